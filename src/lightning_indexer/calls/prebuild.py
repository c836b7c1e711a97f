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
from lightning_indexer.problems.mqa_logits import FORMS, Form, MqaLogitsProblem
from lightning_indexer.selection import registry

# Sizes between which heuristics change their mind; kernels take M and N at run time.
ROWS = (1, 2, 4, 16, 128, 1024, 4096)
KEYS = (1, 1024, 16384, 131072)


@dataclass(frozen=True, slots=True)
class Batch:
    """Problems of one backend that differ little: a process compiles them one after the other."""

    backend: str
    arch: str
    problems: tuple[MqaLogitsProblem, ...]

    def __str__(self) -> str:
        return f"{self.backend} H={self.problems[0].heads} D={self.problems[0].head_dim}"


@dataclass(frozen=True, slots=True)
class Prebuilt:
    """The kernels of a batch by name, and what failed, empty if nothing did."""

    batch: Batch
    kernels: tuple[str, ...]
    error: str = ""


def backends(arch: Arch) -> list[str]:
    """Those that can compile ahead for an arch, by what they say of a usual problem."""
    usual = [MqaLogitsProblem(4096, 32768, heads, 128) for heads in (32, 64)]
    return [name for name, kernel in _precompiled().items() if any(kernel.supports(p, arch) is None for p in usual)]


def _precompiled() -> dict[str, Any]:
    return {name: kernel for name, kernel in registry.kernels().items() if isinstance(kernel, registry.Precompiled)}


def plan(
    arch: Arch,
    heads: Sequence[int],
    head_dims: Sequence[int],
    *,
    forms: Sequence[Form] = FORMS,
    out_dtypes: Sequence[torch.dtype] = (torch.float32,),
    names: Sequence[str] | None = None,
) -> list[Batch]:
    """What there is to compile.

    Args:
        arch: e.g. ``Arch.parse("sm90")``.
        heads, head_dims: H and D of the models that will run.
        forms, out_dtypes: of their calls.
        names: of backends; None: all that compile ahead for the arch.

    Raises:
        ValueError: a backend that does not compile ahead.
    """
    known = _precompiled()
    chosen = [registry.get(name).name for name in names] if names else backends(arch)
    for name in chosen:
        if name not in known:
            raise ValueError(
                f"backend: got {name!r}, which compiles at its first call, expected one of {', '.join(known)}"
            )
    batches = []
    for name in chosen:
        for h in heads:
            for d in head_dims:
                problems = [
                    MqaLogitsProblem(
                        m, n, h, d, out_dtype=dtype, clean_logits=form == "clean",
                        max_seqlen_k=n if form == "compressed" else 0,
                    )
                    for form in forms for dtype in out_dtypes for m in ROWS for n in KEYS
                ]  # fmt: skip
                able = tuple(problem for problem in problems if known[name].supports(problem, arch) is None)
                if able:
                    batches.append(Batch(name, arch.name, able))
    return batches


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
    kernel, arch = registry.kernel(batch.backend), Arch.parse(batch.arch)
    kernels: dict[str, None] = {}
    errors: dict[str, None] = {}
    for problem in batch.problems:
        try:
            with artifacts.required():
                kernels[kernel.precompile(problem, arch)] = None
        except Exception as error:  # compilers raise types of their own; the others are compiled all the same
            errors[str(error)] = None
    return Prebuilt(batch, tuple(kernels), "; ".join(errors))
