"""The 64 lanes of a wave as arrays: registers, operands that all lanes share, lane masks.

A register is an array of 64 uint32. Operands that are the same in every lane are arrays of 64 equal values, kept by
value. Booleans per lane are arrays of 64 bool; a lane mask in scalar registers is a Python int.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy import copyto, float32, float64, int32, int64, uint8, uint16, uint32, uint64, where

# An array of 64 lanes, of whatever type an instruction sees in its registers: more than numpy's stubs can follow.
Lanes = Any

LANE = np.arange(64)
FULL = (1 << 64) - 1
LOW32 = 0xFFFFFFFF


def frozen(array: Lanes) -> Lanes:
    array.flags.writeable = False
    return array


class _Splat(dict[int, Lanes]):
    """``splat[bits]``: 64 lanes of a 32-bit value, seen as one type; kept, because loops use the same ones."""

    def __init__(self, view: Any) -> None:
        super().__init__()
        self.view = view

    def __missing__(self, bits: int) -> Lanes:
        if len(self) > 4096:
            self.clear()
        array = self[bits] = frozen(np.full(64, bits & LOW32, uint32)).view(self.view)
        return array


class _Splat64(dict[int, Lanes]):
    def __init__(self, view: Any) -> None:
        super().__init__()
        self.view = view

    def __missing__(self, bits: int) -> Lanes:
        if len(self) > 1024:
            self.clear()
        array = self[bits] = frozen(np.full(64, bits & FULL, uint64)).view(self.view)
        return array


class _Masks(dict[int, Lanes]):
    """``masks[bits]``: the lane mask ``bits`` as 64 booleans."""

    def __missing__(self, bits: int) -> Lanes:
        if len(self) > 4096:
            self.clear()
        mask = np.unpackbits(np.frombuffer(bits.to_bytes(8, "little"), uint8), bitorder="little").view(bool)
        self[bits] = frozen(mask)
        return mask


K, KF, KI = _Splat(uint32), _Splat(float32), _Splat(int32)
K64, KI64, KD = _Splat64(uint64), _Splat64(int64), _Splat64(float64)
masks = _Masks()

N15, N31, N255 = (frozen(np.full(64, n, uint32)) for n in (15, 31, 255))
N8, N16, N23, N24 = (frozen(np.full(64, n, uint32)) for n in (8, 16, 23, 24))
N24BIT = frozen(np.full(64, 0xFFFFFF, uint32))
N1 = frozen(np.full(64, 1, uint32))
# For v_mbcnt: the lanes below each lane, among the first 32 and among the last 32.
BELOW_LOW = frozen(np.array([(1 << min(n, 32)) - 1 for n in range(64)], uint32))
BELOW_HIGH = frozen(np.array([(1 << max(n - 32, 0)) - 1 for n in range(64)], uint32))
N63 = frozen(np.full(64, 63, uint64))
H15 = frozen(np.full(64, 15, uint16))
ZERO = frozen(np.zeros(64, float32))
ONE = frozen(np.ones(64, float32))


def pack(lanes: Lanes) -> int:
    """64 booleans as a lane mask."""
    bits = int.from_bytes(np.packbits(lanes, None, "little").tobytes(), "little")
    if len(masks) > 4096:
        masks.clear()
    masks[bits] = lanes
    return bits


def pair(low: Lanes, high: Lanes) -> Lanes:
    """Two registers as 64 uint64."""
    both = np.empty((64, 2), uint32)
    both[:, 0] = low
    both[:, 1] = high
    return both.view(uint64).reshape(64)


def put_pair(low: Lanes, high: Lanes, value: Lanes) -> None:
    halves = value.view(uint32).reshape(64, 2)
    low[:] = halves[:, 0]
    high[:] = halves[:, 1]


def put_pair_where(low: Lanes, high: Lanes, value: Lanes, mask: Lanes) -> None:
    halves = value.view(uint32).reshape(64, 2)
    copyto(low, halves[:, 0], where=mask)
    copyto(high, halves[:, 1], where=mask)


def halves(low: Lanes, high: Lanes) -> Lanes:
    """A register from two arrays of 64 16-bit values."""
    both = np.empty((64, 2), uint16)
    both[:, 0] = low.view(uint16)
    both[:, 1] = high.view(uint16)
    return both.view(uint32).reshape(64)


def swap_lanes(first: Lanes, second: Lanes) -> None:
    """Registers as [parts, 2, distance]: the second halves of ``first`` for the first halves of ``second``."""
    kept = first[:, 1].copy()
    first[:, 1] = second[:, 0]
    second[:, 0] = kept


def swap_lanes_where(first: Lanes, second: Lanes, distance: int, active: Lanes) -> None:
    """The same, writing active lanes only; a lane that is off gives what it holds."""
    a, b = first.copy(), second.copy()
    odd = (LANE & distance) != 0
    copyto(first, where(odd, b[LANE ^ distance], a), where=active)
    copyto(second, where(odd, b, a[LANE ^ distance]), where=active)
