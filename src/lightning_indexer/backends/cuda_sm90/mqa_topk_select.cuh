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
constexpr uint32_t kMisfit = 0x10000000;  // more candidates than fit
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
  uint32_t count[kLists];
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

// Linear bins of keys from `low` on; the last one holds what lies behind, too.
struct Bins {
  uint32_t low;
  int shift;

  TOP_K_DEVICE Bins(uint32_t low_, uint32_t high)
      : low(low_), shift(max(32 - __clz(max(high, low_) - low_) - kBinBits, 0)) {}
  TOP_K_DEVICE uint32_t of(uint32_t key) const { return min((key - low) >> shift, kSelectionBins - 1); }
  TOP_K_DEVICE uint32_t least(uint32_t bin) const { return low + (bin << shift); }
  TOP_K_DEVICE uint32_t most(uint32_t bin) const {
    return bin == kSelectionBins - 1 ? kFull : least(bin) + ((1u << shift) - 1);
  }
};

#if CODE_BYTES == 2
using FourCodes = uint2;
TOP_K_DEVICE uint32_t code_in(const FourCodes& four, int i) {
  const uint32_t two = i < 2 ? four.x : four.y;
  return i % 2 == 0 ? two & 0xFFFF : two >> 16;
}
#else
using FourCodes = uint4;
TOP_K_DEVICE uint32_t code_in(const FourCodes& four, int i) {
  return i == 0 ? four.x : i == 1 ? four.y : i == 2 ? four.z : four.w;
}
#endif

struct Gathering {  // of one warp
  uint4* keys;
  uint4* positions;
  uint32_t room;  // vectors
  Bins bins;
  uint32_t vectors = 0, count = 0;

  // The candidates of a list of `length`: `up` at its start, `down` at its end. Counts them in the bins.
  TOP_K_DEVICE void add(const float* scores, const Code* codes, uint32_t length, Count up, Count down) {
    constexpr int kAtOnce = 4;
    const uint32_t of_up = (up.count + 3) / 4, from_down = length - down.count, gap = from_down / 4 - of_up;
    const uint32_t all = of_up + (down.count > 0 ? length / 4 - from_down / 4 : 0);
#pragma unroll 1
    for (uint32_t from = threadIdx.x % 32; from < all; from += 32 * kAtOnce) {
      float4 score[kAtOnce];
      FourCodes code[kAtOnce];
#pragma unroll
      for (int u = 0; u < kAtOnce; ++u) {  // without branches, so that all are on their way together
        const uint32_t i = min(from + u * 32, all - 1), v = i < of_up ? i : i + gap;
        score[u] = __ldcg(reinterpret_cast<const float4*>(scores) + v);
        code[u] = __ldcg(reinterpret_cast<const FourCodes*>(codes) + v);
      }
#pragma unroll
      for (int u = 0; u < kAtOnce; ++u) {
        const uint32_t i = from + u * 32, at = vectors + i;
        if (i >= all || at >= room) continue;
        const bool upwards = i < of_up;
        // Of the vector's four, those in [first, past) are candidates.
        const int first = upwards ? 0 : static_cast<int>(from_down - (i + gap) * 4);
        const int past = upwards ? static_cast<int>(up.count - i * 4) : 4;
        const int first_key = upwards ? up.first_key : down.first_key;
        keys[at] = make_uint4(key(score[u].x, 0, first, past), key(score[u].y, 1, first, past),
                              key(score[u].z, 2, first, past), key(score[u].w, 3, first, past));
        positions[at] = make_uint4(position(code_in(code[u], 0), first_key), position(code_in(code[u], 1), first_key),
                                   position(code_in(code[u], 2), first_key), position(code_in(code[u], 3), first_key));
      }
    }
    vectors += all;
    count += up.count + down.count;
  }

  TOP_K_DEVICE uint32_t key(float score, int i, int first, int past) {
    const bool candidate = i >= first && i < past;
    const uint32_t bits = __float_as_uint(score);  // a number, and no -0: append.cuh
    const uint32_t key = bits ^ (static_cast<uint32_t>(static_cast<int>(bits) >> 31) | 0x80000000u);
    const uint32_t bin = candidate ? bins.of(key) : kSelectionBins;  // no branch
    shared_add(shared_of(block.selection.bins + bin), 1);
    return candidate ? key : 0;
  }

  TOP_K_DEVICE static uint32_t position(uint32_t code, int first_key) {
    const uint32_t within = code % kListKeys;
    return first_key + (code - within) * (kListStep / kListKeys) + within;
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
#pragma unroll 1
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
  if (threadIdx.x < kSelectionBins / 4)
    reinterpret_cast<uint4*>(block.selection.bins)[threadIdx.x] = make_uint4(0, 0, 0, 0);
#pragma unroll 1
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
  const float4 gate = __ldcg(a.gates + row);
  const Count up = count_of(row_block, 0), down = count_of(row_block, 1);
  bool cut_twice = false;
#pragma unroll 1
  for (int piece = threadIdx.x; piece < a.pieces; piece += All::kThreads)
    cut_twice |= __ldcg(&a.middles[piece].x) == row_block;
  cut_twice = __syncthreads_or(cut_twice);

  const uint32_t room = a.lists_room, warp_vectors = a.warp_room / 4;
  const bool gated = gate.x != neg_inf();  // else every number has passed
  Gathering gathering{keys + warp * warp_vectors, positions + warp * warp_vectors, warp_vectors,
                      gated ? Bins(key_of(gate.x), key_of(gate.w)) : Bins(kKeyNegInf, kKeyPosInf)};
  bool fits = true;
  int middles = 0;
  if (cut_twice) {
    find_middles(a, row_block);
    fits = block.misfits == 0;
    middles = min(block.middles, kMiddles);
  }
#pragma unroll 1
  for (int i = -1; i < middles && fits; ++i) {
    const int place = i < 0 ? row_block : block.middle[i];
    const Count first = i < 0 ? up : count_of(place, 0), last = i < 0 ? down : Count{0, 0};
    fits = static_cast<uint32_t>(first.count + last.count) <= room;
    const long long at = (static_cast<long long>(place) * (kRows * kLists) + list) * a.lists_room;
    if (fits) gathering.add(a.scores + at, a.codes + at, room, first, last);
  }
  fits &= gathering.vectors <= warp_vectors;
  if (lane == 0) block.count[warp] = fits ? gathering.count : kMisfit;
  All::sync();
  const uint32_t total = __reduce_add_sync(kFull, lane < kLists ? block.count[lane] : 0);
  if (total >= kMisfit || (total < a.out.k && gated)) {
    if (threadIdx.x == 0) a.redo[atomicAdd(a.redo_count, 1)] = a.first_row + row;
    return;
  }

  Selection<All> selection{block.selection, bitmap};
  const InShared each{gathering.keys, gathering.positions, gathering.vectors};
  if (total > a.out.k) {
    selection.find_cut(a.out.k);
    const uint32_t bin = block.selection.bin, low = gathering.bins.least(bin), high = gathering.bins.most(bin);
    const uint32_t need = a.out.k - block.selection.above, inside = block.selection.inside;
    selection.choose(each, low, high, need, start, inside <= kRanked || inside == need || low == high);
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
