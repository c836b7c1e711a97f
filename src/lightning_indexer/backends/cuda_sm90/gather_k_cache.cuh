// gather_k_cache for Hopper, of MXFP4 keys as e4m3 with one scale each.
//
// A warp has GROUPS times eight keys, four lanes each. A lane converts a block of 32 channels by table: its 8
// magnitudes as e4m3 are 8 bytes, and one byte permutation looks four codes up.
#include "row_lanes.cuh"

struct Arguments {
  const unsigned char* cache;  // blocks of PAGE keys, block_stride bytes apart
  const int* tables;           // [batch, max_blocks], rows table_stride apart
  const int* lengths;          // [batch + 1], cumulative
  unsigned char* out;          // [keys, 128], contiguous
  float* out_scales;           // [keys]
  long long block_stride, table_stride;
  int keys, batch, max_blocks, search;  // search: steps of a bisection of the lengths
};
static_assert(sizeof(Arguments) == ARGUMENT_BYTES, "ARGUMENT_BYTES: the host packs this struct");

constexpr int kRowBytes = kChannels / 2;

// The codes of the magnitudes 0, 0.5, 1, 1.5, 2, 3, 4, 6 times `unit`.
__device__ __forceinline__ uint2 magnitudes(float unit) {
  const float half = 0.5f * unit, two = 2.0f * unit, three = 3.0f * unit;
  return make_uint2(ptx::to_e4m3x2(0.0f, half) | ptx::to_e4m3x2(unit, 1.5f * unit) << 16,
                    ptx::to_e4m3x2(two, three) | ptx::to_e4m3x2(4.0f * unit, 6.0f * unit) << 16);
}

// Eight e4m3 codes of eight nibbles.
__device__ __forceinline__ uint2 converted(uint32_t nibbles, uint2 table) {
  const uint32_t size = nibbles & 0x77777777, even = nibbles << 4;  // signs of even nibbles at bits 7, 15, ...
  const uint32_t low = __byte_perm(table.x, table.y, size) | (__byte_perm(even, nibbles, 0x5140) & 0x80808080);
  const uint32_t high = __byte_perm(table.x, table.y, size >> 16) | (__byte_perm(even, nibbles, 0x7362) & 0x80808080);
  return make_uint2(low, high);
}

__device__ __forceinline__ void store_16(unsigned char* target, const uint32_t* words) {
  if constexpr (STORE == 16) {
    *reinterpret_cast<uint4*>(target) = make_uint4(words[0], words[1], words[2], words[3]);
  } else {
#pragma unroll
    for (int i = 0; i < 16; ++i) target[i] = words[i / 4] >> 8 * (i % 4) & 0xff;
  }
}

extern "C" __global__ void __launch_bounds__(kThreads, CTAS) KERNEL_NAME(const __grid_constant__ Arguments arguments) {
  const int lane = threadIdx.x % kLanes;
  const uint32_t first =
      blockIdx.x * kRowsOfCta + threadIdx.x / 32 * (GROUPS * kRowsOfWarp) + threadIdx.x % 32 / kLanes;
  const int total = min(__ldg(arguments.lengths + arguments.batch), arguments.keys);
  const unsigned char* base[GROUPS];
  int inner[GROUPS];
#pragma unroll
  for (int g = 0; g < GROUPS; ++g) {
    const int row = static_cast<int>(first + g * kRowsOfWarp);
    base[g] = nullptr, inner[g] = 0;
    if (row < 0 || row >= total) continue;
    int sequence = 0;  // the last that starts at or before the row
    for (int step = arguments.search - 1; step >= 0; --step) {
      const int further = sequence + (1 << step);
      if (further < arguments.batch && __ldg(arguments.lengths + further) <= row) sequence = further;
    }
    const int position = row - __ldg(arguments.lengths + sequence), entry = position / PAGE;
    if (entry >= arguments.max_blocks) continue;
    const long long block = __ldg(arguments.tables + sequence * arguments.table_stride + entry);
    base[g] = arguments.cache + block * arguments.block_stride;
    inner[g] = position % PAGE;
  }
  uint32_t word[GROUPS][4], scales[GROUPS];
#pragma unroll
  for (int g = 0; g < GROUPS; ++g) {
    word[g][0] = word[g][1] = word[g][2] = word[g][3] = scales[g] = 0;
    if (base[g] == nullptr) continue;
    const unsigned char* at = base[g] + inner[g] * kRowBytes + 16 * lane;
    if constexpr (WIDE) {
      const uint4 v = ptx::load_once(at);
      word[g][0] = v.x, word[g][1] = v.y, word[g][2] = v.z, word[g][3] = v.w;
    } else {
#pragma unroll
      for (int i = 0; i < 4; ++i) word[g][i] = __ldg(reinterpret_cast<const uint32_t*>(at) + i);
    }
    scales[g] = __ldg(reinterpret_cast<const uint32_t*>(base[g] + PAGE * kRowBytes) + inner[g]);
  }
#pragma unroll
  for (int g = 0; g < GROUPS; ++g) {
    const int byte = scales[g] >> 8 * lane & 0xff;
    const bool some = (word[g][0] | word[g][1] | word[g][2] | word[g][3]) & 0x77777777;
    const int top = max_of_row(some ? byte : -1);
    const uint32_t all_ones = (scales[g] & 0x7f7f7f7f) + 0x01010101 & scales[g] & 0x80808080;  // bytes of 255
    const uint2 table = magnitudes(unit_of_block(byte, top));
    uint32_t codes[8];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint2 pair = converted(word[g][i], table);
      codes[2 * i] = pair.x, codes[2 * i + 1] = pair.y;
    }
    // Two lanes store the 32 bytes of one, then those of the other: a whole sector at a time.
    const bool odd = lane & 1;
    uint32_t of_even[4], of_odd[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint32_t got = __shfl_xor_sync(0xffffffff, odd ? codes[i] : codes[i + 4], 1);
      of_even[i] = odd ? got : codes[i];
      of_odd[i] = odd ? codes[i + 4] : got;
    }
    if (base[g] == nullptr) continue;
    const long long row = first + g * kRowsOfWarp;
    unsigned char* out = arguments.out + row * kChannels + lane / 2 * 64 + lane % 2 * 16;
    store_16(out, of_even);
    store_16(out + 32, of_odd);
    if (lane == 0) arguments.out_scales[row] = scale_of_key(top, all_ones != 0);
  }
}
