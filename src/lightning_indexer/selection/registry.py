"""Which backend runs a call: a registry, one gate per backend and operation, one function that selects in the order of
``policy``.

Nothing here touches a device or imports a kernel, so the whole table can be queried for any arch on any machine.
"""

from __future__ import annotations

import importlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, runtime_checkable

import torch

from lightning_indexer import envs
from lightning_indexer.arch import Arch
from lightning_indexer.problems.mqa_logits import OPERATION, MqaLogitsProblem
from lightning_indexer.selection import policy, selfcheck

if TYPE_CHECKING:
    from lightning_indexer.amd.built import Built

# Computes what its call asks for into the call's result, on the current stream. Never validates, never allocates the
# result. Serves every call of its problem, whatever the strides, storage and alignment of the operands. It may have a
# method ``bind(call)`` that gives a quicker one for calls that agree with this one in devices, shapes and strides.
Run = Callable[[Any], None]


class Kernel(Protocol):
    """One operation of one backend. A config is frozen and hashable; ``str`` of it says which variant it is."""

    def supports(self, problem: Any, arch: Arch) -> str | None:
        """None, or a sentence saying why this problem cannot run on this arch. Pure: no device, no import."""

    def config(self, problem: Any, arch: Arch) -> Any:
        """The heuristic's choice of tile sizes: a pure function."""

    def neighbours(self, problem: Any, arch: Arch) -> Sequence[Any]:
        """Configs worth measuring on this problem; the heuristic's own first."""

    def launch(self, problem: Any, arch: Arch, config: Any) -> Run:
        """Everything that depends on the facts alone (the kernel, its grid), done once; the result is kept."""


@runtime_checkable
class Compiled(Protocol):
    """A kernel for AMD GPUs that can be compiled, and looked at, without a device."""

    def build(self, problem: Any, arch: Arch) -> Built:
        """The kernel that runs ``problem`` on an AMD arch that ``supports`` allows."""


@runtime_checkable
class Precompiled(Protocol):
    """A kernel that lies in this library's disk cache, and can be put there without a device."""

    def precompile(self, problem: Any, arch: Arch) -> str:
        """Compiles what ``launch`` would load for ``problem``, unless it is there; gives the kernel's name."""


@runtime_checkable
class Varied(Kernel, Protocol):
    """A kernel that may be given configs which its heuristic never chooses, or not at sizes that a simulator runs."""

    def variants(self, problem: Any, arch: Arch, *, thorough: bool) -> Sequence[Any]:
        """Configs to check beside the heuristic's: ``thorough``: all, else a few of every kind. A config with an
        attribute ``chunk`` is checked over more keys than that."""


class Backend(Protocol):
    """One way to compute some of the operations. See docs/adding-a-backend.md."""

    name: str
    summary: str

    @property
    def kernels(self) -> Mapping[str, Any]:
        """By operation, a :class:`Kernel` each."""

    def missing(self) -> str | None:
        """None, or what has to be installed on this machine before it can run, with the command. Never raises, imports
        nothing and touches no device."""


class BackendUnavailableError(RuntimeError):
    """The backend asked for by name cannot run this call. It is never replaced by another one."""


class Prepared(NamedTuple):
    """The launch of a problem, and the backend it is from; ``settled`` is False where its check is still to come."""

    backend: str
    run: Run
    settled: bool


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


class _Place(NamedTuple):
    """Where a registered backend stands in the chains of its archs (None: all); ``ahead_of`` None is first."""

    ahead_of: str | None
    archs: frozenset[str] | None


# A name stands for where its class is defined until something asks for it.
_BACKENDS: dict[str, Backend | str] = {
    "cuda-sm90": "cuda_sm90.backend:CudaSm90",
    "hip-gfx950": "hip_gfx950.backend:HipGfx950",
    "gluon-gfx950": "gluon_gfx950.backend:GluonGfx950",
    "flydsl": "flydsl_cdna.backend:FlyDsl",
    "triton-portable": "triton_portable.backend:TritonPortable",
    "torch-blocked": "torch_blocked.backend:TorchBlocked",
}
_PLACES: dict[str, _Place] = {}
_ON_CHANGE: list[Callable[[], None]] = []
_CHECKING = threading.RLock()


