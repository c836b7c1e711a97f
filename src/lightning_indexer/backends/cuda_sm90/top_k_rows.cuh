// One CTA, one row: a short row in registers, a longer one in a single streaming pass.
#pragma once

#include "top_k_exact.cuh"

namespace {

// Counts a score unless it is NaN, in a histogram that has room for every score.
TOP_K_DEVICE void count_number(uint32_t base, float score, float low, float scale) {
  const uint32_t bin = clamped_bin(score, low, scale, kBins);
  asm volatile("{\n.reg .pred p;\nsetp.eq.f32 p, %0, %0;\n@p red.shared.add.u32 [%1], 1;\n}" ::"f"(score),
               "r"(bin * 4u + base)
               : "memory");
}

// Sets bit `bit` of `above` where t > highest, of `upward` where t >= lowest.
TOP_K_DEVICE void compare(uint32_t& above, uint32_t& upward, float t, float highest, float lowest, uint32_t bit) {
  asm("{\n.reg .pred p;\nsetp.gt.f32 p, %2, %3;\n@p or.b32 %0, %0, %5;\nsetp.ge.f32 p, %2, %4;\n@p or.b32 %1, %1, %5;\n}"
      : "+r"(above), "+r"(upward)
      : "f"(t), "f"(highest), "f"(lowest), "r"(bit));
}

// The row's vectors, from `first` on: warp w holds 32 * kVectors of them in a row.
TOP_K_DEVICE void load_row(const Window& window, uint32_t first, uint32_t past, uint4 (&x)[kVectors]) {
  const uint32_t own = (threadIdx.x >> 5) * 32 * kVectors + (threadIdx.x & 31);
#pragma unroll
  for (int u = 0; u < kVectors; ++u) {
    const uint32_t vector = first + own + u * 32;
    x[u] = vector < past ? window.load(vector) : no_numbers();
  }
}

// A short row that the list cannot decide: one score floods it, infinities, a NaN among few scores. Reads it again, so
// that the way here costs the others no registers. `low` and `scale` of the histogram if block.cut is set;
// else block.flood is the key of the highest score.
__device__ __noinline__ void odd_short_row(const Arguments& a, int row, float low, float scale) {
  const Window window = block.window;
  const Cut cut = block.cut;
  const uint32_t k = a.k;
  uint4 x[kVectors];
  load_row(window, window.cover_lo, window.cover_hi, x);
  const uint32_t own = (threadIdx.x >> 5) * 32 * kVectors + (threadIdx.x & 31), first = window.cover_lo + own;
#pragma unroll
  for (int u = 0; u < kVectors; ++u)
    if (first + u * 32 < window.cover_hi && window.partial(first + u * 32)) x[u] = window.mask(x[u], first + u * 32);

  Threshold threshold = {neg_inf(), kEveryTie};
  if (window.length() > k) {
    if (threadIdx.x == 0 && cut.inside > 0) block.flood = kFull;
    if (threadIdx.x < 2) block.published[threadIdx.x] = 0;
    __syncthreads();
    if (cut.inside > 0) {  // perhaps the lowest score of the bin of the cut is all of it
      const float lowest = cut.bin == 0 ? neg_inf() : kMagic + cut.bin;
      uint32_t key = kFull;
      HeldScores{x}([&](float score) {
        if (linear_bin(score, low, scale) >= lowest) key = min(key, key_of(score));
      });
      key = __reduce_min_sync(kFull, key);
      if ((threadIdx.x & 31) == 0) atomicMin(&block.flood, key);
      __syncthreads();
    }
    const float flood = score_of(block.flood);
    uint32_t above = 0, equal = 0;
    HeldScores{x}([&](float score) {
      above += score > flood;
      equal += score == flood;
    });
    above = __reduce_add_sync(kFull, above);
    equal = __reduce_add_sync(kFull, equal);
    if ((threadIdx.x & 31) == 0) {
      shared_add(shared_of(&block.published[0]), above);
      shared_add(shared_of(&block.published[1]), equal);
    }
    __syncthreads();
    above = block.published[0], equal = block.published[1];
    if (above < k && above + equal >= k) threshold = tie_threshold(flood, k - above, equal);
    else threshold = select_by_key<false>(k, reinterpret_cast<uint32_t*>(dynamic_shared), nullptr, HeldScores{x});
  }
  uint32_t above = 0, equal = 0, ties = 0;
#pragma unroll
  for (int u = 0; u < kVectors; ++u)
#pragma unroll
    for (int c = 0; c < kPack; ++c) {
      const float score = score_in(x[u], c);
      if (score > threshold.score) above |= 1u << (kPack * u + c);
      if (score == threshold.score) equal |= 1u << (kPack * u + c);
    }
  const uint32_t chosen = with_ties(above, equal, threshold, ties, block.warp_a);
  const uint32_t total = in_order(chosen, block.warp_d, [&](uint32_t slot, int u, int c) {
    write_one(a, row, window, slot, (first + u * 32) * kPack + c);
  });
  for (uint32_t slot = total + threadIdx.x; slot < k; slot += kThreads) write_nothing(a, row, slot);
}

// A row in registers: `x` as load_row left it, `count` vectors from `first` on.
TOP_K_DEVICE void short_row(const Arguments& a, int row, const Window& window, uint32_t first, uint4 (&x)[kVectors]) {
  ShortPlan& plan = *reinterpret_cast<ShortPlan*>(dynamic_shared);
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const uint32_t of_warp = warp * 32 * kVectors, own = of_warp + lane, count = window.cover_hi - first, k = a.k;
  const int held = (static_cast<int>(count - of_warp) + 31) / 32;  // vectors of the warp that hold scores, over 32
  if (lane == 0) block.fresh[warp] = held;
  __syncwarp();
  int live;
  if (window.length() <= k) {  // all of them, unless one is NaN; scores beside the window that are only cost time
    bool numbers = true;
    live = fresh(&block.fresh[warp]);
#pragma unroll
    for (int u = 0; u < kVectors; ++u) {
      if (u >= live) continue;
#pragma unroll
      for (int c = 0; c < kPack; ++c) {
        const float score = score_in(x[u], c);
        numbers &= score == score || own + u * 32 >= count;
      }
    }
    if (__syncthreads_and(numbers)) return write_whole_window(a, row);
    return odd_short_row(a, row, 0.0f, 0.0f);
  }
  clear(plan.bins, kBins);
  plan.chosen[threadIdx.x] = 0;
  if (threadIdx.x == 0) block.listed = 0, block.cut.inside = 0;
  if (kWholeRows || window.cover_lo < window.full_lo || window.full_hi < window.cover_hi) {
#pragma unroll
    for (int u = 0; u < kVectors; ++u) {
      const uint32_t vector = first + own + u * 32;
      if (vector < window.cover_hi ? window.partial(vector) : kWholeRows) x[u] = window.mask(x[u], vector);
    }
  }

  float low = pos_inf(), high = neg_inf();
  live = fresh(&block.fresh[warp]);
#pragma unroll
  for (int u = 0; u < kVectors; ++u) {
    if (u >= live) continue;
#pragma unroll
    for (int c = 0; c < kPack; ++c) {
      const float score = score_in(x[u], c);
      high = fmaxf(high, score);
      if (u == 0)  // a sample is enough for the lower end: what lies below counts in bin 0
        asm("{\n.reg .pred p;\nsetp.gt.f32 p, %1, 0fff800000;\n@p min.f32 %0, %0, %1;\n}" : "+f"(low) : "f"(score));
    }
  }
  uint32_t low_key = __reduce_min_sync(kFull, key_of(low)), high_key = __reduce_max_sync(kFull, key_of(high));
  if (lane == 0) block.warp_a[warp] = low_key, block.warp_b[warp] = high_key;
  __syncthreads();
  low_key = __reduce_min_sync(kFull, lane < kWarps ? block.warp_a[lane] : kFull);
  high_key = __reduce_max_sync(kFull, lane < kWarps ? block.warp_b[lane] : 0);
  low = score_of(low_key), high = score_of(high_key);
  if (threadIdx.x == 0) block.flood = high_key;
  const float scale = linear_scale(low, high, kBins);
  bool listed = low_key < high_key && scale > 0 && high < pos_inf();
  if (listed) {
    const uint32_t base = shared_of(plan.bins) - 4u * kMagicBits;
    live = fresh(&block.fresh[warp]);
#pragma unroll
    for (int u = 0; u < kVectors; ++u) {
      if (u >= live) continue;
#pragma unroll
      for (int c = 0; c < kPack; ++c) count_number(base, score_in(x[u], c), low, scale);
    }
    __syncthreads();
    find_cut<kBins>(plan.bins, k, block.warp_c, &block.cut);
    listed = block.cut.inside > 0 && block.cut.inside <= kListed;
  }

  uint32_t chosen = 0;
  if (listed) {  // else: fewer finite scores than k, or many about equal
    const Cut cut = block.cut;
    const uint32_t need = k - cut.above;
    const float lowest = cut.bin == 0 ? neg_inf() : kMagic + cut.bin;
    const float highest = cut.bin == kBins - 1 ? pos_inf() : kMagic + cut.bin;
    uint32_t upward = 0;
    live = fresh(&block.fresh[warp]);
#pragma unroll
    for (int u = 0; u < kVectors; ++u) {
      if (u >= live) continue;
#pragma unroll
      for (int c = 0; c < kPack; ++c)
        compare(chosen, upward, linear_bin(score_in(x[u], c), low, scale), highest, lowest, 1u << (kPack * u + c));
    }
    for (uint32_t rest = upward & ~chosen; rest; rest &= rest - 1) {
      const int bit = 31 - __clz(rest & -rest);
      const uint32_t relative = (own + bit / kPack * 32) * kPack + bit % kPack;
      // Read again: shorter than choosing among registers.
      const float score = block.window.score((kWholeRows ? 0 : block.window.cover_lo) * kPack + relative);
      plan.listed[shared_fetch_add(shared_of(&block.listed), 1)] = order_of(score, relative);
    }
    __syncthreads();
    for (uint32_t i = threadIdx.x; i < cut.inside; i += kThreads) {
      const uint64_t mine = plan.listed[i];
      uint32_t rank = 0;
#pragma unroll 1
      for (uint32_t j = 0; j < cut.inside; ++j) rank += plan.listed[j] > mine;
      if (rank < need) {
        const uint32_t relative = position_of(mine), vector = relative / kPack, of = vector / (32 * kVectors);
        const uint32_t within = vector % (32 * kVectors);
        shared_or(shared_of(plan.chosen + of * 32 + within % 32), 1u << (within / 32 * kPack + relative % kPack));
      }
    }
    __syncthreads();
    chosen |= plan.chosen[threadIdx.x];
  } else {
    return odd_short_row(a, row, low, scale);
  }

  const uint32_t mine = ((kWholeRows ? 0 : block.window.cover_lo) + own) * kPack;
  const uint32_t staged = shared_of(plan.staged);
  in_order(chosen, block.warp_d, [&](uint32_t slot, int u, int c) {
    asm volatile("st.shared.u32 [%0], %1;" ::"r"(staged + slot * 4), "r"(mine + u * 32 * kPack + c) : "memory");
  });
  __syncthreads();
  write_staged(a, row, block.window, plan.staged, k);
}

// ---- a row longer than the registers ----

// By how much to overshoot so that the true count falls below k only four deviations out: (f - 1) n = 4 sqrt(f n).
TOP_K_DEVICE float overshoot(float n) {
  const float half = __fdividef(8.0f, n);
  return 1.01f + half + 4.0f * sqrtf(__fdividef(1.0f, n) + half * half * 0.0625f);
}

struct Gate {
  float low;   // candidates are the scores at or above it
  float high;  // of the sample
  enum { kGood, kRough, kNone } state;  // rough: too many of the sample in one bin; none: nothing finite
};

// The sampled score c of vector i; in turn the even and the odd ones, so that strided contents do not alias.
template <int kStride>
TOP_K_DEVICE float sampled(const uint4& vector, int c, int i) {
  return score_in(vector, c * kStride + (kStride > 1 ? i % kStride : 0));
}

TOP_K_DEVICE uint32_t sample_wanted(float expected, float most_overshoot, int vectors) {
  return min(static_cast<uint32_t>(vectors * kSampled * kThreads),
             static_cast<uint32_t>(min(most_overshoot, overshoot(expected)) * expected) + 1);
}

TOP_K_DEVICE uint32_t sample_fine(uint32_t wanted) { return max(24u, wanted >> 3); }

// A gate that k scores and a few more should pass; `expected` scores of the sample are in the top k.
// Clear `bins` are left dirty.
template <int kCount>
TOP_K_DEVICE Gate find_gate(const uint4 (&x)[kCount], float expected, float most_overshoot, uint32_t* bins) {
  constexpr int kStride = SAMPLE_STRIDE, kScores = kSampled;
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  float low = pos_inf(), high = neg_inf();
#pragma unroll
  for (int i = 0; i < kCount; ++i)
#pragma unroll
    for (int c = 0; c < kScores; ++c)
      asm("{\n.reg .pred p;\n.reg .f32 a;\nabs.f32 a, %2;\nsetp.lt.f32 p, a, 0f7f800000;\n"
          "@p min.f32 %0, %0, %2;\n@p max.f32 %1, %1, %2;\n}"
          : "+f"(low), "+f"(high)
          : "f"(sampled<kStride>(x[i], c, i)));
  uint32_t low_key = __reduce_min_sync(kFull, key_of(low)), high_key = __reduce_max_sync(kFull, key_of(high));
  if (lane == 0) block.warp_a[warp] = low_key, block.warp_b[warp] = high_key;
  __syncthreads();
  low_key = __reduce_min_sync(kFull, lane < kWarps ? block.warp_a[lane] : kFull);
  high_key = __reduce_max_sync(kFull, lane < kWarps ? block.warp_b[lane] : 0);
  if (low_key >= high_key) {  // nothing finite, or one score
    if (threadIdx.x == 0) block.flood = low_key > high_key ? kKeyNegInf : low_key;
    return {score_of(low_key + 1), score_of(high_key), low_key > high_key ? Gate::kNone : Gate::kGood};
  }
  if (threadIdx.x == 0) block.flood = 0;
  low = score_of(low_key), high = score_of(high_key);
  const uint32_t wanted = sample_wanted(expected, most_overshoot, kCount);
  const float scale = linear_scale(low, high, kBins);
  const uint32_t base = shared_of(bins) - 4u * kMagicBits;
#pragma unroll
  for (int i = 0; i < kCount; ++i)
#pragma unroll
    for (int c = 0; c < kScores; ++c) count_bin(base, sampled<kStride>(x[i], c, i), low, scale, kBins);
  __syncthreads();
  find_cut<kBins>(bins, wanted, block.warp_c, &block.cut);
  Gate gate = {low, high, Gate::kGood};
  if (scale > 0) gate.low = fmaf(__fdividef(high - low, kBins - 1), static_cast<float>(block.cut.bin) - 0.5f, low);
  if (block.cut.inside > sample_fine(wanted)) gate.state = Gate::kRough;
  return gate;
}

// The same on keys, for a sample badly spread over linear bins; the result is in block.gate_low. `x`: the thread's copy.
template <int kCount>
__device__ __noinline__ void refine_gate(const uint4* x, float expected, float most_overshoot, float rate, uint32_t* bins) {
  const uint32_t wanted = sample_wanted(expected, most_overshoot, kCount), fine = sample_fine(wanted);
  uint32_t from = 0, to = kFull, need = wanted;
  while (true) {
    const int width = 32 - __clz(to - from), shift = width > kKeyBits ? width - kKeyBits : 0;
    __syncthreads();
    clear(bins, kKeyBins);
    __syncthreads();
    for (int i = 0; i < kCount; ++i)
#pragma unroll
      for (int c = 0; c < kSampled; ++c) {
        const uint32_t key = key_of(sampled<SAMPLE_STRIDE>(x[i], c, i));
        if (key >= from && key <= to) shared_add(shared_of(bins + ((key - from) >> shift)), 1);
      }
    __syncthreads();
    find_cut<kKeyBins>(bins, need, block.warp_c, &block.cut);
    from += block.cut.bin << shift;
    to = from + ((1u << shift) - 1);
    need -= block.cut.above;
    if (shift == 0 || block.cut.inside <= fine) break;
  }
  uint32_t key = max(from, kKeyNegInf);
  if (from == to) {
    if (threadIdx.x == 0) block.flood = key;
    // More scores are equal to the gate than there is room for: only those above it.
    if (wanted - need + block.cut.inside > 0.85f * kCapacity * rate) ++key;
  }
  if (threadIdx.x == 0) block.gate_low = score_of(key);
  __syncthreads();
}

// The gate once more, for the second of two equal compares: the predicates of the first as bits in a register would cost
// three instructions each, where comparing again takes one.
TOP_K_DEVICE float again(float gate) {
  uint32_t* slot = &block.fresh[threadIdx.x >> 5];
  if ((threadIdx.x & 31) == 0) *slot = __float_as_uint(gate);
  __syncwarp();
  return __uint_as_float(fresh(slot));
}

struct Collector {  // keeps the scores at or above the gate
  float gate, same_gate;
  uint32_t candidates, counter;  // shared-memory addresses

