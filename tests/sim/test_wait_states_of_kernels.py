"""Wait states of what compilers make: the compiler's own nops, shipped kernels, and the text that is mended."""

from __future__ import annotations

import sys
from dataclasses import replace

import pytest

pytestmark = pytest.mark.skipif(sys.version_info < (3, 11), reason="the decoder, tinygrad, needs Python 3.11")
pytest.importorskip("tinygrad")
pytest.importorskip("ziglang")

from cdna_sim import Hazard, wait_state_hazards  # noqa: E402
from cdna_sim.exec.code import Code  # noqa: E402
from cdna_sim.exec.wait_states import of_nodes, reachable  # noqa: E402
from lightning_indexer import Arch, MqaLogitsProblem  # noqa: E402
from lightning_indexer.amd import clang as amdgpu_clang  # noqa: E402
from lightning_indexer.amd.repair import repair  # noqa: E402
from lightning_indexer.selection import registry as dispatch  # noqa: E402

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
USES = ("v_add_f32 v62, v1, v1", "v_mov_b32 v1, 0", "ds_write_b32 v61, v1", "global_store_dword v61, v1, s[8:9]",
        "buffer_store_dword v1, v61, s[8:11], 0 offen", "v_pk_mul_f32 v[62:63], v[2:3], v[60:61]")  # fmt: skip
PRODUCT = "v_mfma_f32_32x32x64_f8f6f4 v[0:15], v[32:39], v[40:47], 0"


def found(lines: str, arch: str) -> list[Hazard]:
    return wait_state_hazards(amdgpu_clang.assemble(KERNEL.format(lines=lines), arch), "kernel")


# What the compilers put there.

SOURCE = """
typedef float out_t __attribute__((ext_vector_type({count})));
typedef int ints __attribute__((ext_vector_type({ints})));
typedef _Float16 h4 __attribute__((ext_vector_type(4)));
typedef _Float16 h8 __attribute__((ext_vector_type(8)));
extern "C" __attribute__((global)) void kernel(const {a}* a, float* o) {{
  const int lane = __builtin_amdgcn_workitem_id_x();
  out_t zero = {{}};
  out_t r = __builtin_amdgcn_mfma_{name}(a[lane], a[lane + 64], zero, {more});
  o[lane] = r[0] * 2.0f;
}}
"""


@pytest.mark.parametrize(
    ("arch", "count", "ints", "a", "name", "more"),
    [
        ("gfx942", 4, 2, "long", "f32_16x16x32_fp8_fp8", "0, 0, 0"),
        ("gfx942", 16, 2, "long", "f32_32x32x16_fp8_fp8", "0, 0, 0"),
        ("gfx950", 4, 2, "long", "f32_16x16x32_fp8_fp8", "0, 0, 0"),
        ("gfx950", 16, 2, "long", "f32_32x32x16_fp8_fp8", "0, 0, 0"),
        ("gfx942", 16, 2, "h4", "f32_32x32x8f16", "0, 0, 0"),
        ("gfx942", 32, 2, "h4", "f32_32x32x4f16", "0, 0, 0"),
        ("gfx942", 16, 2, "h4", "f32_16x16x4f16", "0, 0, 0"),
        ("gfx942", 4, 2, "h4", "f32_4x4x4f16", "0, 0, 0"),
        ("gfx942", 4, 2, "float", "f32_16x16x4f32", "0, 0, 0"),
        ("gfx950", 16, 2, "float", "f32_32x32x2f32", "0, 0, 0"),
        ("gfx950", 4, 2, "h8", "f32_16x16x32_f16", "0, 0, 0"),
        ("gfx950", 16, 2, "h8", "f32_32x32x16_f16", "0, 0, 0"),
        ("gfx950", 4, 8, "ints", "scale_f32_16x16x128_f8f6f4", "0, 0, 0, lane, 0, lane"),
        ("gfx950", 16, 8, "ints", "scale_f32_32x32x64_f8f6f4", "0, 0, 0, lane, 0, lane"),
        ("gfx950", 16, 8, "ints", "scale_f32_32x32x64_f8f6f4", "4, 4, 0, lane, 0, lane"),
    ],
)  # fmt: skip
def test_the_numbers_are_the_compilers(tmp_path, arch, count, ints, a, name, more):
    source = tmp_path / "kernel.hip"
    source.write_text(SOURCE.format(count=count, ints=ints, a=a, name=name, more=more))
    built = amdgpu_clang.compile_hip(source, arch, {})
    code = Code(built.code_object, built.kernel)
    nodes = reachable(code)
    assert list(of_nodes(code.arch, nodes)) == []
    # The last of the nops before the reader, one shorter, is one too few.
    padding = [pc for pc, node in nodes.items() if node.ins.name == "S_NOP"]
    shorter = {pc: {**nodes, pc: replace(nodes[pc], states=nodes[pc].states - 1)} for pc in padding}
    hazards = [hazard for one in shorter.values() for hazard in of_nodes(code.arch, one)]
    matrix = [hazard for hazard in hazards if hazard.first.kind == "MFMA"]
    assert matrix
    assert all(hazard.found == hazard.needed - 1 for hazard in matrix)


