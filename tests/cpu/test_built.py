"""What every AMD compiler returns: kept on disk, and what it occupies."""

from __future__ import annotations

import pytest

from lightning_indexer.amd.built import Built
from lightning_indexer.amd.clang import assemble

ASSEMBLY = """
  .text
  .globl first
  .p2align 8
  .type first,@function
first:
  s_load_dwordx2 s[4:5], s[0:1], 0x0
  s_waitcnt lgkmcnt(0)
  v_mov_b32 v0, 1.0
  s_endpgm
.Lfirst_end:
  .size first, .Lfirst_end-first
  .rodata
  .p2align 6
  .amdhsa_kernel first
    .amdhsa_group_segment_fixed_size 1536
    .amdhsa_private_segment_fixed_size 48
    .amdhsa_kernarg_size 32
    .amdhsa_enable_private_segment 1
    .amdhsa_user_sgpr_kernarg_segment_ptr 1
    .amdhsa_user_sgpr_kernarg_preload_length 5
    .amdhsa_user_sgpr_kernarg_preload_offset 2
    .amdhsa_next_free_vgpr 100
    .amdhsa_accum_offset 68
    .amdhsa_next_free_sgpr 20
  .end_amdhsa_kernel
  .data
  .globl table
table:
  .long 0x01234567
"""
METADATA = """
  .amdgpu_metadata
---
amdhsa.version: [1, 2]
amdhsa.target: amdgcn-amd-amdhsa--{arch}:sramecc+:xnack-
amdhsa.kernels:
  - .name: first
    .symbol: first.kd
    .args:
      - {{.name: out, .offset: 0, .size: 8, .value_kind: global_buffer, .address_space: global}}
      - {{.name: count, .offset: 8, .size: 4, .value_kind: by_value}}
      - {{.offset: 16, .size: 4, .value_kind: hidden_block_count_x}}
    .group_segment_fixed_size: 1536
    .private_segment_fixed_size: 48
    .kernarg_segment_align: 8
    .kernarg_segment_size: 32
    .max_flat_workgroup_size: 256
    .wavefront_size: 64
    .sgpr_count: 26
    .vgpr_count: 100
    .agpr_count: 32
    .sgpr_spill_count: 3
    .vgpr_spill_count: 5
...
  .end_amdgpu_metadata
"""


@pytest.fixture(autouse=True)
def _cache(tmp_path, monkeypatch):
    monkeypatch.setenv("LIGHTNING_INDEXER_CACHE_DIR", str(tmp_path))


def test_built_survives_the_cache():
    code = assemble(ASSEMBLY + METADATA.format(arch="gfx942"), "gfx942")
    built = Built(code, "first", "; text\nwith two lines\n", 8192, "hip", "clang 1.0", ("out", "count"))
    again = Built.from_bytes(built.to_bytes())
    assert again.code_object.elf == code.elf
    assert (again.kernel, again.isa, again.dynamic_lds) == ("first", "; text\nwith two lines\n", 8192)
    assert (again.source, again.compiler, again.argument_names) == ("hip", "clang 1.0", ("out", "count"))
    assert again.info == built.info


def test_dynamic_lds_counts_as_a_resource():
    code = assemble(ASSEMBLY + METADATA.format(arch="gfx942"), "gfx942")
    few = Built(code, "first", "", 0, "hip", "").resources
    many = Built(code, "first", "", 40000, "hip", "").resources
    assert (few.lds, few.waves_per_simd) == (1536, 4)
    # One workgroup of four waves a compute unit, a wave each SIMD.
    assert (many.lds, many.waves_per_simd) == (41536, 1)
