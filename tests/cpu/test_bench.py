"""``bench``: what is measured, what is refused, and that reports say what was measured. No test here is about speed."""

from __future__ import annotations

import csv
import json
import math
import re
import subprocess
from types import ModuleType

import pytest
import torch

from faulty import FaultyBackend, honest, install, one_percent_high
from helpers import CPU
from lightning_indexer import calc_diff, reference_logits
from lightning_indexer.bench import environment, peers, plots, report, sweep, timing
from lightning_indexer.bench.report import Summary
from lightning_indexer.bench.sweep import Plan, Row
from lightning_indexer.bench.timing import Ceilings, Timing
from lightning_indexer.check import memory
from lightning_indexer.check.cases import Case, make_inputs, make_windows

GPU = torch.device("cuda")
S_Q, S_K, HEADS, HEAD_DIM = 16, 64, 8, 32
# Row i of a causal window sees the 48 keys before the chunk and i + 1 of its own.
POSITIONS = sum(48 + i + 1 for i in range(16))
CEILINGS = Ceilings("float32", 0.5, 20.0)
PNG = b"\x89PNG\r\n\x1a\n"
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


def row_of(contender, median, window="causal", form="clean", heads=64, s_q=1024, diff=1e-7, note="") -> Row:
    """A row of a report, made by hand."""
    case = Case(s_q, 4096, heads, 128, window, form)
    work = {"positions": 1000, "flop": 16_384_000, "bytes": 500_000}
    if median is None:
        return Row(case, contender, **work, diff=diff, note=note)
    return Row(case, contender, **work, median=median, p20=0.9 * median, p80=1.2 * median, host=3.0,
               extra_bytes=2**21, diff=diff)  # fmt: skip


ROWS = [
    row_of("ours", 10.0), row_of("theirs", 20.0),
    row_of("ours", 20.0, form="noclean"), row_of("theirs", 10.0, form="noclean"),
    row_of("ours", 40.0, window="multi_req"), row_of("theirs", 160.0, window="multi_req"),
    row_of("ours", 5.0, form="compressed"), row_of("theirs", None, form="compressed", diff=None, note="no such form"),
    row_of("ours", None, s_q=7, diff=math.nan, note="WRONG: -inf mask differs"), row_of("theirs", 8.0, s_q=7),
]  # fmt: skip


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


# The summary


def test_speedups_pair_the_rows_of_one_case():
    pairs = report.speedups(ROWS, "ours", "theirs")
    assert [(row.case, ratio) for row, ratio in pairs] == [
        (ROWS[0].case, 2.0), (ROWS[2].case, 0.5), (ROWS[4].case, 4.0)
    ]  # fmt: skip
    assert [ratio for _, ratio in report.speedups(ROWS, "theirs", "ours")] == [0.5, 2.0, 0.25]


def test_summary_of_every_group():
    groups = {summary.group: summary for summary in report.summarise(ROWS, ["ours"], report.GROUPS)}
    assert set(groups) == {"causal", "multi_req", "clean_logits=True", "clean_logits=False", "all"}
    assert all((summary.subject, summary.other) == ("ours", "theirs") for summary in groups.values())
    found = {name: (s.cases, s.geomean, s.low, s.high, s.wins) for name, s in groups.items()}
    assert found["all"] == (3, pytest.approx(4 ** (1 / 3)), 0.5, 4.0, 2)
    assert found["causal"] == (2, pytest.approx(1.0), 0.5, 2.0, 1)
    assert found["multi_req"] == (1, pytest.approx(4.0), 4.0, 4.0, 1)
    assert found["clean_logits=True"] == (2, pytest.approx(8**0.5), 2.0, 4.0, 2)
    assert found["clean_logits=False"] == (1, pytest.approx(0.5), 0.5, 0.5, 0)


def test_equal_times_are_no_win():
    [summary] = [
        s for s in report.summarise([row_of("a", 3.0), row_of("b", 3.0)], ["a"], report.GROUPS) if s.group == "all"
    ]
    assert (summary.geomean, summary.wins) == (1.0, 0)


def test_compressed_logits_are_a_group_of_their_own():
    summaries = report.summarise(
        [row_of("a", 3.0, form="compressed"), row_of("b", 6.0, form="compressed")], ["a"], report.GROUPS
    )
    assert {summary.group for summary in summaries} == {"causal", "compressed", "all"}


