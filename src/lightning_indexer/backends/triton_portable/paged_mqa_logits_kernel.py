"""The portable Triton kernel over a paged cache.

    logits[r, n] = scale[n] * sum_h w[r, h] * relu(q[r, h, :] . k[n, :])   below row r's length, -inf behind

Plan. ROWS rows of one b share each tile of BLOCK keys, K [BLOCK, D] x q^T [D, ROWS * H]; a b whose rows are more than
that is cut into GROUPS. The tiles of a b are dealt out to `splits` programs, one after the other, so that a program's
share is even whatever the length: the schedule is the length itself, read here. What lies behind a length is filled
with -inf in the same manner: every column is written once.

Keys lie on the M side of the product, so a key's heads end in few lanes. A tile within one page asks the block table
once, others once a key. Addresses of blocks are 64-bit; places within a block are 32-bit.

fp4 keys become what the matrix unit reads in registers: even and odd channels apart, as they lie in the bytes' nibbles,
so that a product is two of D / 2 channels each, with q split likewise. The key's own scale is applied as others are.
"""

from __future__ import annotations

import triton
import triton.language as tl

from lightning_indexer.backends.triton_portable.fp4_kernel import e4m3_of_e2m1, tops
from lightning_indexer.backends.triton_portable.mqa_logits_kernel import _widen
from lightning_indexer.backends.triton_portable.quantize_kernel import key_scale


def _name(specialization) -> str:
    c = specialization.constants
    form = "clean" if c["CLEAN"] else "noclean"
    order = "fp4" if c["FP4_SHIFT"] else "preshuffled" if c["SHUFFLED"] else "flat"
    shape = f"n{c['NEXT_N']}_H{c['HEADS']}_D{c['HEAD_DIM']}_page{c['PAGE']}"
    return f"fp8_paged_mqa_logits_{shape}_bkv{c['BLOCK']}_r{c['ROWS']}_{order}_{form}_triton"


@triton.jit
def _operand(bits, MODE: tl.constexpr):
    """What the matrix unit reads, of fp8 bytes."""
    if MODE == "widen":
        values = _widen(bits)
    else:
        # e4m3fn bytes read as e4m3fnuz, which halves them: -0.0 is NaN there.
        values = tl.where(bits == 0x80, 0, bits).to(tl.uint8).to(tl.float8e4b8, bitcast=True)
    return values


@triton.jit
def _load_values(pointers, mask, MODE: tl.constexpr, MASKED: tl.constexpr):
    if MODE == "fn":
        pointers = pointers.to(tl.pointer_type(tl.float8e4nv), bitcast=True)
    elif MODE == "fnuz":
        pointers = pointers.to(tl.pointer_type(tl.float8e4b8), bitcast=True)
    values = tl.load(pointers, mask=mask, other=0.0) if MASKED else tl.load(pointers)
    if MODE == "widen" or MODE == "scrub":
        values = _operand(values, MODE)
    return values


@triton.jit
def _load_scales(base, inside, PLACE: tl.constexpr, UE8M0: tl.constexpr, MASKED: tl.constexpr, inner):
    """float32 [BLOCK]: the words behind a block's values, at `inner` of it."""
    words = (base + PLACE).to(tl.pointer_type(tl.int32), bitcast=True) + inner
    bits = tl.load(words, mask=inside, other=0) if MASKED else tl.load(words)
    if UE8M0:
        exponent = bits & 0xFF
        bits = tl.where(exponent == 0, 0x00400000, exponent << 23)
        bits = tl.where(exponent == 255, 0x7FC00000, bits)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _fp4_operand(x, down, lowest, BLOCK: tl.constexpr, SHIFT: tl.constexpr, MODE: tl.constexpr):
    """What the matrix unit reads, [BLOCK, 4 * words], of int32 of four e2m1 codes."""
    x = e4m3_of_e2m1(x, down, lowest, SHIFT, "fn bits" if MODE == "widen" else MODE)
    WIDTH: tl.constexpr = 4 * x.shape[1]
    even = tl.join(x.to(tl.uint8), (x >> 16).to(tl.uint8))
    odd = tl.join((x >> 8).to(tl.uint8), (x >> 24).to(tl.uint8))
    codes = tl.reshape(tl.join(even, odd), [BLOCK, WIDTH])
    if MODE == "widen":
        values = _widen(codes)
    elif MODE == "fn":
        values = codes.to(tl.float8e4nv, bitcast=True)
    else:
        values = codes.to(tl.float8e4b8, bitcast=True)
    return values


