"""Selection calls of vLLM, SGLang and AITER, by their argument orders. Each writes or returns what its engine expects.

All of them: float32 logits (here bfloat16 and float16 too), int32 indices, ``-1`` in unused slots. The engines leave
the order of a row's indices open; here it is ascending, with ties to the smaller index.
"""

from __future__ import annotations

import torch

from lightning_indexer.calls.top_k import top_k_per_row


def vllm_top_k_per_row_prefill(
    logits: torch.Tensor,
    cu_seqlen_ks: torch.Tensor,
    cu_seqlen_ke: torch.Tensor,
    raw_topk_indices: torch.Tensor,
    num_rows: int,
    stride0: int,
    stride1: int,
    topk_tokens: int,
) -> None:
    """``vllm._custom_ops.top_k_per_row_prefill``, as at vLLM 0.33.

    Args:
        logits: [>= num_rows, W].
        cu_seqlen_ks, cu_seqlen_ke: [num_rows] int32, each row's window; the end is exclusive.
        raw_topk_indices: [>= num_rows, >= topk_tokens] int32, written: positions relative to the row's start.
        num_rows: rows to select from.
        stride0, stride1: of logits; they have to be what its strides say.
        topk_tokens: k.

    Raises:
        TypeError, ValueError: as :func:`lightning_indexer.top_k_per_row`; strides that are not those of ``logits``.
    """
    logits = _rows(logits, num_rows, stride0, stride1)
    out = corner(raw_topk_indices, num_rows, topk_tokens)
    top_k_per_row(logits, topk_tokens, first(cu_seqlen_ks, num_rows), first(cu_seqlen_ke, num_rows), out=out)


def vllm_top_k_per_row_decode(
    logits: torch.Tensor,
    next_n: int,
    seq_lens: torch.Tensor,
    raw_topk_indices: torch.Tensor,
    num_rows: int,
    stride0: int,
    stride1: int,
    topk_tokens: int,
) -> None:
    """``vllm._custom_ops.top_k_per_row_decode``, as at vLLM 0.33.

    Args:
        logits: [>= num_rows, W]; row ``b * next_n + j`` is token j of sequence b.
        next_n: tokens of a sequence in this step.
        seq_lens: [B] int32, where row j of a sequence sees ``seq_len - next_n + 1 + j`` positions; or one length a row,
            [B, next_n] or [B * next_n].
        raw_topk_indices, num_rows, stride0, stride1, topk_tokens: as :func:`vllm_top_k_per_row_prefill`.

    Raises:
        As :func:`vllm_top_k_per_row_prefill`.
    """
    logits = _rows(logits, num_rows, stride0, stride1)
    ends = _lengths(seq_lens, next_n, num_rows)
    top_k_per_row(logits, topk_tokens, None, ends, out=corner(raw_topk_indices, num_rows, topk_tokens))


def aiter_top_k_per_row_prefill(
    logits: torch.Tensor,
    rowStarts: torch.Tensor,
    rowEnds: torch.Tensor,
    indices: torch.Tensor,
    values: torch.Tensor | None,
    numRows: int,
    stride0: int,
    stride1: int,
    k: int = 2048,
    stable: bool = False,
) -> None:
    """``aiter.top_k_per_row_prefill``, as at AITER e404860: indices are absolute positions.

    Args:
        logits: [>= numRows, W].
        rowStarts, rowEnds: [numRows] int32, each row's window; the end is exclusive.
        indices: [>= numRows, >= k] int32, written.
        values: likewise float32, the scores; or None.
        numRows: rows to select from.
        stride0, stride1: of logits; they have to be what its strides say.
        k: at most 4096.
        stable: asks for the smaller index among equal scores, which this library gives always.

    Raises:
        As :func:`vllm_top_k_per_row_prefill`.
    """
    logits = _rows(logits, numRows, stride0, stride1)
    top_k_per_row(
        logits, k, rowStarts[:numRows], rowEnds[:numRows], index_base="absolute",
        values=None if values is None else values[:numRows, :k], out=indices[:numRows, :k],
    )  # fmt: skip


def aiter_top_k_per_row_decode(
    logits: torch.Tensor,
    next_n: int,
    seqLens: torch.Tensor,
    indices: torch.Tensor,
    numRows: int,
    stride0: int,
    stride1: int,
    k: int = 2048,
    stable: bool = False,
    values: torch.Tensor | None = None,
) -> None:
    """``aiter.top_k_per_row_decode``, as at AITER e404860.

    Args:
        next_n, seqLens: as :func:`vllm_top_k_per_row_decode`.
        logits, indices, numRows, stride0, stride1, k, stable, values: as :func:`aiter_top_k_per_row_prefill`.

    Raises:
        As :func:`vllm_top_k_per_row_prefill`.
    """
    logits = _rows(logits, numRows, stride0, stride1)
    top_k_per_row(
        logits, k, None, _lengths(seqLens, next_n, numRows), out=indices[:numRows, :k],
        values=None if values is None else values[:numRows, :k],
    )  # fmt: skip


