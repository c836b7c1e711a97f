// The k first of a row's numbers, score descending, then position ascending, as a bitmap of positions; and its output.
//
// A radix selection over the order itself: bins of the keys between two bounds, the bin of the cut becomes the
// next bounds, until few scores are left in it, which are ranked one against the other. Where one score floods the cut,
// the same over positions. Where the scores are is up to Each: each(visit) calls visit(key, position) for every number
// of the row that may be chosen, by the kThreads threads of a Team.
//
// Compile-time, from mqa_topk_config.py: INDEX_BASE, VALUES, BIN_BITS.
#pragma once

#include "order.cuh"
#include "ptx.cuh"

namespace {

enum IndexBase { kFromStart, kAbsolute, kPlusOffset, kThroughPages };
constexpr IndexBase kIndexBase = static_cast<IndexBase>(INDEX_BASE);
constexpr bool kValues = VALUES;

constexpr int kBinBits = BIN_BITS;
constexpr int kSelectionBins = 1 << kBinBits;
constexpr int kRanked = 256;  // scores that are ranked one against the other

// Where a row's result goes.
struct Output {
  const int* offsets;
  const int* page_table;
  int* indices;
  float* values;
  long long indices_stride, values_stride, page_stride;
  int k, page_size;
};

// kThreads threads of a CTA from kFirst on, whole warps, and a barrier of theirs.
template <int kThreads_, int kBarrier, int kFirst = 0>
struct Team {
  static constexpr int kThreads = kThreads_;
  static constexpr int kWarps = kThreads / 32;
  TOP_K_DEVICE static uint32_t thread() { return threadIdx.x - kFirst; }
  TOP_K_DEVICE static void sync() { ptx::bar_sync<kBarrier, kThreads>(); }
};

struct SelectionRoom {
  uint64_t ranked[kRanked];
  uint32_t bins[kSelectionBins + 4];  // behind the last bin: what belongs to none
  uint32_t warps[32];
  uint32_t listed;
  uint32_t bin, above, inside;  // of the cut
};

// What is chosen: keys above `high`, and of those in [low, high] the positions up to `last`, or, where they are ranked,
// `need` of them.
struct Chosen {
  uint32_t low, high, last, need;
  bool ranked;
};

// Linear bins of keys from `low` on; the last one holds what lies behind, too.
struct Bins {
  uint32_t low;
  int shift;

  TOP_K_DEVICE Bins(uint32_t low_, uint32_t high)
      : low(low_), shift(max(32 - __clz(max(high, low_) - low_) - kBinBits, 0)) {}
  TOP_K_DEVICE uint32_t of(uint32_t key) const { return min((key - low) >> shift, kSelectionBins - 1); }
  TOP_K_DEVICE uint32_t least(uint32_t bin) const { return low + (bin << shift); }
  TOP_K_DEVICE uint32_t most(uint32_t bin) const {
    return bin == kSelectionBins - 1 ? kFull : least(bin) + ((1u << shift) - 1);
  }
};

// Of a candidate, whose score is a number and no -0: append.cuh.
TOP_K_DEVICE uint32_t key_of_candidate(uint32_t bits) {
  return bits ^ (static_cast<uint32_t>(static_cast<int>(bits) >> 31) | 0x80000000u);
}

template <class Team>
struct Selection {
  static constexpr int kOwnBins = kSelectionBins / Team::kThreads;
  static_assert(kOwnBins == 4, "one vector of bins a thread");

  SelectionRoom& room;
  uint32_t* bitmap;
  uint32_t* before;  // of each vector of the bitmap, how many bits come before it: where values are asked for

  // Inclusive, over the team.
  TOP_K_DEVICE uint32_t scan(uint32_t value) {
    const int lane = threadIdx.x % 32, warp = Team::thread() / 32;
    value = warp_scan(value);
    if (lane == 31) room.warps[warp] = value;
    Team::sync();
    return value + __reduce_add_sync(kFull, lane < warp ? room.warps[lane] : 0);
  }