  // Scores of kVectors vectors, `apart` positions from one to the next.
  TOP_K_DEVICE void collect(const uint4 (&x)[kVectors], uint32_t position, uint32_t apart) const {
    uint32_t own = 0;
#pragma unroll
    for (int u = 0; u < kVectors; ++u)
#pragma unroll
      for (int c = 0; c < kPack; ++c)
        asm("{\n.reg .pred p;\nsetp.ge.f32 p, %1, %2;\n@p add.u32 %0, %0, 1;\n}" : "+r"(own) : "f"(score_in(x[u], c)), "f"(gate));
    const uint32_t upto = warp_scan(own);
    uint32_t base = 0;
    // The address depends on the data: ptxas would aggregate over the warp once more.
    if ((threadIdx.x & 31) == 31) base = shared_fetch_add(counter + (upto >> 28), upto);
    uint32_t at = __shfl_sync(kFull, base, 31) + upto;
    if (__any_sync(kFull, at > kCapacity)) return;  // the count says so
    at = candidates + (at - own) * 8;
#pragma unroll
    for (int u = 0; u < kVectors; ++u)
#pragma unroll
      for (int c = 0; c < kPack; ++c)
        asm volatile("{\n.reg .pred p;\nsetp.ge.f32 p, %1, %2;\n@p st.shared.v2.b32 [%0], {%3, %4};\n@p add.u32 %0, %0, 8;\n}"
                     : "+r"(at)
                     : "f"(score_in(x[u], c)), "f"(same_gate), "r"(__float_as_uint(score_in(x[u], c))), "r"(position + u * apart + c)
                     : "memory");
  }

