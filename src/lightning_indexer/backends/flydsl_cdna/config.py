"""Shapes of the ``flydsl`` kernels: a pure function of the problem and the arch."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from lightning_indexer.arch import Arch
from lightning_indexer.backends.flydsl_cdna.layout import Layout
from lightning_indexer.problems.mqa_logits import MqaLogitsProblem


@dataclass(frozen=True, slots=True)
class FlyConfig:
    """How one block works.

    Attributes:
        rows, waves: of one block. Waves first take rows of their own; those left over share a row's keys.
        stages: key tiles that LDS holds.
        chunk: positions of one block, a multiple of its tile of keys; more rows of blocks for few rows of logits.
    """

    rows: int
    waves: int
    stages: int
    chunk: int


def heuristic(problem: MqaLogitsProblem, arch: Arch) -> FlyConfig:
    """Four rows share each key tile where there are as many; docs/kernels/flydsl.md has what else was counted."""
    rows = 4 if problem.rows > 2 else problem.rows
    # CDNA4 at H=32: two rows a wave, which read the tile's keys from LDS once. More heads fill the registers alone,
    # and CDNA3's 64 KiB of LDS hold three blocks, which have to have four waves to keep its SIMDs busy.
    deep = _deep(arch)
    waves = max(1, rows // 2) if deep and problem.heads == 32 else rows
    # CDNA3 brings the next tile through registers; CDNA4 has two tiles on their way into LDS.
    return FlyConfig(rows, waves, 3 if deep else 2, _chunk(problem, arch, rows))


def _deep(arch: Arch) -> bool:
    """CDNA4, by its fp8 products of 32x32x64."""
    return "32x32x64" in arch.matrix


def _chunk(problem: MqaLogitsProblem, arch: Arch, rows: int) -> int:
    """Long enough that loading q does not show; few rows are split over keys until every unit has blocks."""
    chunk, groups = 8192, -(-problem.rows // rows)
    while chunk > 256 and groups * -(-problem.keys // chunk) < 8 * arch.units:
        chunk //= 2
    return chunk


def neighbours(problem: MqaLogitsProblem, arch: Arch) -> list[FlyConfig]:
    """What ``bench --tune`` measures: the heuristic's choice first, then those around it."""
    chosen = heuristic(problem, arch)
    others = [replace(chosen, rows=rows, waves=waves) for rows in (1, 2, 4) for waves in (1, 2, 4)]
    others += [replace(chosen, chunk=chosen.chunk * factor // 4) for factor in (2, 8) if chosen.chunk >= 512]
    others += [replace(chosen, stages=stages) for stages in (2, 3)]
    fitting = [config for config in dict.fromkeys(others) if config != chosen and _fits(config, problem, arch)]
    return [chosen, *fitting]


def layout(problem: MqaLogitsProblem, arch: Arch, config: FlyConfig) -> Layout:
    """All that the kernel's code depends on. The sizes of the operands are not among it."""
    return Layout(
        _deep(arch), problem.heads, problem.head_dim, config.rows, config.waves, config.stages,
        problem.clean_logits, problem.compressed, problem.out_dtype is torch.bfloat16,
    )  # fmt: skip


def _fits(config: FlyConfig, problem: MqaLogitsProblem, arch: Arch) -> bool:
    return layout(problem, arch, config).lds_bytes <= arch.shared_bytes
