"""Kernel traces in Chrome's format, as torch.profiler writes them (and so vLLM and SGLang): sums, and two side by side.

Where a trace has kernels of a GPU, those are counted, with copies and fills; where it has none, the operators of the
CPU, each without what it called.
"""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_GPU = ("kernel", "gpu_memcpy", "gpu_memset")
_CPU = ("cpu_op",)
# Any project's prefill scoring: ours, AITER's Triton, Gluon and FlyDSL kernels, DeepGEMM's. Those of decode are paged.
SCORING = "^(?!.*paged).*mqa_logits"
# Any project's selection: PyTorch's, ours, the engines'.
SELECTION = "(?i)top_?k"
GROUPS = (SCORING, SELECTION)


class TraceError(ValueError):
    """A file that is not a trace; the message names it."""


@dataclass(frozen=True, slots=True)
class Sum:
    """Launches of one kernel, and their time in microseconds."""

    launches: int
    microseconds: float


@dataclass(frozen=True, slots=True)
class Row:
    """One kernel, or one group, in both traces."""

    name: str
    a: Sum
    b: Sum

    @property
    def ratio(self) -> float | None:
        """Time of A over time of B: above one where B is faster. None where one of them has none."""
        return self.a.microseconds / self.b.microseconds if self.a.microseconds and self.b.microseconds else None

    @property
    def change(self) -> float | None:
        """Time of B beside A's, as a part of A's: -0.35 is 35% less."""
        return self.b.microseconds / self.a.microseconds - 1.0 if self.a.microseconds else None


@dataclass(frozen=True, slots=True)
class Diff:
    """Kernels with the largest difference of time first, the groups that were asked for, and everything."""

    rows: tuple[Row, ...]
    groups: tuple[Row, ...]
    total: Row


def load(path: Path) -> dict[str, Sum]:
    """A trace's sums by kernel name. ``.gz`` is unpacked.

    Raises:
        TraceError: the file cannot be read, is not a trace, or holds no kernel and no operator.
    """
    try:
        raw = path.read_bytes()
        text = gzip.decompress(raw) if raw[:2] == b"\x1f\x8b" else raw
        document = json.loads(text)
    except (OSError, EOFError, ValueError) as error:
        raise TraceError(f"{path}: cannot be read as a trace: {error}") from None
    events = document.get("traceEvents") if isinstance(document, dict) else document
    if not isinstance(events, list):
        raise TraceError(
            f"{path}: got no list of events, expected a trace in Chrome's format, as torch.profiler writes"
        )
    complete = [e for e in events if isinstance(e, dict) and e.get("ph") == "X" and "dur" in e and "name" in e]
    sums = _sum((e["name"], float(e["dur"])) for e in complete if e.get("cat") in _GPU)
    if not sums:
        sums = _sum(_without_children([e for e in complete if e.get("cat") in _CPU]))
    if not sums:
        raise TraceError(f"{path}: holds neither kernels of a GPU nor operators of a CPU")
    return sums


def diff(a: Mapping[str, Sum], b: Mapping[str, Sum], groups: Sequence[str] = (SCORING,)) -> Diff:
    """Two traces side by side.

    Args:
        a, b: from :func:`load`.
        groups: regular expressions; each gives one row, the sum of the kernels in whose names it is found.

    Raises:
        ValueError: a group that is not a regular expression.
    """
    rows = [Row(name, a.get(name, _NONE), b.get(name, _NONE)) for name in {**a, **b}]
    rows.sort(key=lambda row: -abs(row.a.microseconds - row.b.microseconds))
    summed = []
    for group in groups:
        try:
            pattern = re.compile(group)
        except re.error as error:
            raise ValueError(f"group: {group!r} is not a regular expression: {error}") from None
        summed.append(Row(group, *(_total(s for name, s in side.items() if pattern.search(name)) for side in (a, b))))
    return Diff(tuple(rows), tuple(summed), Row("all", _total(a.values()), _total(b.values())))


_NONE = Sum(0, 0.0)


def _sum(durations: Any) -> dict[str, Sum]:
    launches: dict[str, int] = {}
    time: dict[str, float] = {}
    for name, duration in durations:
        launches[name] = launches.get(name, 0) + 1
        time[name] = time.get(name, 0.0) + duration
    return {name: Sum(launches[name], time[name]) for name in launches}


def _total(sums: Any) -> Sum:
    parts = list(sums)
    return Sum(sum(part.launches for part in parts), sum(part.microseconds for part in parts))


def _without_children(events: list[dict[str, Any]]) -> list[tuple[str, float]]:
    """Each event's name and own time, less that of the events inside it on the same thread."""
    own: list[tuple[str, float]] = []
    threads: dict[tuple[object, object], list[dict[str, Any]]] = {}
    for event in events:
        threads.setdefault((event.get("pid"), event.get("tid")), []).append(event)
    for thread in threads.values():
        thread.sort(key=lambda e: (float(e["ts"]), -float(e["dur"])))
        remaining = [float(e["dur"]) for e in thread]
        open_events: list[int] = []
        for index, event in enumerate(thread):
            start = float(event["ts"])
            while open_events and float(thread[open_events[-1]]["ts"]) + float(thread[open_events[-1]]["dur"]) <= start:
                open_events.pop()
            if open_events:
                remaining[open_events[-1]] -= float(event["dur"])
            open_events.append(index)
        own += [(event["name"], max(0.0, left)) for event, left in zip(thread, remaining, strict=True)]
    return own
