"""FP8 MQA logits on Hopper: gate, tensor maps, launch."""

from __future__ import annotations

import ctypes
import functools
import struct
from collections.abc import Callable
from typing import Any

import torch

from lightning_indexer import packages
from lightning_indexer.arch import Arch
from lightning_indexer.backends.cuda_sm90.config import (
    MAX_ENTER_COST,
    KernelConfig,
    heuristic,
    neighbours,
)
from lightning_indexer.backends.gate import unsupported_shape
from lightning_indexer.cuda import driver, nvrtc
from lightning_indexer.problems.mqa_logits import MqaLogitsCall, MqaLogitsProblem

SOURCE = packages.beside(__name__, "mqa_logits.cuh")
NVRTC_ARCH = "sm_90a"
HEADS = (8, 16, 32, 64, 128)
HEAD_DIMS = (32, 64, 128)
MAX_ROWS = 2**30
# The fill warps round their shares of a row up: the last ones end past N by up to 2048 columns a share, of which there
# are at most four a fill warp.
MAX_KEYS = 2**31 - 2**22
MAX_TILES = 2**31 - 1


class MqaLogits:
    config = staticmethod(heuristic)
    neighbours = staticmethod(neighbours)

    def supports(self, problem: MqaLogitsProblem, arch: Arch) -> str | None:
        if arch.name != "sm90":
            return f"needs sm90 (H100, H200), this is {arch.name}"
        if (reason := unsupported_shape(problem, HEADS, HEAD_DIMS)) is not None:
            return reason
        if not problem.aligned:
            return "rows of q and k must start on 16-byte boundaries for TMA"
        if problem.rows > MAX_ROWS:
            return f"M={problem.rows} is beyond {MAX_ROWS}: row numbers of the schedule are int32"
        if problem.keys > MAX_KEYS:
            return f"N={problem.keys} is beyond {MAX_KEYS}: the end of the last share of a row has to be an int32"
        config = heuristic(problem, arch)
        # Windows of a row block may lie anywhere: the most that they can touch.
        tiles = -(-problem.rows // config.rows) * (-(-problem.keys // config.tile_keys) + 1 + MAX_ENTER_COST)
        if problem.compressed and tiles > MAX_TILES:
            return (
                f"M={problem.rows} compressed rows of N={problem.keys} keys may touch {tiles} tiles, beyond "
                f"{MAX_TILES}: the schedule counts them in int32"
            )
        return None

    def launch(self, problem: MqaLogitsProblem, arch: Arch, config: KernelConfig) -> Launch:
        return Launch(problem, config)

    def precompile(self, problem: MqaLogitsProblem, arch: Arch) -> str:
        config = heuristic(problem, arch)
        nvrtc.cubin(SOURCE, NVRTC_ARCH, config.macros())
        return config.name


class Launch:
    """The kernel for one problem; called with the tensors, it runs on the current stream."""

    def __init__(self, problem: MqaLogitsProblem, config: KernelConfig) -> None:
        self.config = config
        self.rows, self.keys, self.width = problem.rows, problem.keys, problem.width
        self.kernels: dict[int, Callable[..., int]] = {}  # by device
        # Tensor maps by addresses and strides: engines reuse their buffers.
        self.maps: dict[tuple[Any, ...], tuple[Any, int, Any, int]] = {}
        # One launch's arguments each; a thread takes one, or makes it.
        self.buffers: list[_ArgumentBuffer] = []

    def __call__(self, call: MqaLogitsCall) -> None:
        q, k, kv_scale, weights, ks, ke, _, _, _, out, _ = call
        assert out is not None
        device = q.get_device()
        if device != torch._C._cuda_getDevice():
            with torch.cuda.device(device):
                return self(call)
        kernel = self.kernels.get(device) or self._load(device)
        q_stride = q.stride()
        layout = (q.data_ptr(), k.data_ptr(), q_stride, k.stride())
        maps = self.maps.get(layout) or self._encode(layout)
        try:
            arguments = self.buffers.pop()
        except IndexError:
            arguments = _ArgumentBuffer()
        _PARAMETERS.pack_into(
            arguments.buffer, 0, maps[1], maps[3], arguments.address,
            layout[0] if q_stride[1] == self.config.head_dim else 0,
            kv_scale.data_ptr(), weights.data_ptr(), ks.data_ptr(), ke.data_ptr(), out.data_ptr(),
            q_stride[0], weights.stride(0), out.stride(0), self.rows, self.keys, self.width, self.config.enter_cost,
        )  # fmt: skip
        # The driver copies what the pointers point to before it returns.
        status = kernel(ctypes.c_void_p(torch._C._cuda_getCurrentRawStream(device)), arguments.parameters, None)
        self.buffers.append(arguments)
        if status:
            driver.check((status,))
        return None

    def _load(self, device: int) -> Callable[..., int]:
        function = ctypes.c_void_p(_function(tuple(self.config.macros().items()), device))
        grid = [ctypes.c_uint(side) for side in (self.config.ctas, 1, 1, self.config.threads, 1, 1)]
        shared = ctypes.c_uint(self.config.shared_bytes)
        self.kernels[device] = functools.partial(driver.launch_kernel(), function, *grid, shared)
        return self.kernels[device]

    def _encode(self, layout: tuple[Any, ...]) -> tuple[Any, int, Any, int]:
        q_address, k_address, q_stride, k_stride = layout
        q_map = _q_map(self.config, q_address, self.rows, q_stride[0], q_stride[1])
        k_map = _k_map(self.config, k_address, self.keys, k_stride[0])
        if len(self.maps) >= MAX_MAPS:
            self.maps.clear()
        self.maps[layout] = (q_map, int(q_map.getPtr()), k_map, int(k_map.getPtr()))
        return self.maps[layout]


MAX_MAPS = 1024
# Pointers to the two tensor maps and to the arguments, then struct Arguments of shared.cuh.
_POINTERS = struct.Struct("<3Q")
_PARAMETERS = struct.Struct("<3Q 6Q3q4i")


class _ArgumentBuffer:
    """A buffer for ``_PARAMETERS``."""

    __slots__ = ("address", "buffer", "parameters")

    def __init__(self) -> None:
        self.buffer = ctypes.create_string_buffer(_PARAMETERS.size)
        address = ctypes.addressof(self.buffer)
        self.parameters, self.address = ctypes.c_void_p(address), address + _POINTERS.size


@functools.cache
def _function(macros: tuple[tuple[str, str | int], ...], device: int) -> int:
    """The handle of the kernel compiled with ``macros`` on the device, which is the current one."""
    named = dict(macros)
    code = nvrtc.cubin(SOURCE, NVRTC_ARCH, named)
    return driver.load(code, str(named["KERNEL_NAME"]), int(named["SHARED_BYTES"]))


def _q_map(config: KernelConfig, address: int, rows: int, stride_m: int, stride_h: int) -> Any:
    """q [M, H, D] so that one load lays (row, head) pairs in the order of head_sum.cuh: pair 8j + 2t + b.

    Dimensions, fastest first: channel; b, the even or odd head; lanes that share a row (two at H = 128, each with
    half of the heads); row; j, the pair of heads.
    """
    heads = config.heads // config.lanes_of_row  # of a lane
    dims = (config.head_dim, 2, config.lanes_of_row, rows, heads // 2)
    # The only row's stride is never followed, and need not be one of TMA's.
    strides = (stride_h, stride_h * heads, stride_m if rows > 1 else config.heads * stride_h, 2 * stride_h)
    return driver.tensor_map(address, dims, strides, config.q_box)


def _k_map(config: KernelConfig, address: int, keys: int, stride: int) -> Any:
    """k [N, D], a tile of keys a load."""
    return driver.tensor_map(address, (config.head_dim, keys), (stride if keys > 1 else config.head_dim,), config.k_box)
