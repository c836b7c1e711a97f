"""The command line, command by command: exit statuses, what is printed, and errors that name what was typed."""

from __future__ import annotations

import csv
import json
import re
import sys
from types import SimpleNamespace

import pytest
import torch
from typer.testing import CliRunner

from faulty import FaultyBackend, honest, install, one_percent_high
from lightning_indexer import Arch, __version__, envs
from lightning_indexer.bench import timing
from lightning_indexer.bench.timing import Ceilings
from lightning_indexer.check import device, memory
from lightning_indexer.check.cases import WINDOWS
from lightning_indexer.check.mqa_logits import MqaLogitsSuite
from lightning_indexer.chunking import Request
from lightning_indexer.cli import app as cli
from lightning_indexer.cli import demo
from lightning_indexer.selection import registry as dispatch
from processes import program

COMMANDS = ("info", "explain", "plan", "demo", "verify", "resources", "disasm", "bench", "e2e", "trace-diff")
BACKENDS = [backend.name for backend in dispatch.backends()]
SMALL_VERIFY = ("--head-dim", "64", "--heads", "32", "--window", "causal")
SMALL = {"--device": "cpu", "--backend": "torch-blocked", "--shape": "16x64", "--heads": "8", "--head-dim": "32",
         "--window": "causal", "--form": "clean", "--budget-ms": "1"}  # fmt: skip
SMALL_BENCH = ("bench", *(word for pair in SMALL.items() for word in pair))
PNG = b"\x89PNG\r\n\x1a\n"
# A group of verify wants 2 GiB besides its tensors.
TOO_LITTLE = 2**30


