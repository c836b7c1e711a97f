"""What holds for every verb: tables in any width, ``--json``, list options, output paths, exit statuses.

The work of the verbs is replaced where it takes more than a moment; other tests do it.
"""

from __future__ import annotations

import gzip
import json
import re
import subprocess
import sys
from collections import Counter
from types import SimpleNamespace

import pytest
import torch
import typer
from typer.testing import CliRunner

from cdna_sim import Resources
from faulty import FaultyBackend, install, one_percent_high
from lightning_indexer.amd import cdna
from lightning_indexer.backends.triton_portable.mqa_logits import MqaLogits as TritonPortable
from lightning_indexer.bench import paged, sweep, timing, top_k
from lightning_indexer.bench.timing import Ceilings
from lightning_indexer.calls import prebuild as builder
from lightning_indexer.check import device, wrong
from lightning_indexer.check.cases import Case
from lightning_indexer.check.verify import Finding, Outcome
from lightning_indexer.chunking import Request
from lightning_indexer.cli import app as cli
from lightning_indexer.cli import demo, tables
from lightning_indexer.e2e import run as e2e_run
from lightning_indexer.model import cost as model
from lightning_indexer.model import survey
from lightning_indexer.model.cost import Prediction
from lightning_indexer.selection import registry

WIDTHS = (60, 80, 120, None)
NUMBER = re.compile(r"\d[\d.,]*(?:e[+-]\d+)?")
CPU = torch.device("cpu")
CEILINGS = Ceilings("fp8", 1281.25, 4239.5)
PNG = b"\x89PNG\r\n\x1a\n"

# A command line of each verb that prints a table.
VERBS = {
    "info": (),
    "explain": ("--arch", "gfx950", "--shape", "4096x32768"),
    "explain table": ("--table",),
    "plan": ("--request", "32768:4096,0:512,1048576:2048", "--request", "70000:300"),
    "demo": ("--device", "cpu", "--picture", "demo.png"),
    "verify": ("--device", "cpu", "--backend", "torch-blocked"),
    "bench": ("--device", "cpu", "--backend", "torch-blocked", "--shape", "16x64", "--results", "results"),
    "bench top_k": ("--device", "cpu", "--operation", "top_k_per_row", "--results", "results"),
    "bench paged": ("--device", "cpu", "--operation", "fp8_paged_mqa_logits", "--results", "results"),
    "resources": ("--arch", "gfx942", "--backend", "triton-portable"),
    "cost": ("--backend", "triton-portable", "--heads", "32"),
    "disasm": ("--arch", "gfx942", "--backend", "triton-portable"),
    "prebuild": ("--arch", "sm90", "--backend", "cuda-sm90"),
    "cache": (),
    "scale": ("--ranks", "1,8"),
    "trace-diff": ("a.json.gz", "b.json.gz"),
}


def timed(cls, case, contender, **more):
    return cls(case, contender, median=1234.5678, p20=1200.25, p80=1300.75, host=13.75, extra_bytes=2**31, **more)


def fake_sweep(plan, found, where):
    for case in plan.cases()[:3]:
        for name in (*plan.backends, *(peer.name for peer in found)):
            yield timed(sweep.Row, case, name, positions=10**9, flop=10**13, bytes=10**9, diff=4.9e-8)


def fake_top_k(plan, found, where):
    for case in plan.cases:
        for name in (*plan.backends, *(peer.name for peer in found)):
            yield timed(top_k.Row, case, name, bytes=10**9, floor=140.8, cpu=2.5)


def fake_paged(plan, found, where):
    for case in plan.cases:
        yield timed(paged.Row, case, plan.backends[0], bytes=10**9, flop=10**12, floor=99.5, cpu=2.5)


def fake_verify(suite, cases, backends, where):
    mask = torch.zeros(17, 113, dtype=torch.bool)
    mask[3, 5::7] = True
    collected = wrong.Wrong()
    collected.note(mask)
    positions = collected.positions()
    for number, case in enumerate(cases):
        bad = number % 3 == 0
        finding = Finding(("off by 1.5e-03",) if bad else (), 4.9e-8, 3.2e-4, 1.1e-7, torch.float32,
                          positions if bad else None)  # fmt: skip
        yield Outcome(suite.operation, case, backends[0], "fail" if bad else "pass", "off" if bad else "", finding)


