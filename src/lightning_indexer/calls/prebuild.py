"""Kernels into the disk cache ahead of their first call, e.g. while an image is built; no device is needed."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from typing import Any

import torch

from lightning_indexer import artifacts
from lightning_indexer.arch import Arch
from lightning_indexer.problems import gather_k_cache, insert_k_cache, mqa_logits, paged_mqa_logits, prepare_q
from lightning_indexer.problems.cache_layout import CacheLayout
from lightning_indexer.problems.gather_k_cache import GatherProblem
from lightning_indexer.problems.insert_k_cache import InsertProblem
from lightning_indexer.problems.mqa_logits import FORMS, Form, MqaLogitsProblem
from lightning_indexer.problems.paged_mqa_logits import PagedMqaLogitsProblem
from lightning_indexer.problems.prepare_q import PrepareQProblem
from lightning_indexer.problems.transform import Transform
from lightning_indexer.selection import registry

# Sizes between which heuristics change their mind; kernels take M and N at run time.
ROWS = (1, 2, 4, 16, 128, 1024, 4096)
KEYS = (1, 1024, 16384, 131072)
# Of decode: B and W, and the next_n of speculative decoding; pages are those of the engines' caches.
BATCHES = ((1, 1024), (512, 131072))
NEXT_N = (1, 2, 4)
PAGE = 64
SCORES = (mqa_logits.OPERATION, paged_mqa_logits.OPERATION)
# Of the cache: T, and what engines fuse into keys, and into queries without the LayerNorm.
TOKENS = (1, 131072)
ROPES = (
    Transform(), Transform(rope="first", rope_dim=64), Transform(rope="first", rope_dim=64, interleaved=True),
)  # fmt: skip
CACHE = (insert_k_cache.OPERATION, gather_k_cache.OPERATION, prepare_q.OPERATION)
OPERATIONS = (*SCORES, *CACHE)
# Of fp4 keys, the one that a cache has.
FP4_HEAD_DIM = 128


@dataclass(frozen=True, slots=True)
class Batch:
    """Problems of one backend and operation that differ little: a process compiles them one after the other."""

    backend: str
    arch: str
    problems: tuple[Any, ...]

    @property
    def operation(self) -> str:
        operation: str = self.problems[0].operation
        return operation

    def __str__(self) -> str:
        heads = getattr(self.problems[0], "heads", None)  # keys have none
        return f"{self.backend} {self.operation}{'' if heads is None else f' H={heads}'} D={self.problems[0].head_dim}"


@dataclass(frozen=True, slots=True)
class Prebuilt:
    """The kernels of a batch by name, and what failed, empty if nothing did."""

    batch: Batch
    kernels: tuple[str, ...]
    error: str = ""


def backends(arch: Arch, operation: str = mqa_logits.OPERATION) -> list[str]:
    """Those that can compile an operation ahead for an arch, by what they say of usual problems."""
    usual = [problem for heads in (32, 64) for problem in _problems(operation, heads, 128, FORMS, (torch.float32,))]
    known = _precompiled(operation)
    return [name for name, kernel in known.items() if any(kernel.supports(p, arch) is None for p in usual)]


def _precompiled(operation: str) -> dict[str, Any]:
    kernels = registry.kernels(operation)
    return {name: kernel for name, kernel in kernels.items() if isinstance(kernel, registry.Precompiled)}


def plan(
    arch: Arch,
    heads: Sequence[int],
    head_dims: Sequence[int],
    *,
    forms: Sequence[Form] = FORMS,
    out_dtypes: Sequence[torch.dtype] = (torch.float32,),
    names: Sequence[str] | None = None,
    operations: Sequence[str] = OPERATIONS,
) -> list[Batch]:
    """What there is to compile.

    Args:
        arch: e.g. ``Arch.parse("sm90")``.
        heads, head_dims: H and D of the models that will run.
        forms, out_dtypes: of their calls; decode has no compressed form.
        names: of backends; None: all that compile ahead for the arch.
        operations: some of ``OPERATIONS``. The cache's are for H and D whose scores are compiled too, where both are
            asked for.

    Raises:
        ValueError: an unknown operation, or a backend that compiles none of them ahead.
    """
    for operation in operations:
        if operation not in OPERATIONS:
            raise ValueError(f"operation: got {operation!r}, expected one of {', '.join(OPERATIONS)}")
    known = {operation: _precompiled(operation) for operation in operations}
    chosen = [registry.get(name).name for name in names] if names else None
    for name in chosen or ():
        able = dict.fromkeys(name for kernels in known.values() for name in kernels)
        if name not in able:
            raise ValueError(
                f"backend: got {name!r}, which compiles at its first call, expected one of {', '.join(able)}"
            )
    batches: list[Batch] = []
    for operation, kernels in known.items():
        shapes = [(h, d) for h in heads for d in head_dims]
        if operation in CACHE and set(operations) & set(SCORES):
            scored = {(batch.problems[0].heads, batch.problems[0].head_dim) for batch in batches if _scores(batch)}
            shapes = [shape for shape in shapes if shape in scored]
        if operation in CACHE and operation != prepare_q.OPERATION:  # keys have no heads
            shapes = list({d: (h, d) for h, d in shapes}.values())
        for name in backends(arch, operation) if chosen is None else chosen:
            for h, d in shapes if name in kernels else ():
                problems = _problems(operation, h, d, forms, out_dtypes)
                able_to = tuple(problem for problem in problems if kernels[name].supports(problem, arch) is None)
                if able_to:
                    batches.append(Batch(name, arch.name, able_to))
    return batches


def _scores(batch: Batch) -> bool:
    return batch.operation in SCORES


def _problems(
    operation: str, heads: int, head_dim: int, forms: Sequence[Form], out_dtypes: Sequence[torch.dtype]
) -> list[Any]:
    """Calls of every size that heuristics tell apart."""
    if operation == mqa_logits.OPERATION:
        return [
            MqaLogitsProblem(
                m, n, heads, head_dim, out_dtype=dtype, clean_logits=form == "clean",
                max_seqlen_k=n if form == "compressed" else 0,
            )
            for form in forms for dtype in out_dtypes for m in ROWS for n in KEYS
        ]  # fmt: skip
    if operation in CACHE:
        return _of_cache(operation, heads, head_dim)
    layouts = [CacheLayout(PAGE, head_dim)]
    if head_dim == FP4_HEAD_DIM:
        layouts.append(CacheLayout.fp4(PAGE))
    return [
        PagedMqaLogitsProblem(
            batch, next_n, width, heads, head_dim, layout, -(-width // PAGE), out_dtype=dtype,
            clean_logits=form == "clean",
        )
        for layout in layouts for form in forms if form != "compressed" for dtype in out_dtypes for next_n in NEXT_N
        for batch, width in BATCHES
    ]  # fmt: skip


def _of_cache(operation: str, heads: int, head_dim: int) -> list[Any]:
    """Keys with float32 scales and powers of two, and LayerNorm with a bias; MXFP4 keys to gather; q behind RoPE."""
    scales = (False, True)
    if operation == insert_k_cache.OPERATION:
        layouts = [CacheLayout(PAGE, head_dim, scales="power of two" if power else "float32") for power in scales]
        steps = [rope._replace(norm=rope.rope is not None, bias=rope.rope is not None) for rope in ROPES]
        return [
            InsertProblem(tokens, head_dim, layout, step) for tokens in TOKENS for layout in layouts for step in steps
        ]
    if operation == gather_k_cache.OPERATION:
        return [GatherProblem(tokens, 1, CacheLayout.fp4(PAGE, head_dim), 1) for tokens in TOKENS]
    return [
        PrepareQProblem(tokens, heads, head_dim, step, power_of_two=power)
        for tokens in TOKENS for power in scales for step in ROPES[1:]
    ]  # fmt: skip


def run(batches: Sequence[Batch], jobs: int) -> Iterator[Prebuilt]:
    """Compiles the batches over ``jobs`` processes; results come as they end."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(max(1, min(jobs, len(batches))), context) as pool:
        futures = {pool.submit(compile_batch, batch): batch for batch in batches}
        for done in as_completed(futures):
            error = done.exception()  # a process that was killed
            yield done.result() if error is None else Prebuilt(futures[done], (), f"{type(error).__name__}: {error}")


def compile_batch(batch: Batch) -> Prebuilt:
    """Compiles one batch, in this process; a kernel that cannot be read back from the disk cache counts as failed."""
    kernel, arch = registry.kernel(batch.backend, batch.operation), Arch.parse(batch.arch)
    kernels: dict[str, None] = {}
    errors: dict[str, None] = {}
    for problem in batch.problems:
        try:
            with artifacts.required():
                kernels[kernel.precompile(problem, arch)] = None
        except Exception as error:  # compilers raise types of their own; the others are compiled all the same
            errors[str(error)] = None
    return Prebuilt(batch, tuple(kernels), "; ".join(errors))
