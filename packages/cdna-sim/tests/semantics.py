"""Tables of instructions, each row with its own expression of the result, and what runs them in the simulator.

The expressions come from AMD's CDNA3 and CDNA4 ISA documents (the pseudocode of each opcode, the chapters on formats),
in NumPy, ml_dtypes or Python integers. Many rows share one snippet: each has its own result registers, all read the
same operands. Modes are those of compiled kernels: IEEE on, denormals kept, round to nearest even, DX10 clamp on.
"""

from __future__ import annotations

import contextlib
import functools
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

if sys.version_info < (3, 11):
    pytest.skip("the decoder, tinygrad, needs Python 3.11", allow_module_level=True)

from cdna_sim.snippet import run_snippet

ARCHS = ("gfx942", "gfx950")
LANES = np.arange(64)
FULL = 2**64 - 1
ROUNDS = 6  # every pair of 16 edge values in the first four, random values under an EXEC mask in the last two

F64_EDGES = np.array(
    [0.0, -0.0, 1.0, -1.0, np.inf, -np.inf, np.nan, 5e-324, -2e-308, 2.0**-1022, 1.7976931348623157e308,
     -1.7976931348623157e308, 1.5, -2.5, 2.0**32, -(2.0**31) - 1],
)  # fmt: skip
INT_EDGES = np.array(
    [0, 1, 2, 5, 31, 32, 33, 63, 64, 0x7FFFFFFF, 0x80000000, 0x80000001, 0xFFFFFFFF, 0xFFFF, 0x10000, 0xFFFFFFE0],
    np.uint32,
)
# Zeros, ones, infinities, quiet NaN, denormals, the ends of the range, and values outside of int32 and uint32.
F32_EDGES = np.array(
    [0, 0x80000000, 0x3F800000, 0xBF800000, 0x7F800000, 0xFF800000, 0x7FC00000, 1, 0x807FFFFF, 0x00800000, 0x7F7FFFFF,
     0xFF7FFFFF, 0x3FC00000, 0xC0200000, 0x4F800000, 0xCF000001], np.uint32,
)  # fmt: skip
HALF_EDGES = np.array(
    [0, 0x8000, 0x3C00, 0xBC00, 0x7C00, 0xFC00, 0x7E00, 1, 0x83FF, 0x0400, 0x7BFF, 0xFBFF, 0x3E00, 0xC100, 0x1234,
     0xB555], np.uint32,
)  # fmt: skip
SHORT_EDGES = np.array(
    [0, 1, 2, 15, 16, 17, 31, 0x7F, 0x80, 0xFF, 0x7FFF, 0x8000, 0x8001, 0xFFFF, 0xFFFE, 0x1234], np.uint32
)
LONG_EDGES = np.array(
    [0, 1, 31, 32, 63, 64, 2**32 - 1, 2**31 - 1, 2**31, 2**32, 2**63, 2**63 - 1, 2**64 - 1, 2**64 - 2, 2**33 + 7,
     0xABCD], np.uint64,
)  # fmt: skip


@dataclass(frozen=True)
class Type:
    """How the dwords of an operand are read: registers, the NumPy type of an element, elements of a register group."""

    registers: int
    dtype: Any
    elements: int
    bank: str


TYPES = {
    "u32": Type(1, np.uint32, 1, "int"),
    "i32": Type(1, np.int32, 1, "int"),
    "f32": Type(1, np.float32, 1, "float"),
    "f64": Type(2, np.float64, 1, "double"),
    "u64": Type(2, np.uint64, 1, "long"),
    "i64": Type(2, np.int64, 1, "long"),
    "f32x2": Type(2, np.float32, 2, "pair"),
    "u32x2": Type(2, np.uint32, 2, "pair"),
    "u16": Type(1, np.uint16, 2, "short"),
    "i16": Type(1, np.int16, 2, "short"),
    "u16x2": Type(1, np.uint16, 2, "short"),
    "i16x2": Type(1, np.int16, 2, "short"),
    "u8x4": Type(1, np.uint8, 4, "bytes"),
    "i8x4": Type(1, np.int8, 4, "bytes"),
    "f16": Type(1, np.float16, 2, "half"),
    "f16x2": Type(1, np.float16, 2, "half"),
}
LOW_HALF = {"u16", "i16", "f16"}  # what a 16-bit result leaves in the upper half depends on the opcode: not compared

