// fp8_paged_mqa_logits for Hopper (sm_90a).
//
//   logits[b * next_n + j, n] = scale[n] * sum_h w[b * next_n + j, h] * relu(q[b, j, h, :] . k[n, :])
//                               for n < length(b, j), -inf behind
//
// Key n of sequence b is key n % page of block tables[b][n / page]. A CTA has `workers`, each a producer warp and a
// math warpgroup with its own queue of q and key tiles, and fill warps. paged_geometry.cuh has the constants and the
// shared memory, paged_plan.cuh the division of the work, head_sum.cuh the ReLU and the weighted sum.
//
// Tile. 64 keys, the M of a WGMMA, by the heads of kGroupRows rows of one sequence, its N. A tile is loaded once and
// multiplied with each group of rows. A page of 64 keys comes as one tensor load, its scales behind its keys.
//
// Sums. Column 8c + 2t + b of a product lies in lane t of a quad. Where rows come in fours, t picks the row and no
// value crosses a lane; else two or four lanes share the heads of a row, and add up while they part the keys between
// them.
//
// -inf. Behind the last tile of a sequence it comes from the fill warps; inside tiles from the math warps.
#include "paged_fp4_multiply.cuh"
#include "paged_plan.cuh"
#include "paged_sums.cuh"
#include "wgmma.cuh"