def register(
    backend: Backend,
    *,
    ahead_of: str | None = None,
    archs: Sequence[str] | None = None,
    by_name_only: bool = False,
    replace: bool = False,
) -> None:
    """Adds a backend: calls try it from now on, before the library's own.

    Args:
        backend: see :class:`Backend`.
        ahead_of: stand right before this backend in the chains that have it, instead of first.
        archs: only in the chains of these archs, e.g. ``["sm90"]``; None: wherever its gate lets it run.
        by_name_only: in no chain; ``backend=`` and ``LIGHTNING_INDEXER_BACKEND`` reach it.
        replace: take the place of the registered backend of that name.

    Raises:
        TypeError: an object that lacks a member of the protocol; the message names it.
        ValueError: the name is taken, or ``ahead_of`` or ``archs`` name what is not known.
    """
    for member in ("name", "summary", "kernels", "missing"):
        if not hasattr(backend, member):
            raise TypeError(f"backend: got {type(backend).__name__} without {member!r}, expected a Backend")
    for operation, kernel in backend.kernels.items():
        for member in ("supports", "config", "neighbours", "launch"):
            if not callable(getattr(kernel, member, None)):
                raise TypeError(f"backend: its kernel of {operation} has no {member}(), expected a Kernel")
    stands = backend.name in _BACKENDS
    if stands and not replace:
        raise ValueError(f"backend: got the name {backend.name!r}, which is taken; replace=True takes its place")
    if ahead_of is not None:
        get(ahead_of, "ahead_of")
    for name in archs or ():
        Arch.parse(name)
    _BACKENDS[backend.name] = backend
    if not stands and not by_name_only:
        _PLACES[backend.name] = _Place(ahead_of, frozenset(archs) if archs is not None else None)
    changed()


def unregister(name: str) -> None:
    """Takes a backend out of the registry.

    Raises:
        ValueError: no such backend.
    """
    get(name, "name")
    del _BACKENDS[name]
    _PLACES.pop(name, None)
    changed()


def on_change(forget: Callable[[], None]) -> None:
    """``forget`` is called whenever a decision taken earlier may no longer hold."""
    _ON_CHANGE.append(forget)


def changed() -> None:
    """Tells whoever keeps decisions that the registry, or what is thought of a backend, is another one."""
    for forget in _ON_CHANGE:
        forget()


def backends() -> tuple[Backend, ...]:
    """Every backend of the registry."""
    return tuple(get(name) for name in tuple(_BACKENDS))


def kernels(operation: str = OPERATION) -> dict[str, Any]:
    """The kernel of every backend that serves an operation, by the backend's name."""
    return {backend.name: backend.kernels[operation] for backend in backends() if operation in backend.kernels}


def kernel(name: str, operation: str = OPERATION) -> Any:
    """The kernel with which a backend serves an operation.

    Raises:
        ValueError: no such backend, or it does not serve the operation.
    """
    backend = get(name)
    if operation not in backend.kernels:
        raise ValueError(
            f"backend: got {name!r}, which has no {operation}, expected one of {', '.join(kernels(operation))}"
        )
    return backend.kernels[operation]


def get(name: str, source: str = "backend") -> Backend:
    """The backend of that name.

    Raises:
        TypeError: a name that is not a str.
        ValueError: no such backend; the message names the argument or variable and lists the known ones.
    """
    if not isinstance(name, str):
        raise TypeError(f"{source}: got {type(name).__name__}, expected a str or None")
    try:
        found = _BACKENDS[name]
    except KeyError:
        raise ValueError(f"{source}: got {name!r}, expected one of {', '.join(_BACKENDS)}") from None
    if isinstance(found, str):
        module, _, kind = found.partition(":")
        found = getattr(importlib.import_module(f"lightning_indexer.backends.{module}"), kind)()
        _BACKENDS[name] = found  # backends hold no state: two threads may each make one
    backend: Backend = found
    return backend


