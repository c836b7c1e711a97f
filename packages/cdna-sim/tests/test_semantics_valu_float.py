"""Floating-point instructions of the vector unit, their modifiers, and packed float32."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest

from semantics import (
    ARCHS,
    CARRY_LANES,
    FULL,
    SCALAR_FLOAT,
    Row,
    Table,
    both,
    clamp01,
    fma,
    fmax,
    fmin,
    gfx950,
    normal,
    run_snippet,
)

F32, F16 = np.float32, np.float16
ONE, HALF = F32(1), F32(0.5)


def legacy_product(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return np.where((a == 0) | (b == 0), F32(0), a * b)


def med3(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """The middle of three; the least of what is left where one is a NaN."""
    some_nan = np.isnan(a) | np.isnan(b) | np.isnan(c)
    largest = fmax(fmax(a, b), c)
    middle = np.where(largest == a, fmax(b, c), np.where(largest == b, fmax(a, c), fmax(a, b)))
    return np.where(some_nan, fmin(fmin(a, b), c), middle)


def maximum3(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """IEEE 754-2019 maximum: a NaN wins."""
    some_nan = np.isnan(a) | np.isnan(b) | np.isnan(c)
    return np.where(some_nan, a.dtype.type(np.nan), fmax(fmax(a, b), c))


def minimum3(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    some_nan = np.isnan(a) | np.isnan(b) | np.isnan(c)
    return np.where(some_nan, a.dtype.type(np.nan), fmin(fmin(a, b), c))


def scaled(a: np.ndarray, exponent: np.ndarray) -> np.ndarray:
    """a * 2**exponent, rounded once."""
    return np.ldexp(a.astype(np.float64), np.clip(exponent, -600, 600)).astype(a.dtype)


def mantissa(a: np.ndarray) -> np.ndarray:
    return np.where(np.isfinite(a), np.frexp(a)[0], a)


def exponent(a: np.ndarray) -> np.ndarray:
    return np.where(np.isfinite(a), np.frexp(a)[1], 0)


def elements(*columns: np.ndarray) -> np.ndarray:
    return np.stack(columns, axis=1)


def special(x: np.ndarray) -> np.ndarray:
    return ~np.isfinite(x) | (x == 0)


def well_apart(b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """c / b, and both, are far from the ends of the range: neither operand needs scaling."""
    sizes = [np.abs(x.astype(np.float64)) for x in (b, c, c.astype(np.float64) / b)]
    return np.logical_and.reduce([(size > 2.0**-90) & (size < 2.0**90) for size in sizes])


def wide_range(*values: np.ndarray) -> np.ndarray:
    """Operands whose reciprocals and roots are no denormals either."""
    return normal(*values) & np.logical_and.reduce([(np.abs(x) < 2.0**126) | ~np.isfinite(x) for x in values])


def fma_exact(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """float64, by way of fractions, whose conversion to float rounds once."""
    plain = a * b + c
    for lane in np.flatnonzero(np.isfinite(a) & np.isfinite(b) & np.isfinite(c)):
        exact = Fraction(a[lane]) * Fraction(b[lane]) + Fraction(c[lane])
        if exact:
            try:
                plain[lane] = float(exact)
            except OverflowError:
                plain[lane] = np.inf if exact > 0 else -np.inf
    return plain


def quotient_fixed(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """V_DIV_FIXUP of a quotient a = c / b: special operands decide, otherwise the signs of b and c."""
    sign = np.where(np.signbit(b) ^ np.signbit(c), F32(-1), F32(1))
    return np.select(
        [np.isnan(c) | np.isnan(b) | ((b == 0) & (c == 0)) | (np.isinf(b) & np.isinf(c)), (b == 0) | np.isinf(c),
         np.isinf(b) | (c == 0)],
        [np.full(64, F32(np.nan)), sign * F32(np.inf), sign * F32(0)],
        sign * np.abs(a),
    )  # fmt: skip


# Division as LLVM expands it, {a} by {b}.
DIVISION = """v_div_scale_f32 v240, s[12:13], {b}, {b}, {a}
v_div_scale_f32 v241, vcc, {a}, {b}, {a}
v_rcp_f32_e32 v242, v240
v_fma_f32 v243, -v240, v242, 1.0
v_fma_f32 v242, v243, v242, v242
v_mul_f32_e32 v243, v241, v242
v_fma_f32 v244, -v240, v243, v241
v_fma_f32 v243, v244, v242, v243
v_fma_f32 v240, -v240, v243, v241
v_div_fmas_f32 v240, v240, v242, v243
v_div_fixup_f32 {d}, v240, {b}, {a}"""

TWO_OPERANDS = Table(
    both("v_add_f32", "f32 f32 -> f32", lambda a, b: a + b),
    both("v_sub_f32", "f32 f32 -> f32", lambda a, b: a - b),
    both("v_subrev_f32", "f32 f32 -> f32", lambda a, b: b - a),
    both("v_mul_f32", "f32 f32 -> f32", lambda a, b: a * b),
    both("v_max_f32", "f32 f32 -> f32", fmax),
    both("v_min_f32", "f32 f32 -> f32", fmin),
    Row("v_mul_legacy_f32 {d}, {a}, {b}", "f32 f32 -> f32", legacy_product),
    Row("v_max_f32_e32 {d}, 0, {b}", "f32 f32 -> f32", lambda a, b: fmax(np.zeros_like(b), b)),
    Row("v_mul_f32_e32 {d}, 0x4f7ffffe, {b}", "f32 f32 -> f32", lambda a, b: F32(4294966784.0) * b),
    Row("v_mul_f32_e32 {d}, 0.15915494, {b}", "f32 f32 -> f32", lambda a, b: np.uint32(0x3E22F983).view(F32) * b),
    Row("v_add_f32_e32 {d}, -0.5, {b}", "f32 f32 -> f32", lambda a, b: b - HALF),
    Row("v_add_f32_e32 {d}, {f}, {b}", "f32 f32 -> f32", lambda a, b: SCALAR_FLOAT + b),
    # An integer inline constant is its bits: 1 is the smallest denormal.
    Row("v_add_f32_e32 {d}, 1, {b}", "f32 f32 -> f32", lambda a, b: np.uint32(1).view(F32) + b),
    Row("v_ldexp_f32 {d}, {a}, {b}", "f32 i32 -> f32", scaled),
)  # fmt: skip

FUSED = Table(
    Row("v_fma_f32 {d}, {a}, {b}, {c}", "f32 f32 f32 -> f32", fma),
    Row("v_fma_f32 {d}, {a}, {b}, 0", "f32 f32 -> f32", lambda a, b: fma(a, b, np.zeros(64))),
    Row("v_fma_f32 {d}, -{a}, |{b}|, {c}", "f32 f32 f32 -> f32", lambda a, b, c: fma(-a, np.abs(b), c)),
    Row("v_fma_f32 {d}, {a}, {b}, -|{c}| clamp", "f32 f32 f32 -> f32", lambda a, b, c: clamp01(fma(a, b, -np.abs(c))),
        domain=lambda a, b, c: fma(a, b, -np.abs(c)) != 0),  # the sign of a clamped zero is not in the documents
    Row("v_mov_b32 {d}, {c}\nv_fmac_f32_e32 {d}, {a}, {b}", "f32 f32 f32 -> f32", fma),
    Row("v_mov_b32 {d}, {c}\nv_fmac_f32_e64 {d}, -{a}, |{b}|", "f32 f32 f32 -> f32",
        lambda a, b, c: fma(-a, np.abs(b), c)),
    Row("v_fmaak_f32 {d}, {a}, {b}, 0x40490fdb", "f32 f32 -> f32", lambda a, b: fma(a, b, F32(np.pi))),
    Row("v_fmamk_f32 {d}, {a}, 0x40490fdb, {b}", "f32 f32 -> f32", lambda a, b: fma(a, np.full(64, F32(np.pi)), b)),
    Row("v_max3_f32 {d}, {a}, {b}, {c}", "f32 f32 f32 -> f32", lambda a, b, c: fmax(fmax(a, b), c)),
    Row("v_min3_f32 {d}, {a}, {b}, {c}", "f32 f32 f32 -> f32", lambda a, b, c: fmin(fmin(a, b), c)),
    # Which zero is the median of zeros of both signs is left open by "==".
    Row("v_med3_f32 {d}, {a}, {b}, {c}", "f32 f32 f32 -> f32", med3, domain=lambda a, b, c: med3(a, b, c) != 0),
    Row("v_med3_f32 {d}, {a}, 0, 1.0", "f32 -> f32", lambda a: np.where(np.isnan(a), 0, np.clip(a, 0, 1)),
        domain=lambda a: ~(np.isnan(a) | (a == 0))),
    gfx950("v_maximum3_f32 {d}, {a}, {b}, {c}", "f32 f32 f32 -> f32", maximum3),
    gfx950("v_minimum3_f32 {d}, {a}, {b}, {c}", "f32 f32 f32 -> f32", minimum3),
    gfx950("v_maximum3_f32 {d}, {a}, {a}, 0", "f32 -> f32", lambda a: maximum3(a, a, np.zeros_like(a))),
)  # fmt: skip

ONE_OPERAND = Table(
    both("v_floor_f32", "f32 -> f32", np.floor),
    both("v_ceil_f32", "f32 -> f32", np.ceil),
    both("v_trunc_f32", "f32 -> f32", np.trunc),
    both("v_rndne_f32", "f32 -> f32", np.rint),
    # Of tiny negative numbers 1 - x rounds to 1, which some documents exclude; of infinities it is inf - inf.
    both("v_fract_f32", "f32 -> f32", lambda a: a - np.floor(a), domain=lambda a: (np.abs(a) > 1e-7) & np.isfinite(a)),
    both("v_frexp_mant_f32", "f32 -> f32", mantissa),
    both("v_frexp_exp_i32_f32", "f32 -> i32", exponent, domain=lambda a: a != 0),
    both("v_rcp_f32", "f32 -> f32", lambda a: ONE / a, ulp=1, domain=wide_range),
    both("v_rcp_iflag_f32", "f32 -> f32", lambda a: ONE / a, ulp=1, domain=wide_range),
    both("v_rsq_f32", "f32 -> f32", lambda a: (1 / np.sqrt(a.astype(np.float64))).astype(F32), ulp=1, domain=normal),
    both("v_sqrt_f32", "f32 -> f32", np.sqrt, ulp=1, domain=normal),
    both("v_exp_f32", "f32 -> f32", lambda a: np.exp2(a.astype(np.float64)).astype(F32), ulp=1,
         domain=lambda a: normal(a) & ~((a < -126) & (a > -200))),
    # Near 1 the logarithm cancels: one step of float32 there is not what the accuracy means.
    both("v_log_f32", "f32 -> f32", lambda a: np.log2(a.astype(np.float64)).astype(F32), ulp=1,
         domain=lambda a: normal(a) & ~((a > 0.9) & (a < 1.1) & (a != 1))),
)  # fmt: skip

# Of one turn, not of radians. Two is added because the accuracy given is absolute: near zero a step says nothing.
WAVES = Table(
    Row(f"v_{name}_f32_e32 {{d}}, {{a}}\nv_add_f32_e32 {{d}}, 2.0, {{d}}", "f32 -> f32",
        lambda a, f=f: (f(2 * np.pi * a.astype(np.float64)) + 2).astype(F32), ulp=8,
        domain=lambda a: normal(a) & (np.abs(a) < 256))
    for name, f in (("sin", np.sin), ("cos", np.cos))
)  # fmt: skip

MODIFIERS = Table(
    Row("v_add_f32_e64 {d}, -{a}, {b}", "f32 f32 -> f32", lambda a, b: -a + b),
    Row("v_add_f32_e64 {d}, |{a}|, -|{b}|", "f32 f32 -> f32", lambda a, b: np.abs(a) - np.abs(b)),
    Row("v_mul_f32_e64 {d}, -|{a}|, {f}", "f32 -> f32", lambda a: -np.abs(a) * SCALAR_FLOAT),
    Row("v_max_f32_e64 {d}, -{a}, 0", "f32 -> f32", lambda a: fmax(-a, np.zeros_like(a))),
    Row("v_mul_f32_e64 {d}, {a}, {b} clamp", "f32 f32 -> f32", lambda a, b: clamp01(a * b),
        domain=lambda a, b: a * b != 0),
    Row("v_add_f32_e64 {d}, {a}, {b} clamp", "f32 f32 -> f32", lambda a, b: clamp01(a + b),
        domain=lambda a, b: a + b != 0),
    Row("v_max_f32_e64 {d}, {a}, {a} clamp", "f32 -> f32", clamp01, domain=lambda a: a != 0),
    # "If output denormals are enabled, then output modifiers are ignored", and in IEEE mode too.
    Row("v_mul_f32_e64 {d}, {a}, {b} mul:2", "f32 f32 -> f32", lambda a, b: a * b),
    Row("v_add_f32_e64 {d}, {a}, {b} div:2", "f32 f32 -> f32", lambda a, b: a + b),
    Row("v_cndmask_b32_e64 {d}, -{a}, |{b}|, {k}", "f32 f32 -> f32", lambda a, b: np.where(CARRY_LANES, np.abs(b), -a)),
    Row("v_rcp_f32_e64 {d}, -|{a}|", "f32 -> f32", lambda a: ONE / -np.abs(a), ulp=1, domain=wide_range),
)  # fmt: skip

DOUBLES = Table(
    Row("v_add_f64 {d}, {a}, {b}", "f64 f64 -> f64", lambda a, b: a + b),
    Row("v_add_f64 {d}, -{a}, |{b}|", "f64 f64 -> f64", lambda a, b: np.abs(b) - a),
    Row("v_mul_f64 {d}, {a}, {b}", "f64 f64 -> f64", lambda a, b: a * b),
    Row("v_fma_f64 {d}, {a}, {b}, {c}", "f64 f64 f64 -> f64", fma_exact),
    Row("v_mov_b64_e32 {d}, {c}\nv_fmac_f64_e32 {d}, {a}, {b}", "f64 f64 f64 -> f64", fma_exact),
    Row("v_max_f64 {d}, {a}, {b}", "f64 f64 -> f64", fmax),
    Row("v_min_f64 {d}, {a}, {b}", "f64 f64 -> f64", fmin),
    Row("v_ldexp_f64 {d}, {a}, {b}", "f64 i32 -> f64", lambda a, b: np.ldexp(a, np.clip(b, -5000, 5000))),
    both("v_floor_f64", "f64 -> f64", np.floor),
    both("v_ceil_f64", "f64 -> f64", np.ceil),
    both("v_trunc_f64", "f64 -> f64", np.trunc),
    both("v_rndne_f64", "f64 -> f64", np.rint),
    both("v_fract_f64", "f64 -> f64", lambda a: a - np.floor(a), domain=lambda a: (np.abs(a) > 1e-7) & np.isfinite(a)),
    both("v_frexp_mant_f64", "f64 -> f64", mantissa),
    both("v_frexp_exp_i32_f64", "f64 -> i32", exponent, domain=lambda a: a != 0),
)  # fmt: skip

# op_sel_hi says which operands are halves, op_sel which half; products and sums are float32.
MIXED = Table(
    Row("v_fma_mix_f32 {d}, {a}, {b}, {c}", "f32 f32 f32 -> f32", fma),
    Row("v_fma_mix_f32 {d}, -{a}, |{b}|, {c}", "f32 f32 f32 -> f32", lambda a, b, c: fma(-a, np.abs(b), c)),
    Row("v_fma_mix_f32 {d}, {a}, {b}, {c} op_sel:[1,0,0] op_sel_hi:[1,0,1]", "f16x2 f32 f16x2 -> f32",
        lambda a, b, c: fma(a[:, 1].astype(F32), b, c[:, 0].astype(F32))),
    Row("v_fma_mix_f32 {d}, -|{a}|, {b}, {c} op_sel:[0,1,1] op_sel_hi:[1,1,1]", "f16x2 f16x2 f16x2 -> f32",
        lambda a, b, c: fma(-np.abs(a[:, 0]).astype(F32), b[:, 1].astype(F32), c[:, 1].astype(F32))),
    Row("v_mov_b32 {d}, {a}\nv_fma_mixlo_f16 {d}, {a}, {b}, {c} op_sel_hi:[1,0,0]", "f16x2 f32 f32 -> f16x2",
        lambda a, b, c: elements(fma(a[:, 0].astype(F32), b, c).astype(F16), a[:, 1])),
    Row("v_mov_b32 {d}, {a}\nv_fma_mixhi_f16 {d}, {a}, {b}, {c} op_sel_hi:[1,0,0]", "f16x2 f32 f32 -> f16x2",
        lambda a, b, c: elements(a[:, 0], fma(a[:, 0].astype(F32), b, c).astype(F16))),
)  # fmt: skip

DIVIDE = Table(
    Row("v_div_fmas_f32 {d}, {a}, {b}, {c}", "f32 f32 f32 -> f32",
        lambda a, b, c: fma(a, b, c) * np.where(CARRY_LANES, F32(2**32), ONE)),
    Row("v_div_fixup_f32 {d}, {a}, {b}, {c}", "f32 f32 f32 -> f32", quotient_fixed,
        domain=lambda a, b, c: special(b) | special(c) | well_apart(b, c)),
    # Towards the ends of the range the document contradicts itself: DIV_SCALE scales by 2**64, DIV_FMAS undoes 2**32.
    Row(DIVISION, "f32 f32 -> f32", lambda a, b: a / b,
        domain=lambda a, b: special(a) | special(b) | well_apart(b, a)),
)  # fmt: skip

HALVES = Table(
    both("v_add_f16", "f16 f16 -> f16", lambda a, b: a + b),
    both("v_sub_f16", "f16 f16 -> f16", lambda a, b: a - b),
    both("v_subrev_f16", "f16 f16 -> f16", lambda a, b: b - a),
    both("v_mul_f16", "f16 f16 -> f16", lambda a, b: a * b),
    both("v_max_f16", "f16 f16 -> f16", fmax),
    both("v_min_f16", "f16 f16 -> f16", fmin),
    Row("v_fma_f16 {d}, {a}, {b}, {c}", "f16 f16 f16 -> f16", fma),
    Row("v_fma_legacy_f16 {d}, {a}, {b}, {c}", "f16 f16 f16 -> f16", fma),
    Row("v_max3_f16 {d}, {a}, {b}, {c}", "f16 f16 f16 -> f16", lambda a, b, c: fmax(fmax(a, b), c)),
    Row("v_min3_f16 {d}, {a}, {b}, {c}", "f16 f16 f16 -> f16", lambda a, b, c: fmin(fmin(a, b), c)),
    Row("v_med3_f16 {d}, {a}, {b}, {c}", "f16 f16 f16 -> f16", med3, domain=lambda a, b, c: med3(a, b, c) != 0),
    both("v_ldexp_f16", "f16 i16 -> f16", scaled),
    both("v_floor_f16", "f16 -> f16", np.floor),
    both("v_ceil_f16", "f16 -> f16", np.ceil),
    both("v_trunc_f16", "f16 -> f16", np.trunc),
    both("v_rndne_f16", "f16 -> f16", np.rint),
    both("v_fract_f16", "f16 -> f16", lambda a: a - np.floor(a), domain=lambda a: (np.abs(a) > 1e-2) & np.isfinite(a)),
    both("v_frexp_mant_f16", "f16 -> f16", mantissa),
    both("v_frexp_exp_i16_f16", "f16 -> i16", exponent, domain=lambda a: a != 0),
    both("v_rcp_f16", "f16 -> f16", lambda a: F16(1) / a, ulp=1, domain=lambda a: normal(a) & (np.abs(a) < 2.0**13)),
    both("v_rsq_f16", "f16 -> f16", lambda a: (1 / np.sqrt(a.astype(F32))).astype(F16), ulp=1, domain=normal),
    both("v_sqrt_f16", "f16 -> f16", np.sqrt, ulp=1, domain=normal),
    both("v_exp_f16", "f16 -> f16", lambda a: np.exp2(a.astype(F32)).astype(F16), ulp=1,
         domain=lambda a: normal(a) & ~((a < -14) & (a > -30))),
    both("v_log_f16", "f16 -> f16", lambda a: np.log2(a.astype(F32)).astype(F16), ulp=1,
         domain=lambda a: normal(a) & ~((a > 0.9) & (a < 1.1) & (a != 1))),
    # op_sel picks the upper half of an operand, and as the fourth bit that of the result; the other half is kept.
    Row("v_mov_b32 {d}, {a}\nv_fma_f16 {d}, {a}, -{b}, {c} op_sel:[1,0,1,1]", "f16x2 f16x2 f16x2 -> f16x2",
        lambda a, b, c: elements(a[:, 0], fma(a[:, 1], -b[:, 0], c[:, 1]))),
    Row("v_pack_b32_f16 {d}, {a}, {b}", "f16x2 f16x2 -> f16x2", lambda a, b: elements(a[:, 0], b[:, 0])),
    Row("v_pack_b32_f16 {d}, {a}, {b} op_sel:[1,0]", "f16x2 f16x2 -> f16x2", lambda a, b: elements(a[:, 1], b[:, 0])),
    Row("v_pk_add_f16 {d}, {a}, {b}", "f16x2 f16x2 -> f16x2", lambda a, b: a + b),
    Row("v_pk_mul_f16 {d}, {a}, {b}", "f16x2 f16x2 -> f16x2", lambda a, b: a * b),
    Row("v_pk_fma_f16 {d}, {a}, {b}, {c}", "f16x2 f16x2 f16x2 -> f16x2", fma),
    Row("v_pk_max_f16 {d}, {a}, {b}", "f16x2 f16x2 -> f16x2", fmax),
    Row("v_pk_min_f16 {d}, {a}, {b}", "f16x2 f16x2 -> f16x2", fmin),
    Row("v_pk_mul_f16 {d}, {a}, {b} op_sel:[0,1] op_sel_hi:[0,1] neg_lo:[1,0] neg_hi:[0,1]", "f16x2 f16x2 -> f16x2",
        lambda a, b: elements(-a[:, 0] * b[:, 1], a[:, 0] * -b[:, 1])),
    gfx950("v_pk_maximum3_f16 {d}, {a}, {b}, {c}", "f16x2 f16x2 f16x2 -> f16x2", maximum3),
    gfx950("v_pk_minimum3_f16 {d}, {a}, {b}, {c}", "f16x2 f16x2 f16x2 -> f16x2", minimum3),
)  # fmt: skip

PACKED = Table(
    Row("v_pk_add_f32 {d}, {a}, {b}", "f32x2 f32x2 -> f32x2", lambda a, b: a + b),
    Row("v_pk_mul_f32 {d}, {a}, {b}", "f32x2 f32x2 -> f32x2", lambda a, b: a * b),
    Row("v_pk_fma_f32 {d}, {a}, {b}, {c}", "f32x2 f32x2 f32x2 -> f32x2", fma),
    Row("v_pk_fma_f32 {d}, {a}, {b}, 0 op_sel_hi:[1,1,0]", "f32x2 f32x2 -> f32x2",
        lambda a, b: fma(a, b, np.zeros_like(a))),
    Row("v_pk_mul_f32 {d}, {a}, 0.5 op_sel_hi:[1,0]", "f32x2 -> f32x2", lambda a: a * HALF),
    Row("v_pk_mul_f32 {d}, {a}, s[10:11] op_sel:[0,1]", "f32x2 -> f32x2", lambda a: a * SCALAR_FLOAT),
    Row("v_pk_add_f32 {d}, {a}, {b} op_sel:[1,0] op_sel_hi:[0,1]", "f32x2 f32x2 -> f32x2",
        lambda a, b: a[:, ::-1] + b),
    Row("v_pk_mul_f32 {d}, {a}, {b} op_sel_hi:[0,1]", "f32x2 f32x2 -> f32x2", lambda a, b: a[:, :1] * b),
    Row("v_pk_mul_f32 {d}, {a}, {b} op_sel:[1,1] op_sel_hi:[1,1]", "f32x2 f32x2 -> f32x2",
        lambda a, b: np.repeat(a[:, 1:] * b[:, 1:], 2, axis=1)),
    Row("v_pk_fma_f32 {d}, {a}, {b}, {c} op_sel:[0,1,0] op_sel_hi:[1,1,0]", "f32x2 f32x2 f32x2 -> f32x2",
        lambda a, b, c: fma(a, np.repeat(b[:, 1:], 2, axis=1), np.repeat(c[:, :1], 2, axis=1))),
    Row("v_pk_add_f32 {d}, {a}, {b} neg_lo:[0,1] neg_hi:[0,1]", "f32x2 f32x2 -> f32x2", lambda a, b: a - b),
    Row("v_pk_fma_f32 {d}, {a}, {b}, {c} neg_lo:[1,0,0] neg_hi:[0,0,1]", "f32x2 f32x2 f32x2 -> f32x2",
        lambda a, b, c: elements(fma(-a[:, 0], b[:, 0], c[:, 0]), fma(a[:, 1], b[:, 1], -c[:, 1]))),
    Row("v_pk_mul_f32 {d}, {a}, {b} clamp", "f32x2 f32x2 -> f32x2", lambda a, b: clamp01(a * b),
        domain=lambda a, b: a * b != 0),
    Row("v_pk_fma_f32 {d}, {a}, {b}, {c} clamp", "f32x2 f32x2 f32x2 -> f32x2", lambda a, b, c: clamp01(fma(a, b, c)),
        domain=lambda a, b, c: fma(a, b, c) != 0),
    Row("v_pk_mov_b32 {d}, {a}, {b} op_sel:[0,1]", "u32x2 u32x2 -> u32x2", lambda a, b: elements(a[:, 0], b[:, 1])),
    Row("v_pk_mov_b32 {d}, {a}, {b} op_sel:[1,0]", "u32x2 u32x2 -> u32x2", lambda a, b: elements(a[:, 1], b[:, 0])),
)  # fmt: skip

TABLES = (TWO_OPERANDS, FUSED, ONE_OPERAND, WAVES, MODIFIERS, DOUBLES, MIXED, DIVIDE, HALVES, PACKED)


@pytest.mark.parametrize("row", TWO_OPERANDS.rows, ids=str)
def test_two_operands(row):
    TWO_OPERANDS.check(row)


@pytest.mark.parametrize("row", FUSED.rows, ids=str)
def test_fused_and_three_operands(row):
    FUSED.check(row)


@pytest.mark.parametrize("row", ONE_OPERAND.rows, ids=str)
def test_one_operand(row):
    ONE_OPERAND.check(row)


@pytest.mark.parametrize("row", WAVES.rows, ids=str)
def test_sine_and_cosine(row):
    WAVES.check(row)


@pytest.mark.parametrize("row", DOUBLES.rows, ids=str)
def test_doubles(row):
    DOUBLES.check(row)


@pytest.mark.parametrize("row", MIXED.rows, ids=str)
def test_mixed_precision(row):
    MIXED.check(row)


@pytest.mark.parametrize("row", DIVIDE.rows, ids=str)
def test_division(row):
    DIVIDE.check(row)


@pytest.mark.parametrize("row", MODIFIERS.rows, ids=str)
def test_modifiers(row):
    MODIFIERS.check(row)


@pytest.mark.parametrize("row", HALVES.rows, ids=str)
def test_halves(row):
    HALVES.check(row)


@pytest.mark.parametrize("row", PACKED.rows, ids=str)
def test_packed(row):
    PACKED.check(row)


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("name", ["v_max_f32", "v_min_f32"])
def test_a_signalling_nan_wins_and_becomes_quiet(arch, name):
    """In IEEE mode; a quiet one loses against a number."""
    signalling, quiet, two = 0x7F800001, 0x7FC00000, 0x40000000
    first = np.resize(np.array([signalling, two, quiet, two], np.uint32), 64)
    second = np.resize(np.array([two, signalling, two, quiet], np.uint32), 64)
    state = run_snippet(arch, f"{name}_e32 v2, v0, v1", vgprs={0: first, 1: second}, exec_mask=FULL)
    np.testing.assert_array_equal(state.vgpr[2], np.resize([signalling | 0x400000] * 2 + [two] * 2, 64))
