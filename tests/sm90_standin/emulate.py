"""Kernels of ``cuda-sm90`` on the CPU: their sources on stand-ins for their PTX, launched by their own host code.

What the host code asks of NVRTC and of the driver is answered here: a kernel is compiled by g++, a launch is kept, as
in a stream, and what has been launched runs when the call has returned.
"""

from __future__ import annotations

import ctypes
import hashlib
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_indexer import packages
from lightning_indexer.cuda import driver, nvrtc

HERE = Path(__file__).parent
# What is not written as fma() is not fused: the order of rounding is the source's.
GXX = ("g++", "-std=c++17", "-Og", "-w", "-fPIC", "-ffp-contract=off", "-U_FORTIFY_SOURCE")
COOPERATIVE, DEPENDENT = 2, 6  # CU_LAUNCH_ATTRIBUTE_COOPERATIVE, _PROGRAMMATIC_STREAM_SERIALIZATION


class StandinError(AssertionError):
    """What the machine says of a kernel that does what it may not."""


class Map(ctypes.Structure):
    """sm90_standin/machine.cuh's TensorMap."""

    _fields_ = (
        ("address", ctypes.c_void_p), ("rank", ctypes.c_longlong), ("dims", ctypes.c_longlong * 5),
        ("strides", ctypes.c_longlong * 5), ("box", ctypes.c_longlong * 5),
    )  # fmt: skip

    def getPtr(self) -> int:  # noqa: N802 - cuda-bindings' name
        return ctypes.addressof(self)


class Range(ctypes.Structure):
    """The same file's Range."""

    _fields_ = (("first", ctypes.c_void_p), ("last", ctypes.c_void_p), ("writable", ctypes.c_longlong))


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


# What the handles of kernels are, counted from 1: those that a launch has stay true for as long as the process lives.
_loaded: list[bytes] = []
_sources: dict[bytes, tuple[packages.Source, dict[str, str | int]]] = {}
_running: list[Emulator] = []


def _cubin(source: packages.Source, arch: str, macros: Mapping[str, str | int]) -> bytes:
    code = repr((source.name, sorted(macros.items()))).encode()
    _sources[code] = (source, dict(macros))
    return code


def _load(code: bytes, kernel: str, shared_bytes: int) -> int:
    assert kernel == _sources[code][1]["KERNEL_NAME"]
    if code not in _loaded:
        _loaded.append(code)
    return _loaded.index(code) + 1


def _attribute(number: int) -> Any:
    attribute = ctypes.create_string_buffer(72)
    attribute[0:12] = b"".join(word.to_bytes(4, "little") for word in (number, 0, 1))
    return attribute


_ATTRIBUTES = {number: _attribute(number) for number in (COOPERATIVE, DEPENDENT)}


def _launch(config: ctypes.c_void_p, function: ctypes.c_void_p, arguments: ctypes.c_void_p, extra: None) -> int:
    """cuLaunchKernelEx."""
    assert config.value
    assert function.value
    *sizes, shared = (ctypes.c_uint * 7).from_address(config.value)
    grid, threads = sizes[0], sizes[3]
    assert sizes[1:3] == sizes[4:] == [1, 1]
    stream, attributes = (ctypes.c_uint64 * 2).from_address(config.value + 32)
    count = ctypes.c_uint.from_address(config.value + 48).value
    assert stream == 0
    asked = {ctypes.c_uint.from_address(attributes + 72 * i).value for i in range(count)}
    assert asked <= {COOPERATIVE, DEPENDENT}
    _running[-1].enqueue(_loaded[function.value - 1], grid, threads, shared, asked, arguments)
    return 0


