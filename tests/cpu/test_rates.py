"""The inputs of the cost model agree with each other."""

from __future__ import annotations

import pytest

from lightning_indexer.check.cases import flop, positions_in_windows
from lightning_indexer.model.cost import windows_of
from lightning_indexer.model.rates import (
    AITER_GLUON,
    MI350X,
    MI355X,
    PUBLISHED,
    is_fp8,
    is_packed_f32,
    matrix_flop_and_cycles,
)
from lightning_indexer.selection import registry as dispatch


@pytest.mark.parametrize(
    ("opcode", "operations", "cycles"),
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
def test_matrix_instructions(opcode, operations, cycles):
    assert matrix_flop_and_cycles(opcode) == (operations, cycles)


@pytest.mark.parametrize(
    "opcode", ["v_mfma_f64_16x16x4_f64", "v_mfma_i32_32x32x16_i8", "v_add_f32", "v_mfma_f32_32x32x4_2b_bf16"]
)
def test_an_opcode_without_a_rate_is_named(opcode):
    with pytest.raises(ValueError, match=f"got {opcode}, which has no rate in model/rates.py"):
        matrix_flop_and_cycles(opcode)


def test_the_published_peak_is_the_rate_of_the_instruction():
    operations, cycles = matrix_flop_and_cycles("v_mfma_scale_f32_32x32x64_f8f6f4")
    for device, published in ((MI355X, 5.0e15), (MI350X, 4.6e15)):
        peak = operations / cycles * device.simds * device.units * device.clock
        assert peak == pytest.approx(published, rel=0.01)


def test_fp8_instructions():
    assert is_fp8("v_mfma_scale_f32_32x32x64_f8f6f4")
    assert is_fp8("v_mfma_f32_16x16x32_fp8_bf8")
    assert not is_fp8("v_mfma_f32_32x32x16_bf16")


def test_packed_instructions():
    assert is_packed_f32("v_pk_mul_f32")
    assert is_packed_f32("v_pk_fma_f32")
    assert not is_packed_f32("v_pk_max_f16")
    assert not is_packed_f32("v_fma_f32")


@pytest.mark.parametrize("published", PUBLISHED, ids=lambda published: published.title)
def test_published_tables_are_whole(published):
    assert all(len(times) == len(published.kernels) for times in published.times.values())
    for backend, column in published.kinds.items():
        assert isinstance(dispatch.kernel(backend), dispatch.Compiled)
        assert 0 <= column < len(published.kernels)
    # Where only sums can be compared there is a kernel to compare them with.
    assert published.unit == "us" or 0 in published.kinds.values()


@pytest.mark.parametrize(
    ("launch", "live", "share", "tera_flop"),
    [((4096, 4096, "causal"), 0.0084e9, 0.5, 0.137), ((32768, 8192, "multi_req/4"), 0.0335e9, 0.125, 0.550)],
)
def test_windows_are_those_of_the_published_positions(launch, live, share, tera_flop):
    # As published with the times: positions in windows, their share of all, 10^12 floating-point operations.
    rows, keys, window = launch
    assert launch in AITER_GLUON.times
    positions = positions_in_windows(*windows_of(window, rows, keys), keys)
    assert positions == pytest.approx(live, rel=5e-3)
    assert positions / (rows * keys) == pytest.approx(share, rel=1e-3)
    assert flop(64, 128, positions) == pytest.approx(tera_flop * 1e12, rel=5e-3)


def test_windows_of_compressed_keys():
    ks, ke = windows_of("multi_req/4", 32, 16)
    assert ks.tolist() == [0] * 8 + [4] * 8 + [8] * 8 + [12] * 8
    assert (ke - ks).tolist() == [0, 0, 0, 1, 1, 1, 1, 2] * 4
    with pytest.raises(ValueError, match=r"name: got 'x', expected one of causal, .*, multi_req/4"):
        windows_of("x", 8, 8)
