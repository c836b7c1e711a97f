"""``bench --distributed`` and ``scale``: every way is checked and timed; what the model of scale is made of."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from lightning_indexer.bench import distributed
from lightning_indexer.bench.distributed import Case, Ranks
from lightning_indexer.cli.app import app
from lightning_indexer.model import scale
from lightning_indexer.model.scale import Problem, estimate
from processes import in_gloo_group

SMALL = (Case("rows", 6, 100, 8, 9), Case("keys", 6, 100, 8, 9), Case("decode", 2, 200, 8, 9))
WAYS = {
    "rows": ["overlapped", "all rows in pieces", "gathered first"],
    "keys": ["gather", "rows", "histogram"],
    "decode": ["gather", "rows"],
}


def check_bench(rank: int, ranks: int) -> None:
    at = Ranks(rank, ranks, torch.device("cpu"))
    rows = list(distributed.run(SMALL, at, budget_ms=1))
    assert [(row.case, row.way) for row in rows] == [(case, way) for case in SMALL for way in WAYS[case.form]]
    assert all(row.note == "" and row.median and row.alone and row.ranks == ranks for row in rows)
    if rank == 0:
        import tempfile

        with tempfile.TemporaryDirectory() as folder:
            text = distributed.markdown(rows, {"device": "a CPU"}, "torchrun")
            paths = distributed.write(Path(folder), text, rows, {"device": "a CPU"})
            assert [path.name for path in paths] == ["distributed.md", "distributed.csv", "distributed.json"]
            assert "| rows (6, 100) H=8 k=9 | 2 | overlapped |" in paths[0].read_text()
            assert [row["way"] for row in json.loads(paths[2].read_text())["rows"]] == [row.way for row in rows]
    # A rank that selects something else is told of, and not timed.
    ours = distributed.top_k_of_sharded_keys

    def wrong(*args, **options):
        found = ours(*args, **options)
        return found.flip(1) if rank == 1 else found

    distributed.top_k_of_sharded_keys = wrong
    rows = list(distributed.run(SMALL[1:2], at, budget_ms=1))
    assert [row.note for row in rows] == ["WRONG: 6 rows differ"] * 3
    assert all(row.median is None for row in rows)


@pytest.mark.slow
def test_every_way_is_checked_and_timed():
    in_gloo_group(2, check_bench)


def test_cases():
    assert distributed.cases(("rows", "keys", "decode"), None, None, None, on_gpu=True) == list(distributed.GPU)
    assert distributed.cases(("decode",), None, (8, 16), (5,), on_gpu=False) == [
        replace(distributed.CPU[2], heads=heads, k=5) for heads in (8, 16)
    ]
    found = distributed.cases(("rows", "keys"), ((4, 64),), (8,), None, on_gpu=False)
    assert found == [Case(form, 4, 64, 8, 128) for form in ("rows", "keys")]


def test_outside_of_torchrun():
    result = CliRunner().invoke(app, ["bench", "--distributed", "--device", "cpu"])
    assert result.exit_code == 2
    assert "expected a start by torchrun" in " ".join(result.output.replace("│", " ").split())


def test_the_model_is_near_what_it_was_made_from():
    """Medians of one run on two H200; a model of constant rates keeps within a fifth of them."""
    for bytes_of_result, us in ((1e6, 36), (17.3e6, 71), (69e6, 179), (138e6, 320)):
        assert scale.collective(bytes_of_result / 2, 2) == pytest.approx(us * 1e-6, rel=0.2)
    for rows, keys, heads, us in ((4096, 131072, 64, 7337), (4096, 131072, 32, 4034), (1024, 1048576, 32, 9310)):
        assert scale._scoring(Problem("rows", rows, keys, heads), rows, keys) == pytest.approx(us * 1e-6, rel=0.2)
    for rows, width, us in ((4096, 32768, 159), (1024, 131072, 156), (64, 131072, 23.6), (256, 131072, 48.2)):
        assert scale._selection(rows, width) == pytest.approx(us * 1e-6, rel=0.2)
    for sequences, keys, us in ((64, 32768, 82), (128, 65536, 288), (256, 32768, 286)):
        bytes_read = sequences * keys * 132
        assert scale.DECODE_START + bytes_read / scale.DECODE_BYTES == pytest.approx(us * 1e-6, rel=0.2)


@pytest.mark.parametrize("form", scale.FORMS)
def test_the_model_by_ranks(form):
    problem = Problem(form, 64, 524288, 64) if form == "decode" else Problem(form, 8192, 1048576, 64)
    alone = estimate(problem, 1)
    assert alone.communication == alone.exposed == alone.received_bytes == 0
    for ranks in (2, 8, 64, 512):
        found = estimate(problem, ranks)
        assert alone.total / ranks < found.total < alone.total
        assert found.exposed <= found.communication
        assert found.shard_bytes == alone.shard_bytes / ranks
    if form != "rows":
        for ranks in (2, 8, 64, 512):
            ways = {way: estimate(problem, ranks, way).total for way in ("gather", "rows", "histogram")}
            assert ways["histogram"] == max(ways["rows"], ways["histogram"])  # never the best
            assert estimate(problem, ranks).total == min(ways.values())


def test_scale():
    result = CliRunner().invoke(app, ["scale", "--forms", "decode,rows", "--ranks", "2,16", "--heads", "32"])
    assert result.exit_code == 0, result.output
    lines = result.output.splitlines()
    assert len(lines) == 6
    assert lines[2].split()[:4] == ["decode", "(64,", "524288)", "2"]
    assert lines[5].split()[:4] == ["rows", "(8192,", "1048576)", "16"]
    for arguments, message in (
        (["--heads", "16"], "got 16, expected 32 or 64"),
        (["--way", "ring"], "expected one of gather, rows, histogram"),
        (["--forms", "heads"], "expected one of rows, keys, decode"),
    ):
        result = CliRunner().invoke(app, ["scale", *arguments])
        assert result.exit_code == 2
        assert message in " ".join(result.output.replace("│", " ").split())
