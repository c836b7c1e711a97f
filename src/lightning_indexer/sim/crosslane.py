"""Data between lanes and parts of registers: DPP, SDWA, readlane, permlane swaps, accumulation register moves."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from lightning_indexer.sim.decode import EXEC, SGPR_LIMIT, VCC, VGPR0, Instruction
from lightning_indexer.sim.emit import Emitter, unknown
from lightning_indexer.sim.lanes import LANE, Lanes, frozen


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
        raise unknown(ins, f"SDWA selector {selector}", e.program.name)
    width, part = (8, selector) if selector < 4 else (16, selector - 4)
    dtype = f"{'int' if extend else 'uint'}{width}"
    text = f"{text}.view({dtype})[{part}::{32 // width}]"
    return f"{text}.astype(int32).view(uint32)" if extend else f"{text}.astype(uint32)"


def _dpp_operand(e: Emitter, ins: Instruction) -> str:
    try:
        lanes, exists = dpp_source(ins.bits("dpp"))
    except KeyError:
        raise unknown(ins, f"DPP control {ins.bits('dpp'):#x}", e.program.name) from None
    value = e.vgpr(ins.bits("vsrc0") - VGPR0, "u")
    source = e.const(frozen(np.asarray(lanes)))
    text = f"{value}[{source}]"
    if ins.bits("bc") and not (exists.all() and e.full):
        # bound_ctrl: lanes that do not exist or are switched off read as 0.
        valid = e.const(frozen(exists))
        valid = valid if e.full else f"{valid} & em[{source}]"
        text = f"where({valid}, {text}, K[0])"
    return text


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
        raise unknown(ins, "SDWA on 64 bits", e.program.name)
    if selector == 6:
        e.put(number, "u", text)
        return
    if selector > 6 or unused == 3:
        raise unknown(ins, f"SDWA destination selector {selector}, unused {unused}", e.program.name)
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
        raise unknown(ins, f"destination {number}", e.program.name)
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
            raise unknown(ins, "this operand form", e.program.name)
        for register in (first, second):
            e.use_vgpr(register)
            e.write_vgpr(register)
        if first == second:
            raise unknown(ins, "both operands the same register", e.program.name)
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
    from lightning_indexer.sim.valu import check_modifiers, destination, source

    check_modifiers(e, ins)
    a, b, c = (source(e, ins, index, "f") for index in range(3))
    bits = e.sgpr(VCC, wide=True)
    e.put(destination(ins), "f", f"div_fmas({a}, {b}, {c}, masks[{bits}])")


def _div_scale(e: Emitter, ins: Instruction) -> None:
    from lightning_indexer.sim.valu import check_modifiers, destination, source

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
