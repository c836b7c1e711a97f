// LDS strategy: keys are staged through LDS and shared by waves that own different rows.
//
//   logits[m, n] = kv_scale[n] * sum_h w[m, h] * relu(q[m, h, :] . k[n, :])   inside row m's window, -inf elsewhere
//
// Plan. A workgroup owns WAVES * ROWS rows, ROWS a wave, and one of `splits` shares of their stages of 64 keys; grid
// (ceil(M / (WAVES * ROWS)), splits). A stage is copied once for all waves, straight into LDS; each wave reads all of
// it and scores its own rows. So keys pass from memory once per WAVES * ROWS rows, and q and weights are loaded once
// per row, where the streaming strategy loads keys once per ROWS rows and q once per wave of the block: better where
// rows are many and their keys few. Two stages: one is copied while the other is used. What no stage covers is filled
// with -inf by the wave of the row: every column is written exactly once.
//
// LDS layout of a stage: key after key, 128 bytes each, its eight 16-byte pieces permuted: piece p lies at
// p ^ (key / 2 % 8). A wave reads piece 2 j + h of 32 keys at once; 16 lanes of a phase then touch all 64 banks.
#define ROWS BLOCK_M
#include "common.h"

constexpr int STAGE = 64;
constexpr int COPIES = STAGE * DIM / (1024 * WAVES);  // 1 KiB an instruction
static_assert(COPIES * 1024 * WAVES == STAGE * DIM, "every wave copies the same share of a stage");

typedef __attribute__((address_space(3))) unsigned char Lds;

DEVICE void copy_stage(const Arguments& a, int stage, int last, Lds* to, int wave, int lane) {
  // A stage past the end has no bytes: zeros, which nobody reads.
  const int n = stage * STAGE, left = last - n, count = smaller(left, STAGE);
  const Buffer k = buffer(a.k + n * a.k_stride, left > 0 ? (count - 1) * (unsigned)a.k_stride + DIM : 0);
#pragma unroll
  for (int i = 0; i < COPIES; ++i) {
    const int first = 8 * (wave + i * WAVES);  // eight keys an instruction, lane / 8 the key
    const int key = first + lane / 8, piece = lane % 8 ^ (key / 2 % 8);
    __builtin_amdgcn_raw_ptr_buffer_load_lds(k, to + first * DIM, 16, key * (unsigned)a.k_stride + piece * 16, 0, 0, 0);
  }
}

DEVICE void load_scales(const Arguments& a, int stage, int last, float (&scale)[2], int lane) {
  const int n = stage * STAGE, left = last - n;
  const Buffer scales = buffer(a.kv_scale + n, left > 0 ? smaller(left, STAGE) * 4 : 0);
#pragma unroll
  for (int t = 0; t < 2; ++t) {
    const int bits = __builtin_amdgcn_raw_buffer_load_b32(scales, (t * TILE + lane % 32) * 4, 0, 0);
    scale[t] = __builtin_bit_cast(float, bits);
  }
}

DEVICE Keys read_keys(const Lds* stage, int tile, float scale, int lane) {
  const int key = lane % 32, h = lane / 32, mix = key / 2 % 8;  // of the stage's second tile the same
  i32x4 piece[4];
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    const int at = key * DIM + ((2 * j + h) ^ mix) * 16 + tile * TILE * DIM;
    piece[j] = *(const __attribute__((address_space(3))) i32x4*)(stage + at);
  }
  Keys keys;
#pragma unroll
  for (int s = 0; s < 2; ++s)
    keys.part[s] = __builtin_shufflevector(piece[2 * s], piece[2 * s + 1], 0, 1, 2, 3, 4, 5, 6, 7);
  keys.scale = scale;
  return keys;
}

