"""Global memory: scalar loads, GLOBAL, FLAT, SCRATCH and buffer instructions with their bounds, and copies to LDS."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from cdna_sim import Memory, Options, State
from semantics import (
    ARCHS,
    DATA,
    FULL,
    LANES,
    OLD,
    ORDER,
    SOME,
    Load,
    Store,
    Together,
    active_lanes,
    group,
    mnemonics,
    on,
    run_snippet,
)

SIZE = 16384
CONTENT = np.random.default_rng(31).integers(0, 256, SIZE, np.uint8)
MIDDLE = 4096  # where the tests' addresses point, so that negative offsets stay inside
WAIT = "\ns_waitcnt vmcnt(0) lgkmcnt(0)"
OPTIONS = [Options(poison=False, deferred=False), Options(poison=False, deferred=True)]
CIRCUMSTANCES = list(itertools.product(ARCHS, (FULL, SOME), OPTIONS))
masked = pytest.mark.parametrize("exec_mask", [FULL, SOME], ids=["full", "some"])
BOTH = ("gfx942", "gfx950")
NEW = ("gfx950",)

GLOBAL_LOADS = [
    Load("global_load_ubyte {d}, v[0:1], off", 1),
    Load("global_load_sbyte {d}, v[0:1], off offset:1", 1, (1,), signed=True),
    Load("global_load_ushort {d}, v[0:1], off offset:-2", 2, (-2,)),
    Load("global_load_sshort {d}, v[0:1], off", 2, signed=True),
    Load("global_load_ubyte_d16 {d}, v[0:1], off", 1, half=0),
    Load("global_load_ubyte_d16_hi {d}, v[0:1], off", 1, half=1),
    Load("global_load_sbyte_d16 {d}, v[0:1], off", 1, signed=True, half=0),
    Load("global_load_sbyte_d16_hi {d}, v[0:1], off", 1, signed=True, half=1),
    Load("global_load_short_d16 {d}, v[0:1], off", 2, half=0),
    Load("global_load_short_d16_hi {d}, v[0:1], off", 2, half=1),
    Load("global_load_dword {d}, v[0:1], off", 4),
    Load("global_load_dword {d}, v[0:1], off offset:4095", 4, (4095,)),
    Load("global_load_dwordx2 {d}, v[0:1], off offset:-4096", 8, (-4096,)),
    Load("global_load_dwordx3 {d}, v[0:1], off", 12),
    Load("global_load_dwordx4 {d}, v[0:1], off offset:16 sc0 sc1", 16, (16,)),
    Load("global_load_dword {d}, v6, s[20:21]", 4),
    Load("global_load_dwordx4 {d}, v6, s[20:21] offset:-16 nt", 16, (-16,)),
    Load("flat_load_ubyte {d}, v[0:1]", 1),
    Load("flat_load_dword {d}, v[0:1] offset:8", 4, (8,)),
    Load("flat_load_dwordx4 {d}, v[0:1]", 16),
]
GLOBAL_STORES = [
    Store("global_store_byte v[0:1], v2, off", 1),
    Store("global_store_byte_d16_hi v[0:1], v2, off offset:3", 1, (3,), half=1),
    Store("global_store_short v[0:1], v2, off offset:-2", 2, (-2,)),
    Store("global_store_short_d16_hi v[0:1], v2, off", 2, half=1),
    Store("global_store_dword v[0:1], v2, off", 4),
    Store("global_store_dwordx2 v[0:1], v[2:3], off offset:8", 8, (8,)),
    Store("global_store_dwordx3 v[0:1], v[2:4], off", 12),
    Store("global_store_dwordx4 v[0:1], v[2:5], off nt", 16),
    Store("global_store_dword v6, v2, s[20:21] offset:4", 4, (4,)),
    Store("global_store_dwordx4 v6, v[2:5], s[20:21]", 16),
    Store("flat_store_dword v[0:1], v2", 4),
    Store("flat_store_dwordx4 v[0:1], v[2:5]", 16),
]


def low_high(address: int | np.ndarray) -> tuple:
    return address & 0xFFFFFFFF, address >> 32


def pointers(base: int, offsets: np.ndarray) -> dict[int, np.ndarray]:
    """v[0:1] with each lane's address, v6 with its offset from SGPR pair 20."""
    low, high = low_high(np.uint64(base) + offsets.astype(np.uint64))
    return {0: low.astype(np.uint32), 1: high.astype(np.uint32), 6: offsets.astype(np.uint32)}


