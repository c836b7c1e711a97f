"""Backends and archs that come from outside, and a selection that asks no more than it needs."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from faulty import FaultyBackend, honest
from helpers import CPU, assert_matches, expected_for
from lightning_indexer import Arch, MqaLogitsProblem, arch, explain, fp8_mqa_logits, register
from lightning_indexer.check.cases import make_inputs, make_windows
from lightning_indexer.selection import policy, registry

DEEPSEEK = MqaLogitsProblem(4096, 32768, 64, 128)


@pytest.fixture(autouse=True)
def _own_registry(monkeypatch):
    monkeypatch.setattr(registry, "_BACKENDS", dict(registry._BACKENDS))
    monkeypatch.setattr(registry, "_PLACES", dict(registry._PLACES))
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)


def order(arch_name: str) -> list[str]:
    return [verdict.backend for verdict in explain(DEEPSEEK, arch_name)]


def call() -> tuple:
    inputs = make_inputs(6, 50, 8, 32, CPU)
    ks, ke = make_windows("misaligned", 6, 50, CPU)
    return inputs, ks, ke


def test_a_registered_backend_runs_the_next_call():
    ran = []

    def noted(problem, call, run):
        ran.append(problem)
        run(call)

    inputs, ks, ke = call()
    arguments = (inputs.q_fp8, (inputs.k_fp8, inputs.kv_scale), inputs.weights, ks, ke)
    fp8_mqa_logits(*arguments)
    register(FaultyBackend(noted))
    assert order("cpu") == ["faulty", "torch-blocked", "triton-portable"]
    assert_matches(fp8_mqa_logits(*arguments), expected_for(inputs, ks, ke), clean=True)
    assert len(ran) == 1
    registry.unregister("faulty")
    fp8_mqa_logits(*arguments)
    assert len(ran) == 1


def test_where_a_registered_backend_stands():
    register(FaultyBackend(honest), ahead_of="triton-portable", archs=["sm90"])
    assert order("sm90") == ["cuda-sm90", "faulty", "triton-portable", "torch-blocked"]
    assert order("sm80") == ["triton-portable", "torch-blocked"]


def test_a_backend_by_name_only():
    register(FaultyBackend(honest), by_name_only=True)
    assert "faulty" not in order("cpu")
    assert registry.select(DEEPSEEK, Arch.parse("cpu"), "faulty").name == "faulty"


def test_kernels_off_passes_over_it(monkeypatch):
    register(FaultyBackend(honest))
    monkeypatch.setenv("LIGHTNING_INDEXER_KERNELS", "0")
    assert registry.select(DEEPSEEK, Arch.parse("cpu")).name == "torch-blocked"


def test_what_cannot_be_registered():
    with pytest.raises(TypeError, match=r"^backend: got SimpleNamespace without 'summary', expected a Backend$"):
        register(SimpleNamespace(name="x"))
    kernel = SimpleNamespace(supports=print, config=print, launch=print)
    backend = SimpleNamespace(name="x", summary="", missing=print, kernels={"fp8_mqa_logits": kernel})
    with pytest.raises(TypeError, match=r"^backend: its kernel of fp8_mqa_logits has no neighbours\(\), expected"):
        register(backend)
    register(FaultyBackend(honest))
    with pytest.raises(ValueError, match=r"^backend: got the name 'faulty', which is taken; replace=True takes its pl"):
        register(FaultyBackend(honest))
    register(FaultyBackend(honest), replace=True)
    assert order("cpu").count("faulty") == 1
    with pytest.raises(ValueError, match=r"^ahead_of: got 'cutlass', expected one of "):
        register(FaultyBackend(honest), replace=True, ahead_of="cutlass")
    with pytest.raises(ValueError, match=r"^arch: got 'sm91', expected one of "):
        register(FaultyBackend(honest), replace=True, archs=["sm91"])
    with pytest.raises(ValueError, match=r"^backend: got 'x', expected one of "):
        registry.kernel("x")
    with pytest.raises(ValueError, match=r"^backend: got 'faulty', which has no top_k, expected one of "):
        registry.kernel("faulty", "top_k")


def test_selection_asks_nobody_behind_the_winner(monkeypatch):
    class Broken(FaultyBackend):
        def missing(self):
            raise RuntimeError("a broken package")

    broken = Broken(honest)
    register(broken, ahead_of="torch-blocked")
    monkeypatch.setattr(type(registry.get("triton-portable")), "missing", lambda self: None)
    assert registry.select(DEEPSEEK, Arch.parse("sm80")).name == "triton-portable"


COLD = """
import sys
import torch
from lightning_indexer.arch import Arch
from lightning_indexer.problems.mqa_logits import MqaLogitsProblem
from lightning_indexer.selection import registry
from lightning_indexer.cuda import nvrtc

nvrtc.missing = lambda: None
assert registry.select(MqaLogitsProblem(4096, 32768, 64, 128), Arch.parse("sm90")).name == "cuda-sm90"
print(sorted(name for name in sys.modules if name.startswith("lightning_indexer.backends.") and name.count(".") == 2))
print(sorted(name for name in sys.modules if name.startswith(("lightning_indexer.amd", "cdna_sim", "triton"))))
"""


def test_the_winner_alone_is_imported():
    done = subprocess.run([sys.executable, "-c", COLD], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    backends, others = done.stdout.splitlines()
    shared = "'lightning_indexer.backends.gate', 'lightning_indexer.backends.row_waves'"
    assert backends == f"['lightning_indexer.backends.cuda_sm90', {shared}]"
    assert others == "[]"


def test_explain_takes_the_name_of_an_arch():
    assert explain(DEEPSEEK, "gfx942") == explain(DEEPSEEK, Arch.parse("gfx942"))
    with pytest.raises(ValueError, match=r"^arch: got 'gfx941', expected one of "):
        explain(DEEPSEEK, "gfx941")


def test_a_new_arch_is_a_row_and_a_line(monkeypatch):
    """CDNA's next: what the portable kernel and FlyDSL's ask of an arch stands in its row."""
    monkeypatch.setattr(arch, "_TABLE", dict(arch._TABLE))
    monkeypatch.setattr(policy, "ORDER", {name: dict(lines) for name, lines in policy.ORDER.items()})
    new = replace(Arch.parse("gfx942"), name="gfx9x", fp8="fn", products="a test's", simulated=False)
    arch.register(new)
    assert Arch.parse("gfx9x") is new
    assert arch.gpu_arch("gfx9x") is new
    assert order("gfx9x") == ["triton-portable", "torch-blocked"]
    policy.ORDER["fp8_mqa_logits"]["gfx9x"] = ("flydsl",)
    assert order("gfx9x") == ["flydsl", "triton-portable", "torch-blocked"]
    for name, kernel in registry.kernels().items():
        reason = kernel.supports(DEEPSEEK, new)
        assert (reason is None) == (name in ("flydsl", "triton-portable", "torch-blocked")), (name, reason)
        if reason is None:
            kernel.launch(DEEPSEEK, new, kernel.config(DEEPSEEK, new))
    monkeypatch.setenv("LIGHTNING_INDEXER_ARCH", "gfx9x")
    assert arch.arch_of(torch.device("cpu")) is new
