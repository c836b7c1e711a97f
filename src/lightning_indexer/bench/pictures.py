"""Pictures from recorded results: what ``bench``, ``e2e`` and ``--json`` of other verbs wrote, whenever and wherever.

Every picture says below what it was made from: device, versions, commit, date, file. Nothing is drawn that is not in
the file.
"""

from __future__ import annotations

import json
import math
import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning_indexer.bench import diagrams
from lightning_indexer.bench.diagrams import COLOURS, Document
from lightning_indexer.bench.diagrams import figure_of as _figure

# A prefill has eight phases.
_PHASES = (*COLOURS, "#e8cfa8", "#3aa6a6")


def load(path: Path) -> Document:
    """The document in a JSON file, or in the JSON block of a ``report``.

    Raises:
        ValueError: no such document.
        OSError: the file cannot be read.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise ValueError(f"{path}: is no text in UTF-8") from None
    if path.suffix == ".md":
        found = re.findall(r"^```json\n(.*?)\n```$", text, re.MULTILINE | re.DOTALL)
        if not found:
            raise ValueError(f"{path}: has no JSON block")
        text = found[-1]
    try:
        document = json.loads(text)
    except ValueError as error:
        raise ValueError(f"{path}: is no JSON: {error}") from None
    if not isinstance(document, dict):
        raise ValueError(f"{path}: expected what `bench`, `e2e`, `report` or another verb's `--json` wrote, got a list")
    return document


def parts(document: Document) -> dict[str, Document]:
    """What a file holds, by what is added to the names of its pictures: itself, or the parts of a ``report``."""
    if document.get("kind") != "lightning-indexer-report":
        return {"": document}
    return {
        "-" + re.sub(r"\W+", "-", part["title"]): {**part["document"], "environment": document["environment"]}
        for part in document["parts"]
        if isinstance(part["document"], dict) and part["title"].startswith(("bench", "e2e"))
    }


def kinds(document: Document) -> list[str]:
    """Which pictures a document can give."""
    rows = [row for row in document.get("rows", ()) if row.get("median_us")]
    first = rows[0] if rows else {}
    found = []
    if "s_q" in first:
        found.append("scores")
    if "width" in first:
        found.append("selection")
    if "next_n" in first:
        found.append("decode")
    if "alone_us" in first:
        found.append("one-call")
    if any(row.get("extra_bytes") for row in rows) and len({_context(row) for row in rows}) > 1:
        found.append("memory")
    if document.get("kind") == "model":
        found.append("model")
    if any("phases_s" in row for row in document.get("runs", ())):
        found.append("phases")
    if "archs" in document:
        found.append("support")
    if any("slices" in chunk for chunk in document.get("chunks", ())):
        found.append("chunks")
    if diagrams.has_maps(document):
        found.append("wrong")
    return found


def draw(document: Document, kind: str, source: str, path: Path) -> None:
    """Draws one picture.

    Args:
        kind: one of :func:`kinds`.
        source: the name of the file, for the line below.
        path: where it goes; its ending says in which format.
    """
    figure = _KINDS[kind](document)
    facts = document.get("environment", {})
    names = ("device", "lightning-indexer", "torch", "triton", "cuda", "rocm", "vllm", "commit", "date")
    told = [f"{name} {facts[name]}" if name != "device" else str(facts[name]) for name in names if facts.get(name)]
    figure.supxlabel(" · ".join([*told, source]), fontsize=7, color="#555555")
    figure.savefig(path, dpi=120, metadata={"Software": None} if path.suffix == ".png" else None)


def _scores(document: Document) -> Any:
    """Time of each shape relative to the best peer that has all of the compressed form, else of the clean one."""
    rows = [row for row in document["rows"] if row.get("median_us")]
    peers = [name for name in _contenders(rows) if name in ("deep_gemm", "aiter", "einsum")]
    form = "compressed" if any(r["form"] == "compressed" and r["contender"] in peers for r in rows) else "clean"
    rows = [row for row in rows if row["form"] == form]
    base = next((name for name in peers if any(row["contender"] == name for row in rows)), _contenders(rows)[-1])
    ours = [name for name in _contenders(rows) if name != base]
    heads = sorted({row["heads"] for row in rows})
    figure = _figure(6.2 * len(heads), 0.9 + 0.27 * len({_case(row) for row in rows}) / len(heads) * len(ours))
    for axes, h in zip(figure.subplots(1, len(heads), squeeze=False)[0], heads, strict=True):
        mine = [row for row in rows if row["heads"] == h]
        times = {(_case(row), row["contender"]): row["median_us"] for row in mine}
        cases = [case for case in dict.fromkeys(_case(row) for row in mine) if (case, base) in times]
        labels = [f"{case}  {times[case, base]:.0f} us" for case in cases]
        series = {
            name: [times[case, base] / times[case, name] if (case, name) in times else None for case in cases]
            for name in ours
        }
        _bars(axes, labels, series, "{:.2f}x")
        axes.axvline(1.0, color="black", linewidth=0.8)
        axes.set(
            title=f"H={h} D={mine[0]['head_dim']}, {form} logits",
            xlabel=f"time of {base}, beside each shape, over time",
        )
    figure.suptitle(f"fp8_mqa_logits beside {base}: above 1 is faster")
    return figure


def _selection(document: Document) -> Any:
    rows = [row for row in document["rows"] if row.get("median_us")]
    cases = list(dict.fromkeys(_case(row) for row in rows))
    floors = {_case(row): row["floor_us"] for row in rows}
    figure = _figure(9, 1.2 + 0.11 * len(cases) * len(_contenders(rows)))
    axes = figure.subplots()
    times = {(_case(row), row["contender"]): row["median_us"] for row in rows}
    series = {name: [times.get((case, name)) for case in cases] for name in _contenders(rows)}
    _bars(axes, cases, series, "{:.1f}")
    for at, case in enumerate(cases):
        if floors[case]:
            axes.plot([floors[case]] * 2, [at - 0.1, at + 0.9], color="black", linewidth=1.6)
    axes.set(xscale="log", xlabel="us, log scale; the black line is one read of the rows, torch.amax")
    figure.suptitle("top_k_per_row beside its peers: shorter is faster")
    return figure


def _decode(document: Document) -> Any:
    """Bytes of the cache a second, the H side by side."""
    rows = [row for row in document["rows"] if row.get("median_us")]
    heads = sorted({row["heads"] for row in rows})
    most = max(len({_case(row) for row in rows if row["heads"] == h}) for h in heads)
    figure = _figure(max(9, 4.6 * len(heads)), 1.2 + 0.14 * most * len(_contenders(rows)))
    ceiling = document.get("ceilings", {}).get("copy_gbs")
    for axes, h in zip(figure.subplots(1, len(heads), squeeze=False)[0], heads, strict=True):
        mine = [row for row in rows if row["heads"] == h]
        rate = {(_case(row), row["contender"]): row["gbs"] for row in mine}
        cases, names = list(dict.fromkeys(_case(row) for row in mine)), _contenders(mine)
        labels = [case.rsplit(" H=", 1)[0] for case in cases]
        if ceiling:
            axes.axvline(ceiling, color="black", linewidth=1.0, linestyle="--", label=f"copy, {ceiling:.0f} GB/s")
        _bars(axes, labels, {name: [rate.get((case, name)) for case in cases] for name in names}, "{:.0f}")
        axes.set(title=f"H={h}", xlabel="GB/s of the cache")
    figure.suptitle("fp8_paged_mqa_logits: bytes of the cache a second; sequences, tokens of each, context")
    return figure


def _one_call(document: Document) -> Any:
    """Times of one call and of two, of ours and of peers, over that of ours without selection."""
    rows = [row for row in document["rows"] if row.get("median_us")]
    cases = list(dict.fromkeys(_case(row) for row in rows))
    times = {(_case(row), row["contender"]): row["median_us"] for row in rows}
    alone = {_case(row): row["alone_us"] for row in rows if row["alone_us"]}
    labels = [f"{case}  {alone[case]:.0f} us" if case in alone else case for case in cases]
    over = {
        name: [
            times[case, name] / alone[case] if (case, name) in times and case in alone else None for case in cases
        ]
        for name in _contenders(rows)
    }  # fmt: skip
    figure = _figure(9, 1.2 + 0.19 * len(cases) * len(over))
    axes = figure.subplots()
    _bars(axes, labels, over, "{:.2f}x")
    axes.axvline(1.0, color="black", linewidth=0.8)
    axes.set(xlabel="time over that of our fastest scores alone, beside each shape: shorter is faster")
    figure.suptitle("Scores and selection, in one call and in two")
    return figure


def _memory(document: Document) -> Any:
    """The most that a call of each contender holds, over the context."""
    rows = [row for row in document["rows"] if row.get("median_us") and row.get("extra_bytes")]
    figure = _figure(7.5, 4.6)
    axes = figure.subplots()
    for at, name in enumerate(_contenders(rows)):
        most: dict[int, float] = {}
        for row in rows:
            if row["contender"] == name:
                most[_context(row)] = max(most.get(_context(row), 0.0), row["extra_bytes"] / 2**20)
        places = sorted(most)
        axes.plot(places, [most[place] for place in places], marker="o", color=COLOURS[at % len(COLOURS)], label=name)
    axes.set(
        xscale="log", yscale="log", xlabel="keys of the context", ylabel="MiB above the operands, the result's too"
    )
    axes.set_xscale("log", base=2)
    axes.grid(visible=True, which="both", alpha=0.2)
    axes.legend(fontsize=8)
    figure.suptitle("Memory of a call, the most over the shapes of each context")
    return figure


def _model(document: Document) -> Any:
    """Predicted times over published ones of the same kind of kernel."""
    rows = [
        row for row in document["launches"]
        if row["published_unit"] == "us" and row["same_kind"] and row["published"].get(row["same_kind"])
    ]  # fmt: skip
    figure = _figure(6.8, 5.6)
    axes = figure.subplots()
    labelled: list[tuple[float, float]] = []
    for at, name in enumerate(dict.fromkeys(row["backend"] for row in rows)):
        mine = [row for row in rows if row["backend"] == name]
        published = [row["published"][row["same_kind"]] for row in mine]
        label = f"{name} beside {mine[0]['same_kind']}, H={mine[0]['heads']}"
        axes.scatter(
            published, [row["in_order_us"] for row in mine], s=28, alpha=0.8, color=COLOURS[at % len(COLOURS)],
            label=label,
        )  # fmt: skip
        for row, x in zip(mine, published, strict=True):
            # One label where points lie together.
            place = math.log(x), math.log(row["in_order_us"])
            if any(abs(place[0] - other[0]) < 0.9 and abs(place[1] - other[1]) < 0.12 for other in labelled):
                continue
            labelled.append(place)
            axes.annotate(
                f"{row['rows']}x{row['keys']} {row['window']}", (x, row["in_order_us"]), xytext=(4, -3),
                textcoords="offset points", fontsize=5.5, color="#555555",
            )  # fmt: skip
    axes.margins(x=0.12)
    if rows:
        low, high = axes.get_xlim()[0], axes.get_xlim()[1]
        axes.plot([max(low, 1), high], [max(low, 1), high], color="black", linewidth=0.8, label="equal")
    axes.set(xscale="log", yscale="log", xlabel="published by others, us", ylabel="model, us")
    axes.grid(visible=True, which="both", alpha=0.2)
    axes.legend(fontsize=7)
    figure.suptitle("A model from simulated counts, not a measurement, beside published times")
    return figure


def _phases(document: Document) -> Any:
    """Seconds of each phase of a prefill, stacked."""
    rows = document["runs"]
    # The earliest files have no selection: it was `torch.topk`, always.
    labels = [
        f"{row['context']} {row['side']}: {row['backend']} + {row.get('selection', 'torch.topk')}" for row in rows
    ]
    middle = [
        {
            name: statistics.median(run.get(name, 0.0) for run in row["phases_s"])
            for run in row["phases_s"]
            for name in run
        }
        for row in rows
    ]
    figure = _figure(9, 1.5 + 0.45 * len(rows))
    axes = figure.subplots()
    left = [0.0] * len(rows)
    for at, phase in enumerate(dict.fromkeys(name for each in middle for name in each)):
        seconds = [each.get(phase, 0.0) for each in middle]
        axes.barh(labels, seconds, left=left, color=_PHASES[at % len(_PHASES)], label=phase)
        left = [a + b for a, b in zip(left, seconds, strict=True)]
    axes.invert_yaxis()
    axes.set(xlabel="seconds")
    axes.legend(fontsize=7, loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=4, frameon=False)
    figure.suptitle("Prefill by phase")
    return figure


_KINDS: dict[str, Callable[[Document], Any]] = {
    "scores": _scores,
    "selection": _selection,
    "decode": _decode,
    "one-call": _one_call,
    "memory": _memory,
    "model": _model,
    "phases": _phases,
    "support": diagrams.support,
    "chunks": diagrams.chunks,
    "wrong": diagrams.wrong,
}
KINDS = tuple(_KINDS)


def _bars(axes: Any, labels: Sequence[str], series: Mapping[str, Sequence[float | None]], text: str) -> None:
    """A group of horizontal bars for each label, a bar a series with its value at its end."""
    height = 0.8 / len(series)
    for index, (name, values) in enumerate(series.items()):
        at = [place + index * height for place, value in enumerate(values) if value is not None]
        known = [value for value in values if value is not None]
        bars = axes.barh(at, known, height=height, color=COLOURS[index % len(COLOURS)], label=name)
        axes.bar_label(bars, [text.format(value) for value in known], fontsize=6, padding=2)
    axes.set_yticks([place + 0.4 - height / 2 for place in range(len(labels))], labels, fontsize=7)
    axes.set_ylim(len(labels) - 0.1, -0.1 - height / 2)
    axes.margins(x=0.1)
    axes.grid(visible=True, axis="x", alpha=0.3)
    axes.legend(loc="lower right", fontsize=8)


def _contenders(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    return list(dict.fromkeys(row["contender"] for row in rows))


def _context(row: Mapping[str, Any]) -> int:
    return int(row.get("s_k") or row.get("width") or row.get("context") or row.get("keys") or 0)


def _case(row: Mapping[str, Any]) -> str:
    if "s_q" in row:
        return f"({row['s_q']}, {row['s_k']}) {row['window']}"
    if "width" in row:
        more = "" if row["k"] == 2048 else f" k={row['k']}"
        return f"{row['rows']} x {row['width']} {row['window']}{more}{' ties' if row.get('ties') else ''}"
    if "alone_us" in row:
        return f"({row['rows']}, {row['keys']}) {row['window']} H={row['heads']}"
    return f"B={row['batch']} next_n={row['next_n']} {row['context']} H={row['heads']}"