def resource(base: int, records: int, stride: int = 0) -> dict[int, int]:
    """s[24:27]: a linear buffer of 32-bit data."""
    return {24: base & 0xFFFFFFFF, 25: base >> 32 | stride << 16, 26: records, 27: 0x00027000}


OFFSETS = ORDER * np.uint32(52)


def place(load: Load) -> int:
    return 10 + 4 * ([*GLOBAL_LOADS, *BUFFER_LOADS].index(load) % len(GLOBAL_LOADS))


def run_global_loads(loads: list[Load], arch: str, exec_mask: int, options: Options) -> State:
    memory = Memory()
    address = memory.register("content", CONTENT, writable=False) + MIDDLE
    asm = "\n".join(load.line(place(load)) for load in loads)
    vgprs = pointers(address, OFFSETS) | dict.fromkeys(range(10, 256), OLD)
    sgprs = dict(zip((20, 21), low_high(address), strict=True))
    return run_snippet(arch, asm + WAIT, vgprs=vgprs, sgprs=sgprs, memory=memory, exec_mask=exec_mask, options=options)


global_loads = Together(GLOBAL_LOADS, run_global_loads)


@pytest.mark.parametrize("load", GLOBAL_LOADS, ids=str)
def test_global_load(load):
    expected = load.values(CONTENT, MIDDLE + OFFSETS)
    for arch, exec_mask, options in CIRCUMSTANCES:
        with on(arch, exec_mask, options):
            load.check(global_loads.state(load, arch, exec_mask, options), expected, exec_mask, place(load))


@pytest.mark.parametrize("store", GLOBAL_STORES, ids=str)
def test_global_store(store):
    offsets = ORDER * np.uint32(20)
    for arch, exec_mask, options in CIRCUMSTANCES:
        memory, content, expected = Memory(), CONTENT.copy(), CONTENT.copy()
        address = memory.register("content", content) + MIDDLE
        vgprs = pointers(address, offsets) | {2: DATA[0], 3: DATA[1], 4: DATA[2], 5: DATA[3]}
        sgprs = dict(zip((20, 21), low_high(address), strict=True))
        store.apply(expected, MIDDLE + offsets, exec_mask)
        with on(arch, exec_mask, options):
            asm = store.asm + WAIT
            run_snippet(arch, asm, vgprs=vgprs, sgprs=sgprs, memory=memory, exec_mask=exec_mask, options=options)
            np.testing.assert_array_equal(content, expected)


@masked
@pytest.mark.parametrize("arch", ARCHS)
def test_accumulation_registers_load_and_store(arch, exec_mask):
    asm = f"""global_load_dwordx2 a[2:3], v[0:1], off
        buffer_load_dword a4, v6, s[24:27], 0 offen{WAIT}
        global_store_dwordx2 v[0:1], a[2:3], off offset:2048
        buffer_store_dword a4, v6, s[24:27], 0 offen offset:1024{WAIT}"""
    memory, content, expected = Memory(), CONTENT.copy(), CONTENT.copy()
    address = memory.register("content", content)
    offsets = (LANES * 8).astype(np.uint32)
    vgprs = pointers(address, offsets)
    agprs = dict.fromkeys((2, 3, 4), OLD)
    state = run_snippet(
        arch, asm, vgprs=vgprs, agprs=agprs, sgprs=resource(address, SIZE), memory=memory, exec_mask=exec_mask
    )
    words, active = CONTENT[:512].view(np.uint32).reshape(64, 2), active_lanes(exec_mask)
    for register, loaded in ((2, words[:, 0]), (3, words[:, 1]), (4, words[:, 0])):
        np.testing.assert_array_equal(state.agpr[register], np.where(active, loaded, OLD))
    for lane in np.flatnonzero(active):
        start = 8 * int(lane)
        expected[2048 + start : 2048 + start + 8] = CONTENT[start : start + 8]
        expected[1024 + start : 1024 + start + 4] = CONTENT[start : start + 4]
    np.testing.assert_array_equal(content, expected)


