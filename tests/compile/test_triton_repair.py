"""What Triton's own launcher would run on gfx950: compiled as a call does it, on a machine without that GPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from processes import python

pytest.importorskip("triton")
pytest.importorskip("tinygrad")
ROOT = Path(__file__).resolve().parents[2]

# Triton's launcher asks its driver for the device. This one has none to show.
PROGRAM = """
import contextlib, json, torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

class NoDevice:
    def get_current_target(self):
        return GPUTarget("hip", "gfx950", 64)
    def get_current_device(self):
        return 0
    def get_current_stream(self, device):
        return 0
    def get_active_torch_device(self):
        return torch.device("meta")

driver.set_active(NoDevice())
from lightning_indexer import Arch, MqaLogitsProblem
from lightning_indexer.backends.triton_launch import call_like
from lightning_indexer.backends.triton_portable.mqa_logits import Launch
from lightning_indexer.backends.triton_portable.config import heuristic
from lightning_indexer.backends.triton_portable.mqa_logits_kernel import fp8_mqa_logits_kernel
from cdna_sim import wait_state_hazards
from cdna_sim import CodeObject
from lightning_indexer.amd.repair import repair
from lightning_indexer.amd.triton_amd import repaired

gfx950, problem = Arch.parse("gfx950"), MqaLogitsProblem(4096, 32768, 64, 128)
launch = Launch(problem, gfx950, heuristic(problem, gfx950))
arguments = launch.arguments(call_like(problem, gfx950))
texts, hazards = [], []
for context in (contextlib.nullcontext(), repaired("gfx950"), contextlib.nullcontext()):
    with context:
        kernel = fp8_mqa_logits_kernel.warmup(*arguments, grid=launch.grid, **launch.constants, **launch.options)
    texts.append(kernel.asm["amdgcn"])
    hazards.append(len(wait_state_hazards(CodeObject(kernel.asm["hsaco"]), kernel.metadata.name)))
print(json.dumps({"hazards": hazards, "mended": texts[1] == repair(texts[0], "gfx950"), "kept": texts[0] == texts[2]}))
"""


def test_a_call_compiles_the_mended_kernel_and_leaves_others_alone(tmp_path):
    found = json.loads(python("-c", PROGRAM, TRITON_CACHE_DIR=str(tmp_path)).splitlines()[-1])
    assert found["mended"]
    assert found["kept"], "the two are cached apart"
    before, mended, after = found["hazards"]
    assert mended == 0
    assert before == after
