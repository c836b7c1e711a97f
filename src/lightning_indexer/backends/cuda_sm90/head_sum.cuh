// ReLU, weights and head sum of one tile, and where the weights lie for it: what kernels on WGMMA results share.
//
// The product's column 8j + 2t + b belongs to row t (and t + 4, ...) of the row block, so lane t of a quad holds all
// heads of its own rows (half of them where two lanes share a row).
#pragma once

namespace {

// A value that is the same in all lanes, in a form that tells the compiler so.
__device__ __forceinline__ int uniform(int value) { return __shfl_sync(~0u, value, 0); }

// Weighted sums of the ReLU of kColumnPairs pairs of products, for each of a lane's two keys, short of 2^25. `d` are
// WGMMA's registers, four to a pair of columns: (key, even), (key, odd), (key + 8, even), (key + 8, odd); `w` the
// weights. ReLU by saturation: |score| < 2^25.
template <int kColumnPairs, int kParts>
__device__ __forceinline__ void relu_sums(const float* d, const float* w, float& sum0, float& sum1) {
  float part[2][kParts] = {};  // by key; at least four independent sums cover the latency of an FMA
#pragma unroll
  for (int j = 0; j < kColumnPairs; ++j) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      float& p = part[e / 2][(j * 2 + e) % kParts];
      p = fmaf(__saturatef(d[4 * j + e] * 0x1p-25f), w[2 * j + e % 2], p);
    }
  }
  sum0 = part[0][0] + part[0][1], sum1 = part[1][0] + part[1][1];
  if constexpr (kParts == 4) sum0 += part[0][2] + part[0][3], sum1 += part[1][2] + part[1][3];
}

// What a lane knows of its place in a tile.
struct Lane {
  int row;   // in the row block; and + 4, + 8, ... up to kRowsPerLane of them
  int half;  // which of the kLanesPerRow lanes of that row
  int key;   // in the tile; and + 8, unless lanes of a row share the two
};

template <class Geometry>
struct HeadSum : Geometry {
  using Geometry::kHeads, Geometry::kLanesPerRow, Geometry::kPairs, Geometry::kRowsPerLane;
  static constexpr int kColumnPairs = kPairs / 8 / kRowsPerLane;  // pairs of heads that a lane sums for one row
  static constexpr int kKeysPerLane = kLanesPerRow > 1 ? 1 : 2;
  static constexpr int kParts = kRowsPerLane == 1 ? 4 : 2;

  using Accumulators = float[kPairs / 2];
  using Weights = float[kPairs / 4];  // of this lane's rows, in the order of its columns
  using Sums = float[kRowsPerLane][kKeysPerLane];

  __device__ __forceinline__ static Lane place_of(int lane) {
    Lane my;
    my.row = lane % 4 / kLanesPerRow;
    my.half = lane % kLanesPerRow;
    my.key = threadIdx.x % 128 / 32 * 16 + lane / 4 + (kKeysPerLane == 1 ? lane % 2 * 8 : 0);
    return my;
  }

  // Where the weight of a (row, head) pair lies in shared memory. A lane wants the 64 of its own rows: four at a time,
  // next to those of the three other lanes of its quad, so that no two lie in one bank.
  __device__ __forceinline__ static int place_of_weight(int pair) {
    const int row = pair / kHeads, head = pair % kHeads;
    const int lane = kLanesPerRow == 1 ? row % 4 : row * 2 + head / 64;
    const int i = kLanesPerRow == 1 ? row / 4 * kHeads + head : head % 64;
    return i / 4 * 16 + lane * 4 + i % 4;
  }

  __device__ __forceinline__ static void load_weights(const float (&shared)[kPairs], int lane, Weights& w) {
#pragma unroll
    for (int i = 0; i < kPairs / 4; i += 4) {
      const float4 four = *reinterpret_cast<const float4*>(&shared[4 * i + lane % 4 * 4]);
      w[i] = four.x, w[i + 1] = four.y, w[i + 2] = four.z, w[i + 3] = four.w;
    }
  }

  // Sums [row][key] of this lane, short of the key's scale and of 2^25.
  __device__ __forceinline__ static void sum(const Accumulators& d, const Weights& w, int half, Sums& sum) {
#pragma unroll
    for (int r = 0; r < kRowsPerLane; ++r) {
      float sum0, sum1;
      relu_sums<kColumnPairs, kParts>(d + 4 * r * kColumnPairs, w + 2 * r * kColumnPairs, sum0, sum1);
      if constexpr (kLanesPerRow == 1) {
        sum[r][0] = sum0, sum[r][1] = sum1;
      } else {  // the other half of the heads is one lane away: each lane keeps one key
        sum[r][0] = (half ? sum1 : sum0) + __shfl_xor_sync(~0u, half ? sum0 : sum1, 1);
      }
    }
  }
};

}  // namespace
