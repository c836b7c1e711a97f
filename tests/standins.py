"""Stand-ins for vLLM, AITER and DeepGEMM: only what the adapters touch, with the names and signatures of the real ones.

vLLM's are those of the files in the 0.33.0 wheel; ``tests/engines`` checks the wheel itself where it is installed.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace

import torch

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


VLLM_CUSTOM_OPS = "vllm._custom_ops"
VLLM_INDEXER_TOPK = "vllm.model_executor.layers.indexer_topk"
VLLM_PLANNER = "vllm.v1.attention.backends.mla.indexer"


def install_vllm_seams(monkeypatch, platform: str = "cuda") -> SimpleNamespace:
    """:func:`install_vllm` with the functions of every seam, and a layer that calls them in vLLM's order.

    ``read`` has what the readers of scores were given, before and after they changed it.
    """
    engine = install_vllm(monkeypatch, platform)
    engine.read = []

    def raises(name: str, parameters: str) -> Callable:
        scope: dict = {"OriginalError": OriginalError}
        exec(f"def {name}({parameters}):\n    raise OriginalError('{name}')", scope)
        return scope[name]

    ops = "logits, cu_seqlen_ks, cu_seqlen_ke, raw_topk_indices, num_rows, stride0, stride1, topk_tokens"
    engine.custom_ops = module(
        monkeypatch,
        VLLM_CUSTOM_OPS,
        top_k_per_row_prefill=raises("top_k_per_row_prefill", ops),
        indexer_k_quant_and_cache=raises(
            "indexer_k_quant_and_cache", "k, kv_cache, slot_mapping, quant_block_size, kv_cache_dtype"
        ),
        cp_gather_indexer_k_quant_cache=raises(
            "cp_gather_indexer_k_quant_cache", "kv_cache, dst_k, dst_scale, block_table, cu_seq_lens"
        ),
    )
    paged = raises(
        "fp8_fp4_paged_mqa_logits",
        "q, kv_cache, weights, context_lens, block_tables, schedule_metadata, max_model_len, indices=None",
    )
    get = lambda backend: raises("selection", "*args")  # noqa: E731
    get.__name__ = "get_indexer_topk"
    module(monkeypatch, VLLM_INDEXER_TOPK, get_indexer_topk=get)
    module(monkeypatch, VLLM_DEEP_GEMM, fp8_fp4_paged_mqa_logits=paged)

    def select(logits, row_starts, row_ends, count, size, candidates):
        engine.read.append({"before": logits.clone()})

    def mask(logits, row_starts, row_ends, candidates, size):
        engine.read.append({"before": logits.clone()})
        logits[:, :3] = float("-inf")

    def merge(logits, topk_indices, topk_tokens, dcp_rank, dcp_world_size, cp_interleave, row_starts=None):
        if dcp_world_size <= 1:
            return
        engine.read.append({"before": logits.clone()})

    def sparse_attn_indexer(operands, topk_indices, reader=None):
        layer, ks, ke = engine.layer, operands[3], operands[4]
        row_ends = ke - ks
        logits = layer.fp8_fp4_mqa_logits(*operands)
        assert logits.dtype == torch.float32
        num_rows = logits.shape[0]
        if reader == "candidates":
            layer._select_candidate_blocks(logits, None, row_ends, 4, 8, None)
        if reader == "mask":
            layer._apply_candidate_mask(logits, None, row_ends, None, 8)
        engine.custom_ops.top_k_per_row_prefill(
            logits, torch.zeros_like(row_ends), row_ends, topk_indices, num_rows, logits.stride(0), logits.stride(1),
            topk_indices.shape[1],
        )  # fmt: skip
        layer._merge_dcp_topk_global(
            logits, topk_indices, topk_indices.shape[1], 0, 2 if reader == "dcp" else 1, 1, row_starts=None
        )

    module(
        monkeypatch, VLLM_LAYER, fp8_fp4_paged_mqa_logits=paged, get_indexer_topk=get, _select_candidate_blocks=select,
        _apply_candidate_mask=mask, _merge_dcp_topk_global=merge, sparse_attn_indexer=sparse_attn_indexer,
    )  # fmt: skip

    class DeepseekV32IndexerMetadataBuilder:
        def __init__(self, dcp=1, pcp=False):
            self.dcp_world_size, self.use_pcp = dcp, pcp

        @staticmethod
        def _split_indexer_prefill_chunks(
            compressed_seq_lens_cpu, prefill_query_lens_cpu, workspace_size, max_logits_bytes, request_offset=0
        ):
            return "budget", max_logits_bytes, request_offset

    class Another(DeepseekV32IndexerMetadataBuilder):
        pass

    name = "DeepseekV32IndexerMetadataBuilder"
    engine.planner = module(monkeypatch, VLLM_PLANNER, **{name: DeepseekV32IndexerMetadataBuilder})
    engine.builder = lambda dcp=1, pcp=False, other=False: (Another if other else DeepseekV32IndexerMetadataBuilder)(
        dcp, pcp
    )
    module(
        monkeypatch, VLLM_ROCM,
        _launch_aiter_top_k_per_row_prefill=raises(
            "_launch_aiter_top_k_per_row_prefill", "logits, row_starts, row_ends, indices, topk_tokens"
        ),
        rocm_fp8_paged_mqa_logits=raises(
            "rocm_fp8_paged_mqa_logits",
            "q_fp8, kv_cache_fp8, weights, context_lens, block_tables, schedule_metadata, max_model_len, *, "
            "compress_ratio=1",
        ),
    )  # fmt: skip
    return engine