# Operand registers of each bank: three operands, 64-bit ones on even registers.
BANKS = {"int": (0, 1, 2), "float": (3, 4, 5), "half": (6, 7, 8), "bytes": (9, 10, 11), "long": (12, 14, 16),
         "pair": (18, 20, 22), "short": (24, 25, 26), "double": (28, 30, 32)}  # fmt: skip
FIRST_RESULT, LAST_RESULT = 34, 255
FIRST_MASK, LAST_MASK = 24, 94
SCALAR = 0xBEEF0007  # {s}: an integer in an SGPR
SCALAR_FLOAT = np.float32(-2.75)  # {f}: a float in an SGPR
CARRY = 0x5A5AA5A5F00F1337  # {k}: a mask in an SGPR pair, copied to VCC before each row
CARRY_LANES = ((CARRY >> LANES.astype(np.uint64)) & 1).astype(bool)


@dataclass(frozen=True, eq=False)
class Row:
    """An instruction, or a few, and what it gives.

    Attributes:
        asm: lines with {a}, {b}, {c} for the operands, {d}, {e} for the results, {s}, {f}, {k} for SGPRs.
        types: types of the operands and of the results, e.g. ``"f32 i32 -> f32 mask"``.
        expected: of the operands; [64] or, for packed types, [64, elements].
        ulp: steps by which a float may be off, where the document gives an accuracy.
        domain: lanes to compare, of the operands, where the documents leave the others open.
    """

    asm: str
    types: str
    expected: Callable[..., Any]
    archs: tuple[str, ...] = ARCHS
    ulp: int = 0
    domain: Callable[..., Any] | None = None

    @property
    def operands(self) -> list[str]:
        return self.types.split("->")[0].split()

    @property
    def results(self) -> list[str]:
        return self.types.split("->")[1].split()

    def __str__(self) -> str:
        lines = [line for line in self.asm.splitlines() if not line.startswith(("s_mov", "v_mov_b32 {"))]
        return re.sub(r"[{}]", "", (lines or self.asm.splitlines())[-1])


def gfx950(*arguments: Any, **named: Any) -> Row:
    return Row(*arguments, archs=("gfx950",), **named)


def both(name: str, types: str, expected: Callable[..., Any], **named: Any) -> list[Row]:
    """One row for each of the 32-bit and the 64-bit encoding of an instruction on VGPRs."""
    operands = ", ".join("{" + letter + "}" for letter in "abc"[: len(types.split("->")[0].split())])
    return [Row(f"{name}_{size} {{d}}, {operands}", types, expected, **named) for size in ("e32", "e64")]


def mnemonics(lines: str) -> set[str]:
    """Every instruction that a piece of assembly names."""
    return set(re.findall(r"^\s*((?:[sv]|ds|buffer|global|flat|scratch)_[a-z0-9_]+)", lines, re.MULTILINE))


@contextlib.contextmanager
def on(*circumstances: Any) -> Iterator[None]:
    """What fails inside says where."""
    try:
        yield
    except Exception as error:
        error.add_note("on " + ", ".join(hex(one) if isinstance(one, int) else str(one) for one in circumstances))
        raise


class Table:
    """Rows that are run together; ``check`` compares one of them."""

    def __init__(self, *rows: Row | Iterable[Row]) -> None:
        self.rows: list[Row] = [one for row in rows for one in ([row] if isinstance(row, Row) else row)]
        self.outcomes: dict[tuple[str, int], list[Any] | Exception] = {}

    @property
    def opcodes(self) -> set[str]:
        return set().union(*(mnemonics(row.asm) for row in self.rows))

    def check(self, row: Row) -> None:
        for arch in row.archs:
            if (arch, id(row)) not in self.outcomes:
                self._run_all(arch)
            outcome = self.outcomes[arch, id(row)]
            with on(arch):
                if isinstance(outcome, Exception):
                    raise outcome
                for round_, got in enumerate(outcome):
                    compare(row, round_, got)

    def _run_all(self, arch: str) -> None:
        for rows in _batches([row for row in self.rows if arch in row.archs]):
            try:
                outcomes: list[Any] = _run(arch, rows)
            except Exception:
                # Some row of the batch cannot be run: find out which.
                outcomes = [_outcome_alone(arch, row) for row in rows]
            self.outcomes |= {(arch, id(row)): outcome for row, outcome in zip(rows, outcomes, strict=True)}


