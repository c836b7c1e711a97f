"""The first call of a kernel on hardware that this project has not measured holds it against the PyTorch backend.

AMD's kernels here have been executed in simulation alone, and most NVIDIA archs were only compiled for. So on such an
arch a kernel first runs a small adversarial problem of the same H, D and form with the config it is to run with, on the
device; a mismatch takes its backend out of the chain for the process, with a warning that says what differed. It costs
milliseconds, once a kernel. ``LIGHTNING_INDEXER_SELF_CHECK`` is 0 (never) or 1 (everywhere, measured archs and the
simulator included).
"""

from __future__ import annotations

import logging
import warnings
from typing import Any

import torch

from lightning_indexer import envs
from lightning_indexer.arch import Arch
from lightning_indexer.selection import policy

log = logging.getLogger("lightning_indexer")

# Kernels that were checked, and what was wrong with those that failed: by (backend, arch, config and form).
_CHECKED: set[object] = set()
_FAILED: dict[tuple[str, str, str], str] = {}  # by (backend, arch, operation)


class SelfCheckWarning(UserWarning):
    """A kernel gave wrong results on this device, and is not used."""


def is_due(operation: str, backend: str, arch: Arch, device: torch.device) -> bool:
    """True where a kernel of this backend is to be checked before its first call on the device."""
    asked = envs.self_check()
    if asked is not None:
        return asked and backend != policy.FALLBACK
    measured = policy.measured(operation, backend, arch) or backend == policy.FALLBACK
    return device.type == "cuda" and not measured


def must_wait(device: torch.device) -> bool:
    """True while a graph is captured: a check would be captured with it, and cannot read its own result."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def failed(backend: str, problem: Any, arch: Arch) -> str | None:
    """None, or why this process no longer runs the backend."""
    return _FAILED.get((backend, arch.name, problem.operation))


def forget() -> None:
    """Checks every kernel again, those that failed too."""
    _CHECKED.clear()
    _FAILED.clear()


def fault_of(
    backend: str, kernel: Any, config: Any, reference: Any, problem: Any, arch: Arch, device: torch.device
) -> str | None:
    """Runs the check unless this kernel has passed it; None, or what is wrong, which is then warned of.

    Args:
        kernel, config: what is to run ``problem``.
        reference: torch-blocked's kernel of the operation.
        problem: the facts of the call that is to come.
    """
    small = problem.adversarial(arch)
    key = (backend, arch.name, device.index, small, config)
    if key in _CHECKED:
        return None
    with torch.no_grad():
        call, expected = small.example(device), small.example(device)
        try:
            kernel.launch(small, arch, config)(call)
            if device.type == "cuda":
                torch.cuda.synchronize(device)
        except RuntimeError as error:  # a compiler, a driver or a runtime that refused the kernel
            difference: str | None = f"{type(error).__name__}: {error}"
        else:
            reference.launch(small, arch, reference.config(small, arch))(expected)
            difference = small.compare(call, expected)
    if difference is None:
        _CHECKED.add(key)
        return None
    fault = f"failed its self-check on {arch.name} with {config}, {small}: {difference}"
    _FAILED[backend, arch.name, problem.operation] = fault
    message = (
        f"{backend} {fault}. It is not used for {problem.operation} in this process; the next backend is. "
        "Please report this line, with the output of `lightning-indexer info`, as an issue of the project"
    )
    log.error("%s", message)
    warnings.warn(message, SelfCheckWarning, stacklevel=2)
    return fault
