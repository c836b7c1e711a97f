"""Argument orders of vLLM, SGLang and AITER."""

from __future__ import annotations

import pytest
import torch

from helpers import int32
from lightning_indexer.integrations import top_k as engines
from lightning_indexer.problems.top_k import reference_top_k

K = 5
LOGITS = torch.randn(6, 40, generator=torch.Generator().manual_seed(1))
STARTS, ENDS = int32(0, 3, 7, 2, 0, 9), int32(40, 20, 9, 2, 33, 40)
STRIDES = LOGITS.stride()


def expected(**options):
    return reference_top_k(LOGITS, K, STARTS, ENDS, **options)


def test_vllm_prefill():
    buffer = torch.full((8, 7), -7, dtype=torch.int32)
    engines.vllm_top_k_per_row_prefill(LOGITS, STARTS, ENDS, buffer, 6, *STRIDES, K)
    assert torch.equal(buffer[:6, :K], expected()[0])
    assert bool((buffer[6:] == -7).all())
    assert bool((buffer[:, K:] == -7).all())


def test_aiter_prefill():
    indices, values = torch.zeros(6, K, dtype=torch.int32), torch.zeros(6, K)
    engines.aiter_top_k_per_row_prefill(LOGITS, STARTS, ENDS, indices, values, 6, *STRIDES, K)
    right, scores = expected(index_base="absolute")
    assert torch.equal(indices, right)
    assert torch.equal(values, scores)
    engines.aiter_top_k_per_row_prefill(LOGITS, STARTS, ENDS, indices.zero_(), None, 6, *STRIDES, K, stable=True)
    assert torch.equal(indices, right)


@pytest.mark.parametrize(
    ("lengths", "ends"),
    [
        (int32(30, 4, 2), int32(29, 30, 3, 4, 1, 2)),  # one a sequence: its last row sees all
        (int32(3, 3, 5, 9, 0, 1), int32(3, 3, 5, 9, 0, 1)),  # one a row is never derived
        (int32(3, 3, 5, 9, 0, 1).view(3, 2), int32(3, 3, 5, 9, 0, 1)),
        (int32(0, 0, 0), int32(-1, 0, -1, 0, -1, 0)),
    ],
)
def test_decode(lengths, ends):
    right = reference_top_k(LOGITS, K, None, ends)[0]
    for call in (engines.vllm_top_k_per_row_decode, engines.aiter_top_k_per_row_decode):
        indices = torch.zeros(6, K, dtype=torch.int32)
        call(LOGITS, 2, lengths, indices, 6, *STRIDES, K)
        assert torch.equal(indices, right)


def test_decode_of_other_lengths_is_refused():
    with pytest.raises(ValueError, match="seq_lens: got 4 lengths, expected 3, one a sequence, or 6, one a row"):
        engines.vllm_top_k_per_row_decode(LOGITS, 2, int32(1, 2, 3, 4), torch.zeros(6, K).int(), 6, *STRIDES, K)


def test_strides_that_are_not_those_of_logits():
    out = torch.zeros(6, K, dtype=torch.int32)
    with pytest.raises(ValueError, match="stride0: got 41, expected 40"):
        engines.vllm_top_k_per_row_prefill(LOGITS, STARTS, ENDS, out, 6, 41, 1, K)
    with pytest.raises(ValueError, match="num_rows: got 7, expected at most 6"):
        engines.vllm_top_k_per_row_prefill(LOGITS, STARTS, ENDS, out, 7, *STRIDES, K)


def test_sglang():
    lengths = (ENDS - STARTS).clamp(min=0)
    assert torch.equal(engines.sglang_fast_topk(LOGITS, lengths, K, STARTS), expected()[0])
    offsets = int32(0, 100, 200, 300, 400, 500)
    ragged = engines.sglang_topk_transform_ragged(LOGITS, lengths, offsets, K, STARTS)
    assert torch.equal(ragged, expected(index_base="offset", offsets=offsets)[0])


def test_sglang_paged_finds_each_rows_request():
    table = torch.randperm(80, generator=torch.Generator().manual_seed(2)).int().view(2, 40)
    lengths = int32(40, 20, 3, 0, 33, 31)
    by_row = table[torch.tensor([0, 0, 1, 1, 1, 1])]
    right = reference_top_k(LOGITS, K, None, lengths, index_base="page", page_table=by_row, page_size=1)[0]
    result = engines.sglang_topk_transform_paged(LOGITS, lengths, table, int32(0, 2, 6), K)
    assert torch.equal(result, right)
    result = engines.sglang_topk_transform_paged(LOGITS, lengths, by_row, torch.arange(7).int(), K)
    assert torch.equal(result, right)
