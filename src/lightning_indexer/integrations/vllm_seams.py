"""What stands in place of vLLM 0.33's functions, seam by seam.

Prefill on CUDA scores a chunk, and hands the logits to a selection. Where both are replaced, and the layer between them
is the known one, scoring returns its arguments instead (:class:`Pending`), and selection scores and selects some rows
at a time: no [M, N] logits, and so no budget for them in the planner. Who reads scores for another purpose, the
candidate blocks of DeepSeek-V4.1 and the merge of decode context parallelism, is given them.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

import lightning_indexer
from lightning_indexer import envs
from lightning_indexer.fp8 import FP8_DTYPES
from lightning_indexer.integrations import aiter, cache, deep_gemm, top_k
from lightning_indexer.integrations.notes import Notes
from lightning_indexer.integrations.patching import Function, Seam
from lightning_indexer.integrations.window_selection import WORKSPACE_BYTES, select_in_windows
from lightning_indexer.problems.mqa_logits import row_stride
from lightning_indexer.problems.top_k import MAX_K

LAYER = "vllm.model_executor.layers.sparse_attn_indexer"
DEEP_GEMM = "vllm.utils.deep_gemm"
ROCM = "vllm.v1.attention.ops.rocm_aiter_mla_sparse"
CUSTOM_OPS = "vllm._custom_ops"
INDEXER_TOPK = "vllm.model_executor.layers.indexer_topk"
PLANNER = "vllm.v1.attention.backends.mla.indexer"
# patching.text_of the function between scoring and selection, of 0.33.0.
LAYER_TEXT = "1ed9bd170c15eda1"

_WINDOWS = ("cu_seqlen_ks", "cu_seqlen_ke")
_SCORES = (torch.float32, torch.bfloat16, torch.float16)
_UNLIMITED = 2**62  # bytes
# MiB: four rows of a million keys.
LEAST_BUDGET = 16


@dataclass(slots=True)
class State:
    """What calls of this process came to, for the planner: chunks that were selected from without logits of their own,
    and those whose scores were made or read; and what their scores may take at a time."""

    fused: int = 0
    read: int = 0
    workspace_bytes: int = WORKSPACE_BYTES


@dataclass(slots=True)
class Pending:
    """A scoring call that has not run, in place of its compressed logits: as much of them as vLLM's layer looks at."""

    q: torch.Tensor
    kv: tuple[torch.Tensor, torch.Tensor]
    weights: torch.Tensor
    ks: torch.Tensor
    ke: torch.Tensor
    width: int
    state: State
    logits: torch.Tensor | None = None

    dtype = torch.float32

    @property
    def shape(self) -> tuple[int, int]:
        return self.q.shape[0], self.width

    def stride(self, dim: int) -> int:
        return row_stride(self.width, torch.float32) if dim == 0 else 1

    def read(self) -> torch.Tensor:
        """The logits, made at the first time."""
        if self.logits is None:
            self.state.read += 1
            self.logits = lightning_indexer.fp8_mqa_logits(
                self.q, self.kv, self.weights, self.ks, self.ke, clean_logits=False, max_seqlen_k=self.width
            )
        return self.logits

    def select(self, starts: torch.Tensor, ends: torch.Tensor, out: torch.Tensor) -> None:
        """The best of columns [starts, ends) of each row, relative to its start."""
        self.state.fused += 1
        ks, ke = self.ks + starts, torch.minimum(self.ke, self.ks + ends)
        select_in_windows(
            self.q, self.kv, self.weights, ks, ke, out, width=self.width, workspace=self.state.workspace_bytes
        )


def seams(names: tuple[str, ...], platform: str, notes: Notes, *, deferred: bool) -> list[Seam]:
    """The seams of these names; ``deferred``: vLLM's layer is the known one, and prefill may be fused."""
    state = State(workspace_bytes=_logits_budget())
    made = _rocm(notes) if platform == "rocm" else _cuda(notes, state)
    deferring = deferred and platform == "cuda" and {"prefill", "prefill-topk"} <= set(names)
    found = list(made["deferred"]) if deferring else []
    for name in names:
        found += made.get(name, ())
    return found


def _logits_budget() -> int:
    """What vLLM's memory profile leaves to a chunk's logits, and its planner keeps to, in bytes."""
    megabytes = getattr(sys.modules.get("vllm.envs"), "VLLM_SPARSE_INDEXER_MAX_LOGITS_MB", None)
    return WORKSPACE_BYTES if megabytes is None else max(int(megabytes), LEAST_BUDGET) * 2**20


# CUDA


