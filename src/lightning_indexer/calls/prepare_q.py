"""``prepare_q``: the public call, and its custom operators ``lightning_indexer::prepare_q`` and ``_out``."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch.autograd import forward_ad

from lightning_indexer import envs
from lightning_indexer.arch import arch_of, assumed
from lightning_indexer.calls import common
from lightning_indexer.problems.checks import check_pair
from lightning_indexer.problems.prepare_q import OPERATION, PrepareQCall, problem_of, validate
from lightning_indexer.problems.transform import Rope, Steps
from lightning_indexer.selection import registry


def prepare_q(
    q: torch.Tensor,
    weights: torch.Tensor,
    *,
    positions: torch.Tensor | None = None,
    cos_sin_cache: torch.Tensor | None = None,
    rope: Rope = "first",
    interleaved: bool = False,
    hadamard: bool = False,
    dtype: torch.dtype = torch.float8_e4m3fn,
    power_of_two: bool = False,
    fp4: bool = False,
    weight_scale: float | None = None,
    out: tuple[torch.Tensor, torch.Tensor] | None = None,
    backend: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Queries of the indexer as ``fp8_mqa_logits`` reads them: rotated, quantised, their scales in the weights.

    The scale of row (t, h) is ``max(amax, 1e-4) / 448`` (fnuz: 224), as a key's. It is positive and passes the ReLU, so
    the new weight is ``weights[t, h] * q_scale[t, h] * weight_scale``. All steps are in float32.

    Source: DeepSeek-V3.2 technical report, section 2.1.

    Args:
        q: [T, H, D] bfloat16, float16 or float32, last dimension contiguous, any other strides.
        weights: [T, H] of those dtypes, last dimension contiguous.
        positions, cos_sin_cache, rope, interleaved, hadamard: as in ``insert_k_cache``.
        dtype: of the quantised q: ``torch.float8_e4m3fn`` or ``torch.float8_e4m3fnuz``.
        power_of_two: round scales up to powers of two.
        fp4: round q to MXFP4 first, as models do that were trained with fp4 queries; D=128. What leaves is e4m3 with
            one scale a row, exact as ``gather_k_cache`` says.
        weight_scale: None: ``D ** -0.5 * H ** -0.5``.
        out: the pair to write into, contiguous.
        backend: run this backend or raise; None lets the library (or ``LIGHTNING_INDEXER_BACKEND``) choose.

    Returns:
        q [T, H, D] of ``dtype`` and weights [T, H] float32.

    Raises:
        TypeError, ValueError: a bad argument; the message names it, what came and what was expected.
        BackendUnavailableError: the backend asked for cannot run this call.
        NotImplementedError: an operand of ``torch.func``'s transforms, a tangent, or ``torch.jit.trace``.
    """
    if out is not None:
        check_pair("out", out, "(q, weights)")
    steps = Steps(None, None, 1e-6, positions, cos_sin_cache, rope, interleaved, hadamard)
    call = PrepareQCall(q, weights, steps, dtype, power_of_two, fp4, weight_scale, out, backend)
    if torch.compiler.is_compiling() or common.dispatch_modes() or common.needs_operator(_tensors(call)):
        return _through_operator(call)
    return _run(call)


class _Plan(NamedTuple):
    """What a call comes to, from its facts alone: ``run`` is None where there is nothing to write."""

    run: registry.Run | None
    weight_scale: float
    normal: bool


