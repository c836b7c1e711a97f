"""Scalar arithmetic: SOP1, SOP2, SOPC, SOPK. Scalar registers are Python ints, taken modulo 2**32 or 2**64.

A row of a table gives an opcode's operands and its result as expressions of ``a`` and ``b``. Operand types: ``u i`` 32
bits unsigned or signed, ``U I`` 64. SCC: ``n``: result is not zero; ``-``: unchanged; otherwise an expression, which
may use ``r``, the result before it is reduced to its width.
"""

from __future__ import annotations

from cdna_sim.isa.decode import Instruction
from cdna_sim.isa.fields import EXEC, VCC
from cdna_sim.ops.emit import Emitter, unknown

_CARRY = "r >> 32"
_SIGNED_OVERFLOW = "not -0x80000000 <= r < 0x80000000"

# name: (type of a, type of b, width of the result, expression, SCC)
SOP2 = {
    "S_ADD_U32": ("u", "u", 32, "a + b", _CARRY),
    "S_SUB_U32": ("u", "u", 32, "a - b", "r < 0"),
    "S_ADD_I32": ("i", "i", 32, "a + b", _SIGNED_OVERFLOW),
    "S_SUB_I32": ("i", "i", 32, "a - b", _SIGNED_OVERFLOW),
    "S_ADDC_U32": ("u", "u", 32, "a + b + w.scc", _CARRY),
    "S_SUBB_U32": ("u", "u", 32, "a - b - w.scc", "r < 0"),
    "S_MIN_I32": ("i", "i", 32, "min(a, b)", "a < b"),
    "S_MIN_U32": ("u", "u", 32, "min(a, b)", "a < b"),
    "S_MAX_I32": ("i", "i", 32, "max(a, b)", "a >= b"),
    "S_MAX_U32": ("u", "u", 32, "max(a, b)", "a >= b"),
    "S_CSELECT_B32": ("u", "u", 32, "a if w.scc else b", "-"),
    "S_CSELECT_B64": ("U", "U", 64, "a if w.scc else b", "-"),
    "S_AND_B32": ("u", "u", 32, "a & b", "n"),
    "S_AND_B64": ("U", "U", 64, "a & b", "n"),
    "S_OR_B32": ("u", "u", 32, "a | b", "n"),
    "S_OR_B64": ("U", "U", 64, "a | b", "n"),
    "S_XOR_B32": ("u", "u", 32, "a ^ b", "n"),
    "S_XOR_B64": ("U", "U", 64, "a ^ b", "n"),
    "S_ANDN2_B32": ("u", "u", 32, "a & ~b", "n"),
    "S_ANDN2_B64": ("U", "U", 64, "a & ~b", "n"),
    "S_ORN2_B32": ("u", "u", 32, "a | ~b", "n"),
    "S_ORN2_B64": ("U", "U", 64, "a | ~b", "n"),
    "S_NAND_B32": ("u", "u", 32, "~(a & b)", "n"),
    "S_NAND_B64": ("U", "U", 64, "~(a & b)", "n"),
    "S_NOR_B32": ("u", "u", 32, "~(a | b)", "n"),
    "S_NOR_B64": ("U", "U", 64, "~(a | b)", "n"),
    "S_XNOR_B32": ("u", "u", 32, "~(a ^ b)", "n"),
    "S_XNOR_B64": ("U", "U", 64, "~(a ^ b)", "n"),
    "S_LSHL_B32": ("u", "u", 32, "a << (b & 31)", "n"),
    "S_LSHL_B64": ("U", "u", 64, "a << (b & 63)", "n"),
    "S_LSHR_B32": ("u", "u", 32, "a >> (b & 31)", "n"),
    "S_LSHR_B64": ("U", "u", 64, "a >> (b & 63)", "n"),
    "S_ASHR_I32": ("i", "u", 32, "a >> (b & 31)", "n"),
    "S_ASHR_I64": ("I", "u", 64, "a >> (b & 63)", "n"),
    "S_BFM_B32": ("u", "u", 32, "((1 << (a & 31)) - 1) << (b & 31)", "-"),
    "S_BFM_B64": ("u", "u", 64, "((1 << (a & 63)) - 1) << (b & 63)", "-"),
    "S_MUL_I32": ("u", "u", 32, "a * b", "-"),
    "S_MUL_HI_U32": ("u", "u", 32, "a * b >> 32", "-"),
    "S_MUL_HI_I32": ("i", "i", 32, "a * b >> 32", "-"),
    "S_BFE_U32": ("u", "u", 32, "a >> (b & 31) & (1 << (b >> 16 & 127)) - 1", "n"),
    "S_BFE_I32": ("i", "u", 32, "signed_field(a >> (b & 31), b >> 16 & 127)", "n"),
    "S_BFE_U64": ("U", "u", 64, "a >> (b & 63) & (1 << (b >> 16 & 127)) - 1", "n"),
    "S_BFE_I64": ("I", "u", 64, "signed_field(a >> (b & 63), b >> 16 & 127)", "n"),
    "S_ABSDIFF_I32": ("i", "i", 32, "abs(signed32(a - b & 0xFFFFFFFF))", "n"),
    "S_LSHL1_ADD_U32": ("u", "u", 32, "(a << 1) + b", "r >> 32 != 0"),
    "S_LSHL2_ADD_U32": ("u", "u", 32, "(a << 2) + b", "r >> 32 != 0"),
    "S_LSHL3_ADD_U32": ("u", "u", 32, "(a << 3) + b", "r >> 32 != 0"),
    "S_LSHL4_ADD_U32": ("u", "u", 32, "(a << 4) + b", "r >> 32 != 0"),
    "S_PACK_LL_B32_B16": ("u", "u", 32, "b << 16 | a & 0xFFFF", "-"),
    "S_PACK_LH_B32_B16": ("u", "u", 32, "b & 0xFFFF0000 | a & 0xFFFF", "-"),
    "S_PACK_HH_B32_B16": ("u", "u", 32, "b & 0xFFFF0000 | a >> 16", "-"),
}

