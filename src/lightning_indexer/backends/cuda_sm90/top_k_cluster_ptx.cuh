// Clusters: the barrier, and reads of another CTA's shared memory.
#pragma once

#include "top_k_common.cuh"

namespace {

TOP_K_DEVICE uint32_t cluster_rank() {
  if constexpr (kCluster == 1) return 0;
  uint32_t rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

TOP_K_DEVICE void cluster_arrive() { asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory"); }
TOP_K_DEVICE void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }

TOP_K_DEVICE void cluster_sync() {
  if constexpr (kCluster == 1) return __syncthreads();
  cluster_arrive();
  cluster_wait();
}

// The address of what lies at `pointer` in the CTA of that rank.
TOP_K_DEVICE uint32_t remote(const void* pointer, uint32_t rank) {
  uint32_t address;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"(shared_of(pointer)), "r"(rank));
  return address;
}

TOP_K_DEVICE uint32_t remote_word(uint32_t address) {
  uint32_t value;
  asm volatile("ld.shared::cluster.u32 %0, [%1];" : "=r"(value) : "r"(address) : "memory");
  return value;
}

TOP_K_DEVICE uint64_t remote_pair(uint32_t address) {
  uint64_t value;
  asm volatile("ld.shared::cluster.u64 %0, [%1];" : "=l"(value) : "r"(address) : "memory");
  return value;
}

TOP_K_DEVICE uint4 remote_four(uint32_t address) {
  uint4 value;
  asm volatile("ld.shared::cluster.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
               : "r"(address)
               : "memory");
  return value;
}

}  // namespace