def _run(call: PrepareQCall) -> tuple[torch.Tensor, torch.Tensor]:
    q, steps = call.q, call.steps
    facts = common.facts(
        OPERATION, (q, call.weights, *steps.tensors, *(call.out or (None, None))), steps.rope,
        steps.interleaved.__class__, steps.interleaved, steps.hadamard.__class__, steps.hadamard, call.dtype,
        call.power_of_two.__class__, call.power_of_two, call.fp4.__class__, call.fp4, call.weight_scale.__class__,
        call.weight_scale, call.backend, envs.selection(), assumed(),
    )  # fmt: skip
    plan = None if facts is None else common.PLANS.get(facts)
    if common.functorch() is not None or common.tracing() is not None or forward_ad._current_level >= 0:
        common.refuse(OPERATION, _tensors(call))
    if torch.is_grad_enabled() and (
        getattr(q, "requires_grad", False) or getattr(call.weights, "requires_grad", False)
    ):
        common.warn_of_gradients(OPERATION)
    if plan is None:
        checked = validate(call)
        problem = problem_of(checked)
        prepared = registry.prepare(problem, arch_of(q.device), call.backend, q.device)
        same = all(a is b for a, b in zip(_tensors(call), _tensors(checked), strict=True))
        assert checked.weight_scale is not None
        plan = _Plan(prepared.run if problem.tokens else None, checked.weight_scale, same)
        if facts is not None and prepared.settled:
            common.keep(facts, plan)
    out = call.out
    if out is None:
        out = (
            torch.empty(q.shape, dtype=call.dtype, device=q.device),
            torch.empty(q.shape[:2], dtype=torch.float32, device=q.device),
        )
    if plan.run is not None:
        call = call if plan.normal else validate(call)
        plan.run(call._replace(weight_scale=plan.weight_scale, out=out))
    return out[0], out[1]


def _tensors(call: PrepareQCall) -> list[torch.Tensor]:
    given = (call.q, call.weights, *call.steps.tensors, *(call.out or ()))
    return [tensor for tensor in given if isinstance(tensor, torch.Tensor)]


@torch.library.custom_op("lightning_indexer::prepare_q", mutates_args=())
def _operator(
    q: torch.Tensor,
    weights: torch.Tensor,
    positions: torch.Tensor | None,
    cos_sin_cache: torch.Tensor | None,
    rope: str,
    interleaved: bool,
    hadamard: bool,
    dtype: torch.dtype,
    power_of_two: bool,
    fp4: bool,
    weight_scale: float | None,
    backend: str | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    arguments = (q, weights, positions, cos_sin_cache, rope, interleaved, hadamard)
    return _run(common.plain(_call(arguments, (dtype, power_of_two, fp4, weight_scale), None, backend)))


@torch.library.custom_op("lightning_indexer::prepare_q_out", mutates_args=("out_q", "out_weights"))
def _operator_out(
    q: torch.Tensor,
    weights: torch.Tensor,
    positions: torch.Tensor | None,
    cos_sin_cache: torch.Tensor | None,
    rope: str,
    interleaved: bool,
    hadamard: bool,
    dtype: torch.dtype,
    power_of_two: bool,
    fp4: bool,
    weight_scale: float | None,
    backend: str | None,
    out_q: torch.Tensor,
    out_weights: torch.Tensor,
) -> None:
    arguments = (q, weights, positions, cos_sin_cache, rope, interleaved, hadamard)
    out = out_q, out_weights
    _run(common.plain(_call(arguments, (dtype, power_of_two, fp4, weight_scale), out, backend)))


def _call(arguments: tuple[Any, ...], options: tuple[Any, ...], out: Any, backend: str | None) -> PrepareQCall:
    q, weights, *steps = arguments
    dtype, power_of_two, fp4, weight_scale = options
    norm = Steps(None, None, 1e-6, *steps)
    return PrepareQCall(q, weights, norm, dtype, power_of_two, fp4, weight_scale, out, backend)


@_operator.register_fake
def _(*arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
    call = validate(_call(arguments[:7], arguments[7:11], None, None))
    q = call.q
    return q.new_empty(q.shape, dtype=call.dtype), q.new_empty(q.shape[:2], dtype=torch.float32)


@_operator_out.register_fake
def _(*arguments: Any) -> None:
    validate(_call(arguments[:7], arguments[7:11], arguments[12:], None))


def _through_operator(call: PrepareQCall) -> tuple[torch.Tensor, torch.Tensor]:
    if not torch.compiler.is_compiling():
        common.refuse(OPERATION, _tensors(call))
        validate(call)
    given = (*call[:2], *call.steps[3:], *call[3:7], call.backend)
    with torch.no_grad():
        if call.out is None:
            found: tuple[torch.Tensor, torch.Tensor] = _operator(*given)
            return found
        _operator_out(*given, *call.out)
        return call.out
