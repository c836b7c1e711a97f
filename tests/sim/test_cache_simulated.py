"""``triton-portable``'s kernels of the cache, compiled for AMD archs and executed in the simulator.

In processes of their own, because the other tests run Triton's interpreter.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from processes import python

SCRIPT = Path(__file__).with_name("simulate_cache.py")


@pytest.mark.parametrize("arch", ["gfx942", "gfx950"])
def test_simulated(arch, compiled_kernels):
    text = python(SCRIPT, arch, LIGHTNING_INDEXER_CACHE_DIR=str(compiled_kernels))
    lines = text.splitlines()
    assert len(lines) >= 15
    assert [line for line in lines if not line.endswith(": passes")] == []
