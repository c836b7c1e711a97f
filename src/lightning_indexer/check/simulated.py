"""``lightning-indexer verify --arch``: AMD kernels executed in the simulator, against the float32 oracle.

The checks are those of ``verify`` on a GPU. The simulator adds its own: no access outside a tensor, no store to an
input, no value used before the wait for it, no LDS read before it was written. Waves run in an order shuffled by seed,
memory operations take effect as late as they may. Nothing is timed: the simulator counts, it has no clock.
"""

from __future__ import annotations

import itertools
import multiprocessing
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from dataclasses import dataclass, replace
from typing import Any

import torch

from lightning_indexer import envs
from lightning_indexer.amd import simulation
from lightning_indexer.arch import Arch
from lightning_indexer.backends.gluon_gfx950.config import many_rows
from lightning_indexer.backends.hip_gfx950.config import Tunables
from lightning_indexer.backends.hip_gfx950.config import heuristic as hip_heuristic
from lightning_indexer.check import simulated_hip
from lightning_indexer.check.cases import (
    FORMS,
    WINDOWS,
    Case,
    Form,
    Inputs,
    Window,
    make_inputs,
    make_windows,
    window_applies,
)
from lightning_indexer.check.guarded import GuardedOutput
from lightning_indexer.check.verify import call, compressed_width, judge, oracles, with_signed_scales
from lightning_indexer.fp8 import E4M3FNUZ_MAX, quantize_k
from lightning_indexer.selection import registry

# Few rows; an odd number of keys, and one that makes whole tiles.
SHAPES = ((5, 301), (8, 512))
HEADS, HEAD_DIMS = (32, 64), (64, 128)
# Backends whose plan depends on H and on how many rows there are: H=128 in full, and many rows.
ROWS_SHARE_TILES = ("gluon-gfx950", "flydsl")
# What else kernels may be built for, fewer cases of each, and the smallest shapes.
OTHER_SIZES = ((8, 32), (16, 64), (128, 128), (32, 32))
TINY_SHAPES = ((1, 1), (1, 17), (3, 130))
FN, FNUZ = torch.float8_e4m3fn, torch.float8_e4m3fnuz


@dataclass(frozen=True, slots=True)
class SimulatedCase:
    """One call.

    Attributes:
        arch, backend, case: what runs.
        q_dtype, k_dtype: fp8 dialects of the operands; fn operands hold bytes 0x80, -0.0 there and NaN in fnuz.
        chunk: columns that one program owns, so that its pipelined loop runs for longer than the few keys here ask
            for; 0 leaves it to the backend. ``gluon-gfx950`` takes its config of many rows then.
        seed: of the order of the waves.
        tunables: of ``hip-gfx950``, in place of its heuristic's; None leaves them to it.
    """

    arch: str
    backend: str
    case: Case
    q_dtype: torch.dtype
    k_dtype: torch.dtype
    chunk: int = 0
    seed: int = 0
    tunables: Tunables | None = None

    def __str__(self) -> str:
        names = {FN: "fn", FNUZ: "fnuz"}
        dialects = f" q={names[self.q_dtype]} k={names[self.k_dtype]}" if self.arch == "gfx942" else ""
        chunk = f" chunk={self.chunk}" if self.chunk else ""
        tunables = f" {self.tunables}" if self.tunables else ""
        return f"{self.arch} {self.backend} {self.case}{dialects}{chunk}{tunables} seed={self.seed}"


@dataclass(frozen=True, slots=True)
class SimulatedOutcome:
    """What came of a case: empty ``faults`` where it passed.

    ``instructions``: wave-instructions; ``seconds``: the simulator's; ``total_seconds``: with compiler and oracle.
    """

    case: SimulatedCase
    faults: str
    diff: float | None
    instructions: int
    seconds: float
    total_seconds: float


def sweep(
    arch: str,
    backends: Sequence[str],
    *,
    windows: Sequence[str] = WINDOWS,
    heads: Sequence[int] | None = None,
    head_dims: Sequence[int] | None = None,
    seed: int = 0,
    thorough: bool = False,
) -> list[SimulatedCase]:
    """The cases of one arch, those that share a kernel next to each other.

    Six windows x clean {1, 0} x heads x dims at two shapes, then compressed and bfloat16 results, a loop of many
    tiles, and on gfx942 the four pairs of fp8 dialects; where heads and dims are left open, other ones and tiny shapes.
    ``thorough``: every tunable combination of a backend that has tunables.
    """
    native = FNUZ if arch == "gfx942" else FN
    others = ((FN, FNUZ), (FNUZ, FN), (FNUZ, FNUZ)) if arch == "gfx942" else ()
    found: list[SimulatedCase] = []

    def add(
        backend: str, shape: tuple[int, int], h: int, d: int, names: Iterable[Window], form: Form,
        dtype: torch.dtype = torch.float32, pair: tuple[torch.dtype, torch.dtype] = (FN, FN), chunk: int = 0,
    ) -> None:  # fmt: skip
        for window in names:
            if window in windows and window_applies(window, *shape):
                case = Case(*shape, h, d, window, form, dtype)
                found.append(SimulatedCase(arch, backend, case, *pair, chunk, seed + len(found)))

    for backend, h, d in itertools.product(backends, heads or (*HEADS, 128), head_dims or HEAD_DIMS):
        if h not in HEADS and not heads and backend not in ROWS_SHARE_TILES:
            continue
        for shape in SHAPES[: 1 if h == 128 else 2]:
            add(backend, shape, h, d, WINDOWS, "clean")
            add(backend, shape, h, d, WINDOWS, "noclean")
        for pair in others:
            add(backend, SHAPES[0], h, d, ("misaligned", "multi_req"), "clean", pair=pair)
        add(backend, SHAPES[0], h, d, ("misaligned", "past_end"), "compressed", torch.bfloat16)
        if backend == "triton-portable":
            add(backend, (2, 1038), h, d, ("misaligned", "causal"), "clean", pair=(native, native), chunk=1024)
        if backend == "gluon-gfx950" and (h, d) == (64, 128):
            for form in FORMS:
                add(backend, (7, 1038), h, d, WINDOWS, form, chunk=512)
        if backend in ROWS_SHARE_TILES and (h, d) == (64, 128):
            # The rows that select a config; all but the last 90 have an empty window.
            add(backend, (4096, 90), h, d, ("causal",), "clean")
    if not heads and not head_dims:
        for backend in backends:
            for h, d in OTHER_SIZES:
                add(backend, SHAPES[0], h, d, ("misaligned", "empty"), "clean")
            for shape in TINY_SHAPES:
                add(backend, shape, 64, 128, WINDOWS, "clean")
    if "hip-gfx950" in backends and arch == "gfx950" and 32 in (heads or HEADS) and 128 in (head_dims or HEAD_DIMS):
        for case, tunables in simulated_hip.cases(thorough, windows):
            found.append(SimulatedCase(arch, "hip-gfx950", case, FN, FN, 0, seed + len(found), tunables))
    return found


