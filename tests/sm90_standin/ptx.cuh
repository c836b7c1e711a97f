// A stand-in for the backend's ptx.cuh: the same functions on the CPU, and CUDA's own words, so that a kernel written
// on them runs as plain C++ on the machine of machine.cuh.
#pragma once

#include "machine.cuh"

// Of mixed types, as CUDA's: int and unsigned are compared as unsigned.
template <class A, class B>
inline std::common_type_t<A, B> min(A a, B b) {
  const std::common_type_t<A, B> x = a, y = b;
  return y < x ? y : x;
}
template <class A, class B>
inline std::common_type_t<A, B> max(A a, B b) {
  const std::common_type_t<A, B> x = a, y = b;
  return x < y ? y : x;
}

#define __device__
#define __host__
#define __global__
#define __forceinline__ inline
#define __shared__
#define __grid_constant__
#define __align__(bytes) __attribute__((aligned(bytes)))
#define __launch_bounds__(...)

struct alignas(16) float4 {
  float x, y, z, w;
};
struct alignas(8) int2 {
  int x, y;
};
struct alignas(16) int4 {
  int x, y, z, w;
};
struct alignas(8) uint2 {
  unsigned x, y;
};
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline int2 make_int2(int x, int y) { return {x, y}; }
inline uint2 make_uint2(uint32_t x, uint32_t y) { return {x, y}; }
inline uint4 make_uint4(uint32_t x, uint32_t y, uint32_t z, uint32_t w) { return {x, y, z, w}; }

// A CTA's dynamic shared memory, and bytes that nothing may touch.
alignas(1024) unsigned char raw[229 * 1024] STANDIN_SHARED;

#define threadIdx (standin::machine.current->thread)
#define blockIdx (standin::machine.cta->block)
#define gridDim (standin::Index{standin::machine.cta->launch->grid})
#define blockDim (standin::Index{standin::machine.cta->launch->threads})

// ---- CUDA's own functions ----

template <class T>
inline T __ldg(const T* pointer) {
  standin::check_read(pointer, sizeof(T));
  return *pointer;
}
template <class T>
inline T __ldcg(const T* pointer) {
  return __ldg(pointer);
}
template <class T>
inline T __ldcs(const T* pointer) {
  return __ldg(pointer);
}

// The first and one past the last byte of this kernel's shared memory.
extern "C" unsigned char __start_standin_shared[] __attribute__((visibility("hidden")));
extern "C" unsigned char __stop_standin_shared[] __attribute__((visibility("hidden")));
inline bool is_shared(const void* pointer) {
  return pointer >= __start_standin_shared && pointer < __stop_standin_shared;
}

inline int atomicAdd(int* target, int value) {
  if (!is_shared(target)) standin::check_write(target, 4);
  const int before = *target;
  *target += value;
  return before;
}

inline void __syncwarp() { standin::meet(standin::warp(), 32, 1); }
inline void __syncthreads() {
  const int threads = blockDim.x;
  standin::meet(standin::machine.cta->named[0], threads, 100 + threads);
}
inline int __syncthreads_or(int value) {
  standin::Meeting& meeting = standin::machine.cta->named[0];
  bool& any = meeting.any[meeting.generation % 2];
  any = (meeting.here > 0 && any) || value;
  __syncthreads();
  return any;
}
template <class T>
inline T __shfl_sync(unsigned mask, T value, int from) {
  return standin::word<T>(standin::exchange(value, 10, mask)[from % 32]);
}
template <class T>
inline T __shfl_up_sync(unsigned mask, T value, int by) {
  const int lane = standin::lane();
  return standin::word<T>(standin::exchange(value, 20, mask)[lane >= by ? lane - by : lane]);
}
template <class T>
inline T __shfl_xor_sync(unsigned mask, T value, int with) {
  const int lane = standin::lane();
  return standin::word<T>(standin::exchange(value, 30, mask)[lane ^ with]);
}
inline unsigned __ballot_sync(unsigned mask, int value) {
  const uint32_t* all = standin::exchange(value, 40, mask);
  unsigned found = 0;
  for (int i = 0; i < 32; ++i) found |= (all[i] != 0) << i;
  return found;
}
template <class T>
inline T __reduce_add_sync(unsigned mask, T value) {
  const uint32_t* all = standin::exchange(value, 50, mask);
  uint32_t sum = 0;
  for (int i = 0; i < 32; ++i) sum += all[i];
  return static_cast<T>(sum);
}
template <class T>
inline T __reduce_min_sync(unsigned mask, T value) {
  const uint32_t* all = standin::exchange(value, 60, mask);
  for (int i = 0; i < 32; ++i) value = min(value, static_cast<T>(all[i]));
  return value;
}
template <class T>
inline T __reduce_max_sync(unsigned mask, T value) {
  const uint32_t* all = standin::exchange(value, 70, mask);
  for (int i = 0; i < 32; ++i) value = max(value, static_cast<T>(all[i]));
  return value;
}
inline uint32_t __vmaxu2(uint32_t a, uint32_t b) { return max(a >> 16, b >> 16) << 16 | max(a & 0xFFFF, b & 0xFFFF); }
inline int __clz(int value) { return value == 0 ? 32 : __builtin_clz(value); }
inline uint32_t __umulhi(uint32_t a, uint32_t b) { return static_cast<uint32_t>((1ull * a * b) >> 32); }
inline float __saturatef(float value) { return value > 0.0f ? (value < 1.0f ? value : 1.0f) : 0.0f; }
inline float __int_as_float(int bits) { return standin::word<float>(bits); }
inline float __uint_as_float(uint32_t bits) { return standin::word<float>(bits); }
inline int __float_as_int(float value) {
  int bits;
  std::memcpy(&bits, &value, 4);
  return bits;
}
inline uint32_t __float_as_uint(float value) { return __float_as_int(value); }
inline int __popc(uint32_t value) { return __builtin_popcount(value); }
inline int __ffs(uint32_t value) { return __builtin_ffs(static_cast<int>(value)); }
inline void __threadfence() {}

