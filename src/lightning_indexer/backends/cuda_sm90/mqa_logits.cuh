// fp8_mqa_logits for Hopper (sm_90a).
//
//   logits[m, n] = kv_scale[n] * sum_h w[m, h] * relu(q[m, h, :] . k[n, :])   inside row m's window, -inf elsewhere
//
// One CTA a multiprocessor, 384 threads: two workers, each a producer warp and a math warpgroup with its own queue of q
// and key tiles, and two fill warps. plan.cuh has the constants and the shared memory, schedule.cuh the division of the
// work.
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
#include "schedule.cuh"

namespace {

// ---- producer warp ----

// What the producer warp reads of one row block: a window a lane, and the weights of 256 pairs. Loaded one block ahead,
// so that their latency lies under the loads of the block before.
struct Ahead {
  int ks, lo, hi;
  float weights[kPairs / 32];

  __device__ __forceinline__ void load(const Arguments& a, int block) {
    const int lane = threadIdx.x % 32, row = block * kRows + lane;
    const bool real = lane < kRows && row < a.rows;
    ks = real ? __ldg(a.ks + row) : 0;
    lo = max(ks, 0);
    hi = real ? window_end(a, ks, __ldg(a.ke + row)) : 0;
#pragma unroll
    for (int i = 0; i < kPairs / 32; ++i) {
      const int pair = i * 32 + lane, w_row = block * kRows + pair / kHeads;
      weights[i] = w_row < a.rows ? __ldg(a.weights + w_row * a.w_stride + pair % kHeads) : 0.0f;
    }
  }
};

// Where the weight of a (row, head) pair lies. A lane of a math warp wants the 64 of its own rows: four at a time, next
// to those of the three other lanes of its quad, so that no two lie in one bank.
__device__ __forceinline__ int place_of_weight(int pair) {
  const int row = pair / kHeads, head = pair % kHeads;
  const int lane = kLanesPerRow == 1 ? row % 4 : row * 2 + head / 64;
  const int i = kLanesPerRow == 1 ? row / 4 * kHeads + head : head % 64;
  return i / 4 * 16 + lane * 4 + i % 4;
}

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
    ptx::barrier_arrive_expect(&s.k_full[k_stage], kTileKeys * kHeadDim);
    ptx::load_2d(s.k[k_stage], k_map, &s.k_full[k_stage], 0, key);
    if (++k_stage == kKStages) k_stage = 0, k_parity ^= 1;
  };
  // q and the first keys of a row block.
  const auto start = [&](int block, int first_key) {
    const int q_stage = q_count % kQStages;
    ptx::barrier_wait(&s.q_empty[q_stage], (q_count / kQStages & 1) ^ 1);
    if (lane == 0) {
      ptx::barrier_arrive_expect(&s.q_full[q_stage], kPairs * kHeadDim);
#pragma unroll
      for (int r = 0; r < kRows; r += kRowsPerLoad) {
        ptx::load_5d(s.q[q_stage] + r * kHeads * kHeadDim, q_map, &s.q_full[q_stage], 0, 0, 0, block * kRows + r, 0);
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
    if (started) start(piece.block, piece.span.first_key + tiles.first * kTileKeys);
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
    const int first_key = span.first_key + tiles.first * kTileKeys;
    if (!started) start(block, first_key);  // before the weights, which may still be on their way, are written
    started = false;
    const int q_stage = q_count++ % kQStages;
    // A row past M has the empty window [0, 0): no tile of its block is whole, and it stores nothing.
    RowBlock& info = s.block[q_stage];
    const int inner_lo = __reduce_max_sync(~0u, lane < kRows ? now.lo : 0);
    const int inner_hi = __reduce_min_sync(~0u, lane < kRows ? now.hi : 0x7FFFFFFF);
    if (lane == 0) {
      info.first_row = block * kRows;
      info.first_key = first_key;
      info.tiles = tiles.count;
      info.inner_lo = inner_lo;
      info.inner_hi = inner_hi;
    }
    if (lane < kRows) {
      info.lo[lane] = now.lo;
      info.hi[lane] = now.hi;
      info.origin[lane] = kCompressed ? now.ks : 0;
    }
#pragma unroll
    for (int i = 0; i < kPairs / 32; ++i) s.weights[q_stage][place_of_weight(i * 32 + lane)] = now.weights[i];
    ptx::barrier_arrive(&s.q_full[q_stage]);
    if (lane == 0) {
#pragma unroll 1
      for (int tile = 1; tile < tiles.count; ++tile) load_k(first_key + tile * kTileKeys);
    }
    __syncwarp();
  }
  const int q_stage = q_count % kQStages;
  ptx::barrier_wait(&s.q_empty[q_stage], (q_count / kQStages & 1) ^ 1);
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
  if (number_of_blocks(a) > kWorkers * gridDim.x) return;
  const int lane = threadIdx.x % 32;
#pragma unroll 1
  for (int i = blockIdx.x; i < number_of_blocks(a); i += gridDim.x) {
    const int row = i * kRows + lane;
    if (lane < kRows && row < a.rows) {
      if (a.q != nullptr) ptx::bulk_prefetch(a.q + row * a.q_stride, kHeads * kHeadDim);
#pragma unroll
      for (int h = 0; h < kHeads; h += 32) ptx::prefetch(a.weights + row * a.w_stride + h);
    }
    if (lane == 0 && i * kTileKeys < a.keys) ptx::prefetch_2d(k_map, 0, i * kTileKeys);
  }
}

// ---- fill warps ----

// -inf into [first, last) of one row: bulk stores where 16 bytes align, single elements at the ends.
__device__ __forceinline__ void fill_row(Out* row, int first, int last, const Shared& s, uint64_t policy, int lane) {
  if (first >= last) return;
  constexpr int kVector = 16 / sizeof(Out);
  constexpr int kChunk = sizeof(s.neg_inf) / sizeof(Out);
  const int misaligned = reinterpret_cast<uint64_t>(row + first) / sizeof(Out) % kVector;
  const int body = min(last, first + (kVector - misaligned) % kVector);
  const int tail = body + (last - body) / kVector * kVector;
  const Out neg_inf = reinterpret_cast<const Out*>(s.neg_inf)[0];
  if (first + lane < body) row[first + lane] = neg_inf;
  if (tail + lane < last) row[tail + lane] = neg_inf;
  for (int at = body + lane * kChunk; at < tail; at += 32 * kChunk) {
    ptx::bulk_store(row + at, s.neg_inf, min(kChunk, tail - at) * sizeof(Out), policy);
  }
}

__device__ void fill(const Arguments& a, Shared& s, int warp) {
  const int lane = threadIdx.x % 32, blocks = (a.rows + kRows - 1) / kRows;
  asm volatile("bar.sync 1, %0;" ::"n"(32 * (kWorkers + kFillWarps)) : "memory");  // s.cost lay where s.neg_inf is
  for (int i = warp * 32 + lane; i < kScratch; i += 32 * kFillWarps) s.neg_inf[i] = kNegInfPair;
  ptx::fence_async_proxy();
  asm volatile("bar.sync 2, %0;" ::"n"(32 * kFillWarps) : "memory");
  const uint64_t policy = ptx::evict_first_policy();
  // A unit is a row block, or part of its columns where row blocks are few.
  const int warps = kFillWarps * gridDim.x;
  const int parts = max(1, min(4 * warps / blocks, a.keys / kFillColumns));
  const int columns = ((a.keys - 1) / parts / kFillColumns + 1) * kFillColumns;
  for (int unit = blockIdx.x + warp * gridDim.x; unit < blocks * parts; unit += warps) {
    const int block = unit / parts, begin = unit % parts * columns, end = min(begin + columns, a.keys);
    int lo = 0, hi = 0;
    const int row = block * kRows + lane;
    if (lane < kRows && row < a.rows) lo = max(__ldg(a.ks + row), 0), hi = min(__ldg(a.ke + row), a.keys);
    const Span span = span_of_lanes(lo, hi);
    const long long last = static_cast<long long>(span.first_key) + span.tiles * kTileKeys;
    for (int r = 0; r < kRows && block * kRows + r < a.rows; ++r) {
      Out* out = a.out + (block * kRows + r) * a.out_stride;
      fill_row(out, begin, min(span.first_key, end), s, policy, lane);
      fill_row(out, static_cast<int>(max(last, static_cast<long long>(begin))), end, s, policy, lane);
    }
  }
  ptx::bulk_commit();
  ptx::bulk_wait_all();
}

// ---- math warpgroups ----

__device__ __forceinline__ Out to_out(float value) {
#if OUT_BF16
  unsigned short bits;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(value));
  return bits;
#else
  return value;
#endif
}

