"""Moves between lanes: DPP, SDWA, permlane swaps, readlane and its kin, and the LDS permutes."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest

from semantics import ARCHS, FULL, LANES, OLD, SOME, active_lanes, mnemonics, on, run_snippet

A = (0xA0000000 + LANES * 0x01010101 % 0x10000000).astype(np.uint32)
B = np.random.default_rng(5).integers(0, 2**32, 64, np.uint32)
ROW, IN_ROW, BANK = LANES // 16, LANES % 16, LANES % 16 // 4

# Lane that each lane reads; -1: none, the lane is out of its row or of the wave.
CONTROLS: dict[str, np.ndarray] = {
    "quad_perm:[1,0,3,2]": LANES ^ 1,
    "quad_perm:[2,3,0,1]": LANES ^ 2,
    "quad_perm:[0,0,3,1]": LANES // 4 * 4 + np.array([0, 0, 3, 1])[LANES % 4],
    **{f"row_shl:{n}": np.where(IN_ROW + n < 16, LANES + n, -1) for n in (1, 4, 8, 15)},
    **{f"row_shr:{n}": np.where(n <= IN_ROW, LANES - n, -1) for n in (1, 4, 8, 15)},
    **{f"row_ror:{n}": ROW * 16 + (IN_ROW - n) % 16 for n in (1, 4, 15)},
    "wave_shl:1": np.where(LANES < 63, LANES + 1, -1),
    "wave_rol:1": (LANES + 1) % 64,
    "wave_shr:1": LANES - 1,
    "wave_ror:1": (LANES - 1) % 64,
    "row_mirror": ROW * 16 + 15 - IN_ROW,
    "row_half_mirror": LANES // 8 * 8 + 7 - LANES % 8,
    "row_bcast:15": np.where(ROW > 0, ROW * 16 - 1, -1),
    "row_bcast:31": np.where(ROW > 1, 31, -1),
    "row_newbcast:0": ROW * 16,
    "row_newbcast:13": ROW * 16 + 13,
}
MASKS = ((0xF, 0xF), (0xA, 0xF), (0xC, 0xF), (0xF, 0x5), (0x7, 0x9))
OPERATIONS: dict[str, Callable[[np.ndarray, np.ndarray], np.ndarray]] = {
    "v_mov_b32_dpp v{d}, v0": lambda a, b: a,
    "v_add_u32_dpp v{d}, v0, v1": lambda a, b: a + b,
    "v_and_b32_dpp v{d}, v0, v1": lambda a, b: a & b,
    "v_max_f32_dpp v{d}, v2, v3": lambda a, b: np.maximum(a.view(np.float32), b.view(np.float32)).view(np.uint32),
    "v_add_f32_dpp v{d}, v2, v3": lambda a, b: (a.view(np.float32) + b.view(np.float32)).view(np.uint32),
    "v_add_f32_dpp v{d}, -v2, |v3|": lambda a, b: (np.abs(b.view(np.float32)) - a.view(np.float32)).view(np.uint32),
}
FLOATS = np.random.default_rng(6).standard_normal((2, 64)).astype(np.float32).view(np.uint32)


def dpp(source: np.ndarray, row_mask: int, bank_mask: int, zero: bool, enabled: np.ndarray):
    """Lane to read, whether it gives 0 instead, and which lanes are written."""
    valid = (source >= 0) & enabled[source]
    written = enabled & (row_mask >> ROW & 1 == 1) & (bank_mask >> BANK & 1 == 1) & (valid | zero)
    return np.where(valid, source, 0), ~valid, written


DPP = list(itertools.product(OPERATIONS, MASKS, (False, True)))


@pytest.mark.parametrize("control", CONTROLS)
def test_dpp(control):
    """Masked lanes are not written; nor, without bound_ctrl, those whose source is outside or disabled."""
    lines = []
    for number, (operation, (row_mask, bank_mask), zero) in enumerate(DPP):
        modifiers = f"{control} row_mask:{row_mask:#x} bank_mask:{bank_mask:#x}{' bound_ctrl:1' if zero else ''}"
        lines.append(f"{operation.format(d=10 + number)} {modifiers}")
    vgprs = {0: A, 1: B, 2: FLOATS[0], 3: FLOATS[1]} | {10 + number: OLD for number in range(len(DPP))}
    for arch, exec_mask in itertools.product(ARCHS, (FULL, SOME)):
        state = run_snippet(arch, "\n".join(lines), vgprs=vgprs, exec_mask=exec_mask)
        for number, (operation, masks, zero) in enumerate(DPP):
            lane, nothing, written = dpp(CONTROLS[control], *masks, zero, active_lanes(exec_mask))
            first, second = (FLOATS[0], FLOATS[1]) if "f32" in operation else (A, B)
            result = OPERATIONS[operation](np.where(nothing, np.uint32(0), first[lane]), second)
            with on(lines[number], arch, exec_mask):
                np.testing.assert_array_equal(state.vgpr[10 + number], np.where(written, result, OLD))


@pytest.mark.parametrize("arch", ARCHS)
def test_dpp_select(arch):
    asm = """v_cndmask_b32_dpp v2, v0, v1, vcc quad_perm:[1,0,3,2] row_mask:0xf bank_mask:0xf
        v_cndmask_b32_dpp v3, v0, v1, vcc row_shr:1 row_mask:0xa bank_mask:0x7 bound_ctrl:1"""
    exec_mask = 0xFFFF_0FF1_FF3F_F7FF
    state = run_snippet(arch, asm, vgprs={0: A, 1: B, 2: OLD, 3: OLD}, vcc=SOME, exec_mask=exec_mask)
    for register, control, masks in ((2, "quad_perm:[1,0,3,2]", (0xF, 0xF, False)), (3, "row_shr:1", (0xA, 0x7, True))):
        lane, nothing, written = dpp(CONTROLS[control], *masks, active_lanes(exec_mask))
        result = np.where(active_lanes(SOME), B, np.where(nothing, np.uint32(0), A[lane]))
        np.testing.assert_array_equal(state.vgpr[register], np.where(written, result, OLD))


BYTES = {"BYTE_0": (0, 8), "BYTE_1": (8, 8), "BYTE_2": (16, 8), "BYTE_3": (24, 8), "WORD_0": (0, 16),
         "WORD_1": (16, 16), "DWORD": (0, 32)}  # fmt: skip


def selected(x: np.ndarray, select: str, signed: bool = False) -> np.ndarray:
    shift, width = BYTES[select]
    value = x >> np.uint32(shift) & np.uint32(2**width - 1)
    if signed and width < 32:
        sign = np.uint32(1 << width - 1)
        value = (value ^ sign) - sign
    return value


def placed(result: np.ndarray, select: str, unused: str, old: np.ndarray) -> np.ndarray:
    """The result's low bits at their place; other bits zero, the sign (above) and zero (below), or as they were."""
    shift, width = BYTES[select]
    mask = np.uint32((2**width - 1) << shift)
    value = (result << np.uint32(shift)) & mask
    if unused == "UNUSED_PRESERVE":
        return value | old & ~mask
    if unused == "UNUSED_SEXT" and width < 32:
        negative = value >> np.uint32(shift + width - 1) & 1
        return value | np.where(negative, np.uint32(2**32 - 2 ** (shift + width) & 0xFFFFFFFF), np.uint32(0))
    return value


