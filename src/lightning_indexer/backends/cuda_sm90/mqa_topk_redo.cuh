// The rows that mqa_topk_select.cuh could not take, whatever they hold: scores of a wave of them into the workspace,
// then a selection that reads them, then the next wave. One cooperative launch, whose CTAs meet between the two; where
// no row is listed it ends at once.
//
// Compile-time, from mqa_topk_config.py: shared.cuh's with ROWS_LISTED, selection.cuh's, ARGUMENT_BYTES, REDO_BYTES,
// SELECTION_BYTES.
#include "product.cuh"
#include "selection.cuh"

namespace {

// Named barriers, behind those of shared.cuh.
constexpr int kMeets = 5;      // all warps of the CTA
constexpr int kMathWarps = 6;  // the math warps
using Math = Team<G::kMathThreads, kMathWarps>;

struct Redo {
  const int* count;    // of listed rows
  unsigned* arrivals;  // of CTAs at a meeting, zero at the start
  const unsigned char* q;
  unsigned char* gathered_q;  // [wave, H, D]
  long long q_row_stride, q_head_stride;
  int wave;  // rows
  int bitmap_words;
  Output out;
};
static_assert(sizeof(Arguments) == ARGUMENT_BYTES && sizeof(Redo) == REDO_BYTES, "STRUCTS of mqa_topk_config.py");

// All warps of all CTAs; what was written before, also through TMA, is seen behind.
struct Meeting {
  unsigned* arrivals;
  unsigned target = 0;

  __device__ __forceinline__ void operator()() {
    target += gridDim.x;
    ptx::fence_async_proxy_everywhere();
    __threadfence();
    ptx::bar_sync<kMeets, G::kThreads>();
    if (threadIdx.x == 0) {
      ptx::add_release(arrivals);
      while (ptx::load_acquire(arrivals) < target) {
      }
    }
    ptx::bar_sync<kMeets, G::kThreads>();
    __threadfence();
    ptx::fence_async_proxy_everywhere();
  }
};

// The q of the wave's rows, one behind the other. The math warps of all CTAs call it.
__device__ void gather_q(const Redo& r, const int* listed, int rows) {
  constexpr int kVectors = G::kHeadDim / 16, kRowVectors = G::kHeads * kVectors;
  const int warp = (blockIdx.x * G::kMathThreads + threadIdx.x) / 32, warps = gridDim.x * G::kMathThreads / 32;
  for (int row = warp; row < rows; row += warps) {
    const unsigned char* from = r.q + __ldg(listed + row) * r.q_row_stride;
    uint4* to = reinterpret_cast<uint4*>(r.gathered_q) + static_cast<long long>(row) * kRowVectors;
    for (int i = threadIdx.x % 32; i < kRowVectors; i += 32) {
      to[i] = __ldg(reinterpret_cast<const uint4*>(from + i / kVectors * r.q_head_stride) + i % kVectors);
    }
  }
}

struct Scores {  // of a row's window, past the L1, which other CTAs do not write to
  const float4* scores;
  int start, end;

  // Vectors first, first + kThreads, ... of the row.
  template <int kAtOnce, class Visit>
  __device__ __forceinline__ void vectors(int first, int step, Visit visit) const {
    const int past = (end + 3) / 4;
    float4 some[kAtOnce];
#pragma unroll
    for (int u = 0; u < kAtOnce; ++u) some[u] = __ldcg(scores + min(first + u * step, past - 1));
#pragma unroll
    for (int u = 0; u < kAtOnce; ++u) {
      const float four[4] = {some[u].x, some[u].y, some[u].z, some[u].w};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int position = (first + u * step) * 4 + i;
        const uint32_t key = key_of(four[i]);
        if (position >= start && position < end && key > 0) visit(key, position);
      }
    }
  }

  template <class Visit>
  __device__ __forceinline__ void operator()(Visit visit) const {
    constexpr int kAtOnce = 8;
#pragma unroll 1
    for (int first = start / 4; first * 4 < end; first += Math::kThreads * kAtOnce)
      vectors<kAtOnce>(first + threadIdx.x, Math::kThreads, visit);
  }

  // Some of them, from all over the window.
  template <class Visit>
  __device__ __forceinline__ void sample(Visit visit) const {
    constexpr int kAtOnce = 4;
    if (start >= end) return;
    const int step = max(1, (end - start) / (4 * kAtOnce * Math::kThreads));
    vectors<kAtOnce>(start / 4 + threadIdx.x * step, Math::kThreads * step, visit);
  }
};

struct SelectionShared {
  SelectionRoom room;
  int staged[4096];                // k
  alignas(16) uint32_t bitmap[4];  // bitmap_words, and a fourth of that for Selection.before
};
static_assert(sizeof(SelectionShared) <= SELECTION_BYTES, "REDO_SELECTION of mqa_topk_config.py");

struct Bounds {  // `need` of the keys within [low, high] are chosen, and all above
  uint32_t low, high, need;
};

