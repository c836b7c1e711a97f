"""Small floating-point formats: tables of every value, and conversion from float32.

``float8(dialect, kind)``: OCP's e4m3fn and e5m2, or e4m3fnuz and e5m2fnuz; the table of archs says which one reads.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy import float32, float64, uint8, uint16, uint32, where
from numpy.typing import NDArray

from cdna_sim.isa.lanes import Lanes


@dataclass(frozen=True)
class Float8:
    """One 8-bit format: ``values[byte]`` in float64, and how to round to it."""

    name: str
    mantissa: int
    bias: int
    fnuz: bool
    values: NDArray[Any]
    nan: int
    largest: float
    infinite: bool

    def encode(self, value: Lanes, saturate: bool = False) -> Lanes:
        """float32 to bytes: nearest even; infinity and too large become infinity where there is one, else NaN.

        ``saturate``, which the FP16_OVFL mode asks for: they become the largest number.
        """
        wide = value.astype(float64)
        magnitude = np.abs(wide)
        exponent = np.maximum(np.frexp(magnitude)[1] - 1, 1 - self.bias)
        step = np.ldexp(1.0, exponent - self.mantissa)
        rounded = np.rint(magnitude / step) * step
        finite = np.isfinite(wide) & (rounded <= self.largest)
        kept = where(finite, rounded, 0.0)
        exponent = np.maximum(np.frexp(kept)[1] - 1, 1 - self.bias)
        normal = kept >= np.ldexp(1.0, 1 - self.bias)
        units = np.rint(kept / np.ldexp(1.0, exponent - self.mantissa)).astype(np.int64)
        power = where(normal, exponent + self.bias, 0)
        code = where(normal, (power << self.mantissa) + units - (1 << self.mantissa), units)
        sign = where(np.signbit(wide), 0x80, 0)
        if self.fnuz:  # the code of -0 is the one NaN
            sign = where(finite & (code == 0), 0, sign)
            overflow: Any = self.nan
        else:
            overflow = (0x7C if self.infinite else self.nan) | sign
        if saturate:
            overflow = (0x7B if self.infinite else 0x7F if self.fnuz else 0x7E) | sign
        result = where(finite, code | sign, where(np.isnan(wide), self.nan, overflow))
        return result.astype(uint8)


def _float8(name: str, mantissa: int, bias: int, fnuz: bool, infinite: bool) -> Float8:
    codes = np.arange(256)
    power, fraction = codes >> mantissa & (2 ** (7 - mantissa) - 1), codes & (2**mantissa - 1)
    unit = np.ldexp(1.0, np.maximum(power, 1) - bias - mantissa)
    values = (fraction + where(power > 0, 2**mantissa, 0)) * unit * where(codes & 0x80, -1.0, 1.0)
    if fnuz:
        values[0x80] = np.nan
        nan, largest = 0x80, values[0x7F]
    elif infinite:
        values[0x7C], values[0xFC] = np.inf, -np.inf
        values[0x7D:0x80] = values[0xFD:0x100] = np.nan
        nan, largest = 0x7F, values[0x7B]
    else:
        values[0x7F] = values[0xFF] = np.nan
        nan, largest = 0x7F, values[0x7E]
    values.flags.writeable = False
    return Float8(name, mantissa, bias, fnuz, values, nan, float(largest), infinite)


@functools.cache
def float8(dialect: str, kind: str) -> Float8:
    """``kind`` is ``FP8`` (e4m3) or ``BF8`` (e5m2), in the dialect ``fn`` or ``fnuz``."""
    if dialect == "fnuz":
        return _float8("e4m3fnuz", 3, 8, True, False) if kind == "FP8" else _float8("e5m2fnuz", 2, 16, True, False)
    return _float8("e4m3fn", 3, 7, False, False) if kind == "FP8" else _float8("e5m2", 2, 15, False, True)


# e2m1: 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives.
FLOAT4 = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0])
# E8M0: 2**(code - 127); the largest code is NaN.
SCALE8 = np.ldexp(1.0, np.arange(256) - 127)
SCALE8[255] = np.nan


def bf16_of(value: Lanes) -> Lanes:
    """float32 to the 16 bits of bfloat16, nearest even; NaN stays NaN."""
    bits = value.view(uint32)
    rounded = bits + uint32(0x7FFF) + (bits >> uint32(16) & uint32(1)) >> uint32(16)
    return where(np.isnan(value), bits >> uint32(16) | uint32(0x40), rounded).astype(uint16)


def f32_of_bf16(bits: Lanes) -> Lanes:
    return (bits.astype(uint32) << uint32(16)).view(float32)


def f16_toward_zero(value: Lanes) -> Lanes:
    """float32 to half, rounded toward zero."""
    near = value.astype(np.float16)
    over = np.abs(near.astype(float32)) > np.abs(value)
    return where(over & ~np.isnan(value), np.nextafter(near, np.float16(0)), near)
