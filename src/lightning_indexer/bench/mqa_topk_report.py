"""Tables of a ``bench`` run of ``fp8_mqa_topk``: a line a case, then every measurement; CSV and JSON."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from lightning_indexer.bench.mqa_topk import TWO, Case, Row
from lightning_indexer.bench.overview import best_peer, number
from lightning_indexer.bench.report import table, write_files

NAME = "bench-fp8_mqa_topk"


def markdown(
    rows: Sequence[Row], backends: Sequence[str], facts: dict[str, str], notes: Iterable[str], command: str
) -> str:
    """The whole report. Ends with the command that repeats it."""
    clock = "median of runs with the L2 flushed" if facts["arch"] != "cpu" else "median"
    lines = [
        "# lightning-indexer bench: fp8_mqa_topk", "", *(f"- {name}: {value}" for name, value in facts.items()),
        f"- times: microseconds, {clock}; alone: the fastest scoring of ours without selection; best peer / ours, two"
        " calls / ours: above 1 one call is faster",
        *(f"- {note}" for note in notes), "", *overview(rows, backends), "",
        *table(
            ("case", "contender", "us", "p20-p80", "of alone", "host us", "extra MiB"), [_cells(row) for row in rows]
        ),
        "", f"Repeat with: `{command}`", "",
    ]  # fmt: skip
    return "\n".join(lines)


def overview(rows: Sequence[Row], backends: Sequence[str]) -> list[str]:
    """A line a case and backend: one call beside the scoring alone, two calls, and the fastest peer."""
    body = []
    for case in dict.fromkeys(row.case for row in rows):
        mine = {row.contender: row for row in rows if row.case == case}
        best = best_peer(row for name, row in mine.items() if name.removeprefix(TWO) not in backends)
        for backend in backends:
            one, two = mine[backend].median, mine[TWO + backend].median
            floor = mine[backend].floor
            body.append((
                str(case), backend, number(floor), number(one), _ratio(one, floor), number(two), _ratio(two, one),
                best.contender if best else "-", number(best.median if best else None),
                _ratio(best.median if best else None, one),
            ))  # fmt: skip
    return table(
        ("case", "backend", "alone", "one call", "of alone", "two calls", "two calls / ours", "best peer", "its us",
         "best peer / ours"),
        body,
    )  # fmt: skip


def write(folder: Path, text: str, rows: Sequence[Row], facts: dict[str, str]) -> list[Path]:
    """Writes the report, CSV and JSON into ``folder``; returns their paths."""
    return write_files(folder, NAME, text, records(rows), [], {"environment": facts})


def records(rows: Sequence[Row]) -> list[dict[str, object]]:
    """The rows as flat records, for CSV and JSON."""
    return [
        {
            **{name: getattr(row.case, name) for name in Case.__slots__},
            "contender": row.contender,
            "alone_us": row.floor,
            "median_us": row.median,
            "p20_us": row.p20,
            "p80_us": row.p80,
            "host_us": row.host,
            "extra_bytes": row.extra_bytes,
            "note": row.note,
        }
        for row in rows
    ]


def _cells(row: Row) -> tuple[str, ...]:
    if row.median is None or row.p20 is None or row.p80 is None:
        return (str(row.case), row.contender, row.note, "", "", "", "")
    return (
        str(row.case), row.contender, f"{row.median:.1f}", f"{row.p20:.1f}-{row.p80:.1f}",
        _ratio(row.median, row.floor), number(row.host),
        "" if row.extra_bytes is None else f"{row.extra_bytes / 2**20:.0f}",
    )  # fmt: skip


def _ratio(value: float | None, other: float | None) -> str:
    return f"{value / other:.2f}x" if value and other else "-"
