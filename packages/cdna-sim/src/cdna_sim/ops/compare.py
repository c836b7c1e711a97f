"""Vector comparisons: v_cmp writes a lane mask to scalar registers, v_cmpx also to EXEC."""

from __future__ import annotations

from cdna_sim.isa.decode import Instruction
from cdna_sim.isa.fields import EXEC, VCC
from cdna_sim.ops.emit import Emitter, unknown
from cdna_sim.ops.operands import check_modifiers, source

_TYPES = {"I32": "i", "U32": "u", "F32": "f", "I64": "I", "U64": "U", "F64": "d", "I16": "s", "U16": "h", "F16": "e"}
_RELATIONS = {
    "EQ": "equal({0}, {1})",
    "NE": "not_equal({0}, {1})",
    "LT": "less({0}, {1})",
    "LE": "less_equal({0}, {1})",
    "GT": "greater({0}, {1})",
    "GE": "greater_equal({0}, {1})",
    "LG": "({0} < {1}) | ({0} > {1})",
    "O": "~(isnan({0}) | isnan({1}))",
    "U": "isnan({0}) | isnan({1})",
    "NGE": "~({0} >= {1})",
    "NLG": "~(({0} < {1}) | ({0} > {1}))",
    "NGT": "~({0} > {1})",
    "NLE": "~({0} <= {1})",
    "NEQ": "~equal({0}, {1})",
    "NLT": "~({0} < {1})",
    "F": "np.zeros(64, bool)",
    "T": "np.ones(64, bool)",
    "TRU": "np.ones(64, bool)",
}
_CLASS = {"F32": ("f", "uint32", 23, 8), "F64": ("d", "uint64", 52, 11), "F16": ("e", "uint16", 10, 5)}


def emit(e: Emitter, ins: Instruction) -> None:
    check_modifiers(e, ins)
    if ins.variant == "DPP":
        raise unknown(ins, "DPP", e.target.kernel)
    _, verb, relation, type_name = ins.name.split("_")
    if relation == "CLASS":
        kind, raw, mantissa, exponent = _CLASS[type_name]
        value = source(e, ins, 0, kind)
        text = f"is_class({value}, {source(e, ins, 1, 'u')}, {raw}, {mantissa}, {exponent})"
    else:
        kind = _TYPES[type_name]
        text = _RELATIONS[relation].replace("{0}", source(e, ins, 0, kind)).replace("{1}", source(e, ins, 1, kind))
    if ins.format == "VOP3":
        number = ins.raw(7, 0)
    elif ins.variant == "SDWA":
        number = ins.bits("sdst") if ins.bits("sd") else VCC
    else:
        number = VCC
    if verb == "CMPX":
        name = e.temporary()
        bits = f"pack({text})" if e.full else f"pack({text}) & w.exec"
        e.line(f"{name} = {bits}")
        e.put_sgpr(number, name, wide=True)
        e.put_sgpr(EXEC, name, wide=True)
        e.exec_changed(ins)
    else:
        e.put_mask(ins, number, text)
        if number == EXEC:
            e.exec_changed(ins)
