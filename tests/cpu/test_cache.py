"""The cache on the PyTorch backend: every case of the suites, what is accepted and refused, operators, adapters."""

from __future__ import annotations

import inspect

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from helpers import CPU
from lightning_indexer import CacheLayout, arch, gather_k_cache, insert_k_cache, prepare_q
from lightning_indexer.check import gather_k_cache as gather_check
from lightning_indexer.check import insert_k_cache as insert_check
from lightning_indexer.check import prepare_q as prepare_check
from lightning_indexer.integrations import cache as adapters
from lightning_indexer.problems.insert_k_cache import InsertProblem, reference_insert
from lightning_indexer.problems.paged_mqa_logits import PagedMqaLogitsProblem
from lightning_indexer.problems.transform import Steps, transformed
from lightning_indexer.selection import registry

BACKEND = "torch-blocked"
FN, FNUZ = torch.float8_e4m3fn, torch.float8_e4m3fnuz


def test_cases_of_insert():
    for case in insert_check.cases(False):
        assert insert_check.run_case(case, BACKEND, CPU) == [], case


def test_cases_of_gather():
    for case in gather_check.cases(False):
        assert gather_check.run_case(case, BACKEND, CPU) == [], case


def test_cases_of_prepare_q():
    for case in prepare_check.cases(False):
        assert prepare_check.run_case(case, BACKEND, CPU) == [], case


def test_the_suites_see_what_is_wrong():
    """A writer of another layout, a scale that is off, a key too many, a result that is shifted."""
    case = insert_check.Case(67, CacheLayout(16, 128, "preshuffled"), end_to_end=True, slots="shuffled")

    def flat(case, inputs, cache):
        insert_k_cache(inputs.k, cache, inputs.slot_mapping, layout=CacheLayout(16, 128))

    faults = insert_check.run_case(case, "", CPU, call=flat)
    assert any("bytes differ" in fault for fault in faults)
    assert [fault.split(":")[0] for fault in faults if "calc_diff" in fault] == [
        "paged logits", "gather and prefill logits"
    ]  # fmt: skip

    def unskipped(case, inputs, cache):
        insert_k_cache(inputs.k, cache, inputs.slot_mapping.clamp(min=0), layout=case.layout)

    assert insert_check.run_case(insert_check.Case(67), "", CPU, call=unskipped)

    def shifted(case, inputs, out):
        gather_k_cache(
            inputs.kv_cache, inputs.block_tables, inputs.cu_seq_lens, case.keys - 1, layout=case.layout,
            out=(out[0][1:], out[1][1:]),
        )  # fmt: skip

    assert gather_check.run_case(gather_check.Case(3, 150), "", CPU, call=shifted)


def test_a_mismatch_of_writer_and_reader_is_an_error_where_shapes_show_it():
    """All pairs of layouts: the reader refuses a cache of another page, D or width of values."""
    kinds = insert_check.layouts()
    for writer in kinds:
        cache = torch.zeros((2, *writer.block_shape), dtype=torch.uint8)
        for reader in kinds:
            fits = (writer.page, writer.row_bytes) == (reader.page, reader.row_bytes)
            if fits:
                reader.check(cache)
            else:
                with pytest.raises(ValueError, match="kv_cache: got shape"):
                    insert_k_cache(torch.zeros(1, 128), cache, torch.tensor([0]), layout=reader)
                with pytest.raises(ValueError, match="kv_cache: got shape"):
                    gather_k_cache(cache, torch.zeros((1, 1)).int(), torch.tensor([0, 1]).int(), 1, layout=reader)


def test_steps_against_their_matrices():
    """RoPE and the rotation by products with the matrices that define them, in float64."""
    x, generator = torch.randn(5, 128), torch.Generator().manual_seed(0)
    sylvester = torch.ones(1, 1, dtype=torch.float64)
    for _ in range(7):
        sylvester = torch.cat((torch.cat((sylvester, sylvester), 1), torch.cat((sylvester, -sylvester), 1)))
    rotated = transformed(x, Steps(hadamard=True))
    assert torch.allclose(rotated.double(), x.double() @ sylvester / 128**0.5, atol=1e-6)
    angle = torch.rand((9, 32), generator=generator) * 6
    table = torch.cat((angle.cos(), angle.sin()), dim=1)
    positions = torch.tensor([0, 3, 8, 3, 1])
    for rope, start in (("first", 0), ("last", 64)):
        for interleaved in (False, True):
            found = transformed(x, Steps(None, None, 0.0, positions, table, rope, interleaved))
            first = torch.arange(32) * 2 if interleaved else torch.arange(32)
            a, b = start + first, start + first + (1 if interleaved else 32)
            turned = torch.complex(x[:, a], x[:, b]) * torch.polar(torch.ones(5, 32), angle[positions])
            expected = x.clone()
            expected[:, a], expected[:, b] = turned.real, turned.imag
            assert torch.allclose(found, expected, atol=1e-5)


