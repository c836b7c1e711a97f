"""Gathering keys out of a paged cache in Triton: tile sizes, gate and launch."""

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
    shrunk,
    unsupported,
)
from lightning_indexer.fp4 import FP4, SHIFT
from lightning_indexer.problems.gather_k_cache import GatherCall, GatherProblem, results_of


def heuristic(problem: GatherProblem, arch: Arch) -> RowConfig:
    """32 bytes a lane. Keys that are converted: 16 channels, whose bytes one store takes."""
    converts = problem.layout.is_fp4 and problem.dtype is not FP4
    return few_or_many(problem.keys, arch, RowConfig(16 if converts else 32, 4))


def neighbours(problem: GatherProblem, arch: Arch) -> list[RowConfig]:
    """What a tuning run measures."""
    return around(heuristic(problem, arch))


class GatherKCache:
    config = staticmethod(heuristic)
    neighbours = staticmethod(neighbours)

    def supports(self, problem: GatherProblem, arch: Arch) -> str | None:
        return unsupported(arch, problem.head_dim, problem.keys, heuristic(problem, arch))

    def variants(self, problem: GatherProblem, arch: Arch, *, thorough: bool) -> list[RowConfig]:
        return shrunk(heuristic(problem, arch))

    def launch(self, problem: GatherProblem, arch: Arch, config: RowConfig) -> Launch:
        return Launch(problem, arch, config)

    def build(self, problem: GatherProblem, arch: Arch) -> Built:
        """The kernel of this problem for an AMD arch, compiled without a device; operands as torch allocates them."""
        launch = Launch(problem, arch, heuristic(problem, arch))
        return launch.build(launch.arguments(call_like(problem)))


class Launch(RowLaunch):
    outputs = ("out_ptr", "out_scale_ptr")

    def __init__(self, problem: GatherProblem, arch: Arch, config: RowConfig) -> None:
        layout = problem.layout
        self.problem = problem
        converts = layout.is_fp4 and problem.dtype is not FP4
        constants = {
            "ROWS": config.rows,
            "ROW_BYTES": layout.row_bytes,
            "PAGE": layout.page,
            "SHUFFLED": layout.order == "preshuffled",
            "UE8M0": layout.scales == "ue8m0" and not layout.is_fp4,
            "SHIFT": SHIFT[problem.dtype] if converts else 0,
            "TO": encoding(problem.dtype, arch) if converts else "",
        }
        super().__init__(problem.keys, arch, config, constants)

    def kernel(self) -> Any:
        from lightning_indexer.backends.triton_portable.gather_k_cache_kernel import gather_k_cache_kernel

        return gather_k_cache_kernel

    def arguments(self, call: GatherCall) -> tuple[Any, ...]:
        cache, tables, (out, out_scale) = call.kv_cache, call.block_tables, call.results
        batch, max_blocks = tables.shape
        apart = self.problem.layout.bytes_apart(cache)
        return (
            cache, tables, call.cu_seq_lens, out.view(torch.uint8), out_scale.view(torch.int32), self.problem.keys,
            batch, max_blocks, (batch - 1).bit_length(), apart // 4, tables.stride(0),
        )  # fmt: skip


def call_like(problem: GatherProblem) -> GatherCall:
    """Tensors of a call without memory, contiguous."""
    layout, batch = problem.layout, problem.batch
    call = GatherCall(
        torch.empty((max(2, batch * problem.max_blocks), *layout.block_shape), dtype=torch.uint8, device="meta"),
        torch.empty((batch, problem.max_blocks), dtype=torch.int32, device="meta"),
        torch.empty(batch + 1, dtype=torch.int32, device="meta"), problem.keys, layout, 1, problem.dtype,
    )  # fmt: skip
    k, kv_scale = (torch.empty(shape, dtype=dtype, device="meta") for shape, dtype in results_of(call))
    return call._replace(out=(k, kv_scale))
