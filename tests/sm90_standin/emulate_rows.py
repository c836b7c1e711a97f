"""The row kernels of ``cuda-sm90`` on the CPU: their source on stand-ins for its PTX, launched by its own host code."""

from __future__ import annotations

import ctypes
import hashlib
import shutil
import subprocess
from pathlib import Path
from typing import Any

import torch

from lightning_indexer.backends.cuda_sm90 import rows
from sm90_standin.emulate import HERE, byte_range

SOURCES = ("row_lanes", "cache_row", "insert_k_cache", "gather_k_cache", "prepare_q")


class RowsEmulator:
    """Compiles the sources for a configuration, and runs calls on them."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.libraries = folder, {}
        for name in SOURCES:
            shutil.copy(Path(rows.__file__).parent / f"{name}.cuh", folder)
        for name in ("ptx.cuh", "row_ptx.cuh", "wgmma.cuh", "launch_rows.cpp"):
            shutil.copy(HERE / name, folder)

    def library(self, source: str, macros: dict[str, str | int]) -> ctypes.CDLL:
        given = [f'-DSOURCE_FILE="{source}"', *(f"-D{name}={value}" for name, value in macros.items())]
        key = hashlib.sha256(repr(given).encode()).hexdigest()[:16]
        if key not in self.libraries:
            target = self.folder / f"{key}.so"
            # What is not written as fma() is not fused: the order of rounding is the source's.
            options = ["-std=c++17", "-O1", "-w", "-shared", "-fPIC", "-ffp-contract=off"]
            command = ["g++", *options, *given, str(self.folder / "launch_rows.cpp"), "-o", str(target)]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            assert done.returncode == 0, done.stderr[-4000:]
            self.libraries[key] = ctypes.CDLL(str(target))
        return self.libraries[key]

    def run(self, call: Any, launch: rows.RowsLaunch, monkeypatch: Any, *, seed: int = 1) -> None:
        """One call by the host code of the backend, its launch replaced."""
        library = self.library(launch.source.name, launch.macros(launch.operands(call)))
        ranges = [byte_range(tensor) for tensor in _tensors(call)]

        class Slot:
            HEAD, START, POINTERS = rows.driver.Slot.HEAD, rows.driver.Slot.START, rows.driver.Slot.POINTERS

            def __init__(self, _: int, grid: tuple[int, int, int], block: int, shared_bytes: int, size: int) -> None:
                assert (block, shared_bytes) == (32 * launch.config.warps, 0)
                self.buffer = ctypes.create_string_buffer(self.START + size)
                self.address, self.grid = ctypes.addressof(self.buffer), grid[0]

            def launch(self) -> int:
                flat = [ctypes.c_uint64(value) for both in ranges for value in both]
                array = (ctypes.c_uint64 * len(flat))(*flat)
                arguments = ctypes.c_void_p.from_address(self.address + self.POINTERS)
                library.run(arguments, self.grid, len(ranges), array, seed)
                return 0

        monkeypatch.setattr(rows.driver, "Slot", Slot)
        monkeypatch.setattr(rows, "_function", lambda *facts: 0)
        monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: -1, raising=False)
        monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 0, raising=False)
        launch(call)


def _tensors(value: Any) -> list[torch.Tensor]:
    """All tensors of nested tuples."""
    if isinstance(value, torch.Tensor):
        return [value]
    return [tensor for part in value for tensor in _tensors(part)] if isinstance(value, tuple) else []
