// Selection from the candidates of mqa_topk_product.cuh: a CTA a row.
//
// Each warp brings the lists of one warp of the product into shared memory, as ordered integers and positions, a vector
// of four candidates at a time; what of a vector is no candidate is key 0, below all numbers. Their counts tell whether
// the gate let the k first pass and whether every list had room: then the k first candidates are the k first of the
// row. Else the row goes onto the list of those that mqa_topk_redo.cuh takes.
//
// Compile-time, from mqa_topk_config.py: selection.cuh's, candidates.cuh's, and ROWS (of a row block), LISTS (of a row
// and a piece), THREADS, CTAS_PER_SM, STATIC_BYTES, ARGUMENT_BYTES, KERNEL_NAME.
#include "candidates.cuh"
#include "dependent_launch.cuh"
#include "selection.cuh"

namespace {

constexpr int kRows = ROWS;
constexpr int kLists = LISTS;
constexpr int kMiddles = 128;
using All = Team<THREADS, 0>;
static_assert(All::kWarps == kLists, "a warp gathers the lists of one warp of the product");

struct Arguments {
  const float* scores;  // append.cuh's Arguments
  const Code* codes;
  const Count* counts;
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
  int lists_room, bitmap_words;
  int warp_room;  // of a warp's candidates in shared memory, whole vectors
  int unused;
};
static_assert(sizeof(Arguments) == ARGUMENT_BYTES, "STRUCTS of mqa_topk_config.py");

struct Block {
  SelectionRoom selection;
  int middle[kMiddles];  // places of pieces in the middle of the row block
  int middles;
  int misfits;
  uint32_t count[kLists], low[kLists], high[kLists];
};

static_assert(sizeof(Block) <= STATIC_BYTES, "SELECT_STATIC of mqa_topk_config.py");

__shared__ Block block;
extern __shared__ __align__(16) unsigned char dynamic_shared[];

struct InShared {  // each warp what it has gathered; no bounds hold key 0
  const uint4* keys;
  const uint4* positions;
  uint32_t vectors;

  template <class Visit>
  TOP_K_DEVICE void operator()(Visit visit) const {
#pragma unroll 1
    for (uint32_t v = threadIdx.x % 32; v < vectors; v += 32) {
      const uint4 key = keys[v], position = positions[v];
      visit(key.x, position.x);
      visit(key.y, position.y);
      visit(key.z, position.z);
      visit(key.w, position.w);
    }
  }
};

struct Gathering {  // of one warp
  uint4* keys;
  uint4* positions;
  uint32_t room;  // vectors
  uint32_t vectors = 0, count = 0;
  uint32_t low = kFull, high = 0;  // of the keys of this lane

  // The candidates [first, past) of the list that starts at `scores` and `codes`, of keys from `first_key` on.
  TOP_K_DEVICE void add(const float* scores, const Code* codes, uint32_t first, uint32_t past, int first_key) {
    constexpr int kAtOnce = 4;
    const uint32_t begin = first / 4, end = (past + 3) / 4;
#pragma unroll 1
    for (uint32_t from = begin + threadIdx.x % 32; from < end; from += 32 * kAtOnce) {
      float4 score[kAtOnce];
      uint4 code[kAtOnce];
#pragma unroll
      for (int u = 0; u < kAtOnce; ++u) {
        const uint32_t v = from + u * 32;
        if (v >= end) continue;
        score[u] = __ldcs(reinterpret_cast<const float4*>(scores) + v);
        if constexpr (CODE_BYTES == 2) {
          const uint2 two = __ldcs(reinterpret_cast<const uint2*>(codes) + v);
          code[u] = make_uint4(two.x & 0xFFFF, two.x >> 16, two.y & 0xFFFF, two.y >> 16);
        } else {
          code[u] = __ldcs(reinterpret_cast<const uint4*>(codes) + v);
        }
      }
#pragma unroll
      for (int u = 0; u < kAtOnce; ++u) {
        const uint32_t v = from + u * 32, at = vectors + v - begin;
        if (v >= end || at >= room) continue;
        keys[at] = make_uint4(key(score[u].x, v * 4, first, past), key(score[u].y, v * 4 + 1, first, past),
                              key(score[u].z, v * 4 + 2, first, past), key(score[u].w, v * 4 + 3, first, past));
        positions[at] = make_uint4(position(code[u].x, first_key), position(code[u].y, first_key),
                                   position(code[u].z, first_key), position(code[u].w, first_key));
      }
    }
    vectors += end > begin ? end - begin : 0;
    count += past - first;
  }

  TOP_K_DEVICE uint32_t key(float score, uint32_t i, uint32_t first, uint32_t past) {
    const uint32_t bits = __float_as_uint(score);  // a number, and no -0: append.cuh
    const uint32_t ordered = bits ^ (static_cast<uint32_t>(static_cast<int>(bits) >> 31) | 0x80000000u);
    const uint32_t key = i >= first && i < past ? ordered : 0;
    low = min(low, key - 1), high = max(high, key);
    return key;
  }

