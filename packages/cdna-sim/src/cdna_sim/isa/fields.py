"""The fields of a decoded instruction, and the numbers of registers in them."""

from __future__ import annotations

import functools
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any

# Register numbers of the unified source operand space.
FLAT_SCRATCH, VCC, M0, EXEC, VGPR0 = 102, 106, 124, 126, 256
SGPR_LIMIT = 128
SDWA, DPP, VCCZ, EXECZ, SCC, LITERAL = 249, 250, 251, 252, 253, 255


@functools.cache
def _place(encoding: Hashable, name: str) -> tuple[int, int, int, int] | None:
    """Where a field lies in an encoding, and what it counts: its lowest bit, its mask, the number that 0 stands for,
    and the step from one number to the next. None where the encoding has no such field.

    The decoder would make an object for each operand that is looked at.
    """
    found = getattr(encoding, name, None)
    if found is None:
        return None
    first, step = 0, 1
    if not hasattr(found, "_enum"):  # an opcode, not all of whose numbers are taken
        first, second = (_number(found.decode(raw)) for raw in (0, 1))
        step = second - first
    return found.lo, found.mask, first, step


def _number(value: Any) -> int:
    return int(value if isinstance(value, int) else value.offset)


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
        encoding: Any = type(self.inst)
        place = _place(encoding, name)
        if place is None:
            return 0
        low, mask, first, step = place
        return int((self.inst._raw >> low & mask) * step + first)

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
