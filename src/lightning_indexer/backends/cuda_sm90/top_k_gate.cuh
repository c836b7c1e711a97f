// The gate that a few more than k scores of a row pass, from a sample of it.
#pragma once

#include "top_k_exact.cuh"

namespace {

// By how much to overshoot so that the true count falls below k only four deviations out: (f - 1) n = 4 sqrt(f n).
TOP_K_DEVICE float overshoot(float n) {
  const float half = __fdividef(8.0f, n);
  return 1.01f + half + 4.0f * sqrtf(__fdividef(1.0f, n) + half * half * 0.0625f);
}

struct Gate {
  float low;                            // candidates are the scores at or above it
  float high;                           // of the sample
  enum { kGood, kRough, kNone } state;  // rough: too many of the sample in one bin; none: nothing finite
};

// The sampled score c of vector i; in turn the even and the odd ones, so that strided contents do not alias.
template <int kStride>
TOP_K_DEVICE float sampled(const uint4& vector, int c, int i) {
  return score_in(vector, c * kStride + (kStride > 1 ? i % kStride : 0));
}

TOP_K_DEVICE uint32_t sample_wanted(float expected, float most_overshoot, int vectors) {
  return min(static_cast<uint32_t>(vectors * kSampled * kThreads),
             static_cast<uint32_t>(min(most_overshoot, overshoot(expected)) * expected) + 1);
}

TOP_K_DEVICE uint32_t sample_fine(uint32_t wanted) { return max(24u, wanted >> 3); }

// A gate that k scores and a few more should pass; `expected` scores of the sample are in the top k.
// Clear `bins` are left dirty.
template <int kCount>
TOP_K_DEVICE Gate find_gate(const uint4 (&x)[kCount], float expected, float most_overshoot, uint32_t* bins) {
  constexpr int kStride = SAMPLE_STRIDE, kScores = kSampled;
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  float low = pos_inf(), high = neg_inf();
#pragma unroll
  for (int i = 0; i < kCount; ++i)
#pragma unroll
    for (int c = 0; c < kScores; ++c)
      asm("{\n.reg .pred p;\n.reg .f32 a;\nabs.f32 a, %2;\nsetp.lt.f32 p, a, 0f7f800000;\n"
          "@p min.f32 %0, %0, %2;\n@p max.f32 %1, %1, %2;\n}"
          : "+f"(low), "+f"(high)
          : "f"(sampled<kStride>(x[i], c, i)));
  uint32_t low_key = __reduce_min_sync(kFull, key_of(low)), high_key = __reduce_max_sync(kFull, key_of(high));
  if (lane == 0) block.warp_a[warp] = low_key, block.warp_b[warp] = high_key;
  __syncthreads();
  low_key = __reduce_min_sync(kFull, lane < kWarps ? block.warp_a[lane] : kFull);
  high_key = __reduce_max_sync(kFull, lane < kWarps ? block.warp_b[lane] : 0);
  if (low_key >= high_key) {  // nothing finite, or one score
    if (threadIdx.x == 0) block.flood = low_key > high_key ? kKeyNegInf : low_key;
    return {score_of(low_key + 1), score_of(high_key), low_key > high_key ? Gate::kNone : Gate::kGood};
  }
  if (threadIdx.x == 0) block.flood = 0;
  low = score_of(low_key), high = score_of(high_key);
  const uint32_t wanted = sample_wanted(expected, most_overshoot, kCount);
  const float scale = linear_scale(low, high, kBins);
  const uint32_t base = shared_of(bins) - 4u * kMagicBits;
#pragma unroll
  for (int i = 0; i < kCount; ++i)
#pragma unroll
    for (int c = 0; c < kScores; ++c) count_bin(base, sampled<kStride>(x[i], c, i), low, scale, kBins);
  __syncthreads();
  find_cut<kBins>(bins, wanted, block.warp_c, &block.cut);
  Gate gate = {low, high, Gate::kGood};
  if (scale > 0) gate.low = fmaf(__fdividef(high - low, kBins - 1), static_cast<float>(block.cut.bin) - 0.5f, low);
  if (block.cut.inside > sample_fine(wanted)) gate.state = Gate::kRough;
  return gate;
}

// The same on keys, for a sample badly spread over linear bins; the result is in block.gate_low. `x`: the thread's
// copy.
template <int kCount>
__device__ __noinline__ void refine_gate(const uint4* x, float expected, float most_overshoot, float rate,
                                         uint32_t* bins) {
  const uint32_t wanted = sample_wanted(expected, most_overshoot, kCount), fine = sample_fine(wanted);
  uint32_t from = 0, to = kFull, need = wanted;
  while (true) {
    const int width = 32 - __clz(to - from), shift = width > kKeyBits ? width - kKeyBits : 0;
    __syncthreads();
    clear(bins, kKeyBins);
    __syncthreads();
    for (int i = 0; i < kCount; ++i)
#pragma unroll
      for (int c = 0; c < kSampled; ++c) {
        const uint32_t key = key_of(sampled<SAMPLE_STRIDE>(x[i], c, i));
        if (key >= from && key <= to) shared_add(shared_of(bins + ((key - from) >> shift)), 1);
      }
    __syncthreads();
    find_cut<kKeyBins>(bins, need, block.warp_c, &block.cut);
    from += block.cut.bin << shift;
    to = from + ((1u << shift) - 1);
    need -= block.cut.above;
    if (shift == 0 || block.cut.inside <= fine) break;
  }
  uint32_t key = max(from, kKeyNegInf);
  if (from == to) {
    if (threadIdx.x == 0) block.flood = key;
    // More scores are equal to the gate than there is room for: only those above it.
    if (wanted - need + block.cut.inside > 0.85f * kCapacity * rate) ++key;
  }
  if (threadIdx.x == 0) block.gate_low = score_of(key);
  __syncthreads();
}

}  // namespace
