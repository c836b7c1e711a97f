"""Gathering keys out of a paged cache in PyTorch, a block of keys at a time. The CPU backend, and the fallback.

Nothing is read back to the host: rows behind the last key take what block 0 holds.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from lightning_indexer.arch import Arch
from lightning_indexer.fp4 import FP4, fp4_to_fp8
from lightning_indexer.problems.checks import plain_arithmetic
from lightning_indexer.problems.gather_k_cache import GatherCall, GatherProblem
from lightning_indexer.problems.insert_k_cache import places


@dataclass(frozen=True, slots=True)
class KeyBlocks:
    """Keys of one block."""

    keys: int


def heuristic(problem: GatherProblem, arch: Arch) -> KeyBlocks:
    """A CPU block stays in the L2 of a core; a GPU block fills the device."""
    return KeyBlocks(4096 if arch.vendor == "cpu" else 2**20)


class GatherKCache:
    """Runs every problem on every arch."""

    config = staticmethod(heuristic)

    def supports(self, problem: GatherProblem, arch: Arch) -> str | None:
        return None

    def neighbours(self, problem: GatherProblem, arch: Arch) -> list[KeyBlocks]:
        chosen = heuristic(problem, arch)
        return [chosen, replace(chosen, keys=chosen.keys // 2), replace(chosen, keys=chosen.keys * 2)]

    def launch(self, problem: GatherProblem, arch: Arch, config: KeyBlocks) -> Callable[[GatherCall], None]:
        return functools.partial(_run, problem, config)


def _run(problem: GatherProblem, config: KeyBlocks, call: GatherCall) -> None:
    if problem.batch == 0 or problem.max_blocks == 0 or call.kv_cache.shape[0] == 0:
        return
    with plain_arithmetic(call.kv_cache.device):
        for first in range(0, problem.keys, config.keys):
            _gather(problem, call, first, min(first + config.keys, problem.keys))


def _gather(problem: GatherProblem, call: GatherCall, first: int, stop: int) -> None:
    layout, (out, out_scale) = problem.layout, call.results
    row = torch.arange(first, stop, dtype=torch.int32, device=out.device)
    sequence = torch.searchsorted(call.cu_seq_lens[1:], row, right=True).clamp(max=problem.batch - 1)
    position = row - call.cu_seq_lens[sequence]
    block = (position // layout.page).long()
    real = (row < call.cu_seq_lens[-1]) & (block < problem.max_blocks)
    block = torch.where(real, call.block_tables[sequence, block.clamp(0, problem.max_blocks - 1)], 0).long()
    inner = torch.where(real, position % layout.page, 0).long()
    place, scale_place = places(call.kv_cache, layout)
    at = (block, inner // 16, inner % 16) if layout.order == "preshuffled" else (block, inner)
    values, scales = place[at].flatten(1), scale_place[block, inner]
    if layout.is_fp4 and problem.dtype is not FP4:
        values, wide = fp4_to_fp8(values, scales, problem.dtype)
    elif layout.is_fp4:
        wide = scales
    else:
        wide = _float(scales, layout.scales == "ue8m0")
    out[first:stop] = values.view(out.dtype)
    out_scale[first:stop] = wide


def _float(scales: torch.Tensor, ue8m0: bool) -> torch.Tensor:
    """float32 [keys] of their four bytes."""
    if not ue8m0:
        return scales.contiguous().view(torch.float32)[:, 0]
    code = scales[:, 0].to(torch.int32)
    bits = torch.where(code == 0, 0x00400000, code << 23)
    return torch.where(code == 255, 0x7FC00000, bits).to(torch.int32).view(torch.float32)
