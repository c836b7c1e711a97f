"""Every constant of the timing model, with where it comes from.

Sources, by the word in brackets:
    [sheet] AMD Instinct MI300X, MI350X and MI355X data sheets: compute units, peak engine clock, memory bandwidth,
        peak vector float32, which packed instructions reach and others half of.
    [cdna] AMD "CDNA 3 white paper" and "CDNA 4 architecture white paper": four SIMDs of 16 lanes, L1 of 32 KB with
        lines of 128 bytes and 64 bytes a cycle, L2 of 4 MB an XCD with 2 KB a cycle, Infinity Cache of 256 MB with
        17 TB/s, LDS read bandwidth, which CDNA 4 doubled to 128 bytes a cycle.
    [isa] AMD Instinct MI300 and CDNA4 ISA documents; LLVM's scheduling tables and hazard recogniser (SISchedule.td,
        GCNHazardRecognizer.cpp): passes of matrix instructions, wait states, quarter-rate instructions, branches.
    [coexec] LLVM pull requests 157968, 184084, 214682 (packed and dot-product instructions never execute beside a
        matrix instruction; no vector instruction does during its first two passes), and the published analysis of
        gfx950 attention kernels with thread traces, ``mfma_coissue_scheduling.md``: 8 cycles in which operands are
        read, then 4 a vector instruction; a packed one waits until 12 cycles after the last matrix instruction; 8
        cycles a transcendental; an s_waitcnt takes a slot of 4.
    [ta] rocprofiler-compute, "Vector L1 cache": of each four lanes the address unit makes one access where they share
        64 bytes, else one a line: 16 accesses of a wave at best, 64 at worst, TCP_TOTAL_ACCESSES.
    [latency] Chips and Cheese, "Testing AMD's Giant MI300X" and "The MALL is Open" (SC25 workshop): pointer chasing.
    [stream] BabelStream and memcpy on MI300X as published: about four fifths of the peak.
    [fit] calibrated on four published rows of lightning-indexer's docs/timing.md; nothing else is.
"""

from __future__ import annotations

from dataclasses import dataclass

# A SIMD has a turn every four cycles, in which each of its waves issues at most one instruction, and at most one of
# each kind issues: [cdna].
TURN = 4
VECTOR_CYCLES = 4  # 64 lanes over 16, packed float32 too: [sheet]
QUARTER_RATE = 16  # cycles of 32-bit integer products and float64: [isa]
TRANSCENDENTAL = {"gfx942": 16, "gfx950": 8}  # cycles: quarter rate, [isa]; [coexec]


@dataclass(frozen=True, slots=True)
class Device:
    """One GPU. Cycles are of the engine clock; times that other clocks rule are in nanoseconds.

    Attributes:
        name, arch: of the product; of its code.
        units, dies: compute units, and XCDs, which have an L2 each.
        clock: sustained engine clock in GHz.
        launch: microseconds from one kernel to the next, what a profiler counts of an empty kernel.
        memory: bytes a nanosecond that HBM gives in practice.
        lds_bytes: a cycle.
    """

    name: str
    arch: str
    units: int
    clock: float  # [fit]
    launch: float  # [fit]
    memory: float  # [sheet] times 0.8 [stream]
    lds_bytes: int  # [cdna]
    dies: int = 8  # [cdna]
    simds: int = 4  # [cdna]
    read_phase: int = 8  # of a matrix instruction, without vector instructions beside it: [coexec]
    packed_gap: int = 12  # from the end of a matrix instruction to a packed one: [coexec]
    branch: int = 16  # a branch that is taken, until the next instruction issues: [isa], four turns
    # Memory: hits, in cycles of L1 and LDS, in ns beyond.
    l1_latency: int = 120  # [latency]
    l1_lines: int = 256  # 32 KB in lines of 128 bytes: [cdna]
    l2_latency: float = 120.0  # ns, [latency]
    cache_latency: float = 220.0  # ns, Infinity Cache, [latency]
    memory_latency: float = 345.0  # ns, [latency]
    cache: float = 11900.0  # bytes a nanosecond that the Infinity Cache gives, of 17 TB/s peak: [latency]
    scalar_latency: int = 50  # cycles, a hit of the scalar cache: [latency]
    l2_bytes: int = 64  # a cycle and compute unit: 2 KB an XCD over 32, [cdna]
    l2_size: int = 4 << 20  # of an XCD, [cdna]
    cache_size: int = 256 << 20  # Infinity Cache, which all traffic to memory passes, [cdna]
    lds_latency: int = 64  # cycles, [isa]
    line: int = 128  # bytes, [cdna]


DEVICES: dict[str, Device] = {
    device.name: device
    for device in (
        Device("MI300X", "gfx942", 304, 1.79, 1.9, 0.8 * 5300, 64),
        Device("MI350X", "gfx950", 256, 1.88, 1.9, 0.8 * 8000, 128),
        Device("MI355X", "gfx950", 256, 2.05, 1.9, 0.8 * 8000, 128),
    )
}
