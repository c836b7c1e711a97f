"""Kernel arguments as bytes of the segment that a kernel reads them from."""

from __future__ import annotations

import ctypes
import struct

import pytest

from cdna_sim import Argument, Descriptor, KernelInfo, Pointer, Resources, hidden_arguments, pack_arguments


def info(*arguments: tuple[str, int, int, str], kernarg_bytes: int = 0) -> KernelInfo:
    return KernelInfo(
        "kernel",
        Descriptor(0, 0, kernarg_bytes, 0, 0, 0, 0, 0, 0, 0),
        tuple(Argument(*argument) for argument in arguments),
        256, 64, (0, 0), Resources(0, 0, 0, 0, 0, 0, 0, None),
    )  # fmt: skip


OUT, COUNT, SCALE = ("out", 0, 8, "global_buffer"), ("count", 8, 4, "by_value"), ("scale", 12, 4, "by_value")
BIG, SMALL = ("big", 16, 8, "by_value"), ("small", 24, 2, "by_value")


class Size(ctypes.Structure):
    _fields_ = (("rows", ctypes.c_int32), ("keys", ctypes.c_int32))


def test_values_go_to_their_offsets():
    packed = pack_arguments(info(OUT, COUNT, SCALE, BIG, SMALL), (Pointer(0x7F00_0000_1234), -7, 0.5, 2**40, 65535))
    assert packed == struct.pack("<QifqH", 0x7F00_0000_1234, -7, 0.5, 2**40, 65535)


def test_padding_is_zero():
    assert pack_arguments(info(("a", 0, 1, "by_value"), ("b", 8, 8, "by_value")), (True, -1)) == (
        b"\x01" + b"\x00" * 7 + b"\xff" * 8
    )


def test_structures_and_doubles():
    packed = pack_arguments(info(("size", 0, 8, "by_value"), ("x", 8, 8, "by_value")), (Size(3, -4), 0.1))
    assert packed == struct.pack("<iid", 3, -4, 0.1)
    assert pack_arguments(info(("size", 0, 8, "by_value")), (b"\x01" * 8,)) == b"\x01" * 8


def test_pointers_that_a_compiler_appends_are_null():
    scratch = (("", 16, 8, "global_buffer"), ("", 24, 8, "global_buffer"))
    packed = pack_arguments(info(OUT, COUNT, *scratch), (Pointer(64), 1))
    assert packed == struct.pack("<Qi4xQQ", 64, 1, 0, 0)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((1, 2**32), ValueError, "kernel: argument count: got 4294967296, which 4 bytes do not hold"),
        ((1, -(2**31) - 1), ValueError, "kernel: argument count: got -2147483649, which 4 bytes do not hold"),
        ((1, 2, 3), ValueError, "kernel: got 3 arguments, expected 2"),
        ((1,), ValueError, "kernel: got 1 arguments, expected 2"),
        ((1.0, b"12345"), ValueError, "kernel: argument count: got 5 bytes, expected 4"),
        ((1, Pointer(8)), ValueError, "kernel: argument count: got an array, expected by_value of 4 bytes"),
        ((1, "2"), TypeError, "kernel: argument count: got str, expected an array, a number, bytes or a ctypes"),
        ((1, None), TypeError, "kernel: argument count: got NoneType"),
    ],
)
def test_what_does_not_fit_is_named(arguments, error, message):
    with pytest.raises(error) as raised:
        pack_arguments(info(OUT, COUNT), arguments)
    assert str(raised.value).startswith(message)


def test_an_argument_without_a_name_goes_by_its_number():
    with pytest.raises(ValueError, match="kernel: argument 1: got a float, expected 2 bytes"):
        pack_arguments(info(OUT, ("", 8, 2, "by_value")), (0, 1.0))


def test_hidden_arguments_say_how_the_kernel_was_launched():
    hidden = [
        ("", 16, 4, "hidden_block_count_x"), ("", 20, 4, "hidden_block_count_y"), ("", 24, 4, "hidden_block_count_z"),
        ("", 28, 2, "hidden_group_size_x"), ("", 30, 2, "hidden_group_size_y"), ("", 32, 2, "hidden_group_size_z"),
        ("", 34, 2, "hidden_remainder_x"), ("", 40, 8, "hidden_global_offset_x"), ("", 48, 2, "hidden_grid_dims"),
        ("", 52, 4, "hidden_dynamic_lds_size"), ("", 56, 8, "hidden_hostcall_buffer"),
    ]  # fmt: skip
    kernel = info(OUT, *hidden, kernarg_bytes=96)
    packed = pack_arguments(kernel, (5,))
    assert packed == struct.pack("<Q", 5), "hidden arguments are not the caller's"
    segment = hidden_arguments(kernel, packed, (3, 4, 1), (256, 1, 1), 1234)
    assert segment == struct.pack("<Q8x3I3HH4xQH2xIQ32x", 5, 3, 4, 1, 256, 1, 1, 0, 0, 2, 1234, 0)
