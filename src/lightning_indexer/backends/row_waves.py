"""Scores and selection in one call, by any two kernels: waves of rows through one workspace.

A wave is scored into the workspace and selected from while its scores are still in the cache; the next wave takes their
place. What each wave needs is planned once. Windows are data of the device: nothing is read back, and every wave has
the width that all of them have.

Scores lie in the plain form, columns outside the windows unspecified, and the selection is given the windows; or, where
the caller bounds the windows and the kernel that scores can, in the compressed form, and the selection is given
columns.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from lightning_indexer.arch import MIB, Arch
from lightning_indexer.problems.mqa_logits import MqaLogitsCall, row_stride
from lightning_indexer.problems.mqa_topk import ALIGN_BYTES, MqaTopKCall, MqaTopKProblem
from lightning_indexer.problems.paged_mqa_logits import PagedMqaLogitsCall
from lightning_indexer.problems.paged_mqa_topk import PagedMqaTopKCall, PagedMqaTopKProblem, row_ends
from lightning_indexer.problems.top_k import TopKCall, TopKProblem

if TYPE_CHECKING:
    from lightning_indexer.amd.built import Built

Problem = MqaTopKProblem | PagedMqaTopKProblem
# Of the last cache: a wave's scores, beside the keys that it reads and what writes back.
CACHE_SHARE = 5 / 8
# Waves are not made smaller for a small cache: each costs two launches and the ends of two kernels.
LEAST_WAVE_BYTES = 16 * MIB


@dataclass(frozen=True, slots=True)
class Waves:
    """How one call is cut.

    Attributes:
        rows: of a wave; the last one may have fewer.
        overlapped: two places for scores, a wave selected from on a second stream while the next one is scored.
        scoring, selection: the configs of a whole wave.
        plain: windows are bounded, and scores lie in the plain form all the same.
    """

    rows: int
    overlapped: bool
    scoring: Any
    selection: Any
    plain: bool = False

    def __str__(self) -> str:
        return f"waves of {self.rows} rows{', overlapped' if self.overlapped else ''}: {self.scoring}, {self.selection}"


def wave_bytes(problem: Problem, arch: Arch) -> int:
    """How much of the workspace the scores of a wave take, so that they stay in the cache."""
    if not arch.cache_bytes:
        return problem.workspace_bytes
    return min(problem.workspace_bytes, max(LEAST_WAVE_BYTES, int(CACHE_SHARE * arch.cache_bytes)))


def measured_wave_bytes(problem: Problem, arch: Arch) -> int:
    """The same, but on Hopper all of the workspace: a wave costs more there than scores in the L2 save, measured."""
    return problem.workspace_bytes if arch.name == "sm90" else wave_bytes(problem, arch)


class RowWaves:
    """A kernel of ``fp8_mqa_topk``, or of ``fp8_paged_mqa_topk``, made of one that scores and one that selects."""

    def __init__(
        self,
        scoring: Any,
        selections: Sequence[tuple[Any, Callable[[], str | None]]],
        row_block: Callable[[Any], int] = lambda config: 1,
        wave_bytes: Callable[[Problem, Arch], int] = wave_bytes,
    ) -> None:
        """
        Args:
            scoring: a kernel of ``fp8_mqa_logits`` or ``fp8_paged_mqa_logits``.
            selections: kernels of ``top_k_per_row``, each with what is missing for it; the first that runs is taken.
            row_block: of a config of ``scoring``, the rows that it works on together: waves are whole row blocks.
            wave_bytes: how much of the workspace the scores of a wave take.
        """
        self.scoring, self.selections, self.row_block = scoring, selections, row_block
        self.wave_bytes = wave_bytes

    def supports(self, problem: Problem, arch: Arch) -> str | None:
        problem = self._formed(problem, arch)
        rows = self._rows(problem, self.wave_bytes(problem, arch))
        reason: str | None = self.scoring.supports(_scoring_of(problem, rows), arch)
        if reason is not None:
            return reason
        reasons = [kernel.supports(selection_of(problem, rows), arch) for kernel, _ in self.selections]
        return None if None in reasons else "; ".join(map(str, reasons))

    def config(self, problem: Problem, arch: Arch) -> Waves:
        return self.of_wave_bytes(problem, arch, self.wave_bytes(problem, arch))

    def of_wave_bytes(self, problem: Problem, arch: Arch, size: int, *, overlapped: bool = False) -> Waves:
        """Waves whose scores take about ``size`` bytes: whole row blocks, or one, where the workspace has room."""
        given, problem = problem, self._formed(problem, arch)
        rows = self._rows(problem, size)
        block = _unit(problem) * self.row_block(self.scoring.config(_scoring_of(problem, rows), arch))
        rows = max(rows, min(block, problem.rows // _unit(problem) * _unit(problem)))
        while True:
            if rows >= block:
                # As many waves, of one size: the last one is not left with a few rows.
                waves = max(1, -(-problem.rows // rows))
                rows = max(block, min(rows - rows % block, -(-problem.rows // (waves * block)) * block))
            scoring, selection = _scoring_of(problem, rows), selection_of(problem, rows)
            selects = self.selection(selection, arch).config(selection, arch)
            chosen = Waves(rows, overlapped, self.scoring.config(scoring, arch), selects, problem is not given)
            if rows <= _unit(problem):
                return chosen
            if Launch(self, given, arch, chosen).workspace_bytes <= problem.workspace_bytes:
                return chosen
            rows = max(_unit(problem), rows * 7 // 8 // _unit(problem) * _unit(problem))

    def neighbours(self, problem: Problem, arch: Arch) -> list[Waves]:
        """The heuristic's choice first, then waves of other sizes."""
        chosen = self.config(problem, arch)
        sizes = [min(problem.workspace_bytes, mib * MIB) for mib in (8, 16, 24, 32, 48, 64)]
        others = [self.of_wave_bytes(problem, arch, size) for size in sizes]
        if arch.vendor == "nvidia":
            others += [self.of_wave_bytes(problem, arch, size, overlapped=True) for size in sizes]
        return [chosen, *(config for config in dict.fromkeys(others) if config != chosen)]

    def launch(self, problem: Problem, arch: Arch, config: Waves) -> Launch:
        return Launch(self, problem, arch, config)

    def selection(self, problem: TopKProblem, arch: Arch) -> Any:
        """The kernel that selects from a wave."""
        able = [(kernel, missing) for kernel, missing in self.selections if kernel.supports(problem, arch) is None]
        return next((kernel for kernel, missing in able if missing() is None), able[-1][0])

    def _rows(self, problem: Problem, size: int) -> int:
        unit = _unit(problem)
        rows = size // (4 * row_stride(problem.width, torch.float32)) if problem.width else problem.rows
        return max(unit, min(problem.rows, rows) // unit * unit)

    def _formed(self, problem: Problem, arch: Arch) -> Problem:
        """The problem in the form in which its scores lie."""
        if not _is_compressed(problem) or self.scoring.supports(_scoring_of(problem, 1), arch) is None:
            return problem
        return plain(problem)


class CompiledRowWaves(RowWaves):
    """The same where the kernel that scores can be compiled for AMD, and looked at, without a device."""

    def build(self, problem: Problem, arch: Arch) -> Built:
        """The kernel that scores a wave."""
        built: Built = self.scoring.build(_scoring_of(problem, self.config(problem, arch).rows), arch)
        return built


def _unit(problem: Problem) -> int:
    """Rows that are never in two waves: those of one sequence."""
    return problem.scoring.next_n if isinstance(problem, PagedMqaTopKProblem) else 1


def _scoring_of(problem: Problem, rows: int) -> Any:
    """The scoring of a wave."""
    if isinstance(problem, PagedMqaTopKProblem):
        return problem.scoring._replace(batch=rows // problem.scoring.next_n)
    return problem.scoring._replace(rows=rows)


def selection_of(problem: Problem, rows: int) -> TopKProblem:
    """The selection of a wave, from the workspace. Compressed, a column is no position: those come as offsets."""
    selection = problem.selection._replace(rows=rows)
    if _is_compressed(problem) and selection.index_base == "absolute":
        selection = selection._replace(index_base="offset")
    return selection


def _is_compressed(problem: Problem) -> bool:
    return isinstance(problem, MqaTopKProblem) and problem.scoring.compressed


def plain(problem: Problem) -> Problem:
    """The same without a bound of the windows."""
    assert isinstance(problem, MqaTopKProblem)
    scoring = problem.scoring._replace(max_seqlen_k=0)
    return problem._replace(scoring=scoring, selection=problem.selection._replace(width=scoring.width))


class _Part(NamedTuple):
    """The two runs of a wave of some number of rows."""

    score: Any
    select: Any
    select_bytes: int


class Launch:
    """The waves of one problem; called with the tensors, they run on the current stream.

    ``workspace_bytes``: one place for scores, or two, and what the selection works in.
    """

    def __init__(self, kernel: RowWaves, problem: Problem, arch: Arch, config: Waves) -> None:
        self.scored = problem.needs_scores and problem.width > 0
        self.bound = 0
        if config.plain:
            self.bound, problem = problem.width, plain(problem)
        unit = _unit(problem)
        self.problem, self.overlapped = problem, config.overlapped and problem.rows > config.rows > unit
        rows = config.rows // 2 // unit * unit if self.overlapped else config.rows
        self.rows = rows = min(rows, problem.rows)
        self.parts = {
            size: self._part(kernel, arch, size, config)
            for size in {min(rows, problem.rows - start) for start in range(0, problem.rows, max(1, rows))}
        }
        self.stride = row_stride(problem.width, torch.float32)
        self.places = 2 if self.overlapped else 1
        self.select_bytes = max((part.select_bytes for part in self.parts.values()), default=0)
        self.select_bytes = -(-self.select_bytes // ALIGN_BYTES) * ALIGN_BYTES
        self.workspace_bytes = self.select_bytes + self.places * 4 * rows * self.stride
        self.streams: dict[torch.device, torch.cuda.Stream] = {}

    def _part(self, kernel: RowWaves, arch: Arch, rows: int, config: Waves) -> _Part:
        # The last wave runs the same kernels.
        selection = selection_of(self.problem, rows)
        select = kernel.selection(selection, arch).launch(selection, arch, config.selection)
        score = kernel.scoring.launch(_scoring_of(self.problem, rows), arch, config.scoring)
        return _Part(score, select, int(getattr(select, "workspace_bytes", 0)))

    def bind(self, call: Any) -> Callable[[Any], None]:
        """What runs this call, and every other one whose devices, shapes and strides are the same."""
        problem = self.problem
        compressed = _is_compressed(problem)
        if self.rows < problem.rows or not problem.rows or not self.scored or compressed or self.bound:
            return self
        return OneWave(self, call)

    @torch.no_grad()
    def __call__(self, call: Any) -> None:
        if not self.problem.rows:
            return
        if not self.problem.width:  # no kernel is launched without keys
            call.indices.fill_(-1)
            if call.values is not None:
                call.values.fill_(float("-inf"))
            return
        workspace = call.workspace
        if workspace is None:
            workspace = torch.empty(self.workspace_bytes, dtype=torch.uint8, device=call.q.device)
        places, selects_in = self.cut_workspace(workspace)
        if not self.scored:
            for place in places:
                place.zero_()  # every position is selected; equal scores are as good as any
        steps = self.steps(call, places, selects_in)
        if self.overlapped:
            self._overlap(steps, call.q.device)
            return
        for scoring, selection in steps:
            part = self.parts[selection.logits.shape[0]]
            self._score(part, scoring, selection)
            part.select(selection)

    def steps(
        self, call: Any, places: list[torch.Tensor], selects_in: torch.Tensor | None
    ) -> Iterator[tuple[Any, TopKCall]]:
        """The two calls of each wave."""
        if isinstance(self.problem, PagedMqaTopKProblem):
            return _cut_pages(self.problem, call, self.rows, places, selects_in)
        return _cut(self.problem, self.bound, call, self.rows, places, selects_in)

    def _score(self, part: _Part, scoring: Any, selection: TopKCall) -> None:
        if self.scored:
            part.score(scoring)
            if self.problem.force_first or self.problem.force_last:
                _keep(self.problem, selection)

    def _overlap(self, steps: Iterator[tuple[Any, TopKCall]], device: torch.device) -> None:
        """Scoring on the current stream, selection on another one, which the current one waits for in the end."""
        main = torch.cuda.current_stream(device)
        side = self.streams.setdefault(device, torch.cuda.Stream(device))  # type: ignore[no-untyped-call]
        selected: list[torch.cuda.Event] = []
        for scoring, selection in steps:
            part = self.parts[selection.logits.shape[0]]
            if len(selected) >= self.places:
                main.wait_event(selected[-self.places])
            self._score(part, scoring, selection)
            side.wait_event(main.record_event())
            with torch.cuda.stream(side):
                part.select(selection)
            selected.append(side.record_event())
        main.wait_event(selected[-1])

    def cut_workspace(self, workspace: torch.Tensor) -> tuple[list[torch.Tensor], torch.Tensor | None]:
        """Where waves put their scores, [rows, width] float32 each, rows padded, and what the selection works in."""
        size = self.rows * self.stride
        floats = workspace[: self.workspace_bytes].view(torch.float32)
        first = floats.storage_offset() + self.select_bytes // 4
        places = [
            floats.as_strided((self.rows, self.problem.width), (self.stride, 1), first + place * size)
            for place in range(self.places)
        ]
        return places, workspace[: self.select_bytes] if self.select_bytes else None


class OneWave:
    """The calls of one wave that agree in devices, shapes and strides, as those of decode: nothing is cut, and the two
    runs are bound."""

    def __init__(self, launch: Launch, call: Any) -> None:
        problem = launch.problem
        self.launch, self.problem = launch, problem
        self.size, self.stride = (problem.rows, problem.width), (launch.stride, 1)
        self.forced = bool(problem.force_first or problem.force_last)
        self.records: Callable[[Any, torch.Tensor, torch.Tensor | None], tuple[Any, TopKCall]] = self._of_keys
        if isinstance(problem, PagedMqaTopKProblem):
            self.records = self._of_pages
            self.lengths_are_ends = lengths_are_ends(call)
        self.runs: tuple[Any, Any] | None = None  # that score and select, bound by the first call

    def __call__(self, call: Any) -> None:
        scores, selects_in = self._workspace(call)
        scoring, selection = self.records(call, scores, selects_in)
        if self.runs is None:
            self.runs = self._bind(scoring, selection)
        score, select = self.runs
        score(scoring)
        if self.forced:
            _keep(self.problem, selection)
        select(selection)

    def _bind(self, scoring: Any, selection: TopKCall) -> tuple[Any, Any]:
        """The runs of the two calls, and of others that agree with them."""
        (part,) = self.launch.parts.values()
        score, select = part.score, part.select
        return (
            score.bind(scoring) if hasattr(score, "bind") else score,
            select.bind(selection) if hasattr(select, "bind") else select,
        )

    def _workspace(self, call: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The wave's scores, and what the selection works in."""
        workspace, device = call.workspace, call.q.device
        if workspace is None:
            if not self.launch.select_bytes:  # scores are all of it
                return _empty_strided(self.size, self.stride, dtype=_float32, device=device), None
            workspace = torch.empty(self.launch.workspace_bytes, dtype=torch.uint8, device=device)
        (scores,), selects_in = self.launch.cut_workspace(workspace)
        return scores, selects_in

    def _of_keys(
        self, call: MqaTopKCall, scores: torch.Tensor, selects_in: torch.Tensor | None
    ) -> tuple[MqaLogitsCall, TopKCall]:
        q, k, kv_scale, weights, ks, ke, offsets, pages, indices, values, _ = call
        return (
            _scoring((q, k, kv_scale, weights, ks, ke, False, 0, _float32, scores, None)),
            _selection((scores, ks, ke, offsets, pages, indices, values, selects_in)),
        )

    def _of_pages(
        self, call: PagedMqaTopKCall, scores: torch.Tensor, selects_in: torch.Tensor | None
    ) -> tuple[PagedMqaLogitsCall, TopKCall]:
        q, cache, weights, lengths, tables, layout, sequences, offsets, pages, indices, values, _ = call
        ends = lengths if self.lengths_are_ends else row_ends(lengths, q.shape[1]).contiguous()
        return (
            _paged_scoring(
                (q, cache, weights, lengths, tables, self.size[1], layout, sequences, False, _float32, scores, None)
            ),
            _selection((scores, None, ends, offsets, pages, indices, values, selects_in)),
        )


def lengths_are_ends(call: PagedMqaTopKCall) -> bool:
    """Lengths as they are given are what a selection takes as the ends of rows."""
    lengths = call.context_lens
    return lengths.dim() == 1 and lengths.is_contiguous() and call.q.shape[1] == 1


# What calling the classes does, in a third of the time; a global is found in less time than an attribute of a module.
_scoring: Callable[[Iterable[Any]], MqaLogitsCall] = functools.partial(tuple.__new__, MqaLogitsCall)
_paged_scoring: Callable[[Iterable[Any]], PagedMqaLogitsCall] = functools.partial(tuple.__new__, PagedMqaLogitsCall)
_selection: Callable[[Iterable[Any]], TopKCall] = functools.partial(tuple.__new__, TopKCall)
_empty_strided, _float32 = torch.empty_strided, torch.float32


def _cut(
    problem: MqaTopKProblem,
    bound: int,
    call: MqaTopKCall,
    rows: int,
    places: list[torch.Tensor],
    workspace: torch.Tensor | None,
) -> Iterator[tuple[MqaLogitsCall, TopKCall]]:
    """The calls of each wave; ``bound`` is that of windows whose scores lie in the plain form, or 0."""
    starts, ends, offsets = call.ks, call.ke, call.offsets
    if problem.scoring.compressed:
        starts, ends, offsets = _columns(problem, call)
    elif bound:
        ends = torch.minimum(ends, starts.clamp(-bound, problem.keys - bound).add_(bound))
    q, weights, ks, ke = (_split(tensor, rows) for tensor in (call.q, call.weights, call.ks, call.ke))
    first, last, indices = _split(starts, rows), _split(ends, rows), _split(call.indices, rows)
    moved, tables, values = (_split_optional(tensor, rows) for tensor in (offsets, call.page_table, call.values))
    form = (False, problem.scoring.max_seqlen_k, torch.float32)
    for wave, part in enumerate(q):
        scores = places[wave % len(places)]
        scores = scores if part.shape[0] == rows else scores[: part.shape[0]]
        yield (
            MqaLogitsCall(part, call.k, call.kv_scale, weights[wave], ks[wave], ke[wave], *form, scores),
            TopKCall(
                scores, first[wave], last[wave], _at(moved, wave), _at(tables, wave), indices[wave],
                _at(values, wave), workspace,
            ),
        )  # fmt: skip


def _cut_pages(
    problem: PagedMqaTopKProblem,
    call: PagedMqaTopKCall,
    rows: int,
    places: list[torch.Tensor],
    workspace: torch.Tensor | None,
) -> Iterator[tuple[PagedMqaLogitsCall, TopKCall]]:
    """The calls of each wave: the sequences of so many rows."""
    count = rows // problem.scoring.next_n
    lengths, q, weights = _split(call.context_lens, count), _split(call.q, count), _split(call.weights, rows)
    # Of ragged batches the table is that of all sequences.
    sequences = _split_optional(call.sequences, count)
    tables = None if sequences is not None else _split(call.block_tables, count)
    ends = _split(row_ends(call.context_lens, problem.scoring.next_n).contiguous(), rows)
    indices = _split(call.indices, rows)
    moved, pages, values = (_split_optional(tensor, rows) for tensor in (call.offsets, call.page_table, call.values))
    for wave, part in enumerate(q):
        scores = places[wave % len(places)]
        scores = scores if part.shape[0] == count else scores[: part.shape[0] * problem.scoring.next_n]
        yield (
            PagedMqaLogitsCall(
                part, call.kv_cache, weights[wave], lengths[wave],
                call.block_tables if tables is None else tables[wave], problem.width, call.layout,
                _at(sequences, wave), False, torch.float32, scores,
            ),
            TopKCall(
                scores, None, ends[wave], _at(moved, wave), _at(pages, wave), indices[wave],
                _at(values, wave), workspace,
            ),
        )  # fmt: skip


def _split(tensor: torch.Tensor, rows: int) -> tuple[torch.Tensor, ...]:
    if tensor.shape[0] <= rows:  # one wave, as in decode: no view has to be made
        return (tensor,)
    return tensor.split(rows)  # type: ignore[no-untyped-call,no-any-return]


def _split_optional(tensor: torch.Tensor | None, rows: int) -> tuple[torch.Tensor, ...] | None:
    return None if tensor is None else _split(tensor, rows)


def _at(parts: tuple[torch.Tensor, ...] | None, wave: int) -> torch.Tensor | None:
    return None if parts is None else parts[wave]


def _columns(problem: MqaTopKProblem, call: MqaTopKCall) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Starts and ends of the windows as columns of compressed scores, and what makes positions of indices."""
    keys, width = problem.keys, problem.width
    # A window that starts further left than the width has no column; nothing overflows.
    ks = call.ks.clamp(-width, keys)
    ends = call.ke.clamp(0, keys).sub_(ks)
    offsets = call.offsets
    if problem.selection.index_base == "absolute":
        offsets = ks.clamp(min=0)
    return ks.clamp(max=0).neg_(), ends, offsets


def _keep(problem: Problem, selection: TopKCall) -> None:
    """+inf at the first and last positions of each window of a wave."""
    width, scores = problem.width, selection.logits
    assert selection.row_ends is not None
    end = selection.row_ends.clamp(0, width)[:, None]
    start = torch.zeros_like(end) if selection.row_starts is None else selection.row_starts.clamp(0, width)[:, None]
    steps = torch.arange(max(problem.force_first, problem.force_last), device=scores.device, dtype=torch.int32)
    first = torch.minimum(start + steps[: problem.force_first], end - 1)
    last = torch.maximum(end - 1 - steps[: problem.force_last], start)
    # Windows without positions have one column written to that belongs to none.
    columns = torch.cat((first, last), dim=1).clamp_(0, width - 1)
    scores.scatter_(1, columns.long(), float("inf"))
