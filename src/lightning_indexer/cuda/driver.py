"""The CUDA driver: kernels loaded, tensor maps made, launches by the shortest way. It is loaded when it is called."""

from __future__ import annotations

import ctypes
import functools
import struct
import sys
from typing import Any, TypeVar

# What is kept of launches in one table: layouts of operands, tensor maps.
MAX_KEPT = 1024
_Key = TypeVar("_Key")
_Made = TypeVar("_Made")


class DriverError(RuntimeError):
    """A call of the CUDA driver failed."""


def check(result: tuple[Any, ...]) -> Any:
    """What a call of cuda-bindings gives beside its status.

    Raises:
        DriverError: the status is not 0.
    """
    if result[0] != 0:
        from cuda.bindings import driver

        _, name = driver.cuGetErrorName(driver.CUresult(int(result[0])))
        raise DriverError(f"CUDA driver: {name.decode() if name else result[0]}")
    return result[1] if len(result) > 1 else None


def load(cubin: bytes, kernel: str, shared_bytes: int) -> int:
    """The handle of a kernel on the current device, which may then ask for that much dynamic shared memory.

    Its module is never unloaded.
    """
    from cuda.bindings import driver

    module = check(driver.cuModuleLoadData(cubin))
    function = check(driver.cuModuleGetFunction(module, kernel.encode()))
    attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    check(driver.cuFuncSetAttribute(function, attribute, shared_bytes))
    return int(function)


def keep(kept: dict[_Key, _Made], key: _Key, made: _Made) -> _Made:
    """Puts what a launch needs under its key, in the place of all others where there are too many, and returns it."""
    if len(kept) >= MAX_KEPT:
        kept.clear()
    kept[key] = made
    return made


@functools.cache
def launch_kernel() -> Any:
    """cuLaunchKernelEx itself: through ctypes, its call costs a third of what it costs through cuda-bindings."""
    name = "nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1"
    try:
        return ctypes.CDLL(name).cuLaunchKernelEx
    except OSError as error:
        raise DriverError(f"CUDA driver: {name} cannot be loaded: {error}") from error


@functools.cache
def cooperative() -> Any:
    """A launch attribute, in a buffer: all CTAs are resident at once, or the launch fails."""
    return _attribute("COOPERATIVE")


@functools.cache
def dependent() -> Any:
    """A launch attribute, in a buffer: the kernel may start before the one in front of it in the stream has ended.

    It has to wait for it (``griddepcontrol.wait``) before it reads what that one writes.
    """
    return _attribute("PROGRAMMATIC_STREAM_SERIALIZATION")


def _attribute(name: str) -> Any:
    from cuda.bindings import driver

    attribute = ctypes.create_string_buffer(72)  # CUlaunchAttribute: its id, then a union of 64 bytes
    number = int(getattr(driver.CUlaunchAttributeID, f"CU_LAUNCH_ATTRIBUTE_{name}"))
    struct.pack_into("<I4xi", attribute, 0, number, 1)
    return attribute


class Slot:
    """Room for the arguments of one launch at a time, of a kernel with a fixed grid.

    The caller's struct starts with ``HEAD``, the stream, or with ``HEAD_WITH``, the stream, the address of launch
    attributes and their number; then come the pointers to the arguments, then the arguments. It is packed into
    ``buffer`` at ``START``; ``launch()`` gives the driver's status.
    """

    HEAD = "Q16x"  # the stream; no launch attributes
    HEAD_WITH = "QQI4x"
    START = 32  # of a CUlaunchConfig: seven sizes come before the stream
    POINTERS = START + struct.calcsize(f"<{HEAD}")

    __slots__ = ("address", "buffer", "launch")

    def __init__(self, function: int, grid: tuple[int, int, int], block: int, shared_bytes: int, size: int) -> None:
        room = ctypes.create_string_buffer(self.START + size)
        self.buffer = memoryview(room).cast("B")  # which takes half the time of the buffer itself to pack into
        struct.pack_into("<7I", self.buffer, 0, *grid, block, 1, 1, shared_bytes)
        self.address = ctypes.addressof(room)
        config, arguments = ctypes.c_void_p(self.address), ctypes.c_void_p(self.address + self.POINTERS)
        self.launch = functools.partial(launch_kernel(), config, ctypes.c_void_p(function), arguments, None)


def tensor_map(address: int, dims: tuple[int, ...], strides: tuple[int, ...], box: tuple[int, ...]) -> Any:
    """A TMA tensor map of bytes, rows of ``dims[0]`` bytes swizzled over their own length: 32, 64 or 128.

    Args:
        address: of the first byte, on 16.
        dims: sizes, fastest first.
        strides: bytes between elements of all dimensions but the first, each a multiple of 16.
        box: what one load brings, sizes in the order of ``dims``. Elements out of bounds are zero.
    """
    from cuda.bindings import driver

    swizzle = {
        128: driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B,
        64: driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_64B,
        32: driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_32B,
    }[dims[0]]
    return check(driver.cuTensorMapEncodeTiled(
        driver.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_UINT8, len(dims), address,
        [driver.cuuint64_t(dim) for dim in dims], [driver.cuuint64_t(stride) for stride in strides],
        [driver.cuuint32_t(side) for side in box], [driver.cuuint32_t(1)] * len(dims),
        driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle,
        driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
        driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
    ))  # fmt: skip
