"""FP8 MQA logits in FlyDSL for CDNA3 and CDNA4: gate and launch."""

from __future__ import annotations

import functools
from dataclasses import asdict

from lightning_indexer.amd import flydsl, launcher_for
from lightning_indexer.amd.built import Built
from lightning_indexer.arch import Arch
from lightning_indexer.backends.flydsl_cdna.config import FlyConfig, heuristic, layout, neighbours
from lightning_indexer.backends.gate import needs_fp8, unsupported_grid, unsupported_shape
from lightning_indexer.problems.mqa_logits import MqaLogitsCall, MqaLogitsProblem

HEADS = (32, 64, 128)
HEAD_DIMS = (64, 128)
MAX_KEYS = 2**29 - 1  # bytes to a key's scale, and to a column, fit into 32 bits with a sign
MAX_KEY_STRIDE = 2**24 - 1  # bytes; those of a tile, at most 256 keys, fit into 32 bits


class MqaLogits:
    config = staticmethod(heuristic)
    neighbours = staticmethod(neighbours)

    def supports(self, problem: MqaLogitsProblem, arch: Arch) -> str | None:
        if "32x32x16" not in arch.matrix or arch.wave != 64:
            return f"needs CDNA3 or CDNA4 and its fp8 matrix instruction of 32x32x16, not {arch.name}'s"
        if (reason := needs_fp8(problem)) is not None:
            return reason
        if not problem.aligned:
            return "rows of q and k have to start on 16 bytes, for loads of 16 bytes"
        for name, size in (("N", problem.keys), ("max_seqlen_k", problem.width)):
            if size > MAX_KEYS:
                return f"{name}={size} is more than {MAX_KEYS}: offsets of scales and columns have 32 bits"
        # One row, four waves: what `neighbours` offers at most.
        return unsupported_shape(problem, HEADS, HEAD_DIMS) or unsupported_grid(problem.rows, 64 * 4)

    def launch(self, problem: MqaLogitsProblem, arch: Arch, config: FlyConfig) -> Launch:
        return Launch(problem, arch, config)

    def build(self, problem: MqaLogitsProblem, arch: Arch) -> Built:
        """The kernel of this problem, compiled without a device."""
        return Launch(problem, arch, heuristic(problem, arch)).built

    def precompile(self, problem: MqaLogitsProblem, arch: Arch) -> str:
        return self.build(problem, arch).kernel


class Launch:
    """The kernel for one problem and one config; called with the tensors, it runs on the current stream."""

    def __init__(self, problem: MqaLogitsProblem, arch: Arch, config: FlyConfig) -> None:
        self.problem, self.arch, self.config = problem, arch, config
        self.layout = layout(problem, arch, config)
        self.grid = (-(-problem.rows // config.rows), -(-problem.keys // config.chunk), 1)

    @functools.cached_property
    def built(self) -> Built:
        parameters = {"name": self.layout.name, **asdict(self.layout)}
        return flydsl.compile_flydsl(_FACTORY, parameters, self.arch.name, argument_names=_ARGUMENTS)

    def __call__(self, call: MqaLogitsCall) -> None:
        q, k, kv_scale, weights, ks, ke = call[:6]
        out = call.result
        problem, size = self.problem, out.element_size()
        k_stride = k.stride(0) if problem.keys > 1 else 0
        if k_stride > MAX_KEY_STRIDE:
            k = k.contiguous()
            k_stride = k.stride(0)
        sizes = (problem.rows, problem.keys, problem.width, self.config.chunk)
        # Strides in bytes
        strides = (q.stride(0), q.stride(1), k_stride, 4 * weights.stride(0), size * out.stride(0))
        launcher_for(out.device).launch(
            self.built, self.grid, self.layout.threads,
            (q, k, kv_scale, weights, ks, ke, out, *sizes, *strides), outputs=("out",),
        )  # fmt: skip


_FACTORY = "lightning_indexer.backends.flydsl_cdna.mqa_logits_kernel:make"
_ARGUMENTS = (
    "q", "k", "kv_scale", "weights", "ks", "ke", "out",
    "rows", "keys", "width", "chunk", "q_row", "q_head", "k_row", "w_row", "out_row",
)  # fmt: skip
