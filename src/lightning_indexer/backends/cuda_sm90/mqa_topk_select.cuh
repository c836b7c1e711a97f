// Selection from the candidates of mqa_topk_product.cuh: a CTA a row.
//
// The row's lists are gathered in shared memory. Their counts tell whether the gate let the k first pass and whether
// every list had room: then the k first candidates are the k first of the row. Else the row goes onto the list of those
// that mqa_topk_redo.cuh takes.
//
// Compile-time, from mqa_topk.py: selection.cuh's, and ROWS (of a row block), LISTS (of a row and a piece), THREADS,
// CTAS_PER_SM, ARGUMENT_BYTES, KERNEL_NAME.
#include "selection.cuh"

namespace {

constexpr int kRows = ROWS;
constexpr int kLists = LISTS;
using All = Team<THREADS, 0>;
static_assert(All::kWarps == kLists, "a warp gathers the lists of one warp of the product");

struct Arguments {
  const int2* candidates;  // (score, key): append.cuh's Arguments
  const int* counts;
  const int2* middles;
  const float4* gates;
  const int* ks;
  const int* ke;
  int* redo_count;
  int* redo;  // rows of the call
  Output out;
  int rows, keys;
  int first_row;  // of the call; the row blocks, windows and results count from there
  int pieces;     // CTAs of the product
  int unscored, lists_room, bitmap_words;
  int candidates_room;  // of a row, in shared memory
};
static_assert(sizeof(Arguments) == ARGUMENT_BYTES, "STRUCTS of mqa_topk.py");

struct Block {
  SelectionRoom selection;
  int middle[128];  // places of pieces in the middle of the row block
  int middles;
  int misfits;
  uint32_t of_warp[kLists];
  uint32_t low[kLists], high[kLists];
};

__shared__ Block block;
extern __shared__ __align__(16) unsigned char dynamic_shared[];

struct InShared {
  const uint32_t* keys;
  const uint32_t* positions;
  uint32_t count;

  template <class Visit>
  TOP_K_DEVICE void operator()(Visit visit) const {
    for (uint32_t i = threadIdx.x; i < count; i += All::kThreads) visit(keys[i], positions[i]);
  }
};

// Where a position lies among ascending ones.
TOP_K_DEVICE uint32_t slot_of(const int* ascending, uint32_t count, int position) {
  uint32_t low = 0, high = count;
  while (high - low > 1) {
    const uint32_t middle = (low + high) / 2;
    (ascending[middle] <= position ? low : high) = middle;
  }
  return low;
}

}  // namespace

