"""The sweeps' inputs: every window against its definition row by row, and the counts that the sweeps promise."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest
import torch

from helpers import CPU, same_bits
from lightning_indexer import dequantize_k
from lightning_indexer.check.cases import (
    PERFORMANCE_SHAPES,
    REQUESTS,
    SMALL_SHAPES,
    VERIFY_SHAPES,
    WINDOWS,
    Case,
    flop,
    make_inputs,
    make_windows,
    positions_in_windows,
    window_applies,
)
from lightning_indexer.check.mqa_logits import MqaLogitsSuite
from lightning_indexer.problems.mqa_logits import FORMS, window_mask

# Sizes that divide and sizes that do not; more rows than keys; rows that pass several requests' borders.
SHAPES = [*SMALL_SHAPES, (2, 1), (4, 2), (16, 16), (12, 8), (64, 48), (5, 64), (8, 40), (6, 4096)]
# Tile widths of known kernels: the least and the most common ones.
TILES = (32, 64, 128)
# Rows from which on every kind of row of a window occurs.
ALL_KINDS = 8


def windows_of(window: str, s_q: int, s_k: int) -> list[tuple[int, int]]:
    ks, ke = make_windows(window, s_q, s_k, CPU)
    return list(zip(ks.tolist(), ke.tolist(), strict=True))


def keys_inside(start: int, end: int, s_k: int) -> list[int]:
    return [n for n in range(s_k) if start <= n < end]


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize(("s_q", "s_k"), SHAPES)
def test_form_of_the_tensors(window, s_q, s_k):
    if not window_applies(window, s_q, s_k):
        return
    for tensor in make_windows(window, s_q, s_k, CPU):
        assert tensor.dtype is torch.int32
        assert tensor.shape == (s_q,)
        assert tensor.is_contiguous()


@pytest.mark.parametrize(("s_q", "s_k"), SHAPES)
def test_causal(s_q, s_k):
    assert windows_of("causal", s_q, s_k) == [(0, s_k - s_q + i + 1) for i in range(s_q)]


@pytest.mark.parametrize(("s_q", "s_k"), [(2, 2), (8, 8), (8, 40), (8, 512), (64, 384), (32, 32), (6, 18)])
def test_cp_holds_one_early_and_one_late_chunk(s_q, s_k):
    size, half = s_k // s_q, s_q // 2
    rank = size // 3
    positions = [*range(rank * half, (rank + 1) * half)]
    late = 2 * size - 1 - rank
    positions += [*range(late * half, (late + 1) * half)]
    assert windows_of("cp", s_q, s_k) == [(0, position + 1) for position in positions]
    assert max(positions) < s_k


def test_cp_of_all_ranks_would_cover_every_position_once():
    # The definition itself: the two chunks of every rank, for the group size that (8, 40) implies.
    size, half = 5, 4
    chunks = [chunk for rank in range(size) for chunk in (rank, 2 * size - 1 - rank)]
    assert sorted(chunk * half + i for chunk in chunks for i in range(half)) == [*range(40)]
    assert [end for _, end in windows_of("cp", 8, 40)] == [5, 6, 7, 8, 33, 34, 35, 36]


@pytest.mark.parametrize(
    ("s_q", "s_k", "applies"),
    [
        (8, 40, True),
        (8, 8, True),
        (8, 41, False),
        (1, 17, False),
        (3, 1560, False),
        (32, 16, False),
        (671, 1342, False),
    ],
)
def test_cp_applies_to_whole_chunks_only(s_q, s_k, applies):
    assert window_applies("cp", s_q, s_k) is applies
    assert all(window_applies(window, s_q, s_k) for window in WINDOWS if window != "cp")


@pytest.mark.parametrize(("s_q", "s_k"), [*SHAPES, *VERIFY_SHAPES])
def test_misaligned_starts_and_ends_on_no_tile_boundary(s_q, s_k):
    windows = windows_of("misaligned", s_q, s_k)
    for start, end in windows:
        assert start % 2 == end % 2 == 1
        assert end <= s_k
        assert all(start % tile and end % tile for tile in TILES)
        if s_k >= ALL_KINDS:
            assert 0 < start < end
    if s_q >= ALL_KINDS and s_k >= 100:
        assert len({start for start, _ in windows}) > ALL_KINDS / 2
        assert len({end for _, end in windows}) > ALL_KINDS / 2


@pytest.mark.parametrize(("s_q", "s_k"), SHAPES)
def test_empty_mixes_both_kinds_of_empty_rows_with_normal_ones(s_q, s_k):
    for i, (start, end) in enumerate(windows_of("empty", s_q, s_k)):
        if i % 4 == 1:
            assert end < 0
        elif i % 4 == 2:
            assert end < start
            assert start == s_k // 2
        else:
            assert (start, end) == (0, s_k - s_q + i + 1)
    sizes = [len(keys_inside(start, end, s_k)) for start, end in windows_of("empty", 17, 113)]
    assert sizes.count(0) == 8
    assert len([size for size in sizes if size > 0]) == 9


@pytest.mark.parametrize(("s_q", "s_k"), SHAPES)
def test_past_end_passes_the_end(s_q, s_k):
    windows = windows_of("past_end", s_q, s_k)
    for i, (start, end) in enumerate(windows):
        if i % 3 == 1:
            assert start > s_k
            assert end > s_k
        elif i % 3 == 2:
            assert -2 <= start <= 2
            assert end == s_k - s_q + i + 1
        else:
            assert -2 <= start <= 2
            assert end > s_k
    if s_q >= 2 * ALL_KINDS:
        assert any(start < 0 for start, _ in windows), "starts below 0 belong to it too"
        assert any(end > start >= s_k for start, end in windows), "a window wholly past the end"


@pytest.mark.parametrize(("s_q", "s_k"), [(4, 4), (64, 384), (32, 32), (16, 4096), (8, 512)])
def test_multi_req_is_the_formula_of_the_baselines(s_q, s_k):
    per_q, per_k = s_q // REQUESTS, s_k // REQUESTS
    expected = []
    for request in range(REQUESTS):
        start = request * s_k // 4
        expected += [(start, start + per_k - per_q + i + 1) for i in range(per_q)]
    assert windows_of("multi_req", s_q, s_k) == expected


@pytest.mark.parametrize(("s_q", "s_k"), SHAPES)
def test_multi_req_packs_causal_requests(s_q, s_k):
    count = min(4, s_q, s_k)
    windows = windows_of("multi_req", s_q, s_k)
    starts = sorted({start for start, _ in windows})
    assert starts == [request * (s_k // count) for request in range(count)]
    assert [start for start, _ in windows] == sorted(start for start, _ in windows)
    for start in starts:
        ends = [end for s, end in windows if s == start]
        assert len(ends) in (s_q // count, -(-s_q // count))
        # A causal triangle whose last row sees every key of its request and none of the next.
        assert ends == [start + s_k // count - len(ends) + i + 1 for i in range(len(ends))]


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize(("s_q", "s_k"), SHAPES)
def test_positions_in_windows_counts_the_mask(window, s_q, s_k):
    if not window_applies(window, s_q, s_k):
        return
    ks, ke = make_windows(window, s_q, s_k, CPU)
    by_hand = sum(len(keys_inside(start, end, s_k)) for start, end in windows_of(window, s_q, s_k))
    assert positions_in_windows(ks, ke, s_k) == by_hand
    assert int(window_mask(ks, ke, s_k).sum()) == by_hand


def test_positions_in_windows_takes_extreme_values():
    ks = torch.tensor([-(2**31), 2**31 - 1, 2**31 - 1, -(2**31), 3], dtype=torch.int32)
    ke = torch.tensor([2**31 - 1, -(2**31), 2**31 - 1, -(2**31), 5], dtype=torch.int32)
    assert positions_in_windows(ks, ke, 10) == 10 + 2


def test_flop_counts_the_product_alone():
    assert flop(64, 128, 10) == 2 * 64 * 128 * 10


# Operands


def test_inputs_are_what_they_say():
    inputs = make_inputs(5, 7, 8, 32, CPU)
    assert inputs.q.shape == inputs.q_fp8.shape == (5, 8, 32)
    assert inputs.k.shape == inputs.k_fp8.shape == (7, 32)
    assert inputs.weights.shape == (5, 8)
    assert inputs.kv_scale.shape == (7,)
    assert inputs.q_fp8.dtype is inputs.k_fp8.dtype is torch.float8_e4m3fn
    # e4m3 keeps three bits: the relative error of one value is at most 2**-4.
    assert torch.allclose(inputs.q_fp8.float(), inputs.q, rtol=2**-4, atol=2**-10)
    k_back = dequantize_k(inputs.k_fp8, inputs.kv_scale)
    assert torch.allclose(k_back, inputs.k, rtol=2**-4, atol=2**-10 * float(inputs.kv_scale.max()))


def test_inputs_are_repeatable_and_differ_by_size_and_seed():
    first = make_inputs(5, 7, 8, 32, CPU)
    again = make_inputs(5, 7, 8, 32, CPU)
    for name in ("q", "k", "weights", "q_fp8", "k_fp8", "kv_scale"):
        assert same_bits(getattr(first, name), getattr(again, name))
    assert not torch.equal(first.weights, make_inputs(5, 7, 8, 32, CPU, seed=1).weights)
    assert not torch.equal(first.weights, make_inputs(5, 9, 8, 32, CPU).weights)


def test_weights_have_both_signs():
    weights = make_inputs(16, 4, 8, 32, CPU).weights
    assert bool((weights < 0).any())
    assert bool((weights > 0).any())


# The sweeps


def all_cases(*, full: bool) -> list[Case]:
    return MqaLogitsSuite().cases(full=full)


def base_cases(cases: list[Case]) -> list[Case]:
    """The sweep of AITER's hand-written kernel: its shapes, heads, dims, windows and both forms of float32."""
    return [
        case
        for case in cases
        if (case.s_q, case.s_k) in VERIFY_SHAPES
        and case.heads in (32, 64, 128)
        and case.head_dim in (64, 128)
        and case.form in ("clean", "noclean")
        and case.out_dtype is torch.float32
    ]


