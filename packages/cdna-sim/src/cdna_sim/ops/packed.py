"""VOP3P: two operations on halves of registers, or on pairs of registers for float32; dot products; matrix opcodes."""

from __future__ import annotations

from cdna_sim.isa.decode import Instruction
from cdna_sim.isa.fields import VGPR0
from cdna_sim.ops import crosslane, mfma
from cdna_sim.ops.emit import Emitter, unknown

_F32 = {
    "PK_ADD_F32": "add({0}, {1}{o})",
    "PK_MUL_F32": "multiply({0}, {1}{o})",
    "PK_FMA_F32": "fma_f32({0}, {1}, {2})",
}
# Types of operands and result of each half, and the expression.
_HALVES = {
    "PK_MAD_I16": ("hhh", "{0} * {1} + {2}"),
    "PK_MAD_U16": ("hhh", "{0} * {1} + {2}"),
    "PK_MUL_LO_U16": ("hh", "{0} * {1}"),
    "PK_ADD_I16": ("hh", "{0} + {1}"),
    "PK_ADD_U16": ("hh", "{0} + {1}"),
    "PK_SUB_I16": ("hh", "{0} - {1}"),
    "PK_SUB_U16": ("hh", "{0} - {1}"),
    "PK_LSHLREV_B16": ("kh", "left_shift({1}, {0})"),
    "PK_LSHRREV_B16": ("kh", "right_shift({1}, {0})"),
    "PK_ASHRREV_I16": ("ks", "right_shift({1}, {0}.view(int16))"),
    "PK_MAX_I16": ("ss", "maximum({0}, {1})"),
    "PK_MIN_I16": ("ss", "minimum({0}, {1})"),
    "PK_MAX_U16": ("hh", "maximum({0}, {1})"),
    "PK_MIN_U16": ("hh", "minimum({0}, {1})"),
    "PK_FMA_F16": ("eee", "fma_f16({0}, {1}, {2})"),
    "PK_ADD_F16": ("ee", "{0} + {1}"),
    "PK_MUL_F16": ("ee", "{0} * {1}"),
    "PK_MIN_F16": ("ee", "min_f16({0}, {1})"),
    "PK_MAX_F16": ("ee", "max_f16({0}, {1})"),
    "PK_MINIMUM3_F16": ("eee", "minimum3_f16({0}, {1}, {2})"),
    "PK_MAXIMUM3_F16": ("eee", "maximum3_f16({0}, {1}, {2})"),
}
_DOTS = {
    "DOT4_I32_I8": ("i", "add(dot4({0}, {1}, int8).astype(int32), {2}{o})"),
    "DOT4_U32_U8": ("u", "add(dot4({0}, {1}, uint8).astype(uint32), {2}{o})"),
    "DOT2_I32_I16": ("i", "add(dot2({0}, {1}, int16).astype(int32), {2}{o})"),
    "DOT2_U32_U16": ("u", "add(dot2({0}, {1}, uint16).astype(uint32), {2}{o})"),
}


def emit(e: Emitter, ins: Instruction) -> None:
    name = ins.name.removeprefix("V_")
    if "MFMA" in name or "SMFMAC" in name:
        mfma.emit(e, ins)
    elif name in _F32:
        _pair(e, ins, _F32[name])
    elif name in _HALVES:
        _halves(e, ins, *_HALVES[name])
    elif name == "PK_MOV_B32":
        _move(e, ins)
    elif name in _DOTS:
        _dot(e, ins, *_DOTS[name])
    elif name.startswith("MAD_MIX"):
        _mix(e, ins)
    elif name.startswith("ACCVGPR"):
        crosslane.accvgpr(e, ins)
    else:
        raise unknown(ins, "not modelled", e.target.kernel)


def _opsel_hi(ins: Instruction) -> int:
    return ins.bits("opsel_hi") | ins.bits("opsel_hi2") << 2


def _signed(text: str, negate: int) -> str:
    return f"negative({text})" if negate else text


def _float_half(e: Emitter, ins: Instruction, index: int, high: int) -> str:
    """One float32 of an operand pair. Scalar pairs work alike; a constant is the same in both halves."""
    number = ins.bits(f"src{index}")
    if high and (number >= VGPR0 or number < 128):
        number += 1
    return e.operand(ins, number, "f")


