"""Read-modify-write operations on LDS and on global memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
from semantics import ARCHS, FULL, LANES, OLD, ORDER, SOME, active_lanes, group, run_snippet

from lightning_indexer.sim import Memory

WAIT = "\ns_waitcnt vmcnt(0) lgkmcnt(0)"
masked = pytest.mark.parametrize("exec_mask", [FULL, SOME], ids=["full", "some"])


@dataclass(frozen=True)
class Atomic:
    """``expected`` of the old value and the data, and for a compare of the value compared with."""

    name: str
    dtype: type
    expected: Callable[..., np.ndarray]
    operands: int = 1

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


@masked
@pytest.mark.parametrize("row", LDS, ids=lambda row: row.name)
@pytest.mark.parametrize("arch", ARCHS)
def test_lds(arch, row, exec_mask):
    """With and without the old value; of a compare the first operand is compared with, the second stored."""
    n = row.registers
    old, a, b = (values(row.dtype, seed) for seed in (1, 2, 3))
    addresses = ORDER * np.uint32(4 * n)
    memory = np.zeros(64, row.dtype)
    memory[ORDER] = old
    vgprs = {0: addresses} | dict.fromkeys(range(10, 10 + n), OLD)
    vgprs |= dict(enumerate(dwords(a), 2)) | dict(enumerate(dwords(b), 4))
    data = ", ".join(group("v", 2 + 2 * i, n) for i in range(row.operands))
    asm = f"{row.name} v0, {data}\n{returning(row.name)} {group('v', 10, n)}, v0, {data} offset:512{WAIT}"
    lds = np.concatenate([memory.view(np.uint8), np.zeros(512 - memory.nbytes, np.uint8), memory.view(np.uint8)])
    state = run_snippet(arch, asm, vgprs=vgprs, lds=lds, exec_mask=exec_mask)
    active = active_lanes(exec_mask)
    new = row.expected(old, b, a) if row.operands == 2 else row.expected(old, a)
    expected = memory.copy()
    expected[ORDER] = np.where(active, new, old)
    for start in (0, 512):
        got = state.lds[start : start + memory.nbytes].view(row.dtype)
        np.testing.assert_array_equal(got, expected)
    for i, word in enumerate(dwords(old)):
        np.testing.assert_array_equal(state.vgpr[10 + i], np.where(active, word, OLD))


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


@masked
@pytest.mark.parametrize("row", GLOBAL, ids=lambda row: row.name)
@pytest.mark.parametrize("arch", ARCHS)
def test_global(arch, row, exec_mask):
    """sc0 returns the old value; of a compare the data are the new value, then what it is compared with."""
    n = row.registers
    old, a, b = (values(row.dtype, seed) for seed in (1, 2, 3))
    content = np.zeros((2, 64), row.dtype)
    content[:, ORDER] = old
    memory = Memory()
    address = memory.register("content", content)
    at = np.uint64(address) + ORDER.astype(np.uint64) * np.uint64(4 * n)
    vgprs = {0: at.astype(np.uint32), 1: (at >> np.uint64(32)).astype(np.uint32)} | dict.fromkeys(
        range(10, 10 + n), OLD
    )
    vgprs |= dict(enumerate(np.concatenate([dwords(a), dwords(b)]), 2))
    data = group("v", 2, n * row.operands)
    result = group("v", 10, n)
    asm = f"{row.name} v[0:1], {data}, off\n{row.name} {result}, v[0:1], {data}, off offset:{256 * n} sc0{WAIT}"
    state = run_snippet(arch, asm, vgprs=vgprs, memory=memory, exec_mask=exec_mask)
    active = active_lanes(exec_mask)
    new = row.expected(old, a, b) if row.operands == 2 else row.expected(old, a)
    expected = np.zeros(64, row.dtype)
    expected[ORDER] = np.where(active, new, old)
    np.testing.assert_array_equal(content, np.stack([expected, expected]))
    for i, word in enumerate(dwords(old)):
        np.testing.assert_array_equal(state.vgpr[10 + i], np.where(active, word, OLD))


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
