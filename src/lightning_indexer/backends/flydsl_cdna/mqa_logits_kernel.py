"""The FlyDSL kernels for CDNA3 and CDNA4.

    logits[m, n] = kv_scale[n] * sum_h w[m, h] * relu(q[m, h, :] . k[n, :])   inside row m's window, -inf elsewhere

Plan. A block owns ``rows`` rows and ``chunk`` positions. It walks the tiles of 64 keys (128, 256 with waves to spare)
that the union of its rows' windows touches; each tile of k goes through LDS once, and every row of the block reads it
there. Heads lie on the M side of the products and keys on the N side: a lane holds one key's scores of some heads, so
ReLU and weights are plain multiply-adds, and the lane groups that hold the other heads are summed at the end, half of
the values moving each time, until each lane has the whole logit of one key. kv_scale multiplies that.

LDS is a ring of tiles with one barrier a tile. CDNA4 copies memory into LDS, two tiles ahead; CDNA3 brings the next
tile into registers while it computes, and writes them behind the barrier. Pieces of 16 bytes are swizzled (layout.py).

What a block may write of a row is a buffer of that row: the hardware drops lanes outside of it, so stores have no
branches, and the tile loop is one block of code. Where clean, what no tile covers is filled with -inf first: every
column is written once. Row groups run from last to first: under a causal mask the longest start first.

Positions and columns: column c of row m is position origin + c, where origin is 0, or ks[m] for compressed logits.

Control flow is built with ``when`` and ``Loop`` on MLIR's scf: FlyDSL's rewriting of ``if`` and ``for`` reaches no
further than the body of the kernel function.
"""

from __future__ import annotations

import flydsl.compiler as flyc
import flydsl.expr as fx
from flydsl._mlir import ir
from flydsl._mlir.dialects import gpu, llvm
from flydsl._mlir.dialects import rocdl as ops
from flydsl.expr import arith, rocdl
from flydsl.expr.typing import as_ir_value

from lightning_indexer.backends.flydsl_cdna.layout import KEYS_OF_WAVE, LANES, PIECE, Layout
from lightning_indexer.backends.flydsl_cdna.values import (
    Loop,
    at,
    bits,
    constant,
    element,
    floats,
    i32,
    load,
    no_policy,
    pair,
    select,
    shuffle,
    ty,
    uniform,
    when,
    wide,
    zeros,
)  # fmt: skip

BUFFER_FLAGS = 7 << 12 | 4 << 15  # raw buffer of 32-bit data, as LLVM's users set it for gfx9


# The matrix unit


def _multiply(layout, a, b):
    """Scores [side heads, side keys] of fragments a and b, 16 bytes each: ``results`` floats a lane."""
    acc = zeros(layout.results)
    if layout.deep:
        for i in range(0, len(a), 2):
            x, y = (shuffle(v[i], v[i + 1], list(range(8))) for v in (a, b))
            zero = constant(0)  # no scales: LLVM drops the scaled form
            acc = rocdl.mfma_scale_f32_32x32x64_f8f6f4(ty("vector<16xf32>"), [x, y, acc, 0, 0, 0, zero, 0, zero])
        return acc
    for x, y in zip(a, b, strict=True):
        x, y = (llvm.bitcast(ty("vector<2xi64>"), v) for v in (x, y))
        for i in range(2):
            acc = rocdl.mfma_f32_16x16x32_fp8_fp8(ty("vector<4xf32>"), [element(x, i), element(y, i), acc, 0, 0, 0])
    return acc


def _weighted(scores, factors, sums):
    """sums += factors * relu(scores), two at a time, in chains of their own."""
    no_nans = ir.Attribute.parse("#llvm.fastmath<nnan>")  # one v_max_f32 each, without a canonicalising one before
    zero = constant(0.0, "f32")
    for i, factor in enumerate(factors):
        relu = pair(*(llvm.intr_maxnum(element(scores, 2 * i + j), zero, fastmath_flags=no_nans) for j in range(2)))
        chain = i % len(sums)
        sums[chain] = llvm.fmul(factor, relu) if sums[chain] is None else llvm.intr_fma(factor, relu, sums[chain])


def _exchange(second, a, b, move):
    """Lanes of ``second`` keep b and give a away; the others keep a and give b."""
    keep, give = llvm.select(second, b, a), llvm.select(second, a, b)
    return llvm.fadd(keep, floats(move(bits(give))))


