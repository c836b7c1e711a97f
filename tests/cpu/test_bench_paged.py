"""``bench --operation fp8_paged_mqa_logits``: what is timed, what is not, and that reports say it."""

from __future__ import annotations

import csv
import json
from types import SimpleNamespace

import pytest
import torch
from typer.testing import CliRunner

from helpers import CPU
from lightning_indexer.bench import paged, paged_peers, paged_report, report
from lightning_indexer.bench.paged import Case, Plan, Row
from lightning_indexer.bench.timing import Ceilings, Timing
from lightning_indexer.calls.paged_mqa_logits import fp8_paged_mqa_logits
from lightning_indexer.cli import app as cli

SMALL = (Case(3, 2, 300, 16), Case(5, 1, 200, 8, 32, 16, "ragged"))
OURS = "torch-blocked"


@pytest.fixture
def timed(monkeypatch):
    """The calls that are timed, in order, in place of their times."""
    calls = []

    def measure(call, device, budget_ms):
        calls.append(call)
        return Timing(10.0 * len(calls), 1.0, 2.0, 0.0, 3, None, 4.0)

    monkeypatch.setattr(paged, "measure", measure)
    return calls


class Scripted:
    """A peer that gives what ``change`` makes of the right answer."""

    name, note = "scripted", "for tests"

    def __init__(self, change):
        self.change = change

    def supports(self, heads, head_dim, page, next_n):
        return "H 16 only" if heads != 16 else None

    def prepare(self, inputs):
        return lambda: self.change(fp8_paged_mqa_logits(*inputs, clean_logits=False))


def run(peers=(), backends=(OURS,), cases=SMALL):
    return list(paged.run(Plan(cases, backends, 1000.0, 1.0, 1.0), peers, CPU))


# What is measured


def test_every_case_has_a_row_of_every_contender(timed):
    rows = run([Scripted(lambda logits: logits)])
    assert [(row.case, row.contender) for row in rows] == [(c, n) for c in SMALL for n in (OURS, "scripted")]
    assert [row.note for row in rows] == ["", "", "", "H 16 only"]
    assert len(timed) == 3
    # Rows of two see 299 and 300 positions; one read of K serves both.
    assert rows[0].bytes == 3 * 300 * 132
    assert rows[0].flop == 2 * 16 * 128 * 3 * (299 + 300)
    assert rows[0].floor == pytest.approx(rows[0].flop / 1e6)  # at one TFLOP/s the product is the longer
    assert rows[0].gbs == pytest.approx(3 * 300 * 132 / 10.0 / 1e3)


def test_blocks_are_permuted_and_lengths_are_what_they_are_called():
    for case in SMALL:
        inputs = paged.make_inputs(case, CPU)
        used = inputs.block_tables.reshape(-1)
        assert len(used.unique()) == case.batch * case.max_blocks
        assert not torch.equal(used, used.sort().values)
        assert inputs.kv_cache.shape[1:] == case.layout.block_shape
        assert bool((inputs.context_lens == case.context).all()) == (case.lengths == "equal")
        assert int(inputs.context_lens.min()) >= 1
    assert paged.POOL_BYTES > 4 * 60e6  # of the largest L2 it is several times the size


def spoil(place, value):
    def change(logits):
        logits[place] = value
        return logits

    return change


@pytest.mark.parametrize(
    ("change", "note"),
    [
        (spoil((5, 17), 1e4), "WRONG: calc_diff"),
        (spoil((0, 298), float("nan")), "WRONG: not finite inside"),
        (spoil((2, 0), float("-inf")), "WRONG: not finite inside"),
        (lambda logits: logits[:, :-1], "WRONG: shape [6, 299]"),
        (lambda logits: logits * 1.01, "WRONG: calc_diff"),
    ],
)
def test_a_wrong_peer_is_not_timed(timed, change, note):
    [_, row] = run([Scripted(change)], cases=SMALL[:1])
    assert row.note.startswith(note)
    assert row.median is None
    assert len(timed) == 1


def test_what_lies_behind_a_length_is_free(timed):
    """Row 0 of the first case sees 299 of 300 positions."""
    [_, row] = run([Scripted(spoil((0, 299), float("nan")))], cases=SMALL[:1])
    assert row.note == ""
    assert row.median


