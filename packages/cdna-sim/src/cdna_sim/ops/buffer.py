"""Buffer instructions (MUBUF): a base, a size, and 32-bit offsets that are checked against the size.

Raw (no idxen): a lane's offset is ``vaddr`` (offen) plus the instruction's 12 bits, which wraps at 32 bits, plus
``soffset``, which does not; with the bytes of the access it must be within num_records, in bytes. Structured (idxen):
the lane's index must be below num_records, in strides. Loads outside give 0, stores outside are dropped, dword by
dword; an atomic is all inside or dropped. So a raw buffer reaches 4 GiB, and 2 GiB where a compiler computes offsets as
signed numbers.

Source: AMD's emulator of gfx950 (ROCm/rocm-systems pull request 10928), which it holds against hardware.
"""

from __future__ import annotations

import numpy as np

from cdna_sim.isa.decode import Instruction
from cdna_sim.isa.fields import VGPR0
from cdna_sim.isa.lanes import LANE, Lanes
from cdna_sim.memory.buffers import ELEMENTS
from cdna_sim.ops import atomics
from cdna_sim.ops.emit import Emitter, unknown
from cdna_sim.ops.registers import put_registers, take_registers
from cdna_sim.ops.vmem import LoadToLds, VectorMemory, gather, scatter, width_of
from cdna_sim.ops.wave import Entry, Wave

_NOTHING = {"BUFFER_WBL2", "BUFFER_INV"}


class RawBuffer:
    """The resource and the offsets of one instruction."""

    def __init__(self, ins: Instruction, e: Emitter) -> None:
        self.ins = ins
        self.resource, self.offset = ins.bits("srsrc"), ins.bits("offset")
        first = ins.bits("vaddr") - VGPR0
        self.index = first if ins.bits("idxen") else None
        self.vector = first + ins.bits("idxen") if ins.bits("offen") else None
        e.use_sgpr(self.resource, 4)
        for register in (self.index, self.vector):
            if register is not None:
                e.use_vgpr(register)
        number = ins.bits("soffset")
        self.scalar = number if number < 128 else None
        if self.scalar is not None:
            e.use_sgpr(self.scalar)
            self.constant = 0
        else:
            self.constant = int(e.scalar(ins, "soffset"))

    def _base(self, w: Wave) -> int:
        return w.S[self.resource] | (w.S[self.resource + 1] & 0xFFFF) << 32

    def __call__(self, w: Wave, width: int) -> tuple[Lanes, Lanes, Lanes]:
        """Of the active lanes: addresses, whether all their bytes are inside, and the lanes' numbers."""
        word = w.S[self.resource + 1]
        if word >> 31:
            w.fault(self.ins, "a swizzled buffer is not modelled")
        lanes = LANE if w.em is True else np.flatnonzero(w.em)
        if self.vector is None:
            offsets = np.full(len(lanes), self.offset, np.int64)
        else:
            offsets = w.v[self.vector][lanes].astype(np.int64) + self.offset & 0xFFFFFFFF
        offsets += self.constant if self.scalar is None else w.S[self.scalar]
        if self.index is None:
            inside = offsets <= w.S[self.resource + 2] - width
        else:
            stride, index = word >> 16 & 0x3FFF, w.v[self.index][lanes].astype(np.int64)
            if stride == 0:
                w.fault(self.ins, "an index into a buffer without a stride is not modelled")
            inside = index < w.S[self.resource + 2]
            offsets += index * stride
        return (offsets + self._base(w)).view(np.uint64), inside, lanes

    def inside(self, w: Wave, addresses: Lanes, whole: Lanes, width: int, start: int) -> Lanes:
        """Whether ``width`` bytes from ``start`` on are inside in each lane; ``whole``: whether all its bytes are."""
        if self.index is not None:
            return whole
        inside: Lanes = addresses.view(np.int64) - self._base(w) + start <= w.S[self.resource + 2] - width
        return inside


