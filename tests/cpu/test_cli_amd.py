"""``verify --arch``, ``resources`` and ``disasm``: what they are asked, what they print. The work itself is replaced;
tests/compile and tests/sim do it."""

from __future__ import annotations

import re
from types import SimpleNamespace

import pytest
import torch
from typer.testing import CliRunner

import cdna_sim
from cdna_sim import Resources
from lightning_indexer import MqaLogitsProblem
from lightning_indexer.amd import cdna
from lightning_indexer.amd.built import CompileError
from lightning_indexer.amd.simulated import ARCHS
from lightning_indexer.backends.triton_portable.mqa_logits import MqaLogits as TritonPortable
from lightning_indexer.check import simulated
from lightning_indexer.check.cases import WINDOWS, window_applies
from lightning_indexer.check.simulated import FN, FNUZ, SimulatedCase, SimulatedOutcome, make_simulated_inputs, sweep
from lightning_indexer.cli import app as cli
from lightning_indexer.selection import registry as dispatch


@pytest.fixture(autouse=True)
def _wide_terminal(monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("TERM", "dumb")
    monkeypatch.setattr(cli.out, "_width", 200)


def run(*arguments: str) -> SimpleNamespace:
    """``status``, and ``text``: both streams, without frames, each run of white space one space."""
    result = CliRunner().invoke(cli.app, list(arguments), prog_name="lightning-indexer")
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    plain = re.sub(r"\x1b\[[0-9;]*m", "", result.output)
    return SimpleNamespace(status=result.exit_code, text=" ".join(re.sub("[─-╿]", " ", plain).split()))


@pytest.fixture
def outcomes(monkeypatch) -> SimpleNamespace:
    """Replaces the simulation: ``fault`` maps a case to what is wrong with it; ``asked`` holds cases and jobs."""
    record = SimpleNamespace(fault=lambda case: "", asked=[], jobs=0)

    def fake(cases, jobs):
        record.asked, record.jobs = list(cases), jobs
        for case in cases:
            yield SimulatedOutcome(case, record.fault(case), 1e-9, 1000, 0.01, 0.1)

    monkeypatch.setattr(simulated, "run", fake)
    monkeypatch.setattr(cdna, "simulator_missing", lambda: None)
    return record


# The sweep


@pytest.mark.parametrize("arch", ARCHS)
def test_the_sweep_holds_every_combination(arch):
    cases = sweep(arch, ["triton-portable"])
    found = {(c.case.window, c.case.form, c.case.heads, c.case.head_dim) for c in cases if not c.chunk}
    for window in WINDOWS:
        for form in ("clean", "noclean"):
            for heads in (32, 64):
                for head_dim in (64, 128):
                    assert (window, form, heads, head_dim) in found
    assert all(window_applies(c.case.window, c.case.s_q, c.case.s_k) for c in cases)
    assert len({str(c) for c in cases}) == len(cases)
    assert len({c.seed for c in cases}) == len(cases)
    assert any(c.case.s_k % 2 for c in cases)
    assert any(c.chunk for c in cases)
    assert {c.case.out_dtype for c in cases} == {torch.float32, torch.bfloat16}
    pairs = {(c.q_dtype, c.k_dtype) for c in cases}
    assert pairs == ({(FN, FN), (FN, FNUZ), (FNUZ, FN), (FNUZ, FNUZ)} if arch == "gfx942" else {(FN, FN)})


def test_the_sweep_can_be_cut_down():
    cases = sweep("gfx950", ["triton-portable"], windows=["cp"], heads=[64], head_dims=[128], seed=7)
    assert {(c.case.window, c.case.heads, c.case.head_dim) for c in cases} == {("cp", 64, 128)}
    assert [c.seed for c in cases] == list(range(7, 7 + len(cases)))


@pytest.mark.parametrize("q_dtype", [FN, FNUZ])
@pytest.mark.parametrize("k_dtype", [FN, FNUZ])
def test_operands_hold_the_byte_0x80_where_it_is_minus_zero(q_dtype, k_dtype):
    case = sweep("gfx942", ["x"], windows=["causal"], heads=[32], head_dims=[64])[0]
    inputs = make_simulated_inputs(SimulatedCase("gfx942", "x", case.case, q_dtype, k_dtype))
    for tensor, dtype in ((inputs.q_fp8, q_dtype), (inputs.k_fp8, k_dtype)):
        assert tensor.dtype is dtype
        planted = int((tensor.view(torch.uint8) == 0x80).sum())
        assert planted >= tensor.numel() // 7 if dtype is FN else planted == 0
        assert bool(tensor.float().isfinite().all())
    assert bool((inputs.kv_scale < 0).any())
    assert bool((inputs.kv_scale > 0).any())


# verify --arch


def test_verify_prints_one_line_a_backend(outcomes):
    result = run("verify", "--arch", "gfx950", "--backend", "triton-portable", "--jobs", "3", "--heads", "32")
    assert result.status == 0
    count = len(outcomes.asked)
    assert outcomes.jobs == 3
    assert {case.case.heads for case in outcomes.asked} == {32}
    expected = f"triton-portable {count} {count} 0 1.0e-09 1.0e-09 {1000 * count:,} 100,000"
    assert expected in result.text
    assert "verify on simulated gfx950" in result.text


def test_verify_fails_with_status_1_and_the_text_of_the_fault(outcomes):
    outcomes.fault = lambda case: "out of bounds [pc 0x1a40]" if case.case.window == "cp" else ""
    only = ("--backend", "triton-portable", "--head-dim", "64", "--window", "cp", "--window", "causal")
    result = run("verify", "--arch", "gfx942", *only)
    assert result.status == 1
    failed = [case for case in outcomes.asked if case.case.window == "cp"]
    assert result.text.count("out of bounds [pc 0x1a40]") == len(failed) > 0
    assert f"FAIL {failed[0]}: out of bounds" in result.text
    assert f"{len(outcomes.asked)} {len(outcomes.asked) - len(failed)} {len(failed)}" in result.text


def test_verify_names_what_a_gate_keeps_out(outcomes, monkeypatch):
    gate = TritonPortable.supports

    def narrow(self, problem, arch):
        return "D=64 is not for me" if problem.head_dim == 64 else gate(self, problem, arch)

    monkeypatch.setattr(TritonPortable, "supports", narrow)
    result = run("verify", "--arch", "gfx950", "--backend", "triton-portable", "--heads", "32")
    assert result.status == 0
    assert {case.case.head_dim for case in outcomes.asked} == {128}
    assert f"not supported by triton-portable: D=64 is not for me: {len(outcomes.asked)} cases" in result.text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--arch", "gfx90a"), "got 'gfx90a', expected one of gfx942, gfx950"),
        (("--arch", "gfx950", "--device", "cpu"), "the simulator takes neither --device nor --full"),
        (("--arch", "gfx950", "--full"), "the simulator takes neither --device nor --full"),
        (("--arch", "gfx950", "--window", "x"), "got 'x', expected one of causal"),
        (("--arch", "gfx950", "--backend", "x"), "backend: got 'x', expected one of"),
        (("--arch", "gfx950", "--backend", "torch-blocked"), "torch-blocked has no AMD kernels; these have: "),
        (("--arch", "gfx950", "--heads", "24"), ": H=24 is not one of 8, 16, 32, 64, 128"),
        (("--arch", "gfx950", "--jobs", "0"), "Invalid value for '--jobs'"),
    ],
)
def test_verify_refuses(outcomes, arguments, message):
    result = run("verify", *arguments)
    assert result.status == 2, result.text
    assert message in result.text


