"""The Gluon kernel of gfx950.

    logits[m, n] = kv_scale[n] * sum_h w[m, h] * relu(q[m, h, :] . k[n, :])   inside row m's window, -inf elsewhere

Plan. One program owns `chunk` positions of ROWS rows that share every key tile. The tiles cover the union of the rows'
windows; each is copied from memory to LDS without passing through registers, BUFFERS - 1 tiles ahead of its use, and
a buffer is refilled at the top of the one loop, behind the barrier that ends its last use. Tiles past the end copy the
last key again, so the loop has no other form. A wave holds q and w of its own rows and takes its own part of a step.

The product is q [ROWS * H, D] x k^T [D, STEP], in tiles of 32 heads x 32 keys (several rows, where H < 32). A lane's 16
results of a tile are 16 heads of one key; lane l + 32 holds the other 16 (register v: head 8 * (v // 4) + 4 * (l // 32)
+ v % 4). So the head sum is 4 chains of FMAs over v // 4, two of them in one packed instruction, then a sum of 4
registers, and one v_permlane32_swap that gives each half of the wave the other's part of half of the sums: no sum is
made twice, and all 64 lanes store.

Each position of each row is written once: masked in the tiles, filled outside of them. Position p of row m is column p,
or p - ks[m] for compressed logits.
"""

from __future__ import annotations

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.amd import cdna4

# Triton 3.6 has these under other names.
_barrier = getattr(gl, "barrier", None) or gl.thread_barrier
_REINTERPRETS = gl.constexpr(hasattr(gl.shared_memory_descriptor, "reinterpret"))


def _name(specialization) -> str:
    c = specialization.constants
    form = "compressed" if c["COMPRESSED"] else "clean" if c["CLEAN"] else "noclean"
    return (
        f"fp8_mqa_logits_H{c['HEADS']}_D{c['HEAD_DIM']}_r{c['ROWS']}_w{c['ROW_WARPS']}x{c['KEY_WARPS']}"
        f"_bkv{c['BLOCK']}_lds{c['BUFFERS']}_{form}{'_wide' if c['WIDE'] else ''}_gluon"
    )


@gluon.constexpr_function
def _sum_layouts(ROWS, STEP, ROW_WARPS, KEY_WARPS):
    """Layouts of the head sums: [ROWS, 2, STEP] as the two halves of a wave have them after the swap, [ROWS, STEP]."""
    rows, keys = ROWS // ROW_WARPS, STEP // KEY_WARPS  # of one wave
    key_lanes = [[0, 0, 1 << bit] for bit in range(5)]
    spread = [[1 << bit, 0, 0] for bit in range(rows.bit_length() - 1)]
    spread += [[0, 0, 1 << bit] for bit in range(5, keys.bit_length() - 1)]
    # The last bit of a lane takes over the lowest row or key bit that registers hold; without one, halves are doubled.
    lanes, registers = [*key_lanes, *(spread[:1] or [[0, 0, 0]])], [[0, 1, 0], *spread[1:]]
    warps = [[0, 0, keys << bit] for bit in range(KEY_WARPS.bit_length() - 1)]
    warps += [[rows << bit, 0, 0] for bit in range(ROW_WARPS.bit_length() - 1)]

    def flat(bases):
        return [[row, key] for row, _, key in bases]

    halves = gl.DistributedLinearLayout(registers, lanes, warps, [], [ROWS, 2, STEP])
    return halves, gl.DistributedLinearLayout(flat(registers[1:]), flat(lanes), flat(warps), [], [ROWS, STEP])


@gluon.jit
def _load(base, offsets, WIDE: gl.constexpr):
    return gl.load(base + offsets) if WIDE else cdna4.buffer_load(base, offsets)


@gluon.jit
def _store(base, offsets, value, mask, WIDE: gl.constexpr):
    value = value.to(base.dtype.element_ty)
    if WIDE:
        gl.store(base + offsets, value, mask=mask)
    else:
        cdna4.buffer_store(value, base, offsets, mask=mask)


