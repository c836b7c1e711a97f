"""Integer and bit instructions of the vector unit: VOP1, VOP2, VOP3, and packed 16-bit VOP3P."""

from __future__ import annotations

import numpy as np
import pytest

from semantics import CARRY, CARRY_LANES, LANES, SCALAR, Row, Table, both, gfx950

U32, I32, U64, I64 = np.uint32, np.int32, np.uint64, np.int64


def wide(x: np.ndarray) -> np.ndarray:
    """64-bit, sign or zeros extended by the type of ``x``."""
    return x.astype(I64 if x.dtype.kind == "i" else U64)


def high(product: np.ndarray) -> np.ndarray:
    return product >> product.dtype.type(32)


def bits24(x: np.ndarray) -> np.ndarray:
    """The low 24 bits, sign-extended for int32."""
    return (x << 8) >> 8


def mod(count: int):
    """The bits of a shift count that are read."""
    return lambda x: x & x.dtype.type(count - 1)


FIVE, SIX, FOUR = mod(32), mod(64), mod(16)


def count_bits(x: np.ndarray) -> np.ndarray:
    return np.array([int(word).bit_count() for word in x], U32)


def highest_one(x: np.ndarray) -> np.ndarray:
    """Zeros above the first one, seen from the top; -1 without any one."""
    return np.array([32 - int(word).bit_length() if word else -1 for word in x], I32)


def lowest_one(x: np.ndarray) -> np.ndarray:
    return np.array([(int(word) & -int(word)).bit_length() - 1 if word else -1 for word in x], I32)


def highest_change(x: np.ndarray) -> np.ndarray:
    """Where the bits, from the top, first differ from the sign; -1 if they never do."""
    return np.where((x == 0) | (x == -1), -1, highest_one(np.where(x < 0, ~x, x).view(U32)))


def reverse(x: np.ndarray) -> np.ndarray:
    return np.array([int(f"{int(word):032b}"[::-1], 2) for word in x], U32)


def saturate(x: np.ndarray, dtype) -> np.ndarray:
    limits = np.iinfo(dtype)
    return np.clip(x, limits.min, limits.max).astype(dtype)


