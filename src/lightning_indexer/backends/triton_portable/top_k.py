"""``triton-portable``: top-k per row. Gate, plan and launch; the device code is in ``top_k_kernel``."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch

from lightning_indexer import envs
from lightning_indexer.amd import launcher_for, simulates, triton_amd
from lightning_indexer.amd.built import Built
from lightning_indexer.arch import Arch
from lightning_indexer.backends.triton_launch import device_guard, within_2gib
from lightning_indexer.problems.top_k import TopKCall, TopKProblem

MAX_WIDTH = 2**31 - 2**15
_WRITTEN = ("entries_ptr", "indices_ptr", "values_ptr")


@dataclass(frozen=True, slots=True)
class TopKConfig:
    """How one launch works.

    Attributes:
        block: columns of a tile.
        span: columns that are listed at a time, a multiple of ``block``.
        capacity: entries of a program's list, a power of two and at least 2 k.
        sample: scores that the gate is guessed from, a power of two of at most ``capacity``.
        splits: segments of a row; above 1, a second launch merges them.
        programs: rows in work at a time, on each multiprocessor or compute unit.
        num_warps: Triton's.
        registers: of a thread, on NVIDIA; 0 leaves them to the compiler, which takes all and leaves one program a unit.
    """

    block: int
    span: int
    capacity: int
    sample: int
    splits: int
    programs: int
    num_warps: int
    registers: int = 80


def heuristic(problem: TopKProblem, arch: Arch) -> TopKConfig:
    """Lists of at least 2048, so that the guess of a small k has room; segments only where rows leave units idle."""
    capacity = max(2048, 2 * _power_of_two(problem.k))
    segment = -(-problem.width // (splits := _splits(problem, arch)))
    sample = 4096 if segment > 65536 and capacity >= 4096 else 2048
    return TopKConfig(2048, 8192, capacity, sample, splits, 8, 8)


def _splits(problem: TopKProblem, arch: Arch) -> int:
    """As many segments as give every unit two of them; their candidates are at most as many as a segment is long."""
    wanted = min(2 * arch.units // max(1, problem.rows), math.isqrt(problem.width // problem.k), 64)
    return 1 << (wanted.bit_length() - 1) if wanted >= 2 and problem.width >= 8192 else 1


def neighbours(problem: TopKProblem, arch: Arch) -> list[TopKConfig]:
    """What a tuning run measures: the heuristic's choice first, then those around it."""
    chosen = heuristic(problem, arch)
    others = [replace(chosen, block=block) for block in (1024, 4096)]
    others += [replace(chosen, span=span) for span in (4096, 16384)]
    others += [replace(chosen, num_warps=warps) for warps in (4, 8, 16)]
    others += [replace(chosen, registers=registers) for registers in (64, 96, 128)]
    others += [replace(chosen, sample=sample) for sample in (1024, 2048, 4096) if sample <= chosen.capacity]
    others += [replace(chosen, programs=programs) for programs in (4, 16)]
    others += [replace(chosen, splits=splits) for splits in {max(1, chosen.splits // 2), chosen.splits * 2}]
    return [chosen, *(config for config in dict.fromkeys(others) if config != chosen)]


class TopK:
    config = staticmethod(heuristic)
    neighbours = staticmethod(neighbours)

    def supports(self, problem: TopKProblem, arch: Arch) -> str | None:
        if arch.vendor == "cpu" and not envs.triton_interprets():
            return "Triton has no CPU target (TRITON_INTERPRET=1 runs its interpreter, for tests)"
        if not arch.listed:
            return f"{arch.name} is not a known arch; Triton needs NVIDIA sm80 or newer, or AMD gfx90a or newer"
        if problem.width > MAX_WIDTH:
            return f"W={problem.width} is beyond {MAX_WIDTH}: the end of the last span has to be an int32"
        return None

    def launch(self, problem: TopKProblem, arch: Arch, config: TopKConfig) -> TopKLaunch:
        return TopKLaunch(problem, arch, config)

    def build(self, problem: TopKProblem, arch: Arch) -> Built:
        """The kernel of this problem for an AMD arch, compiled without a device; the first launch of two."""
        launch = TopKLaunch(problem, arch, heuristic(problem, arch))
        workspace = torch.empty(launch.workspace_bytes, dtype=torch.uint8, device="meta")
        return launch.build(launch.passes(call_like(problem), workspace)[0])


class TopKLaunch:
    """The kernel for one problem and one config; called with the tensors, it runs on the current stream."""

    def __init__(self, problem: TopKProblem, arch: Arch, config: TopKConfig) -> None:
        if config.capacity < 2 * problem.k or config.sample > config.capacity:
            raise ValueError(f"config: got {config} for k={problem.k}, expected a capacity of 2 k and a sample in it")
        self.problem, self.arch, self.config = problem, arch, config
        items = problem.rows * config.splits
        self.grid = (max(1, min(items, config.programs * arch.units)), 1, 1)
        self.list_bytes = self.grid[0] * (2 * config.capacity + config.span // 32) * 4
        self.segment_bytes = -(-problem.rows * config.splits * problem.k * 4 // 16) * 16 if config.splits > 1 else 0
        self.workspace_bytes = self.list_bytes + 2 * self.segment_bytes
        self.options = {"num_warps": config.num_warps, "num_stages": 1, "enable_fp_fusion": True}
        if arch.vendor == "nvidia" and config.registers:
            self.options["maxnreg"] = config.registers
        # Compiled kernels by what Triton specialises on.
        self.compiled: dict[object, Any] = {}

    def __call__(self, call: TopKCall) -> None:
        workspace = call.workspace
        if workspace is None:
            workspace = torch.empty(self.workspace_bytes, dtype=torch.uint8, device=call.logits.device)
        for launch in self.passes(call, workspace):
            self._launch(launch, call.logits.device)

    def passes(self, call: TopKCall, workspace: torch.Tensor) -> list[dict[str, Any]]:
        """Every argument of each launch, by name."""
        problem, splits = self.problem, self.config.splits
        entries = workspace[: self.list_bytes].view(torch.int32)
        base = call.offsets if problem.index_base == "offset" else call.page_table
        whole: dict[str, Any] = {
            "logits_ptr": call.logits,
            "starts_ptr": call.row_starts,
            "ends_ptr": call.row_ends,
            "base_ptr": base,
            "positions_ptr": None,
            "entries_ptr": entries,
            "indices_ptr": call.indices,
            "values_ptr": call.values,
            "items": problem.rows,
            "width": problem.width,
            "k": problem.k,
            "page_size": max(1, problem.page_size),
            "logits_stride": call.logits.stride(0),
            "base_stride": call.page_table.stride(0) if call.page_table is not None else 0,
            "indices_stride": call.indices.stride(0),
            "values_stride": call.values.stride(0) if call.values is not None else 0,
            "BLOCK": self.config.block,
            "SPAN": self.config.span,
            "CAPACITY": self.config.capacity,
            "SAMPLE": self.config.sample,
            "SORTED": _power_of_two(problem.k),
            "BASE": problem.index_base,
            "ORDER": problem.order if problem.order == "score" else "index",
            "LARGER": problem.tie == "larger",
            "SPLITS": 1,
            "MERGE": False,
            "WAIT": self.arch.name.startswith("gfx9"),
        }
        if splits == 1:
            return [whole]
        width = splits * problem.k
        first, second = self.list_bytes, self.list_bytes + self.segment_bytes
        size = problem.rows * width * 4
        positions = workspace[first : first + size].view(torch.int32).view(problem.rows, width)
        values = workspace[second : second + size].view(torch.float32).view(problem.rows, width)
        segments = whole | {
            "base_ptr": None,
            "indices_ptr": positions,
            "values_ptr": values,
            "items": problem.rows * splits,
            "indices_stride": width,
            "values_stride": width,
            "BASE": "absolute",
            "ORDER": "index",
            "SPLITS": splits,
        }
        merge = whole | {"logits_ptr": values, "positions_ptr": positions, "logits_stride": width, "MERGE": True}
        return [segments, merge]

    def build(self, arguments: dict[str, Any]) -> Built:
        """The kernel for an AMD arch, as Triton's launcher would specialise it on these arguments."""
        from lightning_indexer.backends.triton_portable.top_k_kernel import top_k_per_row_kernel as kernel

        facts = triton_amd.specialise(kernel, arguments, self.arch.name, self.options)
        return triton_amd.compile_triton(
            kernel, facts.signature, facts.constexprs, facts.attrs, self.arch.name, self.options
        )

    def _launch(self, arguments: dict[str, Any], device: torch.device) -> None:
        from lightning_indexer.backends.triton_portable.top_k_kernel import top_k_per_row_kernel as kernel

        if device.type == "cpu" and simulates(self.arch):
            built = self.build(arguments)
            given = [arguments[name] for name in built.argument_names]
            block = self.arch.wave * self.config.num_warps
            launcher_for(device).launch(built, self.grid, block, given, outputs=_WRITTEN)
            return
        key = (device, arguments["SPLITS"], arguments["MERGE"], *map(self._specialised, arguments.values()))
        with device_guard(device):
            if (compiled := self.compiled.get(key)) is not None:
                # Half the host time of the line below, which looks at every argument to find the same kernel.
                compiled[self.grid](*arguments.values())
                return
            with triton_amd.repaired(self.arch.name):
                compiled = kernel[self.grid](**arguments, **self.options)
            if compiled is not None:  # the interpreter has nothing to keep
                self.compiled[key] = compiled

    def _specialised(self, value: Any) -> object:
        """What Triton specialises on beside types: addresses and strides on 16, a 1, 64 bits, AMD's 2 GiB."""
        if isinstance(value, torch.Tensor):
            return value.data_ptr() % 16 == 0, self.arch.vendor == "amd" and within_2gib(value)
        return (value % 16 == 0, value == 1, value < 2**31) if isinstance(value, int) else None


def call_like(problem: TopKProblem) -> TopKCall:
    """Tensors of a call without memory, contiguous."""
    rows, k = problem.rows, problem.k

    def empty(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    pages = -(-problem.width // problem.page_size) if problem.page_size else 0
    return TopKCall(
        empty(rows, problem.width, dtype=problem.dtype),
        empty(rows) if problem.starts else None,
        empty(rows) if problem.ends else None,
        empty(rows) if problem.index_base == "offset" else None,
        empty(rows, pages) if problem.index_base == "page" else None,
        empty(rows, k),
        empty(rows, k, dtype=torch.float32) if problem.values else None,
    )


def _power_of_two(value: int) -> int:
    return 1 << (value - 1).bit_length()
