"""The oracle itself, against a triple loop in Python's float64."""

from __future__ import annotations

import contextlib
import math

import pytest
import torch

from helpers import CPU, int32, same_bits
from lightning_indexer import calc_diff, reference_logits
from lightning_indexer.check.cases import WINDOWS, make_inputs, make_windows, window_applies
from lightning_indexer.problems.mqa_logits import reference_scores, window_mask

# float32 sums of H * D products, relative to the sum of their magnitudes.
FLOAT32_SUM = 2e-6


def by_loops(q, k, kv_scale, weights, ks, ke) -> tuple[list[list[float]], list[list[float]]]:
    """(logits, sums of the magnitudes of what was added up), straight from the formula of the spec."""
    q, k, weights = q.double().tolist(), k.double().tolist(), weights.double().tolist()
    kv_scale, ks, ke = kv_scale.double().tolist(), ks.tolist(), ke.tolist()
    logits, magnitudes = [], []
    for m, (start, end) in enumerate(zip(ks, ke, strict=True)):
        row, magnitude_row = [], []
        for n, key in enumerate(k):
            total = magnitude = 0.0
            for h, query in enumerate(q[m]):
                products = [a * b for a, b in zip(query, key, strict=True)]
                total += weights[m][h] * max(0.0, sum(products))
                magnitude += abs(weights[m][h]) * sum(map(abs, products))
            inside = start <= n < end
            row.append(kv_scale[n] * total if inside else -math.inf)
            magnitude_row.append(abs(kv_scale[n]) * magnitude)
        logits.append(row)
        magnitudes.append(magnitude_row)
    return logits, magnitudes


def random_call(s_q, s_k, heads, head_dim, window="causal"):
    inputs = make_inputs(s_q, s_k, heads, head_dim, CPU)
    scale = inputs.kv_scale * (1.0 - 2.0 * (torch.arange(s_k) % 2))
    return inputs.q_fp8, inputs.k_fp8, scale, inputs.weights, *make_windows(window, s_q, s_k, CPU)


def reference(q, k, kv_scale, weights, ks, ke) -> torch.Tensor:
    return reference_logits(q, (k, kv_scale), weights, ks, ke)


def integer_call(rows, keys, heads, head_dim):
    """Small integers, for which every sum is exact whatever its order: results can be compared bit by bit."""
    generator = torch.Generator().manual_seed(7)

    def integers(*shape, low=-3, high=4):
        return torch.randint(low, high, shape, generator=generator).float()

    q = integers(rows, heads, head_dim).to(torch.float8_e4m3fn)
    k = integers(keys, head_dim).to(torch.float8_e4m3fn)
    ks, ke = integers(rows, low=-2, high=3).int(), integers(rows, low=keys - 3, high=keys + 3).int()
    return q, k, 2.0 ** integers(keys) * (1 - 2 * (torch.arange(keys) % 2)), integers(rows, heads), ks, ke


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize(
    ("s_q", "s_k", "heads", "head_dim"), [(4, 12, 3, 8), (6, 6, 2, 5), (2, 20, 8, 4), (5, 3, 1, 1)]
)
def test_the_formula(window, s_q, s_k, heads, head_dim):
    if not window_applies(window, s_q, s_k):
        return
    call = random_call(s_q, s_k, heads, head_dim, window)
    logits = reference(*call)
    expected, magnitudes = by_loops(*call)
    assert logits.shape == (s_q, s_k)
    assert logits.dtype is torch.float32
    for m in range(s_q):
        for n in range(s_k):
            value, right = float(logits[m, n]), expected[m][n]
            if right == -math.inf:
                assert value == -math.inf
            else:
                assert abs(value - right) <= FLOAT32_SUM * magnitudes[m][n]


def test_the_formula_exactly():
    call = integer_call(7, 9, 4, 16)
    expected, _ = by_loops(*call)
    assert any(value < 0 for row in expected for value in row if value != -math.inf)
    assert reference(*call).tolist() == expected


def test_scores_are_neither_scaled_nor_masked():
    q, k, _, weights, _, _ = integer_call(7, 9, 4, 16)
    expected, _ = by_loops(q, k, torch.ones(9), weights, int32(*[0] * 7), int32(*[9] * 7))
    assert reference_scores(q, k, weights).tolist() == expected


