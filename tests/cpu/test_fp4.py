"""MXFP4: the recipe, its conversion to e4m3 by every spread of exponents, and the calls that take fp4 operands."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from lightning_indexer import CacheLayout, calc_diff, reference_logits
from lightning_indexer.fp4 import EXACT_SPREAD, SHIFT, dequantize_fp4, fp4_to_fp8, quantize_fp4, spread
from lightning_indexer.integrations import deep_gemm

FN, FNUZ = torch.float8_e4m3fn, torch.float8_e4m3fnuz
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def test_values_and_packing():
    x = torch.tensor(E2M1 + tuple(-v for v in E2M1)).repeat(2)[None] * 2.0**-9
    values, scales = quantize_fp4(x)
    assert scales.tolist() == [[127 - 9]]
    assert values[0, :8].tolist() == [0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE]  # the even channel is low
    assert torch.equal(dequantize_fp4(values, scales), x)


def test_the_recipe_rounds_to_the_nearest_and_scales_to_the_power_above():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn((300, 128), generator=generator) * torch.exp2(torch.randint(-126, 120, (300, 1)).float())
    values, scales = quantize_fp4(x)
    blocks = x.double().view(300, 4, 32)
    exponent = torch.log2(blocks.abs().amax(-1).clamp(min=6 * 2.0**-126) / 6).ceil()
    assert torch.equal(scales.double() - 127, exponent)
    units = blocks / torch.exp2(exponent)[..., None]
    grid = torch.tensor(E2M1, dtype=torch.float64)
    off = (units.abs()[..., None] - grid).abs().amin(-1)
    found = dequantize_fp4(values, scales).double().view(300, 4, 32) / torch.exp2(exponent)[..., None]
    assert torch.equal((found - units).abs(), off)


@pytest.mark.parametrize(("middle", "even"), [(0.25, 0), (0.75, 1), (1.25, 1), (1.75, 2), (2.5, 2), (3.5, 4), (5, 4)])
def test_ties_go_to_the_even_code(middle, even):
    x = torch.zeros(1, 32)
    x[0, :3] = torch.tensor([6.0, middle, -middle])
    assert dequantize_fp4(*quantize_fp4(x))[0, :3].tolist() == [6.0, even, -even]


@pytest.mark.parametrize("dtype", [FN, FNUZ])
def test_conversion_is_exact_at_all_spreads_to_14(dtype):
    """Every four exponents within 14 of each other, every value in every block: the float32 definition's bits."""
    steps = (0, 1, 7, 13, EXACT_SPREAD)
    for base in (1, 100, 230):
        offsets = torch.tensor(list(itertools.product(steps, repeat=4)), dtype=torch.uint8)
        scales = offsets + base
        codes = (torch.arange(64)[None] * 37 + torch.arange(len(scales))[:, None] * 11) % 256
        values = codes.to(torch.uint8)
        k, kv_scale = fp4_to_fp8(values, scales, dtype)
        found = k.double() * kv_scale[:, None].double()
        assert torch.equal(found, dequantize_fp4(values, scales).double())
        assert torch.equal(kv_scale.double(), 2.0 ** (scales.amax(1).double() - 127 - SHIFT[dtype]))


@pytest.mark.parametrize("dtype", [FN, FNUZ])
@pytest.mark.parametrize("apart", [15, 16, 18, 30, 240])
def test_beyond_14_the_error_is_bounded(dtype, apart):
    values = torch.arange(256).view(4, 64).to(torch.uint8)
    scales = torch.tensor([[3 + apart, 3, 3 + apart, 3]], dtype=torch.uint8).expand(4, 4).contiguous()
    assert spread(values, scales).tolist() == [apart] * 4
    k, kv_scale = fp4_to_fp8(values, scales, dtype)
    error = (k.double() * kv_scale[:, None].double() - dequantize_fp4(values, scales).double()).abs().max()
    assert 0 < error <= 2.0 ** (3 + apart - 127 - 16)


def test_blocks_of_zeros_do_not_count():
    values = torch.zeros(2, 64, dtype=torch.uint8)
    values[0, 20] = 0x17  # block 1
    values[:, 3] = 0x88  # both -0, block 0
    scales = torch.tensor([[254, 90, 1, 200], [254, 254, 0, 200]], dtype=torch.uint8)
    for dtype in (FN, FNUZ):
        k, kv_scale = fp4_to_fp8(values, scales, dtype)
        assert torch.equal(k.float() * kv_scale[:, None], dequantize_fp4(values, scales))
        assert kv_scale[1] == 1.0
        assert not bool(k.isnan().any())
    scales[0, 3] = 255
    assert fp4_to_fp8(values, scales)[1].isnan().tolist() == [True, False]


