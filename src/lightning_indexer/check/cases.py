"""The inputs that ``verify`` and ``bench`` share: shapes, windows, random operands.

Shapes and windows follow the sweep of AITER's hand-written CDNA4 kernel (14 shapes, six windows, 900 cases) with its
fourteen shapes chosen here: the eight of its performance table, and six small or odd ones.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from lightning_indexer.fp8 import quantize_k, quantize_q
from lightning_indexer.problems.mqa_logits import Form, MqaLogitsCall, MqaLogitsProblem

Window = Literal["causal", "cp", "misaligned", "empty", "past_end", "multi_req"]
WINDOWS: tuple[Window, ...] = ("causal", "cp", "misaligned", "empty", "past_end", "multi_req")

# (s_q, s_k): the performance sweep, then what it lacks: single rows, odd sizes, few rows over several splits.
PERFORMANCE_SHAPES = (
    (1024, 1024),
    (4096, 4096),
    (8192, 8192),
    (4096, 32768),
    (2048, 65536),
    (1024, 131072),
    (128, 32768),
    (671, 131072),
)
VERIFY_SHAPES = (*PERFORMANCE_SHAPES, (1, 1), (1, 17), (17, 113), (61, 1560), (64, 2048), (64, 8192))
# What a CPU, an interpreter or a simulator can do in minutes: same kinds, smaller.
SMALL_SHAPES = ((1, 1), (1, 17), (17, 113), (61, 160), (8, 512), (64, 384), (32, 32), (3, 1560))

REQUESTS = 4


@dataclass(frozen=True, slots=True)
class Case:
    """One call of the sweeps."""

    s_q: int
    s_k: int
    heads: int
    head_dim: int
    window: Window
    form: Form = "clean"
    out_dtype: torch.dtype = torch.float32
    q_dtype: torch.dtype = torch.float8_e4m3fn
    k_dtype: torch.dtype = torch.float8_e4m3fn

    def problem(self, max_seqlen_k: int) -> MqaLogitsProblem:
        """The facts of the call; ``max_seqlen_k`` is its compressed width, 0 in the other forms."""
        return MqaLogitsProblem(
            self.s_q, self.s_k, self.heads, self.head_dim, self.q_dtype, self.k_dtype,
            out_dtype=self.out_dtype, clean_logits=self.form == "clean", max_seqlen_k=max_seqlen_k,
        )  # fmt: skip

    def call(
        self, inputs: Inputs, ks: torch.Tensor, ke: torch.Tensor, max_seqlen_k: int, out: torch.Tensor
    ) -> MqaLogitsCall:
        """The call of this case into ``out``."""
        return MqaLogitsCall(
            inputs.q_fp8, inputs.k_fp8, inputs.kv_scale, inputs.weights, ks, ke, self.form == "clean", max_seqlen_k,
            self.out_dtype, out,
        )  # fmt: skip

    def __str__(self) -> str:
        suffix = "" if self.out_dtype is torch.float32 else " bf16"
        for name, dtype in (("q", self.q_dtype), ("k", self.k_dtype)):
            suffix += f" {name}=fnuz" if dtype is torch.float8_e4m3fnuz else ""
        return f"({self.s_q}, {self.s_k}) H={self.heads} D={self.head_dim} {self.window} {self.form}{suffix}"


@dataclass(frozen=True, slots=True)
class Inputs:
    """Random operands, before and after quantisation. ``k`` rows beyond every window are part of the buffer too."""

    q: torch.Tensor
    k: torch.Tensor
    weights: torch.Tensor
    q_fp8: torch.Tensor
    k_fp8: torch.Tensor
    kv_scale: torch.Tensor


def make_inputs(s_q: int, s_k: int, heads: int, head_dim: int, device: torch.device, seed: int = 0) -> Inputs:
    """Standard normal q, k and weights, and their fp8 form: q saturated, k scaled per row."""
    generator = torch.Generator(device=device).manual_seed(hash((s_q, s_k, heads, head_dim, seed)) % 2**31)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=device, generator=generator)

    q, k, weights = normal(s_q, heads, head_dim), normal(s_k, head_dim), normal(s_q, heads)
    k_fp8, kv_scale = quantize_k(k)
    return Inputs(q, k, weights, quantize_q(q), k_fp8, kv_scale)


def window_applies(window: Window, s_q: int, s_k: int) -> bool:
    """``cp`` needs whole chunks: s_k a multiple of an even s_q."""
    return window != "cp" or (s_q % 2 == 0 and s_k % s_q == 0)


def make_windows(window: Window, s_q: int, s_k: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """``(ks, ke)`` [s_q] int32 of one of the six windows.

    - ``causal``: one request whose last row sees every key; rows before the first key have ``ke <= 0``.
    - ``cp``: rank ``cp_size // 3`` of a zig-zag context-parallel group, which holds chunks ``r`` and ``2*cp_size-1-r``.
    - ``misaligned``: odd starts and ends that share no tile boundary.
    - ``empty``: rows whose end is below 0, or below their start, between normal rows.
    - ``past_end``: starts and ends beyond s_k.
    - ``multi_req``: four requests packed in one chunk, ``s_q/4`` rows over ``s_k/4`` keys each.
    """
    row = torch.arange(s_q, device=device)
    base = s_k - s_q
    if window == "causal":
        ks, ke = torch.zeros_like(row), base + row + 1
    elif window == "cp":
        half, size = s_q // 2, s_k // s_q
        rank = size // 3
        chunk = torch.where(row < half, rank, 2 * size - 1 - rank)
        ks, ke = torch.zeros_like(row), chunk * half + row % half + 1
    elif window == "misaligned":
        ks = (row * 37 + 1) % max(1, s_k // 2) | 1
        ke = s_k - ((row * 59 + 3) % max(1, s_k // 3) & ~1) - (1 - s_k % 2)
    elif window == "empty":
        ks, ke = torch.zeros_like(row), base + row + 1
        ke = torch.where(row % 4 == 1, -1 - row, ke)
        ks, ke = torch.where(row % 4 == 2, s_k // 2, ks), torch.where(row % 4 == 2, s_k // 2 - 1 - row % 3, ke)
    elif window == "past_end":
        ks = torch.where(row % 3 == 1, s_k + row, row % 5 - 2)
        ke = torch.where(row % 3 == 2, base + row + 1, s_k + 1 + row * 17)
    else:
        count = min(REQUESTS, s_q, s_k)
        request = (row * count) // s_q
        first_row = -(-request * s_q // count)
        per_q, per_k = -(-(request + 1) * s_q // count) - first_row, s_k // count
        ks = request * per_k
        ke = ks + per_k - per_q + (row - first_row) + 1
    return ks.to(torch.int32), ke.to(torch.int32)


def positions_in_windows(ks: torch.Tensor, ke: torch.Tensor, s_k: int) -> int:
    """How many (row, key) pairs the windows hold."""
    return int((ke.clamp(max=s_k).long() - ks.clamp(min=0).long()).clamp(min=0).sum())


def flop(heads: int, head_dim: int, positions: int) -> int:
    """Floating-point operations as the field counts them: the fp8 product alone, inside the windows."""
    return 2 * heads * head_dim * positions
