// Rows of 128 channels from wide floats to codes: load, LayerNorm, RoPE, Hadamard rotation, quantisation. In registers.
//
// Four lanes have a row, eight rows a warp. Lane l of the four has chunks l, l + 4, l + 8 and l + 12 of 8 channels, so
// x[8 * b + j] is channel 32 * b + 8 * l + j: a warp's loads are 64 bytes in a row each; both channels that RoPE turns
// lie in one lane; of the rotation's seven stages five do.
#pragma once

#include "row_lanes.cuh"

constexpr int kHeld = kChannels / kLanes, kChunk = 8, kChunks = kHeld / kChunk;
static_assert(kChunk * kLanes == kBlock, "one chunk of each lane is a block of fp4");
static_assert(ROPE_DIM % (INTERLEAVED ? 32 : 64) == 0 && ROPE_DIM <= kChannels, "pairs lie within a lane");

enum Type { kNone = -1, kFloat = 0, kBfloat = 1, kHalf = 2 };
__host__ __device__ constexpr int size_of(int type) { return type == kFloat ? 4 : 2; }

__device__ __forceinline__ float widened(uint32_t bits, int type) {
  return type == kFloat ? __uint_as_float(bits) : type == kBfloat ? __uint_as_float(bits << 16) : ptx::from_half(bits);
}

// Values of a register word.
template <int kType>
__device__ __forceinline__ void unpack(uint32_t word, float* x) {
  if constexpr (kType == kFloat) {
    x[0] = __uint_as_float(word);
  } else if constexpr (kType == kBfloat) {
    x[0] = __uint_as_float(word << 16), x[1] = __uint_as_float(word & 0xffff0000);
  } else {
    x[0] = ptx::from_half(word & 0xffff), x[1] = ptx::from_half(word >> 16);
  }
}

// kCount values from element `first` of a vector that other rows read too.
template <int kType, int kCount>
__device__ __forceinline__ void load_values(const void* vector, long long first, float* x) {
  constexpr int kSize = size_of(kType), kBytes = kCount * kSize;
  const char* at = static_cast<const char*>(vector) + first * kSize;
  if constexpr (!WIDE) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      if constexpr (kSize == 4) x[i] = __ldg(reinterpret_cast<const float*>(at) + i);
      if constexpr (kSize == 2) x[i] = widened(__ldg(reinterpret_cast<const unsigned short*>(at) + i), kType);
    }
  } else if constexpr (kBytes % 16 == 0) {
#pragma unroll
    for (int i = 0; i < kBytes / 16; ++i) {
      const uint4 v = __ldg(reinterpret_cast<const uint4*>(at) + i);
      const uint32_t words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
      for (int w = 0; w < 4; ++w) unpack<kType>(words[w], x + (16 * i + 4 * w) / kSize);
    }
  } else {
    const uint2 v = __ldg(reinterpret_cast<const uint2*>(at));
    unpack<kType>(v.x, x), unpack<kType>(v.y, x + 4 / kSize);
  }
}

// A lane's part of a row as it is in memory.
struct Raw {
  static constexpr int kWords = kChunk * size_of(TYPE) / 4;
  uint32_t word[kChunks][kWords];

  __device__ __forceinline__ void load(const void* row, int lane) {
#pragma unroll
    for (int b = 0; b < kChunks; ++b) {
      const char* at = static_cast<const char*>(row) + (b * kBlock + lane * kChunk) * size_of(TYPE);
#pragma unroll
      for (int i = 0; i < kWords; i += 4) {
        if constexpr (WIDE) {
          // A float32 row's sectors are asked for twice, 16 bytes each: the first brings them to the L1.
          const uint4 v = TYPE == kFloat ? __ldg(reinterpret_cast<const uint4*>(at + 4 * i)) : ptx::load_once(at);
          word[b][i] = v.x, word[b][i + 1] = v.y, word[b][i + 2] = v.z, word[b][i + 3] = v.w;
        } else {
#pragma unroll
          for (int w = i; w < i + 4; ++w) {
            if constexpr (TYPE == kFloat) {
              word[b][w] = __ldg(reinterpret_cast<const uint32_t*>(at) + w);
            } else {
              const unsigned short* halves = reinterpret_cast<const unsigned short*>(at) + 2 * w;
              const uint32_t low = __ldg(halves), high = __ldg(halves + 1);
              word[b][w] = low | high << 16;
            }
          }
        }
      }
    }
  }

