"""Tile sizes of ``gluon-gfx950``: a pure function of the problem and the arch, and the limits they have to keep."""

from __future__ import annotations

from dataclasses import dataclass, replace

from lightning_indexer.arch import Arch
from lightning_indexer.problems.mqa_logits import MqaLogitsProblem

WAVES = 4  # of a program: one for each SIMD of a compute unit
BUFFER_BYTES = 2**31  # what the 32-bit offset of a buffer instruction reaches, as Triton describes buffers
# Rows from which, at H=64 and D=128, programs are of four waves with a row each and three buffers.
PREFERRED_HEADS, PREFERRED_HEAD_DIM, MANY_ROWS = 64, 128, 4096


@dataclass(frozen=True, slots=True)
class GluonConfig:
    """How one program works.

    Attributes:
        rows: rows that share a key tile.
        row_warps, key_warps: waves along rows and along keys; their product is 4.
        step: keys of one matrix product over all waves; 32 or 64 a wave.
        block: keys of one tile, a multiple of ``step``.
        buffers: tiles that LDS holds.
        chunk: positions that one program owns, a multiple of ``block``.
        waves_per_eu: waves of a SIMD that registers are allocated for.
    """

    rows: int
    row_warps: int
    key_warps: int
    step: int
    block: int
    buffers: int
    chunk: int
    waves_per_eu: int = 2

    def lds_bytes(self, head_dim: int) -> int:
        return self.buffers * self.block * head_dim


def heuristic(problem: MqaLogitsProblem, arch: Arch) -> GluonConfig:
    """One of three forms: docs/kernels/gluon_gfx950.md counts them."""
    if (problem.heads, problem.head_dim) == (PREFERRED_HEADS, PREFERRED_HEAD_DIM) and problem.rows >= MANY_ROWS:
        return many_rows(problem, arch)
    # A wave holds q and w of 64 heads (a row of 128): with 64 keys of scores that fills a register file of 256.
    rows = max(1, 64 // problem.heads)
    row_warps = 2 if problem.rows > rows else 1
    key_warps = WAVES // row_warps
    step = key_warps * (64 if problem.heads <= 64 else 32)
    rows *= row_warps
    # Each wave copies 64 lanes of 16 bytes at least.
    block = max(step, WAVES * 1024 // problem.head_dim)
    return GluonConfig(rows, row_warps, key_warps, step, block, 2, _chunk(problem, arch, rows))


def many_rows(problem: MqaLogitsProblem, arch: Arch) -> GluonConfig:
    """Four waves, a row of 64 heads each, share key tiles: K passes L2 once for four rows."""
    return GluonConfig(4, 4, 1, 64, 128, 3, _chunk(problem, arch, 4))


def _chunk(problem: MqaLogitsProblem, arch: Arch, rows: int) -> int:
    """Long enough that q, w and the first tiles do not show, short enough that every unit has work."""
    chunk = 8192
    groups = -(-problem.rows // rows)
    while chunk > 512 and groups * -(-problem.keys // chunk) < 12 * arch.units:
        chunk //= 2
    return chunk


def is_wide(problem: MqaLogitsProblem, config: GluonConfig, strides: tuple[int, int, int, int, int]) -> bool:
    """Whether a program's offsets leave what buffer instructions reach; strides of q (two), k, weights and out.

    Bases are 64-bit, so what counts is the reach of one program, not the size of a tensor.
    """
    q_row, q_head, k_row, w_row, out_row = strides
    others = config.rows - 1
    reach = (
        others * q_row + (problem.heads - 1) * q_head + problem.head_dim,
        (config.chunk + (config.buffers + 1) * config.block) * k_row + problem.head_dim,
        (others * w_row + problem.heads) * 4,
        (others * out_row + max(problem.keys, problem.width) + config.block) * problem.out_dtype.itemsize,
    )
    return max(*reach, *strides) >= BUFFER_BYTES


def neighbours(problem: MqaLogitsProblem, arch: Arch) -> list[GluonConfig]:
    """What ``bench --tune`` measures: the heuristic's choice first, then those around it."""
    chosen = heuristic(problem, arch)
    others = [replace(chosen, chunk=chosen.chunk * factor // 4) for factor in (2, 8) if chosen.chunk >= 1024]
    others += [replace(chosen, buffers=buffers) for buffers in (2, 3, 4)]
    if problem.heads == 64 and problem.head_dim == 128:
        others.append(many_rows(problem, arch))
    return [chosen, *(config for config in dict.fromkeys(others) if config != chosen)]


def variants(problem: MqaLogitsProblem, arch: Arch, *, thorough: bool) -> list[GluonConfig]:
    """Checked beside the heuristic's: the config of many rows with few of them, and a chunk that keys pass."""
    if (problem.heads, problem.head_dim) != (PREFERRED_HEADS, PREFERRED_HEAD_DIM):
        return []
    return [replace(many_rows(problem, arch), chunk=512)]
