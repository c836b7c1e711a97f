// What all forms of top_k.cuh share: scores and keys, a row's window, block scans, histograms, and the output.
#pragma once

#include "order.cuh"
#include "top_k_plan.cuh"

namespace {

constexpr float kMagic = 8388608.0f;  // 2^23: a sum in [2^23, 2^24) holds an integer in its low bits
constexpr uint32_t kMagicBits = 0x4b000000u;

// ---- scores ----

// The total order as one number: larger comes first.
TOP_K_DEVICE uint64_t order_of(float score, uint32_t position) {
  return (static_cast<uint64_t>(key_of(score)) << 32) | (kTiesLarger ? position : ~position);
}

TOP_K_DEVICE uint32_t position_of(uint64_t order) {
  const uint32_t low = static_cast<uint32_t>(order);
  return kTiesLarger ? low : ~low;
}

TOP_K_DEVICE uint32_t word_of(const uint4& vector, int i) {
  return i == 0 ? vector.x : i == 1 ? vector.y : i == 2 ? vector.z : vector.w;
}

// Score c of a vector.
TOP_K_DEVICE float score_in(const uint4& vector, int c) {
  if constexpr (kDtype == kFloat32) return __uint_as_float(word_of(vector, c));
  const uint32_t word = word_of(vector, c >> 1);
  if constexpr (kDtype == kBfloat16) return __uint_as_float((c & 1) ? word & 0xffff0000u : word << 16);
  const unsigned short half = static_cast<unsigned short>((c & 1) ? word >> 16 : word);
  float score;
  asm("cvt.f32.f16 %0, %1;" : "=f"(score) : "h"(half));
  return score;
}

TOP_K_DEVICE uint4 no_numbers() {
  constexpr uint32_t word = kDtype == kFloat32 ? 0x7fffffffu : 0x7fff7fffu;
  return make_uint4(word, word, word, word);
}

// ---- shared memory ----

TOP_K_DEVICE void clear(uint32_t* words, int count) {  // a multiple of four
  for (int i = threadIdx.x; i < count / 4; i += kThreads) reinterpret_cast<uint4*>(words)[i] = make_uint4(0, 0, 0, 0);
}

// A warp's number, read again from where it lies in shared memory: ptxas does not know that it is the same, and so
// keeps no predicates from use to use.
TOP_K_DEVICE uint32_t fresh(const uint32_t* slot) {
  uint32_t value;
  asm volatile("ld.volatile.shared.u32 %0, [%1];" : "=r"(value) : "r"(shared_of(slot)) : "memory");
  return value;
}

// ---- a row ----

// Positions below count from the 16-byte boundary at or before the row's first score, so that vectors are aligned
// whatever the row's address is; `shift` scores lie between the two.
struct Window {
  const uint4* vectors;
  uint32_t shift, start, end;   // scores
  uint32_t cover_lo, cover_hi;  // vectors that hold a score of the window
  uint32_t full_lo, full_hi;    // vectors that hold nothing else

  TOP_K_DEVICE uint32_t length() const { return end - start; }

  TOP_K_DEVICE uint4 load(uint32_t vector) const {
    uint4 got;
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(got.x), "=r"(got.y), "=r"(got.z), "=r"(got.w)
                 : "l"(vectors + vector));
    return got;
  }

  TOP_K_DEVICE float score(uint32_t position) const {
    if constexpr (kDtype == kFloat32) return __ldg(reinterpret_cast<const float*>(vectors) + position);
    const unsigned short half = __ldg(reinterpret_cast<const unsigned short*>(vectors) + position);
    if constexpr (kDtype == kBfloat16) return __uint_as_float(static_cast<uint32_t>(half) << 16);
    float score;
    asm("cvt.f32.f16 %0, %1;" : "=f"(score) : "h"(half));
    return score;
  }

  // Brings the scores outside full vectors nearer.
  TOP_K_DEVICE void prefetch_loose() const {
    if (threadIdx.x >= 2) return;
    const uint4* place = vectors + (threadIdx.x ? cover_hi - 1 : cover_lo);
    asm volatile("prefetch.global.L2 [%0];" ::"l"(place));
  }

