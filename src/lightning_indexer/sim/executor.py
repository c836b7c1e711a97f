"""Runs a kernel: workgroups one after another, the waves of one in turns from barrier to barrier."""

from __future__ import annotations

import itertools
import random
import struct
import time
from typing import Any

import numpy as np

from lightning_indexer.sim import waitstates
from lightning_indexer.sim.decode import Instruction
from lightning_indexer.sim.errors import SimulationFault
from lightning_indexer.sim.ldsmemory import Lds
from lightning_indexer.sim.memory import Memory
from lightning_indexer.sim.options import Options, Report
from lightning_indexer.sim.program import END, LOAD_ADDRESS, Program, program_for
from lightning_indexer.sim.report import fill
from lightning_indexer.sim.wave import Wave
from lightning_indexer.toolchain.code_object import CodeObject, CodeObjectError

# Where the runtime's own buffers lie: far from host addresses.
_KERNARG, _DISPATCH = 0x1100_0000_0000, 0x1200_0000_0000
# IEEE round to nearest even, denormals kept, for both precisions: what compilers ask for on these archs.
_FLOAT_MODE = 0xF0
_LDS_LIMIT = {"gfx942": 65536, "gfx950": 163840}


class Simulator:
    """Runs one kernel of a code object.

    Args:
        code_object: loaded.
        kernel: its name.
        options: how to run.

    Raises:
        CodeObjectError: no such kernel.
        UnknownOpcode: an arch or a float mode that is not modelled.
        SimulationFault: two instructions are too close together.
    """

    def __init__(self, code_object: CodeObject, kernel: str, options: Options | None = None) -> None:
        if kernel not in code_object.kernels:
            raise CodeObjectError(f"kernel: got {kernel!r}, expected one of {', '.join(code_object.kernels)}")
        self.code_object, self.kernel, self.options = code_object, kernel, options or Options()
        self.program = program_for(code_object, kernel, self.options)
        mode = self.program.float_mode
        if mode != _FLOAT_MODE:
            raise SimulationFault(f"float mode {mode:#x}: only {_FLOAT_MODE:#x} is modelled", kernel=kernel)
        if self.options.wait_states:
            waitstates.check(self.program)

    def launch(
        self,
        grid: tuple[int, int, int],
        block: int | tuple[int, int, int],
        kernarg: bytes,
        memory: Memory,
        dynamic_lds: int = 0,
    ) -> Report:
        """Runs ``grid`` workgroups of ``block`` work-items.

        Args:
            grid, block: workgroups and work-items by dimension.
            kernarg: the kernel argument segment, hidden arguments included.
            memory: what the kernel may touch.
            dynamic_lds: bytes beyond the kernel's static LDS.

        Raises:
            SimulationFault: see its class; memory keeps what had been written.
        """
        sizes = (block, 1, 1) if isinstance(block, int) else block
        started = time.perf_counter()
        launch = Launch(self.program, self.options, memory, sizes, grid, kernarg, dynamic_lds)
        memory.start_counting()
        with np.errstate(all="ignore"), launch.runtime_buffers():
            launch.run()
        report = fill(launch)
        report.seconds = time.perf_counter() - started
        return report