@pytest.mark.parametrize("arch", ARCHS)
def test_lanes_of_one_instruction_in_several_buffers(arch):
    contents = [CONTENT[:512].copy(), CONTENT[512:1024].copy(), CONTENT[1024:1536].copy()]
    memory = Memory()
    bases = np.array([memory.register(f"content {n}", content) for n, content in enumerate(contents)], np.uint64)
    which = ORDER % 3
    at = bases[which] + (LANES * 8).astype(np.uint64)
    vgprs = {0: at.astype(np.uint32), 1: (at >> np.uint64(32)).astype(np.uint32), 2: DATA[0], 10: OLD}
    asm = f"global_load_dword v10, v[0:1], off{WAIT}\nglobal_store_dword v[0:1], v2, off offset:4{WAIT}"
    state = run_snippet(arch, asm, vgprs=vgprs, memory=memory)
    words = np.stack([CONTENT[512 * n : 512 * (n + 1)].view(np.uint32).reshape(64, 2) for n in range(3)])
    np.testing.assert_array_equal(state.vgpr[10], words[which, LANES, 0])
    words[which, LANES, 1] = DATA[0]
    np.testing.assert_array_equal(np.stack(contents), words.reshape(3, -1).view(np.uint8))


# Dwords, and byte offset from the address in s[20:21]; s22 is 64.
SCALAR_LOADS = {
    "s_load_dword {d}, s[20:21], 0x0": (1, 0),
    "s_load_dword {d}, s[20:21], 0x58": (1, 0x58),
    "s_load_dword {d}, s[20:21], -0x10": (1, -0x10),
    "s_load_dword {d}, s[20:21], s22": (1, 64),
    "s_load_dword {d}, s[20:21], s22 offset:0x8": (1, 72),
    "s_load_dwordx2 {d}, s[20:21], 0x48": (2, 0x48),
    "s_load_dwordx4 {d}, s[20:21], 0x28": (4, 0x28),
    "s_load_dwordx8 {d}, s[20:21], 0x8": (8, 8),
    "s_load_dwordx16 {d}, s[20:21], 0x400": (16, 0x400),
    "s_buffer_load_dword {d}, s[24:27], 0x10": (1, 0x10),
    "s_buffer_load_dwordx2 {d}, s[24:27], s22": (2, 64),
    "s_buffer_load_dwordx4 {d}, s[24:27], 0x20": (4, 0x20),
    "s_buffer_load_dwordx8 {d}, s[24:27], 0x40": (8, 0x40),
    "s_buffer_load_dwordx16 {d}, s[24:27], 0x0": (16, 0),
}


@pytest.mark.parametrize("options", OPTIONS, ids=["at-once", "deferred"])
@pytest.mark.parametrize("arch", ARCHS)
def test_scalar_loads(arch, options):
    """EXEC plays no part."""
    memory = Memory()
    address = memory.register("content", CONTENT, writable=False) + MIDDLE
    sgprs = dict(zip((20, 21), low_high(address), strict=True)) | {22: 64} | resource(address, 4096)
    lines, places = [], []
    for asm, (count, offset) in SCALAR_LOADS.items():
        lines += [asm.format(d=group("s", 40, count)), "s_waitcnt lgkmcnt(0)"]
        lines += [f"v_writelane_b32 v{10 + len(places)}, s{40 + n}, {n}" for n in range(count)]
        places.append((asm, count, MIDDLE + offset))
    state = run_snippet(arch, "\n".join(lines), sgprs=sgprs, memory=memory, exec_mask=0, options=options)
    for number, (asm, count, start) in enumerate(places):
        expected = CONTENT[start : start + 4 * count].view(np.uint32)
        np.testing.assert_array_equal(state.vgpr[10 + number][:count], expected, asm)


