"""One compute unit: traces of the workgroups that are resident together, replayed cycle by cycle.

Rules, each with its source in ``device.py``:

- A wave issues in order, at most one instruction a turn of four cycles; a SIMD at most one of each kind a turn, each
  from another wave, the oldest first.
- The vector unit takes a vector instruction for 4 cycles (8 or 16 some), and the issue of a matrix instruction.
- The matrix unit takes a matrix instruction for its passes. In the first two, no vector instruction issues; packed
  float32 and dot products not before it has been idle for 12 cycles.
- Results of matrix instructions are used after their latency, but for an accumulator, which goes on at once.
- An s_waitcnt holds its wave until no more than its counts are outstanding: vector memory in order, and LDS and scalar
  loads together. s_nop and s_barrier hold it too; a branch that is taken delays what follows.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from cdna_sim.timing.device import TURN, Device
from cdna_sim.timing.instructions import BARRIER, BRANCH, END, LDS, MATRIX, NOP, SCALAR, SMEM, VECTOR, VMEM, WAIT, Op
from cdna_sim.timing.memory import UnitMemory
from cdna_sim.timing.trace import WaveTrace

# Why a wave did not issue when it could have.
CAUSES = ("vector memory", "LDS, scalar loads", "barrier", "matrix unit busy", "matrix result", "operands read",
          "packed beside matrix", "vector unit busy", "issue slot", "nop, branch")  # fmt: skip
VMCNT, LGKMCNT, AT_BARRIER, MATRIX_BUSY, MATRIX_RESULT, READ_PHASE, PACKED, VECTOR_BUSY, SLOT, OWN = range(len(CAUSES))
_MAX_VM = 63


class _Simd:
    """One SIMD: when each of its units is free again."""

    __slots__ = ("alone", "branch", "lds", "matrix", "read", "scalar", "smem", "vector", "vmem", "waves")

    def __init__(self) -> None:
        self.vector = self.matrix = self.read = self.alone = 0.0
        self.scalar = self.smem = self.vmem = self.lds = self.branch = 0.0
        self.waves = 0


class _Wave:
    """One wave: where it is in its trace, and what is outstanding."""

    __slots__ = (
        "arrived",
        "at",
        "extras",
        "group",
        "lgkm",
        "mask",
        "number",
        "ops",
        "results",
        "simd",
        "slot",
        "stalls",
        "vm",
    )  # fmt: skip

    def __init__(self, trace: WaveTrace, simd: _Simd, group: _Group, number: int) -> None:
        self.ops, self.extras, self.at = trace.ops, trace.extras, 0
        self.simd, self.group, self.number = simd, group, number
        self.vm: deque[float] = deque()
        self.lgkm: deque[float] = deque()
        self.results: list[tuple[int, float, float]] = []  # registers, ready, ready as an accumulator
        self.mask = 0
        self.stalls = [0.0] * len(CAUSES)
        self.arrived = 0.0


class _Group:
    """One resident workgroup."""

    __slots__ = ("end", "running", "slot", "start", "waiting")

    def __init__(self, slot: int, start: float) -> None:
        self.slot, self.start, self.end = slot, start, start
        self.running = 0
        self.waiting: list[_Wave] = []


@dataclass
class Run:
    """What a run of one compute unit gave.

    Attributes:
        cycles: of each workgroup, from its start to its end.
        total: cycles of the run.
        busy: cycles of each unit; of vector and matrix, over the SIMDs.
        stalls: wave-cycles by cause; ``issued``: wave-cycles in which a wave issued; ``waves``: all wave-cycles.
        events: of the first workgroup, (wave, op, start, cycles), where they were asked for.
    """

    cycles: list[float]
    total: float
    busy: dict[str, float]
    stalls: dict[str, float]
    issued: float
    waves: float
    events: list[tuple[int, Op, float, float]] = field(default_factory=list)


def replay(
    device: Device, workgroups: Sequence[Sequence[WaveTrace]], memory: UnitMemory, *, events: bool = False
) -> Run:
    """Replays workgroups that start together on one compute unit."""
    simds = [_Simd() for _ in range(device.simds)]
    heap: list[tuple[float, int, Any]] = []
    groups: list[_Group] = []
    waves: list[_Wave] = []
    turn = TURN
    for slot, traces in enumerate(workgroups):
        group = _Group(slot, 0.0)
        groups.append(group)
        for trace in traces:
            simd = min(simds, key=lambda one: one.waves)
            simd.waves += 1
            wave = _Wave(trace, simd, group, len(waves))
            waves.append(wave)
            group.running += 1
            heapq.heappush(heap, (float(turn * (len(waves) - 1)), wave.number, wave))
    run = _Replay(device, memory, events)
    while heap:
        now, number, wave = heap[0]
        again = run.step(now, wave)
        if again is None:
            heapq.heappop(heap)
            for time, released in run.released:
                heapq.heappush(heap, (time, released.number, released))
            run.released.clear()
        else:
            heapq.heapreplace(heap, (again, number, wave))
    stalls = {cause: sum(wave.stalls[index] for wave in waves) for index, cause in enumerate(CAUSES)}
    spans = [group.end - group.start for group in groups]
    lives = sum(group.end * len(traces) for group, traces in zip(groups, workgroups, strict=True))
    busy = {"vector": run.vector, "matrix": run.matrix, **memory.busy}
    return Run(spans, max(spans, default=0.0), busy, stalls, run.issued * turn, lives, run.events)


class _Replay:
    """The rules: ``step`` issues a wave's next instruction, or says when to ask again."""

    def __init__(self, device: Device, memory: UnitMemory, events: bool) -> None:
        self.device, self.memory, self.keep = device, memory, events
        self.vector = self.matrix = 0.0
        self.issued = 0
        self.events: list[tuple[int, Op, float, float]] = []
        self.released: list[tuple[float, _Wave]] = []

    def step(self, now: float, w: _Wave) -> float | None:
        """When the wave comes next; None where it waits for others or has ended."""
        op = w.ops[w.at]
        unit, simd, turn = op.unit, w.simd, TURN
        cycles: float = turn
        if w.mask and op.used & w.mask and (later := self._results(now, w, op)) > now:
            w.stalls[MATRIX_RESULT] += later - now
            return later
        if unit == VECTOR:
            if simd.vector > now:
                return _later(w, VECTOR_BUSY, now, simd.vector)
            if simd.read > now:
                return _later(w, READ_PHASE, now, simd.read)
            if op.alone and simd.alone > now:
                return _later(w, PACKED, now, simd.alone)
            simd.vector = now + op.cycles
            self.vector += op.cycles
            if op.alone:  # nor does a matrix instruction start beside it
                simd.matrix = max(simd.matrix, simd.vector)
            cycles = op.cycles
        elif unit == MATRIX:
            if simd.matrix > now:
                return _later(w, MATRIX_BUSY, now, simd.matrix)
            if simd.vector > now:
                return _later(w, VECTOR_BUSY, now, simd.vector)
            # With scales of its own, an instruction before it loads them.
            cycles = turn * (op.size // 8)
            start = now + cycles - turn
            simd.vector, simd.read = start + turn, start + self.device.read_phase
            simd.matrix = start + op.cycles
            simd.alone = simd.matrix + self.device.packed_gap
            self.matrix += op.cycles
            w.results.append((op.written, start + op.ready, simd.matrix))
            w.mask |= op.written
        elif unit == SCALAR:
            if simd.scalar > now:
                return _later(w, SLOT, now, simd.scalar)
            simd.scalar = now + turn
        elif unit == VMEM:
            if simd.vmem > now:
                return _later(w, SLOT, now, simd.vmem)
            if len(w.vm) >= _MAX_VM and w.vm[0] > now:
                return _later(w, VMCNT, now, w.vm[0])
            simd.vmem = now + turn
            done = self.memory.vector(now + turn, w.extras[w.at], op.store, w.group.slot)
            w.vm.append(max(done, w.vm[-1]) if w.vm else done)
            if len(w.vm) > _MAX_VM:
                w.vm.popleft()
        elif unit == LDS:
            if simd.lds > now:
                return _later(w, SLOT, now, simd.lds)
            simd.lds = now + turn
            w.lgkm.append(self.memory.lds(now + turn, op.lds_bytes, w.extras[w.at] or 0))
        elif unit == SMEM:
            if simd.smem > now:
                return _later(w, SLOT, now, simd.smem)
            simd.smem = now + turn
            w.lgkm.append(self.memory.scalar(now + turn, w.extras[w.at]))
        elif unit == WAIT:
            if (later := _wait(w.vm, op.vm, now)) > now:
                return _later(w, VMCNT, now, later)
            if (later := _wait_any(w.lgkm, op.lgkm, now)) > now:
                return _later(w, LGKMCNT, now, later)
        elif unit == NOP:
            cycles = op.cycles
            w.stalls[OWN] += cycles - turn
        elif unit == BRANCH:
            if simd.branch > now:
                return _later(w, SLOT, now, simd.branch)
            simd.branch = now + turn
            if w.at + 1 < len(w.ops) and w.ops[w.at + 1].pc != op.pc + op.size:
                cycles = self.device.branch
                w.stalls[OWN] += cycles - turn
        elif unit == BARRIER:
            self._issue(now, w, op, cycles)
            w.arrived = now + turn
            w.group.waiting.append(w)
            self._release(w.group, now + turn)
            return None
        elif unit == END:
            self._issue(now, w, op, cycles)
            w.group.running -= 1
            w.group.end = max(w.group.end, now + turn)
            self._release(w.group, now + turn)
            return None
        self._issue(now, w, op, cycles)
        return now + cycles

    def _issue(self, now: float, w: _Wave, op: Op, cycles: float) -> None:
        w.at += 1
        self.issued += 1
        if self.keep and w.group.slot == 0:
            self.events.append((w.number, op, now, max(cycles, op.cycles if op.unit == MATRIX else 0)))

    def _release(self, group: _Group, now: float) -> None:
        """Lets the waves at a barrier go when all that run have come; an ended one counts as there."""
        if group.waiting and len(group.waiting) == group.running:
            for wave in group.waiting:
                wave.stalls[AT_BARRIER] += now - wave.arrived
                self.released.append((now, wave))
            group.waiting.clear()

    def _results(self, now: float, w: _Wave, op: Op) -> float:
        """When the results of matrix instructions that ``op`` uses are ready."""
        later, left, mask = now, [], 0
        for result in w.results:
            registers, ready, accumulated = result
            if ready <= now:
                continue
            left.append(result)
            mask |= registers
            if op.used & registers:
                later = max(later, accumulated if op.accumulator == registers else ready)
        w.results, w.mask = left, mask
        return later


def _later(w: _Wave, cause: int, now: float, later: float) -> float:
    w.stalls[cause] += later - now
    return later


def _wait(outstanding: deque[float], count: int, now: float) -> float:
    """When at most ``count`` are outstanding, of those that end in order."""
    while outstanding and outstanding[0] <= now:
        outstanding.popleft()
    return outstanding[-1 - count] if len(outstanding) > count else now


def _wait_any(outstanding: deque[float], count: int, now: float) -> float:
    """The same where they end in any order."""
    if not outstanding:
        return now
    left = sorted(time for time in outstanding if time > now)
    outstanding.clear()
    outstanding.extend(left)
    return left[-1 - count] if len(left) > count else now
