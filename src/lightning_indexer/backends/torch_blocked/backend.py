"""``torch-blocked``: the formula in PyTorch, block by block. The CPU backend, and the fallback everywhere.

A block is ``block_rows`` query rows by ``block_keys`` keys. Per block: one GEMM ``[rows*H, D] x [D, keys]``, ReLU in
place, one batched GEMV over the heads, the key scale, the mask. On a CPU the block's scores stay in cache, which is the
gain over a plain einsum; the work is shared by PyTorch's own threads. Blocks that no window touches are skipped.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch

from lightning_indexer.arch import Arch
from lightning_indexer.backends.torch_blocked.config import BlockConfig, heuristic
from lightning_indexer.problem import Operands, Problem


class TorchBlocked:
    name = "torch-blocked"
    summary = "PyTorch, block by block; any device, any H and D; exact float32"

    def missing(self) -> str | None:
        return None

    def supports(self, problem: Problem, arch: Arch) -> str | None:
        return None

    def prepare(self, problem: Problem, arch: Arch) -> Callable[[Operands, torch.Tensor], None]:
        return functools.partial(_run, problem, heuristic(problem, arch))


@torch.no_grad()
def _run(problem: Problem, config: BlockConfig, operands: Operands, out: torch.Tensor) -> None:
    # Under the caller's autocast the products would be bfloat16.
    with torch.autocast(out.device.type, enabled=False):
        _run_blocks(problem, config, operands, out)


def _run_blocks(problem: Problem, config: BlockConfig, operands: Operands, out: torch.Tensor) -> None:
    q, k, kv_scale, weights, ks, ke = operands
    rows, keys = problem.rows, problem.keys
    lo, hi = ks.clamp(min=0), ke.clamp(max=keys)  # an empty window has hi <= lo
    touched = _Touched(lo, hi, config.block_rows, config.block_keys, keys)
    scores = torch.empty((config.block_rows * problem.heads, config.block_keys), dtype=torch.float32, device=q.device)

    for panel in range(0, keys, config.panel_keys):
        panel_stop = min(panel + config.panel_keys, keys)
        k_panel = k[panel:panel_stop].float()
        for row in range(0, rows, config.block_rows):
            row_stop = min(row + config.block_rows, rows)
            blocks, skipped = touched.split(row, panel, panel_stop)
            if problem.clean_logits:
                for key in skipped:
                    out[row:row_stop, key : min(key + config.block_keys, keys)] = float("-inf")
            if not blocks:
                continue
            q_rows = q[row:row_stop].float().reshape(-1, problem.head_dim)
            w_rows = weights[row:row_stop, None, :]
            store = _Store(problem, out[row:row_stop], ks[row:row_stop], lo[row:row_stop], hi[row:row_stop])
            for key in blocks:
                key_stop = min(key + config.block_keys, keys)
                block = scores[: q_rows.shape[0], : key_stop - key]
                torch.mm(q_rows, k_panel[key - panel : key_stop - panel].t(), out=block)
                block.relu_()
                logits = torch.bmm(w_rows, block.view(row_stop - row, problem.heads, -1))[:, 0]
                logits *= kv_scale[key:key_stop]
                logits += 0.0  # -0.0 becomes +0.0
                store.block(logits, key, key_stop, inside=touched.inside(row, key))
            store.finish()


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
        self, problem: Problem, out: torch.Tensor, ks: torch.Tensor, lo: torch.Tensor, hi: torch.Tensor
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
