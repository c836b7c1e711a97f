"""``top_k_per_row``: the public call, and its custom operators ``lightning_indexer::top_k_per_row`` and ``_out``."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch.autograd import forward_ad

from lightning_indexer import envs
from lightning_indexer.arch import _ASSUMED, arch_of
from lightning_indexer.calls import common, sharded
from lightning_indexer.problems.top_k import (
    OPERATION,
    IndexBase,
    Order,
    Tie,
    TopKArguments,
    TopKCall,
    TopKProblem,
    problem_of,
    validate,
)
from lightning_indexer.selection import registry


def top_k_per_row(
    logits: torch.Tensor,
    k: int,
    row_starts: torch.Tensor | None = None,
    row_ends: torch.Tensor | None = None,
    *,
    index_base: IndexBase = "row",
    offsets: torch.Tensor | None = None,
    page_table: torch.Tensor | None = None,
    page_size: int | None = None,
    order: Order = "index",
    tie: Tie = "smaller",
    values: torch.Tensor | bool | None = None,
    out: torch.Tensor | None = None,
    workspace: torch.Tensor | None = None,
    backend: str | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """The k best positions of each row: what sparse attention reads after the indexer has scored.

    Candidates of row m are the positions ``[row_starts[m], row_ends[m])`` clamped to ``[0, W]``. One total order
    decides: score descending, then index ascending. NaN is no candidate; ``-inf`` inside the window comes last; -0.0
    equals +0.0. The result is exact on every input, a function of the row's values alone, and nothing is read back
    to the host. docs/semantics.md states every edge case.

    Source: DeepSeek-V3.2 technical report, section 2.1, the top-k selector.

    Args:
        logits: [M, W] float32, bfloat16 or float16, last dimension contiguous, any row stride. Compressed logits
            (column j of row m is position ``ks[m] + j``) are rows that start at 0 and end at ``ke - ks``.
        k: 1 to 4096.
        row_starts: [M] or [M, 1] int32, first candidate of each row, any value; None: 0.
        row_ends: likewise, end (exclusive); ``end <= start`` is an empty row; None: W.
        index_base: what an index counts from, where ``start`` is the row's clamped start: ``"row"``: position - start.
            ``"absolute"``: position. ``"offset"``: position - start + offsets[m]. ``"page"``: with
            r = position - start, ``page_table[m, r // page_size] * page_size + r % page_size``.
        offsets: [M] or [M, 1] int32, with ``index_base="offset"``.
        page_table: [M, pages] int32, last dimension contiguous, with ``index_base="page"``; entries of pages that no
            selected position lies in are not read.
        page_size: positions of a page, with ``page_table``.
        order: of a row's indices: ``"index"`` ascending position, ``"score"`` the total order, ``"any"`` unspecified.
        tie: ``"larger"`` reverses the order of equal scores: the larger index is the better one.
        values: True returns the scores too, float32 in the order of the indices; a tensor, [M, k] float32, takes them.
            The sign of a zero among them is unspecified.
        out: [M, k] int32 to write into, last dimension contiguous, any row stride of at least k.
        workspace: uint8 [bytes] on a 16-byte boundary, of at least :func:`top_k_workspace_bytes`; None allocates.
            What it holds before and after means nothing; calls that may overlap need one each.
        backend: run this backend or raise; None lets the library (or ``LIGHTNING_INDEXER_BACKEND``) choose.

    Returns:
        Indices [M, k] int32, every slot written, ``-1`` behind the last where a row has fewer than k candidates; with
        ``values``, the pair of them and the scores [M, k] float32, ``-inf`` there. Not differentiable: logits that
        require grad are warned of once.

    Raises:
        TypeError, ValueError: a bad argument; the message names it, what came and what was expected. Int64 starts and
            ends are refused, as a conversion would cost a launch each.
        BackendUnavailableError: the backend asked for cannot run this call.
        NotImplementedError: an operand of ``torch.func``'s transforms, a tangent, or ``torch.jit.trace``.
    """
    plain = (
        type(logits) is _Tensor
        and (row_starts is None or type(row_starts) is _Tensor)
        and (row_ends is None or type(row_ends) is _Tensor)
        and (offsets is None or type(offsets) is _Tensor)
        and (page_table is None or type(page_table) is _Tensor)
        and (values is None or values is True or type(values) is _Tensor)
        and (out is None or type(out) is _Tensor)
        and (workspace is None or type(workspace) is _Tensor)
    )
    through_operator = (
        _is_compiling()
        or _dispatch_modes()
        or (
            (not plain or logits.is_meta)
            and common.needs_operator((logits, row_starts, row_ends, offsets, page_table, values, out, workspace))
        )
    )
    plan = facts = None
    if not through_operator:
        # All that validation, selection and a kernel's preparation read. Calls that agree in it plan once.
        try:
            facts = (
                OPERATION, logits.shape, logits.stride(), logits.dtype, logits.device, logits.is_neg(), k.__class__, k,
                None if row_starts is None else _fact_of(row_starts), None if row_ends is None else _fact_of(row_ends),
                index_base, None if offsets is None else _fact_of(offsets),
                None if page_table is None else _fact_of(page_table), page_size.__class__, page_size, order, tie,
                None if values is None else _fact_of(values), None if out is None else _fact_of(out),
                None if workspace is None else _fact_of(workspace), backend,
                logits.data_ptr() & 15, None if _unset(_NAMES) else _selection(), _assumed(),
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
        call = TopKArguments(
            logits, k, row_starts, row_ends, index_base, offsets, page_table, page_size, order, tie, values, out,
            workspace, backend,
        )  # fmt: skip
        return _through_operator(call) if through_operator else _run(call, facts, plan)
    if _is_grad_enabled() and logits.requires_grad:
        common.warn_of_gradients(OPERATION, stacklevel=3)
    if out is None:
        out = _empty_strided(plan.size, plan.stride, dtype=_int32, device=logits.device)
    scores = None
    if type(values) is _Tensor:
        scores = values
    elif values:
        scores = _empty_strided(plan.size, plan.stride, dtype=_float32, device=logits.device)
    if workspace is not None or plan.workspace_bytes:
        workspace = common.workspace(workspace, plan.workspace_bytes, logits.device)
    plan.run(_record((logits, row_starts, row_ends, offsets, page_table, out, scores, workspace)))
    return out if scores is None else (out, scores)


def top_k_workspace_bytes(problem: TopKProblem, device: torch.device | str, backend: str | None = None) -> int:
    """Bytes of ``workspace`` that a call of this problem on this device uses.

    Raises:
        As :func:`top_k_per_row`.
    """
    device = torch.device(device)
    prepared = registry.prepare(problem, arch_of(device), backend, device)
    return _workspace_bytes(prepared.run)


class _Plan(NamedTuple):
    """What a call comes to, from its facts alone.

    ``size`` and ``stride`` are those of results the library allocates; ``plain`` is False where arguments have to be
    converted first.
    """

    run: registry.Run
    size: tuple[int, int]
    stride: tuple[int, int]
    workspace_bytes: int
    plain: bool


def _run(call: TopKArguments, facts: object, plan: _Plan | None) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Any call: the first with these facts, whose plan is kept, and those that take more than the plan's run."""
    if _functorch() is not None or _tracing() is not None or forward_ad._current_level >= 0:
        common.refuse(OPERATION, common.tensors_of(call))
    if torch.is_grad_enabled() and getattr(call.logits, "requires_grad", False):
        common.warn_of_gradients(OPERATION)
    settled, given = False, call
    call = validate(call)
    device = call.logits.device
    if plan is None:
        problem = problem_of(call)
        prepared = registry.prepare(problem, arch_of(device), call.backend, device)
        settled = prepared.settled
        same = (one is other for one, other in zip(common.tensors_of(given), common.tensors_of(call), strict=True))
        plan = _Plan(
            prepared.run if problem.rows else _nothing,
            (problem.rows, problem.k),
            (problem.k, 1),
            _workspace_bytes(prepared.run) if problem.rows else 0,
            all(same),
        )
    indices = call.out
    if indices is None:
        indices = _empty_strided(plan.size, plan.stride, dtype=torch.int32, device=device)
    scores = call.values if isinstance(call.values, torch.Tensor) else None
    if call.values is True:
        scores = _empty_strided(plan.size, plan.stride, dtype=torch.float32, device=device)
    workspace = common.workspace(call.workspace, plan.workspace_bytes, device)
    record = TopKCall(
        call.logits, call.row_starts, call.row_ends, call.offsets, call.page_table, indices, scores, workspace
    )
    if settled and facts is not None:
        if plan.plain and (bind := getattr(plan.run, "bind", None)) is not None:
            plan = plan._replace(run=bind(record))
        common.keep(facts, plan)
    plan.run(record)
    return indices if scores is None else (indices, scores)


def _nothing(call: TopKCall) -> None:
    """What there is to compute without rows."""


# Each call asks these; a global is found in less time than an attribute of a module.
_PLANS, _fact_of = common.PLANS, common.fact_of
_Tensor, _empty_strided, _int32, _float32 = torch.Tensor, torch.empty_strided, torch.int32, torch.float32
# Dynamo reads this one as True. What else traces, torch.export's second way too, gives fake tensors.
_is_compiling, _is_grad_enabled = torch.compiler.is_dynamo_compiling, torch.is_grad_enabled
_dispatch_modes, _functorch, _tracing = common.dispatch_modes, common.functorch, common.tracing
_selection, _unset, _NAMES, _assumed = envs.selection, envs.VARIABLES.isdisjoint, envs.SELECTION, _ASSUMED.get

# What calling the class does, in a third of the time.
_record: Callable[[Iterable[Any]], TopKCall] = functools.partial(tuple.__new__, TopKCall)


def _workspace_bytes(run: registry.Run) -> int:
    return int(getattr(run, "workspace_bytes", 0))


# The operators: their schemas are the one other place where the arguments are spelled.


@torch.library.custom_op("lightning_indexer::top_k_per_row", mutates_args=())
def _operator(
    logits: torch.Tensor,
    k: int,
    row_starts: torch.Tensor | None,
    row_ends: torch.Tensor | None,
    index_base: str,
    offsets: torch.Tensor | None,
    page_table: torch.Tensor | None,
    page_size: int | None,
    order: str,
    tie: str,
    values: bool,
    backend: str | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    # Without values the second result is empty.
    indices, scores = _empty(logits, k, values)
    _operator_out(
        logits, k, row_starts, row_ends, index_base, offsets, page_table, page_size, order, tie,
        scores if values else None, indices, None, backend,
    )  # fmt: skip
    return indices, scores


@torch.library.custom_op("lightning_indexer::top_k_per_row_out", mutates_args=("values", "out", "workspace"))
def _operator_out(
    logits: torch.Tensor,
    k: int,
    row_starts: torch.Tensor | None,
    row_ends: torch.Tensor | None,
    index_base: str,
    offsets: torch.Tensor | None,
    page_table: torch.Tensor | None,
    page_size: int | None,
    order: str,
    tie: str,
    values: torch.Tensor | None,
    out: torch.Tensor,
    workspace: torch.Tensor | None,
    backend: str | None,
) -> None:
    plain = common.plain_tensor
    options: dict[str, Any] = {
        "index_base": index_base, "offsets": plain(offsets), "page_table": plain(page_table), "page_size": page_size,
        "order": order, "tie": tie, "values": plain(values), "out": plain(out), "workspace": plain(workspace),
        "backend": backend,
    }  # fmt: skip
    top_k_per_row(plain(logits), k, plain(row_starts), plain(row_ends), **options)


@_operator.register_fake
def _(*arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
    *given, values, backend = arguments
    call = validate(TopKArguments._make((*given, values, None, None, backend)))
    return _empty(call.logits, call.k, values)


@_operator_out.register_fake
def _(*arguments: Any) -> None:
    validate(TopKArguments._make(arguments))


def _empty(logits: torch.Tensor, k: int, values: bool) -> tuple[torch.Tensor, torch.Tensor]:
    shape = (logits.shape[0], k)
    return logits.new_empty(shape, dtype=torch.int32), logits.new_empty(shape if values else (0,), dtype=torch.float32)


def _through_operator(call: TopKArguments) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    if not torch.compiler.is_compiling():
        common.refuse(OPERATION, common.tensors_of(call))
    if sharded.is_distributed(common.tensors_of(call)):
        return _on_every_rank(call)
    with torch.no_grad():
        if call.out is None and call.workspace is None and not isinstance(call.values, torch.Tensor):
            indices, scores = _operator(*call[:10], call.values is True, call.backend)
            return (indices, scores) if call.values is True else indices
        new_indices, new_scores = _empty(call.logits, call.k, call.values is True)
        out = new_indices if call.out is None else call.out
        values = call.values if isinstance(call.values, torch.Tensor) else new_scores if call.values is True else None
        _operator_out(*call[:10], values, out, call.workspace, call.backend)
        return out if values is None else (out, values)


def _on_every_rank(call: TopKArguments) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """The call on DTensors, rows sharded or not: a row is whole on its rank."""
    names = ("logits", "row_starts", "row_ends", "offsets", "page_table")
    operands = {name: getattr(call, name) for name in names}
    outs = {"values": call.values if isinstance(call.values, torch.Tensor) else None, "out": call.out}

    def local(parts: dict[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
        given: dict[str, Any] = {name: parts.get(name) for name in (*names, "out")}
        part = call._replace(**given, values=parts.get("values", call.values))
        found = top_k_per_row(**part._asdict())
        return found if isinstance(found, tuple) else (found,)

    results = sharded.run(operands, names, outs, call.logits.shape[0], local)
    return results[0] if len(results) == 1 else (results[0], results[1])
