// A stand-in for the backend's ptx.cuh: the same functions on the CPU, so that a kernel written on them runs as plain
// C++.
//
// Every thread of a CTA is a fiber; where one waits, another runs, in random order. What the hardware does in its own
// time (TMA, cp.async, bulk stores, WGMMA) happens some while after it was asked for, or when it is waited for. A wait
// that cannot end, a barrier left within a phase, lanes of a warp at different collectives and reads outside of
// registered memory end the process with a sentence.
#pragma once

#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <vector>

using std::max;
using std::min;

#define __device__
#define __host__
#define __global__
#define __forceinline__ inline
#define __shared__
#define __grid_constant__
#define __align__(bytes) __attribute__((aligned(bytes)))
#define __launch_bounds__(...)

struct float4 {
  float x, y, z, w;
};

struct alignas(8) uint2 {
  unsigned x, y;
};
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};

alignas(1024) unsigned char raw[256 * 1024];  // a CTA's shared memory

namespace standin {

struct Index {
  unsigned x = 0;
};

[[noreturn]] inline void fail(const char* what) {
  std::fprintf(stderr, "stand-in: %s\n", what);
  std::fflush(stderr);
  std::_Exit(3);
}

struct Barrier {  // an mbarrier
  int expected = 0, pending = 0;
  long long bytes = 0;
  unsigned phase = 0;
  void settle() {
    if (pending < 0) fail("an mbarrier got an arrival too many");
    if (pending == 0 && bytes == 0) ++phase, pending = expected;
  }
};

struct Meeting {  // of the threads of a warp, or at a named barrier
  int here = 0;
  unsigned generation = 0;
  int kind = 0;
  unsigned long long value[32] = {};
};

struct Fiber {
  ucontext_t context;
  std::vector<char> stack;
  Index thread;
  bool done = false;
  const unsigned* awaited = nullptr;  // a counter that has to leave `value` before the fiber goes on
  unsigned value = 0;
  std::deque<std::function<void()>> copies;     // cp.async and what waits for it, in order
  std::vector<std::function<void()>> products;  // WGMMAs
  const void* operand = nullptr;                // of one whose first operand lies in registers
};

struct Range {
  const char* first;
  const char* last;
};

struct Machine {
  std::vector<std::unique_ptr<Fiber>> fibers;
  Fiber* current = nullptr;
  ucontext_t main;
  Index block, grid;
  std::map<const void*, Barrier> barriers;
  std::vector<Meeting> warps;
  std::map<int, Meeting> named;
  std::deque<std::function<void()>> loads, stores;
  std::vector<Range> readable;
  unsigned long long progress = 0;
  unsigned random = 1;

