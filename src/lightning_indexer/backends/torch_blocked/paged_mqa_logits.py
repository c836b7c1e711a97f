"""FP8 MQA logits over a paged cache in PyTorch, block of pages by block of pages.

Per block: the pages that the table names, widened to float32, one GEMM ``[rows * H, D] x [D, keys]`` for all rows of a
sequence, ReLU in place, one batched GEMV over the heads, the scale, the mask. On a CPU each thread takes whole blocks,
and only pages that some row sees are read. On a GPU no length is read back: blocks are of the whole batch, as wide as
the result, and pages that no row sees are replaced by block 0. The fallback where no kernel runs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from lightning_indexer.arch import Arch
from lightning_indexer.backends.torch_blocked.mqa_logits import _threads
from lightning_indexer.fp4 import dequantize_fp4
from lightning_indexer.problems.checks import plain_arithmetic
from lightning_indexer.problems.paged_mqa_logits import PagedMqaLogitsCall, PagedMqaLogitsProblem, row_lengths


@dataclass(frozen=True, slots=True)
class PageBlocks:
    """How much is worked on at a time.

    Attributes:
        scores: elements of a block's [rows * H, keys].
        keys: the most keys of a block; at least a page.
    """

    scores: int
    keys: int


def heuristic(problem: PagedMqaLogitsProblem, arch: Arch) -> PageBlocks:
    """A CPU block's scores stay in the L2 of two cores (2 MiB); a GPU block fills the device (256 MiB)."""
    return PageBlocks(2**19, 2048) if arch.vendor == "cpu" else PageBlocks(2**26, 8192)


