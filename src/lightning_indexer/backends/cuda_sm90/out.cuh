// Elements of the result: their type, -inf, and its fill by bulk stores.
//
// Compile-time: OUT_BF16.
#pragma once

#include "ptx.cuh"

namespace {

#if OUT_BF16
using Out = unsigned short;
constexpr uint32_t kNegInfPair = 0xFF80FF80u;
#else
using Out = float;
constexpr uint32_t kNegInfPair = 0xFF800000u;
#endif

__device__ __forceinline__ Out to_out(float value) {
#if OUT_BF16
  return ptx::to_bfloat16(value);
#else
  return value;
#endif
}

// -inf into [first, last) of one row: bulk stores where 16 bytes align, single elements at the ends. One warp calls it;
// `neg_inf` is kWords of -inf in shared memory.
template <int kWords>
__device__ __forceinline__ void fill_row(Out* row, int first, int last, const uint32_t (&neg_inf)[kWords],
                                         uint64_t policy, int lane) {
  if (first >= last) return;
  constexpr int kVector = 16 / sizeof(Out);
  constexpr int kBulk = sizeof(neg_inf) / sizeof(Out);
  const int misaligned = reinterpret_cast<uint64_t>(row + first) / sizeof(Out) % kVector;
  const int body = min(last, first + (kVector - misaligned) % kVector);
  const int tail = body + (last - body) / kVector * kVector;
  const Out element = reinterpret_cast<const Out*>(neg_inf)[0];
  if (first + lane < body) row[first + lane] = element;
  if (tail + lane < last) row[tail + lane] = element;
  for (int at = body + lane * kBulk; at < tail; at += 32 * kBulk) {
    ptx::bulk_store(row + at, neg_inf, min(kBulk, tail - at) * sizeof(Out), policy);
  }
}

}  // namespace
