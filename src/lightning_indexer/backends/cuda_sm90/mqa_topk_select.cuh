// Selection from the candidates of mqa_topk_product.cuh: a CTA a row.
//
// Each warp brings the lists of one warp of the product into shared memory, as ordered integers and positions, a vector
// of two candidates at a time; what of a vector is no candidate is key 0, below all numbers. Their counts tell whether
// the gate let the k first pass and whether every list had room: then the k first candidates are the k first of the
// row. Else the row goes onto the list of those that mqa_topk_redo.cuh takes.
//
// Compile-time, from mqa_topk_config.py: selection.cuh's, and ROWS (of a row block), LISTS (of a row
// and a piece), THREADS, CTAS_PER_SM, STATIC_BYTES, ARGUMENT_BYTES, KERNEL_NAME.
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
  const int2* candidates;  // append.cuh's Arguments
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
  const uint4* pairs;
  uint32_t vectors;

  template <class Visit>
  TOP_K_DEVICE void operator()(Visit visit) const {
#pragma unroll 1
    for (uint32_t v = threadIdx.x % 32; v < vectors; v += 32) {
      const uint4 two = pairs[v];
      visit(two.x, two.y);
      visit(two.z, two.w);
    }
  }
};

struct Gathering {  // of one warp
  uint4* pairs;     // two keys and positions a vector
  uint32_t room;    // vectors
  Bins bins;
  uint32_t vectors = 0, count = 0;

  // The candidates of a list of `length`: `up` at its start, `down` at its end. Counts them in the bins.
  TOP_K_DEVICE void add(const int2* candidates, uint32_t length, uint32_t up, uint32_t down) {
    constexpr int kAtOnce = 8;
    const uint32_t of_up = (up + 1) / 2, from_down = length - down, gap = from_down / 2 - of_up;
    const uint32_t all = of_up + (down > 0 ? length / 2 - from_down / 2 : 0);
#pragma unroll 1
    for (uint32_t from = threadIdx.x % 32; from < all; from += 32 * kAtOnce) {
      uint4 two[kAtOnce];
#pragma unroll
      for (int u = 0; u < kAtOnce; ++u) {  // without branches, so that all are on their way together
        const uint32_t i = min(from + u * 32, all - 1);
        two[u] = __ldcg(reinterpret_cast<const uint4*>(candidates) + (i < of_up ? i : i + gap));
      }
#pragma unroll
      for (int u = 0; u < kAtOnce; ++u) {
        const uint32_t i = from + u * 32, at = vectors + i;
        if (i >= all || at >= room) continue;
        // Of the vector's two, the second may lie behind the last of `up`, the first before the first of `down`.
        const bool upwards = i < of_up;
        const bool first = upwards || (i + gap) * 2 >= from_down, second = !upwards || i * 2 + 1 < up;
        pairs[at] = make_uint4(key(two[u].x, first), two[u].y, key(two[u].z, second), two[u].w);
      }
    }
    vectors += all;
    count += up + down;
  }

  TOP_K_DEVICE uint32_t key(uint32_t bits, bool candidate) {
    const uint32_t key = key_of_candidate(bits);
    const uint32_t bin = candidate ? bins.of(key) : kSelectionBins;  // no branch
    shared_add(shared_of(block.selection.bins + bin), 1);
    return candidate ? key : 0;
  }
};

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
  const int row_block = row / kRows, list = row % kRows * kLists + warp;
  uint4* pairs = reinterpret_cast<uint4*>(dynamic_shared);
  uint32_t* bitmap = reinterpret_cast<uint32_t*>(pairs + kLists * (a.warp_room / 2));
  if (threadIdx.x < kSelectionBins / 4)
    reinterpret_cast<uint4*>(block.selection.bins)[threadIdx.x] = make_uint4(0, 0, 0, 0);
  wait_for_previous();
  const auto count_of = [&](int place, int down) {
    return static_cast<uint32_t>(__ldcg(a.counts + (place * 2 + down) * (kRows * kLists) + list));
  };
  const float4 gate = __ldcg(a.gates + row);
  // Where no window of a row block has a position there are no counts.
  const uint32_t up = end > start ? count_of(row_block, 0) : 0, down = end > start ? count_of(row_block, 1) : 0;
  bool cut_twice = false;
#pragma unroll 1
  for (int piece = threadIdx.x; piece < a.pieces; piece += All::kThreads)
    cut_twice |= __ldcg(&a.middles[piece].x) == row_block;
  cut_twice = __syncthreads_or(cut_twice && end > start);

  const uint32_t room = a.lists_room, warp_vectors = a.warp_room / 2;
  const bool gated = gate.x != neg_inf();  // else every number has passed
  Gathering gathering{pairs + warp * warp_vectors, warp_vectors,
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
    const uint32_t first = i < 0 ? up : count_of(place, 0), last = i < 0 ? down : 0;
    fits = first + last <= room;
    const long long at = (static_cast<long long>(place) * (kRows * kLists) + list) * a.lists_room;
    if (fits) gathering.add(a.candidates + at, room, first, last);
  }
  fits &= gathering.vectors <= warp_vectors;
  if (lane == 0) block.count[warp] = fits ? gathering.count : kMisfit;
  All::sync();
  const uint32_t total = __reduce_add_sync(kFull, lane < kLists ? block.count[lane] : 0);
  if (total >= kMisfit || (total < a.out.k && gated)) {
    if (threadIdx.x == 0) a.redo[atomicAdd(a.redo_count, 1)] = a.first_row + row;
    return;
  }

  Selection<All> selection{block.selection, bitmap, bitmap + a.bitmap_words};
  const InShared each{gathering.pairs, gathering.vectors};
  Chosen chosen = {1, 0, kFull, 0, false};  // all of them
  if (total > a.out.k) {
    selection.find_cut(a.out.k);
    const uint32_t bin = block.selection.bin, low = gathering.bins.least(bin), high = gathering.bins.most(bin);
    const uint32_t need = a.out.k - block.selection.above, inside = block.selection.inside;
    chosen = selection.decide(each, low, high, need, inside <= kRanked || inside == need || low == high);
  }
  write_chosen(selection, each, chosen, a.out, row, start, end, a.bitmap_words, reinterpret_cast<int*>(pairs));
}