  unsigned next_random() {
    random ^= random << 13, random ^= random >> 17, random ^= random << 5;
    return random;
  }
};
inline Machine machine;

inline void yield() { swapcontext(&machine.current->context, &machine.main); }

inline void wait_for_change(const unsigned& counter) {
  Fiber& fiber = *machine.current;
  fiber.awaited = &counter, fiber.value = counter;
  yield();
  fiber.awaited = nullptr;
}

inline void meet(Meeting& meeting, int all, int kind) {
  if (meeting.here == 0) meeting.kind = kind;
  if (meeting.kind != kind) fail("threads meet at different places");
  ++machine.progress;
  const unsigned generation = meeting.generation;
  if (++meeting.here == all) {
    meeting.here = 0;
    ++meeting.generation;
    return;
  }
  while (meeting.generation == generation) wait_for_change(meeting.generation);
}

inline Meeting& warp() { return machine.warps[machine.current->thread.x / 32]; }

template <class T>
inline T exchange(T value, int kind, const std::function<T(const T*)>& choose) {
  static_assert(sizeof(T) == 4);
  Meeting& meeting = warp();
  std::memcpy(&meeting.value[machine.current->thread.x % 32], &value, 4);
  meet(meeting, 32, kind);
  T all[32];
  for (int i = 0; i < 32; ++i) std::memcpy(&all[i], &meeting.value[i], 4);
  const T found = choose(all);
  meet(meeting, 32, kind + 1);
  return found;
}

inline void check_read(const void* pointer, size_t bytes) {
  const char* p = static_cast<const char*>(pointer);
  for (const Range& range : machine.readable)
    if (p >= range.first && p + bytes <= range.last) return;
  fail("a read outside of the operands");
}

inline void launch_cta(unsigned threads, unsigned block, unsigned grid, const std::function<void()>& body) {
  static std::function<void()> run;
  run = body;
  machine.block.x = block, machine.grid.x = grid;
  machine.barriers.clear(), machine.named.clear();
  machine.warps.assign(threads / 32, Meeting());
  for (size_t i = 0; i < sizeof(raw); ++i) raw[i] = 0x7F;  // NaN, as e4m3
  while (machine.fibers.size() < threads) {
    machine.fibers.push_back(std::make_unique<Fiber>());
    machine.fibers.back()->stack.resize(128 * 1024);
  }
  for (unsigned t = 0; t < threads; ++t) {
    Fiber& fiber = *machine.fibers[t];
    fiber.thread.x = t, fiber.done = false, fiber.awaited = nullptr;
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = fiber.stack.data();
    fiber.context.uc_stack.ss_size = fiber.stack.size();
    fiber.context.uc_link = &machine.main;
    makecontext(&fiber.context, reinterpret_cast<void (*)()>(+[] {
      run();
      machine.current->done = true;
    }),
                0);
  }
  std::vector<Fiber*> order;
  for (unsigned t = 0; t < threads; ++t) order.push_back(machine.fibers[t].get());
  int idle = 0;
  while (true) {
    const unsigned long long before = machine.progress;
    if (machine.next_random() % 4 == 0)
      for (size_t i = order.size(); i > 1; --i) std::swap(order[i - 1], order[machine.next_random() % i]);
    bool alive = false;
    for (Fiber* fiber : order) {
      if (!fiber->done) {
        alive = true;
        if (fiber->awaited == nullptr || *fiber->awaited != fiber->value) {
          machine.current = fiber;
          swapcontext(&machine.main, &fiber->context);
          machine.progress += fiber->done;
        }
      }
      // What is done in its own time.
      while (!fiber->copies.empty() && machine.next_random() % 2) {
        fiber->copies.front()();
        fiber->copies.pop_front();
        ++machine.progress;
      }
    }
    while (!machine.loads.empty() && (idle > 0 || machine.next_random() % 3 == 0)) {
      const size_t which = machine.next_random() % machine.loads.size();
      machine.loads[which]();
      machine.loads.erase(machine.loads.begin() + which);
      ++machine.progress;
    }
    bool pending = !machine.loads.empty() || !machine.stores.empty();
    for (Fiber* fiber : order) pending |= !fiber->copies.empty();
    if (!alive) {
      if (pending) fail("the CTA ended before its copies");
      for (const auto& [place, barrier] : machine.barriers)
        if (barrier.pending != barrier.expected || barrier.bytes != 0) fail("an mbarrier ended within a phase");
      return;
    }
    idle = machine.progress == before ? idle + 1 : 0;
    if (idle > 50 && machine.loads.empty()) fail("every thread waits: a deadlock");
  }
}

}  // namespace standin

#define threadIdx (standin::machine.current->thread)
#define blockIdx (standin::machine.block)
#define gridDim (standin::machine.grid)

// ---- CUDA's own functions ----

