"""Global, flat and scratch memory. Addresses are taken at issue, memory is read and written at the wait."""

from __future__ import annotations

from typing import Any

import numpy as np

from cdna_sim.isa.decode import Instruction
from cdna_sim.isa.fields import M0, VGPR0
from cdna_sim.isa.lanes import LANE, Lanes, pair
from cdna_sim.memory.buffers import Buffer, byte_windows
from cdna_sim.ops import atomics
from cdna_sim.ops.emit import Emitter, unknown
from cdna_sim.ops.registers import put_registers, take_registers
from cdna_sim.ops.wave import POISON, Entry, Wave

_OFF = 127  # saddr: no scalar register
_SIZES = {"UBYTE": 1, "SBYTE": 1, "USHORT": 2, "SSHORT": 2, "SHORT": 2, "BYTE": 1, "DWORD": 4, "DWORDX2": 8,
          "DWORDX3": 12, "DWORDX4": 16}  # fmt: skip
_POISON = np.uint32(POISON)

# Where the lanes of one instruction go: groups of (buffer, byte offsets in it, which of the active lanes or True).
Places = list[tuple[Buffer, Lanes, Any]]


class VectorMemory:
    """What the vector memory instructions have in common.

    Attributes:
        in_order: operations of the vector memory counter complete in order.
        bits: registers that it writes when it is waited for.
        width: bytes of a lane.
    """

    in_order = True

    def __init__(self, ins: Instruction, e: Emitter, width: int) -> None:
        self.ins, self.width = ins, width
        self.deferred = e.target.deferred
        self.poison = e.target.deferred and not e.target.strict
        self.bits = 0
        self.flat = ins.format == "FLAT"

    def places(self, w: Wave, kind: str, addresses: Lanes, width: int = 0) -> Places:
        """Finds the buffers of the active lanes' ``addresses`` (uint64) and counts the access."""
        if not len(addresses):
            return []
        width = width or self.width
        # Loops use one buffer an instruction, so that the last one is tried first.
        last: Buffer | None = w.known.get(self)
        buffer = last or w.memory.find(int(addresses[0]), width)
        found: Places = []
        if buffer is not None:
            offsets = addresses - buffer.base64
            if int(offsets.max()) <= buffer.size - width:
                found = [(buffer, offsets.view(np.int64), True)]
            elif (other := w.memory.find(int(addresses[0]), width)) is not None and other is not buffer:
                buffer, offsets = other, addresses - other.base64
                if int(offsets.max()) <= buffer.size - width:
                    found = [(buffer, offsets.view(np.int64), True)]
        if not found:
            found = self._scattered(w, kind, addresses, width)
        if found[0][0] is not last:
            w.known[self] = found[0][0]
        stores = kind != "load"
        for place, offsets, _ in found:
            if stores:
                place.stored += width * len(offsets)
                if not place.writable:
                    self._read_only(w, kind, place, offsets)
            if kind != "store":
                place.loaded += width * len(offsets)
            if w.launch.on_access is not None:
                w.launch.on_access(
                    kind, place.name, w.workgroup, w.index, self.ins.pc, offsets + np.int64(place.base), width
                )
        return found

    def _scattered(self, w: Wave, kind: str, addresses: Lanes, width: int) -> Places:
        """Lanes in several buffers, or a fault for the first that is in none."""
        groups: dict[int, tuple[Buffer, list[int]]] = {}
        for lane, address in enumerate(addresses.tolist()):
            buffer = w.memory.find(address, width)
            if buffer is None:
                w.memory_fault(self.ins, kind, address, width, self._lane(w, lane))
            groups.setdefault(id(buffer), (buffer, []))[1].append(lane)
        return [
            (buffer, (addresses[lanes] - buffer.base64).view(np.int64), np.array(lanes))
            for buffer, lanes in groups.values()
        ]

    def _lane(self, w: Wave, position: int) -> int:
        return position if w.em is True else int(np.flatnonzero(w.em)[position])

    def _read_only(self, w: Wave, kind: str, buffer: Buffer, offsets: Lanes) -> None:
        address = buffer.base + int(offsets[0])
        message = f"{kind} of {self.width} bytes at {address:#x} in {buffer.name}, which is read-only"
        w.fault(self.ins, message, None, address)

    def issue(self, w: Wave, *what: Any) -> None:
        entry = (self, self.bits, *what)
        if self.deferred:
            if self.poison and self.bits:
                first = (self.bits & -self.bits).bit_length() - 1
                w.V[first : first + self.bits.bit_count()] = _POISON
            w.issue_vm(entry)
            if self.flat:
                w.issue_lgkm((_FLAT, 0))
        else:
            self.commit(w, entry)

    def commit(self, w: Wave, entry: Entry) -> None:
        raise NotImplementedError


