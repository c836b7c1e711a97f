"""Kernels run in the simulator, on tensors in host memory."""

from __future__ import annotations

import contextlib
import functools
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from contextvars import ContextVar
from typing import TYPE_CHECKING

import torch

from lightning_indexer.amd import cdna
from lightning_indexer.amd.arguments import Grid, Value
from lightning_indexer.amd.built import Built
from lightning_indexer.arch import Arch, assume

if TYPE_CHECKING:
    import numpy
    from numpy.typing import NDArray

    from cdna_sim import CodeObject, Options, Report, Simulator


ARCHS = tuple(arch.name for arch in Arch.known() if arch.simulated)
_REPORTS = 256


class SimLauncher:
    """Simulates every launch; a memory fault raises ``cdna_sim.SimulationFault``.

    Kernels may touch, of each tensor argument, the bytes from its first to its last element, and nothing else. They
    see each tensor at an address of its own, 64 GiB from the next, so that no offset leads from one into another.

    Attributes:
        options: how the simulator runs.
        reports: what it counted, a launch each; of the last 256.
    """

    def __init__(self, options: Options | None = None) -> None:
        """Raises ModuleNotFoundError where the simulator's packages are missing; it says what to install."""
        if (reason := cdna.simulator_missing()) is not None:
            raise ModuleNotFoundError(reason)
        from cdna_sim import Options

        self.options = options or Options()
        self.reports: deque[Report] = deque(maxlen=_REPORTS)
        # Decoding a kernel takes longer than a small launch of it.
        self._simulators: dict[tuple[CodeObject, str], Simulator] = {}

    def launch(
        self,
        built: Built,
        grid: Grid,
        block: int | Grid,
        arguments: Sequence[Value],
        stream: int | None = None,
        *,
        outputs: Collection[str] | None = None,
    ) -> None:
        """As ``Launcher.launch``; returns when the kernel has ended."""
        from cdna_sim import Simulator, explicit_arguments

        if built.code_object.arch not in ARCHS:
            raise ValueError(f"got a kernel for {built.code_object.arch}; the simulator runs {' and '.join(ARCHS)}")
        key = (built.code_object, built.kernel)
        if key not in self._simulators:
            self._simulators[key] = Simulator(built.code_object, built.kernel, self.options)
        names = built.argument_names or tuple(argument.name for argument in explicit_arguments(built.info))
        names += ("",) * (len(arguments) - len(names))
        given = [
            _bytes_of(names[index] or f"argument {index}", value) if isinstance(value, torch.Tensor) else value
            for index, value in enumerate(arguments)
        ]
        report = self._simulators[key].run(
            grid, block, given, dynamic_lds=built.dynamic_lds, outputs=outputs, names=names
        )
        self.reports.append(report)


@contextlib.contextmanager
def simulation(arch: str, options: Options | None = None) -> Iterator[SimLauncher]:
    """Inside, calls whose tensors are on the CPU run as on ``arch``, their kernels in the simulator.

    Args:
        arch: one whose row in ``arch`` says ``simulated``.
        options: how the simulator runs.

    Yields:
        The launcher, whose ``reports`` grow with each launch.

    Raises:
        ValueError: another arch.
        ModuleNotFoundError: the simulator's packages are missing; the message says what to install.
    """
    if arch not in ARCHS:
        raise ValueError(f"arch: got {arch!r}, expected one of {', '.join(ARCHS)}")
    launcher = SimLauncher(options)
    token = _CURRENT.set(launcher)
    try:
        with assume(arch):
            yield launcher
    finally:
        _CURRENT.reset(token)


def current() -> SimLauncher | None:
    """The launcher of the innermost ``simulation``, or None outside of one."""
    return _CURRENT.get()


@functools.cache
def default() -> SimLauncher:
    """The launcher of calls outside of ``simulation``: the arch is forced by the environment."""
    return SimLauncher()


_CURRENT: ContextVar[SimLauncher | None] = ContextVar("simulation", default=None)


def _bytes_of(name: str, tensor: torch.Tensor) -> NDArray[numpy.uint8]:
    """The memory from a tensor's first to its last element, as an array that shares it."""
    if tensor.device.type != "cpu":
        raise ValueError(f"{name}: got a tensor on {tensor.device}, expected one on the CPU: the launch is simulated")
    if tensor.numel() == 0:
        return tensor.new_empty(0, dtype=torch.uint8).numpy()
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.as_strided((last + 1,), (1,)).view(torch.uint8).numpy()
