"""Top-k per row against the reference: cases, and a judge that accepts no difference.

Results are poisoned and fenced, so that a slot that was not written and a write outside show; repeats are bitwise the
same; and a row's set is the same in another batch, at another stride and by another plan.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from lightning_indexer.calls.top_k import top_k_per_row
from lightning_indexer.check.suite import CaseSuite
from lightning_indexer.check.verify import Finding
from lightning_indexer.check.wrong import Wrong
from lightning_indexer.problems.top_k import OPERATION, IndexBase, Order, Tie, TopKProblem, reference_top_k

POISON = -0x3F3F3F3F  # no index is as small
_GUARD = 1024
REPEATS = 20

SCORES = (
    "normal", "integers", "equal", "plateau", "zeros", "nan", "all_nan", "infinities", "mostly_neg_inf", "ascending",
    "descending", "one_bin", "denormal", "heavy_tail",
)  # fmt: skip
WINDOWS = ("whole", "ends", "causal", "packed", "odd", "short")
BASES: tuple[IndexBase, ...] = ("row", "absolute", "offset", "page")
ORDERS: tuple[Order, ...] = ("index", "score", "any")
TIES: tuple[Tie, ...] = ("smaller", "larger")
PAGE_SIZE = 64


@dataclass(frozen=True, slots=True)
class Case:
    """One call.

    Attributes:
        rows, width, k, dtype: of the logits, and how many are selected.
        scores: what the logits hold, one of ``SCORES``.
        window: where rows start and end, one of ``WINDOWS``.
        base, order, tie: the call's options.
        values: the call returns scores.
        shift: elements that rows start behind a 16-byte boundary; 0 is aligned.
        seed: of what is random.
    """

    rows: int
    width: int
    k: int
    dtype: torch.dtype = torch.float32
    scores: str = "normal"
    window: str = "odd"
    base: IndexBase = "row"
    order: Order = "index"
    tie: Tie = "smaller"
    values: bool = True
    shift: int = 0
    seed: int = 0

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        shift = f" shifted by {self.shift}" if self.shift else ""
        options = f"{self.base} {self.order} {self.tie}"
        return f"({self.rows}, {self.width}) k={self.k} {dtype} {self.scores} {self.window} {options}{shift}"

    @property
    def problem(self) -> TopKProblem:
        """The facts of the call."""
        starts, ends = self.window not in ("whole", "ends"), self.window != "whole"
        return TopKProblem(
            self.rows, self.width, self.k, self.dtype, self.base, self.order, self.tie, self.values, starts, ends,
            self.shift == 0, PAGE_SIZE if self.base == "page" else 0,
        )  # fmt: skip


def cases(full: bool) -> list[Case]:
    """The sweep of ``verify``; not ``full``: the same kinds at sizes for a CPU, an interpreter or a simulator."""
    rows, width, k = (64, 40000, 2048) if full else (5, 1500, 96)
    found = [Case(rows, width, k, scores=scores, window=window) for scores in SCORES for window in ("odd", "whole")]
    found += [Case(rows, width, k, window=window) for window in WINDOWS]
    dtypes = (torch.float32, torch.bfloat16, torch.float16)
    for base, order, tie, dtype in itertools.product(BASES, ORDERS, TIES, dtypes):
        scores = "integers" if tie == "larger" or order == "score" else "normal"
        found.append(Case(rows, width, k, dtype, scores, base=base, order=order, tie=tie, shift=3 * (order == "any")))
    found += [
        Case(3, width, k, scores=scores, order=order, tie="larger")
        for scores in ("equal", "plateau", "zeros", "one_bin")
        for order in ORDERS
    ]
    # Few long rows, which plans cut; rows around tiles; one row; k from 1 on; rows shorter than k.
    long = 300_000 if full else 9000
    found += [
        Case(count, long, k, scores=scores, window="ends") for count in (1, 3) for scores in ("normal", "integers")
    ]
    found += [
        Case(2, n, min(k, 33), window=window) for n in (1, 31, 32, 33, 2047, 2048, 2049) for window in ("whole", "ends")
    ]
    found += [
        Case(3, width, size) for size in ((1, 2, 100, 511, 512, 513, 1024, 4095, 4096) if full else (1, 2, 31, 64))
    ]
    found += [Case(rows, k // 2, k), Case(rows, width, k, values=False), Case(rows, width, k, shift=1), Case(0, 64, 8)]
    if full:
        found += [Case(4096, 32768, 2048, window=window) for window in ("causal", "packed")]
        found += [Case(1024, 131072, 2048, window="causal"), Case(64, 1 << 20, 2048, window="causal")]
        found += [Case(4096, 32768, 2048, scores="integers", window="causal"), Case(8192, 8192, 512, window="causal")]
        found += [Case(2, 300_000, 2048, scores="equal"), Case(8200, 262_144, 64, torch.bfloat16, window="causal")]
    return found


def simulated_cases() -> list[Case]:
    """Few small cases of every kind of path, for kernels that run in the simulator."""
    kinds = ("normal", "integers", "equal", "nan", "zeros")
    found = [Case(2, 1500, 40, scores=scores, seed=seed) for seed, scores in enumerate(kinds)]
    found += [
        Case(2, 900, 24, torch.bfloat16, "integers", base="page", order="score", tie="larger"),
        Case(2, 900, 24, torch.float16, base="offset", shift=1),
        Case(1, 4100, 24, base="absolute", window="ends"),
        Case(2, 20, 24, window="whole"),
    ]
    return found


def make_scores(case: Case, device: torch.device) -> torch.Tensor:
    """[M, W] logits of the case, at its alignment; columns outside of the windows hold scores like the others."""
    rows, width, k = case.rows, case.width, case.k
    generator = torch.Generator(device=device).manual_seed(case.seed + 7919 * width + k)
    normal = torch.randn((rows, width), generator=generator, device=device)
    position = torch.arange(width, device=device)
    random = torch.rand((rows, width), generator=generator, device=device)
    made: dict[str, Callable[[], torch.Tensor]] = {
        "normal": lambda: normal,
        "integers": lambda: (normal * 2).round(),
        "equal": lambda: torch.full_like(normal, -3.25),
        # Fewer than k scores above a plateau that is wider than any list.
        "plateau": lambda: torch.where(random < 0.3 * k / width, normal.abs() + 1, 0.5),
        "zeros": lambda: torch.where(random < 0.6, torch.where(random < 0.3, -0.0, 0.0), normal),
        "nan": lambda: torch.where(random < 0.5, float("nan"), normal),
        "all_nan": lambda: torch.full_like(normal, -float("nan")),
        "infinities": lambda: torch.where(random < 0.1, float("inf"), torch.where(random < 0.2, -float("inf"), normal)),
        "mostly_neg_inf": lambda: torch.where(random < 0.97, -float("inf"), normal),
        "ascending": lambda: (position - width / 2).float().expand(rows, width),
        "descending": lambda: (width / 2 - position).float().expand(rows, width),
        # A few bits of the mantissa apart; one outlier makes any linear histogram a single bin.
        "one_bin": lambda: torch.where(position == width // 3, 1e30, 1 + (random * 64).floor() * 2**-23),
        "denormal": lambda: normal * 1e-41,
        "heavy_tail": lambda: normal.sign() * torch.exp(normal * 20),
    }
    wide = torch.full((rows, (width + 40) // 16 * 16), 7.0, dtype=case.dtype, device=device)
    logits = wide[:, case.shift : case.shift + width]
    logits.copy_(made[case.scores]())
    return logits


def make_windows(case: Case, device: torch.device) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """int32 starts and ends, or None."""
    rows, width, k = case.rows, case.width, case.k
    row = torch.arange(rows, device=device)
    zero = torch.zeros_like(row)
    request = row * 4 // max(1, rows)
    starts, ends = {
        "whole": (None, None),
        "ends": (None, width - row * 5),
        "causal": (zero, width - rows + 1 + row),
        "packed": (request * (width // 4), (request + 1) * (width // 4) - row % 7),
        # Every row another kind: negative, odd, empty, reversed, past the end, whole.
        "odd": (
            torch.where(row % 5 == 1, 37 + row, torch.where(row % 5 == 2, width // 2, -3 * (row % 5))),
            torch.where(row % 5 == 2, width // 2 - row % 2, torch.where(row % 5 == 3, 2**31 - 1, width - row % 5 * 29)),
        ),
        "short": (row * 3, row * 3 + k - 2 + row % 5),
    }[case.window]
    return (None if starts is None else starts.int()), (None if ends is None else ends.int())


@dataclass(slots=True)
class Guarded:
    """[rows, width] view inside a poisoned buffer of 4-byte elements, with guards before, between and behind."""

    buffer: torch.Tensor
    view: torch.Tensor

    @staticmethod
    def make(rows: int, width: int, dtype: torch.dtype, device: torch.device) -> Guarded:
        stride = width + 13
        buffer = torch.full((2 * _GUARD + rows * stride,), POISON, dtype=torch.int32, device=device)
        view = buffer.view(dtype)[_GUARD : _GUARD + rows * stride].view(rows, stride)[:, :width]
        return Guarded(buffer, view)

    def faults(self, name: str) -> list[str]:
        """What was not written, and what should not have been."""
        rows, width = self.view.shape
        inner = self.buffer[_GUARD : self.buffer.numel() - _GUARD].view(rows, width + 13)
        outside = (self.buffer[:_GUARD], self.buffer[self.buffer.numel() - _GUARD :], inner[:, width:])
        faults = []
        if not all(bool((part == POISON).all()) for part in outside):
            faults.append(f"wrote outside of {name}")
        if unwritten := int((inner[:, :width] == POISON).sum()):
            faults.append(f"{unwritten} slots of {name} never written")
        return faults


@dataclass(frozen=True, slots=True)
class Inputs:
    """The tensors of a case."""

    logits: torch.Tensor
    starts: torch.Tensor | None
    ends: torch.Tensor | None
    offsets: torch.Tensor | None
    page_table: torch.Tensor | None

    def rows(self, rows: slice) -> Inputs:
        """The same for some of the rows."""
        others = (self.starts, self.ends, self.offsets, self.page_table)
        starts, ends, offsets, table = (None if tensor is None else tensor[rows] for tensor in others)
        return Inputs(self.logits[rows], starts, ends, offsets, table)


def make_inputs(case: Case, device: torch.device) -> Inputs:
    """The tensors of a case, the same at each time."""
    rows, pages = case.rows, -(-case.width // PAGE_SIZE)
    generator = torch.Generator(device=device).manual_seed(rows + pages)
    offsets = torch.arange(rows, device=device, dtype=torch.int32) * 1000 - 500 if case.base == "offset" else None
    table = torch.randperm(rows * pages, generator=generator, device=device).int().view(rows, pages)
    starts, ends = make_windows(case, device)
    return Inputs(make_scores(case, device), starts, ends, offsets, table if case.base == "page" else None)


Call = Callable[[Case, Inputs, torch.Tensor, "torch.Tensor | None"], None]


def call_backend(backend: str) -> Call:
    """The public call on that backend, into given results."""

    def call(case: Case, inputs: Inputs, indices: torch.Tensor, values: torch.Tensor | None) -> None:
        top_k_per_row(
            inputs.logits, case.k, inputs.starts, inputs.ends, index_base=case.base, offsets=inputs.offsets,
            page_table=inputs.page_table, page_size=PAGE_SIZE if case.base == "page" else None, order=case.order,
            tie=case.tie, values=values, out=indices, backend=backend,
        )  # fmt: skip

    return call


def run_case(
    case: Case, backend: str, device: torch.device, *, repeats: int = 0, call: Call | None = None,
    wrong: Wrong | None = None,
) -> list[str]:  # fmt: skip
    """Runs one case and gives what is wrong with its result, nothing where it passes.

    Args:
        repeats: how often to run it again, bitwise the same each time, and on fewer rows at another stride.
        call: what to run in place of the public call on ``backend``.
        wrong: takes which slots of the indices are wrong.
    """
    call = call or call_backend(backend)
    inputs = make_inputs(case, device)
    indices, values, faults = _guarded(case, inputs, call)
    expected, scores = reference_top_k(
        inputs.logits, case.k, inputs.starts, inputs.ends, index_base=case.base, offsets=inputs.offsets,
        page_table=inputs.page_table, page_size=PAGE_SIZE, order=case.order, tie=case.tie,
    )  # fmt: skip
    faults += compare(case, indices, values, expected, scores, wrong)
    for _ in range(repeats):
        again, _, _ = _guarded(case, inputs, call)
        if not torch.equal(*(_comparable(case, found) for found in (again, indices))):
            faults.append("a repeat differs")
            break
    if repeats and case.rows > 2:
        faults += _in_another_batch(case, inputs, call, indices)
    return faults


def compare(
    case: Case, indices: torch.Tensor, values: torch.Tensor | None, expected: torch.Tensor, scores: torch.Tensor,
    wrong: Wrong | None = None,
) -> list[str]:  # fmt: skip
    """How a result differs from the reference's; ``wrong`` takes where."""
    faults = []
    found, right = _comparable(case, indices), _comparable(case, expected)
    if count := int((found != right).any(dim=1).sum()):
        if wrong is not None:
            wrong.note(found != right)
        row = int((found != right).any(dim=1).int().argmax())
        missing = sorted(set(right[row].tolist()) - set(found[row].tolist()))[:4]
        extra = sorted(set(found[row].tolist()) - set(right[row].tolist()))[:4]
        faults.append(f"{count} rows differ, the first is {row}: without {missing}, with {extra}")
    if values is not None:
        if case.order == "any":
            values, scores = values.sort(dim=1).values, scores.sort(dim=1).values
        if not torch.equal(values, scores):
            faults.append("values differ")
    return faults


