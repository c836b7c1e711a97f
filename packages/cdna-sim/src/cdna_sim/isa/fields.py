"""The fields of a decoded instruction, and the numbers of registers in them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

# Register numbers of the unified source operand space.
FLAT_SCRATCH, VCC, M0, EXEC, VGPR0 = 102, 106, 124, 126, 256
SGPR_LIMIT = 128
SDWA, DPP, VCCZ, EXECZ, SCC, LITERAL = 249, 250, 251, 252, 253, 255


@dataclass(frozen=True)
class Encoded:
    """One decoded instruction, without its text.

    Attributes:
        pc, size: address and bytes.
        name: mnemonic in upper case, without the encoding's suffix.
        format: encoding, e.g. ``VOP2``; ``variant`` is what follows it: ``LIT``, ``DPP``, ``SDWA``, ``SDST`` or empty.
        kind: the row of the report that counts it.
        inst: tinygrad's instruction.
    """

    pc: int
    size: int
    name: str
    format: str
    variant: str
    kind: str
    inst: Any = field(repr=False)

    def has(self, name: str) -> bool:
        return hasattr(type(self.inst), name)

    def bits(self, name: str) -> int:
        """A field as a number; 0 where the encoding has none of that name."""
        value = getattr(self.inst, name, 0)
        return int(value if isinstance(value, int) else value.offset)

    def raw(self, high: int, low: int) -> int:
        """Bits ``high`` to ``low`` of the machine code."""
        return int(self.inst._raw >> low & (1 << high - low + 1) - 1)

    @property
    def literal(self) -> int:
        return self.bits("literal")

    @property
    def target(self) -> int:
        """Where a branch or a direct call goes."""
        return self.pc + self.size + 4 * ((self.bits("simm16") ^ 0x8000) - 0x8000)


def counts_of(immediate: int) -> tuple[int, int]:
    """The vmcnt and lgkmcnt that an s_waitcnt waits for; expcnt counts nothing that is modelled."""
    return immediate & 15 | (immediate >> 14 & 3) << 4, immediate >> 8 & 15
