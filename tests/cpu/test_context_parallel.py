"""Keys or rows sharded over processes: bitwise the selection of one process.

Operands are small integers, so that every sum is exact: scores do not depend on how a BLAS cuts its work, and many are
equal.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
import torch

from lightning_indexer import (
    Arch,
    CacheLayout,
    MqaLogitsProblem,
    fp8_mqa_logits,
    fp8_paged_mqa_logits,
    reference_top_k,
    top_k_per_row,
)
from lightning_indexer.backends.torch_blocked import config as torch_blocked
from lightning_indexer.check.cases import make_windows
from lightning_indexer.distributed import (
    CollectiveError,
    KeySharding,
    paged_top_k_of_sharded_keys,
    top_k_of_sharded_keys,
    top_k_of_sharded_rows,
)
from lightning_indexer.distributed.collectives import Group
from lightning_indexer.distributed.merge import GATHER_BYTES, candidates, choose_exchange, merge_top_k
from lightning_indexer.distributed.rows import rows_while_gathering, steps_of_pieces
from lightning_indexer.distributed.sharding import landing, locate
from lightning_indexer.integrations.vllm_dcp import merge_dcp_topk_global
from processes import in_gloo_group

CPU = torch.device("cpu")
ROWS, KEYS, HEADS, DIM = 13, 67, 8, 32
EXCHANGES = ("gather", "rows", "histogram")


def shardings(keys: int, ranks: int) -> list[KeySharding]:
    """Even and uneven, with ranks that have no key; all kinds at two ranks, others at three than at four."""
    empty_first, empty_between = [0, keys - 3, 3, 0], [5, 0, 1, keys - 6]
    uneven = [[*sizes[: ranks - 1], keys - sum(sizes[: ranks - 1])] for sizes in (empty_first, empty_between)]
    pages = [1, 16]  # of 16 at four ranks the last one is cut, and one rank has fewer
    if ranks > 2:
        uneven, pages = uneven[ranks - 3 : ranks - 2], pages[ranks - 3 : ranks - 2]
    return [
        KeySharding.even(keys, ranks),
        *map(KeySharding.contiguous, uneven),
        KeySharding.zigzag(keys, ranks),
        *(KeySharding.interleaved(keys, ranks, page) for page in pages),
    ]


def held(sharding: KeySharding, rank: int) -> torch.Tensor:
    """Positions of a rank, counted out one by one."""
    if sharding.page:
        return torch.tensor([n for n in range(sharding.keys) if n // sharding.page % sharding.ranks == rank]).long()
    runs = [torch.arange(first, first + size) for first, size in sharding.runs[rank]]
    return torch.cat(runs)


def take(tensor: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    """Rows of a tensor, fp8 too."""
    if tensor.dtype.itemsize > 1:
        return tensor[at]
    return tensor.view(torch.uint8)[at].view(tensor.dtype)


def operands(rows: int, keys: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(rows * keys)

    def integers(*shape: int) -> torch.Tensor:
        return torch.randint(-2, 3, shape, generator=generator).float()

    q, k = integers(rows, HEADS, DIM).to(torch.float8_e4m3fn), integers(keys, DIM).to(torch.float8_e4m3fn)
    scale = 2.0 ** torch.randint(-1, 2, (keys,), generator=generator)
    return q, k, scale, integers(rows, HEADS) / 2


# What each process checks.


def check_numbering(rank: int, ranks: int) -> None:
    for sharding in shardings(KEYS, ranks):
        positions = held(sharding, rank)
        assert sharding.size(rank) == len(positions)
        at = torch.arange(len(positions), dtype=torch.int32)
        assert torch.equal(sharding.position(at, rank).long(), positions)
        assert sharding.position(torch.tensor([-1]), rank).tolist() == [-1]
        every = torch.arange(-2, KEYS + 3, dtype=torch.int32)
        below = (positions < every[:, None]).sum(1)
        assert torch.equal(sharding.below(every, rank).long(), below)
        expected = torch.where(torch.isin(every, positions), below, -1)
        assert torch.equal(sharding.local(every, rank).long(), expected)
        extremes = torch.tensor([-(2**31), 2**31 - 1], dtype=torch.int32)
        assert sharding.below(extremes, rank).tolist() == [0, len(positions)]
        # Every rank's keys where they land in a buffer of all, and found there by position.
        buffer = torch.full((KEYS,), -1)
        for other in range(ranks):
            parts = held(sharding, other).split([size for _, size in landing(sharding, other)])
            for (first, size), part in zip(landing(sharding, other), parts, strict=True):
                buffer[first : first + size] = part
        assert torch.equal(buffer.sort().values, torch.arange(KEYS))
        for some in (tuple(range(ranks)), (rank,), (0, ranks - 1)):
            found = locate(sharding, some, CPU)
            mine = torch.cat([held(sharding, other) for other in sorted(set(some))]).sort().values
            assert torch.equal(found.positions.long(), mine)
            first, size = found.span
            assert torch.equal(buffer[first : first + size] if found.places is None else buffer[found.places], mine)


def check_merge(rank: int, ranks: int) -> None:
    """Scores of every kind, few different ones: NaN, infinities, zeros of both signs, one score for all."""
    group = Group(None, CPU, None)
    generator = torch.Generator().manual_seed(3)
    kinds = torch.tensor([float("nan"), float("-inf"), float("inf"), -0.0, 0.0, 1.5, -1.5, 1e-42])
    scores = kinds[torch.randint(0, len(kinds), (ROWS, KEYS), generator=generator)]
    scores[3], scores[4], scores[5] = float("nan"), 2.0, float("-inf")
    scores[6] = torch.randn(KEYS, generator=generator)
    references = {
        (k, order): reference_top_k(scores, k, order=order) for k in (1, 9, 80) for order in ("index", "score")
    }
    for sharding in shardings(KEYS, ranks):
        positions = held(sharding, rank)
        for k in (1, 9, 80):
            mine = candidates(ROWS, k, CPU)
            top_k_per_row(scores[:, positions], k, values=mine.values, out=mine.indices)
            mine.indices.copy_(sharding.position(mine.indices, rank))
            for order in ("index", "score"):
                expected, expected_values = references[k, order]
                for exchange in EXCHANGES if order == "index" else ("rows",):
                    found, values = merge_top_k(
                        mine,
                        group,
                        ascending=sharding.ascending,
                        keys=KEYS,
                        order=order,
                        values=True,
                        exchange=exchange,
                    )
                    assert torch.equal(found, expected), (sharding, k, order, exchange)
                    assert torch.equal(values + 0.0, expected_values), (sharding, k, order, exchange)
                    assert values.isneginf()[found < 0].all()


def check_keys(rank: int, ranks: int) -> None:
    q, k, scale, weights = operands(ROWS, KEYS)
    for window, size, base, order, exchange, budget in (
        ("misaligned", 9, "row", "index", None, None),
        ("empty", 40, "absolute", "score", "rows", 2400),
        ("past_end", 80, "row", "index", "histogram", None),
    ):
        ks, ke = make_windows(window, ROWS, KEYS, CPU)
        for starts in (ks, None):
            first = torch.zeros_like(ks) if starts is None else ks
            logits = fp8_mqa_logits(q, (k, scale), weights, first, ke)
            expected, expected_values = top_k_per_row(
                logits, size, first, ke, index_base=base, order=order, values=True
            )
            for sharding in shardings(KEYS, ranks):
                at = held(sharding, rank)
                found, values = top_k_of_sharded_keys(
                    q, (take(k, at), scale[at]), weights, sharding.windows(starts, ke, rank), size, sharding=sharding,
                    index_base=base, order=order, values=True, exchange=exchange, logits_bytes=budget,
                )  # fmt: skip
                assert torch.equal(found, expected), (window, sharding, base, exchange)
                assert torch.equal(values, expected_values), (window, sharding, base, exchange)
    # Equal scores on both sides of every boundary: the smaller positions, whoever holds them.
    nothing = torch.zeros_like(weights)
    for sharding in shardings(KEYS, ranks):
        at = held(sharding, rank)
        windows = sharding.windows(None, torch.full((ROWS,), KEYS, dtype=torch.int32), rank)
        for exchange in EXCHANGES:
            found = top_k_of_sharded_keys(
                q, (take(k, at), scale[at]), nothing, windows, 40, sharding=sharding, exchange=exchange
            )
            assert torch.equal(found, torch.arange(40, dtype=torch.int32).expand(ROWS, -1))
    none = KeySharding.even(KEYS, ranks)
    at = held(none, rank)
    empty = none.windows(None, torch.zeros(0, dtype=torch.int32), rank)
    found = top_k_of_sharded_keys(q[:0], (take(k, at), scale[at]), weights[:0], empty, 4, sharding=none)
    assert found.shape == (0, 4)


def check_rows(rank: int, ranks: int) -> None:
    q, k, scale, weights = operands(ROWS, KEYS)
    for window, size in (("misaligned", 9), ("past_end", 80)):
        ks, ke = make_windows(window, ROWS, KEYS, CPU)
        whole = top_k_per_row(fp8_mqa_logits(q, (k, scale), weights, ks, ke), size, ks, ke, values=True)
        ranked = top_k_per_row(
            fp8_mqa_logits(q, (k, scale), weights, ks, ke), size, ks, ke, order="score", index_base="absolute"
        )
        # Rows by zig-zag halves; one rank without any; in any order.
        chunks = torch.arange(ROWS).tensor_split(2 * ranks)
        zigzag = torch.cat((chunks[rank], chunks[-1 - rank]))
        for mine in (zigzag, zigzag.flip(0) if rank else zigzag[:0]):
            for sharding in shardings(KEYS, ranks):
                at = held(sharding, rank)
                given = take(q, mine), (take(k, at), scale[at, None]), weights[mine], ks[mine], ke[mine]
                for pieces, budget in ((ROWS, None), (2, 2400)):
                    options = {"sharding": sharding, "rows_in_pieces": pieces, "logits_bytes": budget}
                    found, values = top_k_of_sharded_rows(*given, size, values=True, **options)
                    assert torch.equal(found, whole[0][mine]), (window, sharding, pieces)
                    assert torch.equal(values, whole[1][mine]), (window, sharding, pieces)
                found = top_k_of_sharded_rows(
                    *given, size, order="score", index_base="absolute", sharding=sharding, rows_in_pieces=0
                )
                assert torch.equal(found, ranked[mine])


def check_waiting(rank: int, ranks: int) -> None:
    """Operands that are results of collectives are waited for."""
    from torch.distributed._functional_collectives import AsyncCollectiveTensor

    q, k, scale, weights = operands(ROWS, KEYS)
    ke = torch.full((ROWS,), KEYS, dtype=torch.int32)
    expected = top_k_per_row(fp8_mqa_logits(q, (k, scale), weights, ke - KEYS, ke), 9)
    sharding = KeySharding.zigzag(KEYS, ranks)
    at = held(sharding, rank)
    waiting = [AsyncCollectiveTensor(tensor) for tensor in (q, take(k, at), scale[at], weights)]
    given = waiting[0], (waiting[1], waiting[2]), waiting[3]
    assert torch.equal(top_k_of_sharded_rows(*given, ke - KEYS, ke, 9, sharding=sharding, rows_in_pieces=4), expected)
    windows = sharding.windows(None, ke, rank)
    assert torch.equal(top_k_of_sharded_keys(*given, windows, 9, sharding=sharding), expected)


def check_paged(rank: int, ranks: int) -> None:
    page, batch, next_n, longest = 4, 3, 2, 40
    lengths = torch.tensor([37, 0, 21], dtype=torch.int32)
    q, _, _, weights = operands(batch * next_n, 1)
    q = q.view(batch, next_n, HEADS, DIM)
    _, k, scale, _ = operands(1, batch * longest)
    layout = CacheLayout(page, DIM)
    pages = longest // page
    tables = torch.randperm(batch * pages, generator=torch.Generator().manual_seed(1)).view(batch, pages).int()

    def cache_of(positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """A pool with these positions of each sequence, and its tables."""
        filled = -(-max(1, len(positions)) // page)
        keys = torch.full((batch, filled * page, DIM), 0x7F, dtype=torch.uint8)  # NaN where nothing is held
        scales = torch.full((batch, filled * page), float("nan"))
        for b in range(batch):
            keys[b, : len(positions)] = k.view(torch.uint8)[b * longest + positions]
            scales[b, : len(positions)] = scale[b * longest + positions]
        order = torch.argsort(tables[:, :filled].reshape(-1))
        blocks = (t.reshape(batch * filled, page, *t.shape[2:])[order] for t in (keys, scales))
        packed, scales_of_pages = blocks
        table = torch.argsort(order).view(batch, filled).int()
        return layout.pack(packed.view(torch.float8_e4m3fn), scales_of_pages), table

    pool, table = cache_of(torch.arange(longest))
    for context in (lengths, torch.tensor([[5, 37], [1, 0], [40, 21]], dtype=torch.int32)):
        whole = fp8_paged_mqa_logits(q, pool, weights, context, table, longest)
        rows = context.reshape(-1) if context.dim() == 2 else (context[:, None] + torch.tensor([-1, 0])).reshape(-1)
        for size in (6, 50):
            expected, expected_values = top_k_per_row(whole, size, None, rows.int(), values=True)
            for sharding in (
                KeySharding.interleaved(longest, ranks, page),
                KeySharding.interleaved(longest, ranks, 1),
                KeySharding.contiguous([8, *[0] * (ranks - 2), longest - 8]),
                KeySharding.zigzag(longest, ranks),
            ):
                mine, local_table = cache_of(held(sharding, rank))
                local = sharding.lengths(context, next_n, rank)
                found, values = paged_top_k_of_sharded_keys(
                    q, mine, weights, local, local_table, max(1, sharding.size(rank)), size, sharding=sharding,
                    values=True,
                )  # fmt: skip
                assert torch.equal(found, expected), (sharding, size)
                assert torch.equal(values, expected_values), (sharding, size)
                read = sharding.local(found, rank)
                assert torch.equal((read >= 0) & (found >= 0), read >= 0)
                assert torch.equal(sharding.position(read, rank)[read >= 0], found[read >= 0])


def check_vllm(rank: int, ranks: int) -> None:
    """vLLM's own merge: two requests packed, a selection in any order, relative to the row's request."""
    generator = torch.Generator().manual_seed(5)
    lengths, rows = (37, 26), 5
    scores = [torch.randint(0, 9, (rows, length), generator=generator).float() for length in lengths]
    for interleave, k in ((1, 7), (4, 30)):
        mine = [held(KeySharding.interleaved(length, ranks, interleave), rank) for length in lengths]
        local = [score[:, at] for score, at in zip(scores, mine, strict=True)]
        logits = torch.full((2 * rows, sum(map(len, mine))), float("nan"))
        logits[:rows, : len(mine[0])], logits[rows:, len(mine[0]) :] = local
        starts = torch.tensor([0] * rows + [len(mine[0])] * rows, dtype=torch.int32)
        selected = torch.cat([top_k_per_row(score.contiguous(), k) for score in local]).flip(1).contiguous()
        merge_dcp_topk_global(logits, selected, k, rank, ranks, interleave, starts)
        expected = torch.cat([reference_top_k(score, k)[0] for score in scores])
        assert torch.equal(selected, expected), (interleave, k)


def check_errors(rank: int, ranks: int) -> None:
    q, k, scale, weights = operands(ROWS, KEYS)
    sharding = KeySharding.even(KEYS, ranks + 1)
    ends = torch.full((ROWS,), KEYS, dtype=torch.int32)
    windows = sharding.windows(None, ends, rank)
    message = rf"sharding: got one of {ranks + 1} ranks, expected {ranks}"
    with pytest.raises(ValueError, match=message):
        top_k_of_sharded_keys(q, (k, scale), weights, windows, 4, sharding=sharding)
    sharding = KeySharding.even(KEYS, ranks)
    with pytest.raises(ValueError, match=rf"k: got shape \[{KEYS}, {DIM}\], expected \[{sharding.size(rank)}, D\]"):
        top_k_of_sharded_rows(q, (k, scale), weights, ends - ends, ends, 4, sharding=sharding)
    at = held(sharding, rank)
    with pytest.raises(ValueError, match="exchange: got 'ring', expected one of gather, rows, histogram"):
        top_k_of_sharded_keys(
            q, (take(k, at), scale[at]), weights, sharding.windows(None, ends, rank), 4, sharding=sharding,
            exchange="ring",
        )  # fmt: skip


def peak_bytes(call: Callable[[], object]) -> int:
    """What a call holds of PyTorch's memory at most, by every allocation of every thread."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
        call()
    now = most = 0
    for event in profiler.profiler.kineto_results.events():
        if event.name() == "[memory]":
            now += event.nbytes()
            most = max(most, now)
    return most