class Load(VectorMemory):
    def __init__(self, ins: Instruction, e: Emitter, width: int, part: str) -> None:
        super().__init__(ins, e, width)
        self.buffer, self.part = RawBuffer(ins, e), part
        self.number = ins.bits("vdata") - VGPR0 + 256 * ins.bits("acc")
        self.bits = e.will_load("vm", self.number, max(1, width // 4))

    def __call__(self, w: Wave) -> None:
        addresses, inside, lanes = self.buffer(w, self.width)
        if w.em is True and inside.all():
            self.issue(w, [(self.places(w, "load", addresses), None)], self.width, 64, True)
            return
        element = self._element(w, inside)
        parts = []
        for start in range(0, self.width, element):
            part = self.buffer.inside(w, addresses, inside, element, start)
            parts.append((self.places(w, "load", addresses[part] + np.uint64(start), element), part))
        self.issue(w, parts, element, len(lanes), w.em)

    def _element(self, w: Wave, inside: Lanes) -> int:
        """Dwords one at a time where some lane is outside: part of its bytes may be inside."""
        return self.width if inside.all() or self.width < 4 else 4

    def commit(self, w: Wave, entry: Entry) -> None:
        _, _, parts, element, count, mask = entry
        for index, (places, inside) in enumerate(parts):
            if inside is None:
                data = gather(places, element, count)
            else:
                data = np.zeros(count, ELEMENTS[element])
                if places:
                    data[inside] = gather(places, element, int(inside.sum()))
            if count:
                put_registers(w, self.number + index, element, data, mask, self.part)


class CopyToLds(LoadToLds):
    """buffer_load … lds: lanes outside the buffer write zeros."""

    def __init__(self, ins: Instruction, e: Emitter, width: int) -> None:
        super().__init__(ins, e, width, RawBuffer(ins, e), ins.bits("offset"), max(4, width))

    def __call__(self, w: Wave) -> None:
        at = self.target(w, w.em)
        addresses, inside, lanes = self.addresses(w, self.width)
        places = self.places(w, "load", addresses[inside])
        if self.deferred:
            w.lds.copy_issued(w, self.ins, at, self.element)
        self.issue(w, places, inside, len(lanes), at)

    def commit(self, w: Wave, entry: Entry) -> None:
        _, _, places, inside, count, at = entry
        if not count:
            return
        data = np.zeros(count, ELEMENTS[self.width])
        if places:
            data[inside] = gather(places, self.width, int(inside.sum()))
        if self.width < 4:
            data = data.astype(np.uint32)
        if self.deferred:
            w.lds.copy_done(w, self.ins, at)
        w.lds.write(w, self.ins, at, self.element, data)


class Store(VectorMemory):
    def __init__(self, ins: Instruction, e: Emitter, width: int, high: bool) -> None:
        super().__init__(ins, e, width)
        self.buffer, self.high = RawBuffer(ins, e), high
        self.number = ins.bits("vdata") - VGPR0 + 256 * ins.bits("acc")
        e.use_vgpr(self.number, max(1, width // 4))

    def __call__(self, w: Wave) -> None:
        addresses, inside, _ = self.buffer(w, self.width)
        data = take_registers(w, self.number, self.width, w.em, self.high)
        if inside.all():
            self.issue(w, [(self.places(w, "store", addresses), data)], self.width)
            return
        element = min(4, self.width)
        words = data.view(ELEMENTS[element]).reshape(len(data), -1)
        parts = []
        for index in range(words.shape[1]):
            part = self.buffer.inside(w, addresses, inside, element, element * index)
            at = addresses[part] + np.uint64(element * index)
            parts.append((self.places(w, "store", at, element), words[part, index]))
        self.issue(w, parts, element)

    def commit(self, w: Wave, entry: Entry) -> None:
        for places, data in entry[2]:
            scatter(places, entry[3], data)


class Atomic(VectorMemory):
    def __init__(self, ins: Instruction, e: Emitter, operation: atomics.Operation) -> None:
        super().__init__(ins, e, operation.width)
        self.buffer, self.operation = RawBuffer(ins, e), operation
        count = operation.width // 4
        self.number = ins.bits("vdata") - VGPR0 + 256 * ins.bits("acc")
        self.data = [self.number + index * count for index in range(operation.operands)]
        e.use_vgpr(self.number, count * operation.operands)
        self.returns = bool(ins.bits("sc0"))
        if self.returns:
            self.bits = e.will_load("vm", self.number, count)

    def __call__(self, w: Wave) -> None:
        addresses, inside, lanes = self.buffer(w, self.width)
        data = [take_registers(w, number, self.width, w.em)[inside] for number in self.data]
        self.issue(w, self.places(w, "atomic", addresses[inside]), data, lanes[inside])

    def commit(self, w: Wave, entry: Entry) -> None:
        _, _, places, data, lanes = entry
        for buffer, offsets, group in places:
            part = data if group is True else [values[group] for values in data]
            old = self.operation.run(buffer.windows[self.width], offsets, part)
            if self.returns:
                mask = np.zeros(64, bool)
                mask[lanes if group is True else lanes[group]] = True
                put_registers(w, self.number, self.width, old, mask)


def emit(e: Emitter, ins: Instruction) -> None:
    name = ins.name
    if name in _NOTHING:
        return
    if "FORMAT" in name:
        raise unknown(ins, "typed buffers", e.target.kernel)
    operation: VectorMemory
    if "ATOMIC" in name:
        atomic = atomics.find_global(name.split("ATOMIC_")[1])
        if atomic is None:
            raise unknown(ins, "not modelled", e.target.kernel)
        operation = Atomic(ins, e, atomic)
    elif "_LOAD_" in name:
        width, part, _ = width_of(name)
        operation = CopyToLds(ins, e, width) if ins.bits("lds") else Load(ins, e, width, part)
    elif "_STORE_" in name:
        width, _, high = width_of(name)
        operation = Store(ins, e, width, high)
    else:
        raise unknown(ins, "not modelled", e.target.kernel)
    e.line(f"{e.const(operation)}(w)")
