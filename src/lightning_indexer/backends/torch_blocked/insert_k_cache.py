"""Quantising keys into a paged cache in PyTorch, a block of tokens at a time. The CPU backend, and the fallback.

Nothing is read back to the host: a skipped token writes once more what the first one that is not skipped writes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from lightning_indexer.arch import Arch
from lightning_indexer.problems.checks import plain_arithmetic
from lightning_indexer.problems.insert_k_cache import InsertCall, InsertProblem, places, quantized
from lightning_indexer.problems.transform import Steps, transformed


@dataclass(frozen=True, slots=True)
class TokenBlocks:
    """Tokens of one block."""

    tokens: int


def heuristic(problem: InsertProblem, arch: Arch) -> TokenBlocks:
    """A CPU block's float32 stays in the L2 of a core (1 MiB); a GPU block fills the device."""
    return TokenBlocks(1024 if arch.vendor == "cpu" else 2**18)


class InsertKCache:
    """Runs every problem on every arch."""

    config = staticmethod(heuristic)

    def supports(self, problem: InsertProblem, arch: Arch) -> str | None:
        return None

    def neighbours(self, problem: InsertProblem, arch: Arch) -> list[TokenBlocks]:
        chosen = heuristic(problem, arch)
        return [chosen, replace(chosen, tokens=chosen.tokens // 2), replace(chosen, tokens=chosen.tokens * 2)]

    def launch(self, problem: InsertProblem, arch: Arch, config: TokenBlocks) -> Callable[[InsertCall], None]:
        return functools.partial(_run, problem, config)


def _run(problem: InsertProblem, config: TokenBlocks, call: InsertCall) -> None:
    if call.kv_cache.shape[0] == 0:
        return
    with plain_arithmetic(call.k.device):
        for first in range(0, problem.tokens, config.tokens):
            some = slice(first, first + config.tokens)
            steps = call.steps
            if steps.positions is not None:
                steps = steps._replace(positions=steps.positions[some])
            _insert(problem, call.k[some], call.slot_mapping[some], call.kv_cache, steps)


def _insert(problem: InsertProblem, k: torch.Tensor, slots: torch.Tensor, kv_cache: torch.Tensor, steps: Steps) -> None:
    layout = problem.layout
    values, scales = quantized(transformed(k, steps), layout)
    place, scale_place = places(kv_cache, layout)
    kept = (slots >= 0) & (slots < kv_cache.shape[0] * layout.page)
    source = torch.where(kept, torch.arange(len(k), device=k.device), kept.int().argmax())
    some = kept.any()
    slot = torch.where(some, slots[source], 0)
    block, inner = slot // layout.page, slot % layout.page
    at = (block, inner // 16, inner % 16) if layout.order == "preshuffled" else (block, inner)
    # Where every token is skipped, one place keeps what it holds.
    place[at] = torch.where(some, values[source].view(len(k), *place.shape[-2:]), place[at])
    scale_place[block, inner] = torch.where(some, scales[source], scale_place[block, inner])
