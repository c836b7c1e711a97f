"""Compile-time and launch configuration of ``cuda-sm90``: a pure function of the problem and the arch."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from lightning_indexer.arch import Arch
from lightning_indexer.problems.mqa_logits import MqaLogitsProblem

# mqa_logits.cuh's plan; its static asserts hold these to it.
PAIRS = 256
TILE_KEYS = 64
WORKERS = 2
THREADS = 128 * WORKERS + 128
# What a CTA may ask for on sm_90.
SHARED_LIMIT = 227 * 1024


@dataclass(frozen=True, slots=True)
class KernelConfig:
    """One instantiation of the kernel and its grid.

    Attributes:
        heads, head_dim: H and D.
        form: ``clean``, ``noclean`` (outside the windows unspecified) or ``compressed``.
        out: ``f32`` or ``bf16``.
        ctas: persistent CTAs, one an SM.
        k_stages: tiles of 64 keys between TMA and the tensor cores, for each of two workers.
        q_stages: row blocks of q, likewise.
        enter_cost: what entering a row block costs the schedule, in tiles.
    """

    heads: int
    head_dim: int
    form: str
    out: str
    ctas: int
    k_stages: int = 5
    q_stages: int = 2
    enter_cost: int = 1

    @property
    def name(self) -> str:
        """The kernel's name in traces."""
        return (
            f"fp8_mqa_logits_H{self.heads}_D{self.head_dim}_m64n{PAIRS}_w{WORKERS}_k{self.k_stages}_q{self.q_stages}"
            f"_{self.form}_{self.out}_sm90"
        )

    @property
    def rows(self) -> int:
        """Query rows of a row block."""
        return PAIRS // self.heads

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a CTA: q and k of both workers, and at most 18 KiB of the rest and alignment."""
        return WORKERS * (self.q_stages * PAIRS + self.k_stages * TILE_KEYS) * self.head_dim + 18 * 1024

    def macros(self) -> dict[str, str | int]:
        """What the source is compiled with."""
        return {
            "HEADS": self.heads,
            "HEAD_DIM": self.head_dim,
            "CLEAN": int(self.form == "clean"),
            "COMPRESSED": int(self.form == "compressed"),
            "OUT_BF16": int(self.out == "bf16"),
            "KSTAGES": self.k_stages,
            "QSTAGES": self.q_stages,
            "SHARED_BYTES": self.shared_bytes,
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
    others = [replace(chosen, enter_cost=cost) for cost in (0, 2, 3)]
    others += [replace(chosen, k_stages=stages) for stages in (3, 4)]
    return [chosen, *others]
