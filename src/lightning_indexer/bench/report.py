"""Tables of a ``bench`` run: Markdown to read, CSV and JSON to compute with."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

from lightning_indexer.bench.sweep import Row
from lightning_indexer.bench.timing import Ceilings

# The groups of the summary, as in the published table of AITER's CDNA4 kernel.
GROUPS: dict[str, Callable[[Row], bool]] = {
    "causal": lambda row: row.case.window == "causal",
    "multi_req": lambda row: row.case.window == "multi_req",
    "clean_logits=True": lambda row: row.case.form == "clean",
    "clean_logits=False": lambda row: row.case.form == "noclean",
    "compressed": lambda row: row.case.form == "compressed",
    "all": lambda row: True,
}


@dataclass(frozen=True, slots=True)
class Summary:
    """How much faster ``subject`` is than ``other`` over one group: ratios of the medians, above 1 is faster."""

    subject: str
    other: str
    group: str
    cases: int
    geomean: float
    low: float
    high: float
    wins: int


class Measured(Protocol):
    """One contender on one case, of any operation; ``median`` is None where it did not run."""

    @property
    def case(self) -> Any: ...
    @property
    def contender(self) -> str: ...
    @property
    def median(self) -> float | None: ...


AnyRow = TypeVar("AnyRow", bound=Measured)


def speedups(rows: Sequence[AnyRow], subject: str, other: str) -> list[tuple[AnyRow, float]]:
    """(row of ``subject``, time of ``other`` / time of ``subject``) for every case that both ran."""
    theirs = {row.case: row.median for row in rows if row.contender == other and row.median}
    return [
        (row, theirs[row.case] / row.median)
        for row in rows
        if row.contender == subject and row.median and row.case in theirs
    ]


def summarise(
    rows: Sequence[AnyRow], backends: Sequence[str], groups: Mapping[str, Callable[[AnyRow], bool]]
) -> list[Summary]:
    """One line a pair (backend, any other contender) and group that has cases."""
    contenders = list(dict.fromkeys(row.contender for row in rows))
    result = []
    for index, subject in enumerate(backends):
        for other in contenders:
            if other == subject or other in backends[:index]:
                continue
            pairs = speedups(rows, subject, other)
            for group, belongs in groups.items():
                ratios = [ratio for row, ratio in pairs if belongs(row)]
                if ratios:
                    geomean = math.exp(sum(map(math.log, ratios)) / len(ratios))
                    wins = sum(ratio > 1.0 for ratio in ratios)
                    result.append(
                        Summary(subject, other, group, len(ratios), geomean, min(ratios), max(ratios), wins)
                    )  # fmt: skip
    return result


def markdown(
    rows: Sequence[Row],
    summaries: Sequence[Summary],
    ceilings: Ceilings,
    facts: dict[str, str],
    notes: Iterable[str],
    command: str,
) -> str:
    """The whole report. Ends with the command that repeats it."""
    on_gpu = facts["arch"] != "cpu"
    clock = "median of runs with the L2 flushed" if on_gpu else "median"
    lines = ["# lightning-indexer bench", "", *(f"- {name}: {value}" for name, value in facts.items())]
    lines += [
        f"- measured ceilings: {ceilings}",
        f"- times: microseconds, {clock}; FLOP = 2*H*D*(positions inside windows)",
        *(f"- {note}" for note in notes),
        "",
    ]
    lines += table(
        ("window", "form", "H", "s_q", "s_k", "contender", "us", "p20-p80", "host us", "TFLOP/s", "GB/s",
         f"of {ceilings.product_name}", "of copy", "extra MiB", "calc_diff"),
        [_cells(row, ceilings, on_gpu) for row in rows],
    )  # fmt: skip
    lines += summary_table(summaries)
    return "\n".join([*lines, "", f"Repeat with: `{command}`", ""])


def summary_table(summaries: Sequence[Summary]) -> list[str]:
    """The speedups as a table with a line that says what they are; nothing where there are none."""
    if not summaries:
        return []
    return [
        "", "Speedup: time of the other over time of the first; above 1 the first is faster.", "",
        *table(
            ("first", "against", "group", "cases", "geomean", "range", "wins"),
            [
                (s.subject, s.other, s.group, str(s.cases), f"{s.geomean:.2f}x", f"{s.low:.2f}x - {s.high:.2f}x",
                 f"{s.wins} / {s.cases}")
                for s in summaries
            ],
        ),
    ]  # fmt: skip


def table(header: Sequence[str], body: Iterable[Sequence[str]]) -> list[str]:
    """A Markdown table."""
    rule = "| " + " | ".join("---" for _ in header) + " |"
    return ["| " + " | ".join(header) + " |", rule, *("| " + " | ".join(row) + " |" for row in body)]


def _cells(row: Row, ceilings: Ceilings, on_gpu: bool) -> tuple[str, ...]:
    case = row.case
    start = (case.window, case.form, str(case.heads), str(case.s_q), str(case.s_k), row.contender)
    if row.median is None or row.tflops is None or row.gbs is None or row.p20 is None or row.p80 is None:
        return (*start, row.note, *[""] * 8)
    extra = "" if row.extra_bytes is None else f"{row.extra_bytes / 2**20:.0f}"
    return (
        *start,
        f"{row.median:.1f}",
        f"{row.p20:.1f}-{row.p80:.1f}",
        f"{row.host:.0f}" if on_gpu else "",
        f"{row.tflops:.4g}",
        f"{row.gbs:.4g}",
        f"{100 * row.tflops / ceilings.product_tflops:.0f}%",
        f"{100 * row.gbs / ceilings.copy_gbs:.0f}%",
        extra,
        "" if row.diff is None else f"{row.diff:.1e}",
    )


def records(rows: Sequence[Row]) -> list[dict[str, object]]:
    """The rows as flat records, for CSV and JSON."""
    return [
        {
            "window": row.case.window,
            "form": row.case.form,
            "heads": row.case.heads,
            "head_dim": row.case.head_dim,
            "s_q": row.case.s_q,
            "s_k": row.case.s_k,
            "contender": row.contender,
            "median_us": row.median,
            "p20_us": row.p20,
            "p80_us": row.p80,
            "host_us": row.host,
            "tflops": row.tflops,
            "gbs": row.gbs,
            "extra_bytes": row.extra_bytes,
            "positions": row.positions,
            "flop": row.flop,
            "bytes": row.bytes,
            "calc_diff": None if row.diff is None or math.isnan(row.diff) else row.diff,
            "note": row.note,
        }
        for row in rows
    ]


def write(
    folder: Path,
    text: str,
    rows: Sequence[Row],
    summaries: Sequence[Summary],
    ceilings: Ceilings,
    facts: dict[str, str],
) -> list[Path]:
    """Writes bench.md, bench.csv and bench.json into ``folder``; returns their paths."""
    document = {"environment": facts, "ceilings": ceilings.record()}
    return write_files(folder, "bench", text, records(rows), summaries, document)


def write_files(
    folder: Path, name: str, text: str, flat: Sequence[dict[str, object]], summaries: Sequence[Summary],
    document: Mapping[str, object],
) -> list[Path]:  # fmt: skip
    """Writes name.md, name.csv and name.json; the last has ``document``, the rows and the summary."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"{name}.{kind}" for kind in ("md", "csv", "json")]
    paths[0].write_text(text)
    with paths[1].open("w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(flat[0]) if flat else [])
        writer.writeheader()
        writer.writerows(flat)
    summary = [{name: getattr(s, name) for name in Summary.__slots__} for s in summaries]
    document = {**document, "rows": flat, "summary": summary}
    paths[2].write_text(json.dumps(document, indent=1, allow_nan=False) + "\n")
    return paths
