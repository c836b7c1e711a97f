"""Scores and selection in one call: the facts of a call, the checks that every call passes once, and the reference.

The result is that of ``fp8_mqa_logits`` followed by ``top_k_per_row``, bit for bit; between the two, positions that are
always kept have their scores replaced by +inf.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from lightning_indexer.arch import Arch
from lightning_indexer.problems import mqa_logits, top_k
from lightning_indexer.problems.checks import as_int, plain_arithmetic
from lightning_indexer.problems.mqa_logits import MqaLogitsCall, MqaLogitsProblem, reference_logits, row_stride
from lightning_indexer.problems.top_k import IndexBase, Order, Tie, TopKProblem, reference_top_k, windows

OPERATION = "fp8_mqa_topk"
# Of scores that are held at a time, where the caller says nothing.
WORKSPACE_BYTES = 64 * 2**20
# The workspace's address, and each row of scores in it.
ALIGN_BYTES = 256
# Logits of one row chunk of the reference stay under this.
_REFERENCE_BYTES = 2**28


class MqaTopKProblem(NamedTuple):
    """What selection, heuristics and kernels may depend on. Hashable; holds no tensor.

    Attributes:
        scoring: of the whole call, float32 and ``noclean``, or ``compressed`` where the caller bounds the windows.
        selection: of the whole call. Its ``width`` is that of the scores; its windows are those of the scoring.
        force_first, force_last: positions at the start and the end of each window that are always kept.
        workspace_bytes: what the caller allows; at least a row of scores.
    """

    scoring: MqaLogitsProblem
    selection: TopKProblem
    force_first: int = 0
    force_last: int = 0
    workspace_bytes: int = WORKSPACE_BYTES

    @property
    def operation(self) -> str:
        return OPERATION

    @property
    def rows(self) -> int:
        return self.scoring.rows

    @property
    def keys(self) -> int:
        return self.scoring.keys

    @property
    def width(self) -> int:
        """Columns of scores: N, or the longest window that the caller allows."""
        return self.scoring.width

    @property
    def heads(self) -> int:
        return self.scoring.heads

    @property
    def head_dim(self) -> int:
        return self.scoring.head_dim

    @property
    def k(self) -> int:
        return self.selection.k

    @property
    def needs_scores(self) -> bool:
        """False where no window can have more than k positions, all of which are then selected, unscored."""
        return needs_scores(self.selection)

    def adversarial(self, arch: Arch) -> MqaTopKProblem:
        """A small problem of the same H, D, k and options."""
        scoring = self.scoring.adversarial(arch)
        keys = max(scoring.keys, self.k + 411)
        scoring = scoring._replace(keys=keys, max_seqlen_k=keys - 97 if scoring.compressed else 0)
        selection = self.selection._replace(rows=scoring.rows, width=scoring.width)
        return self._replace(scoring=scoring, selection=selection, workspace_bytes=WORKSPACE_BYTES)

    def example(self, device: torch.device) -> MqaTopKCall:
        """A call of this problem with operands that are the same at each time, into results that no kernel writes."""
        return _example(self, device)

    def compare(self, call: MqaTopKCall, expected: MqaTopKCall) -> str | None:
        """None, or in words how the result of ``call`` differs from that of ``expected``, both :meth:`example`."""
        return difference(self.selection, call, expected)

    def __str__(self) -> str:
        return f"{self.scoring}, {selection_str(self)}"


class MqaTopKCall(NamedTuple):
    """The tensors of one call, validated.

    ``q``, ``k``, ``kv_scale``, ``weights``, ``ks``, ``ke`` as in ``MqaLogitsCall``, on gfx942 in its dialect;
    ``offsets``, ``page_table``, ``indices`` and ``values`` as in ``TopKCall``. ``workspace``: uint8 [bytes],
    contiguous, on a 16-byte boundary, of the run's ``workspace_bytes``; None: the run allocates it.
    """

    q: torch.Tensor
    k: torch.Tensor
    kv_scale: torch.Tensor
    weights: torch.Tensor
    ks: torch.Tensor
    ke: torch.Tensor
    offsets: torch.Tensor | None
    page_table: torch.Tensor | None
    indices: torch.Tensor
    values: torch.Tensor | None = None
    workspace: torch.Tensor | None = None


class MqaTopKArguments(NamedTuple):
    """The arguments of ``fp8_mqa_topk``; ``keys`` and ``kv_scale`` are its ``kv``."""

    q: torch.Tensor
    keys: torch.Tensor
    kv_scale: torch.Tensor
    weights: torch.Tensor
    ks: torch.Tensor
    ke: torch.Tensor
    k: int
    max_seqlen_k: int = 0
    index_base: str = "row"
    offsets: torch.Tensor | None = None
    page_table: torch.Tensor | None = None
    page_size: int | None = None
    order: str = "index"
    tie: str = "smaller"
    force_first: int = 0
    force_last: int = 0
    values: torch.Tensor | bool | None = None
    out: torch.Tensor | None = None
    workspace: torch.Tensor | int | None = None
    backend: str | None = None


def validate(call: MqaTopKArguments) -> MqaTopKArguments:
    """Checks one call's arguments; returns them normalised: vectors [M] and contiguous, ``values`` no longer None,
    ``max_seqlen_k`` 0 where it bounds nothing.

    Works on fake tensors too: it reads shapes, strides, dtypes and devices, never values or addresses.

    Raises:
        TypeError, ValueError: as ``fp8_mqa_logits`` and ``top_k_per_row``; kept positions that are negative or more
            than k; a workspace that cannot hold a row of scores.
    """
    scoring = mqa_logits.validate(scoring_of(call))
    width = scoring.max_seqlen_k
    call = call._replace(
        q=scoring.q, keys=scoring.k, kv_scale=scoring.kv_scale, weights=scoring.weights, ks=scoring.ks, ke=scoring.ke,
        max_seqlen_k=width if width < scoring.k.shape[0] else 0,
    )  # fmt: skip
    row_bytes = 4 * row_stride(call.max_seqlen_k or call.keys.shape[0], torch.float32)
    validated: MqaTopKArguments = validate_options(call, scoring.q.shape[0], scoring.q.device, row_bytes)
    return validated


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


def scoring_of(call: MqaTopKArguments) -> MqaLogitsCall:
    """The scoring of the whole call, without a result."""
    return MqaLogitsCall(*call[:6], clean_logits=False, max_seqlen_k=call.max_seqlen_k)


def problem_of(call: MqaTopKArguments) -> MqaTopKProblem:
    """The facts of a validated call."""
    scoring = mqa_logits.problem_of(scoring_of(call))
    selection = selection_of(call, scoring.rows, scoring.width, starts=True)
    return MqaTopKProblem(scoring, selection, call.force_first, call.force_last, workspace_bytes(call))


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


def needs_scores(selection: TopKProblem) -> bool:
    """False where every position is selected, and neither its score nor its rank is asked for."""
    return selection.width > selection.k or selection.values or selection.order == "score"


def selection_str(problem: Any) -> str:
    """How a problem's selection is printed."""
    selection = problem.selection
    forced = f", {problem.force_first} first and {problem.force_last} last kept"
    return (
        f"k={selection.k} by {selection.order}, from {selection.index_base}"
        f"{forced if problem.force_first or problem.force_last else ''}, in {problem.workspace_bytes} bytes"
    )


