// Runs a row kernel on the stand-ins, one CTA after the other.
#include "row_ptx.cuh"
// After what declares CUDA's words.
#include SOURCE_FILE

extern "C" void run(const Arguments* arguments, int grid, int ranges, const standin::Range* readable, unsigned seed) {
  standin::machine.readable.assign(readable, readable + ranges);
  standin::machine.random = seed | 1;
  for (int i = 0; i < grid; ++i) standin::launch_cta(kThreads, i, grid, [&] { KERNEL_NAME(*arguments); });
}
