"""What reports of one operation share: the first table, a line a case with the best peer over ours; flat records."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from typing import Any, Protocol, TypeVar

from lightning_indexer.bench.report import table


class Timed(Protocol):
    """One contender on one case; ``floor`` is what bounds the case, measured or known, None where nothing is."""

    @property
    def case(self) -> Any: ...
    @property
    def contender(self) -> str: ...
    @property
    def median(self) -> float | None: ...
    @property
    def floor(self) -> float | None: ...
    @property
    def note(self) -> str: ...


AnyRow = TypeVar("AnyRow", bound=Timed)


def overview(rows: Sequence[AnyRow], backends: Sequence[str]) -> list[str]:
    """A line a case: every contender's time, the best peer, its time over ours; the geometric means come last."""
    contenders = list(dict.fromkeys(row.contender for row in rows))
    ours = [name for name in contenders if name in backends]
    ratios: dict[str, list[float]] = {name: [] for name in ours}
    body = []
    for case in dict.fromkeys(row.case for row in rows):
        mine = {row.contender: row for row in rows if row.case == case}
        best = best_peer([row for name, row in mine.items() if name not in ours])
        cells = []
        for name in ours:
            ratio = best.median / us if best and best.median and (us := mine[name].median) else None
            ratios[name] += [ratio] if ratio else []
            cells.append(f"{ratio:.2f}x" if ratio else "-")
        floor = next((row.floor for row in mine.values()), None)
        times = [_time(mine.get(name)) for name in contenders]
        body.append((str(case), number(floor), *times, best.contender if best else "-", *cells))
    means = [f"{statistics.geometric_mean(found):.2f}x" if found else "-" for found in ratios.values()]
    body.append(("geomean", "", *[""] * len(contenders), "", *means))
    return table(("case", "floor", *contenders, "best peer", *(f"best peer / {name}" for name in ours)), body)


def best_peer(rows: Iterable[AnyRow]) -> AnyRow | None:
    """The fastest of these that ran."""
    timed = [row for row in rows if row.median]
    return min(timed, key=lambda row: row.median or 0.0) if timed else None


def number(value: float | None) -> str:
    """One decimal, or a dash where there is no number."""
    return "-" if value is None else f"{value:.1f}"


# The name of a measure in JSON and CSV, and of the row's attribute; a row without it has none.
MEASURES = (
    ("floor_us", "floor"), ("median_us", "median"), ("p20_us", "p20"), ("p80_us", "p80"), ("host_us", "host"),
    ("cpu_us", "cpu"), ("gbs", "gbs"), ("tflops", "tflops"), ("extra_bytes", "extra_bytes"), ("bytes", "bytes"),
    ("flop", "flop"), ("note", "note"),
)  # fmt: skip


def records(rows: Sequence[AnyRow]) -> list[dict[str, object]]:
    """The rows as flat records: facts of the case, contender, measures."""
    return [
        {
            **{name: getattr(row.case, name) for name in type(row.case).__slots__},
            "contender": row.contender,
            **{name: getattr(row, attribute) for name, attribute in MEASURES if hasattr(row, attribute)},
        }
        for row in rows
    ]


def _time(row: Timed | None) -> str:
    if row is None or row.median is None:
        return "wrong" if row is not None and row.note.startswith("WRONG") else "-"
    return f"{row.median:.1f}"