def test_the_full_sweep_has_948_base_cases():
    assert len(VERIFY_SHAPES) == len(set(VERIFY_SHAPES)) == 14
    assert set(PERFORMANCE_SHAPES) <= set(VERIFY_SHAPES)
    base = base_cases(all_cases(full=True))
    assert len(base) == 948
    expected = {
        Case(s_q, s_k, heads, head_dim, window, form)
        for (s_q, s_k), heads, head_dim, window, form in itertools.product(
            VERIFY_SHAPES, (32, 64, 128), (64, 128), WINDOWS, ("clean", "noclean")
        )
        if window != "cp" or (s_q % 2 == 0 and s_k % s_q == 0)
    }
    assert set(base) == expected


@pytest.mark.parametrize("full", [False, True])
def test_every_kind_is_in_the_sweep(full):
    cases = all_cases(full=full)
    assert {case.heads for case in cases} == {8, 16, 32, 64, 128}
    assert {case.head_dim for case in cases} == {32, 64, 128}
    assert {case.window for case in cases} == set(WINDOWS)
    assert {case.form for case in cases} == set(FORMS)
    assert {case.out_dtype for case in cases} == {torch.float32, torch.bfloat16}
    # Every pair of heads and head dim, in every form.
    pairs = {(case.heads, case.head_dim, case.form) for case in cases if case.form != "noclean"}
    assert pairs == set(itertools.product((8, 16, 32, 64, 128), (32, 64, 128), ("clean", "compressed")))
    assert {(case.window, case.form) for case in cases} == set(itertools.product(WINDOWS, FORMS))