def test_two_backends_are_compared_once():
    rows = [row_of(name, 1.0) for name in ("a", "b", "peer")]
    pairs = {(summary.subject, summary.other) for summary in report.summarise(rows, ["a", "b"], report.GROUPS)}
    assert pairs == {("a", "b"), ("a", "peer"), ("b", "peer")}


# The report


FACTS = {"device": "a device", "arch": "sm90", "commit": "0123456789ab"}
COLUMNS = ["window", "form", "H", "s_q", "s_k", "contender", "us", "p20-p80", "host us", "TFLOP/s", "GB/s",
           "of float32", "of copy", "extra MiB", "calc_diff"]  # fmt: skip


def tables_of(text: str) -> list[list[list[str]]]:
    """The Markdown tables of a text, as rows of cells, without the rule."""
    tables: list[list[list[str]]] = [[]]
    for line in text.splitlines():
        if line.startswith("|"):
            tables[-1].append([cell.strip() for cell in line.strip("|").split("|")])
        elif tables[-1]:
            tables.append([])
    return [table[:1] + table[2:] for table in tables if table]


def markdown(facts=FACTS) -> str:
    summaries = report.summarise(ROWS, ["ours"], report.GROUPS)
    return report.markdown(ROWS, summaries, CEILINGS, facts, ["theirs: a note"], "lightning-indexer bench --heads 64")


def test_markdown_has_every_column_and_row():
    measurements, summary = tables_of(markdown())
    assert measurements[0] == COLUMNS
    assert len(measurements) == 1 + len(ROWS)
    assert all(len(cells) == len(COLUMNS) for cells in measurements)
    # 16.384e6 FLOP in 10 us are 1.638 TFLOP/s, 3.3 times the ceiling; 500 kB are 50 GB/s.
    assert measurements[1] == ["causal", "clean", "64", "1024", "4096", "ours", "10.0", "9.0-12.0", "3", "1.638", "50",
                               "328%", "250%", "2", "1.0e-07"]  # fmt: skip
    assert measurements[8][5:8] == ["theirs", "no such form", ""]
    assert measurements[9][5:8] == ["ours", "WRONG: -inf mask differs", ""]
    assert summary[0] == ["first", "against", "group", "cases", "geomean", "range", "wins"]
    assert summary[-1] == ["ours", "theirs", "all", "3", "1.59x", "0.50x - 4.00x", "2 / 3"]


def test_markdown_says_where_it_comes_from():
    text = markdown()
    for name, value in FACTS.items():
        assert f"- {name}: {value}" in text
    assert "float32 matrix product 0.5 TFLOP/s, copy 20 GB/s" in text
    assert "- theirs: a note" in text
    assert "L2 flushed" in text
    assert "Repeat with: `lightning-indexer bench --heads 64`" in text


def test_markdown_of_a_cpu_run_claims_no_flush_and_no_host_time():
    text = markdown({**FACTS, "arch": "cpu"})
    assert "L2" not in text
    [first, *_] = tables_of(text)
    assert {cells[COLUMNS.index("host us")] for cells in first[1:]} == {""}


def test_markdown_without_opponents_has_one_table():
    text = report.markdown(ROWS[:1], [], CEILINGS, FACTS, [], "bench")
    assert len(tables_of(text)) == 1
    assert "Speedup" not in text


def expected_record(row: Row) -> dict[str, object]:
    return {
        "window": row.case.window, "form": row.case.form, "heads": row.case.heads, "head_dim": row.case.head_dim,
        "s_q": row.case.s_q, "s_k": row.case.s_k, "contender": row.contender, "median_us": row.median,
        "p20_us": row.p20, "p80_us": row.p80, "host_us": row.host, "tflops": row.tflops, "gbs": row.gbs,
        "extra_bytes": row.extra_bytes, "positions": row.positions, "flop": row.flop, "bytes": row.bytes,
        "calc_diff": None if row.diff is None or math.isnan(row.diff) else row.diff, "note": row.note,
    }  # fmt: skip


def no_constant(name: str) -> None:
    raise AssertionError(f"{name} is not JSON")


