"""Kernels run on an AMD GPU through the HIP runtime, with AMD's ``hip-python``. Has not run on hardware."""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import os
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import torch

from lightning_indexer.amd.arguments import Value, pack_arguments
from lightning_indexer.amd.built import Built
from lightning_indexer.amd.launcher import Grid, three
from lightning_indexer.toolchain.code_object import CodeObject

_NOT_INSTALLED = "hip-python is not installed: pip install 'lightning-indexer[hip]'"


class HipError(RuntimeError):
    """A call of the HIP runtime failed, and the message names it and the error; or there are two runtimes."""


def missing() -> str | None:
    """None, or what to install, with the command; where PyTorch runs on ROCm, also what is wrong with the runtime."""
    if importlib.util.find_spec("hip") is None:
        return _NOT_INSTALLED
    if torch.version.hip is not None:
        try:
            default()
        except HipError as error:
            return str(error)
    return None


class HipLauncher:
    """Launches on the device of the tensor arguments; a code object is loaded once a device.

    The kernarg segment goes as one buffer, HIP_LAUNCH_PARAM_BUFFER_POINTER; the runtime adds the hidden arguments.
    """

    def __init__(self, hip: Any = None) -> None:
        """``hip``: what ``from hip import hip`` gives, imported if None; ModuleNotFoundError says what to install."""
        self._hip = _runtime() if hip is None else hip
        # The module is kept beside its function, which it owns.
        self._loaded: dict[tuple[int, CodeObject, str], tuple[Any, Any]] = {}

    def launch(
        self,
        built: Built,
        grid: Grid,
        block: int | Grid,
        arguments: Sequence[Value],
        stream: int | None = None,
        *,
        outputs: Collection[str] | None = None,
    ) -> None:
        """As ``Launcher.launch``; returns when the kernel is queued.

        Raises:
            HipError: the runtime refused the code object or the launch.
            ValueError: a tensor that is not on the GPU of the others.
        """
        device = _device(arguments)
        packed = pack_arguments(built.info, arguments)
        # The runtime copies the segment before it returns.
        segment = ctypes.create_string_buffer(packed, len(packed))
        size = ctypes.c_size_t(len(packed))
        extra = (ctypes.c_void_p * 5)(
            _BUFFER_POINTER, ctypes.addressof(segment), _BUFFER_SIZE, ctypes.addressof(size), _END
        )
        with torch.cuda.device(device):
            _, function = self._load(built, device)
            if stream is None:
                stream = torch.cuda.current_stream(device).cuda_stream
            self._call(
                "hipModuleLaunchKernel", function, *grid, *three(block), built.dynamic_lds, stream,
                None, ctypes.c_void_p(ctypes.addressof(extra)),
            )  # fmt: skip

    def _load(self, built: Built, device: int) -> tuple[Any, Any]:
        key = (device, built.code_object, built.kernel)
        if key not in self._loaded:
            module = self._call("hipModuleLoadData", built.code_object.elf)
            self._loaded[key] = module, self._call("hipModuleGetFunction", module, built.kernel.encode())
        return self._loaded[key]

    def _call(self, name: str, *arguments: Any) -> Any:
        """The result of a HIP call, which is the second item of what it returns."""
        error, *result = getattr(self._hip, name)(*arguments)
        if error != self._hip.hipError_t.hipSuccess:
            raise HipError(f"{name}: {getattr(error, 'name', error)}")
        return result[0] if result else None


@functools.cache
def default() -> HipLauncher:
    """The launcher that the process shares."""
    return HipLauncher()


def _runtime() -> Any:
    """hip-python's module, its library loaded.

    Raises:
        ModuleNotFoundError: it is not installed.
        HipError: PyTorch has loaded another copy of the runtime, whose streams and allocations this one does not know.
    """
    if importlib.util.find_spec("hip") is None:
        raise ModuleNotFoundError(_NOT_INSTALLED)
    from hip import hip

    hip.hipRuntimeGetVersion()  # loads the library
    if len(loaded := _loaded_runtimes()) > 1:
        raise HipError(
            f"two HIP runtimes are loaded, {' and '.join(loaded)}: PyTorch's streams mean nothing to the other one; "
            "point ROCM_PATH and LD_LIBRARY_PATH at the ROCm that PyTorch uses"
        )
    return hip


def _loaded_runtimes(maps: Path = Path("/proc/self/maps")) -> list[str]:
    """The files of the HIP runtimes in this process."""
    try:
        lines = maps.read_text().splitlines()
    except OSError:  # not Linux
        return []
    paths = {line.split(maxsplit=5)[-1] for line in lines if "libamdhip64" in line}
    return sorted({os.path.realpath(path) for path in paths})


# hip/hip_runtime_api.h: HIP_LAUNCH_PARAM_BUFFER_POINTER, HIP_LAUNCH_PARAM_BUFFER_SIZE, HIP_LAUNCH_PARAM_END.
_BUFFER_POINTER, _BUFFER_SIZE, _END = 1, 2, 3


def _device(arguments: Sequence[Value]) -> int:
    devices = {argument.device for argument in arguments if isinstance(argument, torch.Tensor)}
    if len(devices) != 1 or (device := next(iter(devices))).type != "cuda":
        raise ValueError(f"got tensors on {', '.join(map(str, devices)) or 'no device'}, expected one GPU")
    return torch.cuda.current_device() if device.index is None else device.index
