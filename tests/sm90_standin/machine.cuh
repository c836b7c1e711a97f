// A machine that kernels run on as plain C++: what all stand-ins of the backend's PTX share.
//
// Every thread of a CTA is a fiber; where one waits, another runs, in random order. What the hardware does in its own
// time (TMA, cp.async, bulk stores, WGMMA) happens some while after it was asked for, or when it is waited for. CTAs of
// a grid, and of the grid behind it where that is a dependent launch, run by turns, some at a time. A wait that cannot
// end, a barrier left within a phase, lanes of a warp at different collectives, reads outside of registered memory, and
// reads and writes of what the grid in front may still write and read end the run with a sentence.
#pragma once

#include <setjmp.h>
#include <ucontext.h>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

// All of a kernel's shared memory is in one section, which is saved where another of its CTAs runs.
#define STANDIN_SHARED __attribute__((section("standin_shared")))

namespace standin {

struct Index {
  unsigned x = 0;
};

[[noreturn]] void fail(const std::string& what);

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
  uint32_t value[2][32] = {};  // by turns: who is late still reads the one while others write the other
  bool any[2] = {};
};

struct Fiber {
  jmp_buf place;
  ucontext_t start;
  std::unique_ptr<char[]> stack;
  Index thread;
  bool begun = false, done = false;
  const unsigned* awaited = nullptr;  // a counter that has to leave `value` before the fiber goes on
  unsigned value = 0;
  std::deque<std::function<void()>> copies;     // cp.async and what waits for it, in order
  std::vector<std::function<void()>> products;  // WGMMAs
  const void* operand = nullptr;                // of one whose first operand lies in registers
};

struct TensorMap {
  const unsigned char* address;
  long long rank, dims[5], strides[5], box[5];  // strides of all dimensions, the first 1
};

struct Range {
  char* first;
  char* last;
  long long writable;
};

struct Cta;

struct Kernel {  // of one library
  void (*entry)(void** arguments);
  unsigned char *shared, *shared_end;  // its section
  unsigned char* dynamic;
  int parameters, maps;
  const size_t* sizes;
  Cta* owner;  // whose shared memory lies in the section
};

struct Launch {
  Kernel* kernel;
  unsigned grid, threads, dynamic_bytes;
  bool dependent, cooperative;
  std::vector<std::vector<char>> arguments;
  std::vector<void*> pointers;
  std::vector<unsigned> order;  // of CTAs
  Launch* front = nullptr;      // the one before
  unsigned begun = 0, released = 0, ended = 0;
  std::map<const unsigned char*, std::vector<unsigned char>>
      seen;  // what TMA sees of a map's memory that is written to

  bool front_ended() const { return front == nullptr || front->ended == front->grid; }
};

struct Cta {
  Launch* launch = nullptr;
  Index block;
  std::vector<std::unique_ptr<Fiber>> fibers;
  std::vector<Fiber*> order;
  std::map<const void*, Barrier> barriers;
  std::vector<Meeting> warps;
  std::map<int, Meeting> named;
  std::deque<std::function<void()>> loads, stores;
  std::vector<unsigned char> image;  // of shared memory
  bool released = false;
  int idle = 0;
};

struct Machine {
  Fiber* current = nullptr;
  Cta* cta = nullptr;
  jmp_buf scheduler;
  std::vector<Range> memory;
  unsigned long long progress = 0;
  unsigned random = 1;

  unsigned next_random() {
    random ^= random << 13, random ^= random >> 17, random ^= random << 5;
    return random;
  }
};
extern Machine machine;

void yield();
void wait_for_change(const unsigned& counter);
// One more of `all` threads is at a meeting; true for the last.
bool arrive(Meeting& meeting, int all, int kind);
void meet(Meeting& meeting, int all, int kind);
void check_read(const void* pointer, size_t bytes);
void check_write(const void* pointer, size_t bytes);
void release_dependents();
void wait_for_front();
void publish_to_tma();
const unsigned char* seen_by_tma(const TensorMap& map);

// Swizzled over rows of `span` bytes: 16-byte chunks by the address bits from 7 on.
inline uint32_t swizzled(uint32_t address, int span) { return address ^ (address >> 7 & (span / 16 - 1)) << 4; }

float e4m3(unsigned char code);

struct Matrix {  // of e4m3 in shared memory, rows of `span` bytes swizzled over them
  const unsigned char* shared;
  uint32_t address;
  int span;

  void row(int number, float (&values)[32]) const;
};

// A lane's part of WGMMA: `keys` are its two rows of the first operand.
void multiply(float* d, int registers, const float (&keys)[2][32], const Matrix& pairs, int lane, bool accumulate);

inline Meeting& warp() { return machine.cta->warps[machine.current->thread.x / 32]; }
inline int lane() { return machine.current->thread.x % 32; }

// The values of all lanes of the warp, as words.
template <class T>
inline const uint32_t* exchange(T value, int kind, unsigned mask) {
  static_assert(sizeof(T) == 4);
  if (mask != ~0u) fail("a collective of some lanes");
  Meeting& meeting = warp();
  uint32_t (&values)[32] = meeting.value[meeting.generation % 2];
  std::memcpy(&values[lane()], &value, 4);
  meet(meeting, 32, kind);
  return values;
}

template <class T>
inline T word(uint32_t bits) {
  T value;
  std::memcpy(&value, &bits, 4);
  return value;
}

}  // namespace standin
