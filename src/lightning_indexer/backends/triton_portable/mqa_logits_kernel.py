"""The portable Triton kernel.

    logits[m, n] = kv_scale[n] * sum_h w[m, h] * relu(q[m, h, :] . k[n, :])   inside row m's window, -inf elsewhere

Plan. One program owns `chunk` columns of one row's result. It keeps q[m] and w[m], walks the tiles of BLOCK keys that
the row's window touches, and per tile computes K [BLOCK, D] x q^T [D, H]. Keys lie on the M side of the product, so a
key's heads end in the registers of one quad (NVIDIA) or one lane pair (AMD) and the head sum needs no shared memory.
What the window does not touch is filled with -inf by the same program: every column is written exactly once.

Programs are numbered chunk by chunk, rows from last to first: programs that run together read the same keys from L2,
and under a causal mask the longest rows of each chunk start first.

Columns and positions: column c of row m is position origin + c, where origin is 0, or ks[m] for compressed logits.
"""

from __future__ import annotations

import triton
import triton.language as tl


def _name(specialization) -> str:
    c = specialization.constants
    form = "compressed" if c["COMPRESSED"] else "clean" if c["CLEAN"] else "noclean"
    operands = "bf16" if specialization.signature["q_ptr"] == "*bf16" else "fp8"
    return f"{operands}_mqa_logits_H{c['HEADS']}_D{c['HEAD_DIM']}_bkv{c['BLOCK']}_{form}_triton"


@triton.jit
def _widen(bits):
    """e4m3fn bytes -> float16, for matrix units without fp8. Subnormals are exact; the two NaN codes stay NaN."""
    wide = bits.to(tl.uint16)
    # Exponent and mantissa one bit below float16's: the value read is 2^-8 of the fp8 one (bias 15 against 7).
    half = (((wide & 0x80) << 8) | ((wide & 0x7F) << 7)).to(tl.float16, bitcast=True) * 256.0
    return tl.where((wide & 0x7F) == 0x7F, float("nan"), half).to(tl.float16)


@triton.jit
def _fill_neg_inf(row_ptr, start, stop, BLOCK: tl.constexpr):
    for column in tl.range(start, stop, BLOCK):
        columns = column + tl.arange(0, BLOCK)
        value = tl.full([BLOCK], float("-inf"), tl.float32).to(row_ptr.dtype.element_ty)
        tl.store(row_ptr + columns, value, mask=columns < stop)