namespace {

// ---- producer warp ----

// Where the weight of a group's (row, head) lies in shared memory: a lane wants those of its own columns, four at a
// time, next to those of the three other lanes of its quad. TMA lays q out in the same order.
__device__ __forceinline__ int place_of_weight(int row, int head) {
  const int lane = row % kRowsAtOnce * kLanesPerRow + head % (2 * kLanesPerRow) / 2;
  const int i = 2 * (row / kRowsAtOnce * kColumnPairs + head / (2 * kLanesPerRow)) + head % 2;
  return i / 4 * 16 + lane * 4 + i % 4;
}

__device__ __forceinline__ void produce(const Arguments& a, Shared& shared, int worker, const Guess& guess,
                                        const ptx::TensorMap* q_map, const ptx::TensorMap* k_map) {
  Worker& s = shared.worker[worker];
  const int lane = threadIdx.x % 32;
  const uint64_t policy = ptx::evict_first_policy();  // keys are read once
  int q_count = 0, k_stage = 0, k_parity = 1;

  // One lane waits and loads: another could come so late that a barrier is a phase further.
  const auto load_k = [&](const Unit& unit) {
    ptx::barrier_wait(&s.k_empty[k_stage], k_parity);
    uint64_t* full = &s.k_full[k_stage];
    unsigned char* stage = s.k[k_stage];
    if constexpr (kScalesInLoad) {
      ptx::barrier_arrive_expect(full, KBox::kBytes);
      if constexpr (kFp4) {
        ptx::bulk_load(stage, a.cache + unit.block[0] * a.cache_stride, KBox::kBytes, full, policy);
      } else {
        ptx::load_3d(stage, k_map, full, 0, 0, unit.block[0], policy);
      }
    } else {
      const int part = unit.tile % kTilesPerPage * kBlockKeys;  // first key of the tile in its page
      ptx::barrier_arrive_expect(full, unit.blocks * (KBox::kBytes + 4 * kBlockKeys));
#pragma unroll
      for (int i = 0; i < kBlocks; ++i) {
        if (i >= unit.blocks) break;
        const unsigned char* block = a.cache + unit.block[i] * a.cache_stride;
        if constexpr (kFp4) {
          ptx::bulk_load(stage + i * KBox::kBytes, block + part * kRowBytes, KBox::kBytes, full, policy);
        } else {
          ptx::load_3d(stage + i * KBox::kBytes, k_map, full, 0, part, unit.block[i], policy);
        }
        ptx::bulk_load(stage + kTileBytes + i * 4 * kBlockKeys, block + kPage * kRowBytes + 4 * part, 4 * kBlockKeys,
                       full, policy);
      }
    }
    if (++k_stage == kKStages) k_stage = 0, k_parity ^= 1;
  };
  const auto load_q = [&](const Unit& unit) {
    const int stage = q_count % kQStages;
    ptx::barrier_wait(&s.q_empty[stage], (q_count / kQStages & 1) ^ 1);
    if (lane == 0) {
      s.segment[stage].sequence = unit.sequence;
      s.segment[stage].first_tile = unit.tile;
      s.segment[stage].tiles = unit.left;
      ptx::barrier_arrive_expect(&s.q_full[stage], kQBytes);
#pragma unroll
      for (int row = 0; row < kGroups * kGroupRows; row += kRowsAtOnce) {  // rows past next_n are zeros
        ptx::load_5d(s.q[stage] + row * kHeads * kHeadDim, q_map, &s.q_full[stage], 0, 0, row, 0, unit.sequence);
      }
    }
  };
  const auto load_weights = [&](const Unit& unit) {
    const int stage = q_count++ % kQStages;
    const float* weights = a.weights + static_cast<long long>(unit.sequence) * kNextN * a.w_stride;
#pragma unroll 4
    for (int pair = lane; pair < kNextN * kHeads; pair += 32) {
      const int row = pair / kHeads, head = pair % kHeads;
      ptx::copy_4(&s.weights[stage][row / kGroupRows][place_of_weight(row % kGroupRows, head)],
                  weights + row * a.w_stride + head);
    }
    if (lane < kNextN) {
      ptx::copy_4(&s.segment[stage].lengths[lane],
                  a.lengths + unit.sequence * a.length_stride + lane * a.row_length_stride);
    }
    ptx::barrier_arrive_copies(&s.q_full[stage]);
  };

  // Rounds of units, one a lane. The next one is looked up behind the first loads of a round, while those are on their
  // way; the first round is as many as load at once.
  const Piece piece(a, shared, blockIdx.x + worker * gridDim.x);
  int hint = min(max(guess.sequence, 0) >> Entries(a.batch).shift, Entries(a.batch).count - 1);
  int place = piece.begin, count = 0, most = kKStages;
#pragma unroll 1
  do {
    const int round_place = place, round_count = count;
    Unit mine;
    int i = 0;
#pragma unroll 1
    do {
      int last = min(round_count, i == 0 ? kKStages : 32);
      if (round_count > 0) {
        const Unit& unit = s.unit[i];
        const bool opens = round_place + i == piece.begin || unit.tile == 0;
        last = min(last, i + unit.left);
        if (lane == 0) load_k(unit);  // what takes longest
        if (opens) load_q(unit), load_weights(unit);
        if (lane == 0) {
#pragma unroll 1
          for (int j = i + 1; j < last; ++j) load_k(s.unit[j]);
        }
        __syncwarp();
      }
      if (i == 0) {
        place += round_count;
        count = max(min(piece.end - place, most), 0), most = 32;
        if (lane < count) mine = unit_at(a, shared, place + lane, piece.end, hint, guess);
      }
      i = last;
    } while (i < round_count);
    if (lane < count) s.unit[lane] = mine;
    __syncwarp();
  } while (count > 0);
  const int stage = q_count % kQStages;
  ptx::barrier_wait(&s.q_empty[stage], (q_count / kQStages & 1) ^ 1);
  if (lane == 0) {
    s.segment[stage].tiles = 0;
    ptx::barrier_arrive(&s.q_full[stage]);  // in place of the loads
  }
  ptx::barrier_arrive_copies(&s.q_full[stage]);
}

// ---- fill warps ----

constexpr int kFillColumns = 2048;

__device__ __forceinline__ void fill(const Arguments& a, Shared& s, int warp) {
  const int lane = threadIdx.x % 32, rows = a.batch * kNextN;
  constexpr int kWords = sizeof(s.neg_inf) / 4;
  for (int i = warp * 32 + lane; i < kWords; i += 32 * kFillWarps) s.neg_inf[i] = kNegInfPair;
  ptx::fence_async_proxy();
  ptx::bar_sync<kFillReady, 32 * kFillWarps>();
  const uint64_t policy = ptx::evict_first_policy();
  // A unit is a row, or part of its columns where rows are few.
  const int warps = kFillWarps * gridDim.x;
  const int parts = max(1, min(4 * warps / rows, a.width / kFillColumns));
  const int columns = ((a.width - 1) / parts / kFillColumns + 1) * kFillColumns;
#pragma unroll 1
  for (int unit = blockIdx.x + warp * gridDim.x; unit < rows * parts; unit += warps) {
    // The last parts may begin past the width, by parts * kFillColumns at most: the gate leaves that room in an int.
    const int row = unit / parts, begin = unit % parts * columns, end = min(begin + columns, a.width);
    const int computed = tiles_of(longest(a, row / kNextN)) * kTileKeys;
    fill_row(a.out + row * a.out_stride, max(begin, computed), end, s.neg_inf, policy, lane);
  }
  ptx::bulk_commit();
  ptx::bulk_wait_all();
}

// ---- math warpgroups ----

// Where the scale of a key lies in its stage: rows behind the keys are swizzled like them.
__device__ __forceinline__ int place_of_scale(int key) {
  const int place = kTileBytes + 4 * key;
  if constexpr (!kScalesInLoad) return place;
  return place ^ (place >> 7 & (kHeadDim / 16 - 1)) << 4;
}

// A scale times 2^25, which the ReLU has taken away.
__device__ __forceinline__ float scale_from(uint32_t word) {
#if UE8M0
  const uint32_t exponent = word & 0xFF;
  const uint32_t bits = exponent == 0 ? 0x00400000u : exponent == 255 ? 0x7FC00000u : exponent << 23;
  return 0x1p25f * __uint_as_float(bits);
#else
  return 0x1p25f * __uint_as_float(word);
#endif
}

__device__ __forceinline__ void multiply(const Arguments& a, Worker& s) {
  const int lane = threadIdx.x % 32;
  const int my_row = kLanesPerRow == 1 ? lane % 4 : lane % 4 / 2;
  const int my_key = threadIdx.x % 128 / 32 * 16 + lane / 4 + (kKeysPerLane == 1 ? lane % 2 * 8 : 0);

  const uint64_t k_tiles = ptx::matrix_descriptor<kHeadDim>(s.k[0]);
  int k_stage = 0, k_parity = 0;
  bool k_ready = false;
  // Of the product whose sums are not stored yet; before the first, nothing lies below the width.
  Out* out = a.out;
  int key = a.width, length[kStoredRows] = {}, stored_rows = 0;
  Sums sum;
  float scale[kKeysPerLane];
  Weights w;
  Accumulators d;

  const auto store = [&]() {
#pragma unroll
    for (int r = 0; r < kStoredRows; ++r) {
      Out* target = out + r * kRowsApart * a.out_stride;
#pragma unroll
      for (int e = 0; e < kKeysPerLane; ++e) {
        const int n = key + 8 * e;
        float value = fmaf(sum[r][e], scale[e], 0.0f);  // + 0.0 turns -0.0 into +0.0
        bool write = r * kRowsApart < stored_rows;
        if constexpr (kClean) {
          if (n >= length[r]) value = -__int_as_float(0x7F800000);
          write &= n < a.width;
        } else {
          write &= n < length[r];
        }
        if (write) target[n] = to_out(value);
      }
    }
  };

#pragma unroll
  for (int r = 0; r < kStoredRows; ++r) {
#pragma unroll
    for (int e = 0; e < kKeysPerLane; ++e) sum[r][e] = 0.0f, scale[e] = 0.0f;
  }

  for (int q_count = 0;; ++q_count) {
    const int q_stage = q_count % kQStages;
    ptx::barrier_wait(&s.q_full[q_stage], q_count / kQStages & 1);
    const Segment& segment = s.segment[q_stage];
    const int tiles = uniform(segment.tiles);
    if (tiles == 0) break;
    const uint64_t q_tile = ptx::matrix_descriptor<kHeadDim>(s.q[q_stage]);
    int tile_key = segment.first_tile * kTileKeys + my_key;
#pragma unroll 1
    for (int i = 0; i < tiles; ++i, tile_key += kTileKeys) {
      if (!k_ready) ptx::barrier_wait(&s.k_full[k_stage], k_parity);
      float tile_scale[kKeysPerLane];
#pragma unroll
      for (int e = 0; e < kKeysPerLane; ++e) {
        tile_scale[e] = scale_from(*reinterpret_cast<const uint32_t*>(s.k[k_stage] + place_of_scale(my_key + 8 * e)));
      }
#pragma unroll 1
      for (int group = 0; group < kGroups; ++group) {
        // S [64 keys, kPairs] = K tile x Q^T of the group's rows
        ptx::wgmma_fence();
#pragma unroll
        for (int step = 0; step < kHeadDim / 32; ++step) {  // 32 bytes further along the rows: 2 units of 16
          ptx::wgmma(d, k_tiles + k_stage * (kKStageBytes / 16) + 2 * step,
                     q_tile + group * (kPairs * kHeadDim / 16) + 2 * step, step != 0);
        }
        ptx::wgmma_commit();
        store();  // of the product before, while this one runs
        if (kGroups > 1 || i == 0) {
          load_weights(s.weights[q_stage][group], lane, w);
          const int row = group * kGroupRows + my_row;  // of the sequence
          stored_rows = min(kGroupRows - my_row, kNextN - row);
          out = a.out + (static_cast<long long>(segment.sequence) * kNextN + row) * a.out_stride;
#pragma unroll
          for (int r = 0; r < kStoredRows; ++r) {
            const int stored = min(row + r * kRowsApart, kNextN - 1);
            length[r] = length_of(a, segment.lengths[stored], stored);
          }
        }
        key = tile_key;
#pragma unroll
        for (int e = 0; e < kKeysPerLane; ++e) scale[e] = tile_scale[e];
        ptx::wgmma_wait_all();
        if (group == kGroups - 1) {
          __syncwarp();
          if (lane == 0) ptx::barrier_arrive(&s.k_empty[k_stage]);
          if (++k_stage == kKStages) k_stage = 0, k_parity ^= 1;
          k_ready = ptx::barrier_test(&s.k_full[k_stage], k_parity);
        }
        sum_heads(d, w, lane, sum);
      }
    }
    ptx::barrier_arrive(&s.q_empty[q_stage]);
  }
  store();
}

__device__ __forceinline__ void init_barriers(Worker& s) {
#pragma unroll
  for (int i = 0; i < kQStages; ++i) {
    ptx::barrier_init(&s.q_full[i], 1 + 32);  // the loads, the producer warp's copies
    ptx::barrier_init(&s.q_empty[i], 128);
  }
#pragma unroll
  for (int i = 0; i < kKStages; ++i) {
    ptx::barrier_init(&s.k_full[i], 1);
    ptx::barrier_init(&s.k_empty[i], 4);
  }
}

// At a place of its own for each kind of warp: what the math warps do in sum_tiles and behind it. Publishes the
// mbarriers and the prefix sums.
__device__ __forceinline__ void all_here() { ptx::bar_sync<kAllHere, kThreads>(); }

}  // namespace

