"""fp8 dialects and conversions, on all 256 bytes and against the formulas of the formats."""

from __future__ import annotations

import math

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from lightning_indexer.fp8 import (
    E4M3FN_MAX,
    E4M3FNUZ_MAX,
    FN_AS_FNUZ_FACTOR,
    FP8_DTYPES,
    decode_ue8m0,
    dequantize_k,
    fn_to_fnuz,
    quantize_k,
    quantize_q,
)

FN = torch.float8_e4m3fn
FNUZ = torch.float8_e4m3fnuz
LIMITS = {FN: E4M3FN_MAX, FNUZ: E4M3FNUZ_MAX}
# Three mantissa bits: half a step is 2**-4 of the value. The division by the scale and its inverse round as well.
RELATIVE_ERROR = 2**-4 * (1 + 1e-5)
# Half of the smallest step, in units of the scale.
SUBNORMAL_ERROR = {FN: 2**-10, FNUZ: 2**-11}


def all_codes() -> torch.Tensor:
    return torch.arange(256, dtype=torch.int32).to(torch.uint8)


def value_of(code: int, bias: int) -> float:
    """An e4m3 byte by the definition of the format, NaN bytes aside."""
    sign = -1.0 if code & 0x80 else 1.0
    exponent, mantissa = code >> 3 & 15, code & 7
    if exponent == 0:
        return sign * math.ldexp(mantissa, 1 - bias - 3)
    return sign * math.ldexp(8 + mantissa, exponent - bias - 3)


def random_k(rows: int, width: int = 128, seed: int = 0) -> torch.Tensor:
    """Rows of very different magnitude, with some values that are subnormal after scaling."""
    generator = torch.Generator().manual_seed(seed)
    k = torch.randn(rows, width, generator=generator)
    k[:, ::7] *= 1e-4
    return k * torch.logspace(-2, 6, rows)[:, None]


def codes_of(x: torch.Tensor) -> torch.Tensor:
    return x.view(torch.uint8)


# The facts


def test_maxima_are_those_of_the_formats():
    assert set(FP8_DTYPES) == {FN, FNUZ}
    for dtype, limit in LIMITS.items():
        values = all_codes().view(dtype).float()
        assert values[~values.isnan()].max() == limit == torch.finfo(dtype).max


# fn_to_fnuz


def test_every_byte_reads_as_half():
    fn = all_codes().view(FN)
    fnuz = fn_to_fnuz(fn)
    assert fnuz.dtype is FNUZ
    assert fnuz.shape == fn.shape
    values = fnuz.float()
    for code in range(256):
        assert codes_of(fnuz)[code] == (0 if code == 0x80 else code)
        if code not in (0x7F, 0x80, 0xFF):
            assert fn.float()[code] == value_of(code, bias=7)
            assert values[code] == value_of(code, bias=8)
            assert values[code] * FN_AS_FNUZ_FACTOR == fn.float()[code]
    assert not values.isnan().any()


def test_case_8_negative_zero_becomes_positive_zero():
    x = torch.tensor([-0.0, 0.0, 1.0]).to(FN)
    assert codes_of(x).tolist() == [0x80, 0x00, 0x38]
    assert x.view(FNUZ).float().isnan().tolist() == [True, False, False]
    values = fn_to_fnuz(x).float()
    assert values.tolist() == [0.0, 0.0, 0.5]
    assert not values.signbit().any()


def test_nan_bytes_become_the_largest_values():
    x = torch.tensor([0x7F, 0xFF], dtype=torch.uint8).view(FN)
    assert x.float().isnan().all()
    assert fn_to_fnuz(x).float().tolist() == [E4M3FNUZ_MAX, -E4M3FNUZ_MAX]


@pytest.mark.parametrize(
    "view",
    [
        lambda x: x,
        lambda x: x[:, ::2],
        lambda x: x[3:9, 5:],
        lambda x: x.t(),
        lambda x: x[:0],
        lambda x: x[:, 0],
        lambda x: x[0, 0],
        lambda x: x.expand(3, 16, 16),
    ],
    ids=["whole", "every second", "offset", "transposed", "no rows", "column", "scalar", "expanded"],
)
def test_any_strides_and_the_input_is_kept(view):
    storage = all_codes().reshape(16, 16).view(FN)
    before = codes_of(storage).clone()
    x = view(storage)
    fnuz = fn_to_fnuz(x)
    codes = codes_of(x)
    assert fnuz.shape == x.shape
    assert torch.equal(codes_of(fnuz), codes.masked_fill(codes == 0x80, 0))
    assert torch.equal(codes_of(storage), before)
    assert fnuz.numel() == 0 or fnuz.untyped_storage().data_ptr() != storage.untyped_storage().data_ptr()


