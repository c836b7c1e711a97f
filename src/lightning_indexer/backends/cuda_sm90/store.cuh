// The epilogue that stores scores, and the -inf around them.
#pragma once

#include "head_sum.cuh"
#include "out.cuh"
#include "schedule.cuh"

namespace {

struct Epilogue {
  Out* out = nullptr;  // column 0 - origin of the lane's first row

  __device__ __forceinline__ void enter(const Arguments& a, const RowBlock& info, const Lane& my) {
    // An origin may be INT_MIN: its negative has no place in 32 bits.
    out = a.out + (info.first_row + my.row) * a.out_stride - static_cast<long long>(info.origin[my.row]);
  }

  __device__ __forceinline__ void tile(const Arguments& a, const RowBlock& info, const Lane& my, int key,
                                       const Sum::Sums& sum, const float (&scale)[Sum::kKeysPerLane]);

  __device__ __forceinline__ void leave(const Arguments&, const RowBlock&, const Lane&) {}
};

__device__ __forceinline__ void Epilogue::tile(const Arguments& a, const RowBlock& info, const Lane& my, int key,
                                               const Sum::Sums& sum, const float (&scale)[Sum::kKeysPerLane]) {
  const int tile_key = key - my.key;
  const bool whole = (tile_key >= info.inner_lo) & (tile_key + G::kTileKeys <= info.inner_hi);
#pragma unroll
  for (int r = 0; r < G::kRowsPerLane; ++r) {
    const int row = my.row + 4 * r;
    Out* target = out + 4 * r * a.out_stride;
    if constexpr (kCompressed && G::kRowsPerLane > 1)
      target += static_cast<long long>(info.origin[my.row]) - info.origin[row];
#pragma unroll
    for (int e = 0; e < Sum::kKeysPerLane; ++e) {
      const int n = key + 8 * e;
      float value = fmaf(sum[r][e], scale[e], 0.0f);  // + 0.0 turns -0.0 into +0.0
      bool write = true;
      if (!whole) {
        const bool inside = (n >= info.lo[row]) & (n < info.hi[row]);
        if constexpr (kClean) {
          if (!inside) value = -__int_as_float(0x7F800000);
          write = n < a.keys && info.first_row + row < a.rows;
        } else {
          write = inside;
        }
      }
      if (write) target[n] = to_out(value);
    }
  }
}

// ---- fill warps ----

__device__ void fill(const Arguments& a, Shared& s, int warp) {
  const int lane = threadIdx.x % 32, blocks = (a.rows + G::kRows - 1) / G::kRows;
  ptx::bar_sync<kPiecesFound, 32 * (G::kWorkers + G::kFillWarps)>();  // s.cost lay where s.neg_inf is
  for (int i = warp * 32 + lane; i < kScratch; i += 32 * G::kFillWarps) s.neg_inf[i] = kNegInfPair;
  ptx::fence_async_proxy();
  ptx::bar_sync<kFillReady, 32 * G::kFillWarps>();
  const uint64_t policy = ptx::evict_first_policy();
  // A unit is a row block, or part of its columns where row blocks are few.
  const int warps = G::kFillWarps * gridDim.x;
  const int parts = max(1, min(4 * warps / blocks, a.keys / kFillColumns));
  const int columns = ((a.keys - 1) / parts / kFillColumns + 1) * kFillColumns;
  for (int unit = blockIdx.x + warp * gridDim.x; unit < blocks * parts; unit += warps) {
    // The last parts may begin past N, by parts * kFillColumns at most: the gate's MAX_KEYS leaves that room in an int.
    const int block = unit / parts, begin = unit % parts * columns, end = min(begin + columns, a.keys);
    int lo = 0, hi = 0;
    const int row = block * G::kRows + lane;
    if (lane < G::kRows && row < a.rows) lo = max(__ldg(a.ks + row), 0), hi = min(__ldg(a.ke + row), a.keys);
    const Span span = span_of_lanes(lo, hi);
    const long long last = static_cast<long long>(span.first_key) + span.tiles * G::kTileKeys;
    for (int r = 0; r < G::kRows && block * G::kRows + r < a.rows; ++r) {
      Out* out = a.out + (block * G::kRows + r) * a.out_stride;
      fill_row(out, begin, min(span.first_key, end), s.neg_inf, policy, lane);
      fill_row(out, static_cast<int>(max(last, static_cast<long long>(begin))), end, s.neg_inf, policy, lane);
    }
  }
  ptx::bulk_commit();
  ptx::bulk_wait_all();
}

}  // namespace
