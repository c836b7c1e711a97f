"""Top-k per row in Triton, for every GPU.

    the k best of row m's candidates [start, end): score descending, then position; NaN is no candidate

Plan. A program takes one row after another. It guesses a gate from a sample of the row, so that somewhat more than k
scores reach it. One streaming pass turns every tile into one bit a column, and every span of tiles into entries of the
program's own list, in ascending position. The list is small enough for registers: there the exact cut is found by
narrowing an interval of keys, ties at the cut are taken by position, and the result is written in order. Rows no longer
than the list are their own list.

A guess that misses (fewer than k, or more than the list holds) costs time, never the result: histograms over the row
narrow the interval of keys until the list holds what reaches it, or until one key is left, whose ties are then counted
off by position.

Few long rows are cut into segments: the same kernel finds the k best of each, and a second launch of it those among
them (MERGE). Unused slots hold NaN scores in between.

Keys: the int32 that orders as the float32 score does, -0.0 as +0.0, NaN as -2^31. A program's part of the workspace:
CAPACITY scores, CAPACITY positions, one bit for each column of a span.
"""

from __future__ import annotations

import triton
import triton.language as tl

NOT_A_SCORE = tl.constexpr(-(2**31))  # key of NaN
LOWEST = tl.constexpr(-2139095041)  # key of -inf
ABOVE_ALL = tl.constexpr(2139095041)  # the key of +inf, plus 1
BINS = tl.constexpr(256)  # of a histogram; the last one takes what lies outside
CHUNK = tl.constexpr(32)  # neighbours in the sample: one sector of 128 bytes


def _name(specialization) -> str:
    c = specialization.constants
    form = "merge" if c["MERGE"] else f"split{c['SPLITS']}" if c["SPLITS"] > 1 else "rows"
    return f"top_k_per_row_{c['CAPACITY']}_{c['BASE']}_{c['ORDER']}_{form}_triton"


@triton.jit
def _key(score):
    bits = score.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    bits = tl.where(magnitude == 0, 0, bits)
    return tl.where(magnitude > 0x7F800000, NOT_A_SCORE, bits ^ ((bits >> 31) & 0x7FFFFFFF))


@triton.jit
def _score(key):
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _sync(WAIT: tl.constexpr):
    """Every thread of the program sees what the others have written to the list."""
    if WAIT:
        # On CDNA, Triton's barrier waits for LDS alone.
        nothing = tl.zeros([], tl.int32)
        tl.inline_asm_elementwise("s_waitcnt vmcnt(0)\nv_mov_b32 $0, $1", "=v,v", [nothing], tl.int32, False, 1)
    tl.debug_barrier()


@triton.jit
def _load(row, tile, lo, hi, BLOCK: tl.constexpr):
    """Scores of one tile of columns as float32, NaN outside of [lo, hi). Whole tiles load without a mask."""
    first = tile * BLOCK
    columns = first + tl.arange(0, BLOCK)
    if (first >= lo) & (first <= hi - BLOCK):
        scores = tl.load(row + columns).to(tl.float32)
    else:
        scores = tl.load(row + columns, mask=(columns >= lo) & (columns < hi), other=float("nan")).to(tl.float32)
    return scores


