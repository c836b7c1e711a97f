// Exact top-k of each row's window: the positions of the k largest scores, in ascending order or by score.
//
// A function of the row's scores alone: score descending, then position; NaN is never chosen, -0 equals +0. Nothing is
// carried from row to row, no workspace, no global atomics.
//   kShort   the row lies in registers: one linear histogram of it, the scores of the bin of the cut ranked exactly.
//   kStream  the first load is a sample of the row, its histogram gives a gate that a few more than k scores pass; one
//            streaming pass keeps those in shared memory, and a second histogram and an exact ranking find the cut.
//   kAcross  the same by a cluster for each row (top_k_across.cuh).
// Where the gate misses, or one score floods the cut, exact_row (top_k_exact.cuh) takes the row instead.
// Plan and arguments: top_k_plan.cuh. Configurations: top_k.py.
#include "top_k_across.cuh"
#include "top_k_short.cuh"

#if CLUSTER > 1
#define TOP_K_CLUSTER __cluster_dims__(CLUSTER, 1, 1)
#else
#define TOP_K_CLUSTER
#endif

extern "C" __global__ void TOP_K_CLUSTER __launch_bounds__(kThreads, CTAS_PER_SM)
    KERNEL_NAME(const __grid_constant__ Arguments a) {
  const int row = blockIdx.x / kCluster;
  uint4 x[kVectors];
  if constexpr (kKind == kShort && kWholeRows) {  // few rows: the loads need not wait for the window
    uint32_t shift;
    Window whole;
    whole.vectors = row_vectors(a, row, shift);
    load_row(whole, 0, (shift + a.width + kPack - 1) / kPack, x);
  }
  const Window window = window_of(a, row);
  if (threadIdx.x == 0) block.window = window;
  const bool in_registers = kKind == kShort || window.cover_hi - window.cover_lo <= kThreads * kVectors;
  if (in_registers) {
    if (cluster_rank() == 0) {
      const uint32_t first = kKind == kShort && kWholeRows ? 0 : window.cover_lo;
      if constexpr (kKind != kShort || !kWholeRows) load_row(window, first, window.cover_hi, x);
      short_row(a, row, window, first, x);
    }
  } else if constexpr (kKind == kStream) {
    if (a.bitmap_words)
      stream_row(a, row, window);
    else
      exact_row<false>(a, row, 0, 0.0f, 0);
  } else if constexpr (kKind == kAcross) {
    across_row(a, row, window);
  }
  if constexpr (kByScore) {
    cluster_sync();
    if (cluster_rank() == 0) sort_row(a, row);
  }
}
