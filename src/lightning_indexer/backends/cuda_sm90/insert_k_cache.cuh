// insert_k_cache for Hopper: keys transformed, quantised and written to their slots of a paged cache.
//
// A warp has GROUPS times eight tokens, see cache_row.cuh; the next eight are on their way while eight are worked on.
// No token needs another, and no shared memory is used.
#include "cache_row.cuh"

struct Arguments {
  const void* k;           // [tokens, 128], rows k_stride elements apart
  unsigned char* cache;    // blocks of PAGE keys, block_stride bytes apart
  const long long* slots;  // [tokens]
  const void* weight;      // [128], LayerNorm's
  const void* bias;
  const void* positions;  // [tokens]
  const void* cos_sin;    // [positions, ROPE_DIM], rows table_stride elements apart
  long long k_stride, block_stride, table_stride, capacity;
  int tokens;
  float eps;
};
static_assert(sizeof(Arguments) == ARGUMENT_BYTES, "ARGUMENT_BYTES: the host packs this struct");

constexpr int kRowBytes = FP4 ? kChannels / 2 : kChannels;
constexpr int kTile = 16;  // keys and bytes of a tile of the preshuffled order

__device__ __forceinline__ void store_e4m3(unsigned char* block, int inner, int lane,
                                           const uint32_t (&codes)[kChunks][2]) {
#pragma unroll
  for (int b = 0; b < kChunks; ++b) {
    const int byte = b * kBlock + lane * kChunk;
    const int place = SHUFFLED ? inner / kTile * kTile * kRowBytes + byte / kTile * kTile * kTile +
                                     inner % kTile * kTile + byte % kTile
                               : inner * kRowBytes + byte;
    if constexpr (STORE >= 8) {
      *reinterpret_cast<uint2*>(block + place) = make_uint2(codes[b][0], codes[b][1]);
    } else {
      reinterpret_cast<uint32_t*>(block + place)[0] = codes[b][0];
      reinterpret_cast<uint32_t*>(block + place)[1] = codes[b][1];
    }
  }
}

// The words of four lanes transposed: lane l gets word l of each, 16 bytes in a row.
__device__ __forceinline__ void transpose(uint32_t (&word)[kChunks], int lane) {
#pragma unroll
  for (int bit = 1; bit < kLanes; bit *= 2) {
    const bool upper = lane & bit;
#pragma unroll
    for (int i = 0; i < kChunks; ++i)
      if ((i & bit) == 0) {
        const uint32_t got = __shfl_xor_sync(0xffffffff, upper ? word[i] : word[i + bit], bit);
        word[i] = upper ? got : word[i];
        word[i + bit] = upper ? word[i + bit] : got;
      }
  }
}

struct Token {
  Raw raw;
  long long slot, position;

  // Lanes behind the last token have that one too, and skip it: a branch here would hold the loads behind it back.
  __device__ __forceinline__ void load(const Arguments& arguments, long long number, int lane) {
    const long long token = min(number, static_cast<long long>(arguments.tokens) - 1);
    slot = __ldg(arguments.slots + token);
    position = 0;
    if constexpr (ROPE_DIM > 0)
      position = POSITION_BYTES == 8 ? __ldg(static_cast<const long long*>(arguments.positions) + token)
                                     : __ldg(static_cast<const int*>(arguments.positions) + token);
    raw.load(static_cast<const char*>(arguments.k) + token * arguments.k_stride * size_of(TYPE), lane);
    if (token != number) slot = -1;
  }
};

__device__ __forceinline__ void insert(const Token& token, const Arguments& arguments, int lane) {
  float x[kHeld];
  token.raw.widen(x);
  if constexpr (WEIGHT_TYPE != kNone) layer_norm(x, arguments.weight, arguments.bias, arguments.eps, lane);
  const bool kept = token.slot >= 0 && token.slot < arguments.capacity;
  if constexpr (ROPE_DIM > 0) {
    // The position of a token that is skipped may be any.
    if (kept) rotate(x, arguments.cos_sin, token.position * arguments.table_stride, lane);
  }
  if constexpr (HADAMARD) hadamard(x, lane);
  uint32_t codes[kChunks][2], words[kChunks], scale = 0;
  if constexpr (FP4) {
    const Fp4Scales scales = fp4_scales(x);
#pragma unroll
    for (int b = 0; b < kChunks; ++b) {
      words[b] = quantize_e2m1(x + b * kChunk, scales.inverse[b]);
      scale |= scales.byte[b] << 8 * b;
    }
    if constexpr (STORE == 16) transpose(words, lane);
  } else {
    scale = __float_as_uint(quantize_e4m3(x, codes));
    if constexpr (UE8M0) scale = (scale >> 23) * 0x01010101u;
  }
  if (!kept) return;
  const uint64_t place = static_cast<uint64_t>(token.slot);
  unsigned char* block = arguments.cache + static_cast<long long>(place / PAGE) * arguments.block_stride;
  const int inner = static_cast<int>(place % PAGE);
  if constexpr (!FP4) {
    store_e4m3(block, inner, lane, codes);
  } else if constexpr (STORE == 16) {
    *reinterpret_cast<uint4*>(block + inner * kRowBytes + 16 * lane) =
        make_uint4(words[0], words[1], words[2], words[3]);
  } else {
#pragma unroll
    for (int b = 0; b < kChunks; ++b)
      *reinterpret_cast<uint32_t*>(block + inner * kRowBytes + 16 * b + 4 * lane) = words[b];
  }
  if (lane == 0) *reinterpret_cast<uint32_t*>(block + PAGE * kRowBytes + 4 * inner) = scale;
}

extern "C" __global__ void __launch_bounds__(kThreads, CTAS) KERNEL_NAME(const __grid_constant__ Arguments arguments) {
  const int lane = threadIdx.x % kLanes;
  const long long first = static_cast<long long>(blockIdx.x) * kRowsOfCta + threadIdx.x / 32 * (GROUPS * kRowsOfWarp) +
                          threadIdx.x % 32 / kLanes;
  Token token;
  token.load(arguments, first, lane);
#pragma unroll 2
  for (int g = 1; g < GROUPS; ++g) {
    Token next;
    next.load(arguments, first + g * kRowsOfWarp, lane);
    insert(token, arguments, lane);
    token = next;
  }
  insert(token, arguments, lane);
}
