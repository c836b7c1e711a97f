"""The scalar unit: SOP1, SOP2, SOPC, SOPK and branches, on Python integers.

All rows run in one loop of 64 trips. A trip reads its operands from lane ``m0`` of VGPRs and writes the results of each
row back into that lane of the row's own VGPRs, so that a row costs a few instructions and sees 64 operand pairs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from cdna_sim import Options
from semantics import ARCHS, LONG_EDGES, mnemonics, on, run_snippet

MASK = {"u32": 2**32 - 1, "i32": 2**32 - 1, "u64": 2**64 - 1, "i64": 2**64 - 1}
SHIFTS = np.array([0, 1, 5, 31, 32, 33, 63, 2**64 - 1], np.uint64)
PLACES = {"a": 4, "b": 6, "d": 12, "e": 16}


@dataclass(frozen=True, eq=False)
class Scalar:
    """An instruction on SGPRs.

    Attributes:
        asm: {a}, {b} are the operands, {d}, {e} the results; {d} starts with the bits of operand c.
        types: e.g. ``"u32 u32 scc -> u32 scc"``: operands a, b, c, SCC before; results d, e, SCC after. Without
            ``scc`` among the results SCC is left alone.
        expected: of the operands as Python integers, signed for i32 and i64.
    """

    asm: str
    types: str
    expected: Callable[..., Any]

    @property
    def operands(self) -> list[str]:
        return self.types.split("->")[0].split()

    @property
    def results(self) -> list[str]:
        return self.types.split("->")[1].split()

    def __str__(self) -> str:
        return self.asm.splitlines()[0].replace("{", "").replace("}", "")


def wrap(value: int, kind: str) -> int:
    value &= MASK[kind]
    return value - MASK[kind] - 1 if kind[0] == "i" and value > MASK[kind] // 2 else value


def nonzero(value: int, kind: str = "u32") -> tuple[int, int]:
    """Result and SCC = result is not zero."""
    return value & MASK[kind], int(value & MASK[kind] != 0)


def overflow(value: int) -> tuple[int, int]:
    """Signed 32-bit result, SCC = it does not fit."""
    return value, int(not -(2**31) <= value < 2**31)


def carried(value: int) -> tuple[int, int]:
    return value, int(not 0 <= value < 2**32)


def field(value: int, b: int, bits: int) -> int:
    width = b >> 16 & 0x7F
    return (value >> (b & bits - 1)) & (1 << width) - 1


def signed_field(value: int, b: int, bits: int) -> int:
    width = b >> 16 & 0x7F
    found = field(value, b, bits)
    return found - (1 << width) if width and found >> width - 1 & 1 else found


def first(value: int, bits: int, wanted: int) -> int:
    """Lowest bit that is ``wanted``, or -1."""
    return next((bit for bit in range(bits) if value >> bit & 1 == wanted), -1)


def leading(value: int, bits: int) -> int:
    return bits - value.bit_length() if value else -1


def changed(value: int, bits: int) -> int:
    """First bit from the top that differs from the sign, or -1."""
    sign = value >> bits - 1 & 1
    return next((i for i in range(1, bits) if value >> bits - 1 - i & 1 != sign), -1)


def quads(value: int, bits: int) -> int:
    """A bit for each four: is any of them set."""
    return sum((value >> 4 * i & 15 != 0) << i for i in range(bits // 4))


def whole_quads(value: int, bits: int) -> int:
    return sum(15 << 4 * i for i in range(bits // 4) if value >> 4 * i & 15)


def mirrored(value: int, bits: int) -> int:
    return int(f"{value:0{bits}b}"[::-1], 2)


def logic(name: str, apply: Callable[[int, int], int]) -> list[Scalar]:
    return [
        Scalar(
            f"s_{name}_b{bits} {{d}}, {{a}}, {{b}}", f"u{bits} u{bits} -> u{bits} scc",
            lambda a, b, kind=f"u{bits}": nonzero(apply(a, b), kind),
        )
        for bits in (32, 64)
    ]  # fmt: skip


def saveexec(name: str, apply: Callable[[int, int], int]) -> Scalar:
    return Scalar(
        f"s_{name}_saveexec_b64 {{d}}, {{a}}\ns_cselect_b32 s9, 1, 0\ns_mov_b64 {{e}}, exec\ns_mov_b64 exec, -1",
        "u64 u64 -> u64 u64 scc",
        lambda a, b: (b, *nonzero(apply(a, b), "u64")),
    )


COMPARE = {
    "eq": lambda a, b: a == b, "lg": lambda a, b: a != b, "gt": lambda a, b: a > b, "ge": lambda a, b: a >= b,
    "lt": lambda a, b: a < b, "le": lambda a, b: a <= b,
}  # fmt: skip

TWO = [
    Scalar("s_add_u32 {d}, {a}, {b}", "u32 u32 -> u32 scc", lambda a, b: carried(a + b)),
    Scalar("s_sub_u32 {d}, {a}, {b}", "u32 u32 -> u32 scc", lambda a, b: carried(a - b)),
    Scalar("s_add_i32 {d}, {a}, {b}", "i32 i32 -> i32 scc", lambda a, b: overflow(a + b)),
    Scalar("s_sub_i32 {d}, {a}, {b}", "i32 i32 -> i32 scc", lambda a, b: overflow(a - b)),
    Scalar("s_addc_u32 {d}, {a}, {b}", "u32 u32 scc -> u32 scc", lambda a, b, scc: carried(a + b + scc)),
    Scalar("s_subb_u32 {d}, {a}, {b}", "u32 u32 scc -> u32 scc", lambda a, b, scc: carried(a - b - scc)),
    Scalar("s_min_i32 {d}, {a}, {b}", "i32 i32 -> i32 scc", lambda a, b: (min(a, b), int(a < b))),
    Scalar("s_min_u32 {d}, {a}, {b}", "u32 u32 -> u32 scc", lambda a, b: (min(a, b), int(a < b))),
    Scalar("s_max_i32 {d}, {a}, {b}", "i32 i32 -> i32 scc", lambda a, b: (max(a, b), int(a >= b))),
    Scalar("s_max_u32 {d}, {a}, {b}", "u32 u32 -> u32 scc", lambda a, b: (max(a, b), int(a >= b))),
    Scalar("s_cselect_b32 {d}, {a}, {b}", "u32 u32 scc -> u32", lambda a, b, scc: a if scc else b),
    Scalar("s_cselect_b64 {d}, {a}, {b}", "u64 u64 scc -> u64", lambda a, b, scc: a if scc else b),
    Scalar("s_cselect_b64 {d}, -1, 0", "u64 u64 scc -> u64", lambda a, b, scc: -1 if scc else 0),
    *logic("and", lambda a, b: a & b),
    *logic("or", lambda a, b: a | b),
    *logic("xor", lambda a, b: a ^ b),
    *logic("andn2", lambda a, b: a & ~b),
    *logic("orn2", lambda a, b: a | ~b),
    *logic("nand", lambda a, b: ~(a & b)),
    *logic("nor", lambda a, b: ~(a | b)),
    *logic("xnor", lambda a, b: ~(a ^ b)),
    Scalar("s_and_b32 {d}, {a}, 0x1ff", "u32 -> u32 scc", lambda a: nonzero(a & 0x1FF)),
    Scalar("s_lshl_b32 {d}, {a}, {b}", "u32 u32 -> u32 scc", lambda a, b: nonzero(a << b % 32)),
    Scalar("s_lshr_b32 {d}, {a}, {b}", "u32 u32 -> u32 scc", lambda a, b: nonzero(a >> b % 32)),
    Scalar("s_ashr_i32 {d}, {a}, {b}", "i32 u32 -> i32 scc", lambda a, b: nonzero(a >> b % 32)),
    Scalar("s_lshl_b64 {d}, {a}, {b}", "u64 u32 -> u64 scc", lambda a, b: nonzero(a << b % 64, "u64")),
    Scalar("s_lshr_b64 {d}, {a}, {b}", "u64 u32 -> u64 scc", lambda a, b: nonzero(a >> b % 64, "u64")),
    Scalar("s_ashr_i64 {d}, {a}, {b}", "i64 u32 -> i64 scc", lambda a, b: nonzero(a >> b % 64, "u64")),
    Scalar("s_bfm_b32 {d}, {a}, {b}", "u32 u32 -> u32", lambda a, b: ((1 << a % 32) - 1) << b % 32),
    Scalar("s_bfm_b64 {d}, {a}, {b}", "u32 u32 -> u64", lambda a, b: ((1 << a % 64) - 1) << b % 64),
    Scalar("s_mul_i32 {d}, {a}, {b}", "i32 i32 -> i32", lambda a, b: a * b),
    Scalar("s_mul_hi_u32 {d}, {a}, {b}", "u32 u32 -> u32", lambda a, b: a * b >> 32),
    Scalar("s_mul_hi_i32 {d}, {a}, {b}", "i32 i32 -> i32", lambda a, b: a * b >> 32),
    Scalar("s_absdiff_i32 {d}, {a}, {b}", "i32 i32 -> i32 scc", lambda a, b: nonzero(abs(wrap(a - b, "i32")))),
    *(
        Scalar(f"s_lshl{n}_add_u32 {{d}}, {{a}}, {{b}}", "u32 u32 -> u32 scc", lambda a, b, n=n: carried((a << n) + b))
        for n in (1, 2, 3, 4)
    ),
    Scalar("s_pack_ll_b32_b16 {d}, {a}, {b}", "u32 u32 -> u32", lambda a, b: a & 0xFFFF | b << 16),
    Scalar("s_pack_lh_b32_b16 {d}, {a}, {b}", "u32 u32 -> u32", lambda a, b: a & 0xFFFF | b & 0xFFFF0000),
    Scalar("s_pack_hh_b32_b16 {d}, {a}, {b}", "u32 u32 -> u32", lambda a, b: a >> 16 | b & 0xFFFF0000),
    # Offset, width: 6 and 1, 6 and 2, 31 and 4, 0 and 0, 3 and 31; a width of 32 and more is not defined.
    *(
        Scalar(text, types, expected)
        for spec in (0x10006, 0x20006, 0x4001F, 0, 0x1F0003)
        for text, types, expected in (
            (f"s_bfe_u32 {{d}}, {{a}}, {spec:#x}", "u32 -> u32 scc", lambda a, s=spec: nonzero(field(a, s, 32))),
            (f"s_bfe_i32 {{d}}, {{a}}, {spec:#x}", "i32 -> i32 scc", lambda a, s=spec: nonzero(signed_field(a, s, 32))),
            (f"s_bfe_u64 {{d}}, {{a}}, {spec:#x}", "u64 -> u64 scc", lambda a, s=spec: nonzero(field(a, s, 64), "u64")),
            (f"s_bfe_i64 {{d}}, {{a}}, {spec:#x}", "i64 -> i64 scc",
             lambda a, s=spec: nonzero(signed_field(a, s, 64), "u64")),
        )
    ),
]  # fmt: skip

ONE = [
    Scalar("s_mov_b32 {d}, {a}", "u32 -> u32", lambda a: a),
    Scalar("s_mov_b32 {d}, 0xdeadbeef", "-> u32", lambda: 0xDEADBEEF),
    Scalar("s_mov_b32 {d}, -16", "-> i32", lambda: -16),
    Scalar("s_mov_b32 {d}, 0.5", "-> u32", lambda: 0x3F000000),
    Scalar("s_mov_b64 {d}, {a}", "u64 -> u64", lambda a: a),
    Scalar("s_mov_b64 {d}, -1", "-> i64", lambda: -1),
    Scalar("s_mov_b64 {d}, 0x12345678", "-> u64", lambda: 0x12345678),
    Scalar("s_cmov_b32 {d}, {a}", "u32 u32 u32 scc -> u32", lambda a, b, c, scc: a if scc else c),
    Scalar("s_cmov_b64 {d}, {a}", "u64 u64 u64 scc -> u64", lambda a, b, c, scc: a if scc else c),
    Scalar("s_not_b32 {d}, {a}", "u32 -> u32 scc", lambda a: nonzero(~a)),
    Scalar("s_not_b64 {d}, {a}", "u64 -> u64 scc", lambda a: nonzero(~a, "u64")),
    Scalar("s_brev_b32 {d}, {a}", "u32 -> u32", lambda a: mirrored(a, 32)),
    Scalar("s_brev_b64 {d}, {a}", "u64 -> u64", lambda a: mirrored(a, 64)),
    Scalar("s_bcnt0_i32_b32 {d}, {a}", "u32 -> u32 scc", lambda a: nonzero(32 - a.bit_count())),
    Scalar("s_bcnt0_i32_b64 {d}, {a}", "u64 -> u32 scc", lambda a: nonzero(64 - a.bit_count())),
    Scalar("s_bcnt1_i32_b32 {d}, {a}", "u32 -> u32 scc", lambda a: nonzero(a.bit_count())),
    Scalar("s_bcnt1_i32_b64 {d}, {a}", "u64 -> u32 scc", lambda a: nonzero(a.bit_count())),
    Scalar("s_ff0_i32_b32 {d}, {a}", "u32 -> i32", lambda a: first(a, 32, 0)),
    Scalar("s_ff0_i32_b64 {d}, {a}", "u64 -> i32", lambda a: first(a, 64, 0)),
    Scalar("s_ff1_i32_b32 {d}, {a}", "u32 -> i32", lambda a: first(a, 32, 1)),
    Scalar("s_ff1_i32_b64 {d}, {a}", "u64 -> i32", lambda a: first(a, 64, 1)),
    Scalar("s_flbit_i32_b32 {d}, {a}", "u32 -> i32", lambda a: leading(a, 32)),
    Scalar("s_flbit_i32_b64 {d}, {a}", "u64 -> i32", lambda a: leading(a, 64)),
    Scalar("s_flbit_i32 {d}, {a}", "u32 -> i32", lambda a: changed(a, 32)),
    Scalar("s_sext_i32_i8 {d}, {a}", "u32 -> i32", lambda a: (a & 0xFF ^ 0x80) - 0x80),
    Scalar("s_sext_i32_i16 {d}, {a}", "u32 -> i32", lambda a: (a & 0xFFFF ^ 0x8000) - 0x8000),
    Scalar("s_bitset0_b32 {d}, {a}", "u32 u32 u32 -> u32", lambda a, b, c: c & ~(1 << a % 32)),
    Scalar("s_bitset1_b32 {d}, {a}", "u32 u32 u32 -> u32", lambda a, b, c: c | 1 << a % 32),
    Scalar("s_bitset0_b64 {d}, {a}", "u32 u32 u64 -> u64", lambda a, b, c: c & ~(1 << a % 64)),
    Scalar("s_bitset1_b64 {d}, {a}", "u32 u32 u64 -> u64", lambda a, b, c: c | 1 << a % 64),
    Scalar("s_flbit_i32_i64 {d}, {a}", "u64 -> i32", lambda a: changed(a, 64)),
    Scalar("s_bitreplicate_b64_b32 {d}, {a}", "u32 -> u64", lambda a: sum(3 << 2 * i for i in range(32) if a >> i & 1)),
    *(
        Scalar(f"s_{name}_b{bits} {{d}}, {{a}}", f"u{bits} -> u{bits} scc",
               lambda a, f=f, bits=bits: nonzero(f(a, bits), f"u{bits}"))
        for bits in (32, 64) for name, f in (("wqm", whole_quads), ("quadmask", quads))
    ),
    Scalar("s_abs_i32 {d}, {a}", "i32 -> i32 scc", lambda a: nonzero(abs(a))),
]  # fmt: skip

EXEC = [
    saveexec(name, apply)
    for name, apply in {
        "and": lambda s, x: s & x, "or": lambda s, x: s | x, "xor": lambda s, x: s ^ x, "andn2": lambda s, x: s & ~x,
        "orn2": lambda s, x: s | ~x, "nand": lambda s, x: ~(s & x), "nor": lambda s, x: ~(s | x),
        "xnor": lambda s, x: ~(s ^ x), "andn1": lambda s, x: ~s & x, "orn1": lambda s, x: ~s | x,
    }.items()
]  # fmt: skip

CONDITIONS = [
    *(
        Scalar(f"s_cmp_{name}_{kind} {{a}}, {{b}}", f"{kind} {kind} -> scc", lambda a, b, f=f: int(f(a, b)))
        for kind in ("i32", "u32") for name, f in COMPARE.items()
    ),
    Scalar("s_cmp_eq_u64 {a}, {b}", "u64 u64 -> scc", lambda a, b: int(a == b)),
    Scalar("s_cmp_lg_u64 {a}, {b}", "u64 u64 -> scc", lambda a, b: int(a != b)),
    Scalar("s_bitcmp0_b32 {a}, {b}", "u32 u32 -> scc", lambda a, b: 1 - (a >> b % 32 & 1)),
    Scalar("s_bitcmp1_b32 {a}, {b}", "u32 u32 -> scc", lambda a, b: a >> b % 32 & 1),
    Scalar("s_bitcmp0_b64 {a}, {b}", "u64 u32 -> scc", lambda a, b: 1 - (a >> b % 64 & 1)),
    Scalar("s_bitcmp1_b64 {a}, {b}", "u64 u32 -> scc", lambda a, b: a >> b % 64 & 1),
]  # fmt: skip

# SIMM16 is sign-extended, for unsigned compares zero-extended.
IMMEDIATE = [
    *(
        Scalar(f"s_cmpk_{name}_i32 {{a}}, {k:#x}", "i32 -> scc", lambda a, f=f, k=k: int(f(a, (k ^ 0x8000) - 0x8000)))
        for k in (0x80, 0x7FFF, 0xFFFF) for name, f in COMPARE.items()
    ),
    *(
        Scalar(f"s_cmpk_{name}_u32 {{a}}, {k:#x}", "u32 -> scc", lambda a, f=f, k=k: int(f(a, k)))
        for k in (0x80, 0xFFFF) for name, f in COMPARE.items()
    ),
    Scalar("s_movk_i32 {d}, 0x7fff", "-> i32", lambda: 0x7FFF),
    Scalar("s_movk_i32 {d}, 0x8000", "-> i32", lambda: -0x8000),
    Scalar("s_cmovk_i32 {d}, 0xfff0", "u32 u32 i32 scc -> i32", lambda a, b, c, scc: -16 if scc else c),
    Scalar("s_addk_i32 {d}, 0x400", "u32 u32 i32 -> i32 scc", lambda a, b, c: overflow(c + 0x400)),
    Scalar("s_addk_i32 {d}, 0x8000", "u32 u32 i32 -> i32 scc", lambda a, b, c: overflow(c - 0x8000)),
    Scalar("s_mulk_i32 {d}, 0x410", "u32 u32 i32 -> i32", lambda a, b, c: c * 0x410),
    Scalar("s_mulk_i32 {d}, 0xfff9", "u32 u32 i32 -> i32", lambda a, b, c: c * -7),
]  # fmt: skip

# A branch that is taken skips the 1; %= is a number of the row's own.
BRANCHES = [
    Scalar("s_branch L%=\ns_mov_b32 {d}, 1\nL%=:", "u32 u32 i32 -> i32", lambda a, b, c: c),
    Scalar("s_cbranch_scc0 L%=\ns_mov_b32 {d}, 1\nL%=:", "u32 u32 i32 scc -> i32", lambda a, b, c, s: 1 if s else c),
    Scalar("s_cbranch_scc1 L%=\ns_mov_b32 {d}, 1\nL%=:", "u32 u32 i32 scc -> i32", lambda a, b, c, s: c if s else 1),
    Scalar("s_mov_b64 vcc, {b}\ns_cbranch_vccz L%=\ns_mov_b32 {d}, 1\nL%=:", "u32 u64 i32 -> i32",
           lambda a, b, c: 1 if b else c),
    Scalar("s_mov_b64 vcc, {b}\ns_cbranch_vccnz L%=\ns_mov_b32 {d}, 1\nL%=:", "u32 u64 i32 -> i32",
           lambda a, b, c: c if b else 1),
    Scalar("s_mov_b64 exec, {b}\ns_cbranch_execz L%=\ns_mov_b32 {d}, 1\nL%=:\ns_mov_b64 exec, -1", "u32 u64 i32 -> i32",
           lambda a, b, c: 1 if b else c),
    Scalar("s_mov_b64 exec, {b}\ns_cbranch_execnz L%=\ns_mov_b32 {d}, 1\nL%=:\ns_mov_b64 exec, -1",
           "u32 u64 i32 -> i32", lambda a, b, c: c if b else 1),
    Scalar("s_nop 0\ns_nop 15\ns_waitcnt vmcnt(0) lgkmcnt(0)\ns_barrier", "u32 u32 i32 -> i32", lambda a, b, c: c),
    Scalar("s_setprio 1\ns_sleep 1", "u32 u32 i32 -> i32", lambda a, b, c: c),
]  # fmt: skip

ROWS = [*TWO, *ONE, *EXEC, *CONDITIONS, *IMMEDIATE, *BRANCHES]
LOOP = "s_cmp_lt_u32 s2, 64\ns_cbranch_scc1 LOOP"
FIRST = 16
LIMITED = Options(poison=False, deferred=False, max_instructions=100_000)  # a loop that does not end is a failure
OPCODES = set().union(*(mnemonics(row.asm) for row in ROWS)) | mnemonics(LOOP)
OPCODES |= {"s_getpc_b64", "s_setpc_b64", "s_swappc_b64", "s_call_b64"}


@functools.cache
def _cases(round_: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """a, b and c of 64 trips, and SCC before."""
    rng = np.random.default_rng(77 + round_)
    edges = np.concatenate([LONG_EDGES[[0, 1, 6, 7, 8, 10, 11, 12]]])
    pairs = np.arange(64)
    a = edges[pairs // 8]
    b = (SHIFTS if round_ == 0 else edges)[pairs % 8]
    if round_ == 2:
        a, b = rng.integers(0, 2**64, (2, 64), np.uint64)
    c = rng.integers(0, 2**64, 64, np.uint64)
    c[::3] = edges[rng.integers(0, 8, 22)]
    return a, b, c, rng.integers(0, 2, 64)


def _registers(kind: str, place: int) -> str:
    return f"s[{place}:{place + 1}]" if kind.endswith("64") else f"s{place}"


def _lines(number: int, row: Scalar, vgpr: int) -> tuple[list[str], int]:
    """Assembly of one row, and the VGPR after the row's results."""
    kinds = [kind for kind in row.results if kind != "scc"]
    names = {
        letter: _registers(kind, PLACES[letter])
        for letter, kind in [
            *zip("ab", (k for k in row.operands if k != "scc"), strict=False),
            *zip("de", kinds or ["u32"], strict=False),
        ]
    }
    lines = ["s_mov_b64 s[12:13], s[14:15]"]
    if "saveexec" in row.asm:
        lines.append("s_mov_b64 exec, s[6:7]")
    body = row.asm.replace("%=", str(number)).format(**names)
    if "s_mov_b64 vcc" in body or "s_mov_b64 exec" in body.splitlines()[0]:
        lines.append(body.splitlines()[0])
        body = "\n".join(body.splitlines()[1:])
    lines += ["s_cmp_lg_u32 s8, 0", body]
    if "saveexec" not in row.asm:
        lines.append("s_cselect_b32 s9, 1, 0")
    for letter, kind in zip("de", kinds, strict=False):
        for i in range(2 if kind.endswith("64") else 1):
            lines.append(f"v_writelane_b32 v{vgpr}, s{PLACES[letter] + i}, m0")
            vgpr += 1
    lines.append(f"v_writelane_b32 v{vgpr}, s9, m0")
    return lines, vgpr + 1