def test_rows_of_a_slice_stay_contiguous():
    x = torch.zeros(8, 4, 64).to(FN)[:, 1:3, 16:48]
    assert fn_to_fnuz(x).stride(-1) == 1


@pytest.mark.parametrize("x", [torch.zeros(4), torch.zeros(4).to(FNUZ), torch.zeros(4, dtype=torch.uint8)])
def test_fn_to_fnuz_takes_fn_only(x):
    with pytest.raises(TypeError, match=rf"x: got dtype {x.dtype}, expected torch.float8_e4m3fn"):
        fn_to_fnuz(x)


# quantize_k and dequantize_k


@pytest.mark.parametrize("dtype", FP8_DTYPES)
@pytest.mark.parametrize("source", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scale_format", ["float32", "ue8m0"])
def test_round_trip_error(dtype, source, scale_format):
    k = random_k(64).clamp(-6e4, 6e4).to(source)
    k_fp8, kv_scale = quantize_k(k, scale_format=scale_format, dtype=dtype)
    assert (k_fp8.dtype, k_fp8.shape) == (dtype, k.shape)
    assert (kv_scale.dtype, kv_scale.shape) == (torch.float32, (64,))
    back = dequantize_k(k_fp8, kv_scale)
    assert back.dtype is torch.float32
    error = (back.double() - k.double()).abs()
    bound = k.double().abs() * RELATIVE_ERROR + kv_scale.double()[:, None] * SUBNORMAL_ERROR[dtype]
    assert bool((error <= bound).all())


@pytest.mark.parametrize("dtype", FP8_DTYPES)
def test_the_scale_is_the_largest_magnitude_over_the_limit(dtype):
    k = random_k(64)
    k_fp8, kv_scale = quantize_k(k, dtype=dtype)
    assert torch.equal(kv_scale, (k.abs().amax(1).double() / LIMITS[dtype]).float())
    # The largest magnitude of a row takes the largest code, so the whole range is used.
    assert bool((k_fp8.float().abs().amax(1) == LIMITS[dtype]).all())


@pytest.mark.parametrize("dtype", FP8_DTYPES)
def test_ue8m0_scales_are_the_next_power_of_two(dtype):
    k = random_k(512)
    scale = quantize_k(k, dtype=dtype)[1]
    power = quantize_k(k, scale_format="ue8m0", dtype=dtype)[1]
    mantissa, _ = torch.frexp(power)
    assert bool((mantissa == 0.5).all())
    assert bool((power >= scale).all())
    assert bool((power < 2 * scale).all())


@pytest.mark.parametrize("dtype", FP8_DTYPES)
@pytest.mark.parametrize("exponent", [*range(-20, 21), 100, 119])
def test_ue8m0_keeps_exact_powers(dtype, exponent):
    amax = torch.tensor(math.ldexp(LIMITS[dtype], exponent))
    k = torch.stack((amax, torch.nextafter(amax, torch.tensor(math.inf)), torch.nextafter(amax, torch.tensor(0.0))))
    k_fp8, kv_scale = quantize_k(k[:, None], scale_format="ue8m0", dtype=dtype)
    assert kv_scale.tolist() == [2.0**exponent, 2.0 ** (exponent + 1), 2.0**exponent]
    assert k_fp8.float().flatten().tolist() == [LIMITS[dtype], LIMITS[dtype] / 2, LIMITS[dtype]]


@pytest.mark.parametrize("dtype", FP8_DTYPES)
@pytest.mark.parametrize("scale_format", ["float32", "ue8m0"])
def test_rows_of_zeros_and_tiny_rows(dtype, scale_format):
    k = torch.zeros(4, 32)
    k[1] = 1e-30
    k[2] = 1e-45
    k[3] = -0.0
    k_fp8, kv_scale = quantize_k(k, scale_format=scale_format, dtype=dtype)
    assert bool((kv_scale > 0).all())
    assert bool(kv_scale.isfinite().all())
    assert torch.equal(dequantize_k(k_fp8, kv_scale), torch.zeros(4, 32))


@pytest.mark.parametrize("dtype", FP8_DTYPES)
@pytest.mark.parametrize("scale_format", ["float32", "ue8m0"])
def test_the_largest_float_saturates_and_stays_finite(dtype, scale_format):
    largest = torch.finfo(torch.float32).max
    k = torch.tensor([[largest, -largest, 0.0, 1.0]])
    k_fp8, kv_scale = quantize_k(k, scale_format=scale_format, dtype=dtype)
    assert bool(k_fp8.float().isfinite().all())
    assert bool(kv_scale.isfinite().all())
    assert k_fp8.float()[0, 0] == -k_fp8.float()[0, 1]


@pytest.mark.parametrize("dtype", FP8_DTYPES)
def test_no_value_passes_the_limit(dtype):
    # Division by a rounded scale can give a little more than the limit.
    k = torch.rand(20_000, 1, generator=torch.Generator().manual_seed(1)) + 0.01
    k_fp8, _ = quantize_k(torch.cat((k, -k), dim=1), dtype=dtype)
    assert torch.equal(k_fp8.float(), torch.tensor([LIMITS[dtype], -LIMITS[dtype]]).expand(20_000, 2))


@pytest.mark.parametrize("scale_format", ["float32", "ue8m0"])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_bad_row_does_not_reach_its_neighbours(scale_format, bad):
    k = random_k(3)
    expected, expected_scale = quantize_k(k, scale_format=scale_format)
    k[1, 5] = bad
    k_fp8, kv_scale = quantize_k(k, scale_format=scale_format)
    assert not kv_scale[1].isfinite()
    assert torch.equal(codes_of(k_fp8)[::2], codes_of(expected)[::2])
    assert torch.equal(kv_scale[::2], expected_scale[::2])


def test_no_rows():
    k_fp8, kv_scale = quantize_k(torch.zeros(0, 128), scale_format="ue8m0")
    assert k_fp8.shape == (0, 128)
    assert kv_scale.shape == (0,)
    assert dequantize_k(k_fp8, kv_scale).shape == (0, 128)
    assert dequantize_k(k_fp8, kv_scale[:, None]).shape == (0, 128)


@pytest.mark.parametrize(
    "view", [lambda k: k.t().contiguous().t(), lambda k: k.repeat_interleave(2, dim=1)[:, ::2], lambda k: k[2:]]
)
def test_quantize_k_of_strided_input_is_contiguous(view):
    k = view(random_k(16, 32))
    before = k.clone()
    k_fp8, kv_scale = quantize_k(k)
    expected, expected_scale = quantize_k(k.contiguous())
    assert k_fp8.is_contiguous()
    assert torch.equal(codes_of(k_fp8), codes_of(expected))
    assert torch.equal(kv_scale, expected_scale)
    assert torch.equal(k, before)


@pytest.mark.parametrize("dtype", FP8_DTYPES)
def test_dequantize_reads_every_byte(dtype):
    k_fp8 = all_codes().reshape(2, 128).view(dtype)
    kv_scale = torch.tensor([0.5, -4.0])
    expected = k_fp8.float() * torch.tensor([[0.5], [-4.0]])
    for scale in (kv_scale, kv_scale[:, None]):
        torch.testing.assert_close(dequantize_k(k_fp8, scale), expected, rtol=0, atol=0, equal_nan=True)
    strided = dequantize_k(k_fp8[:, ::2], kv_scale)
    torch.testing.assert_close(strided, expected[:, ::2], rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(
    ("k", "options", "error", "message"),
    [
        ([[1.0]], {}, TypeError, "k: got list, expected a torch.Tensor"),
        (
            torch.zeros(2, 2, dtype=torch.float64),
            {},
            TypeError,
            "k: got dtype torch.float64, expected torch.float32 or",
        ),
        (torch.zeros(2, 2).to(FN), {}, TypeError, "k: got dtype torch.float8_e4m3fn, expected"),
        (torch.zeros(2), {}, ValueError, r"k: got shape \[2\], expected \[N, D\]"),
        (torch.zeros(2, 2, 2), {}, ValueError, r"k: got shape \[2, 2, 2\], expected \[N, D\]"),
        (torch.zeros(2, 0), {}, ValueError, r"k: got shape \[2, 0\], expected \[N, D\] with D of at least 1"),
        (
            torch.zeros(2, 2),
            {"scale_format": "e8m0"},
            ValueError,
            "scale_format: got 'e8m0', expected one of float32, ue8m0",
        ),
        (torch.zeros(2, 2), {"dtype": torch.float8_e5m2}, TypeError, "dtype: got torch.float8_e5m2, expected"),
    ],
)
def test_quantize_k_errors(k, options, error, message):
    with pytest.raises(error, match=message):
        quantize_k(k, **options)


@pytest.mark.parametrize(
    ("k_fp8", "kv_scale", "error", "message"),
    [
        (
            torch.zeros(2, 4),
            torch.ones(2),
            TypeError,
            "k_fp8: got dtype torch.float32, expected torch.float8_e4m3fn or",
        ),
        (torch.zeros(2).to(FN), torch.ones(2), ValueError, r"k_fp8: got shape \[2\], expected \[N, D\]"),
        (torch.zeros(2, 4).to(FN), [1.0, 1.0], TypeError, "kv_scale: got list, expected a torch.Tensor"),
        (torch.zeros(2, 4).to(FN), torch.ones(2).half(), TypeError, "kv_scale: got dtype torch.float16, expected"),
        (torch.zeros(2, 4).to(FN), torch.ones(1), ValueError, r"kv_scale: got shape \[1\], expected \[2\] or \[2, 1\]"),
        (torch.zeros(2, 4).to(FN), torch.ones(2, 4), ValueError, r"kv_scale: got shape \[2, 4\], expected \[2\]"),
        (torch.zeros(2, 4).to(FN), torch.ones(()), ValueError, r"kv_scale: got shape \[\], expected \[2\]"),
        (
            torch.zeros(2, 4).to(FN),
            torch.ones(2, device="meta"),
            ValueError,
            "kv_scale: got a tensor on meta, expected cpu",
        ),
    ],
)
def test_dequantize_k_errors(k_fp8, kv_scale, error, message):
    with pytest.raises(error, match=message):
        dequantize_k(k_fp8, kv_scale)


# quantize_q


@pytest.mark.parametrize("source", [torch.float32, torch.bfloat16, torch.float16])
def test_quantize_q_keeps_what_fp8_holds(source):
    values = all_codes().view(FN).float()
    values = values[~values.isnan()]
    q = quantize_q(values.to(source))
    assert q.dtype is FN
    assert torch.equal(codes_of(q), codes_of(values.to(FN)))


def test_quantize_q_saturates():
    q = torch.tensor([448.0, 449.0, 464.0, 465.0, 500.0, 1e9, math.inf, -449.0, -1e9, -math.inf])
    assert quantize_q(q).float().tolist() == [448.0] * 7 + [-448.0] * 3
    assert quantize_q(torch.tensor([math.nan])).float().isnan().all()


def test_quantize_q_rounds_to_nearest_even():
    assert quantize_q(torch.tensor([1.0625, 1.1875, 1.07, -1.0625])).float().tolist() == [1.0, 1.25, 1.125, -1.0]


def test_quantize_q_of_strided_input_is_contiguous():
    q = torch.randn(6, 4, 16, generator=torch.Generator().manual_seed(2)).transpose(0, 2)
    result = quantize_q(q)
    assert result.is_contiguous()
    assert torch.equal(codes_of(result), codes_of(quantize_q(q.contiguous())))


@pytest.mark.parametrize("q", [1.0, torch.zeros(2, dtype=torch.int32), torch.zeros(2).to(FN)])
def test_quantize_q_errors(q):
    with pytest.raises(TypeError, match=r"^q: got"):
        quantize_q(q)


# torch.compile


def test_fake_tensors_pass():
    with FakeTensorMode():
        x = torch.empty(4, 8, 32, dtype=FN)
        assert (fn_to_fnuz(x[:, ::2]).dtype, fn_to_fnuz(x[:, ::2]).shape) == (FNUZ, (4, 4, 32))
        k_fp8, kv_scale = quantize_k(torch.empty(5, 32), scale_format="ue8m0", dtype=FNUZ)
        assert (k_fp8.dtype, k_fp8.shape, kv_scale.shape) == (FNUZ, (5, 32), (5,))
        assert dequantize_k(k_fp8, kv_scale).shape == (5, 32)
        assert quantize_q(torch.empty(4, 8, 32)).dtype is FN


def test_compiled_without_graph_breaks():
    x = all_codes().view(FN)
    compiled = torch.compile(fn_to_fnuz, backend="aot_eager", fullgraph=True)
    assert torch.equal(codes_of(compiled(x)), codes_of(fn_to_fnuz(x)))
    k = random_k(8, 32)
    quantize = torch.compile(quantize_k, backend="aot_eager", fullgraph=True)
    for result, expected in zip(quantize(k, scale_format="ue8m0"), quantize_k(k, scale_format="ue8m0"), strict=True):
        assert torch.equal(codes_of(result), codes_of(expected))


# UE8M0 scales


def values_of_all_bytes() -> torch.Tensor:
    values = torch.ldexp(torch.ones(256, dtype=torch.float64), torch.arange(-127, 129)).float()
    values[255] = float("nan")
    return values


ALL_BYTES = torch.arange(256, dtype=torch.uint8)
UE8M0_FORMS = {
    "uint8": ALL_BYTES,
    "uint8 column": ALL_BYTES[:, None],
    "e8m0": ALL_BYTES.view(torch.float8_e8m0fnu),
    "four equal bytes": ALL_BYTES[:, None].expand(-1, 4),
    "four equal e8m0": ALL_BYTES[:, None].repeat(1, 4).view(torch.float8_e8m0fnu),
    "int32": ALL_BYTES[:, None].repeat(1, 4).view(torch.int32)[:, 0],
    "int32 column": ALL_BYTES[:, None].repeat(1, 4).view(torch.int32),
    "strided": ALL_BYTES[:, None].repeat(1, 12)[:, ::3],
    "strided int32": ALL_BYTES[:, None].repeat(1, 8).view(torch.int32)[:, 1],
}


@pytest.mark.parametrize("form", UE8M0_FORMS)
def test_ue8m0_of_all_bytes(form):
    decoded = decode_ue8m0(UE8M0_FORMS[form])
    assert decoded.dtype is torch.float32
    assert decoded.shape == (256,)
    assert decoded.is_contiguous()
    assert torch.equal(decoded.view(torch.int32)[:255], values_of_all_bytes().view(torch.int32)[:255])
    assert decoded[255].isnan()
    # As PyTorch reads the dtype.
    assert torch.equal(decoded[1:255], ALL_BYTES.view(torch.float8_e8m0fnu).float()[1:255])


def test_ue8m0_of_no_keys():
    for scale in (ALL_BYTES[:0], ALL_BYTES[:0, None].expand(-1, 4), torch.empty(0, dtype=torch.int32)):
        assert decode_ue8m0(scale).shape == (0,)


def test_ue8m0_round_trip():
    _, kv_scale = quantize_k(torch.randn(50, 32), scale_format="ue8m0")
    codes = (kv_scale.view(torch.int32) >> 23).to(torch.uint8)
    assert torch.equal(decode_ue8m0(codes), kv_scale)


def test_ue8m0_bytes_that_differ_are_refused():
    bytes_of = torch.full((5, 4), 120, dtype=torch.uint8)
    bytes_of[3, 2] = 121
    message = r"^scale: got bytes \[120, 120, 121, 120\] for key 3, expected four equal ones"
    for scale in (bytes_of, bytes_of.view(torch.float8_e8m0fnu), bytes_of.view(torch.int32)[:, 0]):
        with pytest.raises(ValueError, match=message):
            decode_ue8m0(scale)


@pytest.mark.parametrize(
    ("scale", "error", "message"),
    [
        ([1], TypeError, "^scale: got list, expected a torch.Tensor"),
        (torch.ones(4), TypeError, "^scale: got dtype torch.float32, expected torch.uint8 or torch.float8_e8m0fnu or"),
        (ALL_BYTES.view(64, 2, 2), ValueError, r"^scale: got shape \[64, 2, 2\] of torch.uint8, expected \[N\], "),
        (
            ALL_BYTES.view(128, 2),
            ValueError,
            r"^scale: got shape \[128, 2\] of torch.uint8, expected \[N\], \[N, 1\] or",
        ),
        (
            torch.ones(8, 4, dtype=torch.int32),
            ValueError,
            r"^scale: got shape \[8, 4\] of torch.int32, expected \[N\] or",
        ),
    ],
)
def test_ue8m0_of_other_forms_is_refused(scale, error, message):
    with pytest.raises(error, match=message):
        decode_ue8m0(scale)
