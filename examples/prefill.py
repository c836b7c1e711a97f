"""Prefill: a batch of requests is cut into chunks; each is scored, and each query's keys are selected."""

from __future__ import annotations

import torch

from lightning_indexer import fp8_mqa_logits, plan_chunks, quantize_k, quantize_q, top_k_per_row

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HEADS, HEAD_DIM, K = 64, 128, 64
REQUESTS = [(300, 100), (0, 50), (1000, 20)]  # (tokens in the cache, new tokens)


def main() -> None:
    generator = torch.Generator().manual_seed(0)
    keys = [torch.randn(context + new, HEAD_DIM, generator=generator) for context, new in REQUESTS]
    selected: dict[tuple[int, int], list[int]] = {}
    for chunk in plan_chunks(REQUESTS, max_logits_bytes=2**18):
        # In a server: the chunk's slice of the packed queries, and what is gathered from the paged cache.
        q = quantize_q(torch.randn(chunk.rows, HEADS, HEAD_DIM, generator=generator).to(DEVICE))
        gathered = torch.cat([keys[part.request][: part.keys] for part in chunk.slices])
        kv = quantize_k(gathered.to(DEVICE))
        weights = torch.rand(chunk.rows, HEADS, generator=generator).to(DEVICE)
        starts, ends = chunk.windows(DEVICE)
        # Selection reads the windows, so nothing has to be written outside of them.
        logits = fp8_mqa_logits(q, kv, weights, starts, ends, clean_logits=False)
        positions = top_k_per_row(logits, K, starts, ends)  # of each row's own request, -1 where it has fewer
        assert isinstance(positions, torch.Tensor)
        rows = iter(positions.tolist())
        for part in chunk.slices:
            for row in range(part.row_start, part.row_stop):
                selected[part.request, row] = [position for position in next(rows) if position >= 0]
        print(f"{chunk.rows} rows of {chunk.keys} keys: requests {[part.request for part in chunk.slices]}")
    for request, (context, new) in enumerate(REQUESTS):
        for row in range(new):
            seen = context + row + 1
            assert len(selected[request, row]) == min(K, seen)
            assert max(selected[request, row]) < seen, "a token reads no token behind itself"
    print(f"{len(selected)} queries have their keys")


if __name__ == "__main__":
    main()