def _run(arch: str, rows: list[Scalar]) -> list[list[np.ndarray]]:
    """For each row the dwords it gave, [values, 64], in each round."""
    lines = ["s_mov_b32 s2, 0", "LOOP:", "s_mov_b32 m0, s2"]
    sources = {4: 0, 5: 1, 6: 2, 7: 3, 8: 4, 14: 5, 15: 6}
    lines += [f"v_readlane_b32 s{place}, v{vgpr}, s2" for place, vgpr in sources.items()]
    places, vgpr = [], FIRST
    for number, row in enumerate(rows):
        added, end = _lines(number, row, vgpr)
        lines += added
        places.append((vgpr, end))
        vgpr = end
    lines += ["s_add_i32 s2, s2, 1", LOOP]
    found: list[list[np.ndarray]] = [[] for _ in rows]
    for round_ in range(3):
        a, b, c, scc = _cases(round_)
        words = [a, a >> np.uint64(32), b, b >> np.uint64(32), scc, c, c >> np.uint64(32)]
        vgprs = {number: word.astype(np.uint32) for number, word in enumerate(words)}
        state = run_snippet(arch, "\n".join(lines), vgprs=vgprs, options=LIMITED)
        for outcome, (start, end) in zip(found, places, strict=True):
            outcome.append(np.stack([state.vgpr[n] for n in range(start, end)]))
    return found


