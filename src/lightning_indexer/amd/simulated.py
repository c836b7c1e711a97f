"""Kernels run in the simulator, on tensors in host memory."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Collection, Iterator, Sequence
from contextvars import ContextVar
from typing import TYPE_CHECKING

import torch

from lightning_indexer import sim
from lightning_indexer.amd.arguments import Value, explicit_arguments, hidden_arguments, pack_arguments
from lightning_indexer.amd.built import Built
from lightning_indexer.amd.launcher import Grid, three
from lightning_indexer.arch import assume
from lightning_indexer.toolchain.code_object import CodeObject

if TYPE_CHECKING:
    import numpy
    from numpy.typing import NDArray


ARCHS = ("gfx942", "gfx950")


class SimLauncher:
    """Simulates every launch; a memory fault raises ``sim.SimulationFault``.

    Kernels may touch, of each tensor argument, the bytes from its first to its last element, and nothing else. They
    see each tensor at an address of its own, 64 GiB from the next, so that no offset leads from one into another.

    Attributes:
        options: how the simulator runs.
        reports: what it counted, a launch each.
    """

    def __init__(self, options: sim.Options | None = None) -> None:
        """Raises ModuleNotFoundError where the simulator's packages are missing; it says what to install."""
        if (reason := sim.missing()) is not None:
            raise ModuleNotFoundError(reason)
        self.options = options or sim.Options()
        self.reports: list[sim.Report] = []
        # Decoding a kernel takes longer than a small launch of it.
        self._simulators: dict[tuple[CodeObject, str], sim.Simulator] = {}

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
        if built.code_object.arch not in ARCHS:
            raise ValueError(f"got a kernel for {built.code_object.arch}; the simulator runs {' and '.join(ARCHS)}")
        info, memory = built.info, sim.Memory()
        given: list[Value] = []
        for index, value in enumerate(arguments):
            if isinstance(value, torch.Tensor):
                name = _name(built, index)
                # The low bits are the tensor's own: kernels are compiled for their alignment.
                address = (index + 1 << _SPACING) + value.data_ptr() % _PAGE
                writable = outputs is None or name in outputs
                given.append(memory.register(name, _bytes_of(name, value), address=address, writable=writable))
            else:
                given.append(value)
        packed = pack_arguments(info, given)
        key = (built.code_object, built.kernel)
        if key not in self._simulators:
            self._simulators[key] = sim.Simulator(built.code_object, built.kernel, self.options)
        sizes = three(block)
        segment = hidden_arguments(info, packed, grid, sizes, built.dynamic_lds)
        report = self._simulators[key].launch(grid, sizes, segment, memory, built.dynamic_lds)
        self.reports.append(report)


@contextlib.contextmanager
def simulation(arch: str, options: sim.Options | None = None) -> Iterator[SimLauncher]:
    """Inside, calls whose tensors are on the CPU run as on ``arch``, their kernels in the simulator.

    Args:
        arch: ``gfx942`` or ``gfx950``.
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


_SPACING, _PAGE = 36, 2**16


def _name(built: Built, index: int) -> str:
    names = built.argument_names or tuple(argument.name for argument in explicit_arguments(built.info))
    return (names[index] if index < len(names) else "") or f"argument {index}"


def _bytes_of(name: str, tensor: torch.Tensor) -> NDArray[numpy.uint8]:
    """The memory from a tensor's first to its last element, as an array that shares it."""
    if tensor.device.type != "cpu":
        raise ValueError(f"{name}: got a tensor on {tensor.device}, expected one on the CPU: the launch is simulated")
    if tensor.numel() == 0:
        return tensor.new_empty(0, dtype=torch.uint8).numpy()
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.as_strided((last + 1,), (1,)).view(torch.uint8).numpy()