def check_memory(rank: int, ranks: int) -> None:
    """A rank needs its shard and a workspace: the logits that it asked for, what the CPU's kernel takes, candidates."""
    if ranks != 2:
        return
    rows, keys, k, logits_bytes = 64, 1 << 15, 64, 1 << 18
    q, all_keys, scale, weights = operands(rows, keys)
    sharding = KeySharding.even(keys, ranks)
    at = held(sharding, rank)
    kv = take(all_keys, at), scale[at]
    windows = sharding.windows(None, torch.full((rows,), keys, dtype=torch.int32), rank)
    block = torch_blocked.heuristic(MqaLogitsProblem(rows, len(at), HEADS, DIM), Arch.parse("cpu"))
    kernel = 4 * len(at) * DIM + 4 * block.block_rows * HEADS * block.block_keys  # keys and scores in float32
    list_bytes = 8 * rows * k
    for exchange in EXCHANGES:

        def call(exchange: str = exchange) -> None:
            top_k_of_sharded_keys(
                q, kv, weights, windows, k, sharding=sharding, exchange=exchange, logits_bytes=logits_bytes
            )

        if rank:
            call()
            continue
        peak = peak_bytes(call)
        assert logits_bytes < peak < logits_bytes + kernel + 8 * ranks * list_bytes + 2**18, (exchange, peak)
        assert peak < 4 * rows * keys // 2  # half of what the logits of one device take


