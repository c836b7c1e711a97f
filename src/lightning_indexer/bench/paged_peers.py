"""Other implementations of paged decode logits, measured in the same run where they can be imported."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import NamedTuple, Protocol

import torch

from lightning_indexer.bench.peers import first_module, takes


class Inputs(NamedTuple):
    """Operands of one case, in the order of ``fp8_paged_mqa_logits``."""

    q: torch.Tensor
    kv_cache: torch.Tensor
    weights: torch.Tensor
    context_lens: torch.Tensor
    block_tables: torch.Tensor
    max_context_len: int


class Peer(Protocol):
    name: str
    note: str

    def supports(self, heads: int, head_dim: int, page: int, next_n: int) -> str | None:
        """None, or why this case is left out."""

    def prepare(self, inputs: Inputs) -> Callable[[], torch.Tensor]:
        """The call to time: [B * next_n, max_context_len], unspecified behind the lengths."""


class DeepGemm:
    """DeepGEMM's paged call, in any of its forms; ``scheduled``: with its schedule kernel in the time.

    An engine runs the schedule once a step, for all layers; a caller of one layer runs it each time.
    """

    def __init__(self, module: ModuleType, scheduled: bool) -> None:
        self.module, self.scheduled = module, scheduled
        self.name = "deep_gemm+schedule" if scheduled else "deep_gemm"
        self.note = f"{module.__name__}, its schedule made {'in each call' if scheduled else 'before'}"
        self.newest = getattr(module, "fp8_fp4_paged_mqa_logits", None)

    def supports(self, heads: int, head_dim: int, page: int, next_n: int) -> str | None:
        return None if heads in (32, 64) else "H 32 and 64 only"

    def prepare(self, inputs: Inputs) -> Callable[[], torch.Tensor]:
        q, kv_cache, weights, lengths, tables, width = inputs
        next_n, page = q.shape[1], kv_cache.shape[1]
        multiprocessors = torch.cuda.get_device_properties(q.device).multi_processor_count
        steps = torch.arange(next_n, dtype=torch.int32, device=q.device)
        per_row = (lengths[:, None] - next_n + 1 + steps).clamp(min=0).int()

        def schedule() -> torch.Tensor:
            made: torch.Tensor = self.module.get_paged_mqa_logits_metadata(per_row, page, multiprocessors)
            return made

        if self.newest is None:
            function = self.module.fp8_paged_mqa_logits
            operands: tuple[object, ...] = (q, kv_cache, weights, per_row, tables)
            rest: tuple[object, ...] = (width, False)
        else:
            function = self.newest
            operands = ((q, None), kv_cache, weights, per_row, tables)
            rest = (width, False) if takes(function, "clean_logits") else (width,)
        if self.scheduled:
            return lambda: function(*operands, schedule(), *rest)
        before = schedule()
        return lambda: function(*operands, before, *rest)


def find(device: torch.device) -> tuple[list[Peer], list[str]]:
    """The peers that can be imported here, and a line for each one that cannot."""
    if device.type == "cpu":
        return [], ["deep_gemm: GPU only"]
    absent: list[str] = []
    module = first_module(("deep_gemm", "vllm.third_party.deep_gemm"), absent)
    return [] if module is None else [DeepGemm(module, False), DeepGemm(module, True)], absent
