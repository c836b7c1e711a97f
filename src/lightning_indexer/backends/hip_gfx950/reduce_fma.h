// The head sum in float32: multiply-adds over the heads of a lane, then one swap of half waves for two rows.
#pragma once

struct Weights {
  f32x16 head;  // of the lane's heads, as the result of a product is laid out
};

// From the row's weights of 32 heads on.
DEVICE Weights load_weights(const float* from, int, int lane) {
  Weights weights;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const f32x4 four = *(const f32x4*)(from + 8 * i + lane / 32 * 4) * UP;
#pragma unroll
    for (int j = 0; j < 4; ++j) weights.head[4 * i + j] = four[j];
  }
  return weights;
}

struct Sums {
  f32x2 row[ROWS];  // this lane's share, in two parts

  // Adds registers [8 half, 8 half + 8) of weight[h] * relu(score[h]); half 0 comes first.
  template <int half>
  DEVICE_MEMBER void add(f32x16 score, const Weights& weights, int r, int g) {
    f32x2 sum = half || g ? row[r] : f32x2{0.f, 0.f};
    float after = sum[0];  // half 1: what half 0 ended with
#pragma unroll
    for (int v = 8 * half; v < 8 * half + 8; v += 2) {
      const f32x2 pair = {score[v], score[v + 1]};
      const f32x2 relu = v == 0 ? relu_first(pair) : relu_pair(pair, after);
      if (v == 0) after = relu[0];
      // Not packed: packed float32 instructions do not execute beside matrix instructions.
      sum[0] = __builtin_fmaf(relu[0], weights.head[v], sum[0]);
      sum[1] = __builtin_fmaf(relu[1], weights.head[v + 1], sum[1]);
    }
    row[r] = sum;
  }

  // Rows 2 p and 2 p + 1, complete: the first in lanes 0-31, the second in lanes 32-63.
  DEVICE_MEMBER float pair(int p) const {
    const float a = row[2 * p][0] + row[2 * p][1], b = row[2 * p + 1][0] + row[2 * p + 1][1];
    const u32x2 swapped = __builtin_amdgcn_permlane32_swap(__builtin_bit_cast(unsigned, a),
                                                           __builtin_bit_cast(unsigned, b), false, false);
    // Through scalars: clang reads element 0 for a bit_cast of swapped[1].
    const unsigned first = swapped[0], second = swapped[1];
    return __builtin_bit_cast(float, first) + __builtin_bit_cast(float, second);
  }
};
