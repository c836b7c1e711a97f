"""AITER's prefill call, and the one that vLLM on ROCm wraps around it."""

from __future__ import annotations

import torch

import lightning_indexer


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
