"""DeepGEMM's prefill and decode calls, in the three forms in which they are in use:

1. ``fp8_mqa_logits(q, kv, weights, start, end, clean_logits, max_seqlen_k)``: the first, a legacy call of the
   repository at 54e2261;
2. ``fp8_fp4_mqa_logits((q, None), kv, weights, start, end, clean_logits, max_seqlen_k, logits_dtype)``: that of the
   repository at 54e2261;
3. ``fp8_fp4_mqa_logits((q, None), kv, weights, start, end, max_seqlen_k, schedule_meta)``: that of the build inside the
   vLLM 0.33 wheel (``vllm.third_party.deep_gemm``). It has compressed logits only.

The decode calls are ``fp8_paged_mqa_logits(q, kv_cache, weights, context_lens, block_table, schedule_meta,
max_context_len, clean_logits, indices)``; ``fp8_fp4_paged_mqa_logits((q, None), ..., clean_logits, logits_dtype,
indices)``; and that without ``clean_logits`` and ``logits_dtype``. ``get_paged_mqa_logits_metadata`` gives them a
schedule that none of them reads.

The last two of each take fp4 operands (MXFP4: packed values, and four UE8M0 bytes a row). Nothing here multiplies in
fp4: operands of the prefill call become e4m3 with one scale a row, q's in the weights, and decode kernels convert the
cache as they read it. Exact where the exponents of a row's blocks lie within 14 of each other, see ``fp4_to_fp8``.

DeepGEMM aborts on sizes that it was not built for, such as H other than 32 and 64 on Hopper; these calls run them.
"""

from __future__ import annotations

import torch

import lightning_indexer
from lightning_indexer.arch import arch_of
from lightning_indexer.fp4 import fp4_to_fp8
from lightning_indexer.problems.cache_layout import SCALE_BYTES, CacheLayout
from lightning_indexer.problems.checks import as_bool, as_int, check_tensor, is_numpy_bool, shape_of

# Of a row: DeepGEMM's fp4 has D = 128.
FP4_BYTES = 64


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
    clean_logits: bool | int | None = None,
    max_seqlen_k: int | torch.Tensor | None = 0,
    logits_dtype: torch.dtype = torch.float32,
    schedule_meta: object = None,
) -> torch.Tensor:
    """``deep_gemm.fp8_fp4_mqa_logits``, of the repository and of the vLLM 0.33 wheel.

    The two differ from the sixth argument on. By position, a bool there is the repository's ``clean_logits``; an int is
    the wheel's ``max_seqlen_k``, and the seventh its ``schedule_meta``. By keyword, without ``clean_logits``, a width
    above 0 is the wheel's call: in the repository's it would contradict the default.

    Args:
        q: ``(q, None)``: [M, H, D] float8_e4m3fn; or fp4, ``(values, scales)``: [M, H, D / 2] int8 or uint8 and [M, H]
            int32, four UE8M0 bytes.
        kv: ``(k, kv_scale)``: [N, D] float8_e4m3fn and [N] float32; or fp4, [N, D / 2] int8 or uint8 and [N] int32.
        weights: [M, H] float32.
        cu_seq_len_k_start, cu_seq_len_k_end: [M] int32, each row's window; the end is exclusive.
        clean_logits: write ``-inf`` outside the windows; None: where the logits are not compressed.
        max_seqlen_k: if > 0, the width of compressed logits; ``clean_logits`` must not be True.
        logits_dtype: ``torch.float32`` or ``torch.bfloat16``.
        schedule_meta: ignored. DeepGEMM's schedule of its Blackwell kernel means nothing to other kernels.

    Returns:
        [M, N] of ``logits_dtype``, or [M, max_seqlen_k]: column j of row m is position ``cu_seq_len_k_start[m] + j``,
        and columns outside the window hold anything.

    Raises:
        TypeError: ``q`` is not a pair, or its scales are no UE8M0 bytes; two widths; also as
            :func:`lightning_indexer.fp8_mqa_logits`.
        ValueError: a width of 0 in the wheel's place for it; also as :func:`lightning_indexer.fp8_mqa_logits`.
    """
    values, weights = _fp8_of(q, weights)
    if isinstance(kv, (tuple, list)) and len(kv) == 2 and getattr(kv[0], "dtype", None) in _PACKED:
        kv = _converted("kv", kv[0], kv[1])
    if clean_logits is not None and not isinstance(clean_logits, bool) and not is_numpy_bool(clean_logits):
        width = int(as_int("clean_logits or max_seqlen_k, the sixth argument", clean_logits))
        # The seventh is then the schedule; a number there that is not the default is a second width.
        if isinstance(max_seqlen_k, int) and max_seqlen_k != 0:
            raise TypeError(
                f"max_seqlen_k: got {max_seqlen_k!r} beside {width} in the sixth place, expected one of them"
            )
        if width == 0:
            raise ValueError("max_seqlen_k: got 0, expected at least 1: this call has compressed logits only")
        clean = False
    else:
        width = int(as_int("max_seqlen_k", max_seqlen_k))
        clean = width == 0 if clean_logits is None else as_bool("clean_logits", clean_logits)
    return lightning_indexer.fp8_mqa_logits(
        values,
        kv,
        weights,
        cu_seq_len_k_start,
        cu_seq_len_k_end,
        clean_logits=clean,
        max_seqlen_k=width,
        out_dtype=logits_dtype,
    )


