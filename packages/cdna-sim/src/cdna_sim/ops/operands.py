"""Operands of vector instructions with their modifiers: neg, abs, SDWA selection, DPP, op_sel."""

from __future__ import annotations

import numpy as np

from cdna_sim.isa.decode import Instruction
from cdna_sim.isa.fields import VGPR0
from cdna_sim.isa.lanes import LANE, Lanes, frozen
from cdna_sim.ops.emit import Emitter, unknown

SOURCES = ("src0", "src1", "src2")


def source(e: Emitter, ins: Instruction, index: int, kind: str) -> str:
    """Operand ``index`` with its modifiers: neg, abs, SDWA selection, DPP, op_sel."""
    field = SOURCES[index]
    if not ins.has(field):
        field = "v" + field
    high = bool(ins.bits("opsel") >> index & 1)
    if ins.variant in ("SDWA", "DPP") and index < 2:
        register = selected(e, ins, index)
        text = register if kind == "u" else e.cast(register, kind)
    else:
        text = e.vector(ins, field, kind, high=high)
    negate, absolute = modifiers(ins, index)
    if negate or absolute:
        if kind not in "fde":
            raise unknown(ins, f"a sign modifier on operand {index}, which is no float", e.target.kernel)
        text = f"absolute({text})" if absolute else text
        text = f"negative({text})" if negate else text
    return text


def modifiers(ins: Instruction, index: int) -> tuple[bool, bool]:
    """Whether operand ``index`` is negated, and whether its absolute value is taken."""
    if ins.variant in ("SDWA", "DPP"):
        if index > 1:
            return False, False
        return bool(ins.bits(f"src{index}_neg")), bool(ins.bits(f"src{index}_abs"))
    return bool(ins.bits("neg") >> index & 1), bool(ins.bits("abs") >> index & 1)


def check_modifiers(e: Emitter, ins: Instruction, *, clamp: bool = False, opsel: int = 0) -> None:
    """Refuses output modifiers that the caller does not model; ``opsel``: the bits it does."""
    # Output multipliers (omod) have no effect where denormals are kept, the one mode that is modelled.
    if ins.bits("clmp") and not clamp:
        raise unknown(ins, "clamp", e.target.kernel)
    if ins.bits("opsel") & ~opsel:
        raise unknown(ins, f"op_sel {ins.bits('opsel'):#x}", e.target.kernel)


def destination(ins: Instruction) -> int:
    return ins.bits("vdst") - VGPR0


def dpp_source(control: int) -> tuple[Lanes, Lanes]:
    """For each lane, the lane that a DPP control reads, and whether that one exists.

    Raises:
        KeyError: not a control that gfx9 has.
    """
    everywhere = np.ones(64, bool)
    row, position, count = LANE & ~15, LANE & 15, control & 15
    if control < 0x100:
        selectors = np.array([control >> 2 * lane & 3 for lane in range(4)])
        return (LANE & ~3) + selectors[LANE & 3], everywhere
    if 0x101 <= control <= 0x10F:  # row_shl
        return row + np.minimum(position + count, 15), position + count < 16
    if 0x111 <= control <= 0x11F:  # row_shr
        return row + np.maximum(position - count, 0), position >= count
    if 0x121 <= control <= 0x12F:  # row_ror
        return row + (position - count & 15), everywhere
    if 0x150 <= control <= 0x15F:  # row_newbcast
        return row + count, everywhere
    whole = {
        0x130: (np.minimum(LANE + 1, 63), LANE < 63),  # wave_shl
        0x134: (LANE + 1 & 63, everywhere),  # wave_rol
        0x138: (np.maximum(LANE - 1, 0), LANE > 0),  # wave_shr
        0x13C: (LANE - 1 & 63, everywhere),  # wave_ror
        0x140: (row + 15 - position, everywhere),  # row_mirror
        0x141: ((LANE & ~7) + 7 - (LANE & 7), everywhere),  # row_half_mirror
        0x142: (np.maximum(row - 1, 0), LANE >= 16),  # row_bcast:15, the last lane of the row before
        0x143: (np.full(64, 31), LANE >= 32),  # row_bcast:31
    }
    return whole[control]


def selected(e: Emitter, ins: Instruction, index: int) -> str:
    """Operand ``index`` of a DPP or SDWA instruction as 64 uint32."""
    if ins.variant == "DPP":
        return _dpp_operand(e, ins) if index == 0 else e.vector(ins, "vsrc1", "u")
    if index == 0:
        number = ins.bits("vsrc0") - VGPR0
        text = e.operand(ins, number, "u") if ins.bits("s0") else e.vgpr(number, "u")
    else:
        number = ins.bits("vsrc1") - VGPR0
        text = e.operand(ins, number, "u") if ins.bits("s1") else e.vgpr(number, "u")
    selector, extend = ins.bits(f"src{index}_sel"), ins.bits(f"src{index}_sext")
    if selector == 6:
        return text
    if selector > 6:
        raise unknown(ins, f"SDWA selector {selector}", e.target.kernel)
    width, part = (8, selector) if selector < 4 else (16, selector - 4)
    dtype = f"{'int' if extend else 'uint'}{width}"
    text = f"{text}.view({dtype})[{part}::{32 // width}]"
    return f"{text}.astype(int32).view(uint32)" if extend else f"{text}.astype(uint32)"


def _dpp_operand(e: Emitter, ins: Instruction) -> str:
    try:
        lanes, exists = dpp_source(ins.bits("dpp"))
    except KeyError:
        raise unknown(ins, f"DPP control {ins.bits('dpp'):#x}", e.target.kernel) from None
    value = e.vgpr(ins.bits("vsrc0") - VGPR0, "u")
    source = e.const(frozen(np.asarray(lanes)))
    text = f"{value}[{source}]"
    if ins.bits("bc") and not (exists.all() and e.full):
        # bound_ctrl: lanes that do not exist or are switched off read as 0.
        valid = e.const(frozen(exists))
        valid = valid if e.full else f"{valid} & em[{source}]"
        text = f"where({valid}, {text}, K[0])"
    return text
