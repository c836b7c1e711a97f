"""VOPC: every condition of every type, into VCC, into an SGPR pair, and into EXEC."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from semantics import ARCHS, CARRY, SCALAR, Row, Table, active_lanes, run_snippet

S = np.uint32(SCALAR).view(np.int32)

INTEGER = {
    "f": lambda a, b: np.zeros(64, bool),
    "lt": np.less,
    "eq": np.equal,
    "le": np.less_equal,
    "gt": np.greater,
    "ne": np.not_equal,
    "ge": np.greater_equal,
    "t": lambda a, b: np.ones(64, bool),
}


def _unordered(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return np.isnan(a) | np.isnan(b)


FLOAT = {
    "f": INTEGER["f"],
    "lt": np.less,
    "eq": np.equal,
    "le": np.less_equal,
    "gt": np.greater,
    "lg": lambda a, b: (a < b) | (a > b),
    "ge": np.greater_equal,
    "o": lambda a, b: ~_unordered(a, b),
    "u": _unordered,
    "nge": lambda a, b: ~(a >= b),
    "nlg": lambda a, b: ~((a < b) | (a > b)),
    "ngt": lambda a, b: ~(a > b),
    "nle": lambda a, b: ~(a <= b),
    "neq": lambda a, b: ~(a == b),
    "nlt": lambda a, b: ~(a < b),
    "tru": INTEGER["t"],
}
# Bits of V_CMP_CLASS: signalling NaN, quiet NaN, -inf, -normal, -denormal, -0, +0, +denormal, +normal, +inf.
QUIET_NAN, MINUS_INF, MINUS_NORMAL, MINUS_DENORMAL, MINUS_ZERO, ZERO, DENORMAL, NORMAL, INF = range(1, 10)


def float_class(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    tiny = np.finfo(np.float32).tiny
    negative, size = np.signbit(a), np.abs(a)
    kind = np.select(
        [np.isnan(a), np.isinf(a), size >= tiny, size > 0],
        [QUIET_NAN, np.where(negative, MINUS_INF, INF), np.where(negative, MINUS_NORMAL, NORMAL),
         np.where(negative, MINUS_DENORMAL, DENORMAL)],
        np.where(negative, MINUS_ZERO, ZERO),
    )  # fmt: skip
    return (b >> kind.astype(np.uint32) & 1).astype(bool)


def rows(kind: str, conditions: dict[str, Callable[..., np.ndarray]]) -> list[Row]:
    """Each condition in its 32-bit and 64-bit encoding."""
    types = f"{kind} {kind} -> mask"
    return [
        row
        for name, expected in conditions.items()
        for row in (
            Row(f"v_cmp_{name}_{kind}_e32 vcc, {{a}}, {{b}}\ns_mov_b64 {{d}}, vcc", types, expected),
            Row(f"v_cmp_{name}_{kind}_e64 {{d}}, {{a}}, {{b}}", types, expected),
        )
    ]


def into_exec(kind: str, conditions: dict[str, Callable[..., np.ndarray]]) -> list[Row]:
    """V_CMPX writes VCC and EXEC."""
    return [
        Row(
            f"s_mov_b64 s[12:13], exec\nv_cmpx_{name}_{kind}_e32 vcc, {{a}}, {{b}}\n"
            "s_mov_b64 {d}, exec\ns_mov_b64 exec, s[12:13]\ns_mov_b64 {e}, vcc",
            f"{kind} {kind} -> mask mask",
            lambda a, b, expected=expected: (expected(a, b), expected(a, b)),
        )
        for name, expected in conditions.items()
    ]


INTEGERS = Table(*(rows(kind, INTEGER) for kind in ("i32", "u32", "i64", "u64", "i16", "u16")))
FLOATS = Table(
    rows("f32", FLOAT),
    rows("f16", FLOAT),
    rows("f64", FLOAT),
    Row("v_cmp_lt_f32_e64 {d}, -|{a}|, {b}", "f32 f32 -> mask", lambda a, b: -np.abs(a) < b),
    Row("v_cmp_gt_f32_e64 {d}, |{a}|, -{b}", "f32 f32 -> mask", lambda a, b: np.abs(a) > -b),
    Row("v_cmp_o_f32_e64 {d}, {a}, {a}", "f32 -> mask", lambda a: ~np.isnan(a)),
    Row("v_cmp_lt_f32_e32 vcc, 0, {b}\ns_mov_b64 {d}, vcc", "f32 f32 -> mask", lambda a, b: b > 0),
    Row("v_cmp_class_f32_e64 {d}, {a}, {b}", "f32 u32 -> mask", float_class),
    Row("v_cmp_class_f32_e32 vcc, {a}, {b}\ns_mov_b64 {d}, vcc", "f32 u32 -> mask", float_class),
)
SCALARS = Table(
    Row("v_cmp_gt_u32_e32 vcc, 32, {b}\ns_mov_b64 {d}, vcc", "u32 u32 -> mask", lambda a, b: b < 32),
    Row("v_cmp_gt_i32_e32 vcc, {s}, {b}\ns_mov_b64 {d}, vcc", "i32 i32 -> mask", lambda a, b: b < S),
    Row("v_cmp_le_i32_e64 {d}, {s}, {b}", "i32 i32 -> mask", lambda a, b: b >= S),
    Row("v_cmp_gt_i64_e32 vcc, {k}, {b}\ns_mov_b64 {d}, vcc", "i64 i64 -> mask", lambda a, b: b < np.int64(CARRY)),
    Row("v_cmp_lt_i64_e64 {d}, {k}, {b}", "i64 i64 -> mask", lambda a, b: b > np.int64(CARRY)),
    Row("v_cmp_eq_u32_e64 {d}, 0, {b}", "u32 u32 -> mask", lambda a, b: b == 0),
)
EXEC = Table(
    into_exec("i32", {name: INTEGER[name] for name in ("lt", "eq", "le", "gt", "ne", "ge")}),
    into_exec("u32", {name: INTEGER[name] for name in ("lt", "eq", "le", "gt", "ne", "ge")}),
    into_exec("f32", {name: FLOAT[name] for name in ("lt", "eq", "ge", "neq", "u", "nlt")}),
)
TABLES = (INTEGERS, FLOATS, SCALARS, EXEC)


@pytest.mark.parametrize("row", INTEGERS.rows, ids=str)
def test_integers(row):
    INTEGERS.check(row)


@pytest.mark.parametrize("row", FLOATS.rows, ids=str)
def test_floats(row):
    FLOATS.check(row)


@pytest.mark.parametrize("row", SCALARS.rows, ids=str)
def test_scalar_operands(row):
    SCALARS.check(row)


@pytest.mark.parametrize("row", EXEC.rows, ids=str)
def test_into_exec(row):
    EXEC.check(row)


@pytest.mark.parametrize("arch", ARCHS)
def test_class_of_signalling_nans(arch):
    """Bit 0 of the classes; the first bit of the fraction makes a NaN quiet."""
    values = np.resize(np.array([0x7F800001, 0xFFBFFFFF, 0x7FC00000, 0xFFFFFFFF], np.uint32), 64)
    for bit, expected in ((1, [1, 1, 0, 0]), (2, [0, 0, 1, 1])):
        state = run_snippet(arch, f"v_cmp_class_f32_e64 s[4:5], v0, {bit}", vgprs={0: values})
        assert active_lanes(state.sgpr[4] | state.sgpr[5] << 32).tolist() == np.resize(expected, 64).tolist()
