"""FP8 MQA logits in PyTorch, block by block.

A block is ``block_rows`` query rows by ``block_keys`` keys. Per block: one GEMM ``[rows*H, D] x [D, keys]``, ReLU in
place, one batched GEMV over the heads, the key scale, the mask. On a CPU the block's scores stay in cache, which is the
gain over a plain einsum, and each thread computes whole row blocks. Blocks that no window touches are skipped.
"""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch

from lightning_indexer.arch import Arch
from lightning_indexer.backends.torch_blocked.config import BlockConfig, heuristic, neighbours
from lightning_indexer.problems.mqa_logits import MqaLogitsCall, MqaLogitsProblem


class MqaLogits:
    """Runs every problem on every arch."""

    config = staticmethod(heuristic)
    neighbours = staticmethod(neighbours)

    def supports(self, problem: MqaLogitsProblem, arch: Arch) -> str | None:
        return None

    def launch(self, problem: MqaLogitsProblem, arch: Arch, config: BlockConfig) -> Callable[[MqaLogitsCall], None]:
        return functools.partial(_run, problem, config)


@torch.no_grad()
def _run(problem: MqaLogitsProblem, config: BlockConfig, call: MqaLogitsCall) -> None:
    threads = torch.get_num_threads() if call.q.device.type == "cpu" else 1
    work = _Work(problem, config, call)
    for panel in range(0, problem.keys, config.panel_keys):
        work.load_panel(panel)
        starts = range(0, problem.rows, config.block_rows)
        pool = _threads(threads) if threads > 1 and len(starts) > 1 else None
        if pool is None:
            for row in starts:
                work.row_block(row)
        else:
            list(pool.map(work.row_block, starts))  # list() raises what a block raised


def _threads(threads: int) -> ThreadPoolExecutor | None:
    """The pool; None where the interpreter is ending, when no pool takes work or starts threads."""
    return _pool(threads) if threading.main_thread().is_alive() else None


@functools.cache
def _pool(threads: int) -> ThreadPoolExecutor:
    """Threads that each run PyTorch on one core.

    A block is a handful of small operations. Split over cores one by one, each ends in a barrier, and where another
    process holds one of the cores, every barrier waits for it: 6 to 14 times slower than whole blocks a thread.
    """
    started = threading.Barrier(threads)
    pool = ThreadPoolExecutor(threads, "torch-blocked")

    def start() -> None:
        torch.set_num_threads(1)  # of this thread, and of threads made later: undone below
        started.wait()

    for future in [pool.submit(start) for _ in range(threads)]:
        future.result()
    torch.set_num_threads(threads)
    return pool


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_pool.cache_clear)  # a child has none of its parent's threads


class _Work:
    """What the row blocks of one call share. They are independent: the result does not depend on the threads."""

    def __init__(self, problem: MqaLogitsProblem, config: BlockConfig, call: MqaLogitsCall) -> None:
        self.problem, self.config, self.call, self.out = problem, config, call, call.result
        self.lo = call.ks.clamp(min=0)
        self.hi = call.ke.clamp(max=problem.keys)  # an empty window has hi <= lo
        self.touched = _Touched(self.lo, self.hi, config.block_rows, config.block_keys, problem.keys)
        # A result that was made under inference mode is written under it.
        self.inference = torch.is_inference_mode_enabled() or self.out.is_inference()
        self.local = threading.local()

    def load_panel(self, panel: int) -> None:
        self.panel, self.panel_stop = panel, min(panel + self.config.panel_keys, self.problem.keys)
        self.k_panel = self.call.k[panel : self.panel_stop].float()

    def row_block(self, row: int) -> None:
        # Modes are per thread. Under the caller's autocast the products would be bfloat16.
        mode = torch.inference_mode() if self.inference else torch.no_grad()
        with mode, torch.autocast(self.out.device.type, enabled=False):
            self._row_block(row)

    def _row_block(self, row: int) -> None:
        problem, config, panel = self.problem, self.config, self.panel
        row_stop = min(row + config.block_rows, problem.rows)
        rows = slice(row, row_stop)
        out = self.out[rows]
        blocks, skipped = self.touched.split(row, panel, self.panel_stop)
        if problem.clean_logits:
            for key in skipped:
                out[:, key : min(key + config.block_keys, problem.keys)] = float("-inf")
        if not blocks:
            return
        q, _, kv_scale, weights, ks, _ = self.call[:6]
        q_rows = q[rows].float().reshape(-1, problem.head_dim)
        w_rows = weights[rows, None, :]
        store = _Store(problem, out, ks[rows], self.lo[rows], self.hi[rows])
        scores = self._scores()
        for key in blocks:
            key_stop = min(key + config.block_keys, problem.keys)
            block = scores[: q_rows.shape[0], : key_stop - key]
            torch.mm(q_rows, self.k_panel[key - panel : key_stop - panel].t(), out=block)
            block.relu_()
            logits = torch.bmm(w_rows, block.view(row_stop - row, problem.heads, -1))[:, 0]
            logits *= kv_scale[key:key_stop]
            logits += 0.0  # -0.0 becomes +0.0
            store.block(logits, key, key_stop, inside=self.touched.inside(row, key))
        store.finish()

    def _scores(self) -> torch.Tensor:
        """This thread's [rows*H, keys] buffer of one block."""
        if not hasattr(self.local, "scores"):
            shape = (self.config.block_rows * self.problem.heads, self.config.block_keys)
            self.local.scores = torch.empty(shape, dtype=torch.float32, device=self.out.device)
        scores: torch.Tensor = self.local.scores
        return scores


