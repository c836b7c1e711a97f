"""How a suite runs cases that say their problem and are judged in words."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch

from lightning_indexer.arch import Arch
from lightning_indexer.check.verify import Finding, SimulatedCase


class CaseSuite:
    """One that derives from it names its operation and its module's functions, and says how much memory a case takes.

    Attributes:
        sweep, few: the cases of ``verify`` by ``full``, and those for a simulator by the dialect of its e4m3.
        run: runs a case on a backend and a device and gives what is wrong.
    """

    operation: ClassVar[str]
    sweep: Callable[[bool], Sequence[Any]]
    few: Callable[[torch.dtype], Sequence[Any]]
    run: Callable[..., list[str]]

    def cases(self, *, full: bool) -> Sequence[Any]:
        return self.sweep(full)

    def problem(self, case: Any) -> Any:
        return case.problem

    def check(self, case: Any, backend: str, device: torch.device, *, repeats: int) -> Finding:
        return Finding(tuple(self.run(case, backend, device, repeats=repeats)))

    def simulated_cases(
        self, arch: Arch, backends: Sequence[str], *, seed: int = 0, thorough: bool = False,
        heads: Sequence[int] | None = None, head_dims: Sequence[int] | None = None,
    ) -> list[SimulatedCase]:  # fmt: skip
        dialect = torch.float8_e4m3fnuz if arch.fp8 == "fnuz" else torch.float8_e4m3fn
        return [
            SimulatedCase(self.operation, case, arch.name, backend, seed=seed + number)
            for backend in backends
            for number, case in enumerate(self.few(dialect))
        ]

    def check_simulated(self, case: SimulatedCase) -> Finding:
        return self.check(case.case, case.backend, torch.device("cpu"), repeats=0)
