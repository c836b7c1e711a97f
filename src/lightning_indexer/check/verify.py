"""``lightning-indexer verify``: every operation's suite of cases, what comes of them, and how it is summed up.

Two runners execute a suite: ``device.py`` on a device, ``simulated.py`` in the simulator. The checks are the suite's,
the same in both: outputs poisoned and fenced, exact ``-inf`` masks, values against the float32 reference.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch

from lightning_indexer.arch import Arch
from lightning_indexer.check.wrong import WrongPositions
from lightning_indexer.selection import registry

Status = Literal["pass", "fail", "unsupported", "dropped"]
STATUSES: tuple[Status, ...] = ("pass", "fail", "unsupported", "dropped")


@dataclass(frozen=True, slots=True)
class Finding:
    """What a suite finds in one result. Measures that an operation does not have are None.

    Attributes:
        faults: what is wrong, in words; empty where nothing is.
        diff, diff_unquantised: calc_diff to float32 on the dequantised operands, and on the unquantised ones.
        worst: the largest error of one element, in parts of what it may be made of.
        dtype: of the result.
        wrong: where it is wrong; None where nothing is, or where a suite does not say.
    """

    faults: tuple[str, ...] = ()
    diff: float | None = None
    diff_unquantised: float | None = None
    worst: float | None = None
    dtype: torch.dtype = torch.float32
    wrong: WrongPositions | None = None


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of one case on one backend.

    Attributes:
        case: of the operation's suite, or a ``SimulatedCase``.
        detail: why it failed, was not supported, or was dropped.
        finding: None where nothing ran to its end.
        repeated: it ran several times, to be bitwise the same.
        instructions: simulated wave-instructions; ``seconds``: the simulator's time for them.
    """

    operation: str
    case: Any
    backend: str
    status: Status
    detail: str = ""
    finding: Finding | None = None
    repeated: bool = False
    instructions: int = 0
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class SimulatedCase:
    """One call.

    Attributes:
        operation, case: of which suite, what is called.
        arch, backend: what runs it.
        config: of the backend's kernel, in place of the heuristic's; None leaves it to that.
        seed: of the order of the waves.
    """

    operation: str
    case: Any
    arch: str
    backend: str
    config: Any = None
    seed: int = 0

    def __str__(self) -> str:
        config = f" {self.config}" if self.config is not None else ""
        return f"{self.arch} {self.backend} {self.case}{config} seed={self.seed}"


class Suite(Protocol):
    """The cases of one operation, and how one is checked."""

    operation: str

    def cases(self, *, full: bool) -> Sequence[Any]:
        """The sweep on a device, cases that share operands next to each other; ``str`` of a case names it.

        ``full``: what a GPU does in minutes; otherwise the same kinds at sizes for a CPU.
        """

    def problem(self, case: Any) -> Any:
        """The facts of a case's call, for the gates."""

    def bytes_needed(self, case: Any) -> int:
        """Device memory at the peak of a case's check."""

    def check(self, case: Any, backend: str, device: torch.device, *, repeats: int) -> Finding:
        """Runs a case through the public call, then ``repeats`` times more, and judges the results."""

    def simulated_cases(
        self, arch: Arch, backends: Sequence[str], *, seed: int = 0, thorough: bool = False,
        heads: Sequence[int] | None = None, head_dims: Sequence[int] | None = None,
    ) -> list[SimulatedCase]:  # fmt: skip
        """The sweep in the simulator, cases that share a kernel next to each other.

        ``thorough``: every config that a kernel says it may be given, not a few. ``heads``, ``head_dims``: instead of
        the usual ones, where an operation has any.
        """

    def check_simulated(self, case: SimulatedCase) -> Finding:
        """Runs one of them, inside of ``simulation``, and judges its result."""


