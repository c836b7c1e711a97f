"""How far a right kernel of ``fp8_mqa_logits`` may be from float32, by what its arithmetic gives.

Two measures of one result: ``calc_diff`` of all logits, and the error of each one. A logit is a sum over heads with
weights of both signs, so its error is held against what it sums, |kv_scale| * sum_h |w[h]| * |q[h] . k|, which no
cancellation makes small; and, where the result is rounded, against itself.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from lightning_indexer.arch import Arch
from lightning_indexer.problems.mqa_logits import MAX_DIFF


class Bounds(NamedTuple):
    """What is allowed.

    Attributes:
        diff: calc_diff against float32 on the dequantised operands.
        of_sum: error of a logit, in parts of what it sums.
        of_value: and in parts of itself, beside.
    """

    diff: float
    of_sum: float
    of_value: float


# Products and sums in float32, in another order: on a CPU, and in the simulator, whose matrix instructions are exact.
# bfloat16 results are half a step off, 2^-8 of themselves at most.
FLOAT32 = {torch.float32: Bounds(1e-10, 2e-6, 0.0), torch.bfloat16: Bounds(3e-6, 2e-6, 2**-8)}
# Triton's interpreter truncates to bfloat16, where devices round: a whole step.
INTERPRETED = {torch.float32: FLOAT32[torch.float32], torch.bfloat16: Bounds(1e-5, 2e-6, 2**-7)}
# Every head's part rounded to bfloat16 before the sum: half a step of each, and of its weight.
BFLOAT16_SUMS = {torch.float32: Bounds(MAX_DIFF[torch.float32], 2**-8, 0.0)}
# Tensor cores that keep about 14 bits of a sum (Hopper's fp8), and devices that this project has not measured.
DEVICES = {
    torch.float32: Bounds(MAX_DIFF[torch.float32], 2**-9, 0.0),
    torch.bfloat16: Bounds(MAX_DIFF[torch.bfloat16], 2**-9, 2**-8),
}


def bounds_of(
    arch: Arch, dtype: torch.dtype, *, simulated: bool = False, interpreted: bool = False, bfloat16_sums: bool = False
) -> Bounds:
    """The bounds of a kernel's results.

    Args:
        arch: where it runs.
        dtype: of the result.
        simulated: in the simulator.
        interpreted: in Triton's interpreter.
        bfloat16_sums: with a config that rounds before it sums over heads.
    """
    if bfloat16_sums:
        return BFLOAT16_SUMS[dtype]
    if interpreted:
        return INTERPRETED[dtype]
    return (FLOAT32 if simulated or arch.vendor == "cpu" else DEVICES)[dtype]
