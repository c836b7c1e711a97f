"""Importing the package touches no device, no compiler and no optional package. Each test is a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from helpers import ON_CPU, SOURCES

SOURCE = Path(__file__).resolve().parents[2] / "src"
OPTIONAL = (
    "triton",
    "cuda",
    "flydsl",
    "cdna_sim",
    "elftools",
    "msgpack",
    "tinygrad",
    "typer",
    "rich",
    "matplotlib",
    "vllm",
    "deep_gemm",
    "aiter",
    "sglang",
    "transformers",
)

IMPORT = """
import json, sys
import torch
before = set(sys.modules)

def touched(*args, **kwargs):
    raise AssertionError("the device was touched")

for name in ("is_available", "device_count", "current_device", "get_device_properties", "get_device_capability", "init",
             "_lazy_init", "current_stream"):
    setattr(torch.cuda, name, touched)

import lightning_indexer
import lightning_indexer.distributed
import lightning_indexer.integrations.aiter
import lightning_indexer.integrations.deep_gemm
import lightning_indexer.integrations.sglang
import lightning_indexer.integrations.transformers
import lightning_indexer.integrations.vllm
import lightning_indexer.integrations.vllm_dcp

print(json.dumps({
    "new": sorted({name.split(".")[0] for name in set(sys.modules) - before}),
    "kernels": sorted(name for name in sys.modules if name.startswith("lightning_indexer") and "kernel" in name),
    "initialised": torch.cuda.is_initialized(),
}))
"""

WITHOUT = """
import importlib.util, json, sys
from importlib.machinery import PathFinder

OPTIONAL = set(sys.argv[1:])

class Without(PathFinder):
    '''Finds what PathFinder finds, the optional packages aside: a machine on which they are not installed.'''

    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.split(".")[0] in OPTIONAL else super().find_spec(name, path, target)

sys.meta_path[sys.meta_path.index(PathFinder)] = Without
for name in OPTIONAL:
    assert importlib.util.find_spec(name) is None, name

import torch
import lightning_indexer as li
from lightning_indexer.selection import registry
from lightning_indexer.check.cases import make_inputs, make_windows

cpu = torch.device("cpu")
inputs = make_inputs(9, 70, 8, 32, cpu)
ks, ke = make_windows("misaligned", 9, 70, cpu)
logits = li.fp8_mqa_logits(inputs.q_fp8, (inputs.k_fp8, inputs.kv_scale), inputs.weights, ks, ke)
expected = li.reference_logits(inputs.q_fp8, (inputs.k_fp8, inputs.kv_scale), inputs.weights, ks, ke)

problem, sm90 = li.MqaLogitsProblem(4096, 32768, 64, 128), li.Arch.parse("sm90")
try:
    registry.select(problem, sm90, "triton-portable")
    error = None
except li.BackendUnavailableError as raised:
    error = str(raised)
print(json.dumps({
    "mask": torch.equal(logits == float("-inf"), expected == float("-inf")),
    "diff": li.calc_diff(logits, expected, expected.isfinite()),
    "explain": [[v.backend, v.chosen, v.reason] for v in li.explain(problem, sm90)],
    "error": error,
    "table": li.support_table()["triton-portable"]["sm90"],
}))
"""


def run(script: str, *arguments: str, **variables: str) -> dict:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"PYTHONPATH": SOURCES, **variables}
    done = subprocess.run(
        [sys.executable, "-c", script, *arguments], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_import_loads_nothing_optional_and_touches_no_device():
    # Variables that would raise if the import read the arch or selected a backend.
    found = run(IMPORT, LIGHTNING_INDEXER_ARCH="nonsense", LIGHTNING_INDEXER_BACKEND="nonsense")
    assert "lightning_indexer" in found["new"]
    assert set(found["new"]).isdisjoint(OPTIONAL)
    assert found["kernels"] == []
    assert not found["initialised"]


@pytest.mark.slow
def test_the_package_works_where_nothing_optional_is_installed():
    found = run(WITHOUT, *OPTIONAL)
    assert found["mask"]
    assert found["diff"] < ON_CPU[torch.float32].diff
    sentence = "Triton is not installed: pip install 'lightning-indexer[triton]'"
    assert ["triton-portable", False, sentence] in found["explain"]
    cuda = "cuda-core is not installed: pip install 'lightning-indexer[cuda]'"
    assert ["cuda-sm90", False, cuda] in found["explain"]
    assert ["torch-blocked", True, None] in found["explain"]
    assert found["error"].endswith(f"triton-portable: {sentence}")
    assert found["table"] is None
