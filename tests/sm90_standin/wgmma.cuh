// A stand-in for the backend's wgmma.cuh: a product happens when it is waited for.
#pragma once

#include "ptx.cuh"

namespace ptx {

inline float e4m3(unsigned char code) {
  static const std::vector<float> table = [] {
    std::vector<float> values(256);
    for (int i = 0; i < 256; ++i) {
      const int exponent = i >> 3 & 15, mantissa = i & 7;
      float value = exponent == 0 ? std::ldexp(mantissa, -9) : std::ldexp(8 + mantissa, exponent - 10);
      if ((i & 127) == 127) value = NAN;
      values[i] = i & 128 ? -value : value;
    }
    return values;
  }();
  return table[code];
}

template <int kRowBytes>
inline uint64_t matrix_descriptor(const void* pointer) {
  if (shared_address(pointer) % (8 * kRowBytes)) standin::fail("an operand that starts inside a swizzle pattern");
  return shared_address(pointer) >> 4 | uint64_t(kRowBytes) << 32;
}
inline void wgmma_fence() { __syncwarp(); }
inline void wgmma_commit() { __syncwarp(); }
inline void wgmma_wait_all() {
  __syncwarp();
  for (const auto& product : machine.current->products) product();
  machine.current->products.clear();
  ++machine.progress;
}

template <int kRegisters>
inline void wgmma(float (&d)[kRegisters], uint64_t a, uint64_t b, int accumulate) {
  __syncwarp();
  float* const out = d;
  const int lane = threadIdx.x % 32, warp = threadIdx.x % 128 / 32;
  machine.current->products.push_back([=] {
    const int span = static_cast<int>(a >> 32);
    const auto row_of = [&](uint64_t descriptor, int row, float (&values)[32]) {
      const uint32_t base = (static_cast<uint32_t>(descriptor) << 4) + row * span;
      for (int k = 0; k < 32; ++k) values[k] = e4m3(raw[swizzled(base + k, span)]);
    };
    float keys[2][32], pair[32];
    row_of(a, warp * 16 + lane / 4, keys[0]);
    row_of(a, warp * 16 + lane / 4 + 8, keys[1]);
    for (int j = 0; j < kRegisters / 4; ++j) {
      for (int e = 0; e < 2; ++e) {
        row_of(b, 8 * j + lane % 4 * 2 + e, pair);
        for (int half = 0; half < 2; ++half) {
          float sum = 0.0f;
          for (int k = 0; k < 32; ++k) sum += keys[half][k] * pair[k];
          float& target = out[4 * j + 2 * half + e];
          target = accumulate ? target + sum : sum;
        }
      }
    }
  });
}

}  // namespace ptx
