"""The order in which backends are tried, and why: one pure function an operation, no device, no import of a kernel.

It decides by preference alone. Whether a backend can run the problem is its gate's answer, and whether it is installed
is for the registry to find out. A threshold stands beside the kernel it belongs to; here it is read.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from lightning_indexer.arch import Arch

KERNELS_OFF = "kernels are switched off"
FALLBACK = "torch-blocked"
PORTABLE = "triton-portable"

# By operation, (backend, arch) that this project has run and timed on hardware: an H200, and CPUs.
MEASURED: dict[str, frozenset[tuple[str, str]]] = {
    "fp8_mqa_logits": frozenset({("cuda-sm90", "sm90"), ("triton-portable", "sm90"), ("torch-blocked", "cpu")}),
    "fp8_paged_mqa_logits": frozenset({("cuda-sm90", "sm90"), ("triton-portable", "sm90"), ("torch-blocked", "cpu")}),
    "top_k_per_row": frozenset({("cuda-sm90", "sm90"), ("triton-portable", "sm90"), ("torch-blocked", "cpu")}),
    "insert_k_cache": frozenset({("cuda-sm90", "sm90"), ("triton-portable", "sm90"), ("torch-blocked", "cpu")}),
    "gather_k_cache": frozenset({("cuda-sm90", "sm90"), ("triton-portable", "sm90"), ("torch-blocked", "cpu")}),
    "prepare_q": frozenset({("cuda-sm90", "sm90"), ("triton-portable", "sm90"), ("torch-blocked", "cpu")}),
}


def measured(operation: str, backend: str, arch: Arch) -> bool:
    """True where the numbers and the results of a kernel on an arch are this project's own, from hardware."""
    return (backend, arch.name) in MEASURED.get(operation, ())


# No AMD kernel has been timed by this project: the lines of gfx942 and gfx950 follow the model of docs/timing.md. On 41
# times that others published of public code it is off by 13%, root mean square; by 36% on one. So a gap below 15% moves
# nothing here: such lines, H=64 of hip-gfx950 at long keys among them, are as they were.
# By operation and arch, what is tried before triton-portable and torch-blocked, which follow on every GPU.
ORDER: dict[str, dict[str, tuple[str, ...]]] = {
    "fp8_mqa_logits": {
        "sm90": ("cuda-sm90",),
        "gfx942": ("flydsl",),
        "gfx950": ("hip-gfx950", "gluon-gfx950", "flydsl"),
    },
    "fp8_paged_mqa_logits": {"sm90": ("cuda-sm90",)},
    "fp8_mqa_topk": {
        "sm90": ("cuda-sm90",),
        "gfx942": ("flydsl",),
        "gfx950": ("hip-gfx950", "gluon-gfx950", "flydsl"),
    },
    "fp8_paged_mqa_topk": {"sm90": ("cuda-sm90",)},
    "insert_k_cache": {"sm90": ("cuda-sm90",)},
    "gather_k_cache": {"sm90": ("cuda-sm90",)},
    "prepare_q": {"sm90": ("cuda-sm90",)},
    "top_k_per_row": {"sm90": ("cuda-sm90",)},
}

WHY = {
    "cuda-sm90": "written for Hopper",
    "flydsl": "written for CDNA",
    "triton-portable": "runs on every listed GPU",
    "torch-blocked": "runs any shape on any device",
}


class Step(NamedTuple):
    """One backend of the chain.

    Attributes:
        backend: its name in the registry.
        why: why it stands here.
        passed_over: None, or why this call does not try it, even where it could run.
    """

    backend: str
    why: str
    passed_over: str | None = None


def chain(problem: Any, arch: Arch, *, kernels: bool = True) -> tuple[Step, ...]:
    """What a call tries, first to last. The last one, torch-blocked, runs everything.

    Args:
        problem: the facts of the call; its ``operation`` says which line of ``ORDER`` holds.
        arch: e.g. ``Arch.parse("gfx942")``; no such device is needed.
        kernels: False passes over every backend but torch-blocked.
    """
    if arch.vendor == "cpu":
        steps: tuple[Step, ...] = (Step(FALLBACK, "the one for CPUs"), Step(PORTABLE, "its interpreter, for tests"))
    elif arch.vendor in ("nvidia", "amd"):
        names = (*ORDER.get(problem.operation, {}).get(arch.name, ()), PORTABLE, FALLBACK)
        steps = tuple(_step(name, problem) for name in names)
    else:
        steps = (Step(FALLBACK, WHY[FALLBACK]),)
    if kernels:
        return steps
    return tuple(s if s.backend == FALLBACK else s._replace(passed_over=KERNELS_OFF) for s in steps)


def _step(name: str, problem: Any) -> Step:
    if (rule := _RULES.get((problem.operation, name))) is not None:
        why, taken = rule(problem)
        return Step(name, why, None if taken else f"{why}; this is {_shape(problem)}")
    return Step(name, WHY.get(name, ""))


def _hip_gfx950(problem: Any) -> tuple[str, bool]:
    from lightning_indexer.backends.hip_gfx950.config import KEYS_A_ROW, PREFERRED_HEAD_DIM

    heads = " or ".join(f"H={heads} and N >= {keys} * M" for heads, keys in KEYS_A_ROW.items())
    why = f"preferred where D={PREFERRED_HEAD_DIM}, {heads}"
    return why, problem.head_dim == PREFERRED_HEAD_DIM and (
        problem.heads in KEYS_A_ROW and problem.keys >= KEYS_A_ROW[problem.heads] * problem.rows
    )


def _gluon_gfx950(problem: Any) -> tuple[str, bool]:
    from lightning_indexer.backends.gluon_gfx950.config import MANY_ROWS, PREFERRED_HEAD_DIM, PREFERRED_HEADS

    why = f"preferred where H={PREFERRED_HEADS}, D={PREFERRED_HEAD_DIM} and M >= {MANY_ROWS}"
    return why, (problem.heads, problem.head_dim) == (PREFERRED_HEADS, PREFERRED_HEAD_DIM) and (
        problem.rows >= MANY_ROWS
    )


def _cuda_prepare_q(problem: Any) -> tuple[str, bool]:
    # docs/kernels/cache.md: what is only quantised moves at the copy's rate in Triton, and 7% slower here.
    return "preferred behind RoPE or a rotation, or through fp4", problem.fp4 or any(problem.transform)


# Backends that are preferred at some shapes only: their rule in words, and whether it holds.
_RULES: dict[tuple[str, str], Callable[[Any], tuple[str, bool]]] = {
    ("fp8_mqa_logits", "hip-gfx950"): _hip_gfx950,
    ("fp8_mqa_logits", "gluon-gfx950"): _gluon_gfx950,
    ("prepare_q", "cuda-sm90"): _cuda_prepare_q,
    # What scores alone scores here too.
    ("fp8_mqa_topk", "hip-gfx950"): _hip_gfx950,
    ("fp8_mqa_topk", "gluon-gfx950"): _gluon_gfx950,
}


def _shape(problem: Any) -> str:
    if problem.operation == "prepare_q":
        return str(problem)
    return f"M={problem.rows} N={problem.keys} H={problem.heads} D={problem.head_dim}"
