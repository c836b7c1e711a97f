"""Other implementations of top-k per row, measured in the same run where they can be imported.

A peer is prepared once a case: what to time, and how its result is read as indices relative to the rows' starts.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import NamedTuple, Protocol

import torch

from lightning_indexer.bench.peers import first_module


class Inputs(NamedTuple):
    """Operands of one case: logits [M, W] float32, ``-inf`` outside the windows, int32 starts and ends [M], and k."""

    logits: torch.Tensor
    starts: torch.Tensor
    ends: torch.Tensor
    k: int


class Prepared(NamedTuple):
    """``run`` is what is timed; ``result`` gives int32 [M, k] indices relative to the row's start, -1 where unused."""

    run: Callable[[], object]
    result: Callable[[], torch.Tensor]


class Peer(Protocol):
    """``spoils``: it may write into the logits, so it runs last and on a copy of them."""

    name: str
    note: str
    spoils: bool

    def supports(self, k: int, whole: bool, device: torch.device) -> str | None:
        """None, or why this case is left out. ``whole``: every row is the whole row."""

    def prepare(self, inputs: Inputs) -> Prepared: ...


class TorchTopK:
    """PyTorch's own, on logits that are ``-inf`` outside the windows."""

    name = "torch.topk"
    note = "whole rows, -inf outside the windows, ordered by score"
    spoils = False

    def supports(self, k: int, whole: bool, device: torch.device) -> str | None:
        return None

    def prepare(self, inputs: Inputs) -> Prepared:
        logits, starts, _, k = inputs
        width = min(k, logits.shape[1])

        def result() -> torch.Tensor:
            scores, columns = logits.topk(width, dim=1)
            found = torch.full((logits.shape[0], k), -1, dtype=torch.int32, device=logits.device)
            found[:, :width] = torch.where(torch.isneginf(scores), -1, columns.int() - starts[:, None])
            return found

        return Prepared(lambda: torch.topk(logits, width, dim=1), result)


class Wrapped:
    """One function of the module ``topk_peers``: (logits, starts, ends, k) to (run, indices).

    ``whole``: it is measured on whole rows alone, or on others alone; None: on all.
    """

    def __init__(
        self, module: ModuleType, function: str, name: str, note: str, whole: bool | None = None, spoils: bool = False
    ) -> None:
        self.module, self.function, self.name, self.note = module, function, name, note
        self.whole, self.spoils = whole, spoils

    def supports(self, k: int, whole: bool, device: torch.device) -> str | None:
        if self.whole is None or self.whole == whole:
            return None
        return "for whole rows" if self.whole else "for rows with windows"

    def prepare(self, inputs: Inputs) -> Prepared:
        run, out = getattr(self.module, self.function)(*inputs)
        return Prepared(run, lambda: out)


class Vllm:
    """vLLM's prefill selection."""

    name = "vllm"
    note = "torch.ops._C.top_k_per_row_prefill"
    spoils = False

    def supports(self, k: int, whole: bool, device: torch.device) -> str | None:
        return None if k <= 2048 else "k up to 2048"

    def prepare(self, inputs: Inputs) -> Prepared:
        logits, starts, ends, k = inputs
        out = torch.full((logits.shape[0], k), -1, dtype=torch.int32, device=logits.device)
        shape = (logits.shape[0], logits.stride(0), logits.stride(1), k)
        return Prepared(lambda: torch.ops._C.top_k_per_row_prefill(logits, starts, ends, out, *shape), lambda: out)


class SglKernel:
    """SGLang's first selection kernel, as ``sgl_kernel`` has it."""

    name = "sgl_kernel"
    note = "sgl_kernel.fast_topk_v2"
    spoils = False

    def __init__(self, module: ModuleType) -> None:
        self.module = module

    def supports(self, k: int, whole: bool, device: torch.device) -> str | None:
        return None if k == 2048 else "k 2048 only"

    def prepare(self, inputs: Inputs) -> Prepared:
        logits, starts, ends, k = inputs
        lengths = ends - starts
        found: list[torch.Tensor] = []

        def run() -> None:
            found[:] = [self.module.fast_topk_v2(logits, lengths, k, row_starts=starts)]

        return Prepared(run, lambda: found[0])


def find(device: torch.device) -> tuple[list[Peer], list[str]]:
    """The peers that can be imported here, and a line for each one that cannot."""
    peers: list[Peer] = [TorchTopK()]
    absent: list[str] = []
    if device.type == "cpu":
        return peers, ["flashinfer, sglang, vllm: GPU only"]
    wrapped = first_module(("topk_peers",), absent)
    if wrapped is not None:
        peers += [
            Wrapped(wrapped, "flashinfer", "flashinfer", "radix top-k, unordered"),
            # It may write up to three columns before a row's start.
            Wrapped(wrapped, "sglang_prefill", "sglang", "topk_v2, ragged, unordered", whole=False, spoils=True),
            Wrapped(wrapped, "sglang_decode", "sglang-decode", "topk_v2, unordered, its plan made before", whole=True),
        ]
    if first_module(("vllm._C",), absent) is not None:
        if hasattr(torch.ops._C, "top_k_per_row_prefill"):
            peers.append(Vllm())
        else:
            absent.append("vllm: no top_k_per_row_prefill")
    sgl_kernel = first_module(("sgl_kernel",), absent)
    if sgl_kernel is not None and hasattr(sgl_kernel, "fast_topk_v2"):
        peers.append(SglKernel(sgl_kernel))
    return peers, absent


def padded(logits: torch.Tensor) -> torch.Tensor:
    """A copy of the same strides with a row to spare before the first one, into which a peer may write."""
    rows, width = logits.shape
    copy = torch.empty((rows + 1, logits.stride(0)), dtype=logits.dtype, device=logits.device)[1:, :width]
    return copy.copy_(logits)
