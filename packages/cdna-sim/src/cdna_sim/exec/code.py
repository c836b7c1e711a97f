"""The machine code of one kernel, decoded where it is reached."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from cdna_sim.arch import ARCHS, simulated
from cdna_sim.code_object import CodeObject
from cdna_sim.errors import UnknownOpcode
from cdna_sim.isa.decode import Instruction, decode

# Where the code object lies in a kernel's address space, for constants addressed from the program counter.
LOAD_ADDRESS = 0x1000_0000_0000


class Code:
    """One kernel's code. What has been decoded is kept and never changes.

    Raises:
        CodeObjectError: no such kernel.
        UnknownOpcode: an arch that is not modelled.
    """

    def __init__(self, code_object: CodeObject, kernel: str) -> None:
        self.code_object, self.info, self.name = code_object, code_object.kernel(kernel), kernel
        row = ARCHS.get(code_object.arch)
        if row is None or not row.simulated:
            raise UnknownOpcode(
                f"arch {code_object.arch}: only {' and '.join(simulated())} are modelled", kernel=kernel
            )
        self.arch, self.image = row, code_object.image
        self.float_mode = self.info.descriptor.rsrc1 >> 12 & 0xFF
        self._lock = threading.Lock()
        self._decoded: dict[int, Instruction] = {}
        self._found: dict[str, Any] = {}

    def remember(self, name: str, find: Callable[[], Any]) -> Any:
        """What ``find`` gave the first time: an analysis of the code that several ask for and none changes."""
        if name not in self._found:
            self._found.setdefault(name, find())
        return self._found[name]

    @property
    def entries(self) -> tuple[int, ...]:
        """Where a wave may start: firmware that preloads arguments enters past the code that loads them."""
        descriptor = self.info.descriptor
        return (descriptor.entry, descriptor.entry + 256) if descriptor.preload_length else (descriptor.entry,)

    def instruction(self, pc: int) -> Instruction:
        """The instruction at ``pc``.

        Raises:
            UnknownOpcode: no instruction starts there, or it is outside of the kernel.
        """
        found = self._decoded.get(pc)
        if found is None:
            start, stop = self.info.text
            if not start <= pc < stop:
                raise UnknownOpcode(f"the program counter left the kernel's code {start:#x} to {stop:#x}",
                                    kernel=self.name, pc=pc)  # fmt: skip
            with self._lock:
                found = self._decoded.setdefault(pc, decode(self.image[pc : pc + 16], pc, self.name))
        return found
