"""``gluon-gfx950``: the Gluon kernel of gfx950. Gate and launch.

Triton's runtime launches it on a GPU. On the CPU it runs compiled for gfx950 in the simulator (see ``launcher``).
"""

from __future__ import annotations

import functools
import importlib.util
from pathlib import Path
from typing import Any

import torch

from lightning_indexer.arch import Arch
from lightning_indexer.backends.gate import unsupported_shape
from lightning_indexer.backends.gluon_gfx950.config import WAVES, GluonConfig, heuristic, is_wide, neighbours
from lightning_indexer.backends.triton_launch import device_guard, operands_like
from lightning_indexer.launcher import launcher_for
from lightning_indexer.problem import Operands, Problem
from lightning_indexer.toolchain import triton_amd
from lightning_indexer.toolchain.built import Built

HEADS = (8, 16, 32, 64, 128)
HEAD_DIMS = (32, 64, 128)
MAX_POSITION = 2**31 - 2**14


class GluonGfx950:
    name = "gluon-gfx950"
    summary = "Gluon kernel for AMD gfx950: rows share key tiles that are copied to LDS ahead of their use"

    def missing(self) -> str | None:
        return _missing()

    def supports(self, problem: Problem, arch: Arch) -> str | None:
        if arch.name != "gfx950":
            return f"copies to LDS of 16 bytes a lane and matrix instructions 64 deep are gfx950's, not {arch.name}'s"
        if not problem.aligned:
            return "rows of q and k have to start on 16 bytes, which a lane copies at a time"
        if problem.keys > MAX_POSITION:
            return f"N={problem.keys} is beyond {MAX_POSITION}: the end of the last chunk has to be an int32"
        return unsupported_shape(problem, HEADS, HEAD_DIMS)

    def prepare(self, problem: Problem, arch: Arch) -> Launch:
        return Launch(problem, arch, heuristic(problem, arch))

    def candidates(self, problem: Problem, arch: Arch) -> list[tuple[object, Launch]]:
        return [(config, Launch(problem, arch, config)) for config in neighbours(problem, arch)]

    def build(self, problem: Problem, arch: Arch) -> Built:
        """The kernel of this problem, compiled without a device; operands as torch allocates them."""
        launch = Launch(problem, arch, heuristic(problem, arch))
        return launch.build(launch.arguments(*operands_like(problem, arch)))


class Launch:
    """The kernel for one problem and one tile config; called with the tensors, it runs on the current stream."""

    def __init__(self, problem: Problem, arch: Arch, config: GluonConfig, *, wide: bool = False) -> None:
        """``wide``: with 64-bit pointers where buffer instructions would do.

        Raises:
            ValueError: a config whose tiles do not fit into LDS.
        """
        if config.lds_bytes(problem.head_dim) > arch.lds:
            raise ValueError(
                f"config: got {config}, {config.lds_bytes(problem.head_dim)} bytes of LDS at D={problem.head_dim}, "
                f"expected at most {arch.lds}"
            )
        self.problem, self.arch, self.config, self.wide = problem, arch, config, wide
        self.sizes = (problem.rows, problem.keys, problem.width, config.chunk)
        self.grid = (-(-problem.rows // config.rows) * -(-problem.keys // config.chunk), 1, 1)
        self.options: dict[str, Any] = {
            "num_warps": WAVES, "waves_per_eu": config.waves_per_eu, "enable_fp_fusion": True,
        }  # fmt: skip

    def __call__(self, operands: Operands, out: torch.Tensor) -> None:
        from lightning_indexer.backends.gluon_gfx950.kernel import fp8_mqa_logits_kernel as kernel

        arguments = self.arguments(operands, out)
        if out.device.type == "cpu":
            built = self.build(arguments)
            values = dict(zip(kernel.arg_names, arguments, strict=False))
            given = [values[name] for name in built.argument_names]
            launcher_for(out.device).launch(built, self.grid, 64 * WAVES, given, outputs=("out_ptr",))
            return
        with device_guard(out.device), triton_amd.repaired(self.arch.name):
            kernel[self.grid](*arguments, **self.constants(arguments), **self.options)

    def arguments(self, operands: Operands, out: torch.Tensor) -> tuple[Any, ...]:
        """What the kernel is given at run time, in the order of its signature."""
        q, k, kv_scale, weights, ks, ke = operands
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
        from lightning_indexer.backends.gluon_gfx950.kernel import fp8_mqa_logits_kernel as kernel

        values = dict(zip(kernel.arg_names, (*arguments, *self.constants(arguments).values()), strict=True))
        facts = triton_amd.specialise(kernel, values, self.arch.name, self.options)
        return triton_amd.compile_triton(
            kernel, facts.signature, facts.constexprs, facts.attrs, self.arch.name, self.options, gluon=True
        )


@functools.cache
def _missing() -> str | None:
    spec = importlib.util.find_spec("triton")
    if spec is None:
        return "Triton is not installed: pip install 'lightning-indexer[triton]'"
    gluon = Path("experimental/gluon/language/amd/cdna4")
    if not any((Path(place) / gluon).exists() for place in spec.submodule_search_locations or ()):
        return "Triton has no Gluon for gfx950: pip install 'triton>=3.6'"
    return None
