"""Top-k per row: the reference, what is accepted and refused, the PyTorch backend, and the operators."""

from __future__ import annotations

import math
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers import CPU, INT32_MAX, INT32_MIN, int32
from lightning_indexer import Arch
from lightning_indexer.backends.torch_blocked import top_k as torch_blocked
from lightning_indexer.calls import common
from lightning_indexer.calls.top_k import top_k_per_row, top_k_workspace_bytes
from lightning_indexer.check.top_k import Case, Inputs, cases, make_inputs, run_case
from lightning_indexer.problems.top_k import MAX_K, TopKCall, TopKProblem, order_keys, reference_top_k

INF, NAN = math.inf, math.nan
SPECIAL = [0.0, -0.0, 1.0, -1.0, INF, -INF, NAN, 1e-41, -1e-41, 3.4e38]


def naive(row, k, start, end, *, order, tie):
    """Positions of one row by a sort of Python's, and their scores."""
    sign = 1 if tie == "smaller" else -1
    found = [n for n in range(max(0, start), min(len(row), end)) if not math.isnan(row[n])]
    found = sorted(found, key=lambda n: (-row[n], sign * n))[:k]
    found = found if order == "score" else sorted(found)
    return found + [-1] * (k - len(found)), [row[n] for n in found] + [-INF] * (k - len(found))


