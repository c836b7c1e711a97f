
__device__ __forceinline__ void multiply_fp4(const Arguments& a, const Shared& shared, Worker& s) {
  const int lane = threadIdx.x % 32;
  const int my_row = kLanesPerRow == 1 ? lane % 4 : lane % 4 / 2;
  const int my_key = threadIdx.x % 128 / 32 * 16 + lane / 4 + (kKeysPerLane == 1 ? lane % 2 * 8 : 0);

  Fp4Keys keys(shared, lane);
  KeyOperand operand;
  // Of the product whose sums are not stored yet; before the first, nothing lies below the width.
  Out* out = a.out;
  int key = a.width, length[kStoredRows] = {}, stored_rows = 0;
  Sums sum;
  float scale[kKeysPerLane], tile_scale[kKeysPerLane];
  Weights w;
  Accumulators even, odd;

  const auto store = [&]() {
#pragma unroll
    for (int r = 0; r < kStoredRows; ++r) {
      Out* target = out + r * kRowsApart * a.out_stride;
#pragma unroll
      for (int e = 0; e < kKeysPerLane; ++e) {
        const int n = key + 8 * e;
        float value = fmaf(0x1p19f * sum[r][e], scale[e], 0.0f);  // + 0.0 turns -0.0 into +0.0
        bool write = r * kRowsApart < stored_rows;
        if constexpr (kClean) {
          if (n >= length[r]) value = -__int_as_float(0x7F800000);
          write &= n < a.width;
        } else {
          write &= n < length[r];
        }
        if (write) target[n] = to_out(value);
      }
    }
  };

#pragma unroll
  for (int r = 0; r < kStoredRows; ++r) {
#pragma unroll
    for (int e = 0; e < kKeysPerLane; ++e) sum[r][e] = 0.0f, scale[e] = 0.0f;
  }

  for (int q_count = 0;; ++q_count) {
    const int q_stage = q_count % kQStages;
    ptx::barrier_wait(&s.q_full[q_stage], q_count / kQStages & 1);
    const Segment& segment = s.segment[q_stage];
    const int tiles = uniform(segment.tiles);
    if (tiles == 0) break;
    order_q(s.q[q_stage]);
    const uint64_t q_tile = ptx::matrix_descriptor<kHeadDim>(s.q[q_stage]);
    int tile_key = segment.first_tile * kTileKeys + my_key, i = 0, group = 0;

    const auto next_keys = [&]() {
      keys.next(s, lane);
#pragma unroll
      for (int e = 0; e < kKeysPerLane; ++e) {
        tile_scale[e] = scale_from_top(kKeysPerLane == 1 && lane % 2 ? keys.top[1] : keys.top[e]);
      }
    };
    // S [64 keys, kPairs] = K tile x Q^T of the group's rows
    const auto issue = [&](Accumulators& d, int group) {
      ptx::wgmma_fence();
#pragma unroll
      for (int step = 0; step < kHeadDim / 32; ++step) {
        ptx::wgmma(d, operand[step], q_tile + group * (kPairs * kHeadDim / 16) + 2 * step, step != 0);
      }
      ptx::wgmma_commit();
    };
    // Sums one product while the next one runs; false behind the last.
    const auto work = [&](Accumulators& d, Accumulators& other) {
      float now[kKeysPerLane];
#pragma unroll
      for (int e = 0; e < kKeysPerLane; ++e) now[e] = tile_scale[e];
      const bool last = group == kGroups - 1, next = last && i + 1 < tiles, more = !last || next;
      if (next) next_keys();
      ptx::wgmma_wait_all();
      if (next) keys.convert(operand);
      if (more) issue(other, last ? 0 : group + 1);
      store();
      if (kGroups > 1 || i == 0) {
        load_weights(s.weights[q_stage][group], lane, w);
        const int row = group * kGroupRows + my_row;  // of the sequence
        stored_rows = min(kGroupRows - my_row, kNextN - row);
        out = a.out + (static_cast<long long>(segment.sequence) * kNextN + row) * a.out_stride;
#pragma unroll
        for (int r = 0; r < kStoredRows; ++r) {
          const int stored = min(row + r * kRowsApart, kNextN - 1);
          length[r] = length_of(a, segment.lengths[stored], stored);
        }
      }
      key = tile_key;
#pragma unroll
      for (int e = 0; e < kKeysPerLane; ++e) scale[e] = now[e];
      sum_heads(d, w, lane, sum);
      if (last) {
        group = 0, ++i, tile_key += kTileKeys;
      } else {
        ++group;
      }
      return more;
    };

    next_keys();
    keys.convert(operand);
    issue(even, 0);
#pragma unroll 1
    while (work(even, odd) && work(odd, even)) {
    }
    ptx::wgmma_wait_all();
    ptx::barrier_arrive(&s.q_empty[q_stage]);
  }
  store();
}
