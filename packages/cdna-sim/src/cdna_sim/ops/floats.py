"""Floating-point operations on 64 lanes that numpy has no single call for, or does otherwise than the hardware."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy import (
    absolute,
    add,
    bitwise_and,
    bitwise_or,
    exp2,
    float16,
    float32,
    float64,
    floor,
    fmax,
    fmin,
    int32,
    isnan,
    log2,
    maximum,
    minimum,
    multiply,
    sqrt,
    trunc,
    uint16,
    uint32,
    uint64,
    where,
)  # fmt: skip

from cdna_sim.isa.lanes import ONE, ZERO, Lanes

# Of +0 and -0, max takes +0 and min takes -0; numpy's may take either, and takes the other one with operands swapped
# or always the same one. The bitwise combination of both orders is right in both cases and changes nothing else.
# In IEEE mode a signalling NaN operand makes the result NaN; a quiet one is passed over.
_QUIET = {2: (uint16, 0x0200), 4: (uint32, 0x0040_0000), 8: (uint64, 0x0008_0000_0000_0000)}


def _select(a: Lanes, b: Lanes, function: Any, combine: Any) -> Lanes:
    raw, quiet = _QUIET[a.dtype.itemsize]
    result: Lanes = combine(function(a, b).view(raw), function(b, a).view(raw)).view(a.dtype)
    total = a + b
    if np.count_nonzero(total != total):
        for operand in (b, a):
            bits = operand.view(raw)
            signalling = isnan(operand) & (bits & raw(quiet) == 0)
            result = where(signalling, (bits | raw(quiet)).view(a.dtype), result)
    return result


def max_f32(a: Lanes, b: Lanes) -> Lanes:
    return _select(a, b, fmax, bitwise_and)


def min_f32(a: Lanes, b: Lanes) -> Lanes:
    return _select(a, b, fmin, bitwise_or)


max_f16 = max_f64 = max_f32
min_f16 = min_f64 = min_f32


def relu(value: Lanes) -> Lanes:
    """The maximum with +0. Adding +0 makes -0 positive."""
    if np.count_nonzero(value != value):
        return max_f32(value, ZERO)
    return add(fmax(value, ZERO), ZERO)


def quieted(value: Lanes) -> Lanes:
    """The maximum of a value with itself."""
    return max_f32(value, value) if np.count_nonzero(value != value) else value


def _propagate(a: Lanes, b: Lanes, c: Lanes, result: Lanes) -> Lanes:
    return where(isnan(a) | isnan(b) | isnan(c), a.dtype.type("nan"), result)


def maximum3_f32(a: Lanes, b: Lanes, c: Lanes) -> Lanes:
    """NaN where any operand is NaN, unlike max3."""
    return _propagate(a, b, c, max_f32(max_f32(a, b), c))


def minimum3_f32(a: Lanes, b: Lanes, c: Lanes) -> Lanes:
    return _propagate(a, b, c, min_f32(min_f32(a, b), c))


maximum3_f16, minimum3_f16 = maximum3_f32, minimum3_f32


def med3_f32(a: Lanes, b: Lanes, c: Lanes) -> Lanes:
    """The median; the minimum where any operand is NaN."""
    top = max_f32(max_f32(a, b), c)
    middle = where(top == a, max_f32(b, c), where(top == b, max_f32(a, c), max_f32(a, b)))
    return where(isnan(a) | isnan(b) | isnan(c), min_f32(min_f32(a, b), c), middle)


def med3_f16(a: Lanes, b: Lanes, c: Lanes) -> Lanes:
    return med3_f32(a.astype(float32), b.astype(float32), c.astype(float32)).astype(float16)


def med3(a: Lanes, b: Lanes, c: Lanes) -> Lanes:
    return maximum(minimum(a, b), minimum(maximum(a, b), c))


def clamp_f32(value: Lanes) -> Lanes:
    """To [0, 1]; NaN becomes 0 (DX10_CLAMP), -0 becomes +0."""
    return fmin(fmax(value, ZERO), ONE) + ZERO


def clamp_f16(value: Lanes) -> Lanes:
    return fmin(fmax(value, float16(0)), float16(1)) + float16(0)


def clamp_f64(value: Lanes) -> Lanes:
    return fmin(fmax(value, 0.0), 1.0) + 0.0


def fma_f32(a: Lanes, b: Lanes, c: Lanes) -> Lanes:
    """Exact product and sum in float64, then rounded: off by one bit in about one result of 2**29."""
    return add(multiply(a, b, dtype=float64), c)


def fma_f16(a: Lanes, b: Lanes, c: Lanes) -> Lanes:
    # An exact product of two halves has 22 bits; the float64 sum is exact.
    return (a.astype(float64) * b + c).astype(float16)


def fma_f64(a: Lanes, b: Lanes, c: Lanes) -> Lanes:
    import math
    from fractions import Fraction

    out = a * b + c
    for lane in np.flatnonzero(np.isfinite(a) & np.isfinite(b) & np.isfinite(c)):
        exact = Fraction(float(a[lane])) * Fraction(float(b[lane])) + Fraction(float(c[lane]))
        if exact:
            try:
                out[lane] = float(exact)
            except OverflowError:
                out[lane] = math.inf if exact > 0 else -math.inf
    return out


def flush_f32(value: Lanes) -> Lanes:
    """Denormals to zeros of the same sign: what the transcendental unit reads and writes."""
    return where(absolute(value) < float32(2.0**-126), multiply(value, ZERO), value)


def rcp_f32(a: Lanes) -> Lanes:
    return flush_f32((1.0 / flush_f32(a).astype(float64)).astype(float32))


def rsq_f32(a: Lanes) -> Lanes:
    return (1.0 / sqrt(flush_f32(a).astype(float64))).astype(float32)


def sqrt_f32(a: Lanes) -> Lanes:
    return sqrt(flush_f32(a).astype(float64)).astype(float32)


def exp_f32(a: Lanes) -> Lanes:
    return flush_f32(exp2(a.astype(float64)).astype(float32))


def log_f32(a: Lanes) -> Lanes:
    return log2(flush_f32(a).astype(float64)).astype(float32)


def sin_f32(a: Lanes) -> Lanes:
    """Of revolutions; 0 outside [-256, 256]."""
    return where(absolute(a) <= 256, np.sin(2 * np.pi * a.astype(float64)), a * ZERO).astype(float32)


def cos_f32(a: Lanes) -> Lanes:
    inside = np.cos(2 * np.pi * a.astype(float64))
    return where(absolute(a) <= 256, inside, where(np.isfinite(a), 1.0, float("nan"))).astype(float32)


def fract(a: Lanes) -> Lanes:
    """``a - floor(a)``, below 1 also where rounding would make it 1."""
    below = np.nextafter(a.dtype.type(1), a.dtype.type(0))
    return minimum(a - floor(a), below)


def to_int(value: Lanes, low: int, high: int, dtype: Any) -> Lanes:
    """Truncated and saturated; NaN becomes 0."""
    wide = where(isnan(value), 0.0, value.astype(float64))
    return np.clip(trunc(wide), low, high).astype(dtype)


def ldexp_f32(a: Lanes, exponent: Lanes) -> Lanes:
    return np.ldexp(a.astype(float64), np.clip(exponent.view(int32), -400, 400)).astype(float32)


def ldexp_f64(a: Lanes, exponent: Lanes) -> Lanes:
    return np.ldexp(a, np.clip(exponent.view(int32), -4400, 4400))


def frexp_mant(a: Lanes) -> Lanes:
    return where(np.isfinite(a), np.frexp(a)[0], a)


def frexp_exp(a: Lanes) -> Lanes:
    return where(np.isfinite(a), np.frexp(a)[1], 0).astype(int32)


def class_of(value: Lanes, bits: Any, mantissa: int, exponent: int) -> Lanes:
    """One bit of v_cmp_class a lane: sNaN, qNaN, -inf, -normal, -denormal, -0, +0, +denormal, +normal, +inf."""
    raw = value.view(bits).astype(uint64)
    fraction, power = raw & (2**mantissa - 1), raw >> mantissa & (2**exponent - 1)
    negative_ = (raw >> (mantissa + exponent)) != 0
    quiet = (fraction >> (mantissa - 1)) != 0
    top, zero = power == 2**exponent - 1, fraction == 0
    positive = where(top, 9, where(power != 0, 8, where(zero, 6, 7)))
    signed = where(negative_, 11 - positive, positive)
    return where(top & ~zero, where(quiet, 1, 0), signed)


def is_class(value: Lanes, wanted: Lanes, bits: Any, mantissa: int, exponent: int) -> Lanes:
    return (wanted.astype(uint64) >> class_of(value, bits, mantissa, exponent).astype(uint64) & 1).astype(bool)


def div_fixup(quotient: Lanes, denominator: Lanes, numerator: Lanes) -> Lanes:
    """The special cases of a division whose quotient Newton's method has found."""
    sign = np.signbit(denominator) ^ np.signbit(numerator)
    flip = where(sign, float32(-1), float32(1))
    result = np.copysign(absolute(quotient), flip)
    infinite = (denominator == 0) | np.isinf(numerator)
    zero = np.isinf(denominator) | (numerator == 0)
    result = where(zero, np.copysign(ZERO, flip), where(infinite, np.copysign(float32("inf"), flip), result))
    invalid = ((denominator == 0) & (numerator == 0)) | (np.isinf(denominator) & np.isinf(numerator))
    result = where(invalid, float32("nan"), result)
    # An exponent difference below -150 underflows.
    tiny = np.frexp(numerator)[1] - np.frexp(denominator)[1] < -150
    result = where(tiny & ~zero & ~infinite & ~invalid, np.copysign(ZERO, flip), result)
    return where(isnan(numerator), numerator, where(isnan(denominator), denominator, result))


