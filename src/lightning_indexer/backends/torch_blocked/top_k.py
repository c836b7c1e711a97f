"""Top-k per row in PyTorch.

On a CPU each thread takes rows one by one. A rank in an even sample of the row gives a gate that somewhat more than k
scores reach, most likely; the positions that reach it are listed in one pass, and the exact cut is found among their
scores. Where the guess misses, the cut is found among all of them. Ties at the cut go by position.

On a GPU, and on a CPU where rows are short, whole blocks of rows are selected by one integer a candidate, with no
value read back: the fallback where no kernel runs.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from lightning_indexer.arch import Arch
from lightning_indexer.backends.torch_blocked.mqa_logits import _pool
from lightning_indexer.problems.checks import plain_arithmetic
from lightning_indexer.problems.top_k import MAX_WIDTH, TopKCall, TopKProblem, order_keys, rebase, windows

_NO_CANDIDATE = torch.iinfo(torch.int64).min


@dataclass(frozen=True, slots=True)
class TopKBlocks:
    """How rows are worked on.

    Attributes:
        row_by_row: one row at a time, a thread each; else blocks of rows.
        sample: scores that a row's gate is guessed from.
        block_elements: candidates of a block of rows.
    """

    row_by_row: bool
    sample: int
    block_elements: int


def heuristic(problem: TopKProblem, arch: Arch) -> TopKBlocks:
    """A CPU block's integers stay in cache; a GPU block fills the device (128 MiB of them)."""
    cpu = arch.vendor == "cpu"
    return TopKBlocks(cpu and problem.width > 2048, 2048, 2**16 if cpu else 2**24)


def neighbours(problem: TopKProblem, arch: Arch) -> list[TopKBlocks]:
    """What a tuning run measures: the heuristic's choice first, then those around it."""
    chosen = heuristic(problem, arch)
    return [chosen, *(replace(chosen, sample=sample) for sample in (1024, 4096))]


class TopK:
    """Runs every problem on every arch."""

    config = staticmethod(heuristic)
    neighbours = staticmethod(neighbours)

    def supports(self, problem: TopKProblem, arch: Arch) -> str | None:
        return None

    def launch(self, problem: TopKProblem, arch: Arch, config: TopKBlocks) -> Callable[[TopKCall], None]:
        return functools.partial(_run, problem, config)


def _run(problem: TopKProblem, config: TopKBlocks, call: TopKCall) -> None:
    logits = call.logits
    with plain_arithmetic(logits.device):
        start, end = windows(problem.rows, problem.width, call.row_starts, call.row_ends, logits.device)
        if not config.row_by_row:
            step = max(1, config.block_elements // max(1, problem.width))
            for row in range(0, problem.rows, step):
                _block(problem, call, slice(row, min(row + step, problem.rows)), start, end)
            return
        threads = min(torch.get_num_threads(), problem.rows)
        starts, ends = start.tolist(), end.tolist()
        work = functools.partial(_rows, problem, config, call, starts, ends, torch.is_inference_mode_enabled())
        # Interleaved: under a causal mask rows grow.
        parts = [range(part, problem.rows, 4 * threads) for part in range(min(4 * threads, problem.rows))]
        if threads <= 1:
            work(range(problem.rows))
        else:
            list(_pool(torch.get_num_threads()).map(work, parts))  # list() raises what a part raised


def _rows(
    problem: TopKProblem,
    config: TopKBlocks,
    call: TopKCall,
    starts: list[int],
    ends: list[int],
    inference: bool,
    rows: range,
) -> None:
    with torch.inference_mode() if inference else torch.no_grad():  # modes are per thread
        for m in rows:
            found, scores = _best(problem, config, call.logits[m, starts[m] : ends[m]].float())
            count = found.shape[0]
            indices = call.indices[m]
            indices[count:] = -1
            indices[:count] = _index(problem, call, m, starts[m], found)
            if call.values is not None:
                call.values[m, :count] = scores
                call.values[m, count:] = float("-inf")


def _best(problem: TopKProblem, config: TopKBlocks, scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Offsets of the best of one row's candidates, at most k, and their scores, in the call's order."""
    k = problem.k
    gate = _gate(k, config.sample, scores)
    reach = (scores >= gate).nonzero()[:, 0]  # no NaN does
    if reach.shape[0] < k and gate != -math.inf:
        valid = scores[~scores.isnan()]
        gate = valid.kthvalue(valid.shape[0] - k + 1).values.item() if valid.shape[0] > k else -math.inf
        reach = (scores >= gate).nonzero()[:, 0]
    listed = scores[reach]
    if reach.shape[0] > k:
        cut = listed.kthvalue(reach.shape[0] - k + 1).values
        taken = listed > cut
        ties = (listed == cut).nonzero()[:, 0]
        need = k - int(taken.sum())
        taken[ties[:need] if problem.tie == "smaller" else ties[ties.shape[0] - need :]] = True
        reach, listed = reach[taken], listed[taken]
    if problem.order == "score":
        if problem.tie == "larger":
            reach, listed = reach.flip(0), listed.flip(0)
        listed, order = listed.sort(descending=True, stable=True)
        reach = reach[order]
    return reach, listed


def _gate(k: int, size: int, scores: torch.Tensor) -> float:
    """A score that somewhat more than k of the candidates reach, most likely: a rank in an even sample."""
    count = scores.shape[0]
    if count <= 2 * k:
        return -math.inf
    sample = scores[:: max(1, count // size)].nan_to_num(nan=-math.inf, posinf=math.inf, neginf=-math.inf)
    # Expected rank of the k-th best; four standard deviations of the count below the gate on top of it.
    expected = k * sample.shape[0] / count
    rank = int((2 + math.sqrt(4 + expected)) ** 2) + 1
    if rank >= sample.shape[0]:
        return -math.inf
    return float(sample.kthvalue(sample.shape[0] - rank + 1).values)


def _index(problem: TopKProblem, call: TopKCall, m: int, start: int, found: torch.Tensor) -> torch.Tensor:
    if problem.index_base == "absolute":
        return found + start
    if problem.index_base == "offset":
        assert call.offsets is not None
        return found + call.offsets[m]
    if problem.index_base == "page":
        assert call.page_table is not None
        return call.page_table[m][found // problem.page_size] * problem.page_size + found % problem.page_size
    return found


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
