"""Top-k per row in PyTorch and, on a CPU, NumPy.

On a CPU each thread takes blocks of rows. A rank in an even sample of a row gives a gate that somewhat more than k
scores reach, most likely; the positions that reach it are listed in one pass, and the exact cut is found among their
scores. Where the guess misses, the cut of all of the row's scores is the gate. Ties at the cut go by position. NumPy's
comparisons, sorts and lists take a third of the time of PyTorch's there.

On a GPU, on a CPU where rows are short, and without NumPy, blocks of rows are selected by one integer a candidate, with
no value read back: the fallback where no kernel runs.
"""

from __future__ import annotations

import functools
import importlib.util
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from lightning_indexer.arch import Arch
from lightning_indexer.backends.torch_blocked.mqa_logits import _pool
from lightning_indexer.problems.checks import plain_arithmetic
from lightning_indexer.problems.top_k import MAX_WIDTH, TopKCall, TopKProblem, order_keys, rebase, windows

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Array = NDArray[Any]

_NO_CANDIDATE = torch.iinfo(torch.int64).min


@dataclass(frozen=True, slots=True)
class TopKBlocks:
    """How rows are worked on.

    Attributes:
        spacing: columns between two scores of the sample that a row's gate is guessed from; 0 guesses none.
        block_elements: candidates of a block of rows.
    """

    spacing: int
    block_elements: int


