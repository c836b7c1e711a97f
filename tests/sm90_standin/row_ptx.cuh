// A stand-in for the backend's row_ptx.cuh on the CPU, and for CUDA's own functions that the row kernels call.
#pragma once

#include "ptx.cuh"

inline float __fmul_rn(float a, float b) { return a * b; }
inline float __frcp_rn(float a) { return 1.0f / a; }
inline float rsqrtf(float a) { return 1.0f / std::sqrt(a); }
inline uint32_t __byte_perm(uint32_t low, uint32_t high, uint32_t which) {
  const uint64_t both = static_cast<uint64_t>(high) << 32 | low;
  uint32_t found = 0;
  for (int i = 0; i < 4; ++i) found |= static_cast<uint32_t>(both >> 8 * (which >> 4 * i & 7) & 0xff) << 8 * i;
  return found;
}
inline uint32_t __vminu2(uint32_t a, uint32_t b) { return min(a & 0xffff, b & 0xffff) | min(a >> 16, b >> 16) << 16; }

namespace ptx {

inline uint4 load_once(const void* address) {
  if (reinterpret_cast<uintptr_t>(address) % 16) standin::fail("a load of 16 bytes off its boundary");
  return __ldg(static_cast<const uint4*>(address));
}

inline uint32_t to_e4m3(float x) {
  if (x != x) return 0x7f;
  const uint32_t sign = __float_as_uint(x) >> 24 & 0x80;
  const float size = min(std::fabs(x), 448.0f);
  // The step of a binade; below 2^-6 that of the subnormals. Powers of two scale exactly, and nearbyint goes to even.
  const int exponent = size == 0 ? -6 : max(std::ilogb(size), -6);
  const int count = static_cast<int>(std::nearbyint(std::ldexp(size, 3 - exponent)));
  return sign | static_cast<uint32_t>((exponent + 6) * 8 + count);
}
inline uint32_t to_e4m3x2(float low, float high) { return to_e4m3(low) | to_e4m3(high) << 8; }

inline float from_half(uint32_t bits) {
  _Float16 value;
  const uint16_t half = static_cast<uint16_t>(bits);
  std::memcpy(&value, &half, 2);
  return static_cast<float>(value);
}

inline float max_nan(float a, float b) { return a != a || b != b ? NAN : max(a, b); }

}  // namespace ptx