def test_calls_without_work():
    cache = torch.zeros(2, 64, 1, 132, dtype=torch.uint8)
    insert_k_cache(torch.zeros(0, 128), cache, torch.zeros(0, dtype=torch.int64))
    empty = cache[:0]
    insert_k_cache(torch.ones(3, 128), empty, torch.zeros(3, dtype=torch.int64))
    table = torch.zeros((0, 4), dtype=torch.int32)
    k, scale = gather_k_cache(cache, table, torch.zeros(1, dtype=torch.int32), 5)
    assert (k.shape, k.dtype, scale.shape) == ((5, 128), FN, (5,))
    q, weights = prepare_q(torch.zeros(0, 8, 128), torch.zeros(0, 8))
    assert (q.shape, weights.shape) == ((0, 8, 128), (0, 8))
    assert int(cache.sum()) == 0


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"k": torch.zeros(3, 64)}, ValueError, r"layout: got D=128|kv_cache: got shape"),
        ({"k": torch.zeros(3, 256)[:, ::2]}, ValueError, r"k: got strides \(256, 2\), expected a contiguous last"),
        ({"k": torch.zeros(3, 128, dtype=torch.int32)}, TypeError, "k: got dtype torch.int32"),
        ({"slot_mapping": torch.zeros(3, dtype=torch.int32)}, TypeError, "slot_mapping: got dtype torch.int32"),
        ({"slot_mapping": torch.zeros(4, dtype=torch.int64)}, ValueError, r"slot_mapping: got shape \[4\]"),
        ({"positions": torch.zeros(3, dtype=torch.int64)}, ValueError, "cos_sin_cache: got None"),
        ({"norm_bias": torch.zeros(128)}, ValueError, "norm_bias: got a tensor without norm_weight"),
        ({"norm_weight": torch.zeros(64)}, ValueError, r"norm_weight: got shape \[64\], expected \[128\]"),
        ({"rope": "middle"}, ValueError, "rope: got 'middle', expected one of first, last"),
        ({"layout": CacheLayout(32)}, ValueError, r"kv_cache: got shape \[2, 64, 1, 132\], expected \[blocks, 32"),
        ({"hadamard": 1}, TypeError, "hadamard: got int, expected a bool"),
        (
            {"positions": torch.zeros(3, dtype=torch.int64), "cos_sin_cache": torch.zeros(9, 48)},
            ValueError,
            r"cos_sin_cache: got shape \[9, 48\], expected \[positions, rope_dim\], a power of two",
        ),
    ],
)
def test_errors_of_insert(change, error, message):
    given = {
        "k": torch.zeros(3, 128), "kv_cache": torch.zeros(2, 64, 1, 132, dtype=torch.uint8),
        "slot_mapping": torch.zeros(3, dtype=torch.int64),
    }  # fmt: skip
    with pytest.raises(error, match=message):
        insert_k_cache(**(given | change))


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"block_tables": torch.zeros(1, 2)}, TypeError, "block_tables: got dtype torch.float32"),
        (
            {"cu_seq_lens": torch.zeros(3, dtype=torch.int32)},
            ValueError,
            r"cu_seq_lens: got shape \[3\], expected \[2\]",
        ),
        ({"keys": -1}, ValueError, "keys: got -1"),
        ({"compress_ratio": 0}, ValueError, "compress_ratio: got 0"),
        ({"dtype": FNUZ}, TypeError, "dtype: got torch.float8_e4m3fnuz, expected torch.float8_e4m3fn of a cache"),
        ({"out": (torch.zeros(5, 128).to(FN), torch.zeros(4))}, ValueError, r"out\[1\]: got shape \[4\]"),
        ({"kv_cache": torch.zeros(2, 132, dtype=torch.uint8)}, ValueError, r"kv_cache: got shape \[2, 132\]"),
    ],
)
def test_errors_of_gather(change, error, message):
    given = {
        "kv_cache": torch.zeros(2, 64, 1, 132, dtype=torch.uint8), "block_tables": torch.zeros(1, 2).int(),
        "cu_seq_lens": torch.zeros(2).int(), "keys": 5,
    }  # fmt: skip
    with pytest.raises(error, match=message):
        gather_k_cache(**(given | change))


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"weights": torch.zeros(3, 7)}, ValueError, r"weights: got shape \[3, 7\], expected \[3, 8\]"),
        ({"dtype": torch.bfloat16}, TypeError, "dtype: got torch.bfloat16"),
        ({"weight_scale": "1"}, TypeError, "weight_scale: got str"),
        ({"q": torch.zeros(3, 8, 64), "fp4": True}, ValueError, "fp4: got True with D=64"),
        ({"out": (torch.zeros(3, 8, 128),)}, TypeError, "out: got tuple, expected the pair"),
    ],
)
def test_errors_of_prepare_q(change, error, message):
    with pytest.raises(error, match=message):
        prepare_q(**({"q": torch.zeros(3, 8, 128), "weights": torch.zeros(3, 8)} | change))


