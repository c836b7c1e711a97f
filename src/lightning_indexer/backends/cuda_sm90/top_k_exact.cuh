// The way that needs no luck: radix passes over the keys find the k-th score, a last pass in order writes the result.
// Any row, any k, any ties; a CTA or a cluster, each CTA its own part of the row. Also the selection inside registers.
#pragma once

#include "top_k_cluster_ptx.cuh"

namespace {

constexpr uint32_t kEveryTie = kTiesLarger ? 0u : kFull;

// Chosen: scores above `score`, and of those equal to it the first `limit` (the larger position first: all but the
// first `limit`).
struct Threshold {
  float score;
  uint32_t limit;

  TOP_K_DEVICE bool takes_tie(uint32_t i) const { return kTiesLarger ? i >= limit : i < limit; }
  TOP_K_DEVICE uint32_t ties_before(uint32_t i) const {
    return kTiesLarger ? (i > limit ? i - limit : 0) : min(i, limit);
  }
};

TOP_K_DEVICE Threshold tie_threshold(float score, uint32_t wanted, uint32_t ties) {
  return {score, kTiesLarger ? ties - wanted : wanted};
}

TOP_K_DEVICE uint32_t short_key(float score) { return key_of(score) >> kKeyShift; }

TOP_K_DEVICE float short_key_score(uint32_t key) {
  const uint32_t whole = key << kKeyShift;
  return score_of((whole & 0x80000000u) ? whole : whole | ((1u << kKeyShift) - 1));
}

// The threshold of k, of the scores that each(visit) visits; every lane of a warp visits at once. `bins` and `sums` are
// kKeyBins words, `sums` only where a cluster shares the row.
template <bool kShared, class Each>
TOP_K_DEVICE Threshold select_by_key(uint32_t k, uint32_t* bins, uint32_t* sums, Each each) {
  uint32_t low = kKeyNegInf >> kKeyShift, high = kKeyPosInf >> kKeyShift, need = k;
  while (true) {
    const int width = 32 - __clz(high - low), shift = width > kKeyBits ? width - kKeyBits : 0;
    __syncthreads();
    clear(bins, kKeyBins);
    if (threadIdx.x == 0) block.cut.inside = 0;
    __syncthreads();
    each([&](float score) {
      const uint32_t key = short_key(score);
      const uint32_t bin = key >= low && key <= high ? (key - low) >> shift : kFull;
      int alike;
      __match_all_sync(kFull, bin, &alike);  // floods of one score would queue at one address
      if (alike) {
        if ((threadIdx.x & 31) == 0 && bin != kFull) shared_add(shared_of(bins + bin), 32);
      } else if (bin != kFull) {
        shared_add(shared_of(bins + bin), 1);
      }
    });
    const uint32_t* counts = bins;
    if constexpr (kShared) {
      cluster_sync();
      for (int i = threadIdx.x; i < kKeyBins; i += kThreads) {
        uint32_t sum = 0;
        for (int rank = 0; rank < kCluster; ++rank) sum += remote_word(remote(bins + i, rank));
        sums[i] = sum;
      }
      cluster_sync();
      counts = sums;
    } else {
      __syncthreads();
    }
    find_cut<kKeyBins>(counts, need, block.warp_c, &block.cut);
    const Cut cut = block.cut;
    if (cut.inside == 0) return {neg_inf(), kEveryTie};  // fewer numbers than k
    low += cut.bin << shift;
    high = low + ((1u << shift) - 1);
    need -= cut.above;
    if (cut.inside == need) return {short_key_score(low), kEveryTie};
    if (shift == 0) return tie_threshold(short_key_score(low), need, cut.inside);
  }
}

// A mask of the scores that `threshold` chooses, from those above and those equal; `ties` were seen in earlier blocks.
TOP_K_DEVICE uint32_t with_ties(uint32_t above, uint32_t equal, const Threshold& threshold, uint32_t& ties,
                                uint32_t* warps) {
  if (threshold.limit == kEveryTie) return above | equal;
  uint32_t chosen = above;
  ties += in_order(equal, warps, [&](uint32_t i, int u, int c) {
    if (threshold.takes_tie(ties + i)) chosen |= 1u << (kPack * u + c);
  });
  return chosen;
}

struct Part {  // the vectors of a CTA
  uint32_t lo, hi;
};

// Visits the part's blocks of kThreads * kVectors vectors, laid out as in_order wants them.
template <class Visit>
TOP_K_DEVICE void each_block(const Window& window, const Part& part, Visit visit) {
  const uint32_t own = (threadIdx.x >> 5) * 32 * kVectors + (threadIdx.x & 31);
  for (uint32_t base = part.lo; base < part.hi; base += kThreads * kVectors) {
    uint4 x[kVectors];
#pragma unroll
    for (int u = 0; u < kVectors; ++u) {
      const uint32_t vector = base + own + u * 32;
      x[u] = vector < part.hi ? window.load(vector) : no_numbers();
    }
#pragma unroll
    for (int u = 0; u < kVectors; ++u) {
      const uint32_t vector = base + own + u * 32;
      if (vector < part.hi && window.partial(vector)) x[u] = window.mask(x[u], vector);
    }
    if (!visit(x, base + own)) return;
  }
}

// Every score that the threads hold, for select_by_key. Classes, not lambdas: a generic lambda counts as host code.
struct HeldScores {
  const uint4 (&x)[kVectors];

