"""The adapters: argument order, values, and the errors of what they do not take over."""

from __future__ import annotations

import inspect

import pytest
import torch

import lightning_indexer
from helpers import CPU, assert_matches, expected_for
from lightning_indexer.check.cases import make_inputs, make_windows
from lightning_indexer.integrations import aiter, deep_gemm

ROWS, KEYS, HEADS, HEAD_DIM = 12, 77, 4, 32


@pytest.fixture(scope="module")
def inputs():
    return make_inputs(ROWS, KEYS, HEADS, HEAD_DIM, CPU)


@pytest.fixture(scope="module")
def windows():
    ks, ke = make_windows("misaligned", ROWS, KEYS, CPU)
    assert bool((ks > 0).all())
    return ks, ke


def names(function) -> list[str]:
    return list(inspect.signature(function).parameters)


def test_signatures_are_those_of_the_peers():
    window = ["cu_seq_len_k_start", "cu_seq_len_k_end"]
    assert names(deep_gemm.fp8_mqa_logits) == ["q", "kv", "weights", *window, "clean_logits", "max_seqlen_k"]
    assert names(deep_gemm.fp8_fp4_mqa_logits) == [
        "q", "kv", "weights", *window, "max_seqlen_k", "schedule_meta", "logits_dtype",
    ]  # fmt: skip
    assert names(aiter.fp8_mqa_logits) == ["Q", "KV", "kv_scales", "weights", "cu_starts", "cu_ends", "clean_logits"]
    assert names(aiter.rocm_fp8_mqa_logits) == ["q", "kv", "weights", "cu_seqlen_ks", "cu_seqlen_ke"]


@pytest.mark.parametrize(
    ("call", "options"),
    [
        (lambda *a: deep_gemm.fp8_mqa_logits(*a), {"clean_logits": True, "max_seqlen_k": 0}),
        (lambda *a: deep_gemm.fp8_mqa_logits(*a, False, 7), {"clean_logits": False, "max_seqlen_k": 7}),
        (
            lambda q, *a: deep_gemm.fp8_fp4_mqa_logits((q, None), *a, 7),
            {"clean_logits": False, "max_seqlen_k": 7, "out_dtype": torch.float32},
        ),
        (lambda q, kv, *a: aiter.fp8_mqa_logits(q, *kv, *a), {"clean_logits": True}),
        (lambda q, kv, *a: aiter.fp8_mqa_logits(q, *kv, *a, False), {"clean_logits": False}),
        (lambda *a: aiter.rocm_fp8_mqa_logits(*a), {}),
    ],
)
def test_adapters_pass_on_what_they_are_given(monkeypatch, inputs, windows, call, options):
    """An option that is dropped would not always show in the values: a clean result is a good unclean one."""
    seen = []
    monkeypatch.setattr(lightning_indexer, "fp8_mqa_logits", lambda *a, **o: seen.append((a, o)) or "the result")
    arguments = (inputs.q_fp8, (inputs.k_fp8, inputs.kv_scale), inputs.weights, *windows)
    assert call(*arguments) == "the result"
    (((q, kv, *others), passed),) = seen
    assert q is arguments[0]
    assert [id(x) for x in kv] == [id(x) for x in arguments[1]]
    assert [id(x) for x in others] == [id(x) for x in arguments[2:]]
    assert passed == options


# DeepGEMM


@pytest.mark.parametrize("clean", [True, False])
def test_deep_gemm(inputs, windows, clean):
    result = deep_gemm.fp8_mqa_logits(inputs.q_fp8, (inputs.k_fp8, inputs.kv_scale), inputs.weights, *windows, clean)
    assert result.dtype is torch.float32
    assert_matches(result, expected_for(inputs, *windows), clean=clean)


def test_deep_gemm_is_clean_by_default(inputs, windows):
    result = deep_gemm.fp8_mqa_logits(inputs.q_fp8, (inputs.k_fp8, inputs.kv_scale), inputs.weights, *windows)
    assert_matches(result, expected_for(inputs, *windows), clean=True)


@pytest.mark.parametrize("width", [1, 40, KEYS, 90])
def test_deep_gemm_compressed(inputs, windows, width):
    result = deep_gemm.fp8_mqa_logits(
        inputs.q_fp8, (inputs.k_fp8, inputs.kv_scale), inputs.weights, *windows, False, width
    )
    assert_matches(result, expected_for(inputs, *windows, width), clean=False)


def test_deep_gemm_refuses_compressed_and_clean(inputs, windows):
    with pytest.raises(ValueError, match="clean_logits: got True with max_seqlen_k > 0, expected False"):
        deep_gemm.fp8_mqa_logits(
            inputs.q_fp8, (inputs.k_fp8, inputs.kv_scale), inputs.weights, *windows, max_seqlen_k=8
        )


def test_deep_gemm_names_the_newer_forms_width_in_the_place_of_clean(inputs, windows):
    with pytest.raises(TypeError, match="clean_logits: got int, expected a bool"):
        deep_gemm.fp8_mqa_logits(inputs.q_fp8, (inputs.k_fp8, inputs.kv_scale), inputs.weights, *windows, KEYS)