@settings(max_examples=150, deadline=None)
@given(
    row=st.lists(st.sampled_from(SPECIAL) | st.floats(width=32), min_size=1, max_size=40),
    k=st.integers(1, 45),
    start=st.integers(-3, 45),
    end=st.integers(-3, 45),
    order=st.sampled_from(["index", "score"]),
    tie=st.sampled_from(["smaller", "larger"]),
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_reference_and_cpu_against_a_sort_of_pythons(dtype, row, k, start, end, order, tie):
    logits = torch.tensor([row], dtype=torch.float32).to(dtype)
    expected, scores = naive(logits[0].tolist(), k, start, end, order=order, tie=tie)
    bounds = (int32(start), int32(end))
    results = [
        reference_top_k(logits, k, *bounds, index_base="absolute", order=order, tie=tie),
        top_k_per_row(logits, k, *bounds, index_base="absolute", order=order, tie=tie, values=True),
    ]
    for indices, values in results:
        assert indices.tolist() == [expected]
        assert values.tolist() == [scores]


def test_keys_order_as_scores_do():
    scores = torch.tensor([NAN, -INF, -3.4e38, -1.0, -1e-41, -0.0, 1e-41, 1.0, 3.4e38, INF])
    keys = order_keys(scores)
    assert keys.tolist() == sorted(set(keys.tolist()))
    assert order_keys(torch.tensor([0.0])) == order_keys(torch.tensor([-0.0]))
    assert order_keys(torch.tensor([-NAN])) == order_keys(torch.tensor([NAN])) == INT32_MIN


def test_width_51_with_3_finite_values_and_k_16():
    logits = torch.full((1, 51), NAN)
    logits[0, [5, 17, 50]] = torch.tensor([1.0, -INF, 2.0])
    assert top_k_per_row(logits, 16).tolist() == [[5, 17, 50] + [-1] * 13]


@pytest.mark.parametrize("case", cases(False), ids=str)
def test_cpu(case):
    assert run_case(case, "torch-blocked", CPU, repeats=2) == []


@pytest.mark.parametrize("config", [(0, 4096), (1, 4096), (7, 5000), (32, 2**20)], ids=str)
def test_cpu_by_other_blocks(config):
    """No guess, a guess from every score, and guesses that miss."""

    def call(case: Case, inputs: Inputs, indices, values):
        given = (inputs.logits, inputs.starts, inputs.ends, inputs.offsets, inputs.page_table)
        launch = torch_blocked.TopK().launch(case.problem, Arch.parse("cpu"), torch_blocked.TopKBlocks(*config))
        launch(TopKCall(*given, indices, values))

    for case in cases(False)[::3]:
        assert run_case(case, "", CPU, call=call) == [], case


def test_cpu_without_numpy(monkeypatch):
    monkeypatch.setattr(torch_blocked.importlib.util, "find_spec", lambda name: None)
    case = Case(5, 3000, 96, scores="integers")
    assert torch_blocked.heuristic(case.problem, Arch.parse("cpu")).spacing == 0
    assert run_case(case, "torch-blocked", CPU) == []


def test_threads_do_not_matter():
    case = Case(37, 5000, 200, scores="integers")
    try:
        torch.set_num_threads(2)
        assert run_case(case, "torch-blocked", CPU, repeats=3) == []
    finally:
        torch.set_num_threads(1)


def test_rows_that_are_expanded():
    row = torch.randn(1, 3000)
    expected = top_k_per_row(row, 100)
    assert torch.equal(top_k_per_row(row.expand(4, -1), 100), expected.expand(4, -1))


def test_extreme_bounds():
    logits = torch.tensor([[3.0, 1.0, 2.0]]).expand(5, -1)
    starts = int32(INT32_MIN, 0, INT32_MAX, INT32_MIN, 2)
    ends = int32(INT32_MAX, INT32_MIN, INT32_MAX, INT32_MIN, INT32_MAX)
    assert top_k_per_row(logits, 2, starts, ends).tolist() == [[0, 2], [-1, -1], [-1, -1], [-1, -1], [0, -1]]


def test_columns_as_bounds_and_only_ends():
    logits = torch.randn(3, 50)
    starts, ends = int32(1, 2, 3), int32(40, 50, 4)
    expected = top_k_per_row(logits, 7, starts, ends)
    assert torch.equal(top_k_per_row(logits, 7, starts[:, None], ends[:, None]), expected)
    assert torch.equal(top_k_per_row(logits, 7, None, ends), top_k_per_row(logits, 7, int32(0, 0, 0), ends))


@pytest.mark.parametrize("mode", ["inference", "autocast", "deterministic", "default dtype", "grad"])
def test_modes_of_the_caller(mode):
    logits = torch.randn(6, 4000)
    expected, scores = reference_top_k(logits, 300)
    if mode == "inference":
        with torch.inference_mode():
            results = reference_top_k(logits, 300), top_k_per_row(logits, 300, values=True)
    elif mode == "autocast":
        with torch.autocast("cpu", torch.bfloat16):
            results = reference_top_k(logits, 300), top_k_per_row(logits, 300, values=True)
    elif mode == "deterministic":
        torch.use_deterministic_algorithms(True)
        try:
            results = reference_top_k(logits, 300), top_k_per_row(logits, 300, values=True)
        finally:
            torch.use_deterministic_algorithms(False)
    elif mode == "default dtype":
        torch.set_default_dtype(torch.float64)
        try:
            results = reference_top_k(logits, 300), top_k_per_row(logits, 300, values=True)
        finally:
            torch.set_default_dtype(torch.float32)
    else:
        logits.requires_grad_()
        common._WARNED.discard("top_k_per_row")
        with pytest.warns(UserWarning, match="top_k_per_row: an operand requires grad"):
            top_k_per_row(logits, 300)
        results = reference_top_k(logits, 300), top_k_per_row(logits, 300, values=True)
    for indices, values in results:
        assert indices.dtype == torch.int32
        assert values.dtype == torch.float32
        assert torch.equal(indices, expected)
        assert torch.equal(values, scores)


# What is returned, and into what


def test_results_that_the_caller_owns():
    logits = torch.randn(4, 600)
    expected, scores = reference_top_k(logits, 20)
    out = torch.full((4, 30), -7, dtype=torch.int32)[:, :20]
    values = torch.full((4, 25), NAN)[:, :20]
    result = top_k_per_row(logits, 20, out=out, values=values)
    assert result[0] is out
    assert result[1] is values
    assert torch.equal(out, expected)
    assert torch.equal(values, scores)
    assert isinstance(top_k_per_row(logits, 20), torch.Tensor)
    assert isinstance(top_k_per_row(logits, 20, values=False), torch.Tensor)


def test_no_rows_and_no_columns():
    assert top_k_per_row(torch.empty(0, 5), 3).shape == (0, 3)
    indices, values = top_k_per_row(torch.empty(2, 0), 3, values=True)
    assert indices.tolist() == [[-1] * 3] * 2
    assert values.tolist() == [[-INF] * 3] * 2


def test_workspace_bytes():
    problem = TopKProblem(4, 600, 20)
    assert top_k_workspace_bytes(problem, "cpu", "torch-blocked") == 0


LOGITS = torch.randn(4, 50)
REFUSED = {
    "logits: got list, expected a torch.Tensor": {"logits": [1.0]},
    "logits: got dtype torch.float64": {"logits": LOGITS.double()},
    "logits: got shape \\[50\\], expected 2 dimensions, \\[M, W\\]": {"logits": LOGITS[0]},
    "logits: got strides \\(1, 4\\), expected a contiguous last": {"logits": torch.randn(50, 4).t()},
    "k: got float, expected an int": {"k": 3.0},
    "k: got bool, expected an int": {"k": True},
    "k: got 0, expected 1 to 4096": {"k": 0},
    f"k: got {MAX_K + 1}, expected 1 to 4096": {"k": MAX_K + 1},
    "row_starts: got dtype torch.int64, expected torch.int32: pass": {"row_starts": torch.zeros(4, dtype=torch.int64)},
    "row_ends: got shape \\[3\\], expected \\[4\\] or \\[4, 1\\]": {"row_ends": int32(1, 2, 3)},
    "row_ends: got a tensor on meta, expected cpu": {"row_ends": torch.empty(4, dtype=torch.int32, device="meta")},
    "index_base: got 'global', expected one of row, absolute, offset, page": {"index_base": "global"},
    "order: got 'value', expected one of index, score, any": {"order": "value"},
    "tie: got 'first', expected one of smaller, larger": {"tie": "first"},
    "offsets: got None with index_base 'offset', expected int32 \\[M\\]": {"index_base": "offset"},
    "offsets: got a tensor with index_base 'row'": {"offsets": int32(1, 2, 3, 4)},
    "page_table: got None with index_base 'page'": {"index_base": "page", "page_size": 4},
    "page_size: got None with a page_table": {"index_base": "page", "page_table": torch.zeros(4, 2).int()},
    "page_size: got 0, expected at least 1": {
        "index_base": "page", "page_table": torch.zeros(4, 2).int(), "page_size": 0,
    },
    "page_size: got 4 without a page_table": {"page_size": 4},
    "page_table: got shape \\[3, 2\\], expected \\[4, pages\\]": {
        "index_base": "page", "page_table": torch.zeros(3, 2).int(), "page_size": 4,
    },
    "out: got shape \\[4, 4\\], expected \\[4, 3\\]": {"out": torch.zeros(4, 4).int()},
    "out: got dtype torch.int64, expected torch.int32": {"out": torch.zeros(4, 3).long()},
    "out: got strides \\(0, 1\\), expected a row stride of at least 3: rows overlap": {
        "out": torch.zeros(1, 3).int().expand(4, 3),
    },
    "values: got int, expected a bool or a torch.Tensor": {"values": 1},
    "values: got dtype torch.bfloat16, expected torch.float32": {"values": torch.zeros(4, 3).bfloat16()},
    "workspace: got dtype torch.float32, expected torch.uint8": {"workspace": torch.zeros(4)},
    "workspace: got shape \\[2, 2\\]": {"workspace": torch.zeros(2, 2, dtype=torch.uint8)},
    "backend: got 'fast', expected one of": {"backend": "fast"},
}  # fmt: skip


@pytest.mark.parametrize("message", REFUSED)
def test_refused(message):
    arguments = {"logits": LOGITS, "k": 3, **REFUSED[message]}
    with pytest.raises((TypeError, ValueError), match=message):
        top_k_per_row(**arguments)


def test_a_call_that_is_planned_checks_its_next_arguments_too():
    top_k_per_row(LOGITS, 3)
    with pytest.raises(ValueError, match="order: got 'value'"):
        top_k_per_row(LOGITS, 3, order="value")
    assert torch.equal(top_k_per_row(LOGITS, 3, int32(5).expand(4)), top_k_per_row(LOGITS[:, 5:], 3))


# torch.compile and friends


def test_operators_are_registered_as_pytorch_expects():
    inputs = make_inputs(Case(3, 40, 4, base="page"), CPU)
    functional = torch.ops.lightning_indexer.top_k_per_row.default
    arguments = (inputs.logits, 4, inputs.starts, inputs.ends)
    torch.library.opcheck(functional, (*arguments, "row", None, None, None, "score", "larger", True, None))
    torch.library.opcheck(functional, (*arguments, "row", None, None, None, "index", "smaller", False, None))
    out = torch.empty(3, 4, dtype=torch.int32)
    torch.library.opcheck(
        torch.ops.lightning_indexer.top_k_per_row_out.default,
        (*arguments, "page", None, inputs.page_table, 64, "any", "smaller", torch.empty(3, 4), out, None, None),
    )


@pytest.mark.parametrize("values", [None, True, "tensor"])
@pytest.mark.parametrize("own", [False, True])
def test_compiled(values, own):
    logits = torch.randn(3, 70)
    expected, scores = reference_top_k(logits, 9)

    def call(logits, out, given):
        return top_k_per_row(logits, 9, out=out, values=given)

    out = torch.empty(3, 9, dtype=torch.int32) if own else None
    given = torch.empty(3, 9) if values == "tensor" else values
    result = torch.compile(call, backend="eager", fullgraph=True)(logits, out, given)
    indices = result if values is None else result[0]
    assert torch.equal(indices, expected)
    if values is not None:
        assert torch.equal(result[1], scores)
    if own:
        assert torch.equal(out, expected)


def test_fake_tensors():
    logits = torch.empty(3, 70, device="meta")
    indices, values = top_k_per_row(logits, 9, values=True)
    assert indices.shape == values.shape == (3, 9)
    assert indices.is_meta


def test_a_random_batch_of_everything():
    """Rows of every kind in one call, in another order: each row's result is its own."""
    rows = [make_inputs(case, CPU).logits[:1] for case in cases(False) if case.width == 1500 and case.rows]
    logits = torch.cat([row.float() for row in rows])
    order = list(range(len(rows)))
    random.Random(0).shuffle(order)
    expected, _ = reference_top_k(logits, 64)
    assert torch.equal(top_k_per_row(logits, 64), expected)
    assert torch.equal(top_k_per_row(logits[order], 64), expected[order])
