// Rows of 128 channels over four lanes each, eight rows a warp: what the row kernels share.
#pragma once

#include "row_ptx.cuh"

constexpr int kChannels = 128, kLanes = 4, kRowsOfWarp = 32 / kLanes;
constexpr int kBlock = 32;  // channels of a scale of fp4
constexpr int kThreads = 32 * WARPS, kRowsOfCta = WARPS * GROUPS * kRowsOfWarp;

__device__ __forceinline__ float sum_of_row(float v) {
  v += __shfl_xor_sync(0xffffffff, v, 1);
  return v + __shfl_xor_sync(0xffffffff, v, 2);
}

__device__ __forceinline__ float max_of_row(float v) {
  v = fmaxf(v, __shfl_xor_sync(0xffffffff, v, 1));
  return fmaxf(v, __shfl_xor_sync(0xffffffff, v, 2));
}

__device__ __forceinline__ int max_of_row(int v) {
  v = max(v, __shfl_xor_sync(0xffffffff, v, 1));
  return max(v, __shfl_xor_sync(0xffffffff, v, 2));
}

// ---- MXFP4 keys as e4m3 with one scale, as lightning_indexer.fp4.fp4_to_fp8 has it ----

constexpr int kShift = 6;  // fp4.SHIFT of e4m3fn

// What values of a block are multiplied by; `top` is the largest scale byte of the key's blocks that are not all zeros.
__device__ __forceinline__ float unit_of_block(int byte, int top) {
  const int down = min(max(byte - top + kShift, -126), kShift);
  return __uint_as_float((down + 127) << 23);
}

// 2^(top - kShift - 127), which may be subnormal; 1 of a key of zeros (top is -1), NaN of a broken one.
__device__ __forceinline__ float scale_of_key(int top, bool broken) {
  const int code = top - kShift;
  const uint32_t bits = top < 0 ? 0x3f800000u : code > 0 ? static_cast<uint32_t>(code) << 23 : 1u << (22 + code);
  return __uint_as_float(broken ? 0x7fc00000 : bits);
}