// A value that is the same in all lanes, in a form that tells the compiler so.
__device__ __forceinline__ int uniform(int value) { return __shfl_sync(~0u, value, 0); }

constexpr int kJPerRow = kPairs / 8 / kRowsPerLane;  // pairs of heads that a lane sums for one row
constexpr int kKeysPerLane = kLanesPerRow > 1 ? 1 : 2;
constexpr int kParts = kRowsPerLane == 1 ? 4 : 2;
constexpr bool kStoreLater = kRowsPerLane <= 2;  // with more sums than that, registers do not reach

// What a lane knows of its place in a tile.
struct Lane {
  int row;   // in the row block; and + 4, + 8, ... up to kRowsPerLane of them
  int half;  // which of the kLanesPerRow lanes of that row
  int key;   // in the tile; and + 8, unless lanes of a row share the two
};

// ReLU, weights, head sum of one tile: sums [row][key] of this lane, short of the key's scale.
__device__ __forceinline__ void sum_heads(const float (&d)[kPairs / 2], const float (&w)[kPairs / 4], int half,
                                          float (&sum)[kRowsPerLane][kKeysPerLane]) {
#pragma unroll
  for (int r = 0; r < kRowsPerLane; ++r) {
    float part[2][kParts] = {};  // by key; at least four independent sums cover the latency of an FMA
#pragma unroll
    for (int jj = 0; jj < kJPerRow; ++jj) {
      const int j = r * kJPerRow + jj;
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        float& p = part[e / 2][(jj * 2 + e) % kParts];
        p = fmaf(__saturatef(d[4 * j + e] * 0x1p-25f), w[2 * j + e % 2], p);
      }
    }
    float sum0 = part[0][0] + part[0][1], sum1 = part[1][0] + part[1][1];
    if constexpr (kParts == 4) sum0 += part[0][2] + part[0][3], sum1 += part[1][2] + part[1][3];
    if constexpr (kLanesPerRow == 1) {
      sum[r][0] = sum0, sum[r][1] = sum1;
    } else {  // the other half of the heads is one lane away: each lane keeps one key
      sum[r][0] = (half ? sum1 : sum0) + __shfl_xor_sync(~0u, half ? sum0 : sum1, 1);
    }
  }
}

