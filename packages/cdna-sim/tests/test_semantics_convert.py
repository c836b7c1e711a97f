"""Conversions between integers, float32, float16, bfloat16 and 8-bit floats of both dialects, against ml_dtypes."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from semantics import Row, Table, both, gfx950, normal, truncate_to

F32, F16, U32, I32 = np.float32, np.float16, np.uint32, np.int32
BF16 = ml_dtypes.bfloat16
# What gfx942 and gfx950 call FP8 and BF8.
FP8 = {"gfx942": ml_dtypes.float8_e4m3fnuz, "gfx950": ml_dtypes.float8_e4m3fn}
BF8 = {"gfx942": ml_dtypes.float8_e5m2fnuz, "gfx950": ml_dtypes.float8_e5m2}
EIGHT_BITS = {"fp8": FP8, "bf8": BF8}


def decode(x: np.ndarray, dtype) -> np.ndarray:
    """[64, 4] bytes as [64, 4] float32."""
    return x.view(dtype).astype(F32)


def encode(x: np.ndarray, dtype) -> np.ndarray:
    return x.astype(dtype).view(np.uint8).astype(U32)


def settled(dtype, scale: float = 1.0):
    """Of operands divided by ``scale``: not between the largest number and its double, where documents differ."""
    limit = F32(ml_dtypes.finfo(dtype).max)

    def check(*values: np.ndarray) -> np.ndarray:
        sizes = [np.abs(value / F32(scale)) for value in values[:2]]
        return np.logical_and.reduce([(size <= limit) | (size >= 2 * limit) | np.isnan(size) for size in sizes])

    return check


def a_number(dtype, scale: float = 1.0):
    """Besides: not a NaN, which has more than one encoding in all but the fnuz dialect."""

    def check(*values: np.ndarray) -> np.ndarray:
        results = [(value / F32(scale)).astype(dtype).astype(F32) for value in values[:2]]
        return settled(dtype, scale)(*values) & ~np.isnan(results[0]) & ~np.isnan(results[1])

    return check


def normalised(a: np.ndarray, b: np.ndarray, least: int, steps: int) -> np.ndarray:
    """[least, 1] in that many steps; a NaN gives 0."""
    both_ = np.stack([a, b], 1).astype(np.float64)
    return np.rint(np.clip(np.where(np.isnan(both_), 0, both_), least, 1) * steps)


def halfway(a: np.ndarray, steps: int) -> np.ndarray:
    """Near the middle of two steps, where it is not said which way to round."""
    scaled = np.clip(np.nan_to_num(a.astype(np.float64)), -1, 1) * steps
    return np.abs(np.abs(scaled - np.trunc(scaled)) - 0.5) < 0.01


def low(x: np.ndarray, word: np.ndarray) -> np.ndarray:
    return x & U32(0xFFFF0000) | word


def high(x: np.ndarray, word: np.ndarray) -> np.ndarray:
    return x & U32(0xFFFF) | word << U32(16)


def toward_zero(x: np.ndarray) -> np.ndarray:
    """float16, rounded toward zero; beyond its range the largest number, infinities stay."""
    nearest = x.astype(F16)
    smaller = (nearest.view(np.uint16) - np.uint16(1)).view(F16)
    return np.where((np.abs(nearest.astype(F32)) > np.abs(x)) & np.isfinite(x), smaller, nearest)


def bf16_bits(x: np.ndarray) -> np.ndarray:
    return x.astype(BF16).view(np.uint16)


def integer_rows() -> list[Row]:
    rows = [
        *both("v_cvt_f32_i32", "i32 -> f32", lambda a: a.astype(F32)),
        *both("v_cvt_f32_u32", "u32 -> f32", lambda a: a.astype(F32)),
        *both("v_cvt_i32_f32", "f32 -> i32", lambda a: truncate_to(a, I32)),
        *both("v_cvt_u32_f32", "f32 -> u32", lambda a: truncate_to(a, U32)),
        *both("v_cvt_flr_i32_f32", "f32 -> i32", lambda a: truncate_to(np.floor(a), I32)),
        *both("v_cvt_rpi_i32_f32", "f32 -> i32", lambda a: truncate_to(np.floor(a + F32(0.5)), I32)),
        *both("v_cvt_f16_u16", "u16 -> f16", lambda a: a.astype(F16)),
        *both("v_cvt_f16_i16", "i16 -> f16", lambda a: a.astype(F16)),
        *both("v_cvt_u16_f16", "f16 -> u16", lambda a: truncate_to(a, np.uint16)),
        *both("v_cvt_i16_f16", "f16 -> i16", lambda a: truncate_to(a, np.int16)),
        *both("v_cvt_f64_i32", "i32 -> f64", lambda a: a.astype(np.float64)),
        *both("v_cvt_f64_u32", "u32 -> f64", lambda a: a.astype(np.float64)),
        *both("v_cvt_i32_f64", "f64 -> i32", lambda a: truncate_to(a, I32)),
        *both("v_cvt_u32_f64", "f64 -> u32", lambda a: truncate_to(a, U32)),
        *both("v_cvt_f64_f32", "f32 -> f64", lambda a: a.astype(np.float64)),
        *both("v_cvt_f32_f64", "f64 -> f32", lambda a: a.astype(F32)),
        # A signed 4-bit number of sixteenths.
        *both("v_cvt_off_f32_i4", "u32 -> f32", lambda a: ((a & 15 ^ 8).astype(I32) - 8).astype(F32) / 16),
        Row(
            "v_cvt_pknorm_i16_f32 {d}, {a}, {b}",
            "f32 f32 -> i16x2",
            lambda a, b: normalised(a, b, -1, 32767),
            domain=lambda a, b: ~halfway(a, 32767) & ~halfway(b, 32767),
        ),
        Row(
            "v_cvt_pknorm_u16_f32 {d}, {a}, {b}",
            "f32 f32 -> u16x2",
            lambda a, b: normalised(a, b, 0, 65535),
            domain=lambda a, b: ~halfway(a, 65535) & ~halfway(b, 65535),
        ),
        Row("v_cvt_i32_f32_e64 {d}, -|{a}|", "f32 -> i32", lambda a: truncate_to(-np.abs(a), I32)),
    ]
    for byte in range(4):
        rows += both(f"v_cvt_f32_ubyte{byte}", "u8x4 -> f32", lambda a, byte=byte: a[:, byte].astype(F32))
    return rows


HALVES = Table(
    both("v_cvt_f32_f16", "f16 -> f32", lambda a: a.astype(F32)),
    both("v_cvt_f16_f32", "f32 -> f16", lambda a: a.astype(F16)),
    Row("v_cvt_f32_f16_e64 {d}, -{a} clamp", "f16 -> f32", lambda a: np.clip(-a.astype(F32), 0, 1),
        domain=lambda a: ~np.isnan(a) & (a != 0)),
    Row("v_cvt_pkrtz_f16_f32 {d}, {a}, {b}", "f32 f32 -> f16x2",
        lambda a, b: np.stack([toward_zero(a), toward_zero(b)], 1)),
    gfx950("v_cvt_pk_f16_f32 {d}, {a}, {b}", "f32 f32 -> f16x2", lambda a, b: np.stack([a, b], 1).astype(F16)),
    gfx950("v_cvt_pk_bf16_f32 {d}, {a}, {b}", "f32 f32 -> u16x2", lambda a, b: bf16_bits(np.stack([a, b], 1)),
           domain=lambda a, b: ~np.isnan(a) & ~np.isnan(b)),  # payloads of NaNs are not in the documents
    gfx950("v_cvt_pk_bf16_f32 {d}, {a}, {b}\nv_lshlrev_b32 {d}, 16, {d}", "f32 f32 -> f32",
           lambda a, b: a.astype(BF16).astype(F32)),
    gfx950("v_cvt_pk_bf16_f32 {d}, {a}, {b}\nv_and_b32 {d}, 0xffff0000, {d}", "f32 f32 -> f32",
           lambda a, b: b.astype(BF16).astype(F32)),
    gfx950("v_cvt_pk_bf16_f32 {d}, {a}, {f}\nv_and_b32 {d}, 0xffff0000, {d}", "f32 -> f32",
           lambda a: np.full(64, -2.75, F32)),
    gfx950("v_cvt_f32_bf16_e32 {d}, {a}", "u16 -> f32", lambda a: a.view(BF16).astype(F32)),
)  # fmt: skip

INTEGERS = Table(integer_rows())


def eight_bit_rows(arch: str) -> list[Row]:
    """Decoding of all 256 bytes in every position, and encoding into either half of a register."""
    rows = []
    for name, dtypes in EIGHT_BITS.items():
        dtype = dtypes[arch]
        rows += [
            Row(f"v_cvt_f32_{name}_e32 {{d}}, {{a}}", "u8x4 -> f32", lambda a, t=dtype: decode(a, t)[:, 0]),
            Row(f"v_cvt_pk_f32_{name}_e32 {{d}}, {{a}}", "u8x4 -> f32x2", lambda a, t=dtype: decode(a, t)[:, :2]),
            Row(f"v_cvt_pk_f32_{name}_sdwa {{d}}, {{a}} src0_sel:WORD_1", "u8x4 -> f32x2",
                lambda a, t=dtype: decode(a, t)[:, 2:]),
            Row(f"v_mov_b32 {{d}}, {{c}}\nv_cvt_pk_{name}_f32 {{d}}, {{a}}, {{b}}", "f32 f32 u32 -> u32",
                lambda a, b, c, t=dtype: low(c, encode(a, t) | encode(b, t) << 8), domain=a_number(dtype)),
            Row(f"v_mov_b32 {{d}}, {{c}}\nv_cvt_pk_{name}_f32 {{d}}, {{a}}, -{{b}} op_sel:[0,0,1]",
                "f32 f32 u32 -> u32", lambda a, b, c, t=dtype: high(c, encode(a, t) | encode(-b, t) << 8),
                domain=a_number(dtype)),
            Row(f"v_cvt_pk_{name}_f32 {{d}}, {{a}}, {{b}}\nv_cvt_f32_{name}_e32 {{d}}, {{d}}", "f32 f32 -> f32",
                lambda a, b, t=dtype: a.astype(t).astype(F32), domain=settled(dtype)),
        ]  # fmt: skip
        rows += [
            Row(f"v_cvt_f32_{name}_sdwa {{d}}, {{a}} src0_sel:BYTE_{byte}", "u8x4 -> f32",
                lambda a, t=dtype, byte=byte: decode(a, t)[:, byte])
            for byte in range(4)
        ]  # fmt: skip
    return [Row(row.asm, row.types, row.expected, archs=(arch,), domain=row.domain) for row in rows]


EIGHT = Table(eight_bit_rows("gfx942"), eight_bit_rows("gfx950"))


def scaled_rows() -> list[Row]:
    """Conversions with the exponent of a float32 as their scale."""
    rows = []
    for name, dtypes in EIGHT_BITS.items():
        dtype = dtypes["gfx950"]
        for scale in (0.25, 1.0, 16.0):
            rows += [
                gfx950(f"s_mov_b32 s12, {scale}\nv_cvt_scalef32_pk_f32_{name} {{d}}, {{a}}, s12", "u8x4 -> f32x2",
                       lambda a, t=dtype, scale=scale: decode(a, t)[:, :2] * F32(scale)),
                gfx950(f"s_mov_b32 s12, {scale}\nv_cvt_scalef32_pk_f32_{name} {{d}}, {{a}}, s12 op_sel:[1,0,0]",
                       "u8x4 -> f32x2", lambda a, t=dtype, scale=scale: decode(a, t)[:, 2:] * F32(scale)),
                gfx950(f"s_mov_b32 s12, {scale}\nv_mov_b32 {{d}}, {{c}}\n"
                       f"v_cvt_scalef32_pk_{name}_f32 {{d}}, {{a}}, {{b}}, s12", "f32 f32 u32 -> u32",
                       lambda a, b, c, t=dtype, scale=scale: low(
                           c, encode(a / F32(scale), t) | encode(b / F32(scale), t) << 8),
                       domain=lambda *values, t=dtype, scale=scale: a_number(t, scale)(*values) & normal(*values[:2])),
            ]  # fmt: skip
    return rows


SCALED = Table(scaled_rows())
TABLES = (INTEGERS, HALVES, EIGHT, SCALED)


@pytest.mark.parametrize("row", INTEGERS.rows, ids=str)
def test_integers(row):
    INTEGERS.check(row)


@pytest.mark.parametrize("row", HALVES.rows, ids=str)
def test_halves(row):
    HALVES.check(row)


@pytest.mark.parametrize("row", EIGHT.rows, ids=str)
def test_eight_bits(row):
    EIGHT.check(row)


@pytest.mark.parametrize("row", SCALED.rows, ids=str)
def test_eight_bits_with_a_scale(row):
    SCALED.check(row)
