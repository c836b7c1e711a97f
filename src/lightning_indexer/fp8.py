"""The two e4m3 dialects, and conversions into and between them.

``float8_e4m3fn`` (OCP: exponent bias 7, largest value 448, NaN at bytes 0x7f and 0xff) is what NVIDIA and CDNA4 read.
``float8_e4m3fnuz`` (exponent bias 8, largest value 240, NaN at byte 0x80 alone, no negative zero) is what the matrix
unit of gfx942 reads. A byte that is finite in both has, in fnuz, half its fn value.

Sources: OCP 8-bit Floating Point Specification (OFP8) 1.0; AMD Instinct MI300 ISA document; the block-of-one-row
quantisation of K and the ue8m0 scales follow DeepSeek-V3.2 and DeepGEMM.
"""

from __future__ import annotations

from typing import Literal

import torch

E4M3FN_MAX = 448.0
E4M3FNUZ_MAX = 240.0
FP8_DTYPES = (torch.float8_e4m3fn, torch.float8_e4m3fnuz)
# Of what is quantised, of weights and of tables; kernels number them in this order.
WIDE_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# A product with one operand from fn_to_fnuz is multiplied by this; with two such operands, by its square.
FN_AS_FNUZ_FACTOR = 2.0

ScaleFormat = Literal["float32", "ue8m0"]

_SCALE_FORMATS = ("float32", "ue8m0")
# Floor of a row's amax, as in DeepGEMM: a row of zeros gets a normal, nonzero scale.
MIN_AMAX = 1e-4
_MANTISSA_MASK = 0x007FFFFF


