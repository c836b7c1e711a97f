"""The SGLang plugin against SGLang itself, on a CPU. Skipped where SGLang 0.5.23 is not installed.

``make test-engines`` sets it up from the Python files of its wheel.

Nothing of SGLang is stood in for; DeepGEMM, which it calls and does not have, is.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import inspect
from types import SimpleNamespace

import pytest
import torch

import standins
from lightning_indexer import top_k_per_row
from lightning_indexer.integrations import sglang as plugin
from lightning_indexer.integrations.notes import Notes

if importlib.util.find_spec("sglang") is None:
    pytest.skip("SGLang is not installed", allow_module_level=True)
if not importlib.metadata.version("sglang").startswith("0.5.23"):
    pytest.skip("another SGLang is installed", allow_module_level=True)

ROWS, WIDTH, K, PAGE = 6, 200, 32, 64
BACKEND = "sglang.srt.layers.attention.dsa.dsa_topk_backend"


@pytest.fixture(scope="module")
def module():
    return importlib.import_module(BACKEND)


@pytest.fixture
def hooked(module, monkeypatch):
    """Registered by the plugin, and put in place by SGLang's own registry."""
    registry = importlib.import_module(plugin._REGISTRY)
    monkeypatch.setattr(plugin, "_NOTES", Notes("SGLang", plugin._LOGGER))
    original = module.DSATopKBackend.topk_transform
    plugin._hook_selection()
    registry.HookRegistry.apply_hooks()
    assert module.DSATopKBackend.topk_transform is not original
    yield module
    module.DSATopKBackend.topk_transform = original
    registry.HookRegistry._hooks.clear()
    registry.HookRegistry._patched.clear()


def sgl_kernel(module):
    return next(backend for backend in module.DSATopKBackend if backend.is_sgl_kernel())


def test_the_hook_has_the_parameters_of_the_method(module):
    theirs = list(inspect.signature(module.DSATopKBackend.topk_transform).parameters)
    ours = list(inspect.signature(plugin.topk_transform).parameters)
    assert ours[2:] == theirs[1:]


def test_decode_selects_physical_slots(hooked):
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(ROWS, WIDTH, generator=generator)
    lengths = torch.tensor([200, 100, 31, 0, 64, 65], dtype=torch.int32)
    table = torch.randperm(ROWS * 4, generator=generator).view(ROWS, 4).int()
    metadata = SimpleNamespace(real_page_table=table, page_size=PAGE, token_to_batch_idx=None)
    method = next(m for m in hooked.TopkTransformMethod if m.name == "PAGED")
    found = sgl_kernel(hooked).topk_transform(logits, lengths, K, method, metadata)
    positions = top_k_per_row(logits, K, None, lengths).long()
    slots = table.gather(1, (positions.clamp(min=0) // PAGE)).long() * PAGE + positions % PAGE
    assert torch.equal(found.sort(1).values, torch.where(positions < 0, -1, slots).int().sort(1).values)


def test_ragged_prefill_selects_offset_positions(hooked):
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(ROWS, WIDTH, generator=generator)
    starts = torch.tensor([0, 0, 50, 50, 50, 90], dtype=torch.int32)
    lengths = torch.tensor([1, 40, 10, 60, 0, 110], dtype=torch.int32)
    offsets = torch.tensor([0, 0, 50, 50, 50, 90], dtype=torch.int32)
    method = next(m for m in hooked.TopkTransformMethod if m.name == "RAGGED")
    found = sgl_kernel(hooked).topk_transform(
        logits, lengths, K, method, SimpleNamespace(), topk_indices_offset=offsets, row_starts=starts
    )
    expected = top_k_per_row(logits, K, starts, starts + lengths, index_base="offset", offsets=offsets)
    assert torch.equal(found.sort(1).values, expected.sort(1).values)


def test_a_configured_backend_is_left_alone(hooked, caplog):
    """PyTorch's, which runs here."""
    backend = next(backend for backend in hooked.DSATopKBackend if backend.is_torch())
    logits, lengths = torch.randn(ROWS, WIDTH), torch.full((ROWS,), WIDTH, dtype=torch.int32)
    method = next(m for m in hooked.TopkTransformMethod if m.name == "RAGGED")
    metadata = SimpleNamespace(page_table_1=logits, token_to_batch_idx=None)
    with pytest.raises(RuntimeError, match="for SGLANG_DSA_FUSE_TOPK"):  # its own complaint
        backend.topk_transform(logits, lengths, K, method, metadata)
    assert "names another selection" in caplog.text
    found = backend.topk_transform(logits, lengths, K, method, SimpleNamespace(), force_unfused_topk=True)
    assert torch.equal(found.sort(1).values.int(), top_k_per_row(logits, K).sort(1).values)


def test_sglang_finds_the_replaced_functions(monkeypatch):
    """Through its own resolvers, which look DeepGEMM's names up at their first call and keep them."""
    utils = importlib.import_module("sglang.srt.layers.attention.dsa.utils")

    def fp8_paged_mqa_logits(q, kv_cache, weights, context_lens, block_table, schedule_meta, max_context_len):
        raise standins.OriginalError

    deep_gemm = standins.module(
        monkeypatch, "deep_gemm", fp8_mqa_logits=standins.deep_gemm_function(),
        fp8_paged_mqa_logits=fp8_paged_mqa_logits,
    )  # fmt: skip
    monkeypatch.setattr(utils, "_use_torch_mqa_logits", lambda: False)
    monkeypatch.setattr(plugin._INTEGRATIONS["cuda"], "_sites", [])
    assert plugin.install("cuda") == ("deep_gemm.fp8_mqa_logits", "deep_gemm.fp8_paged_mqa_logits")
    for resolve, name in (
        (utils.resolve_fp8_mqa_logits_fn, "fp8_mqa_logits"),
        (utils.resolve_fp8_paged_mqa_logits_fn, "fp8_paged_mqa_logits"),
    ):
        resolve.cache_clear()
        assert resolve() is getattr(deep_gemm, name)
        resolve.cache_clear()
    plugin.uninstall("cuda")
