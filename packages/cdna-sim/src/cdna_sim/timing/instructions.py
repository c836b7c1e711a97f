"""What each instruction of a kernel asks of a compute unit, decoded once a kernel."""

from __future__ import annotations

import re
from dataclasses import dataclass

from cdna_sim.exec.code import Code
from cdna_sim.exec.wait_states import passes_of, reachable
from cdna_sim.isa.fields import counts_of
from cdna_sim.timing.device import QUARTER_RATE, TRANSCENDENTAL, TURN, VECTOR_CYCLES

# Units, in the order of their numbers.
UNITS = ("vector", "matrix", "scalar", "smem", "vmem", "lds", "branch", "wait", "nop", "barrier", "end")
VECTOR, MATRIX, SCALAR, SMEM, VMEM, LDS, BRANCH, WAIT, NOP, BARRIER, END = range(len(UNITS))
_KINDS = {
    "VALU": VECTOR, "MFMA": MATRIX, "SALU": SCALAR, "SMEM": SMEM, "VMEM_LOAD": VMEM, "VMEM_STORE": VMEM,
    "SCRATCH": VMEM, "LDS": LDS, "BRANCH": BRANCH, "WAIT": WAIT, "BARRIER": BARRIER, "OTHER": SCALAR,
}  # fmt: skip
_TRANSCENDENTAL = re.compile(r"V_(?:RCP|RSQ|SQRT|EXP|LOG|SIN|COS)_")
_QUARTER = re.compile(r"V_(?:MUL_(?:LO|HI)_[UI]32|MAD_[UI]64_[UI]32)|V_\w+_F64")
# Never beside a matrix instruction, [coexec] in device.py.
_ALONE = re.compile(r"V_PK_\w+_F32|V_PK_(?:ADD|MUL|FMA)_F16|V_DOT")
_LDS_WIDTH = re.compile(r"DS_(?:READ|WRITE)(2?)(?:ST64)?_(?:ADDTID_)?B(\d+)")


@dataclass(eq=False, slots=True)
class Op:
    """One instruction.

    Attributes:
        unit: by number in ``UNITS``.
        cycles: of its unit; of a nop, until the next instruction. A matrix instruction's occupy the matrix unit.
        ready: of a matrix instruction, cycles until others may use its result.
        alone: it does not execute beside a matrix instruction.
        used, written: vector registers, as bits.
        accumulator: of a matrix instruction, what it adds to: the next may, without waiting, add to the same.
        vm, lgkm: what an s_waitcnt leaves outstanding.
        store: of memory.
        lds_bytes: of a wave.
    """

    pc: int
    text: str
    unit: int
    cycles: int
    ready: int = 0
    alone: bool = False
    used: int = 0
    written: int = 0
    accumulator: int = 0
    vm: int = 63
    lgkm: int = 15
    store: bool = False
    lds_bytes: int = 0
    size: int = 4


def ops_of(code: Code) -> dict[int, Op]:
    """The instructions that control can reach, by address."""
    found = {}
    for pc, node in reachable(code).items():
        ins = node.ins
        unit = _KINDS.get(ins.kind, SCALAR)
        op = Op(pc, ins.text, unit, TURN, size=ins.size)
        vectors = (1 << 512) - 1
        op.used, op.written = (node.read | node.written) & vectors, node.written & vectors
        if unit == MATRIX and node.product is not None:
            passes = passes_of(node.product)
            wide = node.product.a.kind != "F32"
            op.cycles = 4 * passes
            # Wait states between the two, and the one that the first is: [isa].
            late = code.arch.late if wide and passes != 2 else 0
            op.ready = TURN * (passes + (3 if wide else 2) + late + 1)
            op.accumulator = node.product.accumulator
        elif unit == VECTOR:
            if _TRANSCENDENTAL.match(ins.name):
                op.cycles = TRANSCENDENTAL[code.arch.name]
            elif _QUARTER.match(ins.name):
                op.cycles = QUARTER_RATE
            else:
                op.cycles = VECTOR_CYCLES
            op.alone = _ALONE.match(ins.name) is not None
        elif unit == WAIT:
            op.vm, op.lgkm = counts_of(ins.bits("simm16"))
        elif ins.name == "S_NOP":
            op.unit, op.cycles = NOP, TURN * (ins.bits("simm16") % 16 + 1)
        elif ins.name == "S_SLEEP":
            op.unit, op.cycles = NOP, 64 * max(1, ins.bits("simm16") & 127)
        elif ins.name.startswith("S_ENDPGM"):
            op.unit = END
        elif unit == VMEM:
            op.store = ins.kind == "VMEM_STORE" or "_STORE_" in ins.name
        elif unit == LDS:
            width = _LDS_WIDTH.match(ins.name)
            op.lds_bytes = 64 * (int(width[2]) // 8 * (2 if width[1] else 1) if width else 4)
            op.store = ins.name.startswith("DS_WRITE")
        found[pc] = op
    return found
