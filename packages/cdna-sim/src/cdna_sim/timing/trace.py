"""Traces: what each wave of some workgroups executed, and which memory it touched."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from cdna_sim.isa.decode import Instruction
from cdna_sim.isa.fields import SGPR_LIMIT
from cdna_sim.timing.instructions import LDS, SMEM, Op

Workgroup = tuple[int, int, int]
_LINE = 128
# Lanes of which the address unit makes one access, and the bytes that they have to share for it.
_QUAD, _SHARED = 4, 64


@dataclass(eq=False, slots=True)
class Access:
    """One instruction's use of memory: accesses of the address unit, and the lines of 128 bytes, in their order."""

    accesses: int
    lines: tuple[int, ...]
    size: int  # bytes


@dataclass(eq=False, slots=True)
class WaveTrace:
    """What one wave executed.

    Attributes:
        ops: one after another.
        extras: for each of them an ``Access`` for memory, extra cycles of bank conflicts for LDS, or None.
    """

    ops: list[Op] = field(default_factory=list)
    extras: list[Any] = field(default_factory=list)


class Recorder:
    """Collects traces: give ``trace`` and ``on_access`` to the simulator's ``Options``.

    Attributes:
        workgroups: the waves of each, by number.
    """

    def __init__(self, ops: dict[int, Op]) -> None:
        self._ops = ops
        self.workgroups: dict[Workgroup, list[WaveTrace]] = {}
        self._last: tuple[Any, WaveTrace, int] | None = None
        self._patterns: dict[tuple[bytes, int, int], tuple[int, tuple[int, ...]]] = {}
        self._wave: Any = None
        self._trace: WaveTrace | None = None

    def trace(self, wave: Any, ins: Instruction) -> None:
        """``Options.trace``."""
        self._settle(wave)
        waves = self.workgroups.setdefault(wave.workgroup, [])
        while len(waves) <= wave.index:
            waves.append(WaveTrace())
        one = waves[wave.index]
        op = self._ops[ins.pc]
        one.ops.append(op)
        one.extras.append(None)
        if op.unit == SMEM:
            one.extras[-1] = _scalar_access(wave, ins)
        self._trace = one
        self._last = (wave.launch, one, wave.launch.bank_conflicts) if op.unit == LDS else None

    def _settle(self, wave: Any) -> None:
        """What the last LDS instruction's banks cost shows after it."""
        if self._last is not None:
            launch, one, before = self._last
            one.extras[-1] = launch.bank_conflicts - before
            self._last = None

    def on_access(
        self, kind: str, buffer: str, workgroup: Workgroup, wave: int, pc: int, addresses: Any, width: int
    ) -> None:
        """``Options.on_access``: of the instruction traced last."""
        if self._trace is None or not len(addresses):
            return
        first = int(addresses[0])
        relative = addresses - first
        key = (relative.tobytes(), first % _LINE, width)
        pattern = self._patterns.get(key)
        if pattern is None:
            pattern = self._patterns[key] = _pattern(relative + first % _LINE, width)
        start = first // _LINE
        lines = tuple([start + line for line in pattern[1]])
        before = self._trace.extras[-1]
        size = width * len(addresses)
        if before is None:
            self._trace.extras[-1] = Access(pattern[0], lines, size)
        else:
            before.accesses += pattern[0]
            before.lines += lines
            before.size += size


def _pattern(addresses: Any, width: int) -> tuple[int, tuple[int, ...]]:
    """Accesses, and lines in the order in which they are first touched."""
    accesses = 0
    for start in range(0, len(addresses), _QUAD):
        quad = addresses[start : start + _QUAD]
        accesses += len(np.unique(np.concatenate((quad, quad + width - 1)) // _SHARED))
    ends = np.stack((addresses, addresses + width - 1), axis=1).reshape(-1) // _LINE
    return accesses, tuple(dict.fromkeys(ends.tolist()))


def _scalar_access(wave: Any, ins: Instruction) -> Access:
    """Of a scalar load: the line it starts in. Offsets in registers are small against a line."""
    base = ins.bits("sbase")
    if not ins.has("sbase") or base + 1 >= SGPR_LIMIT or "LOAD" not in ins.name:
        return Access(0, (), 0)
    address = wave.S[base] | (wave.S[base + 1] & 0xFFFF) << 32
    offset = ins.bits("offset") & 0x1FFFFF if ins.bits("imm") else 0
    if ins.bits("soffset_en"):
        offset += wave.S[ins.bits("soffset")]
    return Access(1, ((address + offset) // _LINE,), 4)
