"""The global top-k of a row out of the best candidates of each rank, by the total order of ``top_k_per_row``.

Score descending, then position ascending. A rank's k best hold every one of the global k best that it has, so that the
merge is exact. Three ways, by what travels; ``choose_exchange`` says which is taken:

    gather     every rank receives all candidates and merges all rows: 8 k (P - 1) bytes a row, one collective.
    rows       every rank merges M / P of the rows and hands on what it found: 12 k bytes a row whatever P is.
    histogram  ranks sum 256 counts a row and digit of (score, position) until the k-th is known, and keep what reaches
               it: no candidate travels, the result alone does.
"""

from __future__ import annotations

from typing import Literal, NamedTuple, get_args

import torch

from lightning_indexer.calls.top_k import top_k_per_row
from lightning_indexer.distributed.collectives import Group
from lightning_indexer.problems.top_k import MAX_WIDTH, order_keys

Exchange = Literal["gather", "rows", "histogram"]
# Two H200 of one host: an all-gather takes 36 us up to 1 MB and 53 us at 8.6 MB, so below this a second collective
# costs more than the bytes that it saves.
GATHER_BYTES = 8 << 20
_DIGIT_BITS = 8
_BINS = 1 << _DIGIT_BITS


class Candidates(NamedTuple):
    """A rank's best: ``indices`` positions, ascending in a row, -1 behind the last; ``values`` their scores.

    Both [M, k], views of ``packed`` int32 [2, M, k], which travels.
    """

    packed: torch.Tensor
    indices: torch.Tensor
    values: torch.Tensor


def candidates(rows: int, k: int, device: torch.device) -> Candidates:
    """Room for a rank's candidates."""
    return of_packed(torch.empty((2, rows, k), dtype=torch.int32, device=device))


def of_packed(packed: torch.Tensor) -> Candidates:
    return Candidates(packed, packed[0], packed[1].view(torch.float32))


def choose_exchange(rows: int, k: int, ranks: int) -> Exchange:
    """Bytes decide: :data:`GATHER_BYTES`. The histograms are never chosen, docs/distributed.md says why."""
    return "gather" if 8 * rows * k * ranks <= GATHER_BYTES else "rows"