@pytest.mark.parametrize("arch", ARCHS)
def test_scalar_buffer_bounds(arch):
    """The document only says that dwords out of range are not read; LLVM counts on zeros."""
    asm = f"""s_buffer_load_dwordx4 s[40:43], s[24:27], 0x0
        s_buffer_load_dwordx4 s[44:47], s[24:27], 0x8
        s_buffer_load_dwordx2 s[48:49], s[24:27], s22
        s_buffer_load_dword s50, s[24:27], 0x10{WAIT}"""
    memory = Memory()
    address = memory.register("content", CONTENT[:16], writable=False)
    state = run_snippet(
        arch, asm, sgprs=resource(address, 16) | {22: 64} | dict.fromkeys(range(40, 51), 7), memory=memory
    )
    words = CONTENT[:16].view(np.uint32).tolist()
    assert [state.sgpr[n] for n in range(40, 51)] == [*words, *words[2:], *[0] * 5]


BUFFER_LOADS = [
    Load("buffer_load_ubyte {d}, v0, s[24:27], 0 offen", 1),
    Load("buffer_load_sbyte {d}, v0, s[24:27], 0 offen offset:1", 1, (1,), signed=True),
    Load("buffer_load_ushort {d}, v0, s[24:27], 0 offen", 2),
    Load("buffer_load_sshort {d}, v0, s[24:27], 0 offen offset:2", 2, (2,), signed=True),
    Load("buffer_load_short_d16 {d}, v0, s[24:27], 0 offen", 2, half=0),
    Load("buffer_load_short_d16_hi {d}, v0, s[24:27], 0 offen", 2, half=1),
    Load("buffer_load_ubyte_d16 {d}, v0, s[24:27], 0 offen", 1, half=0),
    Load("buffer_load_dword {d}, v0, s[24:27], 0 offen", 4),
    Load("buffer_load_dword {d}, v0, s[24:27], s22 offen offset:4092", 4, (4092 + 64,)),
    Load("buffer_load_dword {d}, off, s[24:27], s22 offset:12", 4, (12 + 64,)),
    Load("buffer_load_dwordx2 {d}, v0, s[24:27], 0 offen", 8),
    Load("buffer_load_dwordx3 {d}, v0, s[24:27], 0 offen", 12),
    Load("buffer_load_dwordx4 {d}, v0, s[24:27], 16 offen offset:32 sc0 nt", 16, (48,)),
]
BUFFER_STORES = [
    Store("buffer_store_byte v2, v0, s[24:27], 0 offen", 1),
    Store("buffer_store_short v2, v0, s[24:27], 0 offen offset:2", 2, (2,)),
    Store("buffer_store_short_d16_hi v2, v0, s[24:27], 0 offen", 2, half=1),
    Store("buffer_store_dword v2, v0, s[24:27], 0 offen offset:4", 4, (4,)),
    Store("buffer_store_dwordx2 v[2:3], v0, s[24:27], s22 offen", 8, (64,)),
    Store("buffer_store_dwordx3 v[2:4], v0, s[24:27], 0 offen", 12),
    Store("buffer_store_dwordx4 v[2:5], v0, s[24:27], 0 offen", 16),
]


def run_buffer_loads(loads: list[Load], arch: str, exec_mask: int, options: Options) -> State:
    memory = Memory()
    address = memory.register("content", CONTENT, writable=False)
    asm = "\n".join(load.line(place(load)) for load in loads)
    vgprs = {0: OFFSETS} | dict.fromkeys(range(10, 256), OLD)
    sgprs = resource(address, SIZE) | {22: 64}
    return run_snippet(arch, asm + WAIT, vgprs=vgprs, sgprs=sgprs, memory=memory, exec_mask=exec_mask, options=options)


buffer_loads = Together(BUFFER_LOADS, run_buffer_loads)


@pytest.mark.parametrize("load", BUFFER_LOADS, ids=str)
def test_buffer_load(load):
    expected = load.values(CONTENT, OFFSETS * np.uint32(load.address != ""))
    for arch, exec_mask, options in CIRCUMSTANCES:
        with on(arch, exec_mask, options):
            load.check(buffer_loads.state(load, arch, exec_mask, options), expected, exec_mask, place(load))