  TOP_K_DEVICE static uint32_t position(uint32_t code, int first_key) {
    return first_key + code / kListKeys * kListStep + code % kListKeys;
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

// The places of the pieces in the middle of a row block, into block.middle; a piece without a place is a misfit.
TOP_K_DEVICE void find_middles(const Arguments& a, int row_block) {
  if (threadIdx.x == 0) block.middles = block.misfits = 0;
  All::sync();
  for (int piece = threadIdx.x; piece < a.pieces; piece += All::kThreads) {
    const int2 middle = __ldcg(a.middles + piece);
    if (middle.x != row_block) continue;
    const int slot = atomicAdd(&block.middles, 1);
    if (middle.y >= 0 && slot < kMiddles)
      block.middle[slot] = middle.y;
    else
      block.misfits = 1;
  }
  All::sync();
}

}  // namespace

extern "C" __global__ void __launch_bounds__(THREADS, CTAS_PER_SM) KERNEL_NAME(const __grid_constant__ Arguments a) {
  let_next_start();
  const int row = blockIdx.x, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int end = min(max(__ldg(a.ke + row), 0), a.keys), start = min(max(__ldg(a.ks + row), 0), end);
  const int length = end - start, row_block = row / kRows, list = row % kRows * kLists + warp;
  const uint32_t words = min(a.bitmap_words, (length + 127) / 128 * 4);
  uint4* keys = reinterpret_cast<uint4*>(dynamic_shared);
  uint4* positions = keys + kLists * (a.warp_room / 4);
  uint32_t* bitmap = reinterpret_cast<uint32_t*>(positions + kLists * (a.warp_room / 4));
  for (int i = threadIdx.x; i < kSelectionBins / 4; i += All::kThreads)
    reinterpret_cast<uint4*>(block.selection.bins)[i] = make_uint4(0, 0, 0, 0);
  for (uint32_t i = threadIdx.x; i < words / 4; i += All::kThreads)
    reinterpret_cast<uint4*>(bitmap)[i] = make_uint4(0, 0, 0, 0);
  wait_for_previous();
  if (length == 0) {
    write_row<All>(a.out, row, start, 0, [](uint32_t) { return 0; });
    return;
  }

  const auto count_of = [&](int place, int down) {
    const int2 two = __ldcg(reinterpret_cast<const int2*>(a.counts + (place * 2 + down) * (kRows * kLists) + list));
    return Count{two.x, two.y};
  };
  const float at_least = __ldcg(a.gates + row).x;
  const Count up = count_of(row_block, 0), down = count_of(row_block, 1);
  bool cut_twice = false;
  for (int piece = threadIdx.x; piece < a.pieces; piece += All::kThreads)
    cut_twice |= __ldcg(a.middles + piece).x == row_block;
  cut_twice = __syncthreads_or(cut_twice);

  const uint32_t room = a.lists_room, warp_vectors = a.warp_room / 4;
  Gathering gathering{keys + warp * warp_vectors, positions + warp * warp_vectors, warp_vectors};
  const auto add = [&](int place, uint32_t first, uint32_t past, int first_key) {
    const long long at = (static_cast<long long>(place) * (kRows * kLists) + list) * a.lists_room;
    gathering.add(a.scores + at, a.codes + at, first, past, first_key);
  };
  bool fits = static_cast<uint32_t>(up.count + down.count) <= room;
  if (fits) {
    add(row_block, 0, up.count, up.first_key);
    add(row_block, room - down.count, room, down.first_key);
  }
  if (cut_twice) {
    find_middles(a, row_block);
    fits &= block.misfits == 0;
    const int middles = min(block.middles, kMiddles);
    for (int i = 0; i < middles && fits; ++i) {
      const Count count = count_of(block.middle[i], 0);
      fits = count.count <= room;
      if (fits) add(block.middle[i], 0, count.count, count.first_key);
    }
  }
  fits &= gathering.vectors <= warp_vectors;
  uint32_t low = __reduce_min_sync(kFull, gathering.low), high = __reduce_max_sync(kFull, gathering.high);
  if (lane == 0) {
    block.low[warp] = low, block.high[warp] = high;
    block.count[warp] = fits ? gathering.count : 0x10000000u;  // more than fit
  }
  All::sync();
  low = __reduce_min_sync(kFull, lane < kLists ? block.low[lane] : kFull) + 1;
  high = __reduce_max_sync(kFull, lane < kLists ? block.high[lane] : 0);
  const uint32_t total = __reduce_add_sync(kFull, lane < kLists ? block.count[lane] : 0);
  // A gate of -inf lets every number pass: then there are no more.
  if (total >= 0x10000000u || (total < a.out.k && at_least != neg_inf())) {
    if (threadIdx.x == 0) a.redo[atomicAdd(a.redo_count, 1)] = a.first_row + row;
    return;
  }

  Selection<All> selection{block.selection, bitmap};
  const InShared each{gathering.keys, gathering.positions, gathering.vectors};
  if (total > a.out.k) {
    selection.choose(each, low, high, a.out.k, start);
  } else {  // all of them
    each([&](uint32_t key, uint32_t position) {
      if (key > 0) shared_or(shared_of(bitmap + (position - start) / 32), 1u << ((position - start) % 32));
    });
    All::sync();
  }
  // Where the values come from the candidates, those have to stay.
  int* staged = reinterpret_cast<int*>(kValues ? bitmap + a.bitmap_words : reinterpret_cast<uint32_t*>(positions));
  const uint32_t count =
      selection.in_order(words, start, [&](uint32_t slot, uint32_t position) { staged[slot] = position; });
  All::sync();
  write_row<All>(a.out, row, start, count, [=](uint32_t slot) { return staged[slot]; });
  if constexpr (kValues) {
    each([&](uint32_t key, uint32_t position) {
      if (key == 0) return;
      const uint32_t bit = position - start;
      if (bitmap[bit / 32] >> (bit % 32) & 1) values_of(a.out, row)[slot_of(staged, count, position)] = score_of(key);
    });
  }
}
