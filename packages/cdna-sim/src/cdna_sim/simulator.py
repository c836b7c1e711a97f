"""Runs kernels: the entry of the package."""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np

from cdna_sim.arguments import Pointer, Value, explicit_arguments, hidden_arguments, pack_arguments
from cdna_sim.code_object import CodeObject
from cdna_sim.errors import SimulationFault
from cdna_sim.exec.launch import Launch
from cdna_sim.exec.program import program_for
from cdna_sim.memory.buffers import Memory
from cdna_sim.options import Options, Report

Sizes = int | tuple[int, int, int]
# IEEE round to nearest even, denormals kept, for both precisions: what compilers ask for on these archs.
_FLOAT_MODE = 0xF0


class Simulator:
    """Runs one kernel of a code object. Threads may share one: a launch keeps all its state to itself.

    Args:
        code_object: loaded.
        kernel: its name; None for the only one.
        options: how to run.

    Raises:
        CodeObjectError: no such kernel.
        UnknownOpcode: an arch that is not modelled.
        SimulationFault: a float mode that is not modelled, or two instructions that are too close together.
    """

    def __init__(self, code_object: CodeObject, kernel: str | None = None, options: Options | None = None) -> None:
        self.code_object, self.options = code_object, options or Options()
        self.info = code_object.kernel(kernel)
        self.kernel = self.info.name
        self._program = program_for(code_object, self.kernel, self.options)
        mode = self._program.code.float_mode
        if mode != _FLOAT_MODE:
            raise SimulationFault(f"float mode {mode:#x}: only {_FLOAT_MODE:#x} is modelled", kernel=self.kernel)
        if self.options.wait_states:
            for hazard in self._program.hazards():
                raise SimulationFault(
                    f"{hazard.rule} {hazard.found} wait states after `{hazard.first.text}` at {hazard.first.pc:#x}: "
                    f"hardware needs {hazard.needed}",
                    kernel=self.kernel, pc=hazard.second.pc, text=hazard.second.text,
                )  # fmt: skip

    def run(
        self,
        grid: Sizes,
        block: Sizes,
        arguments: Sequence[Value | np.ndarray[Any, Any]],
        *,
        dynamic_lds: int = 0,
        outputs: Collection[str] | None = None,
        names: Sequence[str] | None = None,
    ) -> Report:
        """Runs the kernel on arrays and numbers; arrays are read and written in place.

        A kernel sees each array at an address of its own, 64 GiB from the next, and may touch nothing else.

        Args:
            grid, block: workgroups and work-items, along x or along x, y, z.
            arguments: the explicit ones, as :func:`pack_arguments` takes them, or contiguous arrays.
            dynamic_lds: bytes beyond the kernel's static LDS.
            outputs: names of the arguments that the kernel may write; None if any. A store to another is a fault.
            names: what faults and the report call the arguments; None: as the code object does.

        Raises:
            SimulationFault: see its class; arrays keep what had been written.
            ValueError, TypeError: an argument that does not fit; the message names it.
        """
        memory = Memory()
        known = names if names is not None else [argument.name for argument in explicit_arguments(self.info)]
        values: list[Value] = []
        for index, value in enumerate(arguments):
            if isinstance(value, np.ndarray):
                name = (known[index] if index < len(known) else "") or f"argument {index}"
                writable = outputs is None or name in outputs
                values.append(Pointer(memory.place(name, value, writable=writable)))
            elif isinstance(value, np.bool_ | np.integer | np.floating):
                values.append(value.item())
            else:
                values.append(value)
        sizes, shape = _three(grid), _three(block)
        segment = hidden_arguments(self.info, pack_arguments(self.info, values), sizes, shape, dynamic_lds)
        return self.launch(sizes, shape, segment, memory, dynamic_lds)

    def launch(self, grid: Sizes, block: Sizes, kernarg: bytes, memory: Memory, dynamic_lds: int = 0) -> Report:
        """Runs the kernel on registered memory with a kernarg segment that the caller has packed.

        Args:
            grid, block: workgroups and work-items, along x or along x, y, z.
            kernarg: the kernel argument segment, hidden arguments included.
            memory: what the kernel may touch.
            dynamic_lds: bytes beyond the kernel's static LDS.

        Raises:
            SimulationFault: see its class; memory keeps what had been written.
        """
        started = time.perf_counter()
        launch = Launch(self._program, self.options, memory, _three(block), _three(grid), kernarg, dynamic_lds)
        with np.errstate(all="ignore"):
            report = launch.run()
        report.seconds = time.perf_counter() - started
        return report


def run(
    code_object: CodeObject,
    grid: Sizes,
    block: Sizes,
    arguments: Sequence[Value | np.ndarray[Any, Any]],
    *,
    kernel: str | None = None,
    options: Options | None = None,
    dynamic_lds: int = 0,
    outputs: Collection[str] | None = None,
) -> Report:
    """Runs one kernel: :meth:`Simulator.run` of ``Simulator(code_object, kernel, options)``."""
    return Simulator(code_object, kernel, options).run(grid, block, arguments, dynamic_lds=dynamic_lds, outputs=outputs)


def _three(sizes: Sizes) -> tuple[int, int, int]:
    return (sizes, 1, 1) if isinstance(sizes, int) else sizes