CHECKS: tuple[Callable[[int, int], None], ...] = (
    check_numbering, check_merge, check_keys, check_rows, check_paged, check_vllm, check_errors, check_memory,
)  # fmt: skip


def check_all(rank: int, ranks: int) -> None:
    for check in CHECKS:
        check(rank, ranks)


def check_late(rank: int, ranks: int) -> None:
    """Rank 1 stays away from the first call, and is gone at the second: rank 0 hears of both in time."""
    q, k, scale, weights = operands(ROWS, KEYS)
    sharding = KeySharding.even(KEYS, ranks)
    at = held(sharding, rank)
    ends = torch.full((ROWS,), KEYS, dtype=torch.int32)
    if rank == 1:
        time.sleep(1.0)
        return
    begun = time.monotonic()
    with pytest.raises(CollectiveError, match=r"keys of rank 1: rank 0 of 2 waited in vain, timeout 0.3 s: another"):
        top_k_of_sharded_rows(
            q, (take(k, at), scale[at]), weights, ends - ends, ends, 4, sharding=sharding, timeout=0.3
        )
    assert time.monotonic() - begun < 10
    with pytest.raises(
        CollectiveError, match=r"all-gather of the candidates: rank 0 of 2 waited in vain, timeout 60 s"
    ):
        top_k_of_sharded_keys(
            q, (take(k, at), scale[at]), weights, sharding.windows(None, ends, rank), 4, sharding=sharding
        )
    assert time.monotonic() - begun < 10


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_results_are_those_of_one_process(ranks):
    in_gloo_group(ranks, check_all)


