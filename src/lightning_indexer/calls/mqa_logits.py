"""The public call: validate once, convert the fp8 dialect, allocate, select, run.

Calls from eager code go straight to the backend. Under ``torch.compile``, fake tensors and other dispatch modes they go
through the custom operators ``lightning_indexer::fp8_mqa_logits`` and ``lightning_indexer::fp8_mqa_logits_out``.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from lightning_indexer import envs, fp8
from lightning_indexer.arch import Arch, arch_of, assumed
from lightning_indexer.problems.mqa_logits import Operands, Problem, check_dialect, is_aligned, row_stride, validate
from lightning_indexer.selection import registry as dispatch


def fp8_mqa_logits(
    q: torch.Tensor,
    kv: tuple[torch.Tensor, torch.Tensor],
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
        q: [M, H, D] float8_e4m3fn (or float8_e4m3fnuz on gfx942), last dimension contiguous.
        kv: ``(k, kv_scale)``: keys [N, D] fp8, last dimension contiguous, and their scales [N] or [N, 1] float32.
        weights: [M, H] float32, last dimension contiguous. A scale of q, if any, is folded in here by the caller.
        cu_seqlen_ks: [M] int32, first key of each row's window. Any value is legal; it is clamped.
        cu_seqlen_ke: [M] int32, end (exclusive) of each row's window. ``ke <= ks`` is an empty window.
        clean_logits: write ``-inf`` outside the windows. If False, those positions hold anything.
        max_seqlen_k: if > 0, "compressed logits": the result is [M, max_seqlen_k] and column ``j`` of row ``m`` is
            position ``ks[m] + j``. Columns outside the window hold anything; ``clean_logits`` must be False.
        out_dtype: ``torch.float32`` or ``torch.bfloat16``.
        out: buffer to write into, [M, N] (or [M, max_seqlen_k]) of ``out_dtype``, last dimension contiguous, any row
            stride. Nothing outside it is written, its row padding included.
        backend: run this backend or raise; None lets the library (or ``LIGHTNING_INDEXER_BACKEND``) choose.

    Returns:
        [M, N] (or [M, max_seqlen_k]) logits on q's device: ``out`` if given, else a view of a new buffer whose row
        stride is padded to 256 bytes. Not differentiable.

    Raises:
        TypeError, ValueError: a bad argument; the message names it, what came and what was expected.
        dispatch.BackendUnavailableError: the backend asked for cannot run this call.
    """
    try:
        k, kv_scale = kv
    except (TypeError, ValueError):
        raise TypeError(f"kv: got {type(kv).__name__}, expected the pair (k, kv_scale)") from None
    if isinstance(q, torch.Tensor) and (
        torch.compiler.is_compiling()
        or torch._C._len_torch_dispatch_stack() > 0
        or type(q) is not torch.Tensor
        or q.is_meta
    ):
        return _call_operator(
            q, k, kv_scale, weights, cu_seqlen_ks, cu_seqlen_ke, clean_logits, max_seqlen_k, out_dtype, out, backend
        )
    return _run(
        q, k, kv_scale, weights, cu_seqlen_ks, cu_seqlen_ke, clean_logits, max_seqlen_k, out_dtype, out, backend
    )


def _run(
    q: torch.Tensor,
    k: torch.Tensor,
    kv_scale: torch.Tensor,
    weights: torch.Tensor,
    ks: torch.Tensor,
    ke: torch.Tensor,
    clean_logits: bool,
    max_seqlen_k: int,
    out_dtype: torch.dtype,
    out: torch.Tensor | None,
    backend: str | None,
) -> torch.Tensor:
    # All that validation, arch and dispatch read. Calls that agree in it, as the layers of a model do, plan once.
    try:
        facts = (
            q.shape, q.stride(), q.dtype, q.device, k.shape, k.stride(), k.dtype, k.device,
            kv_scale.shape, kv_scale.is_contiguous(), kv_scale.dtype, kv_scale.device,
            weights.shape, weights.stride(), weights.dtype, weights.device,
            ks.shape, ks.is_contiguous(), ks.dtype, ks.device, ke.shape, ke.is_contiguous(), ke.dtype, ke.device,
            None if out is None else (out.shape, out.stride(), out.dtype, out.device),
            type(clean_logits), clean_logits, type(max_seqlen_k), max_seqlen_k, out_dtype, backend,
            (q.data_ptr() | k.data_ptr()) & 15, envs.selection(), assumed(),
        )  # fmt: skip
        plan = _PLANS.get(facts)
    except (AttributeError, TypeError):  # not a tensor, or not hashable: the checks say which
        plan = facts = None
    if plan is None:
        plan = _plan(q, k, kv_scale, weights, ks, ke, clean_logits, max_seqlen_k, out_dtype, out, backend)
        if len(_PLANS) >= MAX_PLANS:
            _PLANS.clear()
        if facts is not None:
            _PLANS[facts] = plan
    if out is None:
        out = torch.empty_strided(plan.size, plan.stride, dtype=out_dtype, device=q.device)
    if plan.run is None:
        return out
    if plan.scales_are_a_column:
        kv_scale = kv_scale[:, 0]
    operands = Operands(q, k, kv_scale, weights, ks, ke)
    plan.run(operands if plan.convert_to is None else _to_native_dialect(operands, plan.convert_to), out)
    return out


