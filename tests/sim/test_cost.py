"""``lightning-indexer cost``: what it shows, and what the model takes from the simulator."""

from __future__ import annotations

import re

import pytest
from typer.testing import CliRunner

from processes import python

pytest.importorskip("tinygrad")
pytest.importorskip("ziglang")

from lightning_indexer import envs
from lightning_indexer.arch import Arch
from lightning_indexer.cli import app as cli
from lightning_indexer.model import rates
from lightning_indexer.model.cost import Model
from lightning_indexer.problems.mqa_logits import MqaLogitsProblem
from lightning_indexer.selection import registry as dispatch

GFX950 = Arch.parse("gfx950")


@pytest.fixture
def cost(monkeypatch):
    """Runs the command; its exit status, and its lines."""
    monkeypatch.setattr(envs, "stop_triton_interpreter", lambda: None)  # other tests here want it

    def run(*arguments):
        result = CliRunner().invoke(cli.app, ["cost", *arguments])
        return result.exit_code, result.output

    return run


def cost_in_own_process(*arguments: str, published: str = "PUBLISHED") -> str:
    """The same for kernels of Triton, which in this process are Triton's interpreter's."""
    code = (
        "import sys\n"
        "from lightning_indexer.cli import app as cli\n"
        "from lightning_indexer.model import rates\n"
        f"rates.PUBLISHED = rates.{published}\n"
        "cli.app(['cost', *sys.argv[1:]])\n"
    )
    return python("-c", code, *arguments, timeout=300)


def row(text: str, *words: str) -> list[str]:
    """The cells of the one row of a table that holds all of these."""
    rows = [re.split(r"\s{2,}", line.strip()) for line in text.splitlines()]
    [found] = [cells for cells in rows if set(words) <= set(cells)]
    return found


def test_chosen_shapes_beside_what_was_published(cost):
    status, text = cost("--backend", "hip-gfx950", "--shapes", "128x32768,64x512")
    assert status == 0, text
    assert "MODEL, not measured: microseconds on MI355X, H=32 D=128 clean" in text
    assert "This is a model. Nothing here was measured by this project" in text
    published = row(text, "128", "32768", "causal")
    assert published[6:8] == ["225.1", "35.2"]
    assert float(published[8].removesuffix(" of it")) == pytest.approx(float(published[4]) / 35.2, abs=0.01)
    other = row(text, "64", "512", "causal")
    assert other[6:9] == ["-", "-", "-"]
    assert "fp8_mqa_logits_H32_D128_mfma32x32x64_lds_r4_w4_lds2x64_max_clean_hip" in text


def test_heads_for_which_nothing_was_published():
    text = cost_in_own_process("--backend", "triton-portable", "--heads", "16", "--shapes", "64x512")
    assert "H=16 D=128 clean" in text
    assert len(row(text, "64", "512", "causal")) == 8


def test_gluon_beside_its_published_times():
    text = cost_in_own_process("--backend", "gluon-gfx950", "--heads", "64")
    assert "microseconds on MI350X, H=64 D=128 noclean" in text
    for rows, keys, window, us in (("4096", "4096", "causal", 92.8), ("32768", "8192", "multi_req/4", 349.7)):
        cells = row(text, rows, keys, window)
        assert float(cells[7]) == us
        assert float(cells[8].removesuffix(" of it")) == pytest.approx(float(cells[4]) / us, abs=0.01)


def test_sums_are_compared_with_each_other_only():
    pytest.importorskip("flydsl")
    text = cost_in_own_process("--backend", "gluon-gfx950", "--backend", "flydsl", published="PUBLISHED[2:]")
    gluon, flydsl = row(text, "2730", "gluon-gfx950"), row(text, "2730", "flydsl")
    assert gluon[8] == "-"
    assert flydsl[8].endswith(" of gluon-gfx950, [0.64]")
    assert float(flydsl[8].split()[0]) == pytest.approx(float(flydsl[4]) / float(gluon[4]), abs=0.01)
    assert "[Gluon], [FlyDSL]: published, ms. vLLM, FlyDSL prefill scoring" in text


def test_what_cannot_be_predicted(cost):
    status, text = cost("--arch", "gfx942")
    assert status == 2
    assert "expected one of gfx950" in text
    status, text = cost("--backend", "hip-gfx950", "--heads", "128", "--shapes", "64x512")
    assert status == 2
    assert "hip-gfx950: H=128 is not one of 32, 64" in text


def test_a_partial_workgroup_is_not_taken_for_a_whole_one():
    """With rows in reverse the first workgroup is the last, partial one: fewer stores for as many products."""
    problems = [MqaLogitsProblem(1026, 4096, 32, 128), MqaLogitsProblem(1024, 4096, 32, 128)]
    for problem in problems:
        model = Model("hip-gfx950", dispatch.kernel("hip-gfx950"), [problem], GFX950, rates.MI355X)
        [kernel] = model.kernels
        assert kernel.of_tile(problem)["store out"] == pytest.approx(32 * 4)