def packed(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """As DeepGEMM's callers have it: int8 tags packed values, and four bytes are an int32."""
    values, scales = quantize_fp4(x)
    return values.view(torch.int8), scales.contiguous().view(torch.int32)[..., 0]


@pytest.mark.parametrize("compressed", [False, True])
def test_prefill_logits_of_fp4_operands(compressed):
    """Against float32 on what the recipe leaves of q and K: 5e-6, as fp8 operands."""
    generator = torch.Generator().manual_seed(3)
    q, k = torch.randn((20, 32, 128), generator=generator), torch.randn((150, 128), generator=generator)
    q, k = (x * torch.exp2(torch.randn(x.shape, generator=generator)) for x in (q, k))
    weights = torch.randn((20, 32), generator=generator)
    ks, ke = torch.full((20,), 7, dtype=torch.int32), (torch.arange(20) + 120).int()
    right_q, right_k = dequantize_fp4(*quantize_fp4(q)), dequantize_fp4(*quantize_fp4(k))
    expected = reference_logits(right_q, (right_k, torch.ones(150)), weights, ks, ke)
    form = (False, 140) if compressed else (True,)
    found = deep_gemm.fp8_fp4_mqa_logits(packed(q), packed(k), weights, ks, ke, *form)
    if compressed:
        found = torch.nn.functional.pad(found, (7, 3))  # column j is position 7 + j
    assert calc_diff(found, expected, expected != -math.inf) < 1e-12


@pytest.mark.parametrize("fp4_q", [False, True])
def test_decode_logits_of_an_fp4_cache(fp4_q):
    generator = torch.Generator().manual_seed(4)
    q, k = torch.randn((2, 1, 32, 128), generator=generator), torch.randn((6, 64, 128), generator=generator)
    weights = torch.randn((2, 32), generator=generator)
    layout = CacheLayout.fp4(64)
    cache, table = layout.pack(*quantize_fp4(k)), torch.tensor([[4, 0, 2], [1, 3, 5]], dtype=torch.int32)
    lengths = torch.tensor([[150], [192]], dtype=torch.int32)
    right_q = dequantize_fp4(*quantize_fp4(q)) if fp4_q else q.to(FN).float()
    given = packed(q) if fp4_q else (q.to(FN), None)
    found = deep_gemm.fp8_fp4_paged_mqa_logits(given, cache, weights, lengths, table, None, 192, True)
    for b in range(2):
        keys = dequantize_fp4(*quantize_fp4(k))[table[b].long()].reshape(192, 128)
        scores = torch.einsum("hd,nd->hn", right_q[b, 0], keys).relu()
        expected = (weights[b, :, None] * scores).sum(0)[: lengths[b, 0]]
        assert calc_diff(found[b, : lengths[b, 0]], expected) < 1e-12
        assert bool((found[b, lengths[b, 0] :] == -math.inf).all())


def test_layout_of_fp4():
    layout = CacheLayout.fp4(64)
    assert (layout.block_bytes, layout.block_shape) == (64 * 68, (64, 1, 68))
    values, scales = (
        torch.randint(0, 256, (3, 64, 64)).to(torch.uint8),
        torch.randint(0, 256, (3, 64, 4)).to(torch.uint8),
    )
    cache = layout.pack(values, scales)
    assert torch.equal(cache.view(3, -1)[1, :64], values[1, 0])
    assert torch.equal(cache.view(3, -1)[2, 64 * 64 + 4 : 64 * 64 + 8], scales[2, 1])
    assert all(torch.equal(a, b) for a, b in zip(layout.unpack(cache), (values, scales), strict=True))
    for wrong in (
        layout._replace(order="preshuffled"),
        layout._replace(scales="float32"),
        layout._replace(head_dim=64),
    ):
        with pytest.raises(ValueError, match=r"layout: got .* expected flat, ue8m0 and D=128 of fp4 keys"):
            wrong.validate()
    with pytest.raises(ValueError, match=r"kv_cache: got shape \[3, 64, 1, 132\], expected \[blocks, 64, 1, 68\]"):
        layout.check(torch.zeros(3, 64, 1, 132, dtype=torch.uint8))
