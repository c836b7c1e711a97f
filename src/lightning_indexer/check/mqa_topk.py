"""Scores and selection in one call against the two calls, and against the reference: cases, and a judge.

The two calls on the same backend have to give the same bits, whatever the waves. Operands of small whole numbers have
exact scores on any hardware: there the reference's own selection has to come out, ties and all; elsewhere its scores,
rank by rank, down to the rounding of the scoring. Results are poisoned and fenced; repeats, and waves of other sizes,
are bitwise the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from lightning_indexer.calls.mqa_logits import fp8_mqa_logits
from lightning_indexer.calls.mqa_topk import fp8_mqa_topk
from lightning_indexer.calls.top_k import top_k_per_row
from lightning_indexer.check.cases import Window, make_inputs, make_windows
from lightning_indexer.check.suite import CaseSuite
from lightning_indexer.check.top_k import PAGE_SIZE, Guarded
from lightning_indexer.check.verify import Finding
from lightning_indexer.problems.mqa_logits import MqaLogitsProblem, row_stride
from lightning_indexer.problems.mqa_topk import OPERATION, MqaTopKProblem, reference_mqa_topk
from lightning_indexer.problems.one_call import WORKSPACE_BYTES, exact_operands, keep
from lightning_indexer.problems.top_k import IndexBase, Order, Tie, TopKProblem
from lightning_indexer.selection import registry

# Whole numbers; and rows that are sorted, equal, all zero, and with columns that are NaN or infinite, of such numbers.
EXACT = ("exact", "ascending", "descending", "equal", "zeros", "nan")
# Of a selected score, and of the largest one: what the rounding of the scoring may make of it.
_RELATIVE, _ABSOLUTE = 2e-3, 1e-3


@dataclass(frozen=True, slots=True)
class Case:
    """One call.

    Attributes:
        rows, keys, heads, head_dim, k: M, N, H, D, and how many are selected.
        window: one of ``cases.WINDOWS``, or ``"short"``: windows of about k keys, or ``"none"``: all are empty.
        operands: ``"normal"``, or one of ``EXACT``.
        bound: ``max_seqlen_k``: 0, or positions behind which a window is cut.
        base, order, tie, values, force_first, force_last: the call's options.
        waves: how many the workspace makes of the rows, about; 0: the default workspace.
        dtype: of q and k.
    """

    rows: int
    keys: int
    heads: int
    head_dim: int = 128
    k: int = 64
    window: str = "causal"
    operands: str = "exact"
    bound: int = 0
    base: IndexBase = "row"
    order: Order = "index"
    tie: Tie = "smaller"
    values: bool = False
    force_first: int = 0
    force_last: int = 0
    waves: int = 3
    dtype: torch.dtype = torch.float8_e4m3fn

    def __str__(self) -> str:
        forced = f" keep {self.force_first}+{self.force_last}" if self.force_first or self.force_last else ""
        bound = f" bound {self.bound}" if self.bound else ""
        options = f"{self.base} {self.order} {self.tie}{' values' if self.values else ''}"
        shape = f"({self.rows}, {self.keys}) H={self.heads} D={self.head_dim} k={self.k}"
        return f"{shape} {self.window}{bound} {self.operands} {options}{forced} waves={self.waves}"

    @property
    def width(self) -> int:
        return self.bound if 0 < self.bound < self.keys else self.keys

    @property
    def workspace(self) -> int | None:
        """Room for the scores of a wave, and for what a selection may work in."""
        if not self.waves:
            return None
        return -(-self.rows // self.waves) * 4 * row_stride(self.width, torch.float32) + 2**20

    @property
    def problem(self) -> MqaTopKProblem:
        """The facts of the call."""
        width = self.width if self.width < self.keys else 0
        scoring = MqaLogitsProblem(
            self.rows, self.keys, self.heads, self.head_dim, self.dtype, self.dtype, clean_logits=False,
            max_seqlen_k=width,
        )  # fmt: skip
        selection = TopKProblem(
            self.rows, self.width, self.k, torch.float32, self.base, self.order, self.tie, self.values,
            page_size=PAGE_SIZE if self.base == "page" else 0,
        )  # fmt: skip
        room = self.workspace or WORKSPACE_BYTES
        return MqaTopKProblem(scoring, selection, self.force_first, self.force_last, room)


def cases(full: bool) -> list[Case]:
    """The sweep of ``verify``; not ``full``: the same kinds at sizes for a CPU or an interpreter."""
    rows, keys, k = (300, 9000, 2048) if full else (21, 700, 64)
    windows: tuple[str, ...] = ("causal", "misaligned", "empty", "past_end", "multi_req", "short", "none")
    found = [Case(rows, keys, 32, k=k, window=window, values=True) for window in windows]
    found += [Case(rows, keys, 64, k=k, operands=operands, order="score", values=True) for operands in EXACT]
    found += [Case(rows, keys, 32, k=k, operands=operands, tie="larger") for operands in ("equal", "zeros", "exact")]
    found += [Case(rows, keys, 32, k=k, window="multi_req", base=base, order="any") for base in _BASES]
    # Bounds that hold each window, and that cut some.
    found += [
        Case(rows, keys, heads, k=k, window=window, bound=bound, base=base, values=True)
        for heads, window, bound in ((32, "multi_req", keys // 4 + 8), (64, "past_end", keys // 3))
        for base in ("row", "absolute", "page")
    ]  # fmt: skip
    found += [
        Case(rows, keys, heads, d, k, operands="normal", values=True) for heads in (8, 64, 128) for d in (32, 128)
    ]
    found += [Case(rows, keys, 32, k=k, force_first=first, force_last=last, window=window, values=True)
              for first, last, window in ((4, 0, "misaligned"), (0, 9, "empty"), (5, 7, "short"))]  # fmt: skip
    found += [Case(rows, keys, 32, k=k, bound=keys // 3, window="multi_req", force_first=3, force_last=2)]
    # Nothing to score: every window has at most k keys.
    found += [Case(rows, 50, 32, k=k, window=window) for window in ("causal", "misaligned")]
    found += [Case(rows, 50, 32, k=k, values=True), Case(0, 50, 32), Case(3, 0, 32), Case(1, 33, 32, k=5)]
    found += [Case(rows, keys, 32, k=k, waves=waves, operands="normal", values=True) for waves in (0, 1, rows)]
    if full:
        found += [Case(m, n, h, k=2048, operands="normal", values=True, waves=0) for m, n in _LARGE for h in (32, 64)]
        found += [Case(4096, 32768, 64, k=2048, operands=kind, waves=0) for kind in ("ascending", "equal", "zeros")]
        found += [Case(4096, 32768, 32, k=512, operands="normal", values=True, window="multi_req", bound=8192, waves=0)]
    return found


_BASES: tuple[IndexBase, ...] = ("row", "absolute", "offset", "page")
_LARGE = ((4096, 32768), (1024, 131072), (8192, 8192), (512, 262144))


def simulated_cases(dtype: torch.dtype) -> list[Case]:
    """Few small cases, for kernels that run in the simulator."""
    return [
        Case(5, 300, 32, k=24, window="misaligned", waves=2, values=True, dtype=dtype),
        Case(4, 300, 32, k=24, window="multi_req", bound=90, base="absolute", tie="larger", waves=0, dtype=dtype),
    ]


@dataclass(frozen=True, slots=True)
class Inputs:
    """The tensors of a case."""

    q: torch.Tensor
    k: torch.Tensor
    kv_scale: torch.Tensor
    weights: torch.Tensor
    ks: torch.Tensor
    ke: torch.Tensor
    offsets: torch.Tensor | None
    page_table: torch.Tensor | None

    @property
    def kv(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self.k, self.kv_scale


def make_operands(case: Case, device: torch.device) -> Inputs:
    """The tensors of a case, the same at each time."""
    rows, keys = case.rows, case.keys
    drawn = make_inputs(rows, keys, case.heads, case.head_dim, device)
    q, k, weights, kv_scale = drawn.q_fp8.to(case.dtype), drawn.k_fp8.to(case.dtype), drawn.weights, drawn.kv_scale
    if case.operands != "normal":
        generator = torch.Generator("cpu").manual_seed(rows + keys)
        exact_operands(q, k, weights, generator)
        kv_scale = torch.tensor([1.0, -1.0, 0.5, 2.0]).repeat(-(-keys // 4))[:keys].to(device)
    if case.operands in ("ascending", "descending", "equal", "zeros"):
        # One key, of scores that are no zero: a row's scores are a whole number times the scales.
        k.copy_(torch.ones((), device=device))
        q.copy_(torch.ones((), device=device))
        weights.fill_(0.0 if case.operands == "zeros" else 1.0)
        position = torch.arange(keys, device=device, dtype=torch.float32)
        scales = {"ascending": position + 1, "descending": keys - position}
        kv_scale = scales.get(case.operands, torch.ones_like(position))
    if case.operands == "nan":
        kv_scale[::7], kv_scale[3::11], kv_scale[5::13] = float("nan"), float("inf"), -float("inf")
    ks, ke = windows_of(case, device)
    offsets = torch.arange(rows, device=device, dtype=torch.int32) * 1000 if case.base == "offset" else None
    pages = -(-case.width // PAGE_SIZE)
    table = torch.arange(rows * pages, device=device, dtype=torch.int32).view(rows, pages).flip(0)
    return Inputs(q, k, kv_scale, weights, ks, ke, offsets, table if case.base == "page" else None)


def windows_of(case: Case, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """int32 starts and ends."""
    row = torch.arange(case.rows, device=device)
    if case.window == "none":
        return (row + 1).int(), (row // 2).int()
    if case.window == "short":
        return (row * 3).int(), (row * 3 + case.k - 2 + row % 5).int()
    window: Window = case.window  # type: ignore[assignment]
    return make_windows(window, case.rows, case.keys, device)


def options_of(case: Case, inputs: Inputs) -> dict[str, Any]:
    """What the call over both, the selection alone and the reference have in common."""
    return {
        "index_base": case.base, "offsets": inputs.offsets, "page_table": inputs.page_table, "order": case.order,
        "tie": case.tie, "page_size": PAGE_SIZE if case.base == "page" else None,
    }  # fmt: skip


Found = tuple[torch.Tensor, "torch.Tensor | None", "list[str]"]


def run_case(case: Case, backend: str, device: torch.device, *, repeats: int = 0) -> list[str]:
    """Runs one case and gives what is wrong with its result, nothing where it passes.

    Args:
        repeats: how often to run it again, in waves of other sizes too, bitwise the same each time.
    """
    inputs = make_operands(case, device)
    indices, values, faults = _call(case, inputs, backend)
    for number in range(repeats):
        again = replace(case, waves=(case.waves, 0, 2, 1, 5)[number % 5])
        if not same((indices, values), _call(again, inputs, backend)[:2], case):
            faults.append(f"a repeat in {again.waves or 'default'} waves differs")
            break
    if case.rows == 0 or case.keys == 0:
        return faults if bool((indices == -1).all()) else [*faults, "positions of no key"]
    two = two_calls(case, inputs, backend)
    if not same((indices, values), two, case):
        faults.append(f"differs from two calls in {_differing(indices, two[0], case)}")
    return faults + against_reference(case, inputs, indices, values)


def two_calls(case: Case, inputs: Inputs, backend: str) -> tuple[torch.Tensor, torch.Tensor]:
    """The scores of the backend's own call, and the selection from them."""
    ks, ke = inputs.ks, inputs.ke
    logits = fp8_mqa_logits(
        inputs.q, inputs.kv, inputs.weights, ks, ke, clean_logits=False, backend=backend
    )  # fmt: skip
    if case.bound:
        ke = torch.minimum(ke.long(), ks.long() + case.bound).int()
    keep(logits, ks, ke, case.force_first, case.force_last)
    selects = backend if backend in registry.kernels("top_k_per_row") else "torch-blocked"
    result = top_k_per_row(logits, case.k, ks, ke, **options_of(case, inputs), values=True, backend=selects)
    assert isinstance(result, tuple)
    return result