def test_a_wrong_backend_is_not_timed(timed, monkeypatch):
    monkeypatch.setattr(paged, "fp8_paged_mqa_logits", lambda *inputs, layout, backend, **_: torch.zeros(6, inputs[-1]))
    [row] = run(cases=SMALL[:1])
    assert row.note.startswith("WRONG: calc_diff")
    assert timed == []


def test_what_cannot_run_says_so(timed, monkeypatch):
    class Broken(Scripted):
        def prepare(self, inputs):
            raise RuntimeError("no kernel image\nmore")

    rows = run([Broken(None)], backends=("cuda-sm90",), cases=SMALL[:1])
    assert rows[1].note == "does not run: no kernel image"
    assert rows[0].note
    monkeypatch.setattr(paged, "no_room", lambda needed, device: "needs more")
    assert [row.note for row in run(cases=SMALL[:1])] == ["needs more"]
    assert timed == []


# DeepGEMM's forms, with a module that records


def forms():
    def newest(q, kv_cache, weights, context_lens, block_table, schedule_meta, max_context_len):
        return "newest", q, context_lens, schedule_meta, max_context_len

    def repository(q, kv_cache, weights, context_lens, block_table, schedule_meta, max_context_len, clean_logits):
        return "repository", q, context_lens, schedule_meta, max_context_len

    def first(q, kv_cache, weights, context_lens, block_table, schedule_meta, max_context_len, clean_logits=False):
        return "first", (q, None), context_lens, schedule_meta, max_context_len

    return {
        "newest": {"fp8_fp4_paged_mqa_logits": newest},
        "repository": {"fp8_fp4_paged_mqa_logits": repository},
        "first": {"fp8_paged_mqa_logits": first},
    }


@pytest.mark.parametrize("form", forms())
def test_each_form_of_deep_gemm_gets_lengths_of_rows_and_its_schedule(form, monkeypatch):
    schedules, functions = [], forms()[form]

    def metadata(lengths, page, count):
        schedules.append((lengths.tolist(), page, count))
        return "schedule"

    module = SimpleNamespace(__name__="deep_gemm", get_paged_mqa_logits_metadata=metadata, **functions)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(multi_processor_count=132))
    inputs = paged.make_inputs(SMALL[0], CPU)._replace(context_lens=torch.tensor([300, 1, 0], dtype=torch.int32))
    expected = [[299, 300], [0, 1], [0, 0]]
    for scheduled in (False, True):
        schedules.clear()
        call = paged_peers.DeepGemm(module, scheduled).prepare(inputs)
        found = [call(), call()][1]
        assert (found[0], found[1][0] is inputs.q, found[1][1]) == (form, True, None)
        assert (found[2].tolist(), found[2].dtype, *found[3:]) == (expected, torch.int32, "schedule", 300)
        assert schedules == [(expected, 64, 132)] * (2 if scheduled else 1)
    assert paged_peers.DeepGemm(module, True).supports(16, 128, 64, 1) == "H 32 and 64 only"


def test_peers_that_cannot_be_imported_are_named():
    assert paged_peers.find(CPU) == ([], ["deep_gemm: GPU only"])
    found, absent = paged_peers.find(torch.device("cuda"))
    assert found == []
    assert [line.split(":")[0] for line in absent] == ["deep_gemm"]


# Reports

FACTS = {"device": "one", "arch": "sm90"}
CEILINGS = Ceilings("fp8", 1000.0, 4000.0)


def row(case, name, time, note=""):
    return Row(case, name, 4_000_000, 8_000_000, 1.0, time, time, time, 1.0, 2.0, 2**20, note)


ROWS = [
    row(Case(64, 1, 1000, 64), "ours", 10.0), row(Case(64, 1, 1000, 64), "deep_gemm", 20.0),
    row(Case(64, 2, 1000, 64), "ours", 20.0), row(Case(64, 2, 1000, 64), "deep_gemm", 10.0),
    row(Case(64, 6, 1000, 16), "ours", 20.0), row(Case(64, 6, 1000, 16), "deep_gemm", None, "H 32 and 64 only"),
]  # fmt: skip