@pytest.mark.slow
def test_a_rank_that_stays_away_is_named_with_the_timeout():
    in_gloo_group(2, check_late)


# Without processes.


def test_the_exchange_is_chosen_by_bytes():
    assert choose_exchange(64, 2048, 2) == "gather"
    assert choose_exchange(64, 2048, 64) == "rows"
    assert choose_exchange(4096, 2048, 2) == "rows"
    assert choose_exchange(GATHER_BYTES // 8 // 4, 1, 4) == "gather"


def test_rows_scored_while_keys_arrive():
    million = 1 << 20
    assert rows_while_gathering(10, million, 64, 128, 2) == 10
    assert rows_while_gathering(million, million, 64, 128, 1) == 0
    assert rows_while_gathering(million, 4096, 64, 128, 2) == 0  # there before a piece is launched
    two, eight, narrow = (
        rows_while_gathering(million, million, *of) for of in ((64, 128, 2), (64, 128, 8), (32, 128, 8))
    )
    assert 64 <= two <= eight <= narrow <= 512
    assert [len(steps_of_pieces(ranks)) for ranks in (1, 2, 3, 4, 8, 64)] == [1, 2, 2, 3, 4, 7]
    for ranks in (1, 2, 7, 8, 64):
        assert [step for steps in steps_of_pieces(ranks) for step in steps] == list(range(ranks))


def test_shardings_are_checked():
    with pytest.raises(ValueError, match=r"^sizes\[1\]: got -1, expected at least 0"):
        KeySharding.contiguous([3, -1])
    with pytest.raises(ValueError, match="page: got 0, expected at least 1"):
        KeySharding.interleaved(8, 2, 0)
    with pytest.raises(ValueError, match="keys: got 4294967296, expected 0 to 2147483647"):
        KeySharding.even(2**32, 2)
    with pytest.raises(ValueError, match="ranks: got 0, expected at least 1"):
        KeySharding.interleaved(8, 0)
    assert KeySharding.even(10, 4).sizes == [3, 3, 3, 1]
    assert KeySharding.even(9, 4).sizes == [3, 3, 3, 0]
    assert KeySharding.zigzag(9, 2).runs == (((0, 3), (7, 2)), ((3, 2), (5, 2)))
    assert KeySharding.interleaved(10, 3, 2).sizes == [4, 4, 2]


def test_a_group_is_needed():
    sharding = KeySharding.even(KEYS, 1)
    q, k, scale, weights = operands(ROWS, KEYS)
    windows = sharding.windows(None, torch.full((ROWS,), KEYS, dtype=torch.int32), 0)
    with pytest.raises(RuntimeError, match=r"group: torch\.distributed is not initialised"):
        top_k_of_sharded_keys(q, (k, scale), weights, windows, 4, sharding=sharding)
