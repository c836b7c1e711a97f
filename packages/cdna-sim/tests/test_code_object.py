"""Code objects and their metadata, against kernels whose every fact is written down in the assembly."""

from __future__ import annotations

import struct

import pytest

from cdna_sim import Argument, AssemblerError, CodeObject, CodeObjectError, assemble, lds_limit, waves_per_simd

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
ARCHS = ("gfx942", "gfx950")


@pytest.mark.parametrize("arch", ARCHS)
def test_every_fact_of_a_kernel(arch):
    code = assemble(ASSEMBLY + METADATA.format(arch=arch), arch)
    assert code.arch == arch
    assert list(code.kernels) == ["first"]
    kernel = code.kernel()
    assert kernel is code.kernel("first")

    descriptor = kernel.descriptor
    assert (descriptor.lds_bytes, descriptor.scratch_bytes, descriptor.kernarg_bytes) == (1536, 48, 32)
    assert (descriptor.preload_length, descriptor.preload_offset) == (5, 2)
    assert descriptor.properties & 1 << 3, "the kernarg segment pointer"
    assert descriptor.rsrc1 & 0x3F == 12, "100 VGPRs are 13 granules of 8"
    assert descriptor.rsrc3 & 0x3F == 68 // 4 - 1
    assert descriptor.rsrc2 & 1, "scratch"
    assert descriptor.rsrc2 >> 1 & 0x1F == 2 + 5, "user SGPRs: the pointer and the preloaded dwords"

    assert kernel.arguments == (
        Argument("out", 0, 8, "global_buffer"),
        Argument("count", 8, 4, "by_value"),
        Argument("", 16, 4, "hidden_block_count_x"),
    )
    assert (kernel.max_workgroup, kernel.wavefront, kernel.kernarg_bytes) == (256, 64, 32)
    resources = kernel.resources
    assert (resources.vgpr, resources.agpr, resources.sgpr) == (100, 32, 26)
    assert (resources.lds, resources.scratch, resources.vgpr_spills, resources.sgpr_spills) == (1536, 48, 5, 3)
    assert resources.waves_per_simd == 512 // 104


@pytest.mark.parametrize("arch", ARCHS)
def test_the_image_holds_code_and_data_at_their_addresses(arch):
    code = assemble(ASSEMBLY + METADATA.format(arch=arch), arch)
    start, stop = code.kernel().text
    assert start == code.kernel().descriptor.entry
    assert stop - start == 8 + 4 + 4 + 4
    # s_endpgm, as the ISA documents give it.
    assert code.image[stop - 4 : stop] == struct.pack("<I", 0xBF810000)
    assert struct.pack("<I", 0x01234567) in code.image


def test_without_metadata_the_descriptor_says_what_it_can():
    code = assemble(ASSEMBLY.replace(".size first, .Lfirst_end-first", ""), "gfx950")
    kernel = code.kernel()
    assert code.arch == "gfx950"
    assert (kernel.arguments, kernel.max_workgroup, kernel.wavefront, kernel.kernarg_bytes) == ((), 1024, 64, 32)
    # Rounded up to what is allocated: 13 granules of 8, of which 68 are no AGPRs.
    assert (kernel.resources.vgpr, kernel.resources.agpr) == (104, 36)
    assert kernel.resources.sgpr == 32, "20 and VCC with its kin, in granules of 16"
    assert kernel.text[1] >= kernel.text[0] + 20


def test_several_kernels_are_named_one_by_one():
    second = ASSEMBLY.replace("first", "second").replace("table", "other")
    code = assemble(ASSEMBLY + second, "gfx942")
    assert set(code.kernels) == {"first", "second"}
    assert code.kernel("second").text != code.kernel("first").text
    for name in (None, "third"):
        with pytest.raises(CodeObjectError, match=f"kernel: got {name!r}, expected one of first, second"):
            code.kernel(name)


def test_what_is_no_code_object_is_refused():
    elf = assemble(ASSEMBLY + METADATA.format(arch="gfx950"), "gfx950").elf
    with pytest.raises(CodeObjectError, match="not a 64-bit little-endian ELF file"):
        CodeObject(b"PK\x03\x04" + elf)
    with pytest.raises(CodeObjectError, match="not a 64-bit little-endian ELF file"):
        CodeObject(b"")
    with pytest.raises(CodeObjectError, match=r"e_machine: got 62, expected 224 \(AMD GPU\)"):
        CodeObject(elf[:0x12] + struct.pack("<H", 62) + elf[0x14:])
    for length in (8, 0x40, len(elf) // 2, len(elf) - 8):
        with pytest.raises(CodeObjectError, match="damaged code object"):
            CodeObject(elf[:length])


def test_an_object_that_has_to_be_relocated_is_refused():
    # An absolute address of a symbol in a loaded section: the dynamic linker's work.
    with pytest.raises(CodeObjectError, match=r"section .*rel.* holds relocations"):
        assemble(ASSEMBLY + "  .quad first\n", "gfx950")


def test_an_unknown_machine_is_named():
    elf = assemble(ASSEMBLY, "gfx950").elf
    with pytest.raises(CodeObjectError, match="e_flags: got machine 0xff, expected one of gfx90a, gfx942, gfx950"):
        CodeObject(elf[:0x30] + b"\xff" + elf[0x31:])


def test_a_descriptor_that_the_metadata_promises_has_to_be_there():
    text = METADATA.format(arch="gfx950").replace(".symbol: first.kd", ".symbol: gone.kd")
    with pytest.raises(CodeObjectError, match=r"no kernel descriptor for gone\.kd"):
        assemble(ASSEMBLY + text, "gfx950")


def test_the_assembler_says_what_it_does_not_like():
    with pytest.raises(AssemblerError, match=r"assembly for gfx950 failed:(?s:.)*v_nonsense"):
        assemble("v_nonsense v0, v1", "gfx950")
    # An instruction of the other arch.
    scaled = "v_mfma_f32_32x32x64_f8f6f4 a[0:15], v[0:7], v[8:15], a[0:15]"
    with pytest.raises(AssemblerError, match="instruction not supported on this GPU"):
        assemble(scaled, "gfx942")


@pytest.mark.parametrize(
    ("arch", "vgpr", "sgpr", "lds", "waves", "expected"),
    [
        ("gfx950", 1, 16, 0, 4, 8),
        ("gfx950", 64, 16, 0, 4, 8),
        ("gfx950", 65, 16, 0, 4, 7),
        ("gfx950", 183, 16, 34304, 4, 2),
        ("gfx950", 512, 16, 0, 1, 1),
        ("gfx950", 128, 16, 20736, 2, 4),
        ("gfx950", 64, 101, 0, 4, 7),
        ("gfx950", 64, 16, 160 * 1024, 16, 4),
        ("gfx950", 64, 16, 160 * 1024 + 1, 16, 0),
        ("gfx942", 64, 16, 64 * 1024, 4, 1),
        ("gfx942", 64, 16, 64 * 1024 + 1, 4, 0),
        ("gfx942", 64, 16, 32 * 1024, 4, 2),
        ("gfx1201", 64, 16, 0, 4, None),
    ],
)
def test_waves_per_simd(arch, vgpr, sgpr, lds, waves, expected):
    assert waves_per_simd(arch, vgpr, sgpr, lds, waves) == expected


def test_lds_limits():
    assert [lds_limit(arch) for arch in ("gfx942", "gfx950", "gfx1201")] == [64 * 1024, 160 * 1024, None]
