"""Calls on DTensors: rows may be sharded, keys are whole on every rank, so that each rank scores its rows alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor, Placement


def is_distributed(tensors: Sequence[object]) -> bool:
    """True for a call with a DTensor in it; imports nothing of ``torch.distributed``."""
    return any(isinstance(tensor, torch.Tensor) and hasattr(tensor, "placements") for tensor in tensors)


def run(
    operands: Mapping[str, torch.Tensor | None],
    rows: Sequence[str],
    outs: Mapping[str, torch.Tensor | None],
    result_rows: int,
    local: Callable[[dict[str, torch.Tensor]], tuple[torch.Tensor, ...]],
) -> tuple[torch.Tensor, ...]:
    """Runs ``local`` on this rank's part of every operand.

    On each dimension of the mesh the rows are sharded if one of the operands of ``rows`` is ``Shard(0)`` there; those
    that are replicated are cut to match, without communication.

    Args:
        operands: DTensors by the names that errors use, None where the call has none.
        rows: the operands whose dimension 0 is the rows of the result; the others have to be replicated.
        outs: None, or DTensors placed as the rows are: results to write into.
        result_rows: M, of the whole result.
        local: the call on local tensors, operands and outs by name; its results, [rows, any] each.

    Returns:
        DTensors whose rows are placed as those of the operands; for a result that ``local`` wrote into, that DTensor.

    Raises:
        TypeError: DTensors and other tensors in one call.
        ValueError: another placement, or two meshes.
    """
    from torch.distributed.tensor import DTensor, Replicate, Shard

    tensors: dict[str, DTensor] = {}
    for name, tensor in (*operands.items(), *outs.items()):
        if tensor is None:
            continue
        if not isinstance(tensor, DTensor):
            raise TypeError(f"{name}: got {type(tensor).__name__}, expected a DTensor as the other operands are")
        tensors[name] = tensor
    mesh = tensors[rows[0]].device_mesh
    by_rows = (*rows, *outs)
    placed: list[Placement] = [Replicate()] * mesh.ndim
    for name, tensor in tensors.items():
        if tensor.device_mesh != mesh:
            raise ValueError(f"{name}: got a DTensor on {tensor.device_mesh}, expected {mesh}, the mesh of {rows[0]}")
        for dim, placement in enumerate(tensor.placements):
            if placement.is_shard(0) and name in by_rows:
                placed[dim] = Shard(0)
            elif not placement.is_replicate():
                allowed = "Shard(0) or Replicate()" if name in by_rows else "Replicate(): every rank reads all keys"
                raise ValueError(
                    f"{name}: got placements {tensor.placements}, expected {allowed}; redistribute it before the call"
                )
    for name in outs:
        if name in tensors and list(tensors[name].placements) != placed:
            raise ValueError(
                f"{name}: got placements {tensors[name].placements}, expected {tuple(placed)}, as the rows of the "
                "operands"
            )
    _check_shares(tensors, rows, placed, result_rows)
    with torch.no_grad():
        parts = {}
        for name, tensor in tensors.items():
            if name in rows and list(tensor.placements) != placed:
                tensor = tensor.redistribute(mesh, placed)
            parts[name] = tensor.to_local()
        results: list[torch.Tensor] = []
        for part in local(parts):
            written = [tensors[name] for name in outs if parts.get(name) is part]
            size = torch.Size((result_rows, part.shape[1]))
            results += written or [
                DTensor.from_local(part, mesh, placed, run_check=False, shape=size, stride=part.stride())
            ]
        return tuple(results)


def _check_shares(
    tensors: Mapping[str, DTensor], rows: Sequence[str], placed: Sequence[Placement], result_rows: int
) -> None:
    """Rows, next_n a sequence, and sequences are cut at the same places only where ranks hold equally many."""
    ranks = 1
    for dim, placement in enumerate(placed):
        ranks *= tensors[rows[0]].device_mesh.size(dim) if placement.is_shard() else 1
    sequences = tensors[rows[0]].shape[0]
    if sequences != result_rows and sequences % ranks:
        raise ValueError(
            f"{rows[0]}: got {sequences} sequences on {ranks} ranks, expected a multiple of {ranks}, as next_n is not 1"
        )