extern "C" __global__ void __launch_bounds__(kThreads, kCtasPerSm)
    KERNEL_NAME(const __grid_constant__ ptx::TensorMap q_map, const __grid_constant__ ptx::TensorMap k_map,
                const __grid_constant__ Arguments a) {
  extern __shared__ __align__(1024) unsigned char raw[];
  Shared& s = *reinterpret_cast<Shared*>(raw);
  if (ptx::shared_address(raw) % 1024 != 0) ptx::trap();  // the swizzle pattern counts from there
  const int other = static_cast<int>(threadIdx.x / 32) - kMathThreads / 32;
  if (other < 0) {  // a math warp
    sum_tiles(a, s);
    all_here();
    if constexpr (kMoveRegisters) ptx::setmaxnreg_inc<kMathRegisters>();
    if constexpr (kFp4) {
      multiply_fp4(a, s, s.worker[uniform(threadIdx.x / 128)]);
    } else {
      multiply(a, s.worker[uniform(threadIdx.x / 128)]);
    }
    return;
  }
  if constexpr (kMoveRegisters) ptx::setmaxnreg_dec<kOtherRegisters>();
  if (other < kWorkers) {
    const Guess guess = guess_unit(a, blockIdx.x + other * gridDim.x);
    all_here();
    all_here();
    produce(a, s, other, guess, &q_map, &k_map);
  } else {
    if (other == kWorkers && threadIdx.x % 32 == 0) {
      ptx::prefetch_map(&q_map);
      ptx::prefetch_map(&k_map);
#pragma unroll
      for (Worker& worker : s.worker) init_barriers(worker);
      ptx::barrier_init_fence();
    }
    if (kFp4 && other == kWorkers) write_magnitudes(s, threadIdx.x % 32);
    __syncwarp();
    all_here();
    all_here();
    if constexpr (kClean) fill(a, s, other - kWorkers);
  }
}
