"""DeepGEMM's, AITER's and vLLM's decode calls: their argument forms, and what their callers rely on."""

from __future__ import annotations

import inspect
import math

import pytest
import torch

from helpers import same_bits
from lightning_indexer import CacheLayout, calc_diff, fp8_paged_mqa_logits
from lightning_indexer.integrations import aiter, deep_gemm

FN = torch.float8_e4m3fn
B, H, D, PAGE, WIDTH = 4, 32, 128, 64, 300


@pytest.fixture
def operands():
    return make(next_n=2)


def make(next_n: int, order: str = "flat"):
    """q, kv_cache, weights, context_lens [B, next_n], block_table; lengths rise within a row."""
    generator = torch.Generator().manual_seed(next_n)
    blocks = -(-WIDTH // PAGE)
    layout = CacheLayout(PAGE, D, order)
    k = torch.randn((B * blocks, PAGE, D), generator=generator).to(FN)
    kv_cache = layout.pack(k, torch.rand((B * blocks, PAGE), generator=generator) + 0.1)
    q = torch.randn((B, next_n, H, D), generator=generator).to(FN)
    weights = torch.randn((B * next_n, H), generator=generator)
    lengths = torch.tensor([WIDTH, 129, next_n, 0], dtype=torch.int32)[:, None] - next_n + 1 + torch.arange(next_n)
    table = torch.randperm(B * blocks, generator=generator).view(B, blocks).int()
    return q, kv_cache, weights, lengths.int(), table


def test_signatures():
    def names(function):
        return list(inspect.signature(function).parameters)

    first = ["q", "kv_cache", "weights", "context_lens", "block_table", "schedule_meta", "max_context_len"]
    assert names(deep_gemm.fp8_paged_mqa_logits) == [*first, "clean_logits", "indices"]
    assert names(deep_gemm.fp8_fp4_paged_mqa_logits) == [*first, "clean_logits", "logits_dtype", "indices"]
    assert names(deep_gemm.get_paged_mqa_logits_metadata) == ["context_lens", "block_kv", "num_sms", "indices"]
    assert names(aiter.deepgemm_fp8_paged_mqa_logits) == [
        "q_fp8", "kv_cache", "weights", "out_logits", "context_lens", "kv_indices", "max_model_len", "Preshuffle",
        "KVBlockSize", "ChunkK", "TotalCuCount", "WavePerEU", "VarCtxSchedule",
    ]  # fmt: skip
    assert names(aiter.rocm_fp8_paged_mqa_logits)[:7] == [
        "q_fp8", "kv_cache_fp8", "weights", "context_lens", "block_tables", "schedule_metadata", "max_model_len"
    ]  # fmt: skip


def assert_same(found, operands, *, clean, **options):
    q, cache, weights, lengths, table = operands
    expected = fp8_paged_mqa_logits(q, cache, weights, lengths, table, WIDTH, **options)
    inside = expected != -math.inf
    assert found.dtype == expected.dtype
    assert same_bits(found[inside], expected[inside])
    if clean:
        assert same_bits(found, expected)


@pytest.mark.parametrize("next_n", [1, 2])
def test_three_generations_of_deep_gemm(next_n):
    operands = make(next_n)
    q, *others = operands
    schedule = deep_gemm.get_paged_mqa_logits_metadata(operands[3], PAGE, 132)
    assert_same(deep_gemm.fp8_paged_mqa_logits(*operands, schedule, WIDTH), operands, clean=False)
    assert_same(deep_gemm.fp8_paged_mqa_logits(*operands, schedule, WIDTH, True), operands, clean=True)
    assert_same(deep_gemm.fp8_paged_mqa_logits(*operands, schedule, WIDTH, True, None), operands, clean=True)
    newer = deep_gemm.fp8_fp4_paged_mqa_logits
    for dtype in (torch.float32, torch.bfloat16):
        found = newer((q, None), *others, schedule, WIDTH, True, dtype)
        assert_same(found, operands, clean=True, out_dtype=dtype)
        found = newer((q, None), *others, schedule, max_context_len=WIDTH, logits_dtype=dtype, indices=None)
        assert_same(found, operands, clean=False, out_dtype=dtype)
    indices = torch.arange(B, dtype=torch.int32)
    assert_same(newer((q, None), *others, schedule, WIDTH), operands, clean=False)
    assert_same(newer((q, None), *others, schedule, WIDTH, indices), operands, clean=False)
    assert_same(newer((q, None), *others, schedule, WIDTH, indices=indices), operands, clean=False)


def test_lengths_of_sequences(operands):
    q, cache, weights, lengths, table = operands
    found = deep_gemm.fp8_paged_mqa_logits(q, cache, weights, lengths[:, -1], table, None, WIDTH, True)
    assert_same(found, operands, clean=True)


def test_pairs_that_are_none(operands):
    q, *others = operands
    with pytest.raises(TypeError, match=r"q: got dtype torch\.float8_e4m3fn, .*: values of fp4"):
        deep_gemm.fp8_fp4_paged_mqa_logits((q, torch.ones(1, dtype=torch.int32)), *others, None, WIDTH)
    with pytest.raises(TypeError, match=r"q: got Tensor, expected the pair \(q, None\)"):
        deep_gemm.fp8_fp4_paged_mqa_logits(q, *others, None, WIDTH)


def test_schedule():
    lengths = torch.tensor([[3, 4]], dtype=torch.int32)
    schedule = deep_gemm.get_paged_mqa_logits_metadata(lengths, 64, 132, indices=None)
    assert (schedule.shape, schedule.dtype) == ((133, 2), torch.int32)
    torch.empty(133, 2, dtype=torch.int32)[:] = schedule  # as engines copy it
    with pytest.raises(ValueError, match="num_sms: got 0"):
        deep_gemm.get_paged_mqa_logits_metadata(lengths, 64, 0)
    with pytest.raises(TypeError, match=r"context_lens: got dtype torch\.int64"):
        deep_gemm.get_paged_mqa_logits_metadata(lengths.long(), 64, 1)


def test_a_ragged_batch_of_deep_gemm():
    """A row of q and of the table for each token, lengths of their own; ``indices`` names their sequences."""
    q, cache, weights, _, table = make(next_n=1)
    indices = torch.tensor([0, 0, 0, 2, 2, 3], dtype=torch.int32)
    lengths = torch.tensor([100, 101, 102, 7, 8, 0], dtype=torch.int32)
    tokens, rows = torch.cat((q, q[:2])), torch.cat((weights, weights[:2]))
    found = deep_gemm.fp8_fp4_paged_mqa_logits(
        (tokens, None), cache, rows, lengths[:, None], table[indices.long()], None, WIDTH, True, indices=indices
    )
    expected = fp8_paged_mqa_logits(tokens, cache, rows, lengths, table, WIDTH, indices=indices)
    assert same_bits(found, expected)


@pytest.mark.parametrize("heads", [32, 64])
@pytest.mark.parametrize("next_n", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_as_deep_gemm_tests_it(heads, next_n, dtype):
    """Random lengths from 0.7 to 1.3 of a mean, a permuted pool without gaps, lengths of rows that are arbitrary below
    the last; against scores of the unquantised operands and of the dequantised ones, and 20 bitwise repeats."""
    batch, mean = 5, 400
    torch.manual_seed(heads + next_n)  # few logits: their error of quantisation is up to 9.9e-4
    q = torch.randn(batch, next_n, heads, D).bfloat16()
    weights = torch.randn(batch * next_n, heads)
    last = torch.randint(int(0.7 * mean), int(1.3 * mean), (batch,))
    counts = -(-last // PAGE)
    width = int(counts.max()) * PAGE
    table = torch.zeros(batch, int(counts.max()), dtype=torch.int32)
    pool = torch.randperm(int(counts.sum())).int()
    for b, (first, count) in enumerate(zip((counts.cumsum(0) - counts).tolist(), counts.tolist(), strict=True)):
        table[b, :count] = pool[first : first + count]
    keys = torch.randn(len(pool), PAGE, D).bfloat16()
    scale = keys.abs().float().amax(dim=2).clamp(1e-4) / 448
    quantised = (keys.float() / scale[..., None]).to(FN)
    cache = CacheLayout(PAGE, D).pack(quantised, scale)
    lengths = ((last[:, None] + 1) * torch.rand(batch, next_n)).int()
    lengths[:, -1] = last

    def call():
        schedule = deep_gemm.get_paged_mqa_logits_metadata(lengths, PAGE, 132, indices=None)
        return deep_gemm.fp8_fp4_paged_mqa_logits(
            q=(q.to(FN), None), kv_cache=cache, weights=weights, context_lens=lengths, block_table=table,
            schedule_meta=schedule, max_context_len=width, clean_logits=False, logits_dtype=dtype, indices=None,
        )  # fmt: skip

    found = call()
    inside = torch.arange(width) < lengths.reshape(-1, 1)
    for _ in range(20):
        assert same_bits(call().masked_fill(~inside, 0), found.masked_fill(~inside, 0))
    for kept, queries, tolerance in (
        (keys.float(), q.float(), 1e-3),
        (quantised.float() * scale[..., None], q.to(FN).float(), 5e-6 if dtype is torch.float32 else 3e-5),
    ):
        expected = torch.zeros(batch * next_n, width)
        for b in range(batch):
            scores = torch.einsum("jhd,nd->jhn", queries[b], kept[table[b].long()].reshape(-1, D)).relu()
            rows = slice(b * next_n, (b + 1) * next_n)
            expected[rows] = torch.einsum("jh,jhn->jn", weights[rows], scores)
        assert calc_diff(found.float(), expected, inside) < tolerance


@pytest.mark.parametrize("order", ["flat", "preshuffled"])
def test_aiter(order):
    operands = make(2, order)
    q, cache, weights, lengths, table = operands
    out = torch.full((2 * B, WIDTH + 20), -math.inf)
    for view in (torch.uint8, FN):
        given = (q, cache.view(view), weights, out, lengths[:, -1].contiguous(), table, WIDTH)
        assert (
            aiter.deepgemm_fp8_paged_mqa_logits(*given, order == "preshuffled", PAGE, ChunkK=256, WavePerEU=2) is None
        )
        assert_same(out[:, :WIDTH], operands, clean=False, layout=CacheLayout(PAGE, D, order))
        assert bool((out[:, WIDTH:] == -math.inf).all())
    with pytest.raises(ValueError, match="kv_cache: got shape"):
        aiter.deepgemm_fp8_paged_mqa_logits(q, cache, weights, out, lengths, table, WIDTH, KVBlockSize=16)
    with pytest.raises(ValueError, match=r"out_logits: got shape \[8, 299\], expected \[B \* next_n, 300\] or wider"):
        aiter.deepgemm_fp8_paged_mqa_logits(q, cache, weights, out[:, :299], lengths, table, WIDTH, KVBlockSize=PAGE)


def test_vllm_on_rocm_reads_each_cache_as_it_was_written():
    shuffled, flat = make(2, "preshuffled"), make(2)
    found = aiter.rocm_fp8_paged_mqa_logits(*shuffled, None, WIDTH)
    assert_same(found, flat, clean=True)
    record = torch.zeros(flat[1].shape[0], 2, PAGE * (D + 4), dtype=torch.uint8)
    record[:, 0] = flat[1].view(record.shape[0], -1)
    strided = record[:, 0].unflatten(1, (PAGE, 1, D + 4))
    assert not strided.is_contiguous()
    assert_same(aiter.rocm_fp8_paged_mqa_logits(flat[0], strided, *flat[2:], None, WIDTH), flat, clean=True)
    assert_same(aiter.rocm_fp8_paged_mqa_logits(*flat, None, WIDTH, order="flat"), flat, clean=True)
    rows = CacheLayout(1, D).pack(
        *(part.reshape(-1, 1, *part.shape[2:]) for part in CacheLayout(PAGE, D).unpack(flat[1]))
    )
    table = (flat[4].long()[:, :, None] * PAGE + torch.arange(PAGE)).reshape(B, -1).int()
    found = aiter.rocm_fp8_paged_mqa_logits(flat[0], rows, *flat[2:4], table, None, WIDTH)
    # Blocks of other sizes: the same sums in another order.
    torch.testing.assert_close(found, aiter.rocm_fp8_paged_mqa_logits(*shuffled, None, WIDTH), rtol=1e-5, atol=1e-4)
