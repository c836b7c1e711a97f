"""Kernels run on an AMD GPU through the HIP runtime that PyTorch has loaded, by ctypes. Has not run on hardware.

No package is needed for it, and no second runtime can come in, to which PyTorch's streams and allocations mean nothing.
"""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from lightning_indexer.amd.arguments import Grid, Value, pack_arguments, three
from lightning_indexer.amd.built import Built

if TYPE_CHECKING:
    from cdna_sim import CodeObject


class HipError(RuntimeError):
    """A call of the HIP runtime failed, or it cannot be found; the message names kernel, call and error."""


class HipLauncher:
    """Launches on the device of the tensor arguments; a code object is loaded once a device.

    The kernarg segment goes as one buffer, HIP_LAUNCH_PARAM_BUFFER_POINTER; the runtime adds the hidden arguments.
    """

    def __init__(self, hip: Any = None) -> None:
        """``hip``: the library with the functions of HIP; None takes PyTorch's at the first launch."""
        self._hip = None if hip is None else _typed(hip)
        self._loaded: dict[tuple[int, CodeObject, str], ctypes.c_void_p] = {}

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
            function = self._load(built, device)
            if stream is None:
                stream = torch.cuda.current_stream(device).cuda_stream
            self._call(
                built, "hipModuleLaunchKernel", function, *grid, *three(block), built.dynamic_lds, stream, None, extra
            )

    def _load(self, built: Built, device: int) -> ctypes.c_void_p:
        # The runtime may read the image after the call: the key keeps its bytes. Modules are never unloaded.
        key = (device, built.code_object, built.kernel)
        if key not in self._loaded:
            module, function = ctypes.c_void_p(), ctypes.c_void_p()
            self._call(built, "hipModuleLoadData", ctypes.byref(module), built.code_object.elf)
            self._call(built, "hipModuleGetFunction", ctypes.byref(function), module, built.kernel.encode())
            self._loaded[key] = function
        return self._loaded[key]

    def _call(self, built: Built, name: str, *arguments: Any) -> None:
        try:
            if self._hip is None:
                self._hip = _typed(_runtime())
            if error := getattr(self._hip, name)(*arguments):
                text = self._hip.hipGetErrorName(error)
                raise HipError(f"{name}: {text.decode() if text else error}")
        except HipError as error:
            raise HipError(
                f"{built.kernel} ({built.source}) was not launched: {error}. backend='triton-portable', or "
                "LIGHTNING_INDEXER_BACKEND=triton-portable, launches through Triton instead"
            ) from error.__cause__


@functools.cache
def default() -> HipLauncher:
    """The launcher that the process shares."""
    return HipLauncher()


def _typed(hip: Any) -> Any:
    """The library with the types of the functions used here, of hip/hip_runtime_api.h."""
    pointer, unsigned = ctypes.c_void_p, ctypes.c_uint
    for name, result, arguments in (
        ("hipModuleLoadData", ctypes.c_int, (pointer, ctypes.c_char_p)),
        ("hipModuleGetFunction", ctypes.c_int, (pointer, pointer, ctypes.c_char_p)),
        ("hipModuleLaunchKernel", ctypes.c_int, (pointer, *[unsigned] * 7, pointer, pointer, pointer)),
        ("hipGetErrorName", ctypes.c_char_p, (ctypes.c_int,)),
    ):
        function = getattr(hip, name)
        function.restype, function.argtypes = result, arguments
    return hip


def _runtime(folder: Path | None = None, maps: Path = Path("/proc/self/maps")) -> Any:
    """The HIP runtime of this process's PyTorch.

    Args:
        folder: PyTorch's libraries; None: of the one that is imported.
        maps: the files in this process.

    Raises:
        HipError: there is none, or it cannot be told which.
    """
    folder = folder or Path(torch.__file__).parent / "lib"
    # A symbol is looked for in a library and in those that it was linked to: this is the runtime that PyTorch calls.
    own = folder / "libc10_hip.so"
    loaded = _mapped(maps)
    problem: object = "it is not there"
    if own.exists():
        try:
            library = ctypes.CDLL(str(own))
            if hasattr(library, "hipModuleLaunchKernel"):
                return library
            problem = "it is linked to no HIP runtime"
        except OSError as error:
            problem = error
    if len(loaded) == 1:
        try:
            return ctypes.CDLL(loaded[0])
        except OSError as error:
            problem = f"{problem}; {error}"
    found = f"{len(loaded)} are loaded: {', '.join(loaded)}" if loaded else "no libamdhip64 is loaded"
    raise HipError(
        f"the HIP runtime of PyTorch {torch.__version__} (ROCm {torch.version.hip or 'none'}) is not found by "
        f"{own}: {problem}; {found}"
    )


def _mapped(maps: Path) -> list[str]:
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
