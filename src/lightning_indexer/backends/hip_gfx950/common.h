// What both strategies share: one wave, ROWS query rows of HEADS heads, 32 keys at a time.
//
//   v_mfma_f32_32x32x64_f8f6f4 contracts 64 channels of 32 heads (A: q) with 32 keys (B: k), so two of them make
//   the scores of one row, 32 heads and 32 keys. Layouts, with c = lane % 32 and h = lane / 32:
//     operands  lane holds head (or key) c, channels 64 s + 16 h + [0, 16) and 64 s + 32 + 16 h + [0, 16) of part s
//     result    register v is head 8 (v / 4) + 4 h + v % 4 of key c
//   So a lane holds half of the heads of a key; how they are summed is in reduce_fma.h, or in reduce_mfma.h.
//
// Sources: AMD CDNA4 ISA document; LLVM's "User Guide for AMDGPU Backend" (buffer resources).
#pragma once

typedef int i32x4 __attribute__((ext_vector_type(4)));
typedef int i32x8 __attribute__((ext_vector_type(8)));
typedef float f32x2 __attribute__((ext_vector_type(2)));
typedef float f32x4 __attribute__((ext_vector_type(4), aligned(4)));  // rows of weights and logits start on any float
typedef float f32x16 __attribute__((ext_vector_type(16)));
typedef unsigned u32x2 __attribute__((ext_vector_type(2)));

#define DEVICE static inline __attribute__((device, always_inline))
#define DEVICE_MEMBER __attribute__((device, always_inline))

constexpr int TILE = 32;             // keys of one matrix product
constexpr int DIM = 128;             // channels
constexpr int GROUPS = HEADS / 32;   // matrix products of a row and tile: GROUPS times DIM / 64
constexpr int ROW_PAIRS = ROWS / 2;  // rows reduce, and are stored, two at a time
constexpr float MINUS_INF = -__builtin_inff();
static_assert(HEADS % 32 == 0 && HEADS > 0, "a matrix product takes 32 heads");
static_assert(ROWS % 2 == 0, "a swap reduces two rows");

// Pointers and sizes of a launch; strides in elements.
struct Arguments {
  const unsigned char* q;  // fp8 e4m3fn [M, HEADS, DIM]
  const unsigned char* k;  // fp8 e4m3fn [N, DIM]
  const float* kv_scale;   // [N]
  const float* weights;    // [M, HEADS]
  const int* ks;           // [M]
  const int* ke;           // [M]
  float* out;              // [M, N]
  long q_stride_m, q_stride_h, k_stride, w_stride, out_stride;
  int rows, keys;
};

DEVICE int smaller(int a, int b) { return a < b ? a : b; }
DEVICE int larger(int a, int b) { return a > b ? a : b; }
// Equal in all lanes: keeps it, and the buffers made from it, in scalar registers.
DEVICE int uniform(int value) { return __builtin_amdgcn_readfirstlane(value); }

// Buffer resource: loads past `bytes` give 0 and stores past it are dropped, without a mask. 32-bit offsets.
typedef __amdgpu_buffer_rsrc_t Buffer;
DEVICE Buffer buffer(const void* base, unsigned bytes) {
  return __builtin_amdgcn_make_buffer_rsrc((void*)base, 0, (int)bytes, 0x00020000);
}

// ---- Windows

struct Span {
  int first, last;  // [first, last)
};

DEVICE Span window(const Arguments& a, long m) {
  const int lo = larger(a.ks[m], 0), hi = smaller(a.ke[m], a.keys);
  return lo < hi ? Span{lo, hi} : Span{0, 0};
}

// The keys that some row of [m, m + count) sees. Rows past the last one see none.
DEVICE Span union_of_windows(const Arguments& a, long m, int count) {
  Span all = {a.keys, 0};
  for (int r = 0; r < count; ++r) {
    if (m + r >= a.rows) break;
    const Span one = window(a, m + r);
    if (one.first < one.last) all = {smaller(all.first, one.first), larger(all.last, one.last)};
  }
  return all.first < all.last ? Span{uniform(all.first), uniform(all.last)} : Span{0, 0};
}

// The ROWS rows from `m` on: scalars, for the masks of the tiles that not every row sees whole.
struct Windows {
  Span row[ROWS];
  Span whole;  // keys that every row sees
  long m;
  int count;  // rows that exist
};

