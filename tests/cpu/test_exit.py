"""Calls while the interpreter ends, where thread pools take no more work. Each test is a process of its own."""

from __future__ import annotations

import pytest

from processes import program

SCRIPT = """
import sys, threading
import torch
import lightning_indexer as li
from lightning_indexer.check.cases import make_inputs, make_windows

torch.set_num_threads(2)
cpu = torch.device("cpu")
inputs = make_inputs(600, 300, 8, 32, cpu)  # several row blocks
ks, ke = make_windows("causal", 600, 300, cpu)
expected = li.reference_logits(inputs.q_fp8, (inputs.k_fp8, inputs.kv_scale), inputs.weights, ks, ke)

def call():
    logits = li.fp8_mqa_logits(inputs.q_fp8, (inputs.k_fp8, inputs.kv_scale), inputs.weights, ks, ke)
    assert torch.equal(logits == float("-inf"), expected == float("-inf"))
    assert li.calc_diff(logits, expected, expected.isfinite()) < 1e-10
    print("called", flush=True)

def after_main():
    threading.main_thread().join()
    call()

if sys.argv[2] == "warm":
    call()
if sys.argv[1] == "atexit":
    import atexit
    atexit.register(call)
else:
    threading.Thread(target=after_main).start()
"""


@pytest.mark.parametrize("pool", ["cold", "warm"])
@pytest.mark.parametrize("how", ["atexit", "thread"])
@pytest.mark.slow
def test_a_call_while_the_interpreter_ends(how, pool):
    done = program("-c", SCRIPT, how, pool)
    assert done.stdout.split() == ["called"] * (1 + (pool == "warm")), done.stderr
    assert done.returncode == 0, done.stderr
    assert not done.stderr
