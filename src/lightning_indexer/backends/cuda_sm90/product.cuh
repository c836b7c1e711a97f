// The product of row blocks and tiles of keys: producer warps and math warpgroups. mqa_logits.cuh says how.
//
// What becomes of a tile's sums is up to an Epilogue, of store.cuh or of append.cuh:
//   enter(a, block, my)                    before the first tile of a row block
//   tile(a, block, my, key, sum, scale)    scales the sums of one tile, whose first key for this lane is `key`
//   leave(a, block, my)                    after the last one
#pragma once

#include "head_sum.cuh"
#include "schedule.cuh"
#include "wgmma.cuh"
#if APPEND
#include "append.cuh"
#else
#include "store.cuh"
#endif

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
    const int place = real && ROWS_LISTED ? place_of_row(a, row) : row;
    ks = real ? __ldg(a.ks + place) : 0;
    lo = max(ks, 0);
    hi = real ? window_end(a, ks, __ldg(a.ke + place)) : 0;
#pragma unroll
    for (int i = 0; i < G::kPairs / 32; ++i) {
      const int pair = i * 32 + lane, w_row = block * G::kRows + pair / G::kHeads;
      weights[i] = w_row < a.rows ? __ldg(a.weights + place_of_row(a, w_row) * a.w_stride + pair % G::kHeads) : 0.0f;
    }
  }
};

__device__ void produce(const Arguments& a, Shared& shared, const Piece& piece, const ptx::TensorMap* q_map,
                        const ptx::TensorMap* k_map, int worker) {
  Worker& s = shared.worker[worker];
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
  // Those of this worker: every kTileStep-th.
  const int turn = worker % kTileStep;
  const auto own = [&](const Tiles& tiles) -> Tiles {
    return {tiles.first + turn, (tiles.count + kTileStep - 1 - turn) / kTileStep};
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
    const Tiles tiles = own(tiles_of(skip, min(piece.span.cost(a), skip + remaining)));
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
    const Tiles all = tiles_of(skip, end), tiles = own(all);
    remaining -= end - skip;
    skip = 0;
    if (remaining > 0) next.load(a, block + 1);
#if APPEND
    if (all.count <= 0) continue;
    const Place place = place_of(a, shared, block, worker, all.first == 0, all.first + all.count == span.tiles);
    if (tiles.count <= 0) place.write_empty(worker);
#endif
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
#if APPEND
      place.write(a, info);
#endif
    }
    if (lane < G::kRows) {
      info.lo[lane] = now.lo;
      info.hi[lane] = now.hi;
      info.origin[lane] = kCompressed ? now.ks : 0;
#if APPEND
      info.gate[lane] = place.gate_of(a, block * G::kRows + lane, now.hi);
#endif
    }
#pragma unroll
    for (int i = 0; i < G::kPairs / 32; ++i)
      s.weights[q_stage][HeadSum<G>::place_of_weight(i * 32 + lane)] = now.weights[i];
    ptx::barrier_arrive(&s.q_full[q_stage]);
    if (lane == 0) {
#pragma unroll 1
      for (int tile = 1; tile < tiles.count; ++tile) load_k(first_key + tile * (kTileStep * G::kTileKeys));
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

// ---- math warpgroups ----

constexpr bool kLater = G::kRowsPerLane <= 2;  // with more sums than that, registers do not reach

__device__ void multiply(const Arguments& a, Worker& s) {
  const int lane = threadIdx.x % 32;
  const Lane my = Sum::place_of(lane);

  const uint64_t k_tiles = ptx::matrix_descriptor<G::kHeadDim>(s.k[0]);
  int k_stage = 0, k_parity = 0;
  bool k_ready = false;
  // Of the tile whose sums the epilogue does not have yet.
  const RowBlock* info = &s.block[0];
  uint64_t* k_empty = nullptr;
  Epilogue epilogue;
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
  const auto finish_last = [&]() {
    if (lane == 0) ptx::barrier_arrive(k_empty);
    if constexpr (kLater) epilogue.tile(a, *info, my, key, sum, scale);
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
    if constexpr (!kLater) epilogue.tile(a, *info, my, key, sum, scale);
  };

  for (int q_count = 0;; ++q_count) {
    const int q_stage = q_count % G::kQStages;
    ptx::barrier_wait(&s.q_full[q_stage], q_count / G::kQStages & 1);
    const int tiles = uniform(s.block[q_stage].tiles);
    if (tiles == 0) break;
    const uint64_t q_tile = ptx::matrix_descriptor<G::kHeadDim>(s.q[q_stage]);
    multiply_tile(q_tile);
    if (q_count > 0) {
      finish_last();
      epilogue.leave(a, *info, my);
      ptx::barrier_arrive(&s.q_empty[(q_count - 1) % G::kQStages]);
    }
    info = &s.block[q_stage];
    epilogue.enter(a, *info, my);
    key = info->first_key + my.key;
    Sum::load_weights(s.weights[q_stage], lane, w);
    sum_tile();
    for (int i = 1; i < tiles; ++i) {
      multiply_tile(q_tile);
      finish_last();
      key += kTileStep * G::kTileKeys;
      sum_tile();
    }
  }
  if (kLater || kAppend) {
    if (k_empty != nullptr) {
      if constexpr (kLater) epilogue.tile(a, *info, my, key, sum, scale);
      epilogue.leave(a, *info, my);
    }
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