@pytest.fixture(autouse=True)
def _no_gpu_and_a_wide_terminal(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("TERM", "dumb")


def run(*arguments: str) -> SimpleNamespace:
    """``status``, and ``text``: both streams, without colours and frames, each run of white space one space."""
    result = CliRunner().invoke(cli.app, list(arguments), prog_name="lightning-indexer")
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    plain = re.sub(r"\x1b\[[0-9;]*m", "", result.output)
    return SimpleNamespace(status=result.exit_code, text=" ".join(re.sub("[─-╿]", " ", plain).split()), raw=plain)


def small_bench(changed: tuple[str, ...]) -> list[str]:
    """``SMALL_BENCH`` with other values; an option that is given twice would be a longer list."""
    options = SMALL | dict(zip(changed[::2], changed[1::2], strict=True))
    return ["bench", *(word for pair in options.items() for word in pair)]


def refused(*arguments: str) -> str:
    """The message of a command line that must be refused with status 2."""
    result = run(*arguments)
    assert result.status == 2, result.text
    assert "Usage: lightning-indexer" in result.text
    assert "Traceback" not in result.text
    return result.text


# The program


def test_version():
    result = run("--version")
    assert (result.status, result.text) == (0, __version__)


@pytest.mark.slow
def test_as_a_module():
    result = program("-m", "lightning_indexer", "--version")
    assert (result.returncode, result.stdout.strip(), result.stderr) == (0, __version__, "")


def test_missing_packages_of_the_command_line_are_named(monkeypatch):
    from lightning_indexer.__main__ import main

    monkeypatch.delitem(sys.modules, "lightning_indexer.cli.app")
    monkeypatch.delattr("lightning_indexer.cli.app", raising=False)
    monkeypatch.setitem(sys.modules, "typer", None)
    with pytest.raises(SystemExit, match=r"needs typer: pip install '\.\[cli\]'"):
        main()


def test_without_a_command_there_is_help():
    result = run()
    for command in COMMANDS:
        assert f" {command} " in result.text


@pytest.mark.parametrize("command", COMMANDS)
def test_help_of_every_command_has_an_example(command):
    result = run(command, "--help")
    assert result.status == 0
    assert re.search(rf"Examples?: lightning-indexer {command}", result.text)
    assert run(command, "-h").text == result.text


def test_every_example_parses(monkeypatch):
    """Examples are run with their work replaced: a renamed option shows."""
    for command, callback in ((c.name or c.callback.__name__, c.callback) for c in cli.app.registered_commands):
        examples = re.findall(r"`(lightning-indexer [^`]+)`", callback.__doc__)
        assert examples, command
        for example in examples:
            arguments = example.split()[1:]
            assert arguments[0] == command
            result = CliRunner().invoke(cli.app, [*arguments, "--help"])
            assert result.exit_code == 0, example
            known = re.sub(r"\x1b\[[0-9;]*m", "", result.output)
            for option in (a for a in arguments if a.startswith("--")):
                assert re.search(rf"{option}\b", known), f"{example}: no option {option}"


@pytest.mark.parametrize("arguments", [("nonsense",), ("explain", "--nonsense"), ("plan",)])
def test_unknown_commands_and_options(arguments):
    assert arguments[-1] in refused(*arguments) or "--requests" in refused(*arguments)


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize(
    ("variable", "known"), [("LIGHTNING_INDEXER_ARCH", "cpu, sm80"), ("LIGHTNING_INDEXER_BACKEND", ", ".join(BACKENDS))]
)
def test_unknown_values_of_variables_are_refused(monkeypatch, command, variable, known):
    monkeypatch.setenv(variable, "nonsense")
    text = refused(command)
    assert re.search(rf"Invalid value: {variable}: .*got 'nonsense', expected one of {known}", text)


# info


def test_info_lists_devices_backends_packages_and_variables():
    result = run("info")
    assert result.status == 0
    assert f"lightning-indexer {__version__}" in result.text
    assert "cpu cpu " in result.text
    for backend in dispatch.backends():
        assert f"{backend.name} {backend.missing() or 'installed'}" in result.text
        assert backend.summary[:40] in result.text
    for package in ("torch", "triton", "typer", "rich", "matplotlib"):
        assert f" {package} " in result.text
    assert torch.__version__ in result.text
    for name, meaning in envs.KNOWN.items():
        assert f"{name}=(not set) {meaning}" in result.text
    assert "peer not measured here: deep_gemm" in result.text


def test_info_shows_variables_and_warns_of_unknown_ones(monkeypatch):
    values = {
        "BACKEND": "torch-blocked", "ARCH": "gfx950", "CACHE_DIR": "/tmp/kernels", "KERNELS": "1", "VLLM": "0",
        "SGLANG": "1", "SELF_CHECK": "0", "TRUST_CACHE": "0",
    }  # fmt: skip
    assert {f"LIGHTNING_INDEXER_{name}" for name in values} == set(envs.KNOWN)
    for name, value in values.items():
        monkeypatch.setenv(f"LIGHTNING_INDEXER_{name}", value)
    monkeypatch.setenv("LIGHTNING_INDEXER_BAKCEND", "x")
    text = run("info").text
    for name, value in values.items():
        assert f"LIGHTNING_INDEXER_{name}={value} " in text
    assert "warning: LIGHTNING_INDEXER_BAKCEND is set, and nothing reads it" in text


def test_info_says_how_to_install_what_is_missing(monkeypatch):
    backend = FaultyBackend(honest)
    monkeypatch.setattr(backend, "missing", lambda: "not here: pip install it", raising=False)
    install(monkeypatch, backend)
    monkeypatch.setattr("lightning_indexer.bench.environment.package_version", lambda name: None)
    text = run("info").text
    assert "faulty not here: pip install it" in text
    assert "triton missing: pip install '.[triton]' from a clone" in text


# explain


def test_explain_shows_choice_and_reasons():
    result = run("explain", "--arch", "gfx950", "--shape", "4096,32768,32,128")
    assert result.status == 0
    assert "M=4096 N=32768 H=32 D=128 clean float32 on gfx950 (MI350X, MI355X)" in result.text
    assert "-> hip-gfx950: can run" in result.text
    assert " torch-blocked: can run" in result.text
    assert result.text.count("->") == 1


def test_explain_gives_the_reason_why_not():
    result = run("explain", "--arch", "gfx950", "--shape", "1,2,24,48")
    assert result.status == 0
    assert "triton-portable: H=24 is not one of 8, 16, 32, 64, 128" in result.text
    assert "-> torch-blocked: can run" in result.text


def test_explain_of_one_backend_that_cannot_has_status_1():
    result = run("explain", "--arch", "gfx950", "--backend", "triton-portable", "--shape", "1,2,24,48")
    assert result.status == 1
    assert "triton-portable: H=24" in result.text
    assert "torch-blocked" not in result.text


@pytest.mark.parametrize(
    ("form", "words"), [("clean", "clean"), ("noclean", "noclean"), ("compressed", "compressed to 2")]
)
def test_explain_takes_every_form(form, words):
    assert f"M=1 N=2 H=32 D=64 {words} float32 on cpu" in run("explain", "--shape", "1,2,32,64", "--form", form).text


def test_explain_table_has_every_backend_and_arch():
    result = run("explain", "--table")
    assert result.status == 0
    lines = [" ".join(re.sub("[─-╿]", " ", line).split()) for line in result.raw.splitlines()]
    [header] = [line for line in lines if line.startswith("arch ")]
    assert all(name in header for name in BACKENDS)
    for arch in Arch.known():
        assert any(line.startswith(arch.name + " ") for line in lines)


@pytest.mark.parametrize(
    ("arguments", "option", "message"),
    [
        (("--arch", "gfx999"), "--arch", "got 'gfx999', expected one of cpu, sm80"),
        (("--shape", "1,2,3"), "--shape", "got '1,2,3', expected MxN or MxNxHxD"),
        (("--shape", "1,2,3,x"), "--shape", "got '1,2,3,x', expected MxN or MxNxHxD"),
        (("--shape", "1,2,0,64"), "--shape", "got '1,2,0,64', expected MxN or MxNxHxD"),
        (("--form", "dirty"), "--form", "got 'dirty', expected one of clean, noclean, compressed"),
        (("--backend", "cuda"), "--backend", "got 'cuda', expected one of "),
    ],
)
def test_explain_refuses(arguments, option, message):
    text = refused("explain", *arguments)
    assert f"Invalid value for {option}" in text
    assert message in text


def test_explain_lists_every_known_name():
    assert all(arch.name in refused("explain", "--arch", "gfx999") for arch in Arch.known())
    assert all(name in refused("explain", "--backend", "cuda") for name in BACKENDS)


# plan


def test_plan_prints_the_chunks():
    result = run("plan", "--requests", "28672:4096,0:512", "--max-logits-mb", "256")
    assert result.status == 0
    rows = [line.split() for line in re.sub("[─-╿]", " ", result.raw).splitlines()]
    assert [row for row in rows if row and row[0].isdigit()] == [
        ["0", "2048", "32768", "256.0", "yes", "0", "(0:2048)"],
        ["1", "2048", "32768", "256.0", "reuse", "0", "(2048:4096)"],
        ["2", "512", "512", "1.0", "yes", "1", "(0:512)"],
    ]


def test_plan_takes_a_workspace_and_a_ratio():
    text = run("plan", "--requests", "0:4,0:4", "--compress-ratio", "4", "--max-gather-keys", "1").text
    assert "0 4 1 0.0 yes 0 (0:4) 1 4 1 0.0 yes 1 (0:4)" in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--requests", "1x2"), "got '1x2' in '1x2', expected CONTEXT:NEW"),
        (("--requests", ""), "expected CONTEXT:NEW"),
        (("--requests", "-5:2"), "expected CONTEXT:NEW"),
        (("--requests", "10:5", "--max-logits-mb", "-1"), "greater than or equal to 0"),
        (("--requests", "10:5", "--compress-ratio", "0"), "compress_ratio: got 0"),
        (("--requests", "10:5", "--max-gather-keys", "14"), "max_gather_keys: got 14, expected at least 15"),
        (("--requests", "1000000:5", "--max-logits-mb", "1"), "max_logits_bytes: got 1048576, expected at least"),
    ],
)
def test_plan_refuses(arguments, message):
    assert message in refused("plan", *arguments)


