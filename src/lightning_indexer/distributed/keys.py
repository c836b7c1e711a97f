"""Keys sharded over the ranks: each selects among its own, and the candidates are merged. Decode context parallelism.

Every rank has the same rows of q and receives the same result. A rank holds its shard of the keys and the workspace:
no key travels.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import torch

from lightning_indexer.calls.paged_mqa_logits import fp8_paged_mqa_logits
from lightning_indexer.calls.top_k import top_k_per_row
from lightning_indexer.distributed.checks import check_keys, check_options, check_rows, check_vector, check_windows
from lightning_indexer.distributed.collectives import Group
from lightning_indexer.distributed.merge import Candidates, Exchange, candidates, merge_top_k
from lightning_indexer.distributed.selection import score_and_select
from lightning_indexer.distributed.sharding import KeySharding, LocalWindows
from lightning_indexer.problems.cache_layout import CacheLayout
from lightning_indexer.problems.checks import as_int
from lightning_indexer.problems.top_k import MAX_WIDTH, Order

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def top_k_of_sharded_keys(
    q: torch.Tensor,
    kv: tuple[torch.Tensor, torch.Tensor],
    weights: torch.Tensor,
    windows: LocalWindows,
    k: int,
    *,
    sharding: KeySharding,
    group: ProcessGroup | None = None,
    index_base: Literal["row", "absolute"] = "row",
    order: Order = "index",
    values: bool = False,
    exchange: Exchange | None = None,
    logits_bytes: int | None = None,
    timeout: float | None = None,
    backend: str | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """``fp8_mqa_logits`` and ``top_k_per_row`` over keys of which this rank holds a part.

    The result is bitwise that of the two calls on one device with all keys, where a backend's logits depend on nothing
    but their row and key; docs/semantics.md says which do.

    Args:
        q, weights: every row, the same on every rank; as in ``fp8_mqa_logits``.
        kv: ``(k, kv_scale)`` of this rank's positions, ascending.
        windows: ``sharding.windows(ks, ke, rank)``, made once a step.
        k: 1 to 4096; it may pass a shard's keys.
        sharding: which positions lie where.
        group: of the ranks, in the order of the sharding; None: all.
        index_base: ``"row"`` counts from the window's start, ``"absolute"`` gives positions.
        order: of a row, as in ``top_k_per_row``.
        values: return the scores too.
        exchange: how candidates are merged, see ``distributed.merge``; None chooses by size.
        logits_bytes: logits in memory at a time; 1 GiB where None.
        timeout: seconds to wait for the others; None is the group's own. With NCCL the host then waits.
        backend: of the scoring; None lets the library choose.

    Returns:
        Indices [M, k] int32 on every rank, -1 behind the last; with ``values`` the pair of them and float32 scores.

    Raises:
        CollectiveError: another rank has failed or is late.
        TypeError, ValueError, BackendUnavailableError: as the two calls.
    """
    k = check_options(
        sharding, k, index_base=index_base, order=order, values=values, exchange=exchange, logits_bytes=logits_bytes
    )
    rows = check_rows(q, weights, 3)
    check_keys(kv)
    check_windows(windows, rows, q.device)
    team = Group(group, q.device, timeout)
    team.expect(sharding.ranks)
    mine = candidates(rows, k, q.device)
    score_and_select(
        q, kv, weights, windows, mine.indices, mine.values, logits_bytes=logits_bytes, backend=backend
    )  # fmt: skip
    return _merged(mine, windows, team, sharding, index_base, order, values, exchange)


def paged_top_k_of_sharded_keys(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    weights: torch.Tensor,
    lengths: torch.Tensor,
    block_tables: torch.Tensor,
    max_length: int,
    k: int,
    *,
    sharding: KeySharding,
    group: ProcessGroup | None = None,
    layout: CacheLayout | None = None,
    order: Order = "index",
    values: bool = False,
    exchange: Exchange | None = None,
    timeout: float | None = None,
    backend: str | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """``fp8_paged_mqa_logits`` and ``top_k_per_row`` over a cache of which this rank holds a part of each sequence.

    Args:
        q: [B, next_n, H, D], ``weights`` [B * next_n, H]: the same on every rank.
        kv_cache, block_tables: this rank's blocks; a table lists them in ascending position.
        lengths: [B, next_n] int32, of this rank: ``sharding.lengths(context_lens, next_n, rank)``, made once a step.
        max_length: the longest of ``lengths`` or more: columns of this rank's logits.
        layout: of the cache, as in ``fp8_paged_mqa_logits``.
        k, sharding, group, order, values, exchange, timeout, backend: as in :func:`top_k_of_sharded_keys`.

    Returns:
        Positions [B * next_n, k] int32 on every rank, -1 behind the last; with ``values`` the pair of them and scores.
        ``sharding.local(indices, rank)`` are those that the rank's own attention reads, in its own numbering.

    Raises:
        As :func:`top_k_of_sharded_keys`.
    """
    k = check_options(sharding, k, order=order, values=values, exchange=exchange)
    check_rows(q, weights, 4)
    check_vector("lengths", lengths, (tuple(q.shape[:2]),), q.device)
    if not 0 <= as_int("max_length", max_length) <= MAX_WIDTH:
        raise ValueError(f"max_length: got {max_length}, expected 0 to {MAX_WIDTH}: positions are int32")
    team = Group(group, q.device, timeout)
    team.expect(sharding.ranks)
    logits = fp8_paged_mqa_logits(
        q, kv_cache, weights, lengths, block_tables, max_length, layout=layout, clean_logits=False, backend=backend
    )
    windows = sharding.numbered(lengths.reshape(-1), team.rank)
    mine = candidates(logits.shape[0], k, q.device)
    options = windows.numbering or {"index_base": "absolute"}
    top_k_per_row(logits, k, None, windows.ends, values=mine.values, out=mine.indices, **options)
    return _merged(mine, windows, team, sharding, "absolute", order, values, exchange)


def _merged(
    mine: Candidates,
    windows: LocalWindows,
    team: Group,
    sharding: KeySharding,
    index_base: str,
    order: str,
    values: bool,
    exchange: Exchange | None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    if windows.numbering is None:
        mine.indices.copy_(sharding.position(mine.indices, team.rank))
    indices, scores = merge_top_k(
        mine, team, ascending=sharding.ascending, keys=sharding.keys, order=order, values=values, exchange=exchange
    )
    indices = rebased(indices, windows.origins, index_base)
    return indices if scores is None else (indices, scores)


def rebased(indices: torch.Tensor, origins: torch.Tensor | None, index_base: str) -> torch.Tensor:
    """Positions as indices of this base; -1 stays."""
    if origins is None or index_base == "absolute":
        return indices
    return torch.where(indices < 0, -1, indices - origins[:, None])
