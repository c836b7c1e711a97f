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
    asm volatile("fence.proxy.async;" ::: "memory");
    __threadfence();
    ptx::bar_sync<kMeets, G::kThreads>();
    if (threadIdx.x == 0) {
      asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(arrivals) : "memory");
      unsigned here;
      do {
        asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(here) : "l"(arrivals) : "memory");
      } while (here < target);
    }
    ptx::bar_sync<kMeets, G::kThreads>();
    __threadfence();
    asm volatile("fence.proxy.async;" ::: "memory");
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
  const float* scores;
  int start, end;

  template <class Visit>
  __device__ __forceinline__ void operator()(Visit visit) const {
    constexpr int kAtOnce = 8;
    for (int first = start + threadIdx.x; first < end; first += Math::kThreads * kAtOnce) {
      float some[kAtOnce];
#pragma unroll
      for (int u = 0; u < kAtOnce; ++u) {
        const int i = first + u * Math::kThreads;
        some[u] = i < end ? __ldcg(scores + i) : __int_as_float(0x7FFFFFFF);
      }
#pragma unroll
      for (int u = 0; u < kAtOnce; ++u) {
        const uint32_t key = key_of(some[u]);
        if (key > 0) visit(key, first + u * Math::kThreads);
      }
    }
  }
};

struct SelectionShared {
  SelectionRoom room;
  int staged[4096];                // k
  alignas(16) uint32_t bitmap[4];  // bitmap_words
};
static_assert(sizeof(SelectionShared) <= SELECTION_BYTES, "REDO_SELECTION of mqa_topk_config.py");

struct Bounds {  // `need` of the keys within [low, high] are chosen, and all above
  uint32_t low, high, need;
};

// The bin of the cut among linear bins of the finite scores, as keys. Scores are spread over linear bins, where keys of
// the same exponent would queue at few: the histogram of a whole row has no room for that. `scratch`: 64 words. A
// barrier follows whatever the caller has cleared.
__device__ Bounds linear_cut(Selection<Math>& selection, const Scores& each, uint32_t k, int* scratch) {
  uint32_t low = kFull, high = 0;
  each([&](uint32_t key, uint32_t) {
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
  for (int i = threadIdx.x; i < r.bitmap_words; i += Math::kThreads) s.bitmap[i] = 0;
  const float* scores = a.out + row * a.out_stride;
  Selection<Math> selection{s.room, s.bitmap};
  const Scores each{scores, start, end};
  const Bounds bounds = linear_cut(selection, each, r.out.k, s.staged);
  selection.choose(each, bounds.low, bounds.high, bounds.need, start);
  const uint32_t words = min(r.bitmap_words, (end - start + 127) / 128 * 4);
  const uint32_t count =
      selection.in_order(words, start, [&](uint32_t slot, uint32_t position) { s.staged[slot] = position; });
  Math::sync();
  write_row<Math>(r.out, place, start, count, [&](uint32_t slot) { return s.staged[slot]; });
  if constexpr (kValues) {
    for (uint32_t slot = threadIdx.x; slot < count; slot += Math::kThreads)
      values_of(r.out, place)[slot] = __ldcg(scores + s.staged[slot]) + 0.0f;
  }
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
