"""``bench --tune``: candidates of every backend, wrong ones never timed, what the table says."""

from __future__ import annotations

import itertools
import re
from types import SimpleNamespace

import pytest
import torch
from typer.testing import CliRunner

from faulty import FaultyBackend, install, one_percent_high
from lightning_indexer import Arch, MqaLogitsProblem
from lightning_indexer.bench import sweep, tune
from lightning_indexer.cli.app import app
from lightning_indexer.selection import registry as dispatch

SMALL = ["bench", "--tune", "--device", "cpu", "--shapes", "16x64", "--heads", "8", "--head-dim", "32",
         "--windows", "causal", "--forms", "clean,compressed", "--budget-ms", "1"]  # fmt: skip
ARCH_OF = {"cuda-sm90": "sm90", "gluon-gfx950": "gfx950", "triton-portable": "sm90", "torch-blocked": "cpu"}


def plan(backend: str) -> sweep.Plan:
    return sweep.Plan(((16, 64),), (8,), 32, ("causal",), ("clean", "compressed"), (backend,), budget_ms=1.0)


@pytest.mark.parametrize("name", ARCH_OF)
@pytest.mark.parametrize("shape", [(1, 1, 8, 32), (128, 32768, 64, 128), (4096, 32768, 32, 128)])
def test_configs_begin_with_the_heuristics_and_are_distinct(name, shape):
    problem, arch = MqaLogitsProblem(*shape), Arch.parse(ARCH_OF[name])
    kernel = dispatch.kernel(name)
    configs = kernel.neighbours(problem, arch)
    assert len(configs) > 1
    assert len(set(configs)) == len(configs)
    assert configs[0] == kernel.config(problem, arch)
    if name == "cuda-sm90":
        assert all(config.shared_bytes <= configs[0].shared_bytes for config in configs)
    if name in ("triton-portable", "gluon-gfx950"):
        assert all(config.chunk % config.block == 0 for config in configs)


def test_every_candidate_is_checked_and_timed():
    trials = list(tune.run(plan("torch-blocked"), torch.device("cpu")))
    assert {trial.case.form for trial in trials} == {"clean", "compressed"}
    assert [trial.heuristic for trial in trials].count(True) == 2
    assert all(trial.median and not trial.note for trial in trials)


def test_a_wrong_candidate_is_not_timed(monkeypatch):
    install(monkeypatch, FaultyBackend(one_percent_high))
    trials = list(tune.run(plan("faulty"), torch.device("cpu")))
    assert {(trial.case.form, trial.median) for trial in trials} == {("clean", None), ("compressed", None)}
    assert all(trial.note.startswith("WRONG: calc_diff") for trial in trials)
    result = CliRunner().invoke(app, [*SMALL, "--backend", "faulty"])
    assert result.exit_code == 1
    assert "WRONG" in result.output


def test_a_backend_that_cannot_run_says_why():
    [trial, _] = tune.run(plan("cuda-sm90"), torch.device("cpu"))
    assert trial.median is None
    assert "sm90" in trial.note


def test_the_table_names_the_fastest_config_and_its_gain(tmp_path, monkeypatch):
    """The heuristic's config takes 40 us, the next one 30, every other one 50."""
    monkeypatch.chdir(tmp_path)
    times = itertools.chain([40.0, 30.0], itertools.repeat(50.0))
    monkeypatch.setattr(tune, "measure", lambda call, device, budget: SimpleNamespace(median=next(times)))
    arguments = [*SMALL[:-3], "clean", *SMALL[-2:]]
    result = CliRunner().invoke(app, [*arguments, "--backend", "torch-blocked"])
    assert result.exit_code == 0, result.output
    kernel, problem, cpu = dispatch.kernel("torch-blocked"), MqaLogitsProblem(16, 64, 8, 32), Arch.parse("cpu")
    first, second, *_ = map(str, kernel.neighbours(problem, cpu))
    [row] = [line for line in result.output.splitlines() if "torch-blocked" in line]
    assert re.split(r"\s{2,}", row)[2:] == ["40.0", "30.0", "1.33", tune.differences(second, first)]
    assert list(tmp_path.iterdir()) == []


def test_differences():
    heuristic = "KernelConfig(heads=64, enter_cost=1, k_stages=5)"
    assert tune.differences("KernelConfig(heads=64, enter_cost=2, k_stages=5)", heuristic) == "enter_cost=2"
    assert tune.differences(heuristic, heuristic) == "the heuristic's"