@pytest.mark.parametrize(
    ("arch", "backend", "shape"),
    [
        ("gfx950", "hip-gfx950", (4096, 32768, 32, 128)),
        ("gfx950", "hip-gfx950", (8192, 8192, 64, 128)),
        ("gfx950", "flydsl", (4096, 32768, 64, 128)),
        ("gfx942", "flydsl", (4096, 32768, 128, 64)),
    ],
)
def test_shipped_kernels_have_what_they_need_and_little_more(arch, backend, shape):
    built = dispatch.kernel(backend).build(MqaLogitsProblem(*shape), Arch.parse(arch))
    code = Code(built.code_object, built.kernel)
    nodes = reachable(code)
    assert list(of_nodes(code.arch, nodes)) == []
    order = sorted(nodes)
    for index, pc in enumerate(order):
        node, behind = nodes[pc], nodes[order[index + 1]] if index + 1 < len(order) else None
        if node.ins.name != "S_NOP" or behind is None:
            continue
        # LLVM also parts loads that overwrite their own address (for replay after a page fault), and puts one wait
        # state behind packed instructions, whose op_sel it takes for a write of half a register; and around assembly.
        before = [nodes[at] for at in order[max(0, index - 3) : index]]
        loads = behind.ins.kind in ("SMEM", "VMEM_LOAD")
        packed = behind.ins.format == "VOP3P" or any(
            one.ins.format == "VOP3P" and one.written & behind.read for one in before
        )
        if not loads and not packed:
            less = {**nodes, pc: replace(node, states=node.states - 1)}
            assert list(of_nodes(code.arch, less)), f"s_nop at {pc:#x} is there for no rule"


# The text that compilers print, mended.


def text(first: str, between: int, second: str) -> str:
    return "\n".join(f"\t{line}" for line in [first, *["s_mov_b32 s90, 0"] * between, second])


def test_a_reader_19_wait_states_behind_is_mended():
    for second in (
        *USES,
        "v_mfma_f32_32x32x64_f8f6f4 v[64:79], v[8:15], v[40:47], 0",
        "v_mfma_scale_f32_32x32x64_f8f6f4 v[64:79], v[32:39], v[40:47], 0, v3, v60 op_sel_hi:[0,0,0]",
    ):
        broken = text(PRODUCT, 19, second)
        assert len(found(broken, "gfx950")) == 1
        mended = repair(broken, "gfx950")
        assert mended.split("\n")[-2:] == ["\ts_nop 0", f"\t{second}"]
        assert found(mended, "gfx950") == []
        assert repair(mended, "gfx950") is mended


