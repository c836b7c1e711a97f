"""``fp8_paged_mqa_logits``: the public call, and its custom operators ``lightning_indexer::fp8_paged_mqa_logits`` and
``_out``."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch.autograd import forward_ad

from lightning_indexer import envs
from lightning_indexer.arch import _ASSUMED, arch_of
from lightning_indexer.calls import common, sharded
from lightning_indexer.problems.cache_layout import CacheLayout
from lightning_indexer.problems.mqa_logits import row_stride
from lightning_indexer.problems.paged_mqa_logits import (
    OPERATION,
    PagedMqaLogitsCall,
    check_address,
    check_dialect,
    problem_of,
    validate,
)
from lightning_indexer.selection import registry


def fp8_paged_mqa_logits(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    weights: torch.Tensor,
    context_lens: torch.Tensor,
    block_tables: torch.Tensor,
    max_context_len: int,
    *,
    layout: CacheLayout | None = None,
    indices: torch.Tensor | None = None,
    clean_logits: bool = True,
    out_dtype: torch.dtype = torch.float32,
    out: torch.Tensor | None = None,
    schedule_meta: object = None,
    backend: str | None = None,
) -> torch.Tensor:
    """Scores of decode steps: q against the keys of a paged cache.

    Row ``b * next_n + j`` of the result is ``scale[n] * sum_h weights[b * next_n + j, h] * relu(q[b, j, h] . k[n])``
    for the positions n below its length, and -inf behind. Position n of b lies at place ``n % page`` of block
    ``block_tables[b, n // page]``. Nothing is read back to the host: lengths and tables may change between the replays
    of a captured graph. docs/semantics.md states every edge case.

    Source: DeepSeek-V3.2 technical report, section 2.1; the cache is that of its engines.

    Args:
        q: [B, next_n, H, D] float8_e4m3fn, or float8_e4m3fnuz on gfx942; last dimension contiguous.
        kv_cache: [blocks, page, 1, D + 4] uint8 (D / 2 + 4 of fp4 keys), or without the 1. Blocks are contiguous each
            and may lie any multiple of 4 bytes apart; the pool may be of any size.
        weights: [B * next_n, H] float32, bfloat16 or float16; last dimension contiguous.
        context_lens: int32, any strides. [B, next_n]: the length of each row. [B]: row j sees
            ``context_lens[b] - next_n + 1 + j`` positions. Lengths of 0 and below are rows that see nothing; lengths
            past ``max_context_len`` or the table are cut.
        block_tables: [B, max_blocks] int32, last dimension contiguous, any row stride. Entries behind a row's last
            page are not read.
        max_context_len: W, columns of the result.
        layout: how keys lie in the cache; None: ``CacheLayout(page, D, dtype=q.dtype)``, flat with float32 scales.
            fp4 keys become e4m3 in the kernel, exactly where ``gather_k_cache`` says so.
        indices: [B] int32, for ragged batches: q[b] belongs to sequence ``indices[b]``, whose row of ``block_tables``,
            then [sequences, max_blocks], it reads. Not read where the row's length is 0.
        clean_logits: write -inf behind each row's length; False leaves those columns unspecified.
        out_dtype: ``torch.float32`` or ``torch.bfloat16``.
        out: [B * next_n, W] of ``out_dtype`` to write into, last dimension contiguous.
        schedule_meta: accepted for calls written for DeepGEMM, and not needed.
        backend: run this backend or raise; None lets the library (or ``LIGHTNING_INDEXER_BACKEND``) choose.

    Returns:
        [B * next_n, W] of ``out_dtype``, a view of a buffer whose row stride is padded to 256 bytes; or ``out``.

    Raises:
        TypeError, ValueError: a bad argument, or a cache that does not fit its layout; the message names it, what came
            and what was expected.
        BackendUnavailableError: the backend asked for cannot run this call.
        NotImplementedError: an operand of ``torch.func``'s transforms, a tangent, or ``torch.jit.trace``.
    """
    plain = (
        type(q) is type(kv_cache) is type(weights) is type(context_lens) is type(block_tables) is _Tensor
        and (indices is None or type(indices) is _Tensor)
        and (out is None or type(out) is _Tensor)
    )
    if (
        _is_compiling()
        or _dispatch_modes()
        or _functorch() is not None
        or (
            (not plain or q.is_meta)
            and common.needs_operator((q, kv_cache, weights, context_lens, block_tables, indices, out))
        )
    ):
        return _through_operator(
            PagedMqaLogitsCall(
                q, kv_cache, weights, context_lens, block_tables, max_context_len, layout, indices, clean_logits,
                out_dtype, out, backend,
            )
        )  # fmt: skip
    # All that validation, selection and a kernel's preparation read. Calls that agree in it, as the layers of a model
    # do, plan once.
    try:
        facts = (
            OPERATION, q.shape, q.is_contiguous() or q.stride(), q.dtype,
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
            None if indices is None else (indices.shape, indices.stride(), indices.dtype, indices.device),
            None if out is None else (out.shape, out.stride(), out.dtype, out.device),
            max_context_len.__class__, max_context_len, layout, clean_logits.__class__, clean_logits, out_dtype,
            backend, (q.data_ptr() | kv_cache.data_ptr()) & 15, None if _unset(_NAMES) else _selection(), _assumed(),
        )  # fmt: skip
        plan = _PLANS.get(facts)
    except (AttributeError, TypeError, RuntimeError):  # no tensor, not dense or not hashable: the checks say which
        plan = facts = None
    # Inside torch.jit.trace and forward-mode differentiation operands are looked at first.
    if plan is None or _tracing() is not None or forward_ad._current_level >= 0:
        call = PagedMqaLogitsCall(
            q, kv_cache, weights, context_lens, block_tables, max_context_len, layout, indices, clean_logits, out_dtype,
            out, backend,
        )  # fmt: skip
        return _first(call, facts)
    if _is_grad_enabled() and (weights.requires_grad or q.requires_grad):
        common.warn_of_gradients(OPERATION)
    if out is None:
        out = _empty_strided(plan.size, plan.stride, dtype=out_dtype, device=q.device)
    call = _record(
        (
            q, kv_cache, weights, context_lens, block_tables, max_context_len, plan.layout, indices, clean_logits,
            out_dtype, out, backend,
        )
    )  # fmt: skip
    plan.run(call if plan.plain else validate(call))
    return out


class _Plan(NamedTuple):
    """What a call comes to, from its facts alone.

    ``size`` and ``stride`` are those of a result the library allocates; ``plain`` is False where operands have to be
    converted first.
    """

    run: registry.Run
    size: tuple[int, int]
    stride: tuple[int, int]
    layout: CacheLayout
    plain: bool


def _first(call: PagedMqaLogitsCall, facts: object) -> torch.Tensor:
    """The first call with these facts: checks, selects, and keeps what it came to."""
    common.refuse(OPERATION, _tensors(call))
    checked = validate(call)
    arch = arch_of(call.q.device)
    check_dialect(checked, arch)
    check_address(checked.kv_cache)
    problem = problem_of(checked)
    prepared = registry.prepare(problem, arch, call.backend, call.q.device)
    if torch.is_grad_enabled() and (call.weights.requires_grad or call.q.requires_grad):
        common.warn_of_gradients(OPERATION)
    plan = _Plan(
        prepared.run if problem.rows and problem.width else _nothing,
        (problem.rows, problem.width),
        (row_stride(problem.width, problem.out_dtype), 1),
        problem.layout,
        all(one is other for one, other in zip(checked, call._replace(layout=checked.layout), strict=True)),
    )
    if call.out is None:
        checked = checked._replace(
            out=_empty_strided(plan.size, plan.stride, dtype=call.out_dtype, device=call.q.device)
        )
    if plan.plain and (bind := getattr(plan.run, "bind", None)) is not None:
        plan = plan._replace(run=bind(checked))
    if facts is not None and prepared.settled:
        common.keep(facts, plan)
    plan.run(checked)
    return checked.result


def _nothing(call: PagedMqaLogitsCall) -> None:
    """What there is to compute without rows or without columns."""


# Each call asks these; a global is found in less time than an attribute of a module.
_PLANS = common.PLANS
_Tensor, _empty_strided = torch.Tensor, torch.empty_strided
# Dynamo reads this one as True. What else traces, torch.export's second way too, gives fake tensors.
_is_compiling, _is_grad_enabled = torch.compiler.is_dynamo_compiling, torch.is_grad_enabled
_dispatch_modes = torch._C._len_torch_dispatch_stack
_functorch = torch._C._functorch.peek_interpreter_stack
_tracing = torch._C._get_tracing_state
_selection, _unset, _NAMES, _assumed = envs.selection, envs.VARIABLES.isdisjoint, envs.SELECTION, _ASSUMED.get

# What calling the class does, in a third of the time.
_record: Callable[[Iterable[Any]], PagedMqaLogitsCall] = functools.partial(tuple.__new__, PagedMqaLogitsCall)


def _tensors(call: PagedMqaLogitsCall) -> list[torch.Tensor]:
    return [argument for argument in call if isinstance(argument, torch.Tensor)]


# The operators: their schemas are the one other place where the arguments are spelled. The layout is spelled out.


@torch.library.custom_op("lightning_indexer::fp8_paged_mqa_logits", mutates_args=())
def _operator(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    weights: torch.Tensor,
    context_lens: torch.Tensor,
    block_tables: torch.Tensor,
    max_context_len: int,
    page: int,
    head_dim: int,
    order: str,
    scales: str,
    cache_dtype: torch.dtype,
    indices: torch.Tensor | None,
    clean_logits: bool,
    out_dtype: torch.dtype,
    backend: str | None,
) -> torch.Tensor:
    # Contiguous: with a padded stride, whether a result is contiguous would depend on W, and a graph on that.
    out = q.new_empty((q.shape[0] * q.shape[1], max_context_len), dtype=out_dtype)
    _operator_out(
        q, kv_cache, weights, context_lens, block_tables, max_context_len, page, head_dim, order, scales, cache_dtype,
        indices, clean_logits, out, backend,
    )  # fmt: skip
    return out


@torch.library.custom_op("lightning_indexer::fp8_paged_mqa_logits_out", mutates_args=("out",))
def _operator_out(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    weights: torch.Tensor,
    context_lens: torch.Tensor,
    block_tables: torch.Tensor,
    max_context_len: int,
    page: int,
    head_dim: int,
    order: str,
    scales: str,
    cache_dtype: torch.dtype,
    indices: torch.Tensor | None,
    clean_logits: bool,
    out: torch.Tensor,
    backend: str | None,
) -> None:
    # Parameters, subclasses too, as the tensors they hold.
    q, kv_cache, weights, context_lens, block_tables, out = map(
        common.plain_tensor, (q, kv_cache, weights, context_lens, block_tables, out)
    )
    indices = common.plain_tensor(indices)
    layout = CacheLayout(page, head_dim, order, scales, cache_dtype)  # type: ignore[arg-type]
    fp8_paged_mqa_logits(
        q, kv_cache, weights, context_lens, block_tables, max_context_len, layout=layout, indices=indices,
        clean_logits=clean_logits, out_dtype=out.dtype, out=out, backend=backend,
    )  # fmt: skip


@_operator.register_fake
def _(*arguments: Any) -> torch.Tensor:
    *operands, indices, clean_logits, out_dtype, _ = arguments
    layout = CacheLayout._make(operands[6:])
    call = validate(PagedMqaLogitsCall._make((*operands[:6], layout, indices, clean_logits, out_dtype, None, None)))
    return call.q.new_empty((call.q.shape[0] * call.q.shape[1], call.max_context_len), dtype=out_dtype)


@_operator_out.register_fake
def _(*arguments: Any) -> None:
    *operands, indices, clean_logits, out, _ = arguments
    layout = CacheLayout._make(operands[6:])
    validate(PagedMqaLogitsCall._make((*operands[:6], layout, indices, clean_logits, out.dtype, out, None)))


def _through_operator(call: PagedMqaLogitsCall) -> torch.Tensor:
    layout = call.layout
    if sharded.is_distributed(_tensors(call)):
        common.refuse(OPERATION, _tensors(call))
        return _on_every_rank(call)
    if not torch.compiler.is_compiling():  # Dynamo reads no more than it has to; the operators' fakes check
        common.refuse(OPERATION, _tensors(call))
        layout = validate(call).layout
    if layout is None:
        layout = CacheLayout(call.kv_cache.shape[1], call.q.shape[3], dtype=call.q.dtype)
    operands = (*call[:6], layout.page, layout.head_dim, layout.order, layout.scales, layout.dtype, call.indices)
    with torch.no_grad():
        if call.out is None:
            result: torch.Tensor = _operator(*operands, call.clean_logits, call.out_dtype, call.backend)
            return result
        if call.out.dtype != call.out_dtype:
            raise TypeError(f"out: got dtype {call.out.dtype}, expected {call.out_dtype}, the out_dtype of the call")
        _operator_out(*operands, call.clean_logits, call.out, call.backend)
        return call.out


def _on_every_rank(call: PagedMqaLogitsCall) -> torch.Tensor:
    """The call on DTensors: sequences sharded or not, the cache replicated, as are tables that ``indices`` refer to."""
    names = ("q", "kv_cache", "weights", "context_lens", "block_tables", "indices")
    by_rows = ("q", "weights", "context_lens", "block_tables" if call.indices is None else "indices")
    operands = {name: getattr(call, name) for name in names}

    def local(parts: dict[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
        given: dict[str, Any] = {name: parts.get(name) for name in (*names, "out")}
        part = call._replace(**given)
        result = fp8_paged_mqa_logits(
            *part[:6], layout=part.layout, indices=part.indices, clean_logits=part.clean_logits,
            out_dtype=part.out_dtype, out=part.out, backend=part.backend,
        )  # fmt: skip
        return (result,)

    next_n = call.q.shape[1]
    [result] = sharded.run(operands, by_rows, {"out": call.out}, call.q.shape[0] * next_n, local)
    return result