  // NaN for the scores of a vector that lie outside the window.
  TOP_K_DEVICE uint4 mask(const uint4& got, uint32_t vector) const {
    uint32_t words[4] = {got.x, got.y, got.z, got.w};
#pragma unroll
    for (int c = 0; c < kPack; ++c) {
      const uint32_t position = vector * kPack + c;
      if (position >= start && position < end) continue;
      if constexpr (kDtype == kFloat32)
        words[c] = 0x7fffffffu;
      else
        words[c >> 1] |= (c & 1) ? 0x7fff0000u : 0x7fffu;
    }
    return make_uint4(words[0], words[1], words[2], words[3]);
  }

  TOP_K_DEVICE bool partial(uint32_t vector) const { return vector < full_lo || vector >= full_hi; }

  // The 0 to 2 * (kPack - 1) scores outside full vectors: their number, and position i of them.
  TOP_K_DEVICE uint32_t loose() const { return head() + end - min(full_hi * kPack, end); }
  TOP_K_DEVICE uint32_t loose_position(uint32_t i) const {
    return i < head() ? start + i : full_hi * kPack + i - head();
  }
  TOP_K_DEVICE uint32_t head() const { return min(full_lo * kPack, end) - start; }
};

TOP_K_DEVICE const uint4* row_vectors(const Arguments& a, int row, uint32_t& shift) {
  constexpr int bytes = kDtype == kFloat32 ? 4 : 2;
  const uint64_t address = reinterpret_cast<uint64_t>(a.logits) + static_cast<long long>(row) * a.logits_stride * bytes;
  shift = static_cast<uint32_t>(address & 15) / bytes;
  return reinterpret_cast<const uint4*>(address & ~15ull);
}

TOP_K_DEVICE Window window_of(const Arguments& a, int row) {
  Window window;
  window.vectors = row_vectors(a, row, window.shift);
  const int first = a.row_starts ? __ldg(a.row_starts + row) : 0;
  const int last = a.row_ends ? __ldg(a.row_ends + row) : a.width;
  const int end = min(max(last, 0), a.width), start = min(max(first, 0), end);
  window.start = start + window.shift;
  window.end = end + window.shift;
  window.cover_lo = window.start / kPack;
  window.cover_hi = (window.end + kPack - 1) / kPack;
  window.full_lo = (window.start + kPack - 1) / kPack;
  window.full_hi = max(window.end / kPack, window.full_lo);
  return window;
}

struct Block {    // static shared memory
  Window window;  // registers are scarce while a row streams by
  uint32_t warp_a[32], warp_b[32], warp_c[32], warp_d[32];
  uint32_t fresh[32];
  alignas(16) uint32_t published[4];  // to the cluster: candidates, listed, above the bin
  uint32_t candidates, listed, total, before;
  uint32_t flood;        // a key that many scores around the cut are equal to, or 0
  float gate_low, high;  // of the sample
  uint64_t lowest[32], highest[32];
  Cut cut;
};

__shared__ Block block;
extern __shared__ __align__(16) unsigned char dynamic_shared[];

// ---- scans and histograms ----

// Inclusive, over the block; `warps` is free again after the caller's next barrier.
TOP_K_DEVICE uint32_t block_scan(uint32_t value, uint32_t* warps) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  value = warp_scan(value);
  if (lane == 31) warps[warp] = value;
  __syncthreads();
  return value + __reduce_add_sync(kFull, lane < warp ? warps[lane] : 0);
}

TOP_K_DEVICE uint32_t block_total(const uint32_t* warps) {  // after block_scan
  const int lane = threadIdx.x & 31;
  return __reduce_add_sync(kFull, lane < kWarps ? warps[lane] : 0);
}

// From the highest bin down, the bin in which the count reaches `need`; `cut` stays as it was if none does.
template <int kCount>
TOP_K_DEVICE void find_cut(const uint32_t* bins, uint32_t need, uint32_t* warps, Cut* cut) {
  constexpr int kOwn = kCount / kThreads;
  static_assert(kOwn == 1 || kOwn == 2 || kOwn == 4 || kOwn == 8, "one access a thread");
  const int lowest = kCount - kOwn * (threadIdx.x + 1);
  uint32_t own[kOwn], sum = 0;
  if constexpr (kOwn == 4) {
    const uint4 four = *reinterpret_cast<const uint4*>(bins + lowest);
    own[0] = four.w, own[1] = four.z, own[2] = four.y, own[3] = four.x;
  } else if constexpr (kOwn == 2) {
    const uint2 two = *reinterpret_cast<const uint2*>(bins + lowest);
    own[0] = two.y, own[1] = two.x;
  } else {
#pragma unroll
    for (int i = 0; i < kOwn; ++i) own[i] = bins[lowest + kOwn - 1 - i];
  }
#pragma unroll
  for (int i = 0; i < kOwn; ++i) sum += own[i];
  const uint32_t upto = block_scan(sum, warps);
  uint32_t above = upto - sum;
  if (above < need && upto >= need) {
    Cut found = {0, 0, 0};
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      if (above < need && above + own[i] >= need) found = {static_cast<uint32_t>(lowest + kOwn - 1 - i), above, own[i]};
      above += own[i];
    }
    *cut = found;
  }
  __syncthreads();
}