@pytest.mark.slow
def test_compiled_and_fake():
    """The operators: the cache is known to be written, and results have their shapes on fake tensors."""
    layout = CacheLayout(16, 128, "preshuffled", "ue8m0")
    lengths = torch.tensor([0, 23], dtype=torch.int32)
    given = (
        torch.randn(20, 128), torch.arange(20) + 3, torch.tensor([[0, 1]], dtype=torch.int32), lengths,
        torch.randn(3, 8, 128), torch.randn(3, 8),
    )  # fmt: skip

    def step(cache, k, slots, table, lengths, q, weights):
        insert_k_cache(k, cache, slots, layout=layout, hadamard=True)
        return *gather_k_cache(cache, table, lengths, 23, layout=layout), *prepare_q(q, weights, power_of_two=True)

    caches = [torch.zeros((3, *layout.block_shape), dtype=torch.uint8) for _ in range(2)]
    eager = step(caches[0], *given)
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")(caches[1], *given)
    assert torch.equal(*caches)
    assert int(caches[0].sum()) > 0
    for a, b in zip(eager, compiled, strict=True):
        assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))
    with FakeTensorMode() as mode:
        fake = step(*(mode.from_tensor(tensor) for tensor in (caches[0], *given)))
    assert [(t.shape, t.dtype) for t in fake] == [(t.shape, t.dtype) for t in eager]


# Adapters


def test_signatures():
    def names(function):
        return list(inspect.signature(function).parameters)

    assert names(adapters.indexer_k_quant_and_cache) == [
        "k", "kv_cache", "slot_mapping", "quant_block_size", "scale_fmt", "preshuffle"
    ]  # fmt: skip
    assert names(adapters.cp_gather_indexer_k_quant_cache) == [
        "kv_cache", "dst_k", "dst_scale", "block_table", "cu_seq_lens", "preshuffle"
    ]  # fmt: skip


@pytest.mark.parametrize("preshuffle", [False, True])
@pytest.mark.parametrize("scale_fmt", ["ue8m0", ""])
@pytest.mark.parametrize("fnuz", [False, True])
def test_adapters(preshuffle, scale_fmt, fnuz, monkeypatch):
    if fnuz:  # as on gfx942
        monkeypatch.setattr(adapters, "arch_of", lambda device: arch.Arch.parse("gfx942"))
    dtype = FNUZ if fnuz else FN
    k, slots = torch.randn(50, 128).bfloat16(), torch.randperm(64)[:50]
    slots[3] = -1
    cache = torch.zeros(4, 16, 132, dtype=torch.uint8)
    adapters.indexer_k_quant_and_cache(k, cache.view(dtype), slots, 128, scale_fmt, preshuffle)
    scales = "power of two" if scale_fmt else "float32"
    layout = CacheLayout(16, 128, "preshuffled" if preshuffle else "flat", scales, dtype)
    right = torch.zeros(4, 16, 1, 132, dtype=torch.uint8)
    reference_insert(k, right, slots, layout)
    assert torch.equal(cache.view(-1), right.view(-1))

    table, lengths = torch.tensor([[2, 0], [1, 3]], dtype=torch.int32), torch.tensor([0, 32, 50], dtype=torch.int32)
    dst_k, dst_scale = torch.zeros(60, 128, dtype=torch.uint8), torch.zeros(60, 4, dtype=torch.uint8)
    adapters.cp_gather_indexer_k_quant_cache(cache, dst_k, dst_scale, table, lengths, preshuffle)
    expected, scale = layout.unpack(right)
    rows = torch.cat(
        (expected[[2, 0]].view(torch.uint8).view(32, 128), expected[[1, 3]].view(torch.uint8).view(32, 128))
    )
    assert torch.equal(dst_k[:50], rows[:50])
    assert torch.equal(dst_scale[:32].view(torch.float32)[:, 0], scale[[2, 0]].view(-1))


