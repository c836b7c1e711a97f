// The gate of every row: the RANK-th of its sampled scores, or a score a little further down; a CTA a row.
//
// The keys of the scores lie in registers; bisection counts those at or above the middle. Where one score fills the
// gap, the gate is that score up to the RANK-th of the samples in the order of positions.
//
// Compile-time, from mqa_topk_config.py: RANK, WARPS, VALUES_PER_LANE, ARGUMENT_BYTES, KERNEL_NAME.
#include "dependent_launch.cuh"
#include "order.cuh"
#include "sample.cuh"

namespace {

constexpr int kWarps = WARPS;
constexpr int kThreads = 32 * kWarps;
constexpr int kOwn = VALUES_PER_LANE;
constexpr uint32_t kRank = RANK;
constexpr uint32_t kEnough = kRank + kRank / 64;  // a gate that lets a few more pass will do
constexpr int kLinearRounds = 12;

struct Arguments {
  const float* scores;  // [rows, samples]
  const int* sampled_ks;
  const int* sampled_ke;
  float4* gates;  // append.cuh's Gate
  long long stride;
  int keys, sample_stride;
};
static_assert(sizeof(Arguments) == ARGUMENT_BYTES, "STRUCTS of mqa_topk_config.py");

__shared__ uint32_t partial[2][32];
__shared__ int ties[kOwn][kWarps];
__shared__ int last_tie;

enum class Reduce { kSum, kMin, kMax };

template <Reduce kReduce>
__device__ __forceinline__ uint32_t of_warp(uint32_t value) {
  if constexpr (kReduce == Reduce::kSum) return __reduce_add_sync(kFull, value);
  if constexpr (kReduce == Reduce::kMin) return __reduce_min_sync(kFull, value);
  return __reduce_max_sync(kFull, value);
}

// By turns in the one half of `partial` and the other.
template <Reduce kReduce>
__device__ __forceinline__ uint32_t of_cta(uint32_t value, int& turn) {
  value = of_warp<kReduce>(value);
  if (kWarps == 1) return value;
  const int lane = threadIdx.x % 32;
  if (lane == 0) partial[turn][threadIdx.x / 32] = value;
  __syncthreads();
  value = of_warp<kReduce>(lane < kWarps ? partial[turn][lane] : kReduce == Reduce::kMin ? kFull : 0);
  turn ^= 1;
  return value;
}

}  // namespace

extern "C" __global__ void __launch_bounds__(kThreads) KERNEL_NAME(const __grid_constant__ Arguments a) {
  let_next_start();
  wait_for_previous();
  const int row = blockIdx.x, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int first = __ldg(a.sampled_ks + row), past = __ldg(a.sampled_ke + row);
  const float* scores = a.scores + row * a.stride;
  uint32_t keys[kOwn], low = kFull, high = 0, numbers = 0;
#pragma unroll
  for (int j = 0; j < kOwn; ++j) {
    const int i = first + j * kThreads + threadIdx.x;
    keys[j] = i < past ? key_of(__ldcs(scores + i)) : 0;
  }
#pragma unroll
  for (int j = 0; j < kOwn; ++j) {
    numbers += keys[j] > 0;
    high = max(high, keys[j]);
    if (keys[j] > 0) low = min(low, keys[j]);
  }
  int turn = 0;
  const auto count = [&](uint32_t least) {
    uint32_t own = 0;
#pragma unroll
    for (int j = 0; j < kOwn; ++j) own += keys[j] >= least;
    return of_cta<Reduce::kSum>(own, turn);
  };
  numbers = of_cta<Reduce::kSum>(numbers, turn);
  low = of_cta<Reduce::kMin>(low, turn);
  high = of_cta<Reduce::kMax>(high, turn);
  const float highest = score_of(high);
  if (numbers < kRank) {  // every number passes
    if (threadIdx.x == 0) a.gates[row] = make_float4(neg_inf(), neg_inf(), __int_as_float(0x7FFFFFFF), 0.0f);
    return;
  }
  // count(low) >= kRank, and less than that above high. Halved first as scores, which are spread more evenly than keys:
  // the half of all keys is near zero.
  uint32_t passing = numbers;
  for (int round = 0; low < high && passing > kEnough; ++round) {
    uint32_t middle = high - (high - low) / 2;
    if (round < kLinearRounds) {
      const uint32_t linear = key_of(0.5f * score_of(low) + 0.5f * score_of(high));
      if (linear > low && linear <= high) middle = linear;
    }
    const uint32_t some = count(middle);
    if (some >= kRank)
      low = middle, passing = some;
    else
      high = middle - 1;
  }
  int last_key = 0x7FFFFFFF;
  if (passing > kEnough) {  // many equal to `low`: the one that makes kRank with those above
    const int wanted = kRank - count(low + 1);
#pragma unroll
    for (int j = 0; j < kOwn; ++j) {
      const int equal = __popc(__ballot_sync(kFull, keys[j] == low));
      if (lane == 0) ties[j][warp] = equal;
    }
    __syncthreads();
    if (threadIdx.x == 0) {  // how many come before
      int before = 0;
      for (int i = 0; i < kOwn * kWarps; ++i) {
        const int equal = (&ties[0][0])[i];
        (&ties[0][0])[i] = before;
        before += equal;
      }
    }
    __syncthreads();
#pragma unroll
    for (int j = 0; j < kOwn; ++j) {
      const unsigned equal = __ballot_sync(kFull, keys[j] == low);
      if (keys[j] == low && ties[j][warp] + __popc(equal & ((1u << lane) - 1)) == wanted - 1) {
        last_tie = Sample{a.keys, a.sample_stride}.position(first + j * kThreads + threadIdx.x);
      }
    }
    __syncthreads();
    last_key = last_tie;
  }
  if (threadIdx.x == 0) a.gates[row] = make_float4(score_of(low), score_of(low + 1), __int_as_float(last_key), highest);
}
