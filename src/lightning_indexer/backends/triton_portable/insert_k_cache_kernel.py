"""The portable Triton kernel that quantises keys into a paged cache.

Plan. A program has ROWS tokens: load, LayerNorm, RoPE, Hadamard where the call has them, quantise, store to each
token's slot. No token needs another. Addresses of blocks are 64-bit; places within a block are 32-bit.
"""

from __future__ import annotations

import triton
import triton.language as tl

from lightning_indexer.backends.triton_portable.quantize_kernel import (
    first_channels,
    fp4_word,
    hadamard,
    layer_norm,
    load_pairs,
    quantize_e2m1,
    quantize_e4m3,
    rotate,
)


def _name(specialization) -> str:
    c = specialization.constants
    kind = "fp4" if c["FP4"] else "fp8"
    order = "preshuffled" if c["SHUFFLED"] else "flat"
    steps = f"{'_rope' if c['GROUP'] >= 0 else ''}{'_hadamard' if c['HADAMARD'] else ''}"
    return f"insert_k_cache_{kind}_D{c['D']}_page{c['PAGE']}_t{c['ROWS']}_{order}{steps}_triton"


@triton.jit
def _store_e4m3(
    base, inner, a, b, kept, R: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr, INTERLEAVED: tl.constexpr,
    SHUFFLED: tl.constexpr,
):  # fmt: skip
    row = base + (inner // 16 * (16 * D) + inner % 16 * 16 if SHUFFLED else inner * D)
    if INTERLEAVED:
        channel = tl.arange(0, D)
        place = channel // 16 * 256 + channel % 16 if SHUFFLED else channel
        tl.store(row[:, None] + place[None, :], tl.reshape(tl.join(a, b), [R, D]), mask=kept[:, None])
    else:
        first = first_channels(D, HALF)
        second = first + HALF
        if SHUFFLED:
            second = second // 16 * 256 + second % 16
            first = first // 16 * 256 + first % 16
        tl.store(row[:, None] + first[None, :], a, mask=kept[:, None])
        tl.store(row[:, None] + second[None, :], b, mask=kept[:, None])


@triton.jit
def _store_e2m1(
    base, inner, a, b, kept, R: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr, INTERLEAVED: tl.constexpr
):
    row = base + inner * (D // 2)
    if INTERLEAVED:
        packed = tl.reshape(a | (b << 4), [R, D // 2]).to(tl.uint8)
        tl.store(row[:, None] + tl.arange(0, D // 2)[None, :], packed, mask=kept[:, None])
    else:
        # Channels 2i and 2i + 1 of a are neighbours in it.
        low, high = tl.split(tl.reshape(a, [R, D // 4, 2]))
        pair = tl.arange(0, D // 4)
        place = pair // (HALF // 2) * HALF + pair % (HALF // 2)
        tl.store(row[:, None] + place[None, :], (low | (high << 4)).to(tl.uint8), mask=kept[:, None])
        low, high = tl.split(tl.reshape(b, [R, D // 4, 2]))
        tl.store(row[:, None] + (place + HALF // 2)[None, :], (low | (high << 4)).to(tl.uint8), mask=kept[:, None])


@triton.jit(repr=_name, do_not_specialize=["tokens", "capacity", "eps"])
def insert_k_cache_kernel(
    k_ptr,  # [T, D]
    cache_ptr,  # uint8: blocks of PAGE * (D + 4) bytes, of fp4 D / 2 + 4
    slots_ptr,  # int64 [T]
    weight_ptr,  # [D], or None: no LayerNorm
    bias_ptr,  # [D] or None
    positions_ptr,  # [T], or None
    cos_sin_ptr,  # [positions, 2 * HALF], or None
    tokens,
    capacity,  # slots of the cache
    eps,
    k_stride,
    block_words,  # words between two blocks
    cos_sin_stride,
    ROWS: tl.constexpr,  # tokens of a program
    D: tl.constexpr,
    PAGE: tl.constexpr,
    SHUFFLED: tl.constexpr,
    FP4: tl.constexpr,
    LIMIT: tl.constexpr,  # the largest value that is written
    POWER_OF_TWO: tl.constexpr,
    UE8M0: tl.constexpr,
    TO: tl.constexpr,  # how e4m3 is made, see encode_e4m3
    HALF: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    GROUP: tl.constexpr,  # of the channels that are turned; -1: none
    HADAMARD: tl.constexpr,  # log2 of D, 0: none
):
    token = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    real = token < tokens
    slot = tl.load(slots_ptr + token, mask=real, other=-1)
    kept = (slot >= 0) & (slot < capacity)
    slot = tl.where(kept, slot, 0)
    a, b = load_pairs(k_ptr + token * k_stride, kept, ROWS, D, HALF, INTERLEAVED)
    if weight_ptr is not None:
        a, b = layer_norm(a, b, weight_ptr, bias_ptr, eps, D, HALF, INTERLEAVED)
    if GROUP >= 0:
        position = tl.load(positions_ptr + token, mask=kept, other=0).to(tl.int64)
        a, b = rotate(a, b, cos_sin_ptr + position * cos_sin_stride, kept, D, HALF, GROUP)
    if HADAMARD > 0:
        a, b = hadamard(a, b, ROWS, D, HADAMARD)

    base = cache_ptr + slot // PAGE * block_words * 4
    inner = (slot % PAGE).to(tl.int32)
    if FP4:
        a, b, a_byte, b_byte, first = quantize_e2m1(a, b, ROWS, D, HALF, INTERLEAVED)
        word = fp4_word(a_byte, b_byte, first, HALF, INTERLEAVED)
        _store_e2m1(base, inner, a, b, kept, ROWS, D, HALF, INTERLEAVED)
    else:
        a, b, scale = quantize_e4m3(a, b, LIMIT, POWER_OF_TWO, TO)
        word = scale.to(tl.int32, bitcast=True)
        if UE8M0:
            word = (word >> 23) * 0x01010101
        _store_e4m3(base, inner, a, b, kept, ROWS, D, HALF, INTERLEAVED, SHUFFLED)
    ROW_BYTES: tl.constexpr = D // 2 if FP4 else D
    words = (base + PAGE * ROW_BYTES).to(tl.pointer_type(tl.int32), bitcast=True)
    tl.store(words + inner, word, mask=kept)
