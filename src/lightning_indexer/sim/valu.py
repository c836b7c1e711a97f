"""Vector arithmetic: VOP1, VOP2, VOP3. Each row: types of the result and the operands, and an expression.

``{0} {1} {2}`` are the operands, ``{d}`` the old value of the destination (multiply-accumulate), ``{o}`` the place of
numpy's output argument. Types are those of ``emit``; result types ``H`` and ``E`` are ``h`` and ``e`` that keep the
upper half of the register.
"""

from __future__ import annotations

from lightning_indexer.sim import compare, convert, crosslane
from lightning_indexer.sim.decode import VCC, VGPR0, Instruction
from lightning_indexer.sim.emit import Emitter, unknown
from lightning_indexer.sim.salu import carry_register

Row = tuple[str, str, str]

INTEGER: dict[str, Row] = {
    "MOV_B32": ("u", "u", "{0}"),
    "MOV_B64": ("U", "U", "{0}"),
    "NOT_B32": ("u", "u", "invert({0}{o})"),
    "BFREV_B32": ("u", "u", "reverse({0})"),
    "FFBH_U32": ("u", "u", "count_leading({0})"),
    "FFBL_B32": ("u", "u", "count_trailing({0})"),
    "FFBH_I32": ("u", "u", "count_sign({0})"),
    "SAT_PK_U8_I16": ("h", "u", "pack_bytes(*({0}.view(int16).reshape(64, 2).clip(0, 255).T))"),
    "PRNG_B32": ("u", "u", "({0} << N1) ^ (({0} >> N31) * uint32(197))"),
    "ADD_U32": ("u", "uu", "add({0}, {1}{o})"),
    "SUB_U32": ("u", "uu", "subtract({0}, {1}{o})"),
    "SUBREV_U32": ("u", "uu", "subtract({1}, {0}{o})"),
    "ADD_I32": ("u", "uu", "add({0}, {1}{o})"),
    "SUB_I32": ("u", "uu", "subtract({0}, {1}{o})"),
    "AND_B32": ("u", "uu", "bitwise_and({0}, {1}{o})"),
    "OR_B32": ("u", "uu", "bitwise_or({0}, {1}{o})"),
    "XOR_B32": ("u", "uu", "bitwise_xor({0}, {1}{o})"),
    "XNOR_B32": ("u", "uu", "invert(bitwise_xor({0}, {1}){o})"),
    "LSHLREV_B32": ("u", "nu", "left_shift({1}, {0}{o})"),
    "LSHRREV_B32": ("u", "nu", "right_shift({1}, {0}{o})"),
    "ASHRREV_I32": ("i", "ni", "right_shift({1}, {0}.view(int32){o})"),
    "MIN_I32": ("i", "ii", "minimum({0}, {1}{o})"),
    "MAX_I32": ("i", "ii", "maximum({0}, {1}{o})"),
    "MIN_U32": ("u", "uu", "minimum({0}, {1}{o})"),
    "MAX_U32": ("u", "uu", "maximum({0}, {1}{o})"),
    "MUL_LO_U32": ("u", "uu", "multiply({0}, {1}{o})"),
    "MUL_HI_U32": ("u", "uu", "mul_hi_u32({0}, {1})"),
    "MUL_HI_I32": ("i", "ii", "mul_hi_i32({0}, {1})"),
    "MUL_U32_U24": ("u", "uu", "multiply({0} & N24BIT, {1} & N24BIT{o})"),
    "MUL_I32_I24": ("i", "uu", "multiply(signed24({0}), signed24({1}){o})"),
    "MUL_HI_U32_U24": ("u", "uu", "mul_hi_u32({0} & N24BIT, {1} & N24BIT)"),
    "MUL_HI_I32_I24": ("i", "uu", "mul_hi_i32(signed24({0}), signed24({1}))"),
    "MAD_U32_U24": ("u", "uuu", "add(multiply({0} & N24BIT, {1} & N24BIT), {2}{o})"),
    "MAD_I32_I24": ("i", "uui", "add(multiply(signed24({0}), signed24({1})), {2}{o})"),
    "MAD_U32_U16": ("u", "hhu", "add(multiply({0}.astype(uint32), {1}), {2}{o})"),
    "MAD_I32_I16": ("i", "ssi", "add(multiply({0}.astype(int32), {1}), {2}{o})"),
    "ADD3_U32": ("u", "uuu", "add(add({0}, {1}), {2}{o})"),
    "ADD_LSHL_U32": ("u", "uun", "left_shift(add({0}, {1}), {2}{o})"),
    "LSHL_ADD_U32": ("u", "unu", "add(left_shift({0}, {1}), {2}{o})"),
    "LSHL_OR_B32": ("u", "unu", "bitwise_or(left_shift({0}, {1}), {2}{o})"),
    "AND_OR_B32": ("u", "uuu", "bitwise_or(bitwise_and({0}, {1}), {2}{o})"),
    "OR3_B32": ("u", "uuu", "bitwise_or(bitwise_or({0}, {1}), {2}{o})"),
    "XAD_U32": ("u", "uuu", "add(bitwise_xor({0}, {1}), {2}{o})"),
    "BFI_B32": ("u", "uuu", "bitwise_or({0} & {1}, ~{0} & {2}{o})"),
    "BFE_U32": ("u", "unn", "bfe_u32({0}, {1}, {2})"),
    "BFE_I32": ("i", "unn", "bfe_i32({0}, {1}, {2})"),
    "BFM_B32": ("u", "nn", "left_shift((uint32(1) << {0}) - uint32(1), {1}{o})"),
    "PERM_B32": ("u", "uuu", "permute_bytes({0}, {1}, {2})"),
    "ALIGNBIT_B32": ("u", "uun", "align({0}, {1}, {2})"),
    "ALIGNBYTE_B32": ("u", "uuu", "align({0}, {1}, ({2} & uint32(3)) * uint32(8))"),
    "BCNT_U32_B32": ("u", "uu", "add(np.bitwise_count({0}), {1}{o})"),
    "MBCNT_LO_U32_B32": ("u", "uu", "add(np.bitwise_count({0} & BELOW_LOW), {1}{o})"),
    "MBCNT_HI_U32_B32": ("u", "uu", "add(np.bitwise_count({0} & BELOW_HIGH), {1}{o})"),
    "MIN3_I32": ("i", "iii", "minimum(minimum({0}, {1}), {2}{o})"),
    "MAX3_I32": ("i", "iii", "maximum(maximum({0}, {1}), {2}{o})"),
    "MIN3_U32": ("u", "uuu", "minimum(minimum({0}, {1}), {2}{o})"),
    "MAX3_U32": ("u", "uuu", "maximum(maximum({0}, {1}), {2}{o})"),
    "MED3_I32": ("i", "iii", "med3({0}, {1}, {2})"),
    "MED3_U32": ("u", "uuu", "med3({0}, {1}, {2})"),
    "SAD_U8": ("u", "uuu", "sad_u8({0}, {1}, {2})"),
    "SAD_HI_U8": ("u", "uuu", "add(sad_u8({0}, {1}, K[0]) << uint32(16), {2}{o})"),
    "SAD_U16": ("u", "uuu", "sad_u16({0}, {1}, {2})"),
    "SAD_U32": ("u", "uuu", "sad_u32({0}, {1}, {2})"),
    "LERP_U8": ("u", "uuu", "lerp_u8({0}, {1}, {2})"),
    "LSHLREV_B64": ("U", "wU", "left_shift({1}, {0})"),
    "LSHRREV_B64": ("U", "wU", "right_shift({1}, {0})"),
    "ASHRREV_I64": ("I", "wI", "right_shift({1}, {0}.view(int64))"),
    "LSHL_ADD_U64": ("U", "UwU", "add(left_shift({0}, {1}), {2})"),
    "ASHR_PK_I8_I32": ("H", "iin", "pack_bytes(*(({x} >> {2}.view(int32)).clip(-128, 127) for {x} in ({0}, {1})))"),
    "ASHR_PK_U8_I32": ("H", "iin", "pack_bytes(*(({x} >> {2}.view(int32)).clip(0, 255) for {x} in ({0}, {1})))"),
    # 16 bits.
    "ADD_U16": ("h", "hh", "add({0}, {1})"),
    "SUB_U16": ("h", "hh", "subtract({0}, {1})"),
    "SUBREV_U16": ("h", "hh", "subtract({1}, {0})"),
    "ADD_I16": ("H", "hh", "add({0}, {1})"),
    "SUB_I16": ("H", "hh", "subtract({0}, {1})"),
    "MUL_LO_U16": ("h", "hh", "multiply({0}, {1})"),
    "LSHLREV_B16": ("h", "kh", "left_shift({1}, {0})"),
    "LSHRREV_B16": ("h", "kh", "right_shift({1}, {0})"),
    "ASHRREV_I16": ("s", "ks", "right_shift({1}, {0}.view(int16))"),
    "MAX_U16": ("h", "hh", "maximum({0}, {1})"),
    "MIN_U16": ("h", "hh", "minimum({0}, {1})"),
    "MAX_I16": ("s", "ss", "maximum({0}, {1})"),
    "MIN_I16": ("s", "ss", "minimum({0}, {1})"),
    "MAD_U16": ("H", "hhh", "{0} * {1} + {2}"),
    "MAD_I16": ("H", "hhh", "{0} * {1} + {2}"),
    "MAD_LEGACY_U16": ("h", "hhh", "{0} * {1} + {2}"),
    "MAD_LEGACY_I16": ("h", "hhh", "{0} * {1} + {2}"),
    "MIN3_I16": ("S", "sss", "minimum(minimum({0}, {1}), {2})"),
    "MAX3_I16": ("S", "sss", "maximum(maximum({0}, {1}), {2})"),
    "MIN3_U16": ("H", "hhh", "minimum(minimum({0}, {1}), {2})"),
    "MAX3_U16": ("H", "hhh", "maximum(maximum({0}, {1}), {2})"),
    "MED3_I16": ("S", "sss", "med3({0}, {1}, {2})"),
    "MED3_U16": ("H", "hhh", "med3({0}, {1}, {2})"),
    "PACK_B32_F16": ("u", "ee", "halves({0}, {1})"),
}

