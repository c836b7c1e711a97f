"""Rows sharded over the ranks: each scores its own against all keys, which arrive. Prefill context parallelism.

Every rank sends its keys to every other. They arrive in pieces: this rank's own shard is one, then two shards, four,
and so on, all under way from the start. Meanwhile some rows are scored piece by piece as each arrives, and the
candidates of the pieces are merged. By then all keys are here: the rest of the rows takes them in one call, as one
device would.

A row is scored in half the time that its keys take to arrive, or less, so that each piece covers the next, twice as
large. The rows that are scored in pieces are few on purpose. They cost a selection a piece, and a kernel that takes
every multiprocessor runs as long as the last of them, which a transfer may hold.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Literal, NamedTuple

import torch

from lightning_indexer.distributed.checks import check_keys, check_options, check_rows, check_vector
from lightning_indexer.distributed.collectives import Group
from lightning_indexer.distributed.keys import rebased
from lightning_indexer.distributed.merge import of_packed, select_among
from lightning_indexer.distributed.selection import score_and_select
from lightning_indexer.distributed.sharding import KeySharding, LocalWindows, Located, landing, locate
from lightning_indexer.problems.checks import as_int
from lightning_indexer.problems.top_k import Order

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

# Two H200 of one host: an all-gather of 138 MB, half of which travels, takes 320 us.
BYTES_PER_SECOND = 200e9
# What scoring reaches there, docs/kernels/cuda_sm90.md, rounded down.
FLOP_PER_SECOND = 1.0e15
# A piece costs a launch, a selection and its share of the merge.
PIECE_SECONDS = 15e-6
_ROW_STEP = 64


def rows_while_gathering(rows: int, keys: int, heads: int, head_dim: int, ranks: int) -> int:
    """Rows whose scoring takes twice as long as the keys are on their way; none where the pieces would take longer."""
    arrival = keys * (head_dim + 4) * (ranks - 1) / ranks / BYTES_PER_SECOND
    if arrival <= len(steps_of_pieces(ranks)) * PIECE_SECONDS:
        return 0
    needed = 2 * arrival * FLOP_PER_SECOND / (2 * heads * head_dim * keys)
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
    k = check_options(sharding, k, index_base=index_base, order=order, values=values, logits_bytes=logits_bytes)
    rows = check_rows(q, weights, 3)
    check_keys(kv)
    for name, bound in (("cu_seqlen_ks", cu_seqlen_ks), ("cu_seqlen_ke", cu_seqlen_ke)):
        check_vector(name, bound, ((rows,), (rows, 1)), q.device)
    if rows_in_pieces is not None and as_int("rows_in_pieces", rows_in_pieces) < 0:
        raise ValueError(f"rows_in_pieces: got {rows_in_pieces}, expected at least 0")
    team = Group(group, q.device, timeout)
    team.expect(sharding.ranks)
    if rows_in_pieces is None:
        rows_in_pieces = rows_while_gathering(rows, sharding.keys, q.shape[1], q.shape[2], team.ranks)
    whole = slice(0, max(0, rows - rows_in_pieces))
    pieced = slice(whole.stop, rows)
    arriving = _gather(kv, sharding, team)
    indices = torch.empty((rows, k), dtype=torch.int32, device=q.device)
    scores = torch.empty((rows, k), dtype=torch.float32, device=q.device) if values else None

    lists = torch.empty((len(arriving.pieces), 2, rows - whole.stop, k), dtype=torch.int32, device=q.device)
    for piece, into in zip(arriving.pieces, lists, strict=True):
        piece.wait()
        if whole.stop == rows:
            continue
        found, positions = of_packed(into), piece.keys.positions
        starts, ends = (
            torch.searchsorted(positions, bound[pieced].reshape(-1).contiguous(), out_int32=True)
            for bound in (cu_seqlen_ks, cu_seqlen_ke)
        )
        score_and_select(
            q[pieced], arriving.of(piece.keys), weights[pieced], LocalWindows(starts, ends, None, None), found.indices,
            found.values, logits_bytes=logits_bytes, backend=backend,
        )  # fmt: skip
        if positions.numel():
            found.indices.copy_(torch.where(found.indices < 0, -1, positions[found.indices.clamp(min=0).long()]))
    merged, merged_scores = select_among(lists, k, ascending=team.ranks == 1, order=order, values=values)
    indices[pieced] = merged
    if scores is not None and merged_scores is not None:
        scores[pieced] = merged_scores

    windows = sharding_of_one(sharding.keys).windows(cu_seqlen_ks, cu_seqlen_ke, 0)
    if whole.stop:
        every = locate(sharding, tuple(range(team.ranks)), q.device)
        score_and_select(
            q[whole], arriving.of(every), weights[whole], windows.rows(whole), indices[whole],
            None if scores is None else scores[whole], order=order, logits_bytes=logits_bytes, backend=backend,
        )  # fmt: skip
    indices = rebased(indices, windows.origins, index_base)
    return indices if scores is None else (indices, scores)


def sharding_of_one(keys: int) -> KeySharding:
    """All positions on one rank."""
    return KeySharding.contiguous([keys])


class _Piece(NamedTuple):
    """Keys that arrive together."""

    keys: Located
    wait: Callable[[], None]


class _Arriving(NamedTuple):
    """The keys of all ranks where they land; they are there when their piece has been waited for."""

    k: torch.Tensor
    kv_scale: torch.Tensor
    pieces: list[_Piece]

    def of(self, keys: Located) -> tuple[torch.Tensor, torch.Tensor]:
        """These keys by position: copied, unless they lie so."""
        if keys.places is None:
            some = slice(keys.span[0], sum(keys.span))
            return self.k[some], self.kv_scale[some]
        k = self.k.view(torch.uint8).index_select(0, keys.places).view(self.k.dtype)
        return k, self.kv_scale.index_select(0, keys.places)


def steps_of_pieces(ranks: int) -> list[range]:
    """How many places before its own the ranks of each piece are: itself, two, four, eight, …"""
    pieces = [range(1)]
    while pieces[-1].stop < ranks:
        first = pieces[-1].stop
        pieces.append(range(first, min(first + 2 * len(pieces[-1]), ranks)))
    return pieces


def _gather(kv: tuple[torch.Tensor, torch.Tensor], sharding: KeySharding, team: Group) -> _Arriving:
    k, kv_scale = (t.wait() if hasattr(t, "wait") and hasattr(t, "elem") else t for t in kv)
    kv_scale = kv_scale.reshape(-1)
    size = sharding.size(team.rank)
    if k.dim() != 2 or k.shape[0] != size:
        raise ValueError(f"k: got shape {list(k.shape)}, expected [{size}, D], this rank's of the sharding")
    if kv_scale.shape[0] != size:
        raise ValueError(f"kv_scale: got {kv_scale.shape[0]} scales, expected {size}, one a key")
    whole = _Arriving(k.new_empty((sharding.keys, k.shape[1])), kv_scale.new_empty(sharding.keys), [])
    # fp8 travels as bytes: not every transport knows it.
    whole_bytes, own_bytes = whole.k.view(torch.uint8), k.contiguous().view(torch.uint8)

    def landing_of(rank: int) -> list[torch.Tensor]:
        spans = [slice(first, first + count) for first, count in landing(sharding, rank)]
        return [buffer[span] for span in spans for buffer in (whole_bytes, whole.kv_scale)]

    own = landing_of(team.rank)
    done = 0
    for keys_part, scales_part in zip(own[::2], own[1::2], strict=True):
        some = slice(done, done + scales_part.shape[0])
        keys_part.copy_(own_bytes[some])
        scales_part.copy_(kv_scale[some])
        done = some.stop
    for steps in steps_of_pieces(team.ranks):
        sources = [(team.rank - step) % team.ranks for step in steps]
        sends = [(part, (team.rank + step) % team.ranks) for step in steps if step for part in own]
        receives = [(part, rank) for rank in sources if rank != team.rank for part in landing_of(rank)]
        named = f"keys of rank {', '.join(map(str, sources))}"
        keys = locate(sharding, tuple(sources), k.device)
        whole.pieces.append(_Piece(keys, team.exchange(sends, receives, named)))
    return whole
