"""Memory as one compute unit sees it: address unit, L1, its share of L2, Infinity Cache and HBM; LDS.

Each is a queue with a rate, and a latency behind it. L2 has nothing as a launch starts. The Infinity Cache stands
before memory, and all that is read or written passes it: where it holds all that a launch touches, what is read comes
from there, as after an earlier such launch, or after those that made the inputs; else from HBM. So do lines of one
workgroup alone, and lines that others touch too (keys, windows) for the first workgroups of a launch, which run
abreast, so that all of them wait. Later ones find them in L2, as far as it holds what is shared: workgroups drift
apart, so that of lines which all walk through, the share that fits is found, and the rest comes from the Infinity
Cache. L1 is too small to serve one workgroup with what another has read.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass

from cdna_sim.timing.device import Device
from cdna_sim.timing.trace import Access


@dataclass(frozen=True, slots=True)
class Footprint:
    """What a launch touches.

    Attributes:
        shared: lines that the sampled workgroups read, and others too.
        together: bytes of them that the workgroups read which run on a die at a time.
        whole: bytes that the launch reads and writes.
    """

    shared: Set[int]
    together: int
    whole: int


class UnitMemory:
    """The memory of one compute unit during one run.

    Args:
        device: its constants.
        units: that share HBM and Infinity Cache.
        touched: by the launch.
        warm: shared lines have been touched by earlier workgroups.

    Attributes:
        busy: cycles of the address unit, L2, memory and LDS.
    """

    def __init__(self, device: Device, units: int, touched: Footprint, warm: bool) -> None:
        clock = device.clock
        self.device, self.shared, self.warm = device, touched.shared, warm
        self._address = self._l2 = self._memory = self._lds = self._scalar = 0.0
        self._l1: dict[int, float] = {}
        self._scalar_lines: dict[int, float] = {}
        self._seen: dict[int, float] = {}
        self._l2_latency = device.l2_latency * clock
        self._cache_latency = device.cache_latency * clock
        # Of 2^16 lines, how many L2 lacks.
        self._absent = int(65536 * max(0.0, 1 - device.l2_size / max(1, touched.together)))
        self._cache = 0.0
        self._cache_line = device.line / (device.cache / clock / units)
        self._kept = touched.whole <= device.cache_size
        self._memory_latency = device.memory_latency * clock
        self._l2_line = device.line / device.l2_bytes
        self._share = device.memory / clock / units
        self.busy = {"address": 0.0, "l2": 0.0, "cache": 0.0, "memory": 0.0, "lds": 0.0}

    def vector(self, now: float, access: Access | None, store: bool, slot: int) -> float:
        """When a vector memory instruction issued at ``now`` by workgroup ``slot`` is done."""
        if access is None:  # no lane is inside of its buffer
            return now + self.device.l1_latency
        start = max(now, self._address)
        self._address = end = start + access.accesses
        self.busy["address"] += access.accesses
        if store:
            return self._write(end, access)
        done = end
        step = access.accesses / max(1, len(access.lines))
        for line in access.lines:
            start += step
            done = max(done, self._line(start, line, slot))
        return done

    def _line(self, now: float, line: int, slot: int) -> float:
        """When one line's data reaches registers."""
        l1, own = self._l1, line | slot << 58
        arrived = l1.pop(own, None)
        if arrived is None:
            arrived = self._beyond(now, line if line in self.shared else own)
            if len(l1) >= self.device.l1_lines:
                del l1[next(iter(l1))]
        l1[own] = arrived
        return max(arrived, now + self.device.l1_latency)

    def _beyond(self, now: float, line: int) -> float:
        """When a line that L1 lacks arrives there."""
        self._l2 = max(self._l2, now) + self._l2_line
        self.busy["l2"] += self._l2_line
        shared = line in self.shared
        if shared and self._absent and line * 40503 & 65535 < self._absent:
            arrival = self._from_cache(now)
            if self.warm or line in self._seen:
                return arrival
        arrival = self._seen.get(line, 0.0)
        if arrival or (shared and self.warm):
            return max(self._l2 + self._l2_latency, arrival)
        if shared:  # by the first of many units: none of their rates is asked for it
            arrival = self._l2 + (self._cache_latency if self._kept else self._memory_latency)
        elif self._kept:
            arrival = self._from_cache(now)
        else:
            self._memory = max(self._memory, now) + self.device.line / self._share
            self.busy["memory"] += self.device.line / self._share
            arrival = max(self._l2, self._memory) + self._memory_latency
        self._seen[line] = arrival
        return arrival

    def _from_cache(self, now: float) -> float:
        self._cache = max(self._cache, now) + self._cache_line
        self.busy["cache"] += self._cache_line
        return max(self._l2, self._cache) + self._cache_latency

    def _write(self, now: float, access: Access) -> float:
        self._l2 = max(self._l2, now) + access.size / self.device.l2_bytes
        self._memory = max(self._memory, now) + access.size / self._share
        self.busy["l2"] += access.size / self.device.l2_bytes
        self.busy["memory"] += access.size / self._share
        # L2 writes back: full of stores, it takes a line when memory has taken another. Until then nothing passes.
        self._address = max(self._address, self._memory)
        return max(self._l2, self._memory) + self._l2_latency

    def scalar(self, now: float, access: Access | None) -> float:
        """When a scalar load is done."""
        self._scalar = start = max(now, self._scalar + 4)
        if access is None or not access.lines:
            return start + self.device.scalar_latency
        [line] = access.lines
        arrived = self._scalar_lines.get(line)
        if arrived is None:
            arrived = self._scalar_lines[line] = self._beyond(start, line)
        return max(arrived, start + self.device.scalar_latency)

    def lds(self, now: float, size: int, conflicts: int) -> float:
        """When an LDS instruction is done."""
        cycles = max(1.0, size / self.device.lds_bytes) + conflicts
        self._lds = max(self._lds, now) + cycles
        self.busy["lds"] += cycles
        return self._lds + self.device.lds_latency