@dataclass(frozen=True)
class Sdwa:
    """``bits``: of the result; where 16 go to a whole register its upper half is not compared."""

    name: str
    expected: Callable[[np.ndarray, np.ndarray], np.ndarray]
    bits: int = 32


SDWA = [
    Sdwa("v_add_u32_sdwa", lambda a, b: a + b),
    Sdwa("v_sub_u32_sdwa", lambda a, b: a - b),
    Sdwa("v_and_b32_sdwa", lambda a, b: a & b),
    Sdwa("v_or_b32_sdwa", lambda a, b: a | b),
    Sdwa("v_xor_b32_sdwa", lambda a, b: a ^ b),
    Sdwa("v_lshlrev_b32_sdwa", lambda a, b: b << (a & np.uint32(31))),
    Sdwa("v_lshrrev_b32_sdwa", lambda a, b: b >> (a & np.uint32(31))),
    Sdwa("v_mul_u32_u24_sdwa", lambda a, b: (a & np.uint32(0xFFFFFF)) * (b & np.uint32(0xFFFFFF))),
    Sdwa("v_max_u32_sdwa", np.maximum),
    Sdwa("v_mov_b32_sdwa", lambda a, b: a),
    Sdwa("v_add_u16_sdwa", lambda a, b: a + b, 16),
    Sdwa("v_mul_lo_u16_sdwa", lambda a, b: a * b, 16),
    Sdwa("v_lshlrev_b16_sdwa", lambda a, b: b << (a & np.uint32(15)), 16),
    Sdwa("v_cndmask_b32_sdwa", lambda a, b: np.where(active_lanes(SOME), b, a)),
]
# Source selections, and the place of the result with what happens to the bits beside it.
SELECTS = [("WORD_0", "DWORD"), ("DWORD", "WORD_1"), ("BYTE_1", "BYTE_3"), ("BYTE_0", "WORD_0"), ("BYTE_2", "DWORD")]
UNUSED = ("UNUSED_PAD", "UNUSED_SEXT", "UNUSED_PRESERVE")