extern "C" __global__ void __launch_bounds__(THREADS, CTAS_PER_SM) KERNEL_NAME(const __grid_constant__ Arguments a) {
  const int row = blockIdx.x, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int end = min(max(__ldg(a.ke + row), 0), a.keys), start = min(max(__ldg(a.ks + row), 0), end);
  const int length = end - start;
  if (length <= a.unscored || length == 0) {
    write_row<All>(a.out, row, start, length, [=](uint32_t slot) { return start + static_cast<int>(slot); });
    return;
  }

  uint32_t* keys = reinterpret_cast<uint32_t*>(dynamic_shared);
  uint32_t* positions = keys + a.candidates_room;
  uint32_t* bitmap = positions + a.candidates_room;
  const int row_block = row / kRows, list = row % kRows * kLists + warp;
  // The lists at a place: their candidates, in one direction or both.
  const auto counts_of = [&](int place, int down) {
    return __ldg(a.counts + (place * 2 + down) * (kRows * kLists) + list);
  };
  const auto list_of = [&](int place) {
    return a.candidates + (static_cast<long long>(place) * (kRows * kLists) + list) * a.lists_room;
  };

  const uint32_t up = counts_of(row_block, 0), down = counts_of(row_block, 1);
  if (threadIdx.x == 0) block.middles = block.misfits = 0;
  for (int i = threadIdx.x; i < kSelectionBins / 4; i += All::kThreads)
    reinterpret_cast<uint4*>(block.selection.bins)[i] = make_uint4(0, 0, 0, 0);
  const uint32_t words = min(a.bitmap_words, (length + 127) / 128 * 4);
  for (uint32_t i = threadIdx.x; i < words / 4; i += All::kThreads)
    reinterpret_cast<uint4*>(bitmap)[i] = make_uint4(0, 0, 0, 0);
  All::sync();
  for (int piece = threadIdx.x; piece < a.pieces; piece += All::kThreads) {
    const int2 middle = __ldg(a.middles + piece);
    if (middle.x != row_block) continue;
    const int slot = atomicAdd(&block.middles, 1);
    if (middle.y >= 0 && slot < 128)
      block.middle[slot] = middle.y;
    else
      block.misfits = 1;
  }
  All::sync();
  const int middles = min(block.middles, 128);
  uint32_t mine = up + down;
  bool fits = mine <= a.lists_room;
  if (block.misfits == 0) {
    for (int i = 0; i < middles; ++i) {
      const uint32_t count = counts_of(block.middle[i], 0);
      fits &= count <= a.lists_room;
      mine += count;
    }
  } else {
    fits = false;
  }
  if (lane == 0) {
    block.of_warp[warp] = mine;
    if (!fits) block.misfits = 1;
  }
  All::sync();
  const uint32_t of_lane = lane < kLists ? block.of_warp[lane] : 0;
  uint32_t into = __reduce_add_sync(kFull, lane < warp ? of_lane : 0);
  const uint32_t total = __reduce_add_sync(kFull, of_lane);
  const float at_least = __ldg(a.gates + row).x;
  // A gate of -inf lets every number pass: then there are no more.
  if (block.misfits || total > a.candidates_room || (total < a.out.k && at_least != neg_inf())) {
    if (threadIdx.x == 0) a.redo[atomicAdd(a.redo_count, 1)] = a.first_row + row;
    return;
  }

  uint32_t low = kFull, high = 0;
  const auto gather = [&](const int2* from, int step, uint32_t count) {
    constexpr int kAtOnce = 8;
    for (uint32_t first = lane; first < count; first += 32 * kAtOnce) {
      int2 some[kAtOnce];
#pragma unroll
      for (int u = 0; u < kAtOnce; ++u) {
        const uint32_t i = first + u * 32;
        if (i < count) some[u] = __ldcs(from + step * static_cast<int>(i));
      }
#pragma unroll
      for (int u = 0; u < kAtOnce; ++u) {
        const uint32_t i = first + u * 32;
        if (i >= count) continue;
        const uint32_t key = key_of(__int_as_float(some[u].x));
        keys[into + i] = key, positions[into + i] = some[u].y;
        low = min(low, key), high = max(high, key);
      }
    }
    into += count;
  };
  gather(list_of(row_block), 1, up);
  gather(list_of(row_block) + a.lists_room - 1, -1, down);
  for (int i = 0; i < middles; ++i) gather(list_of(block.middle[i]), 1, counts_of(block.middle[i], 0));
  low = __reduce_min_sync(kFull, low), high = __reduce_max_sync(kFull, high);
  if (lane == 0) block.low[warp] = low, block.high[warp] = high;
  All::sync();
  low = __reduce_min_sync(kFull, lane < kLists ? block.low[lane] : kFull);
  high = __reduce_max_sync(kFull, lane < kLists ? block.high[lane] : 0);

  Selection<All> selection{block.selection, bitmap};
  const InShared each{keys, positions, total};
  if (total > a.out.k) {
    selection.choose(each, low, max(low, high), a.out.k, start);
  } else {  // all of them
    each([&](uint32_t, uint32_t position) {
      shared_or(shared_of(bitmap + (position - start) / 32), 1u << ((position - start) % 32));
    });
    All::sync();
  }
  // Where the values come from the candidates, those have to stay.
  int* staged = reinterpret_cast<int*>(kValues ? bitmap + a.bitmap_words : positions);
  const uint32_t count =
      selection.in_order(words, start, [&](uint32_t slot, uint32_t position) { staged[slot] = position; });
  All::sync();
  write_row<All>(a.out, row, start, count, [=](uint32_t slot) { return staged[slot]; });
  if constexpr (kValues) {
    each([&](uint32_t key, uint32_t position) {
      const uint32_t bit = position - start;
      if (bitmap[bit / 32] >> (bit % 32) & 1) values_of(a.out, row)[slot_of(staged, count, position)] = score_of(key);
    });
  }
}