@pytest.mark.parametrize("store", BUFFER_STORES, ids=str)
def test_buffer_store(store):
    offsets = ORDER * np.uint32(20)
    vgprs = {0: offsets, 2: DATA[0], 3: DATA[1], 4: DATA[2], 5: DATA[3]}
    for arch, exec_mask, options in CIRCUMSTANCES:
        memory, content, expected = Memory(), CONTENT.copy(), CONTENT.copy()
        sgprs = resource(memory.register("content", content), SIZE) | {22: 64}
        store.apply(expected, offsets, exec_mask)
        with on(arch, exec_mask, options):
            asm = store.asm + WAIT
            run_snippet(arch, asm, vgprs=vgprs, sgprs=sgprs, memory=memory, exec_mask=exec_mask, options=options)
            np.testing.assert_array_equal(content, expected)


# Raw buffer: voffset + inst_offset wraps at 32 bits, soffset is added without wrapping; out of range where the bytes of
# the access do not end within num_records, each dword of a wide one by itself.
EDGE = 1024
RAW_OFFSETS = (EDGE - 16 + 4 * (LANES % 8)).astype(np.uint32)
RAW_OFFSETS[[60, 61, 62, 63]] = 0xFFFFFFFC, 0x80000000, 0x7FFFFFFC, 0xFFFFFFF0


