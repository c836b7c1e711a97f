"""Waves of rows on simulated kernels: what scores is compiled for an AMD arch, and so is what selects.

In processes of their own, because the other tests run Triton's interpreter.
"""

from __future__ import annotations

from pathlib import Path

from processes import python

SCRIPT = Path(__file__).with_name("simulate_mqa_topk.py")


def test_simulated(compiled_kernels):
    text = python(SCRIPT, LIGHTNING_INDEXER_CACHE_DIR=str(compiled_kernels))
    assert text.splitlines() == ["4 launches, waves of 4 rows"]
