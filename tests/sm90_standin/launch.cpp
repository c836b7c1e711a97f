// Runs a paged kernel on the stand-ins, one CTA after the other.
#include "ptx.cuh"
// After what declares CUDA's words.
#include "paged_mqa_logits.cuh"

extern "C" void run(const ptx::TensorMap* q_map, const ptx::TensorMap* k_map, const Arguments* arguments, int grid,
                    int ranges, const standin::Range* readable, unsigned seed) {
  standin::machine.readable.assign(readable, readable + ranges);
  standin::machine.random = seed | 1;
  for (int i = 0; i < grid; ++i) {
    const unsigned block = (i * 7u + seed) % grid;  // grid is no multiple of 7
    standin::launch_cta(kThreads, block, grid, [&] { KERNEL_NAME(*q_map, *k_map, *arguments); });
  }
}
