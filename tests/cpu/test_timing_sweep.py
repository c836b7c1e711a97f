"""``timing --sweep``: rows that are kept, rows that are predicted again, and the page that is made from them."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("cdna_sim.timing")

from cdna_sim.timing import DEVICES, Prediction
from lightning_indexer.model import timing, timing_sweep

ROOT = Path(__file__).resolve().parents[2]
LAUNCHES = ((4096, 4096, "causal"), (128, 32768, "causal"), (1024, 1024, "multi_req"))


class Kernel:
    """One whose code is a text."""

    def __init__(self, code: str, refuses: int = 0) -> None:
        self.code, self.refuses = code, refuses

    def supports(self, problem, arch):
        return "not built" if problem.heads == self.refuses else None

    def build(self, problem, arch):
        return SimpleNamespace(isa=self.code)


class Predictions:
    """What was predicted, made up; the next one after ``limit`` is interrupted."""

    def __init__(self) -> None:
        self.limit, self.found = -1, []

    def __call__(self, kernel, backend, heads, launch, form, arch, device, samples, published):
        if len(self.found) == self.limit:
            raise KeyboardInterrupt
        self.found.append((arch.name, heads, launch, backend))
        stalls, busy = {"vector memory": 0.6, "barrier": 0.1, "issue slot": 0.0}, {"vector": 0.41239}
        us = launch[0] * (1.0 if backend == "hip-gfx950" else 1.1 if heads == 32 else 1.5)
        prediction = Prediction(us, 1e5, 0.01, 0.1, 2, 256, stalls, 0.3, busy)
        return timing.Row(DEVICES["MI355X"], backend, heads, launch, prediction, SimpleNamespace(kernel="k"), None)


@pytest.fixture
def asked(monkeypatch) -> Predictions:
    predictions = Predictions()
    monkeypatch.setattr(timing_sweep, "predicted", predictions)
    return predictions


def run(path: Path, kernels: dict, heads=(32, 64)) -> list[bool]:
    recorded = timing_sweep.Recorded(path, {"device": "a model"})
    return [new for _, new in timing_sweep.sweep(recorded, {"gfx950": kernels}, heads, ("clean",), LAUNCHES, 4)]


def test_an_interrupted_sweep_keeps_its_rows(tmp_path, asked):
    path, kernels = tmp_path / "timing.json", {"hip-gfx950": Kernel("a"), "flydsl": Kernel("b")}
    asked.limit = 5
    with pytest.raises(KeyboardInterrupt):
        run(path, kernels)
    assert len(json.loads(path.read_text())["rows"]) == 5
    asked.limit = -1
    assert run(path, kernels) == [False] * 5 + [True] * 7
    assert len(set(asked.found)) == len(asked.found) == 12
    document = json.loads(path.read_text())
    # In the order of the sweep's shapes, whatever the order in which they were predicted.
    assert [row["rows"] for row in document["rows"] if row["heads"] == 32] == [1024, 1024, 4096, 4096, 128, 128]
    assert document["rows"][0]["busy"] == {"vector": 0.412}
    assert run(path, kernels) == [False] * 12


def test_other_code_and_another_model_are_predicted_again(tmp_path, asked, monkeypatch):
    path = tmp_path / "timing.json"
    run(path, {"hip-gfx950": Kernel("a"), "flydsl": Kernel("b")}, (32,))
    assert run(path, {"hip-gfx950": Kernel("a"), "flydsl": Kernel("c")}, (32,)) == [False, True] * 3
    monkeypatch.setattr(timing_sweep, "model_version", lambda: "another")
    assert run(path, {"hip-gfx950": Kernel("a"), "flydsl": Kernel("c")}, (32,)) == [True] * 6


def test_what_no_gate_admits_is_left_out(tmp_path, asked):
    assert len(run(tmp_path / "timing.json", {"hip-gfx950": Kernel("a"), "flydsl": Kernel("b", refuses=64)})) == 9


def script():
    spec = importlib.util.spec_from_file_location("timing_tables", ROOT / "scripts" / "timing_tables.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_tables_mark_the_fastest_and_what_is_not_told_from_it(tmp_path, asked):
    path = tmp_path / "timing.json"
    run(path, {"hip-gfx950": Kernel("a"), "flydsl": Kernel("b")})
    text = script().tables(json.loads(path.read_text()))
    assert "| H | rows | keys | window | `hip-gfx950` | `flydsl` | waves of the fastest wait for |" in text
    assert "| 32 | 4096 | 4096 | causal | **4096** | ~4506 | vector memory 60%, barrier 10% |" in text
    assert "| 64 | 4096 | 4096 | causal | **4096** | 6144 | vector memory 60%, barrier 10% |" in text


def test_the_table_of_causes_has_every_backend(tmp_path, asked):
    path = tmp_path / "timing.json"
    run(path, {"flydsl": Kernel("b")})
    document = json.loads(path.read_text())
    for row in document["rows"]:
        row["keys"] = 32768
    text = script().stalls(document)
    assert "| device | H | | vector memory | barrier | issue slot | issued | busiest unit |" in text
    assert "| MI355X | 64 | `flydsl` | 60% | 10% | 0% | 30% | vector, 0.41 |" in text


def test_the_page_shows_what_was_recorded():
    document = json.loads((ROOT / "docs" / "results" / "timing.json").read_text())
    page = (ROOT / "docs" / "timing.md").read_text()
    assert script().filled(page, document) == page


def test_the_recorded_rows_are_of_this_model():
    document = json.loads((ROOT / "docs" / "results" / "timing.json").read_text())
    assert document["model"] == timing_sweep.model_version()
    assert {(row["rows"], row["keys"], row["window"]) for row in document["rows"]} <= set(timing_sweep.LAUNCHES)
    assert all(
        row["predicted_us"] > 0 and sum(row["stalls"].values()) + row["issued"] < 1.01 for row in document["rows"]
    )
