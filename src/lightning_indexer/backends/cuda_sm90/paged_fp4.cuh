// fp4 keys of paged_mqa_logits.cuh: from the bytes of a tile to the e4m3 operand of WGMMA, in registers.
//
// A key is four blocks of 32 e2m1 codes, two a byte, with a scale byte each. In e4m3 its largest block is 2^6 times
// what its codes stand for, a block d exponents below 2^(6 - d) times: eight magnitudes, which a permutation of bytes
// looks four codes up in.
//
// Order. Lane t of a quad takes block t of its two keys, 16 bytes each, where the operand wants channels of all blocks.
// So word 8t + c (of four channels) is word 4c + t of a row of the product, and q's words are put in the same order.
#pragma once

#include "paged_geometry.cuh"

namespace {

// By one warp: what the eight magnitudes of e2m1 become, `lane` exponents below the largest block of a key.
__device__ __forceinline__ void write_magnitudes(Shared& s, int lane) {
  const float one = __int_as_float((127 + 6 - lane) << 23);
  s.magnitudes[lane].x = ptx::to_e4m3(0.5f * one, 0.0f) | ptx::to_e4m3(1.5f * one, one) << 16;
  s.magnitudes[lane].y = ptx::to_e4m3(3.0f * one, 2.0f * one) | ptx::to_e4m3(6.0f * one, 4.0f * one) << 16;
}

// By a math warpgroup: q's rows, swizzled as TMA has left them, in the order of the keys. Eight lanes a row, in place.
__device__ __forceinline__ void order_q(unsigned char* q) {
  const int c = threadIdx.x % 8;
#pragma unroll 1
  for (int row = threadIdx.x % 128 / 8; row < kGroups * kPairs; row += 16) {
    unsigned char* channels = q + row * kHeadDim;
    const auto word = [&](int t) {
      return *reinterpret_cast<const uint32_t*>(channels + ((2 * t + c / 4) ^ row % 8) * 16 + c % 4 * 4);
    };
    const uint4 words = {word(0), word(1), word(2), word(3)};
    __syncwarp();
    *reinterpret_cast<uint4*>(channels + (c ^ row % 8) * 16) = words;
  }
  ptx::fence_async_proxy();
  ptx::bar_sync<128>(kQOrdered + threadIdx.x / 128);
}

using KeyOperand = uint32_t[kHeadDim / 32][4];

// What a lane holds of a tile: two keys, eight apart.
struct Fp4Keys {
  int stage = 0, parity = 0;
  uint32_t codes_at, byte_at, magnitudes;  // where the lane reads
  uint4 codes[2];                          // of its block
  uint2 sizes[2];                          // and what they are looked up in
  uint32_t top[2];  // 1 + the largest scale byte of the key's blocks that are not zeros; 0: all are; 256: NaN

  __device__ __forceinline__ Fp4Keys(const Shared& s, int lane) {
    const int block = threadIdx.x % 128 / 32 * 64 + lane;  // of the tile's, key by key
    codes_at = 16 * block, byte_at = kTileBytes + block, magnitudes = ptx::shared_address(s.magnitudes);
    ptx::keep(codes_at), ptx::keep(byte_at), ptx::keep(magnitudes);
  }

  // The next tile of the worker's queue. Its stage is empty once it is in registers.
  __device__ __forceinline__ void next(Worker& s, int lane) {
    ptx::barrier_wait(&s.k_full[stage], parity);
    const unsigned char* tile = s.k[stage];
    uint32_t byte[2];  // of its block's scale
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      codes[e] = *reinterpret_cast<const uint4*>(tile + codes_at + 512 * e);
      byte[e] = tile[byte_at + 32 * e];
    }
    __syncwarp();
    if (lane == 0) ptx::barrier_arrive(&s.k_empty[stage]);
    if (++stage == kKStages) stage = 0, parity ^= 1;
    uint32_t used[2];
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const bool some = ((codes[e].x | codes[e].y | codes[e].z | codes[e].w) & 0x77777777) != 0;
      used[e] = some || byte[e] == 255 ? byte[e] + 1 : 0;
    }
    uint32_t both = used[0] | used[1] << 16;
    both = __vmaxu2(both, __shfl_xor_sync(~0u, both, 1));
    both = __vmaxu2(both, __shfl_xor_sync(~0u, both, 2));
    top[0] = both & 0xFFFF, top[1] = both >> 16;
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      // A block of zeros may stand above the top: any depth does for it.
      sizes[e] = ptx::load_shared_8(magnitudes + 8 * min(top[e] - 1 - byte[e], kDepths - 1u));
    }
  }

  __device__ __forceinline__ void convert(KeyOperand& keys) const {
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const uint2 size = sizes[e];
      const uint32_t words[4] = {codes[e].x, codes[e].y, codes[e].z, codes[e].w};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const uint32_t word = words[i], code = word & 0x77777777, even = word << 4;
        const uint32_t low_signs = ptx::permute(even, word, 0x5140), high_signs = ptx::permute(even, word, 0x7362);
        keys[i][e] = ptx::permute(size.x, size.y, code) | (low_signs & 0x80808080);
        keys[i][2 + e] = ptx::permute(size.x, size.y, code >> 16) | (high_signs & 0x80808080);
      }
    }
  }
};

// 2^6 times the scale of a key whose top is that, in e4m3.
__device__ __forceinline__ float scale_from_top(uint32_t top) {
  const uint32_t bits = top <= 1 ? 0x00400000u : top > 255 ? 0x7FC00000u : (top - 1) << 23;
  return __uint_as_float(bits);
}

}  // namespace
