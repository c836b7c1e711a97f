// The schedule of paged_mqa_logits.cuh: from lengths to the tiles of each worker, found by every CTA for itself.
//
// The tiles of all sequences stand in one line; pieces of it of equal length, one a worker, are known from their sum.
#pragma once

#include "paged_geometry.cuh"

namespace {

// x / by, of 0 <= x < 2^31 and inverse = min(ceil(2^32 / by), 2^32 - 1).
__device__ __forceinline__ int divide(int x, int by, uint32_t inverse) {
  int quotient = static_cast<int>(__umulhi(static_cast<uint32_t>(x), inverse));
  int rest = x - quotient * by;
  if (rest < 0) --quotient, rest += by;
  return rest >= by ? quotient + 1 : quotient;
}

// Keys that row `row` of a sequence sees, from what the caller gave for it.
__device__ __forceinline__ int length_of(const Arguments& a, int given, int row) {
  const int length = a.derived_lengths ? max(given, 0) - (kNextN - 1) + row : given;
  return min(max(length, 0), a.keys);
}

// The most keys that a row of the sequence sees.
__device__ __forceinline__ int longest(const Arguments& a, int sequence) {
  const int* lengths = a.lengths + sequence * a.length_stride;
  int most = __ldg(lengths);
  if constexpr (kNextN > 1) {
    if (!a.derived_lengths) {
#pragma unroll
      for (int row = 1; row < kNextN; ++row) most = max(most, __ldg(lengths + row * a.row_length_stride));
    }
  }
  return min(max(most, 0), a.keys);
}

__device__ __forceinline__ int tiles_of(int keys) { return (keys + kTileKeys - 1) / kTileKeys; }

// Sequences to an entry of Shared::prefix: 2^shift.
struct Entries {
  int shift, count;

  __device__ __forceinline__ explicit Entries(int batch) {
    shift = batch <= kPrefixEntries ? 0 : 32 - __clz((batch - 1) / kPrefixEntries);
    count = (batch + (1 << shift) - 1) >> shift;
  }
};

// Tiles of all sequences before an entry, into s.prefix. The math warps call it; the other warps meet them in its
// barrier, and all meet once more behind it. (Math warps alone could meet inside; racecheck then counts barriers that
// the readers of s.prefix have not passed.)
__device__ __forceinline__ void sum_tiles(const Arguments& a, Shared& s) {
  const Entries entries(a.batch);
  const int each = (entries.count + kMathThreads - 1) / kMathThreads, first = threadIdx.x * each;
  int mine = 0;
#pragma unroll 1
  for (int i = first; i < min(first + each, entries.count); ++i) {
    const int end = min((i + 1) << entries.shift, a.batch);
#pragma unroll 1
    for (int b = i << entries.shift; b < end; ++b) mine += tiles_of(longest(a, b));
    s.prefix[i + 1] = mine;
  }
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  int inclusive = mine;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const int other = __shfl_up_sync(~0u, inclusive, step);
    if (lane >= step) inclusive += other;
  }
  if (lane == 31) s.warp_tiles[warp] = inclusive;
  ptx::bar_sync<kAllHere, kThreads>();
  int before = inclusive - mine;
#pragma unroll
  for (int w = 0; w < kMathThreads / 32; ++w) before += w < warp ? s.warp_tiles[w] : 0;
#pragma unroll 1
  for (int i = first; i < min(first + each, entries.count); ++i) s.prefix[i + 1] += before;
  if (threadIdx.x == 0) s.prefix[0] = 0;
}

// Row of the block tables that a sequence reads.
__device__ __forceinline__ const int* table_of(const Arguments& a, int sequence) {
  return a.tables + (a.indices ? __ldg(a.indices + sequence) : sequence) * a.table_stride;
}

// The blocks of a tile, of which `blocks` are real.
__device__ __forceinline__ void read_blocks(const int* table, int tile, int blocks, int (&block)[kBlocks]) {
#pragma unroll
  for (int i = 0; i < kBlocks; ++i) block[i] = i < blocks ? __ldg(table + (tile * kBlocks + i) / kTilesPerPage) : 0;
}

// The tile at a place of the line that a lane's first one will have if every row sees a.keys keys. Its blocks are read
// beside the lengths, which halves what the first load waits for.
struct Guess {
  int sequence, tile, blocks;
  int block[kBlocks];
};

__device__ __forceinline__ Guess guess_unit(const Arguments& a, int piece) {
  const int lane = threadIdx.x % 32, place = piece * a.guess_share + min(piece, a.guess_rest) + lane;
  Guess guess = {-1, 0, 0, {}};
  if (lane >= kKStages || a.guess_tiles == 0) return guess;
  const int sequence = divide(place, a.guess_tiles, a.guess_inverse);
  if (sequence >= a.batch) return guess;
  guess.sequence = sequence, guess.tile = place - sequence * a.guess_tiles;
  guess.blocks = min(kBlocks, (a.keys + kPage - 1) / kPage - guess.tile * kBlocks / kTilesPerPage);
  read_blocks(a.tables + sequence * a.table_stride, guess.tile, guess.blocks, guess.block);
  return guess;
}

// A worker's stretch of the line.
struct Piece {
  int begin, end;

  __device__ __forceinline__ Piece(const Arguments& a, const Shared& s, int piece) {
    const int total = s.prefix[Entries(a.batch).count], pieces = gridDim.x * kWorkers;
    const int share = divide(total, pieces, a.pieces_inverse), rest = total - share * pieces;
    begin = share * piece + min(piece, rest);
    end = begin + share + (piece < rest);
  }
};

// The tile at `place` of the line, inside a piece that ends at `end`. `hint` is an entry to look at first.
__device__ __forceinline__ Unit unit_at(const Arguments& a, const Shared& s, int place, int end, int& hint,
                                        const Guess& guess) {
  const Entries entries(a.batch);
  int low = 0, high = entries.count;  // prefix[low] <= place < prefix[high]
  if (s.prefix[hint] <= place && place < s.prefix[hint + 1]) {
    low = hint;
  } else {
    while (high - low > 1) {
      const int middle = (low + high) / 2;
      if (s.prefix[middle] <= place) {
        low = middle;
      } else {
        high = middle;
      }
    }
  }
  hint = low;
  int sequence = low << entries.shift, start = s.prefix[low], sequence_end = s.prefix[low + 1];
  if (entries.shift > 0) {  // on to the sequence, through the lengths again
    while (true) {
      const int tiles = tiles_of(longest(a, sequence));
      if (place < start + tiles) {
        sequence_end = start + tiles;
        break;
      }
      start += tiles, ++sequence;
    }
  }
  Unit unit;
  unit.sequence = sequence, unit.tile = place - start, unit.left = min(sequence_end, end) - place;
  unit.blocks = 1;
  if constexpr (kBlocks > 1) {
    unit.blocks = min(kBlocks, (longest(a, sequence) + kPage - 1) / kPage - unit.tile * kBlocks);
  }
  if (sequence == guess.sequence && unit.tile == guess.tile) {
#pragma unroll
    for (int i = 0; i < kBlocks; ++i) unit.block[i] = guess.block[i];
  } else {
    read_blocks(table_of(a, sequence), unit.tile, unit.blocks, unit.block);
  }
  return unit;
}

}  // namespace
