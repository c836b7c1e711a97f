// One CTA, one row longer than its registers: a single streaming pass.
#pragma once

#include "top_k_gate.cuh"

namespace {

// The gate once more, for the second of two equal compares: the predicates of the first as bits in a register would
// cost three instructions each, where comparing again takes one.
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
        asm("{\n.reg .pred p;\nsetp.ge.f32 p, %1, %2;\n@p add.u32 %0, %0, 1;\n}"
            : "+r"(own)
            : "f"(score_in(x[u], c)), "f"(gate));
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
      for (int c = 0; c < kPack; ++c) {
        const float score = score_in(x[u], c);
        asm volatile(
            "{\n.reg .pred p;\nsetp.ge.f32 p, %1, %2;\n"
            "@p st.shared.v2.b32 [%0], {%3, %4};\n@p add.u32 %0, %0, 8;\n}"
            : "+r"(at)
            : "f"(score), "f"(same_gate), "r"(__float_as_uint(score)), "r"(position + u * apart + c)
            : "memory");
      }
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
      asm volatile("st.shared.v2.b32 [%0], {%1, %2};" ::"r"(candidates + at * 8), "r"(__float_as_uint(score)),
                   "r"(position)
                   : "memory");
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
TOP_K_DEVICE void mark(uint32_t bitmap, uint32_t relative) {
  shared_or(bitmap + relative / 32 * 4, 1u << (relative % 32));
}

TOP_K_DEVICE void stream_row(const Arguments& a, int row, const Window& window) {
  StreamPlan& plan = *reinterpret_cast<StreamPlan*>(dynamic_shared);
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const uint32_t k = a.k;

  // Tile t holds chunks t, t + tiles, t + 2 tiles, ... of 32 vectors, so that tile 0 samples the whole row evenly.
  const uint32_t vectors = window.full_hi - window.full_lo, chunks = (vectors + 31) / 32;
  const uint32_t tiles = (chunks + kWarps * kVectors - 1) / (kWarps * kVectors);
  const uint32_t own = window.full_lo + warp * tiles * 32 + lane, apart = kWarps * tiles * 32;
  // Past the warp's last chunk of tile 0.
  const uint32_t top = window.full_lo + ((warp + (kVectors - 1) * kWarps) * tiles + 1) * 32;
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
  for (uint32_t i = threadIdx.x; i < count; i += kThreads)
    count_bin(base, plan.candidates[i].score, gate.low, scale, kBins);
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
