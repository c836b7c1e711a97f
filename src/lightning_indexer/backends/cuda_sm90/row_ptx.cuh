// What the row kernels (cache_row.cuh) say in PTX.
#pragma once

using uint32_t = unsigned int;
using uint64_t = unsigned long long;

namespace ptx {

// 16 bytes that no one reads again.
__device__ __forceinline__ uint4 load_once(const void* address) {
  uint4 v;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(address));
  return v;
}

// Two e4m3fn codes, nearest even, saturating; NaN is 0x7f.
__device__ __forceinline__ uint32_t to_e4m3x2(float low, float high) {
  unsigned short codes;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(codes) : "f"(high), "f"(low));
  return codes;
}

__device__ __forceinline__ float from_half(uint32_t bits) {
  float value;
  asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(static_cast<unsigned short>(bits)));
  return value;
}

// NaN where either is.
__device__ __forceinline__ float max_nan(float a, float b) {
  float c;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(c) : "f"(a), "f"(b));
  return c;
}

}  // namespace ptx