@pytest.mark.parametrize("row", SDWA, ids=lambda row: row.name)
def test_sdwa(row):
    cases = [
        (sources, place, unused, signed)
        for sources, (place, unused), signed in itertools.product(
            SELECTS,
            [("DWORD", "UNUSED_PAD"), *itertools.product(("BYTE_0", "BYTE_2", "WORD_0", "WORD_1"), UNUSED)],
            (False, True),
        )
    ]
    lines = []
    for number, ((first, second), place, unused, signed) in enumerate(cases):
        one, two = ("sext(v0)", "sext(v1)") if signed and "cndmask" not in row.name else ("v0", "v1")
        operands = f"{one}" if "v_mov" in row.name else f"{one}, {two}"
        vcc = ", vcc" if "cndmask" in row.name else ""
        selects = f"src0_sel:{first}" if "v_mov" in row.name else f"src0_sel:{first} src1_sel:{second}"
        lines.append(f"{row.name} v{10 + number}, {operands}{vcc} dst_sel:{place} dst_unused:{unused} {selects}")
    vgprs = {0: A * np.uint32(0x9E3779B1), 1: B} | {10 + number: OLD for number in range(len(cases))}
    states = [run_snippet(arch, "\n".join(lines), vgprs=vgprs, vcc=SOME, exec_mask=SOME) for arch in ARCHS]
    for number, ((first, second), place, unused, signed) in enumerate(cases):
        signed = signed and "cndmask" not in row.name
        result = row.expected(selected(vgprs[0], first, signed), selected(vgprs[1], second, signed)).astype(np.uint32)
        result &= np.uint32(2**row.bits - 1)
        expected = np.where(active_lanes(SOME), placed(result, place, unused, OLD), OLD)
        looked_at = np.uint32(0xFFFF if place == "DWORD" and row.bits == 16 else 0xFFFFFFFF)
        for arch, state in zip(ARCHS, states, strict=True):
            with on(lines[number], arch):
                np.testing.assert_array_equal(state.vgpr[10 + number] & looked_at, expected & looked_at)