def _head_sum(layout, lane, partial):
    """The partial sums of the lane groups -> in each lane the sum of key ``lane``; half of them move each time."""
    if layout.deep:
        both = ops.permlane32_swap(ty("!llvm.struct<(i32, i32)>"), *map(bits, partial), False, False)
        return llvm.fadd(*(floats(llvm.extractvalue(ty("i32"), both, [i])) for i in range(2)))
    upper, odd = as_ir_value(lane >= 32), as_ir_value((lane & 16) != 0)
    across = as_ir_value((lane ^ 32) * 4)
    halves = [
        _exchange(upper, partial[i], partial[i + 2], lambda v: ops.ds_bpermute(ty("i32"), across, v)) for i in range(2)
    ]
    xor_16 = constant(0x401F)
    return _exchange(odd, *halves, lambda v: ops.ds_swizzle(ty("i32"), v, xor_16))


class _Block:
    """One workgroup's work."""

    def __init__(self, layout, q, k, kv_scale, weights, ks, ke, out, m, n, width, chunk, strides):
        self.layout = layout
        pointers = (q, k, kv_scale, weights, ks, ke, out)
        self.q, self.k, self.kv_scale, self.weights, self.ks, self.ke, self.out = (p.llvm_ptr for p in pointers)
        self.m, self.n, self.width = m, n, width
        self.q_row, self.q_head, self.k_row, self.w_row, self.out_row = strides
        self.lds = fx.SharedAllocator().allocate(fx.Array[fx.Uint8, layout.lds_bytes, 16])._ptr.llvm_ptr
        self.out_type, self.out_bytes = ("bf16", 2) if layout.bf16 else ("f32", 4)
        self.minus_inf = constant(float("-inf"), self.out_type)

        self.thread = i32(fx.thread_idx.x)
        self.lane = self.thread & (LANES - 1)
        self.wave = uniform(self.thread >> 6)
        self.in_side, self.lane_group = self.lane % layout.side, self.lane // layout.side
        self.key0 = (self.wave // layout.row_waves) * KEYS_OF_WAVE  # of this wave, in a tile
        # Rows from last to first: under a causal mask the longest start first.
        group = (m - 1) // layout.rows - i32(fx.block_idx.x)
        self.block_row = group * layout.rows
        self.row0 = self.block_row + (self.wave % layout.row_waves) * layout.rows_of_wave
        self.first = i32(fx.block_idx.y) * chunk
        self.last = self.first + arith.min(chunk, n - self.first)

    def window(self, row):
        """First and last position of a row, both 0 for an empty window or a row past M, and its column 0's position."""
        offset = wide(arith.min(row, self.m - 1)) * 4
        start = i32(load("i32", self.ks, offset, 4))
        stop = arith.min(i32(load("i32", self.ke, offset, 4)), self.n)
        if self.layout.compressed:
            stop = i32(arith.min(fx.Int64(stop), fx.Int64(start) + fx.Int64(self.width)))
        low = arith.max(start, 0)
        there = (row < self.m) & (stop > low)
        return select(there, low, i32(0)), select(there, stop, i32(0)), start

    def run(self):
        layout, first, last = self.layout, self.first, self.last
        begin, end = last, first
        for i in range(layout.rows):
            low, high, _ = self.window(self.block_row + i)
            begin = select(high > low, arith.min(begin, low), begin)
            end = arith.max(end, high)
        begin = arith.max(begin, first) & -layout.tile
        end = arith.min(end, last)
        shift = layout.tile.bit_length() - 1
        self.begin = begin
        self.tiles = tiles = select(end > begin, (end - begin + (layout.tile - 1)) >> shift, i32(0))
        self.rows = [self.window_and_buffer(self.row0 + i) for i in range(layout.rows_of_wave)]
        if layout.clean:
            self.fill(first, select(tiles > 0, begin, last))
            self.fill(arith.min(begin + (tiles << shift), last), select(tiles > 0, last, first))
        with when(tiles > 0):
            self.walk()

    def window_and_buffer(self, row):
        """A row's window, and as a buffer what this block may write of it: its bounds are the stores' only mask."""
        low, high, origin = self.window(row)
        start, stop = self.first, self.last
        if not self.layout.clean:
            start, stop = arith.max(low, start), arith.min(high, stop)
        size = select((row < self.m) & (stop > start), stop - start, i32(0)) * self.out_bytes
        offset = fx.Int64(row) * self.out_row + fx.Int64(start) * self.out_bytes
        if self.layout.compressed:
            offset = offset - fx.Int64(origin) * self.out_bytes
        resource = (at(self.out, offset), constant(0, "i16"), as_ir_value(wide(size)), constant(BUFFER_FLAGS))
        return low, high, start, ops.make_buffer_rsrc(ty("!llvm.ptr<8>"), *resource)

    def store(self, row, value, position):
        """One value a lane, at ``position`` + lane of a row."""
        _, _, start, buffer = row
        offset = self.lane * self.out_bytes + (position - start) * self.out_bytes
        ops.raw_ptr_buffer_store(value, buffer, as_ir_value(offset), constant(0), aux=no_policy())

    def fill(self, start, stop):
        """-inf in columns [start, stop) of this wave's rows."""
        with Loop(start + self.key0, stop, LANES * self.layout.key_waves) as (column, _):
            for row in self.rows:
                self.store(row, self.minus_inf, column)

    def walk(self):
        """The tiles of the block's windows, one barrier each: behind it tile t is whole, and no wave reads t - 1."""
        layout = self.layout
        self.load_rows()
        self.place_copies()
        ahead, ring = layout.stages - 1, layout.stages * layout.stage_bytes
        self.last_tile = self.begin + (self.tiles - 1) * layout.tile
        coming = self.begin
        for t in range(ahead):
            stage = i32(t * layout.stage_bytes)
            self.put(self.fetch(coming, stage), stage)
            coming = self.after(coming)
        staged = []
        if not layout.direct:
            staged, coming = self.fetch(coming), self.after(coming)
        carried = (i32(0), i32(ahead * layout.stage_bytes), coming, *staged)
        with Loop(0, self.tiles, 1, carried) as (t, loop):
            read, write, coming = (i32(value) for value in loop.carried[:3])
            staged = loop.carried[3:]
            if layout.direct:
                rocdl.wait_asyncmark(layout.stages - 2)
            gpu.barrier(address_spaces=ir.Attribute.parse("[#gpu.address_space<workgroup>]"))
            self.put(staged, write)
            staged = self.fetch(coming, write)
            self.score(read, self.begin + t * layout.tile + self.key0)
            following = read + layout.stage_bytes
            # The next tile to come takes the place of this one.
            loop.carried = [select(following == ring, i32(0), following), read, self.after(coming), *staged]

    def after(self, start):
        """First key of the next tile to bring in. Behind the last one it is the last one again."""
        return arith.min(start + self.layout.tile, self.last_tile)

    def load_rows(self):
        """q as A fragments, and the weights in the order of the products' results."""
        layout = self.layout
        self.queries, self.factors = [], []
        for i in range(layout.rows_of_wave):
            safe = fx.Int64(arith.min(self.row0 + i, self.m - 1))
            q_row, w_row = at(self.q, safe * self.q_row), at(self.weights, safe * self.w_row)
            for h in range(0, layout.heads, layout.side):
                head = wide(self.in_side + h) * self.q_head
                places = [head + wide(layout.piece(self.lane_group, c)) * PIECE for c in range(layout.reads)]
                self.queries.append([load("vector<4xi32>", q_row, place, PIECE) for place in places])
                factors = []
                for v in range(layout.results // 4):
                    first = self.lane_group * 4 + (h + v * layout.lane_groups * 4)
                    four = load("vector<4xf32>", w_row, wide(first) * 4, 4)
                    factors += [shuffle(four, four, [j, j + 1], "f32") for j in (0, 2)]
                self.factors.append(factors)

    def place_copies(self):
        """This thread's bytes of a tile of k, relative to its first key. LDS is filled in the order of threads."""
        layout = self.layout
        self.sources = []
        for i in range(layout.copies):
            slot = self.thread + i * layout.threads
            key = slot // layout.pieces
            self.sources.append(key * self.k_row + layout.swizzled(key, slot % layout.pieces) * PIECE)

    def fetch(self, start, stage=None):
        """The tile of k and scales from ``start`` on: on its way into LDS at ``stage``, or into registers, returned.

        Keys from N on are bytes of the last key: nothing past k is read.
        """
        layout, last = self.layout, self.n - 1
        limit = arith.min(last - start, i32(layout.tile)) * self.k_row + (layout.head_dim - PIECE)
        tile = at(self.k, fx.Int64(start) * fx.Int64(self.k_row))
        places = [at(tile, wide(arith.min(fx.Uint32(source), fx.Uint32(limit)))) for source in self.sources]
        scale = at(self.kv_scale, wide(arith.min(self.lane + self.key0 + start, last) * 4))
        if not layout.direct:
            pieces = [llvm.load(ty("vector<4xi32>"), place, alignment=PIECE) for place in places]
            return [*pieces, llvm.load(ty("f32"), scale, alignment=4)]
        for i, place in enumerate(places):
            target = stage + self.wave * (LANES * PIECE) + i * layout.threads * PIECE
            ops.global_load_async_lds(place, at(self.lds, target, 3), PIECE, 0, aux=no_policy())
        target = stage + self.wave * (LANES * 4) + layout.key_bytes
        ops.global_load_async_lds(scale, at(self.lds, target, 3), 4, 0, aux=no_policy())
        rocdl.asyncmark()
        return []

    def put(self, staged, stage):
        """What ``fetch`` brought into registers, if it did, into LDS."""
        for i, value in enumerate(staged):
            unit, first = PIECE, i * self.layout.threads * PIECE
            if i == len(staged) - 1:  # the scales
                unit, first = 4, self.layout.key_bytes
            llvm.store(value, at(self.lds, stage + self.thread * unit + first, 3), alignment=unit)

    def score(self, stage, start):
        """This wave's rows against its 64 keys of a tile, the first at position ``start``: one logit a lane and row."""
        layout, key, parts = self.layout, self.in_side, self.layout.heads // self.layout.side
        scale = load("f32", self.lds, stage + self.thread * 4 + layout.key_bytes, 4, 3)
        lines = [
            key * layout.head_dim + layout.swizzled(key, layout.piece(self.lane_group, c)) * PIECE
            for c in range(layout.reads)
        ]
        partial = [[] for _ in self.rows]
        for u in range(layout.subtiles):
            first = stage + (self.key0 * layout.head_dim + u * layout.side * layout.head_dim)
            keys = [load("vector<4xi32>", self.lds, first + line, PIECE, 3) for line in lines]
            for i in range(layout.rows_of_wave):
                sums = [None, None]
                for h in range(i * parts, (i + 1) * parts):
                    _weighted(_multiply(layout, self.queries[h], keys), self.factors[h], sums)
                total = llvm.fadd(*sums)
                partial[i].append(llvm.fadd(element(total, 0), element(total, 1)))
        for row, sums in zip(self.rows, partial, strict=True):
            # -0.0, which a negative scale makes of 0, becomes +0.0.
            logit = llvm.fadd(llvm.fmul(_head_sum(layout, self.lane, sums), scale), constant(0.0, "f32"))
            if layout.bf16:
                logit = llvm.fptrunc(ty("bf16"), logit)
            if layout.clean:
                low, high, _, _ = row
                inside = fx.Uint32(self.lane + (start - low)) < fx.Uint32(high - low)
                logit = llvm.select(as_ir_value(inside), logit, self.minus_inf)
            self.store(row, logit, start)


def make(name, **facts):
    """The launcher of one kernel, and the arguments that specialise it."""
    layout = Layout(**facts)

    @flyc.kernel(name=name)
    def kernel(
        q: fx.Pointer, k: fx.Pointer, kv_scale: fx.Pointer, weights: fx.Pointer, ks: fx.Pointer, ke: fx.Pointer,
        out: fx.Pointer, m: fx.Int32, n: fx.Int32, width: fx.Int32, chunk: fx.Int32, q_row: fx.Int64,
        q_head: fx.Int64, k_row: fx.Int32, w_row: fx.Int64, out_row: fx.Int64,
    ):  # fmt: skip
        strides = (q_row, q_head, k_row, w_row, out_row)
        _Block(layout, q, k, kv_scale, weights, ks, ke, out, m, n, width, chunk, strides).run()

    @flyc.jit
    def launch(
        q: fx.Pointer, k: fx.Pointer, kv_scale: fx.Pointer, weights: fx.Pointer, ks: fx.Pointer, ke: fx.Pointer,
        out: fx.Pointer, m: fx.Int32, n: fx.Int32, width: fx.Int32, chunk: fx.Int32, q_row: fx.Int64,
        q_head: fx.Int64, k_row: fx.Int32, w_row: fx.Int64, out_row: fx.Int64, stream: fx.Stream,
    ):  # fmt: skip
        kernel(q, k, kv_scale, weights, ks, ke, out, m, n, width, chunk, q_row, q_head, k_row, w_row, out_row).launch(
            grid=(m, 1, 1),  # of FlyDSL's own launch, which nothing uses
            block=[layout.threads, 1, 1],
            stream=stream,
        )

    def pointer(ty, align):
        return flyc.from_c_void_p(ty, 0, assumed_align=align)

    out = pointer(fx.BFloat16, 2) if layout.bf16 else pointer(fx.Float32, 4)
    arguments = (
        pointer(fx.Uint8, PIECE), pointer(fx.Uint8, PIECE), pointer(fx.Float32, 4), pointer(fx.Float32, 4),
        pointer(fx.Int32, 4), pointer(fx.Int32, 4), out,
        1, 1, 1, 1, fx.Int64(1), fx.Int64(1), 1, fx.Int64(1), fx.Int64(1), fx.Stream(None),
    )  # fmt: skip
    return launch, arguments
