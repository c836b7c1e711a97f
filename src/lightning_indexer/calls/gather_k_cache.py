"""``gather_k_cache``: the public call, and its custom operators ``lightning_indexer::gather_k_cache`` and ``_out``."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from lightning_indexer import envs
from lightning_indexer.arch import arch_of, assumed
from lightning_indexer.calls import common
from lightning_indexer.problems.cache_layout import CacheLayout
from lightning_indexer.problems.checks import check_pair
from lightning_indexer.problems.gather_k_cache import (
    OPERATION,
    GatherCall,
    compressed,
    problem_of,
    results_of,
    validate,
)
from lightning_indexer.problems.paged_mqa_logits import check_address
from lightning_indexer.selection import registry


def gather_k_cache(
    kv_cache: torch.Tensor,
    block_tables: torch.Tensor,
    cu_seq_lens: torch.Tensor,
    keys: int,
    *,
    layout: CacheLayout | None = None,
    compress_ratio: int = 1,
    dtype: torch.dtype | None = None,
    out: tuple[torch.Tensor, torch.Tensor] | None = None,
    backend: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The keys of sequences out of a paged cache, one after the other, as ``fp8_mqa_logits`` reads them.

    Sequence b has ``cu_seq_lens[b + 1] - cu_seq_lens[b]`` tokens, a ``compress_ratio``-th of them keys, rounded down.
    Its key p lies at place ``p % page`` of block ``block_tables[b, p // page]``. Nothing is read back to the host.
    fp4 keys become e4m3 with one scale a key: exactly where the exponents of the key's blocks that are not all zeros
    lie within 14 of each other; below that, a value is off by at most 2^-16 of the largest block's scale.

    Args:
        kv_cache: [blocks, page, 1, D + 4] uint8 (D / 2 + 4 of fp4), or without the 1; blocks lie any multiple of 4
            bytes apart.
        block_tables: [B, max_blocks] int32, last dimension contiguous, any row stride. Entries behind a sequence's
            last page are not read.
        cu_seq_lens: [B + 1] int32, 0 and the sums of the sequences' tokens.
        keys: N, rows of the result: at least as many as the sequences have keys. Rows behind the last hold anything;
            keys beyond N are left out.
        layout: how keys lie in the cache; None: e4m3fn, flat with float32 scales.
        compress_ratio: tokens of a key.
        dtype: of the result: of an fp4 cache ``torch.float8_e4m3fn`` (the default), ``torch.float8_e4m3fnuz``, or
            ``torch.float4_e2m1fn_x2``: no conversion. Of an fp8 cache its own.
        out: the pair to write into, contiguous.
        backend: run this backend or raise; None lets the library (or ``LIGHTNING_INDEXER_BACKEND``) choose.

    Returns:
        ``k`` [N, D] of ``dtype`` and ``kv_scale`` [N] float32; not converted, uint8 [N, D / 2] and [N, 4].

    Raises:
        TypeError, ValueError: a bad argument, or a cache that does not fit its layout; the message names it, what came
            and what was expected.
        BackendUnavailableError: the backend asked for cannot run this call.
        NotImplementedError: an operand of ``torch.func``'s transforms, or ``torch.jit.trace``.
    """
    if out is not None:
        check_pair("out", out, "(k, kv_scale)")
    call = GatherCall(kv_cache, block_tables, cu_seq_lens, keys, layout, compress_ratio, dtype, out, backend)
    if torch.compiler.is_compiling() or common.dispatch_modes() or common.needs_operator(_tensors(call)):
        return _through_operator(call)
    return _run(call)


class _Plan(NamedTuple):
    """What a call comes to, from its facts alone: ``run`` is None where there is nothing to write; the results."""

    run: registry.Run | None
    layout: CacheLayout
    dtype: torch.dtype
    shapes: Any
    contiguous: bool


