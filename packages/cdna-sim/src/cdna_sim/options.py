"""How a launch is simulated, and what it reports."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(frozen=True)
class Options:
    """How to run.

    Attributes:
        deferred: memory operations take effect only at the ``s_waitcnt`` that waits for them; otherwise at once.
        order: in which order the waves of a workgroup run between barriers, and the workgroups of the grid.
        seed: of ``order="shuffled"``.
        poison: registers start with a NaN pattern, and reading LDS that nothing has written is a fault.
        strict: faults for a register that is read or overwritten while a load into it is outstanding, for LDS that
            waves touch without a barrier between them, and for LDS read while a copy into it is outstanding. Without
            it, such reads give old or poisoned values.
        wait_states: a fault before the launch for instructions that follow each other sooner than hardware allows, on
            any path through the kernel.
        drop: addresses of instructions to skip, for planting faults.
        trace: called before every instruction as ``trace(wave, instruction)``; slow.
        on_access: called for every global memory access as ``on_access(kind, buffer, workgroup, wave, pc, addresses,
            bytes)``: kind is ``load``, ``store`` or ``atomic``; addresses of the active lanes, bytes of one lane.
        workgroups: the numbers (x, y, z) of those to run; None: the whole grid.
        max_instructions: a launch that executes more wave-instructions than this is a fault; None: no limit.
    """

    deferred: bool = True
    order: Literal["forward", "reversed", "shuffled"] = "forward"
    seed: int = 0
    poison: bool = True
    strict: bool = True
    wait_states: bool = True
    drop: frozenset[int] = frozenset()
    trace: Callable[[Any, Any], None] | None = None
    on_access: Callable[..., None] | None = None
    workgroups: frozenset[tuple[int, int, int]] | None = None
    max_instructions: int | None = None

    def __post_init__(self) -> None:
        if self.order not in ("forward", "reversed", "shuffled"):
            raise ValueError(f"order: got {self.order!r}, expected 'forward', 'reversed' or 'shuffled'")


@dataclass(frozen=True)
class Loop:
    """A backward branch that was taken.

    Attributes:
        start, stop: addresses of the first instruction and past the branch.
        trips: how often the branch was taken, over all waves.
        by_kind: instructions of one pass over the text between start and stop.
        instructions: wave-instructions executed there in the launch, over all waves.
    """

    start: int
    stop: int
    trips: int
    by_kind: dict[str, int]
    instructions: int


@dataclass
class Report:
    """Counts of one launch, over all waves.

    Attributes:
        instructions: wave-instructions executed.
        by_kind: MFMA, VALU, SALU, SMEM, VMEM_LOAD, VMEM_STORE, LDS, SCRATCH, BRANCH, WAIT, BARRIER, OTHER.
        by_opcode, by_pc: the same by mnemonic and by address.
        loops: backward branches that were taken, outermost first.
        loaded, stored: bytes that lanes asked for, by buffer name; vector and scalar loads together.
        lds_bank_conflicts: extra LDS cycles, by the rule in docs/simulator.md.
        waves, seconds: waves run; wall time.
        grid, block: as launched.
    """

    instructions: int = 0
    by_kind: dict[str, int] = field(default_factory=dict)
    by_opcode: dict[str, int] = field(default_factory=dict)
    by_pc: dict[int, int] = field(default_factory=dict)
    loops: list[Loop] = field(default_factory=list)
    loaded: dict[str, int] = field(default_factory=dict)
    stored: dict[str, int] = field(default_factory=dict)
    lds_bank_conflicts: int = 0
    waves: int = 0
    seconds: float = 0.0
    grid: tuple[int, int, int] = (0, 0, 0)
    block: tuple[int, int, int] = (0, 0, 0)