def _outcome_alone(arch: str, row: Row) -> list[Any] | Exception:
    try:
        return _run(arch, [row])[0]
    except Exception as error:
        return error


def _batches(rows: list[Row]) -> Iterator[list[Row]]:
    batch: list[Row] = []
    vgprs = masks = 0
    for row in rows:
        wide = sum(TYPES[kind].registers + 1 for kind in row.results if kind != "mask")
        too_wide = vgprs + wide > LAST_RESULT - FIRST_RESULT
        if too_wide or masks + row.results.count("mask") > (LAST_MASK - FIRST_MASK) // 2:
            yield batch
            batch, vgprs, masks = [], 0, 0
        batch.append(row)
        vgprs += wide
        masks += row.results.count("mask")
    yield batch


def group(letter: str, first: int, count: int) -> str:
    return f"{letter}{first}" if count == 1 else f"{letter}[{first}:{first + count - 1}]"


def _run(arch: str, rows: list[Row]) -> list[list[Any]]:
    """Results of each row in each round, as [64, registers] dwords, or a mask as an integer."""
    lines, places, vgpr, sgpr = [], [], FIRST_RESULT, FIRST_MASK
    for row in rows:
        names = {"s": "s10", "f": "s11", "k": "s[8:9]"}
        for letter, kind, slot in zip("abc", row.operands, range(3), strict=False):
            names[letter] = group("v", BANKS[TYPES[kind].bank][slot], TYPES[kind].registers)
        place = []
        for letter, kind in zip("de", row.results, strict=False):
            if kind == "mask":
                names[letter] = group("s", sgpr, 2)
                place.append(("mask", sgpr, 2))
                sgpr += 2
            else:
                count = TYPES[kind].registers
                vgpr += vgpr % 2 if count > 1 else 0
                names[letter] = group("v", vgpr, count)
                place.append((kind, vgpr, count))
                vgpr += count
        places.append(place)
        lines += ["s_mov_b64 vcc, s[8:9]", row.asm.format(**names)]
    asm = "\n".join(lines)
    sgprs = {8: CARRY & 0xFFFFFFFF, 9: CARRY >> 32, 10: SCALAR, 11: int(SCALAR_FLOAT.view(np.uint32))}
    outcomes: list[list[Any]] = [[] for _ in rows]
    for round_ in range(ROUNDS):
        vgprs = operand_registers(round_) | {n: sentinel(n) for n in range(FIRST_RESULT, vgpr)}
        state = run_snippet(arch, asm, vgprs=vgprs, sgprs=sgprs, exec_mask=exec_mask(round_))
        for outcome, place in zip(outcomes, places, strict=True):
            found = []
            for kind, first, count in place:
                if kind == "mask":
                    found.append((kind, first, state.sgpr[first] | state.sgpr[first + 1] << 32))
                else:
                    found.append((kind, first, np.stack([state.vgpr[first + i] for i in range(count)], axis=1)))
            outcome.append(found)
    return outcomes


def exec_mask(round_: int) -> int:
    return FULL if round_ < 4 else (0xF0F0_1234_5678_9ABC, 0x8000_0001_FFFF_0F1E)[round_ - 4]


def active_lanes(mask: int) -> np.ndarray:
    return np.array([mask >> lane & 1 for lane in range(64)], bool)


def sentinel(register: int) -> np.ndarray:
    """What a result register holds before: inactive lanes keep it."""
    return (np.uint32(0xA5000000) + np.uint32(register << 8) + LANES.astype(np.uint32)).astype(np.uint32)


