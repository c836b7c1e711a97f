"""LDS instructions: reads, writes, atomics, transposing reads, and exchange of registers between lanes."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any

import numpy as np

from cdna_sim.isa.decode import Instruction
from cdna_sim.isa.fields import VGPR0
from cdna_sim.isa.lanes import LANE, Lanes, masks
from cdna_sim.memory.lds import bank_conflicts
from cdna_sim.ops import atomics
from cdna_sim.ops.emit import Emitter, unknown
from cdna_sim.ops.registers import put_registers, take_registers
from cdna_sim.ops.wave import POISON, Entry, Wave

_ACCESS = re.compile(r"DS_(READ|WRITE)(2ST64|2)?_([BUI])(8|16|32|64|96|128)(_D16)?(_HI)?$")
_TRANSPOSE = re.compile(r"DS_READ_B64_TR_B(4|8|16)$")
_POISON = np.uint32(POISON)


@functools.lru_cache(4096)
def _bank_conflicts(read_banks: int, addresses: bytes, mask: int, width: int, store: bool) -> int:
    """:func:`bank_conflicts`, kept from one launch to the next: counting takes longer than the access."""
    return bank_conflicts(read_banks, np.frombuffer(addresses, np.int64), masks[mask], width, store)


class Access:
    """One LDS instruction.

    Attributes:
        in_order: LDS operations of a wave return in order.
        bits: registers that it writes when it is waited for.
    """

    in_order = True

    def __init__(self, ins: Instruction, e: Emitter) -> None:
        self.ins, self.arch = ins, e.target.arch
        self.deferred = e.target.deferred
        self.poison = e.target.deferred and not e.target.strict
        self.address = ins.bits("addr") - VGPR0
        self.offset = ins.bits("offset0") | ins.bits("offset1") << 8
        agpr = 256 * ins.bits("acc")
        self.destination = ins.bits("vdst") - VGPR0 + agpr
        self.sources = [ins.bits(name) - VGPR0 + agpr for name in ("data0", "data1")]
        self.bits = 0
        if ins.bits("gds"):
            raise unknown(ins, "gds", e.target.kernel)

    def places(self, w: Wave, offset: int, width: int, store: bool) -> Lanes:
        """LDS bytes that the active lanes start at; counts bank conflicts."""
        addresses = w.v[self.address]
        # What an address pattern amounts to in this launch: (indices, extra cycles), by addresses and EXEC.
        patterns: dict[tuple[bytes, int, int], tuple[Lanes, int]] | None = w.known.get(self)
        if patterns is None:
            patterns = w.known[self] = {}
        key = (addresses.tobytes(), offset, w.exec)
        known = patterns.get(key)
        if known is None:
            at = addresses.astype(np.int64) + offset & 0xFFFFFFFF
            extra = _bank_conflicts(self.arch.read_banks, at.tobytes(), w.exec, width, store)
            if w.em is not True:
                at = at[w.em]
            if len(at) and int(at.max()) + width > w.lds.size:
                lanes = np.flatnonzero(np.broadcast_to(w.em, 64))
                lane = int(np.argmax(at))
                w.fault(
                    self.ins,
                    f"LDS access of {width} bytes at {int(at[lane]):#x} is outside the workgroup's {w.lds.size} bytes",
                    int(lanes[lane]), int(at[lane]),
                )  # fmt: skip
            if len(patterns) > 512:
                patterns.clear()
            known = patterns[key] = (at, extra)
        w.launch.bank_conflicts += known[1]
        return known[0]

    def issue(self, w: Wave, *what: Any) -> None:
        entry = (self, self.bits, *what)
        if self.deferred:
            if self.poison and self.bits:
                first = (self.bits & -self.bits).bit_length() - 1
                w.V[first : first + self.bits.bit_count()] = _POISON
            w.issue_lgkm(entry)
        else:
            self.commit(w, entry)

    def commit(self, w: Wave, entry: Entry) -> None:
        raise NotImplementedError


class Read(Access):
    """ds_read of ``width`` bytes at one or two offsets."""

    def __init__(self, ins: Instruction, e: Emitter, width: int, offsets: tuple[int, ...], part: str) -> None:
        super().__init__(ins, e)
        self.width, self.offsets, self.part = width, offsets, part
        self.registers = max(1, width // 4)
        e.use_vgpr(self.address)
        self.bits = e.will_load("lgkm", self.destination, self.registers * len(offsets))

    def __call__(self, w: Wave) -> None:
        self.issue(w, [self.places(w, offset, self.width, False) for offset in self.offsets], w.em)

    def commit(self, w: Wave, entry: Entry) -> None:
        number = self.destination
        for at in entry[2]:
            data = w.lds.read(w, self.ins, at, self.width)
            put_registers(w, number, self.width, data, entry[3], self.part)
            number += self.registers


class Write(Access):
    def __init__(self, ins: Instruction, e: Emitter, width: int, offsets: tuple[int, ...], high: bool) -> None:
        super().__init__(ins, e)
        self.width, self.offsets, self.high = width, offsets, high
        e.use_vgpr(self.address)
        for index in range(len(offsets)):
            e.use_vgpr(self.sources[index], max(1, width // 4))

    def __call__(self, w: Wave) -> None:
        writes = [
            (self.places(w, offset, self.width, True), take_registers(w, first, self.width, w.em, self.high))
            for offset, first in zip(self.offsets, self.sources, strict=False)
        ]
        self.issue(w, writes)

    def commit(self, w: Wave, entry: Entry) -> None:
        for at, data in entry[2]:
            w.lds.write(w, self.ins, at, self.width, data)


class Transpose(Access):
    """Reads 8 bytes a lane and transposes them among 16 lanes.

    The 16 lanes' bytes are a matrix of 64 / bits rows; a row is the elements of 16 * bits / 64 consecutive lanes.
    Lane ``l`` gets column ``l % 16``.
    """

    def __init__(self, ins: Instruction, e: Emitter, element: int) -> None:
        super().__init__(ins, e)
        self.element = element
        e.use_vgpr(self.address)
        self.bits = e.will_load("lgkm", self.destination, 2)

    def __call__(self, w: Wave) -> None:
        if w.em is not True:
            w.fault(self.ins, "a transposing read needs all lanes active")
        self.issue(w, self.places(w, self.offset, 8, False))

    def commit(self, w: Wave, entry: Entry) -> None:
        data = w.lds.read(w, self.ins, entry[2], 8)
        if self.element == 4:
            pairs = data.view(np.uint8).reshape(64, 8)
            elements = np.stack((pairs & 15, pairs >> 4), -1).reshape(4, 16, 16)
            turned = elements.transpose(0, 2, 1).reshape(64, 8, 2)
            result = (turned[..., 0] | turned[..., 1] << 4).astype(np.uint8)
        else:
            dtype: Any = np.uint8 if self.element == 8 else np.uint16
            rows = 64 // self.element
            result = data.view(dtype).reshape(4, rows, 16).transpose(0, 2, 1)
        w.V[self.destination : self.destination + 2] = np.ascontiguousarray(result).view(np.uint32).reshape(64, 2).T


class Exchange(Access):
    """Registers between lanes through the LDS hardware, without its memory."""

    def __init__(self, ins: Instruction, e: Emitter, function: Callable[[Access, Wave], Lanes]) -> None:
        super().__init__(ins, e)
        self.function = function
        e.use_vgpr(self.address)
        if ins.name != "DS_SWIZZLE_B32":
            e.use_vgpr(self.sources[0])
        self.bits = e.will_load("lgkm", self.destination, 1)

    def __call__(self, w: Wave) -> None:
        self.issue(w, self.function(self, w), w.em)

    def commit(self, w: Wave, entry: Entry) -> None:
        np.copyto(w.v[self.destination], entry[2], where=entry[3])


def _bpermute(access: Access, w: Wave) -> Lanes:
    """Each lane reads the lane that its address / 4 names; one that is off reads as 0."""
    source = (w.v[access.address] + np.uint32(access.offset)) >> np.uint32(2) & np.uint32(63)
    value = w.v[access.sources[0]][source]
    return value if w.em is True else np.where(w.em[source], value, np.uint32(0))


def _permute(access: Access, w: Wave) -> Lanes:
    """Each active lane sends to the lane its address / 4 names; the highest sender wins, others get 0."""
    target = (w.v[access.address] + np.uint32(access.offset)) >> np.uint32(2) & np.uint32(63)
    result = np.zeros(64, np.uint32)
    active = LANE if w.em is True else np.flatnonzero(w.em)
    result[target[active]] = w.v[access.sources[0]][active]
    return result


def swizzle_source(offset: int) -> Lanes:
    """The lane that each lane reads in ds_swizzle_b32: four lanes freely, or bits of 32 by and, or, xor masks."""
    if offset & 0x8000:
        return (LANE & ~3) + np.array([offset >> 2 * lane & 3 for lane in range(4)])[LANE & 3]
    lane = ((LANE & 31 & offset) | offset >> 5 & 31) ^ (offset >> 10 & 31)
    return (LANE & 32) | lane


def _swizzle(access: Access, w: Wave) -> Lanes:
    source = swizzle_source(access.offset)
    value = w.v[access.address][source]
    return value if w.em is True else np.where(w.em[source], value, np.uint32(0))


class Atomic(Access):
    """ds_add, ds_max, …: lanes one after another, in order."""

    def __init__(self, ins: Instruction, e: Emitter, operation: atomics.Operation, returns: bool) -> None:
        super().__init__(ins, e)
        self.operation, self.returns = operation, returns
        self.width = operation.width
        e.use_vgpr(self.address)
        for source in self.sources[: operation.operands]:
            e.use_vgpr(source, self.width // 4)
        if returns:
            self.bits = e.will_load("lgkm", self.destination, self.width // 4)

    def __call__(self, w: Wave) -> None:
        at = self.places(w, self.offset, self.width, True)
        data = [take_registers(w, first, self.width, w.em) for first in self.sources[: self.operation.operands]]
        self.issue(w, at, data, w.em)

    def commit(self, w: Wave, entry: Entry) -> None:
        _, _, at, data, mask = entry
        w.lds.touch(w, self.ins, at, self.width)
        old = self.operation.run(w.lds.windows[self.width], at, data)
        if self.returns:
            put_registers(w, self.destination, self.width, old, mask)


def emit(e: Emitter, ins: Instruction) -> None:
    access = _access(e, ins)
    if access is not None:
        e.line(f"{e.const(access)}(w)")


def _access(e: Emitter, ins: Instruction) -> Any:
    name = ins.name
    exchange = {"DS_BPERMUTE_B32": _bpermute, "DS_PERMUTE_B32": _permute, "DS_SWIZZLE_B32": _swizzle}.get(name)
    if exchange is not None:
        if name == "DS_SWIZZLE_B32" and (ins.bits("offset0") | ins.bits("offset1") << 8) >= 0xE000:
            raise unknown(ins, "rotate and FFT swizzles", e.target.kernel)
        return Exchange(ins, e, exchange)
    if name == "DS_NOP":
        return None
    if match := _TRANSPOSE.match(name):
        return Transpose(ins, e, int(match[1]))
    if match := _ACCESS.match(name):
        verb, twice, sign, size, d16, high = match.groups()
        width = int(size) // 8
        single = ins.bits("offset0") | ins.bits("offset1") << 8
        offsets: tuple[int, ...] = (single,)
        if twice:
            step = width * (64 if twice == "2ST64" else 1)
            offsets = (ins.bits("offset0") * step, ins.bits("offset1") * step)
        if verb == "WRITE":
            return Write(ins, e, width, offsets, bool(high))
        part = ("s" if sign == "I" else "u") + ("h" if high else "l" if d16 else "")
        return Read(ins, e, width, offsets, part if width < 4 else "")
    returns = "_RTN" in name
    operation = atomics.find(name.removeprefix("DS_").replace("_RTN", ""))
    if operation is not None:
        return Atomic(ins, e, operation, returns)
    raise unknown(ins, "not modelled", e.target.kernel)