def fake_predict(published, kernels, arch, begins):
    units = {"matrix": 1e-3, "vector": 2e-4, "packed": 1e-5, "scalar": 1e-6, "L1": 1e-6, "LDS": 1e-6, "memory": 1e-4}
    times = {launch: {"triton-portable": Prediction(None, units, 0.875, 1234.5)} for launch in published.times}
    kernel = SimpleNamespace(built=SimpleNamespace(kernel="fp8_mqa_logits_H32_D128_block128_warps4_clean_triton"))
    return survey.Predicted(published, times, [(kernel, None)])


@pytest.fixture(autouse=True)
def _replaced(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("COLUMNS", raising=False)
    monkeypatch.setenv("TERM", "dumb")
    monkeypatch.setenv("LIGHTNING_INDEXER_CACHE_DIR", str(tmp_path / "kernels"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(timing, "ceilings", lambda where: CEILINGS)
    monkeypatch.setattr(sweep, "run", fake_sweep)
    monkeypatch.setattr(top_k, "run", fake_top_k)
    monkeypatch.setattr(paged, "run", fake_paged)
    monkeypatch.setattr(device, "run", fake_verify)
    monkeypatch.setattr(demo, "REQUESTS", (Request(60, 4), Request(0, 50)))
    monkeypatch.setattr(demo, "HEADS", 8)
    monkeypatch.setattr(demo, "NEEDLES", 4)
    monkeypatch.setattr(survey, "predict", fake_predict)
    monkeypatch.setattr(survey, "parts", lambda kernel, problem: ([1.25] * 8, [1234.0] * 3))
    monkeypatch.setattr(cdna, "simulator_missing", lambda: None)
    monkeypatch.setattr("lightning_indexer.envs.stop_triton_interpreter", lambda: None)
    built = SimpleNamespace(
        kernel="fp8_mqa_logits_H32_D128_block128_chunk4096_warps4_compressed_bfloat16_triton",
        resources=Resources(256, 64, 48, 34304, 92, 22, 3, 2), compiler="Triton 3.9.0 with LLVM 23.0.0", isa="s_endpgm",
    )  # fmt: skip
    monkeypatch.setattr(TritonPortable, "build", lambda self, problem, arch: built)
    monkeypatch.setattr(builder, "run", lambda batches, jobs: (builder.Prebuilt(b, ("k1", "k2")) for b in batches))
    # What draws is tested elsewhere.
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    kernels = tmp_path / "kernels"
    kernels.mkdir()
    (kernels / ("0123456789" * 4 + ".cubin")).write_bytes(b"x" * 3_000_000)
    (kernels / "notes.txt").write_text("mine")
    for name, duration in (("a", 300.25), ("b", 161.5)):
        event = {"ph": "X", "cat": "kernel", "name": f"fp8_mqa_logits_H32_D128_{name}", "pid": 0, "tid": 7, "ts": 0,
                 "dur": duration}  # fmt: skip
        (tmp_path / f"{name}.json.gz").write_bytes(gzip.compress(json.dumps({"traceEvents": [event] * 3}).encode()))


def run(*arguments, width=None):
    environment = {"COLUMNS": None if width is None else str(width)}
    result = CliRunner().invoke(cli.app, list(arguments), prog_name="lightning-indexer", env=environment)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def words(verb):
    return [verb.split()[0], *VERBS[verb]]


# Tables


@pytest.mark.parametrize("verb", VERBS)
def test_no_number_is_cut_at_any_width(verb):
    whole = run(*words(verb))
    assert whole.exit_code in (0, 1), whole.output
    # Times of this very run differ from run to run.
    numbers = Counter(NUMBER.findall(whole.stdout)) if verb != "demo" else Counter()
    for width in WIDTHS:
        narrow = run(*words(verb), width=width)
        assert narrow.exit_code == whole.exit_code
        missing = numbers - Counter(NUMBER.findall(narrow.stdout))
        assert not missing, f"at {width}: {missing}"
        if width is not None and verb != "disasm":
            for line in narrow.stdout.splitlines():
                # What has to be pasted as it is, and one long name, may be longer.
                whole_line = line.startswith(("FAIL", "repeat the first", "  wrong at", "and "))
                assert len(line) <= width or whole_line or max(map(len, line.split())) > 24, line


def test_tables_of_numbers_become_blocks_where_they_do_not_fit():
    wide, narrow = (run(*words("resources"), width=width).stdout for width in (120, 60))
    assert re.search(r"kernel +VGPR", wide)
    assert re.search(r"^  VGPR +256$", narrow, re.MULTILINE)
    assert "34304" in wide
    assert "34304" in narrow


def test_names_fold_and_text_wraps_between_words():
    table = tables.Table(("name", tables.Column("us", format=".1f"), "note"))
    table.add("fp8_mqa_logits_with_a_long_name_of_a_kernel", 12345.67, "one or two words of which each is short")
    for width in range(44, 120, 3):
        text = table.render(width)
        assert "12345.7" in text
        assert max(map(len, text.splitlines())) <= width
    assert table.records() == [{"name": "fp8_mqa_logits_with_a_long_name_of_a_kernel", "us": 12345.67,
                                "note": "one or two words of which each is short"}]  # fmt: skip
    with pytest.raises(ValueError, match="row: got 1 values, expected 3"):
        table.add("x")


def test_markdown_is_set_anew_only_where_it_does_not_fit():
    text = "# a\n\n| case | us |\n| --- | --- |\n| (4096, 32768) causal | 1034.25 |\n"
    assert tables.markdown(text, 80) == text
    narrow = tables.markdown(text, 26).splitlines()
    assert narrow[0] == "# a"
    assert narrow[4:] == ["(4096, 32768)      1034.25", "causal"]
    assert tables.markdown(text, 20).splitlines()[2:] == ["case (4096, 32768)", "  causal", "  us  1034.25"]


# JSON


@pytest.mark.parametrize("verb", VERBS)
def test_json_is_one_document(verb):
    result = run(*words(verb), "--json")
    document = json.loads(result.stdout)
    assert document
    assert result.exit_code == run(*words(verb)).exit_code


def test_every_verb_has_json():
    group = typer.main.get_command(cli.app)
    for name, command in group.commands.items():
        options = {option for parameter in command.params for option in parameter.opts}
        assert "--json" in options, name


def test_json_keeps_numbers():
    rows = json.loads(run(*words("resources"), "--json").stdout)["kernels"]
    assert (rows[0]["vgpr"], rows[0]["agpr"], rows[0]["vgpr_spills"]) == (256, 64, 22)
    found = json.loads(run(*words("cost"), "--json").stdout)
    launch = next(row for row in found["launches"] if row["published"])
    assert launch["in_order_us"] == pytest.approx(1.2e3 / 0.875)
    assert launch["same_kind"] == "Triton"
    assert found["notes"][-1] == model.EXPLANATION
    assert {(row["device"], row["heads"]) for row in found["launches"]} == {("MI355X", 32)}


# Lists


def test_options_have_one_name_on_all_verbs():
    """A name means one thing, whatever the verb; its plural is the same option."""
    group = typer.main.get_command(cli.app)
    plural = {"--backend", "--window", "--form", "--shape", "--operation", "--length", "--head-dim", "--context"}
    for verb, command in group.commands.items():
        for parameter in command.params:
            names = [option for option in parameter.opts if option.startswith("--")]
            for name in names:
                assert f"{name}s" not in plural or name in plural, (verb, name)
            if getattr(parameter, "multiple", False) and names and names[0] in plural:
                assert names == [names[0], f"{names[0]}s"], (verb, names)


@pytest.mark.parametrize(
    "given", [("--heads", "8,64"), ("--heads", "8", "--heads", "64"), ("--heads", "8", "--heads", "64,8")]
)
def test_lists_take_commas_and_repetition(given, monkeypatch):
    seen = []
    monkeypatch.setattr(device, "run", lambda suite, cases, backends, where: seen.extend(cases) or iter(()))
    run("verify", "--operation", "fp8_mqa_logits", "--backend", "torch-blocked", *given)
    assert {case.heads for case in seen} == {8, 64}


def test_backends_take_commas(monkeypatch):
    seen = []
    monkeypatch.setattr(device, "run", lambda suite, cases, backends, where: seen.append(backends) or iter(()))
    run("verify", "--operation", "fp8_mqa_logits", "--backend", "torch-blocked,triton-portable")
    assert seen == [["torch-blocked", "triton-portable"]]


# Exit statuses. 0: done, and right. 1: a failure, or nothing was done. 2: refused. 130: stopped.


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (("info", "--nonsense"), 2, "No such option"),
        (("explain", "--arch", "gfx999"), 2, "--arch"),
        (("explain", "--operation", "nothing"), 2, "--operation"),
        (("explain", "--arch", "sm80", "--backend", "cuda-sm90"), 1, ""),
        (("explain", "--arch", "sm90", "--arch", "sm80"), 2, "'--arch': given more than once, and it takes one value"),
        (("plan",), 2, "--request"),
        (("plan", "--request", "5"), 2, "expected CONTEXT:NEW"),
        (("demo", "--picture", "a.json.gz/x.png"), 2, "cannot write"),
        (("verify", "--backend", "cuda"), 2, "--backend"),
        (("verify", "--heads", "7"), 2, "no case"),
        (("verify", "--picture", "kernels"), 2, "cannot write"),
        (("verify", "--arch", "sm90"), 2, "--arch"),
        (("bench", "--device", "cpu", "--backend", "cuda-sm90", "--results", "a.json.gz"), 2, "cannot write into"),
        (("bench", "--device", "cpu", "--shape", "16"), 2, "expected MxN"),
        (("bench", "--device", "cpu", "--budget-ms", "nan"), 2, "--budget-ms"),
        (("resources", "--arch", "gfx942", "--heads", "7"), 2, "H=7"),
        (("cost", "--heads", "7"), 2, "nothing was published for H=[7], only for 32, 64"),
        (("cost", "--shape", "999999999999x5"), 2, "got '999999999999x5', expected MxN"),
        (("disasm", "--arch", "gfx942", "--shape", "1"), 2, "expected MxN"),
        (("prebuild", "--arch", "sm90", "--heads", "7"), 2, "nothing for sm90"),
        (("prebuild",), 2, "--arch"),
        (("cache", "--older-than-days", "nan"), 2, "--older-than-days"),
        (("e2e", "--device", "cpu", "--results", "a.json.gz"), 2, "cannot write into"),
        (("trace-diff", "none.json", "b.json.gz"), 2, "none.json"),
        (("trace-diff", "a.json.gz", "b.json.gz", "--group", "("), 2, "group"),
    ],
)
def test_wrong_input(arguments, status, message, monkeypatch):
    monkeypatch.setattr(e2e_run, "run", lambda *rest: pytest.fail("it ran"))
    result = run(*arguments, width=200)
    assert (result.exit_code, "Traceback" in result.output) == (status, False), result.output
    assert message in " ".join(result.output.replace("│", " ").split())


def test_bench_of_nothing_is_no_success(monkeypatch):
    monkeypatch.setattr(sweep, "run", lambda plan, found, where: (
        sweep.Row(case, "cuda-sm90", 0, 0, 0, note="needs sm90") for case in plan.cases()))  # fmt: skip
    result = run("bench", "--device", "cpu", "--backend", "cuda-sm90", "--shape", "16x64")
    assert result.exit_code == 1
    assert "nothing of cuda-sm90 was timed" in result.stderr
    assert "cuda-sm90: needs sm90" in result.stderr


@pytest.mark.parametrize(("after", "kept"), [(2, True), (0, False)])
def test_bench_keeps_what_it_has_when_interrupted(after, kept, monkeypatch, tmp_path):
    def stopped(plan, found, where):
        for number, row in enumerate(fake_sweep(plan, found, where)):
            if number == after:
                raise KeyboardInterrupt
            yield row

    monkeypatch.setattr(sweep, "run", stopped)
    result = run(*words("bench"))
    assert result.exit_code == 130
    assert f"stopped after {after} of" in result.stderr
    path = tmp_path / "results" / "bench.json"
    assert path.exists() == kept
    if kept:
        assert len(json.loads(path.read_text())["rows"]) == 2
        assert "- stopped after 2 of" in (tmp_path / "results" / "bench.md").read_text()


# verify: where it is wrong


def test_verify_names_positions_and_the_command_that_repeats():
    result = run(*words("verify"), "--operation", "fp8_mqa_logits")
    assert result.exit_code == 1
    assert "  wrong at [3, 5], [3, 12], [3, 19], [3, 26], … 16 in all, of [17, 113]" in result.stdout
    failures = json.loads(run(*words("verify"), "--operation", "fp8_mqa_logits", "--json").stdout)["failures"]
    assert failures[0]["wrong"] == {"shape": [17, 113], "count": 16, "first": [[3, 5], [3, 12], [3, 19], [3, 26]]}
    assert failures[0]["repeat"] in result.stdout


@pytest.mark.slow
def test_verify_draws_which_positions_are_wrong(monkeypatch, tmp_path):
    monkeypatch.undo()
    monkeypatch.setattr(device, "run", fake_verify)
    result = run("verify", "--device", "cpu", "--operation", "fp8_mqa_logits", "--backend", "torch-blocked",
                 "--window", "empty", "--picture", str(tmp_path / "new" / "wrong.png"))  # fmt: skip
    assert result.exit_code == 1
    assert (tmp_path / "new" / "wrong.png").read_bytes().startswith(PNG)


@pytest.mark.parametrize(
    ("operation", "options"),
    [("fp8_mqa_logits", ("--heads", "32", "--head-dim", "64", "--window", "causal", "--case", "(17, 113)"))],
)
def test_wrong_positions_are_those_of_the_result(operation, options, monkeypatch):
    monkeypatch.undo()
    name = install(monkeypatch, FaultyBackend(one_percent_high))
    result = run("verify", "--device", "cpu", "--operation", operation, "--backend", name, *options, "--json")
    document = json.loads(result.stdout)
    first = document["failures"][0]["wrong"]
    case = Case(17, 113, 32, 64, "causal", "clean")
    assert first["shape"] == [case.s_q, case.s_k]
    assert 0 < first["count"] <= sum(113 - 17 + row + 1 for row in range(17))
    assert first["first"][0] == [0, 0]


def test_maps_are_small_and_hold_shares():
    collected = wrong.Wrong()
    assert collected.positions() is None
    mask = torch.zeros(640, 1600, dtype=torch.bool)
    mask[:10, :5] = True  # half of the first of 64 x 160 cells
    collected.note(mask)
    collected.note(torch.zeros_like(mask))
    found = collected.positions()
    assert (found.shape, found.count, found.first[:2]) == ((640, 1600), 50, ((0, 0), (0, 1)))
    assert (len(found.cells), len(found.cells[0])) == (64, 160)
    assert found.cells[0][0] == 0.5
    assert sum(map(sum, found.cells)) == 0.5


# cache


def test_cache_shows_and_clears_its_own_files_alone(tmp_path):
    folder = tmp_path / "kernels"
    unfinished = folder / f".{'0' * 40}.cubin.123.0badcafe.tmp"
    unfinished.write_bytes(b"x")
    document = json.loads(run("cache", "--json").stdout)
    assert (document["files"], document["bytes"], document["removed"]) == (2, 3_000_001, 0)
    assert {kind["kind"]: kind["files"] for kind in document["kinds"]} == {".cubin": 1, ".tmp": 1}
    kept = run("cache", "--clear", "--older-than-days", "1")
    assert (kept.exit_code, unfinished.exists()) == (0, True)
    cleared = run("cache", "--clear")
    assert cleared.exit_code == 0
    assert "removed 2 of 2 files" in cleared.stdout
    assert [path.name for path in folder.iterdir()] == ["notes.txt"]
    assert run("cache").exit_code == 0


def test_cache_says_what_it_could_not_remove(monkeypatch, tmp_path):
    monkeypatch.setattr("pathlib.Path.unlink", lambda self, missing_ok: (_ for _ in ()).throw(OSError(1, "denied")))
    result = run("cache", "--clear")
    assert result.exit_code == 1
    assert "denied" in result.stderr


# Without the packages of the command line, and with a reader that goes away


@pytest.mark.slow
def test_info_needs_nothing_but_the_library():
    code = (
        "import sys\n"
        "for name in ('typer', 'rich', 'click', 'matplotlib'): sys.modules[name] = None\n"
        "from lightning_indexer.__main__ import main\n"
        "main()"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "info", "--json"], capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert {row["backend"] for row in document["backends"]} == {backend.name for backend in registry.backends()}
    assert {row["package"] for row in document["packages"]} >= {"cuda-core", "numpy", "typer"}


@pytest.mark.slow
def test_a_reader_that_goes_away_takes_nothing_from_the_status():
    command = f"set -o pipefail; {sys.executable} -m lightning_indexer info | head -1"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