@functools.cache
def operand_registers(round_: int) -> dict[int, np.ndarray]:
    """Every operand register's 64 dwords."""
    rng = np.random.default_rng(1000 + round_)
    pairs = 64 * round_ + LANES
    picks = [pairs // 16 % 16, pairs % 16, (7 * pairs + pairs // 16) % 16]
    registers = {}
    for slot, pick in enumerate(picks):
        edges = round_ < 4
        other = np.roll(pick, 5)  # second element of packed operands
        words = INT_EDGES[pick] if edges else rng.integers(0, 2**32, 64, np.uint32)
        registers[BANKS["int"][slot]] = words
        registers[BANKS["float"][slot]] = F32_EDGES[pick] if edges else random_floats(rng)
        registers[BANKS["half"][slot]] = HALF_EDGES[pick] | HALF_EDGES[other] << 16 if edges else random_halves(rng)
        registers[BANKS["short"][slot]] = SHORT_EDGES[pick] | SHORT_EDGES[other] << 16 if edges else words
        # All 256 bytes in each of the rounds, in every position.
        registers[BANKS["bytes"][slot]] = (
            ((4 * LANES + slot * 36)[:, None] + np.arange(4) * (1 + 2 * round_) & 0xFF).astype(np.uint8)
        ).view(np.uint32)[:, 0]
        longs = LONG_EDGES[pick] if edges else rng.integers(0, 2**64, 64, np.uint64)
        doubles = F64_EDGES[pick] if edges else rng.standard_normal(64) * 10.0 ** rng.integers(-5, 12, 64)
        for bank, values in (("long", longs), ("double", doubles)):
            first, words = BANKS[bank][slot], values.view(np.uint32).reshape(64, 2)
            registers[first], registers[first + 1] = words[:, 0].copy(), words[:, 1].copy()
        first = BANKS["pair"][slot]
        registers[first] = F32_EDGES[other] if edges else random_floats(rng)
        registers[first + 1] = F32_EDGES[pick] if edges else random_floats(rng)
    return registers


def random_floats(rng: np.random.Generator) -> np.ndarray:
    """Half of them of everyday size, half of any exponent; NaNs are quiet."""
    anything = rng.integers(0, 2**32, 64, np.uint32)
    anything[np.isnan(anything.view(np.float32))] |= 0x00400000
    everyday = (rng.standard_normal(64) * 10.0 ** rng.integers(-3, 4, 64)).astype(np.float32).view(np.uint32)
    return np.where(rng.random(64) < 0.5, anything, everyday)


def random_halves(rng: np.random.Generator) -> np.ndarray:
    return rng.standard_normal(128).astype(np.float16).view(np.uint32)


def operand_values(row: Row, round_: int) -> list[np.ndarray]:
    registers = operand_registers(round_)
    values = []
    for slot, kind in enumerate(row.operands):
        first = BANKS[TYPES[kind].bank][slot]
        values.append(read(kind, np.stack([registers[first + i] for i in range(TYPES[kind].registers)], axis=1)))
    return values


def read(kind: str, dwords: np.ndarray) -> np.ndarray:
    """[64, registers] dwords as the values of a type."""
    values = np.ascontiguousarray(dwords).view(TYPES[kind].dtype)
    return values[:, 0] if kind in LOW_HALF or TYPES[kind].elements == 1 else values


def compare(row: Row, round_: int, found: list[tuple[str, int, Any]]) -> None:
    active = active_lanes(exec_mask(round_))
    operands = operand_values(row, round_)
    with np.errstate(all="ignore"):
        expected = row.expected(*operands)
        looked_at = active if row.domain is None else active & np.asarray(row.domain(*operands)).reshape(64, -1).all(1)
    if len(found) == 1:
        expected = (expected,)
    for (kind, first, got), want in zip(found, expected, strict=True):
        if kind == "mask":
            assert got & ~exec_mask(round_) == 0, f"{row}: bits of inactive lanes are set: {got:016x}"
            got_values, want_values = active_lanes(got), np.broadcast_to(np.asarray(want, bool), 64)
        else:
            keeps = np.stack([sentinel(first + i) for i in range(got.shape[1])], axis=1)
            np.testing.assert_array_equal(got[~active], keeps[~active], f"{row}: an inactive lane was written")
            got_values = read(kind, got)
            want_values = np.broadcast_to(np.asarray(want).astype(TYPES[kind].dtype), got_values.shape)
        good = same(got_values, want_values, row.ulp).reshape(64, -1).all(1)
        bad = np.flatnonzero(looked_at & ~good)
        if bad.size:
            lane = bad[0]
            raise AssertionError(
                f"{row}: {bad.size} lanes differ; lane {lane}: operands {[show(value[lane]) for value in operands]}, "
                f"got {show(got_values[lane])}, expected {show(want_values[lane])}"
            )


def same(got: np.ndarray, want: np.ndarray, ulp: int = 0) -> np.ndarray:
    """Elementwise: equal bits, or both NaN, or within ``ulp`` steps."""
    if got.dtype.kind != "f":
        return got == want
    bits = {2: np.uint16, 4: np.uint32, 8: np.uint64}[got.dtype.itemsize]
    equal = np.ascontiguousarray(got).view(bits) == np.ascontiguousarray(want).view(bits)
    if ulp:
        steps = np.abs(ordinal(got) - ordinal(want))
        equal |= (steps <= ulp) & ~np.isnan(got) & ~np.isnan(want)
    return equal | (np.isnan(got) & np.isnan(want))


def ordinal(x: np.ndarray) -> np.ndarray:
    """Integers that count the floats in order, so that neighbours differ by one."""
    size = x.dtype.itemsize
    bits = np.ascontiguousarray(x).view(f"i{size}").astype(np.int64)
    return np.where(bits < 0, -(bits & (1 << 8 * size - 1) - 1), bits)


def show(value: Any) -> str:
    array = np.atleast_1d(np.asarray(value))
    if array.dtype == bool:
        return str(array.tolist())
    raw = array.view(f"u{array.dtype.itemsize}")
    return f"{array.tolist()} ({', '.join(f'{int(word):#x}' for word in raw)})"


class Together:
    """Runs many rows as one snippet, once for every set of circumstances; each alone where that fails.

    Args:
        rows: what ``run`` is given a list of.
        run: of rows, the arch and other circumstances, gives the state afterwards. A row's place in it must not depend
            on which other rows there are.
    """

    def __init__(self, rows: Iterable[Any], run: Callable[..., Any]) -> None:
        self.rows, self.run = list(rows), run
        self.states: dict[Any, Any] = {}

    def state(self, row: Any, arch: str, *circumstances: Any) -> Any:
        key = (arch, *circumstances)
        if key not in self.states:
            try:
                self.states[key] = self.run([one for one in self.rows if arch in one.archs], *key)
            except Exception:
                self.states[key] = None
        found = self.states[key]
        return found if found is not None else self.run([row], *key)


# Loads and stores.

SOME = 0x8F31_7FFE_0FF0_A5C3  # an EXEC mask with holes everywhere
ORDER = np.random.default_rng(23).permutation(64).astype(np.uint32)  # lanes go to addresses out of order
OLD = (0x0DD00000 + LANES).astype(np.uint32)  # what is in a result register before
DATA = np.random.default_rng(22).integers(0, 2**32, (4, 64), np.uint32)  # of four registers, to be stored


@dataclass(frozen=True)
class Load:
    """A load of ``bytes`` from each of the ``offsets`` beyond the lane's address into {d}.

    Attributes:
        signed: sign-extended rather than zero-extended.
        half: 0 or 1: the value goes to that half of the register; None: to all of it.
    """

    asm: str
    bytes: int
    offsets: tuple[int, ...] = (0,)
    signed: bool = False
    half: int | None = None
    archs: tuple[str, ...] = ARCHS

    @property
    def registers(self) -> int:
        return max(1, self.bytes * len(self.offsets) // 4)

    @property
    def address(self) -> str:
        """The VGPR with the lane's address: the first one that is named, if any."""
        named = re.search(r"\bv\[?(\d+)", self.asm)
        return named.group(1) if named else ""

    def line(self, first: int = 10) -> str:
        return self.asm.format(d=group("v", first, self.registers))

    def values(self, data: np.ndarray, addresses: np.ndarray) -> np.ndarray:
        """[64, registers] dwords of what lies at the lanes' addresses."""
        at = (addresses.astype(np.int64)[:, None] + np.array(self.offsets))[:, :, None] + np.arange(self.bytes)
        raw = np.ascontiguousarray(data[at].reshape(64, -1))
        if self.bytes < 4:
            sign = "i" if self.signed else "u"
            return raw.view(f"{sign}{self.bytes}").astype(np.int32).view(np.uint32)
        return raw.view(np.uint32)

    def check(self, state: Any, expected: np.ndarray, exec_mask: int, first: int = 10) -> None:
        active = active_lanes(exec_mask)
        for n in range(self.registers):
            got, want = state.vgpr[first + n], expected[:, n]
            np.testing.assert_array_equal(got[~active], OLD[~active])
            if self.half is not None:
                # The other half is kept, or zeroed where memory has ECC: not compared.
                got, want = got >> 16 * self.half & 0xFFFF, want & 0xFFFF
            np.testing.assert_array_equal(got[active], want[active])

    def __str__(self) -> str:
        return self.asm.replace("{d}", "").replace(" ,", "").strip()


@dataclass(frozen=True)
class Store:
    """A store of ``bytes`` of v[2:5] to each of the ``offsets``; ``half`` 1: from the upper half of v2."""

    asm: str
    bytes: int
    offsets: tuple[int, ...] = (0,)
    half: int = 0

    def apply(self, data: np.ndarray, addresses: np.ndarray, exec_mask: int) -> None:
        """Writes into ``data`` what the active lanes store."""
        words = (DATA >> np.uint32(16) if self.half else DATA).T.copy().view(np.uint8)  # [64, 16]
        for number, offset in enumerate(self.offsets):
            first = max(self.bytes, 4) * number
            for lane in np.flatnonzero(active_lanes(exec_mask)):
                start = int(addresses[lane]) + offset
                data[start : start + self.bytes] = words[lane, first : first + self.bytes]

    def __str__(self) -> str:
        return self.asm


# Arithmetic that NumPy does not have.


def fma(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """One rounding: the sum in float64 is rounded to odd, which makes the second rounding right."""
    dtype = a.dtype
    product, addend = a.astype(np.float64) * b.astype(np.float64), np.asarray(c).astype(np.float64)
    total = product + addend
    high = total - product
    error = (product - (total - high)) + (addend - high)
    bits = total.view(np.int64)
    away = np.where((error > 0) == (total > 0), 1, -1)
    inexact = np.isfinite(total) & (error != 0) & np.isfinite(error) & (bits & 1 == 0)
    odd = np.where(inexact, bits + away, bits).view(np.float64)
    return odd.astype(dtype)


def fmax(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """A NaN loses; +0 is above -0."""
    larger = np.where((a > b) | ((a == b) & np.signbit(b)), a, b)
    return np.where(np.isnan(a), b, np.where(np.isnan(b), a, larger))


def fmin(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    smaller = np.where((a < b) | ((a == b) & np.signbit(a)), a, b)
    return np.where(np.isnan(a), b, np.where(np.isnan(b), a, smaller))


def clamp01(x: np.ndarray) -> np.ndarray:
    """Output clamp of floats; with DX10 clamp a NaN becomes 0."""
    return np.where(np.isnan(x), x.dtype.type(0), np.clip(x, 0, 1))


def truncate_to(x: np.ndarray, dtype: Any) -> np.ndarray:
    """Float to integer: towards zero, out of range to the nearest end, NaN to 0."""
    limits = np.iinfo(dtype)
    whole = np.where(np.isnan(x), 0, np.trunc(x.astype(np.float64)))
    return np.clip(whole, limits.min, limits.max).astype(np.int64).astype(dtype)


def normal(*values: np.ndarray) -> np.ndarray:
    """Neither denormal nor NaN: what approximations do with denormals is not in the documents."""
    return np.logical_and.reduce([(np.abs(x) >= np.finfo(x.dtype).tiny) | (x == 0) for x in values])
