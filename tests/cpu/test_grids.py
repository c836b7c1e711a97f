"""Launches that no grid holds are refused by the gates, in a sentence, and run elsewhere."""

from __future__ import annotations

import pytest

from lightning_indexer import Arch, MqaLogitsProblem, explain
from lightning_indexer.backends.gate import unsupported_grid
from lightning_indexer.selection import registry

GFX950, SM90 = Arch.parse("gfx950"), Arch.parse("sm90")
MANY = 2**24


@pytest.mark.parametrize("name", ["hip-gfx950", "gluon-gfx950", "flydsl", "triton-portable"])
def test_grids_of_2_to_the_32_lanes_are_refused(name):
    """HIP refuses them at the launch; 2^24 rows of 64 keys are a problem that a GPU has the memory for."""
    heads = 32
    kernel = registry.kernel(name)
    few = MqaLogitsProblem(4096, 64, heads, 128)
    assert kernel.supports(few, GFX950) is None
    many = few._replace(rows=4 * MANY)
    reason = kernel.supports(many, GFX950)
    assert reason is not None
    assert "2^32 lanes" in reason


def test_the_grid_of_every_config_that_the_gates_admit_fits():
    for name in ("hip-gfx950", "gluon-gfx950", "flydsl", "triton-portable"):
        kernel = registry.kernel(name)
        for rows in (MANY - 1, MANY, MANY + 1, 2 * MANY, 4 * MANY - 1, 4 * MANY):
            problem = MqaLogitsProblem(rows, 64, 32, 128)
            if kernel.supports(problem, GFX950) is None:
                launch = kernel.launch(problem, GFX950, kernel.config(problem, GFX950))
                assert launch.grid[0] * 64 * 4 < 2**32, (name, rows)


def test_such_a_problem_runs_elsewhere():
    [chosen] = [v.backend for v in explain(MqaLogitsProblem(4 * MANY, 64, 32, 128), GFX950) if v.chosen]
    assert chosen == "torch-blocked"
    assert registry.kernel("triton-portable").supports(MqaLogitsProblem(4 * MANY, 64, 32, 128), SM90) is None


def test_limits():
    assert unsupported_grid(2**24 - 1, 256) is None
    assert "are not fewer than 2^32 lanes" in (unsupported_grid(2**24, 256) or "")
    assert unsupported_grid(2**24, 256, "nvidia") is None
    assert "are not fewer than 2^31" in (unsupported_grid(2**31, 256, "nvidia") or "")
