"""``bench --operation fp8_mqa_topk``: what is timed, what is not, and that reports say it. No test is about speed."""

from __future__ import annotations

import json

import pytest
import torch
from typer.testing import CliRunner

from helpers import CPU
from lightning_indexer import fp8_mqa_logits
from lightning_indexer.bench import mqa_topk, top_k_peers
from lightning_indexer.bench.mqa_topk import TWO, Case, Plan
from lightning_indexer.bench.timing import Timing
from lightning_indexer.cli import app as cli

CASES = (Case(9, 300, 32, 20), Case(12, 320, 8, 20, "multi_req"))
OURS = "torch-blocked"


class Scoring:
    """A peer that scores in DeepGEMM's forms."""

    name, note = "scoring", "for tests"

    def __init__(self, compressed_only=False, change=lambda logits: logits):
        self.compressed_only, self.change = compressed_only, change

    def supports(self, case, device):
        return None

    def prepare(self, case, inputs, ks, ke, max_seqlen_k):
        return lambda: self.change(fp8_mqa_logits(
            inputs.q_fp8, (inputs.k_fp8, inputs.kv_scale), inputs.weights, ks, ke, clean_logits=case.form == "clean",
            max_seqlen_k=max_seqlen_k,
        ))  # fmt: skip


@pytest.fixture
def timed(monkeypatch):
    calls = []

    def measure(call, device, budget_ms):
        call()
        calls.append(call)
        return Timing(10.0 * len(calls), 1.0, 2.0, 0.0, 3, None, 4.0)

    monkeypatch.setattr(mqa_topk, "measure", measure)
    return calls


def run(scoring=None):
    return list(mqa_topk.run(Plan(CASES, (OURS,), 1.0), scoring, [top_k_peers.TorchTopK()], CPU))


def test_ours_by_one_call_and_by_two_and_a_peer(timed):
    rows = run(Scoring())
    names = [OURS, TWO + OURS, "scoring + torch.topk"]
    assert [row.contender for row in rows] == names * 2 == mqa_topk.contenders(
        Plan(CASES, (OURS,)), Scoring(), [top_k_peers.TorchTopK()]
    ) * 2  # fmt: skip
    assert [row.note for row in rows] == [""] * 6
    assert all(row.median and row.floor for row in rows)
    assert len(timed) == 2 * 4


def test_what_is_wrong_is_not_timed(timed, monkeypatch):
    [*_, peer] = run(Scoring(change=lambda logits: -logits))
    assert peer.note.startswith("WRONG: shares ")
    assert peer.median is None
    [*_, peer] = run(Scoring(compressed_only=True))
    assert peer.note == "needs -inf outside the windows"
    monkeypatch.setattr(mqa_topk, "fp8_mqa_topk", lambda *_, **options: torch.zeros_like(options["out"]))
    assert run()[0].note == "WRONG: not what two calls select"


def test_what_does_not_fit_is_left_out(timed, monkeypatch):
    monkeypatch.setattr(mqa_topk, "no_room", lambda needed, device: "needs more")
    assert {row.note for row in run()} == {"needs more"}
    assert timed == []


def test_command(timed, tmp_path):
    arguments = ["bench", "--operation", "fp8_mqa_topk", "--device", "cpu", "--shapes", "9x300", "--heads", "32",
                 "--k", "20", "--backend", OURS, "--results", str(tmp_path)]  # fmt: skip
    done = CliRunner().invoke(cli.app, arguments)
    assert done.exit_code == 0, done.output
    assert "(9, 300) H=32 causal k=20" in done.output
    written = json.loads((tmp_path / "bench-fp8_mqa_topk.json").read_text())
    assert OURS in str(written)
    refused = CliRunner().invoke(cli.app, [*arguments, "--forms", "clean"])
    assert refused.exit_code == 2