def test_the_full_sweep_passes_two_gibibytes_and_2_to_31_elements():
    sizes = [case.s_q * case.s_k for case in all_cases(full=True)]
    assert max(sizes) >= 2**31


@pytest.mark.parametrize("full", [False, True])
def test_names_are_unique(full):
    names = Counter(str(case) for case in all_cases(full=full))
    assert [name for name, count in names.items() if count > 1] == []


@pytest.mark.parametrize("full", [False, True])
def test_cases_that_share_operands_are_next_to_each_other_and_windows_apply(full):
    cases = all_cases(full=full)
    assert all(window_applies(case.window, case.s_q, case.s_k) for case in cases)
    groups = [key for key, _ in itertools.groupby(cases, lambda case: (case.s_q, case.s_k, case.heads, case.head_dim))]
    # At most the sizes of the second list are those of the first again.
    assert len(groups) - len(set(groups)) <= 4 * 15
    assert len(groups) * 6 < len(cases)


def test_a_case_is_named_by_all_that_sets_it_apart():
    assert str(Case(61, 160, 32, 64, "empty")) == "(61, 160) H=32 D=64 empty clean"
    bf16 = Case(61, 160, 32, 64, "cp", "compressed", torch.bfloat16)
    assert str(bf16) == "(61, 160) H=32 D=64 cp compressed bf16"
