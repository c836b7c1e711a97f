"""``report``: one file of a machine, whatever becomes of its parts."""

from __future__ import annotations

import contextlib
import json
import re
import signal
import subprocess
import sys
from unittest import mock

import pytest
from typer.testing import CliRunner

from helpers import CPU
from lightning_indexer import Arch
from lightning_indexer.bench import pictures
from lightning_indexer.cli import app as cli
from lightning_indexer.cli import report
from lightning_indexer.cli.report import Part

VERIFIED = {
    "cases": 3, "failures": [{"case": "(1, 1)", "detail": "off by 1e-3"}], "left_out": {},
    "summary": [{"count": {"pass": 2}, "diff": {"torch.float32": 4.9e-8}}],
}  # fmt: skip
TIMED = {"rows": [{"contender": "a", "median_us": 5.0}, {"contender": "b", "median_us": None}]}
# What a part's process does, by the first word of its arguments.
PROGRAM = f"""
import json, os, signal, sys, time
verb = sys.argv[1]
if verb == "verify":
    print(json.dumps({VERIFIED!r}))
    sys.exit(1)
if verb == "bench":
    if "slow" in sys.argv:
        try:
            time.sleep(60)
        except KeyboardInterrupt:
            print(json.dumps({TIMED!r}))
            sys.exit(130)
    print(json.dumps({TIMED!r}))
if verb == "late":
    print(json.dumps({{"good": True}}), flush=True)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGINT)
if verb == "info":
    print("{{}}")
if verb == "resources":
    print("not JSON", file=sys.stderr)
    os.kill(os.getpid(), signal.SIGSEGV)
"""


@pytest.fixture
def parts(monkeypatch, tmp_path):
    """Replaces the commands by a program of a few lines; what is to run."""
    script = tmp_path / "program.py"
    script.write_text(PROGRAM)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    real = subprocess.Popen

    def start(command, **options):
        return real([sys.executable, "-S", str(script), *command[3:]], **options)

    monkeypatch.setattr(report.subprocess, "Popen", start)
    monkeypatch.setattr(report, "LEAST", 1.0)
    chosen: list[Part] = []
    monkeypatch.setattr(report, "_on_device", lambda where, folder: chosen)
    return chosen


def run(*arguments):
    result = CliRunner().invoke(cli.app, ["report", "--device", "cpu", "--output", "r.md", *arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def test_each_part_is_recorded_whatever_becomes_of_it(parts, tmp_path):
    parts += [
        Part("info", ("info",), 1.0), Part("verify x", ("verify",), 1.0), Part("bench y", ("bench",), 1.0),
        Part("resources", ("resources",), 1.0), Part("verify late", ("late",), 1.0),
        Part("bench z", ("bench", "slow"), 0.001),
    ]  # fmt: skip
    result = run("--minutes", "0.2")
    assert result.exit_code == 1
    text = (tmp_path / "r.md").read_text()
    assert re.search(r"\| info \| passed \|", text)
    assert re.search(
        r"\| verify x \| failed \| \d+ \| 2 passed, 1 failed, of 3 cases, worst calc_diff 4.9e-08 \|", text
    )
    assert "- (1, 1): off by 1e-3" in text
    assert re.search(r"\| bench y \| passed \| \d+ \| 1 of 2 measurements: a \|", text)
    assert re.search(r"\| resources \| crashed, exit status -11 \|", text)
    assert "not JSON" in text
    assert re.search(r"\| verify late \| passed \|", text), "interrupted as it ended"
    assert re.search(r"\| bench z \| stopped, its time was up \| \d+ \| 1 of 2 measurements: a \|", text)
    document = pictures.load(tmp_path / "r.md")
    assert document["kind"] == "lightning-indexer-report"
    assert {"device", "arch", "commit", "date", "torch"} <= set(document["environment"])
    assert [part["document"] for part in document["parts"]] == [{}, VERIFIED, TIMED, None, {"good": True}, TIMED]


def test_a_report_of_what_is_right_succeeds(parts):
    parts.append(Part("bench y", ("bench",), 1.0))
    result = run("--json")
    assert (result.exit_code, json.loads(result.stdout)["format"]) == (0, report.FORMAT)


def test_parts_stop_where_interrupts_are_ignored(parts):
    """A script's `report &` ignores Ctrl-C, and so would what it starts."""
    parts.append(Part("bench z", ("bench", "slow"), 1.0))
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        result = run("--minutes", "0.05", "--json")
        assert signal.getsignal(signal.SIGINT) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)
    assert result.exit_code == 0
    [part] = json.loads(result.stdout)["parts"]
    assert (part["status"], part["document"]) == ("stopped, its time was up", TIMED)


def test_no_part_is_begun_without_time(parts, monkeypatch):
    parts += [Part(f"bench {name}", ("bench",), 1.0) for name in "xyz"]
    clock = iter((0.0, 1.0, 10.5, 11.6))
    monkeypatch.setattr(report.time, "monotonic", lambda: next(clock))
    given = []
    monkeypatch.setattr(
        report,
        "_one",
        lambda part, seconds: given.append(seconds) or report.Done("", "", "passed", 1, TIMED, ""),
    )
    monkeypatch.setattr(report.common, "progress", lambda: contextlib.nullcontext(mock.MagicMock()))
    done, stopped = report._run(parts, 12.0)
    assert [each.status for each in done] == ["passed", "passed", "not run, no time was left"]
    assert given == [11 / 3, 1.0], "a share, and the least that a part gets while there is time"
    assert not stopped


def test_a_report_that_is_stopped_has_its_parts(parts, tmp_path, monkeypatch):
    parts += [Part("info", ("info",), 1.0), Part("bench y", ("bench",), 1.0)]
    real = report._one
    monkeypatch.setattr(
        report, "_one", lambda part, seconds: real(part, seconds) if part.title == "info" else _interrupt()
    )
    assert run().exit_code == 130
    assert [part["title"] for part in pictures.load(tmp_path / "r.md")["parts"]] == ["info"]


def _interrupt():
    raise KeyboardInterrupt


def test_a_bad_place_is_refused_before_anything_runs(parts, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(report, "_run", lambda *rest: pytest.fail("it ran"))
    result = CliRunner().invoke(cli.app, ["report", "--device", "cpu", "--output", str(tmp_path / "file" / "r.md")])
    assert (result.exit_code, "cannot write" in result.output) == (2, True)


def test_parts_are_every_backend_and_operation(tmp_path):
    parts = report._on_device(CPU, tmp_path)
    titles = [part.title for part in parts]
    for operation in ("fp8_mqa_logits", "fp8_paged_mqa_logits", "top_k_per_row"):
        assert f"verify {operation} torch-blocked" in titles
        assert f"bench {operation}" in titles
    assert titles.index("bench top_k_per_row") < titles.index("verify insert_k_cache torch-blocked")
    simulated = [part.title for part in report._simulated(Arch.parse("gfx950"))]
    assert "verify fp8_mqa_logits" in simulated
    assert not any(title.startswith("bench") for title in simulated), "the simulator has no clock"


def test_nothing_of_the_user_is_told(parts, tmp_path):
    parts.append(Part("bench y", ("bench", "--results", str(tmp_path)), 1.0))
    run()
    assert str(tmp_path) not in (tmp_path / "r.md").read_text()
