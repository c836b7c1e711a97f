"""Scores and selection in one call over a paged cache: the cases of ``fp8_paged_mqa_logits`` with selections of all
kinds, held against the two calls, bit for bit, and against the scores that the reference selects.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from lightning_indexer.calls.mqa_topk import fp8_paged_mqa_topk
from lightning_indexer.calls.paged_mqa_logits import fp8_paged_mqa_logits
from lightning_indexer.calls.top_k import top_k_per_row
from lightning_indexer.check import mqa_topk, paged_mqa_logits
from lightning_indexer.check.paged_mqa_logits import Inputs
from lightning_indexer.check.suite import CaseSuite
from lightning_indexer.check.top_k import Guarded
from lightning_indexer.check.verify import Finding
from lightning_indexer.problems.mqa_logits import row_stride
from lightning_indexer.problems.one_call import WORKSPACE_BYTES, keep
from lightning_indexer.problems.paged_mqa_logits import row_lengths
from lightning_indexer.problems.paged_mqa_topk import OPERATION, PagedMqaTopKProblem, reference_paged_mqa_topk
from lightning_indexer.problems.top_k import IndexBase, Order, Tie, TopKProblem
from lightning_indexer.selection import registry


@dataclass(frozen=True, slots=True)
class Case:
    """One call.

    Attributes:
        scored: the operands, a case of ``fp8_paged_mqa_logits``.
        k, base, order, tie, force_first, force_last: the call's options; ``"page"`` gives slots of the cache.
        waves: how many the workspace makes of the sequences, about; 0: the default workspace.
    """

    scored: paged_mqa_logits.Case
    k: int
    base: IndexBase = "row"
    order: Order = "index"
    tie: Tie = "smaller"
    force_first: int = 0
    force_last: int = 0
    waves: int = 2

    @property
    def values(self) -> bool:
        return True

    @property
    def heads(self) -> int:
        return self.scored.heads

    @property
    def head_dim(self) -> int:
        return self.scored.head_dim

    def __str__(self) -> str:
        forced = f" keep {self.force_first}+{self.force_last}" if self.force_first or self.force_last else ""
        return f"{self.scored} k={self.k} {self.base} {self.order} {self.tie}{forced} waves={self.waves}"

    @property
    def workspace(self) -> int | None:
        """Room for the scores of a wave, and for what a selection may work in."""
        if not self.waves:
            return None
        rows = -(-self.scored.batch // self.waves) * self.scored.next_n
        return rows * 4 * row_stride(self.scored.width, torch.float32) + 2**20

    @property
    def problem(self) -> PagedMqaTopKProblem:
        """The facts of the call."""
        scoring = self.scored.problem
        selection = TopKProblem(
            scoring.rows, scoring.width, self.k, torch.float32, self.base, self.order, self.tie, values=True,
            starts=False, page_size=self.scored.page if self.base == "page" else 0,
        )  # fmt: skip
        room = self.workspace or WORKSPACE_BYTES
        return PagedMqaTopKProblem(scoring, selection, self.force_first, self.force_last, room)


def cases(full: bool) -> list[Case]:
    """Float32 cases of the scoring's sweep, each with another selection."""
    k = 512 if full else 24
    scored = [
        replace(case, clean=False)
        for case in paged_mqa_logits.cases(full)
        if case.out_dtype is torch.float32 and case.batch <= 256
    ]
    found = []
    for number, case in enumerate(scored):
        base, order = _SELECTIONS[number % len(_SELECTIONS)]
        tie: Tie = "larger" if number % 4 == 3 else "smaller"
        kept = (number % 5 == 1) * 3
        found.append(Case(case, k, base, order, tie, kept, 2 * kept, waves=number % 4))
    return found


_SELECTIONS: tuple[tuple[IndexBase, Order], ...] = (("row", "index"), ("page", "score"), ("absolute", "any"))


def simulated_cases(dtype: torch.dtype) -> list[Case]:
    """Few small cases, for kernels that run in the simulator."""
    first, second = paged_mqa_logits.simulated_cases(dtype)[:2]
    return [Case(replace(first, clean=False), 24, "page", waves=0), Case(replace(second, clean=False), 24, waves=2)]


