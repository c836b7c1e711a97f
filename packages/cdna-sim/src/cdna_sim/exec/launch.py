"""One launch: workgroups one after another, the waves of one in turns from barrier to barrier."""

from __future__ import annotations

import itertools
import random
import struct
from typing import Any

import numpy as np

from cdna_sim.arch import WAVE
from cdna_sim.errors import SimulationFault
from cdna_sim.exec.code import LOAD_ADDRESS
from cdna_sim.exec.program import END, Program
from cdna_sim.exec.report import counted
from cdna_sim.memory.buffers import Memory
from cdna_sim.memory.lds import Lds
from cdna_sim.ops.wave import LaunchState, Wave
from cdna_sim.options import Options, Report

# Where the runtime's own buffers lie: far from host addresses.
_KERNARG, _DISPATCH = 0x1100_0000_0000, 0x1200_0000_0000


class Launch:
    """One launch: its waves, its memory, its counts and initial registers.

    Attributes:
        buffers: the caller's, with the bytes moved in this launch.
    """

    def __init__(
        self,
        program: Program,
        options: Options,
        memory: Memory,
        block: tuple[int, int, int],
        grid: tuple[int, int, int],
        kernarg: bytes,
        dynamic_lds: int,
    ) -> None:
        self.program, self.options = program, options
        self.block, self.grid = block, grid
        self.waves_run = 0
        descriptor = program.info.descriptor
        self.items = block[0] * block[1] * block[2]
        lds_bytes = descriptor.lds_bytes + dynamic_lds
        self._check(kernarg, lds_bytes)
        wave_count = -(-self.items // WAVE)
        self.lds = Lds(lds_bytes, wave_count, options.poison, options.strict)
        self.state = LaunchState(
            program.name, self._with_runtime_buffers(memory, kernarg), options.trace, options.on_access,
            descriptor.scratch_bytes,
        )  # fmt: skip
        self.waves = [Wave(self.state) for _ in range(wave_count)]
        self.random = random.Random(options.seed)
        self.user_sgprs = self._user_sgprs(kernarg)

    def _check(self, kernarg: bytes, lds_bytes: int) -> None:
        info, name = self.program.info, self.program.name
        if min(self.grid) < 1 or min(self.block) < 1:
            raise ValueError(f"grid and block: got {self.grid} and {self.block}, expected at least one of each")
        if self.items > info.max_workgroup:
            raise SimulationFault(
                f"{self.items} work-items in a workgroup of at most {info.max_workgroup}", kernel=name
            )
        if lds_bytes > self.program.arch.lds:
            raise SimulationFault(f"{lds_bytes} bytes of LDS of {self.program.arch.lds}", kernel=name)
        if len(kernarg) < info.kernarg_bytes:
            raise SimulationFault(f"{len(kernarg)} bytes of arguments of {info.kernarg_bytes}", kernel=name)

    def _with_runtime_buffers(self, memory: Memory, kernarg: bytes) -> Memory:
        """A copy of ``memory`` with the argument segment, the code and the dispatch packet."""
        memory = memory.copy()
        self.buffers = list(memory.buffers)
        if kernarg:
            segment = np.frombuffer(kernarg + bytes(-len(kernarg) % 64), np.uint8)
            memory.register("the kernel arguments", segment, address=_KERNARG, writable=False)
        image = np.frombuffer(self.program.code.image, np.uint8)
        memory.register("the code object", image, address=LOAD_ADDRESS, writable=False)
        items = [size * count for size, count in zip(self.block, self.grid, strict=True)]
        packet = struct.pack(
            "<HHHHHHIIIIIQQQQ", 0, 3, *self.block, 0, *(item & 0xFFFFFFFF for item in items),
            self.program.info.descriptor.scratch_bytes, self.lds.size, 0, _KERNARG, 0, 0,
        )  # fmt: skip
        memory.register("the dispatch packet", np.frombuffer(packet, np.uint8), address=_DISPATCH, writable=False)
        return memory

    def _user_sgprs(self, kernarg: bytes) -> list[int]:
        """What the runtime and the firmware put into the first scalar registers, in the ABI's order."""
        descriptor = self.program.info.descriptor
        enabled = descriptor.properties
        registers: list[int] = []
        for bit, dwords, value in (
            (0, 4, 0),  # private segment buffer: not used with architected scratch
            (1, 2, _DISPATCH),
            (2, 2, 0),  # queue
            (3, 2, _KERNARG),
            (4, 2, 0),  # dispatch id
            (5, 2, 0),  # flat scratch
            (6, 1, descriptor.scratch_bytes),
        ):
            if enabled >> bit & 1:
                registers += [value >> 32 * index & 0xFFFFFFFF for index in range(dwords)]
        length, first = descriptor.preload_length, 4 * descriptor.preload_offset
        if length:
            data = (kernarg + bytes(4 * length))[first : first + 4 * length]
            registers += struct.unpack(f"<{length}I", data)
        count = descriptor.rsrc2 >> 1 & 31
        return registers + [0] * (count - len(registers))

    def run(self) -> Report:
        """Runs the whole grid, or the workgroups that ``Options`` names."""
        chosen = self.options.workgroups
        if chosen is None:
            workgroups = list(itertools.product(*(range(size) for size in reversed(self.grid))))
        else:
            workgroups = sorted((z, y, x) for x, y, z in chosen)
        self._order(workgroups)
        for z, y, x in workgroups:
            self._run_workgroup((x, y, z))
        report = counted(self.program.blocks(), self.state.counts, self.program.code, self.options.drop, self.buffers)
        report.lds_bank_conflicts, report.waves = self.state.bank_conflicts, self.waves_run
        report.grid, report.block = self.grid, self.block
        return report

    def _order(self, sequence: list[Any]) -> None:
        if self.options.order == "reversed":
            sequence.reverse()
        elif self.options.order == "shuffled":
            self.random.shuffle(sequence)

    def _run_workgroup(self, workgroup: tuple[int, int, int]) -> None:
        self.lds.start()
        descriptor = self.program.info.descriptor
        entry = self.program.code.entries[-1]
        for index, wave in enumerate(self.waves):
            wave.start(workgroup, index, self.lds, min(WAVE, self.items - WAVE * index), self.options.poison)
            wave.pc = entry
            registers = list(self.user_sgprs)
            registers += [workgroup[axis] for axis in range(3) if descriptor.rsrc2 >> 7 + axis & 1]
            wave.S[: len(registers)] = registers
            item = np.arange(WAVE * index, WAVE * (index + 1))
            plane, x = np.divmod(item, self.block[0])
            z, y = np.divmod(plane, self.block[1])
            # gfx90a and later pack the three numbers into one register.
            wave.v[0][:] = x | y << 10 | z << 20
        self.waves_run += len(self.waves)
        running = list(self.waves)
        while running:
            # An ended wave counts as arrived at every later barrier.
            turn = list(running)
            self._order(turn)
            for wave in turn:
                if self.run_wave(wave) == END:
                    running.remove(wave)
            self.lds.barrier()

    def run_wave(self, wave: Wave) -> int:
        """Runs to the next barrier or the end."""
        program = self.program
        full, masked = program.full, program.masked
        pc = wave.pc
        if self.options.max_instructions is not None:
            return self._run_counted(wave, self.options.max_instructions)
        while pc >= 0:
            if wave.em is True:
                function = full.get(pc) or program.compile(pc, True)
            else:
                function = masked.get(pc) or program.compile(pc, False)
            pc = function(wave)
        if pc == END:
            wave.finish()
        return pc

    def _run_counted(self, wave: Wave, limit: int) -> int:
        program, pc = self.program, wave.pc
        while pc >= 0:
            full = wave.em is True
            functions = program.full if full else program.masked
            function = functions.get(pc) or program.compile(pc, full)
            before = pc
            pc = function(wave)
            if self._executed() > limit:
                wave.fault(program.code.instruction(before), f"more than {limit} instructions")
        if pc == END:
            wave.finish()
        return pc

    def _executed(self) -> int:
        return sum(len(block.instructions) * self.state.counts[block.counter] for block in self.program.blocks())