def _run(call: GatherCall) -> tuple[torch.Tensor, torch.Tensor]:
    kv_cache = call.kv_cache
    facts = common.facts(
        OPERATION, (kv_cache, call.block_tables, call.cu_seq_lens, *(call.out or (None, None))),
        call.keys.__class__, call.keys, call.layout, call.compress_ratio.__class__, call.compress_ratio, call.dtype,
        call.backend, envs.selection(), assumed(),
    )  # fmt: skip
    plan = None if facts is None else common.PLANS.get(facts)
    if common.functorch() is not None or common.tracing() is not None:
        common.refuse(OPERATION, _tensors(call))
    if plan is None:
        checked = validate(call)
        check_address(kv_cache)
        problem = problem_of(checked)
        prepared = registry.prepare(problem, arch_of(kv_cache.device), call.backend, kv_cache.device)
        nothing = not (problem.keys and problem.batch and kv_cache.shape[0])
        plan = _Plan(
            None if nothing else prepared.run, problem.layout, problem.dtype, results_of(checked),
            call.cu_seq_lens.is_contiguous(),
        )  # fmt: skip
        if facts is not None and prepared.settled:
            common.keep(facts, plan)
    out = call.out
    if out is None:
        k, kv_scale = (torch.empty(shape, dtype=dtype, device=kv_cache.device) for shape, dtype in plan.shapes)
        out = k, kv_scale
    if plan.run is not None:
        cu_seq_lens = call.cu_seq_lens if plan.contiguous else call.cu_seq_lens.contiguous()
        if call.compress_ratio != 1:
            cu_seq_lens = compressed(cu_seq_lens, call.compress_ratio)
        plan.run(call._replace(cu_seq_lens=cu_seq_lens, layout=plan.layout, dtype=plan.dtype, out=out))
    return out[0], out[1]


def _tensors(call: GatherCall) -> list[torch.Tensor]:
    given = (call.kv_cache, call.block_tables, call.cu_seq_lens, *(call.out or ()))
    return [tensor for tensor in given if isinstance(tensor, torch.Tensor)]


@torch.library.custom_op("lightning_indexer::gather_k_cache", mutates_args=())
def _operator(
    kv_cache: torch.Tensor,
    block_tables: torch.Tensor,
    cu_seq_lens: torch.Tensor,
    keys: int,
    page: int,
    head_dim: int,
    order: str,
    scales: str,
    cache_dtype: torch.dtype,
    compress_ratio: int,
    dtype: torch.dtype | None,
    backend: str | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    layout = CacheLayout(page, head_dim, order, scales, cache_dtype)  # type: ignore[arg-type]
    return _run(
        common.plain(
            GatherCall(kv_cache, block_tables, cu_seq_lens, keys, layout, compress_ratio, dtype, None, backend)
        )
    )


@torch.library.custom_op("lightning_indexer::gather_k_cache_out", mutates_args=("k", "kv_scale"))
def _operator_out(
    kv_cache: torch.Tensor,
    block_tables: torch.Tensor,
    cu_seq_lens: torch.Tensor,
    keys: int,
    page: int,
    head_dim: int,
    order: str,
    scales: str,
    cache_dtype: torch.dtype,
    compress_ratio: int,
    dtype: torch.dtype | None,
    backend: str | None,
    k: torch.Tensor,
    kv_scale: torch.Tensor,
) -> None:
    layout = CacheLayout(page, head_dim, order, scales, cache_dtype)  # type: ignore[arg-type]
    _run(
        common.plain(
            GatherCall(kv_cache, block_tables, cu_seq_lens, keys, layout, compress_ratio, dtype, (k, kv_scale), backend)
        )
    )


@_operator.register_fake
def _(*arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
    call = _validated(arguments, None)
    k, kv_scale = (call.kv_cache.new_empty(shape, dtype=dtype) for shape, dtype in results_of(call))
    return k, kv_scale


@_operator_out.register_fake
def _(*arguments: Any) -> None:
    _validated(arguments[:-2], arguments[-2:])


def _validated(arguments: tuple[Any, ...], out: Any) -> GatherCall:
    layout, (ratio, dtype, _) = CacheLayout._make(arguments[4:9]), arguments[9:]
    kv_cache, block_tables, cu_seq_lens, keys = arguments[:4]
    return validate(GatherCall(kv_cache, block_tables, cu_seq_lens, keys, layout, ratio, dtype, out))


def _through_operator(call: GatherCall) -> tuple[torch.Tensor, torch.Tensor]:
    layout = call.layout
    if not torch.compiler.is_compiling():
        common.refuse(OPERATION, _tensors(call))
        layout = validate(call).layout
    if layout is None:
        layout = CacheLayout(call.kv_cache.shape[1], call.kv_cache.shape[-1] - 4)
    given = (*call[:4], *layout, call.compress_ratio, call.dtype, call.backend)
    with torch.no_grad():
        if call.out is None:
            found: tuple[torch.Tensor, torch.Tensor] = _operator(*given)
            return found
        _operator_out(*given, *call.out)
        return call.out