class Launch:
    """One launch: its waves, counts and initial registers.

    Attributes:
        counts: by counter of the program: how often a block ran or a backward branch was taken.
        bank_conflicts: extra LDS cycles so far.
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
        self.program, self.options, self.memory = program, options, memory
        self.block, self.grid = block, grid
        self.on_access = options.on_access
        self.counts = _Counts()
        self.bank_conflicts = 0
        self.waves_run = 0
        self.ticks = 0
        descriptor = program.info.descriptor
        self.scratch_bytes = descriptor.scratch_bytes
        self.kernarg = np.frombuffer(kernarg + bytes(-len(kernarg) % 64), np.uint8)
        self.items = block[0] * block[1] * block[2]
        lds_bytes = descriptor.lds_bytes + dynamic_lds
        self._check(kernarg, lds_bytes)
        self.wave_count = -(-self.items // 64)
        self.lds = Lds(lds_bytes, self.wave_count, options.poison, options.strict)
        self.waves = [Wave(self) for _ in range(self.wave_count)]
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
        if lds_bytes > _LDS_LIMIT[self.program.arch]:
            raise SimulationFault(f"{lds_bytes} bytes of LDS of {_LDS_LIMIT[self.program.arch]}", kernel=name)
        if len(kernarg) < info.kernarg_bytes:
            raise SimulationFault(f"{len(kernarg)} bytes of arguments of {info.kernarg_bytes}", kernel=name)

    def clock(self) -> int:
        """A number that grows, for s_memtime: not a time."""
        self.ticks += 100
        return self.ticks

    def runtime_buffers(self) -> _RuntimeBuffers:
        return _RuntimeBuffers(self)

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
            (6, 1, self.scratch_bytes),
        ):
            if enabled >> bit & 1:
                registers += [value >> 32 * index & 0xFFFFFFFF for index in range(dwords)]
        length, first = descriptor.preload_length, 4 * descriptor.preload_offset
        if length:
            data = (kernarg + bytes(4 * length))[first : first + 4 * length]
            registers += struct.unpack(f"<{length}I", data)
        count = descriptor.rsrc2 >> 1 & 31
        return registers + [0] * (count - len(registers))

    def run(self) -> None:
        chosen = self.options.workgroups
        if chosen is None:
            workgroups = list(itertools.product(*(range(size) for size in reversed(self.grid))))
        else:
            workgroups = sorted((z, y, x) for x, y, z in chosen)
        self._order(workgroups)
        for z, y, x in workgroups:
            self._run_workgroup((x, y, z))

    def _order(self, sequence: list[Any]) -> None:
        if self.options.order == "reversed":
            sequence.reverse()
        elif self.options.order == "shuffled":
            self.random.shuffle(sequence)

    def _run_workgroup(self, workgroup: tuple[int, int, int]) -> None:
        self.lds.start()
        descriptor = self.program.info.descriptor
        # Firmware that preloads arguments enters past the code that loads them.
        entry = descriptor.entry + (256 if descriptor.preload_length else 0)
        for index, wave in enumerate(self.waves):
            wave.start(workgroup, index, self.lds, min(64, self.items - 64 * index), self.options.poison)
            wave.pc = entry
            registers = list(self.user_sgprs)
            registers += [workgroup[axis] for axis in range(3) if descriptor.rsrc2 >> 7 + axis & 1]
            wave.S[: len(registers)] = registers
            item = np.arange(64 * index, 64 * index + 64)
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
                if self._run_wave(wave) == END:
                    running.remove(wave)
            self.lds.barrier()

    def _run_wave(self, wave: Wave) -> int:
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
                ins: Instruction = program.instruction(before)
                wave.fault(ins, f"more than {limit} instructions")
        if pc == END:
            wave.finish()
        return pc

    def _executed(self) -> int:
        return sum(len(block.instructions) * self.counts[block.counter] for block in self.program.blocks)


class _Counts(dict[int, int]):
    def __missing__(self, key: int) -> int:
        return 0


class _RuntimeBuffers:
    """Registers the argument segment, the dispatch packet and the code while a launch runs."""

    def __init__(self, launch: Launch) -> None:
        self.launch = launch

    def __enter__(self) -> None:
        launch = self.launch
        memory = launch.memory
        self.buffers, self.bases = list(memory.buffers), list(memory._bases)
        if len(launch.kernarg):
            memory.register("the kernel arguments", launch.kernarg, address=_KERNARG, writable=False)
        image = np.frombuffer(launch.program.image, np.uint8)
        memory.register("the code object", image, address=LOAD_ADDRESS, writable=False)
        items = [size * count for size, count in zip(launch.block, launch.grid, strict=True)]
        packet = struct.pack(
            "<HHHHHHIIIIIQQQQ", 0, 3, *launch.block, 0, *items, launch.scratch_bytes, launch.lds.size, 0, _KERNARG, 0, 0
        )
        memory.register("the dispatch packet", np.frombuffer(packet, np.uint8), address=_DISPATCH, writable=False)

    def __exit__(self, *error: object) -> None:
        self.launch.memory.buffers[:] = self.buffers
        self.launch.memory._bases[:] = self.bases
