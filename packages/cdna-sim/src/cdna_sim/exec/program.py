"""The code of one kernel as Python functions, one a basic block, made when first reached.

A block runs from its first instruction to a branch, a barrier, the end, or an instruction that writes EXEC; its
function takes a wave and returns the next pc, or END, or BARRIER with the pc left in the wave.

Launches of several threads share a program. It grows, under a lock, and what is in it never changes: everything that a
launch changes belongs to its waves and their ``LaunchState``.
"""

from __future__ import annotations

import builtins
import hashlib
import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from cdna_sim.code_object import CodeObject
from cdna_sim.errors import UnknownOpcode
from cdna_sim.exec.code import LOAD_ADDRESS, Code
from cdna_sim.exec.wait_states import Hazard, hazards_of
from cdna_sim.isa import lanes
from cdna_sim.isa.decode import Instruction
from cdna_sim.ops import bits, floats, formats, salu
from cdna_sim.ops.emit import BackEdge, Emitter, Target, Touch
from cdna_sim.ops.families import generate
from cdna_sim.options import Options

END, BARRIER = -1, -2
_LONGEST_BLOCK = 512


@dataclass(frozen=True)
class Block:
    """The instructions of one generated function; ``counter`` is its key in a launch's counts."""

    instructions: tuple[Instruction, ...]
    edges: tuple[BackEdge, ...]
    counter: int
    function: Callable[[Any], int]


class Program:
    """Decoded and generated code of one kernel under one set of options; shared by launches.

    Attributes:
        full, masked: functions of the blocks generated so far by address, for a full EXEC and for any other.
    """

    def __init__(self, code: Code, options: Options) -> None:
        self.code, self.name, self.info, self.arch = code, code.name, code.info, code.arch
        self.drop, self._traced = options.drop, options.trace is not None
        self._target = Target(
            code.name, code.arch, LOAD_ADDRESS, code.float_mode, deferred=options.deferred, strict=options.strict
        )
        self._lock = threading.RLock()
        self._blocks: dict[int, Block] = {}
        self._hazards: tuple[Hazard, ...] | None = None
        self.full: dict[int, Callable[[Any], int]] = {}
        self.masked: dict[int, Callable[[Any], int]] = {}

    def compile(self, pc: int, full: bool) -> Callable[[Any], int]:
        """The function of the block at ``pc``, for a full EXEC or for any other."""
        counter = 2 * pc + full
        with self._lock:
            if counter not in self._blocks:
                block = self._generate(pc, full, counter)
                self._blocks[counter] = block
                (self.full if full else self.masked)[pc] = block.function
            return self._blocks[counter].function

    def blocks(self) -> list[Block]:
        """Those generated so far."""
        with self._lock:
            return list(self._blocks.values())

    def hazards(self) -> tuple[Hazard, ...]:
        """Instructions that are too close together, on any path through the kernel."""
        with self._lock:
            if self._hazards is None:
                self._hazards = tuple(hazards_of(self.code, self.drop))
            return self._hazards

    def _generate(self, pc: int, full: bool, counter: int) -> Block:
        emitter = Emitter(self._target, full)
        instructions = self._emit(emitter, pc)
        head = [f"w.counts[{counter}] += 1", "v = w.v; f = w.f; i = w.i; S = w.S"]
        if not full:
            head.append("em = w.em")
        body = "\n ".join(["def block(w):", *head, *emitter.lines])
        scope: dict[str, Any] = {**_NAMES, **emitter.constants}
        exec(compile(body, f"<{self.name} {pc:#x} {'full' if full else 'masked'}>", "exec"), scope)
        return Block(tuple(instructions), tuple(emitter.edges), counter, scope.pop("block"))

    def _emit(self, emitter: Emitter, pc: int) -> list[Instruction]:
        """Generates the block at ``pc`` and the hazard checks in it."""
        instructions: list[Instruction] = []
        check = _Check(emitter)
        while not emitter.ended:
            if len(instructions) >= _LONGEST_BLOCK:
                emitter.leave(str(pc))
                break
            try:
                ins = self.code.instruction(pc)
            except UnknownOpcode as error:
                emitter.line(f"raise w.located({emitter.const(error)})")
                emitter.ended = True
                break
            instructions.append(ins)
            if pc in self.drop:
                pc += ins.size
                continue
            start = len(emitter.lines)
            if self._traced:
                emitter.line(f"w.trace(w, {emitter.const(ins)})")
            try:
                generate(emitter, ins)
            except UnknownOpcode as error:
                del emitter.lines[start:]
                emitter.line(f"raise w.located({emitter.const(error)})")
                emitter.ended = True
            touch = Touch(emitter.read | emitter.written, *(emitter.loads[key] for key in ("vm", "lgkm", "scalar")))
            if self._target.deferred and self._target.strict:
                check.add(ins, touch, start)
            pc += ins.size
        check.finish()
        return instructions


