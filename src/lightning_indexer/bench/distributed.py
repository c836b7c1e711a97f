"""``lightning-indexer bench --distributed``: context parallelism under ``torchrun``, beside one device in the same run.

Every rank makes the same operands, runs them alone, and then its share of them together with the others. A selection
that is not that of one device, bit for bit, is never timed.
"""

from __future__ import annotations

import datetime
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from lightning_indexer.bench.report import table, write_files
from lightning_indexer.calls.paged_mqa_logits import fp8_paged_mqa_logits
from lightning_indexer.calls.top_k import top_k_per_row
from lightning_indexer.distributed.keys import paged_top_k_of_sharded_keys, top_k_of_sharded_keys
from lightning_indexer.distributed.merge import choose_exchange
from lightning_indexer.distributed.rows import sharding_of_one, top_k_of_sharded_rows
from lightning_indexer.distributed.selection import score_and_select
from lightning_indexer.distributed.sharding import KeySharding
from lightning_indexer.fp8 import quantize_k, quantize_q
from lightning_indexer.problems.cache_layout import CacheLayout

FORMS = ("rows", "keys", "decode")
HEAD_DIM, PAGE = 128, 64
# A rank that has failed is noticed by the others after this.
TIMEOUT = datetime.timedelta(seconds=120)


@dataclass(frozen=True, slots=True)
class Case:
    """One problem: M rows of a causal chunk at the end of N keys, or M sequences of N cached keys each."""

    form: str
    rows: int
    keys: int
    heads: int
    k: int = 2048

    def __str__(self) -> str:
        return f"{self.form} ({self.rows}, {self.keys}) H={self.heads} k={self.k}"


GPU = (
    *(Case(form, *shape, heads) for shape in ((4096, 131072), (1024, 1048576)) for heads in (32, 64)
      for form in ("rows", "keys")),
    Case("decode", 64, 131072, 64),
)  # fmt: skip
CPU = (Case("rows", 64, 4096, 32, 128), Case("keys", 64, 4096, 32, 128), Case("decode", 4, 4096, 32, 128))


def cases(
    forms: Sequence[str],
    shapes: Sequence[tuple[int, int]] | None,
    heads: Sequence[int] | None,
    sizes: Sequence[int] | None,
    *,
    on_gpu: bool,
) -> list[Case]:
    """The usual cases of these forms, or those of the shapes; with other heads and k where they are given."""
    usual = [case for case in (GPU if on_gpu else CPU) if case.form in forms]
    if shapes is not None:
        default = usual[0]
        usual = [replace(default, form=form, rows=m, keys=n) for m, n in shapes for form in forms]
    if heads is not None:
        usual = [replace(case, heads=h) for case in usual for h in heads]
    if sizes is not None:
        usual = [replace(case, k=k) for case in usual for k in sizes]
    return list(dict.fromkeys(usual))


@dataclass(frozen=True, slots=True)
class Row:
    """One way on one case. Microseconds, the slowest rank's of each run, the median of the runs.

    ``alone`` is one device's time for all of it, ``peak_bytes`` what a rank holds beside its operands, at most.
    """

    case: Case
    ranks: int
    way: str
    alone: float | None = None
    median: float | None = None
    peak_bytes: int | None = None
    note: str = ""

    @property
    def speedup(self) -> float | None:
        return self.alone / self.median if self.alone and self.median else None


class Ranks(NamedTuple):
    """The group that ``torchrun`` started, and this process's device."""

    rank: int
    ranks: int
    device: torch.device


def join(device: str | None) -> Ranks:
    """Joins the group that ``torchrun`` describes: NCCL on GPUs, one a rank, gloo on CPUs.

    Raises:
        ValueError: not under ``torchrun``.
    """
    import torch.distributed as dist

    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        raise ValueError("no RANK and WORLD_SIZE in the environment, expected a start by torchrun")
    where = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if where.type == "cuda":
        where = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(where)
        dist.init_process_group("nccl", timeout=TIMEOUT, device_id=where)
    else:
        dist.init_process_group("gloo", timeout=TIMEOUT)
    return Ranks(dist.get_rank(), dist.get_world_size(), where)


def leave() -> None:
    import torch.distributed as dist

    dist.destroy_process_group()


def run(cases: Sequence[Case], at: Ranks, budget_ms: float = 200.0) -> Iterator[Row]:
    """Every way of every case; every rank yields the same rows."""
    for case in cases:
        alone, ways = (decode if case.form == "decode" else prefill)(case, at)
        with torch.no_grad():
            expected = alone()
        time_alone = _time(alone, at, budget_ms)
        for way, (call, rows) in ways.items():
            wrong = int((call() != expected[rows]).any(dim=1).sum())
            wrong = int(_over_ranks(torch.tensor(wrong, device=at.device), at, "sum"))
            if wrong:
                yield Row(case, at.ranks, way, time_alone, note=f"WRONG: {wrong} rows differ")
                continue
            yield Row(case, at.ranks, way, time_alone, _time(call, at, budget_ms), _peak(call, at))
        if case.form == "decode" and at.device.type == "cuda":
            yield _captured(case, at, alone, ways, budget_ms)


