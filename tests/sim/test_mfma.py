"""Matrix instructions: layouts of A, B, C and D with one-hot rows and columns, special values, then random matrices.

The layouts are those of AMD's matrix instruction calculator; those of the f8f6f4 instructions, which it does not know,
are AMD's "Matrix Core Programming on AMD CDNA3 and CDNA4 architecture" and the CDNA4 ISA document. Every operand is put
into registers here by the formula of its layout, and every result taken out of them.
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
WIDE = {"f16": np.float16, "bf16": ml_dtypes.bfloat16}
BITS = {np.float16: np.uint16, ml_dtypes.bfloat16: np.uint16}
FORMAT_CODES = {"fp8": 0, "bf8": 1}  # of CBSZ and BLGP
BLOCK = 32  # values of K under one scale


@dataclass(frozen=True)
class Shape:
    """D [blocks, m, n] = A [blocks, m, k] @ B [blocks, k, n] + C; ``n`` equals ``m``.

    Attributes:
        run: consecutive K that a lane holds; a lane of an f8f6f4 instruction holds two such runs.
        modifiers: what the assembler needs besides the registers.
    """

    name: str
    arch: str
    m: int
    k: int
    blocks: int
    a_type: str
    b_type: str
    run: int
    modifiers: str = ""

    @property
    def per_lane(self) -> int:
        return self.m * self.k * self.blocks // 64

    @property
    def results(self) -> int:
        """Registers of C and of D."""
        return self.m * self.m * self.blocks // 64

    def dtype(self, kind: str):
        return WIDE.get(kind) or DTYPES[self.arch][kind]

    def place(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Block, row (of A; column of B) and K of each lane's elements, [64, per_lane]."""
        lane, element = LANES[:, None], np.arange(self.per_lane)[None, :]
        outer = lane // self.m  # which of the blocks, or which part of K
        if self.blocks > 1:
            return outer + 0 * element, lane % self.m + 0 * element, element + 0 * lane
        runs_apart = self.run * 64 // self.m
        k = outer * self.run + element % self.run + element // self.run * runs_apart
        return 0 * k, lane % self.m + 0 * k, k

    def result_place(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Block, row and column of each lane's results, [64, results]."""
        lane, register = LANES[:, None], np.arange(self.results)[None, :]
        column = lane % self.m + 0 * register
        if self.m == 32:
            return register // 16 + 0 * lane, register % 16 // 4 * 8 + lane // 32 * 4 + register % 4, column
        if self.m == 16:
            return register // 4 + 0 * lane, lane // 16 * 4 + register % 4, column
        return lane // 4 + 0 * register, register + 0 * lane, column

    def __str__(self) -> str:
        return f"{self.arch}-{self.name}{self.modifiers}"


def shapes() -> list[Shape]:
    found = []
    for arch in ARCHS:
        for a_type in ("fp8", "bf8"):
            for b_type in ("fp8", "bf8"):
                found += [
                    Shape(f"v_mfma_f32_16x16x32_{a_type}_{b_type}", arch, 16, 32, 1, a_type, b_type, 8),
                    Shape(f"v_mfma_f32_32x32x16_{a_type}_{b_type}", arch, 32, 16, 1, a_type, b_type, 8),
                ]
                if arch == "gfx950":
                    codes = f" cbsz:{FORMAT_CODES[a_type]} blgp:{FORMAT_CODES[b_type]}"
                    found += [
                        Shape("v_mfma_f32_16x16x128_f8f6f4", arch, 16, 128, 1, a_type, b_type, 16, codes),
                        Shape("v_mfma_f32_32x32x64_f8f6f4", arch, 32, 64, 1, a_type, b_type, 16, codes),
                    ]
        for kind in WIDE:
            found += [
                Shape(f"v_mfma_f32_32x32x8_{kind}", arch, 32, 8, 1, kind, kind, 4),
                Shape(f"v_mfma_f32_16x16x16_{kind}", arch, 16, 16, 1, kind, kind, 4),
                Shape(f"v_mfma_f32_32x32x4_2b_{kind}", arch, 32, 4, 2, kind, kind, 4),
                Shape(f"v_mfma_f32_16x16x4_4b_{kind}", arch, 16, 4, 4, kind, kind, 4),
                Shape(f"v_mfma_f32_4x4x4_16b_{kind}", arch, 4, 4, 16, kind, kind, 4),
            ]
            if arch == "gfx950":
                found += [
                    Shape(f"v_mfma_f32_16x16x32_{kind}", arch, 16, 32, 1, kind, kind, 8),
                    Shape(f"v_mfma_f32_32x32x16_{kind}", arch, 32, 16, 1, kind, kind, 8),
                ]
    return found


SHAPES = shapes()
SCALED = [shape for shape in SHAPES if "f8f6f4" in shape.name]
every_shape = pytest.mark.parametrize("shape", SHAPES, ids=str)
A_FIRST, B_FIRST, C_FIRST, SCALE_A, SCALE_B = 0, 8, 16, 48, 49
OPCODES = {shape.name for shape in SHAPES} | {shape.name.replace("mfma_", "mfma_scale_") for shape in SCALED}


def packed(shape: Shape, matrix: np.ndarray, kind: str) -> np.ndarray:
    """[registers, 64] dwords of A; of B's transpose, [blocks, n, k], in the same way."""
    block, row, k = shape.place()
    values = np.ascontiguousarray(matrix.astype(shape.dtype(kind))[block, row, k])
    return values.view(np.uint32).T


def unpacked(shape: Shape, registers: np.ndarray) -> np.ndarray:
    """[blocks, m, n] float32 of [results, 64] dwords."""
    block, row, column = shape.result_place()
    matrix = np.full((shape.blocks, shape.m, shape.m), np.nan, np.float32)
    matrix[block, row, column] = np.ascontiguousarray(registers.T).view(np.float32)
    return matrix


def scattered(shape: Shape, matrix: np.ndarray) -> np.ndarray:
    """[results, 64] dwords of C."""
    block, row, column = shape.result_place()
    return np.ascontiguousarray(matrix.astype(np.float32)[block, row, column]).view(np.uint32).T


def registers_at(first: int, words: np.ndarray) -> dict[int, np.ndarray]:
    return {first + n: np.ascontiguousarray(word) for n, word in enumerate(words)}


def gather(state: Any, first: int, shape: Shape) -> np.ndarray:
    return unpacked(shape, np.stack([state.vgpr[first + n] for n in range(shape.results)]))


def multiply(shape: Shape, pairs: list[tuple[np.ndarray, np.ndarray]], c: np.ndarray | None = None) -> list[np.ndarray]:
    """D of several A [blocks, m, k] and B [blocks, k, n], one C: as many a run as registers hold."""
    width = shape.per_lane * np.dtype(shape.dtype(shape.a_type)).itemsize // 4
    room = (256 - C_FIRST - shape.results) // (2 * width + shape.results)
    starts = C_FIRST + shape.results + np.arange(room) * (2 * width + shape.results)
    lines = [
        f"{shape.name} {group('v', at + 2 * width, shape.results)}, {group('v', at, width)}, "
        f"{group('v', at + width, width)}, {group('v', C_FIRST, shape.results)}{shape.modifiers}"
        for at in starts
    ]
    source = np.zeros((shape.results, 64), np.uint32) if c is None else scattered(shape, c)
    found: list[np.ndarray] = []
    for start in range(0, len(pairs), room):
        vgprs = registers_at(C_FIRST, source)
        chunk = (pairs[start : start + room] + pairs[:1] * room)[:room]
        for at, (a, b) in zip(starts, chunk, strict=True):
            vgprs |= registers_at(at, packed(shape, a, shape.a_type))
            vgprs |= registers_at(at + width, packed(shape, b.transpose(0, 2, 1), shape.b_type))
        state = run_snippet(shape.arch, "\n".join(lines), vgprs=vgprs)
        found += [gather(state, at + 2 * width, shape) for at in starts]
    return found[: len(pairs)]


def exact_values(shape: Shape, kind: str, size: tuple[int, ...], seed: int) -> np.ndarray:
    """Numbers that the type holds, few bits each, so that sums are exact in float32."""
    values = np.array(
        [-3.5, -3, -2.5, -2, -1.75, -1.5, -1, -0.75, -0.5, 0, 0.5, 0.75, 1, 1.25, 1.5, 2, 2.5, 3, 3.5, 6, 7]
    )
    chosen = np.random.default_rng(seed).choice(values, size).astype(shape.dtype(kind))
    return chosen.astype(np.float32)


@every_shape
def test_layout_of_a(shape):
    """Each row of A picks one row of B, by a one; over the runs every (row, k) has been that one."""
    b = exact_values(shape, shape.b_type, (shape.blocks, shape.k, shape.m), 1)
    rows = np.arange(shape.m)
    pairs, expected = [], []
    for shift in range(shape.k):
        a = np.zeros((shape.blocks, shape.m, shape.k), np.float32)
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
        b = np.zeros((shape.blocks, shape.k, shape.m), np.float32)
        b[:, (columns + shift) % shape.k, columns] = 1
        pairs.append((a, b))
        expected.append(a[:, :, (columns + shift) % shape.k])
    for got, want in zip(multiply(shape, pairs), expected, strict=True):
        np.testing.assert_array_equal(got, want)


@every_shape
def test_layout_of_c_and_d(shape):
    """A single one in A and in B gives a single 1 in D, at its place, on top of a C of distinct numbers."""
    c = np.arange(shape.blocks * shape.m * shape.m, dtype=np.float32).reshape(shape.blocks, shape.m, shape.m)
    pairs, expected = [], []
    for block in range(shape.blocks):
        for row, column in {(0, 0), (1, 0), (0, 1), (shape.m - 1, 2), (shape.m // 2, shape.m - 1)}:
            a = np.zeros((shape.blocks, shape.m, shape.k), np.float32)
            b = np.zeros((shape.blocks, shape.k, shape.m), np.float32)
            k = (row + 2 * column) % shape.k
            a[block, row, k] = b[block, k, column] = 1
            pairs.append((a, b))
            expected.append(c + (a @ b))
    for got, want in zip(multiply(shape, pairs, c), expected, strict=True):
        np.testing.assert_array_equal(got, want)


@every_shape
def test_random_matrices(shape):
    """Small numbers exactly; any numbers within the rounding of float32 sums."""
    size_a, size_b = (shape.blocks, shape.m, shape.k), (shape.blocks, shape.k, shape.m)
    a, b = exact_values(shape, shape.a_type, size_a, 3), exact_values(shape, shape.b_type, size_b, 4)
    c = np.random.default_rng(5).integers(-100, 100, (shape.blocks, shape.m, shape.m)).astype(np.float32)
    np.testing.assert_array_equal(multiply(shape, [(a, b)], c)[0], a @ b + c)
    rng = np.random.default_rng(6)
    a = rng.standard_normal(size_a).astype(shape.dtype(shape.a_type)).astype(np.float32)
    b = (rng.standard_normal(size_b) * 3).astype(shape.dtype(shape.b_type)).astype(np.float32)
    c = rng.standard_normal(c.shape).astype(np.float32)
    close(multiply(shape, [(a, b)], c)[0], a, b, c)


def close(got: np.ndarray, a: np.ndarray, b: np.ndarray, c: np.ndarray) -> None:
    exact = a.astype(np.float64) @ b.astype(np.float64) + c
    size = np.abs(a).astype(np.float64) @ np.abs(b).astype(np.float64) + np.abs(c)
    # The order of the sum, and how far it is rounded on the way, are not in the documents: half a step for each term.
    assert (np.abs(got - exact) <= (a.shape[-1] + 1) * 2.0**-24 * size).all()


@every_shape
def test_every_number_of_the_type(shape):
    """All bit patterns of 8 bits, a sample of those of 16, times one: NaN, infinities, -0.0, denormals included."""
    for kind, left in ((shape.a_type, True), (shape.b_type, False)):
        dtype = shape.dtype(kind)
        size = shape.blocks * shape.m * shape.k
        if np.dtype(dtype).itemsize == 1:
            patterns = np.resize(np.arange(256, dtype=np.uint8), max(size, 256))
        else:
            patterns = np.random.default_rng(7).integers(0, 2**16, size).astype(np.uint16)
            patterns[:8] = 0x8000, 1, 0x8001, 0x7F80, 0xFF80, 0x7FC0, 0x7C00, 0xFE00
        values = patterns.view(dtype)
        # One K alone, so that no special value meets another in a sum.
        ones = np.ones((shape.blocks, 1, shape.m), np.float32)
        pairs, expected = [], []
        step = shape.blocks * shape.m
        for start in range(0, max(min(len(values), 256), step), step):
            chunk = np.resize(values[start : start + step], step).reshape(shape.blocks, shape.m)
            a = np.zeros((shape.blocks, shape.m, shape.k), dtype)
            b = np.zeros((shape.blocks, shape.k, shape.m), np.float32)
            a[:, :, 1] = chunk
            b[:, 1:2] = ones
            floats = a.astype(np.float32)
            pairs.append((a, b) if left else (b.transpose(0, 2, 1), a.transpose(0, 2, 1)))
            product = np.repeat(floats[:, :, 1:2], shape.m, axis=2)
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
    width, results = len(words_a), shape.results
    va, vb, vc = group("v", 0, width), group("v", 8, width), group("v", 16, results)
    aa, ab, ac = group("a", 0, width), group("a", 8, width), group("a", 16, results)
    lines = [
        f"{shape.name} {group('v', 48, results)}, {va}, {vb}, 1.0{shape.modifiers}",
        f"{shape.name} {group('a', 48, results)}, {aa}, {vb}, {ac}{shape.modifiers}",
        f"{shape.name} {group('v', 80, results)}, {va}, {ab}, {vc}{shape.modifiers}",
        f"{shape.name} {vc}, {va}, {vb}, {vc}{shape.modifiers}",
    ]
    filled = registers_at(0, words_a) | registers_at(8, words_b) | registers_at(16, scattered(shape, c))
    state = run_snippet(shape.arch, "\n".join(lines), vgprs=filled, agprs=filled, exec_mask=SOME)
    np.testing.assert_array_equal(gather(state, 48, shape), a @ b + 1)
    acc = unpacked(shape, np.stack([state.agpr[48 + n] for n in range(results)]))
    np.testing.assert_array_equal(acc, a @ b + c)
    np.testing.assert_array_equal(gather(state, 80, shape), a @ b + c)
    np.testing.assert_array_equal(gather(state, 16, shape), a @ b + c)


def scale_of(exponents: np.ndarray) -> np.ndarray:
    """E8M0: powers of two with a bias of 127; 255 is NaN."""
    return np.where(exponents == 255, np.nan, 2.0 ** (exponents.astype(np.float64) - 127))


def scale_words(shape: Shape, exponents: np.ndarray, byte: int, rng: np.random.Generator) -> np.ndarray:
    """A lane's dword: the scale of its row and its 32 values of K in ``byte``, other bytes random.

    exponents: [m, k / 32]. Lanes count rows first, then blocks of K, whatever K their elements belong to.
    """
    words = rng.integers(0, 2**32, 64, np.uint32).view(np.uint8).reshape(64, 4)
    words[:, byte] = exponents[LANES % shape.m, LANES // shape.m]
    return words.reshape(-1).view(np.uint32)


@pytest.mark.parametrize("bytes_", [(0, 0), (1, 2), (2, 3), (3, 1)], ids=str)
@pytest.mark.parametrize("shape", SCALED, ids=str)
def test_scaled(shape, bytes_):
    """A scale of its own for every row, column and 32 values of K; op_sel and op_sel_hi are the bits of the byte."""
    rng = np.random.default_rng(11)
    a = exact_values(shape, shape.a_type, (1, shape.m, shape.k), 12)
    b = exact_values(shape, shape.b_type, (1, shape.k, shape.m), 13)
    c = rng.integers(-8, 8, (1, shape.m, shape.m)).astype(np.float32)
    exponents = rng.integers(126, 130, (2, shape.m, shape.k // BLOCK)).astype(np.uint8)
    vgprs = registers_at(A_FIRST, packed(shape, a, shape.a_type))
    vgprs |= registers_at(B_FIRST, packed(shape, b.transpose(0, 2, 1), shape.b_type))
    vgprs |= registers_at(C_FIRST, scattered(shape, c))
    vgprs[SCALE_A] = scale_words(shape, exponents[0], bytes_[0], rng)
    vgprs[SCALE_B] = scale_words(shape, exponents[1], bytes_[1], rng)
    state = run_snippet(shape.arch, scaled_line(shape, bytes_), vgprs=vgprs)
    left = a * np.repeat(scale_of(exponents[0]), BLOCK, axis=1)[None]
    right = b * np.repeat(scale_of(exponents[1]), BLOCK, axis=1).T[None]
    np.testing.assert_array_equal(gather(state, 64, shape), (left @ right + c).astype(np.float32))


def scaled_line(shape: Shape, bytes_: tuple[int, int], scales: str = f"v{SCALE_A}, v{SCALE_B}") -> str:
    low, high = [byte & 1 for byte in bytes_], [byte >> 1 for byte in bytes_]
    operands = f"{group('v', 64, shape.results)}, v[0:7], v[8:15], {group('v', C_FIRST, shape.results)}, {scales}"
    selects = f"op_sel:[{low[0]},{low[1]},0] op_sel_hi:[{high[0]},{high[1]},0]"
    return f"{shape.name.replace('mfma_', 'mfma_scale_')} {operands} {selects}{shape.modifiers}"


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
            np.testing.assert_array_equal(gather(state, 64, shape), expected)


@pytest.mark.parametrize("shape", [s for s in SCALED if s.a_type == s.b_type == "fp8"], ids=str)
def test_ends_of_the_scale(shape):
    """Exponent 255 is NaN, 0 is 2**-127 and 254 is 2**127."""
    ones = packed(shape, np.ones((1, shape.m, shape.k)), "fp8")
    exponents = np.full((shape.m, shape.k // BLOCK), 127, np.uint8)
    exponents[1, 0], exponents[2], exponents[3] = 255, 0, 254
    vgprs = registers_at(A_FIRST, ones) | registers_at(B_FIRST, ones)
    vgprs |= registers_at(C_FIRST, np.zeros((shape.results, 64), np.uint32))
    vgprs[SCALE_A] = scale_words(shape, exponents, 0, np.random.default_rng(16))
    # The scale of B keeps the products within the normal float32.
    for row, power, scale_b in ((2, -127, 20), (3, 127, -20)):
        vgprs[SCALE_B] = np.full(64, 127 + scale_b, np.uint32)
        got = gather(run_snippet(shape.arch, scaled_line(shape, (0, 0)), vgprs=vgprs), 64, shape)[0]
        assert np.isnan(got[1]).all()
        np.testing.assert_array_equal(got[0], np.full(shape.m, shape.k * 2.0**scale_b))
        np.testing.assert_array_equal(got[row], np.full(shape.m, shape.k * 2.0 ** (power + scale_b)))
