"""FlashInfer's ``dsa_indexer_det_topk``, as at 0.7.4, in its fp8 forms, ragged and paged: on any device.

FlashInfer runs them on SM100, SM103, SM107 and SM120. Ties go to the larger id, ids are local to their segment and
ascend, unused slots hold -1 and -inf. Nothing is read back to the host.
"""

from __future__ import annotations

import torch

from lightning_indexer.calls.mqa_topk import fp8_mqa_topk, fp8_paged_mqa_topk
from lightning_indexer.fp8 import FP8_DTYPES
from lightning_indexer.problems.cache_layout import SCALE_BYTES, CacheLayout
from lightning_indexer.problems.checks import as_int, check_tensor, shape_of
from lightning_indexer.problems.mqa_logits import row_stride
from lightning_indexer.problems.one_call import WORKSPACE_BYTES

Result = tuple[torch.Tensor, "torch.Tensor | None"]


def dsa_indexer_det_topk(
    q: torch.Tensor,
    k: torch.Tensor,
    w: torch.Tensor,
    cu_seqlens_q: torch.Tensor | None,
    cu_seqlens_k: torch.Tensor | None,
    *,
    top_k: int = 2048,
    softmax_scale: float | None = None,
    q_causal_offsets: torch.Tensor | None = None,
    ratio: int = 1,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    workspace_buffer: torch.Tensor | None = None,
    indices: torch.Tensor | None = None,
    scores: torch.Tensor | None = None,
    return_scores: bool = True,
    backend: str = "cake",
    k_scale: torch.Tensor | None = None,
    q_scale: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    context_lens: torch.Tensor | None = None,
    enable_pdl: bool | None = None,
) -> Result:
    """``flashinfer.dsa_indexer.dsa_indexer_det_topk`` for fp8 operands.

    Ragged: the query at place u of segment s sees the first ``(offset + u + 1) // ratio`` keys of its segment, at most
    all of them. Paged, with ``block_table`` and ``context_lens``: row j of request b sees ``context_lens[b, j]`` keys.

    Args:
        q: [T, H, D] float8_e4m3fn; paged: [B, next_n, H, D].
        k: [Tkv, D] float8_e4m3fn; paged: the cache, whose blocks of ``k.shape[1]`` keys lie ``k.stride(0)`` elements
            apart: values, then float32 scales.
        w: [T, H] float32, every scale but ``k_scale`` folded in; paged: [B * next_n, H].
        cu_seqlens_q, cu_seqlens_k: int32 [S + 1], where segments begin; None in the paged form.
        top_k: 1 to 4096.
        softmax_scale: None: it is part of ``w``.
        q_causal_offsets: int64 [S]; None: Lk - Lq of each segment, and 0 where ``ratio`` is not 1.
        ratio: tokens that share a key.
        max_seqlen_q: ignored.
        max_seqlen_k: no segment has more keys.
        workspace_buffer: uint8, of :func:`dsa_indexer_det_topk_workspace_size` bytes.
        indices, scores: [T, top_k] int32 and float32 to write into.
        return_scores: False gives None in place of the scores.
        backend: ``"cake"`` or ``"sm120"``: the library's own choice stands for both.
        k_scale: float32 [Tkv]; None in the paged form.
        q_scale: None; it would make q MXFP4.
        block_table, context_lens: int32 [B, max_blocks] and [B, next_n].
        enable_pdl: ignored.

    Returns:
        Indices [T, top_k] int32 and scores [T, top_k] float32 or None.

    Raises:
        TypeError, ValueError: bfloat16 or MXFP4 operands, arguments of the other form, a bound that cannot be one; also
            as :func:`lightning_indexer.fp8_mqa_topk`.
    """
    if backend not in ("cake", "sm120"):
        raise ValueError(f"backend: got {backend!r}, expected 'cake' or 'sm120'")
    if q_scale is not None:
        raise TypeError("q_scale: got a tensor, which makes q MXFP4, expected None: fp8 alone is supported")
    check_tensor("q", q, FP8_DTYPES, ": of this function the fp8 form alone")
    if softmax_scale is not None:
        raise ValueError(f"softmax_scale: got {softmax_scale}, expected None: the scale is part of w")
    if not return_scores and scores is not None:
        raise ValueError("scores: got a tensor with return_scores=False, expected None")
    values = scores if scores is not None else bool(return_scores)
    if block_table is not None or context_lens is not None:
        ragged = {
            "cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k, "k_scale": k_scale,
            "q_causal_offsets": q_causal_offsets, "max_seqlen_k": max_seqlen_k,
        }  # fmt: skip
        for name, given in ragged.items():
            if given is not None:
                raise ValueError(f"{name}: got an argument of the ragged form, expected None beside a block_table")
        if block_table is None or context_lens is None:
            raise ValueError("block_table, context_lens: got one of them, expected both")
        if ratio != 1:
            raise ValueError(f"ratio: got {ratio}, expected 1 beside a block_table")
        lengths = _lengths(q, context_lens)
        return _pair(
            fp8_paged_mqa_topk(
                q, _cache(q, k), w, lengths, block_table, top_k, tie="larger", values=values, out=indices,
                workspace=workspace_buffer,
            )
        )  # fmt: skip
    if cu_seqlens_q is None or cu_seqlens_k is None:
        raise ValueError("cu_seqlens_q, cu_seqlens_k: got None, expected both in the ragged form")
    if k_scale is None:
        raise ValueError("k_scale: got None, expected float32 [Tkv]")
    ks, ke = _windows(q, cu_seqlens_q, cu_seqlens_k, q_causal_offsets, int(as_int("ratio", ratio)))
    bound = _bound(max_seqlen_k, k.shape[0], cu_seqlens_q.numel() - 1)
    return _pair(
        fp8_mqa_topk(
            q, (k, k_scale), w, ks, ke, top_k, max_seqlen_k=bound, tie="larger", values=values, out=indices,
            workspace=workspace_buffer,
        )
    )  # fmt: skip


