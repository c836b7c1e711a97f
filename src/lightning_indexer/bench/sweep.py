"""``lightning-indexer bench``: check against the oracle, then time, every contender on every case."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from lightning_indexer.arch import arch_of
from lightning_indexer.bench.peers import Peer
from lightning_indexer.bench.timing import measure
from lightning_indexer.calls.mqa_logits import fp8_mqa_logits
from lightning_indexer.check.cases import (
    Case,
    Inputs,
    Window,
    flop,
    make_inputs,
    make_windows,
    positions_in_windows,
    window_applies,
)
from lightning_indexer.check.memory import no_room
from lightning_indexer.check.mqa_logits import compress, compressed_width
from lightning_indexer.problems.accuracy import calc_diff
from lightning_indexer.problems.mqa_logits import MAX_DIFF, Form, reference_scores, window_mask
from lightning_indexer.selection import registry as dispatch

# What a CPU does in a minute.
CPU_SHAPES = ((128, 1024), (512, 2048), (64, 8192))
# Rows of the oracle: a sample spread over the chunk is enough to catch a wrong kernel before it is timed.
REFCHECK_ROWS = 256


@dataclass(frozen=True, slots=True)
class Row:
    """One contender on one case. Times in microseconds; None and a ``note`` where it did not run."""

    case: Case
    contender: str
    positions: int
    flop: int
    bytes: int
    median: float | None = None
    p20: float | None = None
    p80: float | None = None
    host: float | None = None
    extra_bytes: int | None = None
    diff: float | None = None
    note: str = ""

    @property
    def tflops(self) -> float | None:
        return self.flop / self.median / 1e6 if self.median else None

    @property
    def gbs(self) -> float | None:
        return self.bytes / self.median / 1e3 if self.median else None


@dataclass(frozen=True, slots=True)
class Plan:
    """What one ``bench`` runs."""

    shapes: tuple[tuple[int, int], ...]
    heads: tuple[int, ...]
    head_dim: int
    windows: tuple[Window, ...]
    forms: tuple[Form, ...]
    backends: tuple[str, ...]
    budget_ms: float = 100.0

    def cases(self) -> list[Case]:
        return [
            Case(s_q, s_k, heads, self.head_dim, window, form)
            for heads, window, (s_q, s_k), form in itertools.product(self.heads, self.windows, self.shapes, self.forms)
            if window_applies(window, s_q, s_k)
        ]

    def left_out(self) -> list[str]:
        """A line for each window that does not apply to a shape."""
        return [
            f"{window} at {s_q}x{s_k}, which needs s_k a multiple of an even s_q"
            for window, (s_q, s_k) in itertools.product(self.windows, self.shapes)
            if not window_applies(window, s_q, s_k)
        ]


def run(plan: Plan, peers: list[Peer], device: torch.device) -> Iterator[Row]:
    """Measures every backend and peer on every case, one row each. A wrong result is never timed."""
    inputs: Inputs | None = None
    last: tuple[int, ...] = ()
    for case in plan.cases():
        key = (case.s_q, case.s_k, case.heads, case.head_dim)
        if key != last:
            inputs = None  # free the old ones first
            inputs, last = make_inputs(*key, device), key
        assert inputs is not None
        ks, ke = make_windows(case.window, case.s_q, case.s_k, device)
        width = compressed_width(ks, ke, case.s_k) if case.form == "compressed" else 0
        positions = positions_in_windows(ks, ke, case.s_k)
        work = (positions, flop(case.heads, case.head_dim, positions), _bytes_moved(case, inputs, positions))
        check = RefCheck(case, inputs, ks, ke, width)
        for backend in plan.backends:
            reason, call = _own_call(case, inputs, ks, ke, width, backend)
            yield _row(case, backend, work, reason, call, check, device, plan.budget_ms)
        for peer in peers:
            reason = peer.supports(case, device)
            call = peer.prepare(case, inputs, ks, ke, width)
            yield _row(case, peer.name, work, reason, call, check, device, plan.budget_ms)


def _own_call(
    case: Case, inputs: Inputs, ks: torch.Tensor, ke: torch.Tensor, width: int, backend: str
) -> tuple[str | None, Callable[[], torch.Tensor]]:
    problem = case.problem(width)
    [verdict] = dispatch.explain(problem, arch_of(ks.device), backend)
    kv = (inputs.k_fp8, inputs.kv_scale)
    return verdict.reason, lambda: fp8_mqa_logits(
        inputs.q_fp8, kv, inputs.weights, ks, ke,
        clean_logits=problem.clean_logits, max_seqlen_k=width, out_dtype=case.out_dtype, backend=backend,
    )  # fmt: skip


def _row(
    case: Case,
    contender: str,
    work: tuple[int, int, int],
    reason: str | None,
    call: Callable[[], torch.Tensor],
    check: RefCheck,
    device: torch.device,
    budget_ms: float,
) -> Row:
    reason = reason or no_room(3 * 4 * case.s_q * case.s_k, device)
    if reason is not None:
        return Row(case, contender, *work, note=reason)
    diff, fault = check(call())
    if fault is not None:
        return Row(case, contender, *work, diff=diff, note=f"WRONG: {fault}")
    timing = measure(call, device, budget_ms)
    return Row(
        case, contender, *work, timing.median, timing.p20, timing.p80, timing.host, timing.extra_bytes, diff
    )  # fmt: skip


def _bytes_moved(case: Case, inputs: Inputs, positions: int) -> int:
    """The least that must move: every input once, every result position that the form defines once."""
    written = case.s_q * case.s_k if case.form == "clean" else positions
    read = inputs.q_fp8.nbytes + inputs.k_fp8.nbytes + inputs.kv_scale.nbytes + inputs.weights.nbytes + 8 * case.s_q
    return read + written * case.out_dtype.itemsize


class RefCheck:
    """The oracle on a sample of rows of one case, shared by its contenders."""

    def __init__(self, case: Case, inputs: Inputs, ks: torch.Tensor, ke: torch.Tensor, width: int) -> None:
        step = max(1, case.s_q // REFCHECK_ROWS)
        self.rows = torch.arange(case.s_q - 1, -1, -step, device=ks.device)
        ks, ke = ks[self.rows], ke[self.rows]
        self.clean = case.form == "clean"
        self.allowed = MAX_DIFF[case.out_dtype]
        scores = reference_scores(_rows(inputs.q_fp8, self.rows), inputs.k_fp8, inputs.weights[self.rows])
        self.expected = scores * inputs.kv_scale + 0.0
        self.inside = window_mask(ks, ke, case.s_k)
        if width:
            self.expected, self.inside = compress(self.expected, ks, width), compress(self.inside, ks, width)

    def __call__(self, logits: torch.Tensor) -> tuple[float, str | None]:
        sample = logits[self.rows]
        if sample.shape != self.expected.shape:
            return float("nan"), f"shape {list(logits.shape)}"
        if self.clean and not torch.equal(torch.isneginf(sample), ~self.inside):
            return float("nan"), "-inf mask differs"
        diff = calc_diff(sample, self.expected, self.inside)
        return diff, None if diff < self.allowed else f"calc_diff {diff:.1e}, allowed {self.allowed:.0e}"


def _rows(q: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    # Indexing is not implemented for fp8 on every device; its bytes are.
    return q.view(torch.uint8)[rows].view(q.dtype)
