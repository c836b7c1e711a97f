"""What a run is held against: the needles, and on sampled rows the top-k of the float32 reference and of the side's own
logits."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from lightning_indexer.e2e.prompt import Prompt, readout
from lightning_indexer.e2e.stack import Observer, Scored, Stack
from lightning_indexer.problems.mqa_logits import reference_logits
from lightning_indexer.problems.top_k import reference_top_k


@dataclass(frozen=True, slots=True)
class Checked:
    """Outcome of one prefill.

    Attributes:
        needles: how many were planted.
        selected: how many of them every indexer selected for the row that asks.
        answered: how many of them every layer's attention answered: its output at the row that asks is closest to that
            needle's answer of all.
        overlap_mean, overlap_worst: shared part of a row's selection and the reference's, over the sampled rows; keys
            of the lowest score that the reference selects count for each other.
        exact: rows whose selection is a top-k of the logits that it was made from: distinct keys of the window, with
            exactly the scores that the reference selects from these logits. Among equal scores any will do.
        rows: how many (row, layer) pairs were compared with the reference.
    """

    needles: int
    selected: int
    answered: int
    overlap_mean: float
    overlap_worst: float
    exact: int
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
        self._exact = 0

    def observer(self) -> Observer:
        return Observer(self._scored, self._attended)

    def result(self) -> Checked:
        count = len(self._prompt.needles)
        return Checked(
            count, count - len(self._missed), count - len(self._unanswered),
            sum(self._overlaps) / len(self._overlaps), min(self._overlaps), self._exact, len(self._overlaps),
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
        self._exact += _exact_rows(scored.logits(at), scored.selected[at], ks, ke)
        self._overlaps += _overlaps(expected, scored.selected[at])

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


def _overlaps(expected: torch.Tensor, selected: torch.Tensor) -> list[float]:
    """Of each row of ``expected`` [rows, keys], the part of its top-k that ``selected`` [rows, topk] has."""
    shares = []
    for row, columns in zip(expected, selected.tolist(), strict=True):
        wanted = min(selected.shape[1], int((row != float("-inf")).sum()))
        cut = row.topk(wanted).values[-1]
        found = row[sorted({column for column in columns if 0 <= column < len(row)})]
        above = int((row > cut).sum())
        shared = int((found > cut).sum()) + min(wanted - above, int((found == cut).sum()))
        shares.append(shared / wanted)
    return shares


def _exact_rows(logits: torch.Tensor, selected: torch.Tensor, ks: torch.Tensor, ke: torch.Tensor) -> int:
    """Rows of ``selected`` [rows, topk], absolute columns, that are a top-k of ``logits`` within the windows."""
    topk = selected.shape[1]
    _, wanted = reference_top_k(logits, topk, ks, ke)
    ordered = selected.sort(dim=1).values
    used = ordered >= 0
    inside = ((ordered >= ks[:, None]) & (ordered < ke[:, None])) | ~used
    repeated = (ordered[:, 1:] == ordered[:, :-1]) & used[:, 1:]
    found = logits.gather(1, ordered.clamp(0, logits.shape[1] - 1).long()).masked_fill(~used, float("-inf")) + 0.0
    same = (found.sort(dim=1).values == wanted.sort(dim=1).values).all(dim=1)
    count = used.sum(dim=1) == (ke - ks).clamp(0, topk)
    return int((same & count & inside.all(dim=1) & ~repeated.any(dim=1)).sum())
