"""Which keys lie on which rank: positions counted, moved to a rank's own numbering and back.

On each rank local index j rises with the position, so a window is one window on every rank, and the order of equal
scores, by position, is the order of local indices.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import torch

from lightning_indexer.problems.checks import as_int, check_tensor, shape_of
from lightning_indexer.problems.top_k import MAX_WIDTH

_WHOLE = (torch.int32, torch.int64)
Numbers = TypeVar("Numbers", int, torch.Tensor)


class LocalWindows(NamedTuple):
    """The windows of one step on one rank, made once and used by every layer.

    Attributes:
        starts, ends: int32 [M] in the rank's own numbering; ``starts`` is None where windows begin at 0.
        origins: int32 [M], the windows' starts in positions, from which indices by ``"row"`` count; None where 0.
        numbering: options of ``top_k_per_row`` that give positions instead of local indices; None where it has none.
    """

    starts: torch.Tensor | None
    ends: torch.Tensor
    origins: torch.Tensor | None
    numbering: dict[str, Any] | None

    def rows(self, some: slice) -> LocalWindows:
        """The windows of these rows."""
        options = self.numbering
        if options is not None:
            options = {
                name: value[some] if isinstance(value, torch.Tensor) else value for name, value in options.items()
            }
        starts, ends, origins, _ = self
        return LocalWindows(
            None if starts is None else starts[some], ends[some], None if origins is None else origins[some], options
        )


@dataclass(frozen=True, slots=True)
class KeySharding:
    """How N positions are dealt out to the ranks of a group. Make one by the four functions below.

    Attributes:
        keys: N. Positions from N on belong to nobody. In decode, an upper bound of every context.
        ranks: of the group.
        page: positions that a rank takes in turn, rank 0 first; 0 where ``runs`` say it.
        runs: of each rank, (first position, positions), ascending.
    """

    keys: int
    ranks: int
    page: int = 0
    runs: tuple[tuple[tuple[int, int], ...], ...] = ()

    @staticmethod
    def contiguous(sizes: Sequence[int]) -> KeySharding:
        """``sizes[r]`` positions on rank r, in the order of the ranks; any of them may be 0."""
        if not isinstance(sizes, Iterable):
            raise TypeError(f"sizes: got {type(sizes).__name__}, expected a sequence of ints, one a rank")
        runs, first = [], 0
        for rank, given in enumerate(sizes):
            size = _count(f"sizes[{rank}]", given, 0)
            runs.append(((first, size),))
            first += size
        return _checked(KeySharding(first, len(runs), runs=tuple(runs)))

    @staticmethod
    def even(keys: int, ranks: int) -> KeySharding:
        """Contiguous shards as ``torch.chunk`` and ``Shard(0)`` cut: ceil(N / ranks) each, the last ones fewer or 0."""
        keys, ranks = _count("keys", keys, 0), _count("ranks", ranks, 1)
        size = -(-keys // ranks)
        return KeySharding.contiguous([max(0, min(size, keys - rank * size)) for rank in range(ranks)])

    @staticmethod
    def zigzag(keys: int, ranks: int) -> KeySharding:
        """Two chunks a rank, r and 2 * ranks - 1 - r: causal rows dealt out so are equal work."""
        keys, ranks = _count("keys", keys, 0), _count("ranks", ranks, 1)
        size, more = divmod(keys, 2 * ranks)
        chunks, first = [], 0
        for index in range(2 * ranks):
            chunks.append((first, size + (index < more)))
            first += chunks[-1][1]
        return _checked(KeySharding(keys, ranks, runs=tuple((chunks[r], chunks[-1 - r]) for r in range(ranks))))

    @staticmethod
    def interleaved(keys: int, ranks: int, page: int = 1) -> KeySharding:
        """Pages of ``page`` positions in turn: position n lies on rank ``n // page % ranks``."""
        keys, ranks = _count("keys", keys, 0), _count("ranks", ranks, 1)
        return _checked(KeySharding(keys, ranks, _count("page", page, 1)))

    @property
    def ascending(self) -> bool:
        """True where every position of a rank is below those of the next."""
        return self.ranks == 1 or self._one_run

    def check_rank(self, rank: int) -> int:
        """The rank itself.

        Raises:
            TypeError, ValueError: it is none of the group.
        """
        if type(rank) is int and 0 <= rank < self.ranks:
            return rank
        number = _count("rank", rank, 0)
        if number >= self.ranks:
            raise ValueError(f"rank: got {number}, expected 0 to {self.ranks - 1}")
        return number

    def size(self, rank: int) -> int:
        """Keys of a rank."""
        return self.below(self.keys, rank)

    @property
    def sizes(self) -> list[int]:
        """Keys of every rank."""
        return [self.size(rank) for rank in range(self.ranks)]

    def below(self, positions: Numbers, rank: int) -> Numbers:
        """How many of the rank's keys lie below each position: a window's bound, in the rank's own numbering."""
        rank = self.check_rank(rank)
        if self.page:
            turn = self.page * self.ranks
            inside = _clamp(positions, 0, self.keys)
            return inside // turn * self.page + _clamp(inside % turn - rank * self.page, 0, self.page)
        parts = [_clamp(_clamp(positions, 0, self.keys) - first, 0, size) for first, size in self.runs[rank]]
        return parts[0] + parts[1] if len(parts) == 2 else parts[0]

    def position(self, local: torch.Tensor, rank: int) -> torch.Tensor:
        """Positions of a rank's own indices; -1 stays."""
        rank = self.check_rank(rank)
        check_tensor("local", local, _WHOLE)
        if self.page:
            page = local // self.page
            found = (page * self.ranks + rank) * self.page + local - page * self.page
        else:
            (first, size), *second = self.runs[rank]
            found = local + first
            if second:
                found = torch.where(local < size, found, local + (second[0][0] - size))
        return torch.where(local < 0, -1, found)

    def local(self, positions: torch.Tensor, rank: int) -> torch.Tensor:
        """The rank's own indices of positions that it holds, -1 elsewhere: what its sparse attention reads."""
        check_tensor("positions", positions, _WHOLE)
        at = self.below(positions, rank)
        held = (positions >= 0) & (self.below(positions + 1, rank) > at)
        return torch.where(held, at, -1)

    def windows(self, starts: torch.Tensor | None, ends: torch.Tensor, rank: int) -> LocalWindows:
        """A step's windows on one rank: some small launches, made once a step.

        Args:
            starts: int32 [M], first position of each row's window, any value; None: 0.
            ends: int32 [M], likewise, exclusive.
            rank: of the group.
        """
        ends = _vector("ends", ends)
        local_ends = self.below(ends, rank)
        if starts is None:
            return self.numbered(local_ends, rank)
        starts = _vector("starts", starts)
        if starts.shape != ends.shape or starts.device != ends.device:
            raise ValueError(
                f"starts: got shape {shape_of(starts)} on {starts.device}, expected {shape_of(ends)} on {ends.device}, "
                "as ends"
            )
        local_starts = self.below(starts, rank)
        numbering = None
        if self._one_run:
            numbering = {"index_base": "offset", "offsets": local_starts + self.runs[rank][0][0]}
        return LocalWindows(local_starts, local_ends, starts.clamp(0, self.keys), numbering)

    def numbered(self, local_ends: torch.Tensor, rank: int) -> LocalWindows:
        """Windows that begin at 0, out of their ends on this rank, int32 [M]."""
        rows, device = local_ends.shape, local_ends.device
        numbering: dict[str, Any] | None = None
        if self._one_run:
            offsets = torch.full(rows, self.runs[rank][0][0], dtype=torch.int32, device=device)
            numbering = {"index_base": "offset", "offsets": offsets}
        elif self.page:
            pages = torch.arange(max(1, -(-self.size(rank) // self.page)), dtype=torch.int32, device=device)
            table = (pages * self.ranks + rank).expand(*rows, -1)
            numbering = {"index_base": "page", "page_table": table, "page_size": self.page}
        return LocalWindows(None, local_ends, None, numbering)

    @property
    def _one_run(self) -> bool:
        return not self.page and len(self.runs[0]) == 1

    def lengths(self, context_lens: torch.Tensor, next_n: int, rank: int) -> torch.Tensor:
        """Context lengths on one rank, int32 [B, next_n]: what its paged cache holds of each row's context.

        Args:
            context_lens: int32 [B, next_n], or [B]: row j of b then sees ``context_lens[b] - next_n + 1 + j``.
            next_n: rows of a sequence.
            rank: of the group.
        """
        check_tensor("context_lens", context_lens, (torch.int32,), ": pass context_lens.to(torch.int32)")
        next_n = _count("next_n", next_n, 1)
        if context_lens.dim() != 1 and (context_lens.dim() != 2 or context_lens.shape[1] != next_n):
            raise ValueError(f"context_lens: got shape {shape_of(context_lens)}, expected [B] or [B, {next_n}]")
        if context_lens.dim() == 1:
            step = torch.arange(1 - next_n, 1, dtype=torch.int32, device=context_lens.device)
            context_lens = context_lens[:, None] + step
        return self.below(context_lens, rank)


class Located(NamedTuple):
    """The keys of some ranks, by position, in a buffer of all keys.

    Attributes:
        positions: int32, ascending.
        places: int64, where each lies in the buffer; None where they lie one after the other, in ``span``.
        span: first place and number.
    """

    positions: torch.Tensor
    places: torch.Tensor | None
    span: tuple[int, int]


def landing(sharding: KeySharding, rank: int) -> list[tuple[int, int]]:
    """Where a rank's keys go in a buffer of all keys, as (first, number) in the order of its own numbering.

    Runs go to their positions, pages to the shards end to end: single pages would travel one by one.
    """
    if not sharding.page:
        return [run for run in sharding.runs[rank] if run[1]]
    return [(sum(sharding.size(other) for other in range(rank)), sharding.size(rank))]


def locate(sharding: KeySharding, ranks: tuple[int, ...], device: torch.device) -> Located:
    """The keys of these ranks by position: tables that all layers of a step share."""
    capturing = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
    # What a capture allocates is gone with its graph.
    return (_tables.__wrapped__ if capturing else _tables)(sharding, ranks, device)


@functools.lru_cache(maxsize=64)
def _tables(sharding: KeySharding, ranks: tuple[int, ...], device: torch.device) -> Located:
    positions, places = [], []
    for rank in ranks:
        local = torch.arange(sharding.size(rank), device=device)
        positions.append(sharding.position(local, rank))
        places += [torch.arange(first, first + size, device=device) for first, size in landing(sharding, rank)]
    ascending, order = torch.cat(positions).sort()
    spans: list[tuple[int, int]] = []
    for first, size in sorted(span for rank in ranks for span in landing(sharding, rank)):
        if spans and sum(spans[-1]) == first:
            first, size = spans[-1][0], spans.pop()[1] + size
        spans.append((first, size))
    if len(spans) <= 1 and (not sharding.page or len(ranks) == 1):
        return Located(ascending.int(), None, spans[0] if spans else (0, 0))
    return Located(ascending.int(), torch.cat(places)[order], (0, 0))


def _checked(sharding: KeySharding) -> KeySharding:
    if sharding.ranks < 1:
        raise ValueError("sizes: got none, expected one a rank")
    if sharding.keys > MAX_WIDTH:
        raise ValueError(f"keys: got {sharding.keys}, expected 0 to {MAX_WIDTH}: positions are int32")
    if sharding.page * sharding.ranks > MAX_WIDTH:
        raise ValueError(f"page: got {sharding.page}, expected at most {MAX_WIDTH // sharding.ranks}")
    return sharding


def _count(name: str, given: object, least: int) -> int:
    count = int(given) if isinstance(given, torch.Tensor) and given.dtype in _WHOLE and given.dim() == 0 else given
    number = int(as_int(name, count))
    if number < least:
        raise ValueError(f"{name}: got {number}, expected at least {least}")
    return number


def _vector(name: str, bound: torch.Tensor) -> torch.Tensor:
    """[M] of a window's bounds."""
    check_tensor(name, bound, (torch.int32,), f": pass {name}.to(torch.int32)")
    return bound.reshape(-1)


def _clamp(value: Numbers, least: int, most: int) -> Numbers:
    if isinstance(value, torch.Tensor):
        return value.clamp(least, most)
    return max(least, min(value, most))