def test_sdwa_scalar_operand_floats_and_compares():
    floats = np.array([1.5, -2.25, 0.0, np.inf] * 16, np.float32)
    halves = floats.astype(np.float16).view(np.uint16).astype(np.uint32) << 16 | 0x3C00
    asm = """v_add_u32_sdwa v2, v0, s20 dst_sel:DWORD dst_unused:UNUSED_PAD src0_sel:WORD_0 src1_sel:DWORD
        v_add_f16_sdwa v3, -v1, |v1| dst_sel:DWORD dst_unused:UNUSED_PAD src0_sel:WORD_1 src1_sel:WORD_0
        v_cmp_eq_u32_sdwa vcc, v0, v4 src0_sel:BYTE_3 src1_sel:BYTE_0
        v_cvt_f32_f16_sdwa v5, v1 dst_sel:DWORD dst_unused:UNUSED_PAD src0_sel:WORD_1
        v_add_f16_sdwa v6, v1, v1 dst_sel:WORD_1 dst_unused:UNUSED_PRESERVE src0_sel:WORD_1 src1_sel:WORD_1"""
    for arch in ARCHS:
        vgprs = {0: A, 1: halves.astype(np.uint32), 4: A >> 24, 6: OLD}
        state = run_snippet(arch, asm, vgprs=vgprs, sgprs={20: 0x12345678})
        np.testing.assert_array_equal(state.vgpr[2], (A & 0xFFFF) + np.uint32(0x12345678))
        got = state.vgpr[3].astype(np.uint16).view(np.float16)
        np.testing.assert_array_equal(got, np.float16(1) - floats.astype(np.float16))
        assert state.vcc == FULL
        np.testing.assert_array_equal(state.vgpr[5].view(np.float32), floats)
        np.testing.assert_array_equal((state.vgpr[6] >> 16).astype(np.uint16).view(np.float16), floats * 2)
        np.testing.assert_array_equal(state.vgpr[6] & 0xFFFF, OLD & 0xFFFF)


PERMLANES = {
    # First operand's upper rows with the second's lower ones: rows of 16, halves of 32.
    "v_permlane16_swap_b32_e32 v0, v1": 16,
    "v_permlane32_swap_b32_e32 v0, v1": 32,
}


@pytest.mark.parametrize("asm", PERMLANES)
def test_permlane_swaps(asm):
    """EXEC is all ones: what these do with disabled lanes is not in the documents."""
    width = PERMLANES[asm]
    state = run_snippet("gfx950", asm, vgprs={0: A, 1: B})
    odd = LANES // width % 2 == 1
    np.testing.assert_array_equal(state.vgpr[0], np.where(odd, B[LANES ^ width], A))
    np.testing.assert_array_equal(state.vgpr[1], np.where(odd, B, A[LANES ^ width]))


READS = """v_readfirstlane_b32 s4, v0
    v_readlane_b32 s5, v1, 63
    v_readlane_b32 s6, v1, s20
    v_readlane_b32 s7, v1, m0
    v_writelane_b32 v2, s21, 5
    v_writelane_b32 v2, 17, s20
    v_writelane_b32 v2, s21, m0"""


@pytest.mark.parametrize("exec_mask", [FULL, 0x8F31_7FFE_0FF0_0000, 0])
@pytest.mark.parametrize("arch", ARCHS)
def test_single_lanes(arch, exec_mask):
    """Only readfirstlane looks at EXEC; the lane of the others is taken modulo 64."""
    sgprs = {20: 64 + 9, 21: 0xCAFE0123}
    state = run_snippet(arch, READS, vgprs={0: A, 1: B, 2: OLD}, sgprs=sgprs, m0=0xFFFFFFE2, exec_mask=exec_mask)
    first = next((lane for lane in range(64) if exec_mask >> lane & 1), 0)
    assert [state.sgpr[n] for n in (4, 5, 6, 7)] == [int(A[first]), int(B[63]), int(B[9]), int(B[34])]
    expected = OLD.copy()
    expected[[5, 9, 34]] = 0xCAFE0123, 17, 0xCAFE0123
    np.testing.assert_array_equal(state.vgpr[2], expected)