@triton.jit
def _tile(
    column, origin, lo, hi, last, q, w, k_ptr, k_stride, kv_scale_ptr, out_row,
    HEAD_DIM: tl.constexpr, BLOCK: tl.constexpr, CLEAN: tl.constexpr, WIDEN: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """Columns [column, column + BLOCK) of one row. WHOLE: every one of them lies in the window [lo, hi)."""
    in_tile = tl.arange(0, BLOCK)
    columns = column + in_tile
    position = column + origin
    k_tile = k_ptr + position * k_stride + in_tile[:, None] * k_stride + tl.arange(0, HEAD_DIM)[None, :]
    kv_scales = kv_scale_ptr + position + in_tile
    if WHOLE:
        k = tl.load(k_tile)
        kv_scale = tl.load(kv_scales)
    else:
        # Keys outside the window are never read: they may hold anything, or lie outside the buffer.
        inside = (columns >= lo) & (columns < hi)
        k = tl.load(k_tile, mask=inside[:, None], other=0.0)
        kv_scale = tl.load(kv_scales, mask=inside, other=0.0)
    if WIDEN:
        k = _widen(k)
    scores = tl.maximum(tl.dot(k, q), 0.0)  # [BLOCK, H] float32
    logits = tl.sum(scores * w[None, :], axis=1) * kv_scale + 0.0  # -0.0 becomes +0.0
    if WHOLE:
        tl.store(out_row + columns, logits.to(out_row.dtype.element_ty))
    elif CLEAN:
        logits = tl.where(inside, logits, float("-inf"))
        tl.store(out_row + columns, logits.to(out_row.dtype.element_ty), mask=columns < last)
    else:
        tl.store(out_row + columns, logits.to(out_row.dtype.element_ty), mask=inside)


@triton.jit(repr=_name, do_not_specialize=["rows", "keys"])
def fp8_mqa_logits_kernel(
    q_ptr,  # fp8 (or its bytes, if WIDEN) or bfloat16 [M, H, D]
    k_ptr,  # likewise [N, D]
    kv_scale_ptr,  # float32 [N]
    w_ptr,  # float32 [M, H]
    ks_ptr,  # int32 [M]
    ke_ptr,  # int32 [M]
    out_ptr,  # float32 or bfloat16 [M, width]
    rows,
    keys,
    width,
    chunk,  # columns of one program, a multiple of BLOCK
    q_stride_m,
    q_stride_h,
    k_stride,
    w_stride,
    out_stride,
    HEADS: tl.constexpr,
    PADDED_HEADS: tl.constexpr,  # the N side of the product is at least 16
    HEAD_DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    CLEAN: tl.constexpr,
    COMPRESSED: tl.constexpr,
    WIDEN: tl.constexpr,
):
    # Which row, which columns. Row offsets are 64-bit: M*N passes 2^31.
    program = tl.program_id(0)
    row = (rows - 1 - program % rows).to(tl.int64)
    first = (program // rows) * chunk
    last = tl.minimum(first + chunk, width)
    out_row = out_ptr + row * out_stride

    # The window in columns, [lo, hi), within this program's columns.
    ks = tl.load(ks_ptr + row)
    ke = tl.load(ke_ptr + row)
    origin = tl.zeros([], tl.int64)
    if COMPRESSED:
        origin += ks
    lo = tl.maximum(tl.maximum(ks, 0) - origin, first)
    hi = tl.minimum(tl.minimum(ke, keys) - origin, last)
    lo = tl.minimum(lo, last).to(tl.int32)
    hi = tl.maximum(hi, lo).to(tl.int32)
    tiles_lo = first + (lo - first) // BLOCK * BLOCK
    tiles_hi = tl.minimum(first + (hi - first + BLOCK - 1) // BLOCK * BLOCK, last)
    if hi == lo:
        tiles_lo = first
        tiles_hi = first

    if CLEAN:
        _fill_neg_inf(out_row, first, tiles_lo, 1024)

    if hi > lo:
        # q^T [D, H] and w [H] of this row, held for the whole chunk.
        heads = tl.arange(0, PADDED_HEADS)
        channels = tl.arange(0, HEAD_DIM)
        q_offsets = heads[None, :] * q_stride_h.to(tl.int64) + channels[:, None]
        q_row = q_ptr + row * q_stride_m
        w_row = w_ptr + row * w_stride
        if HEADS == PADDED_HEADS:
            q = tl.load(q_row + q_offsets)
            w = tl.load(w_row + heads)
        else:
            q = tl.load(q_row + q_offsets, mask=heads[None, :] < HEADS, other=0.0)
            w = tl.load(w_row + heads, mask=heads < HEADS, other=0.0)
        if WIDEN:
            q = _widen(q)

        # Whole tiles [whole_lo, whole_hi) need no mask; at most one tile before them and one after do.
        whole_lo = tl.minimum(first + (lo - first + BLOCK - 1) // BLOCK * BLOCK, tiles_hi)
        whole_hi = tl.maximum(first + (hi - first) // BLOCK * BLOCK, whole_lo)
        for column in tl.range(whole_lo, whole_hi, BLOCK):
            _tile(
                column, origin, lo, hi, last, q, w, k_ptr, k_stride, kv_scale_ptr, out_row,
                HEAD_DIM, BLOCK, CLEAN, WIDEN, WHOLE=True,
            )  # fmt: skip
        before = whole_lo - tiles_lo
        after = tl.maximum(tiles_hi - whole_hi, 0)
        for edge in tl.range(0, before + after, BLOCK, num_stages=1):
            _tile(
                tl.where(edge < before, tiles_lo, whole_hi), origin, lo, hi, last, q, w, k_ptr, k_stride, kv_scale_ptr,
                out_row, HEAD_DIM, BLOCK, CLEAN, WIDEN, WHOLE=False,
            )  # fmt: skip

    if CLEAN:
        _fill_neg_inf(out_row, tiles_hi, last, 1024)