def select(problem: Any, arch: Arch, name: str | None = None) -> Backend:
    """The backend that runs ``problem`` on ``arch``: the one named, else the first of the policy's chain that can.

    ``name=None`` reads ``LIGHTNING_INDEXER_BACKEND``, and where that names none, ``LIGHTNING_INDEXER_KERNELS``.
    Backends behind the winner are not asked, nor imported.

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
    reasons = []
    for verdict in _verdicts(problem, arch, name, installed_only=True):
        if verdict.chosen:
            return get(verdict.backend)
        reasons.append(f"{verdict.backend}: {verdict.reason or verdict.passed_over}")
    which = f"{source}={name} does not run" if name is not None else "no backend runs"
    raise BackendUnavailableError(f"{which} {problem} on {arch.name}. {'; '.join(reasons)}")


def prepare(problem: Any, arch: Arch, name: str | None = None, device: torch.device | None = None) -> Prepared:
    """:func:`select`, then the backend's own preparation, and its self-check where one is due on ``device``.

    A backend that fails its check is taken out of the chain, and the next one is prepared.

    Raises:
        As :func:`select`.
    """
    while True:
        backend = select(problem, arch, name)
        kernel = backend.kernels[problem.operation]
        config = kernel.config(problem, arch)
        run = kernel.launch(problem, arch, config)
        if device is None or not selfcheck.is_due(problem.operation, backend.name, arch, device):
            return Prepared(backend.name, run, settled=True)
        if selfcheck.must_wait(device):
            return Prepared(backend.name, run, settled=False)
        reference = get(policy.FALLBACK).kernels[problem.operation]
        with _CHECKING:
            if selfcheck.fault_of(backend.name, kernel, config, reference, problem, arch, device) is None:
                return Prepared(backend.name, run, settled=True)
        changed()


def explain(problem: Any, arch: Arch | str, name: str | None = None, *, installed_only: bool = True) -> list[Verdict]:
    """What :func:`select` thinks of each backend, in the order in which it tries them.

    Args:
        problem: the facts of the call, e.g. ``MqaLogitsProblem(4096, 32768, 32, 128)``.
        arch: e.g. ``"sm90"`` or ``Arch.parse("sm90")``; no such device is needed.
        name: look at this backend alone.
        installed_only: count a backend whose packages are missing on this machine as unable to run.

    Raises:
        TypeError, ValueError: no problem; an unknown arch or backend.
    """
    _check_problem(problem)
    return list(_verdicts(problem, arch if isinstance(arch, Arch) else Arch.parse(arch), name, installed_only))


def support_table(problem: Any = None) -> dict[str, dict[str, str | None]]:
    """``{backend: {arch: None or the reason why not}}`` for every backend and known arch.

    What is installed on this machine plays no part. ``problem`` defaults to the shape of DeepSeek-V3.2, H=64, D=128.
    """
    if problem is None:
        problem = MqaLogitsProblem(rows=4096, keys=32768, heads=64, head_dim=128)
    _check_problem(problem)
    return {b.name: {arch.name: _reason(b, problem, arch, False) for arch in Arch.known()} for b in backends()}


def _check_problem(problem: Any) -> None:
    if not isinstance(getattr(problem, "operation", None), str):
        raise TypeError(f"problem: got {type(problem).__name__}, expected the facts of a call, e.g. a MqaLogitsProblem")


def _verdicts(problem: Any, arch: Arch, name: str | None, installed_only: bool) -> Iterator[Verdict]:
    taken = False
    for step in _steps(problem, arch, name):
        reason = _reason(get(step.backend), problem, arch, installed_only)
        chosen = not taken and reason is None and step.passed_over is None
        taken |= chosen
        yield Verdict(step.backend, chosen, reason, step.why, step.passed_over)


def _reason(backend: Backend, problem: Any, arch: Arch, installed_only: bool) -> str | None:
    kernel = backend.kernels.get(problem.operation)
    if kernel is None:
        return f"has no {problem.operation}"
    reason: str | None = kernel.supports(problem, arch)
    if reason is None and installed_only:
        reason = backend.missing() or selfcheck.failed(backend.name, problem, arch)
    return reason


def _steps(problem: Any, arch: Arch, name: str | None) -> list[policy.Step]:
    if name is not None:
        return [policy.Step(get(name).name, "")]
    on = envs.kernels()
    steps = [step for step in policy.chain(problem, arch, kernels=on) if step.backend in _BACKENDS]
    for added, place in _PLACES.items():
        names = [step.backend for step in steps]
        if (place.archs is not None and arch.name not in place.archs) or place.ahead_of not in (None, *names):
            continue
        at = 0 if place.ahead_of is None else names.index(place.ahead_of)
        steps.insert(at, policy.Step(added, "registered at run time", None if on else policy.KERNELS_OFF))
    return steps
