// The head sum on the matrix unit: relu(scores), rounded to bfloat16, are B of v_mfma_f32_32x32x16_bf16, the weights A.
//
//   The layout of the scores is a B layout with permuted heads: element i of lane half h in part s is head
//   16 s + 8 (i / 4) + 4 h + i % 4. A has the weights of a row in one of its 32 rows and zeros elsewhere, and so all
//   rows of the wave add up in one result, each in its own row of it. Row 2 p is row p of the result, row 2 p + 1 row p
//   + 4: register p, lanes 0-31 and 32-63, ready to store.
#pragma once

typedef __bf16 bf16x2 __attribute__((ext_vector_type(2)));
typedef __bf16 bf16x8 __attribute__((ext_vector_type(8)));
static_assert(ROW_PAIRS <= 4, "registers 0-3 of the result hold a pair each");

struct Weights {
  bf16x8 part[2];
};

DEVICE Weights load_weights(const float* from, int slot, int lane) {
  const bool mine = lane % 32 == slot / 2 + slot % 2 * 4;
  Weights weights;
#pragma unroll
  for (int s = 0; s < 2; ++s) {
    const float* part = from + 16 * s + lane / 32 * 4;
    const f32x4 low = *(const f32x4*)part * UP, high = *(const f32x4*)(part + 8) * UP;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      weights.part[s][i] = (__bf16)(mine ? low[i] : 0.f);
      weights.part[s][4 + i] = (__bf16)(mine ? high[i] : 0.f);
    }
  }
  return weights;
}

struct Sums {
  f32x16 rows;
  float after;  // the first value of half 0

  template <int half>
  DEVICE_MEMBER void add(f32x16 score, const Weights& weights, int r, int g) {
    const f32x16 zero = {};
    bf16x8 relu;
#pragma unroll
    for (int i = 0; i < 8; i += 2) {
      const f32x2 pair = {score[8 * half + i], score[8 * half + i + 1]};
      const f32x2 two = half == 0 && i == 0 ? relu_first(pair) : relu_pair(pair, after);
      if (half == 0 && i == 0) after = two[0];
      const bf16x2 rounded = __builtin_convertvector(two, bf16x2);
      relu[i] = rounded[0], relu[i + 1] = rounded[1];
    }
    const f32x16 sum = half == 0 && r == 0 && g == 0 ? zero : rows;
    rows = __builtin_amdgcn_mfma_f32_32x32x16_bf16(weights.part[half], relu, sum, 0, 0, 0);
  }

  DEVICE_MEMBER float pair(int p) const { return rows[p]; }
};
