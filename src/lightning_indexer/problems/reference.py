"""The oracle: the formula of docs/semantics.md in float32, row chunk by row chunk. No backend shares code with it."""

from __future__ import annotations

import torch

# Scores [H, rows, N] of one row chunk stay under this.
_SCORE_BYTES = 2**30
# calc_diff widens this many elements to float64 at a time.
_DIFF_ELEMENTS = 2**25


def reference_scores(q: torch.Tensor, k: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Unmasked, unscaled logits: ``sum_h weights[m, h] * relu(q[m, h] . k[n])``.

    Args:
        q: [M, H, D], any floating dtype; fp8 is read as it is.
        k: [N, D], any floating dtype.
        weights: [M, H].

    Returns:
        [M, N] float32.
    """
    rows, heads, _ = q.shape
    keys = k.shape[0]
    k = k.float()
    result = torch.empty((rows, keys), dtype=torch.float32, device=q.device)
    step = max(1, _SCORE_BYTES // max(1, heads * keys * 4))
    for start in range(0, rows, step):
        stop = min(start + step, rows)
        scores = torch.einsum("mhd,nd->mhn", q[start:stop].float(), k).relu_()
        result[start:stop] = torch.einsum("mh,mhn->mn", weights[start:stop].float(), scores)
    return result


def window_mask(ks: torch.Tensor, ke: torch.Tensor, keys: int) -> torch.Tensor:
    """[M, N] bool: position n lies in row m's window."""
    positions = torch.arange(keys, device=ks.device)
    return (positions >= ks[:, None]) & (positions < ke[:, None])


def reference_logits(
    q: torch.Tensor,
    k: torch.Tensor,
    kv_scale: torch.Tensor,
    weights: torch.Tensor,
    cu_seqlen_ks: torch.Tensor,
    cu_seqlen_ke: torch.Tensor,
) -> torch.Tensor:
    """The [M, N] float32 logits with ``-inf`` outside the windows; arguments as in ``fp8_mqa_logits``.

    Also takes float32 ``q`` and ``k`` with ``kv_scale`` of ones, to measure the error of quantisation.
    """
    logits = reference_scores(q, k, weights) * kv_scale.reshape(1, -1)
    logits += 0.0  # -0.0 becomes +0.0, as the contract says
    return logits.masked_fill_(~window_mask(cu_seqlen_ks, cu_seqlen_ke, k.shape[0]), float("-inf"))


def calc_diff(x: torch.Tensor, y: torch.Tensor, where: torch.Tensor | None = None) -> float:
    """``1 - 2*sum(x*y) / sum(x*x + y*y)`` in float64: 0 for equal tensors, about half the squared relative error.

    Args:
        x, y: tensors of one shape.
        where: bool mask of the positions that count; all of them if None.

    Returns:
        The difference; 0.0 where nothing counts or both are zero, NaN if a counted position is NaN.
    """
    cross = square = 0.0
    step = max(1, _DIFF_ELEMENTS // max(1, x[:1].numel()))
    for start in range(0, x.shape[0], step):
        rows = slice(start, start + step)
        a, b = x[rows].double(), y[rows].double()
        if where is not None:
            a, b = a.masked_fill(~where[rows], 0.0), b.masked_fill(~where[rows], 0.0)
        cross += float((a * b).sum())
        square += float((a * a + b * b).sum())
    return 1.0 - 2.0 * cross / square if square != 0.0 else 0.0
