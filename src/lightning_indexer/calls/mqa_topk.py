"""``fp8_mqa_topk`` and ``fp8_paged_mqa_topk``: scores and selection in one call, and their custom operators."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch.autograd import forward_ad

from lightning_indexer import envs
from lightning_indexer.arch import _ASSUMED, Arch, arch_of
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
    ks, ke = cu_seqlen_ks, cu_seqlen_ke
    plain = (
        type(q) is type(keys) is type(kv_scale) is type(weights) is type(ks) is type(ke) is _Tensor
        and (offsets is None or type(offsets) is _Tensor)
        and (page_table is None or type(page_table) is _Tensor)
        and (values is None or values is True or type(values) is _Tensor)
        and (out is None or type(out) is _Tensor)
        and (workspace is None or type(workspace) is _Tensor or type(workspace) is int)
    )
    through_operator = (
        _is_compiling()
        or _dispatch_modes()
        or (
            (not plain or q.is_meta)
            and common.needs_operator((q, keys, kv_scale, weights, ks, ke, offsets, page_table, values, out, workspace))
        )
    )
    plan = facts = None
    if not through_operator:
        # All that validation, selection and a kernel's preparation read: calls that agree in it plan once.
        try:
            facts = (
                mqa_topk.OPERATION, q.shape, q.is_contiguous() or q.stride(), q.dtype,
                keys.shape, keys.is_contiguous() or keys.stride(), keys.dtype,
                kv_scale.shape, kv_scale.is_contiguous(), kv_scale.dtype, kv_scale.is_neg(),
                weights.shape, weights.is_contiguous() or weights.stride(), weights.dtype, weights.is_neg(),
                ks.shape, ks.is_contiguous(), ks.dtype, ke.shape, ke.is_contiguous(), ke.dtype,
                # PyTorch has one kind of accelerator, whose devices are told apart by their index; it is -1 elsewhere.
                q.get_device(), keys.get_device(), kv_scale.get_device(), weights.get_device(),
                ks.get_device(), ke.get_device(),
                None if q.is_cuda else (q.device, keys.device, kv_scale.device, weights.device, ks.device, ke.device),
                k.__class__, k, max_seqlen_k.__class__, max_seqlen_k, index_base,
                None if offsets is None else _fact_of(offsets), None if page_table is None else _fact_of(page_table),
                page_size.__class__, page_size, order, tie,
                force_first.__class__, force_first, force_last.__class__, force_last,
                None if values is None else _fact_of(values), None if out is None else _fact_of(out),
                None if workspace is None else _fact_of_workspace(workspace), backend,
                (q.data_ptr() | keys.data_ptr()) & 15, None if _unset(_NAMES) else _selection(), _assumed(),
            )  # fmt: skip
            plan = _PLANS.get(facts)
        except (AttributeError, TypeError, RuntimeError):  # no tensor, not dense or not hashable: the checks say which
            plan = facts = None
    # Inside function transforms, torch.jit.trace and forward-mode differentiation operands are looked at first.
    if (
        plan is None
        or not plan.plain
        or _functorch() is not None
        or _tracing() is not None
        or forward_ad._current_level >= 0
    ):
        call = MqaTopKArguments(
            q, keys, kv_scale, weights, ks, ke, k, max_seqlen_k, index_base, offsets, page_table, page_size, order, tie,
            force_first, force_last, values, out, workspace, backend,
        )  # fmt: skip
        return _through_operator(call) if through_operator else _run(_RAGGED, call, facts, plan)
    if _is_grad_enabled() and (
        q.requires_grad or keys.requires_grad or kv_scale.requires_grad or weights.requires_grad
    ):
        common.warn_of_gradients(mqa_topk.OPERATION, stacklevel=3)
    if out is None:
        out = _empty_strided(plan.size, plan.stride, dtype=_int32, device=q.device)
    scores = None
    if type(values) is _Tensor:
        scores = values
    elif values:
        scores = _empty_strided(plan.size, plan.stride, dtype=_float32, device=q.device)
    plan.run(
        _record(
            (
                q, keys, kv_scale, weights, ks, ke, offsets, page_table, out, scores,
                workspace if type(workspace) is _Tensor else None,
            )
        )
    )  # fmt: skip
    return out if scores is None else (out, scores)


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
    plain = (
        type(q) is type(kv_cache) is type(weights) is type(context_lens) is type(block_tables) is _Tensor
        and (indices is None or type(indices) is _Tensor)
        and (offsets is None or type(offsets) is _Tensor)
        and (page_table is None or type(page_table) is _Tensor)
        and (values is None or values is True or type(values) is _Tensor)
        and (out is None or type(out) is _Tensor)
        and (workspace is None or type(workspace) is _Tensor or type(workspace) is int)
    )
    through_operator = (
        _is_compiling()
        or _dispatch_modes()
        or (
            (not plain or q.is_meta)
            and common.needs_operator(
                (q, kv_cache, weights, context_lens, block_tables, indices, offsets, page_table, values, out, workspace)
            )
        )
    )
    plan = facts = None
    if not through_operator:
        # All that validation, selection and a kernel's preparation read. Calls that agree in it, as the layers of a
        # model do, plan once.
        try:
            facts = (
                paged_mqa_topk.OPERATION, q.shape, q.is_contiguous() or q.stride(), q.dtype,
                kv_cache.shape, kv_cache.is_contiguous() or kv_cache.stride(), kv_cache.dtype,
                weights.shape, weights.is_contiguous() or weights.stride(), weights.dtype, weights.is_neg(),
                context_lens.shape, context_lens.is_contiguous() or context_lens.stride(), context_lens.dtype,
                block_tables.shape, block_tables.is_contiguous() or block_tables.stride(), block_tables.dtype,
                # PyTorch has one kind of accelerator, whose devices are told apart by their index; it is -1 elsewhere.
                q.get_device(), kv_cache.get_device(), weights.get_device(), context_lens.get_device(),
                block_tables.get_device(),
                None
                if q.is_cuda
                else (q.device, kv_cache.device, weights.device, context_lens.device, block_tables.device),
                k.__class__, k, max_context_len.__class__, max_context_len, layout.__class__, layout,
                None if indices is None else _fact_of(indices), index_base,
                None if offsets is None else _fact_of(offsets), None if page_table is None else _fact_of(page_table),
                page_size.__class__, page_size, order, tie,
                force_first.__class__, force_first, force_last.__class__, force_last,
                None if values is None else _fact_of(values), None if out is None else _fact_of(out),
                None if workspace is None else _fact_of_workspace(workspace), backend,
                (q.data_ptr() | kv_cache.data_ptr()) & 15, None if _unset(_NAMES) else _selection(), _assumed(),
            )  # fmt: skip
            plan = _PLANS.get(facts)
        except (AttributeError, TypeError, RuntimeError):  # no tensor, not dense or not hashable: the checks say which
            plan = facts = None
    # Inside function transforms, torch.jit.trace and forward-mode differentiation operands are looked at first.
    if (
        plan is None
        or not plan.plain
        or _functorch() is not None
        or _tracing() is not None
        or forward_ad._current_level >= 0
    ):
        call = PagedMqaTopKArguments(
            q, kv_cache, weights, context_lens, block_tables, k, max_context_len, layout, indices, index_base, offsets,
            page_table, page_size, order, tie, force_first, force_last, values, out, workspace, backend,
        )  # fmt: skip
        return _paged_through_operator(call) if through_operator else _run(_PAGED, call, facts, plan)
    if _is_grad_enabled() and (q.requires_grad or weights.requires_grad):
        common.warn_of_gradients(paged_mqa_topk.OPERATION, stacklevel=3)
    if out is None:
        out = _empty_strided(plan.size, plan.stride, dtype=_int32, device=q.device)
    scores = None
    if type(values) is _Tensor:
        scores = values
    elif values:
        scores = _empty_strided(plan.size, plan.stride, dtype=_float32, device=q.device)
    if plan.tables:
        page_table = paged_mqa_topk.tables_of_rows(block_tables, indices, q.shape[1])
    plan.run(
        _paged_record(
            (
                q, kv_cache, weights, context_lens, block_tables, plan.layout, indices, offsets, page_table, out,
                scores, workspace if type(workspace) is _Tensor else None,
            )
        )
    )  # fmt: skip
    return out if scores is None else (out, scores)


class _Kind(NamedTuple):
    """What the two operations do each in its own way."""

    operation: str
    validate: Callable[[Any], Any]
    check: Callable[[Any, Arch], None]
    problem_of: Callable[[Any], Any]
    record: Callable[[Any, torch.Tensor, torch.Tensor | None, torch.Tensor | None], Any]


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


_RAGGED = _Kind(mqa_topk.OPERATION, mqa_topk.validate, _check_ragged, mqa_topk.problem_of, _ragged_call)
_PAGED = _Kind(paged_mqa_topk.OPERATION, paged_mqa_topk.validate, _check_paged, paged_mqa_topk.problem_of, _paged_call)


class _Plan(NamedTuple):
    """What a call comes to, from its facts alone.

    ``size`` and ``stride`` are those of results the library allocates; ``layout`` is that of the cache; ``tables``: the
    page table is made of the block table; ``plain`` is False where operands have to be converted first. A run that is
    given no workspace allocates it.
    """

    run: registry.Run
    size: tuple[int, int]
    stride: tuple[int, int]
    workspace_bytes: int
    layout: CacheLayout | None
    tables: bool
    plain: bool


def _run(kind: _Kind, call: Any, facts: object, plan: _Plan | None) -> Result:
    """Any call: the first with these facts, whose plan is kept, and those that take more than the plan's run."""
    if _functorch() is not None or _tracing() is not None or forward_ad._current_level >= 0:
        common.refuse(kind.operation, common.tensors_of(call))
    if torch.is_grad_enabled() and any(getattr(operand, "requires_grad", False) for operand in call[:4]):
        common.warn_of_gradients(kind.operation)
    settled = False
    if plan is None:
        plan, call, settled = _plan(kind, call)
    else:
        call = kind.validate(call)
    common.check_workspace(call.workspace, plan.workspace_bytes)
    indices = call.out
    if indices is None:
        indices = _empty_strided(plan.size, plan.stride, dtype=torch.int32, device=call.q.device)
    scores = call.values if isinstance(call.values, torch.Tensor) else None
    if call.values is True:
        scores = _empty_strided(plan.size, plan.stride, dtype=torch.float32, device=call.q.device)
    workspace = call.workspace if isinstance(call.workspace, torch.Tensor) else None
    record = kind.record(call, indices, scores, workspace)
    if settled and facts is not None:
        if plan.plain and (bind := getattr(plan.run, "bind", None)) is not None:
            plan = plan._replace(run=bind(record))
        common.keep(facts, plan)
    plan.run(record)
    return indices if scores is None else (indices, scores)