def _cuda(notes: Notes, state: State) -> dict[str, tuple[Seam, ...]]:
    scoring = ("q", "kv", "weights", *_WINDOWS, "max_seqlen_k")
    paged = (
        "q", "kv_cache", "weights", "context_lens", "block_tables", "schedule_metadata", "max_model_len", "indices",
    )  # fmt: skip
    selecting = ("logits", *_WINDOWS, "raw_topk_indices", "num_rows", "stride0", "stride1", "topk_tokens")

    def make(function: Callable[..., Function], **options: Any) -> Callable[[Function], Function]:
        return functools.partial(function, notes=notes, **options)

    reader = functools.partial(Seam, (LAYER,), parameters=("logits",), make=_reading, more=True, alone=True)
    return {
        "deferred": (
            Seam((LAYER,), "fp8_fp4_mqa_logits", scoring, make(_prefill, state=state, defer=True), alone=True),
            reader("_select_candidate_blocks"),
            reader("_apply_candidate_mask"),
            reader("_merge_dcp_topk_global", make=_merging),
        ),
        "cache": (
            Seam(
                (CUSTOM_OPS,),
                "indexer_k_quant_and_cache",
                ("k", "kv_cache", "slot_mapping", "quant_block_size", "kv_cache_dtype"),
                make(_insert),
            ),
            Seam(
                (CUSTOM_OPS,),
                "cp_gather_indexer_k_quant_cache",
                ("kv_cache", "dst_k", "dst_scale", "block_table", "cu_seq_lens"),
                make(_gather),
            ),
        ),
        "prefill": (Seam((DEEP_GEMM, LAYER), "fp8_fp4_mqa_logits", scoring, make(_prefill, state=state, defer=False)),),
        "prefill-topk": (Seam((CUSTOM_OPS,), "top_k_per_row_prefill", selecting, make(_prefill_top_k)),),
        "decode": (Seam((DEEP_GEMM, LAYER), "fp8_fp4_paged_mqa_logits", paged, make(_decode)),),
        "decode-topk": (Seam((INDEXER_TOPK, LAYER), "get_indexer_topk", ("backend",), make(_decode_top_k)),),
        "planner": (
            Seam(
                (PLANNER,),
                "_split_indexer_prefill_chunks",
                (
                    "compressed_seq_lens_cpu",
                    "prefill_query_lens_cpu",
                    "workspace_size",
                    "max_logits_bytes",
                    "request_offset",
                ),
                functools.partial(Planner, state=state, notes=notes),
                owner="DeepseekV32IndexerMetadataBuilder",
            ),
        ),
    }


def _insert(original: Function, *, notes: Notes) -> Function:
    def indexer_k_quant_and_cache(
        k: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
        quant_block_size: int,
        kv_cache_dtype: str,
    ) -> None:
        width = kv_cache.shape[-1]
        if kv_cache_dtype not in ("ue8m0", "", "fp32") or quant_block_size != k.shape[-1] or width != k.shape[-1] + 4:
            notes.passed_on(
                f"a cache of {width} bytes a key, format {kv_cache_dtype!r}, {quant_block_size} channels a scale"
            )
            original(k, kv_cache, slot_mapping, quant_block_size, kv_cache_dtype)
            return
        cache.indexer_k_quant_and_cache(k, kv_cache, slot_mapping, quant_block_size, kv_cache_dtype)
        notes.took("cache, insertion", "k %s, page %d", k.shape, kv_cache.shape[1])

    return indexer_k_quant_and_cache


def _gather(original: Function, *, notes: Notes) -> Function:
    def cp_gather_indexer_k_quant_cache(
        kv_cache: torch.Tensor,
        dst_k: torch.Tensor,
        dst_scale: torch.Tensor,
        block_table: torch.Tensor,
        cu_seq_lens: torch.Tensor,
    ) -> None:
        if dst_k.dtype not in FP8_DTYPES or kv_cache.shape[-1] != dst_k.shape[-1] + 4:
            notes.passed_on(f"a gather of {dst_k.dtype}, {kv_cache.shape[-1]} bytes a key")
            original(kv_cache, dst_k, dst_scale, block_table, cu_seq_lens)
            return
        cache.cp_gather_indexer_k_quant_cache(kv_cache, dst_k, dst_scale, block_table, cu_seq_lens)
        notes.took("cache, gather", "k %s, page %d", dst_k.shape, kv_cache.shape[1])

    return cp_gather_indexer_k_quant_cache


