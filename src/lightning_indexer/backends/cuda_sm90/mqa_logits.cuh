// fp8_mqa_logits for Hopper (sm_90a).
//
//   logits[m, n] = kv_scale[n] * sum_h w[m, h] * relu(q[m, h, :] . k[n, :])   inside row m's window, -inf elsewhere
//
// One CTA per SM, 384 threads: two workers, each a producer warp and a math warpgroup with its own queue of q
// and key tiles, and two fill warps. geometry.cuh has the constants, shared.cuh the shared memory, head_sum.cuh the
// epilogue of a product, schedule.cuh the division of the work.
//
// Tile. A math warpgroup multiplies 64 keys by 256 (row, head) pairs: m64n256k32, D/32 of them. The pairs are laid out
// so that column 8j + 2t + b of the product belongs to row t (and t + 4, ...) of the row block. In WGMMA's result
// layout lane t of a quad holds exactly those columns: every lane sums all heads of its own rows, and no value crosses
// a lane (one does at H = 128). Eight lanes of equal t hold eight neighbouring keys of one row: each store fills whole
// 32-byte sectors.
//
// ReLU. |score| <= 448 * 448 * 128 < 2^25, so saturate(score * 2^-25) is relu(score) * 2^-25 exactly, one FMUL.SAT on
// the full-rate FMA pipe instead of FMNMX on the half-rate ALU pipe; kv_scale takes the 2^25 back.
//
// Overlap. Two workers share the tensor cores: while one sums heads, the other's product runs. A tile is scaled and
// stored after the next product is issued, also across row blocks (whose weights are read there too), so that between
// two products of a worker there is little besides the sums.
//
// -inf. What lies outside the tiles of a row block is filled by the fill warps with bulk stores, beside the product.
#include "head_sum.cuh"
#include "out.cuh"
#include "schedule.cuh"
#include "wgmma.cuh"

namespace {

// ---- producer warp ----

// What the producer warp reads of one row block: a window a lane, and the weights of 256 pairs. Loaded one block ahead,
// so that their latency lies under the loads of the block before.
struct Ahead {
  int ks, lo, hi;
  float weights[G::kPairs / 32];

