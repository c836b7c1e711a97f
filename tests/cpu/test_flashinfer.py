"""FlashInfer's ``dsa_indexer_det_topk``: its rules, row by row, in plain Python."""

from __future__ import annotations

import re

import pytest
import torch

from helpers import int32
from lightning_indexer import CacheLayout
from lightning_indexer.integrations.flashinfer import (
    dsa_indexer_det_topk,
    dsa_indexer_det_topk_workspace_size,
    dsa_indexer_topk,
)

E4M3 = torch.float8_e4m3fn
HEADS, DIM = 32, 128


def whole(*shape, most=1, seed=0):
    """Whole numbers that are so small that every score is exact, and many are equal."""
    return torch.randint(-most, most + 1, shape, generator=torch.Generator().manual_seed(seed)).float()


def expected(scores, top_k):
    """Ascending ids of the best scores, ties to the larger id, and their scores."""
    ranked = sorted(range(len(scores)), key=lambda j: (-scores[j], -j))[:top_k]
    ids = sorted(ranked)
    pad = top_k - len(ids)
    return ids + [-1] * pad, [scores[j] for j in ids] + [float("-inf")] * pad


def score(q, k, w, scale):
    return ((torch.einsum("hd,nd->hn", q, k).relu() * w[:, None]).sum(0) * scale).tolist()


LENGTHS_Q, LENGTHS_K = (3, 0, 5, 4, 1), (40, 7, 3, 0, 60)


@pytest.mark.parametrize(("ratio", "offsets"), [(1, None), (1, (0, 5, -2, 9, 59)), (3, None), (3, (50, 0, -4, 8, 200))])
@pytest.mark.parametrize("bound", [None, 60])
def test_ragged(ratio, offsets, bound):
    rows, keys, top_k = sum(LENGTHS_Q), sum(LENGTHS_K), 9
    q, k, w = whole(rows, HEADS, DIM), whole(keys, DIM, seed=1), whole(rows, HEADS, most=2, seed=2)
    scale = torch.tensor([1.0, 0.5, 2.0]).repeat(keys)[:keys]
    cu_q = int32(0, *torch.tensor(LENGTHS_Q).cumsum(0).tolist())
    cu_k = int32(0, *torch.tensor(LENGTHS_K).cumsum(0).tolist())
    given = None if offsets is None else torch.tensor(offsets, dtype=torch.int64)
    found, scores = dsa_indexer_det_topk(
        q.to(E4M3), k.to(E4M3), w, cu_q, cu_k, top_k=top_k, q_causal_offsets=given, ratio=ratio, max_seqlen_k=bound,
        k_scale=scale,
    )  # fmt: skip
    for segment, (lq, lk) in enumerate(zip(LENGTHS_Q, LENGTHS_K, strict=True)):
        offset = offsets[segment] if offsets else lk - lq if ratio == 1 else 0
        for u in range(lq):
            seen = max(0, min(lk, (offset + u + 1) // ratio))
            row, first = int(cu_q[segment]) + u, int(cu_k[segment])
            span = slice(first, first + seen)
            ids, best = expected(score(q[row], k[span], w[row], scale[span]), top_k)
            assert found[row].tolist() == ids
            assert scores[row].tolist() == best


@pytest.mark.parametrize("next_n", [1, 2])
@pytest.mark.parametrize("gap", [0, 64])
def test_paged(next_n, gap):
    layout, top_k, blocks = CacheLayout(16, DIM), 6, 7
    k, scale = whole(blocks, 16, DIM), torch.tensor([1.0, 0.5]).repeat(blocks * 8).view(blocks, 16)
    apart = layout.block_bytes + gap
    wide = torch.zeros((blocks, apart), dtype=torch.uint8)
    wide[:, : layout.block_bytes] = layout.pack(k.to(E4M3), scale).view(blocks, -1)
    cache = wide.as_strided((blocks, 16, 132), (apart, 132, 1))
    q, w = whole(3, next_n, HEADS, DIM, seed=3), whole(3 * next_n, HEADS, most=2, seed=4)
    tables, lengths = int32(4, 1, 0, 2, 6, 5, 3, 3, 3).view(3, 3), int32(*range(30, 30 + 3 * next_n)).view(3, next_n)
    lengths[1, 0] = 0
    out, scores = torch.zeros(3 * next_n, top_k).int(), torch.zeros(3 * next_n, top_k)
    found = dsa_indexer_det_topk(
        q.to(E4M3), cache, w, None, None, top_k=top_k, indices=out, scores=scores, backend="sm120", block_table=tables,
        context_lens=lengths,
    )  # fmt: skip
    assert found == (out, scores)
    for row in range(3 * next_n):
        b, j = divmod(row, next_n)
        seen = int(lengths[b, j])
        keys, scales = k[tables[b].long()].reshape(-1, DIM)[:seen], scale[tables[b].long()].reshape(-1)[:seen]
        ids, best = expected(score(q[b, j], keys, w[row], scales), top_k)
        assert out[row].tolist() == ids
        assert scores[row].tolist() == best


def ragged(**changes):
    given = {
        "q": torch.zeros(2, HEADS, DIM).to(E4M3), "k": torch.zeros(9, DIM).to(E4M3), "w": torch.ones(2, HEADS),
        "cu_seqlens_q": int32(0, 2), "cu_seqlens_k": int32(0, 9), "top_k": 3, "k_scale": torch.ones(9),
    }  # fmt: skip
    return given | changes


def test_ties_go_to_the_larger_id_and_scores_may_be_left_out():
    found, scores = dsa_indexer_topk(**ragged(return_scores=False))
    assert scores is None
    assert found.tolist() == [[5, 6, 7], [6, 7, 8]]
    size = dsa_indexer_det_topk_workspace_size(2, 9, 1, top_k=3)
    buffer = torch.zeros(size, dtype=torch.uint8)
    assert torch.equal(dsa_indexer_det_topk(**ragged(workspace_buffer=buffer))[0], found)


@pytest.mark.parametrize(("message", "changes"), [
    ("q: got dtype torch.bfloat16", {"q": torch.zeros(2, HEADS, DIM).bfloat16()}),
    ("q_scale: got a tensor, which makes q MXFP4", {"q_scale": int32(1)}),
    ("softmax_scale: got 0.1, expected None", {"softmax_scale": 0.1}),
    ("backend: got 'cute'", {"backend": "cute"}),
    ("k_scale: got None", {"k_scale": None}),
    ("cu_seqlens_q, cu_seqlens_k: got None", {"cu_seqlens_q": None}),
    ("cu_seqlens_k: got shape [3], expected [S + 1]", {"cu_seqlens_k": int32(0, 1, 9)}),
    ("q_causal_offsets: got dtype torch.int32", {"q_causal_offsets": int32(1)}),
    ("ratio: got 0", {"ratio": 0}),
    ("max_seqlen_k: got 8, expected a bound of the longest of 1 segments of 9 keys", {"max_seqlen_k": 8}),
    ("scores: got a tensor with return_scores=False", {"return_scores": False, "scores": torch.zeros(2, 3)}),
    ("cu_seqlens_q: got an argument of the ragged form", {"block_table": int32(1), "context_lens": int32(1)}),
])  # fmt: skip
def test_refused(message, changes):
    with pytest.raises((TypeError, ValueError), match=re.escape(message)):
        dsa_indexer_det_topk(**ragged(**changes))
