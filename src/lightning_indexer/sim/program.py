"""The code of one kernel as Python functions, one a basic block, made when first reached.

A block runs from its first instruction to a branch, a barrier, the end, or an instruction that writes EXEC; its
function takes a wave and returns the next pc, or END, or BARRIER with the pc left in the wave.
"""

from __future__ import annotations

import builtins
import hashlib
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from lightning_indexer.sim import (
    bits,
    buffer,
    compare,
    control,
    floats,
    formats,
    lanes,
    lds,
    mfma,
    packed,
    salu,
    smem,
    valu,
    vmem,
)  # fmt: skip
from lightning_indexer.sim.decode import Instruction, decode
from lightning_indexer.sim.emit import Emitter, unknown
from lightning_indexer.sim.errors import UnknownOpcode

if TYPE_CHECKING:
    from lightning_indexer.sim.options import Options
    from lightning_indexer.toolchain.code_object import CodeObject

END, BARRIER = -1, -2
# Where the code object lies in a kernel's address space, for constants addressed from the program counter.
LOAD_ADDRESS = 0x1000_0000_0000
_LONGEST_BLOCK = 512


@dataclass(frozen=True)
class Block:
    """The instructions of one generated function; ``counter`` is its index in a launch's counts."""

    start: int
    instructions: tuple[Instruction, ...]
    counter: int


@dataclass(frozen=True)
class BackEdge:
    """A backward branch; ``counter`` counts how often it is taken."""

    source: int
    target: int
    stop: int
    counter: int


@dataclass(frozen=True)
class Touch:
    """Registers of one instruction, as bits: all that it reads or writes, and what its own load writes later.

    Vector loads and LDS reads return in order within their counter, scalar loads do not.
    """

    used: int
    loads_vm: int
    loads_lgkm: int
    loads_scalar: int


class Program:
    """Decoded and generated code of one kernel under one set of options; shared by launches."""

    def __init__(self, code_object: CodeObject, kernel: str, options: Options) -> None:
        self.code_object, self.info = code_object, code_object.kernels[kernel]
        self.name, self.arch, self.image = kernel, code_object.arch, code_object.image
        self.deferred, self.strict, self.drop = options.deferred, options.strict, options.drop
        self.poison, self.traced = options.poison, options.trace is not None
        if self.arch not in ("gfx942", "gfx950"):
            raise UnknownOpcode(f"arch {self.arch}: only gfx942 and gfx950 are modelled", kernel=kernel)
        self.load_address = LOAD_ADDRESS
        self.wait_states_checked = False
        self.float_mode = self.info.descriptor.rsrc1 >> 12 & 0xFF
        self.blocks: list[Block] = []
        self.edges: dict[tuple[int, int], BackEdge] = {}
        self.counters = 0
        self.touch: dict[int, Touch] = {}
        self.full: dict[int, Callable[[Any], int]] = {}
        self.masked: dict[int, Callable[[Any], int]] = {}
        self._decoded: dict[int, Instruction] = {}
        self._by_counter: dict[int, int] = {}
        self.namespace: dict[str, Any] = dict(_NAMES)
        self._bound: dict[Any, str] = {}

    def bind(self, value: Any) -> str:
        """A name for ``value`` in generated code; equal arrays of lanes share one."""
        name = f"c{len(self._bound)}"
        key = (value.dtype.str, value.tobytes()) if isinstance(value, np.ndarray) else id(value)
        known = self._bound.setdefault(key, name)
        if known == name:
            self.namespace[name] = value
        return known

    def counter(self) -> int:
        self.counters += 1
        return self.counters - 1

    def instruction(self, pc: int) -> Instruction:
        found = self._decoded.get(pc)
        if found is None:
            start, stop = self.info.text
            if not start <= pc < stop:
                raise UnknownOpcode(f"the program counter left the kernel's code {start:#x} to {stop:#x}",
                                    kernel=self.name, pc=pc)  # fmt: skip
            found = self._decoded[pc] = decode(self.image[pc : pc + 16], pc, self.name)
        return found

    def edge(self, source: Instruction, target: int) -> BackEdge:
        key = (source.pc, target)
        if key not in self.edges:
            self.edges[key] = BackEdge(source.pc, target, source.pc + source.size, self.counter())
        return self.edges[key]

    def compile(self, pc: int, full: bool) -> Callable[[Any], int]:
        """The function of the block at ``pc``, for a full EXEC or for any other."""
        emitter = Emitter(self, full)
        instructions = self._emit(emitter, pc)
        key = "full" if full else "masked"
        block = Block(pc, tuple(instructions), self.counter())
        self.blocks.append(block)
        head = [f"w.counts[{block.counter}] += 1", "v = w.v; f = w.f; i = w.i; S = w.S"]
        if not full:
            head.append("em = w.em")
        body = "\n ".join(["def block(w):", *head, *emitter.lines])
        exec(compile(body, f"<{self.name} {pc:#x} {key}>", "exec"), self.namespace)
        function: Callable[[Any], int] = self.namespace.pop("block")
        (self.full if full else self.masked)[pc] = function
        return function

    def generate(self, emitter: Emitter, ins: Instruction) -> None:
        """Generates one instruction.

        Raises:
            UnknownOpcode: it is not modelled.
        """
        emitter.begin()
        family = _FAMILIES.get(ins.format)
        if family is None:
            raise unknown(ins, "no such family is modelled", self.name)
        family(emitter, ins)

    def _emit(self, emitter: Emitter, pc: int) -> list[Instruction]:
        """Generates the block at ``pc`` and the hazard checks in it."""
        instructions: list[Instruction] = []
        check = _Check(emitter, pc)
        while not emitter.ended:
            if len(instructions) >= _LONGEST_BLOCK:
                emitter.leave(str(pc))
                break
            try:
                ins = self.instruction(pc)
            except UnknownOpcode as error:
                emitter.line(f"raise w.located({emitter.const(error)})")
                emitter.ended = True
                break
            instructions.append(ins)
            if pc in self.drop:
                pc += ins.size
                continue
            start = len(emitter.lines)
            if self.traced:
                emitter.line(f"w.trace(w, {emitter.const(ins)})")
            try:
                self.generate(emitter, ins)
            except UnknownOpcode as error:
                del emitter.lines[start:]
                emitter.line(f"raise w.located({emitter.const(error)})")
                emitter.ended = True
            self.touch[pc] = Touch(
                emitter.read | emitter.written, *(emitter.loads[key] for key in ("vm", "lgkm", "scalar"))
            )
            if self.deferred and self.strict:
                check.add(ins, self.touch[pc], start)
            pc += ins.size
        check.finish()
        return instructions