@triton.jit
def _words(take, BLOCK: tl.constexpr):
    """One bit a column, 32 to a word. Neighbours sit in one warp, so that no shared memory is needed."""
    lane = tl.arange(0, BLOCK) % 32
    return tl.sum(tl.reshape(take.to(tl.int32) << lane, [BLOCK // 32, 32]), 1)


@triton.jit
def _ones(word):
    """How many bits of a uint32 are set."""
    word = word - ((word >> 1) & 0x55555555)
    word = (word & 0x33333333) + ((word >> 2) & 0x33333333)
    word = (word + (word >> 4)) & 0x0F0F0F0F
    return ((word * 0x01010101) >> 24).to(tl.int32)


@triton.jit
def _append(row, entries, count, first, skip, stop, SPAN: tl.constexpr, CAPACITY: tl.constexpr):
    """Adds the columns whose bit is set, of words [skip, stop) of the span at column ``first``, to the list in order.

    Gives the new length, which may pass CAPACITY.
    """
    number = tl.arange(0, SPAN // 32)
    inside = (number >= skip) & (number < stop)
    word = tl.load(entries + 2 * CAPACITY + number, mask=inside, other=0, cache_modifier=".cg").to(tl.uint32)
    ones = _ones(word)
    slot = count + tl.cumsum(ones, 0) - ones
    column = first + number * 32
    for _ in tl.range(0, tl.max(ones, 0)):
        lowest = word & (~word + 1)
        position = column + (lowest.to(tl.float32).to(tl.int32, bitcast=True) >> 23) - 127
        listed = (word != 0) & (slot < CAPACITY)
        score = tl.load(row + position, mask=listed, other=0.0).to(tl.float32)
        tl.store(entries + slot, score.to(tl.int32, bitcast=True), mask=listed)
        tl.store(entries + CAPACITY + slot, position, mask=listed)
        slot += 1
        word = word & (word - 1)
    return count + tl.sum(ones, 0)


@triton.jit
def _collect(
    row, lo, hi, entries, gate, BLOCK: tl.constexpr, SPAN: tl.constexpr, CAPACITY: tl.constexpr, WAIT: tl.constexpr
):
    """Lists every candidate whose key is at least ``gate``; gives how many there are."""
    floor = _score(gate)
    first = lo // BLOCK
    last = (hi + (BLOCK - 1)) // BLOCK
    count = tl.zeros([], tl.int32)
    following = _load(row, first, lo, hi, BLOCK)
    _sync(WAIT)  # the list may still be read
    for tile in tl.range(first, last):
        scores = following
        following = _load(row, tile + 1, lo, hi, BLOCK)  # under way while this tile is worked on
        count = _take(row, entries, count, scores >= floor, tile, first, last, BLOCK, SPAN, CAPACITY, WAIT)
    return count


@triton.jit
def _collect_ties(
    row, lo, hi, entries, cut, skip, need,
    BLOCK: tl.constexpr, SPAN: tl.constexpr, CAPACITY: tl.constexpr, WAIT: tl.constexpr,
):  # fmt: skip
    """Lists every candidate above ``cut``, and ``need`` of those that equal it, from number ``skip`` on."""
    first = lo // BLOCK
    last = (hi + (BLOCK - 1)) // BLOCK
    count = tl.zeros([], tl.int32)
    ties = tl.zeros([], tl.int32)
    _sync(WAIT)
    for tile in tl.range(first, last):
        key = _key(_load(row, tile, lo, hi, BLOCK))
        tie = (key == cut).to(tl.int32)
        number = ties + tl.cumsum(tie, 0) - 1
        ties += tl.sum(tie, 0)
        take = (key > cut) | ((key == cut) & (number >= skip) & (number - skip < need))
        count = _take(row, entries, count, take, tile, first, last, BLOCK, SPAN, CAPACITY, WAIT)
    return count


@triton.jit
def _take(
    row, entries, count, take, tile, first, last,
    BLOCK: tl.constexpr, SPAN: tl.constexpr, CAPACITY: tl.constexpr, WAIT: tl.constexpr,
):  # fmt: skip
    """Notes what is taken of one tile; at the end of its span, and of the row, lists it."""
    TILES: tl.constexpr = SPAN // BLOCK
    WORDS: tl.constexpr = BLOCK // 32
    inside = tile % TILES
    tl.store(entries + 2 * CAPACITY + inside * WORDS + tl.arange(0, WORDS), _words(take, BLOCK))
    if (inside == TILES - 1) | (tile == last - 1):
        _sync(WAIT)
        origin = tile - inside
        skip = tl.maximum(first - origin, 0) * WORDS
        count = _append(row, entries, count, origin * BLOCK, skip, (inside + 1) * WORDS, SPAN, CAPACITY)
        _sync(WAIT)
    return count


@triton.jit
def _bin(key, low, high, shift):
    """Bin 0 holds ``low`` alone, bins 1 to 254 equal parts of what lies between it and ``high``, bin 255 the rest."""
    part = 1 + ((key - low - 1).to(tl.uint32) >> shift.to(tl.uint32)).to(tl.int32)
    return tl.where((key < low) | (key >= high), BINS - 1, tl.where(key == low, 0, part))


@triton.jit
def _histogram(row, lo, hi, low, high, shift, BLOCK: tl.constexpr):
    counts = tl.zeros([BINS], tl.int32)
    for tile in tl.range(lo // BLOCK, (hi + (BLOCK - 1)) // BLOCK):
        counts += tl.histogram(_bin(_key(_load(row, tile, lo, hi, BLOCK)), low, high, shift), BINS)
    return counts


@triton.jit
def _refine(row, lo, hi, k, low, high, at_low, at_high, BLOCK: tl.constexpr, CAPACITY: tl.constexpr):
    """Narrows keys [low, high), which hold the k-th best, until the list holds what reaches ``low``, or to one key.

    ``at_low``, ``at_high``: how many candidates reach each bound. Where fewer than k candidates exist, ``low`` stays
    the lowest key. Gives low, at_low and at_high.
    """
    bins = tl.arange(0, BINS)
    while (at_low > CAPACITY) & (high - low > 1):
        shift = tl.zeros([], tl.int32)
        while ((high - low - 2) >> shift) > BINS - 3:
            shift += 1
        counts = _histogram(row, lo, hi, low.to(tl.int32), high.to(tl.int32), shift, BLOCK)
        counts = tl.where(bins < BINS - 1, counts, 0)
        reach = at_high + tl.sum(counts, 0) - tl.cumsum(counts, 0) + counts  # candidates from the bin's low bound on
        chosen = tl.maximum(tl.sum(((reach >= k) & (bins < BINS - 1)).to(tl.int32), 0) - 1, 0)
        found = tl.sum(tl.where(bins == chosen, reach, 0), 0)
        inside = tl.sum(tl.where(bins == chosen, counts, 0), 0)
        if found < k:  # every candidate is taken
            at_low = found
        else:
            at_low = found
            at_high = found - inside
            one = chosen.to(tl.int64)
            high = tl.where(chosen == 0, low + 1, tl.minimum(high, low + 1 + (one << shift)))
            low = tl.where(chosen == 0, low, low + 1 + ((one - 1) << shift))
    return low, at_low, at_high


@triton.jit
def _narrow(key, k, low, high, at_low, at_high, slack):
    """The highest bound that at least k of the keys reach, and how many reach it; any that at most k + slack reach.

    Interpolates twice, then halves between the keys that are left, and again.
    """
    step = tl.zeros([], tl.int32)
    while (high - low > 1) & (at_low > k + slack):
        if step % 3 == 2:
            low = tl.min(tl.where(key >= low, key, 2147483647), 0).to(tl.int64)
            high = tl.max(tl.where(key < high, key, NOT_A_SCORE), 0).to(tl.int64) + 1
            middle = low + (high - low) // 2
        else:
            share = (at_low - k + 0.5) / (at_low - at_high).to(tl.float32)
            middle = low + ((high - low).to(tl.float32) * share).to(tl.int64)
        middle = tl.minimum(tl.maximum(middle, low + 1), high - 1)
        if high - low > 1:
            reach = tl.sum((key >= middle).to(tl.int32), 0)
            if reach >= k:
                low = middle
                at_low = reach
            else:
                high = middle
                at_high = reach
        step += 1
    return low.to(tl.int32), at_low


@triton.jit
def _guess(row, lo, n, k, SAMPLE: tl.constexpr, CAPACITY: tl.constexpr):
    """A key that somewhat more than k of the row's n candidates reach, most likely: a rank in an even sample."""
    number = tl.arange(0, SAMPLE)
    spacing = (n - CHUNK) // (SAMPLE // CHUNK)
    columns = lo + (number // CHUNK) * spacing + number % CHUNK
    key = _key(tl.load(row + columns).to(tl.float32))
    # Expected rank of the k-th best; four standard deviations of the count below the gate on top of it.
    share = SAMPLE / n.to(tl.float32)
    expected = k.to(tl.float32) * share
    root = 2.0 + tl.sqrt(4.0 + expected)
    rank = tl.minimum(root * root, 0.75 * CAPACITY * share).to(tl.int32) + 1
    valid = tl.sum((key != NOT_A_SCORE).to(tl.int32), 0)
    gate = tl.full([], LOWEST, tl.int32)
    if valid > rank:
        low = tl.full([], LOWEST, tl.int64)
        high = tl.full([], ABOVE_ALL, tl.int64)
        gate, _ = _narrow(key, rank, low, high, valid, tl.zeros([], tl.int32), rank // 16)
    return gate


@triton.jit
def _index(position, start, valid, base_row, page_size, BASE: tl.constexpr):
    """What the caller's index base makes of absolute positions; ``base_row``: this row's offset, or its page table."""
    if BASE == "absolute":
        index = position
    elif BASE == "row":
        index = position - start
    elif BASE == "offset":
        index = position - start + tl.load(base_row)
    else:
        relative = position - start
        page = tl.load(base_row + relative // page_size, mask=valid, other=0)
        index = page * page_size + relative % page_size
    return index


@triton.jit(repr=_name, do_not_specialize=["items", "k", "width", "page_size"])
def top_k_per_row_kernel(
    logits_ptr,  # float32, bfloat16 or float16 [M, W]
    starts_ptr,  # int32 [M], or None
    ends_ptr,  # int32 [M], or None
    base_ptr,  # int32: offsets [M], or page table [M, pages], or None
    positions_ptr,  # int32 [M, W], if MERGE: the position of each column
    entries_ptr,  # int32 [programs, 2 * CAPACITY + SPAN / 32]: the lists
    indices_ptr,  # int32 [M, k]; [M, SPLITS * k] if SPLITS > 1
    values_ptr,  # float32 [M, k] or None; likewise
    items,  # M * SPLITS
    width,  # W
    k,
    page_size,
    logits_stride,
    base_stride,
    indices_stride,
    values_stride,
    BLOCK: tl.constexpr,  # columns of a tile
    SPAN: tl.constexpr,  # columns that are listed at a time, a multiple of BLOCK
    CAPACITY: tl.constexpr,  # entries of a list, at least 2 k
    SAMPLE: tl.constexpr,
    SORTED: tl.constexpr,  # k rounded up to a power of two
    BASE: tl.constexpr,
    ORDER: tl.constexpr,
    LARGER: tl.constexpr,  # of two equal scores, the larger index is better
    SPLITS: tl.constexpr,
    MERGE: tl.constexpr,
    WAIT: tl.constexpr,  # CDNA: wait for stores before a barrier
):
    entries = entries_ptr + tl.program_id(0).to(tl.int64) * (2 * CAPACITY + SPAN // 32)
    for turn in tl.range(tl.program_id(0), items, tl.num_programs(0)):
        # Last rows first: under a causal mask they are the longest. Row offsets are 64-bit: M*W passes 2^31.
        item = items - 1 - turn
        m = (item // SPLITS).to(tl.int64)
        row = logits_ptr + m * logits_stride
        start = tl.zeros([], tl.int32)
        if starts_ptr is not None:
            start = tl.minimum(tl.maximum(tl.load(starts_ptr + m), 0), width)
        end = width
        if ends_ptr is not None:
            end = tl.minimum(tl.maximum(tl.load(ends_ptr + m), 0), width)
        lo = start
        hi = tl.maximum(end, start)
        if MERGE:
            # Columns are the candidates of the first launch; start above is the row's own, for its indices.
            lo = tl.zeros([], tl.int32)
            hi = tl.full([], 0, tl.int32) + logits_stride.to(tl.int32)
        if SPLITS > 1:
            # Whole tiles a segment.
            tiles = (hi + (BLOCK - 1)) // BLOCK - lo // BLOCK
            part = (tiles + (SPLITS - 1)) // SPLITS
            origin = lo // BLOCK * BLOCK
            segment = item % SPLITS
            edge = origin.to(tl.int64) + segment.to(tl.int64) * part * BLOCK
            lo = tl.minimum(tl.maximum(edge, lo), hi).to(tl.int32)
            hi = tl.minimum(edge + part.to(tl.int64) * BLOCK, hi).to(tl.int32)
            hi = tl.maximum(hi, lo)

        # The list: a superset of the row's k best, in ascending position.
        n = hi - lo
        gate = tl.full([], LOWEST, tl.int32)
        count = n
        if n > CAPACITY:
            gate = _guess(row, lo, n, k, SAMPLE, CAPACITY)
            count = _collect(row, lo, hi, entries, gate, BLOCK, SPAN, CAPACITY, WAIT)
            if (count > CAPACITY) | ((count < k) & (gate > LOWEST)):
                low = gate.to(tl.int64)
                high = tl.full([], ABOVE_ALL, tl.int64)
                at_low = count
                at_high = tl.zeros([], tl.int32)
                if count < k:
                    high = low
                    low = tl.full([], LOWEST, tl.int64)
                    at_low = n
                    at_high = count
                low, at_low, at_high = _refine(row, lo, hi, k, low, high, at_low, at_high, BLOCK, CAPACITY)
                gate = low.to(tl.int32)
                if at_low > CAPACITY:
                    need = k - at_high
                    skip = tl.zeros([], tl.int32)
                    if LARGER:
                        skip = at_low - at_high - need
                    count = _collect_ties(row, lo, hi, entries, gate, skip, need, BLOCK, SPAN, CAPACITY, WAIT)
                else:
                    count = _collect(row, lo, hi, entries, gate, BLOCK, SPAN, CAPACITY, WAIT)

        # The k best of the list.
        slots = tl.arange(0, CAPACITY)
        listed = slots < count
        if n > CAPACITY:
            scores = tl.load(entries + slots, mask=listed, other=-1, cache_modifier=".cg")  # -1: NaN
            scores = scores.to(tl.float32, bitcast=True)
        else:
            scores = tl.load(row + lo + slots, mask=listed, other=float("nan")).to(tl.float32)
        key = _key(scores)
        taken = key != NOT_A_SCORE
        count = tl.sum(taken.to(tl.int32), 0)
        if count > k:
            low = gate.to(tl.int64)
            high = tl.full([], ABOVE_ALL, tl.int64)
            cut, reach = _narrow(key, k, low, high, count, tl.zeros([], tl.int32), 0)
            if reach == k:
                taken = key >= cut
            else:
                above = key > cut
                tie = key == cut
                need = k - tl.sum(above.to(tl.int32), 0)
                number = tl.cumsum(tie.to(tl.int32), 0)
                if LARGER:
                    need = reach - k
                    taken = above | (tie & (number > need))
                else:
                    taken = above | (tie & (number <= need))
        total = tl.minimum(count, k)
        slot = tl.cumsum(taken.to(tl.int32), 0) - 1
        if n > CAPACITY:
            position = tl.load(entries + CAPACITY + slots, mask=taken, other=0, cache_modifier=".cg")
        else:
            position = lo + slots
        if MERGE:
            table = positions_ptr + m * logits_stride
            position = tl.load(table + position, mask=taken, other=0)

        base_row = base_ptr
        if BASE == "offset":
            base_row = base_ptr + m
        if BASE == "page":
            base_row = base_ptr + m * base_stride
        indices = indices_ptr + m * indices_stride
        if SPLITS > 1:
            indices += (item % SPLITS) * k
        if values_ptr is not None:
            values = values_ptr + m * values_stride
            if SPLITS > 1:
                values += (item % SPLITS) * k
        if ORDER == "score":
            # By one integer a candidate: the better of two equal scores has the larger low half.
            low_half = position if LARGER else 0x7FFFFFFF - position
            _sync(WAIT)  # the list is read
            wide = entries.to(tl.pointer_type(tl.int64))
            tl.store(wide + slot, (key.to(tl.int64) << 32) | low_half.to(tl.int64), mask=taken)
            _sync(WAIT)
            slot = tl.arange(0, SORTED)
            taken = slot < total
            lowest: tl.constexpr = -(2**63)
            ranked = tl.load(wide + slot, mask=taken, other=lowest, cache_modifier=".cg")
            ranked = tl.sort(ranked, descending=True)
            key = (ranked >> 32).to(tl.int32)
            low_half = ranked.to(tl.int32)
            position = low_half if LARGER else 0x7FFFFFFF - low_half
        index = _index(position, start, taken, base_row, page_size, BASE)
        tl.store(indices + slot, index, mask=taken)
        if values_ptr is not None:
            tl.store(values + slot, _score(key), mask=taken)
        # Every slot is written.
        rest = tl.arange(0, SORTED)
        unused = (rest >= total) & (rest < k)
        tl.store(indices + rest, tl.full([SORTED], -1, tl.int32), mask=unused)
        if values_ptr is not None:
            filler = float("nan") if SPLITS > 1 else float("-inf")
            tl.store(values + rest, tl.full([SORTED], filler, tl.float32), mask=unused)