  // The window's scores outside full vectors, from `from` to `past` of them; one warp.
  TOP_K_DEVICE void collect_loose(const Window& window, uint32_t from, uint32_t past) const {
    const uint32_t lane = threadIdx.x & 31, i = from + lane;
    const uint32_t position = i < past ? window.loose_position(i) : window.start;
    const float score = window.score(position);
    const bool in = i < past && score >= gate;
    const uint32_t all = __ballot_sync(kFull, in);
    uint32_t base = 0;
    if (lane == 0) base = shared_fetch_add(counter, __popc(all));
    const uint32_t at = __shfl_sync(kFull, base, 0) + __popc(all & ((1u << lane) - 1));
    if (in && at < kCapacity)
      asm volatile("st.shared.v2.b32 [%0], {%1, %2};" ::"r"(candidates + at * 8), "r"(__float_as_uint(score)), "r"(position) : "memory");
  }
};

TOP_K_DEVICE uint64_t warp_least(uint64_t value) {
#pragma unroll
  for (int step = 16; step > 0; step >>= 1) value = min(value, __shfl_xor_sync(kFull, value, step));
  return value;
}

// The least order number that is chosen, where many candidates lie in the bin of the cut: radix passes over their order
// numbers, `need` of them wanted. in_bin(score) says which ones.
template <class InBin>
__device__ __noinline__ uint64_t refine_cut(const Candidate* candidates, uint32_t count, uint32_t need, uint32_t* bins,
                                            InBin in_bin) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  uint64_t low = ~0ull, high = 0;
  for (uint32_t i = threadIdx.x; i < count; i += kThreads) {
    const Candidate candidate = candidates[i];
    if (!in_bin(candidate.score)) continue;
    const uint64_t order = order_of(candidate.score, candidate.position);
    low = min(low, order), high = max(high, order);
  }
  low = warp_least(low), high = ~warp_least(~high);
  if (lane == 0) block.lowest[warp] = low, block.highest[warp] = high;
  __syncthreads();
  low = warp_least(lane < kWarps ? block.lowest[lane] : ~0ull);
  high = ~warp_least(~(lane < kWarps ? block.highest[lane] : 0ull));
  while (true) {
    const int width = 64 - __clzll(high - low), shift = width > kKeyBits ? width - kKeyBits : 0;
    __syncthreads();
    clear(bins, kKeyBins);
    __syncthreads();
    for (uint32_t i = threadIdx.x; i < count; i += kThreads) {
      const Candidate candidate = candidates[i];
      const uint64_t order = order_of(candidate.score, candidate.position);
      if (order >= low && order <= high) shared_add(shared_of(bins + static_cast<uint32_t>((order - low) >> shift)), 1);
    }
    __syncthreads();
    find_cut<kKeyBins>(bins, need, block.warp_c, &block.cut);
    const Cut cut = block.cut;
    low += static_cast<uint64_t>(cut.bin) << shift;
    high = low + ((1ull << shift) - 1);
    need -= cut.above;
    if (shift == 0 || cut.inside == need) return low;
  }
}

