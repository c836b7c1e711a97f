"""MXFP4, as DeepSeek-V4 caches its keys: e2m1 values, two a byte, and a UE8M0 scale for each 32 channels.

An e2m1 code is sign, two bits of exponent, one of mantissa: 0, 0.5, 1, 1.5, 2, 3, 4, 6. The even channel is the low
nibble. Byte b of the scales is 2^(b - 127); 255 is NaN.
"""

from __future__ import annotations

import torch

from lightning_indexer.fp8 import FP8_DTYPES, WIDE_DTYPES, _power_of_two_above

FP4 = torch.float4_e2m1fn_x2
# Channels of a scale.
BLOCK = 32
# The largest value, and the least amax that a scale is made from.
MAX = 6.0
MIN_AMAX = 6.0 * 2.0**-126
# A key whose largest block has the exponent s is converted with the scale 2^(s - SHIFT): the largest for which all
# values of that block lie within the dialect, 6 * 2^6 = 384 of 448 and 6 * 2^5 = 192 of 240.
SHIFT = {torch.float8_e4m3fn: 6, torch.float8_e4m3fnuz: 5}
# Exponents that a key's blocks may lie apart for its conversion to e4m3 to be exact, in both dialects.
EXACT_SPREAD = 14


def quantize_fp4(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantises rows to MXFP4 by DeepGEMM's recipe.

    Per 32 channels: amax, at least 6 * 2^-126; the scale is the least power of two not below amax / 6; values are
    rounded to nearest, ties to even. A NaN, which e2m1 has not, becomes 0.

    Args:
        x: [..., D] float32, bfloat16 or float16, D a multiple of 32.

    Returns:
        values uint8 [..., D / 2] and scales uint8 [..., D / 32].

    Raises:
        ValueError: another D.
    """
    _check("x", x, WIDE_DTYPES)
    if not x.shape[-1] or x.shape[-1] % BLOCK:
        raise ValueError(f"x: got D={x.shape[-1]}, expected a multiple of {BLOCK}")
    blocks = _blocks(x.float())
    amax = blocks.abs().nan_to_num(nan=0.0, posinf=float("inf")).amax(dim=-1).clamp(min=MIN_AMAX)
    scale = _power_of_two_above(amax / torch.full_like(amax, MAX))
    y = (blocks / scale[..., None]).flatten(-2)
    a = y.abs()
    # Between two neighbours, the one whose code is even takes the middle.
    code = (a > 0.25).to(torch.uint8) + (a >= 0.75) + (a > 1.25) + (a >= 1.75) + (a > 2.5) + (a >= 3.5) + (a > 5.0)
    code = (code | (torch.signbit(y) & ~y.isnan()).to(torch.uint8) << 3).to(torch.uint8)
    return code[..., ::2] | code[..., 1::2] << 4, (scale.view(torch.int32) >> 23).to(torch.uint8)


def dequantize_fp4(values: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """The float32 definition: the values that MXFP4 rows stand for.

    Args:
        values: uint8 or int8 [..., D / 2].
        scales: uint8 [..., D / 32].

    Returns:
        [..., D] float32.
    """
    _check_rows(values, scales)
    nibbles = _nibbles(values)
    scale = _exponents(scales)
    value = _blocks(_e2m1(nibbles)) * scale[..., None]
    wide: torch.Tensor = value.flatten(-2)
    return wide


def fp4_to_fp8(
    values: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype = torch.float8_e4m3fn
) -> tuple[torch.Tensor, torch.Tensor]:
    """MXFP4 rows as e4m3 with one scale a row, for matrix units without fp4.

    With s the largest exponent of a row's blocks that are not all zeros, the row's scale is 2^(s - 6), 2^(s - 5) for
    fnuz. Exact where those blocks' exponents lie within 14 of each other. A value of a block further down is rounded
    to a multiple of 2^(s - 15), so that it is off by 2^(s - 16) at most. A row of zeros has the scale 1; one with a
    scale byte of 255 NaN.

    Args:
        values: uint8 or int8 [..., D / 2].
        scales: uint8 [..., D / 32].
        dtype: ``torch.float8_e4m3fn`` or ``torch.float8_e4m3fnuz``.

    Returns:
        [..., D] of ``dtype``, and [...] float32.

    Raises:
        TypeError: another ``dtype``.
    """
    if dtype not in FP8_DTYPES:
        raise TypeError(f"dtype: got {dtype}, expected {' or '.join(map(str, FP8_DTYPES))}")
    _check_rows(values, scales)
    blocks = _blocks(_e2m1(_nibbles(values)))
    codes = scales.view(torch.uint8).to(torch.int32)
    used = torch.where((blocks != 0).any(dim=-1), codes, -1)
    top = used.amax(dim=-1)
    # Far below the largest block, values are 0 in e4m3; a block of zeros may stand above it.
    down = (codes - top[..., None] + SHIFT[dtype]).clamp(-126, SHIFT[dtype])
    wide = (blocks * torch.exp2(down.float())[..., None]).flatten(-2)
    if dtype is torch.float8_e4m3fnuz:  # what is rounded to 0 has no sign there: its -0 is NaN
        wide = torch.where(wide.abs() <= 2.0**-11, torch.zeros_like(wide), wide)
    k = wide.to(dtype)
    scale = _exponents((top - SHIFT[dtype]).to(torch.int32))
    scale = torch.where(top < 0, 1.0, scale)
    return k, torch.where((codes == 255).any(dim=-1), float("nan"), scale)


def spread(values: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """How many exponents the blocks of each row that are not all zeros lie apart, [...] int32.

    :func:`fp4_to_fp8` is exact up to ``EXACT_SPREAD``. Above, it may be.
    """
    _check_rows(values, scales)
    some = _blocks((values.view(torch.uint8) & 0x77) != 0, BLOCK // 2).any(dim=-1)
    codes = scales.view(torch.uint8).to(torch.int32)
    high, low = torch.where(some, codes, -1).amax(dim=-1), torch.where(some, codes, 256).amin(dim=-1)
    return (high - low).clamp(min=0)


def _check(name: str, given: object, dtypes: tuple[torch.dtype, ...]) -> None:
    if not isinstance(given, torch.Tensor) or given.layout is not torch.strided or given.is_nested:
        raise TypeError(f"{name}: got {type(given).__name__}, expected a dense torch.Tensor")
    if given.dtype not in dtypes:
        raise TypeError(f"{name}: got dtype {given.dtype}, expected {' or '.join(map(str, dtypes))}")
    if given.dim() < 1:
        raise ValueError(f"{name}: got shape [], expected [..., D] or its bytes")


def _check_rows(values: torch.Tensor, scales: torch.Tensor) -> None:
    _check("values", values, (torch.uint8, torch.int8, FP4))
    _check("scales", scales, (torch.uint8, torch.int8, torch.float8_e8m0fnu))
    shape = (*values.shape[:-1], values.shape[-1] * 2 // BLOCK)
    if values.shape[-1] * 2 % BLOCK or tuple(scales.shape) != shape:
        raise ValueError(
            f"scales: got shape {list(scales.shape)}, expected {list(shape)}, a byte for {BLOCK} channels of values"
        )


def _blocks(x: torch.Tensor, size: int = BLOCK) -> torch.Tensor:
    """[..., D] as [..., blocks, size]."""
    return x.reshape(*x.shape[:-1], x.shape[-1] // size, size)


def _nibbles(values: torch.Tensor) -> torch.Tensor:
    codes = values.view(torch.uint8)
    return torch.stack((codes & 0xF, codes >> 4), dim=-1).flatten(-2)


def _e2m1(nibbles: torch.Tensor) -> torch.Tensor:
    """float32 of codes: their bits are a float16's, 2^14 times too small. A table would be copied to the device."""
    codes = nibbles.to(torch.int32)
    bits = (codes & 7) << 9 | (codes & 8) << 12
    return bits.to(torch.int16).view(torch.float16).float() * 16384.0


def _exponents(code: torch.Tensor) -> torch.Tensor:
    """2^(code - 127) for codes down to -22, where it is the least subnormal; 255 is NaN."""
    code = code.to(torch.int32)
    bits = torch.where(code > 0, code << 23, torch.ones_like(code) << (22 + code).clamp(0, 22))
    return torch.where(code == 255, 0x7FC00000, bits).to(torch.int32).view(torch.float32)
