"""The ``flydsl`` kernels compiled for both archs: nothing spills, LDS and occupancy are what the plan says."""

from __future__ import annotations

import re

import pytest
import torch

from lightning_indexer import Arch, MqaLogitsProblem
from lightning_indexer.backends.flydsl_cdna.config import heuristic
from lightning_indexer.backends.flydsl_cdna.mqa_logits import Launch
from lightning_indexer.selection import registry as dispatch

# Waves of a SIMD at once, by arch, H and D, of the kernels for many rows.
WAVES = {
    "gfx942": {(32, 64): 6, (32, 128): 3, (64, 64): 6, (64, 128): 3, (128, 64): 4, (128, 128): 3},
    "gfx950": {(32, 64): 5, (32, 128): 3, (64, 64): 5, (64, 128): 4, (128, 64): 3, (128, 128): 2},
}
# Forms and rows that change the code most; every kernel of a shape has the same products.
OTHERS = [
    MqaLogitsProblem(4096, 32768, 64, 64, clean_logits=False, max_seqlen_k=99, out_dtype=torch.bfloat16),
    MqaLogitsProblem(1, 32768, 128, 128, clean_logits=False),
]


@pytest.mark.parametrize("arch", WAVES)
def test_no_kernel_spills(arch, compiled_kernels):
    problems = [MqaLogitsProblem(4096, 32768, heads, head_dim) for heads, head_dim in WAVES[arch]] + OTHERS
    waves = {}
    for problem in problems:
        launch = Launch(problem, Arch.parse(arch), heuristic(problem, Arch.parse(arch)))
        built = launch.built
        assert built.kernel == launch.layout.name
        resources = built.resources
        assert (resources.scratch, resources.vgpr_spills, resources.sgpr_spills) == (0, 0, 0), built.kernel
        assert resources.lds == launch.layout.lds_bytes
        assert built.dynamic_lds == 0
        assert built.info.max_workgroup == launch.layout.threads
        assert resources.agpr == 0, "moves between the two halves of the registers would cost instructions"
        if problem not in OTHERS:
            waves[problem.heads, problem.head_dim] = resources.waves_per_simd
    assert waves == WAVES[arch]


@pytest.mark.parametrize("arch", WAVES)
def test_code_objects_load_under_a_rocm_before_7(arch, compiled_kernels):
    """Version 3 of the ELF header's ABI is code object V5; FlyDSL's own LLVM writes V6, which is 4."""
    built = dispatch.kernel("flydsl").build(MqaLogitsProblem(4096, 32768, 64, 128), Arch.parse(arch))
    assert built.code_object.elf[8] == 3


@pytest.mark.parametrize("arch", WAVES)
def test_the_instructions_are_those_of_the_plan(arch, compiled_kernels):
    built = dispatch.kernel("flydsl").build(MqaLogitsProblem(4096, 32768, 64, 128), Arch.parse(arch))
    text = re.sub(r"\s*[;/].*", "", built.isa)
    loop = text[text.index("s_barrier") : text.index("s_endpgm")]
    # Four rows, one a wave, against 64 keys.
    if arch == "gfx950":
        assert len(re.findall(r"\bv_mfma_f32_32x32x64_f8f6f4\b", loop)) == 8
        assert "v_mfma_scale" not in text, "unit scales need no second instruction word"
        assert len(re.findall(r"\bglobal_load_lds_dwordx4\b", loop)) == 2
        assert "v_permlane32_swap_b32" in loop
        # The two tiles on their way are not waited for.
        assert re.search(r"s_waitcnt vmcnt\([1-9]\d*\)\s+s_barrier", text)
    else:
        assert len(re.findall(r"\bv_mfma_f32_16x16x32_fp8_fp8\b", loop)) == 64
        assert len(re.findall(r"\bds_write_b128\b", loop)) == 2
    assert len(re.findall(r"\bds_read_b128\b", loop)) == 8
    assert len(re.findall(r"\bbuffer_store_dword\b", loop)) == 1
    # ReLU costs one instruction a score.
    assert len(re.findall(r"\bv_max_f32", loop)) == 64 * 64 // 64
    assert text.count("s_barrier") == 1
