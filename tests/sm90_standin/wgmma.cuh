// A stand-in for the backend's wgmma.cuh: a product happens when it is committed, or when it is waited for.
#pragma once

#include "ptx.cuh"

namespace ptx {

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

inline standin::Matrix matrix_of(uint64_t descriptor) {
  return {raw, static_cast<uint32_t>(descriptor) << 4, static_cast<int>(descriptor >> 32)};
}

// `keys_of` gives a lane's two rows of the first operand.
template <int kRegisters, class KeysOf>
inline void push_product(float (&d)[kRegisters], uint64_t b, int accumulate, KeysOf keys_of) {
  float* const out = d;
  const int lane = threadIdx.x % 32;
  machine.current->products.push_back([=] {
    float keys[2][32];
    keys_of(keys);
    standin::multiply(out, kRegisters, keys, matrix_of(b), lane, accumulate);
  });
}

template <int kRegisters>
inline void wgmma(float (&d)[kRegisters], uint64_t a, uint64_t b, int accumulate) {
  __syncwarp();
  const int row = threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4;
  push_product(d, b, accumulate, [=](float (&keys)[2][32]) {
    matrix_of(a).row(row, keys[0]);
    matrix_of(a).row(row + 8, keys[1]);
  });
}

template <int kRegisters>
inline void wgmma(float (&d)[kRegisters], const uint32_t (&a)[4], uint64_t b, int accumulate) {
  machine.current->operand = a;
  __syncwarp();
  const uint32_t* quad[4];
  for (int t = 0; t < 4; ++t)
    quad[t] = static_cast<const uint32_t*>(machine.cta->fibers[threadIdx.x / 4 * 4 + t]->operand);
  __syncwarp();
  push_product(d, b, accumulate, [=](float (&keys)[2][32]) {
    for (int i = 0; i < 4; ++i)
      for (int t = 0; t < 4; ++t)
        for (int byte = 0; byte < 4; ++byte)
          keys[i % 2][16 * (i / 2) + 4 * t + byte] = standin::e4m3(quad[t][i] >> (8 * byte) & 0xFF);
  });
}

}  // namespace ptx
