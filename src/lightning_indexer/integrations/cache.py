"""The indexer's cache under the names that vLLM (0.33, ``vllm._custom_ops``) and AITER have for it.

AITER's functions have a last argument more, ``preshuffle``; its default is vLLM's order.
"""

from __future__ import annotations

import torch

import lightning_indexer
from lightning_indexer.arch import arch_of
from lightning_indexer.fp8 import FP8_DTYPES
from lightning_indexer.problems.cache_layout import SCALE_BYTES, CacheLayout
from lightning_indexer.problems.checks import as_bool, as_int, shape_of


def indexer_k_quant_and_cache(
    k: torch.Tensor,
    kv_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    quant_block_size: int,
    scale_fmt: str,
    preshuffle: bool = False,
) -> None:
    """``indexer_k_quant_and_cache`` of ``vllm._custom_ops`` and of ``aiter``.

    Args:
        k: [T, D] bfloat16, float16 or float32, any row stride.
        kv_cache: [blocks, page, D + 4] or [blocks, page, 1, D + 4], uint8 or fp8; written.
        slot_mapping: [T] int64; negative slots are skipped.
        quant_block_size: channels of a scale; D, as the indexers have it.
        scale_fmt: ``"ue8m0"`` rounds scales up to powers of two, stored as float32; ``""`` and ``"fp32"`` do not.
        preshuffle: values lie as ``[page/16, D/16, 16, 16]``.

    Values are e4m3fn, or e4m3fnuz on gfx942.

    Raises:
        TypeError, ValueError: as :func:`lightning_indexer.insert_k_cache`; another block size or format.
    """
    if as_int("quant_block_size", quant_block_size) != k.shape[-1]:
        raise ValueError(f"quant_block_size: got {quant_block_size}, expected {k.shape[-1]}, D: a key has one scale")
    if scale_fmt not in ("ue8m0", "", "fp32", None):
        raise ValueError(f"scale_fmt: got {scale_fmt!r}, expected 'ue8m0', 'fp32' or ''")
    dtype = torch.float8_e4m3fnuz if arch_of(k.device).fp8 == "fnuz" else torch.float8_e4m3fn
    layout = CacheLayout(
        kv_cache.shape[1], k.shape[-1], "preshuffled" if as_bool("preshuffle", preshuffle) else "flat",
        "power of two" if scale_fmt == "ue8m0" else "float32", dtype,
    )  # fmt: skip
    lightning_indexer.insert_k_cache(k, kv_cache.view(torch.uint8), slot_mapping, layout=layout)


def cp_gather_indexer_k_quant_cache(
    kv_cache: torch.Tensor,
    dst_k: torch.Tensor,
    dst_scale: torch.Tensor,
    block_table: torch.Tensor,
    cu_seq_lens: torch.Tensor,
    preshuffle: bool = False,
) -> None:
    """``cp_gather_indexer_k_quant_cache`` of ``vllm._custom_ops`` and of ``aiter``.

    Bytes are copied, so it serves fp4 caches too: rows of D / 2 bytes, and four scale bytes.

    Args:
        kv_cache: [blocks, page, bytes + 4] or [blocks, page, 1, bytes + 4], uint8 or fp8.
        dst_k: [N, bytes], contiguous, of a dtype of one byte; written up to row ``cu_seq_lens[-1]``.
        dst_scale: N words of 4 bytes, contiguous: [N, 4] uint8 or fp8, [N] or [N, 1] float32 or int32; written.
        block_table: [B, max_blocks] int32.
        cu_seq_lens: [B + 1] int32.
        preshuffle: values lie as ``[page/16, D/16, 16, 16]``.

    Raises:
        TypeError, ValueError: as :func:`lightning_indexer.gather_k_cache`; results of other sizes.
    """
    width = kv_cache.shape[-1] - SCALE_BYTES
    if dst_k.dim() != 2 or dst_k.shape[1] != width or dst_k.element_size() != 1 or not dst_k.is_contiguous():
        raise ValueError(
            f"dst_k: got shape {shape_of(dst_k)} of {dst_k.dtype}, expected [N, {width}] of a dtype of one byte, "
            f"contiguous, to match kv_cache of shape {shape_of(kv_cache)}"
        )
    if not dst_scale.is_contiguous() or dst_scale.numel() * dst_scale.element_size() != SCALE_BYTES * dst_k.shape[0]:
        raise ValueError(
            f"dst_scale: got shape {shape_of(dst_scale)} of {dst_scale.dtype}, expected {SCALE_BYTES} bytes for each "
            f"of {dst_k.shape[0]} keys, contiguous"
        )
    dtype = dst_k.dtype if dst_k.dtype in FP8_DTYPES else torch.float8_e4m3fn
    order = "preshuffled" if as_bool("preshuffle", preshuffle) else "flat"
    lightning_indexer.gather_k_cache(
        kv_cache.view(torch.uint8), block_table, cu_seq_lens, dst_k.shape[0],
        layout=CacheLayout(kv_cache.shape[1], width, order, dtype=dtype),  # type: ignore[arg-type]
        out=(dst_k.view(dtype), dst_scale.view(torch.uint8).view(-1).view(torch.float32)),
    )  # fmt: skip
