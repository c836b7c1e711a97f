"""Simulates the small cases of paged decode on one arch, a line each: python simulate_paged.py gfx950"""

import sys
from dataclasses import replace

import torch

from cdna_sim import Options, SimulationFault
from lightning_indexer import Arch
from lightning_indexer.amd import simulation
from lightning_indexer.backends.triton_portable.paged_mqa_logits import Launch, heuristic
from lightning_indexer.check.paged_mqa_logits import call_of, run_case, simulated_cases


def simulate(arch: Arch, case, number: int) -> list[str]:
    # Two programs a group and one, waves in shuffled order.
    config = replace(heuristic(case.problem, arch), splits=2 - number % 2, num_warps=1 + number % 2)

    def call(case, inputs, out):
        Launch(case.problem, arch, config)(call_of(case, inputs, out))

    with simulation(arch.name, Options(order="shuffled", seed=number)):
        try:
            return run_case(case, "", torch.device("cpu"), call=call)
        except SimulationFault as fault:
            return [str(fault)]


if __name__ == "__main__":
    torch.set_num_threads(1)
    arch = Arch.parse(sys.argv[1])
    dtype = torch.float8_e4m3fnuz if arch.fp8 == "fnuz" else torch.float8_e4m3fn
    for number, case in enumerate(simulated_cases(dtype)):
        faults = simulate(arch, case, number)
        print(f"{case}: {'; '.join(faults) or 'passes'}", flush=True)