def norm16(value: Lanes, low: float, scale: int, dtype: Any) -> Lanes:
    """A number in [low, 1] to a 16-bit fixed-point one; NaN becomes 0."""
    clean = where(isnan(value), 0.0, value.astype(float64))
    return np.rint(np.clip(clean, low, 1.0) * scale).astype(dtype)


def div_fmas(a: Lanes, b: Lanes, c: Lanes, scaled: Lanes) -> Lanes:
    return where(scaled, fma_f32(a, b, c) * 2.0**32, fma_f32(a, b, c)).astype(float32)


def div_scale(value: Lanes, denominator: Lanes, numerator: Lanes) -> tuple[Lanes, Lanes]:
    """Scales numerator or denominator of a division away from denormals; also which lanes v_div_fmas must undo.

    ``value`` is the one of the two to scale. Sources: the pseudocode of V_DIV_SCALE_F32 in the CDNA3 document.
    """
    tiny = 2.0**-126
    wide_d, wide_n = denominator.astype(float64), numerator.astype(float64)
    apart = np.frexp(numerator)[1] - np.frexp(denominator)[1] >= 96
    denormal_d = (absolute(wide_d) < tiny) & (wide_d != 0)
    ratio = absolute(wide_n / wide_d)
    denormal_ratio = (ratio < tiny) & (ratio > 0)
    denormal_rcp = absolute(1.0 / wide_d) < 2.0**-1022
    small_n = np.frexp(numerator)[1] - 1 + 127 <= 23
    invalid = (numerator == 0) | (denominator == 0)
    is_d, is_n = value == denominator, value == numerator
    up, flag = np.zeros(64, bool), np.zeros(64, bool)
    todo = ~invalid
    for condition, scales, sets in (
        (apart, is_d, True), (denormal_d, np.ones(64, bool), False), (denormal_rcp & denormal_ratio, is_d, True),
        (denormal_ratio, is_n, True), (small_n, np.ones(64, bool), False),
    ):  # fmt: skip
        here = todo & condition
        up |= here & scales
        if sets:
            flag |= here
        todo &= ~condition
    scaled = where(up, np.ldexp(value.astype(float64), 64).astype(float32), value)
    return where(invalid, float32("nan"), scaled), flag