# The reference: the two references, row chunk by row chunk.


def reference_mqa_topk(
    q: torch.Tensor,
    kv: tuple[torch.Tensor, torch.Tensor],
    weights: torch.Tensor,
    cu_seqlen_ks: torch.Tensor,
    cu_seqlen_ke: torch.Tensor,
    k: int,
    *,
    max_seqlen_k: int = 0,
    index_base: IndexBase = "row",
    offsets: torch.Tensor | None = None,
    page_table: torch.Tensor | None = None,
    page_size: int = 1,
    order: Order = "index",
    tie: Tie = "smaller",
    force_first: int = 0,
    force_last: int = 0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The reference: ``reference_logits``, +inf at the kept positions, ``reference_top_k``. Arguments as in
    ``fp8_mqa_topk``.

    Returns:
        Indices int32 [M, k] and scores float32 [M, k], as ``reference_top_k``.
    """
    keys = kv[0].shape[0]
    step = max(1, _REFERENCE_BYTES // max(1, 4 * keys))
    ks, ke = cu_seqlen_ks.reshape(-1).long(), cu_seqlen_ke.reshape(-1).long()
    if max_seqlen_k:
        ke = torch.minimum(ke, ks + max_seqlen_k)
    found = []
    for first in range(0, q.shape[0], step):
        rows = slice(first, first + step)
        logits = reference_logits(q[rows], kv, weights[rows], ks[rows], ke[rows])
        keep(logits, ks[rows], ke[rows], force_first, force_last)
        found.append(
            reference_top_k(
                logits, k, ks[rows], ke[rows], index_base=index_base,
                offsets=None if offsets is None else offsets[rows],
                page_table=None if page_table is None else page_table[rows], page_size=page_size, order=order, tie=tie,
            )
        )  # fmt: skip
    if not found:
        empty = torch.empty((0, k), device=q.device)
        return empty.int(), empty.float()
    return torch.cat([indices for indices, _ in found]), torch.cat([values for _, values in found])


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


def _example(problem: MqaTopKProblem, device: torch.device) -> MqaTopKCall:
    scoring = problem.scoring.example(device)
    q, k, kv_scale, weights, ks, ke = scoring[:6]
    generator = torch.Generator("cpu").manual_seed(problem.k)
    exact_operands(q, k, weights, generator)
    kv_scale.copy_(torch.tensor([1.0, -1.0, 0.5, 2.0]).repeat(-(-len(kv_scale) // 4))[: len(kv_scale)])
    indices, values = unwritten(problem.selection, device)
    return MqaTopKCall(q, k, kv_scale, weights, ks, ke, *bases(problem.selection, device), indices, values)


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
