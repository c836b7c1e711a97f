"""Runs a suite on a device."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from lightning_indexer.arch import arch_of
from lightning_indexer.check.memory import no_room
from lightning_indexer.check.verify import Finding, Outcome, Suite
from lightning_indexer.selection import registry

REPEATS = 20
# One case in seven is repeated; windows and forms come in sixes, so that every one is among them.
REPEATED = 7


def run(suite: Suite, cases: Sequence[Any], backends: Sequence[str], device: torch.device) -> Iterator[Outcome]:
    """Every case on every backend, one outcome each, in order. What a backend raises ends the run."""
    arch = arch_of(device)
    for index, case in enumerate(cases):
        reason = no_room(suite.bytes_needed(case), device)
        repeat = index % REPEATED == 0
        for backend in backends:
            if reason is not None:
                yield Outcome(suite.operation, case, backend, "dropped", reason)
                continue
            [verdict] = registry.explain(suite.problem(case), arch, backend)
            if verdict.reason is not None:
                yield Outcome(suite.operation, case, backend, "unsupported", verdict.reason)
                continue
            finding: Finding = suite.check(case, backend, device, repeats=REPEATS if repeat else 0)
            status, detail = ("fail", "; ".join(finding.faults)) if finding.faults else ("pass", "")
            yield Outcome(suite.operation, case, backend, status, detail, finding, repeat)  # type: ignore[arg-type]
