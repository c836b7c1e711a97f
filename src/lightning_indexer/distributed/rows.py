"""Rows sharded over the ranks: each scores its own against all keys, which are on their way. Prefill context parallelism.

Every rank sends its keys to every other, in P - 1 steps that are all under way from the start. Meanwhile some rows are
scored shard by shard, this rank's own first, the others' as they arrive, and the candidates of the shards are merged.
By then all keys are here: the rest of the rows takes them in one call, as one device would.

The rows that are scored in pieces are few on purpose. They cost a selection a shard, and a kernel that takes every
multiprocessor runs as long as the last of them, which a transfer may hold.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Literal, NamedTuple

import torch

from lightning_indexer.distributed.collectives import Group
from lightning_indexer.distributed.keys import rebased
from lightning_indexer.distributed.merge import of_packed, select_among
from lightning_indexer.distributed.selection import score_and_select
from lightning_indexer.distributed.sharding import KeySharding, LocalWindows
from lightning_indexer.problems.top_k import Order

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

# Two H200 of one host: an all-gather of 138 MB, half of which travels, takes 320 us.
BYTES_PER_SECOND = 200e9
# What scoring reaches there, docs/kernels/cuda_sm90.md, rounded down.
FLOP_PER_SECOND = 1.0e15
_ROW_STEP = 64


def rows_while_gathering(rows: int, heads: int, head_dim: int, bytes_per_second: float = BYTES_PER_SECOND) -> int:
    """Rows whose scoring takes twice as long as the keys are on their way, at least; N cancels out."""
    seconds_per_key = 2 * (head_dim + 4) / bytes_per_second
    needed = seconds_per_key * FLOP_PER_SECOND / (2 * heads * head_dim)
    return min(rows, -(-int(needed + 1) // _ROW_STEP) * _ROW_STEP)


def top_k_of_sharded_rows(
    q: torch.Tensor,
    kv: tuple[torch.Tensor, torch.Tensor],
    weights: torch.Tensor,
    cu_seqlen_ks: torch.Tensor,
    cu_seqlen_ke: torch.Tensor,
    k: int,
    *,
    sharding: KeySharding,
    group: ProcessGroup | None = None,
    index_base: Literal["row", "absolute"] = "row",
    order: Order = "index",
    values: bool = False,
    rows_in_pieces: int | None = None,
    logits_bytes: int | None = None,
    timeout: float | None = None,
    backend: str | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """``fp8_mqa_logits`` and ``top_k_per_row`` of this rank's rows over the keys of all ranks.

    The result is bitwise that of the two calls on one device, as in :func:`top_k_of_sharded_keys`.

    Args:
        q, weights: this rank's rows, any of them in any order, and any number; as in ``fp8_mqa_logits``.
        kv: ``(k, kv_scale)`` of this rank's positions, ascending. They may be results of collectives under way.
        cu_seqlen_ks, cu_seqlen_ke: [M] int32, windows of these rows, in positions.
        k: 1 to 4096; it may pass a shard's keys.
        sharding: which positions lie where: how the rows' tokens were dealt out, ``zigzag`` or ``interleaved``.
        group: of the ranks, in the order of the sharding; None: all.
        rows_in_pieces: rows scored shard by shard while keys arrive, the last ones;
            None: :func:`rows_while_gathering`.
        index_base, order, values, logits_bytes, timeout, backend: as in :func:`top_k_of_sharded_keys`.

    Returns:
        Indices [M, k] int32 in the order of this rank's rows, -1 behind the last; with ``values`` the pair of them and
        float32 scores.

    Raises:
        CollectiveError: another rank has failed or is late.
        TypeError, ValueError, BackendUnavailableError: as the two calls.
    """
    team = Group(group, q.device, timeout)
    team.expect(sharding.ranks)
    rows = q.shape[0]
    if rows_in_pieces is None:
        rows_in_pieces = rows_while_gathering(rows, *q.shape[1:])
    early = max(0, rows - rows_in_pieces)
    arriving = _gather(kv, sharding, team)
    windows = sharding_of_one(sharding.keys).windows(cu_seqlen_ks, cu_seqlen_ke, 0)
    indices = torch.empty((rows, k), dtype=torch.int32, device=q.device)
    scores = torch.empty((rows, k), dtype=torch.float32, device=q.device) if values else None

    last = slice(early, rows)
    packed = torch.empty((team.ranks, 2, rows - early, k), dtype=torch.int32, device=q.device)
    for step in range(team.ranks):
        rank = (team.rank - step) % team.ranks
        arriving.waits[step]()
        found = of_packed(packed[rank])
        local = sharding.windows(cu_seqlen_ks[last], cu_seqlen_ke[last], rank)
        score_and_select(
            q[last], arriving.shard(rank), weights[last], local, found.indices, found.values,
            logits_bytes=logits_bytes, backend=backend,
        )  # fmt: skip
        if local.numbering is None:
            found.indices.copy_(sharding.position(found.indices, rank))
    merged, merged_scores = select_among(packed, k, ascending=sharding.ascending, order=order, values=values)
    indices[last] = merged
    if scores is not None and merged_scores is not None:
        scores[last] = merged_scores

    first = slice(0, early)
    if early:
        score_and_select(
            q[first], arriving.in_order(sharding), weights[first], windows.rows(first), indices[first],
            None if scores is None else scores[first], order=order, logits_bytes=logits_bytes, backend=backend,
        )  # fmt: skip
    indices = rebased(indices, windows.origins, index_base)
    return indices if scores is None else (indices, scores)


def sharding_of_one(keys: int) -> KeySharding:
    """All positions on one rank."""
    return KeySharding.contiguous([keys])


class _Arriving(NamedTuple):
    """The keys of all ranks, shards end to end; ``waits[s]`` waits for those of the rank s places before this one."""

    k: torch.Tensor
    kv_scale: torch.Tensor
    firsts: list[int]
    waits: list[Callable[[], None]]

    def shard(self, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
        keys = slice(self.firsts[rank], self.firsts[rank + 1])
        return self.k[keys], self.kv_scale[keys]

    def in_order(self, sharding: KeySharding) -> tuple[torch.Tensor, torch.Tensor]:
        """All keys by position: copied, unless they lie so."""
        order = sharding.order(self.k.device)
        if order is None:
            return self.k, self.kv_scale
        k = self.k.view(torch.uint8).index_select(0, order).view(self.k.dtype)
        return k, self.kv_scale.index_select(0, order)


def _gather(kv: tuple[torch.Tensor, torch.Tensor], sharding: KeySharding, team: Group) -> _Arriving:
    k, kv_scale = (t.wait() if hasattr(t, "wait") and hasattr(t, "elem") else t for t in kv)
    kv_scale = kv_scale.reshape(-1)
    sizes = sharding.sizes
    if k.dim() != 2 or k.shape[0] != sizes[team.rank]:
        raise ValueError(f"k: got shape {list(k.shape)}, expected [{sizes[team.rank]}, D], this rank's of the sharding")
    if kv_scale.shape[0] != k.shape[0]:
        raise ValueError(f"kv_scale: got {kv_scale.shape[0]} scales, expected {k.shape[0]}, one a key")
    firsts = [0]
    for size in sizes:
        firsts.append(firsts[-1] + size)
    whole = _Arriving(k.new_empty((firsts[-1], k.shape[1])), kv_scale.new_empty(firsts[-1]), firsts, [])
    # fp8 travels as bytes: not every transport knows it.
    as_bytes = whole.k.view(torch.uint8)
    own = slice(firsts[team.rank], firsts[team.rank + 1])
    as_bytes[own].copy_(k.view(torch.uint8))
    whole.kv_scale[own].copy_(kv_scale)
    whole.waits.append(lambda: None)
    for step in range(1, team.ranks):
        to, source = (team.rank + step) % team.ranks, (team.rank - step) % team.ranks
        theirs = slice(firsts[source], firsts[source + 1])
        parts = [(as_bytes[some], whole.kv_scale[some]) for some in (own, theirs)]
        whole.waits.append(team.exchange(parts[0], to, parts[1], source, f"keys of rank {source}"))
    return whole
