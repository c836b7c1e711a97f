"""``triton-portable``'s kernels of the cache, compiled for AMD archs and executed in the simulator.

In processes of their own, because the other tests run Triton's interpreter.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from lightning_indexer import envs

SCRIPT = Path(__file__).with_name("simulate_cache.py")


@pytest.mark.parametrize("arch", ["gfx942", "gfx950"])
def test_simulated(arch, compiled_kernels):
    environment = envs.for_process(TRITON_INTERPRET=None, LIGHTNING_INDEXER_CACHE_DIR=str(compiled_kernels))
    done = subprocess.run([sys.executable, SCRIPT, arch], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) >= 15
    assert [line for line in lines if not line.endswith(": passes")] == []