DEVICE Windows windows_of(const Arguments& a, long m) {
  Windows w;
  w.m = m;
  w.count = m < a.rows ? (int)(a.rows - m < ROWS ? a.rows - m : ROWS) : 0;
  w.whole = {0, w.count == ROWS ? a.keys : 0};
#pragma unroll
  for (int r = 0; r < ROWS; ++r) {
    w.row[r] = r < w.count ? window(a, m + r) : Span{0, 0};
    w.whole = {larger(w.whole.first, w.row[r].first), smaller(w.whole.last, w.row[r].last)};
  }
  return w;
}

// ---- ReLU

// ReLU of scores as a clamped product: |score| <= 448 * 448 * 128 < 2^25, so clamp(score * 2^-25) to [0, 1] is
// relu(score) * 2^-25 exactly, two values an instruction. The weights take the 2^25 back.
constexpr float DOWN = RELU_CLAMP ? 0x1p-25f : 1.0f, UP = RELU_CLAMP ? 0x1p25f : 1.0f;

#if RELU_CLAMP
// DOWN * relu(score). The compiler inserts the wait states between a matrix product and the first reader of its result,
// but not before inline assembly: so the first two are v_mul_f32 clamp, which it knows, and the others come after them.
DEVICE f32x2 relu_first(f32x2 score) {
  return f32x2{__builtin_amdgcn_fmed3f(score[0] * DOWN, 0.f, 1.f), __builtin_amdgcn_fmed3f(score[1] * DOWN, 0.f, 1.f)};
}
DEVICE f32x2 relu_pair(f32x2 score, float after) {
  f32x2 result;
  const f32x2 down = {DOWN, DOWN};
  asm("v_pk_mul_f32 %0, %1, %2 clamp" : "=v"(result) : "v"(score), "s"(down), "v"(after));
  return result;
}
#else
// One v_max_f32 each under -fno-honor-nans; without it, a canonicalising one before each.
DEVICE f32x2 relu_first(f32x2 score) { return f32x2{__builtin_fmaxf(score[0], 0.f), __builtin_fmaxf(score[1], 0.f)}; }
DEVICE f32x2 relu_pair(f32x2 score, float) { return relu_first(score); }
#endif

// Sums over heads: `Weights` of a lane, and `Sums` of a tile.
#if REDUCE_MFMA
#include "reduce_mfma.h"
#else
#include "reduce_fma.h"
#endif

// ---- Operands

struct QueryRow {
  i32x8 q[GROUPS][2];
  Weights weights[GROUPS];
};

struct Keys {
  i32x8 part[2];
  float scale;
};

// `slot`: which of the wave's rows it is.
DEVICE QueryRow load_row(const Arguments& a, long m, int slot, int lane) {
  m = m + slot < a.rows ? m + slot : a.rows - 1;
  QueryRow row;
#pragma unroll
  for (int g = 0; g < GROUPS; ++g) {
    const unsigned char* q = a.q + m * a.q_stride_m + (g * 32 + lane % 32) * a.q_stride_h + lane / 32 * 16;
#pragma unroll
    for (int s = 0; s < 2; ++s) {
      const i32x4 low = *(const i32x4*)(q + s * 64), high = *(const i32x4*)(q + s * 64 + 32);
      row.q[g][s] = __builtin_shufflevector(low, high, 0, 1, 2, 3, 4, 5, 6, 7);
    }
    row.weights[g] = load_weights(a.weights + m * a.w_stride + g * 32, slot, lane);
  }
  return row;
}

// Before a loop: in it, the compiler then waits for the loop's own loads alone. 0x0f70 is vmcnt(0).
DEVICE void wait_for_loads() { __builtin_amdgcn_s_waitcnt(0x0f70); }

// ---- One row, one tile

// Without scales: for constant zeros clang takes v_mfma_f32_32x32x64_f8f6f4, without the instruction that loads them.
DEVICE f32x16 multiply(i32x8 q, i32x8 k, f32x16 sum) {
  return __builtin_amdgcn_mfma_scale_f32_32x32x64_f8f6f4(q, k, sum, 0, 0, 0, 0, 0, 0);
}

// ---- A tile: ROWS rows by 32 keys, scored and stored

// Two rows of a tile, at most MAX_ROW_STRIDE (mqa_logits.py) apart, and an offset that is not among them.
constexpr unsigned OUT_BYTES = 0xfffffff0u, OUTSIDE = 0xffffffffu;

struct Output {
  float* pair[ROW_PAIRS];  // the first row of each pair
  unsigned offset;         // of this lane, in bytes: its row of the pair, its column of the tile
};

