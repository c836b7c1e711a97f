"""Machine code to instructions: tinygrad's decoder, with what it leaves to its caller."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import Any

from lightning_indexer.sim.errors import UnknownOpcode

# Register numbers of the unified source operand space.
FLAT_SCRATCH, VCC, M0, EXEC, VGPR0 = 102, 106, 124, 126, 256
SGPR_LIMIT = 128
SDWA, DPP, VCCZ, EXECZ, SCC, LITERAL = 249, 250, 251, 252, 253, 255

_SOPP_KINDS = {"S_WAITCNT": "WAIT", "S_BARRIER": "BARRIER"}
_KINDS = {
    "SOP1": "SALU", "SOP2": "SALU", "SOPC": "SALU", "SOPK": "SALU", "SMEM": "SMEM", "DS": "LDS", "SCRATCH": "SCRATCH",
}  # fmt: skip


@dataclass(frozen=True)
class Instruction:
    """One decoded instruction.

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

    @functools.cached_property
    def text(self) -> str:
        from lightning_indexer.sim.text import text_of

        return text_of(self)


def decode(code: bytes, pc: int, kernel: str = "") -> Instruction:
    """Decodes the instruction at the start of ``code``.

    Raises:
        UnknownOpcode: no such encoding.
    """
    from tinygrad.renderer.amd import decode_inst

    # Only the scaled matrix instructions are 16 bytes long; given 16 bytes always, the decoder takes the instruction
    # before an unscaled v_mfma_*_f8f6f4 for their prefix.
    window = code[:16] if code[2:4] == b"\xac\xd3" else code[:8]
    try:
        inst: Any = decode_inst(window, "cdna")
        name, size = inst.op.name, inst.size()
    except (ValueError, AssertionError, KeyError) as error:
        raise UnknownOpcode(f"no such encoding: {window[:8].hex(' ', 4)}", kernel=kernel, pc=pc) from error
    name = name.removesuffix("_E32").removesuffix("_E64")
    encoding, _, variant = type(inst).__name__.partition("_")
    variant = variant.replace("DPP16", "DPP").removesuffix("_SDST") or variant
    if variant == "MFMA":
        variant = ""
    return Instruction(pc, size, name, encoding, variant, _kind(name, encoding), inst)


def _kind(name: str, encoding: str) -> str:
    if encoding == "SOPP":
        return _SOPP_KINDS.get(name, "BRANCH" if "BRANCH" in name else "OTHER")
    if "MFMA" in name or "SMFMAC" in name:
        return "MFMA"
    if encoding in ("GLOBAL", "FLAT", "MUBUF", "MTBUF"):
        return "VMEM_LOAD" if "_LOAD_" in name else "VMEM_STORE"
    return _KINDS.get(encoding, "VALU" if encoding.startswith("VOP") else "OTHER")
