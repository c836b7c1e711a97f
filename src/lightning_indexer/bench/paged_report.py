"""Tables of a ``bench`` run of ``fp8_paged_mqa_logits``: a line a case, then every measurement; CSV and JSON."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from lightning_indexer.bench.overview import number, overview, records
from lightning_indexer.bench.paged import Row
from lightning_indexer.bench.report import Summary, summary_table, table, write_files
from lightning_indexer.bench.timing import Ceilings

NAME = "bench-fp8_paged_mqa_logits"
GROUPS: dict[str, Callable[[Row], bool]] = {
    "next_n 1": lambda row: row.case.next_n == 1,
    "next_n 2": lambda row: row.case.next_n == 2,
    "next_n 3 to 8": lambda row: row.case.next_n > 2,
    "all": lambda row: True,
}


def markdown(
    rows: Sequence[Row],
    backends: Sequence[str],
    summaries: Sequence[Summary],
    ceilings: Ceilings,
    facts: dict[str, str],
    notes: Iterable[str],
    command: str,
) -> str:
    """The whole report. Ends with the command that repeats it."""
    on_gpu = facts["arch"] != "cpu"
    clock = "median of runs with the L2 flushed, permuted blocks of a pool larger than it" if on_gpu else "median"
    lines = [
        "# lightning-indexer bench: fp8_paged_mqa_logits", "", *(f"- {name}: {value}" for name, value in facts.items()),
        f"- measured ceilings: {ceilings}",
        f"- times: microseconds, {clock}; floor: (D + 4) bytes a key at the copy's rate, or 2*H*D FLOP a row and key at"
        " the product's, whichever is longer; columns behind the lengths are not written",
        *(f"- {note}" for note in notes), "", *overview(rows, backends), "",
        *table(
            ("B", "next_n", "context", "H", "D", "page", "lengths", "contender", "us", "p20-p80",
             "host us" if on_gpu else "cpu us", "GB/s", "of copy", "TFLOP/s", "extra MiB"),
            [_cells(row, ceilings, on_gpu) for row in rows],
        ),
        *summary_table(summaries), "", f"Repeat with: `{command}`", "",
    ]  # fmt: skip
    return "\n".join(lines)


def write(
    folder: Path,
    text: str,
    rows: Sequence[Row],
    summaries: Sequence[Summary],
    ceilings: Ceilings,
    facts: dict[str, str],
) -> list[Path]:
    """Writes the report, CSV and JSON into ``folder``; returns their paths."""
    document = {"environment": facts, "ceilings": ceilings.record()}
    return write_files(folder, NAME, text, records(rows), summaries, document)


def _cells(row: Row, ceilings: Ceilings, on_gpu: bool) -> tuple[str, ...]:
    case = row.case
    start = (
        str(case.batch), str(case.next_n), str(case.context), str(case.heads), str(case.head_dim), str(case.page),
        case.lengths, row.contender,
    )  # fmt: skip
    if row.median is None or row.p20 is None or row.p80 is None or row.gbs is None or row.tflops is None:
        return (*start, row.note, *[""] * 6)
    return (
        *start,
        f"{row.median:.1f}",
        f"{row.p20:.1f}-{row.p80:.1f}",
        number(row.host if on_gpu else row.cpu),
        f"{row.gbs:.4g}",
        f"{100 * row.gbs / ceilings.copy_gbs:.0f}%",
        f"{row.tflops:.4g}",
        "" if row.extra_bytes is None else f"{row.extra_bytes / 2**20:.0f}",
    )
