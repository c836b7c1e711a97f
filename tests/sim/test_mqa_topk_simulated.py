"""Waves of rows on simulated kernels: what scores is compiled for an AMD arch, and so is what selects.

In processes of their own, because the other tests run Triton's interpreter.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from lightning_indexer import envs

SCRIPT = Path(__file__).with_name("simulate_mqa_topk.py")


def test_simulated(compiled_kernels):
    environment = envs.for_process(TRITON_INTERPRET=None, LIGHTNING_INDEXER_CACHE_DIR=str(compiled_kernels))
    done = subprocess.run([sys.executable, SCRIPT], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["4 launches, waves of 4 rows"]