def carry(total: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """32-bit sum and carry, of a 64-bit signed total."""
    return total.astype(U32), (total < 0) | (total >= 2**32)


def field(x: np.ndarray, offset: np.ndarray, width: np.ndarray) -> np.ndarray:
    return (x >> FIVE(offset)) & ((U32(1) << FIVE(width)) - U32(1))


def signed_field(x: np.ndarray, offset: np.ndarray, width: np.ndarray) -> np.ndarray:
    found, count = field((x >> FIVE(offset).view(I32)).view(U32), U32(0), width), FIVE(width)
    sign = np.where(count > 0, U32(1) << FIVE(count - U32(1)), U32(0))
    return ((found ^ sign) - sign).view(I32)


def aligned(a: np.ndarray, b: np.ndarray, shift: np.ndarray) -> np.ndarray:
    return ((wide(a) << U64(32) | wide(b)) >> wide(shift)).astype(U32)


def distance(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return np.maximum(a, b) - np.minimum(a, b)


def shifted_and_packed(dtype):
    """Two integers, shifted right and saturated to bytes, in the low half."""

    def apply(a: np.ndarray, b: np.ndarray, count: np.ndarray) -> np.ndarray:
        low, high_ = (saturate(x >> FIVE(count).view(I32), dtype).view(np.uint8).astype(np.uint16) for x in (a, b))
        return low | high_ << np.uint16(8)

    return apply


def permuted(a: np.ndarray, b: np.ndarray, select: np.ndarray) -> np.ndarray:
    """V_PERM_B32: bytes 0-3 of the second operand, 4-7 of the first, signs of four of them, 0 and 0xff."""
    result = np.zeros(64, U32)
    for lane in range(64):
        data = int(a[lane]) << 32 | int(b[lane])
        for byte in range(4):
            chosen = int(select[lane]) >> 8 * byte & 0xFF
            if chosen < 8:
                value = data >> 8 * chosen & 0xFF
            elif chosen < 12:  # signs of bytes 1, 3, 5, 7
                value = 0xFF * (data >> 16 * (chosen - 8) + 15 & 1)
            else:
                value = 0 if chosen == 12 else 0xFF
            result[lane] |= U32(value << 8 * byte)
    return result


def bitop3(table: int):
    """Bit 4a + 2b + c of the table, for every bit of the operands."""

    def apply(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
        result = np.zeros_like(a)
        for index in range(8):
            if table >> index & 1:
                result |= (a if index & 4 else ~a) & (b if index & 2 else ~b) & (c if index & 1 else ~c)
        return result

    return apply


def median(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    return np.sort(np.stack([a, b, c]), axis=0)[1]


def below(lanes: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """Ones of the mask below bit ``lanes``, of a lane's half of the wave."""
    return count_bits(mask & ((np.ones(64, U64) << np.clip(lanes, 0, 32).astype(U64)) - U64(1)).astype(U32))


def dot(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    return (wide(a) * wide(b)).sum(1).astype(I64).astype(U32) + c.view(U32)


PERM_SELECTS = (0x07060504, 0x03020100, 0x05010400, 0x06040200, 0x0C0C0C07, 0x0D0B0A09, 0x08FF0C00)

MOVES = Table(
    both("v_mov_b32", "u32 -> u32", lambda a: a),
    Row("v_mov_b32_e32 {d}, 0x12345678", "-> u32", lambda: U32(0x12345678)),
    Row("v_mov_b32_e32 {d}, -16", "-> i32", lambda: I32(-16)),
    Row("v_mov_b32_e32 {d}, 0.15915494", "-> u32", lambda: U32(0x3E22F983)),
    Row("v_mov_b32_e32 {d}, -4.0", "-> u32", lambda: U32(0xC0800000)),
    Row("v_mov_b32_e32 {d}, {s}", "-> u32", lambda: U32(SCALAR)),
    Row("v_mov_b64_e32 {d}, {a}", "u64 -> u64", lambda a: a),
    Row("v_mov_b64_e32 {d}, {k}", "-> u64", lambda: U64(CARRY)),
    Row("v_mov_b64_e32 {d}, -1", "-> u64", lambda: U64(2**64 - 1)),
    Row("v_mov_b64_e32 {d}, 7", "-> u64", lambda: U64(7)),
    Row("v_mov_b32 {d}, {a}\nv_mov_b32 {e}, {b}\nv_swap_b32 {d}, {e}", "u32 u32 -> u32 u32", lambda a, b: (b, a)),
    Row("v_accvgpr_write_b32 a7, {a}\nv_accvgpr_read_b32 {d}, a7", "u32 -> u32", lambda a: a),
    Row("v_accvgpr_write_b32 a8, 5\nv_accvgpr_read_b32 {d}, a8", "-> u32", lambda: U32(5)),
    Row(
        "v_accvgpr_write_b32 a9, {a}\nv_accvgpr_mov_b32 a10, a9\nv_accvgpr_read_b32 {d}, a10",
        "u32 -> u32", lambda a: a,
    ),
    Row("v_cndmask_b32_e32 {d}, {a}, {b}, vcc", "u32 u32 -> u32", lambda a, b: np.where(CARRY_LANES, b, a)),
    Row("v_cndmask_b32_e64 {d}, {a}, {b}, {k}", "u32 u32 -> u32", lambda a, b: np.where(CARRY_LANES, b, a)),
    Row("v_cndmask_b32_e64 {d}, 0, {b}, vcc", "u32 u32 -> u32", lambda a, b: np.where(CARRY_LANES, b, 0)),
    Row("v_cndmask_b32_e64 {d}, -1, 64, {k}", "-> u32", lambda: np.where(CARRY_LANES, U32(64), U32(2**32 - 1))),
)  # fmt: skip

BITS = Table(
    both("v_not_b32", "u32 -> u32", lambda a: ~a),
    both("v_bfrev_b32", "u32 -> u32", reverse),
    both("v_ffbh_u32", "u32 -> i32", highest_one),
    both("v_ffbl_b32", "u32 -> i32", lowest_one),
    both("v_ffbh_i32", "i32 -> i32", highest_change),
    both("v_and_b32", "u32 u32 -> u32", lambda a, b: a & b),
    both("v_or_b32", "u32 u32 -> u32", lambda a, b: a | b),
    both("v_xor_b32", "u32 u32 -> u32", lambda a, b: a ^ b),
    both("v_xnor_b32", "u32 u32 -> u32", lambda a, b: ~(a ^ b)),
    Row("v_and_b32_e32 {d}, 0x1ff, {b}", "u32 u32 -> u32", lambda a, b: b & U32(0x1FF)),
    Row("v_and_b32_e32 {d}, {s}, {b}", "u32 u32 -> u32", lambda a, b: b & U32(SCALAR)),
    both("v_lshlrev_b32", "u32 u32 -> u32", lambda a, b: b << FIVE(a)),
    both("v_lshrrev_b32", "u32 u32 -> u32", lambda a, b: b >> FIVE(a)),
    both("v_ashrrev_i32", "i32 i32 -> i32", lambda a, b: b >> FIVE(a)),
    Row("v_lshlrev_b64 {d}, {a}, {b}", "u32 u64 -> u64", lambda a, b: b << SIX(wide(a))),
    Row("v_lshrrev_b64 {d}, {a}, {b}", "u32 u64 -> u64", lambda a, b: b >> SIX(wide(a))),
    Row("v_ashrrev_i64 {d}, {a}, {b}", "i32 i64 -> i64", lambda a, b: b >> SIX(wide(a))),
    Row("v_lshrrev_b64 {d}, 24, {b}", "u32 u64 -> u64", lambda a, b: b >> U64(24)),
    Row("v_bfe_u32 {d}, {a}, {b}, {c}", "u32 u32 u32 -> u32", field),
    Row("v_bfe_i32 {d}, {a}, {b}, {c}", "i32 u32 u32 -> i32", signed_field),
    Row("v_bfe_i32 {d}, {a}, 0, 16", "i32 -> i32", lambda a: a.astype(np.int16).astype(I32)),
    Row("v_bfe_u32 {d}, {a}, 4, 2", "u32 -> u32", lambda a: a >> U32(4) & U32(3)),
    Row("v_bfi_b32 {d}, {a}, {b}, {c}", "u32 u32 u32 -> u32", lambda a, b, c: a & b | ~a & c),
    Row("v_bfm_b32 {d}, {a}, {b}", "u32 u32 -> u32", lambda a, b: ((U32(1) << FIVE(a)) - U32(1)) << FIVE(b)),
    Row("v_alignbit_b32 {d}, {a}, {b}, {c}", "u32 u32 u32 -> u32", lambda a, b, c: aligned(a, b, FIVE(c))),
    Row("v_alignbyte_b32 {d}, {a}, {b}, {c}", "u32 u32 u32 -> u32", lambda a, b, c: aligned(a, b, c % 4 * 8)),
    Row("v_perm_b32 {d}, {a}, {b}, {c}", "u32 u32 u32 -> u32", permuted),
    [
        Row(f"s_mov_b32 s12, {select:#x}\nv_perm_b32 {{d}}, {{a}}, {{b}}, s12", "u8x4 u8x4 -> u32",
            lambda a, b, select=select: permuted(a.view(U32)[:, 0], b.view(U32)[:, 0], np.full(64, select, U32)))
        for select in PERM_SELECTS
    ],
    Row("v_bcnt_u32_b32 {d}, {a}, {b}", "u32 u32 -> u32", lambda a, b: count_bits(a) + b),
    Row("v_mbcnt_lo_u32_b32 {d}, {a}, {b}", "u32 u32 -> u32", lambda a, b: below(LANES, a) + b),
    Row("v_mbcnt_hi_u32_b32 {d}, {a}, {b}", "u32 u32 -> u32", lambda a, b: below(LANES - 32, a) + b),
    Row("v_mbcnt_lo_u32_b32 {d}, -1, 0\nv_mbcnt_hi_u32_b32 {d}, -1, {d}", "-> u32", lambda: LANES),
    gfx950("v_bitop3_b32 {d}, {s}, {b}, 63 bitop3:0xf8", "u32 u32 -> u32",
           lambda a, b: bitop3(0xF8)(np.full(64, SCALAR, U32), b, np.full(64, 63, U32))),
    [
        gfx950(f"v_bitop3_b16 {{d}}, {{a}}, {{b}}, {{c}} bitop3:{table:#x}", "u16 u16 u16 -> u16", bitop3(table))
        for table in (0x36, 0xEA, 0xF8)
    ],
    gfx950("v_bitop3_b16 {d}, {s}, {b}, 63 bitop3:0xf8", "u16 u16 -> u16",
           lambda a, b: bitop3(0xF8)(np.full(64, SCALAR & 0xFFFF, np.uint16), b, np.full(64, 63, np.uint16))),
)  # fmt: skip

BITOP3 = Table(
    gfx950(f"v_bitop3_b32 {{d}}, {{a}}, {{b}}, {{c}} bitop3:{table:#x}", "u32 u32 u32 -> u32", bitop3(table))
    for table in range(256)
)

THREE_OPERANDS = Table(
    Row("v_add3_u32 {d}, {a}, {b}, {c}", "u32 u32 u32 -> u32", lambda a, b, c: a + b + c),
    Row("v_add3_u32 {d}, {a}, {b}, {s}", "u32 u32 -> u32", lambda a, b: a + b + U32(SCALAR)),
    Row("v_lshl_add_u32 {d}, {a}, {b}, {c}", "u32 u32 u32 -> u32", lambda a, b, c: (a << FIVE(b)) + c),
    Row("v_add_lshl_u32 {d}, {a}, {b}, {c}", "u32 u32 u32 -> u32", lambda a, b, c: (a + b) << FIVE(c)),
    Row("v_lshl_or_b32 {d}, {a}, {b}, {c}", "u32 u32 u32 -> u32", lambda a, b, c: a << FIVE(b) | c),
    Row("v_and_or_b32 {d}, {a}, {b}, {c}", "u32 u32 u32 -> u32", lambda a, b, c: a & b | c),
    Row("v_or3_b32 {d}, {a}, {b}, {c}", "u32 u32 u32 -> u32", lambda a, b, c: a | b | c),
    Row("v_xad_u32 {d}, {a}, {b}, {c}", "u32 u32 u32 -> u32", lambda a, b, c: (a ^ b) + c),
    Row("v_lshl_add_u64 {d}, {a}, {b}, {c}", "u64 u32 u64 -> u64", lambda a, b, c: (a << wide(b & 7)) + c,
        domain=lambda a, b, c: b < 5),  # the assembler and LLVM know counts 0 to 4
    Row("v_lshl_add_u64 {d}, {k}, 3, {a}", "u64 -> u64", lambda a: U64(CARRY << 3 & 2**64 - 1) + a),
    Row("v_min3_i32 {d}, {a}, {b}, {c}", "i32 i32 i32 -> i32", lambda a, b, c: np.minimum(np.minimum(a, b), c)),
    Row("v_max3_i32 {d}, {a}, {b}, {c}", "i32 i32 i32 -> i32", lambda a, b, c: np.maximum(np.maximum(a, b), c)),
    Row("v_min3_u32 {d}, {a}, {b}, {c}", "u32 u32 u32 -> u32", lambda a, b, c: np.minimum(np.minimum(a, b), c)),
    Row("v_max3_u32 {d}, {a}, {b}, {c}", "u32 u32 u32 -> u32", lambda a, b, c: np.maximum(np.maximum(a, b), c)),
    Row("v_med3_i32 {d}, {a}, {b}, {c}", "i32 i32 i32 -> i32", median),
    Row("v_med3_u32 {d}, {a}, {b}, {c}", "u32 u32 u32 -> u32", median),
    Row("v_mad_i32_i24 {d}, {a}, {b}, {c}", "i32 i32 i32 -> i32", lambda a, b, c: bits24(a) * bits24(b) + c),
    Row("v_mad_u32_u24 {d}, {a}, {b}, {c}", "u32 u32 u32 -> u32", lambda a, b, c: bits24(a) * bits24(b) + c),
    Row("v_mad_u32_u16 {d}, {a}, {b}, {c}", "u16 u16 u32 -> u32", lambda a, b, c: a.astype(U32) * b.astype(U32) + c),
    Row("v_mad_i32_i16 {d}, {a}, {b}, {c}", "i16 i16 i32 -> i32", lambda a, b, c: a.astype(I32) * b.astype(I32) + c),
    Row("v_mad_u64_u32 {d}, {e}, {a}, {b}, {c}", "u32 u32 u64 -> u64 mask",
        lambda a, b, c: (wide(a) * wide(b) + c, wide(a) * wide(b) + c < c)),
    # The 65th bit of the signed sum is left out: the document does not say what it means.
    Row("v_mad_i64_i32 {d}, s[12:13], {a}, {b}, {c}", "i32 i32 i64 -> i64", lambda a, b, c: wide(a) * wide(b) + c),
    Row("v_mad_u64_u32 {d}, s[12:13], {s}, {b}, 0", "u32 u32 -> u64", lambda a, b: U64(SCALAR) * wide(b)),
    Row("v_sad_u32 {d}, {a}, {b}, {c}", "u32 u32 u32 -> u32", lambda a, b, c: distance(a, b) + c),
    Row("v_sad_u16 {d}, {a}, {b}, {c}", "u16x2 u16x2 u32 -> u32", lambda a, b, c: distance(a, b).sum(1, U32) + c),
    Row("v_sad_u8 {d}, {a}, {b}, {c}", "u8x4 u8x4 u32 -> u32", lambda a, b, c: distance(a, b).sum(1, U32) + c),
    Row("v_sad_hi_u8 {d}, {a}, {b}, {c}", "u8x4 u8x4 u32 -> u32",
        lambda a, b, c: (distance(a, b).sum(1, U32) << U32(16)) + c),
    Row("v_lerp_u8 {d}, {a}, {b}, {c}", "u8x4 u8x4 u8x4 -> u8x4",
        lambda a, b, c: (a.astype(U32) + b + (c & 1)) >> U32(1)),
)  # fmt: skip

ARITHMETIC = Table(
    both("v_add_u32", "u32 u32 -> u32", lambda a, b: a + b),
    both("v_sub_u32", "u32 u32 -> u32", lambda a, b: a - b),
    both("v_subrev_u32", "u32 u32 -> u32", lambda a, b: b - a),
    Row("v_add_u32_e32 {d}, 0xffff8000, {b}", "u32 u32 -> u32", lambda a, b: b - U32(0x8000)),
    Row("v_add_u32_e64 {d}, {a}, {b} clamp", "u32 u32 -> u32", lambda a, b: saturate(wide(a) + wide(b), U32)),
    Row("v_sub_u32_e64 {d}, {a}, {b} clamp", "u32 u32 -> u32", lambda a, b: np.where(a < b, U32(0), a - b)),
    Row("v_add_i32 {d}, {a}, {b}", "i32 i32 -> i32", lambda a, b: a + b),
    Row("v_sub_i32 {d}, {a}, {b}", "i32 i32 -> i32", lambda a, b: a - b),
    Row("v_add_i32 {d}, {a}, {b} clamp", "i32 i32 -> i32", lambda a, b: saturate(wide(a) + wide(b), I32)),
    Row("v_sub_i32 {d}, {a}, {b} clamp", "i32 i32 -> i32", lambda a, b: saturate(wide(a) - wide(b), I32)),
    Row("v_add_co_u32_e32 {d}, vcc, {a}, {b}\ns_mov_b64 {e}, vcc", "u32 u32 -> u32 mask",
        lambda a, b: carry(wide(a).astype(I64) + wide(b).astype(I64))),
    Row("v_sub_co_u32_e32 {d}, vcc, {a}, {b}\ns_mov_b64 {e}, vcc", "u32 u32 -> u32 mask",
        lambda a, b: carry(wide(a).astype(I64) - wide(b).astype(I64))),
    Row("v_subrev_co_u32_e32 {d}, vcc, {a}, {b}\ns_mov_b64 {e}, vcc", "u32 u32 -> u32 mask",
        lambda a, b: carry(wide(b).astype(I64) - wide(a).astype(I64))),
    Row("v_addc_co_u32_e32 {d}, vcc, {a}, {b}, vcc\ns_mov_b64 {e}, vcc", "u32 u32 -> u32 mask",
        lambda a, b: carry(wide(a).astype(I64) + wide(b).astype(I64) + CARRY_LANES)),
    Row("v_subb_co_u32_e32 {d}, vcc, {a}, {b}, vcc\ns_mov_b64 {e}, vcc", "u32 u32 -> u32 mask",
        lambda a, b: carry(wide(a).astype(I64) - wide(b).astype(I64) - CARRY_LANES)),
    Row("v_subbrev_co_u32_e32 {d}, vcc, {a}, {b}, vcc\ns_mov_b64 {e}, vcc", "u32 u32 -> u32 mask",
        lambda a, b: carry(wide(b).astype(I64) - wide(a).astype(I64) - CARRY_LANES)),
    Row("v_add_co_u32_e64 {d}, {e}, {a}, {b}", "u32 u32 -> u32 mask",
        lambda a, b: carry(wide(a).astype(I64) + wide(b).astype(I64))),
    Row("v_sub_co_u32_e64 {d}, {e}, {a}, {b}", "u32 u32 -> u32 mask",
        lambda a, b: carry(wide(a).astype(I64) - wide(b).astype(I64))),
    Row("v_addc_co_u32_e64 {d}, {e}, {a}, {b}, {k}", "u32 u32 -> u32 mask",
        lambda a, b: carry(wide(a).astype(I64) + wide(b).astype(I64) + CARRY_LANES)),
    Row("v_subb_co_u32_e64 {d}, {e}, {a}, {b}, {k}", "u32 u32 -> u32 mask",
        lambda a, b: carry(wide(a).astype(I64) - wide(b).astype(I64) - CARRY_LANES)),
    both("v_min_i32", "i32 i32 -> i32", np.minimum),
    both("v_max_i32", "i32 i32 -> i32", np.maximum),
    both("v_min_u32", "u32 u32 -> u32", np.minimum),
    both("v_max_u32", "u32 u32 -> u32", np.maximum),
    both("v_mul_i32_i24", "i32 i32 -> i32", lambda a, b: bits24(a) * bits24(b)),
    both("v_mul_u32_u24", "u32 u32 -> u32", lambda a, b: bits24(a) * bits24(b)),
    both("v_mul_hi_i32_i24", "i32 i32 -> i32", lambda a, b: high(wide(bits24(a)) * wide(bits24(b)))),
    both("v_mul_hi_u32_u24", "u32 u32 -> u32", lambda a, b: high(wide(bits24(a)) * wide(bits24(b)))),
    Row("v_mul_lo_u32 {d}, {a}, {b}", "u32 u32 -> u32", lambda a, b: a * b),
    Row("v_mul_hi_u32 {d}, {a}, {b}", "u32 u32 -> u32", lambda a, b: high(wide(a) * wide(b))),
    Row("v_mul_hi_i32 {d}, {a}, {b}", "i32 i32 -> i32", lambda a, b: high(wide(a) * wide(b))),
    Row("v_cvt_pk_u16_u32 {d}, {a}, {b}", "u32 u32 -> u16x2",
        lambda a, b: np.stack([saturate(a, np.uint16), saturate(b, np.uint16)], 1)),
    Row("v_cvt_pk_i16_i32 {d}, {a}, {b}", "i32 i32 -> i16x2",
        lambda a, b: np.stack([saturate(a, np.int16), saturate(b, np.int16)], 1)),
    gfx950("v_ashr_pk_i8_i32 {d}, {a}, {b}, {c}", "i32 i32 u32 -> u16", shifted_and_packed(np.int8)),
    gfx950("v_ashr_pk_u8_i32 {d}, {a}, {b}, {c}", "i32 i32 u32 -> u16", shifted_and_packed(np.uint8)),
    both("v_sat_pk_u8_i16", "i16x2 -> u16",
         lambda a: saturate(a, np.uint8).astype(np.uint16) @ np.array([1, 256], np.uint16)),
    gfx950("v_prng_b32_e32 {d}, {a}", "u32 -> u32", lambda a: a << U32(1) ^ np.where(a >> U32(31), U32(197), U32(0))),
)  # fmt: skip

SIXTEEN_BITS = Table(
    both("v_add_u16", "u16 u16 -> u16", lambda a, b: a + b),
    both("v_sub_u16", "u16 u16 -> u16", lambda a, b: a - b),
    both("v_subrev_u16", "u16 u16 -> u16", lambda a, b: b - a),
    both("v_mul_lo_u16", "u16 u16 -> u16", lambda a, b: a * b),
    both("v_lshlrev_b16", "u16 u16 -> u16", lambda a, b: b << FOUR(a)),
    both("v_lshrrev_b16", "u16 u16 -> u16", lambda a, b: b >> FOUR(a)),
    both("v_ashrrev_i16", "i16 i16 -> i16", lambda a, b: b >> FOUR(a)),
    both("v_max_u16", "u16 u16 -> u16", np.maximum),
    both("v_max_i16", "i16 i16 -> i16", np.maximum),
    both("v_min_u16", "u16 u16 -> u16", np.minimum),
    both("v_min_i16", "i16 i16 -> i16", np.minimum),
    Row("v_mad_u16 {d}, {a}, {b}, {c}", "u16 u16 u16 -> u16", lambda a, b, c: a * b + c),
    Row("v_mad_i16 {d}, {a}, {b}, {c}", "i16 i16 i16 -> i16", lambda a, b, c: a * b + c),
    Row("v_mad_legacy_u16 {d}, {a}, {b}, {c}", "u16 u16 u16 -> u16", lambda a, b, c: a * b + c),
    Row("v_mad_legacy_i16 {d}, {a}, {b}, {c}", "i16 i16 i16 -> i16", lambda a, b, c: a * b + c),
    Row("v_add_i16 {d}, {a}, {b}", "i16 i16 -> i16", lambda a, b: a + b),
    Row("v_sub_i16 {d}, {a}, {b}", "i16 i16 -> i16", lambda a, b: a - b),
    Row("v_add_u16_e64 {d}, {a}, {b} clamp", "u16 u16 -> u16", lambda a, b: saturate(wide(a) + wide(b), np.uint16)),
    Row("v_sub_u16_e64 {d}, {a}, {b} clamp", "u16 u16 -> u16", lambda a, b: np.where(a < b, np.uint16(0), a - b)),
    Row("v_min3_i16 {d}, {a}, {b}, {c}", "i16 i16 i16 -> i16", lambda a, b, c: np.minimum(np.minimum(a, b), c)),
    Row("v_max3_i16 {d}, {a}, {b}, {c}", "i16 i16 i16 -> i16", lambda a, b, c: np.maximum(np.maximum(a, b), c)),
    Row("v_med3_i16 {d}, {a}, {b}, {c}", "i16 i16 i16 -> i16", median),
    Row("v_min3_u16 {d}, {a}, {b}, {c}", "u16 u16 u16 -> u16", lambda a, b, c: np.minimum(np.minimum(a, b), c)),
    Row("v_max3_u16 {d}, {a}, {b}, {c}", "u16 u16 u16 -> u16", lambda a, b, c: np.maximum(np.maximum(a, b), c)),
    Row("v_med3_u16 {d}, {a}, {b}, {c}", "u16 u16 u16 -> u16", median),
    Row("v_max3_u16 {d}, {a}, {b}, {c} op_sel:[1,0,1,0]", "u16x2 u16x2 u16x2 -> u16",
        lambda a, b, c: np.maximum(np.maximum(a[:, 1], b[:, 0]), c[:, 1])),
    Row("v_pk_add_u16 {d}, {a}, {b}", "u16x2 u16x2 -> u16x2", lambda a, b: a + b),
    Row("v_pk_sub_u16 {d}, {a}, {b}", "u16x2 u16x2 -> u16x2", lambda a, b: a - b),
    Row("v_pk_add_i16 {d}, {a}, {b}", "i16x2 i16x2 -> i16x2", lambda a, b: a + b),
    Row("v_pk_sub_i16 {d}, {a}, {b}", "i16x2 i16x2 -> i16x2", lambda a, b: a - b),
    Row("v_pk_mul_lo_u16 {d}, {a}, {b}", "u16x2 u16x2 -> u16x2", lambda a, b: a * b),
    Row("v_pk_mad_u16 {d}, {a}, {b}, {c}", "u16x2 u16x2 u16x2 -> u16x2", lambda a, b, c: a * b + c),
    Row("v_pk_mad_i16 {d}, {a}, {b}, {c}", "i16x2 i16x2 i16x2 -> i16x2", lambda a, b, c: a * b + c),
    Row("v_pk_lshlrev_b16 {d}, {a}, {b}", "u16x2 u16x2 -> u16x2", lambda a, b: b << FOUR(a)),
    Row("v_pk_lshrrev_b16 {d}, {a}, {b}", "u16x2 u16x2 -> u16x2", lambda a, b: b >> FOUR(a)),
    Row("v_pk_ashrrev_i16 {d}, {a}, {b}", "i16x2 i16x2 -> i16x2", lambda a, b: b >> FOUR(a)),
    Row("v_pk_max_i16 {d}, {a}, {b}", "i16x2 i16x2 -> i16x2", np.maximum),
    Row("v_pk_min_i16 {d}, {a}, {b}", "i16x2 i16x2 -> i16x2", np.minimum),
    Row("v_pk_max_u16 {d}, {a}, {b}", "u16x2 u16x2 -> u16x2", np.maximum),
    Row("v_pk_min_u16 {d}, {a}, {b}", "u16x2 u16x2 -> u16x2", np.minimum),
    Row("v_pk_add_u16 {d}, {a}, {b} op_sel:[1,0] op_sel_hi:[0,0]", "u16x2 u16x2 -> u16x2",
        lambda a, b: np.stack([a[:, 1] + b[:, 0], a[:, 0] + b[:, 0]], 1)),
    Row("v_dot4_i32_i8 {d}, {a}, {b}, {c}", "i8x4 i8x4 i32 -> u32", dot),
    Row("v_dot4_u32_u8 {d}, {a}, {b}, {c}", "u8x4 u8x4 u32 -> u32", dot),
    Row("v_dot2_i32_i16 {d}, {a}, {b}, {c}", "i16x2 i16x2 i32 -> u32", dot),
    Row("v_dot2_u32_u16 {d}, {a}, {b}, {c}", "u16x2 u16x2 u32 -> u32", dot),
)  # fmt: skip

TABLES = (MOVES, BITS, BITOP3, THREE_OPERANDS, ARITHMETIC, SIXTEEN_BITS)


@pytest.mark.parametrize("row", MOVES.rows, ids=str)
def test_moves(row):
    MOVES.check(row)


@pytest.mark.parametrize("row", BITS.rows, ids=str)
def test_bits(row):
    BITS.check(row)


def test_every_table_of_bitop3():
    for row in BITOP3.rows:
        BITOP3.check(row)


@pytest.mark.parametrize("row", THREE_OPERANDS.rows, ids=str)
def test_three_operands(row):
    THREE_OPERANDS.check(row)


@pytest.mark.parametrize("row", ARITHMETIC.rows, ids=str)
def test_arithmetic(row):
    ARITHMETIC.check(row)


@pytest.mark.parametrize("row", SIXTEEN_BITS.rows, ids=str)
def test_sixteen_bits(row):
    SIXTEEN_BITS.check(row)