  __device__ __forceinline__ void load(const Arguments& a, int block) {
    const int lane = threadIdx.x % 32, row = block * G::kRows + lane;
    const bool real = lane < G::kRows && row < a.rows;
    ks = real ? __ldg(a.ks + row) : 0;
    lo = max(ks, 0);
    hi = real ? window_end(a, ks, __ldg(a.ke + row)) : 0;
#pragma unroll
    for (int i = 0; i < G::kPairs / 32; ++i) {
      const int pair = i * 32 + lane, w_row = block * G::kRows + pair / G::kHeads;
      weights[i] = w_row < a.rows ? __ldg(a.weights + w_row * a.w_stride + pair % G::kHeads) : 0.0f;
    }
  }
};

__device__ void produce(const Arguments& a, Worker& s, const Piece& piece, const ptx::TensorMap* q_map,
                        const ptx::TensorMap* k_map) {
  const int lane = threadIdx.x % 32;
  int q_count = 0, k_stage = 0, k_parity = 1;
  // A stretch [skip, end) of a row block's cost: which of its tiles that is.
  struct Tiles {
    int first, count;
  };
  const auto tiles_of = [&](int skip, int end) -> Tiles {
    const int first = max(skip - a.enter_cost, 0);
    return {first, max(end - a.enter_cost, 0) - first};
  };
  const auto load_k = [&](int key) {
    ptx::barrier_wait(&s.k_empty[k_stage], k_parity);
    ptx::barrier_arrive_expect(&s.k_full[k_stage], G::kKTileBytes);
    ptx::load_2d(s.k[k_stage], k_map, &s.k_full[k_stage], 0, key);
    if (++k_stage == G::kKStages) k_stage = 0, k_parity ^= 1;
  };
  // q and the first keys of a row block.
  const auto start = [&](int block, int first_key) {
    const int q_stage = q_count % G::kQStages;
    ptx::barrier_wait(&s.q_empty[q_stage], (q_count / G::kQStages & 1) ^ 1);
    if (lane == 0) {
      ptx::barrier_arrive_expect(&s.q_full[q_stage], G::kQTileBytes);
#pragma unroll
      for (int r = 0; r < G::kRows; r += G::kRowsPerLoad) {
        ptx::load_5d(s.q[q_stage] + r * G::kHeads * G::kHeadDim, q_map, &s.q_full[q_stage], 0, 0, 0,
                     block * G::kRows + r, 0);
      }
      load_k(first_key);
    }
  };

  int skip = piece.skip, remaining = piece.cost;
  // Where the span of the first row block is known already, its loads do not wait for its windows.
  bool started = false;
  if (piece.span.tiles > 0) {
    const Tiles tiles = tiles_of(skip, min(piece.span.cost(a), skip + remaining));
    started = tiles.count > 0;
    if (started) start(piece.block, piece.span.first_key + tiles.first * G::kTileKeys);
  }
  Ahead next;
  if (remaining > 0) next.load(a, piece.block);
#pragma unroll 1
  for (int block = piece.block; remaining > 0; ++block) {
    const Ahead now = next;
    const Span span = span_of_lanes(now.lo, now.hi);
    const int end = min(span.cost(a), skip + remaining);
    const Tiles tiles = tiles_of(skip, end);
    remaining -= end - skip;
    skip = 0;
    if (remaining > 0) next.load(a, block + 1);
    if (tiles.count <= 0) continue;
    const int first_key = span.first_key + tiles.first * G::kTileKeys;
    if (!started) start(block, first_key);  // before the weights, which may still be on their way, are written
    started = false;
    const int q_stage = q_count++ % G::kQStages;
    // A row past M has the empty window [0, 0): no tile of its block is whole, and it stores nothing.
    RowBlock& info = s.block[q_stage];
    const int inner_lo = __reduce_max_sync(~0u, lane < G::kRows ? now.lo : 0);
    const int inner_hi = __reduce_min_sync(~0u, lane < G::kRows ? now.hi : 0x7FFFFFFF);
    if (lane == 0) {
      info.first_row = block * G::kRows;
      info.first_key = first_key;
      info.tiles = tiles.count;
      info.inner_lo = inner_lo;
      info.inner_hi = inner_hi;
    }
    if (lane < G::kRows) {
      info.lo[lane] = now.lo;
      info.hi[lane] = now.hi;
      info.origin[lane] = kCompressed ? now.ks : 0;
    }
#pragma unroll
    for (int i = 0; i < G::kPairs / 32; ++i)
      s.weights[q_stage][HeadSum<G>::place_of_weight(i * 32 + lane)] = now.weights[i];
    ptx::barrier_arrive(&s.q_full[q_stage]);
    if (lane == 0) {
#pragma unroll 1
      for (int tile = 1; tile < tiles.count; ++tile) load_k(first_key + tile * G::kTileKeys);
    }
    __syncwarp();
  }
  const int q_stage = q_count % G::kQStages;
  ptx::barrier_wait(&s.q_empty[q_stage], (q_count / G::kQStages & 1) ^ 1);
  if (lane == 0) {
    s.block[q_stage].tiles = 0;
    ptx::barrier_arrive(&s.q_full[q_stage]);  // in place of the loads
  }
  ptx::barrier_arrive(&s.q_full[q_stage]);
}

// Small problems are all latency: while the pieces are found, the CTAs bring q, weights and the first keys into the L2
// together, whoever will need them. One warp calls it, just after the math warps have asked for the windows, which must
// not queue behind.
__device__ void warm_l2(const Arguments& a, const ptx::TensorMap* k_map) {
  if (number_of_blocks(a) > G::kWorkers * gridDim.x) return;
  const int lane = threadIdx.x % 32;
#pragma unroll 1
  for (int i = blockIdx.x; i < number_of_blocks(a); i += gridDim.x) {
    const int row = i * G::kRows + lane;
    if (lane < G::kRows && row < a.rows) {
      if (a.q != nullptr) ptx::bulk_prefetch(a.q + row * a.q_stride, G::kHeads * G::kHeadDim);
#pragma unroll
      for (int h = 0; h < G::kHeads; h += 32) ptx::prefetch(a.weights + row * a.w_stride + h);
    }
    if (lane == 0 && i * G::kTileKeys < a.keys) ptx::prefetch_2d(k_map, 0, i * G::kTileKeys);
  }
}

// ---- fill warps ----

__device__ void fill(const Arguments& a, Shared& s, int warp) {
  const int lane = threadIdx.x % 32, blocks = (a.rows + G::kRows - 1) / G::kRows;
  ptx::bar_sync<kPiecesFound, 32 * (G::kWorkers + G::kFillWarps)>();  // s.cost lay where s.neg_inf is
  for (int i = warp * 32 + lane; i < kScratch; i += 32 * G::kFillWarps) s.neg_inf[i] = kNegInfPair;
  ptx::fence_async_proxy();
  ptx::bar_sync<kFillReady, 32 * G::kFillWarps>();
  const uint64_t policy = ptx::evict_first_policy();
  // A unit is a row block, or part of its columns where row blocks are few.
  const int warps = G::kFillWarps * gridDim.x;
  const int parts = max(1, min(4 * warps / blocks, a.keys / kFillColumns));
  const int columns = ((a.keys - 1) / parts / kFillColumns + 1) * kFillColumns;
  for (int unit = blockIdx.x + warp * gridDim.x; unit < blocks * parts; unit += warps) {
    // The last parts may begin past N, by parts * kFillColumns at most: the gate's MAX_KEYS leaves that room in an int.
    const int block = unit / parts, begin = unit % parts * columns, end = min(begin + columns, a.keys);
    int lo = 0, hi = 0;
    const int row = block * G::kRows + lane;
    if (lane < G::kRows && row < a.rows) lo = max(__ldg(a.ks + row), 0), hi = min(__ldg(a.ke + row), a.keys);
    const Span span = span_of_lanes(lo, hi);
    const long long last = static_cast<long long>(span.first_key) + span.tiles * G::kTileKeys;
    for (int r = 0; r < G::kRows && block * G::kRows + r < a.rows; ++r) {
      Out* out = a.out + (block * G::kRows + r) * a.out_stride;
      fill_row(out, begin, min(span.first_key, end), s.neg_inf, policy, lane);
      fill_row(out, static_cast<int>(max(last, static_cast<long long>(begin))), end, s.neg_inf, policy, lane);
    }
  }
  ptx::bulk_commit();
  ptx::bulk_wait_all();
}

// ---- math warpgroups ----

// A value that is the same in all lanes, in a form that tells the compiler so.
__device__ __forceinline__ int uniform(int value) { return __shfl_sync(~0u, value, 0); }

using Sum = HeadSum<G>;
constexpr bool kStoreLater = G::kRowsPerLane <= 2;  // with more sums than that, registers do not reach

// Scales and stores the sums of the tile whose first key for this lane is `key`. `out` is column 0 - origin of its row.
__device__ __forceinline__ void store_tile(const Arguments& a, const RowBlock& info, Out* out, const Lane& my, int key,
                                           const Sum::Sums& sum, const float (&scale)[Sum::kKeysPerLane]) {
  const int tile_key = key - my.key;
  const bool whole = (tile_key >= info.inner_lo) & (tile_key + G::kTileKeys <= info.inner_hi);
#pragma unroll
  for (int r = 0; r < G::kRowsPerLane; ++r) {
    const int row = my.row + 4 * r;
    Out* target = out + 4 * r * a.out_stride;
    if constexpr (kCompressed && G::kRowsPerLane > 1)
      target += static_cast<long long>(info.origin[my.row]) - info.origin[row];
#pragma unroll
    for (int e = 0; e < Sum::kKeysPerLane; ++e) {
      const int n = key + 8 * e;
      float value = fmaf(sum[r][e], scale[e], 0.0f);  // + 0.0 turns -0.0 into +0.0
      bool write = true;
      if (!whole) {
        const bool inside = (n >= info.lo[row]) & (n < info.hi[row]);
        if constexpr (kClean) {
          if (!inside) value = -__int_as_float(0x7F800000);
          write = n < a.keys && info.first_row + row < a.rows;
        } else {
          write = inside;
        }
      }
      if (write) target[n] = to_out(value);
    }
  }
}

__device__ void multiply(const Arguments& a, Worker& s) {
  const int lane = threadIdx.x % 32;
  const Lane my = Sum::place_of(lane);

  const uint64_t k_tiles = ptx::matrix_descriptor<G::kHeadDim>(s.k[0]);
  int k_stage = 0, k_parity = 0;
  bool k_ready = false;
  // Of the tile whose sums are not stored yet.
  const RowBlock* info = &s.block[0];
  uint64_t* k_empty = nullptr;
  Out* out = nullptr;
  int key = 0;
  Sum::Sums sum;
  float scale[Sum::kKeysPerLane];
  Sum::Weights w;
  Sum::Accumulators d;

  // S [64 keys, 256 pairs] = K tile x Q^T, left running
  const auto multiply_tile = [&](uint64_t q_tile) {
    if (!k_ready) ptx::barrier_wait(&s.k_full[k_stage], k_parity);
    ptx::wgmma_fence();
#pragma unroll
    for (int step = 0; step < G::kHeadDim / 32; ++step) {  // 32 bytes further along the rows: 2 units of 16
      ptx::wgmma(d, k_tiles + k_stage * (G::kKTileBytes / 16) + 2 * step, q_tile + 2 * step, step != 0);
    }
    ptx::wgmma_commit();
  };
  const auto store_last = [&]() {
    if (lane == 0) ptx::barrier_arrive(k_empty);
    if constexpr (kStoreLater) store_tile(a, *info, out, my, key, sum, scale);
  };
  const auto sum_tile = [&]() {
#pragma unroll
    for (int e = 0; e < Sum::kKeysPerLane; ++e) {
      scale[e] = key + 8 * e < a.keys ? 0x1p25f * __ldg(a.kv_scale + key + 8 * e) : 0.0f;
    }
    k_empty = &s.k_empty[k_stage];
    if (++k_stage == G::kKStages) k_stage = 0, k_parity ^= 1;
    k_ready = ptx::barrier_test(&s.k_full[k_stage], k_parity);
    ptx::wgmma_wait_all();
    Sum::sum(d, w, my.half, sum);
    if constexpr (!kStoreLater) store_tile(a, *info, out, my, key, sum, scale);
  };

  for (int q_count = 0;; ++q_count) {
    const int q_stage = q_count % G::kQStages;
    ptx::barrier_wait(&s.q_full[q_stage], q_count / G::kQStages & 1);
    const int tiles = uniform(s.block[q_stage].tiles);
    if (tiles == 0) break;
    const uint64_t q_tile = ptx::matrix_descriptor<G::kHeadDim>(s.q[q_stage]);
    multiply_tile(q_tile);
    if (q_count > 0) {
      store_last();
      ptx::barrier_arrive(&s.q_empty[(q_count - 1) % G::kQStages]);
    }
    info = &s.block[q_stage];
    // An origin may be INT_MIN: its negative has no place in 32 bits.
    out = a.out + (info->first_row + my.row) * a.out_stride - static_cast<long long>(info->origin[my.row]);
    key = info->first_key + my.key;
    Sum::load_weights(s.weights[q_stage], lane, w);
    sum_tile();
    for (int i = 1; i < tiles; ++i) {
      multiply_tile(q_tile);
      store_last();
      key += G::kTileKeys;
      sum_tile();
    }
  }
  if constexpr (kStoreLater) {
    if (k_empty != nullptr) store_tile(a, *info, out, my, key, sum, scale);
  }
}

__device__ __forceinline__ void init_barriers(Worker& s) {
#pragma unroll
  for (int i = 0; i < G::kQStages; ++i) {
    ptx::barrier_init(&s.q_full[i], 1 + 32);  // the loads, the producer warp
    ptx::barrier_init(&s.q_empty[i], 128);
  }
#pragma unroll
  for (int i = 0; i < G::kKStages; ++i) {
    ptx::barrier_init(&s.k_full[i], 1);
    ptx::barrier_init(&s.k_empty[i], 4);
  }
}

// At a place of its own for each kind of warp. Publishes the mbarriers and s.cost.
__device__ __forceinline__ void all_here() { ptx::bar_sync<kAllHere, G::kThreads>(); }

}  // namespace