def get_paged_mqa_logits_metadata(
    context_lens: torch.Tensor, block_kv: int, num_sms: int, indices: torch.Tensor | None = None
) -> torch.Tensor:
    """``deep_gemm.get_paged_mqa_logits_metadata``: a schedule of the size that callers allocate, of zeros.

    The decode calls here find their schedule themselves, so this one may be older than the lengths.

    Args:
        context_lens: [B] or [B, next_n] int32.
        block_kv: keys of a page.
        num_sms: at least 1.
        indices: ignored.

    Returns:
        [num_sms + 1, 2] int32 on the device of ``context_lens``.

    Raises:
        TypeError, ValueError: ``context_lens`` is no int32 tensor of those shapes, or a number is not positive.
    """
    check_tensor("context_lens", context_lens, (torch.int32,))
    if context_lens.dim() not in (1, 2):
        raise ValueError(f"context_lens: got shape {shape_of(context_lens)}, expected [B] or [B, next_n]")
    for name, value in (("block_kv", block_kv), ("num_sms", num_sms)):
        if as_int(name, value) < 1:
            raise ValueError(f"{name}: got {value}, expected at least 1")
    return context_lens.new_zeros((int(num_sms) + 1, 2))


def fp8_paged_mqa_logits(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    weights: torch.Tensor,
    context_lens: torch.Tensor,
    block_table: torch.Tensor,
    schedule_meta: torch.Tensor | None,
    max_context_len: int,
    clean_logits: bool = False,
    indices: torch.Tensor | None = None,
) -> torch.Tensor:
    """``deep_gemm.fp8_paged_mqa_logits``, as at DeepGEMM 54e2261 and before it.

    Args:
        q: [B, next_n, H, D] float8_e4m3fn.
        kv_cache: [blocks, page, 1, D + 4] uint8, flat, with float32 scales.
        weights: [B * next_n, H] float32.
        context_lens: [B, next_n] int32, or [B], where row j sees ``context_lens[b] - next_n + 1 + j`` positions.
        block_table: [B, max_blocks] int32: a row for each of q, also where several of q are of one sequence.
        schedule_meta: ignored.
        max_context_len: columns of the result.
        clean_logits: write ``-inf`` behind each row's length.
        indices: ignored: [B], which of q are of one sequence, and so have the same row of ``block_table``.

    Returns:
        [B * next_n, max_context_len] float32. Rows are padded to 256 bytes, not to DeepGEMM's 1024.

    Raises:
        TypeError, ValueError: as :func:`lightning_indexer.fp8_paged_mqa_logits`.
    """
    if q.dim() == 4 and q.shape[1] == 1 and context_lens.dim() == 2:
        context_lens = context_lens.squeeze(1)  # what the call would do each time, with all of its checks
    return lightning_indexer.fp8_paged_mqa_logits(
        q, kv_cache, weights, context_lens, block_table, max_context_len, clean_logits=clean_logits
    )


