"""The dispatch policy: which backends a call tries, in which order, and why. One pure function, no device, no import.

It decides by preference alone. Whether a backend can run the problem is its gate's answer, and whether it is in the
registry and installed is for ``dispatch`` to find out: a name that is not there is skipped.
"""

from __future__ import annotations

from typing import NamedTuple

from lightning_indexer.arch import Arch
from lightning_indexer.backends.hip_gfx950.config import STREAM_RATIO
from lightning_indexer.problems.mqa_logits import Problem

# hip-gfx950 streams K once past a block of query rows held in registers: it pays where K is long beside the rows.
HIP_HEADS, HIP_HEAD_DIM, HIP_KEYS_PER_ROW = 32, 128, STREAM_RATIO
# The H=64 path of gluon-gfx950 keeps three K tiles in flight for four rows at a time: it pays where rows are many.
GLUON_HEADS, GLUON_HEAD_DIM, GLUON_ROWS = 64, 128, 4096

KERNELS_OFF = "kernels are switched off"

# (backend, arch) that this project has timed on hardware: an H200, and CPUs.
MEASURED = frozenset({("cuda-sm90", "sm90"), ("triton-portable", "sm90"), ("torch-blocked", "cpu")})


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


def chain(problem: Problem, arch: Arch, *, kernels: bool = True) -> tuple[Step, ...]:
    """The backends for ``problem`` on ``arch``, the first one first. The last one, torch-blocked, runs everything.

    Args:
        problem: the facts of the call.
        arch: e.g. ``Arch.parse("gfx950")``; no such device is needed.
        kernels: False passes over every backend but torch-blocked.
    """
    steps = (*_kernels(problem, arch), Step("torch-blocked", "runs any shape on any device"))
    if arch.vendor == "cpu":
        steps = (Step("torch-blocked", "the one for CPUs"), Step("triton-portable", "its interpreter, for tests"))
    if kernels:
        return steps
    return tuple(s if s.backend == "torch-blocked" else s._replace(passed_over=KERNELS_OFF) for s in steps)


def _kernels(problem: Problem, arch: Arch) -> tuple[Step, ...]:
    triton = Step("triton-portable", "runs on every listed GPU")
    if arch.vendor not in ("nvidia", "amd"):
        return ()
    if arch.name == "sm90":
        return (Step("cuda-sm90", "written for Hopper"), triton)
    if arch.name == "gfx942":
        return (Step("flydsl", "written for CDNA"), triton)
    if arch.name == "gfx950":
        return (_hip_gfx950(problem), _gluon_gfx950(problem), Step("flydsl", "written for CDNA"), triton)
    return (triton,)


def _hip_gfx950(problem: Problem) -> Step:
    rule = f"preferred where H={HIP_HEADS}, D={HIP_HEAD_DIM} and N >= {HIP_KEYS_PER_ROW} * M"
    taken = (problem.heads, problem.head_dim) == (HIP_HEADS, HIP_HEAD_DIM) and (
        problem.keys >= HIP_KEYS_PER_ROW * problem.rows
    )
    return Step("hip-gfx950", rule, None if taken else f"{rule}; this is {_shape(problem)}")


def _gluon_gfx950(problem: Problem) -> Step:
    rule = f"preferred where H={GLUON_HEADS}, D={GLUON_HEAD_DIM} and M >= {GLUON_ROWS}"
    taken = (problem.heads, problem.head_dim) == (GLUON_HEADS, GLUON_HEAD_DIM) and problem.rows >= GLUON_ROWS
    return Step("gluon-gfx950", rule, None if taken else f"{rule}; this is {_shape(problem)}")


def _shape(problem: Problem) -> str:
    return f"M={problem.rows} N={problem.keys} H={problem.heads} D={problem.head_dim}"