class Emulator:
    """Compiles sources, each for a configuration once, and runs calls on them, in a folder of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.kernels: dict[str, tuple[ctypes.CDLL, Any]] = {}
        self.launched: list[str] = []  # the sources of the launches of the last call
        self.machine: ctypes.CDLL | None = None
        self.right: Emulator | None = None  # what has the sources without the faults of this one
        self.faulty: set[str] = set()

    def with_fault(self, folder: Path, name: str, right: str, wrong: str) -> Emulator:
        """The same with a fault planted in one source; what does not include it is not compiled again."""
        self._set_up()
        other = Emulator(folder)
        other.right, other.machine, other.faulty = self, self.machine, {name}
        for file in self.folder.iterdir():
            (folder / file.name).symlink_to(file)
        text = (folder / name).read_text()
        assert right in text, (name, right)
        (folder / name).unlink()
        (folder / name).write_text(text.replace(right, wrong))
        return other

    def _set_up(self) -> ctypes.CDLL:
        if self.machine is not None:
            return self.machine
        sources = packages.beside("lightning_indexer.backends.cuda_sm90.rows", "ptx.cuh")
        assert isinstance(sources, Path)
        # The stand-ins last, in the place of what they stand for.
        for file in (*sources.parent.glob("*.cuh"), *HERE.glob("*.c*")):
            shutil.copy(file, self.folder)
        self._compile("-O2", "-shared", "machine.cpp", "-o", "machine.so")
        # Included before all else, and by far the most that g++ would read for each kernel.
        self._compile("-x", "c++-header", "ptx.cuh", "-o", "ptx.cuh.gch")
        self.machine = ctypes.CDLL(str(self.folder / "machine.so"))
        self.machine.standin_synchronize.restype = ctypes.c_char_p
        return self.machine

    def _compile(self, *options: str) -> None:
        done = subprocess.run([*GXX, *options], cwd=self.folder, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-4000:]

    def _includes(self, name: str) -> set[str]:
        """A source, and what it includes."""
        found = {name}
        for other in re.findall(r'^#include "([^"]+)"', (self.folder / name).read_text(), re.MULTILINE):
            if other not in found:
                found |= self._includes(other)
        return found

    def kernel(self, code: bytes) -> Any:
        """The address of its struct Kernel."""
        source, given = _sources[code]
        if self.right is not None and not self.faulty & self._includes(source.name):
            return self.right.kernel(code)
        macros: dict[str, str | int] = {**given, "KERNEL_NAME": "kernel_on_standins", "SOURCE_FILE": f'"{source.name}"'}
        macros |= _shared_variables(source)
        text = "".join(f"#define {name} {value}\n" for name, value in sorted(macros.items()))
        key = hashlib.sha256(text.encode()).hexdigest()[:16]
        if key not in self.kernels:
            # In a file behind the precompiled header, which g++ does not take where a name in it is a macro.
            (self.folder / f"{key}.h").write_text(text)
            # The machine by its path, so that the library finds this one.
            machine = (self.folder / "machine.so").resolve()
            self._compile("-shared", f'-DMACROS_FILE="{key}.h"', "kernel.cpp", str(machine), "-o", f"{key}.so")
            library = ctypes.CDLL(str(self.folder / f"{key}.so"))
            library.standin_kernel.restype = ctypes.c_void_p
            self.kernels[key] = (library, ctypes.c_void_p(library.standin_kernel()))
        return self.kernels[key][1]

    def enqueue(
        self, code: bytes, grid: int, threads: int, shared: int, asked: set[int], arguments: ctypes.c_void_p
    ) -> None:
        self.launched.append(_sources[code][0].name)
        self._set_up().standin_launch(
            self.kernel(code), grid, threads, shared, int(DEPENDENT in asked), int(COOPERATIVE in asked), arguments
        )

    def run(
        self, launch: Callable[[Any], object], call: Any, *, writes: Iterable[str] = ("out",), seed: int = 1
    ) -> None:
        """One call by the host code of the backend.

        Args:
            writes: fields of ``call`` that kernels may write to; its other tensors may only be read.

        Raises:
            StandinError: a kernel did what it may not.
        """
        machine = self._set_up()
        results = [tensor for name in writes for tensor in tensors_of(getattr(call, name))]
        ranges = [Range(*byte_range(tensor), 1) for tensor in results]
        ranges += [Range(*byte_range(t), 0) for t in tensors_of(call) if not any(t is other for other in results)]
        self.launched = []
        _running.append(self)
        _forget_kernels()
        try:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(nvrtc, "cubin", _cubin)
                patch.setattr(driver, "load", _load)
                patch.setattr(driver, "tensor_map", tensor_map)
                patch.setattr(driver, "launch_kernel", lambda: _launch)
                patch.setattr(driver, "cooperative", lambda: _ATTRIBUTES[COOPERATIVE])
                patch.setattr(driver, "dependent", lambda: _ATTRIBUTES[DEPENDENT])
                patch.setattr(torch.cuda, "current_device", lambda: -1)
                patch.setattr(torch._C, "_cuda_getDevice", lambda: -1, raising=False)
                patch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 0, raising=False)
                launch(call)
        finally:
            _running.pop()
            _forget_kernels()
            fault = machine.standin_synchronize((Range * len(ranges))(*ranges), len(ranges), seed)
        if fault is not None:
            raise StandinError(fault.decode())


def _forget_kernels() -> None:
    """Handles that the modules of the backend keep for the device of CPU tensors: of this driver, or of another one."""
    for name, module in list(sys.modules.items()):
        if name.startswith("lightning_indexer.backends.cuda_sm90."):
            for kept in vars(module).values():
                if hasattr(kept, "cache_clear"):
                    kept.cache_clear()


def _shared_variables(source: packages.Source) -> dict[str, str]:
    """How a source declares shared memory, for kernel.cpp."""
    text = source.read_text()
    found = {"STATIC_SHARED": ""} if re.search(r"^(extern )?__shared__", text, re.MULTILINE) else {}
    if dynamic := re.search(r"^extern __shared__ .* (\w+)\[\];", text, re.MULTILINE):
        found["DYNAMIC"] = dynamic.group(1)
    return found


def byte_range(tensor: torch.Tensor) -> tuple[int, int]:
    """First byte and one past the last that a tensor may be read at."""
    if not tensor.numel():
        return tensor.data_ptr(), tensor.data_ptr()
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()


def tensors_of(value: Any) -> list[torch.Tensor]:
    """All tensors of nested tuples."""
    if isinstance(value, torch.Tensor):
        return [value]
    return [tensor for part in value for tensor in tensors_of(part)] if isinstance(value, tuple) else []
