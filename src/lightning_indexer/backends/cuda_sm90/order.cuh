// Scores as integers in their order.
#pragma once

#include "order_ptx.cuh"

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

}  // namespace
