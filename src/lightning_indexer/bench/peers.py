"""Other implementations, measured in the same run where they can be imported.

A peer is prepared once per case and returns the call to time. What it cannot do it says, and the table leaves it out.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from types import ModuleType
from typing import Protocol

import torch

from lightning_indexer.check.cases import Case, Inputs
from lightning_indexer.check.memory import available_bytes

Call = Callable[[], torch.Tensor]


class Peer(Protocol):
    name: str
    note: str

    def supports(self, case: Case, device: torch.device) -> str | None:
        """None, or why this case is left out."""

    def prepare(self, case: Case, inputs: Inputs, ks: torch.Tensor, ke: torch.Tensor, max_seqlen_k: int) -> Call:
        """The call to time. Its result has the form of the case."""


class Einsum:
    """The formula as one writes it first: every score of the chunk at once, then a mask."""

    name = "einsum"
    note = "plain masked float32 einsum"

    def supports(self, case: Case, device: torch.device) -> str | None:
        if case.form == "compressed":
            return "no compressed form"
        needed = 2 * 4 * case.heads * case.s_q * case.s_k
        if needed > available_bytes(device) - 2**31:
            return f"needs {needed / 2**30:.0f} GiB for its scores"
        return None

    def prepare(self, case: Case, inputs: Inputs, ks: torch.Tensor, ke: torch.Tensor, max_seqlen_k: int) -> Call:
        positions = torch.arange(case.s_k, device=ks.device)

        def call() -> torch.Tensor:
            scores = torch.einsum("mhd,nd->hmn", inputs.q_fp8.float(), inputs.k_fp8.float() * inputs.kv_scale[:, None])
            logits = torch.einsum("hmn,mh->mn", scores.relu(), inputs.weights)
            mask = (positions >= ks[:, None]) & (positions < ke[:, None])
            return logits.masked_fill(~mask, float("-inf"))

        return call


class DeepGemm:
    """DeepGEMM in any of its forms; what it offers is read off its signature."""

    name = "deep_gemm"

    def __init__(self, module: ModuleType) -> None:
        self.module = module
        # The form that vLLM bundles since 2026 has no clean_logits: compressed logits alone, tail left as it is.
        newest = getattr(module, "fp8_fp4_mqa_logits", None)
        self.compressed_only = newest is not None and not takes(newest, "clean_logits")
        forms = "compressed logits only" if self.compressed_only else "all forms, -inf in a second pass"
        self.note = f"{module.__name__} {getattr(module, '__version__', '')}, {forms}".replace(" ,", ",")

    def supports(self, case: Case, device: torch.device) -> str | None:
        if self.compressed_only and case.form != "compressed":
            return "compressed logits only"
        if case.out_dtype is not torch.float32:
            return "float32 only here"
        if case.heads not in (32, 64):
            return "H 32 and 64 only"
        return None

    def prepare(self, case: Case, inputs: Inputs, ks: torch.Tensor, ke: torch.Tensor, max_seqlen_k: int) -> Call:
        kv = (inputs.k_fp8, inputs.kv_scale)
        if self.compressed_only:
            return lambda: self.module.fp8_fp4_mqa_logits(
                (inputs.q_fp8, None), kv, inputs.weights, ks, ke, max_seqlen_k
            )  # fmt: skip
        clean = case.form == "clean"
        return lambda: self.module.fp8_mqa_logits(
            inputs.q_fp8, kv, inputs.weights, ks, ke, clean_logits=clean, max_seqlen_k=max_seqlen_k
        )  # fmt: skip


class Aiter:
    """AITER's Triton or Gluon kernel, whichever it selects."""

    name = "aiter"
    note = "aiter.ops.triton fp8_mqa_logits"

    def __init__(self, function: Callable[..., torch.Tensor]) -> None:
        self.function = function

    def supports(self, case: Case, device: torch.device) -> str | None:
        if case.form == "compressed" or case.out_dtype is not torch.float32:
            return "float32 [M, N] only"
        return None

    def prepare(self, case: Case, inputs: Inputs, ks: torch.Tensor, ke: torch.Tensor, max_seqlen_k: int) -> Call:
        clean = case.form == "clean"
        return lambda: self.function(inputs.q_fp8, inputs.k_fp8, inputs.kv_scale, inputs.weights, ks, ke, clean)


def find(device: torch.device) -> tuple[list[Peer], list[str]]:
    """The peers that can be imported here, and a line for each one that cannot."""
    peers: list[Peer] = []
    absent: list[str] = []
    if device.type == "cpu":
        return [Einsum()], ["deep_gemm, aiter: GPU only"]
    deep_gemm = first_module(("deep_gemm", "vllm.third_party.deep_gemm"), absent)
    if deep_gemm is not None:
        peers.append(DeepGemm(deep_gemm))
    aiter = first_module(("aiter.ops.triton.attention.fp8_mqa_logits", "aiter.ops.triton.fp8_mqa_logits"), absent)
    if aiter is not None:
        peers.append(Aiter(aiter.fp8_mqa_logits))
    return peers, absent


def takes(function: Callable[..., object], argument: str) -> bool:
    """Whether a function has an argument of that name."""
    try:
        return argument in inspect.signature(function).parameters
    except ValueError:  # of pybind11, as in DeepGEMM itself: the signature is in the docstring
        return argument in (function.__doc__ or "")


def first_module(names: tuple[str, ...], absent: list[str]) -> ModuleType | None:
    """The first of these modules that can be imported; where none can, a line of ``absent`` says why."""
    reasons = []
    for name in names:
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as error:
            reasons.append(f"no module {error.name}")
        except (ImportError, OSError, RuntimeError) as error:
            # A peer built for another driver or torch fails in many ways; the report shows which.
            reasons.append(f"{type(error).__name__}: {error}")
    absent.append(f"{names[0]}: {'; '.join(dict.fromkeys(reasons))}")
    return None