// The bin of the cut among linear bins between the least and the largest finite score of a sample, as keys; the outer
// bins hold what lies beyond. Scores are spread over linear bins, where keys of the same exponent would queue at few:
// the histogram of a whole row has no room for that. `scratch`: 64 words. A barrier follows whatever the caller has
// cleared.
__device__ Bounds linear_cut(Selection<Math>& selection, const Scores& each, uint32_t k, int* scratch) {
  uint32_t low = kFull, high = 0;
  each.sample([&](uint32_t key, uint32_t) {
    if (key > kKeyNegInf && key < kKeyPosInf) low = min(low, key), high = max(high, key);
  });
  low = __reduce_min_sync(kFull, low), high = __reduce_max_sync(kFull, high);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  if (lane == 0) scratch[warp] = low, scratch[32 + warp] = high;
  Math::sync();
  low = __reduce_min_sync(kFull, lane < Math::kWarps ? scratch[lane] : kFull);
  high = __reduce_max_sync(kFull, lane < Math::kWarps ? scratch[32 + lane] : 0);
  const float least = score_of(low), scale = (kSelectionBins - 1) / (score_of(high) - least);
  uint32_t need = k, bin = 0, same = kSelectionBins - 1;
  // Monotone, so that a bin is a range of keys.
  const auto bin_of = [=](uint32_t key) {
    const float at = (score_of(key) - least) * scale;
    return static_cast<uint32_t>(fminf(fmaxf(at, 0.0f), kSelectionBins - 1.0f));
  };
  if (low >= high || !(scale > 0.0f && scale < 3e38f) ||
      !selection.narrow(each, [&](uint32_t key, uint32_t) { return bin_of(key); }, bin, same, need, 0)) {
    return {kKeyNegInf, kKeyPosInf, k};
  }
  // The least key of the bin, and the least one above it.
  const auto least_of = [&](uint32_t wanted) {
    uint32_t from = kKeyNegInf, to = kKeyPosInf + 1;
    while (from < to) {
      const uint32_t middle = from + (to - from) / 2;
      if (bin_of(middle) >= wanted)
        to = middle;
      else
        from = middle + 1;
    }
    return from;
  };
  return {least_of(bin), least_of(bin + 1) - 1, need};
}

__device__ void select_row(const Arguments& a, const Redo& r, SelectionShared& s, int row, int place) {
  const int end = min(max(__ldg(a.ke + place), 0), a.keys), start = min(max(__ldg(a.ks + place), 0), end);
  for (int i = threadIdx.x; i < kSelectionBins; i += Math::kThreads) s.room.bins[i] = 0;
  const float* scores = a.out + row * a.out_stride;
  Selection<Math> selection{s.room, s.bitmap, s.bitmap + r.bitmap_words};
  const Scores each{reinterpret_cast<const float4*>(scores), start, end};
  const Bounds bounds = linear_cut(selection, each, r.out.k, s.staged);
  write_chosen(selection, each, selection.decide(each, bounds.low, bounds.high, bounds.need), r.out, place, start, end,
               r.bitmap_words, s.staged);
  Math::sync();
}

}  // namespace

extern "C" __global__ void __launch_bounds__(G::kThreads, 1)
    KERNEL_NAME(const __grid_constant__ ptx::TensorMap q_map, const __grid_constant__ ptx::TensorMap k_map,
                const __grid_constant__ Arguments all, const __grid_constant__ Redo r) {
  extern __shared__ __align__(1024) unsigned char raw[];
  Shared& s = *reinterpret_cast<Shared*>(raw);
  const int count = __ldg(r.count);
  if (count == 0) return;
  const int other = static_cast<int>(threadIdx.x / 32) - G::kMathThreads / 32;
  Meeting meet{r.arrivals};
  Arguments a = all;
  if (other < 0) {
    ptx::setmaxnreg_inc<G::kMathRegisters>();
    for (int first = 0; first < count; first += r.wave) {
      a.listed = all.listed + first, a.rows = min(r.wave, count - first);
      gather_q(r, a.listed, a.rows);
      price_blocks(a, s);
      meet();
      multiply(a, s.worker[uniform(threadIdx.x / 128)]);
      meet();
      for (int row = blockIdx.x; row < a.rows; row += gridDim.x)
        select_row(a, r, *reinterpret_cast<SelectionShared*>(raw), row, __ldg(a.listed + row));
      meet();
    }
    return;
  }
  ptx::setmaxnreg_dec<G::kOtherRegisters>();
  for (int first = 0; first < count; first += r.wave) {
    a.listed = all.listed + first, a.rows = min(r.wave, count - first);
    if (other == G::kWorkers && threadIdx.x % 32 == 0) {
#pragma unroll
      for (Worker& worker : s.worker) init_barriers(worker);
      ptx::barrier_init_fence();
    }
    __syncwarp();
    meet();
    if (other < G::kWorkers) produce(a, s, find_piece(a, s, other), &q_map, &k_map, other);
    meet();
    meet();
  }
}
