"""``torch-blocked`` against the reference: windows, forms, sizes, blocks, and what must not leak."""

from __future__ import annotations

import dataclasses
import os
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from helpers import (
    CPU,
    FORMS_AND_DTYPES,
    INT32_MAX,
    INT32_MIN,
    MAX_DIFF,
    assert_matches,
    check_guarded,
    expected_for,
    expected_logits,
    int32,
    options_of,
    same_bits,
)
from lightning_indexer import Arch, MqaLogitsProblem, calc_diff, fp8_mqa_logits, reference_logits
from lightning_indexer.backends.torch_blocked import mqa_logits as backend_module
from lightning_indexer.backends.torch_blocked.config import BlockConfig, heuristic
from lightning_indexer.check.cases import WINDOWS, Inputs, make_inputs, make_windows
from lightning_indexer.fp8 import dequantize_k
from lightning_indexer.selection import registry
from processes import python

FN, FNUZ = torch.float8_e4m3fn, torch.float8_e4m3fnuz
# calc_diff against float32 on the operands before quantisation (docs/semantics.md).
MAX_DIFF_UNQUANTISED = 1e-3

# Blocks of the tests: the CPU's own, which hold a whole small problem; and ones that cut it in rows, keys and panels.
BLOCKS = {"one block": None, "many blocks": BlockConfig(2, 16, 32), "odd blocks": BlockConfig(5, 12, 36)}


@pytest.fixture(params=BLOCKS)
def blocks(request, monkeypatch):
    config = BLOCKS[request.param]
    if config is not None:
        monkeypatch.setattr(registry.kernel("torch-blocked"), "config", lambda problem, arch: config)
    return config


def call(inputs: Inputs, ks: torch.Tensor, ke: torch.Tensor, **options) -> torch.Tensor:
    kv = (inputs.k_fp8, inputs.kv_scale)
    return fp8_mqa_logits(inputs.q_fp8, kv, inputs.weights, ks, ke, backend="torch-blocked", **options)


def check(inputs: Inputs, ks: torch.Tensor, ke: torch.Tensor, form="clean", dtype=torch.float32, width=0):
    """One call of a form into a poisoned, guarded buffer."""
    width = (width or inputs.k_fp8.shape[0]) if form == "compressed" else 0
    return check_guarded(
        lambda out: call(inputs, ks, ke, out=out, out_dtype=dtype, **options_of(form, width)),
        expected_for(inputs, ks, ke, width),
        dtype,
        clean=form == "clean",
    )


# Windows, forms, sizes


@pytest.mark.parametrize(("form", "dtype"), FORMS_AND_DTYPES)
@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize(("heads", "head_dim"), [(64, 128), (32, 64), (8, 32), (3, 20), (1, 1)])
def test_windows(blocks, heads, head_dim, window, form, dtype):
    inputs = make_inputs(16, 128, heads, head_dim, CPU)
    check(inputs, *make_windows(window, 16, 128, CPU), form, dtype)


# Below, at and above a multiple of the blocks (2 or 5 rows, 16 or 12 keys, 32 or 36 keys a panel); more rows than keys.
@pytest.mark.parametrize("window", ["causal", "misaligned", "empty", "past_end", "multi_req"])
@pytest.mark.parametrize("form", ["clean", "compressed"])
@pytest.mark.parametrize(
    ("rows", "keys"),
    [(1, 1), (2, 16), (3, 15), (5, 17), (1, 31), (4, 33), (10, 36), (11, 37), (7, 113), (3, 1560), (1, 17), (40, 9)],
)
def test_sizes_around_the_blocks(blocks, rows, keys, window, form):
    check(make_inputs(rows, keys, 3, 20, CPU), *make_windows(window, rows, keys, CPU), form)


@pytest.mark.parametrize("keys", [1, 17, 113, 1560])
@pytest.mark.parametrize("rows", [1, 4, 61])
def test_sizes_of_the_sweep(rows, keys):
    inputs = make_inputs(rows, keys, 16, 32, CPU)
    for window in ("causal", "misaligned", "multi_req"):
        ks, ke = make_windows(window, rows, keys, CPU)
        assert_matches(call(inputs, ks, ke), expected_for(inputs, ks, ke), clean=True)


