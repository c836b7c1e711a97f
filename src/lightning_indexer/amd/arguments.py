"""What a launch is given: sizes, and arguments as the bytes of a kernarg segment, tensors as their addresses."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from cdna_sim import KernelInfo

# A by-value struct goes as its bytes, or as a ctypes structure.
Value = torch.Tensor | int | float | bytes | ctypes.Structure
# Along x, y and z: workgroups of a grid, or lanes of a workgroup.
Grid = tuple[int, int, int]


def three(block: int | Grid) -> Grid:
    """A block's sizes along x, y, z."""
    return (block, 1, 1) if isinstance(block, int) else block


def pack_arguments(info: KernelInfo, arguments: Sequence[Value]) -> bytes:
    """``cdna_sim.pack_arguments``, which says what it takes and raises; a tensor goes as its address."""
    import cdna_sim

    return cdna_sim.pack_arguments(
        info,
        [
            cdna_sim.Pointer(value.data_ptr(), "a tensor") if isinstance(value, torch.Tensor) else value
            for value in arguments
        ],
    )
