// Few long rows: a cluster of CTAs a row, each a contiguous part of it. Every CTA reads the same sample, so all have
// the same gate; histograms and the scores around the cut are exchanged through distributed shared memory.
#pragma once

#include "top_k_stream.cuh"

namespace {

TOP_K_DEVICE void across_row(const Arguments& a, int row, const Window& window) {
  AcrossPlan& plan = *reinterpret_cast<AcrossPlan*>(dynamic_shared);
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const uint32_t rank = cluster_rank(), k = a.k;
  auto exact = [&](uint32_t hint) { exact_row<true>(a, row, hint, 0.0f, 0); };
  if (a.bitmap_words == 0) return exact(0);

  const uint32_t vectors = window.full_hi - window.full_lo, share = ((vectors + kCluster - 1) / kCluster + 31) & ~31u;
  const uint32_t lo = min(window.full_hi, window.full_lo + rank * share), hi = min(window.full_hi, lo + share);
  // Positions of this CTA: the first and the last take the loose ones.
  const uint32_t from = rank == 0 ? window.cover_lo * kPack : lo * kPack;
  const uint32_t past = rank == kCluster - 1 ? window.cover_hi * kPack : hi * kPack;
  auto load = [&](uint4(&x)[kVectors], uint32_t base) {
#pragma unroll
    for (int u = 0; u < kVectors; ++u) {
      const uint32_t vector = base + u * kThreads + threadIdx.x;
      x[u] = vector < hi ? window.load(vector) : no_numbers();
    }
  };
  uint4 sample[kSampleVectors];
#pragma unroll
  for (int i = 0; i < kSampleVectors; ++i) {
    const uint64_t place = static_cast<uint64_t>(i * kThreads + threadIdx.x) * vectors / (kSampleVectors * kThreads);
    sample[i] = window.load(window.full_lo + static_cast<uint32_t>(place));
  }
  uint4 x[kVectors];
  load(x, lo);
  clear(plan.bins, kBins);
  clear(plan.counts, kSharedBins / 2);
  clear(plan.bitmap, a.bitmap_words);
  if (threadIdx.x < 4) block.published[threadIdx.x] = 0;
  if (threadIdx.x == 4) block.total = 0, block.before = 0;

  constexpr float kSamples = kSampleVectors * kThreads * kSampled;
  const float rate = __fdividef(kSamples, static_cast<float>(window.length())), expected = k * rate;
  window.prefetch_loose();
  Gate gate = find_gate<kSampleVectors>(sample, expected, a.overshoot, plan.bins);
  if (gate.state == Gate::kRough) {
    uint4 copy[kSampleVectors];
#pragma unroll
    for (int i = 0; i < kSampleVectors; ++i) copy[i] = sample[i];
    refine_gate<kSampleVectors>(copy, expected, a.overshoot, rate, plan.bins);
    gate.low = block.gate_low;
    load(x, lo);
  }
  // A thin sample: more than k scores may lie above its highest.
  if (expected < 24.0f) gate.high += 0.5f * (gate.high - gate.low);
  const float scale = linear_scale(gate.low, gate.high, kSharedBins);
  if (gate.state == Gate::kNone) {
    cluster_sync();
    return exact(block.flood);
  }
  {
    const Collector collector = {gate.low, again(gate.low), shared_of(plan.candidates), shared_of(&block.published[0])};
    if (warp == 0 && rank == 0 && window.head()) collector.collect_loose(window, 0, window.head());
    if (warp == 0 && rank == kCluster - 1 && window.loose() > window.head())
      collector.collect_loose(window, window.head(), window.loose());
    for (uint32_t base = lo; base < hi; base += kThreads * kVectors) {
      collector.collect(x, (base + threadIdx.x) * kPack, kThreads * kPack);
      load(x, base + kThreads * kVectors);
    }
  }
  __syncthreads();
  const uint32_t count = block.published[0];
  if (count <= kCapacity) {
    for (uint32_t i = threadIdx.x; i < count; i += kThreads) {
      const uint32_t bin = clamped_bin(plan.candidates[i].score, gate.low, scale, kSharedBins) - kMagicBits;
      shared_add(shared_of(plan.counts + bin / 2), 1u << (16 * (bin & 1)));
    }
  }
  cluster_sync();

  // Everybody's histogram and number of candidates.
  {
    constexpr int kFours = kSharedBins / 8;
    const uint32_t of_rank = lane < kCluster ? remote_word(remote(&block.published[0], lane)) : 0;
#pragma unroll
    for (int i = 0; i < (kCluster * kFours + kThreads - 1) / kThreads; ++i) {
      const int four = i * kThreads + threadIdx.x;
      if (four < kCluster * kFours) {
        const uint32_t address = remote(plan.counts, four / kFours) + four % kFours * 16;
        reinterpret_cast<uint4*>(plan.gathered)[four] = remote_four(address);
      }
    }
    const uint32_t all = __reduce_add_sync(kFull, of_rank);
    if (__any_sync(kFull, of_rank > kCapacity) || all < k || all > 65535u) {
      cluster_sync();
      return exact(block.flood);
    }
  }
  __syncthreads();
  uint32_t own = 0, both = 0;
  const int pair = kSharedBins / 2 - 1 - static_cast<int>(threadIdx.x);  // bins 2 pair and 2 pair + 1
  if (pair >= 0) {
    own = plan.counts[pair];
#pragma unroll
    for (int j = 0; j < kCluster; ++j) both += plan.gathered[j][pair];
  }
  {
    const uint32_t upper = both >> 16, lower = both & 0xffff;
    const uint32_t upto = block_scan(upper + lower, block.warp_c), above = upto - upper - lower;
    if (above < k && upto >= k) {
      if (above + upper >= k)
        block.cut = {2u * pair + 1, above, upper};
      else
        block.cut = {2u * pair, above + upper, lower};
    }
    __syncthreads();
  }
  const Cut cut = block.cut;
  const uint32_t need = k - cut.above;
  if (cut.inside > kListed) {  // perhaps its lowest score is all of it
    uint32_t key = kFull;
    if (threadIdx.x == 0) block.published[3] = kFull;
    __syncthreads();
    for (uint32_t i = threadIdx.x; i < count; i += kThreads) {
      const float score = plan.candidates[i].score;
      if (clamped_bin(score, gate.low, scale, kSharedBins) - kMagicBits == cut.bin) key = min(key, key_of(score));
    }
    key = __reduce_min_sync(kFull, key);
    if (lane == 0) atomicMin(&block.published[3], key);
    cluster_sync();
    key = __reduce_min_sync(kFull, lane < kCluster ? remote_word(remote(&block.published[3], lane)) : kFull);
    cluster_sync();
    return exact(key);
  }

  const uint32_t bitmap = shared_of(plan.bitmap);
  const float lowest = cut.bin == 0 ? neg_inf() : kMagic + cut.bin;
  const float highest = cut.bin == kSharedBins - 1 ? pos_inf() : kMagic + cut.bin;
  if (pair >= 0) {  // whole warps: kSharedBins / 2 is a multiple of 32
    const uint32_t upper_bin = 2 * pair + 1;
    uint32_t above = (upper_bin > cut.bin ? own >> 16 : 0) + (upper_bin - 1 > cut.bin ? own & 0xffff : 0);
    above = __reduce_add_sync(kFull, above);
    if (lane == 0 && above) shared_add(shared_of(&block.published[2]), above);
  }
  for (uint32_t i = threadIdx.x; i < count; i += kThreads) {
    const Candidate candidate = plan.candidates[i];
    const float t = linear_bin(candidate.score, gate.low, scale);
    if (t > highest)
      mark(bitmap, candidate.position - from);
    else if (!(t < lowest))
      plan.listed[shared_fetch_add(shared_of(&block.published[1]), 1)] = order_of(candidate.score, candidate.position);
  }
  cluster_sync();

  // Everybody's scores around the cut, and how many positions the CTAs before this one have chosen.
  for (uint32_t other = warp; other < kCluster; other += kWarps) {
    const uint32_t address = remote(block.published, other), list = remote(plan.listed, other);
    const uint32_t listed = remote_word(address + 4), above = remote_word(address + 8);
    const uint64_t entry = remote_pair(list + lane * 8);  // before the count is here: one round trip
    if (listed) {
      uint32_t at = 0;
      if (lane == 0) at = shared_fetch_add(shared_of(&block.total), listed);
      at = __shfl_sync(kFull, at, 0);
      if (lane < listed) plan.all_listed[at + lane] = entry;
      for (uint32_t i = 32 + lane; i < listed; i += 32) plan.all_listed[at + i] = remote_pair(list + i * 8);
    }
    if (lane == 0 && other < rank && above) shared_add(shared_of(&block.before), above);
  }
  __syncthreads();
  cluster_arrive();  // nobody leaves while others read its memory
  for (uint32_t i = threadIdx.x; i < cut.inside; i += kThreads) {
    const uint64_t mine = plan.all_listed[i];
    uint32_t place = 0;
#pragma unroll 1
    for (uint32_t j = 0; j < cut.inside; ++j) place += plan.all_listed[j] > mine;
    if (place >= need) continue;
    const uint32_t position = position_of(mine);
    if (position < from)
      shared_add(shared_of(&block.before), 1);
    else if (position < past)
      mark(bitmap, position - from);
  }
  __syncthreads();

  const int words = (past - from + 31) / 32, each = (words + kThreads - 1) / kThreads;
  const int first = threadIdx.x * each, end = min(words, first + each);
  uint32_t bits = 0;
  for (int i = first; i < end; ++i) bits += __popc(plan.bitmap[i]);
  uint32_t slot = block.before + block_scan(bits, block.warp_d) - bits;
  for (int i = first; i < end; ++i)
    for (uint32_t word = plan.bitmap[i]; word; word &= word - 1)
      write_one(a, row, window, slot++, from + i * 32 + 31 - __clz(word & -word));
  cluster_wait();
}

}  // namespace
