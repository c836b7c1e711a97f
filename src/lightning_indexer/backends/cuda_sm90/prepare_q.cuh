// prepare_q for Hopper: queries turned and quantised, their scales folded into the weights.
//
// A warp has GROUPS times eight rows (token, head), see cache_row.cuh; the next eight are on their way while eight are
// worked on. Rows of a token follow each other, so the cosines of its position come from the L1.
#include "cache_row.cuh"

struct Arguments {
  const void* q;                                                  // [T, HEADS, 128]
  const void* weights;                                            // [T, HEADS]
  const void* positions;                                          // [T]
  const void* cos_sin;                                            // [positions, ROPE_DIM]
  unsigned char* out;                                             // [T, HEADS, 128], contiguous
  float* out_weights;                                             // [T, HEADS], contiguous
  long long q_stride, head_stride, weights_stride, table_stride;  // in elements
  int rows;
  float weight_scale;
};
static_assert(sizeof(Arguments) == ARGUMENT_BYTES, "ARGUMENT_BYTES: the host packs this struct");

struct Row {
  Raw raw;
  float weight;
  long long position;

  // Lanes behind the last row have that one too, and store nothing: a branch here would hold the loads behind it back.
  __device__ __forceinline__ void load(const Arguments& arguments, uint32_t row, int lane) {
    row = min(row, static_cast<uint32_t>(arguments.rows) - 1);
    const uint32_t token = row / HEADS, head = row % HEADS;
    position = 0;
    if constexpr (ROPE_DIM > 0)
      position = POSITION_BYTES == 8 ? __ldg(static_cast<const long long*>(arguments.positions) + token)
                                     : __ldg(static_cast<const int*>(arguments.positions) + token);
    raw.load(static_cast<const char*>(arguments.q) +
                 (token * arguments.q_stride + head * arguments.head_stride) * size_of(TYPE),
             lane);
    const long long at = token * arguments.weights_stride + head;
    if constexpr (GATES_TYPE == kFloat) {
      weight = __ldg(static_cast<const float*>(arguments.weights) + at);
    } else {
      weight = widened(__ldg(static_cast<const unsigned short*>(arguments.weights) + at), GATES_TYPE);
    }
  }
};

__device__ __forceinline__ void prepare(const Row& one, const Arguments& arguments, uint32_t row, int lane) {
  float x[kHeld];
  one.raw.widen(x);
  if constexpr (ROPE_DIM > 0) rotate(x, arguments.cos_sin, one.position * arguments.table_stride, lane);
  if constexpr (HADAMARD) hadamard(x, lane);
  uint32_t codes[kChunks][2];
  const float scale = FP4 ? quantize_through_e2m1(x, codes) : quantize_e4m3(x, codes);
  if (row >= static_cast<uint32_t>(arguments.rows)) return;
  unsigned char* out = arguments.out + static_cast<long long>(row) * kChannels + lane * kChunk;
#pragma unroll
  for (int b = 0; b < kChunks; ++b) {
    if constexpr (STORE >= 8) {
      *reinterpret_cast<uint2*>(out + b * kBlock) = make_uint2(codes[b][0], codes[b][1]);
    } else {
#pragma unroll
      for (int i = 0; i < kChunk; ++i) out[b * kBlock + i] = codes[b][i / 4] >> 8 * (i % 4) & 0xff;
    }
  }
  if (lane == 0) arguments.out_weights[row] = __fmul_rn(one.weight, __fmul_rn(scale, arguments.weight_scale));
}

extern "C" __global__ void __launch_bounds__(kThreads, CTAS) KERNEL_NAME(const __grid_constant__ Arguments arguments) {
  const int lane = threadIdx.x % kLanes;
  uint32_t row = blockIdx.x * kRowsOfCta + threadIdx.x / 32 * (GROUPS * kRowsOfWarp) + threadIdx.x % 32 / kLanes;
  Row one;
  one.load(arguments, row, lane);
#pragma unroll 2
  for (int g = 1; g < GROUPS; ++g, row += kRowsOfWarp) {
    Row next;
    next.load(arguments, row + kRowsOfWarp, lane);
    prepare(one, arguments, row, lane);
    one = next;
  }
  prepare(one, arguments, row, lane);
}
