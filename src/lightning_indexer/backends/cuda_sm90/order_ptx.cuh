// The PTX that selections are made of: words of shared memory, and the prefix sum of a warp.
#pragma once

#define TOP_K_DEVICE __device__ __forceinline__

using uint32_t = unsigned int;
using uint64_t = unsigned long long;

namespace {

TOP_K_DEVICE uint32_t shared_of(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

TOP_K_DEVICE void shared_add(uint32_t address, uint32_t value) {
  asm volatile("red.shared.add.u32 [%0], %1;" ::"r"(address), "r"(value) : "memory");
}

TOP_K_DEVICE void shared_or(uint32_t address, uint32_t value) {
  asm volatile("red.shared.or.b32 [%0], %1;" ::"r"(address), "r"(value) : "memory");
}

TOP_K_DEVICE uint32_t shared_fetch_add(uint32_t address, uint32_t value) {
  uint32_t before;
  asm volatile("atom.shared.add.u32 %0, [%1], %2;" : "=r"(before) : "r"(address), "r"(value) : "memory");
  return before;
}

TOP_K_DEVICE uint32_t warp_scan(uint32_t value) {  // inclusive
#pragma unroll
  for (int step = 1; step < 32; step <<= 1)
    asm volatile(
        "{\n"
        ".reg .pred p;\n"
        ".reg .b32 t;\n"
        "shfl.sync.up.b32 t|p, %0, %1, 0, 0xffffffff;\n"
        "@p add.u32 %0, %0, t;\n"
        "}"
        : "+r"(value)
        : "r"(step));
  return value;
}

}  // namespace