def test_files_hold_the_numbers(tmp_path):
    folder = tmp_path / "new" / "folder"
    summaries = report.summarise(ROWS, ["ours"], report.GROUPS)
    paths = report.write(folder, markdown(), ROWS, summaries, CEILINGS, FACTS)
    assert [path.name for path in paths] == ["bench.md", "bench.csv", "bench.json"]
    assert paths[0].read_text() == markdown()

    expected = [expected_record(row) for row in ROWS]
    with paths[1].open(newline="") as file:
        from_csv = list(csv.DictReader(file))
    assert from_csv == [{name: "" if v is None else str(v) for name, v in record.items()} for record in expected]

    document = json.loads(paths[2].read_text(), parse_constant=no_constant)
    assert document["rows"] == expected
    assert document["environment"] == FACTS
    assert document["ceilings"] == {"product": "float32", "product_tflops": 0.5, "copy_gbs": 20.0}
    assert [Summary(**summary) for summary in document["summary"]] == summaries


def test_files_of_a_run_without_rows(tmp_path):
    paths = report.write(tmp_path, "nothing\n", [], [], CEILINGS, FACTS)
    assert paths[1].read_text().strip() == ""
    assert json.loads(paths[2].read_text())["rows"] == []


# Pictures


@pytest.fixture
def figures(monkeypatch):
    """The figures that would have been saved."""
    from matplotlib.figure import Figure

    saved = []
    monkeypatch.setattr(Figure, "savefig", lambda self, path, **options: saved.append(self))
    return saved


@pytest.mark.slow
def test_pictures_are_written(tmp_path):
    plots.roofline(ROWS, CEILINGS, "title", tmp_path / "roofline.png")
    assert plots.speedup_bars(ROWS, "ours", ["theirs"], "title", tmp_path / "speedup.png")
    for name in ("roofline.png", "speedup.png"):
        assert (tmp_path / name).read_bytes().startswith(PNG)


def test_nothing_to_compare_leaves_no_picture(tmp_path):
    path = tmp_path / "speedup.png"
    assert not plots.speedup_bars(ROWS, "ours", ["nobody"], "title", path)
    assert not path.exists()


def test_roofline_shows_every_measurement_and_contender(figures, tmp_path):
    contenders = [f"contender {index}" for index in range(len(plots._COLOURS) + 2)]
    rows = [row_of(name, 10.0 * (1 + index)) for index, name in enumerate(contenders)]
    plots.roofline([*rows, *ROWS], CEILINGS, "title", tmp_path / "roofline.png")
    [axes] = figures[0].axes
    assert axes.get_legend_handles_labels()[1] == [*contenders, "ours", "theirs"]
    points = [tuple(point) for drawn in axes.collections for point in drawn.get_offsets().tolist()]
    assert sorted(points) == sorted((row.flop / row.bytes, row.tflops) for row in [*rows, *ROWS] if row.median)


def test_roofline_is_the_lower_of_the_two_ceilings(figures, tmp_path):
    plots.roofline(ROWS, CEILINGS, "title", tmp_path / "roofline.png")
    [line] = figures[0].axes[0].lines
    for intensity, height in zip(*line.get_data(), strict=True):
        assert height == pytest.approx(min(0.5, intensity * 20.0 / 1e3))
    assert len(set(line.get_data()[1])) == 2, "the slope, the ridge and the flat part"


def test_roofline_without_measurements(tmp_path):
    path = tmp_path / "roofline.png"
    plots.roofline([row_of("ours", None)], CEILINGS, "title", path)
    assert path.read_bytes().startswith(PNG)


def test_bars_are_the_speedups(figures, tmp_path):
    assert plots.speedup_bars(ROWS, "ours", ["theirs", "nobody"], "title", tmp_path / "speedup.png")
    [axes] = figures[0].axes
    assert [bar.get_width() for bar in axes.patches] == [2.0, 0.5, 4.0]
    assert [label.get_text() for label in axes.get_yticklabels()] == [str(ROWS[index].case) for index in (0, 2, 4)]


# Peers


FP32_CASES = {form: Case(S_Q, S_K, 64, HEAD_DIM, "causal", form) for form in ("clean", "noclean", "compressed")}


def module_with(**functions) -> ModuleType:
    module = ModuleType("deep_gemm")
    for name, function in functions.items():
        setattr(module, name, function)
    return module


def first_form(q, kv, weights, cu_seq_len_k_start, cu_seq_len_k_end, clean_logits=True, max_seqlen_k=0):
    return ("fp8_mqa_logits", q, kv, weights, cu_seq_len_k_start, cu_seq_len_k_end, clean_logits, max_seqlen_k)


def both_dtypes(q, kv, weights, cu_seq_len_k_start, cu_seq_len_k_end, clean_logits=True, max_seqlen_k=0):
    raise AssertionError("the fp8 function is there")


