"""Prepared queries against the reference: cases, and a judge.

Codes of rows that are only quantised are the same in every bit; behind RoPE or a rotation they are within a step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from lightning_indexer.calls.prepare_q import prepare_q
from lightning_indexer.check.suite import CaseSuite
from lightning_indexer.problems.prepare_q import (
    OPERATION,
    PrepareQCall,
    PrepareQProblem,
    difference,
    reference_prepare_q,
)
from lightning_indexer.problems.transform import Transform

FN, FNUZ = torch.float8_e4m3fn, torch.float8_e4m3fnuz
PLAIN = Transform()
TRANSFORMS = (
    PLAIN, Transform(rope="first", rope_dim=64), Transform(rope="last", rope_dim=64, interleaved=True),
    Transform(rope="first", rope_dim=64, hadamard=True),
    Transform(rope="last", rope_dim=64, interleaved=True, hadamard=True),
    Transform(rope="first", rope_dim=128), Transform(hadamard=True),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Case:
    """One call, of the problem's facts."""

    problem: PrepareQProblem

    def __str__(self) -> str:
        p = self.problem
        names = (str(dtype).removeprefix("torch.") for dtype in (p.out_dtype, p.weights_dtype))
        return f"{p}, {', '.join(names)}"

    @property
    def heads(self) -> int:
        return self.problem.heads

    @property
    def head_dim(self) -> int:
        return self.problem.head_dim


def cases(full: bool) -> list[Case]:
    """The sweep of ``verify``; not ``full``: the same kinds at sizes for a CPU or an interpreter."""
    tokens = 500 if full else 5
    usual = PrepareQProblem(tokens, 32, 128)
    found = [usual._replace(transform=t, fp4=fp4) for t in TRANSFORMS for fp4 in (False, True)]
    found += [usual._replace(out_dtype=dtype, power_of_two=power) for dtype in (FN, FNUZ) for power in (False, True)]
    found += [usual._replace(out_dtype=FNUZ, fp4=True)]
    found += [usual._replace(dtype=dtype, weights_dtype=dtype) for dtype in (torch.float16, torch.float32)]
    found += [usual._replace(heads=heads, weights_dtype=torch.bfloat16) for heads in (1, 3, 8, 16, 64, 128)]
    found += [
        usual._replace(head_dim=dim, transform=Transform(rope="last", rope_dim=32, hadamard=True)) for dim in (32, 64)
    ]
    found += [usual._replace(tokens=count, heads=8) for count in (0, 1, 2)]
    if full:
        found += [
            usual._replace(tokens=count, heads=heads, transform=TRANSFORMS[1])
            for count in (4096, 16384)
            for heads in (32, 64)
        ]
    return [Case(problem) for problem in found]


def simulated_cases(dtype: torch.dtype) -> list[Case]:
    """Few small cases of every kind of path, for kernels that run in the simulator."""
    usual = PrepareQProblem(3, 8, 128, out_dtype=dtype)
    return [
        Case(usual),
        Case(usual._replace(transform=TRANSFORMS[1], power_of_two=True, weights_dtype=torch.bfloat16)),
        Case(usual._replace(transform=TRANSFORMS[4])),
        Case(usual._replace(transform=TRANSFORMS[1], fp4=True)),
        Case(usual._replace(out_dtype=FN, dtype=torch.float32)),
    ]


Call = Callable[[PrepareQCall], None]


def call_backend(backend: str) -> Call:
    """The public call on that backend, into given results."""

    def call(given: PrepareQCall) -> None:
        steps = given.steps
        prepare_q(
            given.q, given.weights, positions=steps.positions, cos_sin_cache=steps.cos_sin_cache, rope=steps.rope,
            interleaved=steps.interleaved, hadamard=steps.hadamard, dtype=given.dtype,
            power_of_two=given.power_of_two, fp4=given.fp4, out=given.out, backend=backend,
        )  # fmt: skip

    return call


def run_case(
    case: Case, backend: str, device: torch.device, *, repeats: int = 0, call: Call | None = None
) -> list[str]:
    """Runs one case and gives what is wrong with its results, nothing where it passes.

    Args:
        repeats: how often to run it again, bitwise the same each time.
        call: what to run in place of the public call on ``backend``.
    """
    call = call or call_backend(backend)
    first = case.problem.example(device)
    call(first)
    expected = first._replace(out=reference_prepare_q(first))
    wrong = difference(case.problem, first, expected)
    faults = [] if wrong is None else [wrong]
    for _ in range(repeats):
        again = case.problem.example(device)
        call(again)
        same = (
            torch.equal(a.view(torch.uint8), b.view(torch.uint8))
            for a, b in zip(again.results, first.results, strict=True)
        )
        if not all(same):
            faults.append("a repeat differs")
            break
    return faults


class PrepareQSuite(CaseSuite):
    """The suite of ``prepare_q``."""

    operation = OPERATION
    sweep, few, run = staticmethod(cases), staticmethod(simulated_cases), staticmethod(run_case)

    def bytes_needed(self, case: Case) -> int:
        problem = case.problem
        return 60 * problem.tokens * problem.heads * problem.head_dim + 2**26