template <class T>
inline T __ldg(const T* pointer) {
  standin::check_read(pointer, sizeof(T));
  return *pointer;
}
inline void __syncwarp() { standin::meet(standin::warp(), 32, 1); }
template <class T>
inline T __shfl_sync(unsigned, T value, int from) {
  return standin::exchange<T>(value, 10, [=](const T* all) { return all[from % 32]; });
}
template <class T>
inline T __shfl_up_sync(unsigned, T value, int by) {
  const int lane = threadIdx.x % 32;
  return standin::exchange<T>(value, 20, [=](const T* all) { return all[lane >= by ? lane - by : lane]; });
}
template <class T>
inline T __shfl_xor_sync(unsigned, T value, int mask) {
  const int lane = threadIdx.x % 32;
  return standin::exchange<T>(value, 30, [=](const T* all) { return all[lane ^ mask]; });
}
inline uint32_t __vmaxu2(uint32_t a, uint32_t b) { return max(a >> 16, b >> 16) << 16 | max(a & 0xFFFF, b & 0xFFFF); }
inline int __clz(int value) { return value == 0 ? 32 : __builtin_clz(value); }
inline uint32_t __umulhi(uint32_t a, uint32_t b) { return static_cast<uint32_t>((1ull * a * b) >> 32); }
inline float __saturatef(float value) { return value > 0.0f ? (value < 1.0f ? value : 1.0f) : 0.0f; }
inline float __int_as_float(int bits) {
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}
inline float __uint_as_float(uint32_t bits) { return __int_as_float(static_cast<int>(bits)); }
inline void __threadfence() {}

namespace ptx {

using standin::machine;

struct TensorMap {
  const unsigned char* address;
  long long rank, dims[5], strides[5], box[5];  // strides of all dimensions, the first 1
};

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
  const uint32_t before = *target;
  *target += value;
  return before;
}

// ---- mbarrier ----

inline void barrier_init(uint64_t* barrier, uint32_t arrivals) {
  const int count = static_cast<int>(arrivals);
  machine.barriers[barrier] = {count, count, 0, 0};
}
inline void barrier_init_fence() {}
inline standin::Barrier& barrier_at(const void* barrier) {
  const auto found = machine.barriers.find(barrier);
  if (found == machine.barriers.end()) standin::fail("an mbarrier that was not initialised");
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
  standin::meet(machine.named[kBarrier], kThreads, 100 + kThreads);
}

template <int kThreads>
inline void bar_sync(int barrier) {
  standin::meet(machine.named[barrier], kThreads, 100 + kThreads);
}

// ---- TMA ----

inline void prefetch_map(const TensorMap*) {}
inline uint64_t evict_first_policy() { return 0; }

// Swizzled over rows of `span` bytes: 16-byte chunks by the address bits from 7 on.
inline uint32_t swizzled(uint32_t address, int span) { return address ^ (address >> 7 & (span / 16 - 1)) << 4; }

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
  const std::vector<long long> from(start, start + 5);
  machine.loads.push_back([=] {
    long long at[5], bytes = 1;
    for (int d = 0; d < m.rank; ++d) bytes *= m.box[d];
    for (long long i = 0; i < bytes; ++i) {
      long long rest = i, offset = 0;
      bool inside = true;
      for (int d = 0; d < m.rank; ++d) {
        at[d] = from[d] + rest % m.box[d], rest /= m.box[d];
        inside &= at[d] >= 0 && at[d] < m.dims[d];
        offset += at[d] * m.strides[d];
      }
      if (inside) standin::check_read(m.address + offset, 1);
      raw[swizzled(base + static_cast<uint32_t>(i), static_cast<int>(m.dims[0]))] = inside ? m.address[offset] : 0;
    }
    complete(barrier, bytes);
  });
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
  machine.loads.push_back([=] {
    standin::check_read(source, bytes);
    std::memcpy(target, source, bytes);
    complete(barrier, bytes);
  });
}

inline void fence_async_proxy() {}
inline void bulk_store(void* target, const void* source, uint32_t bytes, uint64_t) {
  if (reinterpret_cast<uintptr_t>(target) % 16 || bytes % 16) standin::fail("a bulk store off a 16-byte boundary");
  machine.stores.push_back([=] { std::memcpy(target, source, bytes); });
}
inline void bulk_commit() {}
inline void bulk_wait_all() {
  for (const auto& store : machine.stores) store();
  machine.stores.clear();
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
