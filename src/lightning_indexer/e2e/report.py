"""The tables of an end-to-end run and of two traces, as Markdown and JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from lightning_indexer.bench.report import table
from lightning_indexer.e2e import traces
from lightning_indexer.e2e.run import INDEXER, MIN_OVERLAP, POLICY, Plan, Result, Side
from lightning_indexer.e2e.stack import FUSED, TORCH
from lightning_indexer.e2e.traces import Diff, Row


def markdown(plan: Plan, results: Sequence[Result], facts: dict[str, str], command: str) -> str:
    """The report. Times are medians over the repeats."""
    lines = [
        f"# End-to-end prefill, A = `{_side(plan, 0)}`, B = `{_side(plan, 1)}`",
        "",
        f"{plan.dims.name}: {plan.layers} layers, {_indexers(plan)} with an indexer of H={plan.dims.index_heads} "
        f"D={plan.dims.index_dim}, top-k {plan.dims.index_topk}; random weights; steps of {plan.step} tokens, "
        f"logits under {plan.max_logits_bytes >> 20} MiB a chunk; runs in turn, A B, {plan.repeats} times.",
        "",
        ", ".join(f"{name} {value}" for name, value in facts.items()),
        "",
        f"    {command}",
        "",
        *table(
            (
                "context", "side", "scoring", "selection", "TTFT ms (runs)", "tokens/s", "scoring ms", "selection ms",
                "indexer ms", "attention ms", "share of scoring", "share of selection", "share of indexer", "needles",
                "answers", "top-k overlap, worst row", "exact rows", "peak GiB",
            ),
            (_cells(result.context, side) for result in results for side in result.sides),
        ),
    ]  # fmt: skip
    for result in results:
        if result.left_out is not None:
            lines.append(f"\nleft out: context {result.context}: {result.left_out}")
            continue
        a, b = result.sides
        ratios = ", ".join(
            f"{name} A / B {a.seconds(*phases) / b.seconds(*phases):.3f}"
            for name, phases in (("scoring", ("scoring",)), ("selection", ("selection",)), ("indexer", INDEXER))
            if a.seconds(*phases) and b.seconds(*phases)  # a side whose scoring selects has no time of selection
        )
        lines.append(f"\ncontext {result.context}: TTFT A / B {a.median_ttft / b.median_ttft:.3f}, {ratios}")
        for side in result.sides:
            chosen = ((side.backend, "scoring", side.ran), (side.selection, "selection", side.selection_ran))
            for backend, what, calls in chosen:
                if backend is None:
                    counts = ", ".join(f"{name} {count}" for name, count in calls.items())
                    lines.append(f"{side.label}, {what}: the policy's choice; calls of one layer by backend: {counts}")
        phases = list(dict.fromkeys(phase for side in result.sides for run in side.phases for phase in run))
        lines += ["", *table(("phase", "A ms", "B ms"), (_phase(result, phase) for phase in phases))]
        if a.trace is not None and b.trace is not None:
            lines += ["", trace_markdown(traces.diff(traces.load(a.trace), traces.load(b.trace), traces.GROUPS), 12)]
    lines += [
        "",
        "Needles: planted tokens that every indexer selected for the row that asks for them; answers: those whose "
        "answer every layer's attention gave. Overlap: a row's selection beside that of the float32 reference on "
        "the same operands, over sampled rows. Exact rows: those whose selection is a top-k of the side's own logits, "
        f"ties aside. `{TORCH}` needs -inf outside the windows, the library's selection takes the windows and leaves "
        f"the logits outside unwritten; `{FUSED}` does both in the phase of scoring. TTFT: the prefill of these "
        "layers, no sampling.",
    ]
    return "\n".join(lines) + "\n"


def failures(results: Sequence[Result]) -> list[str]:
    """What makes the run a failure: needles or answers that are missing, an overlap below the limit, a row that is not
    a top-k, nothing run."""
    lines = []
    for result in results:
        for side in result.sides:
            if not side.passed:
                c = side.checked
                lines.append(
                    f"context {result.context}, {side.label} {side.name}, selection {side.selection_name}: needles "
                    f"{c.selected}/{c.needles}, answers {c.answered}/{c.needles}, overlap {c.overlap_mean:.4%} (at "
                    f"least {MIN_OVERLAP:.1%} wanted), exact rows {c.exact}/{c.rows}"
                )
    if not any(result.sides for result in results):
        lines.append("no context could be run")
    return lines


def write(folder: Path, text: str, plan: Plan, results: Sequence[Result], facts: dict[str, str]) -> list[Path]:
    """Writes e2e.md and e2e.json into ``folder``; returns their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / "e2e.md", folder / "e2e.json"]
    paths[0].write_text(text)
    document = {
        "environment": facts,
        "model": plan.dims.name,
        "layers": plan.layers,
        "step": plan.step,
        "max_logits_bytes": plan.max_logits_bytes,
        "runs": [
            {
                "context": result.context,
                "side": side.label,
                "backend": side.backend or POLICY,
                "ran": side.ran,
                "selection": side.selection or POLICY,
                "selection_ran": side.selection_ran,
                "ttft_s": side.ttft,
                "phases_s": side.phases,
                "needles": side.checked.needles,
                "selected": side.checked.selected,
                "answered": side.checked.answered,
                "overlap_mean": side.checked.overlap_mean,
                "overlap_worst": side.checked.overlap_worst,
                "exact_rows": side.checked.exact,
                "overlap_rows": side.checked.rows,
                "peak_bytes": side.peak_bytes,
                "trace": None if side.trace is None else side.trace.name,
            }
            for result in results
            for side in result.sides
        ],
        "left_out": {str(r.context): r.left_out for r in results if r.left_out is not None},
    }
    paths[1].write_text(json.dumps(document, indent=1, allow_nan=False) + "\n")
    return paths