@pytest.mark.parametrize("rows_at_a_time", [0, 1, 2, 3, 6, 7])
def test_row_chunks_change_nothing(monkeypatch, rows_at_a_time):
    heads, keys = 4, 9
    call = integer_call(7, keys, heads, 16)
    whole = reference(*call)
    seen = []
    einsum = torch.einsum

    def counting(equation, *operands):
        seen.append(operands[0].shape[0])
        return einsum(equation, *operands)

    monkeypatch.setattr("lightning_indexer.problems.mqa_logits._SCORE_BYTES", rows_at_a_time * heads * keys * 4)
    monkeypatch.setattr(torch, "einsum", counting)
    assert same_bits(reference(*call), whole)
    step = max(1, rows_at_a_time)
    assert max(seen) == step, "no chunk is larger than asked for, and a budget for no row at all still makes progress"
    assert sum(seen) == 2 * 7


def test_column_vector_of_scales_and_wide_inputs():
    q, k, scale, weights, ks, ke = integer_call(7, 9, 4, 16)
    plain = reference(q, k, scale, weights, ks, ke)
    assert same_bits(reference(q, k, scale[:, None], weights, ks, ke), plain)
    assert same_bits(reference(q.float(), k.bfloat16(), scale, weights.double(), ks, ke), plain)


def test_inputs_are_left_alone():
    call = integer_call(7, 9, 4, 16)
    copies = [tensor.clone() for tensor in call]
    reference(*call)
    assert all(same_bits(tensor, copy) for tensor, copy in zip(call, copies, strict=True))


@pytest.mark.parametrize("scale", [1.0, -1.0, 0.0, -0.0])
@pytest.mark.parametrize("weight", [1.0, -1.0, 0.0, -0.0])
def test_zeros_are_positive(scale, weight):
    # Every product is negative, so that the ReLU leaves zero for every head.
    q, k = torch.full((2, 3, 4), -1.0), torch.ones(5, 4)
    logits = reference(q, k, torch.full((5,), scale), torch.full((2, 3), weight), int32(0, 1), int32(5, 5))
    inside = logits[0]
    assert bool((inside == 0).all())
    assert not bool(torch.signbit(inside).any())
    assert logits[1, 0] == -math.inf


def test_empty_reversed_and_outlying_windows():
    q, k, scale, weights, _, _ = integer_call(7, 9, 4, 16)
    ks = int32(4, 5, -3, 9, 100, -(2**31), 2)
    ke = int32(4, 3, 0, 12, 200, 2**31 - 1, 5)
    logits = reference(q, k, scale, weights, ks, ke)
    assert bool((logits[:5] == -math.inf).all())
    assert bool(logits[5].isfinite().all())
    assert logits[6].isfinite().tolist() == [n in (2, 3, 4) for n in range(9)]


def test_no_rows_and_no_keys():
    q, k, scale, weights, ks, ke = integer_call(7, 9, 4, 16)
    assert reference(q[:0], k, scale, weights[:0], ks[:0], ke[:0]).shape == (0, 9)
    assert reference(q, k[:0], scale[:0], weights, ks, ke).shape == (7, 0)


def test_garbage_in_keys_outside_every_window_does_not_show():
    q, k, scale, weights, _, _ = integer_call(7, 9, 4, 16)
    ks, ke = int32(*[2] * 7), int32(*[6] * 7)
    clean = reference(q, k, scale, weights, ks, ke)
    dirty = k.clone().view(torch.uint8)
    dirty[[0, 1, 6, 7, 8]] = 0x7F
    scale = scale.clone()
    scale[7] = math.inf
    assert same_bits(reference(q, dirty.view(torch.float8_e4m3fn), scale, weights, ks, ke), clean)


@pytest.mark.parametrize(("ks", "ke"), [([0, 3], [5, 3]), ([-4, 6], [2, 9])])
def test_window_mask(ks, ke):
    mask = window_mask(int32(*ks), int32(*ke), 6)
    assert mask.tolist() == [[start <= n < end for n in range(6)] for start, end in zip(ks, ke, strict=True)]


# calc_diff


def test_equal_tensors_do_not_differ():
    x = torch.randn(5, 7)
    assert calc_diff(x, x) == pytest.approx(0.0, abs=1e-15)
    assert calc_diff(x, x.clone().bfloat16()) > 0.0