def neighbours(problem: PagedMqaLogitsProblem, arch: Arch) -> list[PageBlocks]:
    """What a tuning run measures: the heuristic's choice first, then those around it."""
    chosen = heuristic(problem, arch)
    others = [replace(chosen, scores=chosen.scores * factor // 2) for factor in (1, 4)]
    others += [replace(chosen, keys=chosen.keys * factor // 2) for factor in (1, 4)]
    return [chosen, *others]


class PagedMqaLogits:
    """Runs every problem on every arch."""

    config = staticmethod(heuristic)
    neighbours = staticmethod(neighbours)

    def supports(self, problem: PagedMqaLogitsProblem, arch: Arch) -> str | None:
        return None

    def launch(
        self, problem: PagedMqaLogitsProblem, arch: Arch, config: PageBlocks
    ) -> Callable[[PagedMqaLogitsCall], None]:
        return functools.partial(_run, problem, config)


def _run(problem: PagedMqaLogitsProblem, config: PageBlocks, call: PagedMqaLogitsCall) -> None:
    with plain_arithmetic(call.q.device):
        work = _Work(problem, config, call)
        if problem.keys == 0 or call.kv_cache.shape[0] == 0:
            work.fill(slice(None), 0)
        elif call.q.device.type == "cpu":
            work.on_cpu()
        else:
            work.on_device()


class _Work:
    """What the blocks of one call share. They are independent: the result does not depend on the threads."""

    def __init__(self, problem: PagedMqaLogitsProblem, config: PageBlocks, call: PagedMqaLogitsCall) -> None:
        self.problem, self.config, self.call, self.out = problem, config, call, call.result
        cache = call.kv_cache
        # uint8 [blocks, block_bytes]
        self.pages = cache.as_strided((cache.shape[0], problem.layout.block_bytes), (cache.stride(0), 1))
        self.lengths = row_lengths(call.context_lens, problem.next_n, problem.keys)
        self.inference = torch.is_inference_mode_enabled() or self.out.is_inference()

    def fill(self, rows: slice, column: int) -> None:
        if self.problem.clean_logits:
            self.out[rows, column:] = float("-inf")

    def on_cpu(self) -> None:
        page, next_n = self.problem.layout.page, self.problem.next_n
        longest = self.lengths.amax(dim=1).tolist()
        sequences = None if self.call.indices is None else self.call.indices.tolist()
        score_rows = next_n * self.problem.heads
        blocks = max(1, min(self.config.keys, self.config.scores // score_rows) // page)
        items = []
        for b, keys in enumerate(longest):
            rows = slice(b * next_n, (b + 1) * next_n)
            self.fill(rows, keys)
            sequence = b if sequences is None else sequences[b]
            items += [(b, sequence, first, min(first + blocks * page, keys)) for first in range(0, keys, blocks * page)]
        threads = torch.get_num_threads()
        pool = _threads(threads) if threads > 1 and len(items) > 1 else None
        if pool is None:
            for item in items:
                self.cpu_block(item)
        else:
            list(pool.map(self.cpu_block, items))  # list() raises what a block raised

    def cpu_block(self, item: tuple[int, int, int, int]) -> None:
        """Columns [first, stop) of the rows of one b."""
        b, sequence, first, stop = item
        page, next_n = self.problem.layout.page, self.problem.next_n
        # Modes are per thread.
        mode = torch.inference_mode() if self.inference else torch.no_grad()
        with mode, torch.autocast("cpu", enabled=False):
            table = self.call.block_tables[sequence, first // page : -(-stop // page)]
            # A tenth of the time of indexing by the table.
            pages = self.pages.index_select(0, table)
            logits = self.logits(slice(b, b + 1), pages[None])[0, :, : stop - first]
            lengths = self.lengths[b, :, None]
            if self.problem.clean_logits and bool((lengths < stop).any()):
                logits = torch.where(torch.arange(first, stop) < lengths, logits, float("-inf"))
            self.out[b * next_n : (b + 1) * next_n, first:stop] = logits

    def on_device(self) -> None:
        problem, page = self.problem, self.problem.layout.page
        score_rows = problem.next_n * problem.heads
        blocks = max(1, min(self.config.keys, problem.keys) // page)
        step = max(1, self.config.scores // (score_rows * blocks * page))
        for b in range(0, problem.batch, step):
            some = slice(b, min(b + step, problem.batch))
            rows = slice(some.start * problem.next_n, some.stop * problem.next_n)
            self.fill(rows, problem.keys)
            for block in range(0, problem.max_blocks, blocks):
                first, stop = block * page, min((block + blocks) * page, problem.keys)
                if first < stop:
                    self.device_block(some, rows, first, stop)

    def device_block(self, some: slice, rows: slice, first: int, stop: int) -> None:
        """Columns [first, stop) of the rows of some of the batch."""
        page, device = self.problem.layout.page, self.out.device
        columns = torch.arange(first // page, -(-stop // page), device=device)
        lengths = self.lengths[some]
        seen = columns * page < lengths.amax(dim=1, keepdim=True)  # [some, blocks]
        if self.call.indices is None:
            table = self.call.block_tables[some, first // page : -(-stop // page)]
        else:
            sequences = torch.where(lengths.amax(dim=1) > 0, self.call.indices[some], 0).long()
            table = self.call.block_tables[sequences, first // page : -(-stop // page)]
        pages = self.pages[torch.where(seen, table, 0).long()]  # [some, blocks, block_bytes]
        logits = self.logits(some, pages)[..., : stop - first]
        inside = torch.arange(first, stop, device=device) < lengths[..., None]
        if self.problem.clean_logits:
            logits = torch.where(inside, logits, float("-inf"))
        self.out[rows, first:stop] = logits.reshape(-1, stop - first)

    def logits(self, some: slice, pages: torch.Tensor) -> torch.Tensor:
        """float32 [some, next_n, keys] of uint8 pages [some, blocks, block_bytes]."""
        problem, call = self.problem, self.call
        count, blocks = pages.shape[:2]
        k, kv_scale = problem.layout.unpack_blocks(pages.reshape(count * blocks, -1))
        if problem.layout.is_fp4:
            wide, factor = dequantize_fp4(k, kv_scale), 1.0
            kv_scale = wide.new_ones(())
        else:
            wide, factor = _widen(k) if k.device.type == "cpu" else (k.float(), 1.0)
        keys = wide.view(count, blocks * problem.layout.page, problem.head_dim)
        q = call.q[some].float().reshape(count, -1, problem.head_dim) * factor
        scores = torch.bmm(q, keys.transpose(1, 2)).relu_()
        first, stop, _ = some.indices(problem.batch)
        weights = call.weights[first * problem.next_n : stop * problem.next_n, None, :]
        logits = torch.bmm(weights, scores.view(count * problem.next_n, problem.heads, -1))
        logits = logits.view(count, problem.next_n, -1) * (
            kv_scale if kv_scale.dim() == 0 else kv_scale.view(count, 1, -1)
        )
        return logits + 0.0  # -0.0 becomes +0.0


def _widen(k: torch.Tensor) -> tuple[torch.Tensor, float]:
    """float32 of fp8, and the power of two that it has to be multiplied by; a thirteenth of the time of ``k.float()``.

    Exponent and mantissa of a code, seven bits up, are those of a float16 with another bias: 15 for 7, or for 8.
    """
    codes = k.view(torch.int8)
    fnuz = k.dtype is torch.float8_e4m3fnuz
    # NaN: 0x80 in fnuz; 0x7f and 0xff in fn, which alone are 0 when doubled and two more.
    lowest = codes.amin() == -128 if fnuz else (codes + codes + 2).view(torch.uint8).amin() == 0
    if bool(lowest):
        return k.float(), 1.0
    half = codes.to(torch.int16).mul_(128).bitwise_and_(-0x4001)  # the sign fills bit 14 too
    return half.view(torch.float16).float(), 128.0 if fnuz else 256.0