def fp8_fp4_paged_mqa_logits(
    q: tuple[torch.Tensor, torch.Tensor | None],
    kv_cache: torch.Tensor,
    weights: torch.Tensor,
    context_lens: torch.Tensor,
    block_table: torch.Tensor,
    schedule_meta: torch.Tensor | None,
    max_context_len: int,
    clean_logits: bool | torch.Tensor | None = None,
    logits_dtype: torch.dtype = torch.float32,
    indices: torch.Tensor | None = None,
) -> torch.Tensor:
    """``deep_gemm.fp8_fp4_paged_mqa_logits``, of the repository and of the vLLM 0.33 wheel.

    The two differ in the eighth argument: the repository's ``clean_logits``, or the wheel's ``indices``.

    Args:
        q: ``(q, None)``: [B, next_n, H, D] float8_e4m3fn; or fp4, ``(values, scales)``: [B, next_n, H, D / 2] int8 or
            uint8 and [B, next_n, H] int32, four UE8M0 bytes.
        kv_cache: as in :func:`fp8_paged_mqa_logits`, or fp4: [blocks, page, 1, D / 2 + 4] uint8.
        clean_logits: write ``-inf`` behind each row's length; None: no. A tensor is the wheel's ``indices``.
        logits_dtype: ``torch.float32`` or ``torch.bfloat16``.
        weights, context_lens, block_table, schedule_meta, max_context_len, indices: as in
            :func:`fp8_paged_mqa_logits`.

    Returns:
        [B * next_n, max_context_len] of ``logits_dtype``.

    Raises:
        TypeError: ``q`` is not a pair, or its scales are no UE8M0 bytes; also as
            :func:`lightning_indexer.fp8_paged_mqa_logits`.
        ValueError: as :func:`lightning_indexer.fp8_paged_mqa_logits`.
    """
    values, weights = _fp8_of(q, weights.reshape(q[0].shape[:3]) if _is_fp4(q) else weights)
    if clean_logits is None or isinstance(clean_logits, torch.Tensor):
        clean_logits = False
    if values.dim() == 4 and values.shape[1] == 1 and context_lens.dim() == 2:
        context_lens = context_lens.squeeze(1)
    head_dim = values.shape[-1]
    layout = None
    if kv_cache.dim() > 1 and kv_cache.shape[-1] == head_dim // 2 + SCALE_BYTES:
        layout = CacheLayout.fp4(kv_cache.shape[1], head_dim)
    return lightning_indexer.fp8_paged_mqa_logits(
        values, kv_cache, weights.flatten(0, -2), context_lens, block_table, max_context_len, layout=layout,
        clean_logits=clean_logits, out_dtype=logits_dtype,
    )  # fmt: skip


# DeepGEMM's tag of packed fp4, and the bytes themselves.
_PACKED = (torch.int8, torch.uint8)


def _is_fp4(q: object) -> bool:
    return isinstance(q, (tuple, list)) and len(q) == 2 and q[1] is not None


def _fp8_of(q: tuple[torch.Tensor, torch.Tensor | None], weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """q in e4m3, and the weights, which fp4 q's scales go into."""
    if not isinstance(q, (tuple, list)) or len(q) != 2:
        raise TypeError(f"q: got {type(q).__name__}, expected the pair (q, None), or fp4, (values, scales)")
    values, scale = q
    if scale is None:
        return values, weights
    values, row_scale = _converted("q", values, scale)
    return values, weights.float() * row_scale


def _converted(name: str, values: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """e4m3 and float32 scales of packed fp4 rows and their UE8M0 bytes."""
    check_tensor(name, values, _PACKED, ": values of fp4 are packed, two a byte")
    check_tensor(f"{name}'s scales", scale, (torch.int32,), ": four UE8M0 bytes, one for each 32 channels")
    rows = values.shape[:-1]
    if values.shape[-1] != FP4_BYTES or scale.numel() != rows.numel():
        raise ValueError(
            f"{name}: got shape {shape_of(values)} with scales {shape_of(scale)}, expected [..., {FP4_BYTES}] and an "
            "int32 a row"
        )
    dtype = torch.float8_e4m3fnuz if arch_of(values.device).fp8 == "fnuz" else torch.float8_e4m3fn
    return fp4_to_fp8(values, scale.contiguous().view(torch.uint8).view(*rows, SCALE_BYTES), dtype)
