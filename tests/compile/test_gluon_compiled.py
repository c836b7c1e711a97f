"""``gluon-gfx950`` compiled for gfx950, on a machine that has none: names, instructions, LDS, registers, no spills."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from processes import python

# On one worker: the tests look at the same kernels.
pytestmark = pytest.mark.xdist_group("gluon")

SCRIPT = Path(__file__).with_name("compile_gluon.py")
NOCLEAN = {"clean_logits": False}
COMPRESSED = {"clean_logits": False, "max_seqlen_k": 32768, "out_dtype": "bfloat16"}
# Rows, H, D, other facts, and the kernel's name. Both forms of the kernel, the largest and the smallest register files.
PROBLEMS = [
    (4096, 64, 128, {}, "H64_D128_r4_w4x1_bkv128_lds3_clean"),
    (4096, 64, 128, NOCLEAN, "H64_D128_r4_w4x1_bkv128_lds3_noclean"),
    (4096, 64, 128, COMPRESSED, "H64_D128_r4_w4x1_bkv128_lds3_compressed"),
    (4096, 64, 128, {"wide": True}, "H64_D128_r4_w4x1_bkv128_lds3_clean_wide"),
    (128, 64, 128, {}, "H64_D128_r2_w2x2_bkv128_lds2_clean"),
    (1, 64, 128, {}, "H64_D128_r1_w1x4_bkv256_lds2_clean"),
    (4096, 64, 64, {}, "H64_D64_r2_w2x2_bkv128_lds2_clean"),
    (4096, 32, 128, {}, "H32_D128_r4_w2x2_bkv128_lds2_clean"),
    (4096, 32, 64, COMPRESSED, "H32_D64_r4_w2x2_bkv128_lds2_compressed"),
    (4096, 128, 128, {}, "H128_D128_r2_w2x2_bkv64_lds2_clean"),
    (1, 128, 128, {"wide": True}, "H128_D128_r1_w1x4_bkv128_lds2_clean_wide"),
    (4096, 128, 32, NOCLEAN, "H128_D32_r2_w2x2_bkv128_lds2_noclean"),
    (4096, 16, 128, {}, "H16_D128_r8_w2x2_bkv128_lds2_clean"),
    (1, 8, 128, {}, "H8_D128_r8_w1x4_bkv256_lds2_clean"),
]


@pytest.fixture(scope="session")  # a worker may run other files between two tests of this one
def kernels(tmp_path_factory) -> list[dict]:
    cache = tmp_path_factory.mktemp("cache")
    text = python(
        str(SCRIPT), json.dumps([problem[:4] for problem in PROBLEMS]),
        TRITON_CACHE_DIR=str(cache / "triton"), LIGHTNING_INDEXER_CACHE_DIR=str(cache),
    )  # fmt: skip
    return [json.loads(line) for line in text.splitlines() if line.startswith("{")]


def test_names_are_built_from_the_config(kernels):
    assert [kernel["name"] for kernel in kernels] == [f"fp8_mqa_logits_{name}_gluon" for *_, name in PROBLEMS]


def test_nothing_spills(kernels):
    for kernel in kernels:
        spilled = (kernel["scratch"], kernel["vgpr_spills"], kernel["sgpr_spills"])
        assert spilled == (0, 0, 0), kernel["name"]
        assert re.findall(r"^; ScratchSize: (\d+)$", kernel["text"], re.MULTILINE) == ["0"]


def test_two_waves_fit_a_simd(kernels):
    for kernel in kernels:
        assert kernel["waves_per_simd"] >= 2, kernel["name"]
        assert kernel["lds"] == kernel["planned"], kernel["name"]


def test_keys_pass_through_lds_alone(kernels):
    """Copies of 16 bytes a lane into LDS, reads of 16 bytes from it, and nothing written there by a wave."""
    for kernel in kernels:
        copy = r"global_load_lds_dwordx4" if "_wide_" in kernel["name"] else r"buffer_load_dwordx4 .*\blds"
        assert re.search(copy, kernel["text"]), kernel["name"]
        assert "ds_read_b128" in kernel["text"], kernel["name"]
        assert not re.search(r"\bds_write|\bds_bpermute", kernel["text"]), kernel["name"]
        deep = "16_fp8_fp8" if "_D32_" in kernel["name"] else "64_f8f6f4"
        assert re.search(rf"v_mfma_(scale_)?f32_32x32x{deep}", kernel["text"]), kernel["name"]


def test_the_loop_is_one_without_branches(kernels):
    """Between its label and its backward branch: the copies of one tile, one barrier, every matrix instruction."""
    for kernel in kernels:
        lines = kernel["text"].splitlines()
        products = [index for index, line in enumerate(lines) if re.match(r"\s+v_mfma", line)]
        labels = {line.split(":")[0]: index for index, line in enumerate(lines) if line.startswith(".LBB")}
        jumps = [(index, labels[line.split()[-1]]) for index, line in enumerate(lines) if "s_cbranch" in line]
        loops = [(start, stop) for stop, start in jumps if start < products[0] and stop > products[-1]]
        assert len(loops) == 1, kernel["name"]
        [(start, stop)] = loops
        assert sum("s_barrier" in line for line in lines[start:stop]) == 1, kernel["name"]
        # A masked store without a buffer is skipped by a branch.
        assert any("s_cbranch" in line for line in lines[start:stop]) == ("_wide_" in kernel["name"]), kernel["name"]
