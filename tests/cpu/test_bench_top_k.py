"""``bench --operation top_k_per_row``: what is timed, what is not, and that reports say it. No test is about speed."""

from __future__ import annotations

import csv
import json
from dataclasses import replace

import pytest
import torch
from typer.testing import CliRunner

from helpers import CPU
from lightning_indexer.bench import overview, report, top_k, top_k_peers, top_k_report
from lightning_indexer.bench.timing import Timing
from lightning_indexer.bench.top_k import Case, Plan, Row
from lightning_indexer.cli import app as cli
from lightning_indexer.problems.top_k import reference_top_k

SMALL = (
    Case(7, 300, 20), Case(8, 256, 20, "packed"), Case(5, 200, 40, "whole", ties=True), Case(30, 30, 20),
    Case(3, 10, 16),
)  # fmt: skip
OURS = "torch-blocked"


@pytest.fixture
def timed(monkeypatch):
    """The calls that are timed, in order, in place of their times."""
    calls = []

    def measure(call, device, budget_ms):
        calls.append(call)
        return Timing(10.0 * len(calls), 1.0, 2.0, 0.0, 3, None, 4.0)

    monkeypatch.setattr(top_k, "measure", measure)
    return calls


def run(cases=SMALL, backends=(OURS,), peers=None):
    found = [top_k_peers.TorchTopK()] if peers is None else peers
    return list(top_k.run(Plan(tuple(cases), backends, 1.0), found, CPU))


class Scripted:
    """A peer that gives what ``spoil`` makes of the right answer."""

    note = "for tests"

    def __init__(self, change, name="scripted", spoils=False):
        self.change, self.name, self.spoils = change, name, spoils

    def supports(self, k, whole, device):
        return None

    def prepare(self, inputs):
        indices, _ = reference_top_k(*inputs[:1], inputs.k, inputs.starts, inputs.ends)
        return top_k_peers.Prepared(lambda: None, lambda: self.change(indices.clone(), inputs))


# What is measured


@pytest.mark.parametrize("case", SMALL, ids=str)
def test_logits_are_minus_infinity_outside_the_windows_alone(case):
    inputs = top_k.make_inputs(case, CPU)
    position = torch.arange(case.width)
    inside = (position >= inputs.starts[:, None]) & (position < inputs.ends[:, None])
    assert inputs.logits.shape == inside.shape
    assert torch.equal(torch.isfinite(inputs.logits), inside)
    assert bool(torch.isneginf(inputs.logits[~inside]).all())
    assert inputs.starts.dtype == inputs.ends.dtype == torch.int32
    if case.ties:
        assert torch.equal(inputs.logits, inputs.logits.bfloat16().float())
    if case.window == "whole":
        assert bool(inside.all())
    if case.window == "packed":
        assert len(inputs.starts.unique()) == 4


def test_every_case_has_a_row_of_every_contender(timed):
    rows = run()
    assert [(row.case, row.contender) for row in rows] == [(c, n) for c in SMALL for n in (OURS, "torch.topk")]
    assert all(row.median and row.floor and not row.note for row in rows)
    assert len(timed) == 3 * len(SMALL)  # with the floor
    assert rows[0].bytes == 4 * sum(range(294, 301)) + 4 * 7 * 20


def test_a_wrong_backend_is_not_timed(timed, monkeypatch):
    def one_off(logits, k, starts, ends, *, out, backend):
        indices, _ = reference_top_k(logits, k, starts, ends)
        out.copy_(indices)
        out[-1, 0] = 0 if int(out[-1, 0]) else 1  # one index of one row
        return out

    monkeypatch.setattr(top_k, "top_k_per_row", one_off)
    rows = run(SMALL[:1])
    assert [row.note for row in rows] == ["WRONG: 1 rows differ", ""]
    assert rows[0].median is None
    assert len(timed) == 2


def test_a_slot_that_is_not_written_is_wrong(timed, monkeypatch):
    """Also where -1 or zero would have been right."""
    monkeypatch.setattr(top_k, "top_k_per_row", lambda *_, out, **__: out)
    assert [row.note for row in run(SMALL[-1:], peers=[])] == ["WRONG: 3 rows differ"]


def duplicate(indices, inputs):
    indices[2, 0] = indices[2, 1]
    return indices


def worse(indices, inputs):
    others = set(range(int(inputs.ends[0]))) - set(indices[0].tolist())
    indices[0, 0] = min(others)
    return indices


def outside(indices, inputs):
    indices[1, 3] = int(inputs.ends[1] - inputs.starts[1])
    return indices


def left_out(indices, inputs):
    indices[4, 5] = -1
    return indices


def unwritten(indices, inputs):
    indices[4, 5] = -5
    return indices