// kMagic plus the linear bin of a score: one rounding of a monotone function, so the same for every pass that asks.
TOP_K_DEVICE float linear_bin(float score, float low, float scale) { return fmaf(score - low, scale, kMagic); }

TOP_K_DEVICE float linear_scale(float low, float high, int bins) {  // 0 where no scale fits in a float
  const float scale = __fdividef(bins - 1, high - low);
  return scale > 0.0f && scale < 3e38f ? scale : 0.0f;
}

TOP_K_DEVICE uint32_t clamped_bin(float score, float low, float scale, int bins) {
  return __float_as_uint(fminf(fmaxf(linear_bin(score, low, scale), kMagic), kMagic + (bins - 1)));
}

// Counts a score; `base` is the histogram's address less 4 * kMagicBits. NaN counts in bin 0.
TOP_K_DEVICE void count_bin(uint32_t base, float score, float low, float scale, int bins) {
  shared_add(clamped_bin(score, low, scale, bins) * 4u + base, 1u);
}

// ---- order within a block ----

// Calls put(slot, u, c) for every set bit u * kPack + c of the threads' masks; slots ascend with (warp, u, lane, c),
// which is the order of positions where a warp holds 32 * kVectors vectors in a row. Returns the block's count.
template <class Put>
TOP_K_DEVICE uint32_t in_order(uint32_t mask, uint32_t* warps, Put put) {
  constexpr int kField = kPack == 4 ? 8 : 16;  // bits of the count of a warp's scores of one u
  constexpr int kFields = 32 / kField;
  constexpr int kWords = (kVectors + kFields - 1) / kFields;
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  uint32_t before[kWords], total[kWords], of_warp = 0;
#pragma unroll
  for (int i = 0; i < kWords; ++i) {
    uint32_t own = 0;
#pragma unroll
    for (int f = 0; f < kFields; ++f) {
      const int u = i * kFields + f;
      if (u < kVectors) own |= __popc(mask & (((1u << kPack) - 1) << (kPack * u))) << (kField * f);
    }
    const uint32_t upto = warp_scan(own);
    before[i] = upto - own;
    total[i] = __shfl_sync(kFull, upto, 31);
    if constexpr (kField == 8)
      of_warp = __dp4a(total[i], 0x01010101u, of_warp);
    else
      of_warp += (total[i] & 0xffff) + (total[i] >> 16);
  }
  if (lane == 0) warps[warp] = of_warp;
  __syncthreads();
  uint32_t base = __reduce_add_sync(kFull, lane < warp ? warps[lane] : 0);
#pragma unroll
  for (int u = 0; u < kVectors; ++u) {
    const int i = u / kFields, f = u % kFields * kField;
    const uint32_t count = (total[i] >> f) & ((1u << kField) - 1);
    if (count == 0) continue;
    uint32_t slot = base + ((before[i] >> f) & ((1u << kField) - 1));
#pragma unroll
    for (int c = 0; c < kPack; ++c) {
      if (mask & (1u << (kPack * u + c))) {
        put(slot, u, c);
        ++slot;
      }
    }
    base += count;
  }
  return block_total(warps);
}

// ---- output ----

// The number that leaves for a position. Sorting by score reads the result back, so until then it is the column.
template <bool kFinal>
TOP_K_DEVICE int index_of(const Arguments& a, int row, const Window& window, uint32_t position) {
  if constexpr (!kFinal || kIndexBase == kAbsolute) return position - window.shift;
  const uint32_t relative = position - window.start;
  if constexpr (kIndexBase == kPlusOffset) return relative + __ldg(a.offsets + row);
  if constexpr (kIndexBase == kThroughPages) {
    const uint32_t size = a.page_size, page = relative / size;
    return __ldg(a.page_table + row * a.page_stride + page) * size + relative - page * size;
  }
  return relative;
}

