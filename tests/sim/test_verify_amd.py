"""``triton-portable`` on simulated gfx942 and gfx950, end to end. `make verify-amd` runs the whole sweep.

In processes of their own: this one's Triton is the interpreter.
"""

from __future__ import annotations

import json
import re
import sys

import pytest

from processes import python

pytestmark = pytest.mark.skipif(sys.version_info < (3, 11), reason="the decoder, tinygrad, needs Python 3.11")

ARCHS = ("gfx942", "gfx950")


def run(*arguments: str, **variables: str) -> str:
    return python(*arguments, **variables)


@pytest.mark.parametrize("arch", ARCHS)
def test_verify(arch):
    # TRITON_INTERPRET is not for simulated kernels.
    text = run(
        "-m", "lightning_indexer", "verify", "--arch", arch, "--backend", "triton-portable", "--jobs", "1",
        "--heads", "32", "--head-dim", "64", "--window", "misaligned", "--window", "cp", "--seed", "5",
        TRITON_INTERPRET="1",
    )  # fmt: skip
    numbers = re.search(r"triton-portable\s+(\d+)\s+(\d+)\s+0\s", text)
    assert numbers is not None, text
    assert int(numbers[1]) == int(numbers[2]) >= 6


CALLS = """
import json
import torch
from lightning_indexer import Arch, MqaLogitsProblem, fp8_mqa_logits, reference_logits
from lightning_indexer.backends.triton_portable.mqa_logits import Launch
from lightning_indexer.backends.triton_portable.config import heuristic
from lightning_indexer.check.cases import make_inputs, make_windows
from lightning_indexer.amd import simulation
from lightning_indexer.amd import simulated as simulator
from lightning_indexer.problems.mqa_logits import MqaLogitsCall
from cdna_sim import Options, SimulationFault

rows, keys, heads, head_dim = 3, 300, 32, 64
inputs = make_inputs(rows, keys, heads, head_dim, torch.device("cpu"))
ks, ke = make_windows("causal", rows, keys, torch.device("cpu"))
expected = reference_logits(inputs.q_fp8, (inputs.k_fp8, inputs.kv_scale), inputs.weights, ks, ke)


def close(logits):
    inside = expected.isfinite()
    same = torch.equal(logits == float("-inf"), ~inside)
    return same and bool((logits - expected)[inside].abs().max() < 1e-3)


arguments = (inputs.q_fp8, (inputs.k_fp8, inputs.kv_scale), inputs.weights, ks, ke)
found = {}

# The environment says gfx950: the first backend of AMD's order runs, in the simulator.
found["environment"] = close(fp8_mqa_logits(*arguments))
found["default launches"] = len(simulator.default().reports)

# A block of code that says gfx942; here another order of waves gives the same bits.
bits = []
for options in (Options(), Options(order="shuffled", seed=1), Options(order="reversed", deferred=False)):
    with simulation("gfx942", options) as launcher:
        bits.append(fp8_mqa_logits(*arguments, backend="triton-portable"))
found["context"] = close(bits[0])
found["same bits"] = all(torch.equal(bits[0].view(torch.int32), other.view(torch.int32)) for other in bits)
[report] = launcher.reports
found["mfma"] = report.by_kind["MFMA"]
found["stored"] = report.stored
found["default launches in the end"] = len(simulator.default().reports)

# Another backend of the arch computes on the CPU as ever.
with simulation("gfx950") as launcher:
    found["torch-blocked"] = close(fp8_mqa_logits(*arguments, backend="torch-blocked"))
    found["its launches"] = len(launcher.reports)

# Operands shorter than the kernel is told. These tensors end where others of their storage begin.
arch, problem = Arch.parse("gfx950"), MqaLogitsProblem(rows, keys, heads, head_dim)
launch = Launch(problem, arch, heuristic(problem, arch))
k, scale, weights = inputs.k_fp8, inputs.kv_scale, inputs.weights
out = torch.empty(rows, 320)
faults = {
    "k_ptr": (k[: keys - 1], scale, weights, out[:, :keys]),
    "kv_scale_ptr": (k, scale[: keys - 1], weights, out[:, :keys]),
    "w_ptr": (k, scale, weights.view(-1)[:-1].as_strided((rows, heads - 1), (heads, 1)), out[:, :keys]),
    "out_ptr": (k, scale, weights, out[:, : keys - 1]),
}
for name, (k, scale, weights, out) in faults.items():
    with simulation("gfx950", Options(order="shuffled", seed=2)):
        try:
            launch(MqaLogitsCall(inputs.q_fp8, k, scale, weights, ks, ke, out=out))
            found[name] = "no fault"
        except SimulationFault as fault:
            found[name] = str(fault)
print(json.dumps(found))
"""


def test_public_calls_and_faults(tmp_path):
    found = json.loads(run("-c", CALLS, LIGHTNING_INDEXER_ARCH="gfx950"))
    assert found["environment"]
    assert found["context"]
    assert found["same bits"]
    assert found["torch-blocked"]
    assert found["its launches"] == 0
    assert found["default launches"] == found["default launches in the end"] == 1
    assert found["mfma"] > 0
    assert found["stored"] == {"out_ptr": 3 * 300 * 4}
    for name, access in (("k_ptr", "load"), ("kv_scale_ptr", "load"), ("w_ptr", "load"), ("out_ptr", "store")):
        fault = found[name]
        assert fault.startswith(f"{access} of "), fault
        assert f"past the end of {name}" in fault
        assert re.search(r"kernel fp8_mqa_logits_H32_D64_bkv128_clean_triton, pc 0x[0-9a-f]+, `buffer_", fault)
        assert re.search(r"workgroup \(\d, 0, 0\), wave \d, lane \d+", fault)
