"""Vector arithmetic: VOP1, VOP2, VOP3. Most of it are the rows of ``valurows`` and ``convert``."""

from __future__ import annotations

from cdna_sim.isa.decode import Instruction
from cdna_sim.isa.fields import VCC, VGPR0
from cdna_sim.ops import compare, convert, crosslane
from cdna_sim.ops.emit import Emitter, unknown
from cdna_sim.ops.operands import SOURCES, check_modifiers, destination, modifiers, source
from cdna_sim.ops.salu import carry_register
from cdna_sim.ops.valu_rows import FLOAT, INTEGER, Row

ROWS: dict[str, Row] = {**INTEGER, **FLOAT, **convert.ROWS}
_CLAMP = {"f": "clamp_f32({})", "d": "clamp_f64({})", "e": "clamp_f16({})"}


def emit(e: Emitter, ins: Instruction) -> None:
    name = ins.name.removeprefix("V_")
    if name in ROWS:
        _row(e, ins, *ROWS[name])
    elif name.startswith("CMP"):
        compare.emit(e, ins)
    elif name == "CNDMASK_B32":
        _cndmask(e, ins)
    elif name in _CARRIES:
        _carry(e, ins, *_CARRIES[name])
    elif name in ("MAD_U64_U32", "MAD_I64_I32"):
        _mad64(e, ins)
    elif name in ("BITOP3_B32", "BITOP3_B16"):
        _bitop3(e, ins)
    elif name in ("FMAMK_F32", "FMAAK_F32", "MADMK_F16", "MADAK_F16"):
        _literal_fma(e, ins)
    elif name == "NOP":
        pass
    elif name in convert.EMIT:
        convert.EMIT[name](e, ins)
    elif name in crosslane.EMIT:
        crosslane.EMIT[name](e, ins)
    else:
        raise unknown(ins, "not modelled", e.target.kernel)


def _row(e: Emitter, ins: Instruction, result: str, operands: str, expression: str) -> None:
    clamp = bool(ins.bits("clmp"))
    halves = 8 if result in "HSE" else 0
    for index, kind in enumerate(operands):
        # Only the opcodes that gfx9 added select halves of their 16-bit operands.
        if kind in "hse" and result in "HSEui":
            halves |= 1 << index
    check_modifiers(e, ins, clamp=clamp and (result in "fde" or ins.name in _SATURATING), opsel=halves)
    number = destination(ins)
    if ins.name == "V_MAX_F32" and not clamp and _fast_max(e, ins, number):
        return
    values = [source(e, ins, index, kind) for index, kind in enumerate(operands)]
    if ins.name == "V_PERM_B32" and ins.bits("src2") < VGPR0:
        expression, values[2] = "permute_bytes_alike({0}, {1}, {2})", e.scalar(ins, "src2")
    if "{d}" in expression:
        expression = expression.replace("{d}", e.vgpr(number, result.lower()))
    expression = expression.replace("{x}", "x")
    for index, value in enumerate(values):
        expression = expression.replace(f"{{{index}}}", value)
    if clamp:
        expression = expression.replace("{o}", "")
        if ins.name in _SATURATING:
            expression = _SATURATING[ins.name].format(*values)
        else:
            expression = _CLAMP[result.lower()].format(expression)
    store(e, ins, number, result, expression)


# Integer clamp saturates.
_SATURATING = {
    "V_ADD_U32": "minimum({0}.astype(uint64) + {1}, LOW32).astype(uint32)",
    "V_SUB_U32": "where({0} > {1}, {0} - {1}, K[0])",
    "V_SUBREV_U32": "where({1} > {0}, {1} - {0}, K[0])",
    "V_ADD_I32": "({0}.view(int32).astype(int64) + {1}.view(int32)).clip(-2**31, 2**31 - 1).astype(int32).view(uint32)",
    "V_SUB_I32": "({0}.view(int32).astype(int64) - {1}.view(int32)).clip(-2**31, 2**31 - 1).astype(int32).view(uint32)",
    "V_ADD_U16": "minimum({0}.astype(uint32) + {1}, 65535).astype(uint16)",
    "V_SUB_U16": "where({0} > {1}, {0} - {1}, uint16(0))",
}