class _FlatToken:
    """A flat access counts in lgkmcnt too, and may leave it in any order."""

    in_order = False

    def commit(self, w: Wave, entry: Entry) -> None:
        return


_FLAT = _FlatToken()


def gather(places: Places, width: int, count: int) -> Lanes:
    """The elements at ``places``, in the order of the active lanes."""
    if len(places) == 1:
        buffer, offsets, _ = places[0]
        data: Lanes = buffer.windows[width][offsets]
        return data
    data = np.empty(count, byte_windows(np.empty(width, np.uint8), width).dtype)
    for buffer, offsets, lanes in places:
        data[lanes] = buffer.windows[width][offsets]
    return data


def scatter(places: Places, width: int, data: Lanes) -> None:
    for buffer, offsets, lanes in places:
        buffer.windows[width][offsets] = data if lanes is True else data[lanes]


class Addresses:
    """64-bit addresses of global and flat instructions: a pair of registers, or a scalar base and a 32-bit offset."""

    def __init__(self, ins: Instruction, e: Emitter) -> None:
        bits = 12 if ins.format == "FLAT" else 13
        raw = ins.raw(bits - 1, 0)
        self.offset = raw if ins.format == "FLAT" else (raw ^ 0x1000) - 0x1000
        self.register, self.scalar = ins.bits("addr") - VGPR0, ins.raw(54, 48)
        self.base = None if self.scalar == _OFF or ins.format == "FLAT" else self.scalar
        if self.base is None:
            e.use_vgpr(self.register, 2)
        else:
            e.use_vgpr(self.register)
            e.use_sgpr(self.base, 2)
        self.offset64 = np.uint64(self.offset & 0xFFFFFFFFFFFFFFFF)

    def __call__(self, w: Wave) -> Lanes:
        """Addresses of the active lanes."""
        if self.base is None:
            addresses = pair(w.v[self.register], w.v[self.register + 1])
            if self.offset:
                addresses += self.offset64
        else:
            base = (w.S[self.base] | w.S[self.base + 1] << 32) + self.offset
            addresses = w.v[self.register] + np.uint64(base & 0xFFFFFFFFFFFFFFFF)
        return addresses if w.em is True else addresses[w.em]