def same(one: Sequence[Any], other: Sequence[Any], case: Any) -> bool:
    """Equal indices, and equal values where both have them; in any order where the case says so."""
    indices = [result[0].sort(dim=1).values if case.order == "any" else result[0] for result in (one, other)]
    if not torch.equal(*indices):
        return False
    if one[1] is None or other[1] is None or not case.values:
        return True
    values = [result[1].sort(dim=1).values if case.order == "any" else result[1] for result in (one, other)]
    return torch.equal(*values)


def _differing(one: torch.Tensor, other: torch.Tensor, case: Any) -> str:
    if case.order == "any":
        one, other = one.sort(dim=1).values, other.sort(dim=1).values
    wrong = (one != other).any(dim=1)
    count = int(wrong.sum())
    return f"{count} rows, the first is {int(wrong.int().argmax())}" if count else "values"


def against_reference(case: Case, inputs: Inputs, indices: torch.Tensor, values: torch.Tensor | None) -> list[str]:
    """How a result differs from the reference's: exactly, or beyond the rounding of scores."""
    options = options_of(case, inputs)
    options["page_size"] = options["page_size"] or 1
    given = (inputs.q, inputs.kv, inputs.weights, inputs.ks, inputs.ke, case.k)
    expected, scores = reference_mqa_topk(
        *given, **options, max_seqlen_k=case.bound, force_first=case.force_first, force_last=case.force_last
    )
    if case.operands != "normal":
        wanted = scores if case.values else None
        right = same((indices, values), (expected, wanted), case)
        return [] if right else [f"differs from the reference in {_differing(indices, expected, case)}"]
    assert values is not None, f"{case}: real operands are judged by their scores"
    return near(values, scores)


