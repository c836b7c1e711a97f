"""``fp8_mqa_logits``: the public call, and its custom operators ``lightning_indexer::fp8_mqa_logits`` and ``_out``."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch.autograd import forward_ad

from lightning_indexer import envs, fp8
from lightning_indexer.arch import _ASSUMED, Arch, arch_of
from lightning_indexer.calls import common, sharded
from lightning_indexer.problems.mqa_logits import (
    OPERATION,
    MqaLogitsCall,
    check_dialect,
    problem_of,
    row_stride,
    unit_scale,
    validate,
)
from lightning_indexer.selection import registry


def fp8_mqa_logits(
    q: torch.Tensor,
    kv: tuple[torch.Tensor, torch.Tensor | None],
    weights: torch.Tensor,
    cu_seqlen_ks: torch.Tensor,
    cu_seqlen_ke: torch.Tensor,
    *,
    clean_logits: bool = True,
    max_seqlen_k: int = 0,
    out_dtype: torch.dtype = torch.float32,
    out: torch.Tensor | None = None,
    backend: str | None = None,
) -> torch.Tensor:
    """Scores every key of each row's window: the "lightning indexer" of DeepSeek-V3.2/V4 and GLM-5.

    ``logits[m, n] = kv_scale[n] * sum_h weights[m, h] * relu(sum_d q[m, h, d] * k[n, d])`` for ``n`` in
    ``[ks[m], ke[m])`` clamped to ``[0, N)``, and ``-inf`` elsewhere. docs/semantics.md states every edge case.
    Source: DeepSeek-V3.2 technical report, section 2.1; argument meaning as in DeepGEMM's ``fp8_mqa_logits``.

    Args:
        q: [M, H, D] float8_e4m3fn (or float8_e4m3fnuz on gfx942), last dimension contiguous; or bfloat16, with k of
            bfloat16, which ``triton-portable`` and ``torch-blocked`` take.
        kv: ``(k, kv_scale)``: keys [N, D] fp8, last dimension contiguous, and their scales [N] or [N, 1] float32 (at
            N = 1 also []); scales of another stride are copied. bfloat16 keys may come with None, which is ones.
        weights: [M, H] float32, last dimension contiguous; bfloat16 and float16 are widened by a copy. A scale of q, if
            any, is folded in here by the caller.
        cu_seqlen_ks: [M] or [M, 1] int32, first key of each row's window. Any value is legal; it is clamped. Other
            strides than 1, an expanded scalar's too, are copied.
        cu_seqlen_ke: likewise, end (exclusive) of each row's window. ``ke <= ks`` is an empty window.
        clean_logits: write ``-inf`` outside the windows. If False, those positions hold anything.
        max_seqlen_k: if > 0, "compressed logits": the result is [M, max_seqlen_k] and column ``j`` of row ``m`` is
            position ``ks[m] + j``. Columns outside the window hold anything; ``clean_logits`` must be False.
        out_dtype: ``torch.float32`` or ``torch.bfloat16``.
        out: buffer to write into, [M, N] (or [M, max_seqlen_k]) of ``out_dtype``, last dimension contiguous, any row
            stride. Nothing outside it is written, its row padding included.
        backend: run this backend or raise; None lets the library (or ``LIGHTNING_INDEXER_BACKEND``) choose.

    Returns:
        [M, N] (or [M, max_seqlen_k]) logits on q's device: ``out`` if given, else a new tensor, in eager code a view
        whose row stride is padded to 256 bytes. Not differentiable: operands that require grad are warned of once.

    Raises:
        TypeError, ValueError: a bad argument; the message names it, what came and what was expected.
        BackendUnavailableError: the backend asked for cannot run this call.
        NotImplementedError: an operand of ``torch.func``'s transforms, a tangent, or ``torch.jit.trace``.
    """
    if type(kv) is not tuple and isinstance(kv, torch.Tensor):
        raise TypeError("kv: got one tensor, expected the pair (k, kv_scale)")
    try:
        k, kv_scale = kv
    except (TypeError, ValueError):
        raise TypeError(f"kv: got {type(kv).__name__}, expected the pair (k, kv_scale)") from None
    if kv_scale is None:
        kv_scale = unit_scale(k)
    ks, ke = cu_seqlen_ks, cu_seqlen_ke
    plain = type(q) is type(k) is type(kv_scale) is type(weights) is type(ks) is type(ke) is _Tensor
    plain = plain and (out is None or type(out) is _Tensor)
    if (
        _is_compiling()
        or _dispatch_modes()
        or _functorch() is not None
        or ((not plain or q.is_meta) and common.needs_operator((q, k, kv_scale, weights, ks, ke, out)))
    ):
        return _through_operator(
            MqaLogitsCall(q, k, kv_scale, weights, ks, ke, clean_logits, max_seqlen_k, out_dtype, out, backend)
        )
    # All that validation, selection and a kernel's preparation read. Calls that agree in it, as the layers of a model
    # do, plan once.
    try:
        facts = (
            q.shape, q.is_contiguous() or q.stride(), q.dtype, k.shape, k.is_contiguous() or k.stride(), k.dtype,
            kv_scale.shape, kv_scale.is_contiguous(), kv_scale.dtype, kv_scale.is_neg(),
            weights.shape, weights.is_contiguous() or weights.stride(), weights.dtype, weights.is_neg(),
            ks.shape, ks.is_contiguous(), ks.dtype, ke.shape, ke.is_contiguous(), ke.dtype,
            # PyTorch has one kind of accelerator, whose devices are told apart by their index; it is -1 elsewhere.
            q.get_device(), k.get_device(), kv_scale.get_device(), weights.get_device(),
            ks.get_device(), ke.get_device(),
            None if q.is_cuda else (q.device, k.device, kv_scale.device, weights.device, ks.device, ke.device),
            None if out is None else (out.shape, out.stride(), out.dtype, out.device),
            clean_logits.__class__, clean_logits, max_seqlen_k.__class__, max_seqlen_k, out_dtype, backend,
            (q.data_ptr() | k.data_ptr()) & 15, None if _unset(_NAMES) else _selection(), _assumed(),
        )  # fmt: skip
        plan = _PLANS.get(facts)
    except (AttributeError, TypeError, RuntimeError):  # no tensor, not dense or not hashable: the checks say which
        plan = facts = None
    # Inside torch.jit.trace and forward-mode differentiation operands are looked at first.
    if plan is None or _tracing() is not None or forward_ad._current_level >= 0:
        call = MqaLogitsCall(q, k, kv_scale, weights, ks, ke, clean_logits, max_seqlen_k, out_dtype, out, backend)
        return _first(call, facts)
    if _is_grad_enabled() and (weights.requires_grad or kv_scale.requires_grad or q.requires_grad):
        common.warn_of_gradients(OPERATION)
    if out is None:
        out = _empty_strided(plan.size, plan.stride, dtype=out_dtype, device=q.device)
    call = _record((q, k, kv_scale, weights, ks, ke, clean_logits, max_seqlen_k, out_dtype, out, backend))
    plan.run(call if plan.plain else _converted(call, plan))
    return out


class _Plan(NamedTuple):
    """What a call comes to, from its facts alone.

    ``size`` and ``stride`` are those of a result the library allocates; ``plain`` is False where operands have to be
    converted first, ``convert_to`` set where one may not be in the arch's fp8 dialect.
    """

    run: registry.Run
    size: tuple[int, int]
    stride: tuple[int, int]
    plain: bool
    convert_to: Arch | None


def _first(call: MqaLogitsCall, facts: object) -> torch.Tensor:
    """The first call with these facts: checks, selects, and keeps what it came to."""
    common.refuse(OPERATION, (*call[:6], call.out))
    plan, settled = _plan(call)
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in call[:6]):
        common.warn_of_gradients(OPERATION)
    if call.out is None:
        out = torch.empty_strided(plan.size, plan.stride, dtype=call.out_dtype, device=call.q.device)
        call = call._replace(out=out)
    if plan.plain and (bind := getattr(plan.run, "bind", None)) is not None:
        plan = plan._replace(run=bind(call))
    if facts is not None and settled:
        common.keep(facts, plan)
    plan.run(call if plan.plain else _converted(call, plan))
    return call.result


def _converted(call: MqaLogitsCall, plan: _Plan) -> MqaLogitsCall:
    call = validate(call)
    checked: MqaLogitsCall = call if plan.convert_to is None else to_native_dialect(call, plan.convert_to)
    return checked


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
_record: Callable[[Iterable[Any]], MqaLogitsCall] = functools.partial(tuple.__new__, MqaLogitsCall)


def _nothing(call: MqaLogitsCall) -> None:
    """What there is to compute without rows or without keys."""


def _plan(call: MqaLogitsCall) -> tuple[_Plan, bool]:
    """The plan of a call, and whether it may be kept."""
    checked = validate(call)
    arch = arch_of(call.q.device)
    check_dialect(checked, arch)
    problem = problem_of(checked)
    prepared = registry.prepare(problem, arch, call.backend, call.q.device)
    plan = _Plan(
        prepared.run if problem.rows and problem.keys else _nothing,
        (problem.rows, problem.width),
        (row_stride(problem.width, problem.out_dtype), 1),
        checked is call and arch.fp8 != "fnuz",
        arch if arch.fp8 == "fnuz" else None,
    )
    return plan, prepared.settled


def to_native_dialect(call: Any, arch: Arch) -> Any:
    """On gfx942, fn operands read as fnuz: byte 0x80 scrubbed, and a factor 2 each that goes into ``kv_scale``.

    ``call`` is a record with ``q``, ``k`` and ``kv_scale``, of any operation.
    """
    q, k, factor = call.q, call.k, 1.0
    if q.dtype is torch.float8_e4m3fn:
        q, factor = fp8.fn_to_fnuz(q), factor * fp8.FN_AS_FNUZ_FACTOR
    if k.dtype is torch.float8_e4m3fn:
        k, factor = fp8.fn_to_fnuz(k), factor * fp8.FN_AS_FNUZ_FACTOR
    return call._replace(q=q, k=k, kv_scale=call.kv_scale if factor == 1.0 else call.kv_scale * factor)


# The operators: their schemas are the one other place where the arguments are spelled.


@torch.library.custom_op("lightning_indexer::fp8_mqa_logits", mutates_args=())
def _operator(
    q: torch.Tensor,
    k: torch.Tensor,
    kv_scale: torch.Tensor,
    weights: torch.Tensor,
    cu_seqlen_ks: torch.Tensor,
    cu_seqlen_ke: torch.Tensor,
    clean_logits: bool,
    max_seqlen_k: int,
    out_dtype: torch.dtype,
    backend: str | None,
) -> torch.Tensor:
    # Contiguous: with a padded stride, whether a result is contiguous would depend on N, and a graph on that.
    out = q.new_empty((q.shape[0], max_seqlen_k or k.shape[0]), dtype=out_dtype)
    tensors = (q, k, kv_scale, weights, cu_seqlen_ks, cu_seqlen_ke)
    return _eager(MqaLogitsCall(*tensors, clean_logits, max_seqlen_k, out_dtype, out, backend))


@torch.library.custom_op("lightning_indexer::fp8_mqa_logits_out", mutates_args=("out",))
def _operator_out(
    q: torch.Tensor,
    k: torch.Tensor,
    kv_scale: torch.Tensor,
    weights: torch.Tensor,
    cu_seqlen_ks: torch.Tensor,
    cu_seqlen_ke: torch.Tensor,
    out: torch.Tensor,
    clean_logits: bool,
    max_seqlen_k: int,
    backend: str | None,
) -> None:
    tensors = (q, k, kv_scale, weights, cu_seqlen_ks, cu_seqlen_ke)
    _eager(MqaLogitsCall(*tensors, clean_logits, max_seqlen_k, out.dtype, out, backend))


def _eager(call: MqaLogitsCall) -> torch.Tensor:
    """The call of an operator, whose operands are real: parameters, subclasses too, as the tensors they hold."""
    call = common.plain(call)
    return fp8_mqa_logits(
        call.q, (call.k, call.kv_scale), *call[3:6],
        clean_logits=call.clean_logits, max_seqlen_k=call.max_seqlen_k, out_dtype=call.out_dtype, out=call.out,
        backend=call.backend,
    )  # fmt: skip


@_operator.register_fake
def _(*arguments: Any) -> torch.Tensor:
    call = validate(MqaLogitsCall._make((*arguments[:9], None, None)))
    return call.q.new_empty((call.q.shape[0], call.max_seqlen_k or call.k.shape[0]), dtype=call.out_dtype)


@_operator_out.register_fake
def _(*arguments: Any) -> None:
    *tensors, out, clean_logits, max_seqlen_k, backend = arguments
    validate(MqaLogitsCall._make((*tensors, clean_logits, max_seqlen_k, out.dtype, out, backend)))


def _through_operator(call: MqaLogitsCall) -> torch.Tensor:
    common.refuse(OPERATION, (*call[:6], call.out))
    warns = not torch.compiler.is_compiling() and torch.is_grad_enabled()
    if warns and any(getattr(tensor, "requires_grad", False) for tensor in call[:6]):
        common.warn_of_gradients(OPERATION)
    if any(getattr(tensor, "is_nested", False) for tensor in call[:6]):
        validate(call)  # a nested tensor's own dispatch would refuse the operator without a name
    if sharded.is_distributed((*call[:6], call.out)):
        return _on_every_rank(call)
    with torch.no_grad():
        if call.out is None:
            *arguments, _, backend = call
            result: torch.Tensor = _operator(*arguments, backend)
            return result
        if call.out.dtype != call.out_dtype:
            raise TypeError(f"out: got dtype {call.out.dtype}, expected {call.out_dtype}, the out_dtype of the call")
        _operator_out(*call[:6], call.out, call.clean_logits, call.max_seqlen_k, call.backend)
        return call.out


def _on_every_rank(call: MqaLogitsCall) -> torch.Tensor:
    """The call on DTensors: rows sharded or not, keys replicated."""
    names = ("q", "k", "kv_scale", "weights", "cu_seqlen_ks", "cu_seqlen_ke")

    def local(parts: dict[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
        q, k, *others = (parts[name] for name in names)
        options = {"clean_logits": call.clean_logits, "max_seqlen_k": call.max_seqlen_k, "out_dtype": call.out_dtype}
        out = parts.get("out")
        return (fp8_mqa_logits(q, (k, others[0]), *others[1:], **options, out=out, backend=call.backend),)  # type: ignore[arg-type]

    operands = dict(zip(names, call[:6], strict=True))
    rows = ("q", "weights", "cu_seqlen_ks", "cu_seqlen_ke")
    [result] = sharded.run(operands, rows, {"out": call.out}, call.q.shape[0], local)
    return result