class _Plan(NamedTuple):
    """What a call comes to, from its facts alone.

    ``run`` is None where nothing is to compute; ``size`` and ``stride`` are those of a result the library allocates;
    ``convert_to`` is set where an operand may not be in the arch's fp8 dialect.
    """

    run: dispatch.Run | None
    size: tuple[int, int]
    stride: tuple[int, int]
    scales_are_a_column: bool
    convert_to: Arch | None


_PLANS: dict[object, _Plan] = {}
MAX_PLANS = 4096


def forget_plans() -> None:
    """Drops what earlier calls decided. Needed only by who changes the registry of backends at run time."""
    _PLANS.clear()
    dispatch.forget()


def _plan(
    q: torch.Tensor,
    k: torch.Tensor,
    kv_scale: torch.Tensor,
    weights: torch.Tensor,
    ks: torch.Tensor,
    ke: torch.Tensor,
    clean_logits: bool,
    max_seqlen_k: int,
    out_dtype: torch.dtype,
    out: torch.Tensor | None,
    backend: str | None,
) -> _Plan:
    validate(
        q, k, kv_scale, weights, ks, ke,
        clean_logits=clean_logits, max_seqlen_k=max_seqlen_k, out_dtype=out_dtype, out=out,
    )  # fmt: skip
    arch = arch_of(q.device)
    check_dialect(q, k, arch)
    problem = problem_of(q, k, out_dtype, clean_logits, max_seqlen_k)
    run = dispatch.prepare(problem, arch, backend)
    return _Plan(
        run if problem.rows and problem.keys else None,
        (problem.rows, problem.width),
        (row_stride(problem.width, out_dtype), 1),
        kv_scale.dim() == 2,
        arch if arch.fp8 == "fnuz" else None,
    )


def problem_of(
    q: torch.Tensor, k: torch.Tensor, out_dtype: torch.dtype, clean_logits: bool, max_seqlen_k: int
) -> Problem:
    """The facts of a call with these operands, which have been validated."""
    rows, heads, head_dim = q.shape
    return Problem(
        rows, k.shape[0], heads, head_dim, q.dtype, k.dtype, out_dtype, clean_logits, max_seqlen_k, is_aligned(q, k)
    )


def allocate(rows: int, width: int, out_dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """An uninitialised [rows, width] result whose row stride is padded."""
    return torch.empty_strided((rows, width), (row_stride(width, out_dtype), 1), dtype=out_dtype, device=device)


def _to_native_dialect(operands: Operands, arch: Arch) -> Operands:
    """On gfx942, fn operands read as fnuz: byte 0x80 scrubbed, and a factor 2 each that goes into ``kv_scale``."""
    q, k, factor = operands.q, operands.k, 1.0
    if q.dtype is torch.float8_e4m3fn:
        q, factor = fp8.fn_to_fnuz(q), factor * fp8.FN_AS_FNUZ_FACTOR
    if k.dtype is torch.float8_e4m3fn:
        k, factor = fp8.fn_to_fnuz(k), factor * fp8.FN_AS_FNUZ_FACTOR
    scale = operands.kv_scale if factor == 1.0 else operands.kv_scale * factor
    return operands._replace(q=q, k=k, kv_scale=scale)


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
    return _run(
        q, k, kv_scale, weights, cu_seqlen_ks, cu_seqlen_ke, clean_logits, max_seqlen_k, out_dtype, None, backend
    )


@_operator.register_fake
def _(
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
    validate(
        q, k, kv_scale, weights, cu_seqlen_ks, cu_seqlen_ke,
        clean_logits=clean_logits, max_seqlen_k=max_seqlen_k, out_dtype=out_dtype, out=None,
    )  # fmt: skip
    return allocate(q.shape[0], max_seqlen_k or k.shape[0], out_dtype, q.device)


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
    _run(q, k, kv_scale, weights, cu_seqlen_ks, cu_seqlen_ke, clean_logits, max_seqlen_k, out.dtype, out, backend)


@_operator_out.register_fake
def _(
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
    validate(
        q, k, kv_scale, weights, cu_seqlen_ks, cu_seqlen_ke,
        clean_logits=clean_logits, max_seqlen_k=max_seqlen_k, out_dtype=out.dtype, out=out,
    )  # fmt: skip


@torch.no_grad()
def _call_operator(
    q: torch.Tensor,
    k: torch.Tensor,
    kv_scale: torch.Tensor,
    weights: torch.Tensor,
    ks: torch.Tensor,
    ke: torch.Tensor,
    clean_logits: bool,
    max_seqlen_k: int,
    out_dtype: torch.dtype,
    out: torch.Tensor | None,
    backend: str | None,
) -> torch.Tensor:
    if out is None:
        result: torch.Tensor = _operator(
            q, k, kv_scale, weights, ks, ke, clean_logits, max_seqlen_k, out_dtype, backend
        )
        return result
    if out.dtype != out_dtype:
        raise TypeError(f"out: got dtype {out.dtype}, expected {out_dtype}, the out_dtype of the call")
    _operator_out(q, k, kv_scale, weights, ks, ke, out, clean_logits, max_seqlen_k, backend)
    return out
