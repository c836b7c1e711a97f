"""The A B A B: one prompt, one stack, two backends in turn."""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch

from lightning_indexer.bench import environment
from lightning_indexer.e2e.checks import Checked, Checker
from lightning_indexer.e2e.clock import Clock, synchronize
from lightning_indexer.e2e.dims import Dims
from lightning_indexer.e2e.prompt import Prompt, make_prompt
from lightning_indexer.e2e.stack import Stack, default_dtype, needed_bytes

# Phases that make up the indexer; "logits" is the call that the two sides differ in.
INDEXER = ("indexer projections", "quantise", "gather", "logits", "top-k")
MIN_OVERLAP = 0.999


@dataclass(frozen=True, slots=True)
class Plan:
    """What is run.

    Attributes:
        dims, layers: the stack.
        contexts: prompt lengths, in tokens.
        backends: the two sides, by name.
        step: tokens of one prefill step.
        max_logits_bytes: budget of one chunk's logits.
        repeats: timed runs of each side.
        needles, checked_rows: what the untimed run of each side is held against.
        trace_folder: where kernel traces go; None records none.
    """

    dims: Dims
    layers: int
    contexts: tuple[int, ...]
    backends: tuple[str, str]
    step: int
    max_logits_bytes: int
    repeats: int
    needles: int
    checked_rows: int
    seed: int
    trace_folder: Path | None


@dataclass(slots=True)
class Side:
    """One backend at one context: seconds of each timed run, by phase too; its checks; its trace."""

    label: str
    backend: str
    checked: Checked
    ttft: list[float] = field(default_factory=list)
    phases: list[dict[str, float]] = field(default_factory=list)
    peak_bytes: int | None = None
    trace: Path | None = None

    def seconds(self, *phases: str) -> float:
        """Median over the runs of the phases' sum."""
        return statistics.median(sum(run.get(phase, 0.0) for phase in phases) for run in self.phases)

    @property
    def median_ttft(self) -> float:
        return statistics.median(self.ttft)

    @property
    def passed(self) -> bool:
        c = self.checked
        return c.selected == c.answered == c.needles and c.overlap_mean >= MIN_OVERLAP


@dataclass(frozen=True, slots=True)
class Result:
    """Both sides at one context; or the reason why it was left out."""

    context: int
    sides: tuple[Side, ...]
    left_out: str | None = None


def run(plan: Plan, device: torch.device, progress: Callable[[str], None]) -> list[Result]:
    """Runs every context of the plan. ``progress`` is told what begins."""
    dtype = default_dtype(device)
    results = []
    stack: Stack | None = None
    for context in plan.contexts:
        needed = needed_bytes(plan.dims, plan.layers, context, plan.step, plan.max_logits_bytes, dtype)
        if (reason := environment.no_room(needed, device)) is not None and stack is None:
            results.append(Result(context, (), reason))
            continue
        stack = stack or Stack(plan.dims, plan.layers, device, dtype, plan.seed)
        prompt = make_prompt(context, plan.dims.hidden, plan.needles, device, dtype, plan.seed)
        results.append(Result(context, _run_context(plan, stack, prompt, progress)))
        del prompt
        if device.type == "cuda":
            torch.cuda.empty_cache()
    return results


def steps(plan: Plan) -> int:
    """How many times ``run`` calls ``progress``."""
    return len(plan.contexts) * 2 * (1 + plan.repeats + (plan.trace_folder is not None))


def _run_context(plan: Plan, stack: Stack, prompt: Prompt, progress: Callable[[str], None]) -> tuple[Side, ...]:
    context = prompt.embeddings.shape[0]

    def prefill(backend: str, clock: Clock, checker: Checker | None = None) -> None:
        stack.prefill(
            prompt.embeddings, backend, step=plan.step, max_logits_bytes=plan.max_logits_bytes, clock=clock,
            observer=None if checker is None else checker.observer(),
        )  # fmt: skip

    sides = []
    for label, backend in zip("AB", plan.backends, strict=True):
        # Untimed: it also compiles what the side needs.
        progress(f"{context} {label} {backend}: checks")
        checker = Checker(stack, prompt, plan.checked_rows, plan.seed)
        prefill(backend, Clock(stack.device), checker)
        sides.append(Side(label, backend, checker.result()))
    for _ in range(plan.repeats):
        for side in sides:
            progress(f"{context} {side.label} {side.backend}: timed")
            if stack.device.type == "cuda":
                torch.cuda.reset_peak_memory_stats(stack.device)
            clock = Clock(stack.device)
            clock.begin()
            prefill(side.backend, clock)
            total, phases = clock.end()
            side.ttft.append(total)
            side.phases.append(phases)
            if stack.device.type == "cuda":
                side.peak_bytes = torch.cuda.max_memory_allocated(stack.device)
    if plan.trace_folder is not None:
        plan.trace_folder.mkdir(parents=True, exist_ok=True)
        for side in sides:
            progress(f"{context} {side.label} {side.backend}: trace")
            side.trace = plan.trace_folder / f"trace-{context}-{side.label}-{side.backend}.json.gz"
            with _recording(stack.device, side.trace):
                prefill(side.backend, Clock(stack.device))
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