def dsa_indexer_det_topk_workspace_size(
    num_queries: int,
    num_keys: int,
    num_segments: int,
    *,
    top_k: int = 2048,
    ratio: int = 1,
    device: torch.device | None = None,
    dtype: torch.dtype = torch.float8_e4m3fn,
) -> int:
    """Bytes that :func:`dsa_indexer_det_topk` makes good use of: this library's default, or 16 rows of scores where
    those are more. Every argument but ``num_keys`` is ignored."""
    return max(WORKSPACE_BYTES, 16 * 4 * row_stride(num_keys, torch.float32))


# FlashInfer's previous names.
dsa_indexer_topk = dsa_indexer_det_topk
dsa_indexer_topk_workspace_size = dsa_indexer_det_topk_workspace_size


def _windows(
    q: torch.Tensor, cu_q: torch.Tensor, cu_k: torch.Tensor, offsets: torch.Tensor | None, ratio: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """int32 [T] windows of the packed keys, made on the device."""
    for name, tensor in (("cu_seqlens_q", cu_q), ("cu_seqlens_k", cu_k)):
        check_tensor(name, tensor, (torch.int32,))
        if tensor.dim() != 1 or tensor.numel() < 1 or tensor.numel() != cu_q.numel():
            raise ValueError(f"{name}: got shape {shape_of(tensor)}, expected [S + 1], as long as cu_seqlens_q")
    segments = cu_q.numel() - 1
    if ratio < 1:
        raise ValueError(f"ratio: got {ratio}, expected at least 1")
    if offsets is not None:
        check_tensor("q_causal_offsets", offsets, (torch.int64,))
        if tuple(offsets.shape) != (segments,):
            raise ValueError(f"q_causal_offsets: got shape {shape_of(offsets)}, expected [{segments}]")
    row = torch.arange(q.shape[0], device=q.device, dtype=torch.int32)
    if segments == 0:
        return row, row
    # The first segment that ends behind the row; empty ones end before it.
    segment = torch.searchsorted(cu_q[1:].contiguous(), row, right=True).clamp_(max=segments - 1)
    first_q, first_k = cu_q[segment].long(), cu_k[segment].long()
    keys = cu_k[segment + 1] - first_k
    if offsets is not None:
        offset = offsets[segment]
    elif ratio == 1:
        offset = keys - (cu_q[segment + 1] - first_q)
    else:
        offset = torch.zeros_like(keys)
    seen = torch.div(offset + (row - first_q) + 1, ratio, rounding_mode="floor")
    return first_k.int(), (first_k + torch.minimum(seen.clamp(min=0), keys)).int()


def _bound(max_seqlen_k: int | None, keys: int, segments: int) -> int:
    if max_seqlen_k is None:
        return 0
    bound = int(as_int("max_seqlen_k", max_seqlen_k))
    if not 0 <= bound <= keys or bound * max(1, segments) < keys:
        raise ValueError(
            f"max_seqlen_k: got {bound}, expected a bound of the longest of {segments} segments of {keys} keys"
        )
    return bound


def _lengths(q: torch.Tensor, context_lens: torch.Tensor) -> torch.Tensor:
    check_tensor("context_lens", context_lens, (torch.int32,))
    if q.dim() != 4 or context_lens.numel() != q.shape[0] * q.shape[1]:
        raise ValueError(
            f"context_lens: got shape {shape_of(context_lens)}, expected [B, next_n] of q [B, next_n, H, D], "
            f"which is {shape_of(q)}"
        )
    return context_lens.reshape(q.shape[0], q.shape[1])


def _cache(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """The cache as blocks of bytes, whatever the type and shape that it came in."""
    if not isinstance(k, torch.Tensor) or k.dim() < 2:
        raise ValueError("k: expected a paged cache, [pages, page, ...]")
    layout = CacheLayout(k.shape[1], q.shape[3])
    apart = k.stride(0) * k.element_size() if k.shape[0] > 1 else layout.block_bytes
    row = layout.head_dim + SCALE_BYTES
    return k.view(torch.uint8).as_strided((k.shape[0], *layout.block_shape), (apart, row, row, 1))


def _pair(result: torch.Tensor | tuple[torch.Tensor, torch.Tensor]) -> Result:
    return (result, None) if isinstance(result, torch.Tensor) else result
