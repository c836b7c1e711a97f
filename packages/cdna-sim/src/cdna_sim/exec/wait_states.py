"""Wait states: how far apart hardware needs some pairs of instructions, which it does not enforce by itself.

Compilers put ``s_nop`` between such pairs where nothing else fits, but not where one of the two is inline assembly. So
a whole kernel is checked before it runs, on every path through its code, whether or not a launch takes it.

A distance is counted as the ISA documents do: each instruction between the two is one wait state, ``s_nop n`` is n + 1.
How long a matrix instruction takes is its passes, of four cycles each.

Sources: AMD Instinct MI300 and CDNA4 ISA documents, "Manually Inserted Wait States (NOPs)"; LLVM's hazard recogniser
for gfx940 and gfx950, whose figures these are; its pull request 197267 for stores with a scalar offset.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from dataclasses import dataclass

from cdna_sim.arch import Arch
from cdna_sim.code_object import CodeObject
from cdna_sim.errors import UnknownOpcode
from cdna_sim.exec.code import LOAD_ADDRESS, Code
from cdna_sim.isa.decode import Instruction
from cdna_sim.isa.fields import EXEC, M0, VCC, VGPR0
from cdna_sim.ops.emit import SGPR_BIT, Emitter, Target, register_bits
from cdna_sim.ops.families import check, generate
from cdna_sim.ops.mfma import Mfma

_VECTOR_REGISTERS = (1 << SGPR_BIT) - 1
_EXEC_BITS, _VCC_BITS = register_bits(SGPR_BIT + EXEC, 2), register_bits(SGPR_BIT + VCC, 2)
_M0_BIT = register_bits(SGPR_BIT + M0)
_TRANSCENDENTAL = re.compile(r"V_(?:RCP|RSQ|SQRT|EXP|LOG|SIN|COS)_|V_RCP_IFLAG_")
# Operations in a cycle, by the type of the factors: in shapes of several blocks, in the others of gfx942, and in those
# that gfx950 alone has.
_RATES = {"F32": (64, 64, 64), "F16": (256, 512, 1024), "BF16": (256, 512, 1024), "I8": (256, 1024, 2048)}
# Passes to the wait states after which vector instructions may overwrite an accumulator that was read.
_ACCUMULATOR_READ = {2: 1, 4: 3, 8: 7, 16: 15}


@dataclass(frozen=True)
class Hazard:
    """Two instructions that are too close on some path.

    Attributes:
        first, second: the pair.
        needed, found: wait states between them.
        rule: what the second does too early.
    """

    first: Instruction
    second: Instruction
    needed: int
    found: int
    rule: str

    def __str__(self) -> str:
        return (
            f"`{self.second.text}` at {self.second.pc:#x} {self.rule} `{self.first.text}` at {self.first.pc:#x} "
            f"{self.found} wait states before; hardware needs {self.needed}"
        )


@dataclass(frozen=True)
class Node:
    """One instruction: registers as bits, wait states that it is, and where control goes from it.

    ``product`` is there for a matrix instruction that is modelled.
    """

    ins: Instruction
    product: Mfma | None
    read: int
    written: int
    states: int
    after: tuple[int, ...]

    @property
    def is_vector(self) -> bool:
        return self.ins.kind == "VALU"

    @property
    def is_dot(self) -> bool:
        return self.ins.name.startswith("V_DOT")

    @property
    def is_memory(self) -> bool:
        return self.ins.kind in ("VMEM_LOAD", "VMEM_STORE", "SCRATCH")


def wait_state_hazards(code_object: CodeObject, kernel: str) -> list[Hazard]:
    """The hazards of a kernel, on every path through it; nothing is run.

    Raises:
        CodeObjectError: no such kernel.
        UnknownOpcode: an arch that is not modelled.
    """
    return list(hazards_of(Code(code_object, kernel)))


def hazards_of(code: Code, drop: frozenset[int] = frozenset()) -> Iterator[Hazard]:
    """Every pair that is too close, in the order of the first of the two; ``drop``: addresses that are skipped.

    Code behind an indirect jump is not reached, and the registers of an instruction that is not modelled are not known.
    """
    yield from of_nodes(code.arch, reachable(code, drop))


def of_nodes(arch: Arch, nodes: dict[int, Node]) -> Iterator[Hazard]:
    """The same for instructions that are at hand."""
    for pc in sorted(nodes):
        rules = _Rules(arch, nodes[pc])
        if rules.longest:
            yield from _after(nodes, nodes[pc], rules)


def reachable(code: Code, drop: frozenset[int] = frozenset()) -> dict[int, Node]:
    """The instructions that control can reach, by address; those of ``drop`` touch no register."""
    nodes: dict[int, Node] = code.remember("reachable", lambda: _reachable(code))
    if not drop:
        return nodes
    return {
        pc: Node(node.ins, None, 0, 0, node.states, node.after) if pc in drop else node for pc, node in nodes.items()
    }


def _reachable(code: Code) -> dict[int, Node]:
    target = Target(code.name, code.arch, LOAD_ADDRESS, code.float_mode, deferred=True, strict=True)
    todo = list(code.entries)
    nodes: dict[int, Node] = {}
    while todo:
        pc = todo.pop()
        if pc in nodes:
            continue
        emitter = Emitter(target, full=True)
        try:
            ins = code.instruction(pc)
        except UnknownOpcode:  # not even its length is known
            continue
        product: Mfma | None = None
        # What is not modelled passes for an instruction without registers: a launch that reaches it says so.
        with contextlib.suppress(UnknownOpcode):
            if ins.kind == "MFMA":
                check(emitter, ins)
                product = Mfma(ins, emitter)
            else:
                generate(emitter, ins)
        written = emitter.written
        for loads in emitter.loads.values():
            written |= loads
        states = ins.bits("simm16") % 16 + 1 if ins.name == "S_NOP" else 1
        nodes[pc] = Node(ins, product, emitter.read, written, states, _successors(ins))
        todo += nodes[pc].after
    return nodes


def _successors(ins: Instruction) -> tuple[int, ...]:
    after = ins.pc + ins.size
    if ins.name.startswith(("S_ENDPGM", "S_SETPC", "S_SWAPPC")):
        return ()
    if "BRANCH" not in ins.name and not ins.name.startswith("S_CALL"):
        return (after,)
    return (ins.target,) if ins.name == "S_BRANCH" else (after, ins.target)


def _after(nodes: dict[int, Node], first: Node, rules: _Rules) -> Iterator[Hazard]:
    """The hazards that ``first`` has with what follows it, the shortest path to each instruction."""
    nearest: dict[int, int] = {}
    todo = [(0, pc) for pc in first.after]
    while todo:
        distance, pc = todo.pop()
        if distance >= rules.longest or nearest.get(pc, rules.longest) <= distance or pc not in nodes:
            continue
        nearest[pc] = distance
        todo += [(distance + nodes[pc].states, after) for after in nodes[pc].after]
    for pc in sorted(nearest, key=nearest.__getitem__):
        needed, rule = rules.needed(nodes[pc])
        if needed > nearest[pc]:
            yield Hazard(first.ins, nodes[pc].ins, needed, nearest[pc], rule)


class _Rules:
    """What one instruction asks of those that follow. ``longest``: of any of them; 0 where it asks nothing."""

    def __init__(self, arch: Arch, first: Node) -> None:
        self.first, self.arch = first, arch
        self.vectors, self.scalars = first.written & _VECTOR_REGISTERS, first.written & ~_VECTOR_REGISTERS
        if first.product is not None:
            self.longest = 20
        elif first.is_vector:
            self.longest = 5
        elif first.is_memory:
            self.longest = 2 if _stored(first.ins) else 0
        else:
            self.longest = 1 if first.written & _M0_BIT else 0

    def needed(self, second: Node) -> tuple[int, str]:
        """Wait states between the two, and what ``second`` does."""
        return max(self._of(second), key=lambda rule: rule[0], default=(0, ""))

    def _of(self, second: Node) -> Iterator[tuple[int, str]]:
        if self.first.product is not None:
            yield from self._after_matrix(self.first.product, second)
        elif self.first.is_vector:
            yield from self._after_vector(second)
        elif self.first.is_memory:
            if second.is_vector and second.written & _stored(self.first.ins):
                # With a scalar register as its offset, a buffer store reads its data one cycle earlier.
                soon = self.first.ins.format == "MUBUF" and self.first.ins.bits("soffset") < 128
                yield 1 if soon else 2, "overwrites data of a store of more than 8 bytes,"
        elif _reads_m0(second.ins):
            yield 1, "uses M0, written by a scalar instruction,"

    def _after_matrix(self, product: Mfma, second: Node) -> Iterator[tuple[int, str]]:
        passes, wide = passes_of(product), product.a.kind != "F32"
        # With float32 factors it ends a pass earlier; gfx950's longer ones one wait state later.
        result = passes + (3 if wide else 2) + (self.arch.late if wide and passes != 2 else 0)
        if second.product is not None:
            if second.product.factors & self.vectors:
                yield result, "multiplies the result of a matrix instruction,"
            third = second.product.accumulator
            if third == self.vectors:
                yield 2 if passes == 2 else 0, "accumulates on the result of a matrix instruction,"
            elif third & self.vectors and (wide or second.product.a.kind == "F32"):
                part = passes + (1 + self.arch.late if wide else 0)
                yield part, "accumulates on a part of the result of a matrix instruction,"
        elif second.is_vector or second.is_memory or second.ins.kind == "LDS":
            if (second.read | second.written) & self.vectors:
                yield result, "reads or overwrites the result of a matrix instruction,"
            if wide and second.written & product.accumulator:
                yield _ACCUMULATOR_READ[passes], "overwrites the accumulator that a matrix instruction reads,"

    def _after_vector(self, second: Node) -> Iterator[tuple[int, str]]:
        ins, name = second.ins, second.ins.name
        read = second.read & self.vectors
        if self.first.is_dot and (second.is_vector or second.is_memory or second.ins.kind == "LDS"):
            same = name == self.first.ins.name
            if _factors(ins) & self.vectors if same else (second.read | second.written) & self.vectors:
                yield 3, "uses the result of a dot product,"
        if second.product is not None:
            if read and not self.first.is_dot:
                yield 2, "reads a result of a vector instruction,"
            if self.scalars & _EXEC_BITS:
                yield 4, "follows a vector instruction that writes EXEC,"
        if second.is_vector:
            swaps = name.startswith(("V_PERMLANE16_SWAP", "V_PERMLANE32_SWAP"))
            lane = name in ("V_READLANE_B32", "V_READFIRSTLANE_B32")
            if read and swaps:
                yield 2, "swaps lanes of a result of a vector instruction,"
            if read and ins.variant == "DPP":
                yield 2, "reads with DPP a result of a vector instruction,"
            if read and lane:
                yield 1, "reads a lane of a result of a vector instruction,"
            if _TRANSCENDENTAL.match(self.first.ins.name):
                if read and not _TRANSCENDENTAL.match(name):
                    yield 1, "reads a transcendental result,"
            elif (second.read | second.written) & self.vectors and _writes_a_part(self.first.ins):
                yield 1, "uses a register of which a vector instruction wrote a part,"
            if self.scalars & _EXEC_BITS:
                if ins.variant == "DPP":
                    yield 5, "uses DPP after a vector instruction that writes EXEC,"
                if lane or swaps or name == "V_WRITELANE_B32":
                    yield 4, "moves lanes after a vector instruction that writes EXEC,"
            if second.read & self.scalars & ~_EXEC_BITS:
                yield 2, "reads a scalar register that a vector instruction wrote,"
            if name in ("V_READLANE_B32", "V_WRITELANE_B32") and _lane_select(ins) & self.scalars:
                yield 4, "chooses a lane by a scalar register that a vector instruction wrote,"
            if name.startswith("V_DIV_FMAS") and self.scalars & _VCC_BITS:
                yield 4, "uses VCC, written by a vector instruction,"
        if second.is_memory and second.read & self.scalars & ~_EXEC_BITS:
            yield 5, "uses a scalar register that a vector instruction wrote,"


def _writes_a_part(ins: Instruction) -> bool:
    """A result that is placed into a part of a register; not forwarded to the next instruction."""
    if ins.variant == "SDWA":
        return ins.bits("dst_sel") != 6
    return ins.format == "VOP3" and bool(ins.bits("opsel") >> 3 & 1)


def _stored(ins: Instruction) -> int:
    """Data of a store or atomic of more than 8 bytes, as bits."""
    match = re.search(r"_STORE_\w*X([34])|_(CMPSWAP)_X2", ins.name)
    if match is None:
        return 0
    number = ins.bits("vdata" if ins.format == "MUBUF" else "data") & 0xFF
    return register_bits(number + 256 * ins.bits("acc"), int(match[1] or 4))


def _factors(ins: Instruction) -> int:
    """The vector registers of the first two operands of a dot product, as bits."""
    first = ins.bits("src0") - VGPR0
    second = ins.bits("src1") - VGPR0 if ins.has("src1") else ins.bits("vsrc1") & 0xFF
    return sum(register_bits(number) for number in {first, second} if number >= 0)


def passes_of(product: Mfma) -> int:
    """Passes of a matrix instruction."""
    work = 2 * product.size**2 * product.depth * product.blocks
    kind, bits = product.a.kind, max(product.a.bits, product.b.bits)
    if product.f8f6f4:
        rate = 4096 if bits == 4 else 2048  # 8-bit operands on either side halve it
    elif kind not in _RATES:
        rate = 1024  # fp8, bf8
    else:
        # The largest product of gfx942.
        old = {"F16": 8192, "BF16": 8192, "I8": 16384}.get(kind, 0) * (1 if product.size == 16 else 2)
        rate = _RATES[kind][0 if product.blocks > 1 else 2 if work > old else 1]
    return max(2, work // rate // 4)


def _lane_select(ins: Instruction) -> int:
    number = ins.bits("src1")
    return register_bits(SGPR_BIT + number) if number < 128 else 0


def _reads_m0(ins: Instruction) -> bool:
    """Copies into LDS, and what else takes M0 without naming it."""
    return (
        ins.name.startswith(("S_SENDMSG", "S_TTRACEDATA", "S_MOVREL"))
        or "ADDTID" in ins.name
        or (ins.kind == "VMEM_LOAD" and ("_LDS_" in ins.name or bool(ins.bits("lds"))))
    )