@pytest.mark.parametrize(
    ("first", "between", "second"),
    [
        (PRODUCT, 20, USES[0]),
        (PRODUCT, 0, "v_add_f32 v62, v32, v40"),
        (PRODUCT, 0, f"{PRODUCT[:-1]}v[0:15]"),
        (PRODUCT, 0, "s_mov_b32 s1, 0"),
        (f"{PRODUCT} cbsz:4 blgp:4".replace("32:39", "32:35").replace("40:47", "40:43"), 12, USES[0]),
        ("v_mfma_f32_32x32x16_bf16 v[0:15], v[32:35], v[36:39], 0", 12, USES[0]),
        ("v_mfma_f32_32x32x64_f8f6f4 a[0:15], v[32:39], v[40:47], 0", 0, USES[0]),
    ],
)
def test_what_is_right_stays(first, between, second):
    right = text(first, between, second)
    assert repair(right, "gfx950") is right


def test_assembly_at_once_behind_a_product_is_mended():
    mended = repair(text(PRODUCT, 0, "v_pk_mul_f32 v[62:63], v[0:1], s[4:5] clamp"), "gfx950")
    assert [line.strip() for line in mended.split("\n")][1:3] == ["s_nop 3", "s_nop 15"]
    assert found(mended, "gfx950") == []


def test_paths_of_the_text_are_followed():
    loop = f"""
    s_mov_b32 s4, 0
.LBB0_1:                                ; =>This Inner Loop Header: Depth=1
    v_add_f32 v62, v3, v3               ; v0 is not read here
    {PRODUCT}
    s_nop 14
    s_cmp_lt_u32 s4, 3
    s_cbranch_scc1 .LBB0_1
    s_nop 3
    v_add_f32 v62, v3, v3
    s_branch .LBB0_2
    v_add_f32 v62, v3, v3
.LBB0_2:
"""
    assert len(found(loop, "gfx950")) == 1
    mended = repair(loop, "gfx950")
    assert mended.count("s_nop") == loop.count("s_nop") + 1
    assert "\ts_nop 2\n    v_add_f32 v62, v3, v3               ; v0 is not read here" in mended
    assert found(mended, "gfx950") == []


@pytest.mark.parametrize(
    "between",
    [
        "v_add_f32 v62, v1, v2",  # as LLVM prints the second line of inline assembly: not indented
        "\tv_add_f32 v62, v[1], v2",
        "\tv_add_f32 v62, v1, v2 /* ends here */ // so",
        "again: v_add_f32 v62, v1, v2",
        "\ts_branch .Lout\n\t.Lout:\n\tv_add_f32 v62, v1, v2",
        '\ts_branch "a name"\n"a name":\n\tv_add_f32 v62, v1, v2',
        "\ts_branch 1f\n\tv_mov_b32 v70, 0\n1:\n\tv_add_f32 v62, v1, v2",
        "\ts_nop 03\n\tv_add_f32 v62, v1, v2",
        "\ts_nop NOPS\n\tv_add_f32 v62, v1, v2",
        "\t; v_add_f32 v62, v1, v2\n\tv_add_f32 v62, v1, v2",
    ],
)
def test_however_the_text_is_written(between):
    mended = repair(f"\t{PRODUCT}\n{between}\n\ts_endpgm", "gfx950")
    lines = mended.split("\n")
    reader = next(index for index, line in enumerate(lines) if "v_add_f32" in line and not line.startswith("\t;"))
    before = [line.strip() for line in lines[1:reader] if line.strip().startswith("s_nop")]
    assert before
    if not any(name in between for name in ("again", "1f", "03", "NOPS")):
        assert found(mended, "gfx950") == []


def test_other_archs_are_left_alone():
    broken = text("v_mfma_f32_32x32x4_2b_f16 v[0:31], v[32:33], v[34:35], 0", 3, USES[0])
    assert repair(broken, "gfx942") is broken
    assert repair(broken, "gfx950") is not broken