def test_adapters_gather_fp4_bytes():
    layout = CacheLayout.fp4(64)
    cache = torch.randint(0, 256, (3, 64, 68), dtype=torch.uint8)
    dst_k, dst_scale = torch.zeros(70, 64, dtype=torch.int8), torch.zeros(70, 4, dtype=torch.uint8)
    table, lengths = torch.tensor([[2, 1]], dtype=torch.int32), torch.tensor([0, 70], dtype=torch.int32)
    adapters.cp_gather_indexer_k_quant_cache(cache, dst_k, dst_scale, table, lengths)
    values, scales = layout.unpack(cache[[2, 1]])
    assert torch.equal(dst_k.view(torch.uint8), values.view(-1, 64)[:70])
    assert torch.equal(dst_scale, scales.view(-1, 4)[:70])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"quant_block_size": 64}, "quant_block_size: got 64, expected 128"),
        ({"scale_fmt": "fp16"}, "scale_fmt: got 'fp16'"),
    ],
)
def test_errors_of_adapters(change, message):
    given = {
        "k": torch.zeros(2, 128), "kv_cache": torch.zeros(2, 16, 132, dtype=torch.uint8),
        "slot_mapping": torch.zeros(2, dtype=torch.int64), "quant_block_size": 128, "scale_fmt": "ue8m0",
    }  # fmt: skip
    with pytest.raises(ValueError, match=message):
        adapters.indexer_k_quant_and_cache(**(given | change))


def test_self_check_runs_on_every_backend():
    """The small problem of the self-check has no fault of its own."""
    arch_cpu = arch.Arch.parse("cpu")
    for problem in (InsertProblem(9, 128), prepare_check.cases(False)[0].problem, gather_check.cases(False)[0].problem):
        small = problem.adversarial(arch_cpu)
        calls = [small.example(CPU) for _ in range(2)]
        kernel = registry.kernel(BACKEND, problem.operation)
        for call in calls:
            kernel.launch(small, arch_cpu, kernel.config(small, arch_cpu))(call)
        assert small.compare(*calls) is None
        assert small.compare(calls[0], small.example(CPU)) is not None


def test_rows_behind_the_last_key_do_not_count():
    """They hold anything, and each backend leaves something else there."""
    small = gather_check.cases(False)[0].problem.adversarial(arch.Arch.parse("cpu"))
    one, other = small.example(CPU), small.example(CPU)
    keys = int(one.cu_seq_lens[-1])
    assert 0 < keys < small.keys
    for result in one.results:
        result[keys:].view(torch.uint8).fill_(3)
    assert small.compare(one, other) is None
    one.results[0].view(torch.uint8)[keys - 1, 5] ^= 1
    assert "in key" in small.compare(one, other)


def test_hopper_decode_reads_fp4_pages():
    kernel = registry.kernel("cuda-sm90", "fp8_paged_mqa_logits")
    problem = PagedMqaLogitsProblem(2, 1, 4096, 64, 128, CacheLayout(), 64)
    sm90 = arch.Arch.parse("sm90")
    assert kernel.supports(problem, sm90) is None
    assert kernel.supports(problem._replace(layout=CacheLayout.fp4()), sm90) is None
    # Pages that are not aligned are Triton's.
    assert "16-byte" in str(kernel.supports(problem._replace(layout=CacheLayout.fp4(), aligned=False), sm90))