def compressed_only(q, kv, weights, cu_seq_len_k_start, cu_seq_len_k_end, max_seqlen_k):
    return ("fp8_fp4_mqa_logits", q, kv, weights, cu_seq_len_k_start, cu_seq_len_k_end, max_seqlen_k)


@pytest.mark.parametrize(
    "module",
    [module_with(fp8_mqa_logits=first_form), module_with(fp8_mqa_logits=first_form, fp8_fp4_mqa_logits=both_dtypes)],
    ids=["fp8 alone", "fp8 and fp4"],
)
def test_deep_gemm_of_its_own(module):
    module.__version__ = "2.5.0"
    peer = peers.DeepGemm(module)
    assert peer.note == "deep_gemm 2.5.0, all forms, -inf in a second pass"
    inputs = make_inputs(S_Q, S_K, 64, HEAD_DIM, CPU)
    ks, ke = make_windows("causal", S_Q, S_K, CPU)
    for form, case in FP32_CASES.items():
        assert peer.supports(case, GPU) is None
        width = S_K if form == "compressed" else 0
        name, q, (k, scale), weights, start, end, clean, max_seqlen_k = peer.prepare(case, inputs, ks, ke, width)()
        assert name == "fp8_mqa_logits"
        assert q is inputs.q_fp8
        assert k is inputs.k_fp8
        assert scale is inputs.kv_scale
        assert weights is inputs.weights
        assert start is ks
        assert end is ke
        assert (clean, max_seqlen_k) == (form == "clean", width)


def test_deep_gemm_as_vllm_bundles_it():
    peer = peers.DeepGemm(module_with(fp8_mqa_logits=None, fp8_fp4_mqa_logits=compressed_only))
    assert "compressed logits only" in peer.note
    for form in ("clean", "noclean"):
        assert peer.supports(FP32_CASES[form], GPU) == "compressed logits only"
    case = FP32_CASES["compressed"]
    assert peer.supports(case, GPU) is None
    inputs = make_inputs(S_Q, S_K, 64, HEAD_DIM, CPU)
    ks, ke = make_windows("causal", S_Q, S_K, CPU)
    name, (q, q_scale), (k, k_scale), weights, start, end, width = peer.prepare(case, inputs, ks, ke, 77)()
    assert name == "fp8_fp4_mqa_logits"
    assert q is inputs.q_fp8
    assert q_scale is None
    assert k is inputs.k_fp8
    assert k_scale is inputs.kv_scale
    assert weights is inputs.weights
    assert start is ks
    assert end is ke
    assert width == 77


def test_functions_of_pybind11_are_read_off_their_docstring():
    # DeepGEMM's functions are such: inspect finds no signature.
    function = torch._C._jit_get_operation
    with pytest.raises(ValueError, match="no signature"):
        peers.inspect.signature(function)
    assert peers.takes(function, "qualified_name")
    assert not peers.takes(function, "clean_logits")
    assert peers.DeepGemm(module_with(fp8_fp4_mqa_logits=function)).compressed_only


@pytest.mark.parametrize(
    "case", [Case(1, 1, 16, 128, "causal"), Case(1, 1, 64, 128, "causal", "clean", torch.bfloat16)]
)
def test_deep_gemm_says_what_it_cannot(case):
    peer = peers.DeepGemm(module_with(fp8_mqa_logits=first_form))
    assert peer.supports(case, GPU) in ("H 32 and 64 only", "float32 only here")


def test_aiter_gets_its_arguments_in_its_order():
    peer = peers.Aiter(lambda *arguments: arguments)
    inputs = make_inputs(S_Q, S_K, 64, HEAD_DIM, CPU)
    ks, ke = make_windows("causal", S_Q, S_K, CPU)
    for form in ("clean", "noclean"):
        arguments = peer.prepare(FP32_CASES[form], inputs, ks, ke, 0)()
        expected = (inputs.q_fp8, inputs.k_fp8, inputs.kv_scale, inputs.weights, ks, ke)
        assert all(got is wanted for got, wanted in zip(arguments[:-1], expected, strict=True))
        assert arguments[-1] is (form == "clean")
    assert peer.supports(FP32_CASES["compressed"], GPU) == "float32 [M, N] only"


