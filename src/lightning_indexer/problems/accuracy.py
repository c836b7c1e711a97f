"""The measure by which results are compared with a reference."""

from __future__ import annotations

import torch

# calc_diff widens this many elements to float64 at a time.
_DIFF_ELEMENTS = 2**25


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
