"""Vector registers to and from memory elements of 1 to 16 bytes a lane."""

from __future__ import annotations

from typing import Any

import numpy as np

from cdna_sim.isa.lanes import Lanes
from cdna_sim.memory.buffers import ELEMENTS
from cdna_sim.ops.wave import Wave


def put_registers(w: Wave, number: int, width: int, data: Lanes, mask: Any, part: str = "") -> None:
    """Writes elements of the lanes of ``mask`` (booleans, or True for all) to registers from ``number`` on.

    Args:
        data: one element of ``width`` bytes for each active lane.
        part: for 1 and 2 bytes: ``u`` or ``s`` for zero or sign extension, then ``l`` or ``h`` where it goes into the
            low or high half and the other one is kept.
    """
    if width < 4:
        signed = part.startswith("s")
        values = data.view(np.int8 if width == 1 else np.int16) if signed else data
        if len(part) == 2:
            half = w.v[number].view(np.uint16)[1 if part[1] == "h" else 0 :: 2]
            half[mask if mask is not True else slice(None)] = values.astype(np.int16 if signed else np.uint16).view(
                np.uint16
            )
            return
        data = values.astype(np.int32).view(np.uint32) if signed else values.astype(np.uint32)
        width = 4
    if width == 4:
        if mask is True:
            w.v[number][:] = data
        else:
            w.v[number][mask] = data
        return
    count = width // 4
    words = data.view(np.uint32).reshape(-1, count).T
    if mask is True:
        w.V[number : number + count] = words
    else:
        w.V[number : number + count, mask] = words


def take_registers(w: Wave, number: int, width: int, mask: Any, high: bool = False) -> Lanes:
    """Elements of ``width`` bytes of the active lanes, copied; ``high``: of the upper half of a register."""
    if width == 4:
        return w.v[number].copy() if mask is True else w.v[number][mask]
    if width < 4:
        dtype = ELEMENTS[width]
        start = 2 // width if high else 0
        values = w.v[number].view(dtype)[start :: 4 // width]
        return values.copy() if mask is True else values[mask]
    count = width // 4
    words = w.V[number : number + count].T if mask is True else w.V[number : number + count, mask].T
    return np.ascontiguousarray(words).view(ELEMENTS[width]).reshape(-1)
