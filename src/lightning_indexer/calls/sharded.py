"""Calls on DTensors: rows may be sharded, keys are whole on every rank, so that each rank scores its rows alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor, Placement


def is_distributed(tensors: Sequence[object]) -> bool:
    """True for a call with a DTensor in it; imports nothing of ``torch.distributed``."""
    return any(isinstance(tensor, torch.Tensor) and hasattr(tensor, "placements") for tensor in tensors)


def run(
    operands: dict[str, torch.Tensor],
    rows: Sequence[str],
    out: torch.Tensor | None,
    local: Callable[[dict[str, torch.Tensor], torch.Tensor | None], torch.Tensor],
) -> torch.Tensor:
    """Runs ``local`` on this rank's part of every operand.

    On each dimension of the mesh the rows are sharded if one of the operands of ``rows`` is ``Shard(0)`` there; those
    that are replicated are cut to match, without communication.

    Args:
        operands: DTensors by the names that errors use.
        rows: the operands whose dimension 0 is the rows of the result; the others have to be replicated.
        out: None, or a DTensor placed as the rows are.
        local: the call on local tensors.

    Returns:
        A DTensor whose rows are placed as those of the operands: ``out``, if given.

    Raises:
        TypeError: DTensors and other tensors in one call.
        ValueError: another placement, or two meshes.
    """
    from torch.distributed.tensor import DTensor, Replicate, Shard

    given = operands if out is None else {**operands, "out": out}
    for name, tensor in given.items():
        if not isinstance(tensor, DTensor):
            raise TypeError(f"{name}: got {type(tensor).__name__}, expected a DTensor as the other operands are")
    tensors: dict[str, DTensor] = given  # type: ignore[assignment]
    mesh = tensors[rows[0]].device_mesh
    by_rows = (*rows, "out")
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
    if out is not None and list(tensors["out"].placements) != placed:
        raise ValueError(
            f"out: got placements {tensors['out'].placements}, expected {tuple(placed)}, as the rows of the operands"
        )
    with torch.no_grad():
        parts = {}
        for name in operands:
            tensor = tensors[name]
            if name in rows and list(tensor.placements) != placed:
                tensor = tensor.redistribute(mesh, placed)
            parts[name] = tensor.to_local()
        if out is not None:
            local(parts, tensors["out"].to_local())
            return out
        result = local(parts, None)
        size = torch.Size((tensors[rows[0]].shape[0], result.shape[1]))
        return DTensor.from_local(result, mesh, placed, run_check=False, shape=size, stride=result.stride())
