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
    axes.set(xscale="log", yscale="log", xlabel="FLOP per byte that must move", ylabel="TFLOP/s", title=title)
    axes.grid(visible=True, which="both", alpha=0.2)
    if measured:
        axes.legend(loc="lower right")
    figure.savefig(path, dpi=130)


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
        axes.barh(
            at, [ratios[case] for case in cases if case in ratios], height=height,
            color=_COLOURS[index % len(_COLOURS)], label=f"against {other}",
        )  # fmt: skip
    axes.axvline(1.0, color="black", linewidth=0.8)
    axes.set_yticks([position + 0.4 - height / 2 for position in range(len(cases))], cases, fontsize=7)
    axes.invert_yaxis()
    axes.set(xlabel=f"time of the other / time of {subject}", title=title)
    axes.legend(loc="lower right", fontsize=8)
    axes.grid(visible=True, axis="x", alpha=0.3)
    figure.savefig(path, dpi=110)
    return True
