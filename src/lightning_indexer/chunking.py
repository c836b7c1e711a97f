"""The chunk planner: which query rows and which keys go into each call, under a memory budget.

A prefill step scores M query rows against N gathered keys and holds M * N logits at once. vLLM bounds that product:
chunks are sized so that M * N * 4 bytes stay under ``VLLM_SPARSE_INDEXER_MAX_LOGITS_MB``, 512 by default. The rules
here are the same: requests are packed in order while their keys fit the gather workspace and the logits fit the budget;
a request that passes the logits budget alone is cut over its query rows, never over its keys. Without a logits budget,
for calls that select as they score and hold no logits, the gather workspace alone bounds a chunk.

With the default budget a request of 32,768 keys becomes chunks of (4096, 32768), one of 131,072 keys (1024, 131072).

Planning is plain Python on lengths; only :meth:`Chunk.windows` makes tensors.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

# Window tensors are int32, and a window may end one past the last key.
MAX_KEYS = 2**31 - 1

_REQUEST_FORM = re.compile(r"([0-9]+):([0-9]+)")


@dataclass(frozen=True, slots=True)
class Request:
    """Lengths of one request, in tokens.

    Lengths may be given as NumPy's integers or as tensors of one element, which are read back; they are kept as ints.

    Attributes:
        context: tokens already in the KV cache before this step.
        new: tokens of this step, each one a query row.

    Raises:
        TypeError: a length is not an int.
        ValueError: a length is negative.
    """

    context: int
    new: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "context", _as_int("context", self.context, 0))
        object.__setattr__(self, "new", _as_int("new", self.new, 0))


@dataclass(frozen=True, slots=True)
class Slice:
    """The part of one request that a chunk holds: some of its query rows, all of its keys.

    Attributes:
        request: index of the request in the sequence that was planned.
        context: tokens of the request before its new ones.
        row_start, row_stop: query rows, counted within the request's new tokens; stop is exclusive.
        token_start: row of the slice's first query in the batch's packed q.
        key_start: where the request's keys begin in the chunk's gathered buffer.
        keys: how many keys the request has there.
    """

    request: int
    context: int
    row_start: int
    row_stop: int
    token_start: int
    key_start: int
    keys: int

    @property
    def rows(self) -> int:
        """Query rows of the slice."""
        return self.row_stop - self.row_start


@dataclass(frozen=True, slots=True)
class Chunk:
    """One call: query rows ``[token_start, token_stop)`` of the packed q against ``keys`` gathered keys.

    Attributes:
        slices: one or more slices, in the order of the requests; their keys lie one after the other in the buffer.
        compress_ratio: tokens that share one key.
        gather: False where the previous chunk gathered exactly these keys already, because one request was cut over
            its rows; the caller can then keep the buffer.
    """

    slices: tuple[Slice, ...]
    compress_ratio: int = 1
    gather: bool = True

    @property
    def rows(self) -> int:
        """M: query rows of the chunk."""
        return sum(part.rows for part in self.slices)

    @property
    def keys(self) -> int:
        """N: keys of the chunk's gathered buffer."""
        return sum(part.keys for part in self.slices)

    @property
    def longest(self) -> int:
        """Keys of the chunk's longest request, which no window passes: ``max_seqlen_k``."""
        return max(part.keys for part in self.slices)

    @property
    def token_start(self) -> int:
        """Row of the chunk's first query in the packed q."""
        return self.slices[0].token_start

    @property
    def token_stop(self) -> int:
        """One past the row of the chunk's last query in the packed q."""
        return self.token_start + self.rows

    def windows(self, device: torch.device | str | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """The windows of the chunk's rows, as ``cu_seqlen_ks`` and ``cu_seqlen_ke``.

        Row i of a request starts at the request's ``key_start`` and ends before
        ``key_start + (context + 1 + i) // compress_ratio``: a causal triangle, whose first rows may be empty.

        Args:
            device: where the tensors go; None means torch's default device.

        Returns:
            ``ks`` and ``ke``, both int32 [rows], contiguous, with ``0 <= ks <= ke <= keys``.
        """
        # Lengths are host data: the arithmetic stays there, and both tensors travel in one copy.
        lengths, key_starts, first_positions = [], [], []
        done = 0
        for part in self.slices:
            lengths.append(part.rows)
            key_starts.append(part.key_start)
            first_positions.append(part.context + 1 + part.row_start - done)
            done += part.rows
        repeats = torch.tensor(lengths, dtype=torch.int64, device="cpu")
        per_slice = torch.tensor([key_starts, first_positions], dtype=torch.int64, device="cpu")
        ks, first = per_slice.repeat_interleave(repeats, dim=1, output_size=done).unbind()
        ke = ks + (first + torch.arange(done, dtype=torch.int64, device="cpu")) // self.compress_ratio
        target = torch.get_default_device() if device is None else device
        both = torch.stack((ks, ke)).to(torch.int32).to(target)
        return both[0], both[1]


def plan_chunks(
    requests: Sequence[Request | tuple[int, int]] | torch.Tensor | Any,
    *,
    max_logits_bytes: int | None = 512 * 2**20,
    max_gather_keys: int | None = None,
    compress_ratio: int = 1,
    bytes_per_logit: int = 4,
) -> list[Chunk]:
    """Cuts a prefill batch into chunks whose logits and keys stay under their budgets.

    A request has ``(context + new) // compress_ratio`` keys. In order, requests share a chunk while the sum of their
    keys is at most ``max_gather_keys`` and ``rows * keys * bytes_per_logit`` is at most ``max_logits_bytes``. A request
    whose own logits pass the budget gets chunks of its own, each with all of its keys and as many rows as fit. Requests
    without new tokens are left out. Over all chunks every query row appears once, in the order of the packed q.

    The budget counts M * N logits. The padding of result rows to an aligned stride comes on top of it.

    Source: the chunking behind vLLM's ``VLLM_SPARSE_INDEXER_MAX_LOGITS_MB``.

    Args:
        requests: :class:`Request` or ``(context, new)``, in the order of their rows in the packed q; or a tensor or
            NumPy array [requests, 2] of integers, which is read back once.
        max_logits_bytes: budget for the logits of one chunk, in bytes; None sets none, for ``fp8_mqa_topk``, whose
            memory does not grow with M * N. Requests are then never cut.
        max_gather_keys: rows of the gather workspace; None sets no limit below 2**31 - 1, which int32 windows need.
        compress_ratio: tokens that share one key.
        bytes_per_logit: 4 for float32 logits, 2 for bfloat16.

    Returns:
        The chunks in order; an empty list where no request has new tokens.

    Raises:
        TypeError: an argument or a length that is not an int, or a request of another form.
        ValueError: a negative length; a budget or ratio below 1; ``bytes_per_logit`` other than 2 or 4; a request whose
            keys pass ``max_gather_keys`` or 2**31 - 1, or whose single row of logits passes ``max_logits_bytes``.
    """
    if max_logits_bytes is not None:
        max_logits_bytes = _as_int("max_logits_bytes", max_logits_bytes, 1)
    if max_gather_keys is not None:
        max_gather_keys = _as_int("max_gather_keys", max_gather_keys, 1)
    compress_ratio = _as_int("compress_ratio", compress_ratio, 1)
    if compress_ratio > MAX_KEYS:
        raise ValueError(f"compress_ratio: got {compress_ratio}, expected at most {MAX_KEYS}")
    bytes_per_logit = _as_int("bytes_per_logit", bytes_per_logit, 1)
    if bytes_per_logit not in (2, 4):
        raise ValueError(f"bytes_per_logit: got {bytes_per_logit}, expected 2 (bfloat16) or 4 (float32)")
    key_budget = MAX_KEYS if max_gather_keys is None else min(max_gather_keys, MAX_KEYS)
    logit_budget = math.inf if max_logits_bytes is None else max_logits_bytes // bytes_per_logit

    chunks: list[Chunk] = []
    pending: list[Slice] = []
    pending_rows = pending_keys = 0
    token = 0

    def flush() -> None:
        nonlocal pending_rows, pending_keys
        if pending:
            chunks.append(Chunk(tuple(pending), compress_ratio))
            pending.clear()
            pending_rows = pending_keys = 0

    for index, item in enumerate(_as_pairs(requests)):
        request = _as_request(index, item)
        if request.new == 0:
            continue
        keys = (request.context + request.new) // compress_ratio
        if keys > MAX_KEYS:
            raise ValueError(f"requests[{index}]: got {keys} keys, expected at most {MAX_KEYS}: positions are int32")
        if keys > key_budget:
            raise ValueError(
                f"max_gather_keys: got {max_gather_keys}, expected at least {keys}, the keys of requests[{index}]"
            )
        if keys > logit_budget:
            raise ValueError(
                f"max_logits_bytes: got {max_logits_bytes}, expected at least {keys * bytes_per_logit}, "
                f"one row of {keys} logits of requests[{index}]"
            )

        if request.new * keys > logit_budget:
            flush()
            step = int(logit_budget) // keys
            for start in range(0, request.new, step):
                stop = min(start + step, request.new)
                part = Slice(index, request.context, start, stop, token + start, 0, keys)
                chunks.append(Chunk((part,), compress_ratio, gather=start == 0))
        else:
            rows_after, keys_after = pending_rows + request.new, pending_keys + keys
            if keys_after > key_budget or rows_after * keys_after > logit_budget:
                flush()
            pending.append(Slice(index, request.context, 0, request.new, token, pending_keys, keys))
            pending_rows += request.new
            pending_keys += keys
        token += request.new
    flush()
    return chunks


def parse_requests(text: str) -> list[Request]:
    """Reads a batch from the command line: ``"32768:4096,0:512"`` is two requests, each ``context:new`` in tokens.

    Raises:
        ValueError: an item of another form; the message quotes it.
    """
    parsed = []
    for item in text.split(","):
        match = _REQUEST_FORM.fullmatch(item.strip())
        if match is None:
            raise ValueError(
                f"requests: got {item.strip()!r} in {text!r}, expected CONTEXT:NEW items joined by commas, "
                "such as 32768:4096,0:512"
            )
        parsed.append(Request(int(match[1]), int(match[2])))
    return parsed


def _as_pairs(requests: Any) -> Sequence[Any]:
    """A list of lengths out of a tensor or an array; anything else as it is."""
    if not hasattr(requests, "tolist"):
        if not isinstance(requests, Iterable):
            raise TypeError(f"requests: got {type(requests).__name__}, expected a sequence of (context, new)")
        return requests  # type: ignore[return-value]
    if getattr(requests, "is_meta", False):
        raise ValueError("requests: got a tensor on meta, expected one that holds its lengths")
    shape, dtype = list(requests.shape), str(requests.dtype)
    if len(shape) != 2 or shape[1] != 2:
        raise ValueError(f"requests: got shape {shape}, expected [requests, 2], each row (context, new)")
    if "int" not in dtype:
        raise TypeError(f"requests: got dtype {dtype}, expected integers")
    return [tuple(pair) for pair in requests.tolist()]


def _as_request(index: int, item: Any) -> Request:
    if isinstance(item, Request):
        return item
    if hasattr(item, "tolist") and list(item.shape) == [2]:
        item = tuple(item)
    if not isinstance(item, (tuple, list)) or len(item) != 2:
        raise TypeError(f"requests[{index}]: got {item!r}, expected a Request or a (context, new) tuple")
    try:
        return Request(*item)
    except (TypeError, ValueError) as error:
        raise type(error)(f"requests[{index}].{error}") from None


def _as_int(name: str, value: Any, least: int) -> int:
    """The int that an int, an integer of NumPy's or an integer tensor of one element stands for; a bool is none."""
    try:
        if isinstance(value, bool) or str(getattr(value, "dtype", "")).endswith("bool"):
            raise TypeError
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{name}: got {value!r} of type {type(value).__name__}, expected an int") from None
    if number < least:
        raise ValueError(f"{name}: got {number}, expected an int of at least {least}")
    return number
