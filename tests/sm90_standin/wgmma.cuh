// A stand-in for the backend's wgmma.cuh: a product happens when it is committed, or when it is waited for.
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
inline void run_products() {
  for (const auto& product : machine.current->products) product();
  machine.current->products.clear();
  __syncwarp();  // a lane reads registers of others
}
inline void wgmma_commit() {
  __syncwarp();
  if (machine.next_random() % 2) {
    run_products();
  } else {
    __syncwarp();
  }
}
inline void wgmma_wait_all() {
  __syncwarp();
  run_products();
  ++machine.progress;
}

inline void row_of(uint64_t descriptor, int row, float (&values)[32]) {
  const int span = static_cast<int>(descriptor >> 32);
  const uint32_t base = (static_cast<uint32_t>(descriptor) << 4) + row * span;
  for (int k = 0; k < 32; ++k) values[k] = e4m3(raw[swizzled(base + k, span)]);
}

// `keys_of` gives a lane's two rows of the first operand.
template <int kRegisters, class KeysOf>
inline void push_product(float (&d)[kRegisters], uint64_t b, int accumulate, KeysOf keys_of) {
  float* const out = d;
  const int lane = threadIdx.x % 32;
  machine.current->products.push_back([=] {
    float keys[2][32], pair[32];
    keys_of(keys);
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

template <int kRegisters>
inline void wgmma(float (&d)[kRegisters], uint64_t a, uint64_t b, int accumulate) {
  __syncwarp();
  const int row = threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4;
  push_product(d, b, accumulate, [=](float (&keys)[2][32]) {
    row_of(a, row, keys[0]);
    row_of(a, row + 8, keys[1]);
  });
}

template <int kRegisters>
inline void wgmma(float (&d)[kRegisters], const uint32_t (&a)[4], uint64_t b, int accumulate) {
  machine.current->operand = a;
  __syncwarp();
  const uint32_t* quad[4];
  for (int t = 0; t < 4; ++t) quad[t] = static_cast<const uint32_t*>(machine.fibers[threadIdx.x / 4 * 4 + t]->operand);
  __syncwarp();
  push_product(d, b, accumulate, [=](float (&keys)[2][32]) {
    for (int i = 0; i < 4; ++i)
      for (int t = 0; t < 4; ++t)
        for (int byte = 0; byte < 4; ++byte)
          keys[i % 2][16 * (i / 2) + 4 * t + byte] = e4m3(quad[t][i] >> (8 * byte) & 0xFF);
  });
}

}  // namespace ptx
