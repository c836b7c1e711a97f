"""Simulates the small cases of the cache's kernels on one arch, a line each: python simulate_cache.py gfx950"""

import sys

import torch

from cdna_sim import Options, SimulationFault
from lightning_indexer import Arch
from lightning_indexer.amd import simulation
from lightning_indexer.backends.triton_portable import gather_k_cache, insert_k_cache, prepare_q
from lightning_indexer.check import gather_k_cache as gather_check
from lightning_indexer.check import insert_k_cache as insert_check
from lightning_indexer.check import prepare_q as prepare_check


def simulate(arch: Arch, module, check, case, number: int) -> list[str]:
    kinds = module.heuristic(case.problem, arch), *module.neighbours(case.problem, arch)
    config = kinds[0] if number % 2 else next(kind for kind in kinds if kind.num_warps == 2)

    def call(case, inputs, out):
        module.Launch(case.problem, arch, config)(check.call_of(case, inputs, out))

    def call_of_q(given):
        module.Launch(case.problem, arch, config)(given)

    with simulation(arch.name, Options(order="shuffled", seed=number)):
        try:
            return check.run_case(case, "", torch.device("cpu"), call=call_of_q if check is prepare_check else call)
        except SimulationFault as fault:
            return [str(fault)]


if __name__ == "__main__":
    torch.set_num_threads(1)
    arch = Arch.parse(sys.argv[1])
    dtype = torch.float8_e4m3fnuz if arch.fp8 == "fnuz" else torch.float8_e4m3fn
    for module, check in (
        (insert_k_cache, insert_check),
        (gather_k_cache, gather_check),
        (prepare_q, prepare_check),
    ):
        for number, case in enumerate(check.simulated_cases(dtype)):
            faults = simulate(arch, module, check, case, number)
            print(f"{case}: {'; '.join(faults) or 'passes'}", flush=True)
