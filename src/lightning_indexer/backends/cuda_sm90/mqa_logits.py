"""FP8 MQA logits on Hopper: gate, tensor maps, launch."""

from __future__ import annotations

import functools
import struct
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
from lightning_indexer.backends.gate import needs_fp8, unsupported_shape
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
        if (reason := needs_fp8(problem)) is not None:
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
        self.bound: dict[_Layout, _Bound] = {}

    def __call__(self, call: MqaLogitsCall) -> None:
        self.bind(call)(call)

    def bind(self, call: MqaLogitsCall) -> _Bound:
        """What runs this call, and every other one whose device and strides are the same."""
        device = call.q.get_device()
        layout = (device, call.q.stride(), call.k.stride(0), call.weights.stride(0), call.result.stride(0))
        return self.bound.get(layout) or driver.keep(self.bound, layout, _Bound(self, layout))


# Device; strides of q; row strides of k, weights and out.
_Layout = tuple[int, tuple[int, ...], int, int, int]
# The stream, pointers to the two tensor maps and to the arguments, then struct Arguments of shared.cuh: its pointers,
# which each call packs, and what stays.
_POINTERS = struct.Struct(f"<{driver.Slot.HEAD} 3Q 6Q")
_CONSTANTS = struct.Struct("<3q4i")
_ARGUMENTS = driver.Slot.POINTERS + struct.calcsize("<3Q")
_START = driver.Slot.START


class _Bound:
    """The launch of a problem whose operands lie in one layout: what varies is where they are."""

    def __init__(self, launch: Launch, layout: _Layout) -> None:
        self.launch, self.layout, self.device = launch, layout, layout[0]
        # q's heads lie one behind the other: rows may come as one copy each.
        self.dense = layout[1][1] == launch.config.head_dim
        # Tensor maps by the addresses of q and k: engines reuse their buffers.
        self.maps: dict[tuple[int, int], tuple[Any, int, Any, int]] = {}
        # Room for the arguments of one launch each; a thread takes one, or makes it.
        self.slots: list[driver.Slot] = []

    def __call__(self, call: MqaLogitsCall) -> None:
        q, k, kv_scale, weights, ks, ke, _, _, _, out, _ = call
        assert out is not None
        device = self.device
        if device != torch._C._cuda_getDevice():
            with torch.cuda.device(device):
                return self(call)
        pointers = (q.data_ptr(), k.data_ptr())
        maps = self.maps.get(pointers) or self._encode(pointers)
        try:
            slot = self.slots.pop()
        except IndexError:
            slot = self._new_slot()
        stream = torch._C._cuda_getCurrentRawStream(device)
        _POINTERS.pack_into(
            slot.buffer, _START, stream, maps[1], maps[3], slot.address + _ARGUMENTS, pointers[0] if self.dense else 0,
            kv_scale.data_ptr(), weights.data_ptr(), ks.data_ptr(), ke.data_ptr(), out.data_ptr(),
        )  # fmt: skip
        # The driver copies what the pointers point to before it returns.
        status = slot.launch()
        self.slots.append(slot)
        if status:
            driver.check((status,))
        return None

    def _new_slot(self) -> driver.Slot:
        launch, config = self.launch, self.launch.config
        size = _POINTERS.size + _CONSTANTS.size
        function = _function(tuple(config.macros().items()), self.device)
        slot = driver.Slot(function, (config.ctas, 1, 1), config.threads, config.shared_bytes, size)
        _, q_strides, _, w_stride, out_stride = self.layout
        _CONSTANTS.pack_into(
            slot.buffer, _START + _POINTERS.size,
            q_strides[0], w_stride, out_stride, launch.rows, launch.keys, launch.width, config.enter_cost,
        )  # fmt: skip
        return slot

    def _encode(self, pointers: tuple[int, int]) -> tuple[Any, int, Any, int]:
        launch, config = self.launch, self.launch.config
        _, q_strides, k_stride, _, _ = self.layout
        q_map = _q_map(config, pointers[0], launch.rows, q_strides[0], q_strides[1])
        k_map = _k_map(config, pointers[1], launch.keys, k_stride)
        return driver.keep(self.maps, pointers, (q_map, int(q_map.getPtr()), k_map, int(k_map.getPtr())))


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
