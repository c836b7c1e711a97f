"""FP8 MQA logits over a paged cache in Triton: tile sizes, gate and launch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from lightning_indexer import envs
from lightning_indexer.amd import launcher_for, simulates, triton_amd
from lightning_indexer.amd.built import Built
from lightning_indexer.arch import Arch
from lightning_indexer.backends.gate import unsupported_grid
from lightning_indexer.backends.triton_launch import device_guard, within_2gib
from lightning_indexer.backends.triton_portable.mqa_logits import HEAD_DIMS, HEADS
from lightning_indexer.fp4 import FP4
from lightning_indexer.problems.mqa_logits import row_stride
from lightning_indexer.problems.paged_mqa_logits import PagedMqaLogitsCall, PagedMqaLogitsProblem

MAX_SPLITS = 4096
# A program's last step past the width stays an int32.
MAX_WIDTH = 2**31 - MAX_SPLITS * 1024 - 2**14
# Places within a block are int32.
MAX_BLOCK_BYTES = 2**30


@dataclass(frozen=True, slots=True)
class PagedTileConfig:
    """How one program works.

    Attributes:
        block: keys of one tile, the M side of the matrix product.
        rows: rows of one b that share a tile, a power of two.
        splits: programs that the tiles of those rows are dealt out to.
        num_warps, num_stages: Triton's; stages of the key pipeline.
        waves_per_eu: AMD only, 0 leaves it to the compiler.
    """

    block: int
    rows: int
    splits: int
    num_warps: int
    num_stages: int
    waves_per_eu: int = 0


def heuristic(problem: PagedMqaLogitsProblem, arch: Arch) -> PagedTileConfig:
    """As the prefill kernel's tiles; rows share a tile while rows * H, columns of the product, leave registers."""
    # gfx90a, which widens to float16, spills 10 registers at 128 columns.
    columns = 64 if arch.vendor == "amd" and arch.fp8 == "none" else 128
    rows = _power_of_two(problem.next_n)
    while rows > 1 and rows * _padded(problem.heads, rows) > columns:
        rows //= 2
    splits = _splits(problem, arch, 64, rows)
    if arch.vendor == "amd":
        # Values that are loaded byte by byte take more registers.
        return PagedTileConfig(64, rows, splits, 4 if problem.aligned else 8, 2, 2)
    return PagedTileConfig(64, rows, splits, 4, 3)


