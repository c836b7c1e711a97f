"""``prepare_q`` for Hopper: gate and launch of prepare_q.cuh."""

from __future__ import annotations

import struct
from typing import Any

import torch

from lightning_indexer import packages
from lightning_indexer.arch import Arch
from lightning_indexer.backends.cuda_sm90 import rows
from lightning_indexer.backends.cuda_sm90.rows import Operands, RowsConfig, RowsLaunch, address
from lightning_indexer.cuda import driver
from lightning_indexer.problems.prepare_q import PrepareQCall, PrepareQProblem


def heuristic(problem: PrepareQProblem, arch: Arch) -> RowsConfig:
    """As an insert's rows, H of them a token."""
    return rows.heuristic(problem.tokens * problem.heads, problem.transform, arch)


def neighbours(problem: PrepareQProblem, arch: Arch) -> list[RowsConfig]:
    """What a tuning run measures."""
    return rows.neighbours(problem.tokens * problem.heads, problem.transform, arch)


class PrepareQ:
    """The kernel of ``prepare_q`` that ``cuda-sm90`` registers."""

    config = staticmethod(heuristic)
    neighbours = staticmethod(neighbours)

    def supports(self, problem: PrepareQProblem, arch: Arch) -> str | None:
        if problem.out_dtype is not torch.float8_e4m3fn:
            return f"writes float8_e4m3fn, asked for {str(problem.out_dtype).removeprefix('torch.')}"
        return rows.unsupported(arch, problem.head_dim, problem.tokens * problem.heads, problem.transform)

    def launch(self, problem: PrepareQProblem, arch: Arch, config: RowsConfig) -> Launch:
        return Launch(problem, config)

    def precompile(self, problem: PrepareQProblem, arch: Arch) -> str:
        launch = Launch(problem, heuristic(problem, arch))
        return launch.precompile(launch.usual())


class Launch(RowsLaunch):
    source = packages.beside(__name__, "prepare_q.cuh")
    # The stream, the pointer to the arguments, then struct Arguments.
    packed = struct.Struct(f"<{driver.Slot.HEAD} Q 6Q4qif")

    def __init__(self, problem: PrepareQProblem, config: RowsConfig) -> None:
        kind = "through_fp4" if problem.fp4 else "fp8_power_of_two" if problem.power_of_two else "fp8"
        name = f"prepare_q_{kind}_H{problem.heads}{rows.steps_name(problem.transform)}_{config}_sm90"
        facts = {
            **rows.macros_of(problem.transform, problem.dtype),
            "HEADS": problem.heads,
            "FP4": int(problem.fp4),
            "POWER_OF_TWO": int(problem.power_of_two),
        }
        self.problem = problem
        super().__init__(name, problem.tokens * problem.heads, config, facts)

    def usual(self) -> Operands:
        table = torch.float32 if self.problem.transform.rope is not None else None
        return Operands(table=table, gates=self.problem.weights_dtype)

    def arguments(self, call: PrepareQCall) -> tuple[Any, ...]:
        q, weights, steps, (out, out_weights) = call.q, call.weights, call.steps, call.results
        table = steps.cos_sin_cache
        return (
            q.data_ptr(), weights.data_ptr(), address(steps.positions), address(table), out.data_ptr(),
            out_weights.data_ptr(), q.stride(0), q.stride(1), weights.stride(0),
            0 if table is None else table.stride(0), q.shape[0] * q.shape[1], call.weight_scale,
        )  # fmt: skip

    def kinds(self, call: PrepareQCall, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        q, _, _, table, out, _, q_stride, head_stride, _, table_stride, *_ = arguments
        _, _, positions, rows_ = call.steps.tensors
        starts = q | (q_stride | head_stride) * call.q.element_size() | table
        if rows_ is not None:
            starts |= table_stride * rows_.element_size()
        return (
            starts & 15 == 0, 8 if out & 7 == 0 else 1, None, None, None if rows_ is None else rows_.dtype,
            call.weights.dtype, 8 if positions is None else positions.element_size(),
        )  # fmt: skip