CALLS = """s_getpc_b64 s[4:5]
    s_getpc_b64 s[6:7]
    s_call_b64 s[8:9], FIRST
    s_mov_b32 s20, 1
    s_branch END
FIRST:
    s_mov_b32 s21, 2
    s_add_u32 s10, s4, 40
    s_addc_u32 s11, s5, 0
    s_swappc_b64 s[12:13], s[10:11]
    s_mov_b32 s22, 3
    s_setpc_b64 s[8:9]
SECOND:
    s_mov_b32 s23, 4
    s_setpc_b64 s[12:13]
END:"""


@pytest.mark.parametrize("arch", ARCHS)
def test_program_counter_and_calls(arch):
    """getpc gives the next instruction's address; call and swappc leave where to return to."""
    state = run_snippet(arch, CALLS)
    address = [state.sgpr[n] | state.sgpr[n + 1] << 32 for n in (4, 6, 8, 12)]
    assert [place - address[0] for place in address] == [0, 4, 8, 32]
    assert [state.sgpr[n] for n in (20, 21, 22, 23)] == [1, 2, 3, 4]


_outcomes: dict[tuple[str, int], Any] = {}


def _outcome(arch: str, row: Scalar) -> Any:
    if (arch, id(row)) not in _outcomes:
        for rows in (ROWS[start : start + 55] for start in range(0, len(ROWS), 55)):
            try:
                found: list[Any] = _run(arch, rows)
            except Exception:
                found = []
                for one in rows:  # some row cannot be run: find out which
                    try:
                        found += _run(arch, [one])
                    except Exception as error:
                        found.append(error)
            _outcomes.update({(arch, id(one)): outcome for one, outcome in zip(rows, found, strict=True)})
    return _outcomes[arch, id(row)]


