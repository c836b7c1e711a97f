"""FP8 MQA logits in HIP C++ for CDNA4: gate and launch."""

from __future__ import annotations

import functools

import torch

from lightning_indexer import packages
from lightning_indexer.amd import clang as amdgpu_clang
from lightning_indexer.amd import launcher_for
from lightning_indexer.amd.built import Built
from lightning_indexer.arch import Arch
from lightning_indexer.backends.gate import needs_fp8, unsupported_grid, unsupported_shape
from lightning_indexer.backends.hip_gfx950.config import (
    TILE,
    KernelConfig,
    Tunables,
    heuristic,
    neighbours,
    variants,
)
from lightning_indexer.problems.mqa_logits import MqaLogitsCall, MqaLogitsProblem

SOURCES = {
    "stream": packages.beside(__name__, "mqa_logits.hip"),
    "lds": packages.beside(__name__, "mqa_logits_lds.hip"),
}
# No NaN reaches a result that is used: so the ReLU is one v_max_f32. The vectoriser would pair the rows' last sums, and
# move registers for it.
FLAGS = ("-fno-honor-nans", "-fno-slp-vectorize")
HEADS = (32, 64)
HEAD_DIMS = (128,)
# Within the 32 bits of a buffer's offsets: a tile of the second of two rows of logits; the keys of a tile.
MAX_ROW_STRIDE = 2**30 - 2 * TILE
MAX_KEY_STRIDE = 2**26


def is_supported(num_heads: int, head_dim: int) -> bool:
    """True for the heads and channels that there is a kernel for; a caller sends the others elsewhere."""
    return num_heads in HEADS and head_dim in HEAD_DIMS


class MqaLogits:
    """``tunables``: kept in place of the heuristic's choices, for measurements."""

    neighbours = staticmethod(neighbours)
    variants = staticmethod(variants)

    def __init__(self, tunables: Tunables | None = None) -> None:
        self.tunables = tunables

    def supports(self, problem: MqaLogitsProblem, arch: Arch) -> str | None:
        if arch.name != "gfx950":
            return f"needs gfx950 (MI350X, MI355X), this is {arch.name}"
        if not is_supported(problem.heads, problem.head_dim):
            return unsupported_shape(problem, HEADS, HEAD_DIMS)
        if problem.compressed:
            return "compressed logits are not built: a pair of rows would start at different columns"
        if problem.out_dtype is not torch.float32:
            return f"writes float32 logits, {problem.out_dtype} is not built"
        if (reason := needs_fp8(problem)) is not None:
            return reason
        if not problem.aligned:
            return "rows of q and k must start on 16-byte boundaries for 16-byte loads"
        if problem.width > MAX_ROW_STRIDE:
            return f"N={problem.keys} is above {MAX_ROW_STRIDE}: a row of logits is more than 32-bit offsets reach"
        return unsupported_grid(-(-problem.rows // 2), 64 * 8)  # of the narrowest blocks of the most waves

    def config(self, problem: MqaLogitsProblem, arch: Arch) -> KernelConfig:
        return heuristic(problem, arch, self.tunables)

    def launch(self, problem: MqaLogitsProblem, arch: Arch, config: KernelConfig) -> Launch:
        return Launch(problem, config)

    def build(self, problem: MqaLogitsProblem, arch: Arch) -> Built:
        """The kernel of this problem, compiled without a device."""
        return compile_kernel(heuristic(problem, arch, self.tunables))

    def precompile(self, problem: MqaLogitsProblem, arch: Arch) -> str:
        return self.build(problem, arch).kernel


class Launch:
    """The kernel for one problem and one config; called with the tensors, it runs on the current stream."""

    def __init__(self, problem: MqaLogitsProblem, config: KernelConfig) -> None:
        self.config = config
        self.rows, self.keys = problem.rows, problem.keys
        self.grid = config.grid(problem.rows)

    @functools.cached_property
    def built(self) -> Built:
        return compile_kernel(self.config)

    def __call__(self, call: MqaLogitsCall) -> None:
        q, k, kv_scale, weights, ks, ke = call[:6]
        out = call.result
        # Strides that no gate sees, and that offsets do not reach: through a copy.
        if k.stride(0) > MAX_KEY_STRIDE and self.keys > 1:
            k = k.contiguous()
        if out.stride(0) > MAX_ROW_STRIDE and self.rows > 1:
            near = out.contiguous()
            self(call._replace(k=k, out=near))
            out.copy_(near)
            return
        k_stride, out_stride = k.stride(0) if self.keys > 1 else 0, out.stride(0) if self.rows > 1 else 0
        strides = (q.stride(0), q.stride(1), k_stride, weights.stride(0), out_stride)
        scalars = (self.rows, self.keys, self.grid[0], self.grid[1], int(bool(self.config.reverse_rows)))
        launcher_for(out.device).launch(
            self.built, self.grid, 64 * self.config.num_warps,
            (q, k, kv_scale, weights, ks, ke, out, *strides, *scalars), outputs=("out",),
        )  # fmt: skip


def compile_kernel(config: KernelConfig, flags: tuple[str, ...] = FLAGS) -> Built:
    """The kernel of a config, from the cache where it is there."""
    return amdgpu_clang.compile_hip(SOURCES[config.strategy], "gfx950", config.macros(), flags)
