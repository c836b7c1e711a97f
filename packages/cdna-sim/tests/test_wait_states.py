"""Wait states: each rule at its number and one below, and code that goes round."""

from __future__ import annotations

import sys

import pytest

pytestmark = pytest.mark.skipif(sys.version_info < (3, 11), reason="the decoder, tinygrad, needs Python 3.11")

import cdna_sim  # noqa: E402
from cdna_sim import Hazard, Memory, Options, SimulationFault, Simulator, wait_state_hazards  # noqa: E402
from cdna_sim.exec import wait_states  # noqa: E402
from cdna_sim.exec.code import Code  # noqa: E402

KERNEL = """
.text
.globl kernel
.p2align 8
.type kernel,@function
kernel:
{lines}
s_endpgm
.size kernel, .-kernel
.rodata
.p2align 6
.amdhsa_kernel kernel
  .amdhsa_next_free_vgpr 512
  .amdhsa_accum_offset 256
  .amdhsa_next_free_sgpr 100
  .amdhsa_float_denorm_mode_32 3
.end_amdhsa_kernel
"""
BOTH, NEW = ("gfx942", "gfx950"), ("gfx950",)


def assemble(lines: str, arch: str):
    return cdna_sim.assemble(KERNEL.format(lines=lines), arch)


def found(lines: str, arch: str) -> list[Hazard]:
    return wait_state_hazards(assemble(lines, arch), "kernel")


def nops(count: int) -> str:
    """Wait states without effect: of both kinds, so that either is counted."""
    return "\n".join(["s_mov_b32 s90, 0"] * (count % 3) + [f"s_nop {n - 1}" for n in _parts(count - count % 3)])


