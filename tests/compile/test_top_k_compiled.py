"""``triton-portable``'s top-k compiled for every kind of arch, on a machine that has none of them."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from processes import python

SCRIPT = Path(__file__).with_name("compile_top_k.py")
KIB = 1024
# Arch: shared memory of one workgroup. Sources: CUDA programming guide, AMD ISA documents.
ARCHS = {
    "sm80": 163 * KIB, "sm89": 99 * KIB, "sm90": 227 * KIB, "sm100": 227 * KIB, "sm120": 99 * KIB,
    "gfx90a": 64 * KIB, "gfx942": 64 * KIB, "gfx950": 160 * KIB, "gfx1201": 64 * KIB, "gfx1250": 320 * KIB,
}  # fmt: skip
# One of each kind is compiled for every problem, its likes for the last one, of two passes.
WHOLE = ("sm90", "gfx942", "gfx950", "gfx1201")
NAMES = [r"top_k_per_row_4096_row_index_rows_triton", r"top_k_per_row_2048_page_score_\w+_triton"]


@pytest.mark.parametrize("arch", ARCHS)
def test_compiles(arch, tmp_path):
    text = python(
        SCRIPT, arch, "0" if arch in WHOLE else "2",
        TRITON_CACHE_DIR=str(tmp_path), LIGHTNING_INDEXER_CACHE_DIR=str(tmp_path / "own"),
    )  # fmt: skip
    kernels = [json.loads(line) for line in text.splitlines()]
    names = [kernel["name"] for kernel in kernels]
    assert len(names) >= 4 if arch in WHOLE else len(names) == 2
    if arch in WHOLE:
        assert re.fullmatch(NAMES[0], names[0])
        assert any(re.fullmatch(NAMES[1], name) for name in names)
    assert names[-1].endswith("_merge_triton")
    for kernel in kernels:
        assert 0 < kernel["shared"] <= ARCHS[arch]
        if arch.startswith("gfx"):
            assert re.findall(r"^; ScratchSize: (\d+)$", kernel["text"], re.MULTILINE) == ["0"]
        if arch.startswith("gfx9"):
            # Stores to the list are waited for before the barrier behind which other waves read it.
            assert re.search(r"s_waitcnt vmcnt\(0\)\n\s*v_mov_b32", kernel["text"])
