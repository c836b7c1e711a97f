"""Pictures of a ``bench`` run: the roofline of the device with every measurement in it, and the speedups."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path

from lightning_indexer.bench.report import speedups
from lightning_indexer.bench.sweep import Row
from lightning_indexer.bench.timing import Ceilings

_COLOURS = ("#0b6bcb", "#d1495b", "#2e8b57", "#edae49", "#6a4c93", "#7f7f7f")


def roofline(rows: Sequence[Row], ceilings: Ceilings, title: str, path: Path) -> None:
    """TFLOP/s over FLOP per byte, under the two measured ceilings; one marker a measurement."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 6), layout="constrained")
    axes = figure.subplots()
    measured = [row for row in rows if row.tflops is not None]
    intensity = [row.flop / row.bytes for row in measured] or [1.0]
    ridge = 1e3 * ceilings.product_tflops / ceilings.copy_gbs
    x = [min(*intensity, ridge) / 2, ridge, max(*intensity, ridge) * 2]
    axes.plot(x, [min(ceilings.product_tflops, at * ceilings.copy_gbs / 1e3) for at in x], color="black", linewidth=1.2)
    axes.annotate(
        f"{ceilings.product_name} product {ceilings.product_tflops:.4g} TFLOP/s, copy {ceilings.copy_gbs:.4g} GB/s",
        (x[-1], ceilings.product_tflops), xytext=(-4, 5), textcoords="offset points", ha="right", fontsize=9,
    )  # fmt: skip
    contenders = dict.fromkeys(row.contender for row in measured)
    for colour, contender in zip(itertools.cycle(_COLOURS), contenders, strict=False):
        mine = [row for row in measured if row.contender == contender]
        axes.scatter(
            [row.flop / row.bytes for row in mine], [row.tflops or 0.0 for row in mine], s=26, alpha=0.75, color=colour,
            label=contender,
        )  # fmt: skip
    best: dict[str, Row] = {}
    for row in measured:
        name = f"{row.case.s_q}x{row.case.s_k}"
        if name not in best or (row.tflops or 0.0) > (best[name].tflops or 0.0):
            best[name] = row
    for name, row in best.items():
        axes.annotate(
            name, (row.flop / row.bytes, row.tflops or 0.0), xytext=(3, 4), textcoords="offset points", fontsize=6
        )  # fmt: skip
    above = sum((row.tflops or 0.0) > _ceiling(row, ceilings) for row in measured)
    note = f"\n{above} points above the ceiling: caches, or a ceiling measured low" if above else ""
    axes.set(
        xscale="log", yscale="log", xlabel="FLOP per byte that must move", ylabel="TFLOP/s (2 H D a position)",
        title=f"Roofline, {title}{note}",
    )  # fmt: skip
    axes.grid(visible=True, which="both", alpha=0.2)
    if measured:
        axes.legend(loc="lower right")
    figure.savefig(path, dpi=130)


def _ceiling(row: Row, ceilings: Ceilings) -> float:
    return min(ceilings.product_tflops, row.flop / row.bytes * ceilings.copy_gbs / 1e3)


def speedup_bars(rows: Sequence[Row], subject: str, others: Sequence[str], title: str, path: Path) -> bool:
    """Speedup of ``subject`` per case, one bar an opponent. False, and no file, where nothing compares."""
    from matplotlib.figure import Figure

    series = {other: {str(row.case): ratio for row, ratio in speedups(rows, subject, other)} for other in others}
    cases = list(dict.fromkeys(case for ratios in series.values() for case in ratios))
    if not cases:
        return False
    figure = Figure(figsize=(9, 1.5 + 0.22 * len(cases) * max(1, len(others))), layout="constrained")
    axes = figure.subplots()
    height = 0.8 / len(others)
    for index, (other, ratios) in enumerate(series.items()):
        at = [position + index * height for position, case in enumerate(cases) if case in ratios]
        known = [ratios[case] for case in cases if case in ratios]
        bars = axes.barh(
            at, known, height=height, color=_COLOURS[index % len(_COLOURS)], label=f"against {other}",
            xerr=_spread(rows, subject, other, cases), error_kw={"linewidth": 0.6},
        )  # fmt: skip
        axes.bar_label(bars, [f"{ratio:.2f}x" for ratio in known], fontsize=6, padding=3)
    axes.axvline(1.0, color="black", linewidth=0.8)
    axes.set_yticks([position + 0.4 - height / 2 for position in range(len(cases))], cases, fontsize=7)
    axes.invert_yaxis()
    axes.set(
        xlabel=f"time of the other / time of {subject}; lines: 20th to 80th percentile of both",
        title=f"Speedup of {subject}, {title}",
    )  # fmt: skip
    axes.legend(loc="lower right", fontsize=8)
    axes.grid(visible=True, axis="x", alpha=0.3)
    figure.savefig(path, dpi=110)
    return True


def _spread(rows: Sequence[Row], subject: str, other: str, cases: Sequence[str]) -> tuple[list[float], list[float]]:
    """How far the ratio of two medians goes down and up, where both are at the ends of their middle 60%."""
    mine = {str(row.case): row for row in rows if row.contender == subject and row.median}
    theirs = {str(row.case): row for row in rows if row.contender == other and row.median}
    down: list[float] = []
    up: list[float] = []
    for case in cases:
        a, b = mine.get(case), theirs.get(case)
        if a is None or b is None or not (a.median and a.p20 and a.p80 and b.median and b.p20 and b.p80):
            if a is not None and b is not None:
                down, up = [*down, 0.0], [*up, 0.0]
            continue
        ratio = b.median / a.median
        down.append(max(0.0, ratio - b.p20 / a.p80))
        up.append(max(0.0, b.p80 / a.p20 - ratio))
    return down, up
