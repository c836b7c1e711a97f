"""``triton-portable``: one Triton kernel for every arch that Triton compiles for. Gate and launch.

Triton's runtime launches it on a GPU. On the CPU it runs in Triton's interpreter, or, where the arch is AMD's, compiled
for that arch in the simulator (see ``launcher``).
"""

from __future__ import annotations

from typing import Any

import torch

from lightning_indexer import envs
from lightning_indexer.amd import launcher_for, simulates, triton_amd
from lightning_indexer.amd.built import Built
from lightning_indexer.arch import Arch
from lightning_indexer.backends.gate import unsupported_grid, unsupported_shape
from lightning_indexer.backends.triton_launch import device_guard, operands_like
from lightning_indexer.backends.triton_portable.config import TileConfig, heuristic, neighbours
from lightning_indexer.problems.mqa_logits import Operands, Problem

HEADS = (8, 16, 32, 64, 128)
HEAD_DIMS = (32, 64, 128)


class TritonPortable:
    name = "triton-portable"
    summary = "one Triton kernel for NVIDIA sm80 and newer and AMD gfx9/gfx12"

    def missing(self) -> str | None:
        return triton_amd.missing()

    def supports(self, problem: Problem, arch: Arch) -> str | None:
        if arch.vendor == "cpu" and not envs.triton_interprets():
            return "Triton has no CPU target (TRITON_INTERPRET=1 runs its interpreter, for tests)"
        if not arch.listed:
            return f"{arch.name} is not a known arch; Triton needs NVIDIA sm80 or newer, or AMD gfx90a or newer"
        if (reason := unsupported_shape(problem, HEADS, HEAD_DIMS)) is not None:
            return reason
        config = heuristic(problem, arch)
        return unsupported_grid(problem.rows * -(-problem.width // config.chunk), 64 * config.num_warps, arch.vendor)

    def prepare(self, problem: Problem, arch: Arch) -> Launch:
        return Launch(problem, arch, heuristic(problem, arch))

    def candidates(self, problem: Problem, arch: Arch) -> list[tuple[object, Launch]]:
        return [(config, Launch(problem, arch, config)) for config in neighbours(problem, arch)]

    def build(self, problem: Problem, arch: Arch) -> Built:
        """The kernel of this problem for an AMD arch, compiled without a device; operands as torch allocates them."""
        launch = Launch(problem, arch, heuristic(problem, arch))
        return launch.build(launch.arguments(*operands_like(problem, arch)))


class Launch:
    """The kernel for one problem and one tile config; called with the tensors, it runs on the current stream."""

    def __init__(self, problem: Problem, arch: Arch, config: TileConfig) -> None:
        self.arch = arch
        self.sizes = (problem.rows, problem.keys, problem.width, config.chunk)
        self.grid = (problem.rows * -(-problem.width // config.chunk), 1, 1)
        self.widen = arch.fp8 == "none"
        self.constants = constants(problem, config, self.widen)
        self.options = options(config, arch)
        # Compiled kernels by device, for operands that Triton specialises alike: every address and stride on 16.
        self.compiled: dict[torch.device, Any] = {}

    def __call__(self, operands: Operands, out: torch.Tensor) -> None:
        from lightning_indexer.backends.triton_portable.kernel import fp8_mqa_logits_kernel

        arguments = self.arguments(operands, out)
        device = out.device
        if device.type == "cpu" and simulates(self.arch):
            self._simulate(arguments)
            return
        with device_guard(device):
            if not self._aligned(arguments):
                with triton_amd.repaired(self.arch.name):
                    fp8_mqa_logits_kernel[self.grid](*arguments, **self.constants, **self.options)
            elif (compiled := self.compiled.get(device)) is not None:
                # Half the host time of the line below, which looks at every argument to find the same kernel.
                compiled[self.grid](*arguments, *self.constants.values())
            else:
                with triton_amd.repaired(self.arch.name):
                    compiled = fp8_mqa_logits_kernel[self.grid](*arguments, **self.constants, **self.options)
                if compiled is not None:  # the interpreter has nothing to keep
                    self.compiled[device] = compiled

    def arguments(self, operands: Operands, out: torch.Tensor) -> tuple[Any, ...]:
        """What the kernel is given at run time, in the order of its signature."""
        q, k, kv_scale, weights, ks, ke = operands
        if self.widen:
            q, k = q.view(torch.uint8), k.view(torch.uint8)
        strides = (q.stride(0), q.stride(1), k.stride(0), weights.stride(0), out.stride(0))
        return (q, k, kv_scale, weights, ks, ke, out, *self.sizes, *strides)

    def build(self, arguments: tuple[Any, ...]) -> Built:
        """The kernel for an AMD arch, as Triton's launcher would specialise it on these arguments."""
        from lightning_indexer.backends.triton_portable.kernel import fp8_mqa_logits_kernel as kernel

        values = dict(zip(kernel.arg_names, (*arguments, *self.constants.values()), strict=True))
        facts = triton_amd.specialise(kernel, values, self.arch.name, self.options)
        return triton_amd.compile_triton(
            kernel, facts.signature, facts.constexprs, facts.attrs, self.arch.name, self.options
        )

    def _simulate(self, arguments: tuple[Any, ...]) -> None:
        from lightning_indexer.backends.triton_portable.kernel import fp8_mqa_logits_kernel as kernel

        built = self.build(arguments)
        values = dict(zip(kernel.arg_names, arguments, strict=False))
        given = [values[name] for name in built.argument_names]
        block = 64 * self.options["num_warps"]
        launcher_for(torch.device("cpu")).launch(built, self.grid, block, given, outputs=("out_ptr",))

    def _aligned(self, arguments: tuple[Any, ...]) -> bool:
        addresses = self.sizes[2]
        for tensor in arguments[:7]:
            addresses |= tensor.data_ptr()
        strides = arguments[11] | arguments[12] | arguments[13] | arguments[14] | arguments[15]
        return not (addresses | strides) & 15 and strides < 2**31


def launch(problem: Problem, operands: Operands, out: torch.Tensor, arch: Arch, config: TileConfig) -> None:
    """Runs the kernel with the tile sizes of ``config`` rather than the heuristic's."""
    Launch(problem, arch, config)(operands, out)


def constants(problem: Problem, config: TileConfig, widen: bool) -> dict[str, Any]:
    """The kernel's compile-time arguments, in the order of its signature."""
    return {
        "HEADS": problem.heads,
        "PADDED_HEADS": max(16, problem.heads),
        "HEAD_DIM": problem.head_dim,
        "BLOCK": config.block,
        "CLEAN": problem.clean_logits,
        "COMPRESSED": problem.compressed,
        "WIDEN": widen,
    }


def options(config: TileConfig, arch: Arch) -> dict[str, Any]:
    """The compiler's options. FMA fusion is asked for by name: from 3.10 on, Triton's default is not to fuse."""
    chosen: dict[str, Any] = {
        "num_warps": config.num_warps,
        "num_stages": config.num_stages,
        "enable_fp_fusion": True,
    }
    if arch.vendor == "amd" and config.waves_per_eu:
        chosen["waves_per_eu"] = config.waves_per_eu
    return chosen
