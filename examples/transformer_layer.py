"""The indexer of DeepSeek-V3.2 as a PyTorch module: eager code as transformers has it, and the same on this library."""

from __future__ import annotations

import torch
from torch import nn

from lightning_indexer import fp8_mqa_logits, quantize_k, quantize_q, top_k_per_row

HIDDEN, HEADS, HEAD_DIM, K = 256, 32, 128, 48


class Indexer(nn.Module):
    """Which of the tokens before it each token attends to."""

    def __init__(self) -> None:
        super().__init__()
        self.q = nn.Linear(HIDDEN, HEADS * HEAD_DIM, bias=False)
        self.k = nn.Linear(HIDDEN, HEAD_DIM, bias=False)
        self.norm = nn.LayerNorm(HEAD_DIM)
        self.weights = nn.Linear(HIDDEN, HEADS, bias=False)

    def project(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        q = self.q(hidden).view(-1, HEADS, HEAD_DIM)
        return q, self.norm(self.k(hidden)), self.weights(hidden) * HEADS**-0.5 * HEAD_DIM**-0.5

    @torch.inference_mode()
    def eager(self, hidden: torch.Tensor) -> torch.Tensor:
        """[tokens, K]: all scores of all heads at once, in float32."""
        q, k, weights = self.project(hidden)
        scores = torch.einsum("mhn,mh->mn", torch.einsum("mhd,nd->mhn", q, k).relu(), weights)
        future = torch.ones_like(scores, dtype=torch.bool).triu(1)
        return scores.masked_fill(future, float("-inf")).topk(K, dim=1).indices

    @torch.inference_mode()
    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """[tokens, K] int32, -1 where a token has fewer before it."""
        q, k, weights = self.project(hidden)
        starts = torch.zeros(len(hidden), dtype=torch.int32, device=hidden.device)
        ends = torch.arange(1, len(hidden) + 1, dtype=torch.int32, device=hidden.device)
        logits = fp8_mqa_logits(quantize_q(q), quantize_k(k), weights, starts, ends, clean_logits=False)
        found = top_k_per_row(logits, K, starts, ends)
        assert isinstance(found, torch.Tensor)
        return found


def main() -> None:
    torch.manual_seed(0)
    indexer, hidden = Indexer(), torch.randn(300, HIDDEN)
    ours, theirs = indexer(hidden), indexer.eager(hidden)
    rows = range(K, len(hidden))
    same = [len(set(ours[row].tolist()) & set(theirs[row].tolist())) / K for row in rows]
    print(f"fp8 and float32 select the same {sum(same) / len(same):.1%} of the tokens")
    assert min(same) > 0.8


if __name__ == "__main__":
    main()
