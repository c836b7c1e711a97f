"""SOPP: branches, waits, barriers, the end of a wave."""

from __future__ import annotations

from cdna_sim.isa.decode import Instruction
from cdna_sim.isa.fields import VCC, counts_of
from cdna_sim.ops.emit import Emitter, unknown

# No effect on results: scheduling hints, caches, power. s_nop counts wait states, which are not modelled.
_NOTHING = {
    "S_NOP", "S_SETPRIO", "S_SLEEP", "S_SCHED_BARRIER", "S_ICACHE_INV", "S_TTRACEDATA", "S_INCPERFLEVEL",
    "S_DECPERFLEVEL", "S_SET_VALU_COEXEC_MODE", "S_WAKEUP",
}  # fmt: skip


def sopp(e: Emitter, ins: Instruction) -> None:
    name, after = ins.name, ins.pc + ins.size
    if name == "S_WAITCNT":
        vm, lgkm = counts_of(ins.bits("simm16"))
        if e.target.deferred:
            if vm < 63:
                e.line(f"if len(w.vm) > {vm}: w.wait_vm({vm})")
            if lgkm < 15:
                e.line(f"if len(w.lgkm) > {lgkm}: w.wait_lgkm({lgkm})")
    elif name in _NOTHING:
        pass
    elif name in ("S_ENDPGM", "S_ENDPGM_SAVED"):
        e.leave("END")
    elif name == "S_BARRIER":
        e.line(f"w.pc = {after}")
        e.leave("BARRIER")
    elif "BRANCH" in name:
        _branch(e, ins)
    elif name == "S_TRAP":
        e.line(f"w.fault({e.const(ins)}, 'the kernel trapped (s_trap {ins.bits('simm16')})')")
    else:
        raise unknown(ins, "not modelled", e.target.kernel)


def _branch(e: Emitter, ins: Instruction) -> None:
    after, target = ins.pc + ins.size, ins.target
    if "VCC" in ins.name:
        e.use_sgpr(VCC, 2)
    condition = {
        "S_BRANCH": "True",
        "S_CBRANCH_SCC0": "not w.scc",
        "S_CBRANCH_SCC1": "w.scc",
        "S_CBRANCH_VCCZ": f"not (S[{VCC}] | S[{VCC + 1}])",
        "S_CBRANCH_VCCNZ": f"S[{VCC}] | S[{VCC + 1}]",
        "S_CBRANCH_EXECZ": "not w.exec",
        "S_CBRANCH_EXECNZ": "w.exec",
    }.get(ins.name)
    if condition is None:
        raise unknown(ins, "not modelled", e.target.kernel)
    taken = f"return {target}"
    if target <= ins.pc:
        counter = e.backward(ins, target)
        taken = f"w.counts[{counter}] += 1; {taken}"
    if condition == "True":
        e.line(taken)
    else:
        e.line(f"if {condition}: {taken}")
        e.line(f"return {after}")
    e.ended = True
