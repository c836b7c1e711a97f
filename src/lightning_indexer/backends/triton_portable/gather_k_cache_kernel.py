"""The portable Triton kernel that gathers keys out of a paged cache.

Plan. A program has ROWS rows of the result. Each finds its sequence by bisection of the cumulative lengths, its block
in the table, and is copied, 16 bytes a lane; fp4 keys are converted on the way. Addresses are 64-bit.
"""

from __future__ import annotations

import triton
import triton.language as tl

from lightning_indexer.backends.triton_portable.fp4_kernel import e4m3_of_e2m1, spread, tops
from lightning_indexer.backends.triton_portable.quantize_kernel import key_scale


def _name(specialization) -> str:
    c = specialization.constants
    kind = "fp4" if c["SHIFT"] else f"{c['ROW_BYTES']}B"
    order = "preshuffled" if c["SHUFFLED"] else "flat"
    return f"gather_k_cache_{kind}_page{c['PAGE']}_t{c['ROWS']}_{order}_triton"


@triton.jit(repr=_name, do_not_specialize=["keys", "batch", "max_blocks", "search"])
def gather_k_cache_kernel(
    cache_ptr,  # uint8: blocks of PAGE * (ROW_BYTES + 4) bytes
    table_ptr,  # int32 [B, max_blocks]
    lengths_ptr,  # int32 [B + 1], cumulative
    out_ptr,  # uint8 [N, ROW_BYTES], or [N, 2 * ROW_BYTES] of converted keys
    out_scale_ptr,  # int32 [N]: words
    keys,  # N
    batch,
    max_blocks,
    search,  # steps of the bisection
    block_words,  # words between two blocks
    table_stride,
    ROWS: tl.constexpr,  # keys of a program
    ROW_BYTES: tl.constexpr,
    PAGE: tl.constexpr,
    SHUFFLED: tl.constexpr,
    UE8M0: tl.constexpr,  # scales become float32
    SHIFT: tl.constexpr,  # fp4 keys become e4m3, see fp4_to_fp8; 0: bytes are copied
    TO: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    total = tl.load(lengths_ptr + batch)
    real = row < tl.minimum(total, keys)
    # The last sequence that starts at or before the row.
    sequence = tl.zeros([ROWS], tl.int32)
    for step in range(search):
        further = sequence + (1 << (search - 1 - step))
        start = tl.load(lengths_ptr + further, mask=real & (further < batch), other=2147483647)
        sequence = tl.where(start <= row, further, sequence)
    position = row - tl.load(lengths_ptr + sequence, mask=real, other=0)
    entry = position // PAGE
    real = real & (entry < max_blocks)
    block = tl.load(table_ptr + sequence.to(tl.int64) * table_stride + entry, mask=real, other=0).to(tl.int64)
    inner = position % PAGE
    base = cache_ptr + block * block_words * 4

    words = (base + PAGE * ROW_BYTES).to(tl.pointer_type(tl.int32), bitcast=True)
    word = tl.load(words + inner, mask=real, other=0)
    out_row = row.to(tl.int64)
    if SHIFT > 0:
        # Four nibbles become a word of four codes.
        column = tl.arange(0, ROW_BYTES // 2)
        source = (base + inner * ROW_BYTES).to(tl.pointer_type(tl.uint16), bitcast=True)
        half = tl.load(source[:, None] + column[None, :], mask=real[:, None], other=0).to(tl.int32)
        byte = (word[:, None] >> (column // 8 * 8)[None, :]) & 0xFF
        top, lowest = tops((half & 0x7777) != 0, byte)
        codes = e4m3_of_e2m1(spread(half), byte - top[:, None], lowest, SHIFT, TO)
        target = (out_ptr + out_row * (2 * ROW_BYTES)).to(tl.pointer_type(tl.int32), bitcast=True)
        tl.store(target[:, None] + column[None, :], codes, mask=real[:, None])
        word = key_scale(top, tl.max(byte, axis=1) == 255, SHIFT).to(tl.int32, bitcast=True)
    else:
        column = tl.arange(0, ROW_BYTES)
        if SHUFFLED:
            places = (inner // 16 * (16 * ROW_BYTES) + inner % 16 * 16)[:, None]
            places = places + (column // 16 * 256 + column % 16)[None, :]
        else:
            places = (inner * ROW_BYTES)[:, None] + column[None, :]
        values = tl.load(base[:, None] + places, mask=real[:, None], other=0)
        tl.store(out_ptr + (out_row * ROW_BYTES)[:, None] + column[None, :], values, mask=real[:, None])
        if UE8M0:
            exponent = word & 0xFF
            word = tl.where(exponent == 0, 0x00400000, exponent << 23)
            word = tl.where(exponent == 255, 0x7FC00000, word)
    tl.store(out_scale_ptr + out_row, word, mask=real)
