// Scores as integers in their order, and the few words of shared memory and of a warp that selections are made of.
#pragma once

#define TOP_K_DEVICE __device__ __forceinline__

using uint32_t = unsigned int;
using uint64_t = unsigned long long;

namespace {

constexpr uint32_t kFull = 0xffffffffu;
constexpr uint32_t kKeyNegInf = 0x007fffffu;
constexpr uint32_t kKeyPosInf = 0xff800000u;

TOP_K_DEVICE float pos_inf() { return __uint_as_float(0x7f800000u); }
TOP_K_DEVICE float neg_inf() { return __uint_as_float(0xff800000u); }

// 1 and more in the order of scores, -0 as +0; every NaN is 0.
TOP_K_DEVICE uint32_t key_of(float score) {
  const uint32_t bits = __float_as_uint(score + 0.0f);
  const uint32_t key = bits ^ (static_cast<uint32_t>(static_cast<int>(bits) >> 31) | 0x80000000u);
  return score != score ? 0u : key;
}

TOP_K_DEVICE float score_of(uint32_t key) { return __uint_as_float((key & 0x80000000u) ? (key ^ 0x80000000u) : ~key); }

// ---- shared memory ----

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
