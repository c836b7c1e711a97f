"""Which module generates the instructions of which encoding."""

from __future__ import annotations

from collections.abc import Callable

from cdna_sim.isa.decode import Instruction
from cdna_sim.ops import buffer, compare, control, lds, mfma, packed, salu, smem, valu, vmem
from cdna_sim.ops.emit import Emitter, unknown

_FAMILIES: dict[str, Callable[[Emitter, Instruction], None]] = {
    "SOP1": salu.sop1, "SOP2": salu.sop2, "SOPC": salu.sopc, "SOPK": salu.sopk, "SOPP": control.sopp,
    "SMEM": smem.emit, "VOP1": valu.emit, "VOP2": valu.emit, "VOP3": valu.emit, "VOP3SD": valu.emit,
    "VOPC": compare.emit, "VOP3P": packed.emit, "VOP3PX2": mfma.emit, "DS": lds.emit,
    "GLOBAL": vmem.emit, "FLAT": vmem.emit, "SCRATCH": vmem.emit, "MUBUF": buffer.emit,
}  # fmt: skip


def generate(emitter: Emitter, ins: Instruction) -> None:
    """Generates one instruction.

    Raises:
        UnknownOpcode: it is not modelled, or the arch has no such instruction.
    """
    emitter.begin()
    check(emitter, ins)
    _FAMILIES[ins.format](emitter, ins)


def check(emitter: Emitter, ins: Instruction) -> None:
    """Raises UnknownOpcode for an instruction that the arch does not have, or of a family that is not modelled."""
    arch = emitter.target.arch
    if not arch.has(ins.name):
        raise unknown(ins, f"{arch.name} has no such instruction", emitter.target.kernel)
    if ins.format not in _FAMILIES:
        raise unknown(ins, "no such family is modelled", emitter.target.kernel)
