// fp8_mqa_logits for Hopper (sm_90a).
//
//   logits[m, n] = kv_scale[n] * sum_h w[m, h] * relu(q[m, h, :] . k[n, :])   inside row m's window, -inf elsewhere
//
// One CTA per SM, 384 threads: two workers, each a producer warp and a math warpgroup with its own queue of q
// and key tiles, and two fill warps. geometry.cuh has the constants, shared.cuh the shared memory, schedule.cuh the
// division of the work, product.cuh the product, head_sum.cuh its sums over heads, store.cuh what is stored.
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
#include "product.cuh"

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
    produce(a, s, piece, &q_map, &k_map, other);
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
