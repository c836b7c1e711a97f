"""Stand-ins for vLLM, AITER and DeepGEMM: only what the adapters touch, with the names and signatures of the real ones.

vLLM's are those of the files in the 0.33.0 wheel; ``tests/engines`` checks the wheel itself where it is installed.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace

VLLM_LAYER = "vllm.model_executor.layers.sparse_attn_indexer"
VLLM_DEEP_GEMM = "vllm.utils.deep_gemm"
VLLM_ROCM = "vllm.v1.attention.ops.rocm_aiter_mla_sparse"
AITER_MODULES = ("aiter.ops.triton.fp8_mqa_logits", "aiter.ops.triton.attention.fp8_mqa_logits")


class OriginalError(Exception):
    """Raised by the engines' own functions: the call went to them."""


def module(monkeypatch, name: str, **members: object) -> ModuleType:
    """Puts a module, and the packages above it, into ``sys.modules`` for the test."""
    parts = name.split(".")
    parent = None
    for end in range(1, len(parts) + 1):
        path = ".".join(parts[:end])
        found = sys.modules.get(path)
        if found is None:
            found = ModuleType(path)
            found.__path__ = []
            found.__spec__ = SimpleNamespace(name=path, submodule_search_locations=[], loader=None, origin=None)
            monkeypatch.setitem(sys.modules, path, found)
            if parent is not None:
                monkeypatch.setattr(parent, parts[end - 1], found, raising=False)
        parent = found
    for member, value in members.items():
        monkeypatch.setattr(found, member, value, raising=False)
    return found


def vllm_cuda_function() -> Callable:
    def fp8_fp4_mqa_logits(q, kv, weights, cu_seqlen_ks, cu_seqlen_ke, max_seqlen_k):
        raise OriginalError("fp8_fp4_mqa_logits")

    return fp8_fp4_mqa_logits


def vllm_rocm_function() -> Callable:
    def rocm_fp8_mqa_logits(q, kv, weights, cu_seqlen_ks, cu_seqlen_ke):
        raise OriginalError("rocm_fp8_mqa_logits")

    return rocm_fp8_mqa_logits


def install_vllm(
    monkeypatch, platform: str | None, version: str = "0.33.0", arch: str | None = None
) -> SimpleNamespace:
    """A vLLM on ROCm, on CUDA, or on neither; its functions raise :class:`OriginalError`.

    ``arch`` is what it finds out about the GPU without a context, such as ``sm90``; None finds nothing.
    """
    capability = None
    if platform == "cuda" and arch is not None:
        capability = SimpleNamespace(major=int(arch[2:-1]), minor=int(arch[-1]))
    current = SimpleNamespace(
        is_rocm=lambda: platform == "rocm", is_cuda=lambda: platform == "cuda", get_device_capability=lambda: capability
    )
    module(monkeypatch, "vllm", __version__=version)
    module(monkeypatch, "vllm.platforms", current_platform=current)
    module(monkeypatch, "vllm.platforms.rocm", _GCN_ARCH=arch or "")
    function = vllm_cuda_function()
    mx = capability is not None and capability.major == 10
    return SimpleNamespace(
        deep_gemm=module(monkeypatch, VLLM_DEEP_GEMM, fp8_fp4_mqa_logits=function, mqa_logits_use_mx_scales=lambda: mx),
        layer=module(monkeypatch, VLLM_LAYER, fp8_fp4_mqa_logits=function),
        rocm=module(monkeypatch, VLLM_ROCM, rocm_fp8_mqa_logits=vllm_rocm_function()),
    )


def aiter_function() -> Callable:
    def fp8_mqa_logits(Q, KV, kv_scales, weights, cu_starts, cu_ends, clean_logits=True):
        raise OriginalError("aiter")

    return fp8_mqa_logits


def deep_gemm_function() -> Callable:
    def fp8_mqa_logits(q, kv, weights, cu_seq_len_k_start, cu_seq_len_k_end, clean_logits=True, max_seqlen_k=0):
        raise OriginalError("deep_gemm")

    return fp8_mqa_logits
