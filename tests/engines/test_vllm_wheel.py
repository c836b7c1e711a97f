"""The vLLM plugin against vLLM itself, on a CPU. Skipped where vLLM 0.33 is not installed.

The Python files of the wheel are enough: no compiled extension and no GPU is touched. docs/engines.md says how to set
that up. Nothing of vLLM is stood in for; only what it finds out about the machine, its platform, is given.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
from types import SimpleNamespace

import pytest
import torch

import standins
from helpers import CPU, assert_matches, calc_diff, expected_for
from lightning_indexer.check.cases import make_inputs, make_windows
from lightning_indexer.integrations import vllm as plugin
from lightning_indexer.integrations.patching import IntegrationError

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
    assert plugin.install("rocm") == (f"{standins.VLLM_ROCM}.rocm_fp8_mqa_logits",)
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
    names = plugin.install("cuda")
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


def test_glms_layer_is_reached_too():
    before = plugin.install("cuda")
    try:
        glm = importlib.import_module(GLM_LAYER)
    except ModuleNotFoundError as error:
        pytest.skip(f"{GLM_LAYER} needs {error.name}")
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