  __device__ __forceinline__ void widen(float (&x)[kHeld]) const {
#pragma unroll
    for (int i = 0; i < kChunks * kWords; ++i)
      unpack<TYPE>(word[i / kWords][i % kWords], x + i * kHeld / (kChunks * kWords));
  }
};

// ---- the steps ----

__device__ __forceinline__ void layer_norm(float (&x)[kHeld], const void* weight, const void* bias, float eps,
                                           int lane) {
  float part[4] = {};
#pragma unroll
  for (int i = 0; i < kHeld; ++i) part[i % 4] += x[i];
  const float mean = sum_of_row(part[0] + part[1] + (part[2] + part[3])) * (1.0f / kChannels);
#pragma unroll
  for (int i = 0; i < 4; ++i) part[i] = 0;
#pragma unroll
  for (int i = 0; i < kHeld; ++i) {
    x[i] -= mean;
    part[i % 4] += x[i] * x[i];
  }
  const float variance = sum_of_row(part[0] + part[1] + (part[2] + part[3])) * (1.0f / kChannels);
  const float rest = rsqrtf(variance + eps);
#pragma unroll
  for (int b = 0; b < kChunks; ++b) {
    float gain[kChunk];
    load_values<WEIGHT_TYPE, kChunk>(weight, b * kBlock + lane * kChunk, gain);
#pragma unroll
    for (int j = 0; j < kChunk; ++j) x[b * kChunk + j] *= rest * gain[j];
    if constexpr (BIAS_TYPE != kNone) {
      float shift[kChunk];
      load_values<BIAS_TYPE, kChunk>(bias, b * kBlock + lane * kChunk, shift);
#pragma unroll
      for (int j = 0; j < kChunk; ++j) x[b * kChunk + j] += shift[j];
    }
  }
}

// `table`: the cosines of the row's position, its sines behind.
__device__ __forceinline__ void rotate(float (&x)[kHeld], const void* table, long long first, int lane) {
  constexpr int kStart = ROPE_LAST ? (kChannels - ROPE_DIM) / kBlock : 0, kHalf = ROPE_DIM / 2;
  if constexpr (INTERLEAVED) {
#pragma unroll
    for (int b = 0; b < ROPE_DIM / kBlock; ++b) {
      float cos[kChunk / 2], sin[kChunk / 2];
      const int pair = (b * kBlock + lane * kChunk) / 2;
      load_values<TABLE_TYPE, kChunk / 2>(table, first + pair, cos);
      load_values<TABLE_TYPE, kChunk / 2>(table, first + kHalf + pair, sin);
      float* pairs = x + (kStart + b) * kChunk;
#pragma unroll
      for (int j = 0; j < kChunk / 2; ++j) {
        const float a = pairs[2 * j], c = pairs[2 * j + 1];
        pairs[2 * j] = a * cos[j] - c * sin[j], pairs[2 * j + 1] = c * cos[j] + a * sin[j];
      }
    }
  } else {
#pragma unroll
    for (int b = 0; b < kHalf / kBlock; ++b) {
      float cos[kChunk], sin[kChunk];
      load_values<TABLE_TYPE, kChunk>(table, first + b * kBlock + lane * kChunk, cos);
      load_values<TABLE_TYPE, kChunk>(table, first + kHalf + b * kBlock + lane * kChunk, sin);
#pragma unroll
      for (int j = 0; j < kChunk; ++j) {
        float &one = x[(kStart + b) * kChunk + j], &other = x[(kStart + b + kHalf / kBlock) * kChunk + j];
        const float a = one, c = other;
        one = a * cos[j] - c * sin[j], other = c * cos[j] + a * sin[j];
      }
    }
  }
}

