"""A wrong AMD kernel, planted: its first call notices it, says so, and the next backend gives the right logits."""

from __future__ import annotations

import contextlib
import dataclasses
import sys

import pytest
import torch

pytestmark = pytest.mark.skipif(sys.version_info < (3, 11), reason="the decoder, tinygrad, needs Python 3.11")

from helpers import CPU, assert_matches, expected_for  # noqa: E402
from lightning_indexer import MqaLogitsProblem, explain, fp8_mqa_logits  # noqa: E402
from lightning_indexer.amd import clang, simulation  # noqa: E402
from lightning_indexer.backends.hip_gfx950 import mqa_logits as hip  # noqa: E402
from lightning_indexer.check.cases import make_inputs, make_windows  # noqa: E402
from lightning_indexer.selection import selfcheck  # noqa: E402
from lightning_indexer.selection.selfcheck import SelfCheckWarning  # noqa: E402

SHAPE = (4, 64, 32, 128)  # the policy's first choice on gfx950 is hip-gfx950, then flydsl


@pytest.fixture(autouse=True)
def _checked(monkeypatch, compiled_kernels):
    monkeypatch.setenv("LIGHTNING_INDEXER_SELF_CHECK", "1")
    selfcheck.forget()
    yield
    selfcheck.forget()


def call() -> tuple[torch.Tensor, torch.Tensor]:
    rows, keys, heads, head_dim = SHAPE
    inputs = make_inputs(rows, keys, heads, head_dim, CPU)
    ks, ke = make_windows("misaligned", rows, keys, CPU)
    found = fp8_mqa_logits(inputs.q_fp8, (inputs.k_fp8, inputs.kv_scale), inputs.weights, ks, ke)
    return found, expected_for(inputs, ks, ke)


@contextlib.contextmanager
def launched():
    """The names of the kernels that are launched inside, simulated as gfx950."""
    names: list[str] = []
    with simulation("gfx950") as simulator:
        launch = simulator.launch

        def noted(built, *arguments, **options):
            names.append(built.kernel)
            launch(built, *arguments, **options)

        simulator.launch = noted
        yield names


def plant(monkeypatch, right: str, wrong: str) -> None:
    compile_kernel = hip.compile_kernel

    def compiled(config, *flags):
        built = compile_kernel(config, *flags)
        assert right in built.isa
        isa = built.isa.replace(right, wrong)
        return dataclasses.replace(built, code_object=clang.assemble(isa, "gfx950"), isa=isa)

    monkeypatch.setattr(hip, "compile_kernel", compiled)


def test_a_right_kernel_passes_its_check_and_runs():
    with launched() as kernels:
        found, expected = call()
        first = list(kernels)
        call()
    assert_matches(found, expected, clean=True)
    assert len(first) == 2, "the check, then the call"
    assert len(kernels) == 3, "a kernel is checked once"
    assert all(name.endswith("_hip") for name in kernels)


def test_a_wrong_kernel_is_taken_out(monkeypatch):
    plant(monkeypatch, "v_max_f32", "v_min_f32")
    with launched() as kernels:
        with pytest.warns(SelfCheckWarning, match=r"^hip-gfx950 failed its self-check on gfx950 .* logits are wrong"):
            found, expected = call()
        assert [name.rpartition("_")[2] for name in kernels] == ["hip", "flydsl", "flydsl"]
        [verdict] = explain(MqaLogitsProblem(*SHAPE), "gfx950", "hip-gfx950")
    assert_matches(found, expected, clean=True)
    assert "failed its self-check on gfx950" in verdict.reason


def test_without_its_check_the_wrong_kernel_runs(monkeypatch):
    """What the check is for: nothing else on this path would notice."""
    monkeypatch.setenv("LIGHTNING_INDEXER_SELF_CHECK", "0")
    plant(monkeypatch, "v_max_f32", "v_min_f32")
    with simulation("gfx950"):
        found, expected = call()
    with pytest.raises(AssertionError):
        assert_matches(found, expected, clean=True)
