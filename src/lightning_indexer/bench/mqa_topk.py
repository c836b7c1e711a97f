"""``lightning-indexer bench --operation fp8_mqa_topk``: one call beside two, and beside peers that score and select.

Ours have to be what the two calls select, peers, whose scores and ties are their own, nearly so. The floor of each case
is the fastest scoring of our backends in the same run, without selection. Calls are timed into tensors that are there;
the memory is that of calls that allocate what they return, the logits between two calls too.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from lightning_indexer.arch import arch_of
from lightning_indexer.bench import peers, top_k_peers
from lightning_indexer.bench.timing import extra_bytes, measure
from lightning_indexer.calls.mqa_logits import fp8_mqa_logits
from lightning_indexer.calls.mqa_topk import fp8_mqa_topk
from lightning_indexer.calls.top_k import top_k_per_row
from lightning_indexer.check import cases
from lightning_indexer.check.memory import no_room
from lightning_indexer.problems.mqa_logits import MqaLogitsProblem, allocate
from lightning_indexer.problems.mqa_topk import MqaTopKProblem
from lightning_indexer.problems.top_k import TopKProblem
from lightning_indexer.selection import registry

WINDOWS = ("causal", "multi_req")
HEAD_DIM = 128
# The part of ours that a peer's selection has to share: scores that round otherwise move few positions over the cut.
MIN_OVERLAP = 0.99
TWO = "two calls, "


@dataclass(frozen=True, slots=True)
class Case:
    """One line of the table: M, N, H, k and the window."""

    rows: int
    keys: int
    heads: int
    k: int = 2048
    window: str = "causal"

    def __str__(self) -> str:
        return f"({self.rows}, {self.keys}) H={self.heads} {self.window} k={self.k}"

    @property
    def problem(self) -> MqaTopKProblem:
        scoring = MqaLogitsProblem(self.rows, self.keys, self.heads, HEAD_DIM, clean_logits=False)
        return MqaTopKProblem(scoring, TopKProblem(self.rows, self.keys, self.k))


SHAPES = ((8192, 8192), (4096, 32768), (1024, 131072), (512, 262144))
CPU_SHAPES = ((128, 8192),)


@dataclass(frozen=True, slots=True)
class Row:
    """One contender on one case. Times in microseconds; None and a ``note`` where it did not run."""

    case: Case
    contender: str
    floor: float | None = None
    median: float | None = None
    p20: float | None = None
    p80: float | None = None
    host: float | None = None
    extra_bytes: int | None = None
    note: str = ""


@dataclass(frozen=True, slots=True)
class Plan:
    """What one run measures."""

    cases: tuple[Case, ...]
    backends: tuple[str, ...]
    budget_ms: float = 100.0


def contenders(plan: Plan, scoring: peers.DeepGemm | None, selecting: Sequence[top_k_peers.Peer]) -> list[str]:
    """Their names, in the order in which each case has them."""
    ours = [name for backend in plan.backends for name in (backend, TWO + backend)]
    return ours + ([f"{scoring.name} + {peer.name}" for peer in selecting] if scoring is not None else [])


def run(
    plan: Plan, scoring: peers.DeepGemm | None, selecting: Sequence[top_k_peers.Peer], device: torch.device
) -> Iterator[Row]:
    """Every backend by one call and by two, then every pair of peers, on every case. A wrong result is never timed."""
    ordered = sorted(selecting, key=lambda peer: peer.spoils)
    for case in plan.cases:
        # The logits twice, and what selections of them make.
        if (reason := no_room(6 * 4 * case.rows * case.keys + 2**30, device)) is not None:
            yield from (Row(case, name, note=reason) for name in contenders(plan, scoring, selecting))
            continue
        operands = _Operands(case, device)
        able = {name: registry.explain(case.problem, arch_of(device), name)[0].reason for name in plan.backends}
        running = [name for name, reason in able.items() if reason is None]
        floor = min((measure(operands.scoring(name), device, plan.budget_ms).median for name in running), default=None)
        expected = operands.two_calls(running[0])() if running else None
        for name, reason in able.items():
            for label, make in ((name, operands.one_call), (TWO + name, operands.two_calls)):
                if reason is not None:
                    yield Row(case, label, floor, note=reason)
                    continue
                call = make(name)
                wanted = operands.two_calls(name)().clone()
                fault = None if torch.equal(call(), wanted) else "not what two calls select"
                row = _timed(case, label, call, floor, fault, plan, device)
                yield replace(row, extra_bytes=extra_bytes(make(name, allocate=True), device)) if row.median else row
        for peer in ordered if scoring is not None else ():
            assert scoring is not None
            yield _peer_row(case, operands, scoring, peer, expected, floor, plan, device)


def _timed(
    case: Case, label: str, call: Callable[[], Any], floor: float | None, fault: str | None, plan: Plan,
    device: torch.device,
) -> Row:  # fmt: skip
    if fault is not None:
        return Row(case, label, floor, note=f"WRONG: {fault}")
    t = measure(call, device, plan.budget_ms)
    return Row(case, label, floor, t.median, t.p20, t.p80, t.host, t.extra_bytes)


class _Operands:
    """The tensors of one case, and the calls on them."""

    def __init__(self, case: Case, device: torch.device) -> None:
        self.case = case
        self.inputs = cases.make_inputs(case.rows, case.keys, case.heads, HEAD_DIM, device)
        window: cases.Window = case.window  # type: ignore[assignment]
        self.ks, self.ke = cases.make_windows(window, case.rows, case.keys, device)
        self.kv = (self.inputs.k_fp8, self.inputs.kv_scale)
        self.logits = allocate(case.problem.scoring, device)
        self.out = torch.empty((case.rows, case.k), dtype=torch.int32, device=device)

    def scoring(self, backend: str, *, allocate: bool = False) -> Callable[[], torch.Tensor]:
        return functools.partial(
            fp8_mqa_logits, self.inputs.q_fp8, self.kv, self.inputs.weights, self.ks, self.ke, clean_logits=False,
            out=None if allocate else self.logits, backend=backend,
        )  # fmt: skip

    def one_call(self, backend: str, *, allocate: bool = False) -> Callable[[], Any]:
        return functools.partial(
            fp8_mqa_topk, self.inputs.q_fp8, self.kv, self.inputs.weights, self.ks, self.ke, self.case.k,
            out=None if allocate else self.out, backend=backend,
        )  # fmt: skip

    def two_calls(self, backend: str, *, allocate: bool = False) -> Callable[[], Any]:
        """The library's own choice selects, where the backend has no kernel for it."""
        score = self.scoring(backend, allocate=allocate)
        selects = backend if backend in registry.kernels("top_k_per_row") else None
        out = None if allocate else self.out

        def call() -> Any:
            return top_k_per_row(score(), self.case.k, self.ks, self.ke, out=out, backend=selects)

        return call