class Load(VectorMemory):
    def __init__(self, ins: Instruction, e: Emitter, width: int, part: str, addresses: Any, number: int) -> None:
        super().__init__(ins, e, width)
        self.part, self.addresses = part, addresses
        self.number = number + 256 * ins.bits("acc")
        self.bits = e.will_load("vm", self.number, max(1, width // 4))

    def __call__(self, w: Wave) -> None:
        addresses = self.addresses(w)
        self.issue(w, self.places(w, "load", addresses), len(addresses), w.em)

    def commit(self, w: Wave, entry: Entry) -> None:
        _, _, places, count, mask = entry
        if count:
            put_registers(w, self.number, self.width, gather(places, self.width, count), mask, self.part)


class LoadToLds(VectorMemory):
    """A load whose lanes land in LDS, one after another from M0 + offset on; the vector memory counter waits for it."""

    def __init__(self, ins: Instruction, e: Emitter, width: int, addresses: Any, offset: int, element: int) -> None:
        super().__init__(ins, e, width)
        self.addresses, self.offset, self.element = addresses, offset, element
        # Three dwords a lane leave a gap of one.
        self.step = 16 if element == 12 else element
        e.use_sgpr(M0)

    def target(self, w: Wave, lanes: Any) -> Lanes:
        """LDS bytes of the active lanes."""
        start = (w.S[M0] & 0x3FFFF) + self.offset
        at = start + LANE * self.step
        at = at if lanes is True else at[lanes]
        if len(at) and int(at[-1]) + self.element > w.lds.size:
            w.fault(
                self.ins,
                f"copy to LDS bytes {start:#x} to {int(at[-1]) + self.element:#x}, outside the workgroup's "
                f"{w.lds.size} bytes",
            )  # fmt: skip
        return at

    def __call__(self, w: Wave) -> None:
        at = self.target(w, w.em)
        addresses = self.addresses(w)
        places = self.places(w, "load", addresses)
        if self.deferred:
            w.lds.copy_issued(w, self.ins, at, self.element)
        self.issue(w, places, len(addresses), at)

    def commit(self, w: Wave, entry: Entry) -> None:
        _, _, places, count, at = entry
        if count:
            data = gather(places, self.width, count)
            if self.width < 4:
                data = data.astype(np.uint32)
            if self.deferred:
                w.lds.copy_done(w, self.ins, at)
            w.lds.write(w, self.ins, at, self.element, data)


class Store(VectorMemory):
    def __init__(self, ins: Instruction, e: Emitter, width: int, high: bool, addresses: Any, number: int) -> None:
        super().__init__(ins, e, width)
        self.addresses, self.high = addresses, high
        self.number = number + 256 * ins.bits("acc")
        e.use_vgpr(self.number, max(1, width // 4))

    def __call__(self, w: Wave) -> None:
        addresses = self.addresses(w)
        data = take_registers(w, self.number, self.width, w.em, self.high)
        self.issue(w, self.places(w, "store", addresses), data)

    def commit(self, w: Wave, entry: Entry) -> None:
        scatter(entry[2], self.width, entry[3])


class Atomic(VectorMemory):
    """Lanes one after another, in order; with sc0 the old value returns to registers."""

    def __init__(
        self, ins: Instruction, e: Emitter, operation: atomics.Operation, addresses: Any, data: int, number: int
    ) -> None:
        super().__init__(ins, e, operation.width)
        self.operation, self.addresses = operation, addresses
        agpr = 256 * ins.bits("acc")
        count = operation.width // 4
        self.data = [data + agpr + index * count for index in range(operation.operands)]
        self.number = number + agpr
        e.use_vgpr(self.data[0], count * operation.operands)
        self.returns = bool(ins.bits("sc0"))
        if self.returns:
            self.bits = e.will_load("vm", self.number, count)

    def __call__(self, w: Wave) -> None:
        addresses = self.addresses(w)
        data = [take_registers(w, number, self.width, w.em) for number in self.data]
        self.issue(w, self.places(w, "atomic", addresses), len(addresses), data, w.em)

    def commit(self, w: Wave, entry: Entry) -> None:
        _, _, places, count, data, mask = entry
        old = np.empty(count, byte_windows(np.empty(self.width, np.uint8), self.width).dtype)
        for buffer, offsets, lanes in places:
            part = data if lanes is True else [values[lanes] for values in data]
            old[slice(None) if lanes is True else lanes] = self.operation.run(buffer.windows[self.width], offsets, part)
        if self.returns and count:
            put_registers(w, self.number, self.width, old, mask)


class Scratch(VectorMemory):
    """Private memory of each lane: its own bytes, whatever the layout in hardware."""

    def __init__(self, ins: Instruction, e: Emitter, width: int, load: bool, part: str, high: bool) -> None:
        super().__init__(ins, e, width)
        self.load, self.part, self.high = load, part, high
        self.offset = (ins.raw(12, 0) ^ 0x1000) - 0x1000
        scalar = ins.raw(54, 48)
        self.scalar = None if scalar == _OFF else scalar
        self.vector = ins.bits("addr") - VGPR0 if ins.bits("sve") else None
        if self.scalar is not None:
            e.use_sgpr(self.scalar)
        if self.vector is not None:
            e.use_vgpr(self.vector)
        agpr = 256 * ins.bits("acc")
        self.number = ins.bits("vdst" if load else "data") - VGPR0 + agpr
        if load:
            self.bits = e.will_load("vm", self.number, max(1, width // 4))
        else:
            e.use_vgpr(self.number, max(1, width // 4))

    def __call__(self, w: Wave) -> None:
        start = self.offset + (w.S[self.scalar] if self.scalar is not None else 0)
        lanes = LANE if w.em is True else np.flatnonzero(w.em)
        if self.vector is None:
            at = np.full(len(lanes), start)
        else:
            at = (w.v[self.vector][lanes].astype(np.int64) + start) & 0xFFFFFFFF
        size = w.scratch.shape[1]
        if len(at) and not (int(at.min()) >= 0 and int(at.max()) + self.width <= size):
            w.fault(self.ins, f"scratch access at byte {int(at.max())} of {size}", int(lanes[int(np.argmax(at))]))
        places = lanes * size + at
        if self.load:
            self.issue(w, places, w.em)
        else:
            self.issue(w, places, take_registers(w, self.number, self.width, w.em, self.high))

    def commit(self, w: Wave, entry: Entry) -> None:
        window = byte_windows(w.scratch.reshape(-1), self.width)
        if self.load:
            if len(entry[2]):
                put_registers(w, self.number, self.width, window[entry[2]], entry[3], self.part)
        else:
            window[entry[2]] = entry[3]


def width_of(name: str) -> tuple[int, str, bool]:
    """Bytes of a lane, the part of a register that a load goes to, and whether a store takes the upper half."""
    words = name.split("_")
    high = words[-1] == "HI"
    d16 = "D16" in words
    size = next(word for word in words if word in _SIZES)
    width = _SIZES[size]
    part = ""
    if width < 4:
        part = ("s" if size.startswith("S") and size != "SHORT" else "u") + ("h" if high else "l" if d16 else "")
    return width, part, high


def emit(e: Emitter, ins: Instruction) -> None:
    name = ins.name
    if ins.format == "SCRATCH":
        if "LDS" in name:
            raise unknown(ins, "not modelled", e.target.kernel)
        width, part, high = width_of(name)
        operation: VectorMemory = Scratch(ins, e, width, "_LOAD_" in name, part, high)
    elif "ATOMIC" in name:
        atomic = atomics.find_global(name.split("ATOMIC_")[1])
        if atomic is None:
            raise unknown(ins, "not modelled", e.target.kernel)
        operation = Atomic(ins, e, atomic, Addresses(ins, e), ins.bits("data") - VGPR0, ins.bits("vdst") - VGPR0)
    elif "_LOAD_LDS_" in name:
        width, _, _ = width_of(name)
        addresses = Addresses(ins, e)
        # The instruction's offset moves both ends.
        operation = LoadToLds(ins, e, width, addresses, addresses.offset, max(4, width))
    elif "_LOAD_" in name:
        width, part, _ = width_of(name)
        operation = Load(ins, e, width, part, Addresses(ins, e), ins.bits("vdst") - VGPR0)
    elif "_STORE_" in name:
        width, _, high = width_of(name)
        operation = Store(ins, e, width, high, Addresses(ins, e), ins.bits("data") - VGPR0)
    else:
        raise unknown(ins, "not modelled", e.target.kernel)
    e.line(f"{e.const(operation)}(w)")