__device__ __forceinline__ void hadamard(float (&x)[kHeld], int lane) {
#pragma unroll
  for (int step = 1; step < kHeld; step *= 2) {  // channel bits 0 to 2, then 5 and 6
#pragma unroll
    for (int i = 0; i < kHeld; ++i)
      if ((i & step) == 0) {
        const float a = x[i], c = x[i + step];
        x[i] = a + c, x[i + step] = a - c;
      }
  }
#pragma unroll
  for (int bit = 1; bit < kLanes; bit *= 2) {  // channel bits 3 and 4
    const float sign = lane & bit ? -1.0f : 1.0f;
#pragma unroll
    for (int i = 0; i < kHeld; ++i) x[i] = fmaf(x[i], sign, __shfl_xor_sync(0xffffffff, x[i], bit));
  }
}
// What rows are to be multiplied by after it, together with the inverse of their scale.
constexpr float kGain = HADAMARD ? 0.08838834764831845f : 1.0f;  // 128^-1/2

// ---- quantisation ----

// The least power of two not below the rounded a / limit of a positive normal a, limit (1 + fraction) * 2^power.
template <int kFraction, int kPower>
__device__ __forceinline__ uint32_t exponent_above(float a) {
  const uint32_t bits = __float_as_uint(a);
  return bits >= 0x7f800000 ? 255 : ((bits + 0x7fffff - kFraction) >> 23) - kPower;
}

// Codes of a lane's chunks, two words each; gives the row's scale.
__device__ __forceinline__ float quantize_e4m3(const float (&x)[kHeld], uint32_t (&codes)[kChunks][2]) {
  constexpr float kLimit = 448.0f, kInverse = 1.0f / 448.0f;
  float part[4] = {};
#pragma unroll
  for (int i = 0; i < kHeld; ++i) part[i % 4] = fmaxf(part[i % 4], fabsf(x[i]));  // a NaN does not count
  const float amax = fmaxf(max_of_row(fmaxf(fmaxf(part[0], part[1]), fmaxf(part[2], part[3]))) * kGain, 1e-4f);
  float scale, inverse;
  if constexpr (POWER_OF_TWO) {
    const uint32_t exponent = exponent_above<0x600000, 8>(amax);  // 448 is 1.75 * 2^8
    scale = __uint_as_float(exponent << 23);
    inverse = exponent == 255 ? 0.0f : __uint_as_float((254 - exponent) << 23);
  } else {
    // A product, its remainder and a correction: the correctly rounded quotient.
    const float near = __fmul_rn(amax, kInverse);
    scale = fmaf(fmaf(near, -kLimit, amax), kInverse, near);
    scale = amax < __uint_as_float(0x7f800000) ? scale : amax;
    inverse = __frcp_rn(scale);
  }
  inverse *= kGain;
#pragma unroll
  for (int b = 0; b < kChunks; ++b) {
    float y[kChunk];
#pragma unroll
    for (int j = 0; j < kChunk; ++j) {
      const float v = x[b * kChunk + j];
      if constexpr (POWER_OF_TWO || !PLAIN) {
        y[j] = fmaf(v, inverse, 0.0f);  // -0.0 becomes +0.0
      } else {
        const float near = __fmul_rn(v, inverse);
        y[j] = fmaf(fmaf(near, -scale, v), inverse, near);
      }
    }
#pragma unroll
    for (int w = 0; w < 2; ++w)
      codes[b][w] = ptx::to_e4m3x2(y[4 * w], y[4 * w + 1]) | ptx::to_e4m3x2(y[4 * w + 2], y[4 * w + 3]) << 16;
  }
  return scale;
}

struct Fp4Scales {
  uint32_t byte[kChunks];
  float inverse[kChunks];
  bool some[kChunks];  // a code of the block is not 0
};