def _plan(kind: _Kind, call: Any) -> tuple[_Plan, Any, bool]:
    """The plan of a call, the call as validation leaves it, and whether the plan may be kept."""
    checked = kind.validate(call)
    arch = arch_of(checked.q.device)
    kind.check(checked, arch)
    problem = kind.problem_of(checked)
    prepared = registry.prepare(problem, arch, checked.backend, checked.q.device)
    run: registry.Run = _nothing
    if problem.rows:
        run = prepared.run
        if arch.fp8 == "fnuz" and kind is _RAGGED:
            run = functools.partial(_in_native_dialect, run, arch)
    tables = kind is _PAGED and call.page_table is None and checked.page_table is not None
    changed = {name for name, old, new in zip(call._fields, call, checked, strict=True) if new is not old}
    if tables:
        changed.remove("page_table")
    plan = _Plan(
        run,
        (problem.rows, problem.k),
        (problem.k, 1),
        int(getattr(prepared.run, "workspace_bytes", 0)) if problem.rows else 0,
        checked.layout if kind is _PAGED else None,
        tables,
        not any(isinstance(getattr(checked, name), torch.Tensor) for name in changed),
    )
    return plan, checked, prepared.settled


def _nothing(call: Any) -> None:
    """What there is to compute without rows."""


