"""``lightning-indexer bench --operation top_k_per_row``: check against the reference, then time, every contender.

Ours have to be the reference's indices, peers, whose ties and order are free, have to select its scores. The floor of
each case is ``torch.amax`` over whole rows in the same run: one read of the logits.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from lightning_indexer.arch import arch_of
from lightning_indexer.bench.timing import measure
from lightning_indexer.bench.top_k_peers import Inputs, Peer, Prepared, padded
from lightning_indexer.calls.top_k import top_k_per_row
from lightning_indexer.check.memory import no_room
from lightning_indexer.problems.top_k import TopKProblem, reference_top_k
from lightning_indexer.selection import registry

# Heads of the indexer whose scores the logits look like.
HEADS = 32
# Rows begin at 0 and end behind the row's own position; four requests; whole rows, as in decode.
WINDOWS = ("causal", "packed", "whole")
# No index, and not the mark of an unused slot.
_POISON = -7


@dataclass(frozen=True, slots=True)
class Case:
    """One line of the table: logits [rows, width], the k best; ``ties`` are scores of bfloat16's few values."""

    rows: int
    width: int
    k: int = 2048
    window: str = "causal"
    ties: bool = False

    def __str__(self) -> str:
        return f"{self.rows} x {self.width} {self.window} k={self.k}{' ties' if self.ties else ''}"


PREFILL = (
    Case(4096, 32768), Case(1024, 131072), Case(2048, 65536), Case(8192, 8192), Case(128, 32768), Case(64, 1 << 20),
    Case(1024, 32768, 512), Case(1024, 32768, 1024), Case(4096, 32768, window="packed"), Case(4096, 32768, ties=True),
)  # fmt: skip
DECODE = tuple(Case(b, n, window="whole") for n in (8192, 32768, 131072) for b in (1, 16, 64, 256))
# What a CPU does in a minute.
CPU = (Case(1024, 32768, window="whole"), Case(64, 131072, window="whole"))
SETS = {"prefill": PREFILL, "decode": DECODE, "all": PREFILL + DECODE}


@dataclass(frozen=True, slots=True)
class Row:
    """One contender on one case. Times in microseconds; None and a ``note`` where it did not run.

    ``floor`` is the time of ``torch.amax``; ``cpu`` what a run takes of all cores together, on a CPU; ``bytes`` the
    least that must move: the scores inside the windows and k indices a row.
    """

    case: Case
    contender: str
    bytes: int
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


@dataclass(frozen=True, slots=True)
class Plan:
    """What one run measures."""

    cases: tuple[Case, ...]
    backends: tuple[str, ...]
    budget_ms: float = 100.0


def run(plan: Plan, peers: Sequence[Peer], device: torch.device) -> Iterator[Row]:
    """Every backend, then every peer, on every case, one row each. A wrong result is never timed.

    Peers that may write into the logits come last, on a copy.
    """
    ordered = sorted(peers, key=lambda peer: peer.spoils)
    for case in plan.cases:
        # The logits, what they are made from, a copy, and what the reference sorts.
        reason = no_room(5 * 4 * case.rows * case.width + 2**30, device)
        if reason is not None:
            yield from (Row(case, name, 0, note=reason) for name in (*plan.backends, *(p.name for p in ordered)))
            continue
        inputs = make_inputs(case, device)
        check = RefCheck(inputs)
        amax = measure(functools.partial(inputs.logits.amax, 1), device, plan.budget_ms).median
        inside = int((inputs.ends.long().clamp(0, case.width) - inputs.starts).clamp(min=0).sum())
        work = (4 * inside + 4 * case.rows * case.k, amax)
        for backend in plan.backends:
            [verdict] = registry.explain(TopKProblem(case.rows, case.width, case.k), arch_of(device), backend)
            yield _row(case, backend, work, verdict.reason, functools.partial(_own, inputs, backend), check, True, plan)
        for peer in ordered:
            reason = peer.supports(case.k, case.window == "whole", device)
            given = inputs
            if reason is None and peer.spoils:
                given = inputs._replace(logits=padded(inputs.logits))
            yield _row(case, peer.name, work, reason, functools.partial(peer.prepare, given), check, False, plan)