@pytest.mark.parametrize("width", [1, 15, 16, 17, 100, 128, 129, 300])
def test_compressed_narrower_and_wider_than_the_windows(blocks, width):
    inputs = make_inputs(12, 128, 4, 32, CPU)
    for window in WINDOWS:
        if window != "cp":
            check(inputs, *make_windows(window, 12, 128, CPU), "compressed", width=width)


@pytest.mark.parametrize("ratio", [1, 4])
def test_compress_ratio(blocks, ratio):
    """With four tokens a key, the first three rows of every request are empty."""
    row = torch.arange(24, dtype=torch.int32)
    first = row // 12 * (64 // ratio)
    ks, ke = first, first + (row % 12 + 1) // ratio
    inputs = make_inputs(24, 128 // ratio, 8, 32, CPU)
    result = check(inputs, ks, ke)
    empty = (result == float("-inf")).all(1).nonzero().flatten().tolist()
    assert empty == ([] if ratio == 1 else [0, 1, 2, 12, 13, 14])


EXTREMES = [
    (INT32_MIN, INT32_MAX), (INT32_MIN, INT32_MIN), (INT32_MAX, INT32_MAX), (INT32_MAX, INT32_MIN),
    (INT32_MIN, 5), (-1, 5), (5, INT32_MAX), (39, INT32_MAX), (40, INT32_MAX), (INT32_MIN, 0), (0, INT32_MIN),
    (7, 7), (8, 7), (7, 8), (0, 40), (-40, 80), (39, 40), (-5, 0), (-5, 1), (INT32_MAX - 1, INT32_MAX),
]  # fmt: skip


@pytest.mark.parametrize(("form", "dtype"), FORMS_AND_DTYPES)
def test_windows_at_the_ends_of_int32(blocks, form, dtype):
    ks, ke = (int32(*column) for column in zip(*EXTREMES, strict=True))
    check(make_inputs(len(EXTREMES), 40, 4, 32, CPU), ks, ke, form, dtype)


@pytest.mark.parametrize("form", ["clean", "noclean", "compressed"])
@pytest.mark.parametrize(("rows", "keys"), [(64, 384), (6, 40)])
def test_rows_without_a_window(blocks, rows, keys, form):
    """Every row is written, also where whole blocks are skipped."""
    inputs = make_inputs(rows, keys, 4, 32, CPU)
    nothing = torch.full((rows,), 7, dtype=torch.int32)
    check(inputs, nothing, nothing - 3, form)
    one_row = nothing.clone()
    one_row[rows // 2] = keys
    check(inputs, nothing, one_row, form)


def test_accuracy_against_the_operands_before_quantisation():
    inputs = make_inputs(64, 384, 32, 128, CPU)
    ks, ke = make_windows("misaligned", 64, 384, CPU)
    exact = reference_logits(inputs.q, (inputs.k, torch.ones(384)), inputs.weights, ks, ke)
    inside = exact != float("-inf")
    diff = calc_diff(call(inputs, ks, ke), exact, inside)
    assert 1e-6 < diff < MAX_DIFF_UNQUANTISED
    assert calc_diff(call(inputs, ks, ke), expected_for(inputs, ks, ke), inside) < MAX_DIFF[torch.float32]


# Signs, NaN, and what lies outside of the windows


@pytest.mark.parametrize("form", ["clean", "noclean", "compressed"])
def test_scales_of_any_sign(blocks, form):
    inputs = make_inputs(12, 77, 4, 32, CPU)
    scale = inputs.kv_scale * torch.tensor([1.0, -1.0, 0.0, 3.0]).repeat(20)[:77]
    check(dataclasses.replace(inputs, kv_scale=scale), *make_windows("misaligned", 12, 77, CPU), form)


@pytest.mark.parametrize("sign_of_weights", [1.0, -1.0])
@pytest.mark.parametrize("sign_of_scales", [1.0, -1.0])
@pytest.mark.parametrize(("form", "dtype"), FORMS_AND_DTYPES)
def test_zeros_are_positive(blocks, sign_of_weights, sign_of_scales, form, dtype):
    """q >= 0 and k < 0 make every score 0, and a negative factor would make the sum -0.0."""
    inputs = make_inputs(6, 50, 4, 32, CPU)
    inputs = dataclasses.replace(
        inputs,
        q_fp8=inputs.q_fp8.float().abs().to(FN),
        k_fp8=(-inputs.k_fp8.float().abs() - 0.5).to(FN),
        weights=inputs.weights.abs() * sign_of_weights,
        kv_scale=inputs.kv_scale * sign_of_scales,
    )
    ks, ke = make_windows("misaligned", 6, 50, CPU)
    width = 50 if form == "compressed" else 0
    inside = expected_for(inputs, ks, ke, width) == 0
    assert bool(inside.any())
    result = call(inputs, ks, ke, out_dtype=dtype, **options_of(form, width))[inside]
    assert same_bits(result, torch.zeros_like(result))


@pytest.mark.parametrize("form", ["clean", "compressed"])
@pytest.mark.parametrize("code", [0x7F, 0xFF])
def test_a_nan_key_stays_in_its_column(blocks, form, code):
    inputs = make_inputs(10, 80, 4, 32, CPU)
    row = torch.arange(10, dtype=torch.int32)
    ks, ke = row * 3, row * 3 + 40
    spoiled = inputs.k_fp8.clone()
    spoiled.view(torch.uint8)[45, 7] = code  # rows 2 to 9 see key 45, rows 0 and 1 do not
    width = 80 if form == "compressed" else 0
    good = call(inputs, ks, ke, **options_of(form, width))
    bad = call(dataclasses.replace(inputs, k_fp8=spoiled), ks, ke, **options_of(form, width))
    inside = expected_for(inputs, ks, ke, width) != float("-inf")
    column = torch.arange(inside.shape[1])[None, :] + (ks[:, None] if width else 0)
    untouched = inside & (column != 45)
    assert int((inside & (column == 45)).sum()) == 8
    assert same_bits(bad[untouched], good[untouched])
    if form == "clean":
        assert torch.equal(bad == float("-inf"), ~inside)


def test_a_nan_query_stays_in_its_row(blocks):
    inputs = make_inputs(10, 80, 4, 32, CPU)
    ks, ke = make_windows("misaligned", 10, 80, CPU)
    spoiled = inputs.q_fp8.clone()
    spoiled.view(torch.uint8)[4, 2, 9] = 0x7F
    good, bad = call(inputs, ks, ke), call(dataclasses.replace(inputs, q_fp8=spoiled), ks, ke)
    others = torch.arange(10) != 4
    assert same_bits(bad[others], good[others])
    assert torch.equal(bad[4] == float("-inf"), good[4] == float("-inf"))


@pytest.mark.parametrize(("form", "dtype"), FORMS_AND_DTYPES)
def test_keys_outside_of_every_window_are_not_read_into_a_result(blocks, form, dtype):
    """The gathered buffer holds garbage before, between and after the requests."""
    inputs = make_inputs(8, 120, 4, 32, CPU)
    ks = int32(*[21] * 4, *[70] * 4)
    ke = int32(30, 31, 40, 41, 71, 72, 90, 99)
    outside = torch.ones(120, dtype=torch.bool)
    outside[21:41] = False
    outside[70:99] = False
    k, scale = inputs.k_fp8.clone(), inputs.kv_scale.clone()
    k.view(torch.uint8)[outside] = 0x7F
    scale[outside] = torch.tensor([float("nan"), float("inf"), float("-inf")]).repeat(40)[: int(outside.sum())]
    garbage = dataclasses.replace(inputs, k_fp8=k, kv_scale=scale)
    width = 35 if form == "compressed" else 0
    expected = expected_for(inputs, ks, ke, width)
    result = check_guarded(
        lambda out: call(garbage, ks, ke, out=out, out_dtype=dtype, **options_of(form, width)),
        expected,
        dtype,
        clean=form == "clean",
    )
    inside = expected != float("-inf")
    assert same_bits(result[inside], call(inputs, ks, ke, out_dtype=dtype, **options_of(form, width))[inside])


@pytest.mark.parametrize(("form", "dtype"), FORMS_AND_DTYPES)
def test_twenty_calls_are_bitwise_equal(form, dtype, monkeypatch):
    monkeypatch.setattr(registry.kernel("torch-blocked"), "config", lambda problem, arch: BlockConfig(8, 64, 128))
    inputs = make_inputs(61, 200, 32, 64, CPU)
    ks, ke = make_windows("misaligned", 61, 200, CPU)
    width = 200 if form == "compressed" else 0
    inside = expected_for(inputs, ks, ke, width) != float("-inf")
    if form == "clean":
        inside[:] = True
    first = call(inputs, ks, ke, out_dtype=dtype, **options_of(form, width))[inside]
    for _ in range(19):
        assert same_bits(call(inputs, ks, ke, out_dtype=dtype, **options_of(form, width))[inside], first)


# The state of the caller


def test_operands_that_require_grad():
    inputs = make_inputs(6, 50, 4, 32, CPU)
    ks, ke = make_windows("misaligned", 6, 50, CPU)
    tracked = dataclasses.replace(
        inputs, weights=inputs.weights.clone().requires_grad_(), kv_scale=inputs.kv_scale.clone().requires_grad_()
    )
    result = call(tracked, ks, ke)
    assert not result.requires_grad
    assert same_bits(result, call(inputs, ks, ke))


def test_inference_mode():
    inputs = make_inputs(6, 50, 4, 32, CPU)
    ks, ke = make_windows("misaligned", 6, 50, CPU)
    out = torch.empty(6, 50)
    with torch.inference_mode():
        result = call(inputs, ks, ke)
        call(inputs, ks, ke, out=out)
    assert_matches(result, expected_for(inputs, ks, ke), clean=True)
    assert same_bits(out, result)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_the_default_dtype_plays_no_part(dtype):
    """Inference engines set it to the dtype of the model while they build and warm up."""
    inputs = make_inputs(6, 50, 4, 32, CPU)
    ks, ke = make_windows("misaligned", 6, 50, CPU)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        result = call(inputs, ks, ke)
    finally:
        torch.set_default_dtype(before)
    assert result.dtype is torch.float32
    assert_matches(result, expected_for(inputs, ks, ke), clean=True)


@pytest.mark.parametrize(("form", "dtype"), FORMS_AND_DTYPES)
@pytest.mark.parametrize("window", WINDOWS)
def test_without_reading_the_windows_back(blocks, monkeypatch, window, form, dtype):
    """While a CUDA graph is captured the table of touched blocks cannot be made; the result is the same."""
    touched = backend_module._Touched

    class Capturing(touched):
        def __init__(self, lo, hi, block_rows, block_keys, keys):
            self.block_rows, self.block_keys, self.table = block_rows, block_keys, None

    monkeypatch.setattr(backend_module, "_Touched", Capturing)
    inputs = make_inputs(16, 128, 3, 20, CPU)
    check(inputs, *make_windows(window, 16, 128, CPU), form, dtype)


# gfx942: fn operands are read as fnuz


def every_byte(dtype: torch.dtype, rows: int, columns: int, seed: int) -> torch.Tensor:
    """All byte patterns but NaN, which include 0x80 for fn: -0.0 there, and NaN to the matrix unit of gfx942."""
    nan = (0x7F, 0xFF) if dtype is FN else (0x80,)
    codes = torch.tensor([code for code in range(256) if code not in nan], dtype=torch.uint8)
    order = torch.randint(len(codes), (rows * columns,), generator=torch.Generator().manual_seed(seed))
    order[: len(codes)] = torch.arange(len(codes))
    return codes[order].view(rows, columns).view(dtype)


@pytest.mark.parametrize("q_dtype", [FN, FNUZ])
@pytest.mark.parametrize("k_dtype", [FN, FNUZ])
@pytest.mark.parametrize(("form", "dtype"), FORMS_AND_DTYPES)
def test_the_four_pairs_of_gfx942(monkeypatch, q_dtype, k_dtype, form, dtype):
    """Cases 8 and 9."""
    monkeypatch.setenv("LIGHTNING_INDEXER_ARCH", "gfx942")
    plain = make_inputs(10, 80, 4, 32, CPU)
    q = every_byte(q_dtype, 10 * 4, 32, seed=1).view(10, 4, 32)
    k = every_byte(k_dtype, 80, 32, seed=2)
    inputs = dataclasses.replace(plain, q_fp8=q, k_fp8=k)
    before = q.clone(), k.clone(), inputs.kv_scale.clone()
    check(inputs, *make_windows("misaligned", 10, 80, CPU), form, dtype)
    for value, old in zip((q, k, inputs.kv_scale), before, strict=True):
        assert same_bits(value, old), "an operand was modified"


@pytest.mark.parametrize("q_dtype", [FN, FNUZ])
@pytest.mark.parametrize("k_dtype", [FN, FNUZ])
def test_the_backend_of_gfx942_is_given_fnuz(monkeypatch, q_dtype, k_dtype):
    monkeypatch.setenv("LIGHTNING_INDEXER_ARCH", "gfx942")
    seen = []
    kernel = registry.kernel("torch-blocked")
    original = kernel.launch

    def launch(problem, arch, config):
        run = original(problem, arch, config)
        return lambda call: seen.append((problem, arch, call)) or run(call)

    monkeypatch.setattr(kernel, "launch", launch)
    inputs = make_inputs(4, 40, 4, 32, CPU)
    inputs = dataclasses.replace(
        inputs, q_fp8=inputs.q.clamp(-200, 200).to(q_dtype), k_fp8=inputs.k.clamp(-200, 200).to(k_dtype)
    )
    ks, ke = make_windows("misaligned", 4, 40, CPU)
    assert_matches(call(inputs, ks, ke), expected_for(inputs, ks, ke), clean=True)
    ((problem, arch, operands),) = seen
    assert (problem.q_dtype, problem.k_dtype, arch.name) == (q_dtype, k_dtype, "gfx942")
    assert (operands.q.dtype, operands.k.dtype) == (FNUZ, FNUZ)
    factor = (2.0 if q_dtype is FN else 1.0) * (2.0 if k_dtype is FN else 1.0)
    assert torch.equal(operands.kv_scale, inputs.kv_scale * factor)


@pytest.mark.parametrize("arch", ["sm90", "gfx90a", "gfx950"])
def test_other_archs_refuse_fnuz(monkeypatch, arch):
    monkeypatch.setenv("LIGHTNING_INDEXER_ARCH", arch)
    inputs = make_inputs(4, 40, 4, 32, CPU)
    ks, ke = make_windows("misaligned", 4, 40, CPU)
    assert_matches(call(inputs, ks, ke), expected_for(inputs, ks, ke), clean=True)
    for name in ("q", "k"):
        spoiled = dataclasses.replace(inputs, **{f"{name}_fp8": getattr(inputs, f"{name}_fp8").float().to(FNUZ)})
        with pytest.raises(TypeError, match=f"^{name}: got float8_e4m3fnuz on {arch}, expected float8_e4m3fn"):
            call(spoiled, ks, ke)


def test_the_reference_is_the_formula():
    """The oracle itself, spelled out in Python for one small problem."""
    inputs = make_inputs(3, 7, 2, 4, CPU)
    ks, ke = int32(1, -2, 5), int32(4, 3, 9)
    k = dequantize_k(inputs.k_fp8, torch.ones(7)).tolist()
    q, weights, scale = inputs.q_fp8.float().tolist(), inputs.weights.tolist(), inputs.kv_scale.tolist()
    expected = torch.full((3, 7), float("-inf"), dtype=torch.float64)
    for m in range(3):
        for n in range(max(0, int(ks[m])), min(7, int(ke[m]))):
            scores = [max(0.0, sum(q[m][h][d] * k[n][d] for d in range(4))) for h in range(2)]
            expected[m, n] = scale[n] * sum(w * score for w, score in zip(weights[m], scores, strict=True))
    result = expected_logits(inputs.q_fp8, inputs.k_fp8, inputs.kv_scale, inputs.weights, ks, ke)
    assert_matches(result, expected.float(), clean=True)


# Block sizes


@pytest.mark.parametrize("arch", ["cpu", "sm90", "gfx942"])
@pytest.mark.parametrize("heads", [1, 3, 8, 64, 128, 1000, 100_000])
@pytest.mark.parametrize("rows", [1, 17, 16384])
def test_heuristic(arch, heads, rows):
    arch = Arch.parse(arch)
    config = heuristic(MqaLogitsProblem(rows, 131072, heads, 128), arch)
    assert 1 <= config.block_rows <= rows
    assert config.panel_keys % config.block_keys == 0
    score_bytes = 4 * config.block_rows * heads * config.block_keys
    assert score_bytes <= (2 * 2**20 if arch.name == "cpu" else 256 * 2**20) or config.block_rows == 1
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.block_rows = 3


@pytest.fixture
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def _large_call(form: str = "clean") -> torch.Tensor:
    inputs = make_inputs(150, 1700, 16, 64, CPU)
    ks, ke = make_windows("misaligned", 150, 1700, CPU)
    return fp8_mqa_logits(
        inputs.q_fp8, (inputs.k_fp8, inputs.kv_scale), inputs.weights, ks, ke,
        clean_logits=form == "clean", max_seqlen_k=1700 if form == "compressed" else 0, backend="torch-blocked",
    )  # fmt: skip


class TestThreads:
    """Row blocks run on a pool of threads where PyTorch has more than one."""

    def test_the_result_does_not_depend_on_them(self, two_threads):
        threaded = _large_call()
        torch.set_num_threads(1)
        assert torch.equal(threaded, _large_call())

    def test_the_callers_thread_count_is_left_alone(self, two_threads):
        backend_module._pool.cache_clear()
        _large_call()
        assert torch.get_num_threads() == 2
        seen: list[int] = []
        thread = threading.Thread(target=lambda: seen.append(torch.get_num_threads()))
        thread.start()
        thread.join()
        assert seen == [2], "threads made after the pool"

    def test_modes_of_the_caller_hold_in_the_threads(self, two_threads):
        expected = _large_call()
        with torch.inference_mode():
            assert torch.equal(_large_call(), expected)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert torch.equal(_large_call(), expected)

    def test_an_error_in_a_thread_reaches_the_caller(self, two_threads, monkeypatch):
        def broken(self, logits, key, key_stop, *, inside):
            raise RuntimeError("planted in a block")

        monkeypatch.setattr(backend_module._Store, "block", broken)
        with pytest.raises(RuntimeError, match="planted in a block"):
            _large_call()

    def test_several_callers_at_once(self, two_threads):
        expected = _large_call()
        with ThreadPoolExecutor(4) as callers:
            results = list(callers.map(lambda _: _large_call(), range(8)))
        assert all(torch.equal(result, expected) for result in results)

    @pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
    @pytest.mark.slow
    def test_a_forked_child_makes_its_own_threads(self):
        """PyTorch's own OpenMP threads do not survive a fork either, so the child here computes nothing."""
        code = (
            "import os, sys, torch\n"
            "from lightning_indexer.backends.torch_blocked.mqa_logits import _pool\n"
            "work = lambda: list(_pool(2).map(abs, (-1, -2)))\n"
            "assert work() == [1, 2]\n"
            "child = os.fork()\n"
            "if child == 0: os._exit(0 if work() == [1, 2] else 1)\n"
            "sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))\n"
        )
        python("-c", code, timeout=60)