// Sets the bits of a candidate's position.
TOP_K_DEVICE void mark(uint32_t bitmap, uint32_t relative) { shared_or(bitmap + relative / 32 * 4, 1u << (relative % 32)); }

TOP_K_DEVICE void stream_row(const Arguments& a, int row, const Window& window) {
  StreamPlan& plan = *reinterpret_cast<StreamPlan*>(dynamic_shared);
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const uint32_t k = a.k;

  // Tile t holds chunks t, t + tiles, t + 2 tiles, ... of 32 vectors, so that tile 0 samples the whole row evenly.
  const uint32_t vectors = window.full_hi - window.full_lo, chunks = (vectors + 31) / 32;
  const uint32_t tiles = (chunks + kWarps * kVectors - 1) / (kWarps * kVectors);
  const uint32_t own = window.full_lo + warp * tiles * 32 + lane, apart = kWarps * tiles * 32;
  const uint32_t top = window.full_lo + ((warp + (kVectors - 1) * kWarps) * tiles + 1) * 32;  // past tile 0's last chunk
  auto load = [&](uint4(&x)[kVectors], uint32_t tile) {
    if (top + tile * 32 <= window.full_hi) {
#pragma unroll
      for (int u = 0; u < kVectors; ++u) x[u] = window.load(own + tile * 32 + u * apart);
    } else {
#pragma unroll
      for (int u = 0; u < kVectors; ++u) {
        const uint32_t vector = own + tile * 32 + u * apart;
        x[u] = vector < window.full_hi ? window.load(vector) : no_numbers();
      }
    }
  };
  uint4 x[kVectors];
  load(x, 0);
  clear(plan.bins, kBins);
  clear(plan.bitmap, a.bitmap_words);
  if (threadIdx.x == 0) block.candidates = 0, block.listed = 0;

  window.prefetch_loose();
  const float samples = (chunks + tiles - 1) / tiles * 32 * kSampled;
  const float rate = __fdividef(samples, static_cast<float>(window.length()));
  Gate gate = find_gate<kVectors>(x, k * rate, a.overshoot, plan.bins);
  if (gate.state == Gate::kRough) {
    uint4 copy[kVectors];
#pragma unroll
    for (int u = 0; u < kVectors; ++u) copy[u] = x[u];
    refine_gate<kVectors>(copy, k * rate, a.overshoot, rate, plan.bins);
    gate.low = block.gate_low;
    load(x, 0);  // again: nothing of it need survive the call
  }
  if (gate.state == Gate::kNone) {
    __syncthreads();
    return exact_row<false>(a, row, block.flood, 0.0f, 0);
  }
  clear(plan.bins, kBins);
  if (threadIdx.x == 0) block.high = gate.high;
  {
    const Collector collector = {gate.low, again(gate.low), shared_of(plan.candidates), shared_of(&block.candidates)};
    if (warp == 0 && block.window.loose()) collector.collect_loose(block.window, 0, block.window.loose());
    for (uint32_t tile = 0; tile < tiles; ++tile) {
      collector.collect(x, (own + tile * 32) * kPack, apart * kPack);
      if (tile + 1 < tiles) load(x, tile + 1);
    }
  }
  __syncthreads();
  const uint32_t count = block.candidates;
  if (count < k || count > kCapacity) return exact_row<false>(a, row, block.flood, gate.low, count);

  const float scale = linear_scale(gate.low, block.high, kBins);
  const uint32_t base = shared_of(plan.bins) - 4u * kMagicBits;
#pragma unroll 4
  for (uint32_t i = threadIdx.x; i < count; i += kThreads) count_bin(base, plan.candidates[i].score, gate.low, scale, kBins);
  __syncthreads();
  find_cut<kBins>(plan.bins, k, block.warp_c, &block.cut);
  const Cut cut = block.cut;
  const uint32_t need = k - cut.above, origin = block.window.cover_lo * kPack, bitmap = shared_of(plan.bitmap);
  const float lowest = cut.bin == 0 ? neg_inf() : kMagic + cut.bin;
  const float highest = cut.bin == kBins - 1 ? pos_inf() : kMagic + cut.bin;
  if (cut.inside > kListed) {
    auto in_bin = [=](float score) {
      const float t = linear_bin(score, gate.low, scale);
      return !(t > highest) && !(t < lowest);
    };
    const uint64_t least = refine_cut(plan.candidates, count, need, plan.bins, in_bin);
    for (uint32_t i = threadIdx.x; i < count; i += kThreads) {
      const Candidate candidate = plan.candidates[i];
      if (order_of(candidate.score, candidate.position) >= least) mark(bitmap, candidate.position - origin);
    }
  } else {
#pragma unroll 4
    for (uint32_t i = threadIdx.x; i < count; i += kThreads) {
      const Candidate candidate = plan.candidates[i];
      const float t = linear_bin(candidate.score, gate.low, scale);
      const uint32_t relative = candidate.position - origin;
      asm volatile("{\n.reg .pred p;\nsetp.gt.f32 p, %0, %1;\n@p red.shared.or.b32 [%2], %3;\n}" ::"f"(t), "f"(highest),
                   "r"(bitmap + relative / 32 * 4), "r"(1u << (relative % 32))
                   : "memory");
      if (!(t > highest) && !(t < lowest))
        plan.listed[shared_fetch_add(shared_of(&block.listed), 1)] = order_of(candidate.score, candidate.position);
    }
    __syncthreads();
    for (uint32_t i = threadIdx.x; i < cut.inside; i += kThreads) {
      const uint64_t mine = plan.listed[i];
      uint32_t rank = 0;
#pragma unroll 1
      for (uint32_t j = 0; j < cut.inside; ++j) rank += plan.listed[j] > mine;
      if (rank < need) mark(bitmap, position_of(mine) - origin);
    }
  }
  __syncthreads();

  // Positions in order, from the bitmap, to where the candidates were.
  const int words = ((block.window.cover_hi - block.window.cover_lo) * kPack + 31) / 32;
  const int each = (words + kThreads * 4 - 1) / (kThreads * 4) * 4;
  const int first = threadIdx.x * each, past = min(words, first + each);
  uint32_t bits = 0;
  for (int i = first; i < past; i += 4) {
    const uint4 four = *reinterpret_cast<const uint4*>(plan.bitmap + i);
    bits += __popc(four.x) + __popc(four.y) + __popc(four.z) + __popc(four.w);
  }
  uint32_t at = shared_of(plan.candidates) + (block_scan(bits, block.warp_d) - bits) * 4;
  for (int i = first; i < past; ++i) {
    const uint32_t position = origin + i * 32;
    for (uint32_t word = plan.bitmap[i]; word; word &= word - 1) {
      const int bit = 31 - __clz(word & -word);
      asm volatile("st.shared.u32 [%0], %1;" ::"r"(at), "r"(position + bit) : "memory");
      at += 4;
    }
  }
  __syncthreads();
  write_staged(a, row, block.window, reinterpret_cast<const uint32_t*>(plan.candidates), k);
}

}  // namespace
