"""What callers bring that is not in the table of arguments, beside what tests/cpu/test_validation.py has."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from helpers import CPU, assert_matches, expected_for, same_bits
from lightning_indexer import decode_ue8m0, fp8_mqa_logits, quantize_k
from lightning_indexer.check.cases import make_inputs, make_windows

ROWS, KEYS = 6, 50


@pytest.fixture(scope="module")
def inputs():
    return make_inputs(ROWS, KEYS, 4, 32, CPU)


@pytest.fixture(scope="module")
def windows():
    return make_windows("misaligned", ROWS, KEYS, CPU)


@pytest.mark.parametrize("integer", [np.int32, np.int64, np.uint16])
@pytest.mark.parametrize("boolean", [np.bool_, bool])
def test_numbers_of_numpy(inputs, windows, integer, boolean):
    arguments = (inputs.q_fp8, (inputs.k_fp8, inputs.kv_scale), inputs.weights, *windows)
    for clean, width in ((True, 0), (False, 33)):
        result = fp8_mqa_logits(*arguments, clean_logits=boolean(clean), max_seqlen_k=integer(width))
        assert_matches(result, expected_for(inputs, *windows, width), clean=clean)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"clean_logits": np.int32(1)}, "^clean_logits: got int32, expected a bool"),
        ({"max_seqlen_k": np.bool_(True)}, "^max_seqlen_k: got bool_?, expected an int"),
        ({"max_seqlen_k": np.float32(3)}, "^max_seqlen_k: got float32, expected an int"),
    ],
)
def test_other_numbers_of_numpy_are_refused(inputs, windows, options, message):
    with pytest.raises(TypeError, match=message):
        fp8_mqa_logits(inputs.q_fp8, (inputs.k_fp8, inputs.kv_scale), inputs.weights, *windows, **options)


def test_scales_of_a_packed_cache(inputs, windows):
    """Rows of 132 bytes, 128 of values and 4 of scale: a view of another stride."""
    rows = torch.zeros(KEYS, 132, dtype=torch.uint8)
    rows[:, 128:] = inputs.kv_scale[:, None].view(torch.uint8)
    scale = rows.view(torch.float32)[:, 32]
    assert scale.stride() == (33,)
    result = fp8_mqa_logits(inputs.q_fp8, (inputs.k_fp8, scale), inputs.weights, *windows)
    assert_matches(result, expected_for(inputs, *windows), clean=True)


def test_ue8m0_scales_once_decoded(inputs, windows):
    k, kv_scale = quantize_k(inputs.k, scale_format="ue8m0")
    packed = (kv_scale.view(torch.int32) >> 23).to(torch.uint8)[:, None].repeat(1, 4).view(torch.int32)[:, 0]
    arguments = (inputs.weights, *windows)
    result = fp8_mqa_logits(inputs.q_fp8, (k, decode_ue8m0(packed)), *arguments)
    assert same_bits(result, fp8_mqa_logits(inputs.q_fp8, (k, kv_scale), *arguments))
    with pytest.raises(TypeError, match=r"^kv_scale: got dtype torch.int32, expected torch.float32: .*decode_ue8m0"):
        fp8_mqa_logits(inputs.q_fp8, (k, packed), *arguments)


def sparse(tensor: torch.Tensor) -> torch.Tensor:
    indices = torch.zeros(1, 1, dtype=torch.int64)
    return torch.sparse_coo_tensor(indices, tensor[:1], tensor.shape)


def nested(tensor: torch.Tensor) -> torch.Tensor:
    return torch.nested.nested_tensor([tensor[:1], tensor], layout=torch.jagged)


@pytest.mark.parametrize("name", ["q", "k", "kv_scale", "weights", "cu_seqlen_ks", "cu_seqlen_ke"])
@pytest.mark.parametrize(
    ("make", "what"), [(sparse, "torch.sparse_coo"), (nested, "a nested tensor")], ids=["sparse", "nested"]
)
@pytest.mark.parametrize("operator", [False, True], ids=["eager", "compiled"])
def test_sparse_and_nested_tensors_are_refused(inputs, windows, name, make, what, operator):
    given = {
        "q": inputs.q_fp8, "k": inputs.k_fp8, "kv_scale": inputs.kv_scale, "weights": inputs.weights,
        "cu_seqlen_ks": windows[0], "cu_seqlen_ke": windows[1],
    }  # fmt: skip
    given[name] = make(given[name])
    q, k, kv_scale, *others = given.values()
    if operator:  # another operand for which the call takes the way through the dispatcher
        others[0] = others[0] if name == "weights" else torch.nn.Parameter(others[0], requires_grad=False)
    with pytest.raises(TypeError, match=f"^{name}: got {what}, expected a dense tensor"):
        fp8_mqa_logits(q, (k, kv_scale), *others)
