"""Kernel arguments as the bytes of a kernarg segment.

Source: LLVM's "User Guide for AMDGPU Backend", code object V5 metadata (argument kinds, hidden arguments).
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence
from dataclasses import dataclass

from cdna_sim.code_object import Argument, KernelInfo


@dataclass(frozen=True, slots=True)
class Pointer:
    """An address that stands for an object in memory; ``what`` it is, for errors."""

    address: int
    what: str = "an array"


# A by-value struct goes as its bytes, or as a ctypes structure.
Value = Pointer | int | float | bytes | ctypes.Structure


def explicit_arguments(info: KernelInfo) -> tuple[Argument, ...]:
    """The arguments that the caller gives; the others are the runtime's."""
    return tuple(argument for argument in info.arguments if not argument.kind.startswith("hidden_"))


def pack_arguments(info: KernelInfo, arguments: Sequence[Value]) -> bytes:
    """The explicit arguments at their offsets; the padding between them is zero.

    Args:
        info: the kernel.
        arguments: one value each: a pointer goes as its address, an int as an integer of the argument's size (negative
            ones in two's complement), a float as float32 or float64, bytes and ctypes structures as they are.
            Trailing pointers that are not given are null: Triton appends two for scratch memory that most kernels
            do not use.

    Raises:
        TypeError: a value of another type.
        ValueError: too many or too few values, or one that does not fit; the message names the argument.
    """
    expected = explicit_arguments(info)
    rest = expected[len(arguments) :]
    if len(arguments) > len(expected) or any(argument.kind != "global_buffer" for argument in rest):
        raise ValueError(f"{info.name}: got {len(arguments)} arguments, expected {len(expected)}")
    end = max((argument.offset + argument.size for argument in expected), default=0)
    packed = bytearray(end)
    for index, (argument, value) in enumerate(zip(expected, arguments, strict=False)):
        what = f"{info.name}: argument {argument.name or index}"
        packed[argument.offset : argument.offset + argument.size] = _encode(value, argument, what)
    return bytes(packed)


def hidden_arguments(
    info: KernelInfo,
    packed: bytes,
    grid: tuple[int, int, int],
    block: tuple[int, int, int],
    dynamic_lds: int,
) -> bytes:
    """The whole kernarg segment: ``packed``, then what the HIP runtime adds for its own launches.

    Workgroups are whole, so remainders are 0. Pointers to queues, heaps and host calls are null.
    """
    segment = bytearray(packed.ljust(info.kernarg_bytes, b"\0"))
    dimensions = 3 if grid[2] > 1 or block[2] > 1 else 2 if grid[1] > 1 or block[1] > 1 else 1
    values = {"hidden_grid_dims": dimensions, "hidden_dynamic_lds_size": dynamic_lds}
    for axis, count, size in zip("xyz", grid, block, strict=True):
        values |= {f"hidden_block_count_{axis}": count, f"hidden_group_size_{axis}": size}
    for argument in info.arguments:
        if argument.kind in values:
            number = values[argument.kind].to_bytes(argument.size, "little")
            segment[argument.offset : argument.offset + argument.size] = number
    return bytes(segment)


def _encode(value: Value, argument: Argument, what: str) -> bytes:
    size = argument.size
    if isinstance(value, Pointer):
        if argument.kind != "global_buffer" and size != 8:
            raise ValueError(f"{what}: got {value.what}, expected {argument.kind} of {size} bytes")
        return value.address.to_bytes(8, "little")
    if isinstance(value, bool | int):
        # The metadata does not tell signed from unsigned.
        if not -(1 << 8 * size - 1) <= value < 1 << 8 * size:
            raise ValueError(f"{what}: got {value}, which {size} bytes do not hold")
        return (int(value) % (1 << 8 * size)).to_bytes(size, "little")
    if isinstance(value, float):
        if size not in (4, 8):
            raise ValueError(f"{what}: got a float, expected {size} bytes")
        return struct.pack("<f" if size == 4 else "<d", value)
    if isinstance(value, bytes | ctypes.Structure):
        data = bytes(value)
        if len(data) != size:
            raise ValueError(f"{what}: got {len(data)} bytes, expected {size}")
        return data
    raise TypeError(f"{what}: got {type(value).__name__}, expected an array, a number, bytes or a ctypes structure")
