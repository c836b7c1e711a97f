"""The A B A B: one prompt, one stack, two sides in turn: a backend that scores and one that selects each."""

from __future__ import annotations

import contextlib
import statistics
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from lightning_indexer.arch import Arch
from lightning_indexer.check.memory import no_room
from lightning_indexer.chunking import Request, plan_chunks
from lightning_indexer.e2e.checks import Checked, Checker
from lightning_indexer.e2e.clock import Clock, synchronize
from lightning_indexer.e2e.dims import Dims
from lightning_indexer.e2e.prompt import make_prompt
from lightning_indexer.e2e.stack import FUSED, TORCH, Stack, default_dtype, needed_bytes, needs_clean
from lightning_indexer.problems.mqa_logits import MqaLogitsProblem
from lightning_indexer.problems.mqa_topk import MqaTopKProblem
from lightning_indexer.problems.top_k import TopKProblem
from lightning_indexer.selection import registry as dispatch

# Phases that make up the indexer; "scoring" and "selection" are the calls that the two sides differ in.
INDEXER = ("indexer projections", "quantise", "gather", "scoring", "selection")
MIN_OVERLAP = 0.999
# A side that names no backend: each call takes what the library chooses for its shape.
POLICY = "policy"


@dataclass(frozen=True, slots=True)
class Plan:
    """What is run.

    Attributes:
        dims, layers: the stack.
        contexts: prompt lengths, in tokens.
        backends: what scores on the two sides, by name; None leaves each call to the library's choice.
        selections: what selects, likewise; ``stack.TORCH`` is ``torch.topk``, ``stack.FUSED`` the call that scores.
        step: tokens of one prefill step.
        max_logits_bytes: budget of one chunk's logits.
        repeats: timed runs of each side.
        needles, checked_rows: what the untimed run of each side is held against.
        trace_folder: where kernel traces go; None records none.
    """

    dims: Dims
    layers: int
    contexts: tuple[int, ...]
    backends: tuple[str | None, str | None]
    selections: tuple[str | None, str | None]
    step: int
    max_logits_bytes: int
    repeats: int
    needles: int
    checked_rows: int
    seed: int
    trace_folder: Path | None


@dataclass(slots=True)
class Side:
    """One side at one context: seconds of each timed run, by phase too; its checks; its trace.

    ``ran`` and ``selection_ran`` have the calls of one layer by the backend that ran them.
    """

    label: str
    backend: str | None
    selection: str | None
    checked: Checked
    ran: dict[str, int]
    selection_ran: dict[str, int]
    ttft: list[float] = field(default_factory=list)
    phases: list[dict[str, float]] = field(default_factory=list)
    peak_bytes: int | None = None
    trace: Path | None = None

    def seconds(self, *phases: str) -> float:
        """Median over the runs of the phases' sum."""
        return statistics.median(sum(run.get(phase, 0.0) for phase in phases) for run in self.phases)

    @property
    def name(self) -> str:
        """The backend's name; of a side without one, ``policy`` and what that came to."""
        return self.backend or f"{POLICY}: {', '.join(self.ran)}"

    @property
    def selection_name(self) -> str:
        """The same of what selects."""
        return self.selection or f"{POLICY}: {', '.join(self.selection_ran)}"

    @property
    def median_ttft(self) -> float:
        return statistics.median(self.ttft)

    @property
    def passed(self) -> bool:
        c = self.checked
        return c.selected == c.answered == c.needles and c.overlap_mean >= MIN_OVERLAP and c.exact == c.rows


@dataclass(frozen=True, slots=True)
class Result:
    """Both sides at one context; or the reason why it was left out."""

    context: int
    sides: tuple[Side, ...]
    left_out: str | None = None


def run(plan: Plan, device: torch.device, arch: Arch, progress: Callable[[str], None]) -> list[Result]:
    """Runs every context of the plan, but for those that do not fit. ``progress`` is told what begins."""
    dtype = default_dtype(device)
    results = []
    stack: Stack | None = None
    for context in plan.contexts:
        needed = needed_bytes(plan.dims, plan.layers, context, plan.step, plan.max_logits_bytes, dtype)
        held = 0 if stack is None else stack.weight_bytes()
        reason = no_room(needed - held, device)
        sides: tuple[Side, ...] = ()
        if reason is None:
            try:
                stack = stack or Stack(plan.dims, plan.layers, device, dtype, plan.seed)
                sides = _run_context(plan, stack, context, arch, progress)
            except torch.OutOfMemoryError as error:  # the estimate was too low; other contexts keep their results
                reason = f"ran out of memory: {str(error).splitlines()[0]}"
        results.append(Result(context, sides, reason))
        if device.type == "cuda":
            torch.cuda.empty_cache()
    return results