def _fast_max(e: Emitter, ins: Instruction, number: int) -> bool:
    """Two common forms: max(x, x), which compilers use to quiet NaNs, and max(x, 0), a ReLU."""
    if ins.variant in ("SDWA", "DPP") or ins.bits("neg") or ins.bits("abs"):
        return False
    second = "src1" if ins.has("src1") else "vsrc1"
    first = ins.bits("src0")
    if first == ins.bits(second):
        e.put(number, "f", f"quieted({source(e, ins, 0, 'f')})")
        return True
    if first == 128 or ins.bits(second) == 128:
        value = source(e, ins, 1 if first == 128 else 0, "f")
        e.put(number, "f", f"relu({value})")
        return True
    return False


def store(e: Emitter, ins: Instruction, number: int, result: str, expression: str) -> None:
    """Writes a result, through SDWA's or DPP's masks where the instruction has them."""
    if ins.variant == "SDWA":
        crosslane.store_sdwa(e, ins, number, result.lower(), expression)
        return
    mask = crosslane.dpp_mask(e, ins) if ins.variant == "DPP" else None
    if result in "HSE":
        text = f"({expression.replace('{o}', '')})"
        text = text if result == "H" else f"{text}.view(uint16)"
        if ins.bits("opsel") & 8:
            e.put(number, "h", text, mask, high=True)
        else:
            e.put_low(number, text)
        return
    e.put(number, result, expression, mask)


def _cndmask(e: Emitter, ins: Instruction) -> None:
    check_modifiers(e, ins)
    number = destination(ins)
    mask_register = ins.bits("src2") if ins.format == "VOP3" else VCC
    kind = "f" if any(any(modifiers(ins, index)) for index in (0, 1)) else "u"
    zero, one = source(e, ins, 0, kind), source(e, ins, 1, kind)
    bits = e.sgpr(mask_register, wide=True) if mask_register < 128 else e.scalar(ins, "src2", wide=True)
    target = f"{'v' if kind == 'u' else 'f'}[{number}]"
    if e.full and ins.variant in ("", "LIT"):
        e.write_vgpr(number)
        if one == target:
            e.line(f"copyto({target}, {zero}, where=masks[{bits} ^ FULL])")
            return
        if zero != target:
            e.line(f"{target}[:] = {zero}")
        e.line(f"copyto({target}, {one}, where=masks[{bits}])")
        return
    store(e, ins, number, kind, f"where(masks[{bits}], {one}, {zero})")


# name: (the sum in 64 bits, whether it takes a carry)
_CARRIES = {
    "ADD_CO_U32": ("{0}.astype(uint64) + {1}", False),
    "SUB_CO_U32": ("{0}.astype(int64) - {1}", False),
    "SUBREV_CO_U32": ("{1}.astype(int64) - {0}", False),
    "ADDC_CO_U32": ("{0}.astype(uint64) + {1} + {c}", True),
    "SUBB_CO_U32": ("{0}.astype(int64) - {1} - {c}", True),
    "SUBBREV_CO_U32": ("{1}.astype(int64) - {0} - {c}", True),
}


def _carry(e: Emitter, ins: Instruction, expression: str, takes_carry: bool) -> None:
    check_modifiers(e, ins)
    number = destination(ins)
    text = expression.replace("{0}", source(e, ins, 0, "u")).replace("{1}", source(e, ins, 1, "u"))
    if takes_carry:
        register = ins.bits("src2") if ins.format == "VOP3SD" else VCC
        text = text.replace("{c}", f"masks[{e.sgpr(register, wide=True)}]")
    name = e.temporary()
    e.line(f"{name} = {text}")
    e.put_mask(ins, carry_register(ins) if ins.format == "VOP3SD" else VCC, f"({name} >> 32) != 0")
    store(e, ins, number, "u", f"{name}.astype(uint32)")


