"""FP8 MQA logits in Gluon: gate and launch."""

from __future__ import annotations

from typing import Any

from lightning_indexer.amd import launcher_for, triton_amd
from lightning_indexer.amd.built import Built
from lightning_indexer.arch import Arch
from lightning_indexer.backends.gate import needs_fp8, unsupported_grid, unsupported_shape
from lightning_indexer.backends.gluon_gfx950.config import WAVES, GluonConfig, heuristic, is_wide, neighbours, variants
from lightning_indexer.backends.triton_launch import call_like, device_guard
from lightning_indexer.problems.mqa_logits import MqaLogitsCall, MqaLogitsProblem

HEADS = (8, 16, 32, 64, 128)
HEAD_DIMS = (32, 64, 128)
MAX_POSITION = 2**31 - 2**14


class MqaLogits:
    config = staticmethod(heuristic)
    neighbours = staticmethod(neighbours)
    variants = staticmethod(variants)

    def supports(self, problem: MqaLogitsProblem, arch: Arch) -> str | None:
        if arch.name != "gfx950":
            return f"copies to LDS of 16 bytes a lane and matrix instructions 64 deep are gfx950's, not {arch.name}'s"
        if (reason := needs_fp8(problem)) is not None:
            return reason
        if not problem.aligned:
            return "rows of q and k have to start on 16 bytes, which a lane copies at a time"
        if problem.keys > MAX_POSITION:
            return f"N={problem.keys} is beyond {MAX_POSITION}: the end of the last chunk has to be an int32"
        if (reason := unsupported_shape(problem, HEADS, HEAD_DIMS)) is not None:
            return reason
        config = heuristic(problem, arch)
        return unsupported_grid(-(-problem.rows // config.rows) * -(-problem.keys // config.chunk), 64 * WAVES)

    def launch(self, problem: MqaLogitsProblem, arch: Arch, config: GluonConfig) -> Launch:
        return Launch(problem, arch, config)

    def build(self, problem: MqaLogitsProblem, arch: Arch) -> Built:
        """The kernel of this problem, compiled without a device; operands as torch allocates them."""
        launch = Launch(problem, arch, heuristic(problem, arch))
        return launch.build(launch.arguments(call_like(problem, arch)))


class Launch:
    """The kernel for one problem and one tile config; called with the tensors, it runs on the current stream."""

    def __init__(self, problem: MqaLogitsProblem, arch: Arch, config: GluonConfig, *, wide: bool = False) -> None:
        """``wide``: with 64-bit pointers where buffer instructions would do.

        Raises:
            ValueError: a config whose tiles do not fit into LDS.
        """
        limit = arch.shared_bytes
        if config.lds_bytes(problem.head_dim) > limit:
            raise ValueError(
                f"config: got {config}, {config.lds_bytes(problem.head_dim)} bytes of LDS at D={problem.head_dim}, "
                f"expected at most {limit}"
            )
        self.problem, self.arch, self.config, self.wide = problem, arch, config, wide
        self.sizes = (problem.rows, problem.keys, problem.width, config.chunk)
        self.lines = -(-problem.keys // config.chunk)  # of row groups, one after another in x
        self.grid = (-(-problem.rows // config.rows) * self.lines, 1, 1)
        self.options: dict[str, Any] = {
            "num_warps": WAVES, "waves_per_eu": config.waves_per_eu, "enable_fp_fusion": True,
        }  # fmt: skip

    def __call__(self, call: MqaLogitsCall) -> None:
        from lightning_indexer.backends.gluon_gfx950.mqa_logits_kernel import fp8_mqa_logits_kernel as kernel

        arguments, device = self.arguments(call), call.q.device
        if device.type == "cpu":
            built = self.build(arguments)
            values = dict(zip(kernel.arg_names, arguments, strict=False))
            given = [values[name] for name in built.argument_names]
            launcher_for(device).launch(built, self.grid, self.arch.wave * WAVES, given, outputs=("out_ptr",))
            return
        with device_guard(device), triton_amd.repaired(self.arch.name):
            kernel[self.grid](*arguments, **self.constants(arguments), **self.options)

    def arguments(self, call: MqaLogitsCall) -> tuple[Any, ...]:
        """What the kernel is given at run time, in the order of its signature."""
        q, k, kv_scale, weights, ks, ke = call[:6]
        out = call.result
        strides = (q.stride(0), q.stride(1), k.stride(0), weights.stride(0), out.stride(0))
        return (q, k, kv_scale, weights, ks, ke, out, *self.sizes, *strides)

    def constants(self, arguments: tuple[Any, ...]) -> dict[str, Any]:
        """The kernel's compile-time arguments for these, in the order of its signature."""
        problem, config = self.problem, self.config
        return {
            "HEADS": problem.heads,
            "HEAD_DIM": problem.head_dim,
            "ROWS": config.rows,
            "ROW_WARPS": config.row_warps,
            "KEY_WARPS": config.key_warps,
            "STEP": config.step,
            "BLOCK": config.block,
            "BUFFERS": config.buffers,
            "CLEAN": problem.clean_logits,
            "COMPRESSED": problem.compressed,
            "WIDE": self.wide or is_wide(problem, config, arguments[-5:]),
        }

    def build(self, arguments: tuple[Any, ...]) -> Built:
        """The kernel as Triton's launcher would specialise it on these arguments."""
        from lightning_indexer.backends.gluon_gfx950.mqa_logits_kernel import fp8_mqa_logits_kernel as kernel

        values = dict(zip(kernel.arg_names, (*arguments, *self.constants(arguments).values()), strict=True))
        facts = triton_amd.specialise(kernel, values, self.arch.name, self.options)
        return triton_amd.compile_triton(
            kernel, facts.signature, facts.constexprs, facts.attrs, self.arch.name, self.options, gluon=True
        )