@gluon.jit
def _copy(buffer, base, offsets, end, WIDE: gl.constexpr):
    """One tile of keys into a buffer; ``end`` is the last key's offset. 16 bytes a lane, lanes in LDS order."""
    offsets = gl.max_contiguous(gl.multiple_of(gl.minimum(offsets, end), [1, 16]), [1, 16])
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    if _REINTERPRETS:
        plain = buffer.reinterpret(layout=PLAIN)
    else:
        plain = buffer._reinterpret(buffer.dtype, buffer.shape, PLAIN)
    if WIDE:
        cdna4.async_copy.global_load_to_shared(plain, base + offsets)
    else:
        cdna4.async_copy.buffer_load_to_shared(plain, base, offsets)
    cdna4.async_copy.commit_group()


@gluon.jit
def _fill(base, offsets, start, stop, keys, exists, STEP: gl.constexpr, WIDE: gl.constexpr):
    """-inf into positions [start, stop) of the rows that exist."""
    value = gl.full(offsets.shape, float("-inf"), gl.float32, layout=offsets.type.layout)
    for position in range(start, stop, STEP):
        _store(base, offsets + position, value, exists & (position + keys < stop), WIDE)


@gluon.jit
def _split(x, N: gl.constexpr):
    """The N slices of the last dimension of a tensor of 5."""
    if N == 1:
        slices = (x.reshape([x.shape[0], x.shape[1], x.shape[2], x.shape[3]]),)
    else:
        a, b = x.reshape([x.shape[0], x.shape[1], x.shape[2], x.shape[3], N // 2, 2]).split()
        slices = _split(a, N // 2) + _split(b, N // 2)
    return slices


@gluon.jit
def _links(x, ROWS: gl.constexpr, HEADS: gl.constexpr, STEP: gl.constexpr):
    """[ROWS * H, STEP] as the links of the chains, H / 8 tensors [ROWS, 2 halves of a wave, 4 chains, STEP]."""
    return _split(x.reshape([ROWS, HEADS // 8, 2, 4, STEP]).permute([0, 2, 3, 4, 1]), HEADS // 8)


@gluon.jit
def _scales(base, start, keys, end, BLOCK: gl.constexpr, STEP: gl.constexpr):
    """kv_scale of a tile, a tensor for each step of it."""
    found = ()
    for step in gl.static_range(0, BLOCK, STEP):
        found += (cdna4.buffer_load(base, gl.minimum(start + step + keys, end)),)
    return found


@gluon.jit(repr=_name, do_not_specialize=["rows", "keys", "width"])
def fp8_mqa_logits_kernel(
    q_ptr,  # float8_e4m3fn [M, H, D]
    k_ptr,  # float8_e4m3fn [N, D]
    kv_scale_ptr,  # float32 [N]
    w_ptr,  # float32 [M, H]
    ks_ptr,  # int32 [M]
    ke_ptr,  # int32 [M]
    out_ptr,  # float32 or bfloat16 [M, width]
    rows,
    keys,
    width,
    chunk,  # positions of one program, a multiple of BLOCK
    q_stride_m,
    q_stride_h,
    k_stride,
    w_stride,
    out_stride,
    HEADS: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    ROWS: gl.constexpr,
    ROW_WARPS: gl.constexpr,  # waves along the rows and
    KEY_WARPS: gl.constexpr,  # along the keys
    STEP: gl.constexpr,  # keys of one product
    BLOCK: gl.constexpr,  # keys of one tile
    BUFFERS: gl.constexpr,
    CLEAN: gl.constexpr,
    COMPRESSED: gl.constexpr,
    WIDE: gl.constexpr,  # 64-bit pointers instead of buffer instructions
):
    # Layouts. An instruction is 64 deep where D allows it; a lane reads 16 bytes of K or q at a time.
    INSTRUCTION: gl.constexpr = [32, 32, 16] if HEAD_DIM == 32 else [32, 32, 64]
    TILES: gl.constexpr = [ROWS * HEADS // 32 // ROW_WARPS, STEP // 32 // KEY_WARPS]  # of one wave
    PRODUCT: gl.constexpr = gl.amd.AMDMFMALayout(4, INSTRUCTION, False, [ROW_WARPS, KEY_WARPS], tiles_per_warp=TILES)
    Q: gl.constexpr = gl.DotOperandLayout(0, PRODUCT, 16)
    K: gl.constexpr = gl.DotOperandLayout(1, PRODUCT, 16)
    LAYOUTS: gl.constexpr = _sum_layouts(ROWS, STEP, ROW_WARPS, KEY_WARPS)
    HALVES: gl.constexpr = LAYOUTS[0]
    OUT: gl.constexpr = LAYOUTS[1]
    # LDS: 16 byte pieces, XORed with the number of the 256 byte line, which is what 64 banks serve at once.
    PIECES: gl.constexpr = HEAD_DIM // 16
    LINE: gl.constexpr = 256 // HEAD_DIM
    COPY: gl.constexpr = gl.BlockedLayout([1, 16], [64 // PIECES, PIECES], [ROW_WARPS * KEY_WARPS, 1], [1, 0])
    SWIZZLED: gl.constexpr = gl.SwizzledSharedLayout(16, LINE, PIECES, [1, 0])
    OFFSET: gl.constexpr = gl.int64 if WIDE else gl.int32

    # Which rows, which positions. Base addresses are 64-bit: M * N passes 2^31.
    groups = (rows + ROWS - 1) // ROWS
    program = gl.program_id(0)
    row = (groups - 1 - program % groups) * ROWS
    first = (program // groups) * chunk
    last = gl.minimum(first + chunk, keys)
    row64 = row.to(gl.int64)
    out_base = out_ptr + row64 * out_stride

    # Windows, within [first, last): of each row as a vector, and their union [lo, hi) as scalars.
    in_group = gl.arange(0, ROWS, layout=gl.SliceLayout(1, OUT))
    exists = row + in_group < rows
    one = gl.minimum(row + in_group, rows - 1)
    ks = gl.load(ks_ptr + one)
    ke = gl.minimum(gl.load(ke_ptr + one), last)
    row_lo = gl.maximum(ks, first)
    lo = last
    hi = first
    for n in gl.static_range(ROWS):
        single = gl.minimum(row + n, rows - 1)
        start = gl.maximum(gl.load(ks_ptr + single), first)
        stop = gl.minimum(gl.load(ke_ptr + single), last)
        if start < stop:
            lo = gl.minimum(lo, start)
            hi = gl.maximum(hi, stop)
    row_hi = gl.where(exists, ke, row_lo)
    out_offsets = in_group.to(OFFSET) * out_stride
    if COMPRESSED:
        # A window longer than the width loses its end.
        row_hi = gl.minimum(row_hi.to(gl.int64), ks.to(gl.int64) + width).to(gl.int32)
        out_offsets -= ks
    in_step = gl.arange(0, STEP, layout=gl.SliceLayout(0, OUT))
    out_offsets = out_offsets[:, None] + in_step[None, :]
    row_lo = row_lo[:, None]
    row_hi = row_hi[:, None]

    # Tiles start where a line of 64 results does.
    lo = gl.minimum(lo, hi) // 64 * 64
    tiles = (hi - lo + BLOCK - 1) // BLOCK
    if CLEAN:
        _fill(out_base, out_offsets, first, lo, in_step[None, :], exists[:, None], STEP, WIDE)

    if tiles > 0:
        # q [ROWS * H, D] and w [ROWS * H, 1], held for the whole chunk; rows past the last one repeat it.
        head = gl.arange(0, ROWS * HEADS, layout=gl.SliceLayout(1, Q))
        of_row = gl.minimum(head // HEADS, rows - 1 - row).to(OFFSET)
        channel = gl.arange(0, HEAD_DIM, layout=gl.SliceLayout(0, Q))
        q_offsets = (of_row * q_stride_m + (head % HEADS).to(OFFSET) * q_stride_h)[:, None] + channel[None, :]
        q = _load(q_ptr + row64 * q_stride_m, q_offsets, WIDE)
        head = gl.arange(0, ROWS * HEADS, layout=gl.SliceLayout(1, PRODUCT))
        of_row = gl.minimum(head // HEADS, rows - 1 - row).to(OFFSET)
        w = _load(w_ptr + row64 * w_stride, of_row * w_stride + head % HEADS, WIDE)
        zeros = gl.zeros([ROWS * HEADS, STEP], gl.float32, layout=PRODUCT)
        w, _ = gl.broadcast(w[:, None], zeros)
        w_links = _links(w, ROWS, HEADS, STEP)

        # Where a lane's 16 bytes of a tile come from, relative to the first key of the union.
        buffers = gl.allocate_shared_memory(k_ptr.dtype.element_ty, [BUFFERS, BLOCK, HEAD_DIM], SWIZZLED)
        in_tile = gl.arange(0, BLOCK, layout=gl.SliceLayout(1, COPY))
        byte = gl.arange(0, HEAD_DIM, layout=gl.SliceLayout(0, COPY))
        piece = (byte // 16)[None, :] ^ (in_tile // LINE % PIECES)[:, None]
        in_key = piece * 16 + (byte % 16)[None, :]
        k_base = k_ptr + lo.to(gl.int64) * k_stride
        k_offsets = (in_tile.to(OFFSET) * k_stride)[:, None] + in_key
        k_end = (hi - 1 - lo).to(OFFSET) * k_stride + in_key
        k_tile = gl.to_tensor(k_stride).to(OFFSET) * BLOCK
        scale_base = kv_scale_ptr + lo
        scales = _scales(scale_base, 0, in_step, hi - 1 - lo, BLOCK, STEP)
        for ahead in gl.static_range(BUFFERS - 1):
            _copy(buffers.index(ahead), k_base, k_offsets, k_end, WIDE)
            k_offsets += k_tile

        slot = 0
        position = lo
        for _ in range(tiles):
            # This tile is there, in all waves; so is the end of the tile whose buffer is refilled.
            cdna4.async_copy.wait_group(BUFFERS - 2)
            _barrier()
            # Before the copy: loads return in order, and a later one would wait for it.
            next_scales = _scales(scale_base, position + BLOCK - lo, in_step, hi - 1 - lo, BLOCK, STEP)
            _copy(buffers.index(gl.where(slot == 0, BUFFERS - 1, slot - 1)), k_base, k_offsets, k_end, WIDE)
            k_offsets += k_tile
            tile = buffers.index(slot)
            for step in gl.static_range(0, BLOCK, STEP):
                k = cdna4.async_copy.load_shared_relaxed(tile.slice(step, STEP, 0).permute([1, 0]), K)
                if HEAD_DIM == 32:
                    scores = cdna4.mfma(q, k, zeros)
                else:
                    scores = cdna4.mfma_scaled(q, None, "e4m3", k, None, "e4m3", zeros)
                # One v_maximum3_f32 a score; a maximum that drops NaN takes two instructions.
                scores = gl.maximum(scores, 0.0, propagate_nan=tl.PropagateNan.ALL)
                links = _links(scores, ROWS, HEADS, STEP)
                chains = gl.fma(links[0], w_links[0], gl.zeros_like(links[0]))
                for link in gl.static_range(1, HEADS // 8):
                    chains = gl.fma(links[link], w_links[link], chains)
                halves = gl.convert_layout(gl.sum(chains, axis=2), HALVES)
                sums = gl.convert_layout(gl.sum(halves, axis=1), OUT, assert_trivial=True)
                logits = sums * scales[step // STEP][None, :] + 0.0  # -0.0 becomes +0.0
                here = (position + step + in_step)[None, :]
                inside = (here >= row_lo) & (here < row_hi)
                if CLEAN:
                    logits = gl.where(inside, logits, float("-inf"))
                    inside = exists[:, None] & (here < last)
                _store(out_base, out_offsets + (position + step), logits, inside, WIDE)
            scales = next_scales
            slot = gl.where(slot == BUFFERS - 1, 0, slot + 1)
            position += BLOCK
        # Copies of tiles past the end may be under way still: the end of a wave waits for them (s_endpgm).

    if CLEAN:
        _fill(out_base, out_offsets, lo + tiles * BLOCK, last, in_step[None, :], exists[:, None], STEP, WIDE)
