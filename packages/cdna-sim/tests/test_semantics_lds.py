"""LDS: loads and stores of every width, the two-address forms, and gfx950's transposing reads."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from cdna_sim import Options, State
from semantics import ARCHS, DATA, FULL, LANES, OLD, ORDER, SOME, Load, Store, Together, mnemonics, on, run_snippet

SIZE = 16384
LDS = np.random.default_rng(21).integers(0, 256, SIZE, np.uint8)
WAIT = "\ns_waitcnt lgkmcnt(0)"
OPTIONS = [Options(poison=False, deferred=False), Options(poison=False, deferred=True)]
CIRCUMSTANCES = list(itertools.product(ARCHS, (FULL, SOME), OPTIONS))

LOADS = [
    Load("ds_read_u8 {d}, v1", 1),
    Load("ds_read_u8 {d}, v1 offset:3", 1, (3,)),
    Load("ds_read_i8 {d}, v1 offset:1", 1, (1,), signed=True),
    Load("ds_read_u16 {d}, v2", 2),
    Load("ds_read_u16 {d}, v2 offset:2048", 2, (2048,)),
    Load("ds_read_i16 {d}, v2 offset:2", 2, (2,), signed=True),
    Load("ds_read_u8_d16 {d}, v1", 1, half=0),
    Load("ds_read_u8_d16_hi {d}, v1", 1, half=1),
    Load("ds_read_i8_d16 {d}, v1", 1, signed=True, half=0),
    Load("ds_read_i8_d16_hi {d}, v1", 1, signed=True, half=1),
    Load("ds_read_u16_d16 {d}, v2", 2, half=0),
    Load("ds_read_u16_d16_hi {d}, v2", 2, half=1),
    Load("ds_read_b32 {d}, v0", 4),
    Load("ds_read_b32 {d}, v0 offset:8188", 4, (8188,)),
    Load("ds_read_b64 {d}, v0 offset:8", 8, (8,)),
    Load("ds_read_b96 {d}, v0", 12),
    Load("ds_read_b128 {d}, v0", 16),
    Load("ds_read_b128 {d}, v0 offset:4096", 16, (4096,)),
    Load("ds_read2_b32 {d}, v0 offset0:3 offset1:255", 4, (12, 1020)),
    Load("ds_read2st64_b32 {d}, v0 offset0:1 offset1:3", 4, (256, 768)),
    Load("ds_read2_b64 {d}, v0 offset1:2", 8, (0, 16)),
    Load("ds_read2_b64 {d}, v0 offset0:7 offset1:9", 8, (56, 72)),
    Load("ds_read2st64_b64 {d}, v0 offset1:4", 8, (0, 2048)),
]
STORES = [
    Store("ds_write_b8 v0, v2 offset:1", 1, (1,)),
    Store("ds_write_b16 v0, v2 offset:2", 2, (2,)),
    Store("ds_write_b8_d16_hi v0, v2", 1, half=1),
    Store("ds_write_b16_d16_hi v0, v2", 2, half=1),
    Store("ds_write_b32 v0, v2", 4),
    Store("ds_write_b32 v0, v2 offset:4096", 4, (4096,)),
    Store("ds_write_b64 v0, v[2:3] offset:16", 8, (16,)),
    Store("ds_write_b96 v0, v[2:4]", 12),
    Store("ds_write_b128 v0, v[2:5]", 16),
    Store("ds_write_b128 v0, v[2:5] offset:2048", 16, (2048,)),
    Store("ds_write2_b32 v0, v2, v3 offset0:1 offset1:2", 4, (4, 8)),
    Store("ds_write2st64_b32 v0, v2, v3 offset0:13 offset1:14", 4, (3328, 3584)),
    Store("ds_write2_b64 v0, v[2:3], v[4:5] offset1:1", 8, (0, 8)),
    Store("ds_write2st64_b64 v0, v[2:3], v[4:5] offset1:8", 8, (0, 4096)),
]
TRANSPOSES = {"ds_read_b64_tr_b16": 16, "ds_read_b64_tr_b8": 8, "ds_read_b64_tr_b4": 4}
OPCODES = mnemonics("\n".join(row.asm for row in [*LOADS, *STORES])) | set(TRANSPOSES)


# Byte addresses of whole, of odd and of even alignment, in v0, v1 and v2.
ADDRESSES = {"0": ORDER * np.uint32(48), "1": ORDER * np.uint32(49), "2": ORDER * np.uint32(50)}


def run_loads(loads: list[Load], arch: str, exec_mask: int, options: Options) -> State:
    asm = "\n".join(load.line(place(load)) for load in loads)
    vgprs = {int(number): values for number, values in ADDRESSES.items()} | dict.fromkeys(range(10, 256), OLD)
    return run_snippet(arch, asm + WAIT, vgprs=vgprs, lds=LDS, exec_mask=exec_mask, options=options)


def place(load: Load) -> int:
    return 10 + 4 * LOADS.index(load)


loads_together = Together(LOADS, run_loads)


@pytest.mark.parametrize("load", LOADS, ids=str)
def test_load(load):
    expected = load.values(LDS, ADDRESSES[load.address])
    for arch, exec_mask, options in CIRCUMSTANCES:
        with on(arch, exec_mask, options):
            load.check(loads_together.state(load, arch, exec_mask, options), expected, exec_mask, place(load))


@pytest.mark.parametrize("store", STORES, ids=str)
def test_store(store):
    addresses = ORDER * np.uint32(store.bytes * (3 if store.offsets[-1] < 64 else 1))
    vgprs = {0: addresses, 2: DATA[0], 3: DATA[1], 4: DATA[2], 5: DATA[3]}
    for arch, exec_mask, options in CIRCUMSTANCES:
        with on(arch, exec_mask, options):
            state = run_snippet(arch, store.asm + WAIT, vgprs=vgprs, lds=LDS, exec_mask=exec_mask, options=options)
            expected = LDS.copy()
            store.apply(expected, addresses, exec_mask)
            np.testing.assert_array_equal(state.lds[:SIZE], expected)


@pytest.mark.parametrize("arch", ARCHS)
def test_accumulation_registers_load_and_store(arch):
    """Data operands of LDS instructions may be AGPRs."""
    asm = f"ds_read_b64 a[2:3], v0{WAIT}\nds_write_b64 v0, a[2:3] offset:8192{WAIT}"
    addresses = (LANES * 8).astype(np.uint32)
    state = run_snippet(arch, asm, vgprs={0: addresses}, agprs={2: OLD, 3: OLD}, lds=LDS)
    words = LDS[:512].view(np.uint32).reshape(64, 2)
    np.testing.assert_array_equal(np.stack([state.agpr[2], state.agpr[3]], 1), words)
    np.testing.assert_array_equal(state.lds[8192 : 8192 + 512], LDS[:512])


@pytest.mark.parametrize("options", OPTIONS, ids=["at-once", "deferred"])
@pytest.mark.parametrize("name", TRANSPOSES)
@pytest.mark.parametrize("offset", [0, 512])
def test_transposing_read(name, offset, options):
    """16 lanes read 64 bits each, which make rows of 16 elements; a lane gets one column.

    CDNA4 ISA, "MFMA Transpose Load from LDS", says which K 16 lanes get ready for the MFMA. Every lane has an address
    of its own; EXEC has to be all ones.
    """
    bits = TRANSPOSES[name]
    rows = 64 // bits
    addresses = ORDER * np.uint32(8) + np.uint32(1024)
    asm = f"{name} v[10:11], v0{f' offset:{offset}' if offset else ''}{WAIT}"
    state = run_snippet("gfx950", asm, vgprs={0: addresses}, lds=LDS, options=options)
    raw = LDS[(addresses[:, None] + offset + np.arange(8)).astype(np.int64)]  # [lane, byte]
    elements = np.unpackbits(raw, axis=1, bitorder="little").reshape(4, rows, 16, bits)
    columns = elements.transpose(0, 2, 1, 3).reshape(64, 64)
    expected = np.packbits(columns, axis=1, bitorder="little").view(np.uint32)
    np.testing.assert_array_equal(np.stack([state.vgpr[10], state.vgpr[11]], 1), expected)
