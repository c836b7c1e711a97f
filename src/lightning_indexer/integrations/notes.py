"""What an engine's log says of its calls, each thing once a process: what runs here, what was taken, what was not."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from lightning_indexer import envs
from lightning_indexer.arch import Arch, arch_of, forced_arch
from lightning_indexer.problems.mqa_logits import MqaLogitsProblem, is_aligned
from lightning_indexer.selection import policy, registry
from lightning_indexer.selection.registry import Verdict

# H of the models with this indexer, and a chunk of theirs: they stand for the calls to come.
USUAL_HEADS, USUAL_ROWS, USUAL_KEYS, USUAL_HEAD_DIM = (32, 64), 4096, 32768, 128


@dataclass(slots=True)
class Notes:
    """Writes to ``logger``; ``engine`` is its name in messages.

    ``first_call_told`` is looked at by a call before it gathers what :meth:`tell_first_call` needs.
    """

    engine: str
    logger: logging.Logger
    first_call_told: bool = False
    _told_arch: bool = False
    _reasons: set[str] = field(default_factory=set)
    _taken: set[str] = field(default_factory=set)

    def runs_on(self, arch: Arch, *, compressed: bool, backend: str | None = None) -> None:
        """Which backends calls will try on ``arch``; warns where the first is missing, or has not been measured.

        ``backend`` is the one that calls will name.
        """
        if self._told_arch:
            return
        self._told_arch = True
        chains: dict[str, list[int]] = {}
        warnings: dict[str, None] = {}
        for heads in USUAL_HEADS:
            width = USUAL_KEYS if compressed else 0
            problem = MqaLogitsProblem(
                USUAL_ROWS, USUAL_KEYS, heads, USUAL_HEAD_DIM, clean_logits=False, max_seqlen_k=width
            )
            verdicts = registry.explain(problem, arch, backend or envs.backend())
            names = [verdict.backend for verdict in verdicts if not (verdict.reason or verdict.passed_over)]
            chains.setdefault(", else ".join(names) or "nothing", []).append(heads)
            warnings |= dict.fromkeys(_warnings(verdicts, problem, arch))
        told = "; ".join(f"{names} (H={', '.join(map(str, heads))})" for names, heads in chains.items())
        self.logger.info("%s on %s: calls run %s", self.engine, arch.name, told)
        for warning in warnings:
            self.logger.warning("%s: %s", self.engine, warning)

    def tell_first_call(
        self, q: torch.Tensor, k: torch.Tensor, max_seqlen_k: int, clean_logits: bool, backend: str | None
    ) -> None:
        """A call has run here. Says by which backend, the first time."""
        if self.first_call_told or torch.compiler.is_compiling():
            return
        self.first_call_told = True
        arch = arch_of(q.device)
        self.runs_on(arch, compressed=max_seqlen_k > 0, backend=backend)
        rows, heads, head_dim = q.shape
        problem = MqaLogitsProblem(
            rows,
            k.shape[0],
            heads,
            head_dim,
            q.dtype,
            k.dtype,
            torch.float32,
            clean_logits,
            max_seqlen_k,
            is_aligned(q, k),
        )
        name = registry.select(problem, arch, backend).name
        self.logger.info(
            "%s: lightning-indexer took its first call: %s, %s on %s", self.engine, name, problem, arch.name
        )

    def took(self, seam: str, what: str, *values: object) -> None:
        """A call of a seam has run here. Says so the first time for each, with the values in ``what``, as logging does:
        every call comes by, and nothing is made of them but then."""
        if seam not in self._taken and not torch.compiler.is_compiling():
            self._taken.add(seam)
            values = tuple(list(value) if isinstance(value, torch.Size) else value for value in values)
            self.logger.info("%s: lightning-indexer took its first call of %s: %s", self.engine, seam, what % values)

    def passed_on(self, reason: str) -> None:
        """A call goes to the engine's own function. Says why, the first time for each reason."""
        if reason not in self._reasons and not torch.compiler.is_compiling():
            self._reasons.add(reason)
            self.logger.warning(
                "%s: lightning-indexer passed a call on to %s's own function: %s", self.engine, self.engine, reason
            )


def check_environment() -> None:
    """What every call reads of the environment, before anything is replaced.

    Raises:
        ValueError: an unknown backend or arch, or a switch that is neither 0 nor 1.
    """
    if (name := envs.backend()) is not None:
        registry.get(name, "LIGHTNING_INDEXER_BACKEND")
    envs.kernels()
    forced_arch()


def _warnings(verdicts: Sequence[Verdict], problem: MqaLogitsProblem, arch: Arch) -> list[str]:
    found = []
    for verdict in verdicts:
        if verdict.chosen:
            if not policy.measured(problem.operation, verdict.backend, arch):
                found.append(f"{verdict.backend} has not been measured on {arch.name}: compare before you rely on it")
            break
        backend = registry.get(verdict.backend)
        if verdict.passed_over is None and backend.kernels[problem.operation].supports(problem, arch) is None:
            slower = "; what runs instead is slower than DeepGEMM" if arch.name == "sm90" else ""
            found.append(f"{verdict.backend} would run on {arch.name}, but {verdict.reason}{slower}")
    return found
