"""The one interface, and the choice between its two implementations."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Protocol

import torch

from lightning_indexer import envs
from lightning_indexer.amd.arguments import Grid, Value
from lightning_indexer.amd.built import Built
from lightning_indexer.arch import Arch


class Launcher(Protocol):
    """Runs compiled kernels."""

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
        """Launches one kernel.

        Args:
            built: the kernel.
            grid: workgroups along x, y, z.
            block: lanes of a workgroup, along x or along x, y, z.
            arguments: the explicit ones, as :func:`pack_arguments` takes them.
            stream: HIP stream to launch on; None is torch's current one. The simulator has none: it returns when the
                kernel has ended.
            outputs: names of the arguments whose memory the kernel may write; None if any. The simulator reports a
                store to any other one.
        """


def launcher_for(device: torch.device) -> Launcher:
    """HIP for a GPU's tensors; for the CPU's, the simulator: the one of ``simulation``, or a plain one."""
    from lightning_indexer.amd import hip_runtime as hip
    from lightning_indexer.amd import simulated as simulator

    if device.type == "cpu":
        return simulator.current() or simulator.default()
    return hip.default()


def simulates(arch: Arch) -> bool:
    """True where a call whose tensors are on the CPU is simulated: its arch is AMD's, forced by the environment or by
    ``simulation``. Outside of ``simulation``, ``TRITON_INTERPRET`` asks for Triton's interpreter instead."""
    from lightning_indexer.amd import simulated as simulator

    return arch.vendor == "amd" and (simulator.current() is not None or not envs.triton_interprets())