def _in_native_dialect(run: registry.Run, arch: Arch, call: MqaTopKCall) -> None:
    run(to_native_dialect(call, arch))


def _fact_of_workspace(workspace: Any) -> object:
    return _fact_of(workspace), isinstance(workspace, _Tensor) and workspace.data_ptr() & 15


# Each call asks these; a global is found in less time than an attribute of a module.
_PLANS, _fact_of = common.PLANS, common.fact_of
_Tensor, _empty_strided, _int32, _float32 = torch.Tensor, torch.empty_strided, torch.int32, torch.float32
# Dynamo reads this one as True. What else traces, torch.export's second way too, gives fake tensors.
_is_compiling, _is_grad_enabled = torch.compiler.is_dynamo_compiling, torch.is_grad_enabled
_dispatch_modes, _functorch, _tracing = common.dispatch_modes, common.functorch, common.tracing
_selection, _unset, _NAMES, _assumed = envs.selection, envs.VARIABLES.isdisjoint, envs.SELECTION, _ASSUMED.get

_plain = common.plain_tensor

# What calling the classes does, in a third of the time.
_record: Callable[[Iterable[Any]], MqaTopKCall] = functools.partial(tuple.__new__, MqaTopKCall)
_paged_record: Callable[[Iterable[Any]], PagedMqaTopKCall] = functools.partial(tuple.__new__, PagedMqaTopKCall)


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
    q, keys, kv_scale, weights, ks, ke = map(_plain, (q, keys, kv_scale, weights, cu_seqlen_ks, cu_seqlen_ke))
    indices, scores = _empty(q, q.shape[0], k, values)
    options: dict[str, Any] = {
        "max_seqlen_k": max_seqlen_k, "index_base": index_base, "offsets": _plain(offsets),
        "page_table": _plain(page_table), "page_size": page_size, "order": order, "tie": tie,
        "force_first": force_first, "force_last": force_last, "values": scores if values else None, "out": indices,
        "workspace": workspace, "backend": backend,
    }  # fmt: skip
    fp8_mqa_topk(q, (keys, kv_scale), weights, ks, ke, k, **options)
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
    q, kv_cache, weights, context_lens, block_tables = map(_plain, (q, kv_cache, weights, context_lens, block_tables))
    found, scores = _empty(q, q.shape[0] * q.shape[1], k, values)
    options: dict[str, Any] = {
        "max_context_len": max_context_len, "layout": CacheLayout(page, head_dim, value_order, scales, cache_dtype),  # type: ignore[arg-type]
        "indices": _plain(indices), "index_base": index_base, "offsets": _plain(offsets),
        "page_table": _plain(page_table), "page_size": page_size, "order": order, "tie": tie,
        "force_first": force_first, "force_last": force_last, "values": scores if values else None, "out": found,
        "workspace": workspace, "backend": backend,
    }  # fmt: skip
    fp8_paged_mqa_topk(q, kv_cache, weights, context_lens, block_tables, k, **options)
    return found, scores


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
    if not torch.compiler.is_compiling():  # Dynamo reads no more than it has to; the operator's fake checks
        common.refuse(mqa_topk.OPERATION, common.tensors_of(call))
        mqa_topk.validate(call)
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
