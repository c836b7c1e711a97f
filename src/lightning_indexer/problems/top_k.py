"""Top-k per row: the frozen facts of a call, what a backend is given, the checks every call passes, and the oracle."""

from __future__ import annotations

from typing import Literal, NamedTuple, get_args

import torch

IndexBase = Literal["row", "absolute", "offset", "page"]
Order = Literal["index", "score", "any"]
Tie = Literal["smaller", "larger"]
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
MAX_K = 4096
# Positions and slots are int32.
MAX_WIDTH = 2**31 - 1

# Keys of this many candidates are sorted at a time by the oracle (three int64 each).
_ORACLE_ELEMENTS = 2**23


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

    operation = "top_k_per_row"

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


def validate(
    logits: torch.Tensor,
    k: int,
    row_starts: torch.Tensor | None,
    row_ends: torch.Tensor | None,
    *,
    index_base: str,
    offsets: torch.Tensor | None,
    page_table: torch.Tensor | None,
    page_size: int | None,
    order: str,
    tie: str,
    values: torch.Tensor | None,
    out: torch.Tensor | None,
    workspace: torch.Tensor | None,
) -> None:
    """Checks one call's arguments. Works on fake tensors too: it reads no values and no addresses.

    Raises:
        TypeError: an argument that is not a tensor, or has the wrong dtype or type.
        ValueError: a wrong rank, shape, stride or device, an unknown option, or options that exclude each other.
    """
    _check_tensor("logits", logits, DTYPES)
    if logits.dim() != 2:
        raise ValueError(f"logits: got shape {_shape(logits)}, expected 2 dimensions, [M, W]")
    rows, width = logits.shape
    if width > MAX_WIDTH:
        raise ValueError(f"logits: got {width} columns, expected at most {MAX_WIDTH}: positions are int32")
    _check_last_contiguous("logits", logits)
    if isinstance(k, bool) or not isinstance(k, (int, torch.SymInt)):
        raise TypeError(f"k: got {type(k).__name__}, expected an int")
    if not 1 <= k <= MAX_K:
        raise ValueError(f"k: got {k}, expected 1 to {MAX_K}")
    for option, given, known in (("index_base", index_base, IndexBase), ("order", order, Order), ("tie", tie, Tie)):
        if given not in get_args(known):
            raise ValueError(f"{option}: got {given!r}, expected one of {', '.join(get_args(known))}")
    for name, vector in (("row_starts", row_starts), ("row_ends", row_ends), ("offsets", offsets)):
        if vector is not None:
            _check_vector(name, vector, rows, logits.device)
    _check_base(index_base, offsets, page_table, page_size, rows, logits.device)
    for name, result, dtype in (("out", out, torch.int32), ("values", values, torch.float32)):
        if result is not None:
            _check_result(name, result, dtype, rows, k, logits.device)
    if workspace is not None:
        _check_tensor("workspace", workspace, (torch.uint8,))
        _check_device("workspace", workspace, logits.device)
        if workspace.dim() != 1 or (workspace.numel() > 1 and workspace.stride(0) != 1):
            raise ValueError(f"workspace: got shape {_shape(workspace)}, expected a contiguous tensor of 1 dimension")


def is_aligned(logits: torch.Tensor) -> bool:
    """True when every row starts on a 16-byte boundary."""
    size = logits.element_size()
    stride = logits.stride(0) * size if logits.shape[0] > 1 else 0
    return not (logits.data_ptr() | stride) & 15


def _check_base(
    index_base: str,
    offsets: torch.Tensor | None,
    page_table: torch.Tensor | None,
    page_size: int | None,
    rows: int,
    device: torch.device,
) -> None:
    if (offsets is not None) != (index_base == "offset"):
        state = "a tensor" if offsets is not None else "None"
        raise ValueError(f"offsets: got {state} with index_base {index_base!r}, expected int32 [M] with 'offset' alone")
    if (page_table is not None) != (index_base == "page"):
        state = "a tensor" if page_table is not None else "None"
        raise ValueError(
            f"page_table: got {state} with index_base {index_base!r}, expected int32 [M, pages] with 'page' alone"
        )
    if page_table is None:
        if page_size is not None:
            raise ValueError(f"page_size: got {page_size} without a page_table, expected None")
        return
    if isinstance(page_size, bool) or not isinstance(page_size, int):
        raise TypeError(f"page_size: got {type(page_size).__name__}, expected an int with a page_table")
    if page_size < 1:
        raise ValueError(f"page_size: got {page_size}, expected at least 1")
    _check_tensor("page_table", page_table, (torch.int32,))
    _check_device("page_table", page_table, device)
    if page_table.dim() != 2 or page_table.shape[0] != rows:
        raise ValueError(f"page_table: got shape {_shape(page_table)}, expected [{rows}, pages]")
    _check_last_contiguous("page_table", page_table)


def _check_vector(name: str, vector: torch.Tensor, rows: int, device: torch.device) -> None:
    _check_tensor(name, vector, (torch.int32,))
    _check_device(name, vector, device)
    if tuple(vector.shape) not in ((rows,), (rows, 1)):
        raise ValueError(f"{name}: got shape {_shape(vector)}, expected [{rows}] or [{rows}, 1]")
    if rows > 1 and vector.stride(0) != 1:
        raise ValueError(f"{name}: got strides {tuple(vector.stride())}, expected a contiguous tensor")


def _check_result(name: str, result: torch.Tensor, dtype: torch.dtype, rows: int, k: int, device: torch.device) -> None:
    _check_tensor(name, result, (dtype,))
    _check_device(name, result, device)
    if tuple(result.shape) != (rows, k):
        raise ValueError(f"{name}: got shape {_shape(result)}, expected [{rows}, {k}]")
    _check_last_contiguous(name, result)
    if rows > 1 and result.stride(0) < k:
        raise ValueError(
            f"{name}: got strides {tuple(result.stride())}, expected a row stride of at least {k}: rows overlap"
        )


def _check_tensor(name: str, value: object, dtypes: tuple[torch.dtype, ...]) -> None:
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"{name}: got {type(value).__name__}, expected a torch.Tensor")
    if value.dtype not in dtypes:
        raise TypeError(f"{name}: got dtype {value.dtype}, expected {' or '.join(str(dtype) for dtype in dtypes)}")


def _check_device(name: str, tensor: torch.Tensor, device: torch.device) -> None:
    if tensor.device != device:
        raise ValueError(f"{name}: got a tensor on {tensor.device}, expected {device}, the device of logits")


def _check_last_contiguous(name: str, tensor: torch.Tensor) -> None:
    if tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
        raise ValueError(f"{name}: got strides {tuple(tensor.stride())}, expected a contiguous last dimension")


def _shape(tensor: torch.Tensor) -> list[int]:
    return list(tensor.shape)


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
    """The oracle: sorts every row by one integer a candidate, row chunk by row chunk. No backend shares its selection.

    Arguments as in ``top_k_per_row``; ``order="any"`` gives ascending indices.

    Returns:
        Indices int32 [M, k], -1 in unused slots, and their scores float32 [M, k], ``-inf`` there.
    """
    with torch.inference_mode(False), torch.no_grad():
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
        step = max(1, _ORACLE_ELEMENTS // width)
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
