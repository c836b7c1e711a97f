"""Scores and selection in one call: the facts of a call, the checks that every call passes once, and the reference."""

from __future__ import annotations

from typing import NamedTuple

import torch

from lightning_indexer.arch import Arch
from lightning_indexer.problems import mqa_logits
from lightning_indexer.problems.mqa_logits import MqaLogitsCall, MqaLogitsProblem, reference_logits, row_stride
from lightning_indexer.problems.one_call import (
    WORKSPACE_BYTES,
    OneCallProblem,
    bases,
    exact_operands,
    keep,
    selection_of,
    unwritten,
    validate_options,
    workspace_bytes,
)
from lightning_indexer.problems.top_k import IndexBase, Order, Tie, reference_top_k

OPERATION = "fp8_mqa_topk"
# The workspace's address, and each row of scores in it.
ALIGN_BYTES = 256
# Logits of one row chunk of the reference stay under this.
_REFERENCE_BYTES = 2**28


class MqaTopKProblem(OneCallProblem):
    """The facts of a call over keys; its ``scoring`` is ``compressed`` where the caller bounds the windows."""

    __slots__ = ()
    scoring: MqaLogitsProblem

    @property
    def operation(self) -> str:
        return OPERATION

    @property
    def keys(self) -> int:
        return self.scoring.keys

    @property
    def heads(self) -> int:
        return self.scoring.heads

    @property
    def head_dim(self) -> int:
        return self.scoring.head_dim

    def adversarial(self, arch: Arch) -> MqaTopKProblem:
        """A small problem of the same H, D, k and options."""
        scoring = self.scoring.adversarial(arch)
        keys = max(scoring.keys, self.k + 411)
        scoring = scoring._replace(keys=keys, max_seqlen_k=keys - 97 if scoring.compressed else 0)
        selection = self.selection._replace(rows=scoring.rows, width=scoring.width)
        return self._replace(scoring=scoring, selection=selection, workspace_bytes=WORKSPACE_BYTES)

    def example(self, device: torch.device) -> MqaTopKCall:
        """A call of this problem with operands that are the same at each time, into results that no kernel writes."""
        return _example(self, device)


class MqaTopKCall(NamedTuple):
    """The tensors of one call, validated.

    ``q``, ``k``, ``kv_scale``, ``weights``, ``ks``, ``ke`` as in ``MqaLogitsCall``, on gfx942 in its dialect;
    ``offsets``, ``page_table``, ``indices`` and ``values`` as in ``TopKCall``. ``workspace``: uint8 [bytes],
    contiguous, on a 16-byte boundary, of the run's ``workspace_bytes``; None: the run allocates it.
    """

    q: torch.Tensor
    k: torch.Tensor
    kv_scale: torch.Tensor
    weights: torch.Tensor
    ks: torch.Tensor
    ke: torch.Tensor
    offsets: torch.Tensor | None
    page_table: torch.Tensor | None
    indices: torch.Tensor
    values: torch.Tensor | None = None
    workspace: torch.Tensor | None = None


class MqaTopKArguments(NamedTuple):
    """The arguments of ``fp8_mqa_topk``; ``keys`` and ``kv_scale`` are its ``kv``."""

    q: torch.Tensor
    keys: torch.Tensor
    kv_scale: torch.Tensor
    weights: torch.Tensor
    ks: torch.Tensor
    ke: torch.Tensor
    k: int
    max_seqlen_k: int = 0
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


