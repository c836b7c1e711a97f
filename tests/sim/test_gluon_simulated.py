"""``gluon-gfx950`` on a simulated gfx950. `make verify-amd` runs the whole sweep.

In processes of their own: this one's Triton is the interpreter.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

from processes import python

pytestmark = pytest.mark.skipif(sys.version_info < (3, 11), reason="the decoder, tinygrad, needs Python 3.11")

HERE = Path(__file__).resolve().parent


def run(what: str) -> dict:
    return json.loads(python(str(HERE / "simulate_gluon.py"), what).splitlines()[0])


def test_many_rows_take_their_config_and_are_right():
    found = run("many_rows")
    assert found["backend"] == "gluon-gfx950"
    assert found["kernels"] == ["fp8_mqa_logits_H64_D128_r4_w4x1_bkv128_lds3_clean_gluon"]
    assert found["mask"]
    assert found["diff"] < 5e-6
    assert 0 < found["inside"] < 4096 * 90


def test_windows_orders_and_addresses():
    found = run("windows")
    assert found["close"]
    assert found["same bits in every order of waves"]
    assert found["same bits with 64-bit pointers"]
    assert found["same bits of keys far apart"]
    assert found["kernel of keys far apart"].endswith("_wide_gluon")
    assert found["same bits of keys 2^24 bytes apart"]
    assert found["same bits of keys 2^25 bytes apart"]
    assert found["untouched gaps"]


def test_addresses_beyond_32_bits():
    assert run("reach") == {"heads": True, "columns": True}


def test_planted_faults_are_found():
    found = run("faults")
    for name in ("k_ptr", "kv_scale_ptr", "w_ptr"):
        assert f"past the end of {name}" in found[name], found[name]
    assert "store of" in found["out_ptr"]
    # Of the loop: the wait for a tile's copies, and the barrier behind which all waves have theirs.
    for name in ("no wait", "no barrier"):
        assert re.search(r"nothing has written|LDS race|is used before an s_waitcnt vmcnt", found[name]), found[name]


def test_counts_against_triton_portable():
    for shape, ratio in run("counts").items():
        assert ratio["conflicts"] == 0, shape
        assert ratio["reads"] > 0, shape
        assert ratio["instructions"] < 0.65, (shape, ratio)
