"""How K is kept in the model's cache and scored: fp8 rows with their scale behind, or what the eager code keeps.

A cache of transformers holds whatever [B, S, W] it is given, and crops, reorders and repeats that. So fp8 keys travel
as bytes: each is quantised once, and costs 144 bytes where bfloat16 costs 256.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch

from lightning_indexer.calls.prepare_q import prepare_q
from lightning_indexer.problems.transform import Rope

# Behind a key's D bytes: the float32 scale, four times, so that rows start on 16 bytes, as TMA wants them.
_SCALE_BYTES, _TAIL_BYTES = 4, 16


class Turn(NamedTuple):
    """RoPE of R rows: as the model's own function applies it, and as ``prepare_q`` does.

    Attributes:
        apply: of some rows, [m, heads, D] turned; the slice says which.
        table: [R, rope], the cosines of a row's pairs, then the sines.
        rope: which channels turn.
        interleaved: their pairs are neighbours.
    """

    apply: Callable[[torch.Tensor, slice], torch.Tensor]
    table: torch.Tensor
    rope: Rope
    interleaved: bool


class Scored(NamedTuple):
    """Operands of ``fp8_mqa_logits``."""

    q: torch.Tensor
    weights: torch.Tensor


class KeyFormat(Protocol):
    def pack(self, k: torch.Tensor, turn: Turn) -> torch.Tensor:
        """[B, S, D], not turned yet, as the cache is to hold it, [B, S, W]."""

    def empty(self, like: torch.Tensor, head_dim: int) -> torch.Tensor:
        """[B, 0, W]: no keys, of the batch and the model's dtype of [B, ...]."""

    def unpack(self, cached: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """``kv`` of all sequences, one behind the other: [B * T, D] and [B * T] or None."""

    def queries(self, q: torch.Tensor, weights: torch.Tensor, scaling: float, turn: Turn, rows: slice) -> Scored:
        """[m, H, D], not turned yet, and the weights [m, H], to be multiplied by ``scaling``, as they are scored."""

    def holds(self, cached: torch.Tensor) -> bool:
        """Whether a cache was filled in this format."""


class Fp8:
    """As the published models score: both sides rotated, q with a scale for each row and head, K for each key.

    A key is quantised as a query of one head whose weight is 1, so that one kernel turns, rotates and quantises either.
    Where a model's function moves channels as it turns them, they stay in place here, of q and of K.
    """

    def pack(self, k: torch.Tensor, turn: Turn) -> torch.Tensor:
        batch, tokens, head_dim = k.shape
        rows = k.reshape(batch * tokens, 1, head_dim)
        values, scale = self.queries(rows, torch.ones_like(rows[..., 0], dtype=torch.float32), 1.0, turn, slice(None))
        parts = [values.view(torch.uint8)[:, 0], *[scale.view(torch.uint8)] * (_TAIL_BYTES // _SCALE_BYTES)]
        return torch.cat(parts, dim=1).view(batch, tokens, head_dim + _TAIL_BYTES)

    def empty(self, like: torch.Tensor, head_dim: int) -> torch.Tensor:
        return like.new_empty((like.shape[0], 0, head_dim + _TAIL_BYTES), dtype=torch.uint8)

    def unpack(self, cached: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        rows = cached.reshape(-1, cached.shape[-1])
        head_dim = rows.shape[1] - _TAIL_BYTES
        scale = rows[:, head_dim : head_dim + _SCALE_BYTES].contiguous().view(torch.float32)[:, 0]
        return rows[:, :head_dim].view(torch.float8_e4m3fn), scale

    def queries(self, q: torch.Tensor, weights: torch.Tensor, scaling: float, turn: Turn, rows: slice) -> Scored:
        table: torch.Tensor | None = turn.table[rows]
        positions = None
        if _is_power_of_two(turn.table.shape[1]):
            positions = torch.arange(q.shape[0], dtype=torch.int32, device=q.device)
        else:
            q, table = turn.apply(q, rows), None
        # The scale of a row of q is positive and passes the ReLU: it is in the weights.
        return Scored(
            *prepare_q(
                q, weights, positions=positions, cos_sin_cache=table, rope=turn.rope, interleaved=turn.interleaved,
                hadamard=_is_power_of_two(q.shape[-1]), weight_scale=scaling,
            )
        )  # fmt: skip

    def holds(self, cached: torch.Tensor) -> bool:
        return cached.dtype is torch.uint8


class BFloat16:
    """The operands of the eager code."""

    def pack(self, k: torch.Tensor, turn: Turn) -> torch.Tensor:
        return turn.apply(k.flatten(0, 1)[:, None], slice(None)).view(k.shape)

    def empty(self, like: torch.Tensor, head_dim: int) -> torch.Tensor:
        return like.new_empty((like.shape[0], 0, head_dim))

    def unpack(self, cached: torch.Tensor) -> tuple[torch.Tensor, None]:
        return cached.reshape(-1, cached.shape[-1]).to(torch.bfloat16), None

    def queries(self, q: torch.Tensor, weights: torch.Tensor, scaling: float, turn: Turn, rows: slice) -> Scored:
        return Scored(turn.apply(q, rows).to(torch.bfloat16), weights.float() * scaling)

    def holds(self, cached: torch.Tensor) -> bool:
        return cached.dtype is not torch.uint8


FORMATS: dict[str, KeyFormat] = {"fp8": Fp8(), "bfloat16": BFloat16()}


def _is_power_of_two(size: int) -> bool:
    return size & (size - 1) == 0
