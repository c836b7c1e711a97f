"""``bench``: what is measured and what is refused. No test here is about speed."""

from __future__ import annotations

import math
import re

import pytest
import torch

from faulty import FaultyBackend, honest, install, one_percent_high
from helpers import CPU
from lightning_indexer import reference_logits
from lightning_indexer.bench import peers, sweep, timing
from lightning_indexer.bench.sweep import Plan
from lightning_indexer.bench.timing import Ceilings, Timing
from lightning_indexer.check import memory

GPU = torch.device("cuda")
S_Q, S_K, HEADS, HEAD_DIM = 16, 64, 8, 32
# Row i of a causal window sees the 48 keys before the chunk and i + 1 of its own.
POSITIONS = sum(48 + i + 1 for i in range(16))
# Two float32 sums in different orders.
ORACLE_DIFF = 1e-12
# The kernel counts resident pages per core and adds them up late; other threads may allocate too.
RESIDENT_SIZE_ERROR = 2**23


def plan_of(*forms: str, backends=("torch-blocked",), windows=("causal",), shapes=((S_Q, S_K),)) -> Plan:
    return Plan(shapes, (HEADS,), HEAD_DIM, windows, forms, backends, budget_ms=0.1)


class FakePeer:
    """Returns the right [M, N] result, changed by ``change``; counts its calls."""

    name = "fake"
    note = "a fake"

    def __init__(self, change=lambda logits: logits, reason: str | None = None) -> None:
        self.change, self.reason, self.calls = change, reason, 0

    def supports(self, case, device):
        return self.reason

    def prepare(self, case, inputs, ks, ke, max_seqlen_k):
        right = reference_logits(inputs.q_fp8, (inputs.k_fp8, inputs.kv_scale), inputs.weights, ks, ke)

        def call():
            self.calls += 1
            return self.change(right.clone())

        return call


# What is measured


def test_every_contender_gets_a_row_per_case():
    rows = list(sweep.run(plan_of("clean", "noclean", "compressed"), [peers.Einsum()], CPU))
    assert [(row.case.form, row.contender) for row in rows] == [
        (form, contender) for form in ("clean", "noclean", "compressed") for contender in ("torch-blocked", "einsum")
    ]
    assert {row.case.window for row in rows} == {"causal"}
    *measured, refused = rows
    for row in measured:
        assert row.note == ""
        assert 0 < row.p20 <= row.median <= row.p80
        assert row.host == 0.0
        assert abs(row.diff) < ORACLE_DIFF
        assert row.tflops == pytest.approx(row.flop / (row.median * 1e-6) / 1e12)
        assert row.gbs == pytest.approx(row.bytes / (row.median * 1e-6) / 1e9)
    assert refused.note == "no compressed form"
    assert refused.median is refused.p20 is refused.tflops is refused.gbs is refused.diff is None


def test_work_is_counted_from_the_windows():
    rows = list(sweep.run(plan_of("clean", "noclean", "compressed"), [], CPU))
    read = S_Q * HEADS * HEAD_DIM + S_K * HEAD_DIM + 4 * S_K + 4 * S_Q * HEADS + 2 * 4 * S_Q
    for row in rows:
        assert row.positions == POSITIONS
        assert row.flop == 2 * HEADS * HEAD_DIM * POSITIONS
        assert row.bytes == read + 4 * (S_Q * S_K if row.case.form == "clean" else POSITIONS)


def test_a_case_that_backends_refuse_has_their_reason(monkeypatch):
    name = install(monkeypatch, FaultyBackend(honest, lambda problem: f"not H={problem.heads}"))
    [row] = sweep.run(plan_of("clean", backends=(name,)), [], CPU)
    assert (row.contender, row.note, row.median) == (name, "not H=8", None)


def test_plans_list_their_cases():
    plan = Plan(((4, 8), (3, 8)), (8, 16), 32, ("causal", "cp"), ("clean", "noclean"), ("torch-blocked",))
    cases = plan.cases()
    assert len(cases) == len(set(cases)) == 2 * 2 * 3
    assert {(case.heads, case.window, case.s_q) for case in cases} == {
        (heads, window, s_q) for heads in (8, 16) for window, s_q in (("causal", 4), ("causal", 3), ("cp", 4))
    }
    assert plan.left_out() == ["cp at 3x8, which needs s_k a multiple of an even s_q"]


# What is refused


def set_last_row(value: float):
    def change(logits):
        logits[-1, 3] = value
        return logits

    return change


