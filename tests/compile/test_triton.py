"""``triton-portable`` compiled for every kind of arch, on a machine that has none of them."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from processes import python

SCRIPT = Path(__file__).with_name("compile_triton.py")

# rows, keys, H, D, other facts; and the name of the kernel, where {} is the block.
PROBLEMS = {
    "fp8_mqa_logits_H64_D128_bkv{}_clean_triton": [4096, 32768, 64, 128, {}],
    "fp8_mqa_logits_H32_D128_bkv{}_noclean_triton": [1024, 131072, 32, 128, {"clean_logits": False}],
    "fp8_mqa_logits_H8_D32_bkv{}_compressed_triton": [
        128, 8192, 8, 32, {"clean_logits": False, "max_seqlen_k": 2048, "out_dtype": "bfloat16"},
    ],
    "fp8_mqa_logits_H64_D128_bkv{}_noclean_triton": [4096, 32768, 64, 128, {"clean_logits": False}],
    "fp8_mqa_logits_H128_D128_bkv{}_clean_triton": [4096, 32768, 128, 128, {}],
}  # fmt: skip

KIB = 1024
# Arch: block, matrix instruction, shared memory of one workgroup. Sources: CUDA programming guide, AMD ISA documents.
ARCHS = {
    "sm80": (64, r"mma\.sync\.aligned\.\S+\.f32\.f16\.f16\.f32", 163 * KIB),
    "sm89": (64, r"mma\.sync\.aligned\.\S+\.f32\.e4m3\.e4m3\.f32", 99 * KIB),
    "sm90": (64, r"wgmma\.mma_async\.sync\.aligned\.\S+\.f32\.e4m3\.e4m3", 227 * KIB),
    "sm100": (64, r"tcgen05\.mma\.cta_group::1\.kind::f8f6f4", 227 * KIB),
    "sm120": (64, r"mma\.sync\.aligned\.\S+\.f32\.e4m3\.e4m3\.f32", 99 * KIB),
    "gfx90a": (128, r"v_mfma_f32_\w+f16", 64 * KIB),
    "gfx942": (64, r"v_mfma_f32_\w+fp8_fp8", 64 * KIB),
    "gfx950": (128, r"v_mfma_(scale_)?f32_\w+(f8f6f4|fp8_fp8)", 160 * KIB),
    "gfx1201": (128, r"v_wmma_f32_\w+fp8_fp8", 64 * KIB),
    "gfx1250": (128, r"v_wmma_(scale_)?f32_\w+(f8f6f4|fp8_fp8)", 320 * KIB),
}


# Rows of k that start anywhere: loads of bytes.
UNALIGNED = [
    [4096, 32768, heads, head_dim, {"aligned": False, **facts}]
    for heads, head_dim in ((64, 128), (32, 128), (128, 64))
    for facts in ({}, {"clean_logits": False}, {"clean_logits": False, "max_seqlen_k": 32768})
]


def compile_for(arch: str, cache: Path, problems: Sequence = tuple(PROBLEMS.values())) -> list[dict]:
    text = python(
        str(SCRIPT), arch, json.dumps(problems),
        TRITON_CACHE_DIR=str(cache), LIGHTNING_INDEXER_CACHE_DIR=str(cache / "lightning-indexer"),
    )  # fmt: skip
    return [json.loads(line) for line in text.splitlines()]


def spilled_bytes(cache: Path) -> list[str]:
    """Stack and local memory of every kernel that was compiled into ``cache``, from the machine code itself."""
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    found = []
    for kernel in cache.glob("*/*.cubin"):
        done = subprocess.run([tool, "-res-usage", kernel], capture_output=True, text=True, check=True)
        found += re.findall(r"STACK:(\d+) .*LOCAL:(\d+)", done.stdout)
    return found


@pytest.mark.parametrize("arch", ARCHS)
def test_compiles(arch, tmp_path):
    block, instruction, shared_limit = ARCHS[arch]
    kernels = compile_for(arch, tmp_path)
    # Where q takes so many registers that results of 128 keys would spill, tiles are shorter.
    large = 64 * 128 if arch == "gfx1201" else 128 * 128
    blocks = [min(block, 64) if h * d >= large else block for _, _, h, d, _ in PROBLEMS.values()]
    assert [kernel["name"] for kernel in kernels] == [name.format(n) for name, n in zip(PROBLEMS, blocks, strict=True)]
    for kernel in kernels:
        assert re.search(instruction, kernel["text"]), f"no {instruction} in {kernel['name']}"
        assert 0 < kernel["shared"] <= shared_limit
        if arch.startswith("gfx"):
            assert re.findall(r"^; ScratchSize: (\d+)$", kernel["text"], re.MULTILINE) == ["0"]
            assert re.findall(r"\.[sv]gpr_spill_count:\s+(\d+)", kernel["text"]) == ["0", "0"]
    if arch.startswith("sm"):
        assert spilled_bytes(tmp_path) == [("0", "0")] * len(PROBLEMS)


@pytest.mark.parametrize("arch", ["gfx942", "gfx950"])
def test_unaligned_rows_do_not_spill(arch, tmp_path):
    kernels = compile_for(arch, tmp_path, UNALIGNED)
    assert len(kernels) == len(UNALIGNED)
    for kernel in kernels:
        assert re.findall(r"^; ScratchSize: (\d+)$", kernel["text"], re.MULTILINE) == ["0"], kernel["name"]
        assert re.findall(r"\.vgpr_spill_count:\s+(\d+)", kernel["text"]) == ["0"], kernel["name"]
        # A few scalars in lanes of a vector register, outside of loops; not the 249 of tiles of 128 keys.
        [scalars] = re.findall(r"\.sgpr_spill_count:\s+(\d+)", kernel["text"])
        assert int(scalars) <= 4, kernel["name"]