Way = tuple[Callable[[], torch.Tensor], Any]


def prefill(case: Case, at: Ranks) -> tuple[Callable[[], torch.Tensor], dict[str, Way]]:
    """One device's call, and by name this rank's of each way with the rows of the result that it gives."""
    q, k, kv_scale, weights = _operands(case.rows, case.keys, case.heads, at.device)
    ks = torch.zeros(case.rows, dtype=torch.int32, device=at.device)
    ke = (torch.arange(case.rows, device=at.device) + (case.keys - case.rows + 1)).clamp(min=0).int()
    whole = sharding_of_one(case.keys).windows(ks, ke, 0)
    out = torch.empty((case.rows, case.k), dtype=torch.int32, device=at.device)

    def alone() -> torch.Tensor:
        score_and_select(q, (k, kv_scale), weights, whole, out, None)
        return out

    if case.form == "keys":
        sharding = KeySharding.even(case.keys, at.ranks)
        windows = sharding.windows(ks, ke, at.rank)
        shard = _shard(k, kv_scale, sharding, at)

        def by(exchange: Any) -> Callable[[], Any]:
            return lambda: top_k_of_sharded_keys(
                q, shard, weights, windows, case.k, sharding=sharding, exchange=exchange
            )

        chosen = choose_exchange(case.rows, case.k, at.ranks)
        ways: dict[str, Way] = {chosen: (by(None), slice(None))}
        ways |= {name: (by(name), slice(None)) for name in ("gather", "rows", "histogram") if name != chosen}
        return alone, ways
    # Zig-zag, tokens and keys alike; the keys of earlier chunks are dealt out in the same way.
    chunks = torch.arange(case.rows, device=at.device).tensor_split(2 * at.ranks)
    mine = torch.cat((chunks[at.rank], chunks[-1 - at.rank]))
    sharding = KeySharding.zigzag(case.keys, at.ranks)
    shard = _shard(k, kv_scale, sharding, at)
    given = _take(q, mine), shard, weights[mine], ks[mine], ke[mine]

    def in_pieces(rows: int | None) -> Callable[[], Any]:
        return lambda: top_k_of_sharded_rows(*given, case.k, sharding=sharding, rows_in_pieces=rows)

    pieces = {"overlapped": None, "all rows in pieces": case.rows, "gathered first": 0}
    return alone, {way: (in_pieces(rows), mine) for way, rows in pieces.items()}


