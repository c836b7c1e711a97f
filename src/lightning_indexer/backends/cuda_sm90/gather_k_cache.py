"""``gather_k_cache`` for Hopper, of MXFP4 keys as e4m3: gate and launch of gather_k_cache.cuh."""

from __future__ import annotations

import struct
from typing import Any

import torch

from lightning_indexer import packages
from lightning_indexer.arch import Arch
from lightning_indexer.backends.cuda_sm90 import rows
from lightning_indexer.backends.cuda_sm90.rows import Operands, RowsConfig, RowsLaunch
from lightning_indexer.cuda import driver
from lightning_indexer.problems.gather_k_cache import GatherCall, GatherProblem
from lightning_indexer.problems.transform import Transform


def heuristic(problem: GatherProblem, arch: Arch) -> RowsConfig:
    """A key is 68 bytes: 48 warps an SM, so that enough of them are on their way."""
    config = RowsConfig(4, 1, 12)
    return config if problem.keys >= 2 * arch.units * config.rows else RowsConfig(1, 1, 16)


def neighbours(problem: GatherProblem, arch: Arch) -> list[RowsConfig]:
    """What a tuning run measures, the heuristic's choice first."""
    chosen = heuristic(problem, arch)
    others = [RowsConfig(*sizes) for sizes in ((4, 1, 8), (8, 1, 5), (4, 2, 8), (4, 4, 6), (8, 2, 4))]
    return [chosen, *(other for other in others if other != chosen)]


class GatherKCache:
    """The kernel of ``gather_k_cache`` that ``cuda-sm90`` registers."""

    config = staticmethod(heuristic)
    neighbours = staticmethod(neighbours)

    def supports(self, problem: GatherProblem, arch: Arch) -> str | None:
        if not problem.layout.is_fp4 or problem.dtype is not torch.float8_e4m3fn:
            return "converts MXFP4 keys to float8_e4m3fn; keys that are copied are triton-portable's"
        return rows.unsupported(arch, problem.head_dim, problem.keys, Transform())

    def launch(self, problem: GatherProblem, arch: Arch, config: RowsConfig) -> Launch:
        return Launch(problem, config)

    def precompile(self, problem: GatherProblem, arch: Arch) -> str:
        launch = Launch(problem, heuristic(problem, arch))
        return launch.precompile(launch.usual())


class Launch(RowsLaunch):
    source = packages.beside(__name__, "gather_k_cache.cuh")
    # The stream, the pointer to the arguments, then struct Arguments.
    packed = struct.Struct(f"<{driver.Slot.HEAD} Q 5Q2q4i")

    def __init__(self, problem: GatherProblem, config: RowsConfig) -> None:
        self.layout = problem.layout
        name = f"gather_k_cache_fp4_to_fp8_page{problem.layout.page}_{config}_sm90"
        super().__init__(name, problem.keys, config, {"PAGE": problem.layout.page})

    def usual(self) -> Operands:
        return Operands(self.layout.block_bytes % 16 == 0, 16)

    def arguments(self, call: GatherCall) -> tuple[Any, ...]:
        cache, tables, (out, out_scales) = call.kv_cache, call.block_tables, call.results
        batch, max_blocks = tables.shape
        return (
            cache.data_ptr(), tables.data_ptr(), call.cu_seq_lens.data_ptr(), out.data_ptr(), out_scales.data_ptr(),
            self.layout.bytes_apart(cache), tables.stride(0), call.keys, batch, max_blocks,
            (batch - 1).bit_length(),
        )  # fmt: skip

    def kinds(self, call: GatherCall, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        cache, _, _, out, _, apart, *_ = arguments
        return (cache | apart) & 15 == 0, 16 if out & 15 == 0 else 1, None, None, None, None, 8