@pytest.mark.parametrize(
    ("change", "note"),
    [
        (duplicate, "1 rows repeat an index"),
        (worse, "1 rows differ"),
        (outside, "1 rows select outside the window"),
        (left_out, "1 rows differ"),
        (unwritten, "1 rows select outside the window"),
        (lambda indices, inputs: indices[:, :-1], "shape [7, 19]"),
    ],
)
def test_a_wrong_peer_is_not_timed(timed, change, note):
    [_, row] = run(SMALL[:1], peers=[Scripted(change)])
    assert row.note == f"WRONG: {note}"
    assert row.median is None
    assert len(timed) == 2


def test_peers_are_free_in_order_and_ties(timed):
    def other(indices, inputs):
        """Among equal scores the largest index, and the row backwards."""
        found, _ = reference_top_k(*inputs[:1], inputs.k, inputs.starts, inputs.ends, tie="larger")
        return found.flip(1)

    rows = run(SMALL, backends=(), peers=[Scripted(other)])
    assert [row.note for row in rows] == [""] * len(SMALL)
    assert not torch.equal(
        *(reference_top_k(top_k.make_inputs(SMALL[2], CPU).logits, 40, tie=tie)[0] for tie in ("smaller", "larger"))
    )


def test_a_peer_that_spoils_the_logits_is_last_and_on_a_copy(timed):
    seen = {}

    def spoil(indices, inputs):
        seen["strides"] = inputs.logits.stride()
        inputs.logits.as_strided((1,), (1,), inputs.logits.storage_offset() - 3).fill_(9.0)  # before the first row
        inputs.logits.fill_(float("nan"))
        return indices

    def read(indices, inputs):
        assert not bool(inputs.logits.isnan().any())
        seen["expected"] = inputs.logits.stride()
        return indices

    rows = run(SMALL[:2], peers=[Scripted(spoil, "spoils", True), Scripted(read, "reads")])
    assert [row.contender for row in rows[:3]] == [OURS, "reads", "spoils"]
    assert [row.note for row in rows] == [""] * 6
    assert seen["strides"] == seen["expected"]


def test_what_cannot_run_says_so(timed, monkeypatch):
    def broken(inputs):
        raise RuntimeError("no kernel image\nmore")

    peer = Scripted(None, "broken")
    peer.prepare = broken
    rows = run(SMALL[:1], backends=("cuda-sm90",), peers=[peer])
    assert "needs sm90" in rows[0].note
    assert rows[1].note == "does not run: no kernel image"
    monkeypatch.setattr(top_k, "no_room", lambda needed, device: "needs more")
    assert [row.note for row in run(SMALL[:1])] == ["needs more", "needs more"]
    assert len(timed) == 1  # the floor


def test_peers_that_cannot_be_imported_are_named(monkeypatch):
    assert [peer.name for peer in top_k_peers.find(CPU)[0]] == ["torch.topk"]
    found, absent = top_k_peers.find(torch.device("cuda"))
    assert [peer.name for peer in found] == ["torch.topk"]
    assert [line.split(":")[0] for line in absent] == ["topk_peers", "vllm._C", "sgl_kernel"]


def test_the_bench_has_the_shapes_that_are_published():
    assert {(c.rows, c.width) for c in top_k.PREFILL} >= {(4096, 32768), (1024, 131072), (8192, 8192), (64, 1 << 20)}
    assert len(top_k.DECODE) == 12
    assert [(c.rows, c.width, c.k) for c in top_k.CPU] == [(1024, 32768, 2048), (64, 131072, 2048)]


# Reports


def rows_of(case, floor, **times):
    return [
        Row(case, name.replace("_", "-"), 4000, floor, time, time, time, 1.0, 2.0, 2**20, "" if time else "WRONG: x")
        for name, time in times.items()
    ]


ROWS = [
    *rows_of(Case(64, 1000), 5.0, ours=10.0, fast=20.0, slow=50.0),
    *rows_of(Case(64, 2000, window="whole"), 6.0, ours=10.0, fast=80.0, slow=45.0),
    *rows_of(Case(64, 3000), 7.0, ours=None, fast=30.0, slow=50.0),
    *rows_of(Case(64, 4000), 8.0, ours=9.0, fast=None, slow=None),
]
FACTS = {"device": "one", "arch": "sm90"}


def test_the_overview_has_a_line_a_case_and_the_best_peer():
    header, _, *body = [[c.strip() for c in line.strip("|").split("|")] for line in overview.overview(ROWS, ["ours"])]
    assert header == ["case", "floor", "ours", "fast", "slow", "best peer", "best peer / ours"]
    assert body == [
        ["64 x 1000 causal k=2048", "5.0", "10.0", "20.0", "50.0", "fast", "2.00x"],
        ["64 x 2000 whole k=2048", "6.0", "10.0", "80.0", "45.0", "slow", "4.50x"],
        ["64 x 3000 causal k=2048", "7.0", "wrong", "30.0", "50.0", "fast", "-"],
        ["64 x 4000 causal k=2048", "8.0", "9.0", "wrong", "wrong", "-", "-"],
        ["geomean", "", "", "", "", "", "3.00x"],
    ]


