"""The vLLM plugin against vLLM itself, on a CPU. Skipped where vLLM 0.33 is not installed.

The Python files of the wheel are enough: no compiled extension and no GPU is touched. ``make test-engines`` sets that
up. Nothing of vLLM is stood in for; only what it finds out about the machine, its platform, is given.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import inspect
import sys
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
import torch

import lightning_indexer
import standins
from helpers import CPU, assert_matches, calc_diff, expected_for
from lightning_indexer.check.cases import make_inputs, make_windows
from lightning_indexer.integrations import vllm as plugin
from lightning_indexer.integrations import vllm_seams
from lightning_indexer.integrations.patching import IntegrationError, text_of

if importlib.util.find_spec("vllm") is None:
    pytest.skip("vLLM is not installed", allow_module_level=True)

import vllm

if not vllm.__version__.startswith("0.33."):
    pytest.skip(f"vLLM {vllm.__version__} is installed, these are the seams of 0.33", allow_module_level=True)

ROWS, KEYS, HEADS, HEAD_DIM = 24, 200, 32, 128
GLM_LAYER = "vllm.models.glm5next.nvidia.sparse_indexer"


@pytest.fixture(scope="module")
def layer():
    return importlib.import_module(standins.VLLM_LAYER)


@pytest.fixture(scope="module")
def rocm():
    return importlib.import_module(standins.VLLM_ROCM)


@pytest.fixture(autouse=True)
def _uninstalled(monkeypatch):
    monkeypatch.delenv("VLLM_ROCM_USE_AITER", raising=False)
    yield
    if plugin.replaced():
        plugin.uninstall()


@pytest.fixture(scope="module")
def inputs():
    return make_inputs(ROWS, KEYS, HEADS, HEAD_DIM, CPU)


@pytest.fixture(scope="module")
def windows():
    return make_windows("multi_req", ROWS, KEYS, CPU)


def test_the_seams_have_the_recorded_signatures(layer, rocm):
    """The stand-ins of the other tests say what the wheel says."""
    for real, standin in (
        (layer.fp8_fp4_mqa_logits, standins.vllm_cuda_function()),
        (rocm.rocm_fp8_mqa_logits, standins.vllm_rocm_function()),
    ):
        assert list(inspect.signature(real).parameters) == list(inspect.signature(standin).parameters)
    assert layer.fp8_fp4_mqa_logits is importlib.import_module(standins.VLLM_DEEP_GEMM).fp8_fp4_mqa_logits


def test_the_layers_look_the_names_up_at_each_call(layer, rocm):
    """Patching a module's name reaches the custom operators, which are functions of these modules."""
    assert "fp8_fp4_mqa_logits" in inspect.unwrap(layer.sparse_attn_indexer).__code__.co_names
    callers = [
        name
        for name, value in vars(rocm).items()
        if inspect.isfunction(value) and "rocm_fp8_mqa_logits" in inspect.unwrap(value).__code__.co_names
    ]
    assert callers


def test_rocm(rocm, inputs, windows):
    original = rocm.rocm_fp8_mqa_logits
    # As the caller does: scales from a byte workspace, [N, 1].
    workspace = torch.zeros(KEYS + 8, 4, dtype=torch.uint8)
    workspace[:KEYS].view(torch.float32)[:, 0] = inputs.kv_scale
    arguments = (inputs.q_fp8, (inputs.k_fp8, workspace[:KEYS].view(torch.float32)), inputs.weights, *windows)
    assert plugin.install("rocm", ("prefill",)) == (f"{standins.VLLM_ROCM}.rocm_fp8_mqa_logits",)
    assert rocm.rocm_fp8_mqa_logits is not original
    expected = expected_for(inputs, *windows)
    with torch.inference_mode():
        result = rocm.rocm_fp8_mqa_logits(*arguments)
        theirs = rocm.fp8_mqa_logits_torch(*arguments)
    assert_matches(result, expected, clean=False)
    # vLLM's own fallback rounds to bfloat16 on the way.
    assert calc_diff(result, theirs, expected.isfinite()) < 1e-4
    plugin.uninstall()
    assert rocm.rocm_fp8_mqa_logits is original