  // From the highest bin down, the one in which the count reaches `need`: false if none does. Clears the bins.
  TOP_K_DEVICE bool find_cut(uint32_t need) {
    Team::sync();
    uint4* own = reinterpret_cast<uint4*>(room.bins) + (Team::kThreads - 1 - Team::thread());
    const uint4 four = *own;
    *own = make_uint4(0, 0, 0, 0);
    const uint32_t counts[4] = {four.w, four.z, four.y, four.x}, sum = four.x + four.y + four.z + four.w;
    if (Team::thread() == 0) room.inside = 0;
    const uint32_t upto = scan(sum);
    uint32_t above = upto - sum;
    if (above < need && upto >= need) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (above < need && above + counts[i] >= need) {
          room.bin = kSelectionBins - 1 - (Team::thread() * 4 + i);
          room.above = above, room.inside = counts[i];
        }
        above += counts[i];
      }
    }
    Team::sync();
    return room.inside > 0;
  }

  // Narrows [low, high] to the bin of the cut until it holds no more than `enough`, or one number. value(key, position)
  // is what is binned, or a number outside; `need` becomes how many of the bin are chosen. False: fewer than `need`.
  template <class Each, class Value>
  TOP_K_DEVICE bool narrow(Each each, Value value, uint32_t& low, uint32_t& high, uint32_t& need, uint32_t enough) {
    while (true) {
      const int width = 32 - __clz(high - low), shift = max(width - kBinBits, 0);
      each([&](uint32_t key, uint32_t position) {
        const uint32_t from_low = value(key, position) - low;
        if (from_low <= high - low) shared_add(shared_of(room.bins + (from_low >> shift)), 1);
      });
      if (!find_cut(need)) return false;
      low += room.bin << shift;
      high = low + ((1u << shift) - 1);
      need -= room.above;
      if (room.inside <= enough || room.inside == need || shift == 0) return true;
    }
  }

  // Of the keys within [low, high] `need` are chosen, and all above: which those are. The bins are clear. `narrowed`:
  // [low, high] is a bin that find_cut has found.
  template <class Each>
  TOP_K_DEVICE Chosen decide(Each each, uint32_t low, uint32_t high, uint32_t need, bool narrowed = false) {
    if (!narrowed && !narrow(each, [](uint32_t key, uint32_t) { return key; }, low, high, need, kRanked))
      return {1, 0, kFull, 0, false};  // all numbers
    const uint32_t inside = room.inside;
    if (inside <= kRanked || inside <= need) return {low, high, kFull, need, inside > need};
    uint32_t first = 0x80000000u, last = kFull;  // ~position: the smaller comes first
    narrow(each, [=](uint32_t key, uint32_t position) { return key == low ? ~position : 0u; }, first, last, need, 0);
    return {low, high, ~first, need, false};
  }

  // Fills the bitmap of `words` words, whose bits are clear and count positions from `start` on, with what is chosen.
  template <class Each>
  TOP_K_DEVICE void mark(Each each, const Chosen& chosen, uint32_t start, uint32_t words) {
    if (Team::thread() == 0) room.listed = 0;
    Team::sync();
    const auto mark_one = [&](uint32_t position) {
      const uint32_t bit = position - start;
      if (bit < words * 32) shared_or(shared_of(bitmap + bit / 32), 1u << (bit % 32));
    };
    each([&](uint32_t key, uint32_t position) {
      if (key < chosen.low) return;
      if (key > chosen.high) {
        mark_one(position);
      } else if (chosen.ranked) {
        const uint32_t slot = shared_fetch_add(shared_of(&room.listed), 1);
        room.ranked[slot] = static_cast<uint64_t>(key) << 32 | (kFull - position);
      } else if (position <= chosen.last) {
        mark_one(position);
      }
    });
    Team::sync();
    if (!chosen.ranked) return;
    const uint32_t count = room.listed;
    for (uint32_t i = Team::thread(); i < count; i += Team::kThreads) {
      const uint64_t mine = room.ranked[i];
      uint32_t rank = 0;
#pragma unroll 4
      for (uint32_t j = 0; j < count; ++j) rank += room.ranked[j] > mine;
      if (rank < chosen.need) mark_one(kFull - static_cast<uint32_t>(mine));
    }
    Team::sync();
  }

  // Calls put(slot, position) for the bits of the bitmap of `words` words, a multiple of 4, in order; returns their
  // number.
  template <class Put>
  TOP_K_DEVICE uint32_t in_order(uint32_t words, uint32_t start, Put put) {
    const uint32_t vectors = words / 4, each = (vectors + Team::kThreads - 1) / Team::kThreads;
    const uint32_t first = Team::thread() * each, past = min(first + each, vectors);
    uint32_t own = 0;
#pragma unroll 1
    for (uint32_t v = first; v < past; ++v) {
      const uint4 four = reinterpret_cast<const uint4*>(bitmap)[v];
      own += __popc(four.x) + __popc(four.y) + __popc(four.z) + __popc(four.w);
    }
    const uint32_t upto = scan(own);
    uint32_t slot = upto - own;
#pragma unroll 1
    for (uint32_t v = first; v < past; ++v) {
      if constexpr (kValues) before[v] = slot;
      const uint4 four = reinterpret_cast<const uint4*>(bitmap)[v];
      const uint32_t some[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        for (uint32_t rest = some[i]; rest; rest &= rest - 1) {
          put(slot++, start + v * 128 + i * 32 + (__ffs(rest) - 1));
        }
      }
    }
    const int lane = threadIdx.x % 32;
    return __reduce_add_sync(kFull, lane < Team::kWarps ? room.warps[lane] : 0);
  }

  // Of a bit that is set: what in_order has called put with. A barrier comes between.
  TOP_K_DEVICE uint32_t slot_of(uint32_t bit) const {
    uint32_t slot = before[bit / 128] + __popc(bitmap[bit / 32] & ((1u << bit % 32) - 1));
    for (uint32_t word = bit / 128 * 4; word < bit / 32; ++word) slot += __popc(bitmap[word]);
    return slot;
  }
};