// Scales and stores the sums of the tile whose first key for this lane is `key`. `out` is column 0 - origin of its row.
__device__ __forceinline__ void store_tile(const Arguments& a, const RowBlock& info, Out* out, const Lane& my, int key,
                                           const float (&sum)[kRowsPerLane][kKeysPerLane],
                                           const float (&scale)[kKeysPerLane]) {
  const int tile_key = key - my.key;
  const bool whole = (tile_key >= info.inner_lo) & (tile_key + kTileKeys <= info.inner_hi);
#pragma unroll
  for (int r = 0; r < kRowsPerLane; ++r) {
    const int row = my.row + 4 * r;
    Out* target = out + 4 * r * a.out_stride;
    if constexpr (kCompressed && kRowsPerLane > 1)
      target += static_cast<long long>(info.origin[my.row]) - info.origin[row];
#pragma unroll
    for (int e = 0; e < kKeysPerLane; ++e) {
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
  Lane my;
  my.row = lane % 4 / kLanesPerRow;
  my.half = lane % kLanesPerRow;
  my.key = threadIdx.x % 128 / 32 * 16 + lane / 4 + (kKeysPerLane == 1 ? lane % 2 * 8 : 0);

  const uint64_t k_tiles = ptx::matrix_descriptor<kHeadDim>(s.k[0]);
  int k_stage = 0, k_parity = 0;
  bool k_ready = false;
  // Of the tile whose sums are not stored yet.
  const RowBlock* info = &s.block[0];
  uint64_t* k_empty = nullptr;
  Out* out = nullptr;
  int key = 0;
  float sum[kRowsPerLane][kKeysPerLane], scale[kKeysPerLane];
  float w[kPairs / 4];  // weights of this lane's rows, in the order of its columns
  float d[kPairs / 2];

  // S [64 keys, 256 pairs] = K tile x Q^T, left running
  const auto multiply_tile = [&](uint64_t q_tile) {
    if (!k_ready) ptx::barrier_wait(&s.k_full[k_stage], k_parity);
    ptx::wgmma_fence();
#pragma unroll
    for (int step = 0; step < kHeadDim / 32; ++step) {  // 32 bytes further along the rows: 2 units of 16
      ptx::wgmma_m64n256k32(d, k_tiles + k_stage * (kTileKeys * kHeadDim / 16) + 2 * step, q_tile + 2 * step,
                            step != 0);
    }
    ptx::wgmma_commit();
  };
  const auto store_last = [&]() {
    if (lane == 0) ptx::barrier_arrive(k_empty);
    if constexpr (kStoreLater) store_tile(a, *info, out, my, key, sum, scale);
  };
  const auto sum_tile = [&]() {
#pragma unroll
    for (int e = 0; e < kKeysPerLane; ++e) {
      scale[e] = key + 8 * e < a.keys ? 0x1p25f * __ldg(a.kv_scale + key + 8 * e) : 0.0f;
    }
    k_empty = &s.k_empty[k_stage];
    if (++k_stage == kKStages) k_stage = 0, k_parity ^= 1;
    k_ready = ptx::barrier_test(&s.k_full[k_stage], k_parity);
    ptx::wgmma_wait_all();
    sum_heads(d, w, my.half, sum);
    if constexpr (!kStoreLater) store_tile(a, *info, out, my, key, sum, scale);
  };

  for (int q_count = 0;; ++q_count) {
    const int q_stage = q_count % kQStages;
    ptx::barrier_wait(&s.q_full[q_stage], q_count / kQStages & 1);
    const int tiles = uniform(s.block[q_stage].tiles);
    if (tiles == 0) break;
    const uint64_t q_tile = ptx::matrix_descriptor<kHeadDim>(s.q[q_stage]);
    multiply_tile(q_tile);
    if (q_count > 0) {
      store_last();
      ptx::barrier_arrive(&s.q_empty[(q_count - 1) % kQStages]);
    }
    info = &s.block[q_stage];
    // An origin may be INT_MIN: its negative has no place in 32 bits.
    out = a.out + (info->first_row + my.row) * a.out_stride - static_cast<long long>(info->origin[my.row]);
    key = info->first_key + my.key;
#pragma unroll
    for (int i = 0; i < kPairs / 4; i += 4) {
      const float4 four = *reinterpret_cast<const float4*>(&s.weights[q_stage][4 * i + lane % 4 * 4]);
      w[i] = four.x, w[i + 1] = four.y, w[i + 2] = four.z, w[i + 3] = four.w;
    }
    sum_tile();
    for (int i = 1; i < tiles; ++i) {
      multiply_tile(q_tile);
      store_last();
      key += kTileKeys;
      sum_tile();
    }
  }
  if constexpr (kStoreLater) {
    if (k_empty != nullptr) store_tile(a, *info, out, my, key, sum, scale);
  }
}

__device__ __forceinline__ void init_barriers(Worker& s) {
#pragma unroll
  for (int i = 0; i < kQStages; ++i) {
    ptx::barrier_init(&s.q_full[i], 1 + 32);  // the loads, the producer warp
    ptx::barrier_init(&s.q_empty[i], 128);
  }
#pragma unroll
  for (int i = 0; i < kKStages; ++i) {
    ptx::barrier_init(&s.k_full[i], 1);
    ptx::barrier_init(&s.k_empty[i], 4);
  }
}

// A barrier of the whole CTA, at a place of its own for each kind of warp. Publishes the mbarriers and s.cost.
__device__ __forceinline__ void all_here() { asm volatile("bar.sync 0, %0;" ::"n"(kThreads) : "memory"); }

}  // namespace

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    KERNEL_NAME(const __grid_constant__ ptx::TensorMap q_map, const __grid_constant__ ptx::TensorMap k_map,
                const __grid_constant__ Arguments a) {
  extern __shared__ __align__(1024) unsigned char raw[];
  Shared& s = *reinterpret_cast<Shared*>(raw);
  if (ptx::shared_address(raw) % 1024 != 0) asm volatile("trap;");  // the swizzle pattern counts from there
  const int warp = threadIdx.x / 32;

  // The math warps read the windows; the others are at their own code by the time that is done.
  const int other = warp - kMathThreads / 32;
  int prices = other < 0;
  asm volatile("" : "+r"(prices));  // keeps the code of it here, next to what is in the instruction cache already
  if (prices) price_blocks(a, s);
  if (other < 0) {
    all_here();
    ptx::registers_take<kMathRegisters>();
    multiply(a, s.worker[uniform(threadIdx.x / 128)]);
    return;
  }
  ptx::registers_release<kOtherRegisters>();
  if (other < kWorkers) {
    all_here();
    const Piece piece = find_piece(a, s, other);
    if constexpr (kClean) asm volatile("bar.arrive 1, %0;" ::"n"(32 * (kWorkers + kFillWarps)) : "memory");
    produce(a, s.worker[other], piece, &q_map, &k_map);
  } else {
    if (other == kWorkers && threadIdx.x % 32 == 0) {
      ptx::prefetch_map(&q_map);
      ptx::prefetch_map(&k_map);
#pragma unroll
      for (Worker& worker : s.worker) init_barriers(worker);
      ptx::barrier_init_fence();
    }
    __syncwarp();
    if (other == kWorkers) warm_l2(a, &k_map);
    all_here();
    if constexpr (kClean) fill(a, s, other - kWorkers);
  }
}
