"""Queries of the indexer, transformed and quantised: the facts of a call, its checks, and the reference.

q8[t, h] = fp8 of transform(q[t, h]),    w[t, h] = weights[t, h] * q_scale[t, h] * weight_scale
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from lightning_indexer.arch import Arch
from lightning_indexer.fp4 import fp4_to_fp8, quantize_fp4
from lightning_indexer.fp8 import FP8_DTYPES, WIDE_DTYPES, quantize_rows
from lightning_indexer.problems.checks import as_bool, as_finite, check_tensor, plain_arithmetic, shape_of
from lightning_indexer.problems.insert_k_cache import example_steps
from lightning_indexer.problems.transform import Steps, Transform, check_steps, check_wide, transformed

OPERATION = "prepare_q"


class PrepareQProblem(NamedTuple):
    """What selection, tile heuristics and kernels may depend on. Hashable; holds no tensor.

    Attributes:
        tokens, heads, head_dim: T, H and D.
        transform: what precedes the quantisation.
        dtype, weights_dtype: of q and of the weights.
        out_dtype: of the quantised q.
        power_of_two: scales are rounded up to powers of two.
        fp4: q is rounded to MXFP4 first.
    """

    tokens: int
    heads: int
    head_dim: int
    transform: Transform = Transform()
    dtype: torch.dtype = torch.bfloat16
    weights_dtype: torch.dtype = torch.float32
    out_dtype: torch.dtype = torch.float8_e4m3fn
    power_of_two: bool = False
    fp4: bool = False

    @property
    def operation(self) -> str:
        return OPERATION

    def adversarial(self, arch: Arch) -> PrepareQProblem:
        """A small problem of the same H, D and transform: rows that no tile divides."""
        dtype = torch.float8_e4m3fnuz if arch.fp8 == "fnuz" else torch.float8_e4m3fn
        return self._replace(tokens=13, out_dtype=dtype)

    def example(self, device: torch.device) -> PrepareQCall:
        """A call of this problem with operands that are the same at each time, into results full of NaN."""
        return _example(self, device)

    def compare(self, call: PrepareQCall, expected: PrepareQCall) -> str | None:
        """None, or in words how the results of ``call`` differ from those of ``expected``, both :meth:`example`."""
        return difference(self, call, expected)

    def __str__(self) -> str:
        kind = "fp4" if self.fp4 else "power of two" if self.power_of_two else "float32"
        dtype = str(self.dtype).removeprefix("torch.")
        return f"T={self.tokens} H={self.heads} D={self.head_dim} {dtype} {kind}, {self.transform}"


class PrepareQCall(NamedTuple):
    """The arguments of one call. What a backend is given has been validated and normalised: ``q`` [T, H, D] and
    ``weights`` [T, H], last dimensions contiguous; ``steps`` with contiguous vectors; ``out`` the results,
    contiguous."""

    q: torch.Tensor
    weights: torch.Tensor
    steps: Steps = Steps()
    dtype: torch.dtype = torch.float8_e4m3fn
    power_of_two: bool = False
    fp4: bool = False
    weight_scale: float | None = None
    out: tuple[torch.Tensor, torch.Tensor] | None = None
    backend: str | None = None

    @property
    def results(self) -> tuple[torch.Tensor, torch.Tensor]:
        """``out``, which a backend's call always has."""
        assert self.out is not None
        return self.out


def validate(call: PrepareQCall) -> PrepareQCall:
    """Checks one call's arguments; returns them normalised.

    Works on fake tensors too: it reads shapes, strides, dtypes and devices, never values or addresses.

    Raises:
        TypeError, ValueError: a bad argument; the message names it, what came and what was expected.
    """
    check_wide("q", call.q, "[T, H, D]", 3)
    tokens, heads, head_dim = call.q.shape
    if heads < 1:
        raise ValueError(f"q: got shape {shape_of(call.q)}, expected at least one head, [T, H, D]")
    check_tensor("weights", call.weights, WIDE_DTYPES)
    if tuple(call.weights.shape) != (tokens, heads):
        raise ValueError(f"weights: got shape {shape_of(call.weights)}, expected [{tokens}, {heads}] to match q")
    if heads > 1 and call.weights.stride(1) != 1:
        got = tuple(call.weights.stride())
        raise ValueError(f"weights: got strides {got}, expected a contiguous last dimension")
    if call.weights.device != call.q.device:
        raise ValueError(f"weights: got a tensor on {call.weights.device}, expected {call.q.device}, the device of q")
    if call.steps.norm_weight is not None:
        raise ValueError("norm_weight: got a tensor, expected None: queries have no LayerNorm here")
    if call.dtype not in FP8_DTYPES:
        raise TypeError(f"dtype: got {call.dtype}, expected {' or '.join(map(str, FP8_DTYPES))}")
    call = call._replace(power_of_two=as_bool("power_of_two", call.power_of_two), fp4=as_bool("fp4", call.fp4))
    if call.fp4 and head_dim != 128:
        raise ValueError(f"fp4: got True with D={head_dim}, expected D=128")
    given = call.weight_scale
    scale: Any = head_dim**-0.5 * heads**-0.5 if given is None else as_finite("weight_scale", given)
    if call.out is not None:
        _check_out(call, call.out)
    steps = check_steps(call.steps, tokens, head_dim, call.q.device)
    return call._replace(
        q=call.q.resolve_neg(), weights=call.weights.resolve_neg(), steps=steps, weight_scale=float(scale)
    )


