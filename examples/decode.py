"""Decode: sequences of different lengths grow by a token a step; scores and selection read the paged cache."""

from __future__ import annotations

import torch

from lightning_indexer import CacheLayout, fp8_paged_mqa_logits, quantize_k, quantize_q, top_k_per_row

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HEADS, HEAD_DIM, PAGE, K, STEPS = 32, 128, 64, 32, 4
LENGTHS = [200, 63, 1]
MAX_LENGTH = 256  # of the logits, whatever the lengths are: shapes stay as they are, so a CUDA graph may hold a step


def main() -> None:
    generator = torch.Generator().manual_seed(0)
    layout = CacheLayout(page=PAGE, head_dim=HEAD_DIM)
    pages = MAX_LENGTH // PAGE
    pool = torch.zeros(len(LENGTHS) * pages, *layout.block_shape, dtype=torch.uint8)
    tables = torch.randperm(len(pool), generator=generator).view(len(LENGTHS), pages).int()
    values = torch.randn(len(LENGTHS), MAX_LENGTH, HEAD_DIM, generator=generator)
    for sequence in range(len(LENGTHS)):  # in a server, each step's keys are quantised and inserted
        k, scale = quantize_k(values[sequence])
        pool[tables[sequence].long()] = layout.pack(k.view(pages, PAGE, HEAD_DIM), scale.view(pages, PAGE))
    pool, tables = pool.to(DEVICE), tables.to(DEVICE)

    lengths = torch.tensor(LENGTHS, dtype=torch.int32, device=DEVICE)
    for step in range(STEPS):
        q = quantize_q(torch.randn(len(LENGTHS), 1, HEADS, HEAD_DIM, generator=generator).to(DEVICE))
        weights = torch.rand(len(LENGTHS), HEADS, generator=generator).to(DEVICE)
        logits = fp8_paged_mqa_logits(
            q, pool, weights, lengths, tables, MAX_LENGTH, layout=layout, clean_logits=False
        )  # fmt: skip
        # Where each selected key lies in the pool: page_table[p // page] * page + p % page.
        places = top_k_per_row(
            logits, K, None, lengths, index_base="page", page_table=tables, page_size=PAGE
        )  # fmt: skip
        assert isinstance(places, torch.Tensor)
        found = (places >= 0).sum(dim=1)
        assert torch.equal(found, lengths.clamp(max=K).long())
        print(f"step {step}: lengths {lengths.tolist()}, selected {found.tolist()}")
        lengths += 1


if __name__ == "__main__":
    main()
