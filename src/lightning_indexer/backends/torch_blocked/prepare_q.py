"""Queries transformed and quantised in PyTorch, a block of tokens at a time. The CPU backend, and the fallback."""

from __future__ import annotations

import functools
from collections.abc import Callable

from lightning_indexer.arch import Arch
from lightning_indexer.backends.torch_blocked.insert_k_cache import TokenBlocks
from lightning_indexer.problems.checks import plain_arithmetic
from lightning_indexer.problems.prepare_q import PrepareQCall, PrepareQProblem, quantized
from lightning_indexer.problems.transform import transformed


def heuristic(problem: PrepareQProblem, arch: Arch) -> TokenBlocks:
    """As rows of an insert, H of them a token."""
    return TokenBlocks(max(1, (1024 if arch.vendor == "cpu" else 2**18) // problem.heads))


class PrepareQ:
    """Runs every problem on every arch."""

    config = staticmethod(heuristic)

    def supports(self, problem: PrepareQProblem, arch: Arch) -> str | None:
        return None

    def neighbours(self, problem: PrepareQProblem, arch: Arch) -> list[TokenBlocks]:
        chosen = heuristic(problem, arch)
        return [chosen, TokenBlocks(max(1, chosen.tokens // 2)), TokenBlocks(chosen.tokens * 2)]

    def launch(self, problem: PrepareQProblem, arch: Arch, config: TokenBlocks) -> Callable[[PrepareQCall], None]:
        return functools.partial(_run, problem, config)


def _run(problem: PrepareQProblem, config: TokenBlocks, call: PrepareQCall) -> None:
    out, out_weights = call.results
    assert call.weight_scale is not None
    with plain_arithmetic(call.q.device):
        for first in range(0, problem.tokens, config.tokens):
            some = slice(first, first + config.tokens)
            steps = call.steps
            if steps.positions is not None:
                steps = steps._replace(positions=steps.positions[some])
            q, scale = quantized(transformed(call.q[some], steps), call)
            out[some] = q
            out_weights[some] = call.weights[some].float() * (scale * call.weight_scale)