def _pair(e: Emitter, ins: Instruction, expression: str) -> None:
    """Two float32 operations: op_sel chooses the registers of the first, op_sel_hi of the second."""
    low_selection, high_selection = ins.bits("opsel"), _opsel_hi(ins)
    operands = 3 if "{2}" in expression else 2
    texts = []
    for selection, negations in ((low_selection, ins.bits("neg")), (high_selection, ins.bits("neg_hi"))):
        text = expression
        for index in range(operands):
            value = _float_half(e, ins, index, selection >> index & 1)
            text = text.replace(f"{{{index}}}", _signed(value, negations >> index & 1))
        texts.append(text)
    if ins.bits("clmp"):
        texts = [f"clamp_f32({text.replace('{o}', '')})" for text in texts]
    number = ins.bits("vdst") - VGPR0
    low, high = texts
    if f"f[{number}]" in high:
        # The second operation reads what the first writes.
        name = e.temporary()
        e.line(f"{name} = {low.replace('{o}', '')}")
        e.put(number + 1, "f", high)
        e.put(number, "f", name)
    else:
        e.put(number, "f", low)
        e.put(number + 1, "f", high)


def _move(e: Emitter, ins: Instruction) -> None:
    """Register op_sel[0] of the first operand and op_sel[1] of the second."""
    names = []
    for index in range(2):
        number = ins.bits(f"src{index}")
        if ins.bits("opsel") >> index & 1 and (number >= VGPR0 or number < 128):
            number += 1
        names.append(e.temporary())
        value = e.operand(ins, number, "u")
        e.line(f"{names[-1]} = {value}{'.copy()' if number >= VGPR0 else ''}")
    number = ins.bits("vdst") - VGPR0
    e.put(number, "u", names[0])
    e.put(number + 1, "u", names[1])


def _halves(e: Emitter, ins: Instruction, kinds: str, expression: str) -> None:
    results = []
    floats = kinds[-1] == "e"
    if not floats and (ins.bits("neg") or ins.bits("neg_hi") or ins.bits("clmp")):
        raise unknown(ins, "clamp or a sign modifier on integers", e.target.kernel)
    for selection, negations in ((ins.bits("opsel"), ins.bits("neg")), (_opsel_hi(ins), ins.bits("neg_hi"))):
        text = expression
        for index, kind in enumerate(kinds):
            value = e.vector(ins, f"src{index}", kind, high=bool(selection >> index & 1))
            text = text.replace(f"{{{index}}}", _signed(value, negations >> index & 1))
        results.append(f"clamp_f16({text})" if ins.bits("clmp") else f"({text})")
    e.put(ins.bits("vdst") - VGPR0, "u", f"halves({results[0]}, {results[1]})")


def _dot(e: Emitter, ins: Instruction, kind: str, expression: str) -> None:
    if ins.bits("clmp") or ins.bits("neg") or ins.bits("neg_hi") or ins.bits("opsel"):
        raise unknown(ins, "modifiers", e.target.kernel)
    text = expression.replace("{0}", e.vector(ins, "src0", "u")).replace("{1}", e.vector(ins, "src1", "u"))
    e.put(ins.bits("vdst") - VGPR0, kind, text.replace("{2}", e.vector(ins, "src2", kind)))


def _mix(e: Emitter, ins: Instruction) -> None:
    """A fused multiply-add of float32 and half operands; op_sel_hi says which are halves. neg_hi is the absolute."""
    values = []
    for index in range(3):
        if _opsel_hi(ins) >> index & 1:
            value = e.vector(ins, f"src{index}", "e", high=bool(ins.bits("opsel") >> index & 1)) + ".astype(float32)"
        else:
            value = e.vector(ins, f"src{index}", "f")
        value = f"absolute({value})" if ins.bits("neg_hi") >> index & 1 else value
        values.append(_signed(value, ins.bits("neg") >> index & 1))
    text = f"fma_f32({', '.join(values)}).astype(float32)"
    text = f"clamp_f32({text})" if ins.bits("clmp") else text
    number = ins.bits("vdst") - VGPR0
    if ins.name.endswith("MIX_F32"):
        e.put(number, "f", text)
        return
    half = f"{text}.astype(float16).view(uint16)"
    if "MIXHI" in ins.name:
        e.put(number, "h", half, high=True)
    else:
        e.put_low(number, half)
