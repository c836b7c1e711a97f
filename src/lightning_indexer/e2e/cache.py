"""The indexer's keys of one request in one layer: a paged cache, as engines keep them."""

from __future__ import annotations

import torch

from lightning_indexer.calls.gather_k_cache import gather_k_cache
from lightning_indexer.calls.insert_k_cache import insert_k_cache
from lightning_indexer.problems.cache_layout import CacheLayout

BLOCK_TOKENS = 64


class PagedKeys:
    """Blocks are handed out in a shuffled order, so that a gather is one."""

    def __init__(self, tokens: int, head_dim: int, device: torch.device, generator: torch.Generator) -> None:
        self.layout = CacheLayout(BLOCK_TOKENS, head_dim)
        blocks = -(-tokens // BLOCK_TOKENS)
        self._cache = torch.zeros((blocks, *self.layout.block_shape), dtype=torch.uint8, device=device)
        order = torch.randperm(blocks, generator=generator, device=generator.device).to(device)
        self.block_table = order.int()[None]

    def write(self, start: int, k: torch.Tensor) -> None:
        """Quantises keys [T, D] and stores them at positions ``start`` and after."""
        positions = torch.arange(start, start + k.shape[0], device=self._cache.device)
        block = self.block_table[0, positions // BLOCK_TOKENS].long()
        insert_k_cache(k, self._cache, block * BLOCK_TOKENS + positions % BLOCK_TOKENS, layout=self.layout)

    def gather(self, keys: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The first ``keys`` keys, contiguous: [keys, D] fp8 and [keys] float32."""
        lengths = torch.arange(2, dtype=torch.int32, device=self._cache.device) * keys
        return gather_k_cache(self._cache, self.block_table, lengths, keys, layout=self.layout)