# demo


@pytest.mark.slow
def test_demo_finds_the_keys_and_draws(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = run("demo", "--device", "cpu", "--picture", str(tmp_path / "new" / "scores.png"))
    assert result.status == 0
    assert "5 requests, 1269 query rows, 13009 keys" in result.text
    found, planted = map(int, re.search(r"top-256 of their query: (\d+) / (\d+)", result.text).groups())
    assert found == planted >= 20
    assert (tmp_path / "new" / "scores.png").read_bytes().startswith(PNG)
    assert [path.name for path in tmp_path.iterdir()] == ["new"], "nothing is written elsewhere"


@pytest.mark.slow
def test_demo_fails_where_keys_are_not_found(tmp_path, monkeypatch):
    # Two small requests; scores that say the opposite of what they should.
    monkeypatch.setattr(demo, "REQUESTS", (Request(600, 40), Request(0, 500)))
    right = demo.fp8_mqa_logits
    monkeypatch.setattr(demo, "fp8_mqa_logits", lambda *args: right(*args).nan_to_num(neginf=-torch.inf).neg())
    result = run("demo", "--picture", str(tmp_path / "scores.png"))
    assert result.status == 1


def test_demo_without_matplotlib_says_how_to_get_the_picture(tmp_path, monkeypatch):
    monkeypatch.setattr(demo, "REQUESTS", (Request(600, 40), Request(0, 500)))
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    result = run("demo", "--picture", str(tmp_path / "scores.png"))
    assert result.status == 0
    assert "no picture: `pip install matplotlib`" in result.text
    assert not (tmp_path / "scores.png").exists()


# verify


def test_verify_passes_and_counts():
    result = run("verify", "--device", "cpu", "--backend", "torch-blocked", *SMALL_VERIFY)
    assert result.status == 0
    sweep = MqaLogitsSuite().cases(full=False)
    cases = sum((case.heads, case.head_dim, case.window) == (32, 64, "causal") for case in sweep)
    assert cases > 10
    assert re.search(rf"torch-blocked {cases} {cases} 0 0 0 [1-9]", result.text)
    assert "FAIL" not in result.text


def test_verify_runs_what_was_asked_for(monkeypatch):
    seen = []

    def record(suite, cases, backends, device):
        seen.extend((case, tuple(backends), device.type) for case in cases)
        return iter(())

    monkeypatch.setattr(device, "run", record)
    run("verify", "--backend", "torch-blocked", "--backend", "triton-portable", "--backend", "torch-blocked",
        "--heads", "8", "--heads", "64", "--head-dim", "32", "--window", "cp", "--window", "empty")  # fmt: skip
    assert {case.heads for case, _, _ in seen} == {8, 64}
    assert {case.head_dim for case, _, _ in seen} == {32}
    assert {case.window for case, _, _ in seen} == {"cp", "empty"}
    assert {backends for _, backends, _ in seen} == {("torch-blocked", "triton-portable")}
    assert {device for _, _, device in seen} == {"cpu"}
    small = len(seen)
    seen.clear()
    run("verify", "--full", "--operation", "fp8_mqa_logits")
    assert len(seen) > 2000
    assert {case.window for case, _, _ in seen} == set(WINDOWS)
    seen.clear()
    run("verify", "--operation", "fp8_mqa_logits")
    assert small < len(seen) < 2000


def test_verify_fails_with_status_1_and_names_the_cases(monkeypatch):
    name = install(monkeypatch, FaultyBackend(one_percent_high))
    result = run("verify", "--backend", name, "--backend", "torch-blocked", *SMALL_VERIFY)
    assert result.status == 1
    assert re.search(
        rf"FAIL {name} \(17, 113\) H=32 D=64 causal clean: calc_diff 4.9\de-05, allowed 1e-10", result.text
    )
    assert "FAIL torch-blocked" not in result.text


def test_verify_names_what_was_not_supported(monkeypatch):
    refuses = FaultyBackend(honest, lambda problem: "only 113 keys" if problem.keys != 113 else None)
    result = run("verify", "--backend", install(monkeypatch, refuses), *SMALL_VERIFY)
    assert result.status == 0
    line = re.search(r"unsupported by faulty: only 113 keys: (\d+) cases: (.*)", result.text)
    assert int(line[1]) == line[2].count("H=32 D=64 causal") > 5
    assert "(8, 512) H=32 D=64 causal clean" in line[2]
    assert "(17, 113)" not in line[2]


def test_verify_that_ran_nothing_is_no_success(monkeypatch):
    name = install(monkeypatch, FaultyBackend(honest, lambda problem: "never"))
    assert run("verify", "--backend", name, *SMALL_VERIFY).status == 1


def test_verify_names_what_was_dropped_for_memory(monkeypatch):
    monkeypatch.setattr(memory, "available_bytes", lambda device: TOO_LITTLE)
    result = run("verify", "--backend", "torch-blocked", *SMALL_VERIFY)
    assert result.status == 1, "nothing ran"
    assert "dropped by torch-blocked: needs 2.0 GiB, 1.0 GiB are free" in result.text
    assert "(61, 160) H=32 D=64 causal noclean" in result.text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--window", "diagonal"), "--window: got 'diagonal', expected one of causal, cp, misaligned"),
        (("--backend", "cuda"), "--backend: backend: got 'cuda', expected one of "),
        (("--heads", "7"), "no case has these heads, head dims and windows"),
        (("--heads", "many"), "--heads"),
        (("--device", "meta"), "--device: got 'meta', expected cpu, cuda or cuda:INDEX"),
        (("--device", "warp"), "--device: got 'warp', expected cpu, cuda or cuda:INDEX"),
        (("--device", "cuda"), "--device: got 'cuda', and PyTorch sees no GPU here"),
    ],
)
def test_verify_refuses(arguments, message):
    assert message in refused("verify", *arguments)


