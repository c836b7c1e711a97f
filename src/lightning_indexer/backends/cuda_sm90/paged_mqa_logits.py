"""FP8 MQA logits over a paged cache on Hopper: gate, tensor maps, launch."""

from __future__ import annotations

import functools
import struct
from typing import Any

import torch

from lightning_indexer import packages
from lightning_indexer.arch import Arch
from lightning_indexer.backends.cuda_sm90.config import SHARED_LIMIT
from lightning_indexer.backends.cuda_sm90.paged_config import TILE_KEYS, PagedConfig, heuristic, neighbours
from lightning_indexer.cuda import driver, nvrtc
from lightning_indexer.problems.paged_mqa_logits import PagedMqaLogitsCall, PagedMqaLogitsProblem

SOURCE = packages.beside(__name__, "paged_mqa_logits.cuh")
NVRTC_ARCH = "sm_90a"
HEADS = tuple(range(8, 129, 8))
HEAD_DIMS = (32, 64, 128)
PAGES = (16, 32, 64, 128)
MAX_NEXT_N = 8
MAX_ROWS = 2**30
# As in the prefill kernel, the last parts of a row that is filled end past the width.
MAX_WIDTH = 2**31 - 2**22
MAX_TILES = 2**31 - 1


class PagedMqaLogits:
    config = staticmethod(heuristic)
    neighbours = staticmethod(neighbours)

    def supports(self, problem: PagedMqaLogitsProblem, arch: Arch) -> str | None:
        if arch.name != "sm90":
            return f"needs sm90 (H100, H200), this is {arch.name}"
        layout = problem.layout
        for name, value, known in (("H", problem.heads, HEADS), ("D", problem.head_dim, HEAD_DIMS),
                                   ("page", layout.page, PAGES)):  # fmt: skip
            if value not in known:
                return f"{name}={value} is not one of {', '.join(map(str, known))}"
        if problem.next_n > MAX_NEXT_N:
            return f"next_n={problem.next_n} is beyond {MAX_NEXT_N}"
        if layout.order != "flat":
            return f"pages are {layout.order}: WGMMA reads flat ones"
        if not problem.aligned:
            return "heads of q, the cache and its blocks must start on 16-byte boundaries for TMA"
        if problem.width > MAX_WIDTH:
            return f"W={problem.width} is beyond {MAX_WIDTH}: the end of the last share of a row has to be an int32"
        if problem.rows > MAX_ROWS:
            return f"B * next_n={problem.rows} is beyond {MAX_ROWS}: row numbers are int32"
        if (tiles := problem.batch * _tiles(problem)) > MAX_TILES:
            return f"{tiles} tiles of {TILE_KEYS} keys are beyond {MAX_TILES}: the schedule counts them in int32"
        return None

    def launch(self, problem: PagedMqaLogitsProblem, arch: Arch, config: PagedConfig) -> Launch:
        return Launch(problem, config)

    def precompile(self, problem: PagedMqaLogitsProblem, arch: Arch) -> str:
        config = heuristic(problem, arch)
        nvrtc.cubin(SOURCE, NVRTC_ARCH, config.macros())
        return config.name


