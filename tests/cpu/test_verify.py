"""``verify`` must notice each kind of fault that a kernel can have, and nothing where there is none."""

from __future__ import annotations

import itertools
import math
import re

import pytest
import torch

from faulty import FaultyBackend, honest, install, one_percent_high
from helpers import CPU, bits, int32
from lightning_indexer import MqaLogitsProblem
from lightning_indexer.check import bounds, memory, mqa_logits
from lightning_indexer.check.cases import WINDOWS, Case, make_windows, positions_in_windows
from lightning_indexer.check.device import REPEATED, run
from lightning_indexer.check.guarded import GuardedOutput
from lightning_indexer.check.mqa_logits import MqaLogitsSuite, compress, compressed_width
from lightning_indexer.check.verify import Outcome
from lightning_indexer.problems.mqa_logits import FORMS, MqaLogitsCall, row_stride, window_mask

FP32, BF16 = torch.float32, torch.bfloat16
S_Q, S_K, HEADS, HEAD_DIM = 17, 113, 8, 32
# 1.01 times the right result: calc_diff = 1 - 2 * 1.01 / (1 + 1.01**2).
DIFF_OF_ONE_PERCENT = 1 - 2 * 1.01 / (1 + 1.01**2)
# Half the mean squared relative error of rounding to 8 bits is 1.3e-6 at least; a quarter is allowed for the sample.
BF16_DIFF = (1.0e-6, 2.5e-6)


def group_of(*cases: tuple[str, str, torch.dtype], s_q: int = S_Q, s_k: int = S_K, heads: int = HEADS) -> list[Case]:
    """The cases (window, form, dtype) at one size."""
    return [Case(s_q, s_k, heads, HEAD_DIM, *case) for case in cases]


def verified(cases: list[Case], backends: list[str]) -> list[Outcome]:
    return list(run(MqaLogitsSuite(), cases, backends, CPU))


def run_one(monkeypatch, fault, form="clean", window="causal", dtype=FP32, **sizes) -> Outcome:
    name = install(monkeypatch, FaultyBackend(fault))
    [outcome] = verified(group_of((window, form, dtype), **sizes), [name])
    assert outcome.backend == name
    return outcome


def place_of_fault(problem: MqaLogitsProblem, call: MqaLogitsCall) -> tuple[int, int]:
    """Where a fault goes: row and column in the result of the last position that any window holds."""
    for row in range(problem.rows - 1, -1, -1):
        start, end = int(call.ks[row]), int(call.ke[row])
        if max(start, 0) < min(end, problem.keys):
            position = min(end, problem.keys) - 1
            return row, position - start if problem.compressed else position
    raise AssertionError("no row has a window")


# The honest backend