// The stage has arrived, and every wave has left the other one. All but the last stores of this wave are waited for:
// the copies are older.
DEVICE void next_stage() {
  __builtin_amdgcn_fence(__ATOMIC_RELEASE, "workgroup");
  __builtin_amdgcn_s_waitcnt(0x0f70 | (2 * ROW_PAIRS & 15));  // vmcnt(2 * ROW_PAIRS)
  __builtin_amdgcn_s_barrier();
  __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "workgroup");
}

DEVICE void score_stage(const Arguments& a, const Windows& w, const Output& to, const QueryRow (&rows)[ROWS],
                        const Lds* keys, const float (&scale)[2], int stage, int lane) {
#pragma unroll
  for (int t = 0; t < 2; ++t)
    store_tile(a, w, to, score_tile(rows, read_keys(keys, t, scale[t], lane)), stage * STAGE + t * TILE, lane);
}

extern "C"
    __attribute__((global, amdgpu_flat_work_group_size(64 * WAVES, 64 * WAVES), amdgpu_waves_per_eu(OCCUPANCY))) void
    KERNEL_NAME(const unsigned char* __restrict__ q, const unsigned char* __restrict__ k,
                const float* __restrict__ kv_scale, const float* __restrict__ weights, const int* __restrict__ ks,
                const int* __restrict__ ke, float* __restrict__ out, long q_stride_m, long q_stride_h, long k_stride,
                long w_stride, long out_stride, int rows, int keys, int blocks, int splits, int reverse) {
  const Arguments a = {q,          k,          kv_scale, weights,  ks,         ke,   out,
                       q_stride_m, q_stride_h, k_stride, w_stride, out_stride, rows, keys};
  // One array a stage, so that the compiler sees which copies a read waits for.
  __attribute__((shared, aligned(16))) unsigned char even[STAGE * DIM];
  __attribute__((shared, aligned(16))) unsigned char odd[STAGE * DIM];
  Lds *const even_stage = (Lds*)even, *const odd_stage = (Lds*)odd;
  const int lane = __builtin_amdgcn_workitem_id_x() % 64;
  const int wave = uniform(__builtin_amdgcn_workitem_id_x() / 64);
  const int number = __builtin_amdgcn_workgroup_id_x(), block = reverse ? blocks - 1 - number : number;
  const int split = __builtin_amdgcn_workgroup_id_y();

  // Which rows, which stages.
  const long m = (long)block * WAVES * ROWS;
  const Windows windows = windows_of(a, m + wave * ROWS);
  const Span seen = union_of_windows(a, m, WAVES * ROWS);
  const int first = seen.first / STAGE, stop = (seen.last + STAGE - 1) / STAGE;

  int stage = first + split;
  if (stage < stop) {
    float even_scale[2], odd_scale[2];
    copy_stage(a, stage, seen.last, even_stage, wave, lane);
    load_scales(a, stage, seen.last, even_scale, lane);
    QueryRow wave_rows[ROWS];
#pragma unroll
    for (int r = 0; r < ROWS; ++r) wave_rows[r] = load_row(a, windows.m, r, lane);
    const Output to = output_of(a, windows.m, lane);
    wait_for_loads();
#pragma clang loop unroll(disable)
    while (true) {
      next_stage();
      copy_stage(a, stage + splits, seen.last, odd_stage, wave, lane);
      load_scales(a, stage + splits, seen.last, odd_scale, lane);
      score_stage(a, windows, to, wave_rows, even_stage, even_scale, stage, lane);
      if ((stage += splits) >= stop) break;
      next_stage();
      copy_stage(a, stage + splits, seen.last, even_stage, wave, lane);
      load_scales(a, stage + splits, seen.last, even_scale, lane);
      score_stage(a, windows, to, wave_rows, odd_stage, odd_scale, stage, lane);
      if ((stage += splits) >= stop) break;
    }
  }

  if (CLEAN) {
    fill(a, windows, 0, first * STAGE, split, splits, lane);
    fill(a, windows, smaller(stop * STAGE, keys), keys, split, splits, lane);
  }
}
