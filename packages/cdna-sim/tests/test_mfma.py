"""Matrix instructions: layouts of A, B, C and D with one-hot rows and columns, special values, then random matrices.

The layouts are those of the CDNA4 ISA document, chapter 7 (general input and output layout; tables for f8f6f4 and for
block scales), and of AMD's matrix instruction calculator. Every operand is put into registers here by these formulas,
and every result taken out of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from semantics import ARCHS, LANES, SOME, group, run_snippet

DTYPES = {
    "gfx942": {"fp8": ml_dtypes.float8_e4m3fnuz, "bf8": ml_dtypes.float8_e5m2fnuz},
    "gfx950": {"fp8": ml_dtypes.float8_e4m3fn, "bf8": ml_dtypes.float8_e5m2},
}
OTHERS = {
    "f16": np.float16, "bf16": ml_dtypes.bfloat16, "f32": np.float32, "i8": np.int8,
    "fp4": ml_dtypes.float4_e2m1fn,
}  # fmt: skip
FORMAT_CODES = {"fp8": 0, "bf8": 1, "fp4": 4}  # of CBSZ and BLGP
BLOCK = 32  # values of K under one scale


@dataclass(frozen=True)
class Shape:
    """D [blocks, m, n] = A [blocks, m, k] @ B [blocks, k, n] + C; ``n`` equals ``m``.

    Attributes:
        modifiers: what the assembler needs besides the registers.
    """

    name: str
    arch: str
    m: int
    k: int
    blocks: int
    a_type: str
    b_type: str
    modifiers: str = ""

    @property
    def output(self) -> Any:
        return np.int32 if self.a_type == "i8" else np.float32

    @property
    def results(self) -> int:
        """Registers of C and of D."""
        return self.m * self.m * self.blocks // 64

    def dtype(self, kind: str) -> Any:
        return OTHERS.get(kind) or DTYPES[self.arch][kind]

    def registers(self, kind: str) -> int:
        bits = 4 if kind == "fp4" else 8 * np.dtype(self.dtype(kind)).itemsize
        return self.m * self.k * self.blocks * bits // 64 // 32

    def place(self, kind: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Block, row (of A; column of B) and K of each lane's items, [64, items]."""
        per_lane = self.m * self.k * self.blocks // 64
        lane, item = LANES[:, None], np.arange(per_lane)[None, :]
        part = lane // self.m  # blocks first, then parts of K
        k = part // self.blocks * per_lane + item
        if "f8f6f4" in self.name and kind != "fp4":
            # Two runs of 16, half of K apart.
            k = part * 16 + item % 16 + item // 16 * (self.k // 2)
        return part % self.blocks + 0 * item, lane % self.m + 0 * item, k

    def result_place(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Block, row and column of each lane's results, [64, items]."""
        block, row, column = np.indices((self.blocks, self.m, self.m)).reshape(3, -1)
        height = 4
        together = max(1, -(-64 * height // (self.m * self.m)))  # blocks in one item of all lanes
        rows = 64 // together // self.m  # of row groups in one item
        groups = self.m // (height * rows)
        item = row % height + height * (row // (height * rows) + groups * (block // together))
        lane = column + self.m * (row // height % rows + rows * (block % together))
        places = np.empty((3, 64, self.results), int)
        places[:, lane, item] = block, row, column
        return places[0], places[1], places[2]

    def __str__(self) -> str:
        return f"{self.arch}-{self.name}{self.modifiers}"


def shapes() -> list[Shape]:
    found = []
    for arch in ARCHS:
        for a_type in ("fp8", "bf8"):
            for b_type in ("fp8", "bf8"):
                found += [
                    Shape(f"v_mfma_f32_16x16x32_{a_type}_{b_type}", arch, 16, 32, 1, a_type, b_type),
                    Shape(f"v_mfma_f32_32x32x16_{a_type}_{b_type}", arch, 32, 16, 1, a_type, b_type),
                ]
        sizes = {kind: [(32, 4, 2), (16, 4, 4), (4, 4, 16), (32, 8, 1), (16, 16, 1)] for kind in ("f16", "bf16")}
        sizes["f32"] = [(32, 1, 2), (16, 1, 4), (4, 1, 16), (32, 2, 1), (16, 4, 1)]
        sizes["i8"] = [(32, 4, 2), (16, 4, 4), (4, 4, 16), (32, 16, 1), (16, 32, 1)]
        if arch == "gfx950":
            sizes["f16"] += [(16, 32, 1), (32, 16, 1)]
            sizes["bf16"] += [(16, 32, 1), (32, 16, 1)]
            sizes["i8"] += [(16, 64, 1), (32, 32, 1)]
            for a_type, a_code in FORMAT_CODES.items():
                for b_type, b_code in FORMAT_CODES.items():
                    codes = f" cbsz:{a_code} blgp:{b_code}"
                    found += [
                        Shape("v_mfma_f32_16x16x128_f8f6f4", arch, 16, 128, 1, a_type, b_type, codes),
                        Shape("v_mfma_f32_32x32x64_f8f6f4", arch, 32, 64, 1, a_type, b_type, codes),
                    ]
        for kind, list_ in sizes.items():
            out = "i32" if kind == "i8" else "f32"
            for m, k, blocks in list_:
                several = f"_{blocks}b" if blocks > 1 else ""
                found.append(Shape(f"v_mfma_{out}_{m}x{m}x{k}{several}_{kind}", arch, m, k, blocks, kind, kind))
    return found


SHAPES = shapes()
SCALED = [shape for shape in SHAPES if "f8f6f4" in shape.name]
every_shape = pytest.mark.parametrize("shape", SHAPES, ids=str)
SCALE_A, SCALE_B, A_FIRST, B_FIRST, C_FIRST, D_FIRST = 0, 1, 2, 10, 18, 64
OPCODES = {shape.name for shape in SHAPES} | {shape.name.replace("mfma_", "mfma_scale_") for shape in SCALED}


def packed(shape: Shape, matrix: np.ndarray, kind: str) -> np.ndarray:
    """[registers, 64] dwords of A; of B's transpose, [blocks, n, k], in the same way."""
    block, row, k = shape.place(kind)
    values = np.ascontiguousarray(matrix.astype(shape.dtype(kind))[block, row, k])
    if kind == "fp4":
        codes = values.view(np.uint8)
        values = codes[:, ::2] & 15 | codes[:, 1::2] << 4
    return np.ascontiguousarray(values).view(np.uint32).T


def unpacked(shape: Shape, registers: np.ndarray) -> np.ndarray:
    """[blocks, m, n] of [results, 64] dwords."""
    block, row, column = shape.result_place()
    matrix = np.zeros((shape.blocks, shape.m, shape.m), shape.output)
    matrix[block, row, column] = np.ascontiguousarray(registers.T).view(shape.output)
    return matrix


def scattered(shape: Shape, matrix: np.ndarray) -> np.ndarray:
    """[results, 64] dwords of C."""
    block, row, column = shape.result_place()
    return np.ascontiguousarray(matrix.astype(shape.output)[block, row, column]).view(np.uint32).T


def registers_at(first: int, words: np.ndarray) -> dict[int, np.ndarray]:
    return {first + n: np.ascontiguousarray(word) for n, word in enumerate(words)}


def gather(state: Any, first: int, shape: Shape) -> np.ndarray:
    return unpacked(shape, np.stack([state.vgpr[first + n] for n in range(shape.results)]))


def multiply(shape: Shape, pairs: list[tuple[np.ndarray, np.ndarray]], c: np.ndarray | None = None) -> list[np.ndarray]:
    """D of several A [blocks, m, k] and B [blocks, k, n], one C: as many a run as registers hold."""
    width_a, width_b = shape.registers(shape.a_type), shape.registers(shape.b_type)
    # Operands and results of several registers start at even ones.
    b_at, d_at = width_a + width_a % 2, width_a + width_a % 2 + width_b + width_b % 2
    first = C_FIRST + shape.results
    room = (256 - first) // (d_at + shape.results)
    starts = first + np.arange(room) * (d_at + shape.results)
    lines = [
        f"{shape.name} {group('v', at + d_at, shape.results)}, {group('v', at, width_a)}, "
        f"{group('v', at + b_at, width_b)}, {group('v', C_FIRST, shape.results)}{shape.modifiers}"
        for at in starts
    ]
    source = np.zeros((shape.results, 64), np.uint32) if c is None else scattered(shape, c)
    found: list[np.ndarray] = []
    for start in range(0, len(pairs), room):
        vgprs = registers_at(C_FIRST, source)
        chunk = (pairs[start : start + room] + pairs[:1] * room)[:room]
        for at, (a, b) in zip(starts, chunk, strict=True):
            vgprs |= registers_at(at, packed(shape, a, shape.a_type))
            vgprs |= registers_at(at + b_at, packed(shape, b.transpose(0, 2, 1), shape.b_type))
        state = run_snippet(shape.arch, "\n".join(lines), vgprs=vgprs)
        found += [gather(state, at + d_at, shape) for at in starts]
    return found[: len(pairs)]


def exact_values(shape: Shape, kind: str, size: tuple[int, ...], seed: int) -> np.ndarray:
    """Numbers that the type holds, few bits each, so that sums are exact."""
    values = np.array([-3.5, -2.5, -1.75, -1.25, -0.75, -6, -4, -3, -2, -1.5, -1, -0.5, 0, 0.5, 1, 1.5, 2, 3, 4, 6])
    if kind == "fp4":
        values = values[5:]
    if kind == "i8":
        values = np.array([-128, -100, -7, -3, -2, -1, 0, 1, 2, 3, 5, 17, 64, 127])
    chosen = np.random.default_rng(seed).choice(values, size).astype(shape.dtype(kind))
    return chosen.astype(shape.output)


@every_shape
def test_layout_of_a(shape):
    """Each row of A picks one row of B, by a one; over the runs every (row, k) has been that one."""
    b = exact_values(shape, shape.b_type, (shape.blocks, shape.k, shape.m), 1)
    rows = np.arange(shape.m)
    pairs, expected = [], []
    for shift in range(shape.k):
        a = np.zeros((shape.blocks, shape.m, shape.k), shape.output)
        a[:, rows, (rows + shift) % shape.k] = 1
        pairs.append((a, b))
        expected.append(b[:, (rows + shift) % shape.k])
    for got, want in zip(multiply(shape, pairs), expected, strict=True):
        np.testing.assert_array_equal(got, want)


@every_shape
def test_layout_of_b(shape):
    """Each column of B picks one column of A."""
    a = exact_values(shape, shape.a_type, (shape.blocks, shape.m, shape.k), 2)
    columns = np.arange(shape.m)
    pairs, expected = [], []
    for shift in range(shape.k):
        b = np.zeros((shape.blocks, shape.k, shape.m), shape.output)
        b[:, (columns + shift) % shape.k, columns] = 1
        pairs.append((a, b))
        expected.append(a[:, :, (columns + shift) % shape.k])
    for got, want in zip(multiply(shape, pairs), expected, strict=True):
        np.testing.assert_array_equal(got, want)


@every_shape
def test_layout_of_c_and_d(shape):
    """A single one in A and in B gives a single 1 in D, at its place, on top of a C of distinct numbers."""
    c = np.arange(shape.blocks * shape.m * shape.m, dtype=shape.output).reshape(shape.blocks, shape.m, shape.m)
    pairs, expected = [], []
    for block in range(shape.blocks):
        for row, column in {(0, 0), (1, 0), (0, 1), (shape.m - 1, 2), (shape.m // 2, shape.m - 1)}:
            a = np.zeros((shape.blocks, shape.m, shape.k), shape.output)
            b = np.zeros((shape.blocks, shape.k, shape.m), shape.output)
            k = (row + 2 * column) % shape.k
            a[block, row, k] = b[block, k, column] = 1
            pairs.append((a, b))
            expected.append(c + (a @ b))
    for got, want in zip(multiply(shape, pairs, c), expected, strict=True):
        np.testing.assert_array_equal(got, want)


@every_shape
def test_random_matrices(shape):
    """Small numbers exactly; any numbers within the rounding of sums."""
    size_a, size_b = (shape.blocks, shape.m, shape.k), (shape.blocks, shape.k, shape.m)
    a, b = exact_values(shape, shape.a_type, size_a, 3), exact_values(shape, shape.b_type, size_b, 4)
    c = np.random.default_rng(5).integers(-100, 100, (shape.blocks, shape.m, shape.m)).astype(shape.output)
    np.testing.assert_array_equal(multiply(shape, [(a, b)], c)[0], a @ b + c)
    if shape.a_type == "i8":
        return
    rng = np.random.default_rng(6)
    a = rng.standard_normal(size_a).astype(shape.dtype(shape.a_type)).astype(shape.output)
    b = (rng.standard_normal(size_b) * 3).astype(shape.dtype(shape.b_type)).astype(shape.output)
    c = rng.standard_normal(c.shape).astype(shape.output)
    got, exact = multiply(shape, [(a, b)], c)[0], a.astype(np.longdouble) @ b.astype(np.longdouble) + c
    size = np.abs(a).astype(np.float64) @ np.abs(b).astype(np.float64) + np.abs(c)
    # The order of the sum, and how far it is rounded on the way, are not in the documents: half a step for each term.
    assert (np.abs(got - exact) <= (shape.k + 1) * np.finfo(shape.output).eps / 2 * size).all()


def patterns(shape: Shape, kind: str) -> np.ndarray:
    """Every bit pattern of the smaller types, of others a sample with special ones."""
    dtype = np.dtype(shape.dtype(kind))
    if kind == "fp4":
        return np.arange(16, dtype=np.uint8).view(dtype)
    if dtype.itemsize == 1:
        return np.arange(256, dtype=np.uint8).view(dtype)
    found = np.random.default_rng(7).integers(0, 256, (128, dtype.itemsize), np.uint8).view(dtype)[:, 0].copy()
    found[:10] = np.array([0.0, -0.0, np.inf, -np.inf, np.nan, 1, -1, 0, 0, 0]).astype(dtype)
    found.view(f"u{dtype.itemsize}")[7:10] = 1, 3, 2 ** (8 * dtype.itemsize - 1) + 1  # denormals
    return found


@every_shape
def test_every_number_of_the_type(shape):
    """Times one: NaN, infinities, -0.0 and denormals included. One K alone is not zero, so none meets another."""
    for kind, left in ((shape.a_type, True), (shape.b_type, False)):
        values = patterns(shape, kind)
        step = shape.blocks * shape.m
        pairs, expected = [], []
        for start in range(0, len(values), step):
            a = np.zeros((shape.blocks, shape.m, shape.k), shape.dtype(kind))
            a[:, :, -1] = np.resize(values[start : start + step], step).reshape(shape.blocks, shape.m)
            b = np.zeros((shape.blocks, shape.k, shape.m), shape.output)
            b[:, -1] = 1
            pairs.append((a, b) if left else (b.transpose(0, 2, 1), a.transpose(0, 2, 1)))
            product = np.repeat(a[:, :, -1:].astype(shape.output), shape.m, axis=2)
            expected.append(product if left else product.transpose(0, 2, 1))
        for got, want in zip(multiply(shape, pairs), expected, strict=True):
            np.testing.assert_array_equal(got, want)  # a NaN equals a NaN here


@pytest.mark.parametrize("arch", ARCHS)
def test_0x80_is_nan_in_fnuz_and_minus_zero_in_ocp(arch):
    shape = next(s for s in SHAPES if s.arch == arch and s.name == "v_mfma_f32_16x16x32_fp8_fp8")
    a = np.zeros((1, 16, 32), np.uint8)
    a[0, 3, 5] = 0x80
    got = multiply(shape, [(a.view(shape.dtype("fp8")), np.ones((1, 32, 16), np.float32))])[0][0]
    assert np.isnan(got[3]).all() == (arch == "gfx942")
    assert (np.delete(got, 3, axis=0) == 0).all()


@every_shape
def test_registers_of_every_kind(shape):
    """Accumulation registers for A, B, C and D; C a constant; D on top of C; EXEC ignored."""
    a = exact_values(shape, shape.a_type, (shape.blocks, shape.m, shape.k), 8)
    b = exact_values(shape, shape.b_type, (shape.blocks, shape.k, shape.m), 9)
    c = exact_values(shape, shape.a_type, (shape.blocks, shape.m, shape.m), 10)
    words_a, words_b = packed(shape, a, shape.a_type), packed(shape, b.transpose(0, 2, 1), shape.b_type)
    results = shape.results
    va, vb, vc = group("v", 0, len(words_a)), group("v", 8, len(words_b)), group("v", 16, results)
    aa, ab, ac = group("a", 0, len(words_a)), group("a", 8, len(words_b)), group("a", 16, results)
    one = "1" if shape.output is np.int32 else "1.0"
    lines = [
        f"{shape.name} {group('v', 48, results)}, {va}, {vb}, {one}{shape.modifiers}",
        f"{shape.name} {group('a', 48, results)}, {aa}, {vb}, {ac}{shape.modifiers}",
        f"{shape.name} {group('v', 80, results)}, {va}, {ab}, {vc}{shape.modifiers}",
        f"{shape.name} {vc}, {va}, {vb}, {vc}{shape.modifiers}",
    ]
    filled = registers_at(0, words_a) | registers_at(8, words_b) | registers_at(16, scattered(shape, c))
    state = run_snippet(shape.arch, "\n".join(lines), vgprs=filled, agprs=filled, exec_mask=SOME)
    np.testing.assert_array_equal(gather(state, 48, shape), a @ b + 1)
    acc = unpacked(shape, np.stack([state.agpr[48 + n] for n in range(results)]))
    for got in (acc, gather(state, 80, shape), gather(state, 16, shape)):
        np.testing.assert_array_equal(got, a @ b + c)


def scale_of(exponents: np.ndarray) -> np.ndarray:
    """E8M0: powers of two with a bias of 127; 255 is NaN."""
    return np.where(exponents == 255, np.nan, 2.0 ** (exponents.astype(np.float64) - 127))


def scale_words(shape: Shape, exponents: np.ndarray) -> np.ndarray:
    """A lane's dword: in byte n the exponent [n, row, block of K] of its row and its 32 values of K.

    Lanes count rows first, then blocks of K, whatever K their elements belong to.
    """
    bytes_ = exponents[:, LANES % shape.m, LANES // shape.m].T
    return np.ascontiguousarray(bytes_).view(np.uint32)[:, 0]


BYTES = [(0, 0), (1, 2), (2, 3), (3, 1)]  # of the scale words of A and of B


@pytest.mark.parametrize("shape", SCALED, ids=str)
def test_scaled(shape):
    """A scale of its own for every row, column and 32 values of K; op_sel and op_sel_hi are the bits of the byte."""
    rng = np.random.default_rng(11)
    a = exact_values(shape, shape.a_type, (1, shape.m, shape.k), 12)
    b = exact_values(shape, shape.b_type, (1, shape.k, shape.m), 13)
    c = rng.integers(-8, 8, (1, shape.m, shape.m)).astype(np.float32)
    exponents = rng.integers(126, 130, (2, 4, shape.m, shape.k // BLOCK)).astype(np.uint8)
    vgprs = registers_at(A_FIRST, packed(shape, a, shape.a_type))
    vgprs |= registers_at(B_FIRST, packed(shape, b.transpose(0, 2, 1), shape.b_type))
    vgprs |= registers_at(C_FIRST, scattered(shape, c))
    vgprs |= {SCALE_A: scale_words(shape, exponents[0]), SCALE_B: scale_words(shape, exponents[1])}
    lines = [scaled_line(shape, pair, D_FIRST + 16 * number) for number, pair in enumerate(BYTES)]
    state = run_snippet(shape.arch, "\n".join(lines), vgprs=vgprs)
    for number, (first, second) in enumerate(BYTES):
        left = a * np.repeat(scale_of(exponents[0, first]), BLOCK, axis=1)[None]
        right = b * np.repeat(scale_of(exponents[1, second]), BLOCK, axis=1).T[None]
        got = gather(state, D_FIRST + 16 * number, shape)
        np.testing.assert_array_equal(got, (left @ right + c).astype(np.float32), f"bytes {first} and {second}")


def scaled_line(shape: Shape, bytes_: tuple[int, int], result: int = D_FIRST) -> str:
    low, high = [byte & 1 for byte in bytes_], [byte >> 1 for byte in bytes_]
    counts = {
        result: shape.results, A_FIRST: shape.registers(shape.a_type), B_FIRST: shape.registers(shape.b_type),
        C_FIRST: shape.results,
    }  # fmt: skip
    operands = ", ".join(group("v", first, count) for first, count in counts.items())
    selects = f"op_sel:[{low[0]},{low[1]},0] op_sel_hi:[{high[0]},{high[1]},0]"
    name = shape.name.replace("mfma_", "mfma_scale_")
    return f"{name} {operands}, v{SCALE_A}, v{SCALE_B} {selects}{shape.modifiers}"


@pytest.mark.parametrize("shape", [s for s in SCALED if s.a_type == s.b_type == "fp8"], ids=str)
def test_one_scale_at_a_time(shape):
    """One lane's scale of A, or of B, is not 1: exactly its row, or column, changes, in its 32 values of K."""
    a = exact_values(shape, shape.a_type, (1, shape.m, shape.k), 14)
    b = exact_values(shape, shape.b_type, (1, shape.k, shape.m), 15)
    vgprs = registers_at(A_FIRST, packed(shape, a, shape.a_type))
    vgprs |= registers_at(B_FIRST, packed(shape, b.transpose(0, 2, 1), shape.b_type))
    vgprs |= registers_at(C_FIRST, np.zeros((shape.results, 64), np.uint32))
    for lane in range(0, 64, 7):
        row, block = lane % shape.m, lane // shape.m
        changed = np.ones((shape.m, shape.k), np.float32)
        changed[row, BLOCK * block : BLOCK * (block + 1)] = 4
        ones, one_lane = np.full(64, 127, np.uint32), np.full(64, 127, np.uint32)
        one_lane[lane] = 129
        for scales, expected in (
            ({SCALE_A: one_lane, SCALE_B: ones}, (a * changed) @ b),
            ({SCALE_A: ones, SCALE_B: one_lane}, a @ (b * changed.T)),
        ):
            state = run_snippet(shape.arch, scaled_line(shape, (0, 0)), vgprs=vgprs | scales)
            np.testing.assert_array_equal(gather(state, D_FIRST, shape), expected)


@pytest.mark.parametrize("shape", [s for s in SCALED if s.a_type == s.b_type == "fp8"], ids=str)
def test_ends_of_the_scale(shape):
    """Exponent 255 is NaN, 0 is 2**-127 and 254 is 2**127."""
    ones = packed(shape, np.ones((1, shape.m, shape.k)), "fp8")
    exponents = np.full((shape.m, shape.k // BLOCK), 127, np.uint8)
    exponents[1, 0], exponents[2], exponents[3] = 255, 0, 254
    vgprs = registers_at(A_FIRST, ones) | registers_at(B_FIRST, ones)
    vgprs |= registers_at(C_FIRST, np.zeros((shape.results, 64), np.uint32))
    vgprs[SCALE_A] = scale_words(shape, np.stack([exponents] + [np.full_like(exponents, 99)] * 3))
    # The scale of B keeps the products within the normal float32.
    for row, power, scale_b in ((2, -127, 20), (3, 127, -20)):
        vgprs[SCALE_B] = np.full(64, 127 + scale_b, np.uint32)
        got = gather(run_snippet(shape.arch, scaled_line(shape, (0, 0)), vgprs=vgprs), D_FIRST, shape)[0]
        assert np.isnan(got[1]).all()
        np.testing.assert_array_equal(got[0], np.full(shape.m, shape.k * 2.0**scale_b))
        np.testing.assert_array_equal(got[row], np.full(shape.m, shape.k * 2.0 ** (power + scale_b)))