def _tiles(problem: PagedMqaLogitsProblem) -> int:
    """The most tiles of a sequence."""
    return -(-problem.keys // TILE_KEYS)


# Device; strides of q; blocks and block stride of the cache; row strides of weights, lengths, tables and out.
_Layout = tuple[int, tuple[int, ...], int, int, int, int, int, int, int]
# The stream, pointers to the two tensor maps and to the arguments, then struct Arguments of paged_geometry.cuh: its
# pointers, which each call packs, and what stays.
_POINTERS = struct.Struct(f"<{driver.Slot.HEAD} 3Q 6Q")
_CONSTANTS = struct.Struct("<6q7i2I4x")
_ARGUMENTS = driver.Slot.POINTERS + struct.calcsize("<3Q")
_START = driver.Slot.START


class Launch:
    """The kernel for one problem; called with the tensors, it runs on the current stream."""

    def __init__(self, problem: PagedMqaLogitsProblem, config: PagedConfig) -> None:
        self.problem, self.config = problem, config
        self.bound: dict[_Layout, Bound] = {}

    def __call__(self, call: PagedMqaLogitsCall) -> None:
        self.bind(call)(call)

    def bind(self, call: PagedMqaLogitsCall) -> Bound:
        """What runs this call, and every other one whose device, strides and number of blocks are the same."""
        q, cache, lengths = call.q, call.kv_cache, call.context_lens
        layout = (
            q.get_device(), q.stride(), cache.shape[0], cache.stride(0), call.weights.stride(0), lengths.stride(0),
            lengths.stride(1) if lengths.dim() == 2 else 0, call.block_tables.stride(0), call.result.stride(0),
        )  # fmt: skip
        return self.bound.get(layout) or driver.keep(self.bound, layout, Bound(self, layout))


class Bound:
    """The launch of a problem whose operands lie in one layout: what varies is where they are."""

    def __init__(self, launch: Launch, layout: _Layout) -> None:
        self.problem, self.config, self.layout, self.device = launch.problem, launch.config, layout, layout[0]
        # Tensor maps by the addresses of q and the cache: engines reuse their buffers.
        self.maps: dict[tuple[int, int], tuple[Any, int, Any, int]] = {}
        # Room for the arguments of one launch each; a thread takes one, or makes it.
        self.slots: list[driver.Slot] = []

    def __call__(self, call: PagedMqaLogitsCall) -> None:
        device = self.device
        if device != torch._C._cuda_getDevice():
            with torch.cuda.device(device):
                return self(call)
        q, cache, weights, lengths, tables, _, _, indices, _, _, out, _ = call
        assert out is not None
        return self.at(
            torch._C._cuda_getCurrentRawStream(device), q.data_ptr(), cache.data_ptr(), weights.data_ptr(),
            lengths.data_ptr(), tables.data_ptr(), 0 if indices is None else indices.data_ptr(), out.data_ptr(),
        )  # fmt: skip

    def at(
        self, stream: int, q: int, cache: int, weights: int, lengths: int, tables: int, indices: int, out: int
    ) -> None:
        """A call by the addresses of its operands, on a stream of the device, which is the current one."""
        maps = self.maps.get((q, cache)) or self._encode((q, cache))
        try:
            slot = self.slots.pop()
        except IndexError:
            slot = self._new_slot()
        _POINTERS.pack_into(
            slot.buffer, _START, stream, maps[1], maps[3], slot.address + _ARGUMENTS, weights, lengths, tables, indices,
            cache, out,
        )  # fmt: skip
        # The driver copies what the pointers point to before it returns.
        status = slot.launch()
        self.slots.append(slot)
        if status:
            driver.check((status,))

    def _new_slot(self) -> driver.Slot:
        problem, config = self.problem, self.config
        _, _, _, cache_stride, w_stride, length_stride, row_length_stride, table_stride, out_stride = self.layout
        # Tables that are looked up by indices may be asked for rows that have one alone.
        tiles = 0 if problem.ragged else _tiles(problem)
        share, rest = divmod(problem.batch * tiles, config.pieces)
        slot = driver.Slot(
            _function(config, self.device), (config.ctas, 1, 1), config.threads, config.shared_bytes,
            _POINTERS.size + _CONSTANTS.size,
        )  # fmt: skip
        _CONSTANTS.pack_into(
            slot.buffer, _START + _POINTERS.size,
            w_stride, length_stride, row_length_stride, table_stride, cache_stride, out_stride,
            problem.batch, problem.width, problem.keys, int(not problem.row_lengths), tiles, share, rest,
            inverse(config.pieces), inverse(max(1, tiles)),
        )  # fmt: skip
        return slot

    def _encode(self, pointers: tuple[int, int]) -> tuple[Any, int, Any, int]:
        q_address, cache_address = pointers
        q_map = q_tensor_map(self.config, q_address, self.problem.batch, self.layout[1])
        # A pool of no blocks has no address, and nothing is loaded from it.
        if self.config.fp4:  # pages are copied without a map
            k_map = q_map
        else:
            k_map = k_tensor_map(self.config, cache_address or q_address, max(1, self.layout[2]), self.layout[3])
        return driver.keep(self.maps, pointers, (q_map, int(q_map.getPtr()), k_map, int(k_map.getPtr())))


def inverse(value: int) -> int:
    """What paged_plan.cuh's ``divide`` multiplies with."""
    return min(-(-(2**32) // value), 2**32 - 1)


@functools.cache
def _function(config: PagedConfig, device: int) -> int:
    """The handle of the kernel on the device, which is the current one."""
    return driver.load(nvrtc.cubin(SOURCE, NVRTC_ARCH, config.macros()), config.name, SHARED_LIMIT)


def q_tensor_map(config: PagedConfig, address: int, batch: int, strides: tuple[int, ...]) -> Any:
    """q [B, next_n, H, D] so that one load lays (row, head) pairs out in the order of the kernel's columns.

    Dimensions, fastest first: channel; the heads of the lanes that share a row, two a lane; row; groups of such heads;
    sequence.
    """
    together = 2 * config.lanes_of_row
    dims = (config.head_dim, together, config.next_n, config.heads // together, batch)
    of_batch, of_row, of_head, _ = strides
    # The stride of the only row or sequence is never followed, and need not be one of TMA's.
    of_row = of_row if config.next_n > 1 else config.heads * config.head_dim
    of_batch = of_batch if batch > 1 else config.next_n * config.heads * config.head_dim
    return driver.tensor_map(address, dims, (of_head, of_row, together * of_head, of_batch), config.q_box)


def k_tensor_map(config: PagedConfig, address: int, blocks: int, stride: int) -> Any:
    """The cache: channels, the keys of a page (and the rows that their scales fill), pages."""
    page = config.page
    rows = page + (4 * page // config.head_dim if config.scales_in_load else 0)
    apart = stride if blocks > 1 else page * (config.head_dim + 4)
    return driver.tensor_map(address, (config.head_dim, rows, blocks), (config.head_dim, apart), config.k_box)
