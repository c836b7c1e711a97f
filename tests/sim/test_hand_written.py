"""A hand-written HIP kernel for gfx950, simulated: copies to LDS, scaled matrix instructions, lane swaps."""

from __future__ import annotations

import struct
import sys

import ml_dtypes
import numpy as np
import pytest

pytestmark = pytest.mark.skipif(sys.version_info < (3, 11), reason="the decoder, tinygrad, needs Python 3.11")

from cdna_sim import Memory, Options, Simulator  # noqa: E402
from lightning_indexer.amd.clang import compile_hip  # noqa: E402

# out[n] = sum over h of w[h] * max(0, sum over d of k[n, d] q[h, d]): 32 heads, 128 channels, E8M0 scales for 32 each.
SOURCE = """
typedef int i32x4 __attribute__((ext_vector_type(4)));
typedef int i32x8 __attribute__((ext_vector_type(8)));
typedef float f32x2 __attribute__((ext_vector_type(2)));
typedef float f32x16 __attribute__((ext_vector_type(16)));
typedef unsigned u32x2 __attribute__((ext_vector_type(2)));
#define BITS(type, value) __builtin_bit_cast(type, value)

static __attribute__((device)) float add_shuffled(float x, const int y) { return x + BITS(float, y); }
#define ADD_DPP(x, control) add_shuffled(x, __builtin_amdgcn_update_dpp(0, BITS(int, x), control, 0xf, 0xf, false))

extern "C" __attribute__((global, amdgpu_flat_work_group_size(64, 64)))
void logits(float* out, const unsigned char* q, const unsigned char* k, const unsigned char* q_scale,
            const unsigned char* k_scale, const float* w, int keys) {
  __attribute__((shared, aligned(16))) unsigned char tile[2][4096];
  const int lane = __builtin_amdgcn_workitem_id_x(), row = lane % 32, half = lane / 32;
  i32x8 b[2];
  for (int s = 0; s < 2; ++s) {
    const i32x4* from = (const i32x4*)(q + row * 128 + s * 64 + half * 16);
    b[s] = __builtin_shufflevector(from[0], from[2], 0, 1, 2, 3, 4, 5, 6, 7);
  }
  // Four scale bytes of a head, one for 32 channels; this lane gives those of blocks `half` and `half + 2`.
  const int q_scales = *(const int*)(q_scale + row * 4) >> 8 * half;
  const f32x2 weight = {w[row], w[row]};
  for (int start = 32 * __builtin_amdgcn_workgroup_id_x(), turn = 0; start < keys; start += 64, turn ^= 1) {
    for (int part = 0; part < 4; ++part)
      __builtin_amdgcn_global_load_lds(
          (__attribute__((address_space(1))) void*)(k + (long)start * 128 + part * 1024 + lane * 16),
          (__attribute__((address_space(3))) void*)(tile[turn] + part * 1024), 16, 0, 0);
    const int k_scales = *(const int*)(k_scale + (start + row) * 4) >> 8 * half;
    __builtin_amdgcn_s_waitcnt(0x0f70);  // vmcnt(0)
    __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "workgroup");
    f32x16 c = {};
    for (int s = 0; s < 2; ++s) {
      const i32x4* from = (const i32x4*)(tile[turn] + row * 128 + s * 64 + half * 16);
      const i32x8 a = __builtin_shufflevector(from[0], from[2], 0, 1, 2, 3, 4, 5, 6, 7);
      if (s == 0)
        c = __builtin_amdgcn_mfma_scale_f32_32x32x64_f8f6f4(a, b[s], c, 0, 0, 0, k_scales, 0, q_scales);
      else
        c = __builtin_amdgcn_mfma_scale_f32_32x32x64_f8f6f4(a, b[s], c, 0, 0, 2, k_scales, 2, q_scales);
    }
    // Lanes hold heads, registers keys: register r is key 8 * (r / 4) + 4 * half + r % 4.
    float sum[16];
    for (int r = 0; r < 16; r += 2) {
      f32x2 v = {__builtin_fmaxf(c[r], 0.f), __builtin_fmaxf(c[r + 1], 0.f)};
      v = v * weight;
      sum[r] = v[0], sum[r + 1] = v[1];
    }
    for (int r = 0; r < 16; ++r) {
      float x = sum[r];
      x = ADD_DPP(x, 0x128);  // row_ror:8
      x = ADD_DPP(x, 0x124);  // row_ror:4
      x = ADD_DPP(x, 0x4e);   // quad_perm:[2,3,0,1]
      x = ADD_DPP(x, 0xb1);   // quad_perm:[1,0,3,2]
      const u32x2 rows = __builtin_amdgcn_permlane16_swap(BITS(unsigned, x), BITS(unsigned, x), false, false);
      // Through variables: clang reads element 0 for BITS(float, rows[1]).
      const unsigned first = rows[0], second = rows[1];
      sum[r] = BITS(float, first) + BITS(float, second);
    }
    float mine = 0;
    for (int r = 0; r < 16; ++r)
      if (8 * (r / 4) + r % 4 == row - 4 * half) mine = sum[r];
    const u32x2 halves = __builtin_amdgcn_permlane32_swap(BITS(unsigned, mine), BITS(unsigned, mine), false, false);
    const unsigned total = row & 4 ? halves[1] : halves[0];
    if (half == 0 && start + row < keys) out[start + row] = BITS(float, total);
  }
}
"""


@pytest.mark.parametrize("order", ["forward", "shuffled"])
def test_logits(tmp_path, monkeypatch, order):
    monkeypatch.setenv("LIGHTNING_INDEXER_CACHE_DIR", str(tmp_path / "cache"))
    source = tmp_path / "mqa_logits.hip"
    source.write_text(SOURCE)
    built = compile_hip(source, "gfx950", {}, ("-fno-honor-nans",))
    random, keys = np.random.default_rng(5), 160
    q, k = (random.standard_normal((rows, 128)).astype(ml_dtypes.float8_e4m3fn) for rows in (32, keys))
    q_scale, k_scale = (random.integers(124, 131, (rows, 4)).astype(np.uint8) for rows in (32, keys))
    w, out = random.standard_normal(32).astype(np.float32), np.full(keys, np.nan, np.float32)
    memory = Memory()
    arrays = {"out": out, "q": q, "k": k, "q_scale": q_scale, "k_scale": k_scale, "w": w}
    addresses = [memory.register(name, array.view(np.uint8), writable=name == "out") for name, array in arrays.items()]
    kernarg = struct.pack("<6Qi", *addresses, keys).ljust(built.info.kernarg_bytes, b"\0")
    simulator = Simulator(built.code_object, built.kernel, Options(order=order))
    report = simulator.launch((2, 1, 1), 64, kernarg, memory)

    def scaled(values, scales):
        return values.astype(np.float64) * np.ldexp(1.0, scales.astype(int) - 127).repeat(32, 1)

    expected = np.maximum(scaled(k, k_scale) @ scaled(q, q_scale).T, 0) @ w.astype(np.float64)
    np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-4)
    assert report.by_opcode["v_mfma_scale_f32_32x32x64_f8f6f4"] == 2 * keys // 32
    assert report.by_opcode["v_permlane16_swap_b32"] == 16 * keys // 32
    assert report.loaded["k"] == keys * 128
    assert report.stored == {"out": out.nbytes}
    [loop] = report.loops
    assert loop.by_kind["MFMA"] == 2
