"""What scores and selection in one call has in common over keys and over pages: facts, checks, the reference's parts.

The result of either is that of the call that scores followed by ``top_k_per_row``, bit for bit; between the two,
positions that are always kept have their scores replaced by +inf.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from lightning_indexer.problems import top_k
from lightning_indexer.problems.checks import as_int, plain_arithmetic
from lightning_indexer.problems.top_k import TopKProblem, windows

# Of scores that are held at a time, where the caller says nothing.
WORKSPACE_BYTES = 64 * 2**20


class OneCallProblem(NamedTuple):
    """What selection, heuristics and kernels may depend on. Hashable; holds no tensor.

    Attributes:
        scoring: of the whole call, float32 and without the ``-inf`` fill.
        selection: of the whole call. Its ``width`` is that of the scores.
        force_first, force_last: positions at the start and the end of each row's window that are always kept.
        workspace_bytes: what the caller allows; at least the scores of one row, over pages of a sequence's rows.
    """

    scoring: Any
    selection: TopKProblem
    force_first: int = 0
    force_last: int = 0
    workspace_bytes: int = WORKSPACE_BYTES

    @property
    def rows(self) -> int:
        rows: int = self.scoring.rows
        return rows

    @property
    def width(self) -> int:
        """Columns of scores: N, or the longest window that the caller allows."""
        width: int = self.scoring.width
        return width

    @property
    def k(self) -> int:
        return self.selection.k

    @property
    def needs_scores(self) -> bool:
        """False where every position is selected, and neither its score nor its rank is asked for."""
        selection = self.selection
        return selection.width > selection.k or selection.values or selection.order == "score"

    def compare(self, call: Any, expected: Any) -> str | None:
        """None, or in words how the result of ``call`` differs from that of ``expected``, both an ``example``."""
        return difference(self.selection, call, expected)

    def __str__(self) -> str:
        selection = self.selection
        forced = f", {self.force_first} first and {self.force_last} last kept"
        return (
            f"{self.scoring}, k={selection.k} by {selection.order}, from {selection.index_base}"
            f"{forced if self.force_first or self.force_last else ''}, in {self.workspace_bytes} bytes"
        )


def validate_options(call: Any, rows: int, device: torch.device, row_bytes: int) -> Any:
    """What the calls over keys and over pages have in common: selection, kept positions, workspace."""
    workspace = call.workspace
    given = workspace if isinstance(workspace, torch.Tensor) else None
    call = top_k.validate_selection(call._replace(workspace=given), rows, device, "q")
    kept = {name: as_int(name, getattr(call, name)) for name in ("force_first", "force_last")}
    for name, count in kept.items():
        if not 0 <= count <= call.k:
            raise ValueError(f"{name}: got {count}, expected 0 to k, {call.k}")
    if sum(kept.values()) > call.k:
        raise ValueError(
            f"force_last: got {call.force_last} beside force_first {call.force_first}, expected {call.k} together"
        )
    if workspace is not None and given is None:
        workspace = as_int("workspace", workspace)
    room = workspace.numel() if isinstance(workspace, torch.Tensor) else workspace
    if room is not None and room < row_bytes:
        raise ValueError(f"workspace: got {room} bytes, expected at least {row_bytes}, a row of scores")
    return call._replace(workspace=workspace, **kept)


def selection_of(call: Any, rows: int, width: int, *, starts: bool) -> TopKProblem:
    """The selection of the whole call, as a problem of its own."""
    return TopKProblem(
        rows, width, call.k, torch.float32, call.index_base, call.order, call.tie, call.values is not False, starts,
        ends=True, aligned=True, page_size=call.page_size or 0,
    )  # fmt: skip


def workspace_bytes(call: Any) -> int:
    """What a validated call allows."""
    workspace = call.workspace
    if workspace is None:
        return WORKSPACE_BYTES
    return workspace.numel() if isinstance(workspace, torch.Tensor) else int(workspace)


def keep(logits: torch.Tensor, ks: torch.Tensor, ke: torch.Tensor, force_first: int, force_last: int) -> None:
    """+inf at the first and last positions of each window of ``logits`` [M, N], where there are as many."""
    if not force_first and not force_last:
        return
    with plain_arithmetic(logits.device):
        start, end = (edge[:, None] for edge in windows(logits.shape[0], logits.shape[1], ks, ke, logits.device))
        position = torch.arange(logits.shape[1], device=logits.device)
        kept = (position < start + force_first) | (position >= end - force_last)
        logits.masked_fill_(kept & (position >= start) & (position < end), float("inf"))


# A small call that is hard to get right, and its comparison: what a kernel has to pass on hardware it has not seen.


def exact_operands(q: torch.Tensor, k: torch.Tensor, weights: torch.Tensor, generator: torch.Generator) -> None:
    """Fills q, k and weights with whole numbers that are so small that every sum is exact on any hardware.

    Scores then are the same bits everywhere, many of them equal, and so is what is selected.
    """
    for tensor, most in ((q, 1), (k, 1), (weights, 2)):
        numbers = torch.randint(-most, most + 1, tensor.shape, generator=generator)
        tensor.copy_(numbers.float().to(tensor.device))


def bases(selection: TopKProblem, device: torch.device) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Offsets and a page table, where the selection reads them."""
    rows, offsets, table = selection.rows, None, None
    if selection.index_base == "offset":
        offsets = (torch.arange(rows) * 1000).int().to(device)
    if selection.index_base == "page":
        pages = -(-selection.width // selection.page_size)
        table = torch.randperm(rows * pages, generator=torch.Generator("cpu").manual_seed(rows)).view(rows, pages)
        table = table.int().to(device)
    return offsets, table


def unwritten(selection: TopKProblem, device: torch.device) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Results that no kernel writes."""
    shape = (selection.rows, selection.k)
    values = torch.full(shape, float("nan"), device=device) if selection.values else None
    return torch.full(shape, -2, dtype=torch.int32, device=device), values


def difference(selection: TopKProblem, call: Any, expected: Any) -> str | None:
    """None, or in words how one result differs from the other."""
    found, right = call.indices, expected.indices
    if selection.order == "any":
        found, right = found.sort(dim=1).values, right.sort(dim=1).values
    elif selection.values and not torch.equal(call.values, expected.values):
        return "values differ"
    wrong = (found != right).any(dim=1)
    count = int(wrong.sum())
    return f"{count} of {selection.rows} rows differ, the first is {int(wrong.int().argmax())}" if count else None
