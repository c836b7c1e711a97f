"""One wave: its registers, and its memory operations that no ``s_waitcnt`` has waited for yet."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NoReturn

import numpy as np

from cdna_sim.errors import SimulationFault, UnknownOpcode
from cdna_sim.isa.decode import Instruction
from cdna_sim.isa.fields import EXEC
from cdna_sim.isa.lanes import FULL, LOW32, masks
from cdna_sim.memory.buffers import Memory
from cdna_sim.memory.lds import Lds
from cdna_sim.ops.emit import SGPR_BIT, Touch

# A quiet NaN that no kernel makes, and as an address far from any buffer.
POISON = 0x7FFADBAD
# The counters are 6 and 4 bits wide: issuing one more operation waits for the oldest.
_MAX_VM, _MAX_LGKM = 63, 15

# An operation not yet waited for: (what commits it, registers it will write, …what the commit needs).
Entry = tuple[Any, ...]


class _Counts(dict[int, int]):
    def __missing__(self, key: int) -> int:
        return 0


@dataclass
class LaunchState:
    """What the waves of one launch share; two launches share nothing that changes.

    Attributes:
        kernel: its name, for faults.
        memory: the buffers of this launch.
        trace, on_access: as in ``Options``.
        scratch_bytes: private memory of a lane.
        counts: how often each block ran and each backward branch was taken.
        bank_conflicts: extra LDS cycles so far.
        known: what an instruction keeps from one execution to the next: the buffer it met, LDS address patterns.
    """

    kernel: str
    memory: Memory
    trace: Callable[[Any, Any], None] | None
    on_access: Callable[..., None] | None
    scratch_bytes: int
    counts: dict[int, int] = field(default_factory=_Counts)
    bank_conflicts: int = 0
    ticks: int = 0
    known: dict[Any, Any] = field(default_factory=dict)

    def clock(self) -> int:
        """A number that grows, for s_memtime: not a time."""
        self.ticks += 100
        return self.ticks


class Wave:
    """Registers and outstanding operations of one wave.

    Attributes:
        v, f, i: the 512 vector registers (AGPRs from 256 on) as uint32, float32, int32.
        S: scalar registers by operand number, VCC at 106, M0 at 124, EXEC at 126.
        exec, em: EXEC as an int, and as booleans, or True where all lanes are active.
        vm, lgkm: outstanding operations by counter, oldest first; ``vm_bits``, ``lgkm_bits``: registers they write.
        scratch: private memory, [lane, bytes].
        saturates: conversions to fp8 give the largest number where they overflow: FP16_OVFL of MODE.
    """

    def __init__(self, launch: LaunchState) -> None:
        self.launch, self.memory = launch, launch.memory
        self.counts, self.trace, self.known = launch.counts, launch.trace, launch.known
        self.V = np.zeros((512, 64), np.uint32)
        self.v = list(self.V)
        self.f = list(self.V.view(np.float32))
        self.i = list(self.V.view(np.int32))
        self.scratch = np.zeros((64, launch.scratch_bytes), np.uint8)

    def start(self, workgroup: tuple[int, int, int], index: int, lds: Lds, lanes: int, poison: bool) -> None:
        """Makes this a fresh wave ``index`` of a workgroup with ``lanes`` active lanes."""
        self.workgroup, self.index, self.lds = workgroup, index, lds
        self.S: list[int] = [POISON if poison else 0] * 128
        self.V.fill(POISON if poison else 0)
        self.scratch.fill(0xA5 if poison else 0)
        self.scc = 0
        self.saturates = False
        self.vm: list[Entry] = []
        self.lgkm: list[Entry] = []
        self.vm_bits = self.lgkm_bits = 0
        self.scalar_loads = 0
        self.pc = 0
        bits = (1 << lanes) - 1
        self.S[EXEC], self.S[EXEC + 1] = bits & LOW32, bits >> 32
        self.exec_changed()

    def exec_changed(self) -> None:
        self.exec = self.S[EXEC] | self.S[EXEC + 1] << 32
        self.em: Any = True if self.exec == FULL else masks[self.exec]

    # Outstanding operations.

    def issue_vm(self, entry: Entry) -> None:
        self.vm.append(entry)
        self.vm_bits |= entry[1]
        if len(self.vm) > _MAX_VM:
            self.wait_vm(_MAX_VM)

    def issue_lgkm(self, entry: Entry) -> None:
        self.lgkm.append(entry)
        self.lgkm_bits |= entry[1]
        if not entry[0].in_order:
            self.scalar_loads += 1
        if len(self.lgkm) > _MAX_LGKM:
            self.wait_lgkm(_MAX_LGKM)

    def wait_vm(self, count: int) -> None:
        """Commits the oldest vector memory operations until ``count`` are outstanding."""
        while len(self.vm) > count:
            entry = self.vm.pop(0)
            entry[0].commit(self, entry)
        bits = 0
        for entry in self.vm:
            bits |= entry[1]
        self.vm_bits = bits

    def wait_lgkm(self, count: int) -> None:
        """Commits what ``lgkmcnt(count)`` guarantees.

        LDS operations return in order. Scalar loads return in any order, also past LDS operations: those that have
        returned may all be scalar loads, and which of them is unknown until all have.
        """
        if count == 0:
            for entry in self.lgkm:
                entry[0].commit(self, entry)
            self.lgkm.clear()
            self.lgkm_bits = self.scalar_loads = 0
            return
        done = len(self.lgkm) - count - self.scalar_loads
        left, bits = [], 0
        for entry in self.lgkm:
            if done > 0 and entry[0].in_order:
                entry[0].commit(self, entry)
                done -= 1
            else:
                left.append(entry)
                bits |= entry[1]
        self.lgkm[:] = left
        self.lgkm_bits = bits

    def finish(self) -> None:
        """The end of the wave: stores still complete."""
        self.wait_vm(0)
        self.wait_lgkm(0)

    # Faults.

    def fault(self, ins: Instruction, message: str, lane: int | None = None, address: int | None = None) -> NoReturn:
        raise SimulationFault(
            message, kernel=self.launch.kernel, pc=ins.pc, text=ins.text, workgroup=self.workgroup, wave=self.index,
            lane=lane, address=address,
        )  # fmt: skip

    def memory_fault(self, ins: Instruction, what: str, address: int, width: int, lane: int | None = None) -> NoReturn:
        where = self.memory.where(address, width)
        self.fault(ins, f"{what} of {width} bytes at {address:#x} is outside every buffer: {where}", lane, address)

    def located(self, error: UnknownOpcode) -> UnknownOpcode:
        return UnknownOpcode(
            error.message, kernel=self.launch.kernel, pc=error.pc, text=error.text, workgroup=self.workgroup,
            wave=self.index,
        )  # fmt: skip

    def hazard(self, stretch: tuple[tuple[Instruction, Touch], ...]) -> NoReturn:
        """Finds the instruction of a stretch that touches a register which an outstanding load will write."""
        for ins, touch in stretch:
            for counter, entries, used in (
                ("vmcnt", self.vm, touch.used | touch.loads_lgkm),
                ("lgkmcnt", self.lgkm, touch.used | touch.loads_vm),
            ):
                for entry in entries:
                    if entry[1] & used:
                        load: Instruction = entry[0].ins
                        self.fault(
                            ins,
                            f"use of {_register_name(entry[1] & used)} before an s_waitcnt {counter} that waits "
                            f"for `{load.text}` at pc {load.pc:#x}",
                        )
        raise AssertionError("a hazard that no instruction of its stretch explains")


def _register_name(bits: int) -> str:
    number = (bits & -bits).bit_length() - 1
    if number >= SGPR_BIT:
        return {106: "vcc_lo", 107: "vcc_hi", 124: "m0"}.get(number - SGPR_BIT, f"s{number - SGPR_BIT}")
    return f"a{number - 256}" if number >= 256 else f"v{number}"
