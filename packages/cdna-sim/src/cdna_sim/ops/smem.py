"""Scalar loads. They may return in any order: only ``lgkmcnt(0)`` waits for one."""

from __future__ import annotations

from cdna_sim.isa.decode import Instruction
from cdna_sim.ops.emit import SGPR_BIT, Emitter, unknown
from cdna_sim.ops.wave import POISON, Wave

_NOTHING = {"S_DCACHE_INV", "S_DCACHE_WB", "S_DCACHE_INV_VOL", "S_DCACHE_WB_VOL"}


class _ScalarLoad:
    """One s_load or s_buffer_load: ``dwords`` into scalar registers from ``first`` on."""

    def __init__(self, ins: Instruction, first: int, dwords: int, bits: int, buffer: int | None, e: Emitter) -> None:
        self.ins, self.first, self.dwords, self.bits = ins, first, dwords, bits
        self.buffer, self.deferred = buffer, e.target.deferred
        self.poison = e.target.deferred and not e.target.strict
        self.in_order = False

    def __call__(self, w: Wave, base: int, offset: int) -> None:
        # The two lowest bits of the address and of the offset are ignored.
        if self.buffer is None:
            self._issue(w, (base & ~3) + (offset & ~3), self.dwords)
            return
        size = w.S[self.buffer + 2]
        if w.S[self.buffer + 1] >> 16 & 0x3FFF:
            w.fault(self.ins, "a scalar buffer load with a stride is not modelled")
        # Out-of-range dwords are zero.
        inside = max(0, min(self.dwords, (size - (offset & ~3)) // 4))
        self._issue(w, base + (offset & ~3), inside)

    def _issue(self, w: Wave, address: int, dwords: int) -> None:
        if dwords and w.memory.find(address, 4 * dwords) is None:
            w.memory_fault(self.ins, "load", address, 4 * dwords)
        if self.deferred:
            if self.poison:
                w.S[self.first : self.first + self.dwords] = [POISON] * self.dwords
            w.issue_lgkm((self, self.bits, address, dwords))
        else:
            self.commit(w, (self, self.bits, address, dwords))

    def commit(self, w: Wave, entry: tuple[object, int, int, int]) -> None:
        address, dwords = entry[2], entry[3]
        data = (w.memory.read(address, 4 * dwords) or b"") if dwords else b""
        data += bytes(4 * (self.dwords - dwords))
        words = memoryview(data).cast("I").tolist()
        w.S[self.first : self.first + self.dwords] = words


def emit(e: Emitter, ins: Instruction) -> None:
    name = ins.name
    if name in _NOTHING:
        return
    if name in ("S_MEMTIME", "S_MEMREALTIME"):
        e.put_sgpr(ins.bits("sdata"), "w.launch.clock()", wide=True)
        return
    is_buffer = name.startswith("S_BUFFER_LOAD_DWORD")
    if not is_buffer and not name.startswith("S_LOAD_DWORD"):
        raise unknown(ins, "not modelled", e.target.kernel)
    dwords = int(name.rpartition("DWORD")[2].removeprefix("X") or 1)
    first, base = ins.bits("sdata"), ins.bits("sbase")
    offset = str(((ins.bits("offset") & 0x1FFFFF) ^ 0x100000) - 0x100000) if ins.bits("imm") else "0"
    if ins.bits("soffset_en"):
        offset += f" + {e.sgpr(ins.bits('soffset'))}"
    elif not ins.bits("imm"):
        offset = e.sgpr(ins.raw(38, 32))
    if is_buffer:
        e.use_sgpr(base, 4)
        address = f"S[{base}] | (S[{base + 1}] & 0xFFFF) << 32"
    else:
        address = e.sgpr(base, wide=True)
    if first + dwords > 106 and first != 106:
        raise unknown(ins, f"a load to scalar register {first}", e.target.kernel)
    bits = ((1 << dwords) - 1) << (SGPR_BIT + first)
    # The order of scalar loads is free, so that a second load to the same register is a hazard too.
    e.use_sgpr(first, dwords)
    load = _ScalarLoad(ins, first, dwords, bits, base if is_buffer else None, e)
    e.line(f"{e.const(load)}(w, {address}, {offset})")
    if e.target.deferred:
        e.loads["scalar"] = bits
