"""From q, K and what each row may see to the selected positions, some rows at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from lightning_indexer.calls.mqa_logits import fp8_mqa_logits
from lightning_indexer.calls.top_k import top_k_per_row
from lightning_indexer.integrations.transformers.keys import Scored
from lightning_indexer.integrations.window_selection import select_in_windows
from lightning_indexer.windows import allowed_keys, spans_of

# Rows are projected together while their q, of 16 bits and quantised, stays under this.
QUERY_BYTES = 96 * 2**20
# Of scores that are held at a time.
WORKSPACE_BYTES = 256 * 2**20
# Where a mask is applied to logits, rows are taken together while those stay under this.
LOGITS_BYTES = 128 * 2**20
# Up to here a mask is applied to the logits: reading its windows back would take longer than the step.
FEW_ROWS = 256

# From a slice of rows (batch times positions, flattened) to their operands.
Queries = Callable[[slice], Scored]


class Windows(NamedTuple):
    """Positions that each row sees: [rows] int32, counted in its own sequence, and the lengths on the host if known."""

    start: torch.Tensor
    stop: torch.Tensor
    lengths: torch.Tensor | None = None


def needs_scores(keys: int, k: int) -> bool:
    """False where every key is selected."""
    return keys > k


def select(
    kv: tuple[torch.Tensor, torch.Tensor | None],
    queries: Queries,
    seen: Windows | torch.Tensor,
    out: torch.Tensor,
    heads: int,
    *,
    fill: bool,
) -> torch.Tensor:
    """The k best positions of each row.

    Args:
        kv: keys of B sequences of T, one behind the other.
        queries: gives the operands of some rows.
        seen: windows, or a mask [B, S, T] whose rows may have holes or biases.
        out: [B, S, k] int32, written; k at most T.
        heads: H.
        fill: slots behind a row's last key take positions that it does not see, as torch.topk gives; else -1.
    """
    batch, tokens, k = out.shape
    keys, head_dim = kv[0].shape[0] // batch, kv[0].shape[1]
    rows = batch * tokens
    indices = out.view(rows, k)
    if not needs_scores(keys, k):
        _all(indices, None if fill or not isinstance(seen, Windows) else seen)
        return out
    step = max(1, QUERY_BYTES // (3 * heads * head_dim))
    base = None  # of each row's sequence among all keys
    if batch > 1:
        base = torch.arange(0, batch * keys, keys, dtype=torch.int32, device=out.device).repeat_interleave(tokens)
    if not isinstance(seen, Windows):
        step = max(1, min(step, LOGITS_BYTES // (4 * keys)))
        seen = seen.expand(batch, tokens, keys)
    for first in range(0, rows, step):
        part = slice(first, min(first + step, rows))
        operands = queries(part)
        at = None if base is None else base[part]
        if isinstance(seen, Windows):
            start, stop = seen.start[part], seen.stop[part]
            # Several sequences: columns relative to the window, or each row would be as long as all of them.
            select_in_windows(
                operands.q, kv, operands.weights, _moved(start, at), _moved(stop, at), indices[part],
                width=0 if at is None else keys, offsets=start, workspace=WORKSPACE_BYTES,
            )  # fmt: skip
            if fill:
                _fill_short(indices[part], seen, part)
        else:
            if batch == 1:
                mask = seen[0, part]
            else:
                row = torch.arange(part.start, part.stop, device=out.device)
                mask = seen[row // tokens, row % tokens]
            _masked(operands, kv, at, mask, indices[part])
    return out


def _moved(position: torch.Tensor, base: torch.Tensor | None) -> torch.Tensor:
    return position if base is None else position + base


def _all(indices: torch.Tensor, seen: Windows | None) -> None:
    """Every position, or each that the row sees and -1."""
    position = torch.arange(indices.shape[1], dtype=torch.int32, device=indices.device)
    if seen is None:
        indices.copy_(position)
        return
    inside = (position >= seen.start[:, None]) & (position < seen.stop[:, None])
    indices.copy_(torch.where(inside, position, -1))


def _masked(
    operands: Scored,
    kv: tuple[torch.Tensor, torch.Tensor | None],
    base: torch.Tensor | None,
    mask: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """Scores every key of a row's sequence, then masks as the eager code does."""
    rows, keys = mask.shape
    start = torch.zeros(rows, dtype=torch.int32, device=out.device) if base is None else base
    logits = fp8_mqa_logits(
        operands.q, kv, operands.weights, start, start + keys, clean_logits=False,
        max_seqlen_k=0 if base is None else keys,
    )  # fmt: skip
    if mask.dtype is not torch.bool:
        logits = logits + mask
    logits = logits.masked_fill_(~allowed_keys(mask), float("-inf"))
    top_k_per_row(logits, out.shape[1], order="any", out=out)
    out.clamp_(min=0)  # -1 where scores are NaN


def _fill_short(indices: torch.Tensor, seen: Windows, part: slice) -> None:
    """Fills the rows up to the last one of this part that sees fewer keys than k."""
    stop = indices.shape[0]
    if seen.lengths is not None:
        short = (seen.lengths[part] < indices.shape[1]).nonzero()
        stop = int(short[-1]) + 1 if len(short) else 0
    if stop:
        rows = slice(part.start, part.start + stop)
        _fill(indices[:stop], seen.start[rows], seen.stop[rows])


def _fill(indices: torch.Tensor, start: torch.Tensor, stop: torch.Tensor) -> None:
    """The positions before and behind a row's window, in order, into the slots behind those of its keys."""
    start, length = start[:, None], (stop - start).clamp(min=0)[:, None]
    slot = torch.arange(indices.shape[1], dtype=torch.int32, device=indices.device)
    other = (slot - length).clamp(min=0)
    other = other + torch.where(other >= start, length, 0)
    indices.copy_(torch.where(indices < 0, other, indices))


class _Known(NamedTuple):
    storage: StorageWeakRef
    layout: tuple[object, ...]
    seen: Windows | None


class Masks:
    """Windows of the mask that the layers of a model share, read back once a mask."""

    def __init__(self) -> None:
        self._known: dict[torch.device, _Known] = {}

    def seen(self, mask: torch.Tensor, batch: int, tokens: int) -> Windows | torch.Tensor:
        """Windows where there are many rows and each sees one run of keys, else the mask as it is."""
        if batch * tokens <= FEW_ROWS or torch.compiler.is_compiling():
            return mask
        version = None if mask.is_inference() else mask._version
        layout = (mask.storage_offset(), mask.shape, mask.stride(), mask.dtype, batch, version)
        storage = StorageWeakRef(mask.untyped_storage())  # type: ignore[no-untyped-call]
        known = self._known.get(mask.device)
        # A weak reference keeps the address of its storage from being given to another.
        if known is None or known.storage.cdata != storage.cdata or known.layout != layout:
            known = self._known[mask.device] = _Known(storage, layout, self._read(mask, batch, tokens))
        return mask if known.seen is None else known.seen

    def _read(self, mask: torch.Tensor, batch: int, tokens: int) -> Windows | None:
        start, stop, exact = spans_of(mask)
        if not bool(exact.all()):
            return None
        start, stop = (side.view(-1, tokens).expand(batch, tokens).reshape(-1) for side in (start, stop))
        return Windows(start, stop, (stop - start).cpu())
