"""A whole launch from a sample of its workgroups: residency, dispatch, tail, and how far the sample may be off."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from cdna_sim.arch import ARCHS, VECTOR_REGISTERS, WAVE
from cdna_sim.code_object import CodeObject
from cdna_sim.exec.program import code_for
from cdna_sim.occupancy import MAX_WAVES, SIMDS, VECTOR_GRANULE
from cdna_sim.options import Options, Report
from cdna_sim.timing.device import Device
from cdna_sim.timing.instructions import ops_of
from cdna_sim.timing.memory import Footprint, UnitMemory
from cdna_sim.timing.trace import Access, Recorder, WaveTrace, Workgroup
from cdna_sim.timing.unit import Run, replay

# Arrays are 64 GiB apart (``Memory.place``), so that bits of a line's number say in which one it is.
_ARRAY_BITS, _LINE = 36 - 7, 128
_GOLDEN = 0.618034
_LINES = 4  # sampled along y and z: as many as the requests of the sweeps' packed chunks
Values = NDArray[np.float64]
# An array is shared by workgroups where they read each of its lines this often.
_SHARED = 1.5


@dataclass
class Sample:
    """One sampled workgroup: its number in the order of dispatch, and how its compute unit ran.

    Attributes:
        full: a run of as many like it as are resident together; ``alone``: by itself.
    """

    number: int
    full: Run
    alone: Run


@dataclass
class Prediction:
    """The predicted time of one launch.

    Attributes:
        microseconds: launch and makespan.
        cycles: of the makespan.
        error: standard error of the sampling, as a share of the makespan.
        tail: share of the makespan in which compute units wait for the last workgroups.
        resident: workgroups of a compute unit together; ``workgroups``: of the launch.
        stalls: share of wave-cycles by cause, mean of the samples; ``issued``: in which a wave issued.
        busy: share of a full compute unit's time by unit.
        samples: what was replayed.
    """

    microseconds: float
    cycles: float
    error: float
    tail: float
    resident: int
    workgroups: int
    stalls: dict[str, float]
    issued: float
    busy: dict[str, float]
    samples: list[Sample] = field(default_factory=list)

    @property
    def limit(self) -> str:
        """The unit that is busiest, or what waves wait for most where none is nearly always busy."""
        unit = max(self.busy, key=self.busy.__getitem__)
        if self.busy[unit] > 0.7:
            return unit
        return max(self.stalls, key=self.stalls.__getitem__)


@dataclass(frozen=True)
class Traces:
    """What some workgroups of a launch executed, and what the launch was: enough to time it on any device of its arch.

    Attributes:
        kernel, arch: the code.
        grid: workgroups along x, y, z, or along x and in lines of x; ``waves`` of each.
        vgpr, lds: registers of a lane, and bytes of LDS of a workgroup.
        workgroups: the traces, by number in the order of dispatch.
    """

    kernel: str
    arch: str
    grid: tuple[int, int, int]
    waves: int
    vgpr: int
    lds: int
    workgroups: dict[int, list[WaveTrace]]

    @property
    def count(self) -> int:
        """Workgroups of the launch."""
        return math.prod(self.grid)

    @property
    def resident(self) -> int:
        """Workgroups that a compute unit has room for, by registers, wave slots and LDS."""
        allocated = max(1, -(-self.vgpr // VECTOR_GRANULE)) * VECTOR_GRANULE
        room = max(1, min(MAX_WAVES, VECTOR_REGISTERS // allocated) * SIMDS // self.waves)
        if self.lds:
            row = ARCHS[self.arch]
            room = min(room, row.lds // (-(-self.lds // row.lds_granule) * row.lds_granule))
        return max(1, room)


def record(
    run: Callable[[Options], Report],
    code_object: CodeObject,
    kernel: str,
    *,
    dynamic_lds: int = 0,
    samples: int = 6,
    lines: int = 1,
) -> Traces:
    """Simulates a sample of a launch's workgroups, evenly over the order of dispatch.

    Args:
        run: runs the launch in the simulator under the options it is given, and returns the report.
        code_object, kernel: what it launches.
        dynamic_lds: bytes beyond the kernel's static LDS.
        samples: how many workgroups along x, on each of up to four lines along y and z.
        lines: how many lines a grid of x alone holds, one after another, where the kernel counts them itself.
    """
    code = code_for(code_object, kernel)
    recorder = Recorder(ops_of(code))
    shape = run(Options(deferred=False, strict=False, workgroups=frozenset()))
    grid = (shape.grid[0] // lines, lines, 1) if lines > 1 else shape.grid
    numbers = {_workgroup(number, shape.grid): number for number in sampled(grid, samples)}
    run(
        Options(
            deferred=False, strict=False, workgroups=frozenset(numbers), trace=recorder.trace,
            on_access=recorder.on_access,
        )
    )  # fmt: skip
    resources = code.info.resources
    return Traces(
        kernel, code_object.arch, grid, -(-math.prod(shape.block) // WAVE), resources.vgpr,
        resources.lds + dynamic_lds, {number: recorder.workgroups[place] for place, number in numbers.items()},
    )  # fmt: skip


def sampled(grid: tuple[int, int, int], samples: int) -> list[int]:
    """Numbers of workgroups from all over a grid: ``samples`` along x, on each of up to four lines along y and z.

    Work may lie on a diagonal, rows of one request over its own keys, so that each line takes every place along x.
    Those are off the middles of their strata by the golden ratio's steps, so that nothing periodic meets them.
    """
    x, rest = grid[0], grid[1] * grid[2]
    lines = min(_LINES, rest)
    others = [int((n + 0.5) * rest / lines) for n in range(lines)]
    along = max(1, min(x, samples))
    places = [min(x - 1, int((n + 0.5 + 0.5 * ((n * _GOLDEN) % 1 - 0.5)) * x / along)) for n in range(along)]
    return sorted({other * x + place for other in others for place in places})


def spread(grid: tuple[int, int, int], values: dict[int, float]) -> Values:
    """A value for each workgroup of a grid from those of the sampled ones, by lines along x, then along the rest."""
    x, rest = grid[0], grid[1] * grid[2]
    lines: dict[int, list[tuple[int, float]]] = {}
    for number, value in sorted(values.items()):
        lines.setdefault(number // x, []).append((number % x, value))
    known = sorted(lines)
    rows: Values = np.stack([np.interp(np.arange(x), *np.array(lines[other]).T) for other in known])
    at = np.interp(np.arange(rest), known, np.arange(len(known)))
    low = np.minimum(at.astype(int), max(0, len(known) - 2))
    part = (at - low)[:, None]
    between: Values = (1 - part) * rows[low] + part * rows[np.minimum(low + 1, len(known) - 1)]
    return between.reshape(-1)


def predict(device: Device, traces: Traces, *, passed: int = 0) -> Prediction:
    """The time of the launch.

    Args:
        device: one of ``DEVICES`` that runs the code.
        traces: of the launch, from :func:`record`.
        passed: bytes that others read or wrote since the launch's inputs were, e.g. by a fill of its result.

    Raises:
        ValueError: the code is another architecture's.
    """
    if traces.arch != device.arch:
        raise ValueError(f"device: got {device.name}, a {device.arch}, for a kernel for {traces.arch}")
    resident = _resident(device, traces)
    memory = _memory(device, traces, passed)
    found = []
    for number, waves in traces.workgroups.items():
        warm = number >= device.units * resident
        full = replay(device, [waves] * resident, memory(warm))
        alone = full if resident == 1 else replay(device, [waves], memory(warm))
        found.append(Sample(number, full, alone))
    return _launch(device, found, traces, resident)


def timeline(device: Device, traces: Traces) -> Run:
    """One full compute unit with its events, for ``timeline``: of the sampled workgroup in the middle of the launch."""
    numbers = sorted(traces.workgroups)
    number, resident = numbers[len(numbers) // 2], _resident(device, traces)
    warm = number >= device.units * resident
    return replay(device, [traces.workgroups[number]] * resident, _memory(device, traces)(warm), events=True)


def _resident(device: Device, traces: Traces) -> int:
    return min(traces.resident, -(-traces.count // device.units))


def _memory(device: Device, traces: Traces, passed: int = 0) -> Callable[[bool], UnitMemory]:
    touched = footprint(traces, _resident(device, traces) * device.units // device.dies)
    touched = replace(touched, whole=touched.whole + passed)
    units = min(device.units, traces.count)
    return lambda warm: UnitMemory(device, units, touched, warm)


def footprint(traces: Traces, together: int) -> Footprint:
    """What the launch touches, by its sampled workgroups, of which ``together`` run on a die at a time.

    An array is shared where its workgroups read more lines than it has: those between the first and the last that any
    sampled one reads.
    """
    read: dict[int, list[set[int]]] = {}
    written = 0
    for waves in traces.workgroups.values():
        own: dict[int, set[int]] = {}
        stored: set[int] = set()
        for wave in waves:
            for op, extra in zip(wave.ops, wave.extras, strict=True):
                if not isinstance(extra, Access):
                    continue
                if op.store:
                    stored.update(extra.lines)
                else:
                    for line in extra.lines:
                        own.setdefault(line >> _ARRAY_BITS, set()).add(line)
        written += len(stored)
        for array, lines in own.items():
            read.setdefault(array, []).append(lines)
    shared: set[int] = set()
    abreast, whole = 0.0, written / len(traces.workgroups) * traces.count
    for sets in read.values():
        extent = max(map(max, sets)) - min(map(min, sets)) + 1
        each = sum(map(len, sets)) / len(traces.workgroups)
        whole += min(extent, each * traces.count)
        if each * traces.count >= _SHARED * extent:
            shared.update(*sets)
            abreast += min(extent, each * together)
    return Footprint(frozenset(shared), int(abreast * _LINE), int(whole * _LINE))


def _launch(device: Device, found: list[Sample], traces: Traces, resident: int) -> Prediction:
    full = {sample.number: sample.full.total for sample in found}
    alone = {sample.number: sample.alone.total for sample in found}
    makespan, tail = dispatch(device, spread(traces.grid, full), spread(traces.grid, alone), resident, traces.waves)
    stalls, busy = {}, {}
    total_waves = sum(sample.full.waves for sample in found)
    total = sum(sample.full.total for sample in found)
    for cause in found[0].full.stalls:
        stalls[cause] = sum(sample.full.stalls[cause] for sample in found) / total_waves
    for unit in found[0].full.busy:
        lanes = device.simds if unit in ("vector", "matrix") else 1
        busy[unit] = sum(sample.full.busy[unit] for sample in found) / total / lanes
    error = sampling_error(np.array(list(full), float), np.array(list(full.values())))
    return Prediction(
        device.launch + makespan / device.clock / 1000, makespan, error, tail, resident, traces.count, stalls,
        sum(sample.full.issued for sample in found) / total_waves, busy, found,
    )  # fmt: skip


def sampling_error(places: Values, values: Values) -> float:
    """Standard error of the mean of interpolated values: each sample held against the line between its neighbours."""
    if len(values) < 3:
        return 0.0
    residuals = []
    for index in range(1, len(values) - 1):
        left, right = places[index - 1], places[index + 1]
        part = (places[index] - left) / (right - left)
        residuals.append(values[index] - (values[index - 1] * (1 - part) + values[index + 1] * part))
    # Halving the distance between points quarters what a smooth line misses; a jump is only halved.
    spread = math.sqrt(float(np.mean(np.square(residuals)))) / 2
    return spread / math.sqrt(len(values)) / float(np.mean(values))


def dispatch(device: Device, full: Values, alone: Values, resident: int, waves: int) -> tuple[float, float]:
    """Makespan of workgroups in order, and the share of it in which compute units wait for the last ones.

    Workgroup i goes to die i modulo their number, there to the unit with most room, one wave a cycle. Of k that
    are resident, each takes a time between that by itself and that of a full unit.
    """
    ends, worked = [], 0.0
    per_die = max(1, device.units // device.dies)
    for die in range(device.dies):
        queue = list(range(die, len(full), device.dies))
        if queue:
            end, busy = _die(queue, full, alone, per_die, resident, waves)
            ends.append(end)
            worked += busy
    makespan = max(ends)
    return makespan, max(0.0, 1 - worked / (makespan * device.units))


def _die(
    queue: list[int], full: Values, alone: Values, units: int, resident: int,
    waves: int,
) -> tuple[float, float]:  # fmt: skip
    """End of the last workgroup of one die, and unit-cycles in which any is resident."""
    # Of each unit: workgroups with the part that is left of them, and when that was.
    running: list[dict[int, float]] = [{} for _ in range(units)]
    since, versions = [0.0] * units, [0] * units
    heap: list[tuple[float, int, int, int]] = []
    position, worked, last = 0, 0.0, 0.0

    def cycles(number: int, together: int) -> float:
        if resident == 1:
            return float(full[number])
        return float(alone[number] + (full[number] - alone[number]) * (together - 1) / (resident - 1))

    def advance(unit: int, now: float) -> None:
        one = running[unit]
        nonlocal worked
        if one:
            passed = now - since[unit]
            worked += passed
            for number in one:
                one[number] -= passed / cycles(number, len(one))
        since[unit] = now

    def plan(unit: int) -> None:
        one = running[unit]
        versions[unit] += 1
        if one:
            left, number = min((left * cycles(number, len(one)), number) for number, left in one.items())
            heapq.heappush(heap, (since[unit] + max(0.0, left), unit, number, versions[unit]))

    for _ in range(resident):
        for unit in range(units):
            if position < len(queue):
                advance(unit, float(position * waves))
                running[unit][queue[position]] = 1.0
                position += 1
                plan(unit)
    while heap:
        now, unit, number, version = heapq.heappop(heap)
        if version != versions[unit]:
            continue
        advance(unit, now)
        del running[unit][number]
        last = max(last, now)
        if position < len(queue):
            running[unit][queue[position]] = 1.0
            position += 1
        plan(unit)
    return last, worked


def _workgroup(number: int, grid: tuple[int, int, int]) -> Workgroup:
    return number % grid[0], number // grid[0] % grid[1], number // (grid[0] * grid[1])
