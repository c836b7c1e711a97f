"""Conversions between number formats."""

from __future__ import annotations

from collections.abc import Callable

from cdna_sim.isa.decode import Instruction
from cdna_sim.isa.fields import VGPR0
from cdna_sim.ops.emit import Emitter, unknown
from cdna_sim.ops.formats import Float8, float8
from cdna_sim.ops.operands import check_modifiers, modifiers, source

_I32, _U32 = "-2**31, 2**31 - 1, int32", "0, 2**32 - 1, uint32"

ROWS: dict[str, tuple[str, str, str]] = {
    "CVT_F32_U32": ("f", "u", "{0}.astype(float32)"),
    "CVT_F32_I32": ("f", "i", "{0}.astype(float32)"),
    "CVT_U32_F32": ("u", "f", f"to_int({{0}}, {_U32})"),
    "CVT_I32_F32": ("i", "f", f"to_int({{0}}, {_I32})"),
    "CVT_RPI_I32_F32": ("i", "f", f"to_int(floor({{0}}.astype(float64) + 0.5), {_I32})"),
    "CVT_FLR_I32_F32": ("i", "f", f"to_int(floor({{0}}), {_I32})"),
    "CVT_F32_UBYTE0": ("f", "u", "({0} & N255).astype(float32)"),
    "CVT_F32_UBYTE1": ("f", "u", "({0} >> N8 & N255).astype(float32)"),
    "CVT_F32_UBYTE2": ("f", "u", "({0} >> N16 & N255).astype(float32)"),
    "CVT_F32_UBYTE3": ("f", "u", "({0} >> N24).astype(float32)"),
    "CVT_OFF_F32_I4": ("f", "u", "((({0} & N15) ^ N8).astype(float32) - float32(8)) / float32(16)"),
    "CVT_F64_F32": ("d", "f", "{0}.astype(float64)"),
    "CVT_F32_F64": ("f", "d", "{0}.astype(float32)"),
    "CVT_F64_I32": ("d", "i", "{0}.astype(float64)"),
    "CVT_F64_U32": ("d", "u", "{0}.astype(float64)"),
    "CVT_I32_F64": ("i", "d", f"to_int({{0}}, {_I32})"),
    "CVT_U32_F64": ("u", "d", f"to_int({{0}}, {_U32})"),
    "CVT_F16_F32": ("e", "f", "{0}.astype(float16)"),
    "CVT_F32_F16": ("f", "e", "{0}.astype(float32)"),
    "CVT_F16_U16": ("e", "h", "{0}.astype(float16)"),
    "CVT_F16_I16": ("e", "s", "{0}.astype(float16)"),
    "CVT_U16_F16": ("h", "e", "to_int({0}, 0, 65535, uint16)"),
    "CVT_I16_F16": ("s", "e", "to_int({0}, -32768, 32767, int16)"),
    "CVT_F32_BF16": ("f", "h", "f32_of_bf16({0})"),
    "CVT_PKRTZ_F16_F32": ("u", "ff", "halves(f16_toward_zero({0}), f16_toward_zero({1}))"),
    "CVT_PK_F16_F32": ("u", "ff", "halves({0}.astype(float16), {1}.astype(float16))"),
    "CVT_PK_BF16_F32": ("u", "ff", "halves(bf16_of({0}), bf16_of({1}))"),
    "CVT_PK_U16_U32": ("u", "uu", "halves(*(minimum(x, 65535).astype(uint16) for x in ({0}, {1})))"),
    "CVT_PK_I16_I32": ("u", "ii", "halves(*(x.clip(-32768, 32767).astype(int16) for x in ({0}, {1})))"),
    "CVT_PKNORM_I16_F32": ("u", "ff", "halves(*(norm16(x, -1, 32767, int16) for x in ({0}, {1})))"),
    "CVT_PKNORM_U16_F32": ("u", "ff", "halves(*(norm16(x, 0, 65535, uint16) for x in ({0}, {1})))"),
}


def _formats(e: Emitter, ins: Instruction) -> Float8:
    return float8(e.target.arch.fp8, "BF8" if "BF8" in ins.name else "FP8")


def _scale(e: Emitter, ins: Instruction, index: int) -> str:
    """2 to the unbiased exponent of a float32 operand, in float64."""
    return f"SCALE8[{e.vector(ins, f'src{index}', 'u')} >> N23 & N255]"


