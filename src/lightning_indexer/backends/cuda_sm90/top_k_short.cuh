// One CTA, one row, in registers.
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
  asm("{\n.reg .pred p;\nsetp.gt.f32 p, %2, %3;\n@p or.b32 %0, %0, %5;\n"
      "setp.ge.f32 p, %2, %4;\n@p or.b32 %1, %1, %5;\n}"
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
    if (above < k && above + equal >= k)
      threshold = tie_threshold(flood, k - above, equal);
    else
      threshold = select_by_key<false>(k, reinterpret_cast<uint32_t*>(dynamic_shared), nullptr, HeldScores{x});
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

}  // namespace