TOP_K_DEVICE int* indices_of(const Arguments& a, int row) { return a.indices + row * a.indices_stride; }

TOP_K_DEVICE void write_one(const Arguments& a, int row, const Window& window, uint32_t slot, uint32_t position) {
  indices_of(a, row)[slot] = index_of<!kByScore>(a, row, window, position);
  if constexpr (kValues && !kByScore) a.values[row * a.values_stride + slot] = window.score(position);
}

TOP_K_DEVICE void write_nothing(const Arguments& a, int row, uint32_t slot) {
  indices_of(a, row)[slot] = -1;
  if constexpr (kValues) a.values[row * a.values_stride + slot] = neg_inf();
}

// The `count` positions that at(slot) and, for four slots, at_four(slot) tell; -1 up to k.
template <class At, class AtFour>
TOP_K_DEVICE void write_all(const Arguments& a, int row, const Window& window, uint32_t count, At at, AtFour at_four) {
  int* out = indices_of(a, row);
  const uint32_t k = a.k;
  if (!kValues && ((reinterpret_cast<uint64_t>(out) & 15) | (k & 3)) == 0) {
    auto index = [&](uint32_t position, uint32_t slot) {
      return slot < count ? index_of<!kByScore>(a, row, window, position) : -1;
    };
#pragma unroll 1
    for (uint32_t slot = threadIdx.x * 4; slot < k; slot += kThreads * 4) {
      const uint4 four = at_four(slot);
      *reinterpret_cast<int4*>(out + slot) =
          make_int4(index(four.x, slot), index(four.y, slot + 1), index(four.z, slot + 2), index(four.w, slot + 3));
    }
    return;
  }
#pragma unroll 1
  for (uint32_t slot = threadIdx.x; slot < k; slot += kThreads) {
    if (slot < count)
      write_one(a, row, window, slot, at(slot));
    else
      write_nothing(a, row, slot);
  }
}

TOP_K_DEVICE void write_staged(const Arguments& a, int row, const Window& window, const uint32_t* staged,
                               uint32_t count) {
  write_all(
      a, row, window, count, [=](uint32_t slot) { return staged[slot]; },
      [=](uint32_t slot) { return *reinterpret_cast<const uint4*>(staged + slot); });
}

TOP_K_DEVICE void write_whole_window(const Arguments& a, int row) {
  const Window window = block.window;
  const uint32_t start = window.start;
  write_all(
      a, row, window, window.length(), [=](uint32_t slot) { return start + slot; },
      [=](uint32_t slot) { return make_uint4(start + slot, start + slot + 1, start + slot + 2, start + slot + 3); });
}

// Order "score": the columns that the row's result holds so far, sorted; one CTA, after a barrier.
__device__ __noinline__ void sort_row(const Arguments& a, int row) {
  const Window window = block.window;
  uint64_t* orders = reinterpret_cast<uint64_t*>(dynamic_shared);
  int* out = indices_of(a, row);
  const uint32_t k = a.k;
  uint32_t size = 2;
  while (size < k) size *= 2;
  for (uint32_t slot = threadIdx.x; slot < size; slot += kThreads) {
    const int column = slot < k ? out[slot] : -1;
    const uint32_t position = column + window.shift;
    orders[slot] = column < 0 ? 0 : order_of(window.score(position), position);
  }
  for (uint32_t run = 2; run <= size; run *= 2) {
    for (uint32_t step = run / 2; step > 0; step /= 2) {
      __syncthreads();
      for (uint32_t i = threadIdx.x; i < size / 2; i += kThreads) {
        const uint32_t low = 2 * i - (i & (step - 1)), high = low + step;
        const uint64_t x = orders[low], y = orders[high];
        if ((x < y) == ((low & run) == 0)) orders[low] = y, orders[high] = x;
      }
    }
  }
  __syncthreads();
  for (uint32_t slot = threadIdx.x; slot < k; slot += kThreads) {
    if (orders[slot] == 0) {
      write_nothing(a, row, slot);
      continue;
    }
    const uint32_t position = position_of(orders[slot]);
    out[slot] = index_of<true>(a, row, window, position);
    if constexpr (kValues) a.values[row * a.values_stride + slot] = window.score(position);
  }
}

}  // namespace
