"""What comes of wrong input and of a run that stops: exit status, message, and what is kept.

0: done, and right. 1: a failure, or nothing was done. 2: refused. 130: stopped.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from faulty import FaultyBackend, install, one_percent_high
from lightning_indexer.bench import sweep
from lightning_indexer.check import device, wrong
from lightning_indexer.check.cases import Case
from lightning_indexer.e2e import run as e2e_run
from lightning_indexer.selection import registry
from processes import environment, python
from verbs import WRONG, fake_sweep, fake_verify, replace_work, run, words

PNG = b"\x89PNG\r\n\x1a\n"


@pytest.fixture(autouse=True)
def _replaced(monkeypatch, tmp_path):
    replace_work(monkeypatch, tmp_path)


@pytest.mark.parametrize(("arguments", "status", "message"), WRONG, ids=[" ".join(case[0]) for case in WRONG])
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
    wrong = failures[0]["wrong"]
    lines = wrong.pop("map")
    assert wrong == {"shape": [17, 113], "count": 16, "first": [[3, 5], [3, 12], [3, 19], [3, 26]]}
    assert (len(lines), len(lines[0]), "".join(lines).count("#")) == (17, 113, 16)
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
    assert found.map[0] == "5" + 159 * "."
    assert wrong.WrongPositions.of_map(found.shape, found.count, found.first, found.map) == found
    edges = replace(found, cells=((0.001, 0.999, 1.0),))
    assert edges.map == ("19#",)


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
    document = json.loads(python("-c", code, "info", "--json", timeout=120))
    assert {row["backend"] for row in document["backends"]} == {backend.name for backend in registry.backends()}
    assert {row["package"] for row in document["packages"]} >= {"cuda-core", "numpy", "typer"}


@pytest.mark.slow
def test_a_reader_that_goes_away_takes_nothing_from_the_status():
    command = f"set -o pipefail; {sys.executable} -m lightning_indexer info | head -1"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.slow
def test_a_full_disk_is_said():
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "lightning_indexer", "plan", "--request", "10:5"], env=environment(), stdout=full,
            stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
    assert (done.returncode, done.stderr) == (1, "lightning-indexer: standard output: No space left on device\n")


def test_a_file_that_is_no_text(tmp_path):
    (tmp_path / "bytes.json").write_bytes(b"\xff\xfe")
    result = run("plot", str(tmp_path / "bytes.json"), width=200)
    assert result.exit_code == 2
    assert "bytes.json: is no text in UTF-8" in " ".join(result.output.replace("│", " ").split())
