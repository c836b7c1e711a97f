// A stand-in for the backend's order_ptx.cuh on the CPU.
#pragma once

#include "ptx.cuh"

#define TOP_K_DEVICE inline

inline uint32_t shared_of(const void* pointer) {
  if (!is_shared(pointer)) standin::fail("an address of shared memory outside of it");
  return static_cast<uint32_t>(static_cast<const unsigned char*>(pointer) - __start_standin_shared);
}
inline uint32_t& shared_word(uint32_t address) {
  if (address % 4) standin::fail("a word off its boundary");
  return *reinterpret_cast<uint32_t*>(__start_standin_shared + address);
}
inline uint32_t shared_fetch_add(uint32_t address, uint32_t value) {
  uint32_t& word = shared_word(address);
  const uint32_t before = word;
  word += value;
  return before;
}
inline void shared_add(uint32_t address, uint32_t value) { shared_fetch_add(address, value); }
inline void shared_or(uint32_t address, uint32_t value) { shared_word(address) |= value; }

inline uint32_t warp_scan(uint32_t value) {
  const uint32_t* all = standin::exchange(value, 80, ~0u);
  uint32_t sum = 0;
  for (int i = 0; i <= standin::lane(); ++i) sum += all[i];
  return sum;
}