@pytest.mark.parametrize(
    ("change", "note"),
    [
        (lambda logits: logits * 1.01, "WRONG: calc_diff 5.0e-05, allowed 5e-06"),
        (lambda logits: logits.masked_fill(logits.isneginf(), 0.0), "WRONG: -inf mask differs"),
        (set_last_row(-math.inf), "WRONG: -inf mask differs"),
        (set_last_row(math.nan), "WRONG: calc_diff nan, allowed 5e-06"),
        (set_last_row(math.inf), "WRONG: calc_diff nan, allowed 5e-06"),
        (lambda logits: logits[:, :-1], "WRONG: shape [16, 63]"),
    ],
    ids=["values", "no mask", "one -inf", "one NaN", "one inf", "shape"],
)
def test_a_wrong_result_is_never_timed(change, note):
    peer = FakePeer(change)
    [row] = sweep.run(plan_of("clean", backends=()), [peer], CPU)
    assert row.note == note
    assert row.median is row.p20 is row.p80 is row.host is row.tflops is None
    assert peer.calls == 1


@pytest.mark.parametrize("form", ["noclean", "compressed"])
def test_wrong_values_of_the_other_forms(monkeypatch, form):
    name = install(monkeypatch, FaultyBackend(one_percent_high))
    wrong, right = sweep.run(plan_of(form, backends=(name, "torch-blocked"), windows=("misaligned",)), [], CPU)
    assert wrong.note.startswith("WRONG: calc_diff")
    assert wrong.median is None
    assert right.note == ""


def test_only_the_windows_count_without_clean():
    peer = FakePeer(lambda logits: logits.masked_fill(logits.isneginf(), math.nan))
    [row] = sweep.run(plan_of("noclean", backends=()), [peer], CPU)
    assert row.note == ""
    assert row.median is not None


def test_the_last_of_many_rows_is_checked():
    peer = FakePeer(set_last_row(1e3))
    [row] = sweep.run(plan_of("clean", backends=(), shapes=((602, 640),)), [peer], CPU)
    assert row.note.startswith("WRONG")
    assert sweep.REFCHECK_ROWS < 602, "a sample, or the test shows nothing"


def test_a_peer_that_cannot_is_not_called():
    peer = FakePeer(reason="needs another GPU")
    [row] = sweep.run(plan_of("clean", backends=()), [peer], CPU)
    assert row.note == "needs another GPU"
    assert peer.calls == 0


def test_no_memory_no_call(monkeypatch):
    monkeypatch.setattr(memory, "available_bytes", lambda device: 1000)
    peer = FakePeer()
    rows = list(sweep.run(plan_of("clean"), [peer], CPU))
    assert [re.sub(r"[\d.]+", "#", row.note) for row in rows] == ["needs # GiB, # GiB are free"] * 2
    assert peer.calls == 0


# Timing


@pytest.mark.parametrize("budget_ms", [0.0, 2.0])
def test_timing_on_a_cpu(budget_ms):
    calls = []
    result = timing.measure(lambda: calls.append(1), CPU, budget_ms)
    assert 0 <= result.p20 <= result.median <= result.p80
    assert result.runs >= 3
    assert len(calls) == result.runs + 2, "one to warm up, one for the memory"
    assert result.host == 0.0


def test_percentiles(monkeypatch):
    monkeypatch.setattr(timing, "_cpu_times", lambda call, budget: [float(t) for t in (9, 1, 5, 7, 3, 10, 2, 6, 4, 8)])
    result = timing.measure(lambda: None, CPU)
    assert (result.median, result.p20, result.p80, result.runs) == (5.5, 3.0, 8.0, 10)


def test_memory_of_a_call():
    kept = []
    large = timing.measure(lambda: kept.append(torch.ones(2**24)), CPU, 0.0).extra_bytes
    small = timing.measure(lambda: None, CPU, 0.0).extra_bytes
    assert (large is None) == (small is None)
    if large is not None:
        assert abs(large - 2**26) < RESIDENT_SIZE_ERROR
        assert small < RESIDENT_SIZE_ERROR


def test_ceilings_count_products_and_bytes(monkeypatch):
    monkeypatch.setattr(timing, "measure", lambda call, device: Timing(1000.0, 900.0, 1100.0, 0.0, 3, None))
    assert timing.ceilings(CPU) == Ceilings("float32", 2 * 2048**3 / 1e-3 / 1e12, 2 * 4 * 2**25 / 1e-3 / 1e9)