FLOAT: dict[str, Row] = {
    "ADD_F32": ("f", "ff", "add({0}, {1}{o})"),
    "SUB_F32": ("f", "ff", "subtract({0}, {1}{o})"),
    "SUBREV_F32": ("f", "ff", "subtract({1}, {0}{o})"),
    "MUL_F32": ("f", "ff", "multiply({0}, {1}{o})"),
    "MUL_LEGACY_F32": ("f", "ff", "where(({0} == 0) | ({1} == 0), ZERO, {0} * {1})"),
    "MIN_F32": ("f", "ff", "min_f32({0}, {1})"),
    "MAX_F32": ("f", "ff", "max_f32({0}, {1})"),
    "FMA_F32": ("f", "fff", "fma_f32({0}, {1}, {2})"),
    "FMAC_F32": ("f", "ff", "fma_f32({0}, {1}, {d})"),
    "MIN3_F32": ("f", "fff", "min_f32(min_f32({0}, {1}), {2})"),
    "MAX3_F32": ("f", "fff", "max_f32(max_f32({0}, {1}), {2})"),
    "MED3_F32": ("f", "fff", "med3_f32({0}, {1}, {2})"),
    "MINIMUM3_F32": ("f", "fff", "minimum3_f32({0}, {1}, {2})"),
    "MAXIMUM3_F32": ("f", "fff", "maximum3_f32({0}, {1}, {2})"),
    "FRACT_F32": ("f", "f", "fract({0})"),
    "TRUNC_F32": ("f", "f", "trunc({0}{o})"),
    "CEIL_F32": ("f", "f", "ceil({0}{o})"),
    "RNDNE_F32": ("f", "f", "rint({0}{o})"),
    "FLOOR_F32": ("f", "f", "floor({0}{o})"),
    "EXP_F32": ("f", "f", "exp_f32({0})"),
    "LOG_F32": ("f", "f", "log_f32({0})"),
    "RCP_F32": ("f", "f", "rcp_f32({0})"),
    "RCP_IFLAG_F32": ("f", "f", "rcp_f32({0})"),
    "RSQ_F32": ("f", "f", "rsq_f32({0})"),
    "SQRT_F32": ("f", "f", "sqrt_f32({0})"),
    "SIN_F32": ("f", "f", "sin_f32({0})"),
    "COS_F32": ("f", "f", "cos_f32({0})"),
    "LDEXP_F32": ("f", "fu", "ldexp_f32({0}, {1})"),
    "FREXP_MANT_F32": ("f", "f", "frexp_mant({0})"),
    "FREXP_EXP_I32_F32": ("i", "f", "frexp_exp({0})"),
    "DIV_FIXUP_F32": ("f", "fff", "div_fixup({0}, {1}, {2})"),
    # 64 bits.
    "ADD_F64": ("d", "dd", "{0} + {1}"),
    "MUL_F64": ("d", "dd", "{0} * {1}"),
    "MIN_F64": ("d", "dd", "min_f64({0}, {1})"),
    "MAX_F64": ("d", "dd", "max_f64({0}, {1})"),
    "FMA_F64": ("d", "ddd", "fma_f64({0}, {1}, {2})"),
    "FMAC_F64": ("d", "dd", "fma_f64({0}, {1}, {d})"),
    "LDEXP_F64": ("d", "du", "ldexp_f64({0}, {1})"),
    "TRUNC_F64": ("d", "d", "trunc({0})"),
    "CEIL_F64": ("d", "d", "ceil({0})"),
    "RNDNE_F64": ("d", "d", "rint({0})"),
    "FLOOR_F64": ("d", "d", "floor({0})"),
    "FRACT_F64": ("d", "d", "fract({0})"),
    "FREXP_MANT_F64": ("d", "d", "frexp_mant({0})"),
    "FREXP_EXP_I32_F64": ("i", "d", "frexp_exp({0})"),
    # 16 bits.
    "ADD_F16": ("e", "ee", "{0} + {1}"),
    "SUB_F16": ("e", "ee", "{0} - {1}"),
    "SUBREV_F16": ("e", "ee", "{1} - {0}"),
    "MUL_F16": ("e", "ee", "{0} * {1}"),
    "MIN_F16": ("e", "ee", "min_f16({0}, {1})"),
    "MAX_F16": ("e", "ee", "max_f16({0}, {1})"),
    "LDEXP_F16": ("e", "es", "np.ldexp({0}.astype(float64), {1}).astype(float16)"),
    "FMA_F16": ("E", "eee", "fma_f16({0}, {1}, {2})"),
    "FMA_LEGACY_F16": ("e", "eee", "fma_f16({0}, {1}, {2})"),
    "MIN3_F16": ("E", "eee", "min_f16(min_f16({0}, {1}), {2})"),
    "MAX3_F16": ("E", "eee", "max_f16(max_f16({0}, {1}), {2})"),
    "MED3_F16": ("E", "eee", "med3_f16({0}, {1}, {2})"),
    "TRUNC_F16": ("e", "e", "trunc({0})"),
    "CEIL_F16": ("e", "e", "ceil({0})"),
    "RNDNE_F16": ("e", "e", "rint({0})"),
    "FLOOR_F16": ("e", "e", "floor({0})"),
    "FRACT_F16": ("e", "e", "fract({0})"),
    "RCP_F16": ("e", "e", "(1.0 / {0}.astype(float64)).astype(float16)"),
    "RSQ_F16": ("e", "e", "(1.0 / sqrt({0}.astype(float64))).astype(float16)"),
    "SQRT_F16": ("e", "e", "sqrt({0}.astype(float64)).astype(float16)"),
    "EXP_F16": ("e", "e", "exp2({0}.astype(float64)).astype(float16)"),
    "LOG_F16": ("e", "e", "log2({0}.astype(float64)).astype(float16)"),
    "SIN_F16": ("e", "e", "sin_f32({0}.astype(float32)).astype(float16)"),
    "COS_F16": ("e", "e", "cos_f32({0}.astype(float32)).astype(float16)"),
    "FREXP_MANT_F16": ("e", "e", "frexp_mant({0})"),
    "FREXP_EXP_I16_F16": ("s", "e", "frexp_exp({0}).astype(int16)"),
}

