"""Scores and selection in one call over a paged cache: facts, checks and reference, as ``problems/mqa_topk.py``."""

from __future__ import annotations

from typing import NamedTuple

import torch

from lightning_indexer.arch import Arch
from lightning_indexer.problems import one_call, paged_mqa_logits
from lightning_indexer.problems.cache_layout import CacheLayout
from lightning_indexer.problems.checks import as_int, check_tensor, shape_of
from lightning_indexer.problems.mqa_logits import row_stride
from lightning_indexer.problems.one_call import WORKSPACE_BYTES, OneCallProblem
from lightning_indexer.problems.paged_mqa_logits import (
    PagedMqaLogitsCall,
    PagedMqaLogitsProblem,
    reference_paged_logits,
    row_lengths,
)
from lightning_indexer.problems.top_k import IndexBase, Order, Tie, reference_top_k

OPERATION = "fp8_paged_mqa_topk"


class PagedMqaTopKProblem(OneCallProblem):
    """The facts of a call over pages: rows begin at 0 and end at their lengths."""

    __slots__ = ()
    scoring: PagedMqaLogitsProblem

    @property
    def operation(self) -> str:
        return OPERATION

    def adversarial(self, arch: Arch) -> PagedMqaTopKProblem:
        """A small problem of the same H, D, k, layout and options."""
        scoring = self.scoring.adversarial(arch)
        page = scoring.layout.page
        blocks = max(scoring.max_blocks, -(-(self.k + 300) // page))
        scoring = scoring._replace(max_blocks=blocks, width=blocks * page - page // 3)
        selection = self.selection._replace(rows=scoring.rows, width=scoring.width)
        return self._replace(scoring=scoring, selection=selection, workspace_bytes=WORKSPACE_BYTES)

    def example(self, device: torch.device) -> PagedMqaTopKCall:
        """A call of this problem with operands that are the same at each time, into results that no kernel writes."""
        return _example(self, device)


class PagedMqaTopKCall(NamedTuple):
    """The tensors of one call, validated.

    ``q`` to ``layout`` and ``sequences``, its ``indices``, as in ``PagedMqaLogitsCall``; ``offsets``, ``page_table``,
    ``indices`` and ``values``, of ``B * next_n`` rows, as in ``TopKCall``. ``workspace``: uint8 [bytes], contiguous, on
    a 16-byte boundary, of the run's ``workspace_bytes``; None: the run allocates it.
    """

    q: torch.Tensor
    kv_cache: torch.Tensor
    weights: torch.Tensor
    context_lens: torch.Tensor
    block_tables: torch.Tensor
    layout: CacheLayout
    sequences: torch.Tensor | None
    offsets: torch.Tensor | None
    page_table: torch.Tensor | None
    indices: torch.Tensor
    values: torch.Tensor | None = None
    workspace: torch.Tensor | None = None


class PagedMqaTopKArguments(NamedTuple):
    """The arguments of ``fp8_paged_mqa_topk``; ``sequences`` is its ``indices``."""

    q: torch.Tensor
    kv_cache: torch.Tensor
    weights: torch.Tensor
    context_lens: torch.Tensor
    block_tables: torch.Tensor
    k: int
    max_context_len: int | None = None
    layout: CacheLayout | None = None
    sequences: torch.Tensor | None = None
    index_base: str = "row"
    offsets: torch.Tensor | None = None
    page_table: torch.Tensor | None = None
    page_size: int | None = None
    order: str = "index"
    tie: str = "smaller"
    force_first: int = 0
    force_last: int = 0
    values: torch.Tensor | bool | None = None
    out: torch.Tensor | None = None
    workspace: torch.Tensor | int | None = None
    backend: str | None = None


def validate(call: PagedMqaTopKArguments) -> PagedMqaTopKArguments:
    """Checks one call's arguments; returns them normalised, with ``layout``, ``max_context_len``, ``values`` and, for
    physical slots, ``page_table`` no longer None. ``max_context_len`` is then no more than the block table holds.

    Raises:
        TypeError, ValueError: as ``fp8_paged_mqa_logits`` and ``top_k_per_row``; kept positions that are negative or
            more than k; a workspace that cannot hold the scores of a sequence's rows.
    """
    if call.max_context_len is None:
        call = call._replace(max_context_len=_longest(call))
    scoring = paged_mqa_logits.validate(scoring_of(call))
    assert scoring.layout is not None
    batch, next_n = scoring.q.shape[:2]
    width = min(scoring.max_context_len, scoring.block_tables.shape[1] * scoring.layout.page)
    call = PagedMqaTopKArguments._make((*scoring[:5], call.k, width, scoring.layout, scoring.indices, *call[9:]))
    if call.index_base == "page" and call.page_table is None:
        if call.page_size not in (None, scoring.layout.page):
            raise ValueError(f"page_size: got {call.page_size}, expected {scoring.layout.page}, that of block_tables")
        tables = tables_of_rows(scoring.block_tables, scoring.indices, next_n)
        call = call._replace(page_table=tables, page_size=scoring.layout.page)
    row_bytes = 4 * next_n * row_stride(width, torch.float32)
    validated: PagedMqaTopKArguments = one_call.validate_options(call, batch * next_n, scoring.q.device, row_bytes)
    return validated


def _longest(call: PagedMqaTopKArguments) -> int:
    """What the block table can hold; the scoring's own checks say what is wrong with operands of other shapes."""
    check_tensor("block_tables", call.block_tables, (torch.int32,), ": pass block_tables.to(torch.int32)")
    if call.block_tables.dim() != 2:
        raise ValueError(f"block_tables: got shape {shape_of(call.block_tables)}, expected [B, max_blocks]")
    layout = call.layout if isinstance(call.layout, CacheLayout) else CacheLayout.implied(call.kv_cache)
    return int(call.block_tables.shape[1]) * int(as_int("layout.page", layout.page))


def tables_of_rows(block_tables: torch.Tensor, sequences: torch.Tensor | None, next_n: int) -> torch.Tensor:
    """[B * next_n, max_blocks]: the block table of each row; the table itself where rows and sequences are one."""
    if sequences is not None:  # which is not read where a row sees nothing, and may hold anything there
        block_tables = block_tables[sequences.long().clamp(0, max(0, block_tables.shape[0] - 1))]
    return block_tables if next_n == 1 else block_tables.repeat_interleave(next_n, 0)


def scoring_of(call: PagedMqaTopKArguments) -> PagedMqaLogitsCall:
    """The scoring of the whole call, without a result."""
    width = call.max_context_len
    assert width is not None
    return PagedMqaLogitsCall(*call[:5], width, call.layout, call.sequences, clean_logits=False)


def problem_of(call: PagedMqaTopKArguments) -> PagedMqaTopKProblem:
    """The facts of a validated call."""
    scoring = paged_mqa_logits.problem_of(scoring_of(call))
    selection = one_call.selection_of(call, scoring.rows, scoring.width, starts=False)
    return PagedMqaTopKProblem(
        scoring, selection, call.force_first, call.force_last, one_call.workspace_bytes(call)
    )  # fmt: skip


def row_ends(context_lens: torch.Tensor, next_n: int) -> torch.Tensor:
    """int32 [B * next_n] ends of the rows, unclamped; a view where lengths are those of the rows already."""
    if context_lens.dim() == 2 or next_n == 1:
        return context_lens.reshape(-1)
    steps = torch.arange(1 - next_n, 1, device=context_lens.device, dtype=torch.int32)
    return (context_lens[:, None] + steps).reshape(-1)


def reference_paged_mqa_topk(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    weights: torch.Tensor,
    context_lens: torch.Tensor,
    block_tables: torch.Tensor,
    k: int,
    max_context_len: int,
    *,
    layout: CacheLayout | None = None,
    indices: torch.Tensor | None = None,
    index_base: IndexBase = "row",
    offsets: torch.Tensor | None = None,
    page_table: torch.Tensor | None = None,
    page_size: int = 1,
    order: Order = "index",
    tie: Tie = "smaller",
    force_first: int = 0,
    force_last: int = 0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The reference: ``reference_paged_logits``, +inf at the kept positions, ``reference_top_k``. Arguments as in
    ``fp8_paged_mqa_topk``; reads lengths on the host.

    Returns:
        Indices int32 [B * next_n, k] and scores float32 [B * next_n, k], as ``reference_top_k``.
    """
    page = layout.page if layout is not None else kv_cache.shape[1]
    logits = reference_paged_logits(
        q, kv_cache, weights, context_lens, block_tables, max_context_len, layout=layout, indices=indices
    )
    ends = row_lengths(context_lens, q.shape[1], min(max_context_len, block_tables.shape[1] * page)).reshape(-1)
    one_call.keep(logits, torch.zeros_like(ends), ends, force_first, force_last)
    return reference_top_k(
        logits, k, None, ends, index_base=index_base, offsets=offsets, page_table=page_table, page_size=page_size,
        order=order, tie=tie,
    )  # fmt: skip


def _example(problem: PagedMqaTopKProblem, device: torch.device) -> PagedMqaTopKCall:
    scoring = problem.scoring.example(device)
    assert scoring.layout is not None
    layout, cache = scoring.layout, scoring.kv_cache
    generator = torch.Generator("cpu").manual_seed(problem.k)
    keys = torch.empty((cache.shape[0], layout.page, layout.head_dim))
    one_call.exact_operands(scoring.q, keys, scoring.weights, generator)
    scale = torch.tensor([1.0, 0.5, 2.0]).repeat(keys.shape[0] * layout.page)[: keys.shape[0] * layout.page]
    cache.copy_(layout.pack(keys.to(layout.dtype), scale.view(keys.shape[:2])).to(device).view(cache.shape))
    lengths = scoring.context_lens
    indices, values = one_call.unwritten(problem.selection, device)
    return PagedMqaTopKCall(
        scoring.q, cache, scoring.weights, lengths, scoring.block_tables, layout, scoring.indices,
        *one_call.bases(problem.selection, device), indices, values,
    )  # fmt: skip