  template <class Visit>
  TOP_K_DEVICE void operator()(Visit visit) const {
#pragma unroll
    for (int u = 0; u < kVectors; ++u)
#pragma unroll
      for (int c = 0; c < kPack; ++c) visit(score_in(x[u], c));
  }
};

struct PartScores {  // of a part of the row, from memory
  const Window& window;
  const Part& part;

  template <class Visit>
  TOP_K_DEVICE void operator()(Visit visit) const {
    each_block(window, part, [&](const uint4(&x)[kVectors], uint32_t) {
      HeldScores{x}(visit);
      return true;
    });
  }
};

// Writes the row's result, whatever the row holds. `hint` is a key that may well be the k-th, or 0; `known` scores are
// at or above `gate` (one CTA only; if not the next one above the hint, of no use). A cluster enters together, with
// nothing in flight between its CTAs.
template <bool kShared>
__device__ __noinline__ void exact_row(const Arguments& a, int row, uint32_t hint, float gate, uint32_t known) {
  uint32_t* bins = reinterpret_cast<uint32_t*>(dynamic_shared);
  uint32_t* sums = bins + kKeyBins;
  const Window window = block.window;
  const uint32_t rank = kShared ? cluster_rank() : 0, ranks = kShared ? kCluster : 1;
  const uint32_t k = a.k, vectors = window.cover_hi - window.cover_lo, share = (vectors + ranks - 1) / ranks;
  Part part;
  part.lo = min(window.cover_hi, window.cover_lo + rank * share);
  part.hi = min(window.cover_hi, part.lo + share);

  // Scores above and equal to one: of this CTA's part, of the earlier CTAs and of all.
  struct Count {
    uint32_t above, equal;
  };
  Count before, all;
  auto count = [&](float score) {
    uint32_t above = 0, equal = 0;
    each_block(window, part, [&](const uint4(&x)[kVectors], uint32_t) {
#pragma unroll
      for (int u = 0; u < kVectors; ++u)
#pragma unroll
        for (int c = 0; c < kPack; ++c) {
          const float got = score_in(x[u], c);
          above += got > score;
          equal += got == score;
        }
      return true;
    });
    __syncthreads();
    if (threadIdx.x < 2) block.published[threadIdx.x] = 0;
    __syncthreads();
    above = __reduce_add_sync(kFull, above);
    equal = __reduce_add_sync(kFull, equal);
    if ((threadIdx.x & 31) == 0) {
      shared_add(shared_of(&block.published[0]), above);
      shared_add(shared_of(&block.published[1]), equal);
    }
    if constexpr (kShared)
      cluster_sync();
    else
      __syncthreads();
    before = {0, 0}, all = {0, 0};
    if constexpr (kShared) {
      for (uint32_t other = 0; other < kCluster; ++other) {
        const uint32_t address = remote(block.published, other);
        const Count of = {remote_word(address), remote_word(address + 4)};
        if (other < rank) before.above += of.above, before.equal += of.equal;
        all.above += of.above, all.equal += of.equal;
      }
      cluster_sync();
    } else {
      all = {block.published[0], block.published[1]};
    }
  };

  // The pass in order: returns the slot after this CTA's last.
  auto write_in_order = [&](const Threshold& threshold, const Count& before) {
    uint32_t ties = before.equal, written = before.above + threshold.ties_before(before.equal);
    each_block(window, part, [&](const uint4(&x)[kVectors], uint32_t first) {
      uint32_t above = 0, equal = 0;
#pragma unroll
      for (int u = 0; u < kVectors; ++u)
#pragma unroll
        for (int c = 0; c < kPack; ++c) {
          const float got = score_in(x[u], c);
          if (got > threshold.score) above |= 1u << (kPack * u + c);
          if (got == threshold.score) equal |= 1u << (kPack * u + c);
        }
      __syncthreads();  // the block before has read its counts
      const uint32_t chosen = with_ties(above, equal, threshold, ties, block.warp_c);
      written += in_order(chosen, block.warp_d, [&](uint32_t slot, int u, int c) {
        write_one(a, row, window, written + slot, (first + u * 32) * kPack + c);
      });
      return written < k;
    });
    return written;
  };

  Threshold threshold = {neg_inf(), kEveryTie};
  bool counted = false, found = window.length() <= k;
  if (!kShared && !kTiesLarger && !found && hint && key_of(gate) == hint + 1 && known < k) {
    // The first k - known equal to the hint, if there are so many: the pass in order will see.
    threshold = tie_threshold(score_of(hint), k - known, 0);
    if (write_in_order(threshold, {0, 0}) == k) return;
    threshold = {neg_inf(), kEveryTie};
    __syncthreads();
  }
  if (!found && hint) {
    threshold.score = score_of(hint);
    count(threshold.score);
    counted = found = all.above < k && all.above + all.equal >= k;
    if (found) threshold = tie_threshold(threshold.score, k - all.above, all.equal);
    if (hint == kKeyNegInf && all.above + all.equal < k) {  // fewer numbers than k
      threshold.limit = kEveryTie;
      counted = found = true;
    }
  }
  if (!found) threshold = select_by_key<kShared>(k, bins, sums, PartScores{window, part});
  if (kShared && !counted) count(threshold.score);
  if (!kShared) before = {0, 0};

  if (counted && all.above + all.equal == 0) part.hi = part.lo;  // not one number
  const uint32_t written = write_in_order(threshold, before);
  if (rank + 1 == ranks)
    for (uint32_t slot = written + threadIdx.x; slot < k; slot += kThreads) write_nothing(a, row, slot);
}

}  // namespace
