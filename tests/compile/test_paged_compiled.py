"""``triton-portable``'s paged kernel compiled for every kind of arch, on a machine that has none of them."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from lightning_indexer import Arch, envs

SCRIPT = Path(__file__).with_name("compile_paged.py")
ARCHS = ("sm80", "sm90", "sm120", "gfx90a", "gfx942", "gfx950", "gfx1201", "gfx1250")
NAMES = [
    "fp8_paged_mqa_logits_n1_H64_D128_page64_bkv64_r1_flat_clean_triton",
    "fp8_paged_mqa_logits_n3_H32_D128_page64_bkv64_r4_flat_clean_triton",
    "fp8_paged_mqa_logits_n2_H64_D128_page64_bkv64_r2_preshuffled_noclean_triton",
    "fp8_paged_mqa_logits_n1_H8_D32_page16_bkv64_r1_preshuffled_clean_triton",
]
MATRIX = {"sm80": "mma.sync", "sm90": "wgmma.mma_async", "sm120": "mma.sync"}


@pytest.mark.parametrize("arch", ARCHS)
def test_compiles(arch, tmp_path):
    environment = envs.for_process(
        TRITON_INTERPRET=None, TRITON_CACHE_DIR=str(tmp_path), LIGHTNING_INDEXER_CACHE_DIR=str(tmp_path / "own")
    )
    done = subprocess.run([sys.executable, SCRIPT, arch], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    kernels = [json.loads(line) for line in done.stdout.splitlines()]
    assert [kernel["name"] for kernel in kernels] == NAMES
    for kernel in kernels:
        text = kernel["text"]
        assert 0 < kernel["shared"] <= Arch.parse(arch).shared_bytes
        if not arch.startswith("gfx"):
            assert MATRIX[arch] in text
            # Keys of 128 channels are copied 16 bytes at a time.
            assert "cp.async.cg.shared.global" in text
            continue
        assert "wmma" in text if arch.startswith("gfx12") else "v_mfma" in text
        assert re.findall(r"^; ScratchSize: (\d+)$", text, re.MULTILINE) == ["0"]
        if "D128" in kernel["name"]:
            assert "load_dwordx4" in text or "load_b128" in text
        assert not re.search(r"load_u(byte|8)", text)
