"""The vLLM plugin's selection, decode and planner on stand-ins; ``tests/engines`` has the real modules."""

from __future__ import annotations

import logging
import sys

import pytest
import torch

import standins
from helpers import CPU, assert_matches, expected_for, same_bits
from lightning_indexer import fp8_mqa_logits, fp8_paged_mqa_logits, quantize_k, top_k_per_row
from lightning_indexer.check.cases import make_inputs, make_windows
from lightning_indexer.integrations import vllm, vllm_seams, window_selection
from lightning_indexer.integrations.notes import Notes
from lightning_indexer.integrations.patching import IntegrationError, text_of
from lightning_indexer.problems.mqa_logits import row_stride
from standins import OriginalError

ROWS, KEYS, HEADS, HEAD_DIM, K = 12, 77, 8, 32, 20
LOGGER = "vllm.plugins.lightning_indexer"


@pytest.fixture(autouse=True)
def _clean(monkeypatch):
    for name in [name for name in sys.modules if name.split(".")[0] == "vllm"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delenv("VLLM_ROCM_USE_AITER", raising=False)
    monkeypatch.setattr(vllm, "_NOTES", Notes("vLLM", vllm._LOGGER))
    vllm._INTEGRATION._sites = []
    yield
    vllm._INTEGRATION._sites = []


@pytest.fixture
def engine(monkeypatch):
    """vLLM on CUDA, with a layer that scores and selects as its own does, and is known."""
    found = standins.install_vllm_seams(monkeypatch)
    monkeypatch.setattr(vllm_seams, "LAYER_TEXT", text_of(found.layer.sparse_attn_indexer))
    return found


@pytest.fixture(scope="module")
def inputs():
    return make_inputs(ROWS, KEYS, HEADS, HEAD_DIM, CPU)


@pytest.fixture(scope="module")
def windows():
    return make_windows("multi_req", ROWS, KEYS, CPU)


def expected_selection(inputs, windows) -> torch.Tensor:
    logits = fp8_mqa_logits(inputs.q_fp8, (inputs.k_fp8, inputs.kv_scale), inputs.weights, *windows)
    return top_k_per_row(logits, K, *windows).sort(dim=1).values


def prefill(engine, inputs, windows, **options) -> torch.Tensor:
    indices = torch.full((ROWS, K), -7, dtype=torch.int32)
    operands = ((inputs.q_fp8, None), (inputs.k_fp8, inputs.kv_scale), inputs.weights, *windows, KEYS)
    engine.layer.sparse_attn_indexer(operands, indices, **options)
    return indices.sort(dim=1).values


def messages(caplog) -> list[str]:
    return [record.getMessage() for record in caplog.records if "first call" in record.getMessage()]


# Prefill


def test_prefill_is_fused(engine, inputs, windows, monkeypatch, caplog):
    """No [M, N] logits are made: one call for scores and selection, in a workspace that here holds two rows."""
    calls = []
    real = window_selection.fp8_mqa_topk

    def watched(*args, **options):
        calls.append((tuple(args[0].shape), options["max_seqlen_k"], options["workspace"]))
        return real(*args, **options)

    monkeypatch.setattr(window_selection, "fp8_mqa_topk", watched)
    workspace = 2 * 4 * row_stride(KEYS, torch.float32)
    monkeypatch.setattr(vllm_seams, "WORKSPACE_BYTES", workspace)
    with caplog.at_level(logging.INFO, LOGGER):
        vllm.install("cuda")
        assert torch.equal(prefill(engine, inputs, windows), expected_selection(inputs, windows))
    assert calls == [(tuple(inputs.q_fp8.shape), KEYS, workspace)]
    assert [line.split("first call")[1][:20] for line in messages(caplog)] == [
        ": torch-blocked, M=12"[:20], " of prefill-topk: sc"[:20]
    ]  # fmt: skip


def test_scores_keep_to_the_budget_of_vllms_profile(engine, inputs, windows, monkeypatch):
    """Which stands in an environment variable, and may be small."""
    standins.module(monkeypatch, "vllm.envs", VLLM_SPARSE_INDEXER_MAX_LOGITS_MB=64)
    vllm.install("cuda")
    operands = ((inputs.q_fp8, None), (inputs.k_fp8, inputs.kv_scale), inputs.weights, *windows, KEYS)
    assert engine.layer.fp8_fp4_mqa_logits(*operands).state.workspace_bytes == 64 * 2**20
    monkeypatch.setattr(sys.modules["vllm.envs"], "VLLM_SPARSE_INDEXER_MAX_LOGITS_MB", 1)
    vllm.uninstall()
    vllm.install("cuda")
    assert engine.layer.fp8_fp4_mqa_logits(*operands).state.workspace_bytes == 16 * 2**20


@pytest.mark.parametrize("reader", ["candidates", "mask", "dcp"])
def test_who_reads_scores_is_given_them(engine, inputs, windows, reader):
    """And the selection is of what they hold then."""
    vllm.install("cuda")
    indices = prefill(engine, inputs, windows, reader=reader)
    expected = expected_for(inputs, *windows, KEYS)
    (read,) = engine.read
    assert_matches(read["before"], expected, clean=False)
    if reader == "mask":  # the first three columns are masked in place
        logits = expected.clone()
        logits[:, :3] = float("-inf")
        length = (windows[1] - windows[0]).clamp(min=0)
        assert torch.equal(indices, top_k_per_row(logits, K, None, length).sort(dim=1).values)
    else:
        assert torch.equal(indices, expected_selection(inputs, windows))


def test_a_layer_that_changed_is_not_fused(engine, inputs, windows, monkeypatch, caplog):
    monkeypatch.setattr(vllm_seams, "LAYER_TEXT", "another")
    vllm.install("cuda")
    assert "prefill scores and selects in two calls" in caplog.text
    arguments = ((inputs.q_fp8, None), (inputs.k_fp8, inputs.kv_scale), inputs.weights, *windows, KEYS)
    assert isinstance(engine.layer.fp8_fp4_mqa_logits(*arguments), torch.Tensor)
    assert torch.equal(prefill(engine, inputs, windows), expected_selection(inputs, windows))


def test_other_layers_are_given_logits(engine, inputs, windows, monkeypatch):
    """GLM's layer hands logits to a compiled operator."""
    glm = standins.module(
        monkeypatch,
        "vllm.models.glm5next.nvidia.sparse_indexer",
        fp8_fp4_mqa_logits=engine.deep_gemm.fp8_fp4_mqa_logits,
    )
    vllm.install("cuda")
    arguments = ((inputs.q_fp8, None), (inputs.k_fp8, inputs.kv_scale), inputs.weights, *windows, KEYS)
    for module in (glm, engine.deep_gemm):
        assert_matches(module.fp8_fp4_mqa_logits(*arguments), expected_for(inputs, *windows, KEYS), clean=False)
    assert not isinstance(engine.layer.fp8_fp4_mqa_logits(*arguments), torch.Tensor)


@pytest.mark.parametrize(("seams", "fused"), [(("prefill",), False), (("prefill-topk",), False), (vllm.SEAMS, True)])
def test_seams_by_name(engine, inputs, windows, monkeypatch, seams, fused):
    monkeypatch.setattr(vllm, "_platform", lambda: "cuda")
    monkeypatch.setenv("LIGHTNING_INDEXER_VLLM", ", ".join(seams))
    vllm.register()
    arguments = ((inputs.q_fp8, None), (inputs.k_fp8, inputs.kv_scale), inputs.weights, *windows, KEYS)
    names = vllm.replaced()
    replaced = {name.rsplit(".", 1)[1] for name in names}
    assert ("top_k_per_row_prefill" in replaced) is ("prefill-topk" in seams)
    if "prefill" in seams:
        assert isinstance(engine.layer.fp8_fp4_mqa_logits(*arguments), torch.Tensor) is not fused
    else:
        with pytest.raises(OriginalError):
            engine.layer.fp8_fp4_mqa_logits(*arguments)
    assert set(vllm.uninstall()) >= set(names)
    with pytest.raises(OriginalError):
        engine.layer.fp8_fp4_mqa_logits(*arguments)


def test_unknown_seams(engine, monkeypatch):
    with pytest.raises(ValueError, match="seams: got decoding, expected some of cache, prefill, prefill-topk, decode"):
        vllm.install("cuda", ("prefill", "decoding"))
    with pytest.raises(ValueError, match="seams: got none"):
        vllm.install("cuda", ())
    monkeypatch.setenv("LIGHTNING_INDEXER_VLLM", "prefill,decoding")
    with pytest.raises(ValueError, match="LIGHTNING_INDEXER_VLLM: got 'prefill,decoding', expected 0, 1 or some of"):
        vllm.register()


def test_selection_alone_and_what_it_leaves(engine):
    vllm.install("cuda", ("prefill-topk",))
    logits = torch.randn(6, 40)
    starts, ends = torch.full((6,), 3, dtype=torch.int32), torch.arange(5, 35, 5, dtype=torch.int32)
    indices = torch.full((6, K), -7, dtype=torch.int32)
    arguments = (logits, starts, ends, indices, 6, 40, 1, K)
    engine.custom_ops.top_k_per_row_prefill(*arguments)
    assert torch.equal(indices.sort(1).values, top_k_per_row(logits, K, starts, ends).sort(1).values)
    for other in ((logits.double(), *arguments[1:]), (*arguments[:-1], 5000)):
        with pytest.raises(OriginalError):
            engine.custom_ops.top_k_per_row_prefill(*other)


# Decode


def paged(next_n=2, batch=3, page=64):
    blocks = 5
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(blocks, page, HEAD_DIM, generator=generator).to(torch.float8_e4m3fn).view(torch.uint8)
    scales = (torch.rand(blocks, page, generator=generator) + 0.1).view(torch.uint8)
    cache = torch.cat((values.flatten(1), scales.flatten(1)), dim=1).view(blocks, page, 1, HEAD_DIM + 4)
    q = torch.randn(batch, next_n, HEADS, HEAD_DIM, generator=generator).to(torch.float8_e4m3fn)
    weights = torch.randn(batch * next_n, HEADS, generator=generator)
    tables = torch.tensor([[3, 1], [0, -1], [4, 2]], dtype=torch.int32)[:batch]
    return q, cache, weights, tables


@pytest.mark.parametrize("form", ["per row", "per sequence", "column"])
def test_decode(engine, form, caplog):
    q, cache, weights, tables = paged()
    last = torch.tensor([100, 20, 0], dtype=torch.int32)
    rows = (last[:, None] + torch.tensor([-1, 0])).clamp(min=0).int()
    lengths = {"per row": rows, "per sequence": last, "column": last[:, None]}[form]
    expected = fp8_paged_mqa_logits(q, cache, weights, rows, tables, 128, clean_logits=False)
    inside = torch.arange(128) < rows.reshape(-1, 1)
    with caplog.at_level(logging.INFO, LOGGER):
        vllm.install("cuda", ("decode", "decode-topk"))
        for module in (engine.layer, engine.deep_gemm):
            logits = module.fp8_fp4_paged_mqa_logits(
                (q, None), cache, weights, lengths, tables, torch.zeros(133, 2), max_model_len=128, indices=None
            )
            assert torch.equal(logits[inside], expected[inside])
        # A token a row, each with its table, and which of them are of one sequence.
        flat = engine.layer.fp8_fp4_paged_mqa_logits(
            (q.view(6, 1, *q.shape[2:]), None), cache, weights, rows.view(6, 1), tables.repeat_interleave(2, 0), None,
            128, torch.arange(6, dtype=torch.int32) // 2,
        )  # fmt: skip
        assert torch.equal(flat[inside], expected[inside])
        out = torch.full((6, K), -7, dtype=torch.int32)
        engine.layer.get_indexer_topk("auto")(logits, lengths, 2, out, K, 128)
    assert torch.equal(out.sort(1).values, top_k_per_row(expected, K, None, rows.reshape(-1)).sort(1).values)
    assert [line.split("first call of ")[1].split(":")[0] for line in messages(caplog)] == ["decode", "decode-topk"]


def test_decode_that_goes_to_vllm(engine, caplog):
    q, cache, weights, tables = paged()
    lengths = torch.full((3, 2), 5, dtype=torch.int32)
    vllm.install("cuda")
    for call in (
        ((q, torch.ones(3, 2, 8, dtype=torch.int32)), cache, weights),
        ((q, None), cache[..., :-2], weights),
        ((q, None), cache, weights.bfloat16()),
    ):
        with pytest.raises(OriginalError):
            engine.layer.fp8_fp4_paged_mqa_logits(*call, lengths, tables, None, 64)
    # Tokens whose table is that of their sequences.
    arguments = (q.view(6, 1, 8, 32), None), cache, weights, lengths.view(6, 1), tables, None, 64
    with pytest.raises(OriginalError):
        engine.layer.fp8_fp4_paged_mqa_logits(*arguments, torch.tensor([0, 0, 1, 1, 2, 2], dtype=torch.int32))
    with pytest.raises(OriginalError):
        engine.layer.get_indexer_topk("persistent")(torch.zeros(6, 64), lengths, 2, None, K, 64)
    with pytest.raises(OriginalError):
        engine.layer.get_indexer_topk("auto")(torch.zeros(6, 64), lengths, 2, None, 5000, 64)
    assert "a block table of 3 rows for 6 tokens" in caplog.text
    assert "its own selection for decode, persistent" in caplog.text
    assert "the cache is torch.uint8 of 34 a key, with D=32" in caplog.text


# The cache


def test_insertion_and_gather(engine, caplog):
    """What is gathered is what was inserted, quantised; and what the plugin leaves to vLLM."""
    k = torch.randn(70, HEAD_DIM).bfloat16()
    pages, keys = torch.zeros(4, 64, HEAD_DIM + 4, dtype=torch.uint8), torch.zeros(70, HEAD_DIM).to(torch.float8_e4m3fn)
    scales, table = torch.zeros(70, 4, dtype=torch.uint8), torch.tensor([[2, 0]], dtype=torch.int32)
    slots = torch.cat((torch.arange(128, 192), torch.arange(6)))
    with caplog.at_level(logging.INFO, LOGGER):
        vllm.install("cuda", ("cache",))
        engine.custom_ops.indexer_k_quant_and_cache(k, pages, slots, HEAD_DIM, "fp32")
        lengths = torch.tensor([0, 70], dtype=torch.int32)
        engine.custom_ops.cp_gather_indexer_k_quant_cache(pages, keys, scales, table, lengths)
    expected, scale = quantize_k(k)
    assert torch.equal(keys.view(torch.uint8), expected.view(torch.uint8))
    assert torch.equal(scales.view(torch.float32)[:, 0], scale)
    assert [line.split("first call of ")[1].split(":")[0] for line in messages(caplog)] == [
        "cache, insertion", "cache, gather"
    ]  # fmt: skip
    with pytest.raises(OriginalError):
        engine.custom_ops.indexer_k_quant_and_cache(k, pages, slots, HEAD_DIM, "mxfp8")
    with pytest.raises(OriginalError):
        engine.custom_ops.cp_gather_indexer_k_quant_cache(pages, keys.view(torch.uint8), scales, table, lengths)


# The planner


def split(builder, budget=4 * 100):
    lengths = torch.tensor([50, 30], dtype=torch.int32)
    return builder._split_indexer_prefill_chunks(lengths, lengths, 1000, budget, request_offset=1)


def test_the_budget_goes_once_chunks_make_no_logits(engine, inputs, windows, caplog):
    builder = engine.builder()
    with caplog.at_level(logging.INFO, LOGGER):
        vllm.install("cuda")
        assert split(builder) == ("budget", 400, 1)  # nothing has been fused yet
        prefill(engine, inputs, windows)
        assert split(builder) == ("budget", 2**62, 1)
    assert "first call of planner: chunks of 1000 keys" in caplog.text
    assert type(builder)._split_indexer_prefill_chunks(None, None, 0, 7) == ("budget", 7, 0)
    prefill(engine, inputs, windows, reader="candidates")  # scores are read: it comes back
    assert split(builder) == ("budget", 400, 1)


@pytest.mark.parametrize("why", ["dcp", "pcp", "another builder", "not fused"])
def test_the_budget_stays(engine, inputs, windows, why, monkeypatch):
    if why == "not fused":
        monkeypatch.setattr(vllm_seams, "LAYER_TEXT", "another")
    builder = engine.builder(dcp=2 if why == "dcp" else 1, pcp=why == "pcp", other=why == "another builder")
    vllm.install("cuda")
    prefill(engine, inputs, windows)
    assert split(builder) == ("budget", 400, 1)
    vllm.uninstall()
    assert split(engine.builder()) == ("budget", 400, 1)


# ROCm


def test_rocm(monkeypatch, caplog):
    engine = standins.install_vllm_seams(monkeypatch, "rocm")
    q, cache, weights, tables = paged(next_n=1)
    lengths = torch.tensor([100, 20, 0], dtype=torch.int32)
    with caplog.at_level(logging.INFO, LOGGER):
        names = vllm.install("rocm")
        assert [name.rsplit(".", 1)[1] for name in names] == [
            "rocm_fp8_mqa_logits", "_launch_aiter_top_k_per_row_prefill", "rocm_fp8_paged_mqa_logits"
        ]  # fmt: skip
        flat = fp8_paged_mqa_logits(q, cache, weights, lengths, tables, 128)
        found = engine.rocm.rocm_fp8_paged_mqa_logits(q, cache, weights, lengths, tables, None, 128, compress_ratio=4)
        assert same_bits(found, flat)
        shuffled = engine.rocm.rocm_fp8_paged_mqa_logits(q, cache, weights, lengths, tables, None, 128)
        assert not same_bits(shuffled, flat)  # the same bytes, read in the order of this layout
        indices = torch.full((3, K), -7, dtype=torch.int32)
        starts, ends = torch.tensor([0, 5, 7], dtype=torch.int32), torch.tensor([90, 20, 7], dtype=torch.int32)
        engine.rocm._launch_aiter_top_k_per_row_prefill(flat, starts, ends, indices, K)
    assert torch.equal(indices.sort(1).values, top_k_per_row(flat, K, starts, ends).sort(1).values)
    assert [line.split("first call of ")[1].split(":")[0] for line in messages(caplog)] == ["decode", "prefill-topk"]
    with pytest.raises(OriginalError):
        engine.rocm._launch_aiter_top_k_per_row_prefill(flat, starts, ends, indices, 5000)
    monkeypatch.setenv("VLLM_ROCM_USE_AITER", "0")
    with pytest.raises(OriginalError):
        engine.rocm.rocm_fp8_paged_mqa_logits(q, cache, weights, lengths, tables, None, 128)


def test_a_class_without_the_seam(engine, monkeypatch):
    monkeypatch.delattr(engine.planner, "DeepseekV32IndexerMetadataBuilder")
    with pytest.raises(IntegrationError, match=r"indexer\.DeepseekV32IndexerMetadataBuilder has no function _split"):
        vllm.install("cuda")
    assert vllm.replaced() == ()