def test_reports_hold_the_numbers(tmp_path):
    summaries = report.summarise(ROWS, ["ours"], paged_report.GROUPS)
    assert {(s.group, s.cases, s.geomean) for s in summaries} == {
        ("next_n 1", 1, 2.0), ("next_n 2", 1, 0.5), ("all", 2, 1.0),
    }  # fmt: skip
    text = paged_report.markdown(ROWS, ["ours"], summaries, CEILINGS, FACTS, ["a note"], "the command")
    assert "| B=64 next_n=1 1000 H=64 | 1.0 | 10.0 | 20.0 | deep_gemm | 2.00x |" in text
    assert "| 64 | 1 | 1000 | 64 | 128 | 64 | equal | ours | 10.0 | 10.0-10.0 | 1.0 | 400 | 10% | 0.8 | 1 |" in text
    assert "| H 32 and 64 only |" in text
    assert "Repeat with: `the command`" in text
    paths = paged_report.write(tmp_path, text, ROWS, summaries, CEILINGS, FACTS)
    assert [path.name for path in paths] == [f"bench-fp8_paged_mqa_logits.{kind}" for kind in ("md", "csv", "json")]
    with paths[1].open(newline="") as file:
        assert [record["contender"] for record in csv.DictReader(file)] == [row.contender for row in ROWS]
    document = json.loads(paths[2].read_text())
    assert [(r["batch"], r["next_n"], r["median_us"]) for r in document["rows"]] == [
        (row.case.batch, row.case.next_n, row.median) for row in ROWS
    ]
    assert document["ceilings"]["copy_gbs"] == 4000.0


# The command


def invoke(*arguments):
    operation = () if "--operation" in arguments else ("--operation", "fp8_paged_mqa_logits")
    return CliRunner().invoke(cli.app, ["bench", *operation, "--device", "cpu", "--budget-ms", "1", *arguments])


def test_the_command(tmp_path):
    result = invoke(
        "--shapes", "2x1x300,3x2x100", "--heads", "8,16", "--lengths", "equal,ragged", "--backend", OURS,
        "--results", str(tmp_path),
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    assert (tmp_path / "bench-fp8_paged_mqa_logits.md").read_text() in result.output
    rows = json.loads((tmp_path / "bench-fp8_paged_mqa_logits.json").read_text())["rows"]
    assert len(rows) == 2 * 2 * 2
    assert all(row["median_us"] > 0 and row["gbs"] > 0 and row["floor_us"] > 0 for row in rows)


def test_the_command_runs_its_own_shapes_and_fails_where_a_backend_is_wrong(tmp_path, monkeypatch):
    asked = []

    def planned(plan, peers, device):
        asked.append(plan.cases)
        return [row(Case(64, 1, 1000, 64), OURS, None, "WRONG: shape")]

    monkeypatch.setattr(paged, "run", planned)
    for arguments, sizes in (((), paged.CPU), (("--shapes", "prediction"), paged.PREDICTION)):
        assert invoke(*arguments, "--heads", "64", "--results", str(tmp_path)).exit_code == 1
        assert asked.pop() == tuple(Case(*size, 64) for size in sizes)
    assert len(paged.DECODE) == 14


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--k", "5"), "--k: fp8_paged_mqa_logits has no such option"),
        (("--windows", "causal"), "--window: fp8_paged_mqa_logits has no such option"),
        (("--tune",), "--tune: fp8_paged_mqa_logits has no such option"),
        (("--shapes", "8x8"), "--shape: got '8x8', expected BxNEXT_NxCONTEXT like 64x1x32768"),
        (("--shapes", "8x0x8"), "--shape: got '8x0x8'"),
        (("--lengths", "zeros"), "--length: got 'zeros', expected one of equal, ragged"),
        (("--operation", "top_k_per_row", "--lengths", "equal"), "--length: top_k_per_row has no such option"),
    ],
)
def test_bad_options(arguments, message):
    result = invoke(*arguments)
    assert result.exit_code == 2
    assert message in " ".join(result.output.replace("│", " ").split())
