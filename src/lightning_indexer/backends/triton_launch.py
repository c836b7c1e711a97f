"""What the backends that Triton's runtime launches share."""

from __future__ import annotations

import contextlib

import torch

from lightning_indexer.arch import Arch
from lightning_indexer.problems.mqa_logits import MqaLogitsCall, MqaLogitsProblem, row_stride


def within_2gib(tensor: torch.Tensor) -> bool:
    """What Triton's AMD backend asks of a pointer: buffer instructions reach the whole of its storage."""
    return tensor.untyped_storage().size() < 2**31


def call_like(problem: MqaLogitsProblem, arch: Arch) -> MqaLogitsCall:
    """A call whose operands and result have no memory, contiguous, in the dialect that the arch reads if fp8."""
    fp8 = torch.float8_e4m3fnuz if arch.fp8 == "fnuz" else torch.float8_e4m3fn
    dtype = fp8 if problem.is_fp8 else torch.bfloat16

    def empty(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    rows, keys, heads, head_dim = problem.rows, problem.keys, problem.heads, problem.head_dim
    out = empty(rows, row_stride(problem.width, problem.out_dtype), dtype=problem.out_dtype)
    return MqaLogitsCall(
        empty(rows, heads, head_dim, dtype=dtype), empty(keys, head_dim, dtype=dtype), empty(keys), empty(rows, heads),
        empty(rows, dtype=torch.int32), empty(rows, dtype=torch.int32), problem.clean_logits, problem.max_seqlen_k,
        problem.out_dtype, out[:, : problem.width],
    )  # fmt: skip


def device_guard(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Makes ``device`` current where another one is; free where it already is."""
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        return _NOTHING
    return torch.cuda.device(device)


_NOTHING = contextlib.nullcontext()