def _prefill(original: Function, *, notes: Notes, state: State, defer: bool) -> Function:
    def fp8_fp4_mqa_logits(
        q: tuple[torch.Tensor, torch.Tensor | None],
        kv: tuple[torch.Tensor, torch.Tensor],
        weights: torch.Tensor,
        cu_seqlen_ks: torch.Tensor,
        cu_seqlen_ke: torch.Tensor,
        max_seqlen_k: int,
    ) -> torch.Tensor | Pending:
        values, scale = q
        if scale is not None:
            reason: str | None = "q has scales, which makes it FP4 or MX"
        elif max_seqlen_k < 1:
            reason = f"max_seqlen_k is {max_seqlen_k}"
        else:
            reason = _not_plain_fp8(values, kv, weights)
        if reason is not None:
            state.read += 1
            notes.passed_on(reason)
            theirs: torch.Tensor = original(q, kv, weights, cu_seqlen_ks, cu_seqlen_ke, max_seqlen_k)
            return theirs
        if not notes.first_call_told:
            notes.tell_first_call(values, kv[0], max_seqlen_k, False, None)
        if defer:
            return Pending(values, kv, weights, cu_seqlen_ks, cu_seqlen_ke, max_seqlen_k, state)
        state.read += 1
        return lightning_indexer.fp8_mqa_logits(
            values, kv, weights, cu_seqlen_ks, cu_seqlen_ke, clean_logits=False, max_seqlen_k=max_seqlen_k
        )

    return fp8_fp4_mqa_logits


def _prefill_top_k(original: Function, *, notes: Notes) -> Function:
    def top_k_per_row_prefill(
        logits: torch.Tensor | Pending,
        cu_seqlen_ks: torch.Tensor,
        cu_seqlen_ke: torch.Tensor,
        raw_topk_indices: torch.Tensor,
        num_rows: int,
        stride0: int,
        stride1: int,
        topk_tokens: int,
    ) -> None:
        fits = topk_tokens <= MAX_K
        if isinstance(logits, Pending):
            if logits.logits is None and fits:
                out = top_k.corner(raw_topk_indices, num_rows, topk_tokens)
                logits.select(top_k.first(cu_seqlen_ks, num_rows), top_k.first(cu_seqlen_ke, num_rows), out)
                notes.took("prefill-topk", "scoring and selection in one, k=%d", topk_tokens)
                return
            logits = logits.read()
            stride0, stride1 = logits.stride()
        if not fits or logits.dtype not in _SCORES:
            notes.passed_on(f"k is {topk_tokens}, logits are {logits.dtype}")
            original(logits, cu_seqlen_ks, cu_seqlen_ke, raw_topk_indices, num_rows, stride0, stride1, topk_tokens)
            return
        top_k.vllm_top_k_per_row_prefill(
            logits, cu_seqlen_ks, cu_seqlen_ke, raw_topk_indices, num_rows, stride0, stride1, topk_tokens
        )
        notes.took("prefill-topk", "M=%d W=%d k=%d", num_rows, logits.shape[1], topk_tokens)

    return top_k_per_row_prefill


def _reading(original: Function) -> Function:
    """A function that reads scores, its first argument, and may change them."""

    def reads(logits: Any, *args: Any, **options: Any) -> Any:
        return original(logits.read() if isinstance(logits, Pending) else logits, *args, **options)

    return reads


def _merging(original: Function) -> Function:
    """``_merge_dcp_topk_global``, which reads nothing in a world of one."""

    def _merge_dcp_topk_global(
        logits: Any, topk_indices: Any, topk_tokens: int, dcp_rank: int, dcp_world_size: int, *args: Any, **options: Any
    ) -> None:
        if dcp_world_size > 1:
            real = logits.read() if isinstance(logits, Pending) else logits
            original(real, topk_indices, topk_tokens, dcp_rank, dcp_world_size, *args, **options)

    return _merge_dcp_topk_global


def _decode(original: Function, *, notes: Notes) -> Function:
    def fp8_fp4_paged_mqa_logits(
        q: tuple[torch.Tensor, torch.Tensor | None],
        kv_cache: torch.Tensor,
        weights: torch.Tensor,
        context_lens: torch.Tensor,
        block_tables: torch.Tensor,
        schedule_metadata: torch.Tensor,
        max_model_len: int,
        indices: torch.Tensor | None = None,
    ) -> torch.Tensor:
        values, scale = q
        reason = (
            "q has scales, which makes it FP4 or MX" if scale is not None else _not_plain_cache(q[0], kv_cache, weights)
        )
        # With ``indices`` vLLM repeats the table for each token: they say which rows have one in common.
        if reason is None and indices is not None and block_tables.shape[0] != values.shape[0]:
            reason = f"a block table of {block_tables.shape[0]} rows for {values.shape[0]} tokens"
        if reason is not None:
            notes.passed_on(reason)
            theirs: torch.Tensor = original(
                q, kv_cache, weights, context_lens, block_tables, schedule_metadata, max_model_len, indices
            )
            return theirs
        if context_lens.dim() == 2 and context_lens.shape[1] != values.shape[1]:
            context_lens = context_lens[:, 0]  # one length a sequence, which its last row sees
        result = deep_gemm.fp8_paged_mqa_logits(
            values, kv_cache, weights, context_lens, block_tables, None, max_model_len
        )
        notes.took("decode", "q %s, page %d", values.shape, kv_cache.shape[1])
        return result

    return fp8_fp4_paged_mqa_logits