def make_inputs(case: Case, device: torch.device) -> Inputs:
    """Scores of an indexer's distribution, ``-inf`` outside the windows, in rows of a padded stride."""
    generator = torch.Generator(device).manual_seed(case.rows + case.width)
    weights = torch.randn((case.rows, HEADS), generator=generator, device=device)
    logits = torch.zeros((case.rows, -(-case.width // 64) * 64), device=device)
    part = torch.empty_like(logits)
    for head in range(HEADS):
        torch.randn(part.shape, generator=generator, device=device, out=part)
        logits.addcmul_(part.relu_(), weights[:, head : head + 1])
    if case.ties:
        logits.copy_(part.copy_(logits.bfloat16()))
    row = torch.arange(case.rows, device=device)
    starts, ends = torch.zeros_like(row), torch.full_like(row, case.width)
    if case.window == "causal":
        ends = case.width - case.rows + 1 + row
    elif case.window == "packed":
        request = row * 4 // case.rows
        per_rows, per_keys = case.rows // 4, case.width // 4
        starts = request * per_keys
        ends = starts + per_keys - per_rows + row % max(1, per_rows) + 1
    position = torch.arange(logits.shape[1], device=device)
    for first in range(0, case.rows, 256):
        rows = slice(first, first + 256)
        outside = (position < starts[rows, None]) | (position >= ends[rows, None])
        logits[rows].masked_fill_(outside, float("-inf"))
    return Inputs(logits[:, : case.width], starts.int(), ends.int(), case.k)


def _own(inputs: Inputs, backend: str) -> Prepared:
    logits, starts, ends, k = inputs
    out = torch.full((logits.shape[0], k), _POISON, dtype=torch.int32, device=logits.device)
    return Prepared(lambda: top_k_per_row(logits, k, starts, ends, out=out, backend=backend), lambda: out)


def _row(
    case: Case,
    contender: str,
    work: tuple[int, float],
    reason: str | None,
    prepare: Callable[[], Prepared],
    check: RefCheck,
    ours: bool,
    plan: Plan,
) -> Row:
    if reason is not None:
        return Row(case, contender, *work, note=reason)
    try:
        prepared = prepare()
        prepared.run()
        fault = check(prepared.result(), exact=ours)
    except RuntimeError as error:
        if ours:
            raise
        return Row(case, contender, *work, note=f"does not run: {str(error).splitlines()[0]}")
    if fault is not None:
        return Row(case, contender, *work, note=f"WRONG: {fault}")
    t = measure(prepared.run, check.inputs.logits.device, plan.budget_ms)
    return Row(case, contender, *work, t.median, t.p20, t.p80, t.host, t.cpu, t.extra_bytes)


class RefCheck:
    """The reference's selection of one case, shared by its contenders."""

    def __init__(self, inputs: Inputs) -> None:
        self.inputs = inputs
        self.expected, scores = reference_top_k(inputs.logits, inputs.k, inputs.starts, inputs.ends)
        self.scores = scores.sort(dim=1).values

    def __call__(self, indices: torch.Tensor, *, exact: bool) -> str | None:
        """None, or what is wrong with indices relative to the rows' starts.

        ``exact``: the indices themselves, else distinct indices inside the windows, of the same scores.
        """
        logits, starts, ends, _ = self.inputs
        if indices.shape != self.expected.shape:
            return f"shape {list(indices.shape)}"
        if exact:
            wrong = (indices != self.expected).any(dim=1)
            return f"{int(wrong.sum())} rows differ" if bool(wrong.any()) else None
        ordered = indices.long().sort(dim=1).values
        used = ordered >= 0
        positions = torch.where(used, ordered + starts[:, None], 0)
        outside = (used & (positions >= ends[:, None])).any(dim=1) | (ordered < -1).any(dim=1)
        repeated = (used[:, 1:] & (ordered[:, 1:] == ordered[:, :-1])).any(dim=1)
        found = logits.gather(1, positions.clamp(max=logits.shape[1] - 1)).masked_fill(~used, float("-inf"))
        differ = ((found + 0.0).sort(dim=1).values != self.scores).any(dim=1)
        for rows, what in ((outside, "select outside the window"), (repeated, "repeat an index"), (differ, "differ")):
            if count := int(rows.sum()):
                return f"{count} rows {what}"
        return None
