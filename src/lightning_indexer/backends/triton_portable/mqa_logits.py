"""FP8 MQA logits in Triton: gate and launch."""

from __future__ import annotations

from typing import Any

import torch

from lightning_indexer import envs
from lightning_indexer.amd import launcher_for, simulates, triton_amd
from lightning_indexer.amd.built import Built
from lightning_indexer.arch import Arch
from lightning_indexer.backends.gate import unsupported_grid, unsupported_shape
from lightning_indexer.backends.triton_launch import call_like, device_guard, within_2gib
from lightning_indexer.backends.triton_portable.config import TileConfig, heuristic, neighbours, variants
from lightning_indexer.problems.mqa_logits import MqaLogitsCall, MqaLogitsProblem

HEADS = (8, 16, 32, 64, 128)
HEAD_DIMS = (32, 64, 128)
# Chunks are at most 2^14 columns, so that the end of the last one, and what a pipeline looks ahead, stay int32.
MAX_POSITION = 2**31 - 2**14


class MqaLogits:
    config = staticmethod(heuristic)
    neighbours = staticmethod(neighbours)
    variants = staticmethod(variants)

    def supports(self, problem: MqaLogitsProblem, arch: Arch) -> str | None:
        if arch.vendor == "cpu" and not envs.triton_interprets():
            return "Triton has no CPU target (TRITON_INTERPRET=1 runs its interpreter, for tests)"
        if not arch.listed:
            return f"{arch.name} is not a known arch; Triton needs NVIDIA sm80 or newer, or AMD gfx90a or newer"
        if max(problem.keys, problem.width) > MAX_POSITION:
            return f"N={problem.keys} is beyond {MAX_POSITION}: the end of the last chunk has to be an int32"
        if (reason := unsupported_shape(problem, HEADS, HEAD_DIMS)) is not None:
            return reason
        config = heuristic(problem, arch)
        return unsupported_grid(problem.rows * -(-problem.width // config.chunk), 64 * config.num_warps, arch.vendor)

    def launch(self, problem: MqaLogitsProblem, arch: Arch, config: TileConfig) -> Launch:
        return Launch(problem, arch, config)

    def build(self, problem: MqaLogitsProblem, arch: Arch) -> Built:
        """The kernel of this problem for an AMD arch, compiled without a device; operands as torch allocates them."""
        launch = Launch(problem, arch, heuristic(problem, arch))
        return launch.build(launch.arguments(call_like(problem, arch)))


class Launch:
    """The kernel for one problem and one tile config; called with the tensors, it runs on the current stream."""

    def __init__(self, problem: MqaLogitsProblem, arch: Arch, config: TileConfig) -> None:
        self.arch, self.block = arch, config.block
        self.sizes = (problem.rows, problem.keys, problem.width, config.chunk)
        self.lines = -(-problem.width // config.chunk)  # of rows, one after another in x
        self.grid = (problem.rows * self.lines, 1, 1)
        self.widen = arch.fp8 == "none" and problem.is_fp8
        self.constants = constants(problem, config, self.widen)
        self.options = options(config, arch)
        self.compiled: dict[object, Any] = {}  # by what `_key` says

    def __call__(self, call: MqaLogitsCall) -> None:
        from lightning_indexer.backends.triton_portable.mqa_logits_kernel import fp8_mqa_logits_kernel

        device = call.q.device
        if device.type == "cpu" and call.q.dtype is torch.bfloat16 and not simulates(self.arch):
            # Triton's interpreter multiplies the bits of bfloat16; float32 of them has the same products.
            call = call._replace(q=call.q.float(), k=call.k.float())
        arguments = self.arguments(call)
        if device.type == "cpu" and simulates(self.arch):
            self._simulate(arguments)
            return
        key = self._key(arguments)
        with device_guard(device):
            if key is not None and (compiled := self.compiled.get(key)) is not None:
                # Half the host time of the line below, which looks at every argument to find the same kernel.
                compiled[self.grid](*arguments, *self.constants.values())
            else:
                with triton_amd.repaired(self.arch.name):
                    compiled = fp8_mqa_logits_kernel[self.grid](*arguments, **self.constants, **self.options)
                if key is not None and compiled is not None:  # the interpreter has nothing to keep
                    self.compiled[key] = compiled

    def arguments(self, call: MqaLogitsCall) -> tuple[Any, ...]:
        """What the kernel is given at run time, in the order of its signature."""
        q, k, kv_scale, weights, ks, ke = call[:6]
        out = call.result
        if self.widen:
            q, k = q.view(torch.uint8), k.view(torch.uint8)
        # Offsets in a tile of keys have the bits of the stride: 32 up to here.
        if k.shape[0] > 1 and 2**31 // self.block <= k.stride(0) < 2**31:
            k = k.contiguous()
        strides = (q.stride(0), q.stride(1), k.stride(0), weights.stride(0), out.stride(0))
        return (q, k, kv_scale, weights, ks, ke, out, *self.sizes, *strides)

    def build(self, arguments: tuple[Any, ...]) -> Built:
        """The kernel for an AMD arch, as Triton's launcher would specialise it on these arguments."""
        from lightning_indexer.backends.triton_portable.mqa_logits_kernel import fp8_mqa_logits_kernel as kernel

        values = dict(zip(kernel.arg_names, (*arguments, *self.constants.values()), strict=True))
        facts = triton_amd.specialise(kernel, values, self.arch.name, self.options)
        return triton_amd.compile_triton(
            kernel, facts.signature, facts.constexprs, facts.attrs, self.arch.name, self.options
        )

    def _simulate(self, arguments: tuple[Any, ...]) -> None:
        from lightning_indexer.backends.triton_portable.mqa_logits_kernel import fp8_mqa_logits_kernel as kernel

        key = self._key(arguments)
        if key is None or (built := self.compiled.get(key)) is None:
            built = self.build(arguments)
            if key is not None:
                self.compiled[key] = built
        values = dict(zip(kernel.arg_names, arguments, strict=False))
        given = [values[name] for name in built.argument_names]
        block = self.arch.wave * self.options["num_warps"]
        launcher_for(torch.device("cpu")).launch(built, self.grid, block, given, outputs=("out_ptr",))

    def _key(self, arguments: tuple[Any, ...]) -> object | None:
        """What Triton specialises on that differs between calls of one problem; None where only Triton can tell.

        Where addresses and strides all lie on 16: the device, and for AMD which tensors lie within 2 GiB, where buffer
        instructions reach.
        """
        bits = self.sizes[2]
        for tensor in arguments[:7]:
            bits |= tensor.data_ptr()
        strides = arguments[11] | arguments[12] | arguments[13] | arguments[14] | arguments[15]
        if (bits | strides) & 15 or strides >= 2**31:
            return None
        device = arguments[0].device
        return device if self.arch.vendor != "amd" else (device, *map(within_2gib, arguments[:7]))


def constants(problem: MqaLogitsProblem, config: TileConfig, widen: bool) -> dict[str, Any]:
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