# name: (type of a, width of the result, expression, SCC)
SOP1 = {
    "S_MOV_B32": ("u", 32, "a", "-"),
    "S_MOV_B64": ("U", 64, "a", "-"),
    "S_NOT_B32": ("u", 32, "~a", "n"),
    "S_NOT_B64": ("U", 64, "~a", "n"),
    "S_WQM_B32": ("u", 32, "whole_quads(a)", "n"),
    "S_WQM_B64": ("U", 64, "whole_quads(a)", "n"),
    "S_BREV_B32": ("u", 32, "reversed_bits(a, 32)", "-"),
    "S_BREV_B64": ("U", 64, "reversed_bits(a, 64)", "-"),
    "S_BCNT0_I32_B32": ("u", 32, "32 - a.bit_count()", "n"),
    "S_BCNT0_I32_B64": ("U", 32, "64 - a.bit_count()", "n"),
    "S_BCNT1_I32_B32": ("u", 32, "a.bit_count()", "n"),
    "S_BCNT1_I32_B64": ("U", 32, "a.bit_count()", "n"),
    "S_FF0_I32_B32": ("u", 32, "first_one(a ^ 0xFFFFFFFF)", "-"),
    "S_FF0_I32_B64": ("U", 32, "first_one(a ^ 0xFFFFFFFFFFFFFFFF)", "-"),
    "S_FF1_I32_B32": ("u", 32, "first_one(a)", "-"),
    "S_FF1_I32_B64": ("U", 32, "first_one(a)", "-"),
    "S_FLBIT_I32_B32": ("u", 32, "32 - a.bit_length() if a else -1", "-"),
    "S_FLBIT_I32_B64": ("U", 32, "64 - a.bit_length() if a else -1", "-"),
    "S_FLBIT_I32": ("i", 32, "sign_run(a, 32)", "-"),
    "S_FLBIT_I32_I64": ("I", 32, "sign_run(a, 64)", "-"),
    "S_SEXT_I32_I8": ("u", 32, "(a & 0xFF ^ 0x80) - 0x80", "-"),
    "S_SEXT_I32_I16": ("u", 32, "(a & 0xFFFF ^ 0x8000) - 0x8000", "-"),
    "S_ABS_I32": ("i", 32, "abs(a)", "n"),
    "S_QUADMASK_B32": ("u", 32, "quad_mask(a)", "n"),
    "S_QUADMASK_B64": ("U", 64, "quad_mask(a)", "n"),
    "S_BITREPLICATE_B64_B32": ("u", 64, "replicated(a)", "-"),
}

_SAVEEXEC = {
    "AND": "a & e", "OR": "a | e", "XOR": "a ^ e", "ANDN2": "a & ~e", "ORN2": "a | ~e", "NAND": "~(a & e)",
    "NOR": "~(a | e)", "XNOR": "~(a ^ e)", "ANDN1": "~a & e", "ORN1": "~a | e",
}  # fmt: skip
_COMPARE = {"EQ": "==", "LG": "!=", "GT": ">", "GE": ">=", "LT": "<", "LE": "<="}


