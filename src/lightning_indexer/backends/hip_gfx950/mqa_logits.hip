// Streaming strategy: keys go from memory into registers, no LDS.
//
//   logits[m, n] = kv_scale[n] * sum_h w[m, h] * relu(q[m, h, :] . k[n, :])   inside row m's window, -inf elsewhere
//
// Plan. A workgroup owns ROWS rows and one of `splits` shares of their tiles of 32 keys; grid (ceil(M / ROWS), splits).
// Each of its WAVES waves keeps q and weights of all ROWS rows in registers, so that one load of a tile serves ROWS
// rows. The waves split tiles, not rows: worker i of splits * WAVES takes tiles i, i + workers, ... of those that the
// rows' windows touch, and so several independent streams of keys are in flight. With UNROLL2 two tiles are in
// registers, one in use and one on its way. What no tile covers is filled with -inf by the same waves: every column is
// written exactly once. `reverse` starts the row blocks from the last one: under a causal mask those have most work.
#define ROWS BLOCK_M
#include "common.h"

DEVICE Keys load_keys(const Arguments& a, int tile, int last, int lane) {
  // A tile past the end has no bytes: its loads touch nothing, and count alike in the wait for the one before.
  const int n = tile * TILE, left = last - n, count = smaller(left, TILE);
  const Buffer k = buffer(a.k + n * a.k_stride, left > 0 ? (count - 1) * (unsigned)a.k_stride + DIM : 0);
  const Buffer scales = buffer(a.kv_scale + n, left > 0 ? count * 4 : 0);
  const unsigned offset = lane % 32 * (unsigned)a.k_stride + lane / 32 * 16;
  Keys keys;
#pragma unroll
  for (int s = 0; s < 2; ++s) {
    const i32x4 low = (i32x4)__builtin_amdgcn_raw_buffer_load_b128(k, offset + s * 64, 0, 0);
    const i32x4 high = (i32x4)__builtin_amdgcn_raw_buffer_load_b128(k, offset + s * 64 + 32, 0, 0);
    keys.part[s] = __builtin_shufflevector(low, high, 0, 1, 2, 3, 4, 5, 6, 7);
  }
  const int bits = __builtin_amdgcn_raw_buffer_load_b32(scales, lane % 32 * 4, 0, 0);
  keys.scale = __builtin_bit_cast(float, bits);
  return keys;
}

extern "C"
    __attribute__((global, amdgpu_flat_work_group_size(64 * WAVES, 64 * WAVES), amdgpu_waves_per_eu(OCCUPANCY))) void
    KERNEL_NAME(const unsigned char* __restrict__ q, const unsigned char* __restrict__ k,
                const float* __restrict__ kv_scale, const float* __restrict__ weights, const int* __restrict__ ks,
                const int* __restrict__ ke, float* __restrict__ out, long q_stride_m, long q_stride_h, long k_stride,
                long w_stride, long out_stride, int rows, int keys, int blocks, int splits, int reverse) {
  const Arguments a = {q,          k,          kv_scale, weights,  ks,         ke,   out,
                       q_stride_m, q_stride_h, k_stride, w_stride, out_stride, rows, keys};
  const int lane = __builtin_amdgcn_workitem_id_x() % 64;
  const int wave = uniform(__builtin_amdgcn_workitem_id_x() / 64);
  const int number = __builtin_amdgcn_workgroup_id_x(), block = reverse ? blocks - 1 - number : number;
  const int worker = __builtin_amdgcn_workgroup_id_y() * WAVES + wave, workers = splits * WAVES;

  // Which rows, which tiles.
  const Windows windows = windows_of(a, (long)block * ROWS);
  const Span seen = union_of_windows(a, windows.m, ROWS);
  const int first = seen.first / TILE, stop = (seen.last + TILE - 1) / TILE;

  int tile = first + worker;
  if (tile < stop) {
    Keys even = load_keys(a, tile, seen.last, lane);
    QueryRow block_rows[ROWS];
#pragma unroll
    for (int r = 0; r < ROWS; ++r) block_rows[r] = load_row(a, windows.m, r, lane);
    const Output to = output_of(a, windows.m, lane);
    wait_for_loads();
#pragma clang loop unroll(disable)
    while (true) {
#if UNROLL2
      Keys odd = load_keys(a, tile + workers, seen.last, lane);
      store_tile(a, windows, to, score_tile(block_rows, even), tile * TILE, lane);
      if ((tile += workers) >= stop) break;
      even = load_keys(a, tile + workers, seen.last, lane);
      store_tile(a, windows, to, score_tile(block_rows, odd), tile * TILE, lane);
      if ((tile += workers) >= stop) break;
#else
      store_tile(a, windows, to, score_tile(block_rows, even), tile * TILE, lane);
      if ((tile += workers) >= stop) break;
      even = load_keys(a, tile, seen.last, lane);
#endif
    }
  }

  if (CLEAN) {
    fill(a, windows, 0, first * TILE, worker, workers, lane);
    fill(a, windows, smaller(stop * TILE, keys), keys, worker, workers, lane);
  }
}