def raw_components(offsets: np.ndarray, extra: int, counts: int, soffset: int = 0) -> np.ndarray:
    at = (offsets.astype(np.int64)[:, None] + extra) % 2**32 + soffset + 4 * np.arange(counts)
    words = CONTENT.view(np.uint32)[np.clip(at, 0, SIZE - 4) // 4]
    return np.where(at + 4 <= EDGE, words, 0)


@pytest.mark.parametrize("arch", ARCHS)
def test_raw_buffer_bounds(arch):
    """Loads give 0 out of range; voffset + inst_offset is unsigned and wraps, soffset counts in the check."""
    asm = f"""buffer_load_dword v10, v0, s[24:27], 0 offen
        buffer_load_dwordx4 v[12:15], v0, s[24:27], 0 offen
        buffer_load_dword v16, v0, s[24:27], 0 offen offset:8
        buffer_load_dword v17, v0, s[24:27], s22 offen
        buffer_load_ubyte v18, v0, s[24:27], 0 offen
        buffer_load_dwordx4 v[20:23], v0, s[24:27], s22 offen offset:8{WAIT}"""
    memory = Memory()
    address = memory.register("content", CONTENT, writable=False)
    vgprs = {0: RAW_OFFSETS} | dict.fromkeys((10, 12, 13, 14, 15, 16, 17, 18, 20, 21, 22, 23), OLD)
    state = run_snippet(arch, asm, vgprs=vgprs, sgprs=resource(address, EDGE) | {22: 64}, memory=memory)
    words = raw_components(RAW_OFFSETS, 0, 4)
    np.testing.assert_array_equal(state.vgpr[10], words[:, 0])
    np.testing.assert_array_equal(np.stack([state.vgpr[12 + n] for n in range(4)], 1), words)
    np.testing.assert_array_equal(state.vgpr[16], raw_components(RAW_OFFSETS, 8, 1)[:, 0])
    np.testing.assert_array_equal(state.vgpr[17], raw_components(RAW_OFFSETS, 0, 1, soffset=64)[:, 0])
    np.testing.assert_array_equal(state.vgpr[18], words[:, 0] & 0xFF)
    both = raw_components(RAW_OFFSETS, 8, 4, soffset=64)
    np.testing.assert_array_equal(np.stack([state.vgpr[20 + n] for n in range(4)], 1), both)
    assert both[60].any(), "0xfffffffc + 8 is 4"


@pytest.mark.parametrize("arch", ARCHS)
def test_a_scalar_offset_counts_in_the_range_check(arch):
    """What lies past num_records stays untouched, however the offset is split; soffset does not wrap."""
    for soffset in (64, EDGE - 256, EDGE, 0xFFFF_FFFC):
        memory, content = Memory(), CONTENT.copy()
        sgprs = resource(memory.register("content", content), EDGE) | {22: soffset}
        offsets = (16 * LANES).astype(np.uint32)
        vgprs = {0: offsets, 2: DATA[0], 3: DATA[1], 4: DATA[2], 5: DATA[3], 10: OLD}
        asm = f"""buffer_store_dwordx4 v[2:5], v0, s[24:27], s22 offen
            buffer_load_dword v10, v0, s[24:27], s22 offen{WAIT}"""
        state = run_snippet(arch, asm, vgprs=vgprs, sgprs=sgprs, memory=memory)
        expected = CONTENT.copy()
        at = offsets.astype(np.int64) + soffset
        for lane in np.flatnonzero(at < EDGE):
            expected.view(np.uint32)[at[lane] // 4 :][:4] = [one[lane] for one in DATA[:4]]
        np.testing.assert_array_equal(content, expected)
        np.testing.assert_array_equal(state.vgpr[10], np.where(at < EDGE, DATA[0], 0))


@pytest.mark.parametrize("arch", ARCHS)
def test_atomics_are_all_inside_or_dropped(arch):
    memory, content = Memory(), np.zeros(64, np.uint32)
    sgprs = resource(memory.register("content", content), 32) | {22: 16}
    vgprs = {0: (4 * LANES).astype(np.uint32), 2: np.full(64, 3, np.uint32), 3: np.full(64, 5, np.uint32)}
    asm = f"buffer_atomic_add_x2 v[2:3], v0, s[24:27], s22 offen{WAIT}"
    run_snippet(arch, asm, vgprs=vgprs, sgprs=sgprs, memory=memory)
    # Of the lanes' 8 bytes from 16 on, those of lanes 0, 1 and 2 end within 32.
    np.testing.assert_array_equal(content[:10], [0, 0, 0, 0, 3, 8, 8, 5, 0, 0])
    assert not content[10:].any()


@pytest.mark.parametrize("arch", ARCHS)
def test_raw_buffer_stores_out_of_range_are_dropped(arch):
    memory, content, expected = Memory(), CONTENT.copy(), CONTENT.copy()
    address = memory.register("content", content)
    offsets = (EDGE - 512 + 16 * LANES - 8).astype(np.uint32)
    vgprs = {0: offsets, 2: DATA[0], 3: DATA[1], 4: DATA[2], 5: DATA[3]}
    asm = f"buffer_store_dwordx4 v[2:5], v0, s[24:27], 0 offen{WAIT}"
    run_snippet(arch, asm, vgprs=vgprs, sgprs=resource(address, EDGE), memory=memory)
    Store(asm, 16).apply(expected, offsets, FULL)
    expected[EDGE:] = CONTENT[EDGE:]
    np.testing.assert_array_equal(content, expected)


@pytest.mark.parametrize("arch", ARCHS)
def test_structured_buffer(arch):
    """Address: base + stride * index + offsets; out of range if the index is, whatever the offset."""
    stride, records = 48, 40
    asm = f"""buffer_load_dword v10, v0, s[24:27], 0 idxen
        buffer_load_dwordx2 v[12:13], v[0:1], s[24:27], s22 idxen offen offset:4{WAIT}"""
    memory = Memory()
    address = memory.register("content", CONTENT, writable=False)
    index, offset = ORDER, (LANES % 16 * 4).astype(np.uint32)
    sgprs = resource(address, records, stride) | {22: 64}
    vgprs = {0: index, 1: offset} | dict.fromkeys((10, 12, 13), OLD)
    state = run_snippet(arch, asm, vgprs=vgprs, sgprs=sgprs, memory=memory)
    words = CONTENT.view(np.uint32)
    at = index.astype(np.int64) * stride // 4
    np.testing.assert_array_equal(state.vgpr[10], np.where(index < records, words[at], 0))
    at += (offset + 64 + 4) // 4
    for n in range(2):
        np.testing.assert_array_equal(state.vgpr[12 + n], np.where(index < records, words[at + n], 0))


@pytest.mark.parametrize("arch", ARCHS)
def test_buffer_offsets_reach_past_2_gib(arch):
    """Offset and num_records are unsigned 32 bits; the sum with the base has 64."""
    memory = Memory()
    base, offset = 0x7_FFFF_F000, 0x9000_0040
    memory.register("far", CONTENT[:4096], address=base + offset, writable=False)
    vgprs = {0: (offset + 4 * LANES).astype(np.uint32), 10: OLD, 11: OLD}
    asm = f"""buffer_load_dword v10, v0, s[24:27], 0 offen
        buffer_load_dword v11, v0, s[28:31], 0 offen{WAIT}"""
    short = {28 + n: word for n, word in enumerate(resource(base, 0x8000_0000).values())}
    state = run_snippet(arch, asm, vgprs=vgprs, sgprs=resource(base, 0xFFFF_FFFF) | short, memory=memory)
    np.testing.assert_array_equal(state.vgpr[10], CONTENT[:256].view(np.uint32))
    np.testing.assert_array_equal(state.vgpr[11], np.zeros(64))


# Copies to LDS: asm, bytes a lane, offset in memory and (with M0) in LDS. A lane's place does not depend on EXEC.
COPIES = {
    "buffer_load_dword v0, s[24:27], 0 offen lds": (4, 0, 0, BOTH),
    "buffer_load_dword v0, s[24:27], s22 offen offset:12 lds": (4, 76, 12, BOTH),
    "buffer_load_dwordx4 v0, s[24:27], 0 offen lds": (16, 0, 0, NEW),
    "buffer_load_dwordx4 v0, s[24:27], 0 offen offset:64 lds": (16, 64, 64, NEW),
    "global_load_lds_dword v[0:1], off": (4, 0, 0, BOTH),
    "global_load_lds_dword v6, s[20:21] offset:32": (4, 32, 32, BOTH),
    "global_load_lds_dwordx4 v[0:1], off": (16, 0, 0, NEW),
    "global_load_lds_dwordx4 v[0:1], off offset:1024": (16, 1024, 1024, NEW),
}
LDS = np.random.default_rng(33).integers(0, 256, SIZE, np.uint8)


@pytest.mark.parametrize("asm", COPIES)
def test_copy_to_lds(asm):
    width, offset, lds_offset, archs = COPIES[asm]
    offsets, m0 = ORDER * np.uint32(48), 2048
    for arch, exec_mask, options in CIRCUMSTANCES:
        if arch not in archs:
            continue
        memory, expected = Memory(), LDS.copy()
        address = memory.register("content", CONTENT, writable=False)
        vgprs = {0: offsets} if asm.startswith("buffer") else pointers(address, offsets)
        sgprs = resource(address, SIZE) | {22: 64} | dict(zip((20, 21), low_high(address), strict=True))
        for lane in np.flatnonzero(active_lanes(exec_mask)):
            source, place_ = int(offsets[lane]) + offset, m0 + lds_offset + width * int(lane)
            expected[place_ : place_ + width] = CONTENT[source : source + width]
        registers = {"vgprs": vgprs, "sgprs": sgprs, "m0": m0, "lds": LDS, "exec_mask": exec_mask}
        with on(arch, exec_mask, options):
            state = run_snippet(arch, asm + WAIT, **registers, memory=memory, options=options)
            np.testing.assert_array_equal(state.lds[:SIZE], expected)


@pytest.mark.parametrize(("arch", "name", "width"), [("gfx942", "dword", 4), ("gfx950", "dword", 4),
                                                     ("gfx950", "dwordx4", 16)])  # fmt: skip
def test_copy_to_lds_out_of_range_writes_zeros(arch, name, width):
    memory = Memory()
    address = memory.register("content", CONTENT, writable=False)
    offsets = (EDGE - 32 * width + LANES * width).astype(np.uint32)
    asm = f"buffer_load_{name} v0, s[24:27], 0 offen lds{WAIT}"
    state = run_snippet(arch, asm, vgprs={0: offsets}, sgprs=resource(address, EDGE), m0=0, lds=LDS, memory=memory)
    expected = np.concatenate([CONTENT[EDGE - 32 * width : EDGE], np.zeros(32 * width, np.uint8)])
    np.testing.assert_array_equal(state.lds[: 64 * width], expected)
    np.testing.assert_array_equal(state.lds[64 * width : SIZE], LDS[64 * width :])


@pytest.mark.parametrize("arch", ["gfx950"])
def test_three_dwords_to_lds_skip_the_fourth(arch):
    memory = Memory()
    address = memory.register("content", CONTENT, writable=False)
    asm = f"buffer_load_dwordx3 v0, s[24:27], 0 offen lds{WAIT}"
    vgprs = {0: (LANES * 12).astype(np.uint32)}
    state = run_snippet(arch, asm, vgprs=vgprs, sgprs=resource(address, SIZE), m0=0, lds=LDS, memory=memory)
    expected = LDS[:1024].reshape(64, 16).copy()
    expected[:, :12] = CONTENT[: 64 * 12].reshape(64, 12)
    np.testing.assert_array_equal(state.lds[:1024], expected.reshape(-1))


SCRATCH = """scratch_store_dword off, v2, off offset:16
    scratch_store_dwordx2 off, v[2:3], off offset:24
    scratch_store_dwordx3 off, v[2:4], off offset:32
    scratch_store_dwordx4 off, v[2:5], off offset:48
    scratch_store_byte off, v4, off offset:64
    scratch_store_short off, v5, off offset:66
    scratch_store_dword v0, v3, off
    scratch_store_dword off, a1, s22 offset:4
    scratch_store_short_d16_hi off, v5, off offset:68
    scratch_store_byte_d16_hi off, v5, off offset:70
    scratch_store_dword v0, v5, s22 offset:8
    s_waitcnt vmcnt(0)
    scratch_load_dword v10, off, off offset:16
    scratch_load_dwordx2 v[12:13], off, off offset:24
    scratch_load_dwordx3 v[14:16], off, off offset:32
    scratch_load_dwordx4 v[18:21], off, off offset:48
    scratch_load_ubyte v22, off, off offset:64
    scratch_load_sbyte v23, off, off offset:64
    scratch_load_ushort v24, off, off offset:66
    scratch_load_sshort v25, off, off offset:66
    scratch_load_dword v26, v0, off
    scratch_load_dword a2, off, s22 offset:4
    scratch_load_dword v27, off, off offset:48
    scratch_load_ushort v28, off, off offset:68
    scratch_load_ubyte v29, off, off offset:70
    scratch_load_dword v30, v0, s22 offset:8
    s_waitcnt vmcnt(0)"""


@masked
@pytest.mark.parametrize("arch", ARCHS)
def test_scratch(arch, exec_mask):
    """Every lane has its own memory at the same offsets."""
    a, b, c, d = DATA
    vgprs = {0: (128 + 4 * (LANES % 8)).astype(np.uint32), 2: a, 3: b, 4: c, 5: d} | dict.fromkeys(range(10, 31), OLD)
    state = run_snippet(arch, SCRATCH, vgprs=vgprs, agprs={1: d, 2: OLD}, sgprs={22: 200}, exec_mask=exec_mask)
    expected = {
        10: a, 12: a, 13: b, 14: a, 15: b, 16: c, 18: a, 19: b, 20: c, 21: d, 22: c & 0xFF,
        23: c.astype(np.int8).astype(np.int32).view(np.uint32), 24: d & 0xFFFF,
        25: d.astype(np.int16).astype(np.int32).view(np.uint32), 26: b, 27: a, 28: d >> 16,
        29: d >> 16 & 0xFF, 30: d,
    }  # fmt: skip
    active = active_lanes(exec_mask)
    for register, values in expected.items():
        np.testing.assert_array_equal(state.vgpr[register], np.where(active, values, OLD), f"v{register}")
    np.testing.assert_array_equal(state.agpr[2], np.where(active, d, OLD))


OPCODES = mnemonics(
    "\n".join(
        [row.asm for row in (*GLOBAL_LOADS, *GLOBAL_STORES, *BUFFER_LOADS, *BUFFER_STORES)]
        + [*SCALAR_LOADS, *COPIES, SCRATCH]
    )
)
