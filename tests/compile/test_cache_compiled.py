"""``triton-portable``'s kernels of the cache compiled for Hopper and CDNA, on a machine that has none of them."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from lightning_indexer import Arch
from processes import python

SCRIPT = Path(__file__).with_name("compile_cache.py")
ARCHS = ("sm90", "gfx942", "gfx950")
NAMES = [
    "insert_k_cache_fp8_D128_page64_t32_flat_triton",
    "insert_k_cache_fp8_D128_page64_t32_flat_rope_triton",
    "insert_k_cache_fp8_D128_page16_t32_preshuffled_rope_triton",
    "insert_k_cache_fp4_D128_page64_t32_flat_rope_hadamard_triton",
    "gather_k_cache_128B_page64_t32_flat_triton",
    "gather_k_cache_128B_page16_t32_preshuffled_triton",
    "gather_k_cache_fp4_page64_t16_flat_triton",
    "prepare_q_fp8_H64_D128_r32_rope_triton",
    "prepare_q_fp4_H64_D128_r32_rope_hadamard_triton",
    "fp8_paged_mqa_logits_n1_H64_D128_page64_bkv64_r1_fp4_clean_triton",
]


@pytest.mark.parametrize("arch", ARCHS)
def test_compiles(arch, tmp_path):
    text = python(SCRIPT, arch, TRITON_CACHE_DIR=str(tmp_path), LIGHTNING_INDEXER_CACHE_DIR=str(tmp_path / "own"))
    kernels = [json.loads(line) for line in text.splitlines()]
    assert [kernel["name"] for kernel in kernels] == NAMES
    for kernel in kernels:
        text = kernel["text"]
        assert 0 <= kernel["shared"] <= Arch.parse(arch).shared_bytes
        if arch.startswith("gfx"):
            assert re.findall(r"^; ScratchSize: (\d+)$", text, re.MULTILINE) == ["0"]
            # 16 bytes at a time, of fp4 at times 8: no key is read or written byte by byte.
            assert re.search(r"load_dwordx[24]", text)
            assert "store_byte" not in text
        else:
            assert re.search(r"ld\.global\.v[24]\.b(32|64)|cp\.async\.c[ag]", text)
            assert "st.global.b8" not in text