def _mad64(e: Emitter, ins: Instruction) -> None:
    check_modifiers(e, ins)
    signed = ins.name == "V_MAD_I64_I32"
    narrow, wide, dtype = ("i", "I", "int64") if signed else ("u", "U", "uint64")
    a, b = source(e, ins, 0, narrow), source(e, ins, 1, narrow)
    c = e.vector(ins, "src2", wide)
    product, total = e.temporary(), e.temporary()
    e.line(f"{product} = multiply({a}, {b}, dtype={dtype})")
    c_name = e.temporary()
    e.line(f"{c_name} = {c}")
    e.line(f"{total} = {product} + {c_name}")
    # The carry or overflow out of 64 bits.
    overflow = f"(({product} ^ {total}) & ({c_name} ^ {total})) < 0" if signed else f"{total} < {product}"
    e.put_mask(ins, ins.bits("sdst"), overflow)
    e.put(destination(ins), wide, total)


def _bitop3(e: Emitter, ins: Instruction) -> None:
    """The truth table lies where other instructions have omod, abs and neg."""
    table = ins.bits("omod") << 6 | ins.bits("abs") << 3 | ins.bits("neg")
    if ins.bits("clmp"):
        raise unknown(ins, "clamp", e.target.kernel)
    narrow = ins.name.endswith("B16")
    if not narrow and ins.bits("opsel"):
        raise unknown(ins, "op_sel", e.target.kernel)
    opsel = ins.bits("opsel")
    kind = "h" if narrow else "u"
    operands = [e.vector(ins, name, kind, high=bool(opsel >> index & 1)) for index, name in enumerate(SOURCES)]
    if narrow:
        operands = [f"{text}.astype(uint32)" for text in operands]
    text = _BITOP3.get(table, f"bit_op3({{0}}, {{1}}, {{2}}, {table}){{o}}")
    known = table in _BITOP3
    for index, operand in enumerate(operands):
        text = text.replace(f"{{{index}}}", operand)
    if narrow:
        text = f"({text.replace('{o}', '')}).astype(uint16)"
        store(e, ins, destination(ins), "H", text)
    else:
        e.put(destination(ins), "u", text if known else text.replace("{o}", ""))


# Truth tables that compilers use, with a = 0xF0, b = 0xCC, c = 0xAA.
_BITOP3 = {
    0x80: "bitwise_and(bitwise_and({0}, {1}), {2}{o})",
    0xFE: "bitwise_or(bitwise_or({0}, {1}), {2}{o})",
    0x96: "bitwise_xor(bitwise_xor({0}, {1}), {2}{o})",
    0x6C: "bitwise_xor(bitwise_and({0}, {2}), {1}{o})",
    0x78: "bitwise_xor(bitwise_and({1}, {2}), {0}{o})",
    0xEA: "bitwise_or(bitwise_and({0}, {1}), {2}{o})",
    0xEC: "bitwise_or(bitwise_and({0}, {2}), {1}{o})",
    0xF8: "bitwise_or(bitwise_and({1}, {2}), {0}{o})",
    0xC8: "bitwise_and(bitwise_or({0}, {2}), {1}{o})",
    0xE0: "bitwise_and(bitwise_or({1}, {2}), {0}{o})",
    0xA8: "bitwise_and(bitwise_or({0}, {1}), {2}{o})",
    0x36: "bitwise_xor(bitwise_or({0}, {2}), {1}{o})",
    0x1E: "bitwise_xor(bitwise_or({1}, {2}), {0}{o})",
    0x56: "bitwise_xor(bitwise_or({0}, {1}), {2}{o})",
}


def _literal_fma(e: Emitter, ins: Instruction) -> None:
    """D = S0 * K + S1 (MK) or S0 * S1 + K (AK), with a literal K."""
    half = ins.name.endswith("F16")
    kind = "e" if half else "f"
    a, b, k = e.vector(ins, "src0", kind), e.vector(ins, "vsrc1", kind), e.const_lanes(ins.literal, kind)
    second, third = (k, b) if "MK_" in ins.name else (b, k)
    e_kind = "E" if half else "f"
    store(e, ins, destination(ins), e_kind, f"fma_f{16 if half else 32}({a}, {second}, {third})")