@triton.jit
def _tile(
    column, longest, width, length, real, q, q_odd, w, cache_ptr, block_words, table_row, out_rows,
    HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, PAGE: tl.constexpr, SHUFFLED: tl.constexpr, UE8M0: tl.constexpr,
    FP4_SHIFT: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, CLEAN: tl.constexpr, MODE: tl.constexpr,
    WHOLE: tl.constexpr,
):  # fmt: skip
    """Columns [column, column + BLOCK) of the rows. WHOLE: the longest of them sees every one."""
    ROW_BYTES: tl.constexpr = HEAD_DIM // 2 if FP4_SHIFT else HEAD_DIM
    in_tile = tl.arange(0, BLOCK)
    channel = tl.arange(0, ROW_BYTES)
    columns = column + in_tile
    inside = columns < longest  # keys behind it are never read, nor their entries of the table
    if PAGE % BLOCK == 0:
        block = tl.load(table_row + column // PAGE).to(tl.int64)
        inner = column % PAGE + in_tile
    else:
        if WHOLE:
            block = tl.load(table_row + columns // PAGE).to(tl.int64)
        else:
            block = tl.load(table_row + columns // PAGE, mask=inside, other=0).to(tl.int64)
        inner = columns % PAGE
    base = cache_ptr + block * block_words * 4
    if FP4_SHIFT:
        words = (base + PAGE * ROW_BYTES).to(tl.pointer_type(tl.int32), bitcast=True) + inner
        eight = tl.arange(0, ROW_BYTES // 4)  # nibbles
        values = base.to(tl.pointer_type(tl.int32), bitcast=True)
        places = inner[:, None] * (ROW_BYTES // 4) + eight[None, :]
        pointers = values + places if PAGE % BLOCK == 0 else values[:, None] + places
        if WHOLE:
            packed, word = tl.load(pointers), tl.load(words)
        else:
            packed, word = tl.load(pointers, mask=inside[:, None], other=0), tl.load(words, mask=inside, other=0)
        byte = (word[:, None] >> (eight // 4 * 8)[None, :]) & 0xFF
        top, lowest = tops((packed & 0x77777777) != 0, byte)
        scales = key_scale(top, tl.max(byte, axis=1) == 255, FP4_SHIFT)
        down = byte - top[:, None]
        products = tl.dot(_fp4_operand(packed & 0x0F0F0F0F, down, lowest, BLOCK, FP4_SHIFT, MODE), q)
        odd = _fp4_operand((packed >> 4) & 0x0F0F0F0F, down, lowest, BLOCK, FP4_SHIFT, MODE)
        products = tl.dot(odd, q_odd, products)
    else:
        if SHUFFLED:
            places = (inner // 16 * (16 * HEAD_DIM) + inner % 16 * 16)[:, None]
            places = places + (channel // 16 * 256 + channel % 16)[None, :]
        else:
            places = inner[:, None] * ROW_BYTES + channel[None, :]
        pointers = base + places if PAGE % BLOCK == 0 else base[:, None] + places
        k = _load_values(pointers, inside[:, None], MODE, MASKED=not WHOLE)
        scales = _load_scales(base, inside, PAGE * HEAD_DIM, UE8M0, not WHOLE, inner)
        products = tl.dot(k, q)

    scores = tl.maximum(products, 0.0) * w[None, :]  # [BLOCK, ROWS * H] float32
    logits = tl.sum(scores, axis=1)[:, None] if ROWS == 1 else tl.sum(tl.reshape(scores, [BLOCK, ROWS, HEADS]), axis=2)
    logits = logits * scales[:, None] + 0.0  # -0.0 becomes +0.0
    if CLEAN and (ROWS > 1 or not WHOLE):
        logits = tl.where(columns[:, None] < length[None, :], logits, float("-inf"))
    targets = out_rows[None, :] + columns[:, None]
    logits = logits.to(out_rows.dtype.element_ty)
    if WHOLE:
        tl.store(targets, logits, mask=real[None, :])
    elif CLEAN:
        tl.store(targets, logits, mask=real[None, :] & (columns < width)[:, None])
    else:
        tl.store(targets, logits, mask=real[None, :] & inside[:, None])


@triton.jit(repr=_name, do_not_specialize=["width", "limit", "splits"])
def fp8_paged_mqa_logits_kernel(
    q_ptr,  # fp8, or its bytes if Q_MODE says so [B, NEXT_N, H, D]
    cache_ptr,  # uint8: blocks of PAGE * (D + 4) bytes, of fp4 D / 2 + 4
    w_ptr,  # float32 [B * NEXT_N, H]
    lengths_ptr,  # int32 [B] or [B, NEXT_N]
    table_ptr,  # int32 [B, max_blocks], or of sequences
    indices_ptr,  # int32 [B], or None
    out_ptr,  # float32 or bfloat16 [B * NEXT_N, width]
    width,
    limit,  # positions that a row can see: of the width and of the table
    splits,  # programs that a group's tiles are dealt out to
    q_stride_b,
    q_stride_j,
    q_stride_h,
    block_words,  # words between two blocks
    w_stride,
    length_stride_b,
    length_stride_j,
    table_stride,
    out_stride,
    NEXT_N: tl.constexpr,
    ROWS: tl.constexpr,  # rows of a program, a power of two
    HEADS: tl.constexpr,
    PADDED_HEADS: tl.constexpr,  # the N side of the product is at least 16
    HEAD_DIM: tl.constexpr,
    PAGE: tl.constexpr,
    SHUFFLED: tl.constexpr,
    UE8M0: tl.constexpr,
    FP4_SHIFT: tl.constexpr,  # of fp4 keys, see fp4_to_fp8; else 0
    ROW_LENGTHS: tl.constexpr,
    CLEAN: tl.constexpr,
    BLOCK: tl.constexpr,
    MODE: tl.constexpr,  # of the cache's values: fn, fnuz, scrub (fn bytes read as fnuz), widen
    Q_MODE: tl.constexpr,
    FACTOR: tl.constexpr,  # 2 for each operand that is scrubbed
):
    program = tl.program_id(0)
    split = program % splits
    GROUPS: tl.constexpr = (NEXT_N + ROWS - 1) // ROWS
    group = program // splits % GROUPS
    b = (program // splits // GROUPS).to(tl.int64)

    # Rows [ROWS] of b and their lengths; rows that are not real see nothing and are not stored.
    j = group * ROWS + tl.arange(0, ROWS)
    real = j < NEXT_N
    if ROW_LENGTHS:
        length = tl.load(lengths_ptr + b * length_stride_b + j * length_stride_j, mask=real, other=0)
    else:
        length = tl.maximum(tl.load(lengths_ptr + b * length_stride_b), 0) - NEXT_N + 1 + j
    length = tl.where(real, tl.minimum(tl.maximum(length, 0), limit), 0)
    longest = tl.max(length, axis=0)
    row = b * NEXT_N + j
    out_rows = out_ptr + row * out_stride

    tiles = (longest + BLOCK - 1) // BLOCK
    if split < tiles:
        sequence = b if indices_ptr is None else tl.load(indices_ptr + b).to(tl.int64)
        table_row = table_ptr + sequence * table_stride

        # q^T [D, ROWS * H] and w [ROWS * H] of the rows, held for all tiles.
        head = tl.arange(0, ROWS * PADDED_HEADS) % PADDED_HEADS
        head_row = group * ROWS + tl.arange(0, ROWS * PADDED_HEADS) // PADDED_HEADS
        valid = (head < HEADS) & (head_row < NEXT_N)
        channel = tl.arange(0, HEAD_DIM)
        q_heads = q_ptr + b * q_stride_b + (head_row.to(tl.int64) * q_stride_j + head * q_stride_h)
        if FP4_SHIFT:
            pairs = tl.load(q_heads[:, None] + channel[None, :], mask=valid[:, None], other=0.0)
            even, odd = tl.split(tl.reshape(pairs, [ROWS * PADDED_HEADS, HEAD_DIM // 2, 2]))
            q, q_odd = tl.trans(even), tl.trans(odd)
        else:
            q = tl.load(q_heads[None, :] + channel[:, None], mask=valid[None, :], other=0.0)
            q_odd = q
        if Q_MODE == "widen" or Q_MODE == "scrub":
            q, q_odd = _operand(q, Q_MODE), _operand(q_odd, Q_MODE)
        w = tl.load(w_ptr + (b * NEXT_N + head_row) * w_stride + head, mask=valid, other=0.0) * FACTOR

        whole = longest // BLOCK
        if split < whole:  # a pipelined loop of no turns reads shared memory that nothing has written
            for tile in tl.range(split, whole, splits):
                _tile(
                    tile * BLOCK, longest, width, length, real, q, q_odd, w, cache_ptr, block_words, table_row,
                    out_rows, PADDED_HEADS, HEAD_DIM, PAGE, SHUFFLED, UE8M0, FP4_SHIFT, ROWS, BLOCK, CLEAN, MODE,
                    WHOLE=True,
                )  # fmt: skip
        if whole < tiles and whole % splits == split:
            _tile(
                whole * BLOCK, longest, width, length, real, q, q_odd, w, cache_ptr, block_words, table_row,
                out_rows, PADDED_HEADS, HEAD_DIM, PAGE, SHUFFLED, UE8M0, FP4_SHIFT, ROWS, BLOCK, CLEAN, MODE,
                WHOLE=False,
            )  # fmt: skip

    if CLEAN:
        FILL: tl.constexpr = 1024 // ROWS
        value = tl.full([ROWS, FILL], float("-inf"), tl.float32).to(out_ptr.dtype.element_ty)
        for column in tl.range(tiles * BLOCK + split * FILL, width, splits * FILL):
            columns = column + tl.arange(0, FILL)
            mask = real[:, None] & (columns < width)[None, :]
            tl.store(out_rows[:, None] + columns[None, :], value, mask=mask)
