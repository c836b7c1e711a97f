"""Read-modify-write operations on LDS and on global memory."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest

from cdna_sim import Memory, State
from semantics import ARCHS, FULL, LANES, OLD, ORDER, SOME, Together, active_lanes, group, on, run_snippet

WAIT = "\ns_waitcnt vmcnt(0) lgkmcnt(0)"
MASKS = (FULL, SOME)


@dataclass(frozen=True)
class Atomic:
    """``expected`` of the old value and the data, and for a compare of the value compared with."""

    name: str
    dtype: type
    expected: Callable[..., np.ndarray]
    operands: int = 1
    archs: tuple[str, ...] = ARCHS

    @property
    def registers(self) -> int:
        return np.dtype(self.dtype).itemsize // 4


def increment(old: np.ndarray, limit: np.ndarray) -> np.ndarray:
    return np.where(old >= limit, 0, old + old.dtype.type(1))


def decrement(old: np.ndarray, limit: np.ndarray) -> np.ndarray:
    return np.where((old == 0) | (old > limit), limit, old - old.dtype.type(1))


def swapped(old: np.ndarray, new: np.ndarray, compared: np.ndarray) -> np.ndarray:
    return np.where(old == compared, new, old)


def returning(name: str) -> str:
    prefix, verb, kind = name.split("_")
    return f"{prefix}_{verb}_rtn_{kind}"


U32, I32, F32, U64, I64 = np.uint32, np.int32, np.float32, np.uint64, np.int64
LDS = [
    *(
        Atomic(f"ds_{name}_{sign}{bits}", dtype, expected)
        for bits, unsigned, signed in ((32, U32, I32), (64, U64, I64))
        for name, sign, dtype, expected in (
            ("add", "u", unsigned, lambda old, a: old + a),
            ("sub", "u", unsigned, lambda old, a: old - a),
            ("rsub", "u", unsigned, lambda old, a: a - old),
            ("inc", "u", unsigned, increment),
            ("dec", "u", unsigned, decrement),
            ("min", "i", signed, np.minimum),
            ("max", "i", signed, np.maximum),
            ("min", "u", unsigned, np.minimum),
            ("max", "u", unsigned, np.maximum),
            ("and", "b", unsigned, lambda old, a: old & a),
            ("or", "b", unsigned, lambda old, a: old | a),
            ("xor", "b", unsigned, lambda old, a: old ^ a),
        )
    ),
    Atomic("ds_add_f32", F32, lambda old, a: old + a),
    Atomic("ds_min_f32", F32, np.minimum),
    Atomic("ds_max_f32", F32, np.maximum),
    Atomic("ds_cmpst_b32", U32, swapped, 2),
    Atomic("ds_cmpst_b64", U64, swapped, 2),
]
LDS_RETURNING = {"ds_wrxchg_rtn_b32": U32, "ds_wrxchg_rtn_b64": U64}
GLOBAL = [
    *(
        Atomic(f"global_atomic_{name}{wide}", dtype, expected)
        for wide, unsigned, signed in (("", U32, I32), ("_x2", U64, I64))
        for name, dtype, expected in (
            ("swap", unsigned, lambda old, a: a),
            ("add", unsigned, lambda old, a: old + a),
            ("sub", unsigned, lambda old, a: old - a),
            ("smin", signed, np.minimum),
            ("smax", signed, np.maximum),
            ("umin", unsigned, np.minimum),
            ("umax", unsigned, np.maximum),
            ("and", unsigned, lambda old, a: old & a),
            ("or", unsigned, lambda old, a: old | a),
            ("xor", unsigned, lambda old, a: old ^ a),
            ("inc", unsigned, increment),
            ("dec", unsigned, decrement),
        )
    ),
    Atomic("global_atomic_add_f32", F32, lambda old, a: old + a),
    Atomic("global_atomic_cmpswap", U32, swapped, 2),
    Atomic("global_atomic_cmpswap_x2", U64, swapped, 2),
]
OPCODES = {row.name for row in (*LDS, *GLOBAL)} | {returning(row.name) for row in LDS} | set(LDS_RETURNING)


def values(dtype: type, seed: int) -> np.ndarray:
    """64 numbers, a third of them the same for every seed, so that compares sometimes hold."""
    rng = np.random.default_rng(seed)
    if dtype is F32:
        found = rng.standard_normal(64).astype(F32)
    else:
        found = rng.integers(0, 2**64, 64, np.uint64).astype(dtype)
        found[:6] = np.array([0, 1, 2**64 - 1, 2**63, 2**31, 5], np.uint64).astype(dtype)
    found[::3] = np.arange(22).astype(dtype)
    return found


def dwords(x: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(x).view(np.uint32).reshape(64, -1).T


def registers(rows: list[Atomic], row: Atomic) -> tuple[int, int, int]:
    """Where the data, what a compare compares with, and the result are: registers of the row's own."""
    first = 8 + 6 * rows.index(row)
    return first, first + 2, first + 4