def heuristic(problem: TopKProblem, arch: Arch) -> TopKBlocks:
    """A CPU block is large enough that threads do not wait for Python, a GPU block fills the device (128 MiB)."""
    if arch.vendor != "cpu":
        return TopKBlocks(0, 2**24)
    if importlib.util.find_spec("numpy") is None:
        return TopKBlocks(0, 2**16)
    # A sample of 1024, of which at least 32 lie above the cut: the gate is at most 2 k then.
    return TopKBlocks(max(1, min(problem.width // 1024, problem.k // 32)), 2**20)


def neighbours(problem: TopKProblem, arch: Arch) -> list[TopKBlocks]:
    """What a tuning run measures: the heuristic's choice first, then those around it."""
    chosen = heuristic(problem, arch)
    others = [replace(chosen, block_elements=chosen.block_elements * factor // 4) for factor in (1, 2, 8, 16)]
    others += [replace(chosen, spacing=spacing) for spacing in (8, 32) if chosen.spacing]
    return [chosen, *(config for config in others if config != chosen)]


class TopK:
    """Runs every problem on every arch."""

    config = staticmethod(heuristic)
    neighbours = staticmethod(neighbours)

    def supports(self, problem: TopKProblem, arch: Arch) -> str | None:
        return None

    def launch(self, problem: TopKProblem, arch: Arch, config: TopKBlocks) -> Callable[[TopKCall], None]:
        return functools.partial(_run, problem, config)


def _run(problem: TopKProblem, config: TopKBlocks, call: TopKCall) -> None:
    step = max(1, config.block_elements // max(1, problem.width))
    with plain_arithmetic(call.logits.device):
        start, end = windows(problem.rows, problem.width, call.row_starts, call.row_ends, call.logits.device)
        if not config.spacing:
            for row in range(0, problem.rows, step):
                _block(problem, call, slice(row, min(row + step, problem.rows)), start, end)
            return
        threads = torch.get_num_threads()
        step = max(1, min(step, -(-problem.rows // threads)))
        work = functools.partial(_gated, problem, config, call, start, end, step, torch.is_inference_mode_enabled())
        rows = range(0, problem.rows, step)
        if threads == 1 or len(rows) == 1:
            for row in rows:
                work(row)
        else:
            list(_pool(threads).map(work, rows))  # list() raises what a block raised


def _gated(
    problem: TopKProblem,
    config: TopKBlocks,
    call: TopKCall,
    start: torch.Tensor,
    end: torch.Tensor,
    step: int,
    inference: bool,
    row: int,
) -> None:
    with torch.inference_mode() if inference else torch.no_grad():  # modes are per thread
        rows = slice(row, min(row + step, problem.rows))
        found, scores = _best(problem, config.spacing, call.logits[rows], start[rows], end[rows])
        call.indices[rows] = rebase(
            found, rows, start[rows], problem.index_base, call.offsets, call.page_table, problem.page_size
        ).to(torch.int32)
        if call.values is not None:
            call.values[rows] = scores


def _best(
    problem: TopKProblem, spacing: int, logits: torch.Tensor, start: torch.Tensor, end: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """[rows, k] positions, int64, -1 where there are fewer, and their scores, float32, ``-inf`` there."""
    import numpy as np

    rows, k = logits.shape[0], problem.k
    first, last = int(start.min()), int(end.max())
    scores = logits[:, first:last].float()
    lo, hi = (start - first).numpy()[:, None], (end - first).numpy()[:, None]
    reach, listed, counts = _list(scores, lo, hi, k, spacing)

    # The exact cut of every row, among what is listed of it.
    taken = np.ones(listed.shape, dtype=bool)
    if int(counts.max(initial=0)) > k:
        slots = np.arange(counts.max())
        table = np.full((rows, slots.size), -np.inf, dtype=np.float32)
        table[slots < counts[:, None]] = listed
        table.partition(slots.size - k, axis=1)
        cut = np.where(counts > k, table[:, -k], np.float32(-np.inf))
        taken = listed >= np.repeat(cut, counts)
        stop = np.cumsum(counts)
        for row in np.flatnonzero(np.add.reduceat(taken, stop[counts > 0] - counts[counts > 0], dtype=int) > k):
            row = np.flatnonzero(counts)[row]
            part = slice(stop[row] - counts[row], stop[row])
            ties = np.flatnonzero(listed[part] == cut[row])
            surplus = int(taken[part].sum()) - k
            taken[part][ties[ties.size - surplus :] if problem.tie == "smaller" else ties[:surplus]] = False
        reach, listed = reach[taken], listed[taken]
        counts = np.minimum(counts, k)

    filled = np.arange(k) < counts[:, None]
    column = reach - np.repeat(np.arange(rows) * max(1, last - first), counts) + first
    found: Array = column.reshape(rows, k) if filled.all() else np.full((rows, k), -1, dtype=np.int64)
    values: Array = listed.reshape(rows, k) if filled.all() else np.full((rows, k), -np.inf, dtype=np.float32)
    if not filled.all():
        found[filled], values[filled] = column, listed
    if problem.order == "score":
        step = 1 if problem.tie == "smaller" else -1
        # NaN sorts behind everything: unused slots stay last.
        order = np.argsort(np.where(filled, -values, np.float32("nan"))[:, ::step], axis=1, kind="stable")
        found, values = (np.take_along_axis(table[:, ::step], order, axis=1) for table in (found, values))
    return torch.from_numpy(found), torch.from_numpy(values)


def _list(table: torch.Tensor, lo: Array, hi: Array, k: int, spacing: int) -> tuple[Array, Array, Array]:
    """Of a block [rows, width], flat and in order: what reaches each row's gate, its scores, and how many a row.

    All of the row's candidates where they are at most k, else at least k of them.
    """
    import numpy as np

    rows, width = table.shape
    stride = table.stride(0) if rows > 1 else width
    scores = table.numpy()
    column = np.arange(width)
    same = bool((lo == 0).all() and (hi == width).all())
    sample = scores[:, ::spacing].copy()
    if not same:
        inside = (column[::spacing] >= lo) & (column[::spacing] < hi)
        sample[~inside] = -np.inf
    # Expected rank of the k-th best; four standard deviations of the count below the gate on top of it.
    rank = int((2 + math.sqrt(4 + k / spacing)) ** 2) + 1
    gate = np.full((rows, 1), -np.inf, dtype=np.float32)
    if rank <= sample.shape[1]:
        sample.partition(sample.shape[1] - rank, axis=1)
        gate = sample[:, -rank, None]
        if np.isnan(sample).any():
            # NaN sorts above everything and is below it.
            sample[np.isnan(sample)] = -np.inf
            sample.partition(sample.shape[1] - rank, axis=1)
    reach = scores >= gate  # no NaN does
    if not same:
        reach &= (column >= lo) & (column < hi)
    flat = np.flatnonzero(reach)
    bounds = np.arange(rows + 1) * width
    counts = np.diff(np.searchsorted(flat, bounds))
    missed = np.flatnonzero((counts < k) & (gate[:, 0] > -np.inf))
    for row in missed:
        part = scores[row, lo[row, 0] : hi[row, 0]]
        valid = part[~np.isnan(part)]
        exact = np.partition(valid, valid.size - k)[valid.size - k] if valid.size > k else np.float32(-np.inf)
        reach[row] = (scores[row] >= exact) & (column >= lo[row, 0]) & (column < hi[row, 0])
    if missed.size:
        flat = np.flatnonzero(reach)
        counts = np.diff(np.searchsorted(flat, bounds))
    storage = table.as_strided(((rows - 1) * stride + width if width else 0,), (1,)).numpy()
    return flat, storage[flat + np.repeat(np.arange(rows) * (stride - width), counts)], counts


def _block(problem: TopKProblem, call: TopKCall, rows: slice, start: torch.Tensor, end: torch.Tensor) -> None:
    """A block of rows: the k largest of one unique integer a candidate, key << 32 | the better index."""
    width, k = problem.width, problem.k
    kept = min(k, width)
    call.indices[rows, kept:] = -1
    if call.values is not None:
        call.values[rows, kept:] = float("-inf")
    if kept == 0:
        return
    logits = call.logits[rows]
    position = torch.arange(width, device=logits.device)
    larger = problem.tie == "larger"
    keys = order_keys(logits).long()
    inside = (position >= start[rows, None]) & (position < end[rows, None]) & (keys != -(2**31))
    ranked = torch.where(inside, (keys << 32) | (position if larger else MAX_WIDTH - position), _NO_CANDIDATE)
    best = ranked.topk(kept, dim=1).values
    low = best & 0xFFFFFFFF
    found = torch.where(best != _NO_CANDIDATE, low if larger else MAX_WIDTH - low, -1)
    if problem.order != "score":
        found = torch.where(found < 0, width, found).sort(dim=1).values
        found = torch.where(found == width, -1, found)
    call.indices[rows, :kept] = rebase(
        found, rows, start[rows], problem.index_base, call.offsets, call.page_table, problem.page_size
    ).to(torch.int32)
    if call.values is not None:
        scores = logits.gather(1, found.clamp(min=0)).float()
        call.values[rows, :kept] = torch.where(found >= 0, scores, float("-inf"))
