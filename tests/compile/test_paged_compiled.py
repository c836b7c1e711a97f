"""``triton-portable``'s paged kernel compiled for Hopper and CDNA, on a machine that has none of them."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from lightning_indexer import Arch
from processes import python

SCRIPT = Path(__file__).with_name("compile_paged.py")
ARCHS = ("sm90", "gfx942", "gfx950")
NAMES = [
    "fp8_paged_mqa_logits_n1_H64_D128_page64_bkv64_r1_flat_clean_triton",
    "fp8_paged_mqa_logits_n3_H32_D128_page64_bkv64_r4_preshuffled_noclean_triton",
    "fp8_paged_mqa_logits_n1_H8_D32_page16_bkv64_r1_preshuffled_clean_triton",
]


@pytest.mark.parametrize("arch", ARCHS)
def test_compiles(arch, tmp_path):
    text = python(SCRIPT, arch, TRITON_CACHE_DIR=str(tmp_path), LIGHTNING_INDEXER_CACHE_DIR=str(tmp_path / "own"))
    kernels = [json.loads(line) for line in text.splitlines()]
    assert [kernel["name"] for kernel in kernels] == NAMES
    for kernel in kernels:
        text = kernel["text"]
        assert 0 < kernel["shared"] <= Arch.parse(arch).shared_bytes
        if not arch.startswith("gfx"):
            assert "wgmma.mma_async" in text
            # Keys of 128 channels are copied 16 bytes at a time.
            assert "cp.async.cg.shared.global" in text
            continue
        assert "v_mfma" in text
        assert re.findall(r"^; ScratchSize: (\d+)$", text, re.MULTILINE) == ["0"]
        if "D128" in kernel["name"]:
            assert "load_dwordx4" in text
        assert "load_ubyte" not in text