def decode(case: Case, at: Ranks) -> tuple[Callable[[], torch.Tensor], dict[str, Way]]:
    """Likewise: pages of each sequence dealt out in turn."""
    layout = CacheLayout(PAGE, HEAD_DIM)
    pages = -(-case.keys // PAGE)
    q, _, _, weights = _operands(case.rows, 1, case.heads, at.device)
    q = q[:, None]
    pools: list[torch.Tensor] = []
    for _ in range(case.rows):
        _, k, kv_scale, _ = _operands(0, pages * PAGE, case.heads, at.device, seed=len(pools))
        pools.append(layout.pack(k.view(pages, PAGE, HEAD_DIM), kv_scale.view(pages, PAGE)))
    pool = torch.stack(pools)  # [B, pages, page, 1, D + 4]
    del pools
    lengths = torch.full((case.rows, 1), case.keys, dtype=torch.int32, device=at.device)

    def table_of(count: int) -> torch.Tensor:
        return torch.arange(case.rows * count, dtype=torch.int32, device=at.device).view(case.rows, count)

    whole = pool.flatten(0, 1), table_of(pages)

    def alone() -> torch.Tensor:
        logits = fp8_paged_mqa_logits(q, whole[0], weights, lengths, whole[1], case.keys, clean_logits=False)
        return top_k_per_row(logits, case.k, None, lengths)  # type: ignore[return-value]

    sharding = KeySharding.interleaved(pages * PAGE, at.ranks, PAGE)
    mine = pool[:, at.rank :: at.ranks]
    shard, table_of_shard = mine.flatten(0, 1).contiguous(), table_of(mine.shape[1])
    local, longest = sharding.lengths(lengths, 1, at.rank), max(1, sharding.size(at.rank))

    def by(exchange: Any) -> Callable[[], Any]:
        return lambda: paged_top_k_of_sharded_keys(
            q, shard, weights, local, table_of_shard, longest, case.k, sharding=sharding, exchange=exchange
        )

    chosen = choose_exchange(case.rows, case.k, at.ranks)
    ways: dict[str, Way] = {chosen: (by(None), slice(None))}
    return alone, ways | {name: (by(name), slice(None)) for name in ("gather", "rows") if name != chosen}


def _captured(case: Case, at: Ranks, alone: Callable[[], torch.Tensor], ways: dict[str, Way], budget_ms: float) -> Row:
    """Decode as engines run it, from a captured graph: what launches cost the host does not count."""
    name, (call, _) = next(iter(ways.items()))
    graphs = []
    for each in (alone, call):
        graphs.append(torch.cuda.CUDAGraph())
        with torch.cuda.graph(graphs[-1]):
            each()
    time_alone, together = (_time(graph.replay, at, budget_ms) for graph in graphs)
    return Row(case, at.ranks, f"{name}, graphs", time_alone, together)


def _operands(
    rows: int, keys: int, heads: int, device: torch.device, seed: int = 0
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The same on every rank. On a CPU small integers, as a BLAS sums in an order that depends on the sizes."""
    generator = torch.Generator(device).manual_seed(seed)

    def numbers(*shape: int) -> torch.Tensor:
        if device.type == "cpu":
            return torch.randint(-2, 3, shape, generator=generator).float()
        return torch.randn(shape, generator=generator, device=device)

    weights = numbers(rows, heads)
    if device.type == "cpu":
        fp8 = (numbers(*shape).to(torch.float8_e4m3fn) for shape in ((rows, heads, HEAD_DIM), (keys, HEAD_DIM)))
        return next(fp8), next(fp8), torch.ones(keys), weights
    return quantize_q(numbers(rows, heads, HEAD_DIM)), *quantize_k(numbers(keys, HEAD_DIM)), weights


def _shard(
    k: torch.Tensor, kv_scale: torch.Tensor, sharding: KeySharding, at: Ranks
) -> tuple[torch.Tensor, torch.Tensor]:
    local = torch.arange(sharding.size(at.rank), device=k.device)
    positions = sharding.position(local, at.rank)
    return _take(k, positions), kv_scale[positions]


def _take(tensor: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    # Indexing is not implemented for fp8 on every device; its bytes are.
    return tensor.view(torch.uint8)[at].view(tensor.dtype)


def _over_ranks(number: torch.Tensor, at: Ranks, operation: str) -> float:
    import torch.distributed as dist

    number = number.double().reshape(1)
    dist.all_reduce(number, dist.ReduceOp.SUM if operation == "sum" else dist.ReduceOp.MAX)
    return float(number)


def _time(call: Callable[[], object], at: Ranks, budget_ms: float) -> float:
    """Median over runs of the slowest rank's time; ranks start each run together, with the L2 of GPUs overwritten."""
    on_gpu = at.device.type == "cuda"
    flush = torch.empty(2**26, dtype=torch.int32, device=at.device) if on_gpu else None
    times: list[float] = []
    spent, runs = 0.0, 3
    while len(times) < runs:
        if flush is not None:
            flush.zero_()
        _over_ranks(torch.zeros((), device=at.device), at, "max")  # and reads it: the device is idle
        if on_gpu:
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            begin.record()
            call()
            end.record()
            end.synchronize()
            taken = 1e3 * begin.elapsed_time(end)
        else:
            begun = time.perf_counter()
            call()
            taken = 1e6 * (time.perf_counter() - begun)
        taken = _over_ranks(torch.tensor(taken, device=at.device), at, "max")
        times.append(taken)
        spent += taken
        if len(times) == runs and spent < 1e3 * budget_ms and runs < 50:  # the same on every rank
            runs += 1
    return statistics.median(times[1:])


def _peak(call: Callable[[], object], at: Ranks) -> int | None:
    """Bytes that a call holds at most beside what was there before, of the rank with the most; None on a CPU."""
    if at.device.type != "cuda":
        return None
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    call()
    torch.cuda.synchronize()
    most = torch.cuda.max_memory_allocated() - before
    return int(_over_ranks(torch.tensor(most, device=at.device), at, "max"))


HEADER = ("case", "ranks", "way", "one device us", "us", "speedup", "workspace MB a rank", "note")


def line(row: Row) -> tuple[str, ...]:
    """One line of the table."""

    def number(value: float | None, form: str) -> str:
        return "-" if value is None else format(value, form)

    peak = None if row.peak_bytes is None else row.peak_bytes / 1e6
    return (
        str(row.case), str(row.ranks), row.way, number(row.alone, ".1f"), number(row.median, ".1f"),
        number(row.speedup, ".2f"), number(peak, ".1f"), row.note,
    )  # fmt: skip


def markdown(rows: Sequence[Row], facts: dict[str, str], command: str) -> str:
    """The report: what was measured, with what, and how to measure it again."""
    made_with = "\n".join(f"- {name}: {value}" for name, value in facts.items())
    body = "\n".join(table(HEADER, [line(row) for row in rows]))
    return f"# Context parallelism\n\n{made_with}\n- repeat: `{command}`\n\n{body}\n"


def write(folder: Path, text: str, rows: Sequence[Row], facts: dict[str, str]) -> list[Path]:
    """Writes the report, CSV and JSON; returns their paths."""
    flat: list[dict[str, object]] = [
        {**asdict(row.case), "ranks": row.ranks, "way": row.way, "one_device_us": row.alone, "median_us": row.median,
         "workspace_bytes": row.peak_bytes, "note": row.note}
        for row in rows
    ]  # fmt: skip
    return write_files(folder, "distributed", text, flat, (), {"environment": facts})
