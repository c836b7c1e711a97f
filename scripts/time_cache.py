"""Times the writers of the cache on a GPU: every row of the tables of docs/kernels/cache.md, and configs around them.

    python scripts/time_cache.py [--variants] [--json rows.json]

The share is of a device copy that moves as many bytes, timed in the same run. The L2 is overwritten before every run.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from lightning_indexer import Arch, CacheLayout, arch_of
from lightning_indexer.backends.cuda_sm90.rows import RowsConfig
from lightning_indexer.problems import insert_k_cache, prepare_q
from lightning_indexer.problems.gather_k_cache import GatherCall, GatherProblem, results_of
from lightning_indexer.problems.insert_k_cache import InsertCall, InsertProblem
from lightning_indexer.problems.prepare_q import PrepareQCall, PrepareQProblem
from lightning_indexer.problems.transform import Steps, Transform
from lightning_indexer.selection import registry

FP4 = CacheLayout.fp4()
INSERTS = {
    "page 64, float32 scales": (CacheLayout(), Transform()),
    "LayerNorm and RoPE": (CacheLayout(), Transform(True, True, "first", 64)),
    "LayerNorm and interleaved RoPE": (CacheLayout(), Transform(True, True, "first", 64, True)),
    "interleaved RoPE and rotation": (CacheLayout(), Transform(False, False, "last", 64, True, True)),
    "LayerNorm, RoPE and rotation": (CacheLayout(), Transform(True, True, "first", 64, False, True)),
    "page 16 preshuffled": (CacheLayout(16, 128, "preshuffled"), Transform()),
    "page 1": (CacheLayout(1), Transform()),
    "page 64, UE8M0 scales": (CacheLayout(scales="ue8m0"), Transform()),
    "fp4": (FP4, Transform()),
    "fp4, LayerNorm and RoPE": (FP4, Transform(True, True, "first", 64)),
    "fp4, interleaved RoPE and rotation": (FP4, Transform(False, False, "last", 64, True, True)),
}
QUERIES = {
    "plain": (Transform(), False),
    "RoPE": (Transform(False, False, "first", 64), False),
    "interleaved RoPE": (Transform(False, False, "first", 64, True), False),
    "interleaved RoPE and rotation": (Transform(False, False, "last", 64, True, True), False),
    "RoPE, through fp4": (Transform(False, False, "first", 64), True),
}
TOKENS = (4096, 32768, 131072)
SHAPES = ((4096, 32), (4096, 64), (32768, 32), (16384, 64))
CONFIGS = [RowsConfig(*sizes) for sizes in (
    (2, 1, 10), (2, 1, 12), (2, 1, 16), (2, 1, 20), (1, 1, 32), (4, 1, 8), (4, 1, 10), (2, 2, 12), (2, 4, 12),
    (4, 2, 5),
)]  # fmt: skip
GATHERS = [RowsConfig(*sizes) for sizes in ((4, 1, 8), (4, 1, 12), (8, 1, 5), (4, 2, 8), (4, 4, 6), (8, 2, 4))]
KEPT = 64  # timed runs


class Timer:
    """Median time of a call in us, the L2 overwritten before each; the queue is full, so no call waits for the host."""

    def __init__(self) -> None:
        self.flush = torch.empty(2**28, dtype=torch.uint8, device="cuda")
        self.copies: dict[int, float] = {}

    def __call__(self, call: Callable[[], object]) -> float:
        call()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            call()
        begin = [torch.cuda.Event(enable_timing=True) for _ in range(KEPT)]
        end = [torch.cuda.Event(enable_timing=True) for _ in range(KEPT)]
        for i in range(KEPT):
            self.flush.zero_()
            begin[i].record()
            graph.replay()
            end[i].record()
        torch.cuda.synchronize()
        return statistics.median(1e3 * a.elapsed_time(b) for a, b in zip(begin, end, strict=True))

    def copy(self, moved: int) -> float:
        """Of a copy that reads and writes so many bytes together."""
        if moved not in self.copies:
            source = torch.empty(moved // 2, dtype=torch.uint8, device="cuda")
            target = torch.empty_like(source)
            self.copies[moved] = self(lambda: target.copy_(source))
        return self.copies[moved]


def steps_of(transform: Transform, tokens: int) -> tuple[Steps, int]:
    """Operands of a transform, every token at a position of its own, and their bytes."""
    rotary = transform.rope is not None
    table = torch.randn(tokens, transform.rope_dim, device="cuda") if rotary else None
    steps = Steps(
        torch.randn(128, device="cuda") if transform.norm else None,
        torch.randn(128, device="cuda") if transform.bias else None, 1e-6,
        torch.arange(tokens, device="cuda") if rotary else None, table, transform.rope or "first",
        transform.interleaved, transform.hadamard,
    )  # fmt: skip
    return steps, sum(tensor.nbytes for tensor in steps.tensors if tensor is not None)


def insert_call(problem: InsertProblem) -> tuple[InsertCall, int]:
    """Tokens in order into a pool that they fill, and the bytes of it all."""
    layout, tokens = problem.layout, problem.tokens
    steps, extra = steps_of(problem.transform, tokens)
    k = torch.randn(tokens, 128, device="cuda").bfloat16()
    cache = torch.zeros((tokens // layout.page, *layout.block_shape), dtype=torch.uint8, device="cuda")
    call = InsertCall(k, cache, torch.arange(tokens, device="cuda"), layout, steps)
    return insert_k_cache.validate(call), k.nbytes + cache.nbytes + 8 * tokens + extra


def prepare_call(problem: PrepareQProblem) -> tuple[PrepareQCall, int]:
    """Queries, and the bytes of it all."""
    shape = problem.tokens, problem.heads, 128
    steps, extra = steps_of(problem.transform, problem.tokens)
    q, gates = torch.randn(shape, device="cuda").bfloat16(), torch.randn(shape[:2], device="cuda")
    out = torch.empty(shape, dtype=torch.float8_e4m3fn, device="cuda"), torch.empty(shape[:2], device="cuda")
    call = PrepareQCall(q, gates, steps, fp4=problem.fp4, out=out)
    return prepare_q.validate(call), q.nbytes + 2 * gates.nbytes + out[0].nbytes + extra


def gather_call(problem: GatherProblem) -> tuple[GatherCall, int]:
    """All keys of a pool in the order of a shuffled table, and the bytes of it all."""
    layout, keys = problem.layout, problem.keys
    blocks = keys // layout.page
    cache = torch.randint(0, 96, (blocks, *layout.block_shape), dtype=torch.uint8, device="cuda")
    table = torch.randperm(blocks, device="cuda").int()[None]
    lengths = torch.tensor([0, keys], dtype=torch.int32, device="cuda")
    call = GatherCall(cache, table, lengths, keys, layout, 1, problem.dtype)
    out = [torch.empty(shape, dtype=dtype, device="cuda") for shape, dtype in results_of(call)]
    return call._replace(out=(out[0], out[1])), cache.nbytes + sum(tensor.nbytes for tensor in out)


def problems() -> list[tuple[str, Any]]:
    """Every row and column of the tables."""
    found: list[tuple[str, Any]] = [
        (f"insert, {name}", InsertProblem(tokens, 128, layout, transform))
        for name, (layout, transform) in INSERTS.items() for tokens in TOKENS
    ]  # fmt: skip
    found += [
        (f"prepare_q, {name}", PrepareQProblem(tokens, heads, 128, transform, fp4=fp4))
        for name, (transform, fp4) in QUERIES.items() for tokens, heads in SHAPES
    ]  # fmt: skip
    return found


def run(backend: str, problem: Any, config: Any, call: Any) -> Callable[[], object]:
    """The launch of a backend, on one call."""
    kernel = registry.kernel(backend, problem.operation)
    arch = arch_of(torch.device("cuda"))
    launch = kernel.launch(problem, arch, kernel.config(problem, arch) if config is None else config)
    return lambda: launch(call)


def compile_one(item: tuple[Any, RowsConfig]) -> None:
    """Into the disk cache."""
    problem, config = item
    launch = registry.kernel("cuda-sm90", problem.operation).launch(problem, Arch.parse("sm90"), config)
    launch.precompile(launch.usual())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--variants", action="store_true", help="configs beside the heuristic's")
    parser.add_argument("--json", type=Path, help="where the rows go")
    given = parser.parse_args()
    todo = problems()
    if given.variants:
        kinds = {(name, getattr(p, "heads", 0)): p for name, p in todo}
        with multiprocessing.Pool() as pool:
            pool.map(compile_one, [(p, config) for p in kinds.values() for config in CONFIGS], chunksize=1)
    timer, rows = Timer(), []
    for name, problem in todo:
        call, moved = insert_call(problem) if isinstance(problem, InsertProblem) else prepare_call(problem)
        copy = timer.copy(moved)
        times = {name: timer(run(name, problem, None, call)) for name in ("cuda-sm90", "triton-portable")}
        largest = problem.tokens == 32768 or (given.variants and problem.tokens == TOKENS[-1])
        if given.variants and largest:
            times |= {str(config): timer(run("cuda-sm90", problem, config, call)) for config in CONFIGS}
        if problem.tokens == 32768:
            times["torch-blocked"] = timer(run("torch-blocked", problem, None, call))
        shape = f"T={problem.tokens}" + (f" H={problem.heads}" if isinstance(problem, PrepareQProblem) else "")
        line = "  ".join(f"{one} {us:.1f} us {100 * copy / us:.0f}%" for one, us in times.items())
        print(f"{name}, {shape}, copy {copy:.1f} us ({moved / copy / 1e3:.0f} GB/s):  {line}", flush=True)
        rows.append({"name": name, "shape": shape, "bytes": moved, "copy_us": copy, "us": times})
    for layout in (CacheLayout(), FP4):
        for keys in TOKENS:
            problem = GatherProblem(keys, 1, layout, keys // layout.page)
            call, moved = gather_call(problem)
            copy, times = timer.copy(moved), {"triton-portable": timer(run("triton-portable", problem, None, call))}
            if layout.is_fp4:
                times["cuda-sm90"] = timer(run("cuda-sm90", problem, None, call))
                times |= {str(c): timer(run("cuda-sm90", problem, c, call)) for c in GATHERS if given.variants}
            line = "  ".join(f"{one} {us:.1f} us {100 * copy / us:.0f}%" for one, us in times.items())
            print(f"gather, {layout}, T={keys}, copy {copy:.1f} us:  {line}", flush=True)
            rows.append({"name": f"gather, {layout}", "shape": f"T={keys}", "copy_us": copy, "us": times})
    if given.json:
        given.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
