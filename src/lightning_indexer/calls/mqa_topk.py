"""``fp8_mqa_topk`` and ``fp8_paged_mqa_topk``: scores and selection in one call, and their custom operators."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.autograd import forward_ad

from lightning_indexer import envs
from lightning_indexer.arch import Arch, arch_of, assumed
from lightning_indexer.calls import common
from lightning_indexer.calls.mqa_logits import to_native_dialect
from lightning_indexer.problems import mqa_logits, mqa_topk, paged_mqa_logits, paged_mqa_topk
from lightning_indexer.problems.cache_layout import CacheLayout
from lightning_indexer.problems.mqa_topk import MqaTopKArguments, MqaTopKCall
from lightning_indexer.problems.paged_mqa_topk import PagedMqaTopKArguments, PagedMqaTopKCall
from lightning_indexer.problems.top_k import IndexBase, Order, Tie
from lightning_indexer.selection import registry

Result = torch.Tensor | tuple[torch.Tensor, torch.Tensor]


def fp8_mqa_topk(
    q: torch.Tensor,
    kv: tuple[torch.Tensor, torch.Tensor | None],
    weights: torch.Tensor,
    cu_seqlen_ks: torch.Tensor,
    cu_seqlen_ke: torch.Tensor,
    k: int,
    *,
    max_seqlen_k: int = 0,
    index_base: IndexBase = "row",
    offsets: torch.Tensor | None = None,
    page_table: torch.Tensor | None = None,
    page_size: int | None = None,
    order: Order = "index",
    tie: Tie = "smaller",
    force_first: int = 0,
    force_last: int = 0,
    values: torch.Tensor | bool | None = None,
    out: torch.Tensor | None = None,
    workspace: torch.Tensor | int | None = None,
    backend: str | None = None,
) -> Result:
    """The k best positions of each row's window: ``fp8_mqa_logits`` and ``top_k_per_row`` in one call.

    The result is that of the two calls on the same backend, bit for bit, and memory is bounded by the workspace, not by
    M * N. Nothing is read back to the host. docs/semantics.md states every edge case.

    Source: DeepSeek-V3.2 technical report, section 2.1, the indexer and its top-k selector.

    Args:
        q, kv, weights, cu_seqlen_ks, cu_seqlen_ke: as in :func:`fp8_mqa_logits`.
        k: 1 to 4096.
        max_seqlen_k: if > 0, no window has more positions: positions from ``ks + max_seqlen_k`` on are no candidates.
            Scores then take so many columns, not N, which is worth the most where many requests are packed.
        index_base, offsets, page_table, page_size, order, tie: as in :func:`top_k_per_row`, where a row's candidates
            are its window, clamped to ``[0, N)``.
        force_first, force_last: so many positions at the start and at the end of each window are always kept: their
            scores count as, and are returned as, +inf. Together at most k.
        values: True returns the scores too, float32 in the order of the indices; a tensor, [M, k] float32, takes them.
        out: [M, k] int32 to write into, last dimension contiguous, any row stride of at least k.
        workspace: bytes that scores may take at a time, at least a row of them: an int, or a uint8 tensor [bytes] on a
            16-byte boundary, which the call then works in; None: 64 MiB, or a row where that is more. What a tensor
            holds before and after means nothing; calls that may overlap need one each.
        backend: run this backend or raise; None lets the library (or ``LIGHTNING_INDEXER_BACKEND``) choose.

    Returns:
        Indices [M, k] int32, every slot written, ``-1`` behind the last where a row has fewer than k candidates; with
        ``values``, the pair of them and the scores [M, k] float32, ``-inf`` there. Not differentiable.

    Raises:
        TypeError, ValueError: a bad argument; the message names it, what came and what was expected.
        BackendUnavailableError: the backend asked for cannot run this call.
        NotImplementedError: an operand of ``torch.func``'s transforms, a tangent, or ``torch.jit.trace``.
    """
    if type(kv) is not tuple and isinstance(kv, torch.Tensor):
        raise TypeError("kv: got one tensor, expected the pair (k, kv_scale)")
    try:
        keys, kv_scale = kv
    except (TypeError, ValueError):
        raise TypeError(f"kv: got {type(kv).__name__}, expected the pair (k, kv_scale)") from None
    if kv_scale is None:
        kv_scale = mqa_logits.unit_scale(keys)
    call = MqaTopKArguments(
        q, keys, kv_scale, weights, cu_seqlen_ks, cu_seqlen_ke, k, max_seqlen_k, index_base, offsets, page_table,
        page_size, order, tie, force_first, force_last, values, out, workspace, backend,
    )  # fmt: skip
    if torch.compiler.is_compiling() or common.dispatch_modes() or common.needs_operator(common.tensors_of(call)):
        return _through_operator(call)
    return _run(_RAGGED, call)


def fp8_paged_mqa_topk(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    weights: torch.Tensor,
    context_lens: torch.Tensor,
    block_tables: torch.Tensor,
    k: int,
    *,
    max_context_len: int | None = None,
    layout: CacheLayout | None = None,
    indices: torch.Tensor | None = None,
    index_base: IndexBase = "row",
    offsets: torch.Tensor | None = None,
    page_table: torch.Tensor | None = None,
    page_size: int | None = None,
    order: Order = "index",
    tie: Tie = "smaller",
    force_first: int = 0,
    force_last: int = 0,
    values: torch.Tensor | bool | None = None,
    out: torch.Tensor | None = None,
    workspace: torch.Tensor | int | None = None,
    backend: str | None = None,
) -> Result:
    """The k best positions of each row of decode steps: ``fp8_paged_mqa_logits`` and ``top_k_per_row`` in one call.

    The result is that of the two calls on the same backend, bit for bit. Nothing is read back to the host: lengths and
    tables may change between the replays of a captured graph. docs/semantics.md states every edge case.

    Source: DeepSeek-V3.2 technical report, section 2.1, the indexer and its top-k selector.

    Args:
        q, kv_cache, weights, context_lens, block_tables, layout, indices: as in :func:`fp8_paged_mqa_logits`.
        k: 1 to 4096.
        max_context_len: no row sees more positions; None: what a row of ``block_tables`` can hold.
        index_base, offsets, order, tie: as in :func:`top_k_per_row`, for B * next_n rows whose candidates start at 0.
        page_table, page_size: likewise, with ``index_base="page"``; None: ``block_tables`` and the cache's page, so
            that indices are slots of the cache.
        force_first, force_last, values, out, workspace, backend: as in :func:`fp8_mqa_topk`; a workspace has room for
            next_n rows of scores at least.

    Returns:
        Indices [B * next_n, k] int32, and with ``values`` the scores, as :func:`fp8_mqa_topk`.

    Raises:
        As :func:`fp8_mqa_topk`, and for a cache that does not fit its layout.
    """
    call = PagedMqaTopKArguments(
        q, kv_cache, weights, context_lens, block_tables, k, max_context_len, layout, indices, index_base, offsets,
        page_table, page_size, order, tie, force_first, force_last, values, out, workspace, backend,
    )  # fmt: skip
    if torch.compiler.is_compiling() or common.dispatch_modes() or common.needs_operator(common.tensors_of(call)):
        return _paged_through_operator(call)
    return _run(_PAGED, call)


class _Kind(NamedTuple):
    """What the two operations do each in its own way."""

    operation: str
    validate: Callable[[Any], Any]
    check: Callable[[Any, Arch], None]
    problem_of: Callable[[Any], Any]
    record: Callable[[Any, torch.Tensor, torch.Tensor | None, torch.Tensor | None], Any]
    rows: Callable[[Any], int]


def _check_ragged(call: MqaTopKArguments, arch: Arch) -> None:
    mqa_logits.check_dialect(mqa_topk.scoring_of(call), arch)


def _check_paged(call: PagedMqaTopKArguments, arch: Arch) -> None:
    paged_mqa_logits.check_dialect(paged_mqa_topk.scoring_of(call), arch)
    paged_mqa_logits.check_address(call.kv_cache)


def _ragged_call(
    call: MqaTopKArguments, indices: torch.Tensor, values: torch.Tensor | None, workspace: torch.Tensor | None
) -> MqaTopKCall:
    return MqaTopKCall(*call[:6], call.offsets, call.page_table, indices, values, workspace)


def _paged_call(
    call: PagedMqaTopKArguments, indices: torch.Tensor, values: torch.Tensor | None, workspace: torch.Tensor | None
) -> PagedMqaTopKCall:
    assert call.layout is not None
    given = (*call[:5], call.layout, call.sequences, call.offsets, call.page_table)
    return PagedMqaTopKCall(*given, indices, values, workspace)


_RAGGED = _Kind(
    mqa_topk.OPERATION, mqa_topk.validate, _check_ragged, mqa_topk.problem_of, _ragged_call, lambda call: len(call.q)
)  # fmt: skip
_PAGED = _Kind(
    paged_mqa_topk.OPERATION, paged_mqa_topk.validate, _check_paged, paged_mqa_topk.problem_of, _paged_call,
    lambda call: call.q.shape[0] * call.q.shape[1],
)  # fmt: skip


class _Plan(NamedTuple):
    """What a call comes to, from its facts alone.

    ``run`` is None where there is nothing to write. ``settings``: options that validation fills in; None where operands
    have to be converted first. ``tables``: the block table is the page table. ``convert_to`` is set where an operand
    may not be in the arch's fp8 dialect.
    """

    run: registry.Run | None
    workspace_bytes: int
    settings: dict[str, Any] | None
    tables: bool
    convert_to: Arch | None


def _run(kind: _Kind, call: Any) -> Result:
    try:
        facts = (kind.operation, *map(_fact_of, call), _addresses(call) & 15, envs.selection(), assumed())
        plan = common.PLANS.get(facts)
    except (AttributeError, TypeError, RuntimeError):  # no tensor, not dense or not hashable: the checks say which
        plan = facts = None
    if common.functorch() is not None or common.tracing() is not None or forward_ad._current_level >= 0:
        common.refuse(kind.operation, common.tensors_of(call))
    if torch.is_grad_enabled() and any(getattr(operand, "requires_grad", False) for operand in call[:4]):
        common.warn_of_gradients(kind.operation)
    if plan is None:
        plan, settled = _plan(kind, call)
        if facts is not None and settled:
            common.keep(facts, plan)
    if plan.settings is None:
        call = kind.validate(call)
    else:
        call = call._replace(**plan.settings)
        if plan.tables:
            call = call._replace(page_table=call.block_tables)
    device, shape = call.q.device, (kind.rows(call), call.k)
    indices = torch.empty(shape, dtype=torch.int32, device=device) if call.out is None else call.out
    scores = call.values if isinstance(call.values, torch.Tensor) else None
    if call.values is True:
        scores = torch.empty(shape, dtype=torch.float32, device=device)
    if plan.run is not None:
        record = kind.record(call, indices, scores, common.workspace(call.workspace, plan.workspace_bytes, device))
        plan.run(record if plan.convert_to is None else to_native_dialect(record, plan.convert_to))
    return indices if scores is None else (indices, scores)


def _plan(kind: _Kind, call: Any) -> tuple[_Plan, bool]:
    """The plan of a call, and whether it may be kept."""
    checked = kind.validate(call)
    arch = arch_of(checked.q.device)
    kind.check(checked, arch)
    problem = kind.problem_of(checked)
    prepared = registry.prepare(problem, arch, checked.backend, checked.q.device)
    changed = {name: new for name, old, new in zip(call._fields, call, checked, strict=True) if new is not old}
    tables = kind is _PAGED and changed.get("page_table") is checked.block_tables
    if tables:
        del changed["page_table"]
    converted = any(isinstance(new, torch.Tensor) for new in changed.values())
    plan = _Plan(
        prepared.run if problem.rows else None,
        int(getattr(prepared.run, "workspace_bytes", 0)),
        None if converted else changed,
        tables,
        arch if arch.fp8 == "fnuz" and kind is _RAGGED else None,
    )
    return plan, prepared.settled


def _fact_of(argument: Any) -> object:
    if isinstance(argument, torch.Tensor):
        return argument.shape, argument.stride(), argument.dtype, argument.device, argument.is_neg()
    return argument.__class__, argument


def _addresses(call: Any) -> int:
    """The bits of the addresses of q and the keys."""
    return int(call[0].data_ptr() | call[1].data_ptr())


# The operators: their schemas are the one other place where the arguments are spelled. A workspace of the caller's is
# no argument of theirs: under torch.compile a tensor counts as its size.


@torch.library.custom_op("lightning_indexer::fp8_mqa_topk", mutates_args=())
def _operator(
    q: torch.Tensor,
    keys: torch.Tensor,
    kv_scale: torch.Tensor,
    weights: torch.Tensor,
    cu_seqlen_ks: torch.Tensor,
    cu_seqlen_ke: torch.Tensor,
    k: int,
    max_seqlen_k: int,
    index_base: str,
    offsets: torch.Tensor | None,
    page_table: torch.Tensor | None,
    page_size: int | None,
    order: str,
    tie: str,
    force_first: int,
    force_last: int,
    values: bool,
    workspace: int | None,
    backend: str | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    # Without values the second result is empty.
    tensors = [_plain(t) for t in (q, keys, kv_scale, weights, cu_seqlen_ks, cu_seqlen_ke)]
    indices, scores = _empty(q, q.shape[0], k, values)
    _run(_RAGGED, MqaTopKArguments._make((
        *tensors, k, max_seqlen_k, index_base, offsets, page_table, page_size, order, tie, force_first, force_last,
        scores if values else None, indices, workspace, backend,
    )))  # fmt: skip
    return indices, scores


@torch.library.custom_op("lightning_indexer::fp8_paged_mqa_topk", mutates_args=())
def _paged_operator(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    weights: torch.Tensor,
    context_lens: torch.Tensor,
    block_tables: torch.Tensor,
    k: int,
    max_context_len: int | None,
    page: int,
    head_dim: int,
    value_order: str,
    scales: str,
    cache_dtype: torch.dtype,
    indices: torch.Tensor | None,
    index_base: str,
    offsets: torch.Tensor | None,
    page_table: torch.Tensor | None,
    page_size: int | None,
    order: str,
    tie: str,
    force_first: int,
    force_last: int,
    values: bool,
    workspace: int | None,
    backend: str | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    tensors = [_plain(t) for t in (q, kv_cache, weights, context_lens, block_tables)]
    layout = CacheLayout(page, head_dim, value_order, scales, cache_dtype)  # type: ignore[arg-type]
    found, scores = _empty(q, q.shape[0] * q.shape[1], k, values)
    _run(_PAGED, PagedMqaTopKArguments._make((
        *tensors, k, max_context_len, layout, indices, index_base, offsets, page_table, page_size, order, tie,
        force_first, force_last, scores if values else None, found, workspace, backend,
    )))  # fmt: skip
    return found, scores


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    """Parameters, subclasses too, as the tensors they hold."""
    return tensor if type(tensor) is torch.Tensor else tensor.detach().as_subclass(torch.Tensor)


def _empty(q: torch.Tensor, rows: int, k: int, values: bool) -> tuple[torch.Tensor, torch.Tensor]:
    return q.new_empty((rows, k), dtype=torch.int32), q.new_empty((rows, k) if values else (0,), dtype=torch.float32)


@_operator.register_fake
def _(*arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
    *given, values, workspace, backend = arguments
    call = mqa_topk.validate(MqaTopKArguments._make((*given, values, None, workspace, backend)))
    return _empty(call.q, call.q.shape[0], call.k, values)


@_paged_operator.register_fake
def _(*arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
    *given, values, workspace, backend = arguments
    layout = CacheLayout._make(given[7:12])
    call = paged_mqa_topk.validate(
        PagedMqaTopKArguments._make((*given[:7], layout, *given[12:], values, None, workspace, backend))
    )
    return _empty(call.q, call.q.shape[0] * call.q.shape[1], call.k, values)


def _through_operator(call: MqaTopKArguments) -> Result:
    if not torch.compiler.is_compiling():
        common.refuse(mqa_topk.OPERATION, common.tensors_of(call))
    with torch.no_grad():
        found = _operator(*call[:16], _wants_values(call), _size(call), call.backend)
    return _returned(call, *found)


def _paged_through_operator(call: PagedMqaTopKArguments) -> Result:
    layout = call.layout
    if not torch.compiler.is_compiling():  # Dynamo reads no more than it has to; the operator's fake checks
        common.refuse(paged_mqa_topk.OPERATION, common.tensors_of(call))
        layout = paged_mqa_topk.validate(call).layout
    if layout is None:
        layout = CacheLayout(call.kv_cache.shape[1], call.q.shape[3], dtype=call.q.dtype)
    fields = (layout.page, layout.head_dim, layout.order, layout.scales, layout.dtype)
    with torch.no_grad():
        found = _paged_operator(*call[:7], *fields, *call[8:17], _wants_values(call), _size(call), call.backend)
    return _returned(call, *found)


def _wants_values(call: Any) -> bool:
    return isinstance(call.values, torch.Tensor) or call.values is True


def _size(call: Any) -> int | None:
    return call.workspace.numel() if isinstance(call.workspace, torch.Tensor) else call.workspace


def _returned(call: Any, indices: torch.Tensor, scores: torch.Tensor) -> Result:
    """What the operator made, in the caller's own results where there are any."""
    if call.out is not None:
        indices = call.out.copy_(indices)
    if isinstance(call.values, torch.Tensor):
        scores = call.values.copy_(scores)
    return (indices, scores) if _wants_values(call) else indices