// The number that leaves for a position of a row whose window starts at `start`.
TOP_K_DEVICE int index_of(const Output& out, int row, int start, int position) {
  if constexpr (kIndexBase == kAbsolute) return position;
  const int relative = position - start;
  if constexpr (kIndexBase == kPlusOffset) return relative + __ldg(out.offsets + row);
  if constexpr (kIndexBase == kThroughPages) {
    const int page = relative / out.page_size;
    return __ldg(out.page_table + row * out.page_stride + page) * out.page_size + relative - page * out.page_size;
  }
  return relative;
}

TOP_K_DEVICE int* indices_of(const Output& out, int row) { return out.indices + row * out.indices_stride; }
TOP_K_DEVICE float* values_of(const Output& out, int row) { return out.values + row * out.values_stride; }

// A row's results: what is chosen of `each`, in the order of positions, through a bitmap of `words` words, a multiple
// of 4, at a time; -1 up to k, and -inf among its values. `staged`: shared memory for k positions, where `each` may lie
// while it is read.
template <class Team, class Each>
TOP_K_DEVICE void write_chosen(Selection<Team> selection, Each each, const Chosen& chosen, const Output& out, int row,
                               int start, int end, uint32_t words, int* staged) {
  int* indices = indices_of(out, row);
  uint32_t slots = 0;
  const bool stages = !kValues && end - start <= 32 * words;  // else a candidate is read again behind
#pragma unroll 1
  for (int from = start; from < end; from += 32 * words) {
    const uint32_t here = min(words, (end - from + 127) / 128 * 4);
#pragma unroll 1
    for (uint32_t i = Team::thread(); i < here / 4; i += Team::kThreads)
      reinterpret_cast<uint4*>(selection.bitmap)[i] = make_uint4(0, 0, 0, 0);
    selection.mark(each, chosen, from, here);
    const uint32_t some = selection.in_order(here, from, [&](uint32_t slot, uint32_t position) {
      const int index = index_of(out, row, start, position);
      if (stages)
        staged[slot] = index;
      else
        indices[slots + slot] = index;
    });
    Team::sync();
    if constexpr (kValues) {
      each([&](uint32_t key, uint32_t position) {
        const uint32_t bit = position - from;
        if (key > 0 && bit < here * 32 && (selection.bitmap[bit / 32] >> bit % 32 & 1))
          values_of(out, row)[slots + selection.slot_of(bit)] = score_of(key);
      });
      Team::sync();
    }
    slots += some;
  }
#pragma unroll 1
  for (uint32_t slot = Team::thread(); stages && slot < slots; slot += Team::kThreads) indices[slot] = staged[slot];
#pragma unroll 1
  for (uint32_t slot = slots + Team::thread(); slot < out.k; slot += Team::kThreads) {
    indices[slot] = -1;
    if constexpr (kValues) values_of(out, row)[slot] = neg_inf();
  }
}

}  // namespace
