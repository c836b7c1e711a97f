"""Reads MessagePack, the format of the metadata note in an AMD code object. Source: the MessagePack specification."""

from __future__ import annotations

import struct
from typing import Any

# First byte: length of the value (scalars), or of the count that precedes the items.
_SCALARS = {
    0xCA: ">f", 0xCB: ">d",
    0xCC: ">B", 0xCD: ">H", 0xCE: ">I", 0xCF: ">Q",
    0xD0: ">b", 0xD1: ">h", 0xD2: ">i", 0xD3: ">q",
}  # fmt: skip
_COUNTS = {
    0xC4: ("bytes", ">B"), 0xC5: ("bytes", ">H"), 0xC6: ("bytes", ">I"),
    0xD9: ("str", ">B"), 0xDA: ("str", ">H"), 0xDB: ("str", ">I"),
    0xDC: ("list", ">H"), 0xDD: ("list", ">I"),
    0xDE: ("dict", ">H"), 0xDF: ("dict", ">I"),
}  # fmt: skip
_CONSTANTS = {0xC0: None, 0xC2: False, 0xC3: True}


def unpack(data: bytes) -> Any:
    """The value that ``data`` starts with.

    Raises:
        ValueError: truncated, or a type code that metadata never holds (extensions).
    """
    try:
        value, _ = _read(data, 0)
    except (IndexError, struct.error):
        raise ValueError("MessagePack data ends too early") from None
    return value


def _read(data: bytes, at: int) -> tuple[Any, int]:
    """The value at offset ``at``, and the offset behind it."""
    code = data[at]
    at += 1
    if code < 0x80:
        return code, at
    if code >= 0xE0:
        return code - 0x100, at
    if code < 0x90:
        return _items("dict", code & 0x0F, data, at)
    if code < 0xA0:
        return _items("list", code & 0x0F, data, at)
    if code < 0xC0:
        return _items("str", code & 0x1F, data, at)
    if code in _CONSTANTS:
        return _CONSTANTS[code], at
    if code in _SCALARS:
        layout = _SCALARS[code]
        return struct.unpack_from(layout, data, at)[0], at + struct.calcsize(layout)
    if code in _COUNTS:
        kind, layout = _COUNTS[code]
        return _items(kind, struct.unpack_from(layout, data, at)[0], data, at + struct.calcsize(layout))
    raise ValueError(f"MessagePack type {code:#x} at offset {at - 1} is not read here")


def _items(kind: str, count: int, data: bytes, at: int) -> tuple[Any, int]:
    if kind in ("str", "bytes"):
        raw = data[at : at + count]
        if len(raw) < count:
            raise IndexError
        return (raw.decode() if kind == "str" else raw), at + count
    values = []
    for _ in range(count * (2 if kind == "dict" else 1)):
        value, at = _read(data, at)
        values.append(value)
    return (dict(zip(values[::2], values[1::2], strict=True)) if kind == "dict" else values), at