def _from_scaled(e: Emitter, ins: Instruction) -> None:
    """Two bytes, of the half that op_sel chooses, to float32, times a power of two."""
    _plain(e, ins, opsel=1)
    table = e.const(_formats(e, ins).values)
    start = 2 * (ins.bits("opsel") & 1)
    name, scale = e.temporary(), e.temporary()
    e.line(f"{name} = {table}[{e.vector(ins, 'src0', 'u')}.view(uint8).reshape(64, 4)[:, {start}:{start + 2}]]")
    e.line(f"{scale} = {_scale(e, ins, 1)}")
    number = ins.bits("vdst") - VGPR0
    for index in range(2):
        e.put(number + index, "f", f"({name}[:, {index}] * {scale}).astype(float32)")


def _to_scaled(e: Emitter, ins: Instruction) -> None:
    """Two float32, divided by a power of two, to two bytes in the half that op_sel chooses."""
    _plain(e, ins, opsel=8)
    encode = e.const(_formats(e, ins).encode)
    scale = e.temporary()
    e.line(f"{scale} = {_scale(e, ins, 2)}")
    low, high = (f"{encode}({source(e, ins, index, 'f')} / {scale}, w.saturates)" for index in range(2))
    number = ins.bits("vdst") - VGPR0
    if ins.bits("opsel") & 8:
        e.put(number, "h", f"pack_bytes({low}, {high})", high=True)
    else:
        e.put_low(number, f"pack_bytes({low}, {high})")


def _plain(e: Emitter, ins: Instruction, opsel: int = 0) -> None:
    check_modifiers(e, ins, opsel=opsel)
    if ins.variant == "DPP":
        raise unknown(ins, "DPP", e.target.kernel)
    if any(modifiers(ins, 0)) and "F32_" in ins.name:
        raise unknown(ins, "a sign modifier on an 8-bit operand", e.target.kernel)


def _from_float8(e: Emitter, ins: Instruction) -> None:
    """One byte, or two for ``PK``, to float32. SDWA or op_sel says which."""
    _plain(e, ins, opsel=3)
    packed = "_PK_" in ins.name
    field = "vsrc0" if ins.variant == "SDWA" else "src0"
    table = e.const(_formats(e, ins).values.astype("float32"))
    value = e.vector(ins, field, "u")
    if ins.variant == "SDWA":
        selector = ins.bits("src0_sel")
        start = {0: 0, 1: 1, 2: 2, 3: 3, 4: 0, 5: 2, 6: 0}[selector]
    else:
        # Without SDWA the byte is op_sel's two bits, low one for the upper half of the index.
        opsel = ins.bits("opsel")
        start = 2 * (opsel & 1) if packed else (opsel & 1) << 1 | opsel >> 1 & 1
    name = e.temporary()
    e.line(f"{name} = {value}.view(uint8).reshape(64, 4)")
    number = ins.bits("vdst") - VGPR0
    first, second = f"{table}[{name}[:, {start}]]", f"{table}[{name}[:, {start + 1}]]"
    if packed:
        low, high = e.temporary(), e.temporary()
        e.line(f"{low} = {first}; {high} = {second}")
        e.put(number, "f", low)
        e.put(number + 1, "f", high)
    else:
        e.put(number, "f", first)


def _to_float8(e: Emitter, ins: Instruction) -> None:
    """Two float32 to two bytes in one half of the destination; the other half is kept."""
    _plain(e, ins, opsel=8)
    encode = e.const(_formats(e, ins).encode)
    a, b = source(e, ins, 0, "f"), source(e, ins, 1, "f")
    text = f"pack_bytes({encode}({a}, w.saturates), {encode}({b}, w.saturates))"
    number = ins.bits("vdst") - VGPR0
    if ins.bits("opsel") & 8:
        e.put(number, "h", text, high=True)
    else:
        e.put_low(number, text)


EMIT: dict[str, Callable[[Emitter, Instruction], None]] = {
    "CVT_F32_FP8": _from_float8,
    "CVT_F32_BF8": _from_float8,
    "CVT_PK_F32_FP8": _from_float8,
    "CVT_PK_F32_BF8": _from_float8,
    "CVT_PK_FP8_F32": _to_float8,
    "CVT_PK_BF8_F32": _to_float8,
    "CVT_SCALEF32_PK_F32_FP8": _from_scaled,
    "CVT_SCALEF32_PK_F32_BF8": _from_scaled,
    "CVT_SCALEF32_PK_FP8_F32": _to_scaled,
    "CVT_SCALEF32_PK_BF8_F32": _to_scaled,
}