def operands(row: Atomic, rows: list[Atomic]) -> dict[int, np.ndarray]:
    data, compared, result = registers(rows, row)
    a, b = dwords(values(row.dtype, 2)), dwords(values(row.dtype, 3))
    return dict(enumerate(a, data)) | dict(enumerate(b, compared)) | {result: OLD, result + 1: OLD}


def contents(row: Atomic) -> np.ndarray:
    """What memory holds before: each lane's value at the place of its own that ORDER gives, in dwords."""
    found = np.zeros(64, row.dtype)
    found[ORDER] = values(row.dtype, 1)
    return found


def check(row: Atomic, copies: list[np.ndarray], result: list[np.ndarray], exec_mask: int) -> None:
    """The memory afterwards, in two copies, and what was returned."""
    old, a, b = (values(row.dtype, seed) for seed in (1, 2, 3))
    new = row.expected(old, a, b) if row.operands == 2 else row.expected(old, a)
    expected, active = contents(row), active_lanes(exec_mask)
    expected[ORDER] = np.where(active, new, old)
    for copy in copies:
        np.testing.assert_array_equal(copy, expected)
    for got, word in zip(result, dwords(old), strict=True):
        np.testing.assert_array_equal(got, np.where(active, word, OLD))


def run_lds(rows: list[Atomic], arch: str, exec_mask: int) -> State:
    """Each row on 1 KiB of its own: without the old value on the first half, with it on the second."""
    lines, lds, vgprs = [], np.zeros((len(LDS), 2, 512), np.uint8), {}
    for row in rows:
        n, start = row.registers, 1024 * LDS.index(row)
        data, compared, result = registers(LDS, row)
        # Of a compare the first operand is compared with, the second stored.
        sources = [group("v", compared, n)] * (row.operands == 2) + [group("v", data, n)]
        both, address = ", ".join(sources), n  # v1: dwords apart, v2: pairs
        lines.append(f"{row.name} v{address}, {both} offset:{start}")
        lines.append(f"{returning(row.name)} {group('v', result, n)}, v{address}, {both} offset:{start + 512}")
        lds[LDS.index(row), :, : 256 * n] = contents(row).view(np.uint8)
        vgprs |= operands(row, LDS)
    vgprs |= {1: ORDER * np.uint32(4), 2: ORDER * np.uint32(8)}
    return run_snippet(arch, "\n".join(lines) + WAIT, vgprs=vgprs, lds=lds.reshape(-1), exec_mask=exec_mask)


lds_together = Together(LDS, run_lds)


@pytest.mark.parametrize("row", LDS, ids=lambda row: row.name)
def test_lds(row):
    start, size = 1024 * LDS.index(row), 256 * row.registers
    for arch, exec_mask in itertools.product(ARCHS, MASKS):
        with on(arch, exec_mask):
            state = lds_together.state(row, arch, exec_mask)
            copies = [state.lds[at : at + size].view(row.dtype) for at in (start, start + 512)]
            result = [state.vgpr[registers(LDS, row)[2] + i] for i in range(row.registers)]
            check(row, copies, result, exec_mask)


@pytest.mark.parametrize("name", LDS_RETURNING)
@pytest.mark.parametrize("arch", ARCHS)
def test_lds_exchange(arch, name):
    dtype = LDS_RETURNING[name]
    n = np.dtype(dtype).itemsize // 4
    old, a = values(dtype, 1), values(dtype, 2)
    vgprs = {0: (LANES * 4 * n).astype(np.uint32)} | dict(enumerate(dwords(a), 2))
    asm = f"{name} {group('v', 10, n)}, v0, {group('v', 2, n)}{WAIT}"
    state = run_snippet(arch, asm, vgprs=vgprs, lds=old.view(np.uint8))
    np.testing.assert_array_equal(np.stack([state.vgpr[10 + i] for i in range(n)]), dwords(old))
    np.testing.assert_array_equal(state.lds[: old.nbytes], a.view(np.uint8))