namespace ptx {

using standin::machine;

using standin::TensorMap;

inline uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(static_cast<const unsigned char*>(pointer) - raw);
}
inline void trap() { standin::fail("trap"); }
inline unsigned short to_bfloat16(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  if (value != value) return 0x7FFF;
  return static_cast<unsigned short>((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
}
inline uint32_t permute(uint32_t x, uint32_t y, uint32_t selector) {
  uint32_t found = 0;
  for (int i = 0; i < 4; ++i) {
    const int from = selector >> (4 * i) & 15;
    if (from > 7) standin::fail("a selector that asks for signs");
    found |= ((from < 4 ? x : y) >> (8 * (from % 4)) & 0xFF) << (8 * i);
  }
  return found;
}
inline void keep(uint32_t&) {}
inline uint2 load_shared_8(uint32_t address) {
  uint2 words;
  std::memcpy(&words, raw + address, 8);
  return words;
}
inline uint32_t to_e4m3_code(float value) {
  // In units of 2^-9 below 2^-6, else of an eighth of the value's power of two; 448 at most.
  const float size = std::fabs(value);
  int exponent;
  std::frexp(size, &exponent);
  const int step = size == 0.0f ? -9 : max(exponent - 4, -9);
  const int units = static_cast<int>(std::nearbyint(std::ldexp(size, -step)));
  const uint32_t code = units + (step + 9) * 8;  // 16 units carry into the exponent
  return min(code, 0x7Eu) | (std::signbit(value) ? 0x80 : 0);
}
inline uint32_t to_e4m3(float high, float low) { return to_e4m3_code(high) << 8 | to_e4m3_code(low); }
inline uint32_t atomic_add(uint32_t* target, uint32_t value) {
  standin::check_write(target, 4);
  const uint32_t before = *target;
  *target += value;
  return before;
}

inline void add_release(uint32_t* target) {
  atomic_add(target, 1);
  ++machine.progress;
}
inline uint32_t load_acquire(const uint32_t* source) {
  standin::check_read(source, 4);
  const uint32_t value = *source;
  standin::yield();  // its callers ask again and again
  return value;
}

// ---- mbarrier ----

constexpr uint64_t kBarrierWord = 0x6D62617272696572;  // what lies in shared memory for one

inline void barrier_init(uint64_t* barrier, uint32_t arrivals) {
  const int count = static_cast<int>(arrivals);
  machine.cta->barriers[barrier] = {count, count, 0, 0};
  *barrier = kBarrierWord;
}
inline void barrier_init_fence() {}
inline standin::Barrier& barrier_at(const uint64_t* barrier) {
  const auto found = machine.cta->barriers.find(barrier);
  if (*barrier != kBarrierWord) standin::fail("something was written where an mbarrier lies");
  if (found == machine.cta->barriers.end()) standin::fail("an mbarrier that was not initialised");
  return found->second;
}
inline void barrier_arrive(uint64_t* barrier) {
  ++machine.progress;
  standin::Barrier& b = barrier_at(barrier);
  --b.pending, b.settle();
}
inline void barrier_arrive_expect(uint64_t* barrier, uint32_t bytes) {
  ++machine.progress;
  standin::Barrier& b = barrier_at(barrier);
  b.bytes += bytes, --b.pending, b.settle();
}
inline bool barrier_test(uint64_t* barrier, uint32_t parity) {
  if (machine.next_random() % 3 == 0) standin::yield();
  return (barrier_at(barrier).phase & 1) != parity;
}
inline void barrier_wait(uint64_t* barrier, uint32_t parity) {
  const standin::Barrier& b = barrier_at(barrier);
  while ((b.phase & 1) == parity) standin::wait_for_change(b.phase);
}

// ---- named barriers ----

template <int kBarrier, int kThreads>
inline void bar_sync() {
  standin::meet(machine.cta->named[kBarrier], kThreads, 100 + kThreads);
}

template <int kThreads>
inline void bar_sync(int barrier) {
  standin::meet(machine.cta->named[barrier], kThreads, 100 + kThreads);
}

template <int kBarrier, int kThreads>
inline void bar_arrive() {
  standin::arrive(machine.cta->named[kBarrier], kThreads, 100 + kThreads);
}

// ---- TMA ----

inline void prefetch_map(const TensorMap*) {}
inline uint64_t evict_first_policy() { return 0; }

inline void complete(uint64_t* barrier, long long bytes) {
  standin::Barrier& b = barrier_at(barrier);
  b.bytes -= bytes;
  if (b.bytes < 0) standin::fail("an mbarrier got more bytes than it expects");
  b.settle();
}

inline void load(void* target, const TensorMap* map, uint64_t* barrier, const long long (&start)[5]) {
  const TensorMap m = *map;
  const uint32_t base = shared_address(target);
  if (base % 128) standin::fail("a TMA target off a 128-byte boundary");
  if (m.box[0] % 16 || m.dims[0] != m.box[0] || start[0] != 0) standin::fail("a TMA box of parts of rows");
  const std::vector<long long> from(start, start + 5);
  machine.cta->loads.push_back([=] {
    const unsigned char* const seen = standin::seen_by_tma(m);
    const int span = static_cast<int>(m.dims[0]);
    long long rows = 1;
    for (int d = 1; d < m.rank; ++d) rows *= m.box[d];
    for (long long row = 0; row < rows; ++row) {
      long long rest = row, offset = 0;
      bool inside = true;
      for (int d = 1; d < m.rank; ++d) {
        const long long at = from[d] + rest % m.box[d];
        rest /= m.box[d];
        inside &= at >= 0 && at < m.dims[d];
        offset += at * m.strides[d];
      }
      if (inside) standin::check_read(m.address + offset, span);
      for (int i = 0; i < span; i += 16) {
        unsigned char* const to = raw + standin::swizzled(base + static_cast<uint32_t>(row * span + i), span);
        inside ? std::memcpy(to, seen + offset + i, 16) : std::memset(to, 0, 16);
      }
    }
    complete(barrier, rows * span);
  });
}
inline void load_2d(void* target, const TensorMap* map, uint64_t* barrier, int x0, int x1) {
  load(target, map, barrier, {x0, x1, 0, 0, 0});
}
inline void prefetch_2d(const TensorMap*, int, int) {}
inline void prefetch(const void* source) { standin::check_read(source, 1); }
inline void bulk_prefetch(const void* source, uint32_t bytes) {
  if (reinterpret_cast<uintptr_t>(source) % 16 || bytes % 16) standin::fail("a bulk prefetch off a 16-byte boundary");
  standin::check_read(source, bytes);
}
inline void load_3d(void* target, const TensorMap* map, uint64_t* barrier, int x0, int x1, int x2, uint64_t) {
  load(target, map, barrier, {x0, x1, x2, 0, 0});
}
inline void load_5d(void* target, const TensorMap* map, uint64_t* barrier, int x0, int x1, int x2, int x3, int x4) {
  load(target, map, barrier, {x0, x1, x2, x3, x4});
}
inline void bulk_load(void* target, const void* source, uint32_t bytes, uint64_t* barrier, uint64_t) {
  if (shared_address(target) % 16 || reinterpret_cast<uintptr_t>(source) % 16 || bytes % 16)
    standin::fail("a bulk copy off a 16-byte boundary");
  machine.cta->loads.push_back([=] {
    standin::check_read(source, bytes);
    std::memcpy(target, source, bytes);
    complete(barrier, bytes);
  });
}

inline void fence_async_proxy() {}
inline void fence_async_proxy_everywhere() { standin::publish_to_tma(); }
inline void bulk_store(void* target, const void* source, uint32_t bytes, uint64_t) {
  if (reinterpret_cast<uintptr_t>(target) % 16 || bytes % 16) standin::fail("a bulk store off a 16-byte boundary");
  machine.cta->stores.push_back([=] { std::memcpy(target, source, bytes); });
}
inline void bulk_commit() {}
inline void bulk_wait_all() {
  for (const auto& store : machine.cta->stores) store();
  machine.cta->stores.clear();
}

// ---- cp.async ----

inline void copy_4(void* target, const void* source) {
  machine.current->copies.push_back([=] {
    standin::check_read(source, 4);
    std::memcpy(target, source, 4);
  });
}
inline void barrier_arrive_copies(uint64_t* barrier) {
  machine.current->copies.push_back([=] { barrier_arrive(barrier); });
}

template <int kRegisters>
inline void setmaxnreg_dec() {}
template <int kRegisters>
inline void setmaxnreg_inc() {}

}  // namespace ptx