def test_einsum_is_right_and_says_when_its_scores_do_not_fit(monkeypatch):
    case = FP32_CASES["clean"]
    inputs = make_inputs(S_Q, S_K, 64, HEAD_DIM, CPU)
    ks, ke = make_windows("misaligned", S_Q, S_K, CPU)
    logits = peers.Einsum().prepare(case, inputs, ks, ke, 0)()
    expected = reference_logits(inputs.q_fp8, (inputs.k_fp8, inputs.kv_scale), inputs.weights, ks, ke)
    assert torch.equal(logits.isneginf(), expected.isneginf())
    assert calc_diff(logits, expected, expected.isfinite()) < ORACLE_DIFF
    assert peers.Einsum().supports(case, CPU) is None
    monkeypatch.setattr(peers, "available_bytes", lambda device: 2**31)
    assert "GiB for its scores" in peers.Einsum().supports(case, CPU)


def importing(monkeypatch, present: dict[str, object]):
    """Makes exactly these modules importable for ``peers``; an exception as the value is raised."""

    def import_module(name):
        if name not in present:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name.split(".")[0])
        if isinstance(present[name], Exception):
            raise present[name]
        return present[name]

    monkeypatch.setattr(peers.importlib, "import_module", import_module)


def test_absent_peers_are_listed(monkeypatch):
    importing(monkeypatch, {})
    found, absent = peers.find(GPU)
    assert found == []
    assert absent == [
        "deep_gemm: no module deep_gemm; no module vllm",
        "aiter.ops.triton.attention.fp8_mqa_logits: no module aiter",
    ]


def test_present_peers_are_found_under_either_name(monkeypatch):
    bundled = module_with(fp8_fp4_mqa_logits=compressed_only)
    aiter = module_with(fp8_mqa_logits=first_form)
    importing(monkeypatch, {"vllm.third_party.deep_gemm": bundled, "aiter.ops.triton.fp8_mqa_logits": aiter})
    found, absent = peers.find(GPU)
    assert [peer.name for peer in found] == ["deep_gemm", "aiter"]
    assert found[0].module is bundled
    assert found[1].function is first_form
    assert absent == []


@pytest.mark.parametrize("error", [ImportError("libcuda.so.1"), OSError("libcuda.so.1"), RuntimeError("libcuda.so.1")])
def test_a_peer_that_breaks_at_import_is_listed_with_its_error(monkeypatch, error):
    importing(monkeypatch, {"deep_gemm": error})
    found, absent = peers.find(GPU)
    assert found == []
    assert absent[0] == f"deep_gemm: {type(error).__name__}: libcuda.so.1; no module vllm"


def test_a_cpu_has_one_peer():
    found, absent = peers.find(CPU)
    assert [peer.name for peer in found] == ["einsum"]
    assert absent == ["deep_gemm, aiter: GPU only"]


# The environment


def test_record_names_machine_versions_and_commit():
    facts = environment.record(CPU)
    assert list(facts)[:3] == ["device", "arch", "lightning-indexer"]
    assert facts["arch"] == "cpu"
    assert facts["torch"] == torch.__version__
    assert "threads" in facts["device"]
    assert re.fullmatch(r"[0-9a-f]{12}(-dirty)?|unknown|v?\d.*", facts["commit"])


def test_what_is_not_installed_has_no_version():
    assert environment.package_version("no-such-distribution") is None
    assert "no-such-distribution" not in environment.record(CPU)


def test_outside_a_checkout_there_is_no_commit(monkeypatch, tmp_path):
    monkeypatch.setattr(environment, "__file__", str(tmp_path / "environment.py"))
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert environment.commit() is None
    assert environment.record(CPU)["commit"] == "unknown"


def test_available_memory_is_read_from_the_system(monkeypatch):
    assert memory.available_bytes(CPU) > 2**20
    monkeypatch.setattr(memory.Path, "read_text", lambda path: "MemTotal: 9 kB\nMemAvailable:   1234 kB\n")
    assert memory.available_bytes(CPU) == 1234 * 1024


def test_a_package_inside_another_project_has_not_its_commit(tmp_path):
    def git(*arguments):
        subprocess.run(["git", "-c", "user.name=a", "-c", "user.email=a@b.c", *arguments], cwd=tmp_path, check=True)

    git("init", "-q")
    tracked, installed = tmp_path / "mine.py", tmp_path / "theirs.py"
    for path in (tracked, installed):
        path.write_text("")
    git("add", "mine.py")
    git("commit", "-q", "-m", "x")
    assert re.fullmatch(r"[0-9a-f]{12}", environment.commit(tracked))
    assert environment.commit(installed) is None