def _splits(problem: PagedMqaLogitsProblem, arch: Arch, block: int, rows: int) -> int:
    """Some programs a unit, and none with more than 8192 keys where one b is far longer than the others."""
    groups = max(1, problem.batch * -(-problem.next_n // rows))
    wanted = max(-(-8 * arch.units // groups), -(-problem.keys // 8192))
    return max(1, min(wanted, -(-problem.keys // block), MAX_SPLITS))


def neighbours(problem: PagedMqaLogitsProblem, arch: Arch) -> list[PagedTileConfig]:
    """What a tuning run measures: the heuristic's choice first, then those around it."""
    chosen = heuristic(problem, arch)
    others = [replace(chosen, splits=splits) for splits in (max(1, chosen.splits // 2), 2 * chosen.splits)]
    others += [replace(chosen, block=block) for block in (32, 128)]
    others += [replace(chosen, rows=chosen.rows // 2)] if chosen.rows > 1 else []
    others += [replace(chosen, num_warps=warps) for warps in (2, 8)]
    others += [replace(chosen, num_stages=stages) for stages in (2, 4)]
    return [chosen, *(config for config in dict.fromkeys(others) if config != chosen)]


class PagedMqaLogits:
    config = staticmethod(heuristic)
    neighbours = staticmethod(neighbours)

    def supports(self, problem: PagedMqaLogitsProblem, arch: Arch) -> str | None:
        if arch.vendor == "cpu" and not envs.triton_interprets():
            return "Triton has no CPU target (TRITON_INTERPRET=1 runs its interpreter, for tests)"
        if not arch.listed:
            return f"{arch.name} is not a known arch; Triton needs NVIDIA sm80 or newer, or AMD gfx90a or newer"
        for name, value, known in (("H", problem.heads, HEADS), ("D", problem.head_dim, HEAD_DIMS)):
            if value not in known:
                return f"{name}={value} is not one of {', '.join(map(str, known))}"
        if problem.width > MAX_WIDTH:
            return f"W={problem.width} is beyond {MAX_WIDTH}: a program's last column has to be an int32"
        if problem.layout.block_bytes > MAX_BLOCK_BYTES:
            return f"a block of {problem.layout.block_bytes} bytes is larger than {MAX_BLOCK_BYTES}"
        config = heuristic(problem, arch)
        return unsupported_grid(_programs(problem, config), arch.wave * config.num_warps, arch.vendor)

    def launch(self, problem: PagedMqaLogitsProblem, arch: Arch, config: PagedTileConfig) -> Launch:
        return Launch(problem, arch, config)

    def build(self, problem: PagedMqaLogitsProblem, arch: Arch) -> Built:
        """The kernel of this problem for an AMD arch, compiled without a device; operands as torch allocates them."""
        launch = Launch(problem, arch, heuristic(problem, arch))
        return launch.build(launch.arguments(call_like(problem)))


class Launch:
    """The kernel for one problem and one tile config; called with the tensors, it runs on the current stream."""

    def __init__(self, problem: PagedMqaLogitsProblem, arch: Arch, config: PagedTileConfig) -> None:
        self.problem, self.arch, self.config = problem, arch, config
        self.grid = (_programs(problem, config), 1, 1)
        self.mode, self.q_mode = _mode(problem.layout.dtype, arch), _mode(problem.q_dtype, arch)
        self.constants = constants(problem, arch, config)
        self.options = options(config, arch)
        self.compiled: dict[object, Any] = {}  # by what `_key` says

    def __call__(self, call: PagedMqaLogitsCall) -> None:
        from lightning_indexer.backends.triton_portable.paged_mqa_logits_kernel import (
            fp8_paged_mqa_logits_kernel as kernel,
        )

        arguments = self.arguments(call)
        device = call.q.device
        key = self._key(arguments, device)
        compiled = self.compiled.get(key)
        if device.type == "cpu" and simulates(self.arch):
            if compiled is None:
                compiled = self.compiled[key] = self.build(arguments)
            given = [arguments[kernel.arg_names.index(name)] for name in compiled.argument_names]
            block = self.arch.wave * self.config.num_warps
            launcher_for(device).launch(compiled, self.grid, block, given, outputs=("out_ptr",))
            return
        with device_guard(device):
            if compiled is not None:
                # Half the host time of the line below, which looks at every argument to find the same kernel.
                compiled[self.grid](*arguments, *self.constants.values())
                return
            with triton_amd.repaired(self.arch.name):
                compiled = kernel[self.grid](*arguments, **self.constants, **self.options)
            if compiled is not None:  # the interpreter has nothing to keep
                self.compiled[key] = compiled

    def arguments(self, call: PagedMqaLogitsCall) -> tuple[Any, ...]:
        """What the kernel is given at run time, in the order of its signature."""
        problem, cache, lengths, out = self.problem, call.kv_cache, call.context_lens, call.result
        q = call.q.view(torch.uint8) if self.q_mode in ("widen", "scrub") else call.q
        apart = problem.layout.bytes_apart(cache)
        return (
            q, cache, call.weights, lengths, call.block_tables, call.indices, out,
            problem.width, problem.keys, self.config.splits, q.stride(0), q.stride(1), q.stride(2), apart // 4,
            call.weights.stride(0), lengths.stride(0), lengths.stride(1) if lengths.dim() == 2 else 0,
            call.block_tables.stride(0), out.stride(0),
        )  # fmt: skip

    def build(self, arguments: tuple[Any, ...]) -> Built:
        """The kernel for an AMD arch, as Triton's launcher would specialise it on these arguments."""
        from lightning_indexer.backends.triton_portable.paged_mqa_logits_kernel import (
            fp8_paged_mqa_logits_kernel as kernel,
        )

        values = dict(zip(kernel.arg_names, (*arguments, *self.constants.values()), strict=True))
        facts = triton_amd.specialise(kernel, values, self.arch.name, self.options)
        return triton_amd.compile_triton(
            kernel, facts.signature, facts.constexprs, facts.attrs, self.arch.name, self.options
        )

    def _key(self, arguments: tuple[Any, ...], device: torch.device) -> object:
        """What Triton specialises on beside types: addresses and strides on 16, a 1, 64 bits, AMD's 2 GiB."""
        tensors = [tensor for tensor in arguments[:7] if tensor is not None]
        aligned = tuple(tensor.data_ptr() % 16 == 0 for tensor in tensors)
        sizes = tuple((value % 16 == 0, value == 1, value < 2**31) for value in arguments[10:])
        near = tuple(map(within_2gib, tensors)) if self.arch.vendor == "amd" else ()
        return device, aligned, sizes, near


def _mode(dtype: torch.dtype, arch: Arch) -> str:
    """How the matrix unit of the arch reads fp8 of that dialect; fp4 is converted to its own."""
    if arch.fp8 == "none":
        return "widen"
    if arch.fp8 == "fnuz":
        if dtype is FP4:
            return "fnuz"
        return "fnuz" if dtype is torch.float8_e4m3fnuz else "scrub"
    return "fn"


def _padded(heads: int, rows: int) -> int:
    """Heads of a row on the N side of the product, which has at least 16 columns."""
    return max(heads, 16 // rows)


def _power_of_two(value: int) -> int:
    return 1 << (value - 1).bit_length()


def _programs(problem: PagedMqaLogitsProblem, config: PagedTileConfig) -> int:
    return problem.batch * -(-problem.next_n // config.rows) * config.splits


def constants(problem: PagedMqaLogitsProblem, arch: Arch, config: PagedTileConfig) -> dict[str, Any]:
    """The kernel's compile-time arguments, in the order of its signature."""
    mode, q_mode = _mode(problem.layout.dtype, arch), _mode(problem.q_dtype, arch)
    return {
        "NEXT_N": problem.next_n,
        "ROWS": config.rows,
        "HEADS": problem.heads,
        "PADDED_HEADS": _padded(problem.heads, config.rows),
        "HEAD_DIM": problem.head_dim,
        "PAGE": problem.layout.page,
        "SHUFFLED": problem.layout.order == "preshuffled",
        "UE8M0": problem.layout.scales == "ue8m0",
        "FP4_SHIFT": (5 if mode == "fnuz" else 6) if problem.layout.is_fp4 else 0,
        "ROW_LENGTHS": problem.row_lengths,
        "CLEAN": problem.clean_logits,
        "BLOCK": config.block,
        "MODE": mode,
        "Q_MODE": q_mode,
        "FACTOR": 2.0 ** (mode == "scrub") * 2.0 ** (q_mode == "scrub"),
    }


def options(config: PagedTileConfig, arch: Arch) -> dict[str, Any]:
    """The compiler's options. FMA fusion is asked for by name: from 3.10 on, Triton's default is not to fuse."""
    chosen: dict[str, Any] = {
        "num_warps": config.num_warps,
        "num_stages": config.num_stages,
        "enable_fp_fusion": True,
    }
    if arch.vendor == "amd" and config.waves_per_eu:
        chosen["waves_per_eu"] = config.waves_per_eu
    return chosen


def call_like(problem: PagedMqaLogitsProblem) -> PagedMqaLogitsCall:
    """Tensors of a call without memory, contiguous; blocks that are not aligned lie 4 bytes further apart."""

    def empty(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    batch, next_n, layout = problem.batch, problem.next_n, problem.layout
    blocks = max(2, batch * problem.max_blocks)
    apart = layout.block_bytes + (0 if problem.aligned else 4)
    wide = empty(blocks, apart, dtype=torch.uint8)
    width = layout.row_bytes + 4
    out = empty(problem.rows, row_stride(problem.width, problem.out_dtype), dtype=problem.out_dtype)
    return PagedMqaLogitsCall(
        empty(batch, next_n, problem.heads, problem.head_dim, dtype=problem.q_dtype),
        wide.as_strided((blocks, *layout.block_shape), (apart, width, width, 1)),
        empty(problem.rows, problem.heads, dtype=torch.float32),
        empty(batch, next_n) if problem.row_lengths else empty(batch), empty(batch, problem.max_blocks),
        problem.width, layout, empty(batch) if problem.ragged else None, problem.clean_logits, problem.out_dtype,
        out[:, : problem.width],
    )  # fmt: skip
