"""Tables of a ``bench`` run of ``top_k_per_row``: a line a case, then every measurement; CSV and JSON."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from lightning_indexer.bench.overview import number, overview, records
from lightning_indexer.bench.report import Summary, summary_table, table, write_files
from lightning_indexer.bench.top_k import Row

NAME = "bench-top_k_per_row"
GROUPS: dict[str, Callable[[Row], bool]] = {
    "prefill": lambda row: row.case.window != "whole",
    "whole rows": lambda row: row.case.window == "whole",
    "all": lambda row: True,
}


def markdown(
    rows: Sequence[Row],
    backends: Sequence[str],
    summaries: Sequence[Summary],
    facts: dict[str, str],
    notes: Iterable[str],
    command: str,
) -> str:
    """The whole report. Ends with the command that repeats it."""
    on_gpu = facts["arch"] != "cpu"
    clock = "median of runs with the L2 flushed" if on_gpu else "median"
    lines = [
        "# lightning-indexer bench: top_k_per_row", "", *(f"- {name}: {value}" for name, value in facts.items()),
        f"- times: microseconds, {clock}; floor: torch.amax over whole rows; ours in ascending index order, ties to the"
        " smaller index; best peer / ours: above 1 ours is faster",
        *(f"- {note}" for note in notes), "", *overview(rows, backends), "",
        *table(
            ("rows", "width", "k", "window", "ties", "contender", "us", "p20-p80", "host us" if on_gpu else "cpu us",
             "of floor", "GB/s", "extra MiB"),
            [_cells(row, on_gpu) for row in rows],
        ),
        *summary_table(summaries), "", f"Repeat with: `{command}`", "",
    ]  # fmt: skip
    return "\n".join(lines)


def write(
    folder: Path, text: str, rows: Sequence[Row], summaries: Sequence[Summary], facts: dict[str, str]
) -> list[Path]:
    """Writes the report, CSV and JSON into ``folder``; returns their paths."""
    return write_files(folder, NAME, text, records(rows), summaries, {"environment": facts})


def _cells(row: Row, on_gpu: bool) -> tuple[str, ...]:
    case = row.case
    start = (str(case.rows), str(case.width), str(case.k), case.window, "yes" if case.ties else "", row.contender)
    if row.median is None or row.p20 is None or row.p80 is None:
        return (*start, row.note, *[""] * 5)
    return (
        *start,
        f"{row.median:.1f}",
        f"{row.p20:.1f}-{row.p80:.1f}",
        number(row.host if on_gpu else row.cpu),
        "-" if row.floor is None else f"{row.median / row.floor:.2f}x",
        "-" if row.gbs is None else f"{row.gbs:.4g}",
        "" if row.extra_bytes is None else f"{row.extra_bytes / 2**20:.0f}",
    )