@pytest.mark.parametrize("dtype", [FP32, BF16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("form", FORMS)
def test_the_honest_backend_passes_in_every_window(monkeypatch, form, dtype):
    name = install(monkeypatch, FaultyBackend(honest))
    group = group_of(*((window, form, dtype) for window in WINDOWS if window != "cp"))
    chunks = group_of(("cp", form, dtype), s_q=8, s_k=40)
    outcomes = verified([*group, *chunks], [name, "torch-blocked"])
    assert len(outcomes) == 2 * len(WINDOWS)
    for outcome in outcomes:
        assert outcome.status == "pass", f"{outcome.case}: {outcome.detail}"
        assert outcome.detail == ""
        assert outcome.finding.diff < bounds.FLOAT32[dtype].diff
        assert outcome.finding.diff_unquantised < 10 * mqa_logits.MAX_DIFF_UNQUANTISED


def test_outcomes_come_in_order_of_case_then_backend(monkeypatch):
    name = install(monkeypatch, FaultyBackend(honest))
    group = group_of(("causal", "clean", FP32), ("empty", "noclean", FP32))
    outcomes = verified(group, ["torch-blocked", name])
    assert [(outcome.case, outcome.backend) for outcome in outcomes] == [
        *itertools.product(group, ["torch-blocked", name])
    ]


def test_the_accuracy_of_bf16_is_measured(monkeypatch):
    low, high = BF16_DIFF
    assert low < run_one(monkeypatch, honest, dtype=BF16).finding.diff < high


# What was not written, and what should not have been


@pytest.mark.parametrize("dtype", [FP32, BF16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("form", FORMS)
def test_one_position_of_a_window_left_out(monkeypatch, form, dtype):
    def fault(problem, call, run):
        row, column = place_of_fault(problem, call)
        before = call.result[row, column].clone()
        run(call)
        call.result[row, column].copy_(before)

    outcome = run_one(monkeypatch, fault, form, dtype=dtype)
    assert outcome.status == "fail"
    assert "1 positions never written" in outcome.detail


@pytest.mark.parametrize("form", FORMS)
def test_one_position_outside_the_windows_left_out(monkeypatch, form):
    def fault(problem, call, run):
        before = call.result[0, -1].clone()
        run(call)
        call.result[0, -1].copy_(before)

    # Row 0 of a causal window does not reach the last column.
    outcome = run_one(monkeypatch, fault, form)
    if form == "clean":
        assert outcome.status == "fail"
        assert "1 positions never written" in outcome.detail
    else:
        assert outcome.status == "pass", outcome.detail


@pytest.mark.parametrize("dtype", [FP32, BF16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("where", ["row gap", "before", "after", "end of the guard band"])
def test_one_element_written_outside_the_view(monkeypatch, where, form, dtype):
    def fault(problem, call, run):
        run(call)
        first = call.result.storage_offset()
        last = first + (problem.rows - 1) * call.result.stride(0) + problem.width - 1
        offset = {
            "row gap": first + problem.width,
            "before": first - 1,
            "after": last + 1,
            "end of the guard band": call.result.untyped_storage().nbytes() // call.result.itemsize - 1,
        }[where]
        call.result.as_strided((1,), (1,), offset).fill_(float("-inf"))

    outcome = run_one(monkeypatch, fault, form, dtype=dtype)
    assert outcome.status == "fail"
    assert outcome.detail == "wrote outside the view"


def test_a_whole_row_not_written_where_all_windows_are_empty(monkeypatch):
    def fault(problem, call, run):
        before = call.result[1].clone()
        run(call)
        call.result[1].copy_(before)

    # Row 1 of "empty" has no window; a kernel that returns early there leaves it as it was.
    outcome = run_one(monkeypatch, fault, window="empty")
    assert outcome.status == "fail"
    assert f"{S_K} positions never written" in outcome.detail


# The mask


def test_one_minus_inf_inside_a_window(monkeypatch):
    def fault(problem, call, run):
        run(call)
        call.result[place_of_fault(problem, call)] = float("-inf")

    outcome = run_one(monkeypatch, fault)
    assert outcome.status == "fail"
    assert "-inf mask differs at 1 positions" in outcome.detail
    for form in ("noclean", "compressed"):
        assert run_one(monkeypatch, fault, form).status == "fail"


@pytest.mark.parametrize("value", [0.0, -3e38, float("inf"), float("nan")])
def test_one_other_value_outside_the_windows(monkeypatch, value):
    def fault(problem, call, run):
        run(call)
        call.result[0, -1] = value

    outcome = run_one(monkeypatch, fault)
    assert outcome.status == "fail"
    assert outcome.detail == f"-inf mask differs at 1 positions, the first at [0, {S_K - 1}]"
    assert run_one(monkeypatch, fault, "noclean").status == "pass", "without clean, anything may stand there"


@pytest.mark.parametrize("form", FORMS)
def test_one_nan_inside_a_window(monkeypatch, form):
    def fault(problem, call, run):
        run(call)
        call.result[place_of_fault(problem, call)] = float("nan")

    outcome = run_one(monkeypatch, fault, form)
    assert outcome.status == "fail"
    assert "1 NaN inside windows" in outcome.detail
    assert "never written" not in outcome.detail, "a NaN that was written is not the poison"


@pytest.mark.parametrize("form", FORMS)
def test_one_plus_inf_inside_a_window(monkeypatch, form):
    def fault(problem, call, run):
        run(call)
        call.result[place_of_fault(problem, call)] = float("inf")

    assert run_one(monkeypatch, fault, form).status == "fail"


@pytest.mark.parametrize(("shift", "positions"), [(1, S_Q), (-1, S_Q)])
def test_windows_that_start_one_off(monkeypatch, shift, positions):
    def fault(problem, call, run):
        run(call._replace(ks=call.ks + shift))

    outcome = run_one(monkeypatch, fault, window="misaligned")
    assert outcome.status == "fail"
    assert f"-inf mask differs at {positions} positions" in outcome.detail
    # Compressed, a wrong start also moves every value by a column.
    outcome = run_one(monkeypatch, fault, "compressed", "misaligned")
    assert outcome.status == "fail"
    assert "calc_diff" in outcome.detail


@pytest.mark.parametrize("shift", [1, -1])
def test_windows_that_end_one_off(monkeypatch, shift):
    def fault(problem, call, run):
        run(call._replace(ke=call.ke + shift))

    assert run_one(monkeypatch, fault, window="misaligned").status == "fail"
    if shift < 0:
        outcome = run_one(monkeypatch, fault, "compressed", "misaligned")
        assert f"{S_Q} positions never written" in outcome.detail


def test_compressed_logits_that_ignore_ks(monkeypatch):
    def fault(problem, call, run):
        run(call._replace(ks=torch.zeros_like(call.ks), ke=call.ke - call.ks))

    for window in ("misaligned", "multi_req"):
        outcome = run_one(monkeypatch, fault, "compressed", window)
        assert outcome.status == "fail"
        assert "calc_diff" in outcome.detail
    assert run_one(monkeypatch, fault, "compressed", "causal").status == "pass", "there ks is 0: no test of ks"


def test_starts_clamped_before_the_columns_are_counted(monkeypatch):
    def fault(problem, call, run):
        run(call._replace(ks=call.ks.clamp(min=0)))

    # Column j is ks + j for a negative ks too; only past_end has such rows.
    assert run_one(monkeypatch, fault, "compressed", "past_end").status == "fail"


# The values


@pytest.mark.parametrize("dtype", [FP32, BF16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("form", FORMS)
def test_all_values_one_percent_high(monkeypatch, form, dtype):
    outcome = run_one(monkeypatch, one_percent_high, form, dtype=dtype)
    assert outcome.status == "fail"
    assert "calc_diff" in outcome.detail
    if dtype is FP32:
        assert outcome.finding.diff == pytest.approx(DIFF_OF_ONE_PERCENT, rel=1e-3)


BIASES = {
    "a ten-thousandth of itself": lambda logits: logits.mul_(1 + 1e-4),
    "a thousandth": lambda logits: logits.add_(1e-3),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("bias", BIASES)
def test_a_small_bias_of_every_logit(monkeypatch, form, bias):
    def fault(problem, call, run):
        run(call)
        BIASES[bias](call.result)

    outcome = run_one(monkeypatch, fault, form, heads=64)
    assert outcome.status == "fail"
    assert re.search(r"calc_diff \d\.\d\de-\d\d, allowed 1e-10", outcome.detail)
    assert "off by more than 2e-06 of what they sum, the first at [" in outcome.detail


@pytest.mark.parametrize("form", FORMS)
def test_one_logit_a_thousandth_high(monkeypatch, form):
    """Among others it does not show in calc_diff."""
    where = []

    def fault(problem, call, run):
        run(call)
        where[:] = place_of_fault(problem, call)
        call.result[tuple(where)] *= 1.001

    outcome = run_one(monkeypatch, fault, form)
    assert outcome.status == "fail"
    assert f" logits are off by more than 2e-06 of what they sum, the first at {where}: got " in outcome.detail
    assert outcome.detail.startswith("1 of ")


def test_values_are_compared_with_the_unquantised_inputs_too(monkeypatch):
    def fault(problem, call, run):
        run(call)
        call.result.mul_(1.1)

    monkeypatch.setitem(bounds.FLOAT32, FP32, bounds.Bounds(1.0, 1.0, 1.0))
    outcome = run_one(monkeypatch, fault)
    assert outcome.status == "fail"
    assert re.fullmatch(r"calc_diff \d\.\d\de-03 to unquantised, allowed 1\.00e-03", outcome.detail)


def test_what_quantisation_itself_costs_is_allowed(monkeypatch):
    def fault(problem, call, run):
        run(call)
        call.result.mul_(1.02)

    monkeypatch.setattr(mqa_logits, "MAX_DIFF_UNQUANTISED", 1e-9)
    monkeypatch.setitem(bounds.FLOAT32, FP32, bounds.Bounds(1.0, 1.0, 1.0))
    assert run_one(monkeypatch, honest).status == "pass"
    assert "to unquantised" in run_one(monkeypatch, fault).detail


@pytest.mark.parametrize("dtype", [FP32, BF16], ids=["fp32", "bf16"])
def test_one_head_left_out(monkeypatch, dtype):
    def fault(problem, call, run):
        weights = call.weights.clone()
        weights[:, -1] = 0.0
        run(call._replace(weights=weights))

    assert run_one(monkeypatch, fault, dtype=dtype, heads=128).status == "fail"


def test_values_rounded_to_five_bits(monkeypatch):
    def fault(problem, call, run):
        run(call)
        finite = call.result.isfinite()
        mantissa, exponent = call.result.masked_fill(~finite, 0.0).frexp()
        rounded = torch.ldexp((mantissa * 2**5).round(), exponent - 5)
        call.result.copy_(torch.where(finite, rounded, call.result))

    # bfloat16 keeps eight bits and is told apart by its own limit alone: its calc_diff is 1.6e-6.
    outcome = run_one(monkeypatch, fault)
    assert outcome.status == "fail"
    assert "calc_diff" in outcome.detail


def test_the_sign_of_the_key_scales_ignored(monkeypatch):
    def fault(problem, call, run):
        run(call._replace(kv_scale=call.kv_scale.abs()))

    assert run_one(monkeypatch, fault).status == "fail"


def test_key_scales_applied_before_the_relu(monkeypatch):
    def fault(problem, call, run):
        # relu(q . k * scale): the same for positive scales, zero or another head's share for negative ones.
        negated = torch.where(call.kv_scale[:, None] < 0, -call.k.float(), call.k.float())
        run(call._replace(k=negated.to(call.k.dtype), kv_scale=call.kv_scale.abs()))

    assert run_one(monkeypatch, fault).status == "fail"


@pytest.mark.parametrize("column", [0, S_K - 1])
def test_one_wrong_column(monkeypatch, column):
    def fault(problem, call, run):
        scale = call.kv_scale.clone()
        scale[column] = scale[column - 1]
        run(call._replace(kv_scale=scale))

    assert run_one(monkeypatch, fault, s_q=4).status == "fail"


def test_rows_that_swap_their_weights(monkeypatch):
    def fault(problem, call, run):
        run(call._replace(weights=call.weights.flip(0)))

    assert run_one(monkeypatch, fault).status == "fail"


# Repeats


@pytest.mark.parametrize("form", FORMS)
def test_one_bit_that_differs_between_runs(monkeypatch, form):
    calls = itertools.count()

    def fault(problem, call, run):
        run(call)
        if next(calls) % 10 == 9:
            at = place_of_fault(problem, call)
            call.result[at] = call.result[at].nextafter(torch.tensor(math.inf))

    outcome = run_one(monkeypatch, fault, form)
    assert outcome.repeated
    assert outcome.status == "fail"
    assert outcome.detail == "2 of 20 repeats differ bitwise"


def test_differences_where_anything_may_stand_are_none(monkeypatch):
    calls = itertools.count()

    def fault(problem, call, run):
        run(call)
        call.result[0, -1] = float(next(calls))

    outcome = run_one(monkeypatch, fault, "noclean")
    assert outcome.repeated
    assert outcome.status == "pass", outcome.detail


@pytest.mark.parametrize("full", [False, True])
def test_a_sample_of_every_window_and_form_is_repeated(full):
    repeated = set()
    cases = MqaLogitsSuite().cases(full=full)
    repeated.update((case.window, case.form) for case in cases[::REPEATED])
    assert repeated == set(itertools.product(WINDOWS, FORMS))


def test_the_sample_is_what_run_repeats():
    group = group_of(*(("causal", "clean", FP32) for _ in range(REPEATED + 2)))
    repeated = [outcome.repeated for outcome in verified(group, ["torch-blocked"])]
    assert repeated == [True, *[False] * (REPEATED - 1), True, False]


# What does not run


def test_no_memory_is_reported_by_name(monkeypatch):
    monkeypatch.setattr(memory, "available_bytes", lambda device: 2**30)
    group = group_of(("causal", "clean", FP32), ("empty", "compressed", BF16))
    outcomes = verified(group, ["torch-blocked"])
    assert [(outcome.case, outcome.status) for outcome in outcomes] == [(case, "dropped") for case in group]
    for outcome in outcomes:
        assert "GiB" in outcome.detail
        assert "1.0 GiB are free" in outcome.detail
        assert outcome.finding is None


def test_memory_needed_grows_with_the_result(monkeypatch):
    small, large = group_of(("causal", "clean", FP32)), group_of(("causal", "clean", FP32), s_q=1024, s_k=2**20)
    # Two references, the result and temporaries of 4 GiB each do not fit in 8 GiB; the small case does.
    monkeypatch.setattr(memory, "available_bytes", lambda device: 8 * 2**30)
    assert [o.status for o in verified([*small, *large], ["torch-blocked"])] == ["pass", "dropped"]


def test_unsupported_is_reported_with_the_reason(monkeypatch):
    def refuses(problem):
        return "H=24 is not one of 32, 64" if problem.heads == 24 else None

    name = install(monkeypatch, FaultyBackend(honest, refuses))
    groups = [*group_of(("causal", "clean", FP32), heads=24), *group_of(("causal", "clean", FP32))]
    outcomes = verified(groups, [name, "torch-blocked"])
    assert [outcome.status for outcome in outcomes] == ["unsupported", "pass", "pass", "pass"]
    assert outcomes[0].detail == "H=24 is not one of 32, 64"
    assert outcomes[0].finding is None


def test_the_gate_sees_the_form_of_the_case(monkeypatch):
    seen = []

    def refuses(problem):
        seen.append(problem)
        return "no"

    name = install(monkeypatch, FaultyBackend(honest, refuses))
    group = group_of(("misaligned", "clean", FP32), ("misaligned", "noclean", BF16), ("misaligned", "compressed", FP32))
    verified(group, [name])
    assert [(p.clean_logits, p.compressed, p.out_dtype) for p in seen] == [
        (True, False, FP32), (False, False, BF16), (False, True, FP32),
    ]  # fmt: skip
    assert {(p.rows, p.keys, p.heads, p.head_dim) for p in seen} == {(S_Q, S_K, HEADS, HEAD_DIM)}


def test_a_crash_is_not_swallowed(monkeypatch):
    def fault(problem, call, run):
        raise RuntimeError("launch failed")

    with pytest.raises(RuntimeError, match="launch failed"):
        run_one(monkeypatch, fault)


# The guarded output


@pytest.mark.parametrize("dtype", [FP32, BF16], ids=["fp32", "bf16"])
@pytest.mark.parametrize(("rows", "width"), [(1, 1), (3, 17), (2, 64), (5, 113)])
def test_a_fresh_guarded_output_is_poison_throughout(rows, width, dtype):
    output = GuardedOutput(rows, width, dtype, CPU)
    assert output.view.shape == (rows, width)
    assert output.view.dtype is dtype
    assert output.view.stride() == (output.stride, 1)
    assert output.stride > row_stride(width, dtype), "more than the padding that a kernel may expect"
    assert bool(output.view.isnan().all())
    assert bool(output.unwritten().all())
    assert output.intact()


@pytest.mark.parametrize("dtype", [FP32, BF16], ids=["fp32", "bf16"])
def test_every_kind_of_value_counts_as_written(dtype):
    output = GuardedOutput(2, 5, dtype, CPU)
    output.view[0] = torch.tensor([0.0, -0.0, float("inf"), float("-inf"), float("nan")], dtype=dtype)
    output.view[1, 0] = torch.tensor(0.0) / torch.tensor(0.0)
    assert output.unwritten().tolist() == [[False] * 5, [False, True, True, True, True]]
    assert output.intact()


@pytest.mark.parametrize("dtype", [FP32, BF16], ids=["fp32", "bf16"])
def test_every_element_around_the_view_is_guarded(dtype):
    rows, width = 3, 17
    total = GuardedOutput(rows, width, dtype, CPU).view.untyped_storage().nbytes() // dtype.itemsize
    output = GuardedOutput(rows, width, dtype, CPU)
    everything = output.view.as_strided((total,), (1,), 0)
    inside = torch.zeros(total, dtype=torch.bool)
    inside.as_strided(output.view.shape, output.view.stride(), output.view.storage_offset()).fill_(True)
    assert int(inside.sum()) == rows * width
    poison = everything[:1].clone()
    for offset in range(0, total, 61):
        everything[offset] = 1.0
        assert output.intact() == bool(inside[offset])
        everything[offset : offset + 1].copy_(poison)
    assert torch.equal(bits(everything), bits(poison.expand(total)))


# Compressed logits


def by_definition(full: list[list[float]], ks: list[int], width: int) -> list[list[float]]:
    return [
        [row[start + j] if 0 <= start + j < len(row) else 0.0 for j in range(width)]
        for row, start in zip(full, ks, strict=True)
    ]


@pytest.mark.parametrize("ks", [[0, 0, 0], [1, 2, 3], [-2, 6, 7], [9, -9, -1], [-(2**31), 2**31 - 1, 5]])
@pytest.mark.parametrize("width", [1, 4, 7, 12])
def test_compress_is_its_definition(ks, width):
    full = torch.arange(1.0, 22.0).view(3, 7)
    assert compress(full, int32(*ks), width).tolist() == by_definition(full.tolist(), ks, width)
    mask = full.long() % 2 == 0
    expected = [[bool(value) for value in row] for row in by_definition(mask.tolist(), ks, width)]
    assert compress(mask, int32(*ks), width).tolist() == expected


@pytest.mark.parametrize(
    ("ks", "ke", "expected"),
    [
        ([0, 0], [3, 5], 5),
        ([2, 4], [5, 10], 6),
        ([0, 8], [3, 15], 3),  # the end is the tensor's, 10
        ([-3, 0], [4, 4], 7),  # column 0 is position -3
        ([5, 6], [5, 2], 1),  # nothing at all
        ([12, 0], [20, 0], 1),
    ],
)
def test_compressed_width_just_holds_every_window(ks, ke, expected):
    assert compressed_width(int32(*ks), int32(*ke), 10) == expected


@pytest.mark.parametrize("window", [window for window in WINDOWS if window != "cp"])
def test_compressed_width_loses_no_position_and_has_none_to_spare(window):
    ks, ke = make_windows(window, S_Q, S_K, CPU)
    width = compressed_width(ks, ke, S_K)
    mask = window_mask(ks, ke, S_K)
    total = positions_in_windows(ks, ke, S_K)
    assert int(compress(mask, ks, width).sum()) == total
    assert int(compress(mask, ks, width - 1).sum()) < total
