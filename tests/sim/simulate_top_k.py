"""Simulates the small cases of top-k on one arch, a line each: python simulate_top_k.py gfx950"""

import sys
from dataclasses import replace

import torch

from cdna_sim import Options, SimulationFault
from lightning_indexer import Arch
from lightning_indexer.amd import simulation
from lightning_indexer.backends.triton_portable.top_k import TopKConfig, TopKLaunch
from lightning_indexer.check.top_k import run_case, simulated_cases
from lightning_indexer.problems.top_k import TopKCall

SMALL = TopKConfig(block=256, span=512, capacity=128, sample=128, splits=1, programs=1, num_warps=1)


def simulate(arch: Arch, case, number: int) -> list[str]:
    # One wave and four, in shuffled order; long rows cut into segments.
    config = replace(SMALL, num_warps=1 + 3 * (number % 2), splits=2 if case.width > 4000 else 1)

    def call(case, inputs, indices, values):
        given = (inputs.logits, inputs.starts, inputs.ends, inputs.offsets, inputs.page_table)
        TopKLaunch(case.problem, arch, config)(TopKCall(*given, indices, values))

    with simulation(arch.name, Options(order="shuffled", seed=number)):
        try:
            return run_case(case, "", torch.device("cpu"), call=call)
        except SimulationFault as fault:
            return [str(fault)]


if __name__ == "__main__":
    torch.set_num_threads(1)
    for number, case in enumerate(simulated_cases()):
        faults = simulate(Arch.parse(sys.argv[1]), case, number)
        print(f"{case}: {'; '.join(faults) or 'passes'}", flush=True)
