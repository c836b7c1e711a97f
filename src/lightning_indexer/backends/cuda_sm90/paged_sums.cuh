// What the math warpgroups of paged_mqa_logits.cuh do with a product: ReLU and weighted sum.
#pragma once

#include "head_sum.cuh"
#include "paged_plan.cuh"

namespace {

// What a lane stores of a product: kStoredRows rows, kRowsApart apart, of a key or of two that are eight apart.
constexpr int kStoredRows = kLanesPerRow == 4 ? (kRowsPerLane + 1) / 2 : kRowsPerLane;
constexpr int kRowsApart = kLanesPerRow == 1 ? 4 : 2;
constexpr int kKeysPerLane = kLanesPerRow == 1 ? 2 : 1;
using Accumulators = float[kPairs / 2];
using Weights = float[kWeights / 4];
using Sums = float[kStoredRows][kKeysPerLane];

__device__ __forceinline__ void load_weights(const float (&shared)[kWeights], int lane, Weights& w) {
#pragma unroll
  for (int i = 0; i < kWeights / 4; i += 4) {
    const float4 four = *reinterpret_cast<const float4*>(&shared[4 * i + lane % 4 * 4]);
    w[i] = four.x, w[i + 1] = four.y, w[i + 2] = four.z, w[i + 3] = four.w;
  }
}

__device__ __forceinline__ void sum_heads(const Accumulators& d, const Weights& w, int lane, Sums& sum) {
  constexpr int kParts = kRowsPerLane == 1 ? 4 : 2;  // at least four independent sums with those of the other key
  float row_sum[2 * kStoredRows] = {};               // of four lanes a row; one more where rows are odd
#pragma unroll
  for (int r = 0; r < kRowsPerLane; ++r) {
    float sum0, sum1;
    relu_sums<kColumnPairs, kParts>(d + 4 * r * kColumnPairs, w + 2 * r * kColumnPairs, sum0, sum1);
    if constexpr (kLanesPerRow == 1) {
      sum[r][0] = sum0, sum[r][1] = sum1;
    } else {  // an even lane keeps one key, an odd lane the other
      const bool odd = lane & 1;
      const float kept = (odd ? sum1 : sum0) + __shfl_xor_sync(~0u, odd ? sum0 : sum1, 1);
      if constexpr (kLanesPerRow == 2) {
        sum[r][0] = kept;
      } else {
        row_sum[r] = kept;
      }
    }
  }
  if constexpr (kLanesPerRow == 4) {  // of two rows, the lower lanes keep one, the upper lanes the other
#pragma unroll
    for (int r = 0; r < kStoredRows; ++r) {
      const bool upper = lane & 2;
      sum[r][0] = (upper ? row_sum[2 * r + 1] : row_sum[2 * r]) +
                  __shfl_xor_sync(~0u, upper ? row_sum[2 * r] : row_sum[2 * r + 1], 2);
    }
  }
}

}  // namespace
