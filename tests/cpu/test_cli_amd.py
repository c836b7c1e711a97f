"""``verify --arch``, ``resources`` and ``disasm``: what they are asked, what they print. The work itself is replaced;
tests/compile and tests/sim do it."""

from __future__ import annotations

import re
import shlex
from types import SimpleNamespace

import pytest
import torch
from typer.testing import CliRunner

import cdna_sim
from cdna_sim import Resources
from lightning_indexer import Arch, MqaLogitsProblem
from lightning_indexer.amd import cdna
from lightning_indexer.amd.built import CompileError
from lightning_indexer.backends.triton_portable.mqa_logits import MqaLogits as TritonPortable
from lightning_indexer.check import simulated, verify
from lightning_indexer.check.cases import WINDOWS, Case, window_applies
from lightning_indexer.check.mqa_logits import FN, FNUZ, MqaLogitsSuite, planted_inputs
from lightning_indexer.check.verify import Finding, Outcome, SimulatedCase
from lightning_indexer.cli import app as cli
from lightning_indexer.selection import registry as dispatch


@pytest.fixture(autouse=True)
def _wide_terminal(monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("TERM", "dumb")


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
            fault = record.fault(case)
            finding = Finding(
                (fault,) if fault else (), 1e-9, 1e-4, 1e-7, getattr(case.case, "out_dtype", torch.float32)
            )
            status = "fail" if fault else "pass"
            yield Outcome(case.operation, case, case.backend, status, fault, finding, instructions=1000, seconds=0.01)

    monkeypatch.setattr(simulated, "run", fake)
    monkeypatch.setattr(cdna, "simulator_missing", lambda: None)
    return record


# The sweep


ARCHS = tuple(arch.name for arch in Arch.known() if arch.simulated)


def sweep(arch: str, backends: list[str], **options) -> list[SimulatedCase]:
    return MqaLogitsSuite().simulated_cases(Arch.parse(arch), backends, **options)


@pytest.mark.parametrize("arch", ARCHS)
def test_the_sweep_holds_every_combination(arch):
    cases = sweep(arch, ["triton-portable"])
    found = {(c.case.window, c.case.form, c.case.heads, c.case.head_dim) for c in cases if c.config is None}
    for window in WINDOWS:
        for form in ("clean", "noclean"):
            for heads in (32, 64):
                for head_dim in (64, 128):
                    assert (window, form, heads, head_dim) in found
    assert all(window_applies(c.case.window, c.case.s_q, c.case.s_k) for c in cases)
    assert len({str(c) for c in cases}) == len(cases)
    assert len({c.seed for c in cases}) > 0.95 * len(cases)
    assert any(c.case.s_k % 2 for c in cases)
    assert any(c.config is not None and c.config.chunk < c.case.s_k for c in cases)
    assert {c.case.out_dtype for c in cases} == {torch.float32, torch.bfloat16}
    pairs = {(c.case.q_dtype, c.case.k_dtype) for c in cases}
    assert pairs == ({(FN, FN), (FN, FNUZ), (FNUZ, FN), (FNUZ, FNUZ)} if arch == "gfx942" else {(FN, FN)})


def test_the_sweep_can_be_cut_down():
    cases = sweep("gfx950", ["triton-portable"], heads=[64], head_dims=[128], seed=7)
    assert {(c.case.heads, c.case.head_dim) for c in cases} == {(64, 128)}
    whole = sweep("gfx950", ["triton-portable"], seed=7)
    assert set(cases) <= set(whole), "a case has its own seed, whatever else is in the sweep"
    chosen = verify.select((case.case for case in cases), window=["cp"])
    assert {case.window for case in chosen} == {"cp"}
    assert verify.select([cases[0].case], pages=[64]) == []


@pytest.mark.parametrize("q_dtype", [FN, FNUZ])
@pytest.mark.parametrize("k_dtype", [FN, FNUZ])
def test_operands_hold_the_byte_0x80_where_it_is_minus_zero(q_dtype, k_dtype):
    inputs = planted_inputs(Case(5, 301, 32, 64, "causal", q_dtype=q_dtype, k_dtype=k_dtype), 0)
    for tensor, dtype in ((inputs.q_fp8, q_dtype), (inputs.k_fp8, k_dtype)):
        assert tensor.dtype is dtype
        planted = int((tensor.view(torch.uint8) == 0x80).sum())
        assert planted >= tensor.numel() // 7 if dtype is FN else planted == 0
        assert bool(tensor.float().isfinite().all())
    assert bool((inputs.kv_scale < 0).any())
    assert bool((inputs.kv_scale > 0).any())


# verify --arch


SCORES = ("--operation", "fp8_mqa_logits")


def test_verify_prints_one_line_a_backend(outcomes):
    result = run("verify", "--arch", "gfx950", *SCORES, "--backend", "triton-portable", "--jobs", "3", "--heads", "32")
    assert result.status == 0
    count = len(outcomes.asked)
    assert outcomes.jobs == 3
    assert {case.case.heads for case in outcomes.asked} == {32}
    expected = f"triton-portable {count} {count} 0 1.0e-09 1.0e-09 1.0e-07 {1000 * count:,} 100,000"
    assert expected in result.text
    assert "verify on simulated gfx950" in result.text


def test_verify_fails_with_status_1_and_the_text_of_the_fault(outcomes):
    outcomes.fault = lambda case: "out of bounds [pc 0x1a40]" if case.case.window == "cp" else ""
    only = ("--backend", "triton-portable", "--window", "cp", "--window", "causal")
    result = run("verify", "--arch", "gfx942", *only)
    assert result.status == 1
    failed = [case for case in outcomes.asked if case.case.window == "cp"]
    # Ten as they come and again below the table; the others are counted.
    assert result.text.count("out of bounds [pc 0x1a40]") == 20
    assert f"and {len(failed) - 10} failures of triton-portable more" in result.text
    assert f"FAIL {failed[0]}: out of bounds" in result.text
    [line] = re.findall(r"repeat the first of triton-portable with: (.*)", result.text)
    outcomes.asked.clear()
    again = run(*shlex.split(line)[1:])
    assert again.status == 1
    assert outcomes.asked == failed[:1]


def test_verify_stops_at_the_first_failure_where_asked(outcomes):
    outcomes.fault = lambda case: "wrong" if case.case.window == "cp" else ""
    result = run("verify", "--arch", "gfx942", "--backend", "triton-portable", "--fail-fast")
    assert result.status == 1
    assert result.text.count("FAIL") == 2


def test_verify_keeps_what_it_has_when_interrupted(outcomes):
    def fault(case):
        if case.case.window == "cp":
            raise KeyboardInterrupt
        return ""

    outcomes.fault = fault
    result = run("verify", "--arch", "gfx942", *SCORES, "--backend", "triton-portable", "--heads", "32")
    assert result.status == 130
    done = [case.case.window for case in outcomes.asked].index("cp")
    assert f"stopped after {done} of {len(outcomes.asked)} cases" in result.text
    assert f"triton-portable {done} {done} 0" in result.text


def test_verify_leaves_out_what_is_not_installed(outcomes, monkeypatch):
    monkeypatch.setattr(dispatch.get("flydsl").__class__, "missing", lambda self: "FlyDSL is not installed")
    result = run("verify", "--arch", "gfx942", "--heads", "32", "--head-dim", "64")
    assert result.status == 0
    assert "left out: flydsl: FlyDSL is not installed" in result.text
    assert {case.backend for case in outcomes.asked} == {"triton-portable"}
    for command in (("verify",), ("resources",)):
        named = run(*command, "--arch", "gfx942", "--backend", "flydsl")
        assert (named.status, "flydsl: FlyDSL is not installed" in named.text) == (2, True)


def test_verify_of_several_heads(outcomes):
    assert run("verify", "--arch", "gfx942", "--backend", "triton-portable", "--heads", "32,64").status == 0
    assert {case.case.heads for case in outcomes.asked} == {32, 64}


def test_verify_names_what_a_gate_keeps_out(outcomes, monkeypatch):
    gate = TritonPortable.supports

    def narrow(self, problem, arch):
        return "D=64 is not for me" if problem.head_dim == 64 else gate(self, problem, arch)

    monkeypatch.setattr(TritonPortable, "supports", narrow)
    result = run("verify", "--arch", "gfx950", *SCORES, "--backend", "triton-portable", "--heads", "32")
    assert result.status == 0
    assert {case.case.head_dim for case in outcomes.asked} == {128}
    refused = sum(case.case.head_dim == 64 for case in sweep("gfx950", ["triton-portable"], heads=[32], thorough=True))
    assert f"not supported by triton-portable: D=64 is not for me: {refused} cases" in result.text


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
        assert f"k{index} 256 64 48 34304 92 22 3 2 Triton 9" in result.text


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
        (("disasm", "--arch", "gfx950", "--shape", "1x2x3"), "expected MxN or MxNxHxD"),
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


# timing


@pytest.fixture
def predicted(monkeypatch) -> list[tuple]:
    """Replaces simulation and model; what they were asked for."""
    from cdna_sim.timing import DEVICES, Prediction
    from lightning_indexer.model import timing

    asked: list[tuple] = []

    def row(published: float | None, launch: tuple, heads: int) -> timing.Row:
        stalls = {"vector memory": 0.5, "barrier": 0.1, "matrix unit busy": 0.05}
        prediction = Prediction(50.0, 1e5, 0.02, 0.1, 2, 256, stalls, 0.3, {"address": 0.9, "vector": 0.4})
        return timing.Row(DEVICES["MI355X"], "hip-gfx950", heads, launch, prediction, None, published)

    def rows(kernels, arch, device, heads, launches, samples):
        asked.append((tuple(kernels), arch.name, device.name, tuple(heads), tuple(launches), samples))
        yield row(None, (128, 2048, "causal"), 32)

    monkeypatch.setattr("lightning_indexer.envs.stop_triton_interpreter", lambda: None)  # other tests here want it
    monkeypatch.setattr(timing, "rows", rows)
    monkeypatch.setattr(timing, "published_rows", lambda *_: iter([row(40.0, (1024, 1024, "causal"), 32)]))
    monkeypatch.setattr(cdna, "simulator_missing", lambda: None)
    return asked


def test_timing_of_given_shapes(predicted):
    out = run("timing", "--shapes", "128x2048,8x64", "--heads", "32,64", "--windows", "causal,multi_req",
              "--backend", "hip-gfx950", "--device", "MI350X", "--samples", "3")  # fmt: skip
    assert out.status == 0, out.text
    launches = [(m, n, window) for m, n in ((128, 2048), (8, 64)) for window in ("causal", "multi_req")]
    assert predicted == [(("hip-gfx950",), "gfx950", "MI350X", (32, 64), tuple(launches), 3)]
    assert "128 2048 causal 32 MI355X hip-gfx950 50.0 0.020 - - address" in out.text
    assert "vector memory 50%, barrier 10%" in out.text
    assert "MODEL, not measured" in out.text


def test_timing_of_the_published_launches(predicted):
    out = run("timing", "--backend", "hip-gfx950")
    assert "1024 1024 causal 32 MI355X hip-gfx950 50.0 0.020 40.0 1.25" in out.text
    assert predicted == []


def test_timing_sweeps_into_a_file(predicted, tmp_path, monkeypatch):
    from lightning_indexer.model import timing_sweep

    asked = []

    def sweep(recorded, kernels, heads, forms, launches, samples):
        asked.append((recorded.path, list(kernels), heads, forms, len(launches), samples))
        row = {"rows": 8, "keys": 64, "window": "causal", "heads": 32, "form": "clean", "device": "MI355X",
               "backend": "flydsl", "predicted_us": 5.25, "limit": "vector", "stalls": {"barrier": 0.5}}  # fmt: skip
        yield row, True

    monkeypatch.setattr(timing_sweep, "sweep", sweep)
    out = run("timing", "--backend", "flydsl", "--sweep", str(tmp_path / "t.json"))
    assert out.status == 0, out.text
    assert asked == [(tmp_path / "t.json", ["gfx942", "gfx950"], [32, 64], ["clean"], 16, 4)]
    assert "8 64 causal 32 clean MI355X flydsl 5.2 vector barrier 50%" in out.text
    asked.clear()
    run("timing", "--backend", "flydsl", "--sweep", str(tmp_path / "t.json"), "--arch", "gfx950", "--heads", "64",
        "--forms", "clean,noclean", "--windows", "multi_req", "--shapes", "8x64")  # fmt: skip
    assert asked == [(tmp_path / "t.json", ["gfx950"], [64], ["clean", "noclean"], 1, 4)]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--arch", "gfx942"], "no times were published for gfx942"),
        (["--device", "MI300X"], "device: got 'MI300X', expected one of MI350X, MI355X"),
        (["--shapes", "8x8", "--windows", "cp"], "causal, multi_req"),
        (["--form", "noclean"], "is of --sweep alone"),
        (["--sweep", "x.json", "--trace", "y.json"], "is of one launch; leave it out, or --sweep"),
        (["--sweep", "x.json", "--form", "compressed"], "clean, noclean"),
    ],
)
def test_timing_refuses_by_name(predicted, arguments, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    out = run("timing", "--backend", "flydsl" if "gfx942" in arguments else "hip-gfx950", *arguments)
    assert out.status == 2
    assert message in out.text
