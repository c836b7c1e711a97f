"""Integer and bit operations on 64 lanes that numpy has no single call for."""

from __future__ import annotations

import numpy as np
from numpy import int32, int64, uint8, uint16, uint32, uint64, where

from cdna_sim.isa.lanes import N31, Lanes


def mul_hi_u32(a: Lanes, b: Lanes) -> Lanes:
    return (a.astype(uint64) * b >> uint64(32)).astype(uint32)


def mul_hi_i32(a: Lanes, b: Lanes) -> Lanes:
    return (a.astype(int64) * b >> 32).astype(int32)


def signed24(a: Lanes) -> Lanes:
    return (a << uint32(8)).view(int32) >> 8


def bfe_u32(value: Lanes, offset: Lanes, width: Lanes) -> Lanes:
    """``offset`` and ``width`` are already taken modulo 32."""
    return value >> offset & (uint32(1) << width) - uint32(1)


def bfe_i32(value: Lanes, offset: Lanes, width: Lanes) -> Lanes:
    field = (value >> offset.view(int32)).view(uint32) & (uint32(1) << width) - uint32(1)
    shift = (uint32(32) - width & N31).view(int32)
    return where(width == 0, 0, (field.view(int32) << shift) >> shift)


def reverse(value: Lanes) -> Lanes:
    for shift, mask in ((1, 0x55555555), (2, 0x33333333), (4, 0x0F0F0F0F)):
        value = (value >> uint32(shift) & uint32(mask)) | ((value & uint32(mask)) << uint32(shift))
    return value.byteswap()


def count_leading(value: Lanes) -> Lanes:
    """Position of the first 1 from the top; -1 where there is none."""
    exponent = np.frexp(value.astype(np.float64))[1]
    return where(value == 0, -1, 32 - exponent).astype(int32).view(uint32)


def count_trailing(value: Lanes) -> Lanes:
    lowest = value & (~value + uint32(1))
    return where(value == 0, -1, np.frexp(lowest.astype(np.float64))[1] - 1).astype(int32).view(uint32)


def count_sign(value: Lanes) -> Lanes:
    """Position of the first bit that differs from the sign, from the top; -1 where all are equal."""
    signed = value.view(int32)
    return count_leading(where(signed < 0, ~value, value))


def permute_bytes(high: Lanes, low: Lanes, selector: Lanes) -> Lanes:
    """v_perm_b32: selectors 0 to 3 are bytes of ``low``, 4 to 7 of ``high``, 8 to 11 signs, 12 zero, else 255."""
    chosen = np.minimum(selector.view(uint8).reshape(64, 4), 13)
    flat = chosen + (np.arange(64, dtype=uint16) * uint16(16))[:, None]
    return _choices(high, low).reshape(-1)[flat].view(uint32).reshape(64)


def permute_bytes_alike(high: Lanes, low: Lanes, selector: int) -> Lanes:
    """The same with one selector for all lanes."""
    index = _indices.get(selector)
    if index is None:
        index = _indices[selector] = np.minimum([selector >> shift & 255 for shift in (0, 8, 16, 24)], 13)
    if int(index.max()) < 8:
        both = np.empty((64, 2), uint32)
        both[:, 0] = low
        both[:, 1] = high
        return both.view(uint8).take(index, 1).view(uint32).reshape(64)
    return _choices(high, low).take(index, 1).view(uint32).reshape(64)


_indices: dict[int, Lanes] = {}


def _choices(high: Lanes, low: Lanes) -> Lanes:
    """For each lane, the bytes that selectors 0 to 15 stand for."""
    table = np.empty((64, 16), uint8)
    table[:, 0:4] = low.view(uint8).reshape(64, 4)
    table[:, 4:8] = high.view(uint8).reshape(64, 4)
    table[:, 8:12] = where(table[:, 1:8:2] & 0x80, 0xFF, 0)
    table[:, 12] = 0
    table[:, 13:] = 0xFF
    return table


def align(high: Lanes, low: Lanes, shift: Lanes) -> Lanes:
    """Low 32 bits of ``high:low`` shifted right."""
    both = high.astype(uint64) << uint64(32) | low
    return (both >> shift.astype(uint64)).astype(uint32)


def bit_op3(a: Lanes, b: Lanes, c: Lanes, table: int) -> Lanes:
    """The boolean function of three bits whose value for (a, b, c) is bit ``4a + 2b + c`` of ``table``."""
    result = np.zeros(64, uint32)
    for index in range(8):
        if table >> index & 1:
            result |= (a if index & 4 else ~a) & (b if index & 2 else ~b) & (c if index & 1 else ~c)
    return result


def sad_u8(a: Lanes, b: Lanes, c: Lanes) -> Lanes:
    x, y = (v.view(uint8).reshape(64, 4).astype(int32) for v in (a, b))
    return np.abs(x - y).sum(1).astype(uint32) + c


def sad_u16(a: Lanes, b: Lanes, c: Lanes) -> Lanes:
    x, y = (v.view(uint16).reshape(64, 2).astype(int32) for v in (a, b))
    return np.abs(x - y).sum(1).astype(uint32) + c


def sad_u32(a: Lanes, b: Lanes, c: Lanes) -> Lanes:
    return where(a > b, a - b, b - a) + c


def lerp_u8(a: Lanes, b: Lanes, c: Lanes) -> Lanes:
    x, y, up = (v.view(uint8).reshape(64, 4).astype(uint16) for v in (a, b, c))
    return ((x + y + (up & 1)) >> 1).astype(uint8).view(uint32).reshape(64)


def dot4(a: Lanes, b: Lanes, dtype: type) -> Lanes:
    """Exact sum of four products of bytes, as int64."""
    x, y = (v.view(dtype).reshape(64, 4).astype(int64) for v in (a, b))
    return (x * y).sum(1)


def dot2(a: Lanes, b: Lanes, dtype: type) -> Lanes:
    x, y = (v.view(dtype).reshape(64, 2).astype(int64) for v in (a, b))
    return (x * y).sum(1)


def pack_bytes(low: Lanes, high: Lanes) -> Lanes:
    """Two saturated bytes as the low half of a register."""
    return (low.astype(uint8).astype(uint16) | high.astype(uint8).astype(uint16) << uint16(8)).astype(uint16)
