// What the math warpgroups of paged_mqa_logits.cuh do with fp4 keys: a tile is converted into registers, multiplied
// with each group of rows, and summed, while the next product runs where registers allow.
#pragma once

#include "paged_fp4.cuh"
#include "paged_sums.cuh"
#include "wgmma.cuh"

namespace {

// The sums of one product, until they are stored while the next one runs.
struct Pending {
  Out* out;
  int key, length[kStoredRows] = {}, stored_rows = 0;
  Sums sum;
  float scale[kKeysPerLane];

  // Before the first product: nothing lies below the width.
  __device__ __forceinline__ explicit Pending(const Arguments& a) : out(a.out), key(a.width) {
#pragma unroll
    for (int r = 0; r < kStoredRows; ++r) {
#pragma unroll
      for (int e = 0; e < kKeysPerLane; ++e) sum[r][e] = 0.0f, scale[e] = 0.0f;
    }
  }

  // The rows of a group: where they are stored, and how many keys they see.
  __device__ __forceinline__ void enter(const Arguments& a, const Segment& segment, int group, int my_row) {
    const int row = group * kGroupRows + my_row;  // of the sequence
    stored_rows = min(kGroupRows - my_row, kNextN - row);
    out = a.out + (static_cast<long long>(segment.sequence) * kNextN + row) * a.out_stride;
#pragma unroll
    for (int r = 0; r < kStoredRows; ++r) {
      const int stored = min(row + r * kRowsApart, kNextN - 1);
      length[r] = length_of(a, segment.lengths[stored], stored);
    }
  }

  __device__ __forceinline__ void store(const Arguments& a) const {
#pragma unroll
    for (int r = 0; r < kStoredRows; ++r) {
      Out* target = out + r * kRowsApart * a.out_stride;
#pragma unroll
      for (int e = 0; e < kKeysPerLane; ++e) {
        const int n = key + 8 * e;
        float value = fmaf(0x1p19f * sum[r][e], scale[e], 0.0f);  // + 0.0 turns -0.0 into +0.0
        bool write = r * kRowsApart < stored_rows;
        if constexpr (kClean) {
          if (n >= length[r]) value = -__int_as_float(0x7F800000);
          write &= n < a.width;
        } else {
          write &= n < length[r];
        }
        if (write) target[n] = to_out(value);
      }
    }
  }
};

// Registers for two products beside the keys; else the sums of one end before the next one starts.
constexpr bool kTwoProducts = kPairs <= 64 || kWorkers < 3;

__device__ __forceinline__ void multiply_fp4(const Arguments& a, const Shared& shared, Worker& s) {
  const int lane = threadIdx.x % 32;
  const int my_row = kLanesPerRow == 1 ? lane % 4 : lane % 4 / 2;
  const int my_key = threadIdx.x % 128 / 32 * 16 + lane / 4 + (kKeysPerLane == 1 ? lane % 2 * 8 : 0);
  Fp4Keys keys(shared, lane);
  KeyOperand operand;
  Pending pending(a);  // of the product before
  float scale[kKeysPerLane];
  Weights w;
  Accumulators even, odd;

  for (int q_count = 0;; ++q_count) {
    const int q_stage = q_count % kQStages;
    ptx::barrier_wait(&s.q_full[q_stage], q_count / kQStages & 1);
    const Segment& segment = s.segment[q_stage];
    const int tiles = uniform(segment.tiles);
    if (tiles == 0) break;
    order_q(s.q[q_stage]);
    const uint64_t q_tile = ptx::matrix_descriptor<kHeadDim>(s.q[q_stage]);
    int tile = 0, group = 0, tile_key = segment.first_tile * kTileKeys + my_key;

    const auto next_keys = [&]() {
      keys.next(s, lane);
#pragma unroll
      for (int e = 0; e < kKeysPerLane; ++e) {
        scale[e] = scale_from_top(kKeysPerLane == 1 && lane % 2 ? keys.top[1] : keys.top[e]);
      }
    };
    // S [64 keys, kPairs] = K tile x Q^T of the group's rows
    const auto start = [&](Accumulators& d, int group) {
      ptx::wgmma_fence();
#pragma unroll
      for (int step = 0; step < kHeadDim / 32; ++step) {  // 32 bytes further along the rows of q: 2 units of 16
        ptx::wgmma(d, operand[step], q_tile + group * (kPairs * kHeadDim / 16) + 2 * step, step != 0);
      }
      ptx::wgmma_commit();
    };
    // Sums the product that runs into d, and starts the next one, into `other` before it where there is one; false if
    // there is no next one.
    const auto finish = [&](Accumulators& d, Accumulators& other) {
      float now[kKeysPerLane];
#pragma unroll
      for (int e = 0; e < kKeysPerLane; ++e) now[e] = scale[e];
      const bool last = group == kGroups - 1, convert = last && tile + 1 < tiles, more = !last || convert;
      const int next = last ? 0 : group + 1;
      const auto store_and_enter = [&]() {
        pending.store(a);
        if (kGroups > 1 || tile == 0) {
          load_weights(s.weights[q_stage][group], lane, w);
          pending.enter(a, segment, group, my_row);
        }
        pending.key = tile_key;
#pragma unroll
        for (int e = 0; e < kKeysPerLane; ++e) pending.scale[e] = now[e];
      };
      if constexpr (!kTwoProducts) store_and_enter();
      if (convert) next_keys();
      ptx::wgmma_wait_all();
      if (convert) keys.convert(operand);
      if constexpr (kTwoProducts) {
        if (more) start(other, next);
        store_and_enter();
      }
      sum_heads(d, w, lane, pending.sum);
      if constexpr (!kTwoProducts) {
        if (more) start(d, next);
      }
      group = next;
      if (last) ++tile, tile_key += kTileKeys;
      return more;
    };

    next_keys();
    keys.convert(operand);
    start(even, 0);
    if constexpr (kTwoProducts) {
#pragma unroll 1
      while (finish(even, odd) && finish(odd, even)) {
      }
    } else {
#pragma unroll 1
      while (finish(even, even)) {
      }
    }
    ptx::wgmma_wait_all();
    ptx::barrier_arrive(&s.q_empty[q_stage]);
  }
  pending.store(a);
}

}  // namespace
