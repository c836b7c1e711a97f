"""A backend with one fault, to show that ``verify``, ``bench`` and the command line notice it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from lightning_indexer import Arch, Problem
from lightning_indexer.calls import mqa_logits as api
from lightning_indexer.problems.mqa_logits import Operands
from lightning_indexer.selection import registry as dispatch

# Runs instead of a kernel: (problem, operands, out, honest), where ``honest(operands, out)`` is torch-blocked.
Fault = Callable[[Problem, Operands, torch.Tensor, dispatch.Run], None]


class FaultyBackend:
    name = "faulty"
    summary = "torch-blocked with a fault"

    def __init__(self, fault: Fault, refuses: Callable[[Problem], str | None] = lambda problem: None) -> None:
        self.fault, self.refuses = fault, refuses

    def missing(self) -> str | None:
        return None

    def supports(self, problem: Problem, arch: Arch) -> str | None:
        return self.refuses(problem)

    def prepare(self, problem: Problem, arch: Arch) -> dispatch.Run:
        honest = dispatch.get("torch-blocked").prepare(problem, arch)
        return lambda operands, out: self.fault(problem, operands, out, honest)


def install(monkeypatch: pytest.MonkeyPatch, backend: FaultyBackend) -> str:
    """Puts the backend into the registry for one test; returns its name."""
    monkeypatch.setitem(dispatch._BACKENDS, backend.name, backend)
    api.forget_plans()  # a test may install one after another
    return backend.name


def honest(problem: Problem, operands: Operands, out: torch.Tensor, run: dispatch.Run) -> None:
    """No fault at all."""
    run(operands, out)


def one_percent_high(problem: Problem, operands: Operands, out: torch.Tensor, run: dispatch.Run) -> None:
    """Every logit is 1.01 of what it should be."""
    run(operands, out)
    out *= 1.01
