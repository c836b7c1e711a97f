"""How K is kept in the model's cache and scored: fp8 rows with their scale behind, or what the eager code keeps.

A cache of transformers holds whatever [B, S, W] it is given, and crops, reorders and repeats that. So fp8 keys travel
as bytes: each is quantised once, and costs 144 bytes where bfloat16 costs 256.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch

from lightning_indexer.fp8 import quantize_k

# Behind a key's D bytes: the float32 scale, and room up to the next 16 bytes, on which TMA wants rows to start.
_SCALE_BYTES, _TAIL_BYTES = 4, 16


class Scored(NamedTuple):
    """Operands of ``fp8_mqa_logits``."""

    q: torch.Tensor
    weights: torch.Tensor


class KeyFormat(Protocol):
    def pack(self, k: torch.Tensor) -> torch.Tensor:
        """[B, S, D] as the cache is to hold it, [B, S, W]."""

    def unpack(self, cached: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """``kv`` of all sequences, one behind the other: [B * T, D] and [B * T] or None."""

    def queries(self, q: torch.Tensor, weights: torch.Tensor) -> Scored:
        """[M, H, D] and the float32 weights [M, H] as they are scored."""

    def holds(self, cached: torch.Tensor) -> bool:
        """Whether a cache was filled in this format."""


class Fp8:
    """As the published models score: both sides rotated, q with a scale for each row and head, K for each key."""

    def pack(self, k: torch.Tensor) -> torch.Tensor:
        batch, tokens, head_dim = k.shape
        values, scale = quantize_k(_rotated(k).reshape(-1, head_dim))
        rows = torch.zeros((batch * tokens, head_dim + _TAIL_BYTES), dtype=torch.uint8, device=k.device)
        rows[:, :head_dim] = values.view(torch.uint8)
        rows[:, head_dim : head_dim + _SCALE_BYTES] = scale[:, None].view(torch.uint8)
        return rows.view(batch, tokens, head_dim + _TAIL_BYTES)

    def unpack(self, cached: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        rows = cached.reshape(-1, cached.shape[-1])
        head_dim = rows.shape[1] - _TAIL_BYTES
        scale = rows[:, head_dim : head_dim + _SCALE_BYTES].contiguous().view(torch.float32)[:, 0]
        return rows[:, :head_dim].view(torch.float8_e4m3fn), scale

    def queries(self, q: torch.Tensor, weights: torch.Tensor) -> Scored:
        rows, heads, head_dim = q.shape
        values, scale = quantize_k(_rotated(q).reshape(-1, head_dim))
        # A positive scale passes the ReLU.
        return Scored(values.view(rows, heads, head_dim), weights * scale.view(rows, heads))

    def holds(self, cached: torch.Tensor) -> bool:
        return cached.dtype is torch.uint8


class BFloat16:
    """The operands of the eager code."""

    def pack(self, k: torch.Tensor) -> torch.Tensor:
        return k

    def unpack(self, cached: torch.Tensor) -> tuple[torch.Tensor, None]:
        return cached.reshape(-1, cached.shape[-1]).to(torch.bfloat16), None

    def queries(self, q: torch.Tensor, weights: torch.Tensor) -> Scored:
        return Scored(q.to(torch.bfloat16), weights)

    def holds(self, cached: torch.Tensor) -> bool:
        return cached.dtype is not torch.uint8


FORMATS: dict[str, KeyFormat] = {"fp8": Fp8(), "bfloat16": BFloat16()}


def _rotated(x: torch.Tensor) -> torch.Tensor:
    """Times an orthogonal matrix, which leaves products as they are and spreads outliers over the channels."""
    size = x.shape[-1]
    return x if size & (size - 1) else x @ _hadamard(size, x.dtype, x.device)


_MATRICES: dict[tuple[int, torch.dtype, torch.device], torch.Tensor] = {}


def _hadamard(size: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """[size, size], scaled to be orthogonal; made once."""
    key = (size, dtype, device)
    if key not in _MATRICES:
        matrix = torch.ones((1, 1))
        while matrix.shape[0] < size:
            matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)))
        _MATRICES[key] = (matrix * size**-0.5).to(device, dtype)
    return _MATRICES[key]
