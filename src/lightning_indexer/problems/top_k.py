"""Top-k per row: the facts of a call, the checks that every call passes once, and the reference.

The k best of row m's candidates, the positions [start, end) clamped to [0, W], by one total order: score descending,
then index ascending. NaN is no candidate.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple, TypeVar, get_args

import torch

from lightning_indexer.arch import Arch
from lightning_indexer.problems.checks import as_int, check_tensor, contiguous_vector, plain_arithmetic, shape_of

OPERATION = "top_k_per_row"
IndexBase = Literal["row", "absolute", "offset", "page"]
Order = Literal["index", "score", "any"]
Tie = Literal["smaller", "larger"]
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
MAX_K = 4096
# Positions and slots are int32.
MAX_WIDTH = 2**31 - 1
_Call = TypeVar("_Call", bound=tuple[Any, ...])
# The reference sorts this many candidates at a time, by three int64 each.
_REFERENCE_ELEMENTS = 2**23


class TopKProblem(NamedTuple):
    """What selection, heuristics and kernels may depend on. Hashable; holds no tensor.

    Attributes:
        rows, width, k: M, W and k.
        dtype: of the logits.
        index_base: what an index counts from, see :func:`validate`.
        order: of a row's indices.
        tie: which index wins among equal scores.
        values: the scores are returned too.
        starts, ends: the call has ``row_starts``, ``row_ends``; without, rows begin at 0 and end at W.
        aligned: every row of the logits starts on a 16-byte boundary.
        page_size: positions of a page, 0 unless ``index_base`` is ``"page"``.
    """

    rows: int
    width: int
    k: int
    dtype: torch.dtype = torch.float32
    index_base: IndexBase = "row"
    order: Order = "index"
    tie: Tie = "smaller"
    values: bool = False
    starts: bool = True
    ends: bool = True
    aligned: bool = True
    page_size: int = 0

    @property
    def operation(self) -> str:
        return OPERATION

    def adversarial(self, arch: Arch) -> TopKProblem:
        """A small problem of the same k, dtype and options: rows longer than what any kernel holds at a time."""
        return self._replace(rows=7, width=max(5003, 5 * self.k + 3))

    def example(self, device: torch.device) -> TopKCall:
        """A call of this problem with scores that are the same at each time, into results that no kernel writes."""
        return _example(self, device)

    def compare(self, call: TopKCall, expected: TopKCall) -> str | None:
        """None, or in words how the result of ``call`` differs from that of ``expected``, both :meth:`example`."""
        return _difference(self, call, expected)

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        return f"M={self.rows} W={self.width} k={self.k} {dtype} by {self.order}, from {self.index_base}"


class TopKCall(NamedTuple):
    """The tensors of one call, validated.

    ``logits`` [M, W], last dimension contiguous; ``row_starts``, ``row_ends``, ``offsets`` int32 [M], contiguous;
    ``page_table`` int32 [M, pages], last dimension contiguous; ``indices`` int32 and ``values`` float32 [M, k], the
    results, last dimension contiguous; ``workspace`` uint8 [bytes], contiguous, on a 16-byte boundary.
    """

    logits: torch.Tensor
    row_starts: torch.Tensor | None
    row_ends: torch.Tensor | None
    offsets: torch.Tensor | None
    page_table: torch.Tensor | None
    indices: torch.Tensor
    values: torch.Tensor | None = None
    workspace: torch.Tensor | None = None


class TopKArguments(NamedTuple):
    """The arguments of ``top_k_per_row``, in its order; ``values`` is a tensor, or whether to return them."""

    logits: torch.Tensor
    k: int
    row_starts: torch.Tensor | None = None
    row_ends: torch.Tensor | None = None
    index_base: str = "row"
    offsets: torch.Tensor | None = None
    page_table: torch.Tensor | None = None
    page_size: int | None = None
    order: str = "index"
    tie: str = "smaller"
    values: torch.Tensor | bool | None = None
    out: torch.Tensor | None = None
    workspace: torch.Tensor | None = None
    backend: str | None = None


def validate(call: TopKArguments) -> TopKArguments:
    """Checks one call's arguments; returns them normalised: vectors [M] and contiguous, ``values`` no longer None.

    Works on fake tensors too: it reads shapes, strides, dtypes and devices, never values or addresses.

    Raises:
        TypeError: an argument that is not a dense tensor, or has the wrong dtype or type.
        ValueError: a wrong rank, shape, stride or device, an unknown option, or options that exclude each other.
    """
    logits = call.logits
    check_tensor("logits", logits, DTYPES)
    if logits.dim() != 2:
        raise ValueError(f"logits: got shape {shape_of(logits)}, expected 2 dimensions, [M, W]")
    if logits.shape[1] > MAX_WIDTH:
        raise ValueError(f"logits: got {logits.shape[1]} columns, expected at most {MAX_WIDTH}: positions are int32")
    _check_last_contiguous("logits", logits)
    call = call._replace(
        logits=logits.resolve_neg(),
        row_starts=_vector("row_starts", call.row_starts, logits.shape[0], logits.device, "logits"),
        row_ends=_vector("row_ends", call.row_ends, logits.shape[0], logits.device, "logits"),
    )
    return validate_selection(call, logits.shape[0], logits.device, "logits")


def validate_selection(call: _Call, rows: int, device: torch.device, owner: str) -> _Call:
    """Checks what a call says of its selection, whatever it selects from; returns it normalised.

    Args:
        call: a NamedTuple with the fields of :class:`TopKArguments` from ``index_base`` on, and ``k``.
        rows: M.
        device: of the argument ``owner``.

    Raises:
        TypeError, ValueError: as :func:`validate`.
    """
    given: Any = call
    k: Any = as_int("k", given.k)
    if not 1 <= k <= MAX_K:
        raise ValueError(f"k: got {k}, expected 1 to {MAX_K}")
    known: tuple[tuple[str, str, object], ...] = (
        ("index_base", given.index_base, IndexBase),
        ("order", given.order, Order),
        ("tie", given.tie, Tie),
    )
    for option, value, kinds in known:
        if value not in get_args(kinds):
            raise ValueError(f"{option}: got {value!r}, expected one of {', '.join(get_args(kinds))}")
    given = given._replace(
        k=k,
        offsets=_vector("offsets", given.offsets, rows, device, owner),
        values=False if given.values is None else given.values,
    )
    _check_base(given, rows, device, owner)
    if given.out is not None:
        _check_result("out", given.out, torch.int32, rows, k, device, owner)
    if isinstance(given.values, torch.Tensor):
        _check_result("values", given.values, torch.float32, rows, k, device, owner)
    elif not isinstance(given.values, bool):
        raise TypeError(f"values: got {type(given.values).__name__}, expected a bool or a torch.Tensor")
    if given.workspace is not None:
        check_tensor("workspace", given.workspace, (torch.uint8,))
        _check_device("workspace", given.workspace, device, owner)
        if given.workspace.dim() != 1 or not given.workspace.is_contiguous():
            got = f"shape {shape_of(given.workspace)}, strides {tuple(given.workspace.stride())}"
            raise ValueError(f"workspace: got {got}, expected one contiguous dimension, [bytes]")
    return given  # type: ignore[no-any-return]


def problem_of(call: TopKArguments) -> TopKProblem:
    """The facts of a validated call."""
    rows, width = call.logits.shape
    return TopKProblem(
        rows, width, call.k, call.logits.dtype, call.index_base, call.order, call.tie,  # type: ignore[arg-type]
        values=call.values is not False, starts=call.row_starts is not None, ends=call.row_ends is not None,
        aligned=is_aligned(call.logits), page_size=call.page_size or 0,
    )  # fmt: skip


def is_aligned(logits: torch.Tensor) -> bool:
    """True when every row starts on a 16-byte boundary."""
    stride = logits.stride(0) * logits.element_size() if logits.shape[0] > 1 else 0
    return not (logits.data_ptr() | stride) & 15


def _check_base(call: Any, rows: int, device: torch.device, owner: str) -> None:
    for name, tensor, base, shape in (
        ("offsets", call.offsets, "offset", "[M]"),
        ("page_table", call.page_table, "page", "[M, pages]"),
    ):
        if (tensor is not None) != (call.index_base == base):
            got = "a tensor" if tensor is not None else "None"
            raise ValueError(
                f"{name}: got {got} with index_base {call.index_base!r}, expected int32 {shape} with {base!r} alone"
            )
    if call.page_table is None:
        if call.page_size is not None:
            raise ValueError(f"page_size: got {call.page_size} without a page_table, expected None")
        return
    if call.page_size is None:
        raise TypeError("page_size: got None with a page_table, expected an int")
    if not 1 <= as_int("page_size", call.page_size) <= MAX_WIDTH:
        raise ValueError(f"page_size: got {call.page_size}, expected at least 1, at most {MAX_WIDTH}")
    check_tensor("page_table", call.page_table, (torch.int32,))
    _check_device("page_table", call.page_table, device, owner)
    if call.page_table.dim() != 2 or call.page_table.shape[0] != rows:
        raise ValueError(f"page_table: got shape {shape_of(call.page_table)}, expected [{rows}, pages]")
    _check_last_contiguous("page_table", call.page_table)


def _vector(name: str, vector: torch.Tensor | None, rows: int, device: torch.device, owner: str) -> torch.Tensor | None:
    if vector is None:
        return None
    check_tensor(name, vector, (torch.int32,), f": pass {name}.to(torch.int32)")
    _check_device(name, vector, device, owner)
    flat = contiguous_vector(vector, rows)
    if flat.dim() != 1 or flat.shape[0] != rows:
        raise ValueError(f"{name}: got shape {shape_of(vector)}, expected [{rows}] or [{rows}, 1]")
    return flat.resolve_neg()


def _check_result(
    name: str, result: torch.Tensor, dtype: torch.dtype, rows: int, k: int, device: torch.device, owner: str
) -> None:
    check_tensor(name, result, (dtype,))
    _check_device(name, result, device, owner)
    if result.dim() != 2 or result.shape[0] != rows or result.shape[1] != k:
        raise ValueError(f"{name}: got shape {shape_of(result)}, expected [{rows}, {k}]")
    _check_last_contiguous(name, result)
    if rows > 1 and result.stride(0) < k:
        raise ValueError(
            f"{name}: got strides {tuple(result.stride())}, expected a row stride of at least {k}: rows overlap"
        )


def _check_device(name: str, tensor: torch.Tensor, device: torch.device, owner: str) -> None:
    if tensor.device != device:
        raise ValueError(f"{name}: got a tensor on {tensor.device}, expected {device}, the device of {owner}")


def _check_last_contiguous(name: str, tensor: torch.Tensor) -> None:
    if tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
        raise ValueError(f"{name}: got strides {tuple(tensor.stride())}, expected a contiguous last dimension")


def windows(
    rows: int, width: int, row_starts: torch.Tensor | None, row_ends: torch.Tensor | None, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """[M] int64: first candidate of each row and the end behind its last one, within [0, W]; equal for empty rows."""
    if row_starts is None:
        start = torch.zeros(rows, dtype=torch.int64, device=device)
    else:
        start = row_starts.reshape(-1).long().clamp(0, width)
    if row_ends is None:
        end = torch.full((rows,), width, dtype=torch.int64, device=device)
    else:
        end = row_ends.reshape(-1).long().clamp(0, width)
    return start, torch.maximum(start, end)


def order_keys(scores: torch.Tensor) -> torch.Tensor:
    """int32 keys in the order of the scores: -0.0 is +0.0, NaN is below everything (-2^31)."""
    bits = scores.float().view(torch.int32)
    magnitude = bits & 0x7FFFFFFF  # no float comparison: denormals count, whatever the device's mode
    bits = torch.where(magnitude == 0, 0, bits)
    keys = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return torch.where(magnitude > 0x7F800000, -(2**31), keys)


def rebase(
    positions: torch.Tensor,
    rows: slice,
    start: torch.Tensor,
    index_base: str,
    offsets: torch.Tensor | None,
    page_table: torch.Tensor | None,
    page_size: int,
) -> torch.Tensor:
    """int64 [rows, k] indices of absolute ``positions``, -1 where those are -1; ``start`` [rows] is clamped."""
    if index_base == "absolute":
        return positions
    relative = positions - start[:, None]
    if index_base == "offset":
        assert offsets is not None
        relative = relative + offsets.reshape(-1)[rows, None]
    elif index_base == "page":
        assert page_table is not None
        inside = torch.where(positions >= 0, relative, 0)
        pages = page_table[rows].long()
        if pages.shape[1] == 0:
            return torch.full_like(positions, -1)
        relative = pages.gather(1, inside // page_size) * page_size + inside % page_size
    return torch.where(positions >= 0, relative, -1)


def reference_top_k(
    logits: torch.Tensor,
    k: int,
    row_starts: torch.Tensor | None = None,
    row_ends: torch.Tensor | None = None,
    *,
    index_base: IndexBase = "row",
    offsets: torch.Tensor | None = None,
    page_table: torch.Tensor | None = None,
    page_size: int = 1,
    order: Order = "index",
    tie: Tie = "smaller",
) -> tuple[torch.Tensor, torch.Tensor]:
    """The reference: sorts every row by one integer a candidate, row chunk by row chunk.

    No backend shares its selection.

    Arguments as in ``top_k_per_row``; ``order="any"`` gives ascending indices.

    Returns:
        Indices int32 [M, k], -1 in unused slots, and their scores float32 [M, k], ``-inf`` there.
    """
    with plain_arithmetic(logits.device):
        rows, width = logits.shape
        device = logits.device
        start, end = windows(rows, width, row_starts, row_ends, device)
        indices = torch.full((rows, k), -1, dtype=torch.int32, device=device)
        values = torch.full((rows, k), float("-inf"), dtype=torch.float32, device=device)
        kept = min(k, width)
        if kept == 0:
            return indices, values
        position = torch.arange(width, device=device)
        # Low half of a candidate's integer: the better of two equal scores has the larger one.
        low = position if tie == "larger" else MAX_WIDTH - position
        step = max(1, _REFERENCE_ELEMENTS // width)
        for first in range(0, rows, step):
            chunk = slice(first, min(first + step, rows))
            keys = order_keys(logits[chunk]).long()
            inside = (position >= start[chunk, None]) & (position < end[chunk, None]) & (keys != -(2**31))
            ranked = torch.where(inside, (keys << 32) | low, torch.iinfo(torch.int64).min)
            best = ranked.sort(dim=1, descending=True).values[:, :kept]
            found = (best & 0xFFFFFFFF) if tie == "larger" else MAX_WIDTH - (best & 0xFFFFFFFF)
            found = torch.where(best != torch.iinfo(torch.int64).min, found, -1)
            if order != "score":
                found = torch.where(found < 0, width, found).sort(dim=1).values
                found = torch.where(found == width, -1, found)
            scores = logits[chunk].float().gather(1, found.clamp(min=0))
            values[chunk, :kept] = torch.where(found >= 0, scores + 0.0, float("-inf"))
            result = rebase(found, chunk, start[chunk], index_base, offsets, page_table, page_size)
            indices[chunk, :kept] = result.to(torch.int32)
        return indices, values


# A small call that is hard to get right, and its comparison: what a kernel has to pass on hardware it has not seen.


def _example(problem: TopKProblem, device: torch.device) -> TopKCall:
    rows, width, k = problem.rows, problem.width, problem.k
    generator = torch.Generator("cpu").manual_seed(k)
    scores = torch.randn((rows, width), generator=generator)
    # Ties at the cut, plateaus, negative zeros, NaN and infinities; later rows repeat the kinds.
    scores[1::7] = (scores[1::7] * 2).round()
    scores[2::7] = torch.where(scores[2::7] > 1.5, scores[2::7], -0.0)
    scores[3::7, ::2] = float("nan")
    scores[4::7, k // 2 :] = float("-inf")
    scores[5::7] = scores[5::7].sort(dim=1).values
    # Rows that are not aligned start one element into rows that are.
    wide = torch.zeros((rows, (width + 16) // 16 * 16), dtype=problem.dtype, device=device)
    logits = wide[:, :width] if problem.aligned else wide[:, 1 : width + 1]
    logits.copy_(scores)
    row = torch.arange(rows)
    pages = -(-width // problem.page_size) if problem.page_size else 0
    table = torch.randperm(rows * pages, generator=generator).view(rows, pages).int().to(device)
    return TopKCall(
        logits,
        (row % 3 * 5 - 2).int().to(device) if problem.starts else None,
        (width + 1 - row % 4 * 3).int().to(device) if problem.ends else None,
        (row * 1000).int().to(device) if problem.index_base == "offset" else None,
        table if problem.index_base == "page" else None,
        torch.full((rows, k), -2, dtype=torch.int32, device=device),
        torch.full((rows, k), float("nan"), device=device) if problem.values else None,
    )


def _difference(problem: TopKProblem, call: TopKCall, expected: TopKCall) -> str | None:
    found, right = call.indices, expected.indices
    if problem.order == "any":
        found, right = found.sort(dim=1).values, right.sort(dim=1).values
    elif problem.values and not torch.equal(call.values, expected.values):  # type: ignore[arg-type]
        return "values differ"
    wrong = (found != right).any(dim=1)
    count = int(wrong.sum())
    return f"{count} of {problem.rows} rows differ, the first is {int(wrong.int().argmax())}" if count else None
