"""Paged decode logits: the layouts, the reference, what is accepted and refused, the PyTorch backend, the operators."""

from __future__ import annotations

import math

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from helpers import CPU, same_bits
from lightning_indexer import Arch, BackendUnavailableError, CacheLayout, fp8_mqa_logits, fp8_paged_mqa_logits
from lightning_indexer.backends.torch_blocked import paged_mqa_logits as torch_blocked
from lightning_indexer.calls import common
from lightning_indexer.check.paged_mqa_logits import Case, call_of, cases, make_inputs, run_case
from lightning_indexer.problems.paged_mqa_logits import (
    PagedMqaLogitsProblem,
    problem_of,
    reference_paged_logits,
    validate,
)

INF = math.inf
FN, FNUZ = torch.float8_e4m3fn, torch.float8_e4m3fnuz
LAYOUTS = [
    CacheLayout(page, 32, order, scales, dtype)
    for page, order in ((1, "flat"), (16, "flat"), (64, "flat"), (16, "preshuffled"), (48, "preshuffled"))
    for scales in ("float32", "power of two", "ue8m0")
    for dtype in (FN, FNUZ)
]


def keys_of(layout: CacheLayout, blocks: int) -> tuple[torch.Tensor, torch.Tensor]:
    k = torch.randn(blocks, layout.page, layout.head_dim).to(layout.dtype)
    scale = torch.exp2(torch.randint(-20, 20, (blocks, layout.page)).float())
    return k, scale * 1.5 if layout.scales == "float32" else scale


