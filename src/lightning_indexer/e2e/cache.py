"""The indexer's paged key cache: fp8 keys and their scales in blocks that lie anywhere, as engines keep them."""

from __future__ import annotations

import torch

BLOCK_TOKENS = 64


class PagedKeys:
    """Keys of one request in one layer.

    A block of bytes holds ``BLOCK_TOKENS`` rows of D fp8 values, then as many float32 scales. Blocks are handed out in
    a shuffled order, so that a gather is one.
    """

    def __init__(self, tokens: int, head_dim: int, device: torch.device, generator: torch.Generator) -> None:
        blocks = -(-tokens // BLOCK_TOKENS)
        storage = torch.zeros(blocks, BLOCK_TOKENS * (head_dim + 4), dtype=torch.uint8, device=device)
        split = BLOCK_TOKENS * head_dim
        self._values = storage[:, :split].view(blocks, BLOCK_TOKENS, head_dim)
        self._scales = storage[:, split:].view(torch.float32)
        self.block_table = torch.randperm(blocks, generator=generator, device=generator.device).to(device)

    def write(self, start: int, k: torch.Tensor, kv_scale: torch.Tensor) -> None:
        """Stores keys [T, D] fp8 and scales [T] at positions ``start`` and after."""
        block, offset = self._slots(start, start + k.shape[0])
        self._values[block, offset] = k.view(torch.uint8)
        self._scales[block, offset] = kv_scale

    def gather(self, keys: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The first ``keys`` keys, contiguous: [keys, D] fp8 and [keys] float32."""
        block, offset = self._slots(0, keys)
        return self._values[block, offset].view(torch.float8_e4m3fn), self._scales[block, offset]

    def _slots(self, start: int, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
        positions = torch.arange(start, stop, device=self.block_table.device)
        return self.block_table[positions // BLOCK_TOKENS], positions % BLOCK_TOKENS