def near(values: torch.Tensor, scores: torch.Tensor) -> list[str]:
    """Selected scores are the reference's, rank by rank, down to the rounding of the scoring."""
    found, right = (one.sort(dim=1, descending=True).values for one in (values, scores))
    finite = torch.isfinite(right)
    if not torch.equal(found[~finite], right[~finite]):
        return ["rows have other numbers of positions than the reference's"]
    found, right = found[finite], right[finite]
    if not right.numel():
        return []
    wrong = int(((found - right).abs() > _RELATIVE * right.abs() + _ABSOLUTE * right.abs().amax()).sum())
    return [f"{wrong} of {right.numel()} selected scores are not the reference's"] if wrong else []


def _call(case: Case, inputs: Inputs, backend: str) -> Found:
    """The public call into guarded results."""
    device = inputs.q.device
    indices = Guarded.make(case.rows, case.k, torch.int32, device)
    values = Guarded.make(case.rows, case.k, torch.float32, device) if case.values else None
    fp8_mqa_topk(
        inputs.q, inputs.kv, inputs.weights, inputs.ks, inputs.ke, case.k, max_seqlen_k=case.bound,
        **options_of(case, inputs), force_first=case.force_first, force_last=case.force_last,
        values=values.view if values else None, out=indices.view, workspace=case.workspace, backend=backend,
    )  # fmt: skip
    faults = indices.faults("indices") + (values.faults("values") if values else [])
    return indices.view, values.view if values else None, faults


class MqaTopKSuite(CaseSuite):
    """The suite of ``fp8_mqa_topk``."""

    operation = OPERATION
    sweep, few, run = staticmethod(cases), staticmethod(simulated_cases), staticmethod(run_case)

    def bytes_needed(self, case: Case) -> int:
        # The logits of two calls, what marks their windows, the reference's chunks.
        return 6 * case.rows * case.keys + 8 * case.rows * case.heads * case.head_dim + 3 * 2**30

    def check(self, case: Case, backend: str, device: torch.device, *, repeats: int) -> Finding:
        return Finding(tuple(run_case(case, backend, device, repeats=min(repeats, 5))))