def run_case(case: Case, backend: str, device: torch.device, *, repeats: int = 0) -> list[str]:
    """Runs one case and gives what is wrong with its result, nothing where it passes.

    Args:
        repeats: how often to run it again, in waves of other sizes too, bitwise the same each time.
    """
    inputs = paged_mqa_logits.make_inputs(case.scored, device)
    indices, values, faults = _call(case, inputs, backend)
    for number in range(repeats):
        again = replace(case, waves=(case.waves, 0, 2, 1, 5)[number % 5])
        if not mqa_topk.same((indices, values), _call(again, inputs, backend)[:2], case):
            faults.append(f"a repeat in {again.waves or 'default'} waves differs")
            break
    if not mqa_topk.same((indices, values), _two_calls(case, inputs, backend), case):
        faults.append("differs from two calls")
    scored = case.scored
    _, scores = reference_paged_mqa_topk(
        inputs.q, inputs.kv_cache, inputs.weights, inputs.context_lens, inputs.block_tables, case.k, scored.width,
        layout=scored.layout, indices=inputs.indices, force_first=case.force_first, force_last=case.force_last,
    )  # fmt: skip
    return faults + mqa_topk.near(values, scores)


def _two_calls(case: Case, inputs: Inputs, backend: str) -> tuple[torch.Tensor, torch.Tensor]:
    scored = case.scored
    logits = fp8_paged_mqa_logits(
        inputs.q, inputs.kv_cache, inputs.weights, inputs.context_lens, inputs.block_tables, scored.width,
        layout=scored.layout, indices=inputs.indices, clean_logits=False, backend=backend,
    )  # fmt: skip
    ends = row_lengths(inputs.context_lens, scored.next_n, scored.width).reshape(-1).int()
    keep(logits, torch.zeros_like(ends), ends, case.force_first, case.force_last)
    options: dict[str, Any] = {"index_base": case.base, "order": case.order, "tie": case.tie}
    if case.base == "page":
        tables = inputs.block_tables
        if inputs.indices is not None:
            tables = tables[inputs.indices.long().clamp(0, tables.shape[0] - 1)]
        options |= {"page_table": tables.repeat_interleave(scored.next_n, 0), "page_size": scored.page}
    selects = backend if backend in registry.kernels("top_k_per_row") else "torch-blocked"
    result = top_k_per_row(logits, case.k, None, ends, **options, values=True, backend=selects)
    assert isinstance(result, tuple)
    return result


def _call(case: Case, inputs: Inputs, backend: str) -> tuple[torch.Tensor, torch.Tensor, list[str]]:
    """The public call into guarded results."""
    rows, device = case.scored.batch * case.scored.next_n, inputs.q.device
    indices = Guarded.make(rows, case.k, torch.int32, device)
    values = Guarded.make(rows, case.k, torch.float32, device)
    fp8_paged_mqa_topk(
        inputs.q, inputs.kv_cache, inputs.weights, inputs.context_lens, inputs.block_tables, case.k,
        max_context_len=case.scored.width, layout=case.scored.layout, indices=inputs.indices, index_base=case.base,
        order=case.order, tie=case.tie, force_first=case.force_first, force_last=case.force_last,
        values=values.view, out=indices.view, workspace=case.workspace, backend=backend,
    )  # fmt: skip
    return indices.view, values.view, indices.faults("indices") + values.faults("values")


class PagedMqaTopKSuite(CaseSuite):
    """The suite of ``fp8_paged_mqa_topk``."""

    operation = OPERATION
    sweep, few, run = staticmethod(cases), staticmethod(simulated_cases), staticmethod(run_case)

    def bytes_needed(self, case: Case) -> int:
        return paged_mqa_logits.PagedMqaLogitsSuite().bytes_needed(case.scored)

    def check(self, case: Case, backend: str, device: torch.device, *, repeats: int) -> Finding:
        return Finding(tuple(run_case(case, backend, device, repeats=min(repeats, 5))))
