"""An output buffer that shows what a kernel failed to write, and what it should not have written."""

from __future__ import annotations

import torch

from lightning_indexer.problems.mqa_logits import row_stride

# NaN with a payload: an element that keeps these bits was never written. No arithmetic produces them.
_POISON = {torch.float32: (torch.int32, 0x7FC0BEEF), torch.bfloat16: (torch.int16, 0x7FAB)}
_GUARD = 4096


class GuardedOutput:
    """[rows, width] view inside a poisoned buffer: guard bands before and after, and a gap after every row."""

    def __init__(self, rows: int, width: int, dtype: torch.dtype, device: torch.device) -> None:
        bits, self.poison = _POISON[dtype]
        self.stride = row_stride(width, dtype) + 64
        self._bits = torch.full((2 * _GUARD + rows * self.stride,), self.poison, dtype=bits, device=device)
        self.view = self._bits.view(dtype)[_GUARD : _GUARD + rows * self.stride].view(rows, self.stride)[:, :width]

    def unwritten(self) -> torch.Tensor:
        """[rows, width] bool: still poisoned."""
        return self.view.view(self._bits.dtype) == self.poison

    def intact(self) -> bool:
        """True while nothing outside the view was written."""
        rows, width = self.view.shape
        inner = self._bits[_GUARD : _GUARD + rows * self.stride].view(rows, self.stride)
        outside = (self._bits[:_GUARD], self._bits[_GUARD + rows * self.stride :], inner[:, width:])
        return all(bool((part == self.poison).all()) for part in outside)
