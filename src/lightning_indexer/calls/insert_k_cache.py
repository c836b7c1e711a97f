"""``insert_k_cache``: the public call, and its custom operator ``lightning_indexer::insert_k_cache``."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch.autograd import forward_ad

from lightning_indexer import envs
from lightning_indexer.arch import arch_of, assumed
from lightning_indexer.calls import common
from lightning_indexer.problems.cache_layout import CacheLayout
from lightning_indexer.problems.insert_k_cache import OPERATION, InsertCall, problem_of, validate
from lightning_indexer.problems.paged_mqa_logits import check_address
from lightning_indexer.problems.transform import Rope, Steps
from lightning_indexer.selection import registry


def insert_k_cache(
    k: torch.Tensor,
    kv_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    layout: CacheLayout | None = None,
    norm_weight: torch.Tensor | None = None,
    norm_bias: torch.Tensor | None = None,
    norm_eps: float = 1e-6,
    positions: torch.Tensor | None = None,
    cos_sin_cache: torch.Tensor | None = None,
    rope: Rope = "first",
    interleaved: bool = False,
    hadamard: bool = False,
    backend: str | None = None,
) -> None:
    """Quantises keys and writes them into a paged cache, with the steps that precede it on request, in one kernel.

    Row t of k, after LayerNorm, RoPE and Hadamard rotation where they are asked for, goes to place ``slot % page`` of
    block ``slot // page`` with ``slot = slot_mapping[t]``. fp8: the scale is ``max(amax, 1e-4) / 448`` (fnuz: 224),
    rounded up to a power of two where the layout's scales are. fp4: a scale for each 32 channels, see
    ``lightning_indexer.fp4``. All steps are in float32; nothing is rounded between them. docs/semantics.md states
    every edge case.

    Source: DeepSeek-V3.2 technical report, section 2.1; the cache is that of its engines.

    Args:
        k: [T, D] bfloat16, float16 or float32, last dimension contiguous, any row stride.
        kv_cache: [blocks, page, 1, D + 4] uint8 (D / 2 + 4 of fp4), or without the 1; written. Blocks are contiguous
            each and may lie any multiple of 4 bytes apart; the pool may be of any size.
        slot_mapping: [T] int64. A slot that is negative, or beyond the cache, is skipped. Two tokens of one slot leave
            either's key.
        layout: how keys lie in the cache; None: ``CacheLayout(page, D)``, e4m3fn, flat with float32 scales.
        norm_weight, norm_bias: [D], LayerNorm's gain and bias; None: no LayerNorm, no bias.
        norm_eps: added to the variance.
        positions: [T] int64 or int32, rows of ``cos_sin_cache``, which is not checked; None: no RoPE.
        cos_sin_cache: [positions, rope_dim], the cosines of a position's rope_dim / 2 pairs, then their sines.
        rope: ``"first"`` or ``"last"``, the channels that are rotated.
        interleaved: pairs are channels (2i, 2i + 1) of them; else (i, i + rope_dim / 2).
        hadamard: multiply by the Hadamard matrix of D channels over sqrt(D).
        backend: run this backend or raise; None lets the library (or ``LIGHTNING_INDEXER_BACKEND``) choose.

    Raises:
        TypeError, ValueError: a bad argument, or a cache that does not fit its layout; the message names it, what came
            and what was expected.
        BackendUnavailableError: the backend asked for cannot run this call.
        NotImplementedError: an operand of ``torch.func``'s transforms, a tangent, or ``torch.jit.trace``.
    """
    steps = Steps(norm_weight, norm_bias, norm_eps, positions, cos_sin_cache, rope, interleaved, hadamard)
    call = InsertCall(k, kv_cache, slot_mapping, layout, steps, backend)
    if torch.compiler.is_compiling() or common.dispatch_modes() or common.needs_operator(_tensors(call)):
        _through_operator(call)
    else:
        _run(call)


class _Plan(NamedTuple):
    """What a call comes to, from its facts alone. ``run`` is None where there is nothing to write; ``layout`` is None
    where operands have to be converted first."""

    run: registry.Run | None
    layout: CacheLayout | None


def _run(call: InsertCall) -> None:
    k, kv_cache, slots, layout, steps, backend = call
    facts = common.facts(
        OPERATION, (k, kv_cache, slots, *steps.tensors), layout, steps.norm_eps.__class__, steps.norm_eps, steps.rope,
        steps.interleaved.__class__, steps.interleaved, steps.hadamard.__class__, steps.hadamard, backend,
        envs.selection(), assumed(),
    )  # fmt: skip
    plan = None if facts is None else common.PLANS.get(facts)
    if common.functorch() is not None or common.tracing() is not None or forward_ad._current_level >= 0:
        common.refuse(OPERATION, _tensors(call))
    if torch.is_grad_enabled() and getattr(k, "requires_grad", False):
        common.warn_of_gradients(OPERATION)
    if plan is None:
        checked = validate(call)
        check_address(kv_cache)
        problem = problem_of(checked)
        prepared = registry.prepare(problem, arch_of(k.device), backend, k.device)
        run = prepared.run if problem.tokens and kv_cache.shape[0] else None
        same = all(a is b for a, b in zip(_tensors(call), _tensors(checked), strict=True))
        plan = _Plan(run, checked.layout if same else None)
        if facts is not None and prepared.settled:
            common.keep(facts, plan)
    if plan.run is not None:
        plan.run(call._replace(layout=plan.layout) if plan.layout is not None else validate(call))


def _tensors(call: InsertCall) -> list[torch.Tensor]:
    given = (call.k, call.kv_cache, call.slot_mapping, *call.steps.tensors)
    return [tensor for tensor in given if isinstance(tensor, torch.Tensor)]


@torch.library.custom_op("lightning_indexer::insert_k_cache", mutates_args=("kv_cache",))
def _operator(
    k: torch.Tensor,
    kv_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    page: int,
    head_dim: int,
    order: str,
    scales: str,
    cache_dtype: torch.dtype,
    norm_weight: torch.Tensor | None,
    norm_bias: torch.Tensor | None,
    norm_eps: float,
    positions: torch.Tensor | None,
    cos_sin_cache: torch.Tensor | None,
    rope: str,
    interleaved: bool,
    hadamard: bool,
    backend: str | None,
) -> None:
    layout = CacheLayout(page, head_dim, order, scales, cache_dtype)  # type: ignore[arg-type]
    steps = Steps(norm_weight, norm_bias, norm_eps, positions, cos_sin_cache, rope, interleaved, hadamard)  # type: ignore[arg-type]
    _run(common.plain(InsertCall(k, kv_cache, slot_mapping, layout, steps, backend)))


@_operator.register_fake
def _(*arguments: Any) -> None:
    k, kv_cache, slots, *rest = arguments
    validate(InsertCall(k, kv_cache, slots, CacheLayout._make(rest[:5]), Steps._make(rest[5:13])))


def _through_operator(call: InsertCall) -> None:
    layout = call.layout
    if not torch.compiler.is_compiling():  # Dynamo reads no more than it has to; the operator's fake checks
        common.refuse(OPERATION, _tensors(call))
        layout = validate(call).layout
    if layout is None:
        layout = CacheLayout(call.kv_cache.shape[1], call.k.shape[1])
    with torch.no_grad():
        _operator(*call[:3], *layout, *call.steps, call.backend)