def trace_markdown(diff: Diff, top: int) -> str:
    """Groups first, then the kernels with the largest difference, then everything."""
    shown = [row for row in diff.rows if row.a.launches or row.b.launches][:top]
    groups = [row for row in diff.groups if row.a.launches or row.b.launches]
    rows = [*(_trace_row(row, f"/{row.name}/") for row in groups), *(_trace_row(row, row.name) for row in shown)]
    rows.append(_trace_row(diff.total, "all kernels"))
    header = ("kernel", "launches A", "launches B", "A ms", "B ms", "B beside A", "A / B")
    return "\n".join(table(header, rows))


def trace_records(diff: Diff) -> list[dict[str, object]]:
    """Every row as a flat record, for JSON."""
    kinds = [("group", row) for row in diff.groups] + [("kernel", row) for row in diff.rows] + [("total", diff.total)]
    return [
        {
            "kind": kind,
            "name": row.name,
            "launches_a": row.a.launches,
            "launches_b": row.b.launches,
            "ms_a": row.a.microseconds / 1e3,
            "ms_b": row.b.microseconds / 1e3,
            "ratio": row.ratio,
        }
        for kind, row in kinds
    ]


def _cells(context: int, side: Side) -> tuple[str, ...]:
    c, total = side.checked, side.median_ttft
    scoring, selection = side.seconds("scoring"), side.seconds("selection")
    indexer = side.seconds(*INDEXER)
    return (
        str(context), side.label, side.name, side.selection_name,
        f"{1e3 * total:.1f} ({', '.join(f'{1e3 * t:.1f}' for t in side.ttft)})", f"{context / total:.0f}",
        f"{1e3 * scoring:.1f}", f"{1e3 * selection:.1f}", f"{1e3 * indexer:.1f}",
        f"{1e3 * side.seconds('attention'):.1f}", f"{scoring / total:.1%}", f"{selection / total:.1%}",
        f"{indexer / total:.1%}",
        f"{c.selected}/{c.needles}", f"{c.answered}/{c.needles}",
        f"{c.overlap_mean:.3%}, {c.overlap_worst:.2%}", f"{c.exact}/{c.rows}",
        "-" if side.peak_bytes is None else f"{side.peak_bytes / 2**30:.1f}",
    )  # fmt: skip


def _phase(result: Result, phase: str) -> tuple[str, ...]:
    return (phase, *(f"{1e3 * side.seconds(phase):.1f}" for side in result.sides))


def _trace_row(row: Row, name: str) -> tuple[str, ...]:
    shown = name if len(name) <= 96 else name[:93] + "..."
    return (
        shown.replace("|", "\\|"), str(row.a.launches), str(row.b.launches), f"{row.a.microseconds / 1e3:.2f}",
        f"{row.b.microseconds / 1e3:.2f}", "-" if row.change is None else f"{row.change:+.0%}",
        "-" if row.ratio is None else f"{row.ratio:.2f}x",
    )  # fmt: skip


def _side(plan: Plan, index: int) -> str:
    return f"{plan.backends[index] or POLICY} + {plan.selections[index] or POLICY}"


def _indexers(plan: Plan) -> int:
    return -(-plan.layers // plan.dims.index_period)
