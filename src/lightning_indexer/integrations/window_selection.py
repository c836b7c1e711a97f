"""Scores and selection within windows, in one call, for engines that need no logits."""

from __future__ import annotations

import torch

from lightning_indexer.calls.mqa_topk import fp8_mqa_topk

# Of scores at a time: what vLLM allows a chunk by default. Fewer and larger waves cost Hopper less.
WORKSPACE_BYTES = 512 * 2**20


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
    workspace: int | None = None,
) -> None:
    """The k best keys of each row's window, relative to its start.

    Args:
        q, kv, weights, ks, ke: as in ``fp8_mqa_topk``.
        out: [M, k] int32, written; -1 behind the last.
        width: if > 0, no window is longer.
        offsets: [M] int32, added to each row's positions.
        workspace: bytes for scores; None: ``WORKSPACE_BYTES``.
    """
    fp8_mqa_topk(
        q, kv, weights, ks, ke, out.shape[1], max_seqlen_k=width, order="any",
        index_base="row" if offsets is None else "offset", offsets=offsets, out=out,
        workspace=workspace or WORKSPACE_BYTES,
    )  # fmt: skip
