"""The adapters: argument order, values, and the errors of what they do not take over."""

from __future__ import annotations

import inspect

import numpy as np
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
        "q", "kv", "weights", *window, "clean_logits", "max_seqlen_k", "logits_dtype", "schedule_meta",
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


# The three forms of DeepGEMM's call: how each is written, and what it comes to


SCHEDULE = torch.zeros(133, 2, dtype=torch.int32)
ARGUMENTS = ("q", "kv", "weights", "cu_seq_len_k_start", "cu_seq_len_k_end")

# The arguments after the windows, by position and by keyword, and (clean_logits, max_seqlen_k, logits_dtype) of them.
REPOSITORY = [
    ((), {}, (True, 0, torch.float32)),
    ((True,), {}, (True, 0, torch.float32)),
    ((False,), {}, (False, 0, torch.float32)),
    ((True, 0, torch.bfloat16), {}, (True, 0, torch.bfloat16)),
    ((False, 40), {}, (False, 40, torch.float32)),
    ((False, 40, torch.bfloat16), {}, (False, 40, torch.bfloat16)),
    ((False, 40, torch.float32, SCHEDULE), {}, (False, 40, torch.float32)),
    ((np.bool_(False), np.int64(40)), {}, (False, 40, torch.float32)),
    ((False,), {"max_seqlen_k": 90, "logits_dtype": torch.bfloat16}, (False, 90, torch.bfloat16)),
    ((), {"clean_logits": True, "max_seqlen_k": 0, "logits_dtype": torch.float32}, (True, 0, torch.float32)),
    ((), {"clean_logits": True, "max_seqlen_k": 0, "logits_dtype": torch.bfloat16}, (True, 0, torch.bfloat16)),
    ((), {"clean_logits": False, "max_seqlen_k": 40, "logits_dtype": torch.bfloat16}, (False, 40, torch.bfloat16)),
    ((), {"clean_logits": False, "max_seqlen_k": 40, "schedule_meta": SCHEDULE}, (False, 40, torch.float32)),
    ((), {"clean_logits": False}, (False, 0, torch.float32)),
    ((), {"logits_dtype": torch.bfloat16}, (True, 0, torch.bfloat16)),
]
WHEEL = [
    ((40,), {}, (False, 40, torch.float32)),
    ((1,), {}, (False, 1, torch.float32)),
    ((np.int32(40),), {}, (False, 40, torch.float32)),
    ((40, SCHEDULE), {}, (False, 40, torch.float32)),
    ((40, None), {}, (False, 40, torch.float32)),
    ((40,), {"schedule_meta": SCHEDULE}, (False, 40, torch.float32)),
    ((), {"max_seqlen_k": 40}, (False, 40, torch.float32)),
    ((), {"max_seqlen_k": 90, "schedule_meta": SCHEDULE}, (False, 90, torch.float32)),
    ((), {"max_seqlen_k": 40, "schedule_meta": None}, (False, 40, torch.float32)),
]
FIRST = [
    ((), {}, (True, 0, torch.float32)),
    ((True,), {}, (True, 0, torch.float32)),
    ((False,), {}, (False, 0, torch.float32)),
    ((False, 40), {}, (False, 40, torch.float32)),
    ((), {"clean_logits": False, "max_seqlen_k": 40}, (False, 40, torch.float32)),
    ((), {"clean_logits": False}, (False, 0, torch.float32)),
    ((), {"max_seqlen_k": 0}, (True, 0, torch.float32)),
]


@pytest.mark.parametrize(
    ("form", "named", "more", "options", "meaning"),
    [
        (form, named, *case)
        for form, cases in (("first", FIRST), ("repository", REPOSITORY), ("wheel", WHEEL))
        for case in cases
        for named in (False, True)
        if not (named and case[0])  # arguments by position, after others by keyword
    ],
)
def test_every_form_of_the_call(inputs, windows, form, named, more, options, meaning):
    function = deep_gemm.fp8_mqa_logits if form == "first" else deep_gemm.fp8_fp4_mqa_logits
    q = inputs.q_fp8 if form == "first" else (inputs.q_fp8, None)
    given = (q, (inputs.k_fp8, inputs.kv_scale), inputs.weights, *windows)
    clean, width, dtype = meaning
    if named:
        result = function(**dict(zip(ARGUMENTS, given, strict=True)), **options)
    else:
        result = function(*given, *more, **options)
    assert result.dtype is dtype
    assert_matches(result, expected_for(inputs, *windows, width), clean=clean)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"q": "tensor"}, TypeError, r"^q: got Tensor, expected the pair \(q, None\)"),
        ({"q": "three"}, TypeError, r"^q: got tuple, expected the pair \(q, None\)"),
        ({"q": "fp8 with scales"}, TypeError, r"^q: got dtype torch.float8_e4m3fn, .*values of fp4 are packed"),
        ({"q": "fp4 of float scales"}, TypeError, r"^q's scales: got dtype torch.float32, .*four UE8M0 bytes"),
        ({"q": "fp4 of D=16"}, ValueError, r"^q: got shape .*, expected \[..., 64\] and an int32 a row"),
        ({"sixth": 0}, ValueError, "^max_seqlen_k: got 0, expected at least 1"),
        ({"sixth": -1}, ValueError, "^max_seqlen_k: got -1, expected"),
        (
            {"sixth": 40, "max_seqlen_k": 41},
            TypeError,
            "^max_seqlen_k: got 41 beside 40 in the sixth place, expected one",
        ),
        ({"sixth": "40"}, TypeError, "^clean_logits or max_seqlen_k, the sixth argument: got str, expected an int"),
        ({"max_seqlen_k": -1}, ValueError, "^max_seqlen_k: got -1, expected"),
        ({"max_seqlen_k": True}, TypeError, "^max_seqlen_k: got bool, expected an int"),
        ({"sixth": False, "max_seqlen_k": False}, TypeError, "^max_seqlen_k: got bool, expected an int"),
        (
            {"sixth": True, "max_seqlen_k": 40},
            ValueError,
            "^clean_logits: got True with max_seqlen_k > 0, expected False",
        ),
        ({"logits_dtype": torch.float16}, TypeError, "^out_dtype: got torch.float16, expected torch.float32 or"),
    ],
)
def test_errors_of_the_newer_forms(inputs, windows, change, error, message):
    forms = {
        "tensor": inputs.q_fp8,
        "three": (inputs.q_fp8, None, None),
        "fp8 with scales": (inputs.q_fp8, torch.ones(ROWS, HEADS, dtype=torch.int32)),
        "fp4 of float scales": (inputs.q_fp8.view(torch.int8), torch.ones(ROWS, HEADS)),
        "fp4 of D=16": (inputs.q_fp8.view(torch.int8)[..., :8], torch.ones(ROWS, HEADS, dtype=torch.int32)),
    }
    q = forms.get(change.get("q"), (inputs.q_fp8, None))
    options = {name: value for name, value in change.items() if name not in ("q", "sixth")}
    sixth = (change["sixth"],) if "sixth" in change else ()
    with pytest.raises(error, match=message):
        deep_gemm.fp8_fp4_mqa_logits(q, (inputs.k_fp8, inputs.kv_scale), inputs.weights, *windows, *sixth, **options)


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