def merge_top_k(
    mine: Candidates, group: Group, *, ascending: bool, keys: int, order: str, values: bool, exchange: str | None = None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The k best of each row over all ranks, on every rank.

    Args:
        mine: this rank's; every rank has the same M and k.
        group: of the ranks.
        ascending: every position of a rank is below those of the next.
        keys: N, above every position.
        order: of a row, as in ``top_k_per_row``.
        values: return the scores too.
        exchange: one of the three; None lets :func:`choose_exchange` say.

    Returns:
        Positions [M, k] int32, -1 behind the last, and scores [M, k] float32, ``-inf`` there, or None.
    """
    if exchange is not None and exchange not in get_args(Exchange):
        raise ValueError(f"exchange: got {exchange!r}, expected one of {', '.join(get_args(Exchange))}")
    _, rows, k = mine.packed.shape
    if rows == 0 or group.ranks == 1:
        return select_among(mine.packed[None], k, ascending=True, order=order, values=values)
    exchange = exchange or choose_exchange(rows, k, group.ranks)
    if exchange == "gather":
        everyone = group.all_gather(mine.packed, "all-gather of the candidates")
        return select_among(everyone, k, ascending=ascending, order=order, values=values)
    if exchange == "rows":
        return _by_rows(mine, group, ascending, order, values)
    return _by_histograms(mine, group, ascending, keys, order, values)


def select_among(
    everyone: torch.Tensor, k: int, *, ascending: bool, order: str, values: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The k best of each row among lists of candidates, int32 [lists, 2, M, width], as they are packed.

    Unused slots become NaN, which is never selected. Where the lists are not in ascending order one after the other,
    candidates are sorted by position first: the selection prefers the first of equal scores.
    """
    lists, _, rows, width = everyone.shape
    indices, scores = (everyone[:, i].transpose(0, 1).contiguous().view(rows, lists * width) for i in range(2))
    scores = scores.view(torch.float32)
    if not ascending:
        indices, by_position = torch.where(indices < 0, MAX_WIDTH, indices).sort(dim=1)
        scores = scores.gather(1, by_position)
        unused = indices == MAX_WIDTH  # no position: those are below N, which is at most this
    else:
        unused = indices < 0
    scores = torch.where(unused, float("nan"), scores)
    found = top_k_per_row(
        scores, k, index_base="page", page_table=indices, page_size=1, order=order, values=values  # type: ignore[arg-type]
    )  # fmt: skip
    return found if isinstance(found, tuple) else (found, None)


def _by_rows(
    mine: Candidates, group: Group, ascending: bool, order: str, values: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    _, rows, k = mine.packed.shape
    share = -(-rows // group.ranks)
    packed = mine.packed
    if rows % group.ranks:  # rows that fill up the last shares hold no candidate
        packed = torch.nn.functional.pad(packed, (0, 0, 0, group.ranks * share - rows), value=-1)
    by_owner = packed.view(2, group.ranks, share, k).transpose(0, 1).contiguous()
    received = group.all_to_all(by_owner, "exchange of the candidates by rows")
    best, scores = select_among(received, k, ascending=ascending, order=order, values=values)
    parts = best[None] if scores is None else torch.stack((best, scores.view(torch.int32)))
    whole = group.all_gather(parts, "all-gather of the merged rows").transpose(0, 1)
    whole = whole.reshape(parts.shape[0], group.ranks * share, k)[:, :rows]
    return whole[0], whole[1].view(torch.float32) if values else None


def _by_histograms(
    mine: Candidates, group: Group, ascending: bool, keys: int, order: str, values: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    _, rows, k = mine.packed.shape
    used = mine.indices >= 0
    # One integer a candidate, larger is better: the score's key, then the distance from the last position.
    bits = -(-max(1, keys - 1).bit_length() // _DIGIT_BITS) * _DIGIT_BITS
    ranked = (order_keys(mine.values).long() << bits) | ((1 << bits) - 1 - mine.indices.long())
    alive, survivors = used, torch.zeros_like(used)
    wanted: torch.Tensor | None = None
    for shift in range(32 + bits - _DIGIT_BITS, -1, -_DIGIT_BITS):
        digit = (ranked >> shift) & (_BINS - 1)
        if shift == 32 + bits - _DIGIT_BITS:
            digit = digit ^ (_BINS // 2)  # keys are signed
        counts = torch.zeros((rows, _BINS), dtype=torch.int32, device=digit.device)
        counts.scatter_add_(1, digit, alive.int())
        group.all_reduce(counts, "sum of the histograms")
        reached = counts.flip(1).cumsum(1).flip(1)  # at this digit or above
        if wanted is None:
            wanted = reached[:, :1].clamp(max=k)
        # The largest digit that enough reach; digit 0, which all reach, where none is wanted any more.
        cut = ((reached >= wanted).sum(1, keepdim=True) - 1).clamp(min=0)
        above = reached.gather(1, cut) - counts.gather(1, cut)
        survivors = survivors | (alive & (digit > cut))
        alive = alive & (digit == cut)
        wanted = wanted - above
    assert wanted is not None
    survivors = survivors | (alive & (wanted > 0))
    return _assemble(mine, survivors, group, ascending, order, values)


def _assemble(
    mine: Candidates, survivors: torch.Tensor, group: Group, ascending: bool, order: str, values: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The survivors of all ranks in one [M, k]: each rank knows its slots, and the sum of all is the result."""
    rows, k = survivors.shape
    per_rank = group.all_gather(survivors.sum(1, dtype=torch.int32), "all-gather of the counts")
    slots = per_rank[: group.rank].sum(0)[:, None] + survivors.cumsum(1) - 1
    merged = mine.packed.new_zeros((2, rows, k + 1))  # the last column takes what does not survive
    slots = torch.where(survivors, slots, k)
    merged[0].scatter_(1, slots, mine.indices + 1)
    merged[1].scatter_(1, slots, mine.packed[1])
    merged = group.all_reduce(merged[:, :, :k].contiguous(), "sum of the survivors")
    merged[0] -= 1
    return select_among(merged[None], k, ascending=ascending, order=order, values=values)
