"""Runs a few lines of assembly on one wave with given registers, for tests of single opcodes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cdna_sim.assembler import assemble
from cdna_sim.exec.launch import Launch
from cdna_sim.exec.program import END, program_for
from cdna_sim.isa.fields import EXEC, M0, VCC
from cdna_sim.isa.lanes import FULL, LOW32
from cdna_sim.memory.buffers import Memory
from cdna_sim.options import Options

_LDS_BYTES = 65536

_SOURCE = """
.text
.globl snippet
.p2align 8
.type snippet,@function
snippet:
{lines}
s_endpgm
.size snippet, .-snippet
.rodata
.p2align 6
.amdhsa_kernel snippet
  .amdhsa_next_free_vgpr 512
  .amdhsa_next_free_sgpr 100
  .amdhsa_accum_offset 256
  .amdhsa_group_segment_fixed_size {lds}
  .amdhsa_private_segment_fixed_size 1024
  .amdhsa_float_denorm_mode_32 3
.end_amdhsa_kernel
"""


@dataclass
class State:
    """What a snippet left behind.

    Attributes:
        vgpr, agpr: by number, uint32 [64].
        sgpr: by number.
        vcc, exec: lane masks; ``m0``, ``scc``.
        lds: bytes.
    """

    vgpr: list[NDArray[np.uint32]]
    agpr: list[NDArray[np.uint32]]
    sgpr: list[int]
    vcc: int
    scc: int
    exec: int
    m0: int
    lds: NDArray[np.uint8]


def run_snippet(
    arch: str,
    asm: str,
    *,
    vgprs: Mapping[int, NDArray[Any]] | None = None,
    agprs: Mapping[int, NDArray[Any]] | None = None,
    sgprs: Mapping[int, int] | None = None,
    exec_mask: int = FULL,
    vcc: int = 0,
    scc: int = 0,
    m0: int = 0,
    lds: bytes | NDArray[np.uint8] = b"",
    memory: Memory | None = None,
    options: Options | None = None,
) -> State:
    """Assembles ``asm`` and runs it on one wave.

    Args:
        arch: ``gfx942`` or ``gfx950``.
        asm: lines of assembly; the end of the program is added.
        vgprs, agprs: initial registers by number, 64 values of 32 bits; others are 0.
        sgprs: initial scalar registers by number; others are 0.
        exec_mask, vcc, scc, m0: the other registers.
        lds: the first bytes of the 64 KiB of LDS; the rest is 0.
        memory: global memory.
        options: by default at once and without poison: ``Options(poison=False, deferred=False)``.

    Raises:
        SimulationFault, UnknownOpcode: as a launch.
    """
    code = assemble(_SOURCE.format(lines=asm, lds=_LDS_BYTES), arch)
    # Snippets are single instructions, read back at once: their wait states are not checked.
    chosen = options or Options(poison=False, deferred=False)
    program = program_for(code, "snippet", chosen)
    launch = Launch(program, chosen, memory or Memory(), (64, 1, 1), (1, 1, 1), b"", 0)
    wave = launch.waves[0]
    launch.lds.start()
    wave.start((0, 0, 0), 0, launch.lds, 64, poison=False)
    wave.pc = program.info.descriptor.entry
    for registers, first in ((vgprs or {}, 0), (agprs or {}, 256)):
        for number, values in registers.items():
            wave.v[first + number][:] = np.ascontiguousarray(values).view(np.uint32)
    for number, value in (sgprs or {}).items():
        wave.S[number] = value & LOW32
    for number, pair in ((VCC, vcc), (EXEC, exec_mask)):
        wave.S[number], wave.S[number + 1] = pair & LOW32, pair >> 32
    wave.S[M0], wave.scc = m0 & LOW32, scc
    wave.exec_changed()
    initial = np.frombuffer(bytes(lds), np.uint8)
    launch.lds.data[: len(initial)] = initial
    if launch.lds.watched and len(initial):
        launch.lds.state[: len(initial)] = 0
    with np.errstate(all="ignore"):
        while launch.run_wave(wave) != END:
            launch.lds.barrier()
    return State(
        vgpr=wave.v[:256], agpr=wave.v[256:], sgpr=list(wave.S[:106]), vcc=wave.S[VCC] | wave.S[VCC + 1] << 32,
        scc=wave.scc, exec=wave.exec, m0=wave.S[M0], lds=launch.lds.data,
    )  # fmt: skip
