"""Runs a suite in the simulator, over several processes.

The simulator adds checks of its own: no access outside a tensor, no store to an input, no value used before the wait
for it, no LDS read before it was written. Waves run in an order shuffled by seed, memory operations take effect as late
as they may. Nothing is timed: the simulator counts, it has no clock.
"""

from __future__ import annotations

import multiprocessing
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed

import torch

from lightning_indexer import envs
from lightning_indexer.amd import simulation
from lightning_indexer.arch import Arch
from lightning_indexer.check import verify
from lightning_indexer.check.verify import Outcome, SimulatedCase
from lightning_indexer.selection import registry


def supported(cases: Sequence[SimulatedCase]) -> tuple[list[SimulatedCase], Counter[str]]:
    """The cases that their backends' gates admit, and how many each reason keeps out."""
    admitted, refused = [], Counter[str]()
    suites = {operation: verify.suite(operation) for operation in {case.operation for case in cases}}
    for case in cases:
        kernel = registry.kernel(case.backend, case.operation)
        reason = kernel.supports(suites[case.operation].problem(case.case), Arch.parse(case.arch))
        if reason is None:
            admitted.append(case)
        else:
            refused[f"{case.backend}: {reason}"] += 1
    return admitted, refused


def run(cases: Sequence[SimulatedCase], jobs: int) -> Iterator[Outcome]:
    """Runs the cases over ``jobs`` processes; outcomes come as they end, not in order."""
    # Cases in a row share a kernel: one process compiles it, and decodes it once. Few cases go one by one, so that all
    # processes have some to the end, and one that is interrupted has its results until then.
    size = max(1, min(_BATCH, len(cases) // (4 * jobs)))
    batches = [cases[start : start + size] for start in range(0, len(cases), size)]
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(max(1, min(jobs, len(batches))), context, _start_process) as pool:
        futures: list[Future[list[Outcome]]] = [pool.submit(run_batch, batch) for batch in batches]
        try:
            for future in as_completed(futures):
                yield from future.result()
        finally:
            pool.shutdown(cancel_futures=True)


def run_batch(cases: Sequence[SimulatedCase]) -> list[Outcome]:
    """Runs cases one after the other, in this process."""
    return [run_case(case) for case in cases]


def run_case(case: SimulatedCase) -> Outcome:
    """Simulates one case and checks its result. A fault of the simulator is a failed case, any other error an error."""
    from cdna_sim import Options, SimulationFault

    finding, faults = None, ""
    with simulation(case.arch, Options(order="shuffled", seed=case.seed)) as launcher:
        try:
            finding = verify.suite(case.operation).check_simulated(case)
            faults = "; ".join(finding.faults)
        except SimulationFault as fault:
            faults = str(fault)
        reports = list(launcher.reports)
    return Outcome(
        case.operation, case, case.backend, "fail" if faults else "pass", faults, finding,
        instructions=sum(report.instructions for report in reports), seconds=sum(report.seconds for report in reports),
    )  # fmt: skip


_BATCH = 6


def _start_process() -> None:
    torch.set_num_threads(1)
    envs.stop_triton_interpreter()
