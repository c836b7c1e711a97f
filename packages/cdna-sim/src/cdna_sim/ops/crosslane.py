"""Data between lanes and parts of registers: DPP, SDWA, readlane, permlane swaps, accumulation register moves."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from cdna_sim.isa.decode import Instruction
from cdna_sim.isa.fields import EXEC, SGPR_LIMIT, VCC, VGPR0
from cdna_sim.isa.lanes import LANE, frozen
from cdna_sim.ops.emit import Emitter, unknown
from cdna_sim.ops.operands import check_modifiers, destination, dpp_source, source


def dpp_mask(e: Emitter, ins: Instruction) -> str | None:
    """The lanes that a DPP instruction may write, beside EXEC; None for all."""
    rows, banks = ins.bits("row_mask"), ins.bits("bank_mask")
    allowed = (rows >> (LANE >> 4) & 1) & (banks >> (LANE >> 2 & 3) & 1) != 0
    lanes, exists = dpp_source(ins.bits("dpp"))
    text = None
    if not ins.bits("bc"):
        # Without bound_ctrl, a lane that would read from one that does not exist, or is off, keeps its old value.
        allowed = allowed & exists
        text = None if e.full else f"em[{e.const(frozen(np.asarray(lanes)))}]"
    if not allowed.all():
        name = e.const(frozen(allowed))
        text = name if text is None else f"({name} & {text})"
    return text


def store_sdwa(e: Emitter, ins: Instruction, number: int, kind: str, expression: str) -> None:
    """Writes the part of the destination that SDWA selects; the rest is zero, sign or kept."""
    selector, unused = ins.bits("dst_sel"), ins.bits("dst_unused")
    narrow = kind in "hse"
    text = expression.replace("{o}", "")
    if narrow:
        text = f"({text}).view(uint16)" if kind != "h" else f"({text})"
        if selector in (4, 6) and (unused == 0 or selector == 6):
            e.put(number, "h", text)
            return
        text = f"{text}.astype(uint32)"
    elif kind in "if":
        text = f"({text}).view(uint32)"
    elif kind != "u":
        raise unknown(ins, "SDWA on 64 bits", e.target.kernel)
    if selector == 6:
        e.put(number, "u", text)
        return
    if selector > 6 or unused == 3:
        raise unknown(ins, f"SDWA destination selector {selector}, unused {unused}", e.target.kernel)
    width, part = (8, selector) if selector < 4 else (16, selector - 4)
    mask, shift = (1 << width) - 1, width * part
    placed = f"(({text}) & uint32({mask})) << uint32({shift})"
    if unused == 2:
        kept = f"{e.vgpr(number, 'u')} & uint32({~(mask << shift) & 0xFFFFFFFF})"
        placed = f"({placed}) | ({kept})"
    elif unused == 1:  # the sign fills the bits above, zeros those below
        placed = f"((({text}) << uint32({32 - width})).view(int32) >> {32 - width}).view(uint32) << uint32({shift})"
    e.put(number, "u", placed)


def _lane_index(e: Emitter, ins: Instruction, field: str) -> str:
    return f"({e.scalar(ins, field)} & 63)"


def _readfirstlane(e: Emitter, ins: Instruction) -> None:
    """Of the first active lane; of lane 0 where none is."""
    lane = "0" if e.full else "((w.exec & -w.exec).bit_length() - 1 if w.exec else 0)"
    value = e.vector(ins, "src0", "u")
    e.put_sgpr(_scalar_destination(e, ins), f"int({value}[{lane}])")


def _readlane(e: Emitter, ins: Instruction) -> None:
    value = e.vector(ins, "src0", "u")
    e.put_sgpr(_scalar_destination(e, ins), f"int({value}[{_lane_index(e, ins, 'src1')}])")


def _scalar_destination(e: Emitter, ins: Instruction) -> int:
    """The destination of readlane is a scalar register in the field of a vector one."""
    number = ins.raw(24, 17) if ins.format == "VOP1" else ins.raw(7, 0)
    if number >= SGPR_LIMIT or number in (EXEC, EXEC + 1):
        raise unknown(ins, f"destination {number}", e.target.kernel)
    return number


def _writelane(e: Emitter, ins: Instruction) -> None:
    number = ins.bits("vdst") - VGPR0 if ins.bits("vdst") >= VGPR0 else ins.raw(7, 0)
    e.write_vgpr(number)
    e.line(f"v[{number}][{_lane_index(e, ins, 'src1')}] = {e.scalar(ins, 'src0')}")


def _swap(distance: int) -> Callable[[Emitter, Instruction], None]:
    def emit(e: Emitter, ins: Instruction) -> None:
        """Swaps the odd halves (rows) of the first register with the even ones of the second; EXEC switches lanes."""
        first, second = ins.bits("vdst") - VGPR0, ins.bits("src0") - VGPR0
        if second < 0 or ins.variant or ins.bits("opsel"):
            raise unknown(ins, "this operand form", e.target.kernel)
        for register in (first, second):
            e.use_vgpr(register)
            e.write_vgpr(register)
        if first == second:
            raise unknown(ins, "both operands the same register", e.target.kernel)
        arguments = f"v[{first}], v[{second}]"
        if e.full:
            parts = 32 // distance
            a, b = (f"v[{n}].reshape({parts}, 2, {distance})" for n in (first, second))
            e.line(f"swap_lanes({a}, {b})")
        else:
            e.line(f"swap_lanes_where({arguments}, {distance}, em)")

    return emit


def _swap_registers(e: Emitter, ins: Instruction) -> None:
    first, second = ins.bits("vdst") - VGPR0, ins.bits("src0") - VGPR0
    e.use_vgpr(first)
    e.use_vgpr(second)
    name = e.temporary()
    e.line(f"{name} = v[{first}].copy()")
    e.put(first, "u", f"v[{second}]")
    e.put(second, "u", name)


def accvgpr(e: Emitter, ins: Instruction) -> None:
    """Moves between the two halves of the register file."""
    destination, source = ins.raw(24, 17), ins.bits("src0")
    if ins.name == "V_ACCVGPR_MOV_B32":
        e.put(destination + 256, "u", e.vgpr(source - VGPR0 + 256, "u"))
        return
    destination = ins.raw(7, 0)
    if ins.name.startswith("V_ACCVGPR_READ"):
        e.put(destination, "u", e.vgpr(source - VGPR0 + 256, "u"))
    else:
        e.put(destination + 256, "u", e.vector(ins, "src0", "u"))


def _div_fmas(e: Emitter, ins: Instruction) -> None:
    """A fused multiply-add, scaled by 2**32 in lanes whose bit of VCC v_div_scale has set."""
    check_modifiers(e, ins)
    a, b, c = (source(e, ins, index, "f") for index in range(3))
    bits = e.sgpr(VCC, wide=True)
    e.put(destination(ins), "f", f"div_fmas({a}, {b}, {c}, masks[{bits}])")


def _div_scale(e: Emitter, ins: Instruction) -> None:
    check_modifiers(e, ins)
    a, b, c = (source(e, ins, index, "f") for index in range(3))
    value, scaled = e.temporary(), e.temporary()
    e.line(f"{value}, {scaled} = div_scale({a}, {b}, {c})")
    e.put_mask(ins, ins.bits("sdst"), scaled)
    e.put(destination(ins), "f", value)


EMIT: dict[str, Callable[[Emitter, Instruction], None]] = {
    "READFIRSTLANE_B32": _readfirstlane,
    "READLANE_B32": _readlane,
    "WRITELANE_B32": _writelane,
    "PERMLANE16_SWAP_B32": _swap(16),
    "PERMLANE32_SWAP_B32": _swap(32),
    "SWAP_B32": _swap_registers,
    "ACCVGPR_MOV_B32": accvgpr,
    "DIV_FMAS_F32": _div_fmas,
    "DIV_SCALE_F32": _div_scale,
}
