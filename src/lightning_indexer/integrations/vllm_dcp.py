"""vLLM's merge under decode context parallelism, in its argument order: any k to 4096, any device, no CuTe DSL."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from lightning_indexer.distributed.collectives import Group
from lightning_indexer.distributed.merge import candidates, merge_top_k
from lightning_indexer.distributed.sharding import KeySharding
from lightning_indexer.problems.top_k import MAX_WIDTH

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def merge_dcp_topk_global(
    logits: torch.Tensor,
    topk_indices: torch.Tensor,
    topk_tokens: int,
    dcp_rank: int,
    dcp_world_size: int,
    cp_interleave: int,
    row_starts: torch.Tensor | None = None,
    *,
    group: ProcessGroup | None = None,
) -> None:
    """Replaces each rank's own selection by the global one, as ``_merge_dcp_topk_global`` of vLLM's
    ``model_executor/layers/sparse_attn_indexer.py`` does.

    Args:
        logits: [M, W] float32, this rank's scores.
        topk_indices: [M, topk_tokens] int32, this rank's selection in any order, counted from ``row_starts`` in its own
            numbering, -1 where there is none. Becomes positions of the request, ascending, -1 behind the last.
        topk_tokens: k.
        dcp_rank, dcp_world_size: this rank and the ranks.
        cp_interleave: tokens that a rank takes in turn.
        row_starts: [M] int32, the column at which a row's request begins; None: 0.
        group: vLLM's ``get_dcp_group().device_group``; None: all ranks.

    Raises:
        CollectiveError: another rank has failed or is late.
    """
    if dcp_world_size <= 1:
        return
    team = Group(group, logits.device, None)
    team.expect(dcp_world_size)
    sharding = KeySharding.interleaved(MAX_WIDTH, dcp_world_size, cp_interleave)
    selected = topk_indices[:, :topk_tokens]
    columns = selected.clamp(min=0).long()
    if row_starts is not None:
        columns = columns + row_starts.reshape(-1, 1)
    mine = candidates(logits.shape[0], topk_tokens, logits.device)
    mine.values.copy_(logits.gather(1, columns.clamp(max=max(0, logits.shape[1] - 1))))
    mine.indices.copy_(sharding.position(selected, dcp_rank))
    merged, _ = merge_top_k(mine, team, ascending=False, keys=MAX_WIDTH, order="index", values=False)
    selected.copy_(merged)
