"""The check of a kernel before its first call where nobody has measured it. tests/sim has it in the simulator."""

from __future__ import annotations

import itertools
import warnings

import pytest
import torch

from faulty import FaultyBackend, honest, one_percent_high
from helpers import CPU, assert_matches, expected_for
from lightning_indexer import Arch, BackendUnavailableError, MqaLogitsProblem, explain, fp8_mqa_logits, register
from lightning_indexer.check.cases import make_inputs, make_windows
from lightning_indexer.selection import policy, registry, selfcheck
from lightning_indexer.selection.selfcheck import SelfCheckWarning

FORMS = [
    {"clean_logits": clean, "max_seqlen_k": width, "out_dtype": dtype}
    for (clean, width), dtype in itertools.product([(True, 0), (False, 0), (False, 9)], [torch.float32, torch.bfloat16])
]


@pytest.fixture(autouse=True)
def _own_registry(monkeypatch):
    monkeypatch.setattr(registry, "_BACKENDS", dict(registry._BACKENDS))
    monkeypatch.setattr(registry, "_PLACES", dict(registry._PLACES))
    monkeypatch.setenv("LIGHTNING_INDEXER_SELF_CHECK", "1")
    selfcheck.forget()
    yield
    selfcheck.forget()


def call(rows: int = 6, **options) -> torch.Tensor:
    inputs = make_inputs(rows, 50, 8, 32, CPU)
    ks, ke = make_windows("misaligned", rows, 50, CPU)
    result = fp8_mqa_logits(inputs.q_fp8, (inputs.k_fp8, inputs.kv_scale), inputs.weights, ks, ke, **options)
    if not options.get("max_seqlen_k"):
        assert_matches(result, expected_for(inputs, ks, ke), clean=options.get("clean_logits", True))
    return result


def one_wrong_row(problem, call, run):
    run(call)
    if problem.rows > 7:
        call.result[7] += 1.0


def tail_not_written(problem, call, run):
    before = call.result[:, -1].clone()
    run(call)
    call.result[:, -1] = before


def no_mask(problem, call, run):
    run(call)
    call.result[1, 0] = 0.0


def refuses(problem, call, run):
    raise RuntimeError("the driver refused the launch")


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_a_right_kernel_passes_once_and_runs(form):
    ran = []

    def noted(problem, call, run):
        ran.append(problem)
        run(call)

    register(FaultyBackend(noted))
    for rows in (6, 7, 8):
        call(rows, **form)
    checks = [problem for problem in ran if problem.rows not in (6, 7, 8)]
    assert len(checks) >= 1
    assert len(checks) + 3 == len(ran)
    assert {(p.heads, p.head_dim, p.form, p.out_dtype) for p in checks} == {(8, 32, ran[-1].form, form["out_dtype"])}
    call(6, **form)
    assert len(ran) == len(checks) + 4, "a kernel is checked once"


FAULTS = {
    "a wrong row": (one_wrong_row, r"of \d+ logits are wrong, the first at \[7, \d+\]: got .*, expected "),
    "one percent": (one_percent_high, r"calc_diff [\d.e-]+, allowed 5e-06"),
    "an unwritten column": (tail_not_written, r"logits are wrong|-inf at \d+ wrong positions"),
    "a wrong mask": (no_mask, r"-inf at 1 wrong positions"),
    "a launch that is refused": (refuses, "RuntimeError: the driver refused the launch"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_wrong_kernel_is_taken_out_with_a_loud_sentence(name, caplog):
    fault, difference = FAULTS[name]
    register(FaultyBackend(fault))
    with pytest.warns(SelfCheckWarning, match=difference) as warned:
        call()
    text = str(warned[0].message)
    assert text.startswith("faulty failed its self-check on cpu with BlockConfig(")
    assert "It is not used for fp8_mqa_logits in this process; the next backend is." in text
    assert "Please report this line" in text
    assert text in caplog.text
    [verdict] = explain(MqaLogitsProblem(6, 50, 8, 32), "cpu", "faulty")
    assert verdict.reason in text
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        call()
        call(9)
    with pytest.raises(BackendUnavailableError, match="faulty: failed its self-check"):
        call(backend="faulty")


def test_a_named_backend_that_fails_is_an_error():
    register(FaultyBackend(one_percent_high), by_name_only=True)
    with pytest.warns(SelfCheckWarning), pytest.raises(BackendUnavailableError, match="calc_diff"):
        call(backend="faulty")


def test_it_can_be_switched_off(monkeypatch):
    monkeypatch.setenv("LIGHTNING_INDEXER_SELF_CHECK", "0")
    register(FaultyBackend(one_wrong_row))
    call()
    monkeypatch.setenv("LIGHTNING_INDEXER_SELF_CHECK", "perhaps")
    with pytest.raises(ValueError, match=r"^LIGHTNING_INDEXER_SELF_CHECK: got 'perhaps', expected 0 or 1$"):
        call()


def test_without_the_variable_what_is_measured_is_not_checked(monkeypatch):
    monkeypatch.delenv("LIGHTNING_INDEXER_SELF_CHECK")
    gpu = torch.device("cuda", 0)
    for operation, measured in policy.MEASURED.items():
        for backend, arch in measured:
            assert not selfcheck.is_due(operation, backend, Arch.parse(arch), gpu)
    for backend, arch in (("triton-portable", "sm80"), ("triton-portable", "gfx942"), ("flydsl", "gfx950")):
        assert selfcheck.is_due("fp8_mqa_logits", backend, Arch.parse(arch), gpu)
        assert not selfcheck.is_due("fp8_mqa_logits", backend, Arch.parse(arch), CPU), (
            "the simulator has its own checks"
        )
    assert not selfcheck.is_due("fp8_mqa_logits", "torch-blocked", Arch.parse("gfx942"), gpu)


def test_while_a_graph_is_captured_it_waits(monkeypatch):
    register(FaultyBackend(one_wrong_row))
    monkeypatch.setattr(selfcheck, "must_wait", lambda device: True)
    call()
    monkeypatch.setattr(selfcheck, "must_wait", lambda device: False)
    with pytest.warns(SelfCheckWarning):
        call()


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("aligned", [True, False])
def test_the_small_problem_has_the_form_of_the_call(form, aligned):
    arch = Arch.parse("gfx942")
    problem = MqaLogitsProblem(4096, 32768, 32, 64, aligned=aligned, **form)
    small = problem.adversarial(arch)
    assert small.rows * small.keys < 2**14
    assert (small.heads, small.head_dim, small.form, small.out_dtype) == (32, 64, problem.form, problem.out_dtype)
    example = small.example(CPU)
    assert example.q.dtype is example.k.dtype is torch.float8_e4m3fnuz
    assert bool(example.result.isnan().all())
    from lightning_indexer.problems.mqa_logits import problem_of, validate

    assert problem_of(validate(example)) == small
    windows = (example.ke - example.ks).clamp(max=1)
    assert {-1, 0, 1} >= set(windows.clamp(min=-1).tolist()) >= {0, 1}
    honest_run = registry.kernel("torch-blocked")
    honest_run.launch(small, arch, honest_run.config(small, arch))(example)
    again = small.example(CPU)
    honest_run.launch(small, arch, honest_run.config(small, arch))(again)
    assert small.compare(example, again) is None


def test_honest_is_honest():
    register(FaultyBackend(honest))
    call()
    assert [v.backend for v in explain(MqaLogitsProblem(6, 50, 8, 32), "cpu") if v.chosen] == ["faulty"]