def _decode_top_k(original: Function, *, notes: Notes) -> Function:
    @functools.cache
    def get_indexer_topk(backend: str) -> Function:
        theirs: Function = original(backend)
        if backend != "auto":
            notes.passed_on(f"vLLM's configuration names its own selection for decode, {backend}")
            return theirs

        def select(
            logits: torch.Tensor,
            seq_lens: torch.Tensor,
            next_n: int,
            topk_indices: torch.Tensor,
            topk_tokens: int,
            max_seq_len: int,
        ) -> None:
            rows = logits.shape[0]
            if topk_tokens > MAX_K or logits.dtype not in _SCORES:
                notes.passed_on(f"k is {topk_tokens}, logits are {logits.dtype}")
                theirs(logits, seq_lens, next_n, topk_indices, topk_tokens, max_seq_len)
                return
            lengths = seq_lens if seq_lens.numel() == rows else seq_lens.reshape(-1)
            top_k.vllm_top_k_per_row_decode(
                logits, next_n, lengths, topk_indices, rows, logits.stride(0), logits.stride(1), topk_tokens
            )
            notes.took("decode-topk", "M=%d W=%d k=%d", rows, logits.shape[1], topk_tokens)

        return select

    return get_indexer_topk


class Planner:
    """``_split_indexer_prefill_chunks`` without a logits budget, for builders whose chunks make no logits.

    The budget stays until a chunk has been scored and selected from in one, and comes back when scores are read.
    """

    def __init__(self, original: Function, *, state: State, notes: Notes) -> None:
        self.original, self.state, self.notes = original, state, notes

    def __call__(self, *args: Any, **options: Any) -> Any:
        return self.original(*args, **options)

    def __get__(self, builder: Any, owner: type) -> Function:
        if builder is None or self.state.fused == 0 or self.state.read > 0 or self._keeps_budget(builder, owner):
            return self.original
        return self._split

    def _keeps_budget(self, builder: Any, owner: type) -> bool:
        """Builders of other layers, and of layers whose scores are read by the merge of context parallelism."""
        return (
            vars(owner).get("_split_indexer_prefill_chunks") is not self
            or builder.dcp_world_size > 1
            or builder.use_pcp
        )

    def _split(
        self,
        compressed_seq_lens_cpu: torch.Tensor,
        prefill_query_lens_cpu: torch.Tensor,
        workspace_size: int,
        max_logits_bytes: int,
        request_offset: int = 0,
    ) -> Any:
        self.notes.took("planner", "chunks of %d keys and any number of rows", workspace_size)
        return self.original(
            compressed_seq_lens_cpu, prefill_query_lens_cpu, workspace_size, _UNLIMITED, request_offset=request_offset
        )


# ROCm


def _rocm(notes: Notes) -> dict[str, tuple[Seam, ...]]:
    return {
        "prefill": (
            Seam(
                (ROCM,), "rocm_fp8_mqa_logits", ("q", "kv", "weights", *_WINDOWS),
                functools.partial(_rocm_prefill, notes=notes),
            ),
        ),
        "prefill-topk": (
            Seam(
                (ROCM,),
                "_launch_aiter_top_k_per_row_prefill",
                ("logits", "row_starts", "row_ends", "indices", "topk_tokens"),
                functools.partial(_rocm_prefill_top_k, notes=notes),
            ),
        ),
        "decode": (
            Seam(
                (ROCM,),
                "rocm_fp8_paged_mqa_logits",
                (
                    "q_fp8", "kv_cache_fp8", "weights", "context_lens", "block_tables", "schedule_metadata",
                    "max_model_len", "compress_ratio",
                ),
                functools.partial(_rocm_decode, notes=notes),
            ),
        ),
    }  # fmt: skip


