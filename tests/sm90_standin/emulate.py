"""The paged kernel of ``cuda-sm90`` on the CPU: its source on stand-ins for its PTX, launched by its own host code."""

from __future__ import annotations

import ctypes
import hashlib
import shutil
import subprocess
from pathlib import Path
from typing import Any

import torch

from lightning_indexer.backends.cuda_sm90 import paged_mqa_logits as host
from lightning_indexer.backends.cuda_sm90.paged_config import PagedConfig
from lightning_indexer.problems.paged_mqa_logits import PagedMqaLogitsCall

HERE = Path(__file__).parent
SOURCES = (
    "out",
    "head_sum",
    "paged_geometry",
    "paged_sums",
    "paged_fp4",
    "paged_fp4_multiply",
    "paged_plan",
    "paged_mqa_logits",
)


class Map(ctypes.Structure):
    """sm90_standin/ptx.cuh's TensorMap."""

    _fields_ = (
        ("address", ctypes.c_void_p), ("rank", ctypes.c_longlong), ("dims", ctypes.c_longlong * 5),
        ("strides", ctypes.c_longlong * 5), ("box", ctypes.c_longlong * 5),
    )  # fmt: skip

    def getPtr(self) -> int:  # noqa: N802 - cuda-bindings' name
        return ctypes.addressof(self)


def tensor_map(address: int, dims: tuple[int, ...], strides: tuple[int, ...], box: tuple[int, ...]) -> Map:
    """As ``driver.tensor_map``, with what cuTensorMapEncodeTiled asks."""
    assert address % 16 == 0
    assert len(dims) == len(box) == len(strides) + 1 <= 5
    assert all(stride % 16 == 0 and 0 <= stride < 2**40 for stride in strides), strides
    assert all(1 <= dim <= 2**32 for dim in dims), dims
    assert all(1 <= side <= 256 for side in box), box
    pad = (0,) * (5 - len(dims))
    five = ctypes.c_longlong * 5
    return Map(address, len(dims), five(*dims, *pad), five(1, *strides, *pad), five(*box, *pad))


class Emulator:
    """Compiles the source for a configuration, and runs calls on it."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.libraries = folder, {}
        for name in SOURCES:
            shutil.copy(Path(host.__file__).parent / f"{name}.cuh", folder)
        for name in ("ptx.cuh", "wgmma.cuh", "launch.cpp"):
            shutil.copy(HERE / name, folder)

    def library(self, config: PagedConfig) -> ctypes.CDLL:
        macros = [f"-D{name}={value}" for name, value in config.macros().items()]
        key = hashlib.sha256(repr(macros).encode()).hexdigest()[:16]
        if key not in self.libraries:
            target = self.folder / f"{key}.so"
            command = ["g++", "-std=c++17", "-O1", "-w", "-shared", "-fPIC", *macros, str(self.folder / "launch.cpp")]
            done = subprocess.run([*command, "-o", str(target)], capture_output=True, text=True, check=False)
            assert done.returncode == 0, done.stderr[-4000:]
            self.libraries[key] = ctypes.CDLL(str(target))
        return self.libraries[key]

    def run(self, call: PagedMqaLogitsCall, launch: host.Launch, monkeypatch: Any, *, seed: int = 1) -> None:
        """One call by the host code of the backend, its launch replaced."""
        library = self.library(launch.config)
        ranges = [byte_range(tensor) for tensor in call if isinstance(tensor, torch.Tensor)]

        class Slot:
            HEAD, START, POINTERS = host.driver.Slot.HEAD, host.driver.Slot.START, host.driver.Slot.POINTERS

            def __init__(self, _: int, grid: tuple[int, int, int], block: int, shared_bytes: int, size: int) -> None:
                assert (block, shared_bytes) == (launch.config.threads, launch.config.shared_bytes)
                self.buffer = ctypes.create_string_buffer(self.START + size)
                self.address, self.grid = ctypes.addressof(self.buffer), grid[0]

            def launch(self) -> int:
                maps = [ctypes.c_void_p.from_address(self.address + self.POINTERS + 8 * i) for i in range(3)]
                flat = [ctypes.c_uint64(value) for both in ranges for value in both]
                array = (ctypes.c_uint64 * len(flat))(*flat)
                library.run(*maps, self.grid, len(ranges), array, seed)
                return 0

        monkeypatch.setattr(host.driver, "Slot", Slot)
        monkeypatch.setattr(host.driver, "tensor_map", tensor_map)
        monkeypatch.setattr(host, "_function", lambda config, device: 0)
        monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: -1, raising=False)
        monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 0, raising=False)
        launch(call)


def byte_range(tensor: torch.Tensor) -> tuple[int, int]:
    """First byte and one past the last that a tensor may be read at."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (
        last + 1
    ) * tensor.element_size() if tensor.numel() else tensor.data_ptr()
