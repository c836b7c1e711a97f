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
    PAIRS,
    THREADS,
    TILE_KEYS,
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
        # Room for one launch's arguments each; a thread takes one, or makes it.
        self.rooms: list[_Room] = []

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
            room = self.rooms.pop()
        except IndexError:
            room = _Room()
        _PARAMETERS.pack_into(
            room.buffer, 0, maps[1], maps[3], room.arguments,
            layout[0] if q_stride[1] == self.config.head_dim else 0,
            kv_scale.data_ptr(), weights.data_ptr(), ks.data_ptr(), ke.data_ptr(), out.data_ptr(),
            q_stride[0], weights.stride(0), out.stride(0), self.rows, self.keys, self.width, self.config.enter_cost,
        )  # fmt: skip
        # The driver copies what the pointers point to before it returns.
        status = kernel(ctypes.c_void_p(torch._C._cuda_getCurrentRawStream(device)), room.parameters, None)
        self.rooms.append(room)
        if status:
            driver.check((status,))
        return None

    def _load(self, device: int) -> Callable[..., int]:
        function = ctypes.c_void_p(_function(tuple(self.config.macros().items()), device))
        grid = [ctypes.c_uint(side) for side in (self.config.ctas, 1, 1, THREADS, 1, 1)]
        shared = ctypes.c_uint(self.config.shared_bytes)
        self.kernels[device] = functools.partial(driver.launch_kernel(), function, *grid, shared)
        return self.kernels[device]

    def _encode(self, layout: tuple[Any, ...]) -> tuple[Any, int, Any, int]:
        q_address, k_address, q_stride, k_stride = layout
        q_map = _q_map(q_address, self.rows, self.config.heads, self.config.head_dim, q_stride[0], q_stride[1])
        k_map = _k_map(k_address, self.keys, self.config.head_dim, k_stride[0])
        if len(self.maps) >= MAX_MAPS:
            self.maps.clear()
        self.maps[layout] = (q_map, int(q_map.getPtr()), k_map, int(k_map.getPtr()))
        return self.maps[layout]


MAX_MAPS = 1024
# Pointers to the two tensor maps and to the arguments, then struct Arguments of plan.cuh.
_POINTERS = struct.Struct("<3Q")
_PARAMETERS = struct.Struct("<3Q 6Q3q4i")


class _Room:
    """A buffer for ``_PARAMETERS``."""

    __slots__ = ("arguments", "buffer", "parameters")

    def __init__(self) -> None:
        self.buffer = ctypes.create_string_buffer(_PARAMETERS.size)
        address = ctypes.addressof(self.buffer)
        self.parameters, self.arguments = ctypes.c_void_p(address), address + _POINTERS.size


@functools.cache
def _function(macros: tuple[tuple[str, str | int], ...], device: int) -> int:
    """The handle of the kernel compiled with ``macros`` on the device, which is the current one."""
    named = dict(macros)
    code = nvrtc.cubin(SOURCE, NVRTC_ARCH, named)
    return driver.load(code, str(named["KERNEL_NAME"]), int(named["SHARED_BYTES"]))


def _q_map(address: int, rows: int, heads: int, head_dim: int, stride_m: int, stride_h: int) -> Any:
    """q [M, H, D] so that one load lays (row, head) pairs in the order of mqa_logits.cuh: pair 8j + 2t + b.

    Dimensions, fastest first: channel; b, the even or odd head; lanes that share a row (two at H = 128, each with
    half of the heads); row; j, the pair of heads.
    """
    rows_of_block = PAIRS // heads
    lanes = 4 // rows_of_block if rows_of_block < 4 else 1
    dims = (head_dim, 2, lanes, rows, heads // lanes // 2)
    strides = (stride_h, stride_h * (heads // lanes), stride_m, 2 * stride_h)
    box = (head_dim, 2, lanes, min(4, rows_of_block), heads // lanes // 2)
    return driver.tensor_map(address, dims, strides, box)


def _k_map(address: int, keys: int, head_dim: int, stride: int) -> Any:
    """k [N, D], a tile of keys a load."""
    return driver.tensor_map(address, (head_dim, keys), (stride,), (head_dim, TILE_KEYS))
