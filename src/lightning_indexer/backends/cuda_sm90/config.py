"""Compile-time and launch configuration of ``cuda-sm90``: a pure function of the problem and the arch."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from lightning_indexer.arch import Arch
from lightning_indexer.problems.mqa_logits import MqaLogitsProblem

# What a CTA may ask for on sm_90, beside the 1 KiB that the system takes.
SHARED_LIMIT = 227 * 1024
MAX_ENTER_COST = 3
# Ints of shared.cuh's first keys of row blocks, and of their costs, later -inf.
_KNOWN_BLOCKS, _SCRATCH = 1024, 2048
# What becomes of scores, and the first part of the kernel's name: stored; appended to lists where they pass a gate;
# stored for rows that a list names.
EPILOGUES = {"store": "fp8_mqa_logits", "append": "fp8_mqa_topk_product", "listed": "fp8_mqa_topk_redo"}


@dataclass(frozen=True, slots=True)
class KernelConfig:
    """One instantiation of the kernel and its grid: all sizes that the source is compiled with.

    The source takes them as :meth:`macros`; the static asserts of ``geometry.cuh`` say which values it is written for.

    Attributes:
        heads, head_dim: H and D.
        form: ``clean``, ``noclean`` (outside the windows unspecified) or ``compressed``.
        out: ``f32`` or ``bf16``.
        ctas: persistent CTAs, one an SM.
        k_stages: tiles of 64 keys between TMA and the tensor cores, for each of two workers.
        q_stages: row blocks of q, likewise.
        enter_cost: what entering a row block costs the schedule, in tiles.
        pairs: (row, head) pairs of a row block, the N of its WGMMA.
        tile_keys: keys of a tile, the M of its WGMMA.
        workers: each a producer warp and a math warpgroup with queues of its own.
        math_registers, other_registers: of a thread of a math warpgroup, and of the other warps (setmaxnreg).
        epilogue: what becomes of scores, one of ``EPILOGUES``.
    """

    heads: int
    head_dim: int
    form: str
    out: str
    ctas: int
    k_stages: int = 5
    q_stages: int = 2
    enter_cost: int = 1
    pairs: int = 256
    tile_keys: int = 64
    workers: int = 2
    math_registers: int = 224
    other_registers: int = 56
    epilogue: str = "store"

    @property
    def name(self) -> str:
        """The kernel's name in traces."""
        return (
            f"{EPILOGUES[self.epilogue]}_H{self.heads}_D{self.head_dim}_m{self.tile_keys}n{self.pairs}_w{self.workers}"
            f"_k{self.k_stages}_q{self.q_stages}_{self.form}_{self.out}_sm90"
        )

    @property
    def rows(self) -> int:
        """Query rows of a row block."""
        return self.pairs // self.heads

    @property
    def lanes_of_row(self) -> int:
        """Lanes of a quad that share a row, each with its part of the heads."""
        return max(1, 4 // self.rows)

    @property
    def threads(self) -> int:
        """Of a CTA: a math warpgroup for each worker, and one of producer and fill warps."""
        return 128 * self.workers + 128

    @property
    def q_box(self) -> tuple[int, ...]:
        """TMA box of q: channels; even or odd head; lanes of a row; rows; pairs of heads."""
        return self.head_dim, 2, self.lanes_of_row, min(4, self.rows), self.heads // self.lanes_of_row // 2

    @property
    def k_box(self) -> tuple[int, ...]:
        """TMA box of k: channels; keys."""
        return self.head_dim, self.tile_keys

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a CTA, as ``struct Shared`` of shared.cuh lays it out."""
        tiles = (self.q_stages * self.pairs + self.k_stages * self.tile_keys) * self.head_dim
        row_blocks = self.q_stages * (4 * self.pairs + 4 * (5 + 3 * self.rows))  # weights; windows and origins
        mbarriers = 2 * 8 * (self.q_stages + self.k_stages)
        others = 0
        if self.epilogue == "append":  # gates and places of lists; the place of the piece in the middle
            row_blocks += self.q_stages * (16 * self.rows + 32 + 12)
            others = 16
        worker = -(-(tiles + row_blocks + mbarriers) // 1024) * 1024
        return -(-(self.workers * worker + 4 * (_KNOWN_BLOCKS + _SCRATCH) + others) // 1024) * 1024

    def macros(self) -> dict[str, str | int]:
        """What the source is compiled with."""
        return {
            "HEADS": self.heads,
            "HEAD_DIM": self.head_dim,
            "CLEAN": int(self.form == "clean"),
            "COMPRESSED": int(self.form == "compressed"),
            "OUT_BF16": int(self.out == "bf16"),
            "APPEND": int(self.epilogue == "append"),
            "ROWS_LISTED": int(self.epilogue == "listed"),
            "PAIRS": self.pairs,
            "TILE_KEYS": self.tile_keys,
            "WORKERS": self.workers,
            "THREADS": self.threads,
            "K_STAGES": self.k_stages,
            "Q_STAGES": self.q_stages,
            "MATH_REGISTERS": self.math_registers,
            "OTHER_REGISTERS": self.other_registers,
            "Q_BOX": ",".join(map(str, self.q_box)),
            "K_BOX": ",".join(map(str, self.k_box)),
            "SHARED_BYTES": self.shared_bytes,
            "SHARED_LIMIT": SHARED_LIMIT,
            "KERNEL_NAME": self.name,
        }


def heuristic(problem: MqaLogitsProblem, arch: Arch) -> KernelConfig:
    """Five key tiles a worker cover the latency of a load; the schedule inside the kernel does the rest.

    Entering a row block costs about one tile, measured: docs/kernels/cuda_sm90.md.
    """
    out = "f32" if problem.out_dtype is torch.float32 else "bf16"
    return KernelConfig(problem.heads, problem.head_dim, problem.form, out, arch.units)


def neighbours(problem: MqaLogitsProblem, arch: Arch) -> list[KernelConfig]:
    """What ``bench --tune`` measures: the heuristic's choice first, then those around it."""
    chosen = heuristic(problem, arch)
    others = [replace(chosen, enter_cost=cost) for cost in (0, 2, MAX_ENTER_COST)]
    others += [replace(chosen, k_stages=stages) for stages in (3, 4)]
    return [chosen, *others]
