"""``lightning-indexer bench --tune``: is the heuristic's tile config the fastest of those around it?

Nothing that runs a call reads what is measured here: a better config goes into the backend's ``config.py``, by hand.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from lightning_indexer.arch import arch_of
from lightning_indexer.bench.sweep import Plan, RefCheck
from lightning_indexer.bench.timing import measure
from lightning_indexer.check.cases import Case, make_inputs, make_windows
from lightning_indexer.check.memory import no_room
from lightning_indexer.check.mqa_logits import compressed_width
from lightning_indexer.problems.mqa_logits import allocate
from lightning_indexer.selection import registry as dispatch


@dataclass(frozen=True, slots=True)
class Trial:
    """One config of one backend on one case. ``median`` in microseconds, None and a ``note`` where it did not run."""

    case: Case
    backend: str
    config: str
    heuristic: bool
    median: float | None = None
    note: str = ""


def run(plan: Plan, device: torch.device) -> Iterator[Trial]:
    """Every candidate of every backend on every case. A config with a wrong result is never timed."""
    arch = arch_of(device)
    for case in plan.cases():
        room = no_room(3 * 4 * case.s_q * case.s_k, device)
        inputs = None
        for name in plan.backends:
            backend, kernel = dispatch.get(name), dispatch.kernel(name)
            problem = case.problem(case.s_k if case.form == "compressed" else 0)
            reason = room or kernel.supports(problem, arch) or backend.missing()
            if reason is not None:
                yield Trial(case, name, "", True, note=reason)
                continue
            inputs = inputs or make_inputs(case.s_q, case.s_k, case.heads, case.head_dim, device)
            ks, ke = make_windows(case.window, case.s_q, case.s_k, device)
            width = compressed_width(ks, ke, case.s_k) if case.form == "compressed" else 0
            problem = case.problem(width)
            out = allocate(problem, device)
            call = case.call(inputs, ks, ke, width, out)
            check = RefCheck(case, inputs, ks, ke, width)
            for index, config in enumerate(kernel.neighbours(problem, arch)):
                run = kernel.launch(problem, arch, config)
                out.fill_(float("nan"))
                run(call)
                _, fault = check(out)
                if fault is not None:
                    yield Trial(case, name, str(config), index == 0, note=f"WRONG: {fault}")
                    continue
                timing = measure(functools.partial(run, call), device, plan.budget_ms)
                yield Trial(case, name, str(config), index == 0, timing.median)


def differences(config: str, heuristic: str) -> str:
    """The fields in which a config's text differs from the heuristic's, e.g. ``enter_cost=2``."""
    theirs = set(_fields(heuristic))
    return ", ".join(field for field in _fields(config) if field not in theirs) or "the heuristic's"


def _fields(config: str) -> list[str]:
    return config[config.index("(") + 1 : -1].split(", ")