ROWS: dict[str, Row] = {**INTEGER, **FLOAT, **convert.ROWS}
_CLAMP = {"f": "clamp_f32({})", "d": "clamp_f64({})", "e": "clamp_f16({})"}
_SOURCES = ("src0", "src1", "src2")


def emit(e: Emitter, ins: Instruction) -> None:
    name = ins.name.removeprefix("V_")
    if name in ROWS:
        _row(e, ins, *ROWS[name])
    elif name.startswith("CMP"):
        compare.emit(e, ins)
    elif name in ("CNDMASK_B32",):
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
        raise unknown(ins, "not modelled", e.program.name)


def source(e: Emitter, ins: Instruction, index: int, kind: str) -> str:
    """Operand ``index`` with its modifiers: neg, abs, SDWA selection, DPP, op_sel."""
    field = _SOURCES[index]
    if not ins.has(field):
        field = "v" + field
    high = bool(ins.bits("opsel") >> index & 1)
    if ins.variant in ("SDWA", "DPP") and index < 2:
        register = crosslane.selected(e, ins, index)
        text = register if kind == "u" else e.cast(register, kind)
    else:
        text = e.vector(ins, field, kind, high=high)
    negate, absolute = modifiers(ins, index)
    if negate or absolute:
        if kind not in "fde":
            raise unknown(ins, f"a sign modifier on operand {index}, which is no float", e.program.name)
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
        raise unknown(ins, "clamp", e.program.name)
    if ins.bits("opsel") & ~opsel:
        raise unknown(ins, f"op_sel {ins.bits('opsel'):#x}", e.program.name)


def destination(ins: Instruction) -> int:
    return ins.bits("vdst") - VGPR0


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
    if mask_register < 128:
        bits = e.sgpr(mask_register, wide=True)
    else:
        bits = e.scalar(ins, "src2", wide=True)
    target = f"{'v' if kind == 'u' else 'f'}[{number}]"
    if (e.full and ins.variant == "") or (e.full and ins.variant == "LIT"):
        e.use_vgpr(number)
        if one == target:
            e.line(f"copyto({target}, {zero}, where=masks[{bits} ^ FULL])")
            return
        if zero != target:
            e.line(f"{target}[:] = {zero}")
        e.line(f"copyto({target}, {one}, where=masks[{bits}])")
        return
    store(e, ins, number, kind, f"where(masks[{bits}], {one}, {zero})")


# name: (minuend first, takes a carry, subtracts)
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
        raise unknown(ins, "clamp", e.program.name)
    narrow = ins.name.endswith("B16")
    if not narrow and ins.bits("opsel"):
        raise unknown(ins, "op_sel", e.program.name)
    opsel = ins.bits("opsel")
    kind = "h" if narrow else "u"
    operands = [e.vector(ins, name, kind, high=bool(opsel >> index & 1)) for index, name in enumerate(_SOURCES)]
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