def quantize_k(
    k: torch.Tensor, *, scale_format: ScaleFormat = "float32", dtype: torch.dtype = torch.float8_e4m3fn
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantises K to fp8 with one scale per row, so that ``k ≈ k_fp8.float() * kv_scale[:, None]``.

    A row's scale is ``max(amax, 1e-4) / fp8_max``, where fp8_max is 448 for fn and 240 for fnuz. ``"ue8m0"`` rounds it
    up to a power of two, which leaves exact powers as they are. Values saturate at fp8_max. A row that holds a NaN gets
    a NaN scale, one that holds an infinity an infinite scale; other rows are not affected.

    Args:
        k: [N, D] float32, bfloat16 or float16, any strides; N may be 0.
        scale_format: ``"float32"`` or ``"ue8m0"``; the scale is a float32 tensor for both.
        dtype: ``torch.float8_e4m3fn`` or ``torch.float8_e4m3fnuz``.

    Returns:
        ``k_fp8`` [N, D] of ``dtype``, contiguous, and ``kv_scale`` [N] float32, without unit.

    Raises:
        TypeError: ``k`` is not a tensor of those dtypes, or ``dtype`` is not one of the two.
        ValueError: ``k`` is not [N, D] with D >= 1, or ``scale_format`` is not known.
    """
    _check_tensor("k", k, WIDE_DTYPES)
    if k.dim() != 2 or k.shape[1] < 1:
        raise ValueError(f"k: got shape {list(k.shape)}, expected [N, D] with D of at least 1")
    if scale_format not in _SCALE_FORMATS:
        raise ValueError(f"scale_format: got {scale_format!r}, expected one of {', '.join(_SCALE_FORMATS)}")
    if dtype not in FP8_DTYPES:
        raise TypeError(f"dtype: got {dtype}, expected {_names(FP8_DTYPES)}")

    limit = E4M3FNUZ_MAX if dtype == torch.float8_e4m3fnuz else E4M3FN_MAX
    values = k.to(torch.float32)
    amax = values.abs().amax(dim=1).clamp(min=MIN_AMAX)
    # A tensor divisor, because CUDA turns a division by a Python number into a multiplication by its reciprocal.
    kv_scale = amax / torch.full_like(amax, limit)
    if scale_format == "ue8m0":
        kv_scale = _power_of_two_above(kv_scale)
    k_fp8 = (values / kv_scale[:, None]).clamp(-limit, limit).to(dtype)
    return k_fp8.contiguous(), kv_scale


def dequantize_k(k_fp8: torch.Tensor, kv_scale: torch.Tensor) -> torch.Tensor:
    """The values that quantised K stands for: ``k_fp8 * kv_scale``, row by row.

    Args:
        k_fp8: [N, D] float8_e4m3fn or float8_e4m3fnuz, any strides.
        kv_scale: [N] or [N, 1] float32.

    Returns:
        [N, D] float32.

    Raises:
        TypeError: an argument that is not a tensor of those dtypes.
        ValueError: a shape other than those, or tensors on two devices.
    """
    _check_tensor("k_fp8", k_fp8, FP8_DTYPES)
    _check_tensor("kv_scale", kv_scale, (torch.float32,))
    if k_fp8.dim() != 2:
        raise ValueError(f"k_fp8: got shape {list(k_fp8.shape)}, expected [N, D]")
    keys = k_fp8.shape[0]
    column = kv_scale[:, None] if kv_scale.dim() == 1 else kv_scale
    if column.dim() != 2 or column.shape[0] != keys or column.shape[1] != 1:
        raise ValueError(f"kv_scale: got shape {list(kv_scale.shape)}, expected [{keys}] or [{keys}, 1] to match k_fp8")
    if kv_scale.device != k_fp8.device:
        raise ValueError(f"kv_scale: got a tensor on {kv_scale.device}, expected {k_fp8.device}, the device of k_fp8")
    return k_fp8.to(torch.float32) * column


def decode_ue8m0(scale: torch.Tensor) -> torch.Tensor:
    """The float32 scales that UE8M0 bytes stand for: byte b is 2^(b - 127), and 255 is NaN.

    Args:
        scale: one byte a key: uint8 or float8_e8m0fnu [N] or [N, 1]; or four bytes a key, as DeepGEMM keeps them for
            rows of 128 channels in blocks of 32: [N, 4] of those dtypes, or int32 [N] or [N, 1], four bytes in each.

    Returns:
        [N] float32, contiguous, as ``kv_scale`` has to be.

    Raises:
        TypeError: another dtype.
        ValueError: another shape, or a row whose four bytes differ: its channels have no common scale, and no single
            ``kv_scale`` stands for it. The bytes are compared on the device, and the result is awaited.
    """
    e8m0 = getattr(torch, "float8_e8m0fnu", torch.uint8)
    _check_tensor("scale", scale, (torch.uint8, e8m0, torch.int32))
    packed = scale.dtype is torch.int32
    columns = scale[:, None] if scale.dim() == 1 else scale
    if columns.dim() != 2 or columns.shape[1] not in ((1,) if packed else (1, 4)):
        expected = "[N] or [N, 1]" if packed else "[N], [N, 1] or [N, 4]"
        raise ValueError(f"scale: got shape {list(scale.shape)} of {scale.dtype}, expected {expected}")
    codes = columns.contiguous().view(torch.uint8)
    first = codes[:, :1]
    if codes.shape[1] > 1 and bool((differs := (codes != first).any(dim=1)).any()):
        row = int(differs.nonzero()[0])
        raise ValueError(
            f"scale: got bytes {codes[row].tolist()} for key {row}, expected four equal ones: a key has one scale here"
        )
    # An exponent of 0 is the subnormal 2^-127, one of 255 with a mantissa NaN.
    exponent = first[:, 0].to(torch.int32)
    bits = torch.where(exponent == 0, 0x00400000, exponent << 23)
    return torch.where(exponent == 255, 0x7FC00000, bits).to(torch.int32).view(torch.float32)


def quantize_q(q: torch.Tensor) -> torch.Tensor:
    """Casts q to float8_e4m3fn, saturating at ±448. There is no scale.

    A caller that divides q by a positive scale before the cast multiplies ``weights`` by that scale: it passes the
    ReLU, so it folds into the weight of its row and head.

    Args:
        q: float32, bfloat16 or float16, [M, H, D] or any other shape, any strides. NaN stays NaN.

    Returns:
        float8_e4m3fn of the same shape, contiguous.

    Raises:
        TypeError: ``q`` is not a tensor of those dtypes.
    """
    _check_tensor("q", q, WIDE_DTYPES)
    # Some versions of torch cast values above 448 to NaN.
    return q.to(torch.float32).clamp(-E4M3FN_MAX, E4M3FN_MAX).to(torch.float8_e4m3fn).contiguous()


def fn_to_fnuz(x: torch.Tensor) -> torch.Tensor:
    """Reads e4m3fn bytes as e4m3fnuz, for the matrix unit of gfx942. The result is half of the value of ``x``.

    Only byte 0x80 changes, to 0x00: it is -0.0 in fn and NaN in fnuz. Multiply a product by ``FN_AS_FNUZ_FACTOR`` for
    each converted operand. The NaN bytes of fn, 0x7f and 0xff, become the finite values 240 and -240.

    Args:
        x: float8_e4m3fn of any shape and strides; it is not modified.

    Returns:
        float8_e4m3fnuz of the same shape, in memory of its own.

    Raises:
        TypeError: ``x`` is not a float8_e4m3fn tensor.
    """
    _check_tensor("x", x, (torch.float8_e4m3fn,))
    # Comparison and selection exist for uint8 on every device, not for fp8.
    codes = x.view(torch.uint8)
    return torch.where(codes == 0x80, torch.zeros_like(codes), codes).view(torch.float8_e4m3fnuz)


# Of what caches and queries are quantised to, as engines do: fnuz keeps a binade's room below its largest value.
CACHE_MAX = {torch.float8_e4m3fn: E4M3FN_MAX, torch.float8_e4m3fnuz: 224.0}


def quantize_rows(
    x: torch.Tensor, dtype: torch.dtype, *, power_of_two: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows as engines quantise them: scale max(amax, 1e-4) / 448, of fnuz / 224, on request the power of two above.

    A NaN becomes a NaN code and does not count for its row's scale. A row that holds an infinity gets an infinite one,
    and its values mean nothing. -0.0 becomes 0.

    Args:
        x: [..., D] float32.
        dtype: ``torch.float8_e4m3fn`` or ``torch.float8_e4m3fnuz``.

    Returns:
        [..., D] of ``dtype`` and [...] float32.
    """
    limit = CACHE_MAX[dtype]
    amax = x.abs().nan_to_num(nan=0.0, posinf=float("inf")).amax(dim=-1).clamp(min=MIN_AMAX)
    scale = amax / torch.full_like(amax, limit)
    if power_of_two:
        scale = _power_of_two_above(scale)
    y = (x / scale[..., None]).clamp(-limit, limit) + 0.0
    if dtype is torch.float8_e4m3fnuz:  # what is rounded to 0 has no sign there: its -0 is NaN
        y = torch.where(y.abs() <= 2.0**-11, torch.zeros_like(y), y)
    return y.to(dtype), scale


def _power_of_two_above(scale: torch.Tensor) -> torch.Tensor:
    """The least power of two that is not below each positive normal float32; infinities and NaN are kept."""
    # A nonzero mantissa carries into the exponent: exact, where log2 and exp2 round.
    rounded = ((scale.view(torch.int32) + _MANTISSA_MASK) & ~_MANTISSA_MASK).view(torch.float32)
    return torch.where(scale.isfinite(), rounded, scale)


def _check_tensor(name: str, value: object, dtypes: tuple[torch.dtype, ...]) -> None:
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"{name}: got {type(value).__name__}, expected a torch.Tensor")
    if value.layout is not torch.strided or value.is_nested:
        raise TypeError(f"{name}: got a sparse or nested tensor, expected a dense one")
    if value.dtype not in dtypes:
        raise TypeError(f"{name}: got dtype {value.dtype}, expected {_names(dtypes)}")


def _names(dtypes: tuple[torch.dtype, ...]) -> str:
    return " or ".join(str(dtype) for dtype in dtypes)