def run(cases: Sequence[SimulatedCase], jobs: int) -> Iterator[SimulatedOutcome]:
    """Runs the cases over ``jobs`` processes; outcomes come as they end, not in order."""
    # Cases in a row share a kernel: one process compiles it, and decodes it once.
    batches = [cases[start : start + _BATCH] for start in range(0, len(cases), _BATCH)]
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(max(1, min(jobs, len(batches))), context, _start_process) as pool:
        futures: list[Future[list[SimulatedOutcome]]] = [pool.submit(run_batch, batch) for batch in batches]
        try:
            for future in as_completed(futures):
                yield from future.result()
        finally:
            pool.shutdown(cancel_futures=True)


def run_batch(cases: Sequence[SimulatedCase]) -> list[SimulatedOutcome]:
    """Runs cases one after the other, in this process."""
    return [run_case(case) for case in cases]


def run_case(case: SimulatedCase) -> SimulatedOutcome:
    """Simulates one case and checks its result. A fault of the simulator is a failed case, any other error an error."""
    from cdna_sim import Options, SimulationFault

    started = time.perf_counter()
    facts = case.case
    inputs = make_simulated_inputs(case)
    ks, ke = make_windows(facts.window, facts.s_q, facts.s_k, torch.device("cpu"))
    faults: list[str] = []
    diff = None
    with simulation(case.arch, Options(order="shuffled", seed=case.seed)) as launcher:
        try:
            output = _call(case, inputs, ks, ke)
            faults, diff, _ = judge(facts, output, ks, ke, *oracles(inputs))
        except SimulationFault as fault:
            faults.append(str(fault))
    reports = launcher.reports
    return SimulatedOutcome(
        case, "; ".join(faults), diff, sum(report.instructions for report in reports),
        sum(report.seconds for report in reports), time.perf_counter() - started,
    )  # fmt: skip


def make_simulated_inputs(case: SimulatedCase) -> Inputs:
    """The case's operands in its dialects, scales of both signs. Every seventh byte of fn operands is 0x80."""
    facts = case.case
    inputs = make_inputs(facts.s_q, facts.s_k, facts.heads, facts.head_dim, torch.device("cpu"), case.seed)
    q, k = inputs.q.clone(), inputs.k.clone()
    for wide, dtype in ((q, case.q_dtype), (k, case.k_dtype)):
        if dtype is FN:
            wide.view(-1)[::7] = -0.0
    q_fp8 = q.clamp(-E4M3FNUZ_MAX, E4M3FNUZ_MAX).to(case.q_dtype)
    k_fp8, kv_scale = quantize_k(k, dtype=case.k_dtype)
    return with_signed_scales(replace(inputs, q=q, k=k, q_fp8=q_fp8, k_fp8=k_fp8, kv_scale=kv_scale))


def _call(case: SimulatedCase, inputs: Inputs, ks: torch.Tensor, ke: torch.Tensor) -> GuardedOutput:
    facts = case.case
    width = compressed_width(ks, ke, facts.s_k) if facts.form == "compressed" else 0
    if not case.chunk and case.tunables is None:
        return call(facts, case.backend, inputs, ks, ke, width)
    arch, problem = Arch.parse(case.arch), facts.problem(width)
    output = GuardedOutput(facts.s_q, problem.width, facts.out_dtype, ks.device)
    kernel = registry.kernel(case.backend)
    if case.tunables is not None:
        config: Any = hip_heuristic(problem, arch, case.tunables)
    else:
        config = many_rows(problem, arch) if case.backend == "gluon-gfx950" else kernel.config(problem, arch)
        config = replace(config, chunk=case.chunk)
    kernel.launch(problem, arch, config)(facts.call(inputs, ks, ke, width, output.view))
    return output


_BATCH = 6


def _start_process() -> None:
    torch.set_num_threads(1)
    envs.stop_triton_interpreter()