def _comparable(case: Case, indices: torch.Tensor) -> torch.Tensor:
    return indices.sort(dim=1).values if case.order == "any" else indices


def _guarded(case: Case, inputs: Inputs, call: Call) -> tuple[torch.Tensor, torch.Tensor | None, list[str]]:
    device = inputs.logits.device
    indices = Guarded.make(case.rows, case.k, torch.int32, device)
    values = Guarded.make(case.rows, case.k, torch.float32, device) if case.values else None
    call(case, inputs, indices.view, values.view if values else None)
    faults = indices.faults("indices") + (values.faults("values") if values else [])
    return indices.view, values.view if values else None, faults


def _in_another_batch(case: Case, inputs: Inputs, call: Call, indices: torch.Tensor) -> list[str]:
    """The last two rows alone, their logits at another stride and alignment: the same result."""
    few = replace(case, rows=2, values=False)
    part = inputs.rows(slice(case.rows - 2, case.rows))
    moved = torch.zeros((2, case.width + 5), dtype=case.dtype, device=inputs.logits.device)[:, 1 : case.width + 1]
    moved.copy_(part.logits)
    alone, _, _ = _guarded(few, replace(part, logits=moved), call)
    same = torch.equal(_comparable(case, alone), _comparable(case, indices[case.rows - 2 :]))
    return [] if same else ["rows differ in another batch at another stride"]


class TopKSuite(CaseSuite):
    """The suite of ``top_k_per_row``."""

    operation = OPERATION
    sweep, run = staticmethod(cases), staticmethod(run_case)

    @staticmethod
    def few(_dialect: torch.dtype) -> list[Case]:
        return simulated_cases()

    def bytes_needed(self, case: Case) -> int:
        # The logits, what made them, the reference's sort and positions.
        return 48 * case.rows * case.width + 2**30

    def check(self, case: Case, backend: str, device: torch.device, *, repeats: int) -> Finding:
        wrong = Wrong()
        faults = run_case(case, backend, device, repeats=repeats, wrong=wrong)
        return Finding(tuple(faults), dtype=case.dtype, wrong=wrong.positions())