ADDRESSES = np.random.default_rng(8).integers(0, 2**32, 64, np.uint32)
WAIT = "\ns_waitcnt lgkmcnt(0)"


@pytest.mark.parametrize("exec_mask", [FULL, SOME], ids=["full", "some"])
@pytest.mark.parametrize("arch", ARCHS)
def test_lds_permutes(arch, exec_mask):
    """Bytes of address beyond a lane and beyond the wave are ignored; a disabled source gives 0."""
    asm = "ds_bpermute_b32 v2, v1, v0\nds_bpermute_b32 v3, v1, v0 offset:12\nds_permute_b32 v4, v1, v0" + WAIT
    vgprs = {0: A, 1: ADDRESSES, 2: OLD, 3: OLD, 4: OLD}
    state = run_snippet(arch, asm, vgprs=vgprs, exec_mask=exec_mask)
    enabled = active_lanes(exec_mask)
    for register, offset in ((2, 0), (3, 12)):
        source = (ADDRESSES.astype(np.int64) + offset) // 4 % 64
        expected = np.where(enabled, np.where(enabled[source], A[source], 0), OLD)
        np.testing.assert_array_equal(state.vgpr[register], expected)
    sent = np.zeros(64, np.uint32)
    for lane in np.flatnonzero(enabled):  # of lanes that send to the same place, the highest wins
        sent[ADDRESSES[lane] // 4 % 64] = A[lane]
    np.testing.assert_array_equal(state.vgpr[4], np.where(enabled, sent, OLD))


def bit_mode(and_mask: int, or_mask: int, xor_mask: int) -> tuple[int, np.ndarray]:
    """Offset, and the lane read: within each half of the wave."""
    lane = (LANES % 32 & and_mask | or_mask) ^ xor_mask
    return xor_mask << 10 | or_mask << 5 | and_mask, LANES // 32 * 32 + lane


SWIZZLES = {
    "quad 2,3,0,1": (0x8000 | 2 | 3 << 2 | 0 << 4 | 1 << 6, LANES ^ 2),
    "quad 0,0,3,1": (0x8000 | 0 | 0 << 2 | 3 << 4 | 1 << 6, LANES // 4 * 4 + np.array([0, 0, 3, 1])[LANES % 4]),
    "swap 16": bit_mode(0x1F, 0, 0x10),
    "mirror": bit_mode(0x1F, 0, 0x1F),
    "broadcast of 8": bit_mode(0x18, 0x05, 0),
    "all three": bit_mode(0x0E, 0x10, 0x09),
}


@pytest.mark.parametrize("exec_mask", [FULL, SOME], ids=["full", "some"])
@pytest.mark.parametrize("arch", ARCHS)
def test_ds_swizzle(arch, exec_mask):
    lines = [
        f"ds_swizzle_b32 v{2 + number}, v0 offset:{offset}" for number, (offset, _) in enumerate(SWIZZLES.values())
    ]
    vgprs = {0: A} | {2 + number: OLD for number in range(len(SWIZZLES))}
    state = run_snippet(arch, "\n".join(lines) + WAIT, vgprs=vgprs, exec_mask=exec_mask)
    enabled = active_lanes(exec_mask)
    for number, (name, (_, source)) in enumerate(SWIZZLES.items()):
        expected = np.where(enabled, np.where(enabled[source], A[source], 0), OLD)
        np.testing.assert_array_equal(state.vgpr[2 + number], expected, name)


OPCODES = (
    mnemonics("\n".join([*OPERATIONS, *PERMLANES, READS, *(row.name for row in SDWA)]))
    | {"v_cndmask_b32_dpp", "v_add_f16_sdwa", "v_cmp_eq_u32_sdwa", "v_cvt_f32_f16_sdwa"}
    | {"ds_bpermute_b32", "ds_permute_b32", "ds_swizzle_b32"}
)