def _rocm_prefill(original: Function, *, notes: Notes) -> Function:
    def rocm_fp8_mqa_logits(
        q: torch.Tensor,
        kv: tuple[torch.Tensor, torch.Tensor],
        weights: torch.Tensor,
        cu_seqlen_ks: torch.Tensor,
        cu_seqlen_ke: torch.Tensor,
    ) -> torch.Tensor:
        if (reason := _not_plain_fp8(q, kv, weights)) is not None:
            notes.passed_on(reason)
            theirs: torch.Tensor = original(q, kv, weights, cu_seqlen_ks, cu_seqlen_ke)
            return theirs
        backend = rocm_backend()
        result = lightning_indexer.fp8_mqa_logits(
            q, kv, weights, cu_seqlen_ks, cu_seqlen_ke, clean_logits=False, backend=backend
        )
        if not notes.first_call_told:
            notes.tell_first_call(q, kv[0], 0, False, backend)
        return result

    return rocm_fp8_mqa_logits


def _rocm_prefill_top_k(original: Function, *, notes: Notes) -> Function:
    def _launch_aiter_top_k_per_row_prefill(
        logits: torch.Tensor,
        row_starts: torch.Tensor,
        row_ends: torch.Tensor,
        indices: torch.Tensor,
        topk_tokens: int,
    ) -> None:
        if topk_tokens > MAX_K or logits.dtype not in _SCORES:
            notes.passed_on(f"k is {topk_tokens}, logits are {logits.dtype}")
            original(logits, row_starts, row_ends, indices, topk_tokens)
            return
        lightning_indexer.top_k_per_row(
            logits, topk_tokens, row_starts, row_ends, order="any", out=indices[:, :topk_tokens],
            backend=rocm_backend(),
        )  # fmt: skip
        notes.took("prefill-topk", "M=%d W=%d k=%d", *logits.shape, topk_tokens)

    return _launch_aiter_top_k_per_row_prefill


def _rocm_decode(original: Function, *, notes: Notes) -> Function:
    def rocm_fp8_paged_mqa_logits(
        q_fp8: torch.Tensor,
        kv_cache_fp8: torch.Tensor,
        weights: torch.Tensor,
        context_lens: torch.Tensor,
        block_tables: torch.Tensor,
        schedule_metadata: torch.Tensor,
        max_model_len: int,
        *,
        compress_ratio: int = 1,
    ) -> torch.Tensor:
        reason = _not_plain_cache(q_fp8, kv_cache_fp8, weights)
        if rocm_backend() is not None:
            reason = "VLLM_ROCM_USE_AITER=0"
        if reason is not None:
            notes.passed_on(reason)
            theirs: torch.Tensor = original(
                q_fp8, kv_cache_fp8, weights, context_lens, block_tables, schedule_metadata, max_model_len,
                compress_ratio=compress_ratio,
            )  # fmt: skip
            return theirs
        result = aiter.rocm_fp8_paged_mqa_logits(
            q_fp8, kv_cache_fp8, weights, context_lens, block_tables, None, max_model_len,
            order="flat" if compress_ratio == 4 else None,
        )  # fmt: skip
        notes.took("decode", "q %s, page %d", q_fp8.shape, kv_cache_fp8.shape[1])
        return result

    return rocm_fp8_paged_mqa_logits


def rocm_backend() -> str | None:
    """What calls on ROCm name."""
    return "torch-blocked" if envs.vllm_without_aiter() else None


def _not_plain_fp8(q: torch.Tensor, kv: tuple[torch.Tensor, torch.Tensor], weights: torch.Tensor) -> str | None:
    """None for plain fp8 with float32 scales and weights; else what is not. MX scales are int32, FP4 is int8."""
    k, kv_scale = kv
    if q.dtype not in FP8_DTYPES or k.dtype not in FP8_DTYPES:
        return f"q is {q.dtype}, k is {k.dtype}"
    if kv_scale.dtype is not torch.float32 or weights.dtype is not torch.float32:
        return f"kv_scale is {kv_scale.dtype}, weights are {weights.dtype}"
    return None


def _not_plain_cache(q: torch.Tensor, kv_cache: torch.Tensor, weights: torch.Tensor) -> str | None:
    """None for fp8 q over a cache of bytes with a float32 scale a key."""
    if q.dtype not in FP8_DTYPES or weights.dtype is not torch.float32:
        return f"q is {q.dtype}, weights are {weights.dtype}"
    if kv_cache.dtype is not torch.uint8 or kv_cache.shape[-1] != q.shape[-1] + 4:
        return f"the cache is {kv_cache.dtype} of {kv_cache.shape[-1]} a key, with D={q.shape[-1]}"
    return None