def test_verify_says_what_the_simulator_lacks(outcomes, monkeypatch):
    monkeypatch.setattr(cdna, "simulator_missing", lambda: "simulation needs tinygrad: pip install it")
    result = run("verify", "--arch", "gfx950")
    assert result.status == 2
    assert "simulation needs tinygrad: pip install it" in result.text
    assert outcomes.asked == []


# resources and disasm


@pytest.fixture
def built(monkeypatch) -> list[tuple[MqaLogitsProblem, str]]:
    """Replaces the compiler; grows with what it is asked for."""
    asked: list[tuple[MqaLogitsProblem, str]] = []

    def build(self, problem, arch):
        asked.append((problem, arch.name))
        resources = Resources(256, 64, 48, 34304, 92, 22, 3, 2)
        return SimpleNamespace(
            kernel=f"k{len(asked)}", resources=resources, compiler="Triton 9", isa="s_endpgm ; text", code_object=None
        )

    monkeypatch.setattr(TritonPortable, "build", build)
    return asked


def test_resources_lists_every_kernel(built):
    result = run("resources", "--arch", "gfx942", "--backend", "triton-portable")
    assert result.status == 0
    assert len(built) == 12
    assert {(p.heads, p.head_dim) for p, _ in built} == {(32, 64), (32, 128), (64, 64), (64, 128)}
    assert {(p.clean_logits, p.compressed) for p, _ in built} == {(True, False), (False, False), (False, True)}
    assert {arch for _, arch in built} == {"gfx942"}
    assert "gfx942 (MI300X, MI325X)" in result.text
    for index in range(1, 13):
        assert f"k{index} 256 64 48 34304 92 22/3 2 Triton 9" in result.text


