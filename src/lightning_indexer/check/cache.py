"""What the suites of the cache's operations share: its layouts, and pools of blocks."""

from __future__ import annotations

import torch

from lightning_indexer.problems.cache_layout import CacheLayout


def layouts(fnuz: bool = False) -> list[CacheLayout]:
    """One of every kind that engines have."""
    dtype = torch.float8_e4m3fnuz if fnuz else torch.float8_e4m3fn
    found = [
        CacheLayout(page, 128, order, scales, dtype)  # type: ignore[arg-type]
        for page, order in ((64, "flat"), (16, "preshuffled"), (64, "preshuffled"), (1, "flat"))
        for scales in ("float32", "power of two", "ue8m0")
    ]
    return [*found, CacheLayout.fp4(64), CacheLayout.fp4(128)]


def blocks_of_4_gib(layout: CacheLayout, gap: int) -> int:
    """So many blocks, ``gap`` bytes between two, that the next one starts behind 4 GiB."""
    return 2**32 // (layout.block_bytes + gap) + 1


def pool(
    layout: CacheLayout, blocks: int, gap: int, device: torch.device, *, fill: int, guard: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """A buffer full of one byte, and the cache in it: its blocks ``gap`` bytes apart, ``guard`` bytes around them."""
    apart = layout.block_bytes + gap
    buffer = torch.full((2 * guard + blocks * apart,), fill, dtype=torch.uint8, device=device)
    row = layout.row_bytes + 4
    return buffer, buffer.as_strided((blocks, *layout.block_shape), (apart, row, row, 1), guard)
