"""DeepGEMM's prefill calls. Two generations of it are in use, and their sixth argument differs:

- ``fp8_mqa_logits(q, kv, weights, start, end, clean_logits, max_seqlen_k)``: the older form, kept as a legacy call in
  the repository at 54e2261;
- ``fp8_fp4_mqa_logits((q, None), kv, weights, start, end, max_seqlen_k, schedule_meta)``: the newer form, of the build
  inside the vLLM 0.33 wheel (``vllm.third_party.deep_gemm``). It has compressed logits only.

DeepGEMM aborts on sizes that it was not built for, such as H other than 32 and 64 on Hopper; these calls run them.
"""

from __future__ import annotations

import torch

import lightning_indexer


def fp8_mqa_logits(
    q: torch.Tensor,
    kv: tuple[torch.Tensor, torch.Tensor],
    weights: torch.Tensor,
    cu_seq_len_k_start: torch.Tensor,
    cu_seq_len_k_end: torch.Tensor,
    clean_logits: bool = True,
    max_seqlen_k: int = 0,
) -> torch.Tensor:
    """``deep_gemm.fp8_mqa_logits``, as at DeepGEMM 54e2261 and before it.

    Args:
        q: [M, H, D] float8_e4m3fn.
        kv: ``(k, kv_scale)``: [N, D] float8_e4m3fn and [N] float32.
        weights: [M, H] float32.
        cu_seq_len_k_start, cu_seq_len_k_end: [M] int32, each row's window; the end is exclusive.
        clean_logits: write ``-inf`` outside the windows.
        max_seqlen_k: if > 0, the width of compressed logits; ``clean_logits`` must be False.

    Returns:
        [M, N] float32, or [M, max_seqlen_k]. Rows are padded to 256 bytes, not to DeepGEMM's 1024.

    Raises:
        TypeError, ValueError: as :func:`lightning_indexer.fp8_mqa_logits`.
    """
    return lightning_indexer.fp8_mqa_logits(
        q, kv, weights, cu_seq_len_k_start, cu_seq_len_k_end, clean_logits=clean_logits, max_seqlen_k=max_seqlen_k
    )


def fp8_fp4_mqa_logits(
    q: tuple[torch.Tensor, torch.Tensor | None],
    kv: tuple[torch.Tensor, torch.Tensor],
    weights: torch.Tensor,
    cu_seq_len_k_start: torch.Tensor,
    cu_seq_len_k_end: torch.Tensor,
    max_seqlen_k: int,
    schedule_meta: object = None,
    *,
    logits_dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """``deep_gemm.fp8_fp4_mqa_logits`` of the vLLM 0.33 wheel, for fp8 operands.

    Args:
        q: ``(q, None)``: [M, H, D] float8_e4m3fn. A second element other than None would make it fp4.
        kv: ``(k, kv_scale)``: [N, D] float8_e4m3fn and [N] float32.
        weights: [M, H] float32.
        cu_seq_len_k_start, cu_seq_len_k_end: [M] int32, each row's window; the end is exclusive.
        max_seqlen_k: columns of the result, at least 1.
        schedule_meta: ignored. DeepGEMM's schedule of its Blackwell kernel means nothing to other kernels.
        logits_dtype: ``torch.float32`` or ``torch.bfloat16``, an argument of the repository's version of this call.

    Returns:
        [M, max_seqlen_k] of ``logits_dtype``: column j of row m is position ``cu_seq_len_k_start[m] + j``. Columns
        outside the window hold anything.

    Raises:
        TypeError: ``q`` is not a pair, or is fp4; also as :func:`lightning_indexer.fp8_mqa_logits`.
        ValueError: ``max_seqlen_k`` is 0, which DeepGEMM refuses here too; also as
            :func:`lightning_indexer.fp8_mqa_logits`.
    """
    if not isinstance(q, (tuple, list)) or len(q) != 2:
        raise TypeError(f"q: got {type(q).__name__}, expected the pair (q, None)")
    values, scale = q
    if scale is not None:
        raise TypeError("q: got a scale, which makes it fp4; fp4 is not supported: expected (q, None)")
    if isinstance(max_seqlen_k, int) and not isinstance(max_seqlen_k, bool) and max_seqlen_k == 0:
        raise ValueError("max_seqlen_k: got 0, expected at least 1: this call has compressed logits only")
    return lightning_indexer.fp8_mqa_logits(
        values,
        kv,
        weights,
        cu_seq_len_k_start,
        cu_seq_len_k_end,
        clean_logits=False,
        max_seqlen_k=max_seqlen_k,
        out_dtype=logits_dtype,
    )