# The layout


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_every_byte_lies_where_the_layout_says(layout):
    """Against the addresses, spelled out one by one: kernels and writers share none of the packing code."""
    k, scale = keys_of(layout, 3)
    cache = layout.pack(k, scale)
    assert cache.shape == (3, *layout.block_shape)
    flat, values = cache.view(3, -1), k.view(torch.uint8)
    for block, key, channel in ((0, 0, 0), (1, layout.page - 1, 31), (2, layout.page // 2, 17), (2, 0, 15), (1, 0, 16)):
        place = key * 32 + channel
        if layout.order == "preshuffled":
            place = ((key // 16 * 2 + channel // 16) * 16 + key % 16) * 16 + channel % 16
        assert flat[block, place] == values[block, key, channel]
    for block, key in ((0, 0), (2, layout.page - 1)):
        place = layout.page * 32 + 4 * key
        found = flat[block, place : place + 4].clone()
        if layout.scales == "ue8m0":
            assert found.tolist() == [int(math.log2(scale[block, key])) + 127] * 4
        else:
            assert found.view(torch.float32) == scale[block, key]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_unpack_undoes_pack_at_any_block_stride(layout):
    k, scale = keys_of(layout, 4)
    cache = layout.pack(k, scale)
    wide = torch.zeros(4, layout.block_bytes + 20, dtype=torch.uint8)
    wide[:, : layout.block_bytes] = cache.view(4, -1)
    strided = wide.as_strided(cache.shape, (wide.stride(0), *cache.stride()[1:]))
    for given in (cache, strided, cache[:, :, 0]):
        found, scales = layout.unpack(given)
        assert same_bits(found, k)
        assert torch.equal(scales, scale)


def test_ue8m0_extremes():
    layout = CacheLayout(2, 32, scales="ue8m0")
    cache = torch.zeros(1, 2, 1, 36, dtype=torch.uint8)
    cache.view(-1)[-4:] = 255
    scales = layout.unpack(cache)[1]
    assert scales[0, 0] == 2.0**-127
    assert bool(scales[0, 1].isnan())


@pytest.mark.parametrize(
    ("layout", "error", "message"),
    [
        (CacheLayout(page=0), ValueError, "layout.page: got 0"),
        (CacheLayout(page=1.5), TypeError, "layout.page: got float"),
        (CacheLayout(head_dim=True), TypeError, "layout.head_dim: got bool"),
        (CacheLayout(page=24, order="preshuffled"), ValueError, "layout: got page 24 and D=128, preshuffled"),
        (CacheLayout(head_dim=40, order="preshuffled"), ValueError, "layout: got page 64 and D=40, preshuffled"),
        (CacheLayout(page=1, head_dim=33), ValueError, "layout: got 33 value bytes a block"),
        (CacheLayout(order="shuffled"), ValueError, "layout.order: got 'shuffled'"),
        (CacheLayout(scales="float16"), ValueError, "layout.scales: got 'float16'"),
        (CacheLayout(dtype=torch.float8_e5m2), TypeError, "layout.dtype: got torch.float8_e5m2"),
    ],
    ids=lambda value: str(value) if isinstance(value, str) else "",
)
def test_layouts_that_no_cache_has(layout, error, message):
    with pytest.raises(error, match=message):
        layout.validate()


def test_scales_that_a_layout_cannot_hold():
    for scales in ("power of two", "ue8m0"):
        layout = CacheLayout(2, 32, scales=scales)
        for wrong in (1.5, -2.0):
            with pytest.raises(ValueError, match="kv_scale: got scales that are no powers of two"):
                layout.pack(torch.zeros(1, 2, 32).to(FN), torch.tensor([[1.0, wrong]]))
    with pytest.raises(ValueError, match=r"k: got shape \[2, 32\], expected \[blocks, 2, 32\]"):
        layout.pack(torch.zeros(2, 32).to(FN), torch.ones(1, 2))
    with pytest.raises(TypeError, match=r"k: got dtype torch\.float8_e4m3fnuz"):
        layout.pack(torch.zeros(1, 2, 32).to(FNUZ), torch.ones(1, 2))


# The reference and the PyTorch backend


def test_reference_is_that_of_the_prefill_call_on_gathered_keys():
    case = Case(3, 2, 16, 64, 200, 16, "preshuffled", lengths="rows")
    inputs = make_inputs(case, CPU)
    found = reference_paged_logits(
        inputs.q, inputs.kv_cache, inputs.weights, inputs.context_lens, inputs.block_tables, 200, layout=case.layout
    )
    k, scale = case.layout.unpack(inputs.kv_cache)
    for b in range(3):
        longest = int(inputs.context_lens[b].max().clamp(0, 200))
        blocks = inputs.block_tables[b, : -(-longest // 16)].long()
        keys, scales = k[blocks].reshape(-1, 64)[:longest], scale[blocks].reshape(-1)[:longest]
        rows = slice(2 * b, 2 * b + 2)
        start, end = torch.zeros(2, dtype=torch.int32), inputs.context_lens[b].contiguous()
        expected = fp8_mqa_logits(inputs.q[b], (keys, scales), inputs.weights[rows], start, end)
        torch.testing.assert_close(found[rows, :longest], expected, rtol=1e-5, atol=1e-4)
        assert bool((found[rows, longest:] == -INF).all())


@pytest.mark.parametrize("case", cases(False), ids=str)
def test_cpu(case):
    assert run_case(case, "torch-blocked", CPU, repeats=1) == []


def test_threads_and_blocks_do_not_matter():
    case = Case(7, 3, 32, 64, 500, 16, lengths="rows")
    inputs = make_inputs(case, CPU)
    given = call_of(case, inputs, torch.empty(21, 500))
    expected = fp8_paged_mqa_logits(*given[:6], layout=case.layout)
    try:
        torch.set_num_threads(2)
        assert same_bits(fp8_paged_mqa_logits(*given[:6], layout=case.layout), expected)
        assert run_case(case, "torch-blocked", CPU, repeats=2) == []
    finally:
        torch.set_num_threads(1)
    for config in torch_blocked.neighbours(case.problem, Arch.parse("cpu")):
        for small in (config, torch_blocked.PageBlocks(1, 1), torch_blocked.PageBlocks(2**12, 64)):
            launch = torch_blocked.PagedMqaLogits().launch(case.problem, Arch.parse("cpu"), small)
            assert run_case(case, "", CPU, call=lambda case, i, out, run=launch: run(call_of(case, i, out))) == []


@pytest.mark.parametrize("case", cases(False)[::2], ids=str)
def test_the_way_of_gpus_reads_no_length(case, monkeypatch):
    """What a GPU runs, here: blocks of the whole batch."""
    monkeypatch.setattr(torch_blocked._Work, "on_cpu", torch_blocked._Work.on_device)
    monkeypatch.setattr(torch_blocked, "_threads", None)
    for config in (torch_blocked.PageBlocks(2**26, 8192), torch_blocked.PageBlocks(2**13, 32)):
        launch = torch_blocked.PagedMqaLogits().launch(case.problem, Arch.parse("sm90"), config)
        assert run_case(case, "", CPU, call=lambda case, i, out, run=launch: run(call_of(case, i, out))) == []


@pytest.mark.parametrize("dtype", [FN, FNUZ], ids=str)
def test_every_code_is_widened_exactly(dtype):
    codes = torch.arange(256, dtype=torch.uint8)
    finite = codes[~codes.view(dtype).float().isnan()].view(dtype)
    wide, factor = torch_blocked._widen(finite)
    assert factor > 1
    assert same_bits(wide * factor + 0.0, finite.float() + 0.0)
    for code in codes[codes.view(dtype).float().isnan()]:
        mixed = torch.cat((codes[:3], code[None])).view(dtype)
        wide, factor = torch_blocked._widen(mixed)
        assert bool((wide * factor).isnan()[3])
        assert torch.equal((wide * factor)[:3], mixed.float()[:3])


def test_nan_stays_in_its_column():
    case = Case(1, 2, 8, 32, 130, 64, lengths="equal")
    inputs = make_inputs(case, CPU)
    given = (inputs.q, inputs.kv_cache, inputs.weights, inputs.context_lens, inputs.block_tables, 130)
    expected = fp8_paged_mqa_logits(*given)
    block = inputs.block_tables[0, 1]
    inputs.kv_cache.view(inputs.kv_cache.shape[0], -1)[block, 5 * 32 + 3] = 0x7F  # position 69
    found = fp8_paged_mqa_logits(*given)
    assert found.isnan().any(dim=0).nonzero().flatten().tolist() == [69]
    others = torch.arange(130) != 69
    torch.testing.assert_close(found[:, others], expected[:, others], rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("mode", ["inference", "autocast", "default dtype"])
def test_modes_of_the_caller(mode):
    case = Case(3, 2, 16, 64, 200)
    given = call_of(case, make_inputs(case, CPU), torch.empty(0))[:6]
    expected = fp8_paged_mqa_logits(*given)
    if mode == "inference":
        with torch.inference_mode():
            found = fp8_paged_mqa_logits(*given)
    elif mode == "autocast":
        with torch.autocast("cpu", torch.bfloat16):
            found = fp8_paged_mqa_logits(*given)
    else:
        torch.set_default_dtype(torch.float64)
        try:
            found = fp8_paged_mqa_logits(*given)
        finally:
            torch.set_default_dtype(torch.float32)
    assert same_bits(found, expected)


def test_an_empty_pool_and_an_empty_table():
    layout = CacheLayout(16, 32)
    q, weights = torch.zeros(2, 1, 8, 32).to(FN), torch.ones(2, 8)
    lengths = torch.zeros(2, dtype=torch.int32)
    for blocks, entries in ((0, 3), (2, 0), (0, 0)):
        cache = torch.zeros(blocks, 16, 1, 36, dtype=torch.uint8)
        tables = torch.zeros(2, entries, dtype=torch.int32)
        found = fp8_paged_mqa_logits(q, cache, weights, lengths, tables, 40, layout=layout)
        assert bool((found == -INF).all())
        assert found.shape == (2, 40)
    assert fp8_paged_mqa_logits(q, cache, weights, lengths, tables, 0).shape == (2, 0)


def test_a_pool_whose_offsets_pass_2_gib():
    """Blocks of a sparse mapping: the last of them lies behind 2^31 bytes."""
    layout = CacheLayout(64, 128)
    apart = 2**30 + 64
    storage = torch.empty(2 * apart + layout.block_bytes, dtype=torch.uint8)
    k, scale = keys_of(layout, 3)
    cache = storage.as_strided((3, *layout.block_shape), (apart, 132, 132, 1))
    cache.copy_(layout.pack(k, scale))
    q, weights = torch.randn(1, 1, 32, 128).to(FN), torch.randn(1, 32)
    lengths, tables = torch.tensor([130], dtype=torch.int32), torch.tensor([[2, 0, 1]], dtype=torch.int32)
    found = fp8_paged_mqa_logits(q, cache, weights, lengths, tables, 150)
    expected = reference_paged_logits(q, layout.pack(k, scale), weights, lengths, tables, 150)
    torch.testing.assert_close(found, expected)


# What is accepted and refused


def test_forms_of_the_arguments_that_mean_the_same():
    case = Case(4, 1, 16, 64, 200)
    given = call_of(case, make_inputs(case, CPU), torch.empty(0))
    q, cache, weights, lengths, tables, width = given[:6]
    expected = fp8_paged_mqa_logits(q, cache, weights, lengths, tables, width)
    assert same_bits(fp8_paged_mqa_logits(q, cache[:, :, 0], weights, lengths, tables, width), expected)
    strided = torch.stack((lengths, lengths), dim=1)[:, :1]
    for other in (lengths[:, None], strided, strided[:, 0]):
        assert same_bits(fp8_paged_mqa_logits(q, cache, weights, other, tables, width), expected)
    identity = torch.arange(4, dtype=torch.int32)
    assert same_bits(fp8_paged_mqa_logits(q, cache, weights, lengths, tables, width, indices=identity), expected)
    spaced = torch.stack((identity, identity), dim=1)[:, 0]
    assert same_bits(fp8_paged_mqa_logits(q, cache, weights, lengths, tables, width, indices=spaced), expected)
    for layout in (case.layout, None):
        found = fp8_paged_mqa_logits(q, cache, weights, lengths, tables, width, layout=layout, schedule_meta=object())
        assert same_bits(found, expected)
    out = torch.empty(4, 200)
    assert fp8_paged_mqa_logits(q, cache, weights, lengths, tables, width, out=out) is out
    held = torch.nn.Parameter(torch.full_like(out, torch.nan), requires_grad=False)
    kept = torch.nn.Parameter(identity, requires_grad=False)
    assert fp8_paged_mqa_logits(q, cache, weights, lengths, tables, width, indices=kept, out=held) is held
    assert same_bits(held.data, expected)
    assert same_bits(out, expected)
    narrow = weights.bfloat16()
    found = fp8_paged_mqa_logits(q, cache, narrow, lengths, tables, width)
    assert same_bits(found, fp8_paged_mqa_logits(q, cache, narrow.float(), lengths, tables, width))


def test_lengths_of_rows_are_not_derived():
    """[3, 3] stays [3, 3]; a length [B] is that of the last row."""
    case = Case(1, 2, 8, 32, 10, 16)
    q, cache, weights, _, tables, width = call_of(case, make_inputs(case, CPU), torch.empty(0))[:6]
    tables = torch.zeros_like(tables)
    for lengths, seen in (([[3, 3]], [3, 3]), ([3], [2, 3]), ([[5, 2]], [5, 2]), ([1], [0, 1]), ([0], [0, 0])):
        found = fp8_paged_mqa_logits(q, cache, weights, torch.tensor(lengths, dtype=torch.int32), tables, width)
        assert (found != -INF).sum(dim=1).tolist() == seen


REFUSED = {
    "q: got shape [2, 8, 32], expected 4 dimensions": {"q": torch.zeros(2, 8, 32).to(FN)},
    "q: got dtype torch.float32": {"q": torch.zeros(2, 1, 8, 32)},
    "q: got float8_e4m3fnuz on cpu": {"q": torch.zeros(2, 1, 8, 32).to(FNUZ)},
    "layout.dtype: got float8_e4m3fnuz on cpu": {"layout": CacheLayout(16, 32, dtype=FNUZ)},
    "kv_cache: got dtype torch.float8_e4m3fn, expected torch.uint8": {"kv_cache": torch.zeros(4, 16, 1, 36).to(FN)},
    "kv_cache: got shape [4, 16, 1, 40], expected [blocks, 16, 1, 36]": {
        "kv_cache": torch.zeros(4, 16, 1, 40, dtype=torch.uint8)
    },
    "kv_cache: got shape [4, 16, 1, 36], expected [blocks, 64, 1, 36]": {"layout": CacheLayout(64, 32)},
    "kv_cache: got strides": {"kv_cache": torch.zeros(4, 16, 1, 72, dtype=torch.uint8)[..., ::2]},
    "expected blocks that are contiguous each": {"kv_cache": torch.zeros(4, 32, 1, 36, dtype=torch.uint8)[:, ::2]},
    "a multiple of 4 bytes apart": {
        "kv_cache": torch.zeros(4000, dtype=torch.uint8).as_strided((4, 16, 1, 36), (578, 36, 36, 1))
    },
    "kv_cache: got an address off a 4-byte boundary": {
        "kv_cache": torch.zeros(4000, dtype=torch.uint8)[2:].as_strided((4, 16, 1, 36), (576, 36, 36, 1))
    },
    "layout: got D=64, expected 32": {"layout": CacheLayout(16, 64)},
    "layout: got str": {"layout": "flat"},
    "weights: got shape [3, 8], expected [2, 8]": {"weights": torch.ones(3, 8)},
    "context_lens: got dtype torch.int64, expected torch.int32: pass": {"context_lens": torch.zeros(2).long()},
    "context_lens: got shape [3], expected [2] or [2, 1]": {"context_lens": torch.zeros(3).int()},
    "context_lens: got shape [2, 2]": {"context_lens": torch.zeros(2, 2).int()},
    "block_tables: got dtype torch.int64": {"block_tables": torch.zeros(2, 4).long()},
    "block_tables: got shape [3, 4], expected [2, max_blocks]": {"block_tables": torch.zeros(3, 4).int()},
    "block_tables: got strides (1, 2)": {"block_tables": torch.zeros(4, 2).int().t()},
    "indices: got dtype torch.int64": {"indices": torch.zeros(2).long()},
    "indices: got shape [3], expected [2]": {"indices": torch.zeros(3).int()},
    "block_tables: got shape [0, 4], expected at least one sequence": {
        "indices": torch.zeros(2).int(), "block_tables": torch.zeros(0, 4).int()
    },
    "max_context_len: got float": {"max_context_len": 40.0},
    "max_context_len: got -1": {"max_context_len": -1},
    "clean_logits: got int": {"clean_logits": 1},
    "out_dtype: got torch.float16": {"out_dtype": torch.float16},
    "out: got shape [2, 41], expected [2, 40]": {"out": torch.empty(2, 41)},
    "out: got dtype torch.bfloat16": {"out": torch.empty(2, 40, dtype=torch.bfloat16)},
    "rows overlap": {"out": torch.empty(80).as_strided((2, 40), (20, 1))},
    "weights: got a tensor on meta, expected cpu": {"weights": torch.ones(2, 8, device="meta")},
}  # fmt: skip


@pytest.mark.parametrize("message", REFUSED)
def test_refused(message):
    arguments = {
        "q": torch.zeros(2, 1, 8, 32).to(FN), "kv_cache": torch.zeros(4, 16, 1, 36, dtype=torch.uint8),
        "weights": torch.ones(2, 8), "context_lens": torch.tensor([3, 40], dtype=torch.int32),
        "block_tables": torch.tensor([[0, 1, 2, 3]] * 2, dtype=torch.int32), "max_context_len": 40,
    }  # fmt: skip
    fp8_paged_mqa_logits(**arguments)
    with pytest.raises((TypeError, ValueError)) as raised:
        fp8_paged_mqa_logits(**(arguments | REFUSED[message]))
    assert message in str(raised.value)


def test_backend_by_name():
    case = Case(2, 1, 8, 32, 40, 16)
    given = call_of(case, make_inputs(case, CPU), torch.empty(0))[:6]
    with pytest.raises(BackendUnavailableError, match="flydsl: has no fp8_paged_mqa_logits"):
        fp8_paged_mqa_logits(*given, backend="flydsl")


# Memo, operators, self-check


def test_calls_that_agree_plan_once():
    case = Case(2, 2, 8, 32, 40, 16)
    given = call_of(case, make_inputs(case, CPU), torch.empty(0))[:6]
    first = fp8_paged_mqa_logits(*given)
    plans = len(common.PLANS)
    assert same_bits(fp8_paged_mqa_logits(*given), first)
    assert len(common.PLANS) == plans
    fp8_paged_mqa_logits(*given, layout=CacheLayout(16, 32, "preshuffled"))
    assert len(common.PLANS) == plans + 1


def test_operators():
    case = Case(2, 2, 8, 32, 40, 16, "preshuffled", "ue8m0", lengths="rows")
    inputs = make_inputs(case, CPU)
    given = (inputs.q, inputs.kv_cache, inputs.weights, inputs.context_lens, inputs.block_tables, 40)
    spelled = (16, 32, "preshuffled", "ue8m0", FN, None, True)
    expected = fp8_paged_mqa_logits(*given, layout=case.layout)
    operators = torch.ops.lightning_indexer
    tests = ("test_faketensor",)  # the others compute with fp8
    torch.library.opcheck(operators.fp8_paged_mqa_logits, (*given, *spelled, torch.float32, None), test_utils=tests)
    out = torch.empty(4, 40)
    torch.library.opcheck(operators.fp8_paged_mqa_logits_out, (*given, *spelled, out, None), test_utils=tests)
    compiled = torch.compile(
        lambda *tensors: fp8_paged_mqa_logits(*tensors, 40, layout=case.layout), backend="aot_eager", fullgraph=True
    )
    assert same_bits(compiled(*given[:5]), expected)
    flat = torch.compile(lambda *tensors: fp8_paged_mqa_logits(*tensors, 40, out=out), backend="aot_eager")
    assert same_bits(flat(*given[:5]), fp8_paged_mqa_logits(*given))
    with FakeTensorMode() as mode:
        fakes = [mode.from_tensor(tensor) for tensor in given[:5]]
        assert fp8_paged_mqa_logits(*fakes, 40, layout=case.layout).shape == (4, 40)
        with pytest.raises(ValueError, match=r"kv_cache: got shape \[8, 16, 1, 36\], expected \[blocks, 64, 1, 36\]"):
            fp8_paged_mqa_logits(*fakes, 40, layout=CacheLayout(64, 32))


@pytest.mark.parametrize("aligned", [True, False])
@pytest.mark.parametrize("arch", ["sm90", "gfx942"])
def test_example_of_a_problem_is_its_problem(arch, aligned):
    """What a kernel is checked on before its first call: the same each time, and a fault in it shows."""
    problem = PagedMqaLogitsProblem(
        64, 3, 4096, 16, 64, CacheLayout(16, 64, "preshuffled"), 256, row_lengths=True, ragged=True, aligned=aligned
    )
    small = problem.adversarial(Arch.parse(arch))
    call = small.example(CPU)
    assert validate(call) is call
    assert problem_of(call) == small
    kernel = torch_blocked.PagedMqaLogits()
    kernel.launch(small, Arch.parse("cpu"), kernel.config(small, Arch.parse("cpu")))(call)
    expected = small.example(CPU)
    logits = reference_paged_logits(*expected[:6], layout=expected.layout, indices=expected.indices)
    expected.result.copy_(logits)
    assert small.compare(call, expected) is None
    call.result[0, 3] += 50.0
    assert "logits are wrong" in str(small.compare(call, expected))
    call.result[1] = 0.0
    assert "-inf at" in str(small.compare(call, expected))