class _Check:
    """Places hazard checks: no register of an outstanding load may be touched before the wait for it.

    All loads outstanding at the start of a stretch without waits stay so throughout it, so that one test of register
    bits covers the stretch. A new stretch starts after a wait, and where a register of a load issued in the stretch
    itself is touched.
    """

    def __init__(self, emitter: Emitter, pc: int) -> None:
        self.emitter = emitter
        self._begin(pc, 0)

    def _begin(self, pc: int, line: int) -> None:
        self.pc, self.line, self.stop = pc, line, pc
        self.against_vm = self.against_lgkm = 0  # registers to test against what is outstanding in each counter
        self.issued_vm = self.issued_lgkm = 0

    def add(self, ins: Instruction, touch: Touch, line: int) -> None:
        # Loads of one counter that return in order may follow each other into the same register.
        against_vm, against_lgkm = touch.used | touch.loads_lgkm, touch.used | touch.loads_vm
        if against_vm & self.issued_vm or against_lgkm & self.issued_lgkm:
            line += self._place()
            self._begin(ins.pc, line)
        self.against_vm |= against_vm
        self.against_lgkm |= against_lgkm
        self.issued_vm |= touch.loads_vm
        self.issued_lgkm |= touch.loads_lgkm | touch.loads_scalar
        self.stop = ins.pc + ins.size
        if ins.name == "S_WAITCNT":
            self._place()
            self._begin(self.stop, len(self.emitter.lines))

    def _place(self) -> int:
        """Writes the test of the stretch at its start; returns how many lines that added."""
        if not (self.against_vm or self.against_lgkm):
            return 0
        self.emitter.lines.insert(
            self.line,
            f"if w.vm_bits & {self.against_vm} or w.lgkm_bits & {self.against_lgkm}: w.hazard({self.pc}, {self.stop})",
        )
        return 1

    def finish(self) -> None:
        self._place()


# What generated code may name: numpy, and the helpers of these modules.
_NAMES: dict[str, Any] = {
    **{name: getattr(np, name) for name in np.__all__ if not hasattr(builtins, name)}, "np": np,
    **vars(bits), **vars(floats), **vars(formats), **vars(lanes), **salu.HELPERS,
    "END": END, "BARRIER": BARRIER, "__builtins__": builtins,
}  # fmt: skip
# The generator of each encoding.
_FAMILIES: dict[str, Callable[[Emitter, Instruction], None]] = {
    "SOP1": salu.sop1, "SOP2": salu.sop2, "SOPC": salu.sopc, "SOPK": salu.sopk, "SOPP": control.sopp,
    "SMEM": smem.emit, "VOP1": valu.emit, "VOP2": valu.emit, "VOP3": valu.emit, "VOP3SD": valu.emit,
    "VOPC": compare.emit, "VOP3P": packed.emit, "VOP3PX2": mfma.emit, "DS": lds.emit,
    "GLOBAL": vmem.emit, "FLAT": vmem.emit, "SCRATCH": vmem.emit, "MUBUF": buffer.emit,
}  # fmt: skip


_programs: OrderedDict[tuple[Any, ...], Program] = OrderedDict()


def program_for(code_object: CodeObject, kernel: str, options: Options) -> Program:
    """The program of a kernel, kept for the next launch of the same code under the same options."""
    digest = hashlib.sha256(code_object.elf).digest()
    traced = options.trace is not None
    key = (digest, kernel, options.deferred, options.strict, options.poison, traced, options.drop)
    if key not in _programs:
        while len(_programs) >= 32:
            _programs.popitem(last=False)
        _programs[key] = Program(code_object, kernel, options)
    _programs.move_to_end(key)
    return _programs[key]