def _parts(count: int) -> list[int]:
    return [16] * (count // 16) + ([count % 16] if count % 16 else [])


# Matrix instructions, and the wait states that their result needs on gfx942 and on gfx950: passes of four cycles, and
# 3, on gfx950 4; with float32 factors 2.
RESULT = {
    "v_mfma_f32_16x16x32_fp8_fp8 v[0:3], v[32:33], v[34:35], 0": (7, 8),
    "v_mfma_f32_32x32x16_fp8_bf8 v[0:15], v[32:33], v[34:35], 0": (11, 12),
    "v_mfma_f32_16x16x16_f16 v[0:3], v[32:33], v[34:35], 0": (7, 8),
    "v_mfma_f32_32x32x8_bf16 v[0:15], v[32:33], v[34:35], 0": (11, 12),
    "v_mfma_f32_32x32x4_2b_f16 v[0:31], v[32:33], v[34:35], 0": (19, 20),
    "v_mfma_f32_16x16x4_4b_f16 v[0:15], v[32:33], v[34:35], 0": (11, 12),
    "v_mfma_f32_4x4x4_16b_f16 v[0:3], v[32:33], v[34:35], 0": (5, 5),
    "v_mfma_f32_32x32x2_f32 v[0:15], v32, v34, 0": (18, 18),
    "v_mfma_f32_16x16x4_f32 v[0:3], v32, v34, 0": (10, 10),
    "v_mfma_f32_4x4x1_16b_f32 v[0:3], v32, v34, 0": (4, 4),
    "v_mfma_i32_16x16x32_i8 v[0:3], v[32:33], v[34:35], 0": (7, 8),
    "v_mfma_i32_32x32x16_i8 v[0:15], v[32:33], v[34:35], 0": (11, 12),
    "v_mfma_f32_16x16x32_f16 v[0:3], v[32:35], v[36:39], 0": (None, 8),
    "v_mfma_f32_32x32x16_bf16 v[0:15], v[32:35], v[36:39], 0": (None, 12),
    "v_mfma_i32_16x16x64_i8 v[0:3], v[32:35], v[36:39], 0": (None, 8),
    "v_mfma_i32_32x32x32_i8 v[0:15], v[32:35], v[36:39], 0": (None, 12),
    "v_mfma_f32_16x16x128_f8f6f4 v[0:3], v[32:39], v[40:47], 0": (None, 12),
    "v_mfma_f32_32x32x64_f8f6f4 v[0:15], v[32:39], v[40:47], 0": (None, 20),
    "v_mfma_f32_32x32x64_f8f6f4 v[0:15], v[32:35], v[40:43], 0 cbsz:4 blgp:4": (None, 12),
    "v_mfma_f32_32x32x64_f8f6f4 v[0:15], v[32:39], v[40:43], 0 blgp:4": (None, 20),
    "v_mfma_scale_f32_32x32x64_f8f6f4 v[0:15], v[32:39], v[40:47], 0, v60, v60 op_sel_hi:[0,0,0]": (None, 20),
    "v_mfma_scale_f32_32x32x64_f8f6f4 a[0:15], v[32:39], v[40:47], 0, v60, v60 op_sel_hi:[0,0,0]": (None, 20),
}  # fmt: skip
LANDS = ("ds_read_b128 v[0:3], v61", "global_load_dwordx4 v[0:3], v61, s[8:9]", "scratch_load_dword v1, off, s4")
USES = ("v_add_f32 v62, v1, v1", "v_mov_b32 v1, 0", "ds_write_b32 v61, v1", "global_store_dword v61, v1, s[8:9]",
        "buffer_store_dword v1, v61, s[8:11], 0 offen", "v_pk_mul_f32 v[62:63], v[2:3], v[60:61]")  # fmt: skip


def at_its_number(first: str, second: str, needed: int, arch: str, message: str = "") -> None:
    assert found(f"{first}\n{nops(needed)}\n{second}", arch) == []
    [hazard] = found(f"{first}\n{nops(needed - 1)}\n{second}", arch)
    assert (hazard.needed, hazard.found) == (needed, needed - 1)
    assert message in str(hazard)
    if needed > 3:
        assert found(f"{first}\n{second}", arch)[0].found == 0


@pytest.mark.parametrize("arch", BOTH)
@pytest.mark.parametrize("first", RESULT)
def test_the_result_of_a_matrix_instruction(first, arch):
    needed = RESULT[first][arch == "gfx950"]
    if needed is None:
        return
    if " a[" in first:
        at_its_number(first, "v_accvgpr_read_b32 v62, a1", needed, arch)
        return
    for second in (*USES, *LANDS):
        at_its_number(first, second, needed, arch, "reads or overwrites the result of a matrix instruction")
    # Its factors, and the scales, may be overwritten at once.
    assert found(f"{first}\nv_mov_b32 v32, 0\nv_mov_b32 v34, 0\nv_mov_b32 v60, 0", arch) == []


PRODUCT = "v_mfma_f32_32x32x64_f8f6f4 v[0:15], v[32:39], v[40:47], 0"


@pytest.mark.parametrize(
    ("second", "needed"),
    [
        ("v_mfma_f32_32x32x64_f8f6f4 v[64:79], v[8:15], v[40:47], 0", 20),
        ("v_mfma_f32_32x32x64_f8f6f4 v[64:79], v[32:39], v[8:15], 0", 20),
        ("v_mfma_scale_f32_32x32x64_f8f6f4 v[64:79], v[32:39], v[40:47], 0, v3, v60 op_sel_hi:[0,0,0]", 20),
        ("v_mfma_f32_32x32x64_f8f6f4 v[64:79], v[32:39], v[40:47], v[4:19]", 18),
    ],
)
def test_products_of_products(second, needed):
    at_its_number(PRODUCT, second, needed, "gfx950")


@pytest.mark.parametrize(
    ("first", "part", "needed"),
    [
        ("v_mfma_f32_32x32x8_f16 v[0:15], v[32:33], v[34:35], 0", "v_mfma_f32_16x16x16_f16", (9, 10)),
        ("v_mfma_f32_16x16x16_f16 v[0:3], v[32:33], v[34:35], 0", "v_mfma_f32_4x4x4_16b_f16", (5, 6)),
        ("v_mfma_f32_4x4x4_16b_f16 v[0:3], v[32:33], v[34:35], 0", "v_mfma_f32_32x32x8_f16", (3, 4)),
    ],
)
def test_an_accumulator_that_overlaps_a_result(first, part, needed):
    result, third = ("v[2:17]", "v[2:17]") if "32x32" in part else ("v[2:5]", "v[2:5]")
    for arch, number in zip(BOTH, needed, strict=True):
        at_its_number(first, f"{part} {result}, v[32:33], v[34:35], {third}", number, arch, "accumulates on a part")
    plain = "v_mfma_f32_32x32x2_f32 v[0:15], v32, v33, 0", "v_mfma_f32_16x16x4_f32 v[2:5], v32, v33, v[2:5]"
    at_its_number(*plain, 16, "gfx950")


def test_narrow_factors_are_half_as_many_registers():
    first = "v_mfma_f32_32x32x64_f8f6f4 v[36:51], v[16:23], v[24:31], 0"
    second = "v_mfma_f32_32x32x64_f8f6f4 v[0:15], v[32:{}], v[52:{}], 0 cbsz:{} blgp:{}"
    assert found(f"{first}\n{second.format(35, 55, 4, 4)}", "gfx950") == []
    at_its_number(first.replace("v[36:51]", "v[34:49]"), second.format(35, 55, 4, 4), 20, "gfx950")
    at_its_number(first, second.format(39, 59, 0, 0), 20, "gfx950")


def test_accumulating_needs_nothing():
    assert found(f"{PRODUCT}\n{PRODUCT[:-1]}v[0:15]", "gfx950") == []
    two_passes = "v_mfma_f32_4x4x4_16b_f16 v[0:3], v[32:33], v[34:35], "
    at_its_number(f"{two_passes}0", f"{two_passes}v[0:3]", 2, "gfx942")


@pytest.mark.parametrize(
    ("first", "needed"),
    [
        ("v_mfma_f32_32x32x64_f8f6f4 v[64:79], v[32:39], v[40:47], v[0:15]", 15),
        ("v_mfma_f32_32x32x16_bf16 v[64:79], v[32:35], v[40:43], v[0:15]", 7),
        ("v_mfma_f32_16x16x32_bf16 v[64:67], v[32:35], v[40:43], v[0:3]", 3),
    ],
)
def test_an_accumulator_that_is_read(first, needed):
    for second in ("v_mov_b32 v2, 0", "ds_read_b32 v2, v63", "global_load_dword v2, v63, s[8:9]"):
        at_its_number(first, second, needed, "gfx950", "overwrites the accumulator")
    assert found(f"{first}\nv_add_f32 v62, v2, v2", "gfx950") == []


@pytest.mark.parametrize(
    ("first", "second", "needed", "archs"),
    [
        ("v_mov_b32 v33, 0", PRODUCT, 2, NEW),
        ("v_mov_b32 v0, 0", "v_mfma_f32_16x16x32_fp8_fp8 v[0:3], v[32:33], v[34:35], v[0:3]", 2, BOTH),
        ("v_cmpx_gt_u32 4, v0", "v_mfma_f32_16x16x32_fp8_fp8 v[0:3], v[32:33], v[34:35], 0", 4, BOTH),
        ("v_cmpx_gt_u32 4, v0", "v_mov_b32_dpp v1, v2 row_shr:1", 5, BOTH),
        ("v_cmpx_gt_u32 4, v0", "v_readfirstlane_b32 s4, v2", 4, BOTH),
        ("v_cmpx_gt_u32 4, v0", "v_writelane_b32 v2, s4, 3", 4, BOTH),
        ("v_mov_b32 v2, 0", "v_mov_b32_dpp v1, v2 row_shr:1", 2, BOTH),
        ("v_mov_b32 v2, 0", "v_permlane32_swap_b32 v1, v2", 2, NEW),
        ("v_mov_b32 v1, 0", "v_permlane16_swap_b32 v1, v2", 2, NEW),
        ("v_mov_b32 v2, 0", "v_readfirstlane_b32 s4, v2", 1, BOTH),
        ("v_mov_b32 v2, 0", "v_readlane_b32 s4, v2, 3", 1, BOTH),
        ("v_exp_f32 v2, v3", "v_add_f32 v4, v2, v5", 1, BOTH),
        ("v_mov_b32_sdwa v2, v3 dst_sel:BYTE_1 dst_unused:UNUSED_PRESERVE", "v_add_f32 v4, v2, v5", 1, BOTH),
        ("v_mov_b32_sdwa v2, v3 dst_sel:WORD_1 dst_unused:UNUSED_PRESERVE", "v_exp_f32 v4, v2", 1, BOTH),
        ("v_mov_b32_sdwa v2, v3 dst_sel:WORD_1 dst_unused:UNUSED_PRESERVE", "v_mov_b32 v2, 0", 1, BOTH),
        ("v_cvt_pk_fp8_f32 v6, v1, v2 op_sel:[0,0,1]", "v_cvt_pk_fp8_f32 v6, v3, v4", 1, BOTH),
        ("v_dot4_i32_i8 v1, v2, v3, v4", "v_add_u32 v5, v1, v1", 3, BOTH),
        ("v_dot4_i32_i8 v1, v2, v3, v4", "v_mov_b32 v1, 0", 3, BOTH),
        ("v_dot4_i32_i8 v1, v2, v3, v4", "v_dot4_i32_i8 v5, v1, v3, v4", 3, BOTH),
        ("v_dot4_i32_i8 v1, v2, v3, v4", "global_store_dword v5, v1, s[8:9]", 3, BOTH),
        ("v_cmp_gt_u32 vcc, 4, v0", "v_cndmask_b32 v1, v2, v3, vcc", 2, BOTH),
        ("v_add_co_u32 v4, vcc, v4, v1", "v_addc_co_u32 v5, vcc, 0, v5, vcc", 2, BOTH),
        ("v_readfirstlane_b32 s4, v2", "v_add_u32 v1, s4, v3", 2, BOTH),
        ("v_readfirstlane_b32 s4, v2", "v_readlane_b32 s5, v7, s4", 4, BOTH),
        ("v_cmp_gt_u32 vcc, 4, v0", "v_div_fmas_f32 v1, v2, v3, v4", 4, BOTH),
        ("v_readfirstlane_b32 s8, v2", "global_load_dword v4, v5, s[8:9]", 5, BOTH),
        ("v_readfirstlane_b32 s9, v2", "buffer_store_dword v4, v5, s[8:11], 0 offen", 5, BOTH),
        ("global_store_dwordx4 v8, v[4:7], s[8:9]", "v_mov_b32 v7, 0", 2, BOTH),
        ("buffer_store_dwordx3 v[4:6], v8, s[8:11], 0 offen", "v_mov_b32 v6, 0", 2, BOTH),
        ("buffer_store_dwordx4 v[4:7], v8, s[8:11], s4 offen", "v_mov_b32 v5, 0", 1, BOTH),
        ("scratch_store_dwordx4 off, v[4:7], s4", "v_mov_b32 v5, 0", 2, BOTH),
        ("global_atomic_cmpswap_x2 v8, v[4:7], s[8:9]", "v_mov_b32 v7, 0", 2, BOTH),
        ("s_mov_b32 m0, 64", "global_load_lds_dword v[8:9], off", 1, BOTH),
        ("s_mov_b32 m0, 64", "buffer_load_dword v8, s[8:11], 0 offen lds", 1, BOTH),
    ],
)
def test_other_pairs(first, second, needed, archs):
    for arch in archs:
        at_its_number(first, second, needed, arch)


@pytest.mark.parametrize(
    "lines",
    [
        "v_exp_f32 v2, v3\nv_exp_f32 v4, v2",
        "v_mov_b32 v2, 0\nv_add_f32 v4, v2, v2",
        "v_mov_b32 v2, 0\nglobal_store_dword v8, v2, s[8:9]",
        "s_mov_b32 s4, 0\nv_add_u32 v1, s4, v3",
        "s_mov_b32 s8, 0\nglobal_load_dword v4, v5, s[8:9]",
        "s_mov_b32 m0, 64\nglobal_load_dword v4, v5, s[8:9]",
        "global_store_dwordx2 v8, v[4:5], s[8:9]\nv_mov_b32 v5, 0",
        "buffer_store_dwordx2 v[4:5], v8, s[8:11], s4 offen\nv_mov_b32 v5, 0",
        "global_store_dwordx4 v8, v[4:7], s[8:9]\nv_add_f32 v1, v5, v5",
        "v_cmp_gt_u32 vcc, 4, v0\ns_and_b64 vcc, vcc, exec",
        "v_mov_b32_sdwa v2, v3 dst_sel:DWORD\nv_add_f32 v4, v2, v5",
        "v_dot4_i32_i8 v1, v2, v3, v4\nv_dot4_i32_i8 v1, v2, v3, v1",
        "v_dot4_i32_i8 v32, v2, v3, v4\nv_mfma_f32_16x16x32_fp8_fp8 v[0:3], v[32:33], v[34:35], 0",
        # One opcode's result as another's accumulator: compilers add nothing, see docs/model.md.
        "v_mfma_f32_16x16x32_fp8_fp8 v[0:3], v[32:33], v[34:35], 0\n"
        "v_mfma_f32_16x16x32_fp8_bf8 v[0:3], v[32:33], v[34:35], v[0:3]",
    ],
)
def test_what_needs_nothing(lines):
    assert found(lines, "gfx942") == []
    assert found(lines, "gfx950") == []


def test_the_shortest_path_counts():
    loop = f"""
        s_mov_b32 s4, 0
    again:
        v_add_f32 v62, v3, v3
        {PRODUCT}
        s_add_u32 s4, s4, 1
        s_cmp_lt_u32 s4, 3
        s_cbranch_scc1 again
        s_nop 15
        s_nop 15
        v_add_f32 v62, v3, v3
    """
    [hazard] = found(loop, "gfx950")
    assert hazard.found == 3
    assert hazard.second.pc < hazard.first.pc
    past = f"{PRODUCT}\ns_cbranch_scc1 skip\ns_nop 15\ns_nop 7\nskip:\nv_add_f32 v62, v3, v3"
    assert [hazard.found for hazard in found(past, "gfx950")] == [1]


def test_what_is_not_modelled_does_not_end_the_check():
    unknown = "v_cubeid_f32 v70, v71, v72, v73"
    [hazard] = found(f"{unknown}\n{PRODUCT}\n{unknown}\nv_mov_b32 v62, v1", "gfx950")
    assert hazard.found == 1
    assert found("v_mfma_f64_16x16x4_f64 v[0:7], v[32:33], v[34:35], 0\nv_mov_b32 v62, v60", "gfx942") == []


def test_a_launch_refuses_and_names_both():
    lines = f"{PRODUCT}\n{nops(4)}\nv_add_f32 v62, v3, v3"
    with pytest.raises(
        SimulationFault, match="reads or overwrites the result of a matrix instruction, 4 wait states"
    ) as e:
        Simulator(assemble(lines, "gfx950"), "kernel")
    assert "v_mfma_f32_32x32x64_f8f6f4" in str(e.value)
    assert e.value.text.startswith("v_add_f32 v62")
    report = Simulator(assemble(lines, "gfx950"), "kernel", Options(wait_states=False)).launch(
        (1, 1, 1), 64, b"", Memory()
    )
    assert report.instructions == 5


def test_an_instruction_left_out_is_a_wait_state_and_touches_nothing():
    code = assemble(f"{PRODUCT}\n{nops(4)}\nv_add_f32 v62, v3, v3", "gfx950")
    kernel = Code(code, "kernel")
    reader = next(hazard.second.pc for hazard in wait_states.hazards_of(kernel))
    assert list(wait_states.hazards_of(kernel, frozenset({reader}))) == []