def _check_out(call: PrepareQCall, out: tuple[torch.Tensor, torch.Tensor]) -> None:
    shape = tuple(call.q.shape)
    for name, tensor, size, dtype in (
        ("out[0]", out[0], shape, call.dtype),
        ("out[1]", out[1], shape[:2], torch.float32),
    ):
        check_tensor(name, tensor, (dtype,))
        if tuple(tensor.shape) != size or not tensor.is_contiguous() or tensor.device != call.q.device:
            raise ValueError(
                f"{name}: got shape {shape_of(tensor)}, strides {tuple(tensor.stride())} on {tensor.device}, expected "
                f"{list(size)}, contiguous, on {call.q.device}"
            )


def problem_of(call: PrepareQCall) -> PrepareQProblem:
    """The facts of a validated call."""
    tokens, heads, head_dim = call.q.shape
    return PrepareQProblem(
        tokens,
        heads,
        head_dim,
        call.steps.transform,
        call.q.dtype,
        call.weights.dtype,
        call.dtype,
        call.power_of_two,
        call.fp4,
    )


def quantized(x: torch.Tensor, call: PrepareQCall) -> tuple[torch.Tensor, torch.Tensor]:
    """fp8 [T, H, D] and scales [T, H] of float32 ``x``."""
    if call.fp4:
        return fp4_to_fp8(*quantize_fp4(x), call.dtype)
    return quantize_rows(x, call.dtype, power_of_two=call.power_of_two)


def reference_prepare_q(call: PrepareQCall) -> tuple[torch.Tensor, torch.Tensor]:
    """The results of a validated call."""
    assert call.weight_scale is not None
    with plain_arithmetic(call.q.device):
        q, scale = quantized(transformed(call.q, call.steps), call)
        return q, call.weights.float() * (scale * call.weight_scale)


def difference(problem: PrepareQProblem, call: PrepareQCall, expected: PrepareQCall) -> str | None:
    """None, or how results differ: by more than a step of the quantisation, or where there is no transform, a bit."""
    (got_q, got_w), (right_q, right_w) = call.results, expected.results
    wrong = int((got_q.view(torch.uint8) != right_q.view(torch.uint8)).sum())
    if problem.transform == Transform() and wrong:
        return f"{wrong} codes differ"
    off = (got_w - right_w).abs() > (0.5 if problem.power_of_two or problem.fp4 else 1e-5) * right_w.abs()
    off |= got_w.isnan() != right_w.isnan()
    if bool(off.any()):
        row, head = (int(place) for place in off.nonzero()[0])
        return (
            f"{int(off.sum())} weights are wrong, the first at [{row}, {head}]: got {float(got_w[row, head]):.6g}, "
            f"expected {float(right_w[row, head]):.6g}"
        )
    # A row's scale is its new weight over its old one.
    some = (call.weights != 0)[..., None]
    old = torch.where(some, call.weights.float()[..., None], 1.0)
    a = torch.where(some, got_q.float() * (got_w[..., None] / old), 0.0)
    b = torch.where(some, right_q.float() * (right_w[..., None] / old), 0.0)
    largest = b.abs().amax(dim=-1, keepdim=True)
    off = (a - b).abs() > b.abs() / 7 + largest * (0.4 if problem.fp4 else 2.0**-16)
    if bool(off.any()):
        row, head, channel = (int(place) for place in off.nonzero()[0])
        return (
            f"{int(off.sum())} channels are wrong, the first at [{row}, {head}, {channel}]: got "
            f"{float(a[row, head, channel]):.6g}, expected {float(b[row, head, channel]):.6g}"
        )
    error = float(((a - b).double() ** 2).sum() / (b.double() ** 2).sum().clamp(min=1e-300))
    if error > (1e-3 if problem.power_of_two or problem.fp4 else 1e-5):
        return f"relative square error {error:.1e}"
    return None


def _example(problem: PrepareQProblem, device: torch.device) -> PrepareQCall:
    tokens, heads, head_dim = problem.tokens, problem.heads, problem.head_dim
    generator = torch.Generator("cpu").manual_seed(heads * head_dim)
    q = torch.randn((tokens, heads, head_dim), generator=generator)
    q *= torch.exp2(torch.randint(-12, 8, (tokens, heads, 1), generator=generator).float())
    q.view(-1)[::5] = -0.0
    q.view(-1, head_dim)[::9] = 0.0
    wide = torch.zeros((tokens, heads, head_dim + 8), dtype=problem.dtype, device=device)
    wide[..., :head_dim] = q.to(problem.dtype).to(device)
    weights = torch.randn((tokens, heads + 3), generator=generator).to(problem.weights_dtype).to(device)[:, :heads]
    out = (
        torch.full((tokens, heads, head_dim), 0x7F, dtype=torch.uint8, device=device).view(problem.out_dtype),
        torch.full((tokens, heads), float("nan"), device=device),
    )
    steps = example_steps(problem.transform, tokens, head_dim, device)
    return PrepareQCall(
        wide[..., :head_dim], weights, steps, problem.out_dtype, problem.power_of_two, problem.fp4,
        head_dim**-0.5 * heads**-0.5, out,
    )  # fmt: skip
