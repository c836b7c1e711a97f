"""AITER's prefill and decode calls, and those that vLLM on ROCm wraps around them."""

from __future__ import annotations

import torch

import lightning_indexer
from lightning_indexer.problems.cache_layout import CacheLayout, Order
from lightning_indexer.problems.checks import check_tensor, shape_of


def fp8_mqa_logits(
    Q: torch.Tensor,
    KV: torch.Tensor,
    kv_scales: torch.Tensor,
    weights: torch.Tensor,
    cu_starts: torch.Tensor,
    cu_ends: torch.Tensor,
    clean_logits: bool = True,
) -> torch.Tensor:
    """``aiter.ops.triton.attention.fp8_mqa_logits.fp8_mqa_logits``, as at AITER e4048607a5.

    Args:
        Q: [M, H, D] float8_e4m3fn, or float8_e4m3fnuz on gfx942. H and D need not be powers of two.
        KV: [N, D] of either dtype.
        kv_scales: [N] or [N, 1] float32.
        weights: [M, H] float32.
        cu_starts, cu_ends: [M] int32, each row's window; the end is exclusive.
        clean_logits: write ``-inf`` outside the windows. If False, those positions hold anything.

    Returns:
        [M, N] float32.

    Raises:
        TypeError, ValueError: as :func:`lightning_indexer.fp8_mqa_logits`, whose names the messages use.
    """
    return lightning_indexer.fp8_mqa_logits(Q, (KV, kv_scales), weights, cu_starts, cu_ends, clean_logits=clean_logits)


def rocm_fp8_mqa_logits(
    q: torch.Tensor,
    kv: tuple[torch.Tensor, torch.Tensor],
    weights: torch.Tensor,
    cu_seqlen_ks: torch.Tensor,
    cu_seqlen_ke: torch.Tensor,
) -> torch.Tensor:
    """``vllm.v1.attention.ops.rocm_aiter_mla_sparse.rocm_fp8_mqa_logits``, as at vLLM 002ef941ee.

    Args:
        q: [M, H, D] float8_e4m3fn, or float8_e4m3fnuz on gfx942.
        kv: ``(k, scale)``: [N, D] of either dtype, and [N, 1] or [N] float32.
        weights: [M, H] float32.
        cu_seqlen_ks, cu_seqlen_ke: [M] int32, each row's window; the end is exclusive.

    Returns:
        [M, N] float32 with ``-inf`` outside the windows.

    Raises:
        TypeError, ValueError: as :func:`lightning_indexer.fp8_mqa_logits`.
    """
    return lightning_indexer.fp8_mqa_logits(q, kv, weights, cu_seqlen_ks, cu_seqlen_ke)


def deepgemm_fp8_paged_mqa_logits(
    q_fp8: torch.Tensor,
    kv_cache: torch.Tensor,
    weights: torch.Tensor,
    out_logits: torch.Tensor,
    context_lens: torch.Tensor,
    kv_indices: torch.Tensor,
    max_model_len: int,
    Preshuffle: bool = False,
    KVBlockSize: int = 1,
    ChunkK: int = 256,
    TotalCuCount: int | None = None,
    WavePerEU: int = 2,
    VarCtxSchedule: torch.Tensor | None = None,
) -> None:
    """``aiter.ops.triton.attention.pa_mqa_logits.deepgemm_fp8_paged_mqa_logits``, as at AITER e4048607a5.

    Args:
        q_fp8: [B, next_n, H, D] float8_e4m3fn, or float8_e4m3fnuz on gfx942; the cache is of the same dialect.
        kv_cache: [blocks, KVBlockSize, 1, D + 4], uint8 or fp8, with float32 scales.
        weights: [B * next_n, H] float32.
        out_logits: [B * next_n, W] float32, W of at least ``max_model_len``: the columns below a row's length are
            written, and of those behind, up to ``max_model_len``, some may be.
        context_lens: [B] int32: row j sees ``context_lens[b] - next_n + 1 + j`` positions; or [B, next_n].
        kv_indices: [B, max_blocks] int32, the block table.
        max_model_len: columns that may be written.
        Preshuffle: the values of a block lie as ``[page/16, D/16, 16, 16]``, not key by key.
        KVBlockSize: the page.
        ChunkK, TotalCuCount, WavePerEU, VarCtxSchedule: ignored: tiles and schedule of AITER's kernels.

    Raises:
        TypeError, ValueError: as :func:`lightning_indexer.fp8_paged_mqa_logits`, whose names the messages use.
    """
    check_tensor("out_logits", out_logits, (torch.float32,))
    if out_logits.dim() != 2 or out_logits.shape[1] < max_model_len:
        raise ValueError(
            f"out_logits: got shape {shape_of(out_logits)}, expected [B * next_n, {max_model_len}] or wider"
        )
    lightning_indexer.fp8_paged_mqa_logits(
        q_fp8, kv_cache.view(torch.uint8), weights, context_lens, kv_indices, max_model_len,
        layout=CacheLayout(KVBlockSize, q_fp8.shape[-1], "preshuffled" if Preshuffle else "flat", dtype=q_fp8.dtype),
        clean_logits=False, out=out_logits[:, :max_model_len],
    )  # fmt: skip


def rocm_fp8_paged_mqa_logits(
    q_fp8: torch.Tensor,
    kv_cache_fp8: torch.Tensor,
    weights: torch.Tensor,
    context_lens: torch.Tensor,
    block_tables: torch.Tensor,
    schedule_metadata: torch.Tensor | None,
    max_model_len: int,
    *,
    order: Order | None = None,
) -> torch.Tensor:
    """``vllm.v1.attention.ops.rocm_aiter_mla_sparse.rocm_fp8_paged_mqa_logits``, as at vLLM 002ef941ee.

    Args:
        q_fp8: [B, next_n, H, D] float8_e4m3fn, or float8_e4m3fnuz on gfx942; the cache is of the same dialect.
        kv_cache_fp8: [blocks, page, 1, D + 4] uint8 with float32 scales.
        weights: [B * next_n, H] float32.
        context_lens: [B] int32: row j sees ``context_lens[b] - next_n + 1 + j`` positions; or [B, next_n].
        block_tables: [B, max_blocks] int32.
        schedule_metadata: ignored.
        max_model_len: columns of the result.
        order: of the values of a block; None is vLLM's rule: preshuffled where the cache is contiguous and its page
            larger than 1 (DeepSeek-V3.2, GLM), flat in a strided slice of a larger record (DeepSeek-V4) and at page 1.

    Returns:
        [B * next_n, max_model_len] float32, ``-inf`` behind each row's length.

    Raises:
        TypeError, ValueError: as :func:`lightning_indexer.fp8_paged_mqa_logits`.
    """
    page = kv_cache_fp8.shape[1]
    if order is None:
        order = "preshuffled" if page > 1 and kv_cache_fp8.is_contiguous() else "flat"
    return lightning_indexer.fp8_paged_mqa_logits(
        q_fp8, kv_cache_fp8, weights, context_lens, block_tables, max_model_len,
        layout=CacheLayout(page, q_fp8.shape[-1], order, dtype=q_fp8.dtype),
    )  # fmt: skip
