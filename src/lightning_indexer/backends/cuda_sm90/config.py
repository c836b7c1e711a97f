"""Compile-time and launch configuration of ``cuda-sm90``: a pure function of the problem and the arch."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from lightning_indexer.arch import Arch
from lightning_indexer.problem import Problem

# kernel.cuh's plan; its static asserts hold these to it.
TILE_KEYS = 64
# What a CTA may ask for on sm_90.
SHARED_LIMIT = 227 * 1024


@dataclass(frozen=True, slots=True)
class KernelConfig:
    """One instantiation of the kernel and its grid.

    Attributes:
        heads, head_dim: H and D.
        form: ``clean``, ``nocl`` (outside the windows unspecified) or ``compressed``.
        out: ``f32`` or ``bf16``.
        k_stages: 128-key buffers between the copy engine and the tensor cores.
        ctas: persistent CTAs, one a multiprocessor.
    """

    heads: int
    head_dim: int
    form: str
    out: str
    k_stages: int
    ctas: int
    enter_cost: int = 2
    q_stages: int = 3
    pairs: int = 256
    groups: int = 2

    @property
    def name(self) -> str:
        """The kernel's name in traces."""
        return f"fp8_mqa_logits_H{self.heads}_D{self.head_dim}_m64n{self.pairs}x{self.groups}_k{self.k_stages}q{self.q_stages}c{self.enter_cost}_{self.form}_{self.out}_sm90"

    @property
    def stage_keys(self) -> int:
        """Keys of one stage: a tile for each math warpgroup."""
        return self.groups * TILE_KEYS

    @property
    def threads(self) -> int:
        """Of a CTA: the math warpgroups, and one that loads and fills."""
        return 128 * (self.groups + 1)

    @property
    def rows(self) -> int:
        """Query rows of a row block."""
        return self.pairs // self.heads

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a CTA: q, k, then at most 16 KiB of the rest, and room to align to 1 KiB."""
        return (self.q_stages * self.pairs + self.k_stages * self.stage_keys) * self.head_dim + 16 * 1024

    def macros(self) -> dict[str, str | int]:
        """What the source is compiled with."""
        return {
            "HEADS": self.heads,
            "HEAD_DIM": self.head_dim,
            "CLEAN": int(self.form == "clean"),
            "COMPRESSED": int(self.form == "compressed"),
            "OUT_BF16": int(self.out == "bf16"),
            "PAIRS": self.pairs,
            "GROUPS": self.groups,
            "KSTAGES": self.k_stages,
            "QSTAGES": self.q_stages,
            "ENTER_COST": self.enter_cost,
            "SHARED_BYTES": self.shared_bytes,
            "KERNEL_NAME": self.name,
        }


def heuristic(problem: Problem, arch: Arch) -> KernelConfig:
    """Six key stages cover the latency of a load from HBM; the schedule inside the kernel does the rest."""
    form = "compressed" if problem.compressed else "clean" if problem.clean_logits else "nocl"
    out = "f32" if problem.out_dtype is torch.float32 else "bf16"
    return KernelConfig(problem.heads, problem.head_dim, form, out, 6, arch.units)