def _arguments(row: Scalar, values: tuple[int, int, int], scc: int) -> list[int]:
    kinds = [kind for kind in row.operands if kind != "scc"]
    arguments = [wrap(value, kind) for value, kind in zip(values, kinds, strict=False)]
    return arguments + [scc] * ("scc" in row.operands)


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_scalar(row):
    for arch in ARCHS:
        outcome = _outcome(arch, row)
        with on(arch):
            if isinstance(outcome, Exception):
                raise outcome
            for round_, got in enumerate(outcome):
                _compare(row, round_, got)


def _compare(row: Scalar, round_: int, got: np.ndarray) -> None:
    a, b, c, sccs = _cases(round_)
    for trip in range(64):
        arguments = _arguments(row, (int(a[trip]), int(b[trip]), int(c[trip])), int(sccs[trip]))
        expected = row.expected(*arguments)
        values = list(expected) if isinstance(expected, tuple) else [expected]
        if "scc" not in row.results:
            values.append(int(sccs[trip]))
        words = []
        for value, kind in zip(values, [*(k for k in row.results if k != "scc"), "u32"], strict=True):
            words += [value & 0xFFFFFFFF, value >> 32 & 0xFFFFFFFF] if kind.endswith("64") else [value & 0xFFFFFFFF]
        assert [int(word) for word in got[:, trip]] == words, f"{row}: operands {[hex(x) for x in arguments]}"