def run_global(rows: list[Atomic], arch: str, exec_mask: int) -> tuple[State, np.ndarray]:
    """Each row on 1 KiB of its own, whose address is in SGPRs of its own; sc0 returns the old value."""
    content = np.zeros((len(GLOBAL), 2, 512), np.uint8)
    memory = Memory()
    base = memory.register("content", content)
    lines: list[str] = []
    vgprs, sgprs = {1: ORDER * np.uint32(4), 2: ORDER * np.uint32(8)}, {}
    for row in rows:
        n, number = row.registers, GLOBAL.index(row)
        data, _, result = registers(GLOBAL, row)
        # Of a compare the data are the new value, then what it is compared with.
        words = np.concatenate([dwords(values(row.dtype, seed)) for seed in (2, 3)])
        vgprs |= operands(row, GLOBAL) | dict(enumerate(words, data))
        address, pair = base + 1024 * number, 40 + 2 * number
        sgprs |= {pair: address & 0xFFFFFFFF, pair + 1: address >> 32}
        where = f"{group('v', data, n * row.operands)}, s[{pair}:{pair + 1}]"
        lines.append(f"{row.name} v{n}, {where}")
        lines.append(f"{row.name} {group('v', result, n)}, v{n}, {where} offset:512 sc0")
        content[number, :, : 256 * n] = contents(row).view(np.uint8)
    asm = "\n".join(lines) + WAIT
    return run_snippet(arch, asm, vgprs=vgprs, sgprs=sgprs, memory=memory, exec_mask=exec_mask), content


global_together = Together(GLOBAL, run_global)


@pytest.mark.parametrize("row", GLOBAL, ids=lambda row: row.name)
def test_global(row):
    for arch, exec_mask in itertools.product(ARCHS, MASKS):
        with on(arch, exec_mask):
            state, content = global_together.state(row, arch, exec_mask)
            copies = list(content[GLOBAL.index(row), :, : 256 * row.registers].view(row.dtype))
            result = [state.vgpr[registers(GLOBAL, row)[2] + i] for i in range(row.registers)]
            check(row, copies, result, exec_mask)


BUFFER = ("buffer_atomic_add", "buffer_atomic_umax", "buffer_atomic_swap", "buffer_atomic_add_x2")
FLAT = ("flat_atomic_add", "flat_atomic_smax", "flat_atomic_add_x2")
PLAIN = {"add": lambda old, a: old + a, "umax": np.maximum, "swap": lambda old, a: a, "smax": np.maximum}


@pytest.mark.parametrize("exec_mask", MASKS, ids=["full", "some"])
@pytest.mark.parametrize("name", [*BUFFER, *FLAT])
@pytest.mark.parametrize("arch", ARCHS)
def test_buffer_and_flat(arch, name, exec_mask):
    """Out of a buffer's range nothing is written; what is returned there is not in the documents."""
    dtype = U64 if name.endswith("x2") else I32 if "smax" in name else U32
    n = np.dtype(dtype).itemsize // 4
    old, a = values(dtype, 1), values(dtype, 2)
    content = old.copy()
    memory = Memory()
    address = memory.register("content", content)
    inside = LANES < 48 if name in BUFFER else LANES >= 0
    offsets = (LANES * 4 * n).astype(np.uint64)
    at = np.uint64(address) + offsets
    vgprs = {0: at.astype(np.uint32), 1: (at >> np.uint64(32)).astype(np.uint32), 6: offsets.astype(np.uint32)}
    vgprs |= dict(enumerate(dwords(a), 2)) | {10 + i: word for i, word in enumerate(dwords(a))}
    sgprs = {24: address & 0xFFFFFFFF, 25: address >> 32, 26: 48 * 4 * n, 27: 0x27000}
    # A returning buffer atomic gives the old value in its data registers, a flat one in registers of its own.
    data, result = group("v", 2, n), group("v", 10, n)
    asm = f"{name} {result}, v6, s[24:27], 0 offen sc0" if name in BUFFER else f"{name} {result}, v[0:1], {data} sc0"
    state = run_snippet(arch, asm + WAIT, vgprs=vgprs, sgprs=sgprs, memory=memory, exec_mask=exec_mask)
    active = active_lanes(exec_mask)
    np.testing.assert_array_equal(content, np.where(active & inside, PLAIN[name.split("_")[2]](old, a), old))
    known = inside | ~active
    for i, (word, before) in enumerate(zip(dwords(old), dwords(a), strict=True)):
        np.testing.assert_array_equal(state.vgpr[10 + i][known], np.where(active, word, before)[known])


@pytest.mark.parametrize("arch", ARCHS)
def test_lanes_at_one_address_add_up(arch):
    """In whatever order."""
    total, data = np.zeros(1, np.uint32), (LANES + 7).astype(np.uint32)
    memory = Memory()
    address = memory.register("total", total)
    words = {0: address & 0xFFFFFFFF, 1: address >> 32, 3: 8}
    vgprs = {2: data} | {n: np.full(64, word, np.uint32) for n, word in words.items()}
    asm = f"global_atomic_add v[0:1], v2, off\nds_add_u32 v3, v2{WAIT}"
    state = run_snippet(arch, asm, vgprs=vgprs, memory=memory, exec_mask=SOME)
    expected = int(data[active_lanes(SOME)].sum())
    assert (int(total[0]), int(state.lds[8:12].view(np.uint32)[0])) == (expected, expected)
