// Which tiles the windows touch, and which of them each worker computes.
#pragma once

#include "head_sum.cuh"
#include "shared.cuh"

namespace {

using Sum = HeadSum<G>;

struct Span {  // the tiles that the windows of a row block touch
  int first_key;
  int tiles;

  __device__ __forceinline__ int cost(const Arguments& a) const { return tiles > 0 ? tiles + a.enter_cost : 0; }
};

__device__ __forceinline__ Span span_of(int lo, int hi) {
  if (hi <= lo) return {0, 0};
  // [M, N]: 128-byte lines of the result. Compressed: the first column of the rows that share the least ks.
  const int first = kCompressed ? lo : lo & ~31;
  return {first, (hi - first + G::kTileKeys - 1) / G::kTileKeys};
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

// Where the weights and the window of a row lie.
__device__ __forceinline__ int place_of_row(const Arguments& a, int row) {
#if ROWS_LISTED
  return __ldg(a.listed + row);
#else
  return row;
#endif
}

__device__ __forceinline__ int number_of_blocks(const Arguments& a) { return (a.rows + G::kRows - 1) / G::kRows; }

// The windows of kWindows rows from `first` on, as one: [lo, hi), empty where all of them are.
constexpr int kWindows = G::kRows < 4 ? G::kRows : 4;

__device__ __forceinline__ void windows_of_rows(const Arguments& a, int first, int& lo, int& hi) {
  lo = 0x7FFFFFFF, hi = 0;
  int ks[kWindows], ke[kWindows];
#pragma unroll
  for (int r = 0; r < kWindows; ++r) {
    const bool real = first + r < a.rows;
#if ROWS_LISTED
    const int place = real ? place_of_row(a, first + r) : 0;
    ks[r] = real ? __ldg(a.ks + place) : 0;
    ke[r] = real ? __ldg(a.ke + place) : 0;
#else
    ks[r] = real ? __ldg(a.ks + first + r) : 0;
    ke[r] = real ? __ldg(a.ke + first + r) : 0;
#endif
  }
#pragma unroll
  for (int r = 0; r < kWindows; ++r) {
    const int row_lo = max(ks[r], 0), row_hi = window_end(a, ks[r], ke[r]);
    if (row_hi > row_lo) lo = min(lo, row_lo), hi = max(hi, row_hi);
  }
}

struct Entries {  // how the costs of row blocks lie in s.cost
  int shift;      // 2^shift blocks an entry
  int each;       // entries a lane, a multiple of four; 32 times as many in all

  __device__ __forceinline__ explicit Entries(int blocks) {
    shift = blocks <= kScratch ? 0 : 32 - __clz((blocks - 1) / kScratch);
    each = (((blocks - 1) >> shift) + 128) / 128 * 4;
  }
};

// The cost of every row block, its tiles and a.enter_cost more for entering it, into s.cost. The math warps call it.
// Here and below the code is short on purpose: on a cold start every line of it comes from memory.
__device__ __forceinline__ void price_blocks(const Arguments& a, Shared& s) {
  const Entries entries(number_of_blocks(a));
  if (entries.shift > 0) {
#pragma unroll 1
    for (int entry = threadIdx.x; entry < kScratch; entry += G::kMathThreads) s.cost[entry] = 0;
    ptx::bar_sync<kCostsCleared, G::kMathThreads>();
  }
  constexpr int kThreadsPerBlock = G::kRows / kWindows;
  const int end = (32 * entries.each << entries.shift) * kThreadsPerBlock;
#pragma unroll 1
  for (int at = threadIdx.x; at < end;
       at += G::kMathThreads) {  // whole warps: end and kMathThreads are multiples of 32
    int lo, hi;
    windows_of_rows(a, at * kWindows, lo, hi);
#pragma unroll
    for (int step = 1; step < kThreadsPerBlock; step *= 2) {
      lo = min(lo, __shfl_xor_sync(~0u, lo, step));
      hi = max(hi, __shfl_xor_sync(~0u, hi, step));
    }
    if (threadIdx.x % kThreadsPerBlock == 0) {
      const int block = at / kThreadsPerBlock;
      const Span span = span_of(lo, hi);
      if (entries.shift == 0) {
        s.cost[block] = span.cost(a);
        if (block < kKnownBlocks) s.first_key[block] = span.first_key;
      } else {
        atomicAdd(&s.cost[block >> entries.shift], span.cost(a));
      }
    }
  }
}

struct Piece {  // `cost` units of work from `skip` units into row block `block` on
  int block, skip, cost;
  Span span;  // of that block, or empty: not known
};

// Cuts the work of all row blocks into pieces of equal cost, kPiecesPerCta a CTA. One warp calls it.
__device__ __forceinline__ Piece find_piece(const Arguments& a, const Shared& s, int worker) {
  const Entries entries(number_of_blocks(a));
  const int lane = threadIdx.x % 32, first = lane * entries.each;
  int mine = 0;
#pragma unroll 1
  for (int i = 0; i < entries.each; i += 4) {
    const int4 cost = *reinterpret_cast<const int4*>(&s.cost[first + i]);
    mine += cost.x + cost.y + cost.z + cost.w;
  }
  int inclusive = mine;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const int other = __shfl_up_sync(~0u, inclusive, step);
    if (lane >= step) inclusive += other;
  }
  const int total = __shfl_sync(~0u, inclusive, 31), pieces = gridDim.x * kPiecesPerCta;
  const int piece = blockIdx.x * kPiecesPerCta + (kPiecesPerCta > 1 ? worker : 0), share = total / pieces,
            rest = total - share * pieces;
  const int begin = share * piece + min(piece, rest), before = inclusive - mine;
  const bool here = before <= begin && begin < inclusive;
  int block = 0, skip = begin - before;
  if (here) {
    int entry = first;
    while (skip >= s.cost[entry]) skip -= s.cost[entry++];
    block = entry << entries.shift;
    if (__builtin_expect(entries.shift > 0, 0)) {  // on to the block, through the windows again
      while (true) {
        int lo = 0x7FFFFFFF, hi = 0;
#pragma unroll 1
        for (int r = 0; r < G::kRows; r += kWindows) {
          int some_lo, some_hi;
          windows_of_rows(a, block * G::kRows + r, some_lo, some_hi);
          lo = min(lo, some_lo), hi = max(hi, some_hi);
        }
        const int cost = span_of(lo, hi).cost(a);
        if (skip < cost) break;
        skip -= cost, ++block;
      }
    }
  }
  const int from = __ffs(__ballot_sync(~0u, here)) - 1;
  if (from < 0) return {0, 0, 0, {0, 0}};
  block = __shfl_sync(~0u, block, from), skip = __shfl_sync(~0u, skip, from);
  Span span = {0, 0};
  if (entries.shift == 0 && block < kKnownBlocks) span = {s.first_key[block], s.cost[block] - a.enter_cost};
  return {block, skip, share + (piece < rest), span};
}

}  // namespace