// Block b of a row is chunk b of its four lanes. What e2m1 has no code for becomes +0.
__device__ __forceinline__ Fp4Scales fp4_scales(float (&x)[kHeld]) {
  const float infinity = __uint_as_float(0x7f800000);
  Fp4Scales scales;
#pragma unroll
  for (int b = 0; b < kChunks; ++b) {
    float* v = x + b * kChunk;
    float amax = fabsf(v[0]);
#pragma unroll
    for (int j = 1; j < kChunk; ++j) amax = ptx::max_nan(amax, fabsf(v[j]));
    if (amax != amax) {  // rare
      amax = 0;
#pragma unroll
      for (int j = 0; j < kChunk; ++j) {
        v[j] = v[j] == v[j] ? v[j] : 0.0f;
        amax = fmaxf(amax, fabsf(v[j]));
      }
    }
    amax = max_of_row(amax) * kGain;
    if (amax == infinity) {  // rare
#pragma unroll
      for (int j = 0; j < kChunk; ++j) v[j] = fabsf(v[j]) < infinity ? v[j] : 0.0f;
    }
    scales.byte[b] = exponent_above<0x400000, 2>(fmaxf(amax, __uint_as_float(0x01c00000)));  // 6 is 1.5 * 2^2
    scales.inverse[b] = scales.byte[b] == 255 ? 0.0f : __uint_as_float((254 - scales.byte[b]) << 23);
    scales.some[b] = amax * scales.inverse[b] > 0.25f;
    scales.inverse[b] *= kGain;
  }
  return scales;
}

// Eight e2m1 codes of a chunk. A code is the least of what three steps give: those of 0.5, of 1 from code 2 on, and of
// 2 from code 4 on; a sum with 2^22 rounds to steps of 0.5, and its last bits count them.
__device__ __forceinline__ uint32_t quantize_e2m1(const float* x, float inverse) {
  uint32_t word = 0;
#pragma unroll
  for (int j = 0; j < kChunk / 2; ++j) {
    const float low = fabsf(x[j]) * inverse, high = fabsf(x[j + 4]) * inverse;
    const uint32_t halves = __byte_perm(__float_as_uint(low + 4194304.0f), __float_as_uint(high + 4194304.0f), 0x5410);
    const uint32_t ones = __byte_perm(__float_as_uint(low + 8388610.0f), __float_as_uint(high + 8388610.0f), 0x5410);
    const uint32_t twos = __byte_perm(__float_as_uint(low + 16777224.0f), __float_as_uint(high + 16777224.0f), 0x5410);
    const uint32_t signs = __byte_perm(__float_as_uint(x[j]), __float_as_uint(x[j + 4]), 0x7632);
    word |= (__vminu2(__vminu2(halves, ones), twos) | (signs >> 12 & 0x00080008)) << 4 * j;
  }
  return word;
}

// e4m3 codes of what is left of a row in MXFP4; gives the scale of the row.
__device__ __forceinline__ float quantize_through_e2m1(float (&x)[kHeld], uint32_t (&codes)[kChunks][2]) {
  constexpr float kMagic = 6291456.0f;  // 1.5 * 2^22: a sum with it has a step of 0.5
  const Fp4Scales scales = fp4_scales(x);
  int top = -1;
  bool broken = false;
#pragma unroll
  for (int b = 0; b < kChunks; ++b) {
    const int byte = static_cast<int>(scales.byte[b]);
    if (scales.some[b]) top = byte > top ? byte : top;
    broken |= byte == 255;
  }
#pragma unroll
  for (int b = 0; b < kChunks; ++b) {
    const float unit = unit_of_block(static_cast<int>(scales.byte[b]), top);
    float y[kChunk];
#pragma unroll
    for (int j = 0; j < kChunk; ++j) {
      // The step of [2^e, 2^(e + 1)) is 2^(e - 1), and 0.5 below 1.
      const float v = x[b * kChunk + j] * scales.inverse[b];
      const float binade = fmaxf(__uint_as_float(__float_as_uint(v) & 0x7f800000), 1.0f);
      const float rounded = fmaf(binade, -kMagic, fmaf(binade, kMagic, v));
      y[j] = copysignf(rounded, v) * unit;
    }
#pragma unroll
    for (int w = 0; w < 2; ++w)
      codes[b][w] = ptx::to_e4m3x2(y[4 * w], y[4 * w + 1]) | ptx::to_e4m3x2(y[4 * w + 2], y[4 * w + 3]) << 16;
  }
  return scale_of_key(top, broken);
}
