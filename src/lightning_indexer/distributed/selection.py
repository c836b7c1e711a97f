"""Scores and selection of one block of keys: the seam behind which the two calls may become one."""

from __future__ import annotations

import torch

from lightning_indexer.calls.mqa_logits import fp8_mqa_logits
from lightning_indexer.calls.top_k import top_k_per_row
from lightning_indexer.distributed.sharding import LocalWindows

# Logits that lie in memory at a time, where the caller does not say.
LOGITS_BYTES = 1 << 30


def score_and_select(
    q: torch.Tensor,
    kv: tuple[torch.Tensor, torch.Tensor],
    weights: torch.Tensor,
    windows: LocalWindows,
    indices: torch.Tensor,
    values: torch.Tensor | None,
    *,
    order: str = "index",
    logits_bytes: int | None = None,
    backend: str | None = None,
) -> None:
    """Writes each row's best positions among these keys, and their scores.

    Args:
        q, kv, weights: as in ``fp8_mqa_logits``.
        windows: with a ``numbering``, or whose positions are the keys' own numbers.
        indices: [M, k] int32 to write into, last dimension contiguous; ``values`` likewise float32, or None.
        order: of a row, as in ``top_k_per_row``.
        logits_bytes: rows are taken so many at a time that their logits fit; one row at least.
        backend: of the scoring.
    """
    rows, keys = q.shape[0], kv[0].shape[0]
    if rows == 0:
        return
    # Row strides are multiples of 256 bytes.
    stride = -(-max(1, keys) // 64) * 64
    step = max(1, min(rows, (LOGITS_BYTES if logits_bytes is None else logits_bytes) // (4 * stride)))
    step = -(-rows // -(-rows // step))  # equal chunks
    buffer = torch.empty((step, stride), dtype=torch.float32, device=q.device)
    zeros = torch.zeros_like(windows.ends[:step]) if windows.starts is None else None
    for first in range(0, rows, step):
        some = slice(first, min(first + step, rows))
        logits = buffer[: some.stop - first, :keys]
        starts, ends, _, numbering = windows.rows(some)
        fp8_mqa_logits(
            q[some], kv, weights[some], zeros[: some.stop - first] if starts is None else starts, ends,  # type: ignore[index]
            clean_logits=False, out=logits, backend=backend,
        )  # fmt: skip
        top_k_per_row(
            logits, indices.shape[1], starts, ends, order=order,  # type: ignore[arg-type]
            values=None if values is None else values[some], out=indices[some],
            **(numbering or {"index_base": "absolute"}),
        )  # fmt: skip
