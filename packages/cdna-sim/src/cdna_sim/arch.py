"""The CDNA architectures, a row each: what differs between them, for the reader of code objects and the simulator.

A new architecture of this family is one row. What all rows share is written where it is used: 512 vector registers of a
lane, four SIMDs of a compute unit, the encodings of instructions.

Sources: AMD Instinct MI200, MI300 and CDNA4 ISA documents; LLVM's AMDGPU backend (machine numbers, allocation granules,
hazards); LDS banks as measured by others (HipKittens for gfx950, AMD's blog on LDS bank conflicts for gfx942).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

WAVE = 64  # lanes
VECTOR_REGISTERS = 512  # of a lane, accumulation registers included

# What CDNA4 added to CDNA3, by mnemonic.
_CDNA4 = re.compile(
    r"DS_READ_B(64|96)_TR_|V_PERMLANE(16|32)_SWAP|V_BITOP3_|V_(MAXIMUM|MINIMUM)3_F32|V_PK_(MAXIMUM|MINIMUM)3_F16"
    r"|V_CVT_SCALEF32_|V_CVT_(PK|SR)_BF16_F32|V_CVT_F32_BF16|V_PRNG_|V_ASHR_PK_|V_DOT2C?_F32_BF16"
    r"|GLOBAL_LOAD_LDS_DWORDX|BUFFER_ATOMIC_PK_ADD_BF16|V_MFMA_(SCALE_)?F32_\d+X\d+X\d+_F8F6F4"
    r"|V_MFMA_F32_(16X16X32|32X32X16)_B?F16|V_MFMA_I32_(16X16X64|32X32X32)_I8"
)


@dataclass(frozen=True, slots=True)
class Arch:
    """One architecture.

    Attributes:
        name: e.g. ``gfx950``.
        machine: its number in the header of a code object (EF_AMDGPU_MACH).
        lds, lds_granule: bytes of LDS of a compute unit, which one workgroup may have all of, and the unit in which
            workgroups get them.
        simulated: instructions of this architecture are modelled.
        fp8: the dialect of its 8-bit floats: ``fnuz``, or OCP's ``fn``.
        opcodes: the generation whose instructions it has.
        read_banks: LDS banks that serve reads; writes have 32 everywhere.
        late: wait states by which results of matrix instructions of more than two passes are later than on gfx942.
    """

    name: str
    machine: int
    lds: int
    lds_granule: int
    simulated: bool = True
    fp8: Literal["fn", "fnuz"] = "fnuz"
    opcodes: Literal["CDNA2", "CDNA3", "CDNA4"] = "CDNA3"
    read_banks: int = 32
    late: int = 0

    def has(self, opcode: str) -> bool:
        """Whether it has the instruction of that name (upper case), which the common decoder knows."""
        return self.opcodes == "CDNA4" or _CDNA4.match(opcode) is None


ARCHS: dict[str, Arch] = {
    arch.name: arch
    for arch in (
        Arch("gfx90a", 0x3F, 64 * 1024, 512, simulated=False, opcodes="CDNA2"),
        Arch("gfx942", 0x4C, 64 * 1024, 512),
        Arch("gfx950", 0x4F, 160 * 1024, 1280, fp8="fn", opcodes="CDNA4", read_banks=64, late=1),
    )
}


def simulated() -> tuple[str, ...]:
    """Names of the architectures whose kernels can be run here."""
    return tuple(arch.name for arch in ARCHS.values() if arch.simulated)
