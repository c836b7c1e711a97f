"""Quantising keys into a paged cache in Triton: tile sizes, gate and launch."""

from __future__ import annotations

from typing import Any

import torch

from lightning_indexer.amd.built import Built
from lightning_indexer.arch import Arch
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
from lightning_indexer.fp8 import CACHE_MAX
from lightning_indexer.problems.insert_k_cache import InsertCall, InsertProblem
from lightning_indexer.problems.transform import Steps, Transform


def heuristic(problem: InsertProblem, arch: Arch) -> RowConfig:
    """32 channels a lane: 16-byte loads of 16-bit keys, and few enough registers for many warps a unit."""
    return few_or_many(problem.tokens, arch, RowConfig(32, 4))


def neighbours(problem: InsertProblem, arch: Arch) -> list[RowConfig]:
    """What a tuning run measures."""
    return around(heuristic(problem, arch))


def fp4_reason(transform: Transform) -> str | None:
    """None, or why channels as RoPE pairs them are not quantised to fp4."""
    if transform.rope is None or transform.interleaved or transform.rope_dim >= 64:
        return None
    return f"RoPE of {transform.rope_dim} channels splits the blocks of 32 that fp4 has a scale for"


class InsertKCache:
    config = staticmethod(heuristic)
    neighbours = staticmethod(neighbours)

    def supports(self, problem: InsertProblem, arch: Arch) -> str | None:
        reason = fp4_reason(problem.transform) if problem.layout.is_fp4 else None
        return reason or unsupported(arch, problem.head_dim, problem.tokens, heuristic(problem, arch))

    def variants(self, problem: InsertProblem, arch: Arch, *, thorough: bool) -> list[RowConfig]:
        return shrunk(heuristic(problem, arch))

    def launch(self, problem: InsertProblem, arch: Arch, config: RowConfig) -> Launch:
        return Launch(problem, arch, config)

    def build(self, problem: InsertProblem, arch: Arch) -> Built:
        """The kernel of this problem for an AMD arch, compiled without a device; operands as torch allocates them."""
        launch = Launch(problem, arch, heuristic(problem, arch))
        return launch.build(launch.arguments(call_like(problem)))


class Launch(RowLaunch):
    outputs = ("cache_ptr",)

    def __init__(self, problem: InsertProblem, arch: Arch, config: RowConfig) -> None:
        layout = problem.layout
        self.layout = layout
        constants = {
            "ROWS": config.rows,
            "D": problem.head_dim,
            "PAGE": layout.page,
            "SHUFFLED": layout.order == "preshuffled",
            "FP4": layout.is_fp4,
            "LIMIT": 0.0 if layout.is_fp4 else CACHE_MAX[layout.dtype],
            "POWER_OF_TWO": layout.scales != "float32",
            "UE8M0": layout.scales == "ue8m0",
            "TO": "" if layout.is_fp4 else encoding(layout.dtype, arch),
            **pairs(problem.transform, problem.head_dim),
        }
        super().__init__(problem.tokens, arch, config, constants)

    def kernel(self) -> Any:
        from lightning_indexer.backends.triton_portable.insert_k_cache_kernel import insert_k_cache_kernel

        return insert_k_cache_kernel

    def arguments(self, call: InsertCall) -> tuple[Any, ...]:
        k, cache, steps = call.k, call.kv_cache, call.steps
        apart = self.layout.bytes_apart(cache)
        rows = steps.cos_sin_cache
        return (
            k, cache, call.slot_mapping, steps.norm_weight, steps.norm_bias, steps.positions, rows, k.shape[0],
            cache.shape[0] * self.layout.page, float(steps.norm_eps), k.stride(0), apart // 4,
            0 if rows is None else rows.stride(0),
        )  # fmt: skip


def call_like(problem: InsertProblem) -> InsertCall:
    """Tensors of a call without memory, contiguous."""
    layout, tokens, head_dim = problem.layout, problem.tokens, problem.head_dim
    return InsertCall(
        torch.empty((tokens, head_dim), dtype=problem.dtype, device="meta"),
        torch.empty((max(2, -(-tokens // layout.page)), *layout.block_shape), dtype=torch.uint8, device="meta"),
        torch.empty(tokens, dtype=torch.int64, device="meta"), layout, steps_like(problem.transform, tokens, head_dim),
    )  # fmt: skip


def steps_like(transform: Transform, tokens: int, head_dim: int) -> Steps:
    """Operands of a transform without memory."""

    def empty(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    rotary = transform.rope is not None
    return Steps(
        empty(head_dim) if transform.norm else None, empty(head_dim) if transform.bias else None, 1e-6,
        empty(tokens, dtype=torch.int64) if rotary else None, empty(4096, transform.rope_dim) if rotary else None,
        transform.rope or "first", transform.interleaved, transform.hadamard,
    )  # fmt: skip
