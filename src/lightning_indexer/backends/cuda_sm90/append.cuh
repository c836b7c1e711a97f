// The epilogue that appends the (score, key) pairs that pass their row's gate to lists, and where the lists lie.
//
// Lists. Each math warp of a piece has one for each row: no two write to the same, so slots come from ballots and
// counters in registers, without atomics. A row block and the pieces that it is cut into share one place: the piece
// that begins the block fills its lists upwards, the piece that ends it downwards from their other ends, and whether
// the two met shows in the counts. A piece that does neither has a place of its own, the next one free. A warp's keys
// ascend, so each list does.
//
// Gate. Scores and keys in one order, score descending, then key ascending, so that rows of equal scores are no
// different from others: score >= at_least in the tiles that start at or before last_key, and > behind.
#pragma once

#include "head_sum.cuh"
#include "schedule.cuh"

namespace {

// Where the lists of a row block's piece lie.
struct Place {
  int* counts;  // null: nowhere
  int first;    // in a.candidates
  int step;
  bool alone;

  __device__ __forceinline__ void write(const Arguments&, RowBlock& info) const {
    info.first = first;
    info.counts = counts;
    info.step = step;
    info.alone = alone;
  }

  // Not read ahead, as the windows are: the producer warp has no registers for it.
  __device__ __forceinline__ Gate gate_of(const Arguments& a, int row, int hi) const {
    const float nan = __int_as_float(0x7FFFFFFF);
    if (hi == 0 || counts == nullptr) return {nan, nan, 0, nan};  // nothing passes
    const int4 four = __ldcg(reinterpret_cast<const int4*>(a.gates + row));
    return {__int_as_float(four.x), __int_as_float(four.y), four.z, __int_as_float(four.w)};
  }

  // For a worker that none of the piece's tiles is for. One warp calls it.
  __device__ __forceinline__ void write_empty(int worker) const {
    if (counts == nullptr) return;
    for (int i = threadIdx.x % 32; i < G::kRows * 4; i += 32) {
      int* count = counts + i / 4 * kLists + worker * 4 + i % 4;
      *count = 0;
      if (alone) count[G::kRows * kLists] = 0;
    }
  }
};

// The producer warps of all workers call it together.
__device__ __forceinline__ Place place_of(const Arguments& a, Shared& s, int block, int worker, bool begins,
                                          bool ends) {
  int place = block;
  if (!begins && !ends) {
    if (worker == 0 && threadIdx.x % 32 == 0) {
      const int taken = number_of_blocks(a) + atomicAdd(a.taken, 1);
      s.middle = taken < a.places ? taken : -1;
      a.middles[blockIdx.x] = make_int2(block, s.middle);
    }
    ptx::bar_sync<kPlaceTaken, 32 * G::kWorkers>();
    place = s.middle;
  }
  if (place < 0) return {nullptr, 0, 1, false};
  const bool down = ends && !begins;
  return {a.counts + (place * 2 + down) * (G::kRows * kLists),
          place * (G::kRows * kLists) * a.room + (down ? a.room - 1 : 0), down ? -1 : 1, begins && ends};
}

struct Epilogue {
  int list = 0;  // of the lane's first row: where its warp's first candidate lies
  int count[G::kRowsPerLane];

  __device__ __forceinline__ static int list_of(const Lane& my) { return my.row * kLists + threadIdx.x / 32; }

  __device__ __forceinline__ void enter(const Arguments& a, const RowBlock& info, const Lane& my) {
    list = info.first + list_of(my) * a.room;
#pragma unroll
    for (int r = 0; r < G::kRowsPerLane; ++r) count[r] = 0;
  }

  __device__ __forceinline__ void tile(const Arguments& a, const RowBlock& info, const Lane& my, int key,
                                       const Sum::Sums& sum, const float (&scale)[Sum::kKeysPerLane]) {
    const int tile_key = key - my.key, lane = threadIdx.x % 32;
    const bool whole = (tile_key >= info.inner_lo) & (tile_key + G::kTileKeys <= info.inner_hi);
    // The lanes of a quad position share a row: theirs are the slots.
    const unsigned place = lane & ~3u;
#pragma unroll
    for (int r = 0; r < G::kRowsPerLane; ++r) {
      const int row = my.row + 4 * r;
      const Gate gate = info.gate[row];
      const float least = tile_key <= gate.last_key ? gate.at_least : gate.above;
#pragma unroll
      for (int e = 0; e < Sum::kKeysPerLane; ++e) {
        const int n = key + 8 * e;
        const float score = fmaf(sum[r][e], scale[e], 0.0f);  // + 0.0 turns -0.0 into +0.0
        bool passes = score >= least;
        if (!whole) passes = passes & (n >= info.lo[row]) & (n < info.hi[row]);
        const unsigned passed = __ballot_sync(~0u, passes);
        // Nibble i: how many of this row's lanes up to the i-th pass.
        const unsigned upto = (passed >> lane % 4 & 0x11111111u) * 0x11111111u;
        const int slot = count[r] + static_cast<int>(upto >> place & 0xF) - 1;
        if (passes && slot < a.room) {
          a.candidates[list + 4 * r * kLists * a.room + info.step * slot] = make_int2(__float_as_int(score), n);
        }
        count[r] += upto >> 28;
      }
    }
  }

  __device__ __forceinline__ void leave(const Arguments&, const RowBlock& info, const Lane& my) {
    if (threadIdx.x % 32 >= 4 || info.counts == nullptr) return;
#pragma unroll
    for (int r = 0; r < G::kRowsPerLane; ++r) {
      int* place = info.counts + list_of(my) + 4 * r * kLists;
      *place = count[r];
      if (info.alone) place[G::kRows * kLists] = 0;
    }
  }
};
static_assert(G::kLanesPerRow == 1, "the lanes of a quad position share a row");
static_assert(G::kKTileBytes > 0 && !kCompressed && !kClean, "lists hold keys");

}  // namespace
