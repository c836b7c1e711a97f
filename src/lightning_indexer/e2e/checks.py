"""What a run is held against: the needles, and the top-k of the float32 reference on sampled rows."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from lightning_indexer.e2e.prompt import Prompt, readout
from lightning_indexer.e2e.stack import Observer, Scored, Stack
from lightning_indexer.problems.mqa_logits import reference_logits


@dataclass(frozen=True, slots=True)
class Checked:
    """Outcome of one prefill.

    Attributes:
        needles: how many were planted.
        selected: how many of them every indexer selected for the row that asks.
        answered: how many of them every layer's attention answered: its output at the row that asks is closest to that
            needle's answer of all.
        overlap_mean, overlap_worst: shared part of a row's selection and the reference's, over the sampled rows.
        rows: how many (row, layer) pairs were compared with the reference.
    """

    needles: int
    selected: int
    answered: int
    overlap_mean: float
    overlap_worst: float
    rows: int


class Checker:
    """Observes one prefill and keeps what :class:`Checked` needs; see :meth:`observer`."""

    def __init__(self, stack: Stack, prompt: Prompt, rows: int, seed: int) -> None:
        self._stack, self._prompt = stack, prompt
        context = prompt.embeddings.shape[0]
        sampled = torch.randperm(context, generator=torch.Generator().manual_seed(seed))[:rows].tolist()
        self._rows = sorted({*sampled, *(needle.question for needle in prompt.needles), context - 1})
        self._missed: set[int] = set()
        self._unanswered: set[int] = set()
        self._overlaps: list[float] = []

    def observer(self) -> Observer:
        return Observer(self._scored, self._attended)

    def result(self) -> Checked:
        count = len(self._prompt.needles)
        return Checked(
            count, count - len(self._missed), count - len(self._unanswered),
            sum(self._overlaps) / len(self._overlaps), min(self._overlaps), len(self._overlaps),
        )  # fmt: skip

    def _scored(self, scored: Scored) -> None:
        first, count = scored.first_position, scored.q.shape[0]
        for number, needle in enumerate(self._prompt.needles):
            row = needle.question - first
            if 0 <= row < count and not bool((scored.selected[row] == needle.key).any()):
                self._missed.add(number)
        rows = [row - first for row in self._rows if first <= row < first + count]
        if not rows:
            return
        at = torch.tensor(rows, device=scored.q.device)
        # fp8 tensors have no indexing on every device; their bytes do.
        q = scored.q.view(torch.uint8)[at].view(scored.q.dtype)
        ks, ke = scored.ks[at], scored.ke[at]
        expected = reference_logits(q, (scored.k, scored.kv_scale), scored.weights[at], ks, ke)
        width = min(scored.selected.shape[1], expected.shape[1])
        scores, columns = expected.topk(width, dim=1)
        columns.masked_fill_(scores == float("-inf"), -1)
        for theirs, ours in zip(columns.tolist(), scored.selected[at].tolist(), strict=True):
            wanted = set(theirs) - {-1}
            self._overlaps.append(len(wanted & set(ours)) / len(wanted))

    def _attended(self, layer: int, start: int, attended: torch.Tensor) -> None:
        inside = [
            (number, needle.question - start)
            for number, needle in enumerate(self._prompt.needles)
            if start <= needle.question < start + attended.shape[0]
        ]
        if not inside:
            return
        answers = torch.nn.functional.normalize(readout(self._stack.layers[layer], self._prompt.answers).float(), dim=1)
        rows = attended[torch.tensor([row for _, row in inside], device=attended.device)].float()
        closest = (rows @ answers.T).argmax(dim=1).tolist()
        self._unanswered |= {number for (number, _), found in zip(inside, closest, strict=True) if found != number}