def validate(call: MqaTopKArguments) -> MqaTopKArguments:
    """Checks one call's arguments; returns them normalised: vectors [M] and contiguous, ``values`` no longer None,
    ``max_seqlen_k`` 0 where it bounds nothing.

    Works on fake tensors too: it reads shapes, strides, dtypes and devices, never values or addresses.

    Raises:
        TypeError, ValueError: as ``fp8_mqa_logits`` and ``top_k_per_row``; kept positions that are negative or more
            than k; a workspace that cannot hold a row of scores.
    """
    scoring = mqa_logits.validate(scoring_of(call))
    width = scoring.max_seqlen_k
    call = call._replace(
        q=scoring.q, keys=scoring.k, kv_scale=scoring.kv_scale, weights=scoring.weights, ks=scoring.ks, ke=scoring.ke,
        max_seqlen_k=width if width < scoring.k.shape[0] else 0,
    )  # fmt: skip
    row_bytes = 4 * row_stride(call.max_seqlen_k or call.keys.shape[0], torch.float32)
    validated: MqaTopKArguments = validate_options(call, scoring.q.shape[0], scoring.q.device, row_bytes)
    return validated


def scoring_of(call: MqaTopKArguments) -> MqaLogitsCall:
    """The scoring of the whole call, without a result."""
    return MqaLogitsCall(*call[:6], clean_logits=False, max_seqlen_k=call.max_seqlen_k)


def problem_of(call: MqaTopKArguments) -> MqaTopKProblem:
    """The facts of a validated call."""
    scoring = mqa_logits.problem_of(scoring_of(call))
    selection = selection_of(call, scoring.rows, scoring.width, starts=True)
    return MqaTopKProblem(scoring, selection, call.force_first, call.force_last, workspace_bytes(call))


# The reference: the two references, row chunk by row chunk.


def reference_mqa_topk(
    q: torch.Tensor,
    kv: tuple[torch.Tensor, torch.Tensor],
    weights: torch.Tensor,
    cu_seqlen_ks: torch.Tensor,
    cu_seqlen_ke: torch.Tensor,
    k: int,
    *,
    max_seqlen_k: int = 0,
    index_base: IndexBase = "row",
    offsets: torch.Tensor | None = None,
    page_table: torch.Tensor | None = None,
    page_size: int = 1,
    order: Order = "index",
    tie: Tie = "smaller",
    force_first: int = 0,
    force_last: int = 0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The reference: ``reference_logits``, +inf at the kept positions, ``reference_top_k``. Arguments as in
    ``fp8_mqa_topk``.

    Returns:
        Indices int32 [M, k] and scores float32 [M, k], as ``reference_top_k``.
    """
    keys = kv[0].shape[0]
    step = max(1, _REFERENCE_BYTES // max(1, 4 * keys))
    ks, ke = cu_seqlen_ks.reshape(-1).long(), cu_seqlen_ke.reshape(-1).long()
    if max_seqlen_k:
        ke = torch.minimum(ke, ks + max_seqlen_k)
    found = []
    for first in range(0, q.shape[0], step):
        rows = slice(first, first + step)
        logits = reference_logits(q[rows], kv, weights[rows], ks[rows], ke[rows])
        keep(logits, ks[rows], ke[rows], force_first, force_last)
        found.append(
            reference_top_k(
                logits, k, ks[rows], ke[rows], index_base=index_base,
                offsets=None if offsets is None else offsets[rows],
                page_table=None if page_table is None else page_table[rows], page_size=page_size, order=order, tie=tie,
            )
        )  # fmt: skip
    if not found:
        empty = torch.empty((0, k), device=q.device)
        return empty.int(), empty.float()
    return torch.cat([indices for indices, _ in found]), torch.cat([values for _, values in found])


def _example(problem: MqaTopKProblem, device: torch.device) -> MqaTopKCall:
    scoring = problem.scoring.example(device)
    q, k, kv_scale, weights, ks, ke = scoring[:6]
    generator = torch.Generator("cpu").manual_seed(problem.k)
    exact_operands(q, k, weights, generator)
    kv_scale.copy_(torch.tensor([1.0, -1.0, 0.5, 2.0]).repeat(-(-len(kv_scale) // 4))[: len(kv_scale)])
    indices, values = unwritten(problem.selection, device)
    return MqaTopKCall(q, k, kv_scale, weights, ks, ke, *bases(problem.selection, device), indices, values)
