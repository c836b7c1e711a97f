"""What Triton's own launcher would run on gfx950: compiled as a call does it, on a machine without that GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

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
from lightning_indexer.backends.triton_launch import operands_like
from lightning_indexer.backends.triton_portable.mqa_logits import Launch
from lightning_indexer.backends.triton_portable.config import heuristic
from lightning_indexer.backends.triton_portable.mqa_logits_kernel import fp8_mqa_logits_kernel
from lightning_indexer.sim import too_close
from lightning_indexer.toolchain.code_object import CodeObject
from lightning_indexer.amd.repair import repair
from lightning_indexer.amd.triton_amd import repaired

gfx950, problem = Arch.parse("gfx950"), MqaLogitsProblem(4096, 32768, 64, 128)
launch = Launch(problem, gfx950, heuristic(problem, gfx950))
arguments = launch.arguments(*operands_like(problem, gfx950))
texts, hazards = [], []
for context in (contextlib.nullcontext(), repaired("gfx950"), contextlib.nullcontext()):
    with context:
        kernel = fp8_mqa_logits_kernel.warmup(*arguments, grid=launch.grid, **launch.constants, **launch.options)
    texts.append(kernel.asm["amdgcn"])
    hazards.append(len(too_close(CodeObject(kernel.asm["hsaco"]), kernel.metadata.name)))
print(json.dumps({"hazards": hazards, "mended": texts[1] == repair(texts[0], "gfx950"), "kept": texts[0] == texts[2]}))
"""


def test_a_call_compiles_the_mended_kernel_and_leaves_others_alone(tmp_path):
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"PYTHONPATH": str(ROOT / "src"), "TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["mended"]
    assert found["kept"], "the two are cached apart"
    before, mended, after = found["hazards"]
    assert mended == 0
    assert before == after