def test_resources_of_some(built):
    some = ("--backend", "triton-portable", "--backend", "hip-gfx950")
    result = run("resources", "--arch", "gfx950", *some, "--heads", "8", "--head-dim", "32")
    assert result.status == 0
    assert "not supported by hip-gfx950: H=8 is not one of 32, 64" in result.text
    assert {(p.heads, p.head_dim) for p, _ in built} == {(8, 32)}
    result = run("resources", "--arch", "gfx950", "--backend", "triton-portable", "--heads", "7")
    assert (result.status, "triton-portable: H=7 is not one of" in result.text) == (2, True)


def test_disasm_prints_the_text(built):
    result = run("disasm", "--arch", "gfx950", "--backend", "triton-portable", "--shape", "5,6,32,64", "--form",
                 "compressed")  # fmt: skip
    assert (result.status, result.text) == (0, "s_endpgm ; text")
    [(problem, arch)] = built
    assert (problem.rows, problem.keys, problem.heads, problem.head_dim, problem.max_seqlen_k) == (5, 6, 32, 64, 6)
    assert arch == "gfx950"


def test_disasm_with_addresses_decodes_the_code_object(built, monkeypatch):
    monkeypatch.setattr(cdna, "simulator_missing", lambda: None)
    lines = [(0x1A00, b"\x01\x02\x03\x04", "v_first"), (0x1A04, b"\0" * 8, "v_second")]
    monkeypatch.setattr(cdna_sim, "listing", lambda code_object, kernel: iter(lines), raising=False)
    result = run("disasm", "--arch", "gfx942", "--addresses")
    assert result.text == "0x001a00 01020304 v_first 0x001a04 0000000000000000 v_second"
    monkeypatch.setattr(cdna, "simulator_missing", lambda: "the simulator needs tinygrad")
    assert "the simulator needs tinygrad" in run("disasm", "--arch", "gfx942", "--addresses").text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("disasm",), "Missing option '--arch'"),
        (("disasm", "--arch", "sm90"), "got 'sm90', expected one of gfx942, gfx950"),
        (("disasm", "--arch", "gfx950", "--shape", "1,2"), "expected M,N,H,D"),
        (("disasm", "--arch", "gfx950", "--form", "x"), "expected one of clean, noclean, compressed"),
        (("disasm", "--arch", "gfx950", "--backend", "cuda-sm90"), "cuda-sm90 has no AMD kernels"),
        (("resources",), "Missing option '--arch'"),
        (("resources", "--arch", "gfx950", "--heads", "x"), "expected positive integers"),
    ],
)
def test_what_is_refused(built, arguments, message):
    result = run(*arguments)
    assert result.status == 2, result.text
    assert message in result.text
    assert built == []


@pytest.mark.parametrize("command", ["disasm", "resources"])
def test_a_kernel_that_does_not_compile_ends_with_the_message(monkeypatch, command):
    def build(self, problem, arch):
        raise CompileError("kernel for gfx950: out of registers")

    monkeypatch.setattr(TritonPortable, "build", build)
    result = run(command, "--arch", "gfx950", "--backend", "triton-portable")
    assert (result.status, result.text) == (1, "kernel for gfx950: out of registers")


def test_backends_with_amd_kernels_say_so():
    kernels = [name for name, kernel in dispatch.kernels().items() if isinstance(kernel, dispatch.Compiled)]
    assert kernels == ["hip-gfx950", "gluon-gfx950", "flydsl", "triton-portable"]
