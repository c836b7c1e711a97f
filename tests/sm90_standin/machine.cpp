// The scheduler: launches in the order of a stream, their CTAs, and the threads of those.
#include "machine.cuh"

namespace standin {

Machine machine;

namespace {

constexpr size_t kStack = 128 * 1024;
constexpr unsigned char kPoison = 0x7F;  // NaN, as e4m3

struct Failure {
  std::string what;
};
std::string failed;  // within a fiber
std::string message;

std::deque<std::unique_ptr<Launch>> launches;
std::vector<std::unique_ptr<Cta>> live;
std::vector<std::unique_ptr<Fiber>> spare;

void first_step() {
  const Launch& launch = *machine.cta->launch;
  launch.kernel->entry(const_cast<void**>(launch.pointers.data()));
  machine.current->done = true;
  _longjmp(machine.scheduler, 1);
}

void resume(Fiber& fiber) {
  machine.current = &fiber;
  if (_setjmp(machine.scheduler) == 0) {
    if (fiber.begun) _longjmp(fiber.place, 1);
    fiber.begun = true;
    setcontext(&fiber.start);
  }
  machine.current = nullptr;
  if (!failed.empty()) throw Failure{failed};
}

std::unique_ptr<Fiber> new_fiber(unsigned thread) {
  std::unique_ptr<Fiber> fiber;
  if (spare.empty()) {
    fiber = std::make_unique<Fiber>();
    fiber->stack.reset(new char[kStack]);
  } else {
    fiber = std::move(spare.back());
    spare.pop_back();
  }
  fiber->thread.x = thread, fiber->begun = fiber->done = false, fiber->awaited = nullptr;
  fiber->copies.clear(), fiber->products.clear();
  getcontext(&fiber->start);
  fiber->start.uc_stack.ss_sp = fiber->stack.get();
  fiber->start.uc_stack.ss_size = kStack;
  fiber->start.uc_link = nullptr;
  makecontext(&fiber->start, first_step, 0);
  return fiber;
}

template <class T>
void shuffle(std::vector<T>& values) {
  for (size_t i = values.size(); i > 1; --i) std::swap(values[i - 1], values[machine.next_random() % i]);
}

const Range* range_of(const void* pointer, size_t bytes) {
  const char* p = static_cast<const char*>(pointer);
  for (const Range& range : machine.memory)
    if (p >= range.first && p + bytes <= range.last) return &range;
  return nullptr;
}

// Of the maps of memory that is written to, what lies there now.
void see(Launch& launch) {
  for (int i = 0; i < launch.kernel->maps; ++i) {
    const TensorMap& map = *static_cast<const TensorMap*>(launch.pointers[i]);
    long long bytes = 1;
    for (int d = 0; d < map.rank; ++d) bytes += (map.dims[d] - 1) * map.strides[d];
    const Range* range = range_of(map.address, bytes);
    if (range == nullptr) throw Failure{"a tensor map of memory outside of the operands"};
    if (range->writable) launch.seen[map.address].assign(map.address, map.address + bytes);
  }
}

void begin_cta(Launch& launch) {
  if (launch.begun == 0) see(launch);
  auto cta = std::make_unique<Cta>();
  cta->launch = &launch;
  cta->block.x = launch.order[launch.begun++];
  cta->warps.resize(launch.threads / 32);
  for (unsigned t = 0; t < launch.threads; ++t) {
    cta->fibers.push_back(new_fiber(t));
    cta->order.push_back(cta->fibers.back().get());
  }
  live.push_back(std::move(cta));
}

bool may_begin(const Launch& launch, size_t number) {
  if (launch.begun == launch.grid) return false;
  for (size_t i = 0; i + 1 < number; ++i)
    if (!launch.dependent && launches[i]->ended < launches[i]->grid) return false;
  if (launch.front_ended()) return true;
  return launch.dependent && launch.front->released == launch.front->grid;
}

void release(Cta& cta) {
  if (!cta.released) cta.released = true, ++cta.launch->released;
}

void bring_shared(Cta& cta) {
  Kernel& kernel = *cta.launch->kernel;
  if (kernel.owner == &cta) return;
  const size_t size = kernel.shared_end - kernel.shared;
  if (kernel.owner != nullptr) kernel.owner->image.assign(kernel.shared, kernel.shared_end);
  if (cta.image.empty())
    std::memset(kernel.shared, kPoison, size);
  else
    std::memcpy(kernel.shared, cta.image.data(), size);
  kernel.owner = &cta;
}

void end_cta(Cta& cta) {
  Launch& launch = *cta.launch;
  bool pending = !cta.loads.empty() || !cta.stores.empty();
  for (const auto& fiber : cta.fibers) pending |= !fiber->copies.empty();
  if (pending) throw Failure{"the CTA ended before its copies"};
  for (const auto& [place, barrier] : cta.barriers)
    if (barrier.pending != barrier.expected || barrier.bytes != 0) throw Failure{"an mbarrier ended within a phase"};
  // What a CTA asks for lies at the start of the room for it.
  const Kernel& kernel = *launch.kernel;
  for (size_t i = 0; i < 64; ++i)
    if (kernel.dynamic[launch.dynamic_bytes + i] != kPoison) throw Failure{"a write behind the shared memory of a CTA"};
  release(cta);
  ++launch.ended;
  ++machine.progress;
  launch.kernel->owner = nullptr;
  for (auto& fiber : cta.fibers) spare.push_back(std::move(fiber));
}

// Some steps of a CTA: until its threads wait for others, or by chance earlier. True: it has ended.
bool run_cta(Cta& cta) {
  machine.cta = &cta;
  bring_shared(cta);
  while (true) {
    const unsigned long long before = machine.progress;
    if (machine.next_random() % 4 == 0) shuffle(cta.order);
    bool alive = false;
    for (Fiber* fiber : cta.order) {
      if (!fiber->done) {
        alive = true;
        if (fiber->awaited == nullptr || *fiber->awaited != fiber->value) {
          resume(*fiber);
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
    while (!cta.loads.empty() && (cta.idle > 0 || machine.next_random() % 3 == 0)) {
      const size_t which = machine.next_random() % cta.loads.size();
      cta.loads[which]();
      cta.loads.erase(cta.loads.begin() + which);
      ++machine.progress;
    }
    if (!alive) {
      end_cta(cta);
      return true;
    }
    cta.idle = machine.progress == before ? cta.idle + 1 : 0;
    if ((cta.idle > 1 && cta.loads.empty()) || machine.next_random() % 256 == 0) return false;
  }
}

// The same; what it writes while the grid in front runs ends the run.
bool run_checked(Cta& cta) {
  if (cta.launch->front_ended()) return run_cta(cta);
  std::vector<std::vector<char>> before;
  for (const Range& range : machine.memory)
    if (range.writable) before.emplace_back(range.first, range.last);
  const bool ended = run_cta(cta);
  size_t i = 0;
  for (const Range& range : machine.memory) {
    if (!range.writable) continue;
    const std::vector<char>& was = before[i++];
    if (!std::equal(was.begin(), was.end(), range.first)) throw Failure{"a write while the grid in front runs"};
  }
  return ended;
}

void run_all() {
  const size_t most = 1 + machine.next_random() % 6;  // CTAs at a time, beside those of whole grids
  const bool eager = machine.next_random() % 4 != 0;  // CTAs of the grid behind begin as soon as they may
  int idle = 0;
  while (true) {
    const unsigned long long before = machine.progress;
    for (size_t i = 0; i < launches.size(); ++i) {
      Launch& launch = *launches[i];
      while (may_begin(launch, i) &&
             (launch.cooperative || live.size() < most || (i > 0 && eager && live.size() < 8))) {
        begin_cta(launch);
        ++machine.progress;
      }
    }
    if (live.empty()) return;
    shuffle(live);
    for (size_t i = 0; i < live.size();) {
      if (run_checked(*live[i]))
        live.erase(live.begin() + i);
      else
        ++i;
    }
    idle = machine.progress == before ? idle + 1 : 0;
    if (idle > 50) throw Failure{"every thread waits: a deadlock"};
  }
}

}  // namespace

void fail(const std::string& what) {
  if (machine.current == nullptr) throw Failure{what};
  failed = what;
  _longjmp(machine.scheduler, 1);
}

void yield() {
  if (_setjmp(machine.current->place) == 0) _longjmp(machine.scheduler, 1);
}

void wait_for_change(const unsigned& counter) {
  Fiber& fiber = *machine.current;
  fiber.awaited = &counter, fiber.value = counter;
  yield();
  machine.current->awaited = nullptr;
}

bool arrive(Meeting& meeting, int all, int kind) {
  if (meeting.here == 0) meeting.kind = kind;
  if (meeting.kind != kind) fail("threads meet at different places");
  ++machine.progress;
  if (++meeting.here < all) return false;
  meeting.here = 0;
  ++meeting.generation;
  return true;
}

void meet(Meeting& meeting, int all, int kind) {
  const unsigned generation = meeting.generation;
  if (arrive(meeting, all, kind)) return;
  while (meeting.generation == generation) wait_for_change(meeting.generation);
}

void check_read(const void* pointer, size_t bytes) {
  const Range* range = range_of(pointer, bytes);
  if (range == nullptr) fail("a read outside of the operands");
  if (range->writable && !machine.cta->launch->front_ended()) fail("a read of what the grid in front may write");
}

void check_write(const void* pointer, size_t bytes) {
  const Range* range = range_of(pointer, bytes);
  if (range == nullptr || !range->writable) fail("a write outside of the results");
  if (!machine.cta->launch->front_ended()) fail("a write while the grid in front runs");
}

void release_dependents() { release(*machine.cta); }

void wait_for_front() {
  Launch& launch = *machine.cta->launch;
  while (!launch.front_ended()) wait_for_change(launch.front->ended);
}

void publish_to_tma() {
  for (auto& [address, bytes] : machine.cta->launch->seen) std::memcpy(bytes.data(), address, bytes.size());
}

const unsigned char* seen_by_tma(const TensorMap& map) {
  const auto found = machine.cta->launch->seen.find(map.address);
  return found == machine.cta->launch->seen.end() ? map.address : found->second.data();
}

namespace {

struct Codes {
  float value[256];

  Codes() {
    for (int i = 0; i < 256; ++i) {
      const int exponent = i >> 3 & 15, mantissa = i & 7;
      const float size = exponent == 0 ? std::ldexp(mantissa, -9) : std::ldexp(8 + mantissa, exponent - 10);
      value[i] = (i & 127) == 127 ? NAN : i & 128 ? -size : size;
    }
  }
};
const Codes codes;

}  // namespace

float e4m3(unsigned char code) { return codes.value[code]; }

void Matrix::row(int number, float (&values)[32]) const {
  for (int chunk = 0; chunk < 32; chunk += 16) {
    const unsigned char* bytes = shared + swizzled(address + number * span + chunk, span);
    for (int k = 0; k < 16; ++k) values[chunk + k] = codes.value[bytes[k]];
  }
}

void multiply(float* d, int registers, const float (&keys)[2][32], const Matrix& pairs, int lane, bool accumulate) {
  float pair[32];
  for (int j = 0; j < registers / 4; ++j) {
    for (int e = 0; e < 2; ++e) {
      pairs.row(8 * j + lane % 4 * 2 + e, pair);
      float sum[2] = {};
      for (int k = 0; k < 32; ++k) sum[0] += keys[0][k] * pair[k], sum[1] += keys[1][k] * pair[k];
      for (int half = 0; half < 2; ++half) {
        float& target = d[4 * j + 2 * half + e];
        target = accumulate ? target + sum[half] : sum[half];
      }
    }
  }
}

}  // namespace standin

using namespace standin;

extern "C" void standin_launch(Kernel* kernel, unsigned grid, unsigned threads, unsigned dynamic_bytes, int dependent,
                               int cooperative, void** arguments) {
  auto launch = std::make_unique<Launch>();
  launch->kernel = kernel, launch->grid = grid, launch->threads = threads, launch->dynamic_bytes = dynamic_bytes;
  launch->dependent = dependent, launch->cooperative = cooperative;
  for (int i = 0; i < kernel->parameters; ++i) {
    const char* bytes = static_cast<const char*>(arguments[i]);
    launch->arguments.emplace_back(bytes, bytes + kernel->sizes[i]);
  }
  for (auto& argument : launch->arguments) launch->pointers.push_back(argument.data());
  for (unsigned i = 0; i < grid; ++i) launch->order.push_back(i);
  if (!launches.empty()) launch->front = launches.back().get();
  launches.push_back(std::move(launch));
}

// Runs what has been launched. Null, or what went wrong.
extern "C" const char* standin_synchronize(const Range* memory, int ranges, unsigned seed) {
  machine.memory.assign(memory, memory + ranges);
  machine.random = seed * 2654435761u | 1;
  failed.clear(), message.clear();
  for (auto& launch : launches) shuffle(launch->order);
  try {
    run_all();
  } catch (const Failure& failure) {
    message = failure.what;
  }
  for (auto& launch : launches) launch->kernel->owner = nullptr;
  live.clear();
  launches.clear();
  machine.current = nullptr, machine.cta = nullptr;
  return message.empty() ? nullptr : message.c_str();
}
