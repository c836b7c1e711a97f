// The product of mqa_logits.cuh with the epilogue of append.cuh: of every row, the candidates that pass its gate.
//
// One piece of the work a CTA, whose two workers take its tiles in turn. No fill warps: nothing is stored but
// candidates and their counts.
//
// Compile-time, from mqa_topk_config.py: shared.cuh's with APPEND, and ARGUMENT_BYTES.
#include "dependent_launch.cuh"
#include "product.cuh"

static_assert(sizeof(Arguments) == ARGUMENT_BYTES, "STRUCTS of mqa_topk_config.py");

extern "C" __global__ void __launch_bounds__(G::kThreads, 1)
    KERNEL_NAME(const __grid_constant__ ptx::TensorMap q_map, const __grid_constant__ ptx::TensorMap k_map,
                const __grid_constant__ Arguments a) {
  extern __shared__ __align__(1024) unsigned char raw[];
  Shared& s = *reinterpret_cast<Shared*>(raw);
  if (ptx::shared_address(raw) % 1024 != 0) ptx::trap();  // the swizzle pattern counts from there
  const int other = static_cast<int>(threadIdx.x / 32) - G::kMathThreads / 32;
  let_next_start();
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
    wait_for_previous();  // gates; and lists, which the rows before may still be selected from
    if (other == 0 && threadIdx.x % 32 == 0) a.middles[blockIdx.x] = make_int2(-1, -1);
    __syncwarp();
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
    all_here();
  }
}
