"""Machine code to instructions: tinygrad's decoder, with what it leaves to its caller."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from cdna_sim.code_object import CodeObject
from cdna_sim.errors import UnknownOpcode
from cdna_sim.isa.fields import Encoded
from cdna_sim.isa.text import text_of

_SOPP_KINDS = {"S_WAITCNT": "WAIT", "S_BARRIER": "BARRIER"}
_KINDS = {
    "SOP1": "SALU", "SOP2": "SALU", "SOPC": "SALU", "SOPK": "SALU", "SMEM": "SMEM", "DS": "LDS", "SCRATCH": "SCRATCH",
}  # fmt: skip


@dataclass(frozen=True)
class Instruction(Encoded):
    """One decoded instruction; ``text`` is mnemonic, operands and modifiers."""

    @functools.cached_property
    def text(self) -> str:
        return text_of(self)


def decode(code: bytes, pc: int, kernel: str = "") -> Instruction:
    """Decodes the instruction at the start of ``code``.

    Raises:
        UnknownOpcode: no such encoding.
    """
    # Only the scaled matrix instructions are 16 bytes long; given 16 bytes always, the decoder takes the instruction
    # before an unscaled v_mfma_*_f8f6f4 for their prefix.
    window = code[:16] if code[2:4] == b"\xac\xd3" else code[:8]
    try:
        return Instruction(pc, *_facts(window))
    except (ValueError, AssertionError, KeyError) as error:
        raise UnknownOpcode(f"no such encoding: {window[:8].hex(' ', 4)}", kernel=kernel, pc=pc) from error


@functools.lru_cache(1 << 16)
def _facts(window: bytes) -> tuple[int, str, str, str, str, Any]:
    """All of an instruction but its address: variants of a kernel have most of their machine code in common."""
    from tinygrad.renderer.amd import decode_inst

    inst: Any = decode_inst(window, "cdna")
    name = inst.op.name.removesuffix("_E32").removesuffix("_E64")
    encoding, _, variant = type(inst).__name__.partition("_")
    variant = variant.replace("DPP16", "DPP").removesuffix("_SDST") or variant
    if variant == "MFMA":
        variant = ""
    return inst.size(), name, encoding, variant, _kind(name, encoding), inst


def _kind(name: str, encoding: str) -> str:
    if encoding == "SOPP":
        return _SOPP_KINDS.get(name, "BRANCH" if "BRANCH" in name else "OTHER")
    if "MFMA" in name or "SMFMAC" in name:
        return "MFMA"
    if encoding in ("GLOBAL", "FLAT", "MUBUF", "MTBUF"):
        return "VMEM_LOAD" if "_LOAD_" in name else "VMEM_STORE"
    return _KINDS.get(encoding, "VALU" if encoding.startswith("VOP") else "OTHER")


def listing(code_object: CodeObject, kernel: str) -> Iterator[tuple[int, bytes, str]]:
    """The kernel's code: (address, machine code, text) for each instruction.

    Raises:
        CodeObjectError: no such kernel.
        UnknownOpcode: bytes that are no instruction.
    """
    pc, stop = code_object.kernel(kernel).text
    while pc < stop:
        ins = decode(code_object.image[pc : pc + 16], pc, kernel)
        yield pc, code_object.image[pc : pc + ins.size], ins.text
        pc += ins.size
