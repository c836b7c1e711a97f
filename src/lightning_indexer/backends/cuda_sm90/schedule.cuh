// Which tiles the windows touch, and which of them each worker computes.
#pragma once

#include "plan.cuh"

namespace {

struct Span {  // the tiles that the windows of a row block touch
  int first_key;
  int tiles;

  __device__ __forceinline__ int cost() const { return tiles > 0 ? tiles + kEnterCost : 0; }
};

__device__ __forceinline__ Span span_of(int lo, int hi) {
  if (hi <= lo) return {0, 0};
  // [M, N]: 128-byte lines of the result. Compressed: the first column of the rows that share the least ks.
  const int first = kCompressed ? lo : lo & ~31;
  return {first, (hi - first + kTileKeys - 1) / kTileKeys};
}

// The same of a row block whose windows lie one in a lane of this warp.
__device__ __forceinline__ Span span_of_lanes(int lo, int hi) {
  const bool some = hi > lo;
  const int least = __reduce_min_sync(~0u, some ? lo : 0x7FFFFFFF);
  return span_of(least, __reduce_max_sync(~0u, some ? hi : 0));
}

// End of a row's window. Compressed: positions past the result's last column are no part of it.
__device__ __forceinline__ int window_end(const Arguments& a, int ks, int ke) {
  const int end = min(ke, a.keys);
  if constexpr (!kCompressed) return end;
  return static_cast<int>(min(static_cast<long long>(end), static_cast<long long>(ks) + a.width));
}

__device__ __forceinline__ Span span_of_block(const Arguments& a, int block) {
  int lo = 0x7FFFFFFF, hi = 0;
  const auto add = [&](int ks, int ke) {
    const int row_lo = max(ks, 0), row_hi = window_end(a, ks, ke);
    if (row_hi > row_lo) lo = min(lo, row_lo), hi = max(hi, row_hi);
  };
  const int first = block * kRows;
  if (kRows % 4 == 0 && a.windows_aligned && first + kRows <= a.rows) {
#pragma unroll
    for (int r = 0; r < kRows; r += 4) {
      const int4 ks = __ldg(reinterpret_cast<const int4*>(a.ks + first + r));
      const int4 ke = __ldg(reinterpret_cast<const int4*>(a.ke + first + r));
      add(ks.x, ke.x), add(ks.y, ke.y), add(ks.z, ke.z), add(ks.w, ke.w);
    }
  } else {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      if (first + r < a.rows) add(__ldg(a.ks + first + r), __ldg(a.ke + first + r));
    }
  }
  return span_of(lo, hi);
}

// Cuts the work of all row blocks into pieces of equal cost, one a worker: a tile is one unit, and entering a row block
// (its q, weights and windows must arrive) is kEnterCost. Leaves this CTA's pieces in shared memory. All threads call
// it.
__device__ void find_pieces(const Arguments& a, Shared& s) {
  const int blocks = (a.rows + kRows - 1) / kRows;
  const int blocks_an_entry = (blocks + kScratch - 1) / kScratch;
  const int entries = (blocks + blocks_an_entry - 1) / blocks_an_entry;
  // Neighbouring threads read neighbouring rows; every window is read from global memory once.
  if (blocks_an_entry == 1) {
#pragma unroll(kRows <= 8 ? 4 : 1)
    for (int block = threadIdx.x; block < blocks; block += kThreads) s.cost[block] = span_of_block(a, block).cost();
  } else {
    for (int entry = threadIdx.x; entry < entries; entry += kThreads) {
      int cost = 0;
      const int last = min((entry + 1) * blocks_an_entry, blocks);
      for (int block = entry * blocks_an_entry; block < last; ++block) cost += span_of_block(a, block).cost();
      s.cost[entry] = cost;
    }
  }
  __syncthreads();

  const int each = (entries + kThreads - 1) / kThreads;
  const int first = threadIdx.x * each, last = min(first + each, entries);
  int mine = 0;
  for (int entry = first; entry < last; ++entry) mine += s.cost[entry];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  int inclusive = mine;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const int other = __shfl_up_sync(~0u, inclusive, step);
    if (lane >= step) inclusive += other;
  }
  if (lane == 31) s.warp_sums[warp] = inclusive;
  __syncthreads();
  int before = inclusive - mine, total = 0;
#pragma unroll
  for (int w = 0; w < kThreads / 32; ++w) {
    if (w < warp) before += s.warp_sums[w];
    total += s.warp_sums[w];
  }
#pragma unroll
  for (int w = 0; w < kWorkers; ++w) {
    const int piece = blockIdx.x * kWorkers + w, pieces = gridDim.x * kWorkers;
    const int begin = static_cast<long long>(total) * piece / pieces;
    const int end = static_cast<long long>(total) * (piece + 1) / pieces;
    if (threadIdx.x == 0) s.worker[w].cost = end - begin;
    if (before <= begin && begin < before + mine) {
      int entry = first, skip = begin - before;
      while (skip >= s.cost[entry]) skip -= s.cost[entry++];
      int block = entry * blocks_an_entry;
      if (blocks_an_entry > 1) {
        for (int cost; skip >= (cost = span_of_block(a, block).cost()); ++block) skip -= cost;
      }
      s.worker[w].start_block = block;
      s.worker[w].start_cost = skip;
    }
  }
  __syncthreads();
}

}  // namespace
