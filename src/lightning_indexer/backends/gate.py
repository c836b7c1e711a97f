"""What the gates of several backends ask in the same words."""

from __future__ import annotations

from lightning_indexer.problems.mqa_logits import MqaLogitsProblem


def needs_fp8(problem: MqaLogitsProblem) -> str | None:
    """None for fp8 operands, else the sentence of a kernel that reads nothing else."""
    return None if problem.is_fp8 else "q and k are bfloat16, and this kernel reads fp8"


def unsupported_shape(problem: MqaLogitsProblem, heads: tuple[int, ...], head_dims: tuple[int, ...]) -> str | None:
    """None, or the sentence that says which of H and D a kernel is not built for."""
    if problem.heads not in heads:
        return f"H={problem.heads} is not one of {', '.join(map(str, heads))}"
    if problem.head_dim not in head_dims:
        return f"D={problem.head_dim} is not one of {', '.join(map(str, head_dims))}"
    return None


def unsupported_grid(workgroups: int, threads: int, vendor: str = "amd") -> str | None:
    """None, or the sentence that says that a grid, along x, has more workgroups or lanes than a launch can have."""
    if vendor == "amd" and workgroups * threads >= 2**32:
        return f"{workgroups} workgroups of {threads} lanes are not fewer than 2^32 lanes, which is what HIP launches"
    if workgroups >= 2**31:
        return f"{workgroups} workgroups are not fewer than 2^31"
    return None