# DeepGEMM as bundled in vLLM 0.33


@pytest.mark.parametrize("width", [1, 40, 90])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_deep_gemm_of_vllm(inputs, windows, width, dtype):
    kv = (inputs.k_fp8, inputs.kv_scale)
    result = deep_gemm.fp8_fp4_mqa_logits((inputs.q_fp8, None), kv, inputs.weights, *windows, width, logits_dtype=dtype)
    assert result.dtype is dtype
    assert_matches(result, expected_for(inputs, *windows, width), clean=False)


def test_deep_gemm_of_vllm_is_float32_and_ignores_the_schedule(inputs, windows):
    arguments = ((inputs.q_fp8, None), (inputs.k_fp8, inputs.kv_scale), inputs.weights, *windows, KEYS)
    schedule = torch.zeros(133, 2, dtype=torch.int32)
    for result in (
        deep_gemm.fp8_fp4_mqa_logits(*arguments),
        deep_gemm.fp8_fp4_mqa_logits(*arguments, schedule),
        deep_gemm.fp8_fp4_mqa_logits(*arguments, schedule_meta=schedule),
    ):
        assert result.dtype is torch.float32
        assert_matches(result, expected_for(inputs, *windows, KEYS), clean=False)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"q": "tensor"}, TypeError, r"^q: got Tensor, expected the pair \(q, None\)"),
        ({"q": "three"}, TypeError, r"^q: got tuple, expected the pair \(q, None\)"),
        ({"q": "fp4"}, TypeError, r"^q: got a scale, .*fp4 is not supported: expected \(q, None\)"),
        ({"max_seqlen_k": 0}, ValueError, "^max_seqlen_k: got 0, expected at least 1"),
        ({"max_seqlen_k": -1}, ValueError, "^max_seqlen_k: got -1, expected"),
        # The repository's order, clean_logits before max_seqlen_k.
        ({"max_seqlen_k": True}, TypeError, "^max_seqlen_k: got bool, expected an int"),
        ({"max_seqlen_k": False}, TypeError, "^max_seqlen_k: got bool, expected an int"),
        ({"logits_dtype": torch.float16}, TypeError, "^out_dtype: got torch.float16, expected torch.float32 or"),
    ],
)
def test_deep_gemm_of_vllm_errors(inputs, windows, change, error, message):
    forms = {
        "tensor": inputs.q_fp8,
        "three": (inputs.q_fp8, None, None),
        "fp4": (inputs.q_fp8, torch.ones(ROWS, HEADS, dtype=torch.int32)),
    }
    q = forms.get(change.get("q"), (inputs.q_fp8, None))
    options = {"max_seqlen_k": KEYS, **{name: value for name, value in change.items() if name != "q"}}
    with pytest.raises(error, match=message):
        deep_gemm.fp8_fp4_mqa_logits(q, (inputs.k_fp8, inputs.kv_scale), inputs.weights, *windows, **options)


# AITER, and vLLM on ROCm


@pytest.mark.parametrize("clean", [True, False])
@pytest.mark.parametrize("column", [False, True])
def test_aiter(inputs, windows, clean, column):
    kv_scales = inputs.kv_scale[:, None] if column else inputs.kv_scale
    result = aiter.fp8_mqa_logits(inputs.q_fp8, inputs.k_fp8, kv_scales, inputs.weights, *windows, clean)
    assert_matches(result, expected_for(inputs, *windows), clean=clean)


def test_aiter_is_clean_by_default(inputs, windows):
    result = aiter.fp8_mqa_logits(inputs.q_fp8, inputs.k_fp8, inputs.kv_scale, inputs.weights, *windows)
    assert_matches(result, expected_for(inputs, *windows), clean=True)


@pytest.mark.parametrize("column", [False, True])
def test_vllm_on_rocm(inputs, windows, column):
    # vLLM reads the scales out of a byte workspace that is longer than the chunk.
    workspace = torch.zeros(KEYS + 9, 4, dtype=torch.uint8)
    workspace[:KEYS].view(torch.float32)[:, 0] = inputs.kv_scale
    scale = workspace[:KEYS].view(torch.float32)
    assert scale.shape == (KEYS, 1)
    kv = (inputs.k_fp8, scale if column else scale[:, 0])
    result = aiter.rocm_fp8_mqa_logits(inputs.q_fp8, kv, inputs.weights, *windows)
    assert_matches(result, expected_for(inputs, *windows), clean=True)


def test_aiter_errors_use_the_names_of_the_library(inputs, windows):
    with pytest.raises(TypeError, match=r"^cu_seqlen_ks: got dtype torch.int64, expected torch.int32"):
        aiter.fp8_mqa_logits(inputs.q_fp8, inputs.k_fp8, inputs.kv_scale, inputs.weights, windows[0].long(), windows[1])
    with pytest.raises(TypeError, match=r"^kv: got one tensor, expected the pair \(k, kv_scale\)"):
        aiter.rocm_fp8_mqa_logits(inputs.q_fp8, inputs.k_fp8, inputs.weights, *windows)