@pytest.mark.parametrize("command", ["demo", "verify", "bench"])
def test_no_gpu_is_said_so(command):
    assert "Invalid value for --device: got 'cuda:1', and PyTorch sees no GPU here" in refused(
        command, "--device", "cuda:1"
    )


def test_a_gpu_that_is_not_there_is_said_so(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert "got 'cuda:2', and PyTorch sees 2 GPUs here" in refused("verify", "--device", "cuda:2")


# bench


@pytest.fixture
def ceilings(monkeypatch):
    """Instead of seconds of matrix products."""
    found = Ceilings("float32", 0.25, 12.5)
    monkeypatch.setattr(timing, "ceilings", lambda device: found)
    return found


def test_bench_writes_what_it_prints(tmp_path, ceilings, monkeypatch):
    monkeypatch.setenv("COLUMNS", "9999")
    folder = tmp_path / "results"
    result = run(*SMALL_BENCH, "--results", str(folder))
    assert result.status == 0
    written = (folder / "bench.md").read_text()
    assert written in result.raw
    assert "| causal | clean | 8 | 16 | 64 | torch-blocked |" in written
    assert "| causal | clean | 8 | 16 | 64 | einsum |" in written
    assert "| torch-blocked | einsum | causal | 1 |" in written
    assert "einsum: plain masked float32 einsum" in written
    assert "not measured: deep_gemm, aiter: GPU only" in written
    assert "Repeat with: `lightning-indexer" in written
    assert "matrix product 0.25 TFLOP/s, copy 12.5 GB/s" in written
    with (folder / "bench.csv").open() as file:
        from_csv = list(csv.DictReader(file))
    from_json = json.loads((folder / "bench.json").read_text())["rows"]
    assert [row["contender"] for row in from_csv] == ["torch-blocked", "einsum"]
    assert [float(row["median_us"]) for row in from_csv] == [row["median_us"] for row in from_json]
    for name in ("roofline.png", "speedup-torch-blocked.png"):
        assert (folder / name).read_bytes().startswith(PNG)
        assert name in result.text


def test_bench_repeats_with_the_command_that_ran(tmp_path, ceilings, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["/a/path/lightning-indexer", *SMALL_BENCH, "--results", "a folder"])
    result = run(*SMALL_BENCH, "--results", str(tmp_path))
    command = "lightning-indexer " + " ".join(SMALL_BENCH)
    assert f"Repeat with: `{command} --results 'a folder'`" in result.raw


def test_bench_without_peers(tmp_path, ceilings):
    result = run(*SMALL_BENCH, "--no-peers", "--results", str(tmp_path))
    assert result.status == 0
    assert "einsum" not in result.text
    assert not (tmp_path / "speedup-torch-blocked.png").exists()


def test_bench_of_a_wrong_backend_fails_and_does_not_time_it(tmp_path, ceilings, monkeypatch):
    name = install(monkeypatch, FaultyBackend(one_percent_high))
    result = run(*SMALL_BENCH, "--backend", name, "--results", str(tmp_path))
    assert result.status == 1
    rows = {row["contender"]: row for row in json.loads((tmp_path / "bench.json").read_text())["rows"]}
    assert rows[name]["note"].startswith("WRONG: calc_diff")
    assert rows[name]["median_us"] is None
    assert rows["torch-blocked"]["median_us"] > 0


def test_bench_without_matplotlib_has_no_pictures(tmp_path, ceilings, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    result = run(*SMALL_BENCH, "--results", str(tmp_path))
    assert result.status == 0
    assert "no pictures: `pip install matplotlib`" in result.text
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bench.csv", "bench.json", "bench.md"]


def test_bench_says_which_windows_it_left_out(tmp_path, ceilings):
    result = run(*small_bench(("--window", "causal,cp", "--shape", "3x8,4x8")), "--results", str(tmp_path))
    assert result.status == 0
    rows = json.loads((tmp_path / "bench.json").read_text())["rows"]
    assert {(row["window"], row["s_q"]) for row in rows} == {("causal", 3), ("causal", 4), ("cp", 4)}
    assert "not measured: cp at 3x8, which needs s_k a multiple of an even s_q" in result.text


@pytest.mark.parametrize(
    ("arguments", "option", "message"),
    [
        (("--window", "causal,diagonal"), "--window", "got 'diagonal', expected one of causal, cp, misaligned"),
        (("--form", "clean,dirty"), "--form", "got 'dirty', expected one of clean, noclean, compressed"),
        (("--shape", "16"), "--shape", "got '16', expected MxN"),
        (("--shape", "16x0"), "--shape", "got '16x0', expected MxN"),
        (("--shape", "16x64,ax5"), "--shape", "got 'ax5', expected MxN"),
        (("--shape", "1x2x3"), "--shape", "got '1x2x3', expected MxN"),
        (("--shape", "999999999999x5"), "--shape", "got '999999999999x5', expected MxN"),
        (("--shape", "16x64,"), "--shape", "which has an empty item"),
        (("--budget-ms", "nan"), "--budget-ms", "got nan, expected a number of at least 0"),
        (("--budget-ms", "-5"), "--budget-ms", "got -5, expected a number of at least 0"),
        (("--heads", "8,-1"), "--heads", "got '8,-1', expected positive integers"),
        (("--head-dim", "0"), "--head-dim", "1"),
        (("--backend", "cuda"), "--backend", "got 'cuda', expected one of "),
        (("--device", "cuda"), "--device", "got 'cuda', and PyTorch sees no GPU here"),
        (("--window", "cp", "--shape", "3x8"), "--window", "cp at 3x8, which needs s_k a multiple of an even s_q"),
    ],
)
def test_bench_refuses(arguments, option, message, tmp_path, ceilings):
    text = refused(*small_bench(arguments), "--results", str(tmp_path / "results"))
    assert option in text
    assert message in text
    assert not (tmp_path / "results").exists()


def test_explain_obeys_the_environment_as_calls_do(monkeypatch):
    monkeypatch.setenv("LIGHTNING_INDEXER_BACKEND", "torch-blocked")
    result = run("explain", "--arch", "sm90")
    assert result.status == 0
    assert "LIGHTNING_INDEXER_BACKEND=torch-blocked" in result.text
    assert "-> torch-blocked" in result.text
    assert "cuda-sm90" not in result.text
