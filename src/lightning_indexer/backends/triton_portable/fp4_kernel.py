"""Device functions of the kernels that read fp4 keys: e2m1 to e4m3, four codes at a time, as fp4.py defines it."""

from __future__ import annotations

import triton
import triton.language as tl

from lightning_indexer.backends.triton_portable.quantize_kernel import (
    decode_e2m1,
    encode_e4m3,
    relative_scale,
)


@triton.jit
def spread(half):
    """int32, a nibble in each byte, of int32 of four nibbles."""
    half = (half | (half << 8)) & 0x00FF00FF
    return (half | (half << 4)) & 0x0F0F0F0F


@triton.jit
def tops(nonzero, byte):
    """Of blocks [R, ...] of keys, whether a part of theirs is not zero and their scale bytes: the largest byte of each
    key's blocks that are not zeros, -1 of none, and how far the lowest of any key's lies above or below it."""
    top = tl.max(tl.where(nonzero, byte, -1), axis=1)
    return top, tl.min(tl.min(tl.where(nonzero, byte - top[:, None], 0), axis=1), axis=0)


@triton.jit
def e4m3_of_e2m1(x, down, lowest, SHIFT: tl.constexpr, TO: tl.constexpr):
    """int32 of four e4m3 codes, of int32 of four e2m1 codes, a byte each; see fp4_to_fp8.

    `down` int32: the exponent of the code's block less that of its key's largest; `lowest`, a scalar: the least."""
    FNUZ: tl.constexpr = SHIFT == 5
    if lowest >= -11:
        # All are normal in e4m3: exponents are added, four bytes at a time. 0.5 alone is subnormal in e2m1.
        size = x & 0x07070707
        some = ((size + 0x07070707) >> 3) & 0x01010101
        normal = ((size + 0x06060606) >> 3) & 0x01010101
        sign = (x << 4) & ((some << 7) if FNUZ else ((x & 0x08080808) << 4))
        codes = (((size + normal - some) << 2) + some * ((down + 12) << 3)) | sign
    else:
        unit = relative_scale(down, 0, SHIFT)
        codes = tl.zeros_like(x)
        for i in tl.static_range(4):
            value = decode_e2m1((x >> (8 * i)) & 0xF) * unit
            codes |= encode_e4m3(value, TO).to(tl.int32) << (8 * i)
    return codes
