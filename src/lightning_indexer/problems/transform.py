"""What stands before the quantisation of keys and queries: LayerNorm, RoPE, Hadamard rotation.

    x = LayerNorm(x) over the D channels       weight, bias, eps
    x = RoPE(x) on the first or last channels  pairs (2i, 2i + 1) where interleaved, else (i, i + rope_dim / 2)
    x = H x / sqrt(D)                          H the Hadamard matrix in Sylvester's order

All in float32: nothing is rounded between the steps.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple, get_args

import torch

from lightning_indexer.fp8 import WIDE_DTYPES
from lightning_indexer.problems.checks import as_bool, as_finite, check_tensor, shape_of

Rope = Literal["first", "last"]


class Transform(NamedTuple):
    """The steps of a call. Hashable; holds no tensor.

    Attributes:
        norm, bias: LayerNorm, with a bias.
        rope: which channels are rotated; None: none.
        rope_dim: how many.
        interleaved: their pairs are neighbours.
        hadamard: the rotation of all D channels.
    """

    norm: bool = False
    bias: bool = False
    rope: Rope | None = None
    rope_dim: int = 0
    interleaved: bool = False
    hadamard: bool = False

    def __str__(self) -> str:
        steps = ["LayerNorm"] if self.norm else []
        if self.rope:
            steps.append(f"RoPE {self.rope} {self.rope_dim}{' interleaved' if self.interleaved else ''}")
        steps += ["Hadamard"] if self.hadamard else []
        return ", ".join(steps) or "plain"


class Steps(NamedTuple):
    """Arguments of a call that its transform comes from; see ``insert_k_cache`` and ``prepare_q``."""

    norm_weight: torch.Tensor | None = None
    norm_bias: torch.Tensor | None = None
    norm_eps: float = 1e-6
    positions: torch.Tensor | None = None
    cos_sin_cache: torch.Tensor | None = None
    rope: Rope = "first"
    interleaved: bool = False
    hadamard: bool = False

    @property
    def transform(self) -> Transform:
        """The facts, of checked arguments."""
        rotary = self.cos_sin_cache is not None
        return Transform(
            self.norm_weight is not None, self.norm_bias is not None, self.rope if rotary else None,
            self.cos_sin_cache.shape[1] if self.cos_sin_cache is not None else 0, rotary and self.interleaved,
            self.hadamard,
        )  # fmt: skip

    @property
    def tensors(self) -> tuple[torch.Tensor | None, ...]:
        return self.norm_weight, self.norm_bias, self.positions, self.cos_sin_cache


def check_steps(steps: Steps, tokens: int, head_dim: int, device: torch.device) -> Steps:
    """The steps, their vectors contiguous.

    Raises:
        TypeError, ValueError: a bad argument; the message names it, what came and what was expected.
    """
    for name, vector in (("norm_weight", steps.norm_weight), ("norm_bias", steps.norm_bias)):
        if vector is not None:
            check_tensor(name, vector, WIDE_DTYPES)
            if tuple(vector.shape) != (head_dim,):
                raise ValueError(f"{name}: got shape {shape_of(vector)}, expected [{head_dim}]")
    if steps.norm_bias is not None and steps.norm_weight is None:
        raise ValueError("norm_bias: got a tensor without norm_weight, expected None")
    if steps.rope not in get_args(Rope):
        raise ValueError(f"rope: got {steps.rope!r}, expected one of {', '.join(get_args(Rope))}")
    if (steps.positions is None) != (steps.cos_sin_cache is None):
        missing = "positions" if steps.positions is None else "cos_sin_cache"
        raise ValueError(f"{missing}: got None, expected a tensor: RoPE takes positions and cos_sin_cache")
    if steps.positions is not None and steps.cos_sin_cache is not None:
        check_tensor("positions", steps.positions, (torch.int64, torch.int32))
        check_tensor("cos_sin_cache", steps.cos_sin_cache, WIDE_DTYPES)
        if tuple(steps.positions.shape) != (tokens,):
            raise ValueError(f"positions: got shape {shape_of(steps.positions)}, expected [{tokens}]")
        shape = tuple(steps.cos_sin_cache.shape)
        if len(shape) != 2 or shape[1] > head_dim or shape[1] < 2 or shape[1] & (shape[1] - 1):
            raise ValueError(
                f"cos_sin_cache: got shape {shape_of(steps.cos_sin_cache)}, expected [positions, rope_dim], a power of "
                f"two from 2 to {head_dim}: the cosines of a position, then its sines"
            )
        if shape[1] > 1 and steps.cos_sin_cache.stride(1) != 1:
            got = tuple(steps.cos_sin_cache.stride())
            raise ValueError(f"cos_sin_cache: got strides {got}, expected a contiguous last dimension")
    interleaved, hadamard = (as_bool(name, getattr(steps, name)) for name in ("interleaved", "hadamard"))
    norm_eps: Any = as_finite("norm_eps", steps.norm_eps)
    if norm_eps < 0:
        raise ValueError(f"norm_eps: got {steps.norm_eps}, expected at least 0")
    if hadamard and head_dim & (head_dim - 1):
        raise ValueError(f"hadamard: got True with D={head_dim}, expected a power of two")
    for name, tensor in zip(("norm_weight", "norm_bias", "positions", "cos_sin_cache"), steps.tensors, strict=True):
        if tensor is not None and tensor.device != device:
            raise ValueError(f"{name}: got a tensor on {tensor.device}, expected {device}, the device of the values")
    return steps._replace(
        norm_eps=norm_eps,
        interleaved=interleaved,
        hadamard=hadamard,
        **{
            name: tensor.contiguous()
            for name in ("norm_weight", "norm_bias", "positions")
            if (tensor := getattr(steps, name)) is not None and not tensor.is_contiguous()
        },
    )


def check_wide(name: str, x: torch.Tensor, shape: str, dimensions: int) -> None:
    """Rows to quantise.

    Raises:
        TypeError, ValueError: another dtype, rank or stride.
    """
    check_tensor(name, x, WIDE_DTYPES)
    if x.dim() != dimensions or x.shape[-1] < 1:
        raise ValueError(f"{name}: got shape {shape_of(x)}, expected {shape}")
    if x.shape[-1] > 1 and x.stride(-1) != 1:
        raise ValueError(f"{name}: got strides {tuple(x.stride())}, expected a contiguous last dimension")


def transformed(x: torch.Tensor, steps: Steps) -> torch.Tensor:
    """The reference: float32 of ``x`` [T, ..., D] after the steps."""
    x = x.float()
    if steps.norm_weight is not None:
        bias = None if steps.norm_bias is None else steps.norm_bias.float()
        x = torch.nn.functional.layer_norm(x, x.shape[-1:], steps.norm_weight.float(), bias, steps.norm_eps)
    if steps.positions is not None and steps.cos_sin_cache is not None:
        x = _rotated(x, steps.cos_sin_cache[steps.positions.long()].float(), steps)
    if steps.hadamard:
        x = _hadamard(x) * x.shape[-1] ** -0.5
    return x


def _rotated(x: torch.Tensor, cos_sin: torch.Tensor, steps: Steps) -> torch.Tensor:
    dim, rest = cos_sin.shape[1], x.shape[-1] - cos_sin.shape[1]
    cos, sin = (part.view(-1, *[1] * (x.dim() - 2), dim // 2) for part in cos_sin.chunk(2, dim=1))
    start = 0 if steps.rope == "first" else rest
    part = x[..., start : start + dim]
    a, b = (part[..., ::2], part[..., 1::2]) if steps.interleaved else part.chunk(2, dim=-1)
    turned = a * cos - b * sin, b * cos + a * sin
    both = torch.stack(turned, dim=-1).flatten(-2) if steps.interleaved else torch.cat(turned, dim=-1)
    return torch.cat((both, x[..., dim:]) if start == 0 else (x[..., :rest], both), dim=-1)


def _hadamard(x: torch.Tensor) -> torch.Tensor:
    size = x.shape[-1]
    shape, step = x.shape, 1
    while step < size:
        a, b = x.reshape(*shape[:-1], size // (2 * step), 2, step).unbind(dim=-2)
        x = torch.stack((a + b, a - b), dim=-2).reshape(shape)
        step *= 2
    return x