def sglang_fast_topk(
    score: torch.Tensor, lengths: torch.Tensor, topk: int, row_starts: torch.Tensor | None = None
) -> torch.Tensor:
    """``sgl_kernel.fast_topk_v2``.

    Args:
        score: [B, L].
        lengths: [B] int32, candidates of each row.
        topk: k, any from 1 to 4096.
        row_starts: [B] int32, first candidate of each row; None: 0.

    Returns:
        [B, topk] int32, relative to the row's start.

    Raises:
        TypeError, ValueError: as :func:`lightning_indexer.top_k_per_row`.
    """
    return _indices(top_k_per_row(score, topk, row_starts, _ends(lengths, row_starts)))


def sglang_topk_transform_ragged(
    score: torch.Tensor,
    lengths: torch.Tensor,
    topk_indices_offset: torch.Tensor,
    topk: int,
    row_starts: torch.Tensor | None = None,
) -> torch.Tensor:
    """``sgl_kernel.fast_topk_transform_ragged_fused``: indices into the ragged K of a prefill.

    Args:
        score, lengths, topk, row_starts: as :func:`sglang_fast_topk`.
        topk_indices_offset: [B] int32, added to each row's relative indices.

    Returns:
        [B, topk] int32, ``-1`` in unused slots.

    Raises:
        As :func:`sglang_fast_topk`.
    """
    ends = _ends(lengths, row_starts)
    return _indices(top_k_per_row(score, topk, row_starts, ends, index_base="offset", offsets=topk_indices_offset))


def sglang_topk_transform_paged(
    score: torch.Tensor,
    lengths: torch.Tensor,
    page_table_size_1: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    topk: int,
    row_starts: torch.Tensor | None = None,
) -> torch.Tensor:
    """``sgl_kernel.fast_topk_transform_fused``: physical slots, by a table of pages of one token.

    Args:
        score, lengths, topk, row_starts: as :func:`sglang_fast_topk`.
        page_table_size_1: [requests, capacity] int32; row r holds the slots of request r, position by position.
        cu_seqlens_q: [requests + 1] int32, first row of each request in ``score``, ascending.

    Returns:
        [B, topk] int32, ``-1`` in unused slots.

    Raises:
        As :func:`sglang_fast_topk`.
    """
    rows, requests = score.shape[0], page_table_size_1.shape[0]
    table = page_table_size_1
    if requests != rows:
        row = torch.arange(rows, device=score.device, dtype=torch.int32)
        table = table[torch.searchsorted(cu_seqlens_q[1:], row, right=True).clamp_(max=requests - 1)]
    ends = _ends(lengths, row_starts)
    return _indices(top_k_per_row(score, topk, row_starts, ends, index_base="page", page_table=table, page_size=1))


def _rows(logits: torch.Tensor, rows: int, stride0: int, stride1: int) -> torch.Tensor:
    """The first rows of logits, which the strides describe."""
    if rows > logits.shape[0]:
        raise ValueError(f"num_rows: got {rows}, expected at most {logits.shape[0]}, the rows of logits")
    if rows > 1 and stride0 != logits.stride(0):
        raise ValueError(f"stride0: got {stride0}, expected {logits.stride(0)}, the row stride of logits")
    if logits.shape[1] > 1 and stride1 != logits.stride(1):
        raise ValueError(f"stride1: got {stride1}, expected {logits.stride(1)}, the column stride of logits")
    return first(logits, rows)


# A view costs a microsecond or two, and engines mostly give what is asked for.


def first(tensor: torch.Tensor, rows: int) -> torch.Tensor:
    """The first rows of a tensor, itself where it has no more."""
    return tensor if tensor.shape[0] == rows else tensor[:rows]


def corner(tensor: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """The first columns of the first rows of a tensor [.., ..]."""
    return tensor if tensor.shape == (rows, columns) else tensor[:rows, :columns]


def _lengths(seq_lens: torch.Tensor, next_n: int, rows: int) -> torch.Tensor:
    """[rows] int32 candidates of each row of a decode step: given, or derived from one length a sequence."""
    count = seq_lens.numel()
    if count * next_n == rows and seq_lens.dim() == 1 and next_n > 1:
        token = torch.arange(next_n, device=seq_lens.device, dtype=torch.int32)
        return (seq_lens[:, None] - (next_n - 1) + token).reshape(-1)
    if count != rows:
        raise ValueError(
            f"seq_lens: got {count} lengths, expected {rows // next_n}, one a sequence, or {rows}, one a row"
        )
    return seq_lens if seq_lens.dim() == 1 else seq_lens.reshape(-1)


def _ends(lengths: torch.Tensor, row_starts: torch.Tensor | None) -> torch.Tensor:
    return lengths if row_starts is None else lengths + row_starts


def _indices(result: torch.Tensor | tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    assert isinstance(result, torch.Tensor)
    return result