def test_known_values():
    x = torch.tensor([[3.0, 4.0]])
    assert calc_diff(x, torch.tensor([[4.0, 3.0]])) == pytest.approx(1 - 2 * 24 / 50)
    assert calc_diff(x, -x) == pytest.approx(2.0)
    assert calc_diff(x, torch.zeros(1, 2)) == pytest.approx(1.0)
    # Orthogonal: nothing in common.
    assert calc_diff(torch.tensor([[1.0, 0.0]]), torch.tensor([[0.0, 1.0]])) == pytest.approx(1.0)


@pytest.mark.parametrize("error", [1e-2, 1e-3, 1e-4])
def test_about_half_the_squared_relative_error(error):
    x = torch.randn(64, 64, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    assert calc_diff(x * (1 + error), x) == pytest.approx(error**2 / 2, rel=2 * error)
    assert calc_diff(x, x * (1 + error)) == pytest.approx(calc_diff(x * (1 + error), x), rel=1e-6)


def test_sums_are_float64():
    # In float32 the small part would vanish beside the large one, and so would the difference.
    x, y = torch.tensor([[2.0**13, 1.0]]), torch.tensor([[2.0**13, 2.0]])
    assert calc_diff(x, y) == pytest.approx(1 / (2**27 + 5), rel=1e-6, abs=0)


def test_only_what_the_mask_selects_counts():
    x, y = torch.tensor([[1.0, 2.0, 3.0]]), torch.tensor([[1.0, 5.0, 3.0]])
    assert calc_diff(x, y, torch.tensor([[True, False, True]])) == 0.0
    assert calc_diff(x, y, torch.tensor([[False, True, False]])) == pytest.approx(1 - 2 * 10 / 29)
    assert calc_diff(x, y, torch.ones(1, 3, dtype=torch.bool)) == calc_diff(x, y)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_bad_values_show_where_they_count_and_only_there(value):
    x = torch.tensor([[1.0, value]])
    y = torch.tensor([[1.0, 2.0]])
    for pair in ((x, y), (y, x)):
        assert math.isnan(calc_diff(*pair))
        assert math.isnan(calc_diff(*pair, torch.tensor([[False, True]])))
        assert calc_diff(*pair, torch.tensor([[True, False]])) == 0.0


@pytest.mark.parametrize("elements", [1, 4, 5, 8, 12, 24])
def test_chunks_of_rows_change_nothing(monkeypatch, elements):
    x = torch.randint(-9, 9, (6, 4), generator=torch.Generator().manual_seed(3)).float()
    y = x.clone()
    y[-1, -1] += 40.0  # the last chunk must count
    where = torch.ones(6, 4, dtype=torch.bool)
    where[0] = False
    whole, masked = calc_diff(x, y), calc_diff(x, y, where)
    assert whole != masked
    monkeypatch.setattr("lightning_indexer.problems.accuracy._DIFF_ELEMENTS", elements)
    assert calc_diff(x, y) == whole
    assert calc_diff(x, y, where) == masked


def test_nothing_to_compare():
    assert calc_diff(torch.zeros(0, 5), torch.zeros(0, 5)) == 0.0
    assert calc_diff(torch.zeros(5, 0), torch.zeros(5, 0)) == 0.0
    assert calc_diff(torch.zeros(2, 2), torch.zeros(2, 2)) == 0.0
    x = torch.randn(2, 2)
    assert calc_diff(x, -x, torch.zeros(2, 2, dtype=torch.bool)) == 0.0


# An oracle does not depend on the modes around it.


@contextlib.contextmanager
def default_dtype(dtype):
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextlib.contextmanager
def matmul_precision(name):
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(name)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


MODES = {
    "autocast to bfloat16": lambda: torch.autocast("cpu", torch.bfloat16),
    "default dtype float64": lambda: default_dtype(torch.float64),
    "default dtype bfloat16": lambda: default_dtype(torch.bfloat16),
    "matmul precision medium": lambda: matmul_precision("medium"),
    "inference mode": torch.inference_mode,
}


@pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
def test_no_mode_around_the_reference_changes_it(mode):
    call = random_call(6, 40, 8, 32, "misaligned")
    expected = reference(*call)
    with mode():
        found = reference(*call)
    assert found.dtype is torch.float32
    assert same_bits(found, expected)