def test_rocm_without_aiter(rocm, inputs, windows, monkeypatch):
    plugin.install("rocm")
    monkeypatch.setenv("VLLM_ROCM_USE_AITER", "0")
    monkeypatch.setenv("LIGHTNING_INDEXER_ARCH", "gfx942")  # where a call without a name would take a kernel
    arguments = (inputs.q_fp8, (inputs.k_fp8, inputs.kv_scale[:, None]), inputs.weights, *windows)
    assert_matches(rocm.rocm_fp8_mqa_logits(*arguments), expected_for(inputs, *windows), clean=False)


@pytest.mark.parametrize("width", [50, KEYS])
def test_cuda(layer, inputs, windows, width):
    original = layer.fp8_fp4_mqa_logits
    names = plugin.install("cuda", ("prefill",))
    assert {f"{standins.VLLM_LAYER}.fp8_fp4_mqa_logits", f"{standins.VLLM_DEEP_GEMM}.fp8_fp4_mqa_logits"} <= set(names)
    ks, ke = windows
    # As the caller does it, through the names of that module.
    q_scale, weights = layer.mqa_logits_mx_inputs(inputs.q_fp8, None, inputs.weights)
    with torch.inference_mode():
        result = layer.as_fp32_logits(
            layer.fp8_fp4_mqa_logits((inputs.q_fp8, q_scale), (inputs.k_fp8, inputs.kv_scale), weights, ks, ke, width),
            ke - ks,
        )
    assert result.shape == (ROWS, width)
    assert_matches(result, expected_for(inputs, ks, ke, width), clean=False)
    plugin.uninstall()
    assert layer.fp8_fp4_mqa_logits is original


