"""The portable Triton kernel that turns and quantises queries and folds their scales into the weights.

Plan. A program has ROWS rows of D channels, each a (token, head); they need nothing of each other.
"""

from __future__ import annotations

import triton
import triton.language as tl

from lightning_indexer.backends.triton_portable.quantize_kernel import (
    decode_e2m1,
    encode_e4m3,
    first_channels,
    hadamard,
    key_scale,
    load_pairs,
    quantize_e2m1,
    quantize_e4m3,
    relative_scale,
    rotate,
)


def _name(specialization) -> str:
    c = specialization.constants
    kind = "fp4" if c["FP4"] else "fp8"
    steps = f"{'_rope' if c['GROUP'] >= 0 else ''}{'_hadamard' if c['HADAMARD'] else ''}"
    return f"prepare_q_{kind}_H{c['HEADS']}_D{c['D']}_r{c['ROWS']}{steps}_triton"


@triton.jit
def _through_e2m1(
    a, b, R: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr, INTERLEAVED: tl.constexpr, SHIFT: tl.constexpr,
    TO: tl.constexpr,
):  # fmt: skip
    """e4m3 codes of what is left of a and b in MXFP4, and the scale of each row."""
    a, b, a_byte, b_byte, _ = quantize_e2m1(a, b, R, D, HALF, INTERLEAVED)
    a_top = tl.where(tl.max(a & 7, axis=2) > 0, a_byte, -1)
    b_top = tl.where(tl.max(b & 7, axis=2) > 0, b_byte, -1)
    top = tl.maximum(tl.max(a_top, axis=1), tl.max(b_top, axis=1))
    broken = tl.maximum(tl.max(a_byte, axis=1), tl.max(b_byte, axis=1)) == 255
    a_unit, b_unit = relative_scale(a_byte, top[:, None], SHIFT), relative_scale(b_byte, top[:, None], SHIFT)
    a = tl.reshape(decode_e2m1(a) * a_unit[:, :, None], [R, D // 2])
    b = tl.reshape(decode_e2m1(b) * b_unit[:, :, None], [R, D // 2])
    return encode_e4m3(a, TO), encode_e4m3(b, TO), key_scale(top, broken, SHIFT)


@triton.jit(repr=_name, do_not_specialize=["rows", "weight_scale"])
def prepare_q_kernel(
    q_ptr,  # [T, H, D]
    weights_ptr,  # [T, H]
    positions_ptr,  # [T], or None
    cos_sin_ptr,  # [positions, 2 * HALF], or None
    out_ptr,  # uint8 [T, H, D], contiguous
    out_weights_ptr,  # float32 [T, H], contiguous
    rows,  # T * H
    weight_scale,
    q_stride,
    q_stride_h,
    w_stride,
    cos_sin_stride,
    ROWS: tl.constexpr,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    FP4: tl.constexpr,
    LIMIT: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    SHIFT: tl.constexpr,
    TO: tl.constexpr,
    HALF: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    GROUP: tl.constexpr,
    HADAMARD: tl.constexpr,  # log2 of D, 0: none
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    real = row < rows
    token, head = row // HEADS, row % HEADS
    a, b = load_pairs(q_ptr + token * q_stride + head * q_stride_h, real, ROWS, D, HALF, INTERLEAVED)
    if GROUP >= 0:
        position = tl.load(positions_ptr + token, mask=real, other=0).to(tl.int64)
        a, b = rotate(a, b, cos_sin_ptr + position * cos_sin_stride, real, D, HALF, GROUP)
    if HADAMARD > 0:
        a, b = hadamard(a, b, ROWS, D, HADAMARD)
    if FP4:
        a, b, scale = _through_e2m1(a, b, ROWS, D, HALF, INTERLEAVED, SHIFT, TO)
    else:
        a, b, scale = quantize_e4m3(a, b, LIMIT, POWER_OF_TWO, TO)
    weight = tl.load(weights_ptr + token * w_stride + head, mask=real, other=0.0).to(tl.float32)
    tl.store(out_weights_ptr + row, weight * (scale * weight_scale), mask=real)
    out = out_ptr + row * D
    if INTERLEAVED:
        codes = tl.reshape(tl.join(a, b), [ROWS, D])
        tl.store(out[:, None] + tl.arange(0, D)[None, :], codes, mask=real[:, None])
    else:
        first = first_channels(D, HALF)
        tl.store(out[:, None] + first[None, :], a, mask=real[:, None])
        tl.store(out[:, None] + (first + HALF)[None, :], b, mask=real[:, None])
