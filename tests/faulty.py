"""A backend with one fault, to show that ``verify``, ``bench`` and the command line notice it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from lightning_indexer import Arch, MqaLogitsProblem
from lightning_indexer.problems.mqa_logits import MqaLogitsCall
from lightning_indexer.selection import registry

# Runs instead of a kernel: (problem, call, honest), where ``honest(call)`` is torch-blocked.
Fault = Callable[[MqaLogitsProblem, MqaLogitsCall, registry.Run], None]


class FaultyKernel:
    """torch-blocked's kernel with a fault behind it."""

    def __init__(self, fault: Fault, refuses: Callable[[MqaLogitsProblem], str | None]) -> None:
        self.fault, self.refuses = fault, refuses
        self.honest: Any = registry.kernel("torch-blocked")
        self.config, self.neighbours = self.honest.config, self.honest.neighbours

    def supports(self, problem: MqaLogitsProblem, arch: Arch) -> str | None:
        return self.refuses(problem)

    def launch(self, problem: MqaLogitsProblem, arch: Arch, config: Any) -> registry.Run:
        run = self.honest.launch(problem, arch, config)
        return lambda call: self.fault(problem, call, run)


class FaultyBackend:
    name = "faulty"
    summary = "torch-blocked with a fault"

    def __init__(self, fault: Fault, refuses: Callable[[MqaLogitsProblem], str | None] = lambda problem: None) -> None:
        self.kernels = {"fp8_mqa_logits": FaultyKernel(fault, refuses)}

    def missing(self) -> str | None:
        return None


def install(monkeypatch: pytest.MonkeyPatch, backend: FaultyBackend) -> str:
    """Puts the backend into the registry for one test, reached by name; returns its name."""
    monkeypatch.setitem(registry._BACKENDS, backend.name, backend)
    registry.changed()  # a test may install one after another
    return backend.name


def honest(problem: MqaLogitsProblem, call: MqaLogitsCall, run: registry.Run) -> None:
    """No fault at all."""
    run(call)


def one_percent_high(problem: MqaLogitsProblem, call: MqaLogitsCall, run: registry.Run) -> None:
    """Every logit is 1.01 of what it should be."""
    run(call)
    call.result.mul_(1.01)