# By operation, where its suite is defined.
_SUITES = {
    "fp8_mqa_logits": "mqa_logits:MqaLogitsSuite",
    "fp8_mqa_topk": "mqa_topk:MqaTopKSuite",
    "fp8_paged_mqa_logits": "paged_mqa_logits:PagedMqaLogitsSuite",
    "gather_k_cache": "gather_k_cache:GatherKCacheSuite",
    "insert_k_cache": "insert_k_cache:InsertKCacheSuite",
    "prepare_q": "prepare_q:PrepareQSuite",
    "fp8_paged_mqa_topk": "paged_mqa_topk:PagedMqaTopKSuite",
    "top_k_per_row": "top_k:TopKSuite",
}


def operations() -> tuple[str, ...]:
    """Every operation that has a suite."""
    return tuple(_SUITES)


def suite(operation: str) -> Suite:
    """The suite of an operation, a new one: it keeps the operands of its last case.

    Raises:
        ValueError: an operation without one.
    """
    if operation not in _SUITES:
        raise ValueError(f"operation: got {operation!r}, expected one of {', '.join(_SUITES)}")
    module, _, kind = _SUITES[operation].partition(":")
    found: Suite = getattr(importlib.import_module(f"lightning_indexer.check.{module}"), kind)()
    return found


def backends_of(found: Suite, cases: Iterable[Any], arch: Arch) -> list[str]:
    """The installed backends that can run some of the cases on ``arch``."""
    problems = list(dict.fromkeys(found.problem(case) for case in cases))
    return [
        name
        for name, kernel in registry.kernels(found.operation).items()
        if registry.get(name).missing() is None and any(kernel.supports(p, arch) is None for p in problems)
    ]


def select(cases: Iterable[Any], **wanted: Sequence[Any] | None) -> list[Any]:
    """The cases whose attributes are among those wanted, e.g. ``heads=[32]``; None wants all.

    A case without the attribute is left out where it is asked for. ``text`` is a part of the case's name.
    """
    text = wanted.pop("text", None)
    return [
        case
        for case in cases
        if all(values is None or getattr(case, name, None) in values for name, values in wanted.items())
        and (text is None or any(part in str(case) for part in text))
    ]


@dataclass(frozen=True, slots=True)
class Summary:
    """The outcomes of one backend on one operation.

    Attributes:
        count: how many, by status.
        diff, worst: the largest ones of its findings, by dtype of the result.
    """

    operation: str
    backend: str
    cases: int
    count: dict[Status, int]
    repeated: int
    diff: dict[torch.dtype, float]
    worst: dict[torch.dtype, float]
    diff_unquantised: float | None
    instructions: int
    seconds: float

    @property
    def good(self) -> bool:
        """Nothing failed, and something ran."""
        return self.count["fail"] == 0 and self.count["pass"] > 0


def summarise(outcomes: Sequence[Outcome]) -> list[Summary]:
    """A line for each operation and backend, in the order in which they came."""
    found = []
    for operation, backend in dict.fromkeys((o.operation, o.backend) for o in outcomes):
        mine = [o for o in outcomes if (o.operation, o.backend) == (operation, backend)]
        findings = [o.finding for o in mine if o.finding is not None]
        diff: dict[torch.dtype, float] = {}
        worst: dict[torch.dtype, float] = {}
        for finding in findings:
            for largest, value in ((diff, finding.diff), (worst, finding.worst)):
                if value is not None:
                    largest[finding.dtype] = _larger(largest.get(finding.dtype, value), value)
        unquantised = [f.diff_unquantised for f in findings if f.diff_unquantised is not None]
        found.append(
            Summary(
                operation, backend, len(mine),
                {status: sum(o.status == status for o in mine) for status in STATUSES},
                sum(o.repeated for o in mine), diff, worst, max(unquantised, default=None),
                sum(o.instructions for o in mine), sum(o.seconds for o in mine),
            )
        )  # fmt: skip
    return found


def _larger(a: float, b: float) -> float:
    return b if not b <= a else a  # NaN counts as large


def left_out(outcomes: Iterable[Outcome]) -> dict[str, list[str]]:
    """The cases that did not run, by the reason in words."""
    found: dict[str, list[str]] = {}
    for o in outcomes:
        if o.status in ("unsupported", "dropped"):
            found.setdefault(f"{o.status} by {o.backend}: {o.detail}", []).append(str(o.case))
    return found
