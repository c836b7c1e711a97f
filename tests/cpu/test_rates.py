"""The inputs of the cost model agree with each other."""

from __future__ import annotations

import pytest

from lightning_indexer.bench.cases import PERFORMANCE_SHAPES
from lightning_indexer.bench.rates import MI355X, SEED, is_fp8, is_packed_f32, matrix_flop_and_cycles


@pytest.mark.parametrize(
    ("opcode", "flop", "cycles"),
    [
        ("v_mfma_scale_f32_32x32x64_f8f6f4", 131072, 64),
        ("v_mfma_f32_32x32x64_f8f6f4", 131072, 64),
        ("v_mfma_f32_16x16x128_f8f6f4", 65536, 32),
        ("v_mfma_f32_32x32x16_fp8_fp8", 32768, 32),
        ("v_mfma_f32_16x16x32_fp8_bf8", 16384, 16),
        ("v_mfma_f32_32x32x16_bf16", 32768, 32),
        ("v_mfma_f32_16x16x16_f16", 8192, 16),
    ],
)
def test_matrix_instructions(opcode, flop, cycles):
    assert matrix_flop_and_cycles(opcode) == (flop, cycles)


@pytest.mark.parametrize("opcode", ["v_mfma_f64_16x16x4_f64", "v_mfma_i32_32x32x16_i8", "v_add_f32"])
def test_an_opcode_without_a_rate_is_named(opcode):
    with pytest.raises(ValueError, match=f"got {opcode}, which has no rate in bench/rates.py"):
        matrix_flop_and_cycles(opcode)


def test_the_published_peak_is_the_rate_of_the_instruction():
    flop, cycles = matrix_flop_and_cycles("v_mfma_scale_f32_32x32x64_f8f6f4")
    peak = flop / cycles * MI355X.simds * MI355X.units * MI355X.clock
    assert peak == pytest.approx(5.0e15, rel=0.01)


def test_fp8_instructions():
    assert is_fp8("v_mfma_scale_f32_32x32x64_f8f6f4")
    assert is_fp8("v_mfma_f32_16x16x32_fp8_bf8")
    assert not is_fp8("v_mfma_f32_32x32x16_bf16")


def test_packed_instructions():
    assert is_packed_f32("v_pk_mul_f32")
    assert is_packed_f32("v_pk_fma_f32")
    assert not is_packed_f32("v_pk_max_f16")
    assert not is_packed_f32("v_fma_f32")


def test_the_published_table_has_its_fourteen_rows():
    assert len(SEED) == 14
    assert {(s_q, s_k) for s_q, s_k, _ in SEED} == set(PERFORMANCE_SHAPES)
    assert {window for _, _, window in SEED} == {"causal", "multi_req"}
    assert SEED[128, 32768, "causal"] == (225.1, 35.2)
