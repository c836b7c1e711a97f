"""``insert_k_cache`` for Hopper: gate and launch of insert_k_cache.cuh."""

from __future__ import annotations

import struct
from typing import Any

import torch

from lightning_indexer import packages
from lightning_indexer.arch import Arch
from lightning_indexer.backends.cuda_sm90 import rows
from lightning_indexer.backends.cuda_sm90.rows import Operands, RowsConfig, RowsLaunch, address
from lightning_indexer.cuda import driver
from lightning_indexer.problems.insert_k_cache import InsertCall, InsertProblem


def heuristic(problem: InsertProblem, arch: Arch) -> RowsConfig:
    """By the number of tokens; two groups a warp where blocks are single keys, whose stores are 4 bytes each."""
    layout, transform = problem.layout, problem.transform
    registers = 64 if layout.is_fp4 and transform.hadamard else 48
    chosen = rows.heuristic(problem.tokens, transform, arch, registers=registers)
    return RowsConfig(4, 2, 5) if layout.page == 1 and chosen.warps > 1 else chosen


def neighbours(problem: InsertProblem, arch: Arch) -> list[RowsConfig]:
    """What a tuning run measures."""
    chosen = heuristic(problem, arch)
    return [chosen, *(other for other in rows.neighbours(problem.tokens, problem.transform, arch) if other != chosen)]


class InsertKCache:
    """The kernel of ``insert_k_cache`` that ``cuda-sm90`` registers."""

    config = staticmethod(heuristic)
    neighbours = staticmethod(neighbours)

    def supports(self, problem: InsertProblem, arch: Arch) -> str | None:
        if problem.layout.dtype is torch.float8_e4m3fnuz:
            return "writes float8_e4m3fn and MXFP4, the layout has float8_e4m3fnuz"
        return rows.unsupported(arch, problem.head_dim, problem.tokens, problem.transform)

    def launch(self, problem: InsertProblem, arch: Arch, config: RowsConfig) -> Launch:
        return Launch(problem, config)

    def precompile(self, problem: InsertProblem, arch: Arch) -> str:
        launch = Launch(problem, heuristic(problem, arch))
        return launch.precompile(launch.usual())


class Launch(RowsLaunch):
    source = packages.beside(__name__, "insert_k_cache.cuh")
    # The stream, the pointer to the arguments, then struct Arguments.
    packed = struct.Struct(f"<{driver.Slot.HEAD} Q 7Q4qif")

    def __init__(self, problem: InsertProblem, config: RowsConfig) -> None:
        layout = problem.layout
        self.layout, self.transform = layout, problem.transform
        kind = "fp4" if layout.is_fp4 else f"fp8_{layout.scales.replace(' ', '_')}_{layout.order}"
        name = f"insert_k_cache_{kind}_page{layout.page}{rows.steps_name(problem.transform)}_{config}_sm90"
        facts = {
            **rows.macros_of(problem.transform, problem.dtype),
            "PAGE": layout.page,
            "FP4": int(layout.is_fp4),
            "SHUFFLED": int(layout.order == "preshuffled"),
            "POWER_OF_TWO": int(layout.scales != "float32"),
            "UE8M0": int(layout.scales == "ue8m0"),
        }
        super().__init__(name, problem.tokens, config, facts)

    def store(self, start: int, apart: int) -> int:
        """Bytes of a store into blocks that lie so many bytes apart from an address on."""
        wanted = 16 if self.layout.is_fp4 else 8
        return wanted if start % wanted == apart % wanted == 0 else 4

    def usual(self) -> Operands:
        transform = self.transform
        weight, bias, table = (
            torch.float32 if there else None for there in (transform.norm, transform.bias, transform.rope)
        )
        return Operands(True, self.store(0, self.layout.block_bytes), weight, bias, table)

    def arguments(self, call: InsertCall) -> tuple[Any, ...]:
        k, cache, steps = call.k, call.kv_cache, call.steps
        table = steps.cos_sin_cache
        return (
            k.data_ptr(), cache.data_ptr(), call.slot_mapping.data_ptr(), *map(address, steps.tensors), k.stride(0),
            self.layout.bytes_apart(cache), 0 if table is None else table.stride(0),
            cache.shape[0] * self.layout.page, k.shape[0], steps.norm_eps,
        )  # fmt: skip

    def kinds(self, call: InsertCall, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        k, cache, _, weight, bias, _, table, k_stride, apart, table_stride, *_ = arguments
        gain, shift, positions, rows_ = call.steps.tensors
        starts = k | k_stride * call.k.element_size() | weight | bias | table
        if rows_ is not None:
            starts |= table_stride * rows_.element_size()
        return (
            starts & 15 == 0, self.store(cache, apart), None if gain is None else gain.dtype,
            None if shift is None else shift.dtype, None if rows_ is None else rows_.dtype, None,
            8 if positions is None else positions.element_size(),
        )  # fmt: skip