def problems(dims: Dims, context: int, step: int, max_logits_bytes: int, selection: str | None = None) -> list[Any]:
    """The scoring calls of one layer in the prefill of one context, in order."""
    clean = needs_clean(selection)
    budget = None if selection == FUSED else max_logits_bytes
    calls = [
        MqaLogitsProblem(chunk.rows, chunk.keys, dims.index_heads, dims.index_dim, clean_logits=clean)
        for start in range(0, context, step)
        for chunk in plan_chunks([Request(start, min(step, context - start))], max_logits_bytes=budget)
    ]
    if selection != FUSED:
        return list(calls)
    return [MqaTopKProblem(call, cut) for call, cut in zip(calls, selections(dims, calls), strict=True)]


def selections(dims: Dims, calls: Sequence[Any]) -> list[TopKProblem]:
    """The selecting calls behind these scoring calls."""
    return [TopKProblem(call.rows, call.keys, dims.index_topk, index_base="absolute") for call in calls]


def ran(calls: Sequence[Any], arch: Arch, backend: str | None) -> dict[str, int]:
    """How many of the calls each backend runs; all, where that is no backend.

    Raises:
        As :func:`dispatch.select`.
    """
    if backend in (TORCH, FUSED):
        return {backend: len(calls)}
    return dict(Counter(dispatch.select(problem, arch, backend).name for problem in calls))


def steps(plan: Plan) -> int:
    """How many times ``run`` calls ``progress``."""
    return len(plan.contexts) * 2 * (1 + plan.repeats + (plan.trace_folder is not None))


def _run_context(
    plan: Plan, stack: Stack, context: int, arch: Arch, progress: Callable[[str], None]
) -> tuple[Side, ...]:
    prompt = make_prompt(context, plan.dims.hidden, plan.needles, stack.device, stack.dtype, plan.seed)

    def prefill(backend: str | None, selection: str | None, clock: Clock, checker: Checker | None = None) -> None:
        stack.prefill(
            prompt.embeddings, backend, selection, step=plan.step, max_logits_bytes=plan.max_logits_bytes, clock=clock,
            observer=None if checker is None else checker.observer(),
        )  # fmt: skip

    sides = []
    for label, backend, selection in zip("AB", plan.backends, plan.selections, strict=True):
        # Untimed: it also compiles what the side needs.
        progress(f"{context} {label} {backend or POLICY} {selection or POLICY}: checks")
        checker = Checker(stack, prompt, plan.checked_rows, plan.seed)
        prefill(backend, selection, Clock(stack.device), checker)
        calls = problems(plan.dims, context, plan.step, plan.max_logits_bytes, selection)
        selecting = ran(selections(plan.dims, calls), arch, selection)
        sides.append(Side(label, backend, selection, checker.result(), ran(calls, arch, backend), selecting))
    for _ in range(plan.repeats):
        for side in sides:
            progress(f"{context} {side.label} {side.backend or POLICY} {side.selection or POLICY}: timed")
            if stack.device.type == "cuda":
                torch.cuda.reset_peak_memory_stats(stack.device)
            clock = Clock(stack.device)
            clock.begin()
            prefill(side.backend, side.selection, clock)
            total, phases = clock.end()
            side.ttft.append(total)
            side.phases.append(phases)
            if stack.device.type == "cuda":
                side.peak_bytes = torch.cuda.max_memory_allocated(stack.device)
    if plan.trace_folder is not None:
        plan.trace_folder.mkdir(parents=True, exist_ok=True)
        for side in sides:
            what = f"{side.backend or POLICY} {side.selection or POLICY}"
            progress(f"{context} {side.label} {what}: trace")
            side.trace = plan.trace_folder / f"trace-{context}-{side.label}-{what.replace(' ', '-')}.json.gz"
            with _recording(stack.device, side.trace):
                prefill(side.backend, side.selection, Clock(stack.device))
    return tuple(sides)


@contextlib.contextmanager
def _recording(device: torch.device, path: Path) -> Iterator[None]:
    """Writes a kernel trace of what runs inside."""
    from torch.profiler import ProfilerActivity, profile

    activity = ProfilerActivity.CUDA if device.type == "cuda" else ProfilerActivity.CPU
    with profile(activities=[activity]) as profiler:
        yield
        synchronize(device)
    profiler.export_chrome_trace(str(path))
