"""Scores and selection within windows, for engines that need no logits: the place of the call that fuses the two."""

from __future__ import annotations

import torch

from lightning_indexer.calls.mqa_logits import fp8_mqa_logits
from lightning_indexer.calls.top_k import top_k_per_row

# Rows are taken together while their logits stay under this: what vLLM allows a chunk by default.
LOGITS_BYTES = 512 * 2**20


def select_in_windows(
    q: torch.Tensor,
    kv: tuple[torch.Tensor, torch.Tensor | None],
    weights: torch.Tensor,
    ks: torch.Tensor,
    ke: torch.Tensor,
    out: torch.Tensor,
    *,
    width: int = 0,
    offsets: torch.Tensor | None = None,
) -> None:
    """The k best keys of each row's window, relative to its start.

    Args:
        q, kv, weights, ks, ke: as in ``fp8_mqa_logits``.
        out: [M, k] int32, written; -1 behind the last.
        width: if > 0, no window is longer, and logits are compressed to it.
        offsets: [M] int32, added to each row's positions.
    """
    rows, keys = q.shape[0], width or kv[0].shape[0]
    step = max(1, LOGITS_BYTES // (4 * max(1, keys)))
    for first in range(0, rows, step):
        part = slice(first, first + step)
        start, stop = ks[part], ke[part]
        logits = fp8_mqa_logits(q[part], kv, weights[part], start, stop, clean_logits=False, max_seqlen_k=width)
        # Columns of compressed logits are relative already.
        row_starts, row_ends = (None, stop - start) if width else (start, stop)
        top_k_per_row(
            logits, out.shape[1], row_starts, row_ends, order="any", out=out[part],
            index_base="row" if offsets is None else "offset", offsets=None if offsets is None else offsets[part],
        )  # fmt: skip
