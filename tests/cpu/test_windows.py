"""Windows out of masks, and calls with them."""

from __future__ import annotations

import pytest
import torch

from helpers import CPU, int32
from lightning_indexer import fp8_mqa_logits, windows_from_mask
from lightning_indexer.check.cases import WINDOWS, make_inputs, make_windows
from lightning_indexer.problems.mqa_logits import window_mask


def additive(mask: torch.Tensor, dtype: torch.dtype, lowest: bool = False) -> torch.Tensor:
    no = torch.finfo(dtype).min if lowest else float("-inf")
    return torch.zeros(mask.shape, dtype=dtype).masked_fill(~mask, no)


FORMS = {
    "bool": lambda mask: mask,
    "additive": lambda mask: additive(mask, torch.float32),
    "bfloat16": lambda mask: additive(mask, torch.bfloat16),
    "lowest": lambda mask: additive(mask, torch.float16, lowest=True),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("size", [(2, 1), (7, 50), (50, 50), (5, 1)])
def test_windows_and_back(form, window, size):
    mask = window_mask(*make_windows(window, *size, CPU), size[1])
    ks, ke = windows_from_mask(FORMS[form](mask))
    for bound in (ks, ke):
        assert bound.dtype is torch.int32
        assert bound.shape == size[:1]
        assert bound.is_contiguous()
    assert torch.equal(window_mask(ks, ke, size[1]), mask)
    empty = ~mask.any(dim=1)
    assert not ks[empty].any()
    assert not ke[empty].any()


@pytest.mark.parametrize("form", FORMS)
def test_a_batch_of_masks(form):
    mask = torch.ones(2, 1, 7, 50, dtype=torch.bool).tril(43)
    mask[1, 0, :, :3] = False
    ks, ke = windows_from_mask(FORMS[form](mask))
    assert ks.tolist() == [0] * 7 + [3] * 7
    assert ke.tolist() == list(range(44, 51)) * 2
    inputs = make_inputs(7, 50, 4, 32, CPU)
    kv = (inputs.k_fp8, inputs.kv_scale)
    for b in range(2):
        logits = fp8_mqa_logits(inputs.q_fp8, kv, inputs.weights, ks.view(2, 7)[b], ke.view(2, 7)[b])
        assert torch.equal(logits != float("-inf"), mask[b, 0])


def test_an_expanded_mask():
    mask = torch.ones(4, 6, dtype=torch.bool).tril(2).expand(3, 1, 4, 6)
    ks, ke = windows_from_mask(mask)
    assert ks.tolist() == [0] * 12
    assert ke.tolist() == [3, 4, 5, 6] * 3


def test_empty_masks():
    assert [bound.tolist() for bound in windows_from_mask(torch.zeros(3, 0, dtype=torch.bool))] == [[0] * 3] * 2
    assert [bound.tolist() for bound in windows_from_mask(torch.zeros(0, 5, dtype=torch.bool))] == [[], []]
    assert [bound.tolist() for bound in windows_from_mask(torch.zeros(2, 5, dtype=torch.bool))] == [[0, 0]] * 2


def test_a_row_with_a_hole_is_named():
    mask = window_mask(int32(0, 2, 1, 0), int32(3, 6, 8, 8), 8)
    mask[2, 4:6] = mask[3, 1] = False
    message = r"^mask: row 2 allows 5 keys in \[1, 8\), but not key 4, expected one run of keys: a window has no holes$"
    with pytest.raises(ValueError, match=message):
        windows_from_mask(mask)
    with pytest.raises(ValueError, match=r"^mask: row 6 allows 5"):
        windows_from_mask(additive(torch.stack((mask[[0, 1, 0, 1]], mask)), torch.float32))


@pytest.mark.parametrize(
    ("mask", "error", "message"),
    [
        ("mask", TypeError, "^mask: got str, expected a torch.Tensor"),
        (
            torch.ones(3, 4, dtype=torch.int64),
            TypeError,
            "^mask: got dtype torch.int64, expected torch.bool or an additive",
        ),
        (torch.ones(4, dtype=torch.bool), ValueError, r"^mask: got shape \[4\], expected \[M, N\]"),
        (torch.tensor([[0.0, -1.5]]), ValueError, "^mask: got -1.5 at row 0, key 1, expected 0 or -inf"),
        (
            torch.tensor([[0.0, 0.0], [0.0, float("nan")]]),
            ValueError,
            "^mask: got nan at row 1, key 1, expected 0 or -inf",
        ),
        (torch.tensor([[1.0, 0.0]]), ValueError, "^mask: got 1.0 at row 0, key 0, expected 0 or -inf"),
    ],
)
def test_what_is_no_mask_is_refused(mask, error, message):
    with pytest.raises(error, match=message):
        windows_from_mask(mask)