DEVICE Output output_of(const Arguments& a, long m, int lane) {
  Output o;
#pragma unroll
  for (int p = 0; p < ROW_PAIRS; ++p) o.pair[p] = a.out + (m + 2 * p) * a.out_stride;
  o.offset = (unsigned)(lane / 32) * (unsigned)(a.out_stride * 4) + lane % 32 * 4;
  return o;
}

struct Logits {
  float pair[ROW_PAIRS];
};

// Keeps the order of instructions: the epilogue of one product lies between the issues of the two halves of the next,
// so that matrix and vector unit work side by side, and a result is read about 20 instructions after its issue.
DEVICE void in_order() { __builtin_amdgcn_sched_barrier(0); }

DEVICE Logits score_tile(const QueryRow (&rows)[ROWS], const Keys& keys) {
  constexpr int PRODUCTS = ROWS * GROUPS;
  const f32x16 zero = {};
  Sums sums;
  f32x16 before, now = multiply(rows[0].q[0][1], keys.part[1], multiply(rows[0].q[0][0], keys.part[0], zero));
#pragma unroll
  for (int i = 0; i < PRODUCTS; ++i) {
    const int r = i / GROUPS, g = i % GROUPS, ahead = i + 1;
    f32x16 next = zero;
    if (ahead < PRODUCTS) next = multiply(rows[ahead / GROUPS].q[ahead % GROUPS][0], keys.part[0], next);
    in_order();
    if (i > 0) {
      const int last = i - 1;
      sums.add<1>(before, rows[last / GROUPS].weights[last % GROUPS], last / GROUPS, last % GROUPS);
    }
    in_order();
    if (ahead < PRODUCTS) next = multiply(rows[ahead / GROUPS].q[ahead % GROUPS][1], keys.part[1], next);
    in_order();
    sums.add<0>(now, rows[r].weights[g], r, g);
    in_order();
    before = now;
    now = next;
  }
  sums.add<1>(before, rows[ROWS - 1].weights[GROUPS - 1], ROWS - 1, GROUPS - 1);

  Logits logits;
#pragma unroll
  for (int p = 0; p < ROW_PAIRS; ++p)
    // + 0 makes -0.0 into +0.0; one FMA.
    logits.pair[p] = __builtin_fmaf(sums.pair(p), keys.scale, 0.f);
  return logits;
}

// Columns [n, n + 32). All 64 lanes store; a lane that must not is given an offset that the buffer drops. The tile is
// in the buffer's base, of 64 bits: a scalar offset would count in the 32 bits of the range check.
DEVICE void store_tile(const Arguments& a, const Windows& w, const Output& o, Logits logits, int n, int lane) {
  unsigned offset[ROW_PAIRS];
#pragma unroll
  for (int p = 0; p < ROW_PAIRS; ++p) offset[p] = o.offset;
  if (n < w.whole.first || n + TILE > w.whole.last) {
    const int column = n + lane % 32;
    const bool second = lane >= 32;
#pragma unroll
    for (int p = 0; p < ROW_PAIRS; ++p) {
      const int first = second ? w.row[2 * p + 1].first : w.row[2 * p].first;
      const int last = second ? w.row[2 * p + 1].last : w.row[2 * p].last;
      const bool inside = column >= first && column < last;
      const bool exists = column < a.keys && 2 * p + second < w.count;
      if (CLEAN) logits.pair[p] = inside ? logits.pair[p] : MINUS_INF;
      offset[p] = (CLEAN ? exists : inside) ? o.offset : OUTSIDE;
    }
  }
#pragma unroll
  for (int p = 0; p < ROW_PAIRS; ++p)
    __builtin_amdgcn_raw_buffer_store_b32(__builtin_bit_cast(int, logits.pair[p]), buffer(o.pair[p] + n, OUT_BYTES),
                                          offset[p], 0, 0);
}

// ---- Outside the tiles

// -inf into columns [first, last) of the rows, 256 at a time, shared between `workers` waves.
DEVICE void fill(const Arguments& a, const Windows& w, int first, int last, int worker, int workers, int lane) {
  for (long column = first + 256l * worker; column < last; column += 256l * workers) {
    const long mine = column + 4 * lane;
    for (int r = 0; r < w.count; ++r) {
      float* to = a.out + (w.m + r) * a.out_stride + mine;
      if (mine + 4 <= last) {
        *(f32x4*)to = f32x4{MINUS_INF, MINUS_INF, MINUS_INF, MINUS_INF};
      } else {
#pragma unroll
        for (int i = 0; i < 3; ++i)
          if (mine + i < last) to[i] = MINUS_INF;
      }
    }
  }
}
