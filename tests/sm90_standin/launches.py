"""What the host code of ``cuda-sm90`` gives the CUDA driver, recorded on the CPU: no kernel runs."""

from __future__ import annotations

import ctypes
import struct
from typing import Any, NamedTuple

import torch

from lightning_indexer.backends.cuda_sm90 import mqa_logits, mqa_topk, mqa_topk_config, paged_mqa_logits, top_k
from lightning_indexer.cuda import driver, nvrtc

MAP_BYTES = 128


class Launch(NamedTuple):
    """One launch. ``parameters``: of tensor maps what they were made of, of structs their bytes."""

    kernel: str
    grid: tuple[int, int, int]
    block: int
    shared_bytes: int
    stream: int
    attributes: bytes
    parameters: tuple[Any, ...]


class Driver:
    """Stands in for driver and compiler; CPU tensors count as those of the current device."""

    def __init__(self, monkeypatch: Any) -> None:
        self.launches: list[Launch] = []
        self.names: dict[int, str] = {}
        self.maps: dict[int, tuple[Any, ...]] = {}
        for module in (mqa_logits, paged_mqa_logits, top_k):
            module._function.cache_clear()
        mqa_topk._kernel_on.cache_clear()
        monkeypatch.setattr(nvrtc, "cubin", lambda *_: b"")
        monkeypatch.setattr(nvrtc, "missing", lambda: None)
        monkeypatch.setattr(driver, "load", self._load)
        monkeypatch.setattr(driver, "launch_kernel", lambda: self._launch)
        monkeypatch.setattr(driver, "tensor_map", self._tensor_map)
        for name in ("cooperative", "dependent"):
            made = ctypes.create_string_buffer(name.encode(), 72)
            monkeypatch.setattr(driver, name, lambda made=made: made)
        monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: -1, raising=False)
        monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 77, raising=False)
        monkeypatch.setattr(torch.cuda, "_exchange_device", lambda device: -1)
        monkeypatch.setattr(torch.cuda, "_maybe_exchange_device", lambda device: -1)

    def taken(self) -> list[Launch]:
        """The launches since the last time."""
        taken, self.launches = self.launches, []
        return taken

    def _load(self, cubin: bytes, kernel: str, shared_bytes: int) -> int:
        self.names[1 + len(self.names)] = kernel
        return len(self.names)

    def _tensor_map(self, *facts: Any) -> Any:
        room = ctypes.create_string_buffer(MAP_BYTES)
        self.maps[ctypes.addressof(room)] = facts
        room.getPtr = lambda: ctypes.addressof(room)
        return room

    def _launch(self, config: Any, function: Any, parameters: Any, extra: None) -> int:
        sizes = struct.unpack("<7I", ctypes.string_at(config.value, 28))
        stream, attributes, count = struct.unpack("<QQI", ctypes.string_at(config.value + driver.Slot.START, 20))
        kernel = self.names[function.value]
        given = []
        for number, size in enumerate(_sizes(kernel)):
            at = ctypes.c_void_p.from_address(parameters.value + 8 * number).value
            given.append(self.maps[at] if size is None else ctypes.string_at(at, size))
        self.launches.append(
            Launch(
                kernel, sizes[:3], sizes[3], sizes[6], stream, ctypes.string_at(attributes, 72 * count), tuple(given)
            )
        )
        return 0


def part_of(kernel: str) -> str:
    """Which kernel of the gate has this name."""
    name = kernel.removeprefix("fp8_mqa_topk_").partition("_")[0]
    if kernel.startswith("fp8_mqa_logits"):
        return "score"
    return name if name in mqa_topk_config.STRUCTS else "redo"


def _sizes(kernel: str) -> list[int | None]:
    """Bytes of a kernel's parameters; None of a tensor map."""
    if kernel.startswith("top_k_per_row"):
        return [top_k._POINTERS.size + top_k._CONSTANTS.size - struct.calcsize(f"<{driver.Slot.HEAD} Q")]
    if kernel.startswith("fp8_paged_mqa_logits"):
        size = paged_mqa_logits._POINTERS.size + paged_mqa_logits._CONSTANTS.size
        return [None, None, size - struct.calcsize(f"<{driver.Slot.HEAD} 3Q")]
    part = part_of(kernel)
    maps: list[int | None] = [None, None] if part in ("score", "product", "redo") else []
    return [*maps, *(struct.calcsize(f"<{form}") for form in mqa_topk_config.STRUCTS[part])]