def test_cuda_leaves_fp4_to_vllm(layer, inputs, windows):
    plugin.install("cuda")
    q = (torch.zeros(ROWS, HEADS, HEAD_DIM // 2, dtype=torch.int8), torch.zeros(ROWS, HEADS, dtype=torch.int32))
    kv = (torch.zeros(KEYS, HEAD_DIM // 2, dtype=torch.int8), torch.zeros(KEYS, dtype=torch.int32))
    with pytest.raises(RuntimeError, match="DeepGEMM"):  # vLLM's own complaint: there is none on a CPU
        layer.fp8_fp4_mqa_logits(q, kv, inputs.weights, *windows, KEYS)


def test_where_vllm_uses_mx_scales(monkeypatch, layer):
    """Its own predicate, on a platform of the SM100 family and on one of SM120."""
    deep_gemm = importlib.import_module(standins.VLLM_DEEP_GEMM)
    original = layer.fp8_fp4_mqa_logits
    for major, mx in ((10, True), (12, False)):
        platform = SimpleNamespace(
            is_cuda=lambda: True, is_device_capability_family=lambda family, major=major: major == family // 10
        )
        monkeypatch.setattr(deep_gemm, "current_platform", platform)
        deep_gemm.mqa_logits_use_mx_scales.cache_clear()
        try:
            assert plugin._uses_mx_scales() is mx
            if mx:
                with pytest.raises(IntegrationError, match="scores with MX scales on this GPU"):
                    plugin.install("cuda")
                assert layer.fp8_fp4_mqa_logits is original
        finally:
            deep_gemm.mqa_logits_use_mx_scales.cache_clear()


class NoTorchvision(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Modules of torchvision, of no content: transformers' image processors, which models import on the way to this
    layer, name it, and its wheels do not load beside a PyTorch of another build."""

    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "torchvision":
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec):
        return None

    def exec_module(self, module):
        def attribute(name):
            if name.startswith("__"):
                raise AttributeError(name)
            return MagicMock()

        module.__getattr__ = attribute


def test_glms_layer_is_reached_too(monkeypatch, layer):
    before = plugin.install("cuda")
    if importlib.util.find_spec("torchvision") is None:
        monkeypatch.setattr(sys, "meta_path", [*sys.meta_path, NoTorchvision()])
    glm = importlib.import_module(GLM_LAYER)
    for name in [name for name in sys.modules if name.split(".")[0] == "torchvision"]:
        monkeypatch.delitem(sys.modules, name)
    ours = importlib.import_module(standins.VLLM_DEEP_GEMM).fp8_fp4_mqa_logits
    assert glm.fp8_fp4_mqa_logits is ours
    restored = plugin.uninstall()
    assert set(before) <= set(restored)
    assert glm.fp8_fp4_mqa_logits is importlib.import_module(standins.VLLM_DEEP_GEMM).fp8_fp4_mqa_logits is not ours


def test_the_entry_point(monkeypatch, layer):
    """Through vLLM's own loader of plugins."""
    import importlib.metadata

    import vllm.plugins

    entry = importlib.metadata.EntryPoint(
        "lightning_indexer", "lightning_indexer.integrations.vllm:register", "vllm.general_plugins"
    )
    real = importlib.metadata.entry_points

    def entry_points(**options):
        return [entry] if options.get("group") == "vllm.general_plugins" else real(**options)

    monkeypatch.setattr(importlib.metadata, "entry_points", entry_points)
    monkeypatch.setattr(plugin, "_platform", lambda: "cuda")
    for switch, installed in (("0", False), ("1", True)):
        monkeypatch.setenv("LIGHTNING_INDEXER_VLLM", switch)
        monkeypatch.setattr(vllm.plugins, "plugins_loaded", False)
        vllm.plugins.load_general_plugins()
        assert bool(plugin.replaced()) is installed


def test_a_machine_without_a_gpu_has_nothing_to_replace():
    from vllm.platforms import current_platform

    if current_platform.is_cuda() or current_platform.is_rocm():
        pytest.skip("vLLM found a GPU")
    assert plugin._platform() is None


# Selection, decode and the planner


@pytest.fixture(scope="module")
def planner():
    return importlib.import_module(vllm_seams.PLANNER)


def test_the_layer_is_the_known_one(layer):
    assert text_of(layer.sparse_attn_indexer) == vllm_seams.LAYER_TEXT
    # What it does with scores between the two calls, and behind them.
    names = inspect.unwrap(layer.sparse_attn_indexer).__code__.co_names
    assert {"as_fp32_logits", "_select_candidate_blocks", "_apply_candidate_mask", "_merge_dcp_topk_global"} <= set(
        names
    )


def test_every_seam_of_cuda_is_replaced_and_restored(layer, planner):
    names = plugin.install("cuda")
    assert {name.rsplit(".", 1)[1] for name in names} == {
        "fp8_fp4_mqa_logits", "_select_candidate_blocks", "_apply_candidate_mask", "_merge_dcp_topk_global",
        "indexer_k_quant_and_cache", "cp_gather_indexer_k_quant_cache",
        "top_k_per_row_prefill", "fp8_fp4_paged_mqa_logits", "get_indexer_topk", "_split_indexer_prefill_chunks",
    }  # fmt: skip
    assert f"{vllm_seams.LAYER}.get_indexer_topk" in names
    assert set(plugin.uninstall()) == set(names)
    for name in names:
        owner, attribute = name.rsplit(".", 1)
        module, _, cls = owner.rpartition(".") if owner.endswith("Builder") else (owner, "", "")
        found = importlib.import_module(module)
        value = vars(getattr(found, cls) if cls else found)[attribute]
        assert "lightning_indexer" not in getattr(value, "__module__", "") or not hasattr(value, "__wrapped__")


def test_every_seam_of_rocm_is_replaced(rocm):
    names = plugin.install("rocm")
    assert [name.rsplit(".", 1)[1] for name in names] == [
        "rocm_fp8_mqa_logits", "_launch_aiter_top_k_per_row_prefill", "rocm_fp8_paged_mqa_logits"
    ]  # fmt: skip


@pytest.mark.parametrize("k", [16, 64])
def test_prefill_as_the_layer_does_it(layer, inputs, windows, k):
    """The lines of ``sparse_attn_indexer`` between its gather and its merge, through the names of its module."""
    plugin.install("cuda")
    ks, ke = windows
    indices = torch.full((ROWS, k), -7, dtype=torch.int32)
    q_scale, weights = layer.mqa_logits_mx_inputs(inputs.q_fp8, None, inputs.weights)
    row_ends = ke - ks
    logits = layer.as_fp32_logits(
        layer.fp8_fp4_mqa_logits((inputs.q_fp8, q_scale), (inputs.k_fp8, inputs.kv_scale), weights, ks, ke, KEYS),
        row_ends,
    )
    assert isinstance(logits, vllm_seams.Pending)
    layer.ops.top_k_per_row_prefill(
        logits, torch.zeros_like(row_ends), row_ends, indices, logits.shape[0], logits.stride(0), logits.stride(1), k
    )
    layer._merge_dcp_topk_global(logits, indices, k, 0, 1, 1, row_starts=None)
    assert logits.logits is None
    expected = lightning_indexer.top_k_per_row(expected_for(inputs, *windows), k, *windows)
    assert torch.equal(indices.sort(1).values, expected.sort(1).values)


def test_decode_as_the_layer_does_it(layer):
    plugin.install("cuda")
    batch, next_n, page, width, k = 3, 2, 64, 256, 48
    generator = torch.Generator().manual_seed(4)
    values = torch.randn(9, page * HEAD_DIM, generator=generator).to(torch.float8_e4m3fn).view(torch.uint8)
    scales = (torch.rand(9, page, generator=generator) + 0.1).view(torch.uint8)
    cache = torch.cat((values, scales), dim=1).view(9, page, HEAD_DIM + 4)
    q = torch.randn(batch, next_n, HEADS, HEAD_DIM, generator=generator).to(torch.float8_e4m3fn)
    weights = torch.randn(batch * next_n, HEADS, generator=generator)
    tables = torch.tensor([[3, 1, 8, 5], [0, -1, -1, -1], [4, 2, 7, -1]], dtype=torch.int32)
    seq_lens = torch.tensor([[219, 220], [19, 20], [150, 151]], dtype=torch.int32)
    cache = layer.kv_cache_as_quant_view(cache, HEAD_DIM, False)
    assert list(cache.shape) == [9, page, 1, HEAD_DIM + 4]
    q_scale, weights = layer.mqa_logits_mx_inputs(q, None, weights)
    logits = layer.as_fp32_logits(
        layer.fp8_fp4_paged_mqa_logits(
            (q, q_scale), cache, weights, seq_lens, tables, torch.zeros(133, 2), max_model_len=width, indices=None
        ),
        seq_lens.view(-1),
    )
    indices = torch.full((batch * next_n, k), -7, dtype=torch.int32)
    layer.get_indexer_topk("auto")(logits, seq_lens, next_n, indices, k, width)
    expected = lightning_indexer.fp8_paged_mqa_logits(q, cache, weights, seq_lens, tables, width)
    inside = torch.arange(width) < seq_lens.reshape(-1, 1)
    assert torch.equal(logits[inside], expected[inside])
    assert torch.equal(
        indices.sort(1).values, lightning_indexer.top_k_per_row(expected, k, None, seq_lens.view(-1)).sort(1).values
    )


def test_the_planner(planner, layer, inputs, windows):
    """Its own chunks, with and without the budget: one request of 64 rows over 4096 keys, 16 KiB a row."""
    builder = object.__new__(planner.DeepseekV32IndexerMetadataBuilder)
    builder.dcp_world_size, builder.use_pcp = 1, False
    lengths, rows = torch.tensor([4096], dtype=torch.int32), torch.tensor([64], dtype=torch.int32)

    def chunks() -> list:
        return builder._split_indexer_prefill_chunks(lengths, rows, 2**20, 10 * 4 * 4096, request_offset=0)

    own = chunks()
    assert len(own) == 7
    plugin.install("cuda")
    assert chunks() == own  # nothing has been fused yet
    test_prefill = torch.full((ROWS, 16), -7, dtype=torch.int32)
    ks, ke = windows
    kv = (inputs.k_fp8, inputs.kv_scale)
    pending = layer.fp8_fp4_mqa_logits((inputs.q_fp8, None), kv, inputs.weights, ks, ke, KEYS)
    layer.ops.top_k_per_row_prefill(pending, torch.zeros_like(ks), ke - ks, test_prefill, ROWS, 1, 1, 16)
    assert chunks() == [(slice(0, 1), slice(0, 64))]
    builder.dcp_world_size = 2
    assert chunks() == own