class _Touched:
    """Which (row block, key block) pairs some window touches, and which lie wholly inside every row's window.

    On a GPU this reads the windows back once. While a graph is captured that is not allowed, so every block counts as
    touched and none as inside: the same result, without the saving.
    """

    def __init__(self, lo: torch.Tensor, hi: torch.Tensor, block_rows: int, block_keys: int, keys: int) -> None:
        self.block_rows, self.block_keys = block_rows, block_keys
        self.table: list[list[int]] | None = None
        if lo.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return
        start = torch.arange(0, keys, block_keys, device=lo.device)
        stop = (start + block_keys).clamp(max=keys)
        table = []
        for row in range(0, lo.shape[0], block_rows):
            first, end = lo[row : row + block_rows, None], hi[row : row + block_rows, None]
            any_row = ((first < stop) & (end > start) & (first < end)).any(0)
            all_rows = ((first <= start) & (end >= stop)).all(0)
            table.append(any_row.to(torch.int8) + all_rows.to(torch.int8))
        self.table = torch.stack(table).tolist()

    def split(self, row: int, panel: int, panel_stop: int) -> tuple[list[int], list[int]]:
        """First keys of the blocks of [panel, panel_stop): those that a window of these rows touches, the others."""
        starts = range(panel, panel_stop, self.block_keys)
        if self.table is None:
            return list(starts), []
        states = self.table[row // self.block_rows]
        touched = [key for key in starts if states[key // self.block_keys]]
        return touched, [key for key in starts if not states[key // self.block_keys]]

    def inside(self, row: int, key: int) -> bool:
        return self.table is not None and self.table[row // self.block_rows][key // self.block_keys] == 2


class _Store:
    """Writes the blocks of one row block into the result: in place, or shifted by each row's ``ks`` if compressed."""

    def __init__(
        self, problem: MqaLogitsProblem, out: torch.Tensor, ks: torch.Tensor, lo: torch.Tensor, hi: torch.Tensor
    ) -> None:
        self.out, self.ks, self.lo, self.hi = out, ks[:, None].long(), lo[:, None], hi[:, None]
        self.clean, self.width = problem.clean_logits, problem.width
        self.shifted: torch.Tensor | None = None
        if problem.compressed:
            # Positions outside the window are scattered into one more column, which is dropped.
            self.shifted = torch.empty((out.shape[0], self.width + 1), dtype=out.dtype, device=out.device)
            self.shifted[:, : self.width] = out

    def block(self, logits: torch.Tensor, key: int, key_stop: int, *, inside: bool) -> None:
        positions = (
            torch.arange(key, key_stop, device=logits.device) if self.shifted is not None or not inside else None
        )
        if self.shifted is not None:
            assert positions is not None
            columns = positions - self.ks
            valid = (positions >= self.lo) & (positions < self.hi) & (columns < self.width)
            self.shifted.scatter_(1, torch.where(valid, columns, self.width), logits.to(self.out.dtype))
            return
        if self.clean and positions is not None:
            logits = torch.where((positions >= self.lo) & (positions < self.hi), logits, float("-inf"))
        self.out[:, key:key_stop] = logits

    def finish(self) -> None:
        if self.shifted is not None:
            self.out.copy_(self.shifted[:, : self.width])
