"""Counts of a launch from how often its blocks ran."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from lightning_indexer.sim.options import Loop, Report

if TYPE_CHECKING:
    from lightning_indexer.sim.executor import Launch


def fill(launch: Launch) -> Report:
    program, counts = launch.program, launch.counts
    by_pc: Counter[int] = Counter()
    for block in program.blocks:
        times = counts[block.counter]
        if times:
            for ins in block.instructions:
                if ins.pc not in program.drop:
                    by_pc[ins.pc] += times
    by_kind: Counter[str] = Counter()
    by_opcode: Counter[str] = Counter()
    for pc, times in by_pc.items():
        ins = program.instruction(pc)
        by_kind[ins.kind] += times
        by_opcode[ins.name.lower()] += times
    report = Report(
        instructions=sum(by_pc.values()),
        by_kind=dict(by_kind),
        by_opcode=dict(by_opcode.most_common()),
        by_pc=dict(sorted(by_pc.items())),
        lds_bank_conflicts=launch.bank_conflicts,
        waves=launch.waves_run,
        grid=launch.grid,
        block=launch.block,
    )
    for buffer in launch.memory.buffers:
        if buffer.loaded:
            report.loaded[buffer.name] = report.loaded.get(buffer.name, 0) + buffer.loaded
        if buffer.stored:
            report.stored[buffer.name] = report.stored.get(buffer.name, 0) + buffer.stored
    for edge in program.edges.values():
        if trips := counts[edge.counter]:
            inside = [program.instruction(pc) for pc in by_pc if edge.target <= pc < edge.stop]
            report.loops.append(
                Loop(
                    edge.target,
                    edge.stop,
                    trips,
                    dict(Counter(ins.kind for ins in inside)),
                    sum(by_pc[ins.pc] for ins in inside),
                )
            )
    report.loops.sort(key=lambda loop: (loop.start, -loop.stop))
    return report
