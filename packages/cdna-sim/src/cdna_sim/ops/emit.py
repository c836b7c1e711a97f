"""Generates Python for one basic block: operands as expressions, results as statements.

The families (salu, valu, …) call these methods for one instruction after another. Generated code sees one wave ``w``
and its parts: ``v``, ``f``, ``i``, lists of the 512 vector registers as uint32, float32 and int32 (AGPRs from 256 on);
``S``, the scalar registers as Python ints; ``em``, the EXEC mask as booleans. A block is generated twice, for a full
EXEC, where masks need not be looked at, and for any other.

Types of an operand or result, one letter: ``u i f`` 32 bits (unsigned, signed, float), ``U I d`` 64, ``h s e`` the
low 16 (unsigned, signed, half), ``n`` a shift count modulo 32, ``w`` one modulo 64 (as uint64), ``k`` one modulo 16.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Any

import numpy as np

from cdna_sim.arch import Arch
from cdna_sim.errors import UnknownOpcode
from cdna_sim.isa import lanes
from cdna_sim.isa.decode import Instruction
from cdna_sim.isa.fields import EXEC, EXECZ, LITERAL, M0, SCC, VCC, VCCZ, VGPR0

_FLOATS = {240: 0.5, 241: -0.5, 242: 1.0, 243: -1.0, 244: 2.0, 245: -2.0, 246: 4.0, 247: -4.0}
# 1/(2 pi) as the hardware has it, by type.
_INV_2PI = {"e": 0x3118, "f": 0x3E22F983, "d": 0x3FC45F306DC9C882}
_WIDE = "UId"
_NARROW = "hse"
_DTYPES: dict[str, Any] = {
    "u": np.uint32, "i": np.int32, "f": np.float32, "U": np.uint64, "I": np.int64, "d": np.float64,
    "h": np.uint16, "s": np.int16, "e": np.float16, "n": np.uint32, "w": np.uint64, "k": np.uint16,
}  # fmt: skip
_SPLATS = {"u": "K", "f": "KF", "i": "KI", "U": "K64", "I": "KI64", "d": "KD"}
SGPR_BIT = 512  # scalar register n is bit 512 + n of a set of registers


def register_bits(number: int, count: int = 1) -> int:
    """``count`` registers from ``number`` on as a set."""
    return ((1 << count) - 1) << number


def unknown(instruction: Instruction, what: str, kernel: str = "") -> UnknownOpcode:
    name = instruction.name.lower()
    return UnknownOpcode(
        f"{name} ({instruction.format}{' ' + instruction.variant if instruction.variant else ''}): {what}",
        kernel=kernel, pc=instruction.pc, text=instruction.text,
    )  # fmt: skip


def float_bits(value: float, kind: str) -> int:
    code = {"e": "<e", "d": "<d"}.get(kind, "<f")
    return int.from_bytes(struct.pack(code, value), "little")


@dataclass(frozen=True)
class Target:
    """What code is generated for.

    Attributes:
        kernel: its name, for errors.
        load_address: where the code object lies in the kernel's address space.
        float_mode: bits of the kernel's float mode.
        deferred, strict: as in ``Options``.
    """

    kernel: str
    arch: Arch
    load_address: int
    float_mode: int
    deferred: bool
    strict: bool


@dataclass(frozen=True)
class Touch:
    """Registers of one instruction, as bits: all that it reads or writes, and what its own load writes later.

    Vector loads and LDS reads return in order within their counter, scalar loads do not.
    """

    used: int
    loads_vm: int
    loads_lgkm: int
    loads_scalar: int


@dataclass(frozen=True)
class BackEdge:
    """A backward branch at ``source``; ``stop`` is behind it."""

    source: int
    target: int
    stop: int

    @property
    def counter(self) -> int:
        """Its key in a launch's counts; blocks have those from 0 on."""
        return -1 - self.source


