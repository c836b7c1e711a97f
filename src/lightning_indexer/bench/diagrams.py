"""Pictures of what is not timed: which backend runs where, the chunks of a plan, where a result is wrong."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

from lightning_indexer.check.wrong import WrongPositions
from lightning_indexer.check.wrong import figure_of as figure_of_maps

COLOURS = ("#0b6bcb", "#d1495b", "#2e8b57", "#edae49", "#6a4c93", "#7f7f7f")
Document = Mapping[str, Any]
# Failures of one picture.
MAPS = 6


def figure_of(width: float, height: float) -> Any:
    """An empty figure, inches."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, max(height, 2.5)), layout="constrained")


def support(document: Document) -> Any:
    """``explain --table --json``: a grid of archs and backends; a number is that of a reason below."""
    archs = {
        arch: {name: reason and reason.replace(arch, "another") for name, reason in reasons.items()}
        for arch, reasons in document["archs"].items()
    }
    backends = list(next(iter(archs.values())))
    numbers: dict[str, int] = {}
    for reasons in archs.values():
        for reason in reasons.values():
            if reason is not None:
                numbers.setdefault(reason, len(numbers) + 1)
    figure = figure_of(1.6 + 1.35 * len(backends), 1.4 + 0.27 * len(archs) + 0.17 * len(numbers))
    axes, below = figure.subplots(2, height_ratios=(0.27 * len(archs), max(0.27, 0.17 * len(numbers))))
    axes.imshow(
        [[reason is None for reason in reasons.values()] for reasons in archs.values()], aspect="auto", cmap="Greens",
        vmin=0, vmax=2,
    )  # fmt: skip
    for row, reasons in enumerate(archs.values()):
        for column, reason in enumerate(reasons.values()):
            text = "yes" if reason is None else str(numbers[reason])
            axes.text(
                column, row, text, ha="center", va="center", fontsize=8, color="black" if reason is None else "#777777"
            )
    axes.set_xticks(range(len(backends)), backends, fontsize=8)
    axes.set_yticks(range(len(archs)), list(archs), fontsize=8)
    axes.tick_params(top=True, labeltop=True, bottom=False, labelbottom=False)
    below.axis("off")
    lines = "\n".join(f"{number}  {_short(reason)}" for reason, number in numbers.items())
    below.text(0, 1, lines, va="top", fontsize=7, transform=below.transAxes)
    figure.suptitle(f"What runs {document['problem']}", fontsize=10)
    return figure


def chunks(document: Document) -> Any:
    """``plan --json``: rows below each other, keys of the gathered buffers to the right; what windows see is filled."""
    found = document["chunks"]
    rows = sum(chunk["rows"] for chunk in found)
    figure = figure_of(8.5, 1.4 + 0.42 * len(found))
    axes = figure.subplots()
    requests = sorted({part["request"] for chunk in found for part in chunk["slices"]})
    colour = dict(zip(requests, itertools.cycle(COLOURS)))
    top = 0
    for chunk in found:
        for part in chunk["slices"]:
            count = part["row_stop"] - part["row_start"]
            start, ratio = part["key_start"], document["compress_ratio"]
            ends = [start + (part["context"] + at) // ratio for at in (part["row_start"] + 1, part["row_stop"])]
            axes.fill(
                [start, *ends, start], [top, top, top + count, top + count], color=colour[part["request"]], alpha=0.75,
                linewidth=0,
            )  # fmt: skip
            top += count
        axes.add_patch(_outline(chunk, top))
        size = f"{chunk['rows']} x {chunk['keys']}, {chunk['logits_mib']:.0f} MiB"
        more = "" if chunk["gather"] == "yes" else ", keys still there"
        axes.annotate(
            f"chunk {chunk['chunk']}: {size}{more}", (chunk["keys"], top - chunk["rows"] / 2), xytext=(4, 0),
            textcoords="offset points", fontsize=7, va="center",
        )  # fmt: skip
    for request in requests:
        axes.fill([], [], color=colour[request], label=f"request {request}")
    axes.set(xlabel="keys of the gathered buffer", ylabel="query rows of the batch", ylim=(rows, 0))
    axes.set_xlim(0, 1.45 * max(chunk["keys"] for chunk in found))
    axes.legend(fontsize=8, loc="upper right")
    figure.suptitle("Chunks: a box is one call's logits, filled is what windows see")
    return figure


def wrong(document: Document) -> Any:
    """``verify --json`` of a run that failed: which positions of a result are wrong."""
    titled = []
    for failure in document["failures"]:
        if found := _positions(failure):
            name = "" if failure["backend"] in failure["case"] else f"{failure['backend']} "
            titled.append((f"{name}{failure['case']}", found))
    return figure_of_maps(titled[:MAPS])


def has_maps(document: Document) -> bool:
    """Whether ``verify --json`` says where something is wrong."""
    return any(_positions(failure) for failure in document.get("failures", ()))


def _positions(failure: Document) -> WrongPositions | None:
    found = failure.get("wrong") or {}
    if not found.get("map"):
        return None
    return WrongPositions.of_map(found["shape"], found["count"], found["first"], found["map"])


def _short(text: str) -> str:
    return text if len(text) <= 150 else text[:149] + "…"


def _outline(chunk: Document, top: float) -> Any:
    from matplotlib.patches import Rectangle

    return Rectangle((0, top - chunk["rows"]), chunk["keys"], chunk["rows"], fill=False, linewidth=0.9)
