"""Instructions as text, as an assembler would write them, more or less."""

from __future__ import annotations

from typing import Any

from cdna_sim.isa.fields import Encoded, counts_of

_NAMES = {102: "flat_scratch_lo", 103: "flat_scratch_hi", 104: "xnack_mask_lo", 105: "xnack_mask_hi", 106: "vcc_lo",
          107: "vcc_hi", 124: "m0", 126: "exec_lo", 127: "exec_hi", 240: "0.5", 241: "-0.5", 242: "1.0", 243: "-1.0",
          244: "2.0", 245: "-2.0", 246: "4.0", 247: "-4.0", 248: "0.15915494", 251: "src_vccz", 252: "src_execz",
          253: "src_scc"}  # fmt: skip
_PAIRS = {102: "flat_scratch", 104: "xnack_mask", 106: "vcc", 126: "exec"}
# Operands in the order an assembler has them, by encoding.
_OPERANDS = {
    "SOP1": ("sdst", "ssrc0"),
    "SOP2": ("sdst", "ssrc0", "ssrc1"),
    "SOPC": ("ssrc0", "ssrc1"),
    "SMEM": ("sdata", "sbase"),
    "VOP1": ("vdst", "src0"),
    "VOP2": ("vdst", "src0", "vsrc1"),
    "VOPC": ("src0", "vsrc1"),
    "VOP3": ("vdst", "src0", "src1", "src2"),
    "VOP3SD": ("vdst", "sdst", "src0", "src1", "src2"),
    "VOP3P": ("vdst", "src0", "src1", "src2"),
    "VOP3PX2": ("vdst", "src0", "src1", "src2"),
    "DS": ("vdst", "addr", "data0", "data1"),
    "MUBUF": ("vdata", "vaddr", "srsrc", "soffset"),
}  # fmt: skip
_FLAGS = ("omod", "clmp", "opsel", "sc0", "sc1", "nt", "gds", "cbsz", "abid", "blgp")


def text_of(ins: Encoded) -> str:
    """Mnemonic, operands and modifiers."""
    name = ins.name.lower()
    if ins.format == "SOPP":
        return _sopp(ins, name)
    if ins.format == "SOPK":
        immediate = ins.bits("simm16")
        last = f"{ins.literal:#x}" if ins.variant == "LIT" else f"{(immediate ^ 0x8000) - 0x8000}"
        return f"{name} {_register(ins.bits('sdst'), 1)}, {last}"
    if ins.format in ("GLOBAL", "FLAT", "SCRATCH"):
        return " ".join([name, ", ".join(_flat(ins)), *_modifiers(ins)])
    operands = [_operand(ins, field) for field in _OPERANDS.get(ins.format, ()) if _shown(ins, field)]
    if ins.format == "MUBUF":
        operands = _mubuf(ins, operands)
    return " ".join(part for part in (name, ", ".join(operands), *_modifiers(ins)) if part)


def _sopp(ins: Encoded, name: str) -> str:
    immediate = ins.bits("simm16")
    if name == "s_waitcnt":
        vm, lgkm = counts_of(immediate)
        parts = [f"vmcnt({vm})"] if vm < 63 else []
        if immediate >> 4 & 7 < 7:
            parts.append(f"expcnt({immediate >> 4 & 7})")
        if lgkm < 15:
            parts.append(f"lgkmcnt({lgkm})")
        return " ".join([name, *parts])
    if "branch" in name:
        return f"{name} {ins.target:#x}"
    if name in ("s_endpgm", "s_barrier"):
        return name
    return f"{name} {immediate}"


def _count(ins: Encoded, field: str) -> int:
    registers = ins.inst.op_regs
    plain = field[1:] if field.startswith("v") and field[1:] in registers else field
    return int(registers.get(field, registers.get(plain, 1)))


def _register(number: int, count: int, literal: int = 0, *, agpr: bool = False) -> str:
    if number >= 256 or agpr:
        letter, first = ("a" if agpr else "v"), number & 255
        return f"{letter}{first}" if count == 1 else f"{letter}[{first}:{first + count - 1}]"
    if count == 2 and number in _PAIRS:
        return _PAIRS[number]
    if number in _NAMES:
        return _NAMES[number]
    if number == 255:
        return f"{literal:#x}"
    if 128 <= number <= 192:
        return str(number - 128)
    if 193 <= number <= 208:
        return str(192 - number)
    if number < 128:
        letter, first = ("ttmp", number - 108) if number >= 108 else ("s", number)
        return f"{letter}{first}" if count == 1 else f"{letter}[{first}:{first + count - 1}]"
    return f"src{number}"


def _shown(ins: Encoded, field: str) -> bool:
    registers: dict[str, Any] = ins.inst.op_regs
    if field in ("src2", "data0", "data1", "vdst", "src1") and ins.format in ("DS", "VOP3", "VOP3P"):
        return field in registers
    return ins.has(field) or ins.has("v" + field)


