"""What the suites of the cache's operations share: its layouts, pools of blocks, and how a suite runs its cases."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch

from lightning_indexer.arch import Arch
from lightning_indexer.check.verify import Finding, SimulatedCase
from lightning_indexer.problems.cache_layout import CacheLayout


def layouts(fnuz: bool = False) -> list[CacheLayout]:
    """One of every kind that engines have."""
    dtype = torch.float8_e4m3fnuz if fnuz else torch.float8_e4m3fn
    found = [
        CacheLayout(page, 128, order, scales, dtype)  # type: ignore[arg-type]
        for page, order in ((64, "flat"), (16, "preshuffled"), (64, "preshuffled"), (1, "flat"))
        for scales in ("float32", "power of two", "ue8m0")
    ]
    return [*found, CacheLayout.fp4(64), CacheLayout.fp4(128)]


def blocks_of_4_gib(layout: CacheLayout, gap: int) -> int:
    """So many blocks, ``gap`` bytes between two, that the next one starts behind 4 GiB."""
    return 2**32 // (layout.block_bytes + gap) + 1


def pool(
    layout: CacheLayout, blocks: int, gap: int, device: torch.device, *, fill: int, guard: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """A buffer full of one byte, and the cache in it: its blocks ``gap`` bytes apart, ``guard`` bytes around them."""
    apart = layout.block_bytes + gap
    buffer = torch.full((2 * guard + blocks * apart,), fill, dtype=torch.uint8, device=device)
    row = layout.row_bytes + 4
    return buffer, buffer.as_strided((blocks, *layout.block_shape), (apart, row, row, 1), guard)


class RowSuite:
    """A suite whose cases say their problem. One that derives from it names its operation and its module's functions.

    Attributes:
        sweep, few: the cases of ``verify`` by ``full``, and those for a simulator by whether its codes are fnuz.
        run: runs a case on a backend and a device and gives what is wrong.
    """

    operation: ClassVar[str]
    sweep: Callable[[bool], Sequence[Any]]
    few: Callable[[bool], Sequence[Any]]
    run: Callable[..., list[str]]

    def cases(self, *, full: bool) -> Sequence[Any]:
        return self.sweep(full)

    def problem(self, case: Any) -> Any:
        return case.problem

    def check(self, case: Any, backend: str, device: torch.device, *, repeats: int) -> Finding:
        return Finding(tuple(self.run(case, backend, device, repeats=repeats)), dtype=torch.uint8)

    def simulated_cases(
        self, arch: Arch, backends: Sequence[str], *, seed: int = 0, thorough: bool = False,
        heads: Sequence[int] | None = None, head_dims: Sequence[int] | None = None,
    ) -> list[SimulatedCase]:  # fmt: skip
        return [
            SimulatedCase(self.operation, case, arch.name, backend, seed=seed + number)
            for backend in backends
            for number, case in enumerate(self.few(arch.fp8 == "fnuz"))
        ]

    def check_simulated(self, case: SimulatedCase) -> Finding:
        return Finding(tuple(self.run(case.case, case.backend, torch.device("cpu"))), dtype=torch.uint8)
