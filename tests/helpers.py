"""What the tests share: calls that write into guarded buffers, and the comparison with the reference."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from lightning_indexer import Arch, MqaLogitsProblem, calc_diff, reference_logits
from lightning_indexer.check.cases import Form, Inputs
from lightning_indexer.check.guarded import GuardedOutput
from lightning_indexer.selection import registry

_ROOT = Path(__file__).resolve().parents[1]
# PYTHONPATH of processes that run this tree's code.
SOURCES = os.pathsep.join(str(_ROOT / folder) for folder in ("src", "packages/cdna-sim/src"))
CPU = torch.device("cpu")
INT32_MIN, INT32_MAX = -(2**31), 2**31 - 1


class Tolerance(NamedTuple):
    """``diff``: calc_diff of all logits. ``relative``: error of each logit, in parts of itself."""

    diff: float
    relative: float


# calc_diff against float32 on the dequantised operands that any backend has to keep, docs/semantics.md.
MAX_DIFF = {torch.float32: 5e-6, torch.bfloat16: 3e-5}
# On a CPU products and sums are float32, so that only the order of the sums differs; bfloat16 is half a step more.
ON_CPU = {torch.float32: Tolerance(1e-12, 2**-23), torch.bfloat16: Tolerance(3e-6, 2**-8)}
# Triton's interpreter truncates to bfloat16, where GPUs round: a whole step.
INTERPRETED = {torch.float32: Tolerance(1e-12, 2**-23), torch.bfloat16: Tolerance(1e-5, 2**-7)}
# Error of each logit in parts of the largest one: sums over H * D products that may cancel.
MAX_ERROR_OF_SUMS = 2e-6

FORMS_AND_DTYPES = [
    (form, dtype) for form in ("clean", "noclean", "compressed") for dtype in (torch.float32, torch.bfloat16)
]


def replace_launches(
    monkeypatch: pytest.MonkeyPatch, launch: Callable[[str, MqaLogitsProblem, Arch], registry.Run]
) -> None:
    """What backends are asked to launch from now on is ``launch(backend's name, problem, arch)``."""
    for name, kernel in registry.kernels().items():
        monkeypatch.setattr(kernel, "launch", lambda problem, arch, config, name=name: launch(name, problem, arch))
    registry.changed()


def int32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def bits(x: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor, for comparisons that tell NaNs and zeros apart."""
    return x.contiguous().view(torch.uint8)


def same_bits(x: torch.Tensor, y: torch.Tensor) -> bool:
    return x.shape == y.shape and x.dtype == y.dtype and torch.equal(bits(x), bits(y))


def expected_logits(
    q: torch.Tensor,
    k: torch.Tensor,
    kv_scale: torch.Tensor,
    weights: torch.Tensor,
    ks: torch.Tensor,
    ke: torch.Tensor,
    width: int = 0,
) -> torch.Tensor:
    """The reference, [M, N]; or with a width, its compressed form [M, width] with ``-inf`` outside the windows."""
    logits = reference_logits(q, (k, kv_scale), weights, ks, ke)
    if not width:
        return logits
    positions = ks.long()[:, None] + torch.arange(width)
    exists = (positions >= 0) & (positions < k.shape[0])
    return logits.gather(1, positions.clamp(0, k.shape[0] - 1)).masked_fill(~exists, float("-inf"))


def expected_for(inputs: Inputs, ks: torch.Tensor, ke: torch.Tensor, width: int = 0) -> torch.Tensor:
    return expected_logits(inputs.q_fp8, inputs.k_fp8, inputs.kv_scale, inputs.weights, ks, ke, width)


def assert_matches(
    result: torch.Tensor,
    expected: torch.Tensor,
    *,
    clean: bool,
    tolerance: dict[torch.dtype, Tolerance] = ON_CPU,
) -> None:
    """``expected`` holds ``-inf`` outside the windows; there, an unclean result may hold anything."""
    assert result.shape == expected.shape
    inside = expected != float("-inf")
    if clean:
        assert torch.equal(result == float("-inf"), ~inside), "the -inf mask differs"
    assert bool(result[inside].isfinite().all()), "a logit inside a window is not finite"
    assert not bool((torch.signbit(result) & (result == 0))[inside].any()), "-0.0 inside a window"
    diff = calc_diff(result, expected, inside)
    assert diff < tolerance[result.dtype].diff, f"calc_diff {diff}"
    if bool(inside.any()):
        error = (result.double() - expected.double())[inside].abs()
        value = expected.double()[inside].abs()
        allowed = tolerance[result.dtype].relative * value + MAX_ERROR_OF_SUMS * value.max()
        assert bool((error <= allowed).all()), f"one logit is off by {(error - allowed).max()} more than it may be"


def check_guarded(
    run: Callable[[torch.Tensor], None],
    expected: torch.Tensor,
    out_dtype: torch.dtype,
    *,
    clean: bool,
    tolerance: dict[torch.dtype, Tolerance] = ON_CPU,
) -> torch.Tensor:
    """Lets ``run`` write into a NaN-poisoned view between guard bands, then checks values, mask and guards."""
    buffer = GuardedOutput(*expected.shape, out_dtype, expected.device)
    run(buffer.view)
    must_be_written = torch.ones_like(expected, dtype=torch.bool) if clean else expected != float("-inf")
    assert not bool((buffer.unwritten() & must_be_written).any()), "not every position was written"
    assert buffer.intact(), "something outside of the view was written"
    assert_matches(buffer.view, expected, clean=clean, tolerance=tolerance)
    return buffer.view


def options_of(form: Form, width: int) -> dict[str, object]:
    """The arguments of ``fp8_mqa_logits`` for a form; ``width`` is that of compressed logits."""
    return {"clean_logits": form == "clean", "max_seqlen_k": width if form == "compressed" else 0}
