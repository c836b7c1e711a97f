"""Tile sizes of ``triton-portable``: a pure function of the problem and the arch."""

from __future__ import annotations

from dataclasses import dataclass, replace

from lightning_indexer.arch import Arch
from lightning_indexer.problems.mqa_logits import MqaLogitsProblem


@dataclass(frozen=True, slots=True)
class TileConfig:
    """How one program works.

    Attributes:
        block: keys of one tile, the M side of the matrix product.
        chunk: columns of the result that one program owns, a multiple of ``block``.
        num_warps, num_stages: Triton's; stages of the key pipeline.
        waves_per_eu: AMD only, 0 leaves it to the compiler.
    """

    block: int
    chunk: int
    num_warps: int
    num_stages: int
    waves_per_eu: int = 0


def heuristic(problem: MqaLogitsProblem, arch: Arch) -> TileConfig:
    """NVIDIA: the best of 30 on an H200, docs/kernels/triton_portable.md. AMD: what public kernels of this form use."""
    if arch.vendor == "amd":
        # CDNA3: 64 KiB of LDS, room for two programs. Elsewhere tiles of 128 keys spill where q is large (102 registers
        # on CDNA4 at H=D=128, up to 10 on RDNA4 from 64 x 128 on), and where keys are loaded byte by byte (up to 35 on
        # CDNA4; with four waves it still spills 99 scalar ones).
        size, little = problem.heads * problem.head_dim, arch.shared_bytes <= 64 * 1024
        large = (64 if little and arch.wave == 32 else 128) * 128
        small = (little and arch.wave == 64 and arch.fp8 != "none") or not problem.aligned or size >= large
        block, num_warps, num_stages, waves_per_eu = 64 if small else 128, 4 if problem.aligned else 8, 2, 2
    else:
        block, num_warps, num_stages, waves_per_eu = 64, 4, 3, 0
    return TileConfig(block, _chunk(problem, arch), num_warps, num_stages, waves_per_eu)


def _chunk(problem: MqaLogitsProblem, arch: Arch) -> int:
    """Long enough that loading q and starting the pipeline do not show, short enough that every unit has work."""
    chunk = 8192
    while chunk > 256:
        programs = problem.rows * -(-problem.width // chunk)
        # Long windows are cut for balance, short ones only to give every unit something.
        if programs >= (12 if chunk > 1024 else 4) * arch.units:
            break
        chunk //= 2
    return chunk


def neighbours(problem: MqaLogitsProblem, arch: Arch) -> list[TileConfig]:
    """What ``bench --tune`` measures: the heuristic's choice first, then those around it."""
    chosen = heuristic(problem, arch)
    others = [replace(chosen, chunk=chosen.chunk * factor // 4) for factor in (2, 8) if chosen.chunk >= 512]
    others += [replace(chosen, block=block, chunk=max(chosen.chunk, block)) for block in (32, 64, 128)]
    others += [replace(chosen, num_warps=warps) for warps in (2, 8)]
    others += [replace(chosen, num_stages=stages) for stages in (2, 4)]
    return [chosen, *(config for config in dict.fromkeys(others) if config != chosen)]


def variants(problem: MqaLogitsProblem, arch: Arch, *, thorough: bool) -> list[TileConfig]:
    """Checked beside the heuristic's: a chunk of many tiles, for its pipelined loop."""
    return [replace(heuristic(problem, arch), chunk=1024)]
