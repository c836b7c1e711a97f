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
        windows: its bytes as elements of each width, at every alignment.
        loaded, stored: bytes moved in the launch that this buffer belongs to.
    """

    def __init__(
        self,
        name: str,
        data: NDArray[np.uint8],
        base: int,
        writable: bool,
        windows: dict[int, NDArray[Any]] | None = None,
    ) -> None:
        self.name, self.data, self.base = name, data, base
        self.size, self.writable = len(data), writable
        self.windows = windows or {width: byte_windows(data, width) for width in ELEMENTS}
        self.base64 = np.uint64(base)
        self.loaded = self.stored = 0


# Bits of an address between buffers that are placed, and what they keep of the host's.
_SPACING, _PAGE = 36, 2**16


class Memory:
    """The buffers a kernel may touch.

    A launch works on a copy, so that one memory may serve several launches at once; what kernels write is shared.
    """

    def __init__(self) -> None:
        self.buffers: list[Buffer] = []
        self._bases: list[int] = []
        self._placed = 0

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
        self._insert(Buffer(name, array.reshape(-1).view(np.uint8), base, writable))
        return base

    def place(self, name: str, array: NDArray[Any], *, writable: bool = True) -> int:
        """As :meth:`register`, at an address of its own: 64 GiB from the next, so that no offset of 32 bits leads from
        one buffer into another. Its low bits are those on the host, for kernels that are compiled for an alignment.
        """
        self._placed += 1
        address = (self._placed << _SPACING) + array.ctypes.data % _PAGE
        return self.register(name, array, address=address, writable=writable)

    def copy(self) -> Memory:
        """The same arrays at the same addresses, with counts of their own."""
        other = Memory()
        other.buffers = [Buffer(b.name, b.data, b.base, b.writable, b.windows) for b in self.buffers]
        other._bases, other._placed = list(self._bases), self._placed
        return other

    def _insert(self, buffer: Buffer) -> None:
        at = bisect_right(self._bases, buffer.base)
        self.buffers.insert(at, buffer)
        self._bases.insert(at, buffer.base)

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
