"""Which backend runs a call: a registry, one gate per backend, one function that selects in the order of ``policy``.

Nothing here touches a device or imports a kernel, so the whole table can be queried for any arch on any machine.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch

from lightning_indexer import envs
from lightning_indexer.amd.built import Built
from lightning_indexer.arch import Arch
from lightning_indexer.backends.cuda_sm90.backend import CudaSm90
from lightning_indexer.backends.flydsl_cdna.backend import FlyDsl
from lightning_indexer.backends.gluon_gfx950.backend import GluonGfx950
from lightning_indexer.backends.hip_gfx950.backend import HipGfx950
from lightning_indexer.backends.torch_blocked.backend import TorchBlocked
from lightning_indexer.backends.triton_portable.backend import TritonPortable
from lightning_indexer.problems.mqa_logits import Operands, Problem
from lightning_indexer.selection import policy

# Writes the logits into ``out`` [M, width] on the current stream. Never validates, never allocates the result.
Run = Callable[[Operands, torch.Tensor], None]


class Backend(Protocol):
    """One way to compute the logits. See docs/adding-a-backend.md."""

    name: str
    summary: str

    def missing(self) -> str | None:
        """None, or what has to be installed on this machine before it can run, with the command."""

    def supports(self, problem: Problem, arch: Arch) -> str | None:
        """None, or a sentence saying why this problem cannot run on this arch. Pure: no device, no import."""

    def prepare(self, problem: Problem, arch: Arch) -> Run:
        """Everything that depends on the facts alone (tile sizes, the kernel), done once; the result is cached."""

    def candidates(self, problem: Problem, arch: Arch) -> Sequence[tuple[object, Run]]:
        """Tile configs worth measuring on this problem, each with its run; the heuristic's own first."""


@runtime_checkable
class AmdBackend(Backend, Protocol):
    """A backend whose AMD kernels can be compiled, and looked at, without a device."""

    def build(self, problem: Problem, arch: Arch) -> Built:
        """The kernel that runs ``problem`` on an AMD arch that ``supports`` allows."""


@runtime_checkable
class Precompiling(Backend, Protocol):
    """A backend that keeps its kernels in this library's disk cache, and can put them there without a device."""

    def precompile(self, problem: Problem, arch: Arch) -> str:
        """Compiles what ``prepare`` would load for ``problem``, unless it is there; gives the kernel's name."""


_BACKENDS: dict[str, Backend] = {
    backend.name: backend
    for backend in (CudaSm90(), HipGfx950(), GluonGfx950(), FlyDsl(), TritonPortable(), TorchBlocked())
}


class BackendUnavailableError(RuntimeError):
    """The backend asked for by name cannot run this call. It is never replaced by another one."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What selection thinks of one backend.

    Attributes:
        reason: None where it could run, else why not.
        why: why the policy has it at this place; empty for a backend looked at by name.
        passed_over: None, or why the policy does not take it for this call, even where it could run.
    """

    backend: str
    chosen: bool
    reason: str | None
    why: str = ""
    passed_over: str | None = None

    def __str__(self) -> str:
        state = self.reason or ("can run" if self.passed_over is None else "can run by name")
        note = self.passed_over or self.why
        return f"{'->' if self.chosen else '  '} {self.backend}: {state}{f' ({note})' if note else ''}"


def backends() -> tuple[Backend, ...]:
    """Every backend of the registry."""
    return tuple(_BACKENDS.values())


def get(name: str, source: str = "backend") -> Backend:
    """The backend of that name.

    Raises:
        TypeError: a name that is not a str.
        ValueError: no such backend; the message names the argument or variable and lists the known ones.
    """
    if not isinstance(name, str):
        raise TypeError(f"{source}: got {type(name).__name__}, expected a str or None")
    try:
        return _BACKENDS[name]
    except KeyError:
        raise ValueError(f"{source}: got {name!r}, expected one of {', '.join(_BACKENDS)}") from None


def select(problem: Problem, arch: Arch, name: str | None = None) -> Backend:
    """The backend that runs ``problem`` on ``arch``: the one named, else the first of the policy's chain that can.

    ``name=None`` reads ``LIGHTNING_INDEXER_BACKEND``, and where that names none, ``LIGHTNING_INDEXER_KERNELS``.

    Raises:
        TypeError: a name that is not a str.
        ValueError: an unknown name.
        BackendUnavailableError: the named backend cannot run this problem here; the message says why.
    """
    source = "backend"
    if name is None:
        name, source = envs.backend(), "LIGHTNING_INDEXER_BACKEND"
    if name is not None:
        get(name, source)
    verdicts = explain(problem, arch, name)
    for verdict in verdicts:
        if verdict.chosen:
            return _BACKENDS[verdict.backend]
    reasons = "; ".join(f"{verdict.backend}: {verdict.reason or verdict.passed_over}" for verdict in verdicts)
    which = f"{source}={name} does not run" if name is not None else "no backend runs"
    raise BackendUnavailableError(f"{which} {problem} on {arch.name}. {reasons}")


def prepare(problem: Problem, arch: Arch, name: str | None = None) -> Run:
    """:func:`select`, then the backend's own preparation; cached, so that a repeated call costs one look-up.

    Raises:
        As :func:`select`.
    """
    if name is not None:
        get(name)
    # Whatever selection reads from the environment is part of the key.
    interprets = arch.vendor == "cpu" and envs.triton_interprets()
    environment = (envs.backend(), envs.kernels()) if name is None else None
    return _prepare(problem, arch, name, environment, interprets)


@functools.lru_cache(maxsize=4096)
def _prepare(problem: Problem, arch: Arch, name: str | None, _environment: object, _interprets: bool) -> Run:
    return select(problem, arch, name).prepare(problem, arch)


def forget() -> None:
    """Drops what :func:`prepare` keeps."""
    _prepare.cache_clear()


def explain(problem: Problem, arch: Arch, name: str | None = None, *, installed_only: bool = True) -> list[Verdict]:
    """What :func:`select` thinks of each backend, in the order in which it tries them.

    Args:
        problem: the facts of the call, e.g. ``Problem(4096, 32768, 32, 128)``.
        arch: e.g. ``Arch.parse("gfx950")``; no such device is needed.
        name: look at this backend alone.
        installed_only: count a backend whose packages are missing on this machine as unable to run.
    """
    if name is not None:
        steps: tuple[policy.Step, ...] = (policy.Step(get(name).name, ""),)
    else:
        steps = policy.chain(problem, arch, kernels=envs.kernels())
    verdicts: list[Verdict] = []
    taken = False
    for step in steps:
        backend = _BACKENDS.get(step.backend)
        if backend is None:
            continue
        reason = backend.supports(problem, arch) or (backend.missing() if installed_only else None)
        chosen = not taken and reason is None and step.passed_over is None
        taken |= chosen
        verdicts.append(Verdict(step.backend, chosen, reason, step.why, step.passed_over))
    return verdicts


def support_table(problem: Problem | None = None) -> dict[str, dict[str, str | None]]:
    """``{backend: {arch: None or the reason why not}}`` for every backend and known arch.

    What is installed on this machine plays no part. ``problem`` defaults to the shape of DeepSeek-V3.2, H=64, D=128.
    """
    problem = problem or Problem(rows=4096, keys=32768, heads=64, head_dim=128)
    return {b.name: {arch.name: b.supports(problem, arch) for arch in Arch.known()} for b in backends()}