def test_reports_hold_the_numbers(tmp_path):
    summaries = report.summarise(ROWS, ["ours"], top_k_report.GROUPS)
    assert {(s.other, s.group, s.cases, round(s.geomean, 3)) for s in summaries} == {
        ("fast", "prefill", 1, 2.0), ("fast", "whole rows", 1, 8.0), ("fast", "all", 2, 4.0),
        ("slow", "prefill", 1, 5.0), ("slow", "whole rows", 1, 4.5), ("slow", "all", 2, round((5 * 4.5) ** 0.5, 3)),
    }  # fmt: skip
    text = top_k_report.markdown(ROWS, ["ours"], summaries, FACTS, ["a note"], "the command")
    assert "| 64 | 1000 | 2048 | causal |  | ours | 10.0 | 10.0-10.0 | 1.0 | 2.00x | 0.4 | 1 |" in text
    assert "| host us |" in text
    assert "- a note" in text
    assert "Repeat with: `the command`" in text
    assert "| cpu us |" in top_k_report.markdown(ROWS, ["ours"], [], {**FACTS, "arch": "cpu"}, [], "")
    paths = top_k_report.write(tmp_path, text, ROWS, summaries, FACTS)
    assert [path.name for path in paths] == [f"bench-top_k_per_row.{kind}" for kind in ("md", "csv", "json")]
    with paths[1].open(newline="") as file:
        assert [row["contender"] for row in csv.DictReader(file)] == [row.contender for row in ROWS]
    document = json.loads(paths[2].read_text())
    assert [(r["rows"], r["width"], r["contender"], r["median_us"], r["floor_us"]) for r in document["rows"]] == [
        (row.case.rows, row.case.width, row.contender, row.median, row.floor) for row in ROWS
    ]
    assert document["rows"][6]["note"] == "WRONG: x"
    assert document["environment"] == FACTS


def test_a_run_without_peers_has_a_report():
    alone = [row for row in ROWS if row.contender == "ours"]
    assert "| geomean |  |  |  | - |" in overview.overview(alone, ["ours"])


# The command


def invoke(*arguments):
    operation = () if "--operation" in arguments else ("--operation", "top_k_per_row")
    return CliRunner().invoke(cli.app, ["bench", *operation, "--device", "cpu", "--budget-ms", "1", *arguments])


def test_the_command(tmp_path):
    arguments = ("--shapes", "9x300,4x500", "--k", "16,32", "--windows", "causal,whole", "--backend", OURS)
    result = invoke(*arguments, "--results", str(tmp_path))
    assert result.exit_code == 0, result.output
    written = (tmp_path / "bench-top_k_per_row.md").read_text()
    assert written in result.output
    rows = json.loads((tmp_path / "bench-top_k_per_row.json").read_text())["rows"]
    assert len(rows) == 2 * 2 * 2 * 2
    assert {row["contender"] for row in rows} == {OURS, "torch.topk"}
    assert all(row["median_us"] > 0 and row["cpu_us"] > 0 and row["floor_us"] > 0 for row in rows)
    assert "not measured: flashinfer, sglang, vllm: GPU only" in written


def test_the_command_runs_its_own_shapes_and_fails_where_a_backend_is_wrong(tmp_path, monkeypatch):
    asked = []

    def planned(plan, peers, device):
        asked.append((plan, peers))
        return [replace(ROWS[0], contender=OURS, median=None, note="WRONG: 1 rows differ")]

    monkeypatch.setattr(top_k, "run", planned)
    for arguments, cases in ((("--no-peers",), top_k.CPU), (("--shapes", "decode"), top_k.DECODE)):
        result = invoke(*arguments, "--results", str(tmp_path))
        assert result.exit_code == 1
        assert asked.pop()[0].cases == cases
    assert asked == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--heads", "32"), "--heads: top_k_per_row has no such option"),
        (("--forms", "clean"), "--form: top_k_per_row has no such option"),
        (("--tune",), "--tune: top_k_per_row has no such option"),
        (("--k", "16"), "--k: goes with --shape ROWSxWIDTH"),
        (("--shapes", "decode", "--windows", "causal"), "--window: goes with --shape ROWSxWIDTH"),
        (("--shapes", "8x8", "--k", "5000"), "--k: got 5000, expected 1 to 4096"),
        (("--shapes", "8x8", "--windows", "cp"), "--window: got 'cp', expected one of causal, packed, whole"),
        (("--operation", "fp8_mqa_logits", "--k", "5"), "--k: fp8_mqa_logits has no such option"),
        (
            ("--operation", "sort"),
            "got 'sort', expected one of fp8_mqa_logits, fp8_paged_mqa_logits, top_k_per_row",
        ),
    ],
)
def test_bad_options(arguments, message):
    result = invoke(*arguments)
    assert result.exit_code == 2
    assert message in " ".join(result.output.replace("│", " ").split())
