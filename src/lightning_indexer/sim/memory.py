"""Global memory of a simulated launch: named host arrays at their addresses, every access bounds-checked."""

from __future__ import annotations

from bisect import bisect_right
from typing import Any

import numpy as np
from numpy.typing import NDArray

# Elements that one lane moves, by its bytes. Void and complex stand for "this many bytes": nothing computes on them.
ELEMENTS: dict[int, Any] = {
    1: np.dtype("u1"), 2: np.dtype("<u2"), 4: np.dtype("<u4"), 8: np.dtype("<u8"), 12: np.dtype("V12"),
    16: np.dtype("c16"),
}  # fmt: skip


def byte_windows(data: NDArray[np.uint8], width: int) -> NDArray[Any]:
    """A view whose element k is the ``width`` bytes from byte k on: loads and stores at any alignment."""
    element = ELEMENTS[width]
    windows: NDArray[Any] = np.ndarray((max(len(data) - width + 1, 0),), element, data, strides=(1,))
    return windows


class Buffer:
    """One registered array: ``size`` bytes from ``base`` on.

    Attributes:
        loaded, stored: bytes moved in the running launch.
    """

    def __init__(self, memory: Memory, name: str, data: NDArray[np.uint8], base: int, writable: bool) -> None:
        self.memory, self.name, self.data, self.base = memory, name, data, base
        self.size, self.writable = len(data), writable
        self.windows = {width: byte_windows(data, width) for width in ELEMENTS}
        self.base64 = np.uint64(base)
        self.loaded = self.stored = 0


class Memory:
    """The buffers a kernel may touch. Host addresses are used as they are, so a kernel's pointers need no change."""

    def __init__(self) -> None:
        self.buffers: list[Buffer] = []
        self._bases: list[int] = []

    def register(self, name: str, array: NDArray[Any], *, address: int | None = None, writable: bool = True) -> int:
        """Makes ``array`` (contiguous) visible to kernels.

        Args:
            name: what faults and reports call it.
            array: any dtype; kernels read and write it in place.
            address: where kernels see it, by default where it lies on the host.
            writable: False: a store to it is a fault.

        Returns:
            The address.

        Raises:
            ValueError: the array is not contiguous, or is read-only although writable.
        """
        if not array.flags.c_contiguous:
            raise ValueError(f"{name}: the array is not contiguous")
        if writable and not array.flags.writeable:
            raise ValueError(f"{name}: the array is read-only; register it with writable=False")
        base = array.ctypes.data if address is None else address
        buffer = Buffer(self, name, array.reshape(-1).view(np.uint8), base, writable)
        at = bisect_right(self._bases, base)
        self.buffers.insert(at, buffer)
        self._bases.insert(at, base)
        return base

    def find(self, address: int, width: int) -> Buffer | None:
        """The buffer that holds all ``width`` bytes from ``address`` on; of overlapping ones, that starts last."""
        for buffer in reversed(self.buffers[: bisect_right(self._bases, address)]):
            if address + width <= buffer.base + buffer.size:
                return buffer
        return None

    def read(self, address: int, width: int) -> bytes | None:
        """``width`` bytes, or None outside the buffers."""
        buffer = self.find(address, width)
        if buffer is None:
            return None
        at = address - buffer.base
        buffer.loaded += width
        return buffer.data[at : at + width].tobytes()

    def where(self, address: int, width: int) -> str:
        """The nearest buffer and how far off ``address`` is, as a clause of a sentence."""
        if not self.buffers:
            return "no buffer is registered"

        def gap(buffer: Buffer) -> int:
            return max(buffer.base - address, address + width - (buffer.base + buffer.size))

        nearest = min(self.buffers, key=gap)
        end = nearest.base + nearest.size
        if address < nearest.base:
            place = f"{nearest.base - address} bytes before {nearest.name}"
        elif address >= end:
            place = f"{address - end} bytes past the end of {nearest.name}"
        else:
            place = f"{address + width - end} of its {width} bytes past the end of {nearest.name}"
        return f"{place} ({nearest.base:#x}, {nearest.size} bytes)"

    def start_counting(self) -> None:
        for buffer in self.buffers:
            buffer.loaded = buffer.stored = 0
