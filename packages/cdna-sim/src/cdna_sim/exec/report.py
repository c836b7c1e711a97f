"""Counts of a launch from how often its blocks ran."""

from __future__ import annotations

from collections import Counter

from cdna_sim.exec.code import Code
from cdna_sim.exec.program import Block
from cdna_sim.memory.buffers import Buffer
from cdna_sim.options import Loop, Report


def counted(
    blocks: list[Block], counts: dict[int, int], code: Code, drop: frozenset[int], buffers: list[Buffer]
) -> Report:
    """The report of a launch, but for what only the launch knows: its waves, its shape, its time.

    Args:
        blocks: of its program.
        counts: of the launch, by the blocks' and branches' counters.
        drop: addresses that were skipped.
        buffers: with the bytes moved.
    """
    by_pc: Counter[int] = Counter()
    for block in blocks:
        times = counts.get(block.counter, 0)
        if times:
            for ins in block.instructions:
                if ins.pc not in drop:
                    by_pc[ins.pc] += times
    by_kind: Counter[str] = Counter()
    by_opcode: Counter[str] = Counter()
    for pc, times in by_pc.items():
        ins = code.instruction(pc)
        by_kind[ins.kind] += times
        by_opcode[ins.name.lower()] += times
    report = Report(
        instructions=sum(by_pc.values()),
        by_kind=dict(by_kind),
        by_opcode=dict(by_opcode.most_common()),
        by_pc=dict(sorted(by_pc.items())),
    )
    for buffer in buffers:
        if buffer.loaded:
            report.loaded[buffer.name] = report.loaded.get(buffer.name, 0) + buffer.loaded
        if buffer.stored:
            report.stored[buffer.name] = report.stored.get(buffer.name, 0) + buffer.stored
    # A branch may end blocks that start at different places.
    for edge in {edge.source: edge for block in blocks for edge in block.edges}.values():
        if trips := counts.get(edge.counter, 0):
            inside = [code.instruction(pc) for pc in by_pc if edge.target <= pc < edge.stop]
            report.loops.append(
                Loop(
                    edge.target, edge.stop, trips, dict(Counter(ins.kind for ins in inside)),
                    sum(by_pc[ins.pc] for ins in inside),
                )
            )  # fmt: skip
    report.loops.sort(key=lambda loop: (loop.start, -loop.stop))
    return report
