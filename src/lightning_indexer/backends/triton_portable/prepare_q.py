"""Queries turned and quantised in Triton: tile sizes, gate and launch."""

from __future__ import annotations

from typing import Any

import torch

from lightning_indexer.amd.built import Built
from lightning_indexer.arch import Arch
from lightning_indexer.backends.triton_portable.insert_k_cache import fp4_reason, steps_like
from lightning_indexer.backends.triton_portable.row_launch import (
    RowConfig,
    RowLaunch,
    around,
    encoding,
    few_or_many,
    pairs,
    shrunk,
    unsupported,
)
from lightning_indexer.fp4 import SHIFT
from lightning_indexer.fp8 import CACHE_MAX
from lightning_indexer.problems.prepare_q import PrepareQCall, PrepareQProblem


def heuristic(problem: PrepareQProblem, arch: Arch) -> RowConfig:
    """As an insert's rows, H of them a token."""
    return few_or_many(problem.tokens * problem.heads, arch, RowConfig(32, 4))


def neighbours(problem: PrepareQProblem, arch: Arch) -> list[RowConfig]:
    """What a tuning run measures."""
    return around(heuristic(problem, arch))


class PrepareQ:
    config = staticmethod(heuristic)
    neighbours = staticmethod(neighbours)

    def supports(self, problem: PrepareQProblem, arch: Arch) -> str | None:
        rows = problem.tokens * problem.heads
        reason = fp4_reason(problem.transform) if problem.fp4 else None
        return reason or unsupported(arch, problem.head_dim, rows, heuristic(problem, arch))

    def variants(self, problem: PrepareQProblem, arch: Arch, *, thorough: bool) -> list[RowConfig]:
        return shrunk(heuristic(problem, arch))

    def launch(self, problem: PrepareQProblem, arch: Arch, config: RowConfig) -> Launch:
        return Launch(problem, arch, config)

    def build(self, problem: PrepareQProblem, arch: Arch) -> Built:
        """The kernel of this problem for an AMD arch, compiled without a device; operands as torch allocates them."""
        launch = Launch(problem, arch, heuristic(problem, arch))
        return launch.build(launch.arguments(call_like(problem)))


class Launch(RowLaunch):
    outputs = ("out_ptr", "out_weights_ptr")

    def __init__(self, problem: PrepareQProblem, arch: Arch, config: RowConfig) -> None:
        constants = {
            "ROWS": config.rows,
            "HEADS": problem.heads,
            "D": problem.head_dim,
            "FP4": problem.fp4,
            "LIMIT": CACHE_MAX[problem.out_dtype],
            "POWER_OF_TWO": problem.power_of_two,
            "SHIFT": SHIFT[problem.out_dtype],
            "TO": encoding(problem.out_dtype, arch),
            **pairs(problem.transform, problem.head_dim),
        }
        super().__init__(problem.tokens * problem.heads, arch, config, constants)

    def kernel(self) -> Any:
        from lightning_indexer.backends.triton_portable.prepare_q_kernel import prepare_q_kernel

        return prepare_q_kernel

    def arguments(self, call: PrepareQCall) -> tuple[Any, ...]:
        q, weights, steps, (out, out_weights) = call.q, call.weights, call.steps, call.results
        table = steps.cos_sin_cache
        return (
            q, weights, steps.positions, table, out.view(torch.uint8), out_weights, q.shape[0] * q.shape[1],
            call.weight_scale, q.stride(0), q.stride(1), weights.stride(0), 0 if table is None else table.stride(0),
        )  # fmt: skip


def call_like(problem: PrepareQProblem) -> PrepareQCall:
    """Tensors of a call without memory, contiguous."""
    shape = (problem.tokens, problem.heads, problem.head_dim)
    return PrepareQCall(
        torch.empty(shape, dtype=problem.dtype, device="meta"),
        torch.empty(shape[:2], dtype=problem.weights_dtype, device="meta"),
        steps_like(problem.transform, problem.tokens, problem.head_dim), problem.out_dtype, problem.power_of_two,
        problem.fp4, 1.0,
        (torch.empty(shape, dtype=problem.out_dtype, device="meta"), torch.empty(shape[:2], device="meta")),
    )  # fmt: skip