def signed32(value: int) -> int:
    return value - (1 << 32) if value >> 31 else value


def signed64(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value


def signed_field(value: int, width: int) -> int:
    if width == 0:
        return 0
    value &= (1 << width) - 1
    return value - (1 << width) if value >> (width - 1) else value


def first_one(value: int) -> int:
    return (value & -value).bit_length() - 1


def sign_run(value: int, width: int) -> int:
    """Position from the top of the first bit that differs from the sign; -1 where all are equal."""
    differing = ~value if value < 0 else value
    return width - differing.bit_length() if differing else -1


def reversed_bits(value: int, width: int) -> int:
    return int(f"{value:0{width}b}"[::-1], 2)


def quad_mask(value: int) -> int:
    return sum(1 << i for i in range(16) if value >> 4 * i & 15)


def whole_quads(value: int) -> int:
    return sum(15 << 4 * i for i in range(16) if value >> 4 * i & 15)


def replicated(value: int) -> int:
    return sum(3 << 2 * i for i in range(32) if value >> i & 1)


HELPERS = {
    function.__name__: function
    for function in (
        signed32, signed64, signed_field, first_one, sign_run, reversed_bits, quad_mask, whole_quads, replicated,
    )
}  # fmt: skip


def _operand(e: Emitter, ins: Instruction, name: str, kind: str) -> str:
    return e.scalar(ins, name, wide=kind in "UI", signed=kind in "iI")


def _result(e: Emitter, ins: Instruction, number: int, width: int, expression: str, scc: str) -> None:
    """Writes an expression of ``a`` and ``b`` and sets SCC."""
    mask = (1 << width) - 1
    if scc in "-n":
        e.line(f"r = ({expression}) & {mask:#x}")
        e.put_sgpr(number, "r", wide=width == 64)
        if scc == "n":
            e.line("w.scc = 1 if r else 0")
    else:
        e.line(f"r = {expression}")
        e.line(f"w.scc = int({scc})")
        e.line(f"r &= {mask:#x}")
        e.put_sgpr(number, "r", wide=width == 64)
    if number in (EXEC, EXEC + 1):
        e.exec_changed(ins)


def sop2(e: Emitter, ins: Instruction) -> None:
    row = SOP2.get(ins.name)
    if row is None:
        raise unknown(ins, "not modelled", e.target.kernel)
    type_a, type_b, width, expression, scc = row
    e.line(f"a = {_operand(e, ins, 'ssrc0', type_a)}")
    e.line(f"b = {_operand(e, ins, 'ssrc1', type_b)}")
    _result(e, ins, ins.bits("sdst"), width, expression, scc)


def sop1(e: Emitter, ins: Instruction) -> None:
    name, destination = ins.name, ins.bits("sdst")
    if name in SOP1:
        kind, width, expression, scc = SOP1[name]
        e.line(f"a = {_operand(e, ins, 'ssrc0', kind)}")
        _result(e, ins, destination, width, expression, scc)
    elif name.endswith(("_SAVEEXEC_B64", "_WREXEC_B64")):
        operation = _SAVEEXEC[name.split("_")[1]]
        e.line(f"a = {_operand(e, ins, 'ssrc0', 'U')}")
        e.line(f"e = {e.sgpr(EXEC, wide=True)}")
        e.line(f"r = ({operation}) & 0xFFFFFFFFFFFFFFFF")
        e.put_sgpr(destination, "r" if "WREXEC" in name else "e", wide=True)
        e.put_sgpr(EXEC, "r", wide=True)
        e.line("w.scc = 1 if r else 0")
        e.exec_changed(ins)
    elif name in ("S_CMOV_B32", "S_CMOV_B64"):
        wide = name.endswith("64")
        e.line(f"r = {_operand(e, ins, 'ssrc0', 'U' if wide else 'u')} if w.scc else {e.sgpr(destination, wide)}")
        e.put_sgpr(destination, "r", wide)
        if destination == EXEC:
            e.exec_changed(ins)
    elif name.startswith("S_BITSET"):
        wide = name.endswith("64")
        e.line(f"a = 1 << ({_operand(e, ins, 'ssrc0', 'u')} & {63 if wide else 31})")
        old = e.sgpr(destination, wide)
        e.put_sgpr(destination, f"({old} | a)" if "SET1" in name else f"({old} & ~a)", wide)
        if destination in (EXEC, EXEC + 1):
            e.exec_changed(ins)
    elif name == "S_GETPC_B64":
        e.put_sgpr(destination, str(ins.pc + ins.size + e.target.load_address), wide=True)
    elif name in ("S_SETPC_B64", "S_SWAPPC_B64"):
        e.line(f"a = {_operand(e, ins, 'ssrc0', 'U')} - {e.target.load_address}")
        if name == "S_SWAPPC_B64":
            e.put_sgpr(destination, str(ins.pc + ins.size + e.target.load_address), wide=True)
        e.leave("a")
    else:
        raise unknown(ins, "not modelled", e.target.kernel)


def sopc(e: Emitter, ins: Instruction) -> None:
    parts = ins.name.split("_")
    if parts[1] == "CMP":
        kind = {"I32": "i", "U32": "u", "U64": "U"}[parts[3]]
        a, b = (_operand(e, ins, name, kind) for name in ("ssrc0", "ssrc1"))
        e.line(f"w.scc = int({a} {_COMPARE[parts[2]]} {b})")
    elif parts[1] in ("BITCMP0", "BITCMP1"):
        wide = parts[2] == "B64"
        a, b = _operand(e, ins, "ssrc0", "U" if wide else "u"), _operand(e, ins, "ssrc1", "u")
        flip = " ^ 1" if parts[1] == "BITCMP0" else ""
        e.line(f"w.scc = ({a} >> ({b} & {63 if wide else 31}) & 1){flip}")
    else:
        raise unknown(ins, "not modelled", e.target.kernel)


# Hardware registers by number: MODE (rounding, denormals) and TRAPSTS, which no kernel here needs.
_FP16_OVFL = 23  # bit of MODE
_HW_MODE = 1


def sopk(e: Emitter, ins: Instruction) -> None:
    name, destination = ins.name, ins.bits("sdst")
    immediate = ins.bits("simm16")
    signed = (immediate ^ 0x8000) - 0x8000
    if name == "S_MOVK_I32":
        e.put_sgpr(destination, str(signed & 0xFFFFFFFF))
    elif name == "S_CMOVK_I32":
        e.put_sgpr(destination, f"{signed & 0xFFFFFFFF} if w.scc else {e.sgpr(destination)}")
    elif name.startswith("S_CMPK_"):
        operator = _COMPARE[name.split("_")[2]]
        is_signed = name.endswith("I32")
        value = signed if is_signed else immediate
        e.line(f"w.scc = int({e.sgpr(destination, signed=is_signed)} {operator} {value})")
    elif name == "S_ADDK_I32":
        e.line(f"r = {e.sgpr(destination, signed=True)} + {signed}")
        e.line(f"w.scc = int({_SIGNED_OVERFLOW})")
        e.put_sgpr(destination, "r & 0xFFFFFFFF")
    elif name == "S_MULK_I32":
        e.put_sgpr(destination, f"{e.sgpr(destination)} * {signed} & 0xFFFFFFFF")
    elif name == "S_CALL_B64":
        e.put_sgpr(destination, str(ins.pc + ins.size + e.target.load_address), wide=True)
        e.leave(str(ins.target))
    elif name in ("S_SETREG_B32", "S_SETREG_IMM32_B32"):
        _setreg(e, ins, immediate)
    else:
        raise unknown(ins, "not modelled", e.target.kernel)
    if destination in (EXEC, EXEC + 1) and not e.ended:
        e.exec_changed(ins)


def _setreg(e: Emitter, ins: Instruction, immediate: int) -> None:
    """Writing MODE is accepted where it changes nothing, and to FP16_OVFL, of which fp8 conversions alone take note."""
    register, offset, size = immediate & 63, immediate >> 6 & 31, (immediate >> 11) + 1
    mode = e.target.float_mode
    if (register, offset, size, ins.name) == (_HW_MODE, _FP16_OVFL, 1, "S_SETREG_IMM32_B32"):
        e.line(f"w.saturates = {bool(ins.literal & 1)}")
        return
    if register != _HW_MODE or offset + size > 8 or ins.name != "S_SETREG_IMM32_B32":
        raise unknown(ins, f"hardware register {register}, bits {offset} to {offset + size - 1}", e.target.kernel)
    wanted = ins.literal & (1 << size) - 1
    if wanted != mode >> offset & (1 << size) - 1:
        raise unknown(ins, f"a change of the float mode {mode:#x}", e.target.kernel)


def carry_register(ins: Instruction) -> int:
    """Where a carry or compare goes: VCC in the short encodings."""
    return ins.bits("sdst") if ins.has("sdst") else VCC