class Emitter:
    """One block being generated.

    Attributes:
        constants: what generated code names, by name.
        edges: backward branches.
        full: this is the version for a full EXEC.
        lines: statements so far.
        read, written: registers of the current instruction, as bits; ``loads``: those that only its outstanding load
            will write, by what waits for it: ``vm``, ``lgkm``, or ``scalar`` for lgkmcnt(0).
        ended: the block has returned.
    """

    def __init__(self, target: Target, full: bool) -> None:
        self.target, self.full = target, full
        self.constants: dict[str, Any] = {}
        self._names: dict[Any, str] = {}
        self.edges: list[BackEdge] = []
        self.lines: list[str] = []
        self.read = self.written = 0
        self.loads: dict[str, int] = {}
        self.begin()
        self.ended = False
        self.temporaries = 0

    def line(self, text: str) -> None:
        self.lines.append(text)

    def const(self, value: Any) -> str:
        """The name by which generated code sees ``value``; equal arrays of lanes share one."""
        key = (value.dtype.str, value.tobytes()) if isinstance(value, np.ndarray) else id(value)
        name = self._names.setdefault(key, f"c{len(self._names)}")
        self.constants[name] = value  # which also keeps its id from being given again
        return name

    def temporary(self) -> str:
        self.temporaries += 1
        return f"t{self.temporaries}"

    def leave(self, target: str) -> None:
        """Ends the block; ``target`` is an expression for the next pc."""
        self.line(f"return {target}")
        self.ended = True

    def backward(self, ins: Instruction, target: int) -> int:
        """Notes a backward branch; returns its counter."""
        self.edges.append(BackEdge(ins.pc, target, ins.pc + ins.size))
        return self.edges[-1].counter

    # Register use.

    def begin(self) -> None:
        """The next instruction."""
        self.read = self.written = 0
        self.loads = {"vm": 0, "lgkm": 0, "scalar": 0}

    def use_vgpr(self, number: int, count: int = 1) -> None:
        self.read |= register_bits(number, count)

    def use_sgpr(self, number: int, count: int = 1) -> None:
        self.read |= register_bits(SGPR_BIT + number, count)

    def write_vgpr(self, number: int, count: int = 1) -> None:
        self.written |= register_bits(number, count)

    def will_load(self, counter: str, number: int, count: int) -> int:
        """Notes registers that a load of this instruction writes later; returns them as bits."""
        bits = register_bits(number, count)
        self.loads[counter] |= bits
        return bits

    # Scalar operands and results: Python ints.

    def scalar(self, ins: Instruction, name: str, wide: bool = False, signed: bool = False) -> str:
        """A scalar operand of 32 or 64 bits as an int expression."""
        number = ins.bits(name)
        if number < 128:
            return self.sgpr(number, wide, signed)
        value = self._inline(ins, number, "U" if wide else "u")
        if value is not None:
            if number == LITERAL and wide and signed:
                value = value | 0xFFFFFFFF00000000 if value >> 31 else value
            bits = 64 if wide else 32
            return f"({value - (1 << bits)})" if signed and value >> (bits - 1) else str(value)
        return self._special(ins, number)

    def sgpr(self, number: int, wide: bool = False, signed: bool = False) -> str:
        self.use_sgpr(number, 2 if wide else 1)
        if wide:
            text = f"(S[{number}] | S[{number + 1}] << 32)"
            return f"signed64({text})" if signed else text
        return f"signed32(S[{number}])" if signed else f"S[{number}]"

    def put_sgpr(self, number: int, value: str, wide: bool = False) -> None:
        """Writes an int expression, already reduced to its width, to scalar registers. EXEC ends the block."""
        self.written |= register_bits(SGPR_BIT + number, 2 if wide else 1)
        if wide:
            if not value.isidentifier():
                name = self.temporary()
                self.line(f"{name} = {value}")
                value = name
            self.line(f"S[{number}] = {value} & 0xFFFFFFFF; S[{number + 1}] = {value} >> 32")
        else:
            self.line(f"S[{number}] = {value}")

    def exec_changed(self, ins: Instruction) -> None:
        self.line("w.exec_changed()")
        self.leave(str(ins.pc + ins.size))

    def _special(self, ins: Instruction, number: int) -> str:
        if number == SCC:
            return "w.scc"
        if number == VCCZ:
            self.use_sgpr(VCC, 2)
            return f"int(not S[{VCC}] | S[{VCC + 1}])"
        if number == EXECZ:
            return f"int(not S[{EXEC}] | S[{EXEC + 1}])"
        raise unknown(ins, f"source operand {number}", self.target.kernel)

    def _inline(self, ins: Instruction, number: int, kind: str) -> int | None:
        """The bits of an inline constant or literal as an operand of type ``kind``."""
        width = 64 if kind in _WIDE + "w" else 16 if kind in _NARROW + "k" else 32
        mask = (1 << width) - 1
        if 128 <= number <= 192:
            return number - 128
        if 193 <= number <= 208:
            return (192 - number) & mask
        if number in _FLOATS:
            if kind in "UI" and ins.format.startswith("VOP"):
                kind = "d"
            return float_bits(_FLOATS[number], kind if kind in "ed" else "f")
        if number == 248:
            return _INV_2PI.get(kind, _INV_2PI["f"])
        if number == LITERAL:
            # A 32-bit literal is the high half of a double; elsewhere the low bits.
            literal = ins.literal << 32 if kind == "d" else ins.literal
            if kind == "I" and literal >> 31:
                literal |= 0xFFFFFFFF00000000
            return literal & mask if width == 16 else literal
        return None

    # Vector operands and results.

    def vector(self, ins: Instruction, name: str, kind: str, *, high: bool = False, agpr: bool = False) -> str:
        """A vector operand as an expression for 64 lanes."""
        number = ins.bits(name)
        if agpr:
            number |= VGPR0
        return self.operand(ins, number, kind, high=high, base=256 if agpr else 0)

    def operand(self, ins: Instruction, number: int, kind: str, *, high: bool = False, base: int = 0) -> str:
        """The same by operand number; ``base`` 256 means an accumulation register."""
        if number >= VGPR0:
            return self.vgpr(number - VGPR0 + base, kind, high)
        if number < 128:
            return self._splat_sgpr(number, kind, high)
        value = self._inline(ins, number, kind)
        if value is None:
            text = f"K[{self._special(ins, number)}]"
            return text if kind == "u" else self.cast(text, kind)
        if high and kind in _NARROW + "k":
            # An integer constant is extended to 32 bits; a half constant has zeros above it.
            value = 0xFFFF if 193 <= number <= 208 else 0
        return self.const_lanes(value, kind)

    def const_lanes(self, value: int, kind: str) -> str:
        if kind == "n":
            value, kind = value & 31, "u"
        elif kind == "w":
            value, kind = value & 63, "U"
        elif kind == "k":
            value, kind = value & 15, "h"
        dtype = np.dtype(_DTYPES[kind])
        raw = np.dtype(f"u{dtype.itemsize}")
        return self.const(lanes.frozen(np.full(64, value & (1 << 8 * dtype.itemsize) - 1, raw)).view(dtype))

    def vgpr(self, number: int, kind: str, high: bool = False) -> str:
        self.use_vgpr(number, 2 if kind in _WIDE else 1)
        if kind in "uif":
            return f"{'v' if kind == 'u' else kind}[{number}]"
        if kind in _WIDE:
            text = f"pair(v[{number}], v[{number + 1}])"
            return text if kind == "U" else f"{text}.view({'int64' if kind == 'I' else 'float64'})"
        if kind in _NARROW and not high:
            return f"v[{number}].view({np.dtype(_DTYPES[kind])})[::2]"
        return self.cast(f"v[{number}]", kind, high)

    def _splat_sgpr(self, number: int, kind: str, high: bool) -> str:
        if kind in _WIDE:
            self.use_sgpr(number, 2)
            return f"{_SPLATS[kind]}[S[{number}] | S[{number + 1}] << 32]"
        self.use_sgpr(number)
        if kind in "uif":
            return f"{_SPLATS[kind]}[S[{number}]]"
        if kind == "n":
            return f"K[S[{number}] & 31]"
        if kind == "w":
            return f"K64[S[{number}] & 63]"
        return self.cast(f"K[S[{number}]]", kind, high)

    @staticmethod
    def cast(text: str, kind: str, high: bool = False) -> str:
        """An expression for 64 uint32 as another type."""
        if kind == "u":
            return text
        if kind in "if":
            return f"{text}.view({np.dtype(_DTYPES[kind])})"
        if kind in _NARROW:
            return f"{text}.view({np.dtype(_DTYPES[kind])})[{1 if high else 0}::2]"
        if kind == "n":
            return f"bitwise_and({text}, N31)"
        if kind == "w":
            return f"bitwise_and({text}.astype(uint64), N63)"
        if kind == "k":
            return f"bitwise_and({text}.view(uint16)[{1 if high else 0}::2], H15)"
        raise ValueError(f"cast: no 32-bit value is a {kind!r}")

    def put(self, number: int, kind: str, expression: str, mask: str | None = None, high: bool = False) -> None:
        """Writes ``expression`` to a vector register under EXEC.

        Args:
            number: the register.
            kind: the type of the expression; 16-bit ones clear the upper half, or with ``high`` keep the lower one.
            expression: may hold ``{o}`` where a numpy call takes its output argument.
            mask: a further expression of booleans: lanes to write.
        """
        self.write_vgpr(number, 2 if kind in _WIDE else 1)
        if high:  # the other half is kept
            self.use_vgpr(number)
        where = self.mask(mask)
        if kind in _WIDE:
            text = expression.replace("{o}", "")
            call = f"put_pair(v[{number}], v[{number + 1}], {text}" if where is None else (
                f"put_pair_where(v[{number}], v[{number + 1}], {text}, {where}"
            )  # fmt: skip
            self.line(f"{call})")
            return
        register = f"{kind if kind in 'fi' else 'v'}[{number}]"
        if kind in _NARROW:
            text = f"({expression.replace('{o}', '')})"
            text = text if kind == "h" else f"{text}.view(uint16)"
            if high:
                register = f"v[{number}].view(uint16)[1::2]"
            self._store(register, text, where)
        elif "{o}" in expression and where is None:
            self.line(expression.replace("{o}", f", out={register}"))
        else:
            self._store(register, expression.replace("{o}", ""), where)

    def put_low(self, number: int, expression: str) -> None:
        """Writes 64 uint16 to the low halves and keeps the high ones."""
        self.use_vgpr(number)
        self.write_vgpr(number)
        self._store(f"v[{number}].view(uint16)[::2]", expression, self.mask(None))

    def mask(self, further: str | None) -> str | None:
        if self.full:
            return further
        return "em" if further is None else f"em & {further}"

    def _store(self, register: str, text: str, where: str | None) -> None:
        if where is None:
            self.line(f"{register}[:] = {text}")
        else:
            self.line(f"copyto({register}, {text}, where={where})")

    def put_mask(self, ins: Instruction, number: int, booleans: str) -> None:
        """Writes one bit a lane to a pair of scalar registers; inactive lanes are 0."""
        bits = f"pack({booleans})" if self.full else f"pack({booleans}) & w.exec"
        if number in (M0, M0 + 1):
            raise unknown(ins, f"lane mask to register {number}", self.target.kernel)
        self.put_sgpr(number, bits, wide=True)