extern "C" __global__ void __launch_bounds__(G::kThreads, 1)
    KERNEL_NAME(const __grid_constant__ ptx::TensorMap q_map, const __grid_constant__ ptx::TensorMap k_map,
                const __grid_constant__ Arguments a) {
  extern __shared__ __align__(1024) unsigned char raw[];
  Shared& s = *reinterpret_cast<Shared*>(raw);
  if (ptx::shared_address(raw) % 1024 != 0) ptx::trap();  // the swizzle pattern counts from there
  const int warp = threadIdx.x / 32;

  // The math warps read the windows; the others are at their own code by the time that is done.
  const int other = warp - G::kMathThreads / 32;
  int prices = other < 0;
  asm volatile("" : "+r"(prices));  // keeps the code of it here, next to what is in the instruction cache already
  if (prices) price_blocks(a, s);
  if (other < 0) {
    all_here();
    ptx::setmaxnreg_inc<G::kMathRegisters>();
    multiply(a, s.worker[uniform(threadIdx.x / 128)]);
    return;
  }
  ptx::setmaxnreg_dec<G::kOtherRegisters>();
  if (other < G::kWorkers) {
    all_here();
    const Piece piece = find_piece(a, s, other);
    if constexpr (kClean) ptx::bar_arrive<kPiecesFound, 32 * (G::kWorkers + G::kFillWarps)>();
    produce(a, s.worker[other], piece, &q_map, &k_map);
  } else {
    if (other == G::kWorkers && threadIdx.x % 32 == 0) {
      ptx::prefetch_map(&q_map);
      ptx::prefetch_map(&k_map);
#pragma unroll
      for (Worker& worker : s.worker) init_barriers(worker);
      ptx::barrier_init_fence();
    }
    __syncwarp();
    if (other == G::kWorkers) warm_l2(a, &k_map);
    all_here();
    if constexpr (kClean) fill(a, s, other - G::kWorkers);
  }
}