def _peer_row(
    case: Case, operands: _Operands, scoring: peers.DeepGemm, peer: top_k_peers.Peer, expected: Any,
    floor: float | None, plan: Plan, device: torch.device,
) -> Row:  # fmt: skip
    label = f"{scoring.name} + {peer.name}"
    masks = peer.name == top_k_peers.TorchTopK.name  # which knows no windows: -inf has to stand outside of them
    form: Any = "compressed" if scoring.compressed_only else "clean" if masks else "noclean"
    asked = cases.Case(case.rows, case.keys, case.heads, HEAD_DIM, case.window, form)  # type: ignore[arg-type]
    reason = scoring.supports(asked, device) or peer.supports(case.k, False, device)
    if reason is None and masks and scoring.compressed_only:
        reason = "needs -inf outside the windows"
    if reason is not None:
        return Row(case, label, floor, note=reason)
    try:
        width = case.keys if scoring.compressed_only else 0
        score = scoring.prepare(asked, operands.inputs, operands.ks, operands.ke, width)
        starts, ends = operands.ks.clamp(min=0), operands.ke.clamp(max=case.keys)
        if scoring.compressed_only:
            starts, ends = torch.zeros_like(starts), ends - starts
        # Every run scores into a new tensor; the selection reads the first one, of the same scores.
        prepared = peer.prepare(top_k_peers.Inputs(score(), starts, ends, case.k))

        def call() -> None:
            score()
            prepared.run()

        call()
        fault = None if expected is None else _overlap_fault(prepared.result(), expected)
    except RuntimeError as error:
        return Row(case, label, floor, note=f"does not run: {str(error).splitlines()[0]}")
    return _timed(case, label, call, floor, fault, plan, device)


def _overlap_fault(found: torch.Tensor, expected: torch.Tensor) -> str | None:
    """None, or that a selection shares too few of its positions with ours."""
    shared = total = 0
    for first in range(0, found.shape[0], 64):
        ours, theirs = expected[first : first + 64].sort(dim=1).values, found[first : first + 64].sort(dim=1).values
        at = torch.searchsorted(ours, theirs).clamp_(max=ours.shape[1] - 1)
        shared += int(((ours.gather(1, at) == theirs) & (theirs >= 0)).sum())
        total += int((ours >= 0).sum())
    return None if shared >= MIN_OVERLAP * total else f"shares {shared / max(1, total):.1%} of our positions"