class _Check:
    """Places hazard checks: no register of an outstanding load may be touched before the wait for it.

    All loads outstanding at the start of a stretch without waits stay so throughout it, so that one test of register
    bits covers the stretch. A new stretch starts after a wait, and where a register of a load issued in the stretch
    itself is touched.
    """

    def __init__(self, emitter: Emitter) -> None:
        self.emitter = emitter
        self._begin(0)

    def _begin(self, line: int) -> None:
        self.line = line
        self.stretch: list[tuple[Instruction, Touch]] = []
        self.against_vm = self.against_lgkm = 0  # registers to test against what is outstanding in each counter
        self.issued_vm = self.issued_lgkm = 0

    def add(self, ins: Instruction, touch: Touch, line: int) -> None:
        # Loads of one counter that return in order may follow each other into the same register.
        against_vm, against_lgkm = touch.used | touch.loads_lgkm, touch.used | touch.loads_vm
        if against_vm & self.issued_vm or against_lgkm & self.issued_lgkm:
            line += self._place()
            self._begin(line)
        self.against_vm |= against_vm
        self.against_lgkm |= against_lgkm
        self.issued_vm |= touch.loads_vm
        self.issued_lgkm |= touch.loads_lgkm | touch.loads_scalar
        self.stretch.append((ins, touch))
        if ins.name == "S_WAITCNT":
            self._place()
            self._begin(len(self.emitter.lines))

    def _place(self) -> int:
        """Writes the test of the stretch at its start; returns how many lines that added."""
        if not (self.against_vm or self.against_lgkm):
            return 0
        stretch = self.emitter.const(tuple(self.stretch))
        self.emitter.lines.insert(
            self.line,
            f"if w.vm_bits & {self.against_vm} or w.lgkm_bits & {self.against_lgkm}: w.hazard({stretch})",
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


_programs: OrderedDict[tuple[Any, ...], Program] = OrderedDict()
_codes: OrderedDict[tuple[bytes, str], Code] = OrderedDict()
_programs_lock = threading.Lock()
_KEPT = 32


def program_for(code_object: CodeObject, kernel: str, options: Options) -> Program:
    """The program of a kernel, kept for the next launch of the same code under the same options."""
    digest = hashlib.sha256(code_object.elf).digest()
    key = (digest, kernel, options.deferred, options.strict, options.trace is not None, options.drop)
    with _programs_lock:
        if key not in _programs:
            while len(_programs) >= _KEPT:
                _programs.popitem(last=False)
            _programs[key] = Program(_code(digest, code_object, kernel), options)
        _programs.move_to_end(key)
        return _programs[key]


def code_for(code_object: CodeObject, kernel: str) -> Code:
    """A kernel's decoded code, kept for whoever asks for it next."""
    digest = hashlib.sha256(code_object.elf).digest()
    with _programs_lock:
        return _code(digest, code_object, kernel)


def _code(digest: bytes, code_object: CodeObject, kernel: str) -> Code:
    key = (digest, kernel)
    if key not in _codes:
        while len(_codes) >= _KEPT:
            _codes.popitem(last=False)
        _codes[key] = Code(code_object, kernel)
    _codes.move_to_end(key)
    return _codes[key]