def _operand(ins: Encoded, field: str) -> str:
    if field == "vdst" and ins.name in ("V_READFIRSTLANE_B32", "V_READLANE_B32"):
        return _register(ins.raw(24, 17) if ins.format == "VOP1" else ins.raw(7, 0), 1)
    agpr = False
    if ins.format in ("DS", "MUBUF"):
        agpr = bool(ins.bits("acc")) and field in ("vdst", "data0", "data1", "vdata")
    elif ins.kind == "MFMA":
        agpr = bool(
            {"src0": ins.bits("acc") & 1, "src1": ins.bits("acc") >> 1, "src2": ins.bits("acc_cd")}.get(
                field, ins.bits("acc_cd")
            )
        )
        agpr = agpr and ins.bits(field) >= 256
    elif "ACCVGPR" in ins.name:
        agpr = (field == "vdst") != ins.name.startswith("V_ACCVGPR_READ") or "MOV" in ins.name
    name = field
    if ins.variant in ("SDWA", "DPP") and field == "src0":
        name = "vsrc0"
    text = _register(ins.bits(name), _count(ins, field), ins.literal, agpr=agpr)
    if field.startswith("src") and ins.format in ("VOP3", "VOP3SD", "VOP3P") and ins.kind == "VALU":
        index = int(field[-1])
        if "BITOP3" not in ins.name:
            if ins.format != "VOP3P" and ins.bits("abs") >> index & 1:
                text = f"|{text}|"
            if ins.bits("neg") >> index & 1:
                text = f"-{text}"
    return text


def _flat(ins: Encoded) -> list[str]:
    scalar = ins.raw(54, 48)
    off = scalar == 127 or ins.format == "FLAT"
    if ins.format == "SCRATCH":
        address = _register(ins.bits("addr"), 1) if ins.bits("sve") else "off"
        base = "off" if off else _register(scalar, 1)
    else:
        address = _register(ins.bits("addr"), 2 if off else 1)
        base = "off" if off else _register(scalar, 2)
    agpr = bool(ins.bits("acc"))
    operands = [address]
    if "_LOAD_" in ins.name and "_LDS_" not in ins.name:
        operands.insert(0, _register(ins.bits("vdst"), _count(ins, "vdst"), agpr=agpr))
    elif "_LOAD_" not in ins.name:
        if "ATOMIC" in ins.name and ins.bits("sc0"):
            operands.insert(0, _register(ins.bits("vdst"), _count(ins, "vdst"), agpr=agpr))
        operands.append(_register(ins.bits("data"), _count(ins, "data"), agpr=agpr))
    return operands if ins.format == "FLAT" else [*operands, base]


def _mubuf(ins: Encoded, operands: list[str]) -> list[str]:
    data, address, resource, offset = operands
    address = address if ins.bits("offen") or ins.bits("idxen") else "off"
    return [address, resource, offset] if ins.bits("lds") else [data, address, resource, offset]


def _modifiers(ins: Encoded) -> list[str]:
    found = []
    if ins.format == "DS":
        if "READ2" in ins.name or "WRITE2" in ins.name:
            found += [f"{name}:{ins.bits(name)}" for name in ("offset0", "offset1") if ins.bits(name)]
        elif offset := ins.bits("offset0") | ins.bits("offset1") << 8:
            found.append(f"offset:{offset}")
    elif ins.format in ("GLOBAL", "SCRATCH"):
        if offset := (ins.raw(12, 0) ^ 0x1000) - 0x1000:
            found.append(f"offset:{offset}")
    elif ins.format == "SMEM":
        if ins.bits("soffset_en"):
            found.append(f", {_register(ins.bits('soffset'), 1)}")
        found.append(f"{((ins.bits('offset') & 0x1FFFFF) ^ 0x100000) - 0x100000:#x}")
    elif ins.format == "MUBUF":
        found += [name for name in ("offen", "idxen", "lds") if ins.bits(name)]
        if offset := ins.bits("offset"):
            found.append(f"offset:{offset}")
    if "BITOP3" in ins.name:
        return [f"bitop3:{ins.bits('omod') << 6 | ins.bits('abs') << 3 | ins.bits('neg'):#x}"]
    if ins.format == "VOP3P" and ins.kind == "VALU" and "ACCVGPR" not in ins.name:
        high = ins.bits("opsel_hi") | ins.bits("opsel_hi2") << 2
        found += [f"op_sel:{ins.bits('opsel'):03b}", f"op_sel_hi:{high:03b}"]
        found += [f"{name}:{ins.bits(name):03b}" for name in ("neg_hi",) if ins.bits(name)]
        return found + (["clamp"] if ins.bits("clmp") else [])
    if ins.format == "VOP3PX2":
        scales = ", ".join(_register(ins.bits(f"scale_src{index}"), 1) for index in range(2))
        found += [f", {scales}", f"op_sel:{ins.bits('opsel'):03b}", f"op_sel_hi:{ins.bits('opsel_hi'):02b}"]
        return found + [f"{name}:{ins.bits(name)}" for name in ("cbsz", "blgp") if ins.bits(name)]
    for name in _FLAGS:
        if value := ins.bits(name):
            label = {"clmp": "clamp", "opsel": "op_sel"}.get(name, name)
            found.append(label if name in ("clmp", "sc0", "sc1", "nt", "gds") else f"{label}:{value}")
    if ins.variant == "SDWA":
        found += [f"{name}:{ins.bits(name)}" for name in ("dst_sel", "dst_unused", "src0_sel", "src1_sel")]
    elif ins.variant == "DPP":
        found += [f"dpp:{ins.bits('dpp'):#x}", f"row_mask:{ins.bits('row_mask'):#x}",
                  f"bank_mask:{ins.bits('bank_mask'):#x}"] + (["bound_ctrl:1"] if ins.bits("bc") else [])  # fmt: skip
    return found
