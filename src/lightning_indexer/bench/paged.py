"""``bench --operation fp8_paged_mqa_logits``: check against the reference, then time, every contender.

The pool is larger than any L2 and its blocks are permuted: a pool of blocks that are used again flatters a decode
kernel by a third and more.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from lightning_indexer.arch import arch_of
from lightning_indexer.bench.paged_peers import Inputs, Peer
from lightning_indexer.bench.timing import measure
from lightning_indexer.calls.paged_mqa_logits import fp8_paged_mqa_logits
from lightning_indexer.check.memory import no_room
from lightning_indexer.problems.accuracy import calc_diff
from lightning_indexer.problems.cache_layout import CacheLayout
from lightning_indexer.problems.mqa_logits import MAX_DIFF
from lightning_indexer.problems.paged_mqa_logits import PagedMqaLogitsProblem, reference_paged_logits, row_lengths
from lightning_indexer.selection import registry

# Of a pool, on a GPU: several times the L2 of any.
POOL_BYTES = 1 << 29
# Sequences of the reference: a sample is enough to catch a wrong kernel before it is timed.
REFCHECK_SEQUENCES = 4
LENGTHS = ("equal", "ragged")


@dataclass(frozen=True, slots=True)
class Case:
    """One line of the table: B sequences of ``context`` keys, next_n rows each; ``ragged`` ones of 1 to ``context``."""

    batch: int
    next_n: int
    context: int
    heads: int
    head_dim: int = 128
    page: int = 64
    lengths: str = "equal"

    def __str__(self) -> str:
        shape = f"B={self.batch} next_n={self.next_n} {self.context} H={self.heads}"
        others = f"{'' if self.head_dim == 128 else f' D={self.head_dim}'}{'' if self.page == 64 else f' {self.page}'}"
        return f"{shape}{others}{'' if self.lengths == 'equal' else ' ' + self.lengths}"

    @property
    def layout(self) -> CacheLayout:
        return CacheLayout(self.page, self.head_dim)

    @property
    def max_blocks(self) -> int:
        return -(-self.context // self.page)

    @property
    def problem(self) -> PagedMqaLogitsProblem:
        return PagedMqaLogitsProblem(
            self.batch, self.next_n, self.context, self.heads, self.head_dim, self.layout, self.max_blocks,
            clean_logits=False,
        )  # fmt: skip


# (B, next_n, context)
DECODE = (
    (1, 1, 8192), (1, 1, 131072), (4, 1, 131072), (16, 1, 32768), (64, 1, 4096), (64, 1, 32768), (128, 1, 8192),
    (128, 1, 65536), (256, 1, 8192), (256, 1, 32768), (64, 2, 32768), (128, 2, 16384), (16, 2, 131072), (1, 2, 131072),
)  # fmt: skip
# Rows of multi-token prediction: beyond two of 64 heads the product takes longer than the read.
PREDICTION = tuple((64, next_n, 32768) for next_n in (1, 2, 3, 4, 6, 8))
# What a CPU does in a minute.
CPU = ((1, 1, 131072), (16, 1, 8192), (16, 2, 8192))
SETS: dict[str, tuple[tuple[int, int, int], ...]] = {
    "decode": DECODE,
    "prediction": PREDICTION,
    "all": (*DECODE, *PREDICTION[2:]),
}


@dataclass(frozen=True, slots=True)
class Row:
    """One contender on one case. Times in microseconds; None and a ``note`` where it did not run.

    ``bytes`` is what must be read of the cache, D + 4 a key; ``flop`` 2*H*D a row and key that it sees; ``floor`` the
    time of the longer of them at the device's measured ceilings.
    """

    case: Case
    contender: str
    bytes: int
    flop: int
    floor: float | None = None
    median: float | None = None
    p20: float | None = None
    p80: float | None = None
    host: float | None = None
    cpu: float | None = None
    extra_bytes: int | None = None
    note: str = ""

    @property
    def gbs(self) -> float | None:
        return self.bytes / self.median / 1e3 if self.median else None

    @property
    def tflops(self) -> float | None:
        return self.flop / self.median / 1e6 if self.median else None


class Plan(NamedTuple):
    """What one run measures. ``read_gbs`` and ``product_tflops`` are the ceilings that floors come from."""

    cases: tuple[Case, ...]
    backends: tuple[str, ...]
    read_gbs: float
    product_tflops: float
    budget_ms: float = 100.0


def run(plan: Plan, peers: Sequence[Peer], device: torch.device) -> Iterator[Row]:
    """Every backend, then every peer, on every case, one row each. A wrong result is never timed."""
    for case in plan.cases:
        names = (*plan.backends, *(peer.name for peer in peers))
        rows = case.batch * case.next_n
        # The pool, its unpacked sample, a result and its copy.
        reason = no_room(2 * _pool_bytes(case, device) + 12 * rows * case.context + 2**30, device)
        if reason is not None:
            yield from (Row(case, name, 0, 0, note=reason) for name in names)
            continue
        inputs = make_inputs(case, device)
        check = RefCheck(case, inputs)
        read, flop = work(case, inputs)
        floor = max(read / plan.read_gbs / 1e3, flop / plan.product_tflops / 1e6)
        for backend in plan.backends:
            [verdict] = registry.explain(case.problem, arch_of(device), backend)
            call = functools.partial(_own, case, inputs, backend)
            yield _row(Row(case, backend, read, flop, floor), verdict.reason, lambda call=call: call, check, True, plan)  # type: ignore[misc]
        for peer in peers:
            prepare = functools.partial(peer.prepare, inputs)
            reason = peer.supports(case.heads, case.head_dim, case.page, case.next_n)
            yield _row(Row(case, peer.name, read, flop, floor), reason, prepare, check, False, plan)


def work(case: Case, inputs: Inputs) -> tuple[int, int]:
    """Bytes of the cache that rows see, each once, and floating-point operations."""
    lengths = row_lengths(inputs.context_lens, case.next_n, case.context)
    keys, seen = int(lengths.amax(dim=1).sum()), int(lengths.sum())
    return keys * (case.head_dim + 4), 2 * case.heads * case.head_dim * seen


def make_inputs(case: Case, device: torch.device) -> Inputs:
    """Random q and keys, scales of real sizes, blocks in any order; lengths are never read on the host."""
    generator = torch.Generator(device).manual_seed(case.batch + case.context)
    layout = case.layout
    blocks = _pool_bytes(case, device) // layout.block_bytes
    pool = torch.empty((blocks, layout.block_bytes), dtype=torch.uint8, device=device)
    part = max(1, (1 << 28) // layout.value_bytes)
    for first in range(0, blocks, part):
        some = pool[first : first + part]
        k = torch.randn((len(some), layout.value_bytes), generator=generator, device=device)
        some[:, : layout.value_bytes] = k.to(layout.dtype).view(torch.uint8)
        scale = 0.5 + torch.rand((len(some), case.page), generator=generator, device=device)
        some[:, layout.value_bytes :] = scale.view(torch.uint8)
    tables = torch.randperm(blocks, generator=generator, device=device)[: case.batch * case.max_blocks]
    lengths = torch.full((case.batch,), case.context, device=device)
    if case.lengths == "ragged":
        lengths = torch.randint(1, case.context + 1, (case.batch,), generator=generator, device=device)
    shape = (case.batch, case.next_n, case.heads, case.head_dim)
    return Inputs(
        torch.randn(shape, generator=generator, device=device).to(layout.dtype),
        pool.view(blocks, *layout.block_shape),
        torch.randn((case.batch * case.next_n, case.heads), generator=generator, device=device),
        lengths.int(),
        tables.view(case.batch, case.max_blocks).int(),
        case.context,
    )


def _pool_bytes(case: Case, device: torch.device) -> int:
    needed = case.batch * case.max_blocks * case.layout.block_bytes
    return max(needed, POOL_BYTES if device.type == "cuda" else 0)


def _own(case: Case, inputs: Inputs, backend: str) -> torch.Tensor:
    return fp8_paged_mqa_logits(*inputs, layout=case.layout, clean_logits=False, backend=backend)


def _row(
    row: Row,
    reason: str | None,
    prepare: Callable[[], Callable[[], torch.Tensor]],
    check: RefCheck,
    ours: bool,
    plan: Plan,
) -> Row:
    case, contender, read, flop, floor = row.case, row.contender, row.bytes, row.flop, row.floor
    if reason is not None:
        return Row(case, contender, read, flop, floor, note=reason)
    try:
        call = prepare()
        fault = check(call())
    except RuntimeError as error:
        if ours:
            raise
        return Row(case, contender, read, flop, floor, note=f"does not run: {str(error).splitlines()[0]}")
    if fault is not None:
        return Row(case, contender, read, flop, floor, note=f"WRONG: {fault}")
    t = measure(call, check.device, plan.budget_ms)
    return Row(case, contender, read, flop, floor, t.median, t.p20, t.p80, t.host, t.cpu, t.extra_bytes)


class RefCheck:
    """The reference on some sequences of one case, shared by its contenders."""

    def __init__(self, case: Case, inputs: Inputs) -> None:
        self.device = inputs.q.device
        self.shape = (case.batch * case.next_n, case.context)
        step = max(1, case.batch // REFCHECK_SEQUENCES)
        chosen = torch.arange(case.batch - 1, -1, -step, device=self.device)
        self.rows = (chosen[:, None] * case.next_n + torch.arange(case.next_n, device=self.device)).reshape(-1)
        lengths = inputs.context_lens[chosen]
        q = inputs.q.view(torch.uint8)[chosen].view(inputs.q.dtype)  # indexing is not implemented for fp8 everywhere
        self.expected = reference_paged_logits(
            q, inputs.kv_cache, inputs.weights[self.rows], lengths, inputs.block_tables[chosen], case.context,
            layout=case.layout,
        )  # fmt: skip
        seen = row_lengths(lengths, case.next_n, case.context).reshape(-1, 1)
        self.inside = torch.arange(case.context, device=self.device) < seen

    def __call__(self, logits: torch.Tensor) -> str | None:
        """None, or what is wrong."""
        if tuple(logits.shape) != self.shape:
            return f"shape {list(logits.shape)}"
        found = logits[self.rows].masked_fill(~self.inside, 0.0)
        if not bool(found.isfinite().all()):
            return "not finite inside"
        diff = calc_diff(found, self.expected, self.inside)
        allowed = MAX_DIFF[torch.float32]
        return None if diff < allowed else f"calc_diff {diff:.1e}, allowed {allowed:.0e}"
