"""``triton-portable``: one Triton kernel for every arch that Triton compiles for. Gate and launch."""

from __future__ import annotations

import functools
import importlib.util
from typing import Any

import torch

from lightning_indexer import envs
from lightning_indexer.arch import Arch
from lightning_indexer.backends.triton_portable.config import TileConfig, heuristic
from lightning_indexer.problem import Operands, Problem

HEADS = (8, 16, 32, 64, 128)
HEAD_DIMS = (32, 64, 128)


class TritonPortable:
    name = "triton-portable"
    summary = "one Triton kernel for NVIDIA sm80 and newer and AMD gfx9/gfx12"

    def missing(self) -> str | None:
        return _missing()

    def supports(self, problem: Problem, arch: Arch) -> str | None:
        if arch.vendor == "cpu" and not envs.triton_interprets():
            return "Triton has no CPU target (TRITON_INTERPRET=1 runs its interpreter, for tests)"
        if not arch.listed:
            return f"{arch.name} is not a known arch; Triton needs NVIDIA sm80 or newer, or AMD gfx90a or newer"
        if problem.heads not in HEADS:
            return f"H={problem.heads} is not one of {', '.join(map(str, HEADS))}"
        if problem.head_dim not in HEAD_DIMS:
            return f"D={problem.head_dim} is not one of {', '.join(map(str, HEAD_DIMS))}"
        return None

    def run(self, problem: Problem, operands: Operands, out: torch.Tensor, arch: Arch) -> None:
        launch(problem, operands, out, arch, heuristic(problem, arch))


def launch(problem: Problem, operands: Operands, out: torch.Tensor, arch: Arch, config: TileConfig) -> None:
    """Launches the kernel on the current stream with the tile sizes of ``config``."""
    from lightning_indexer.backends.triton_portable.kernel import fp8_mqa_logits_kernel

    q, k, kv_scale, weights, ks, ke = operands
    widen = arch.fp8 == "none"
    if widen:
        q, k = q.view(torch.uint8), k.view(torch.uint8)
    grid = (problem.rows * -(-problem.width // config.chunk),)
    with torch.cuda.device_of(q):  # type: ignore[no-untyped-call]
        fp8_mqa_logits_kernel[grid](
            q, k, kv_scale, weights, ks, ke, out,
            problem.rows, problem.keys, problem.width, config.chunk,
            q.stride(0), q.stride(1), k.stride(0), weights.stride(0), out.stride(0),
            **constants(problem, config, widen),
            **options(config, arch),
        )  # fmt: skip


def constants(problem: Problem, config: TileConfig, widen: bool) -> dict[str, Any]:
    """The kernel's compile-time arguments."""
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


@functools.cache
def _missing() -> str | None:
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed: pip install 'lightning-indexer[triton]'"
    return None
