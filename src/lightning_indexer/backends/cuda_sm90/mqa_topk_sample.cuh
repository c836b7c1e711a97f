// The sampled keys and scales, one behind the other, and the windows in terms of them. Clears what later kernels count
// in.
//
// Compile-time, from mqa_topk_config.py: HEAD_DIM, ARGUMENT_BYTES, KERNEL_NAME.
#include "sample.cuh"

namespace {

struct Arguments {
  const unsigned char* k;
  const float* kv_scale;
  const int* ks;
  const int* ke;
  unsigned char* sampled_k;  // [samples, D]
  float* sampled_scale;
  int* sampled_ks;
  int* sampled_ke;
  int* counters;
  long long k_stride;
  int rows, keys, stride;
  int ungated;  // windows that are not longer need no sample
  int counter_count;
  int unused;
};
static_assert(sizeof(Arguments) == ARGUMENT_BYTES, "STRUCTS of mqa_topk_config.py");

}  // namespace

extern "C" __global__ void KERNEL_NAME(const __grid_constant__ Arguments a) {
  const Sample sample{a.keys, a.stride};
  constexpr int kVectors = HEAD_DIM / 16;
  const int threads = gridDim.x * blockDim.x, thread = blockIdx.x * blockDim.x + threadIdx.x;
  for (int i = thread; i < a.counter_count; i += threads) a.counters[i] = 0;
  for (int at = thread; at < sample.count() * kVectors; at += threads) {
    const int i = at / kVectors, vector = at % kVectors, key = sample.position(i);
    reinterpret_cast<uint4*>(a.sampled_k)[at] = __ldg(reinterpret_cast<const uint4*>(a.k + key * a.k_stride) + vector);
    if (vector == 0) a.sampled_scale[i] = __ldg(a.kv_scale + key);
  }
  for (int row = thread; row < a.rows; row += threads) {
    const int end = min(max(__ldg(a.ke + row), 0), a.keys), start = min(max(__ldg(a.ks + row), 0), end);
    const bool gated = end - start > a.ungated;
    a.sampled_ks[row] = gated ? sample.before(start) : 0;
    a.sampled_ke[row] = gated ? sample.before(end) : 0;
  }
}
