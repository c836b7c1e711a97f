"""Simulates a small case of fp8_mqa_topk: hip-gfx950 scores, triton-portable selects, wave by wave."""

import sys
from dataclasses import replace

import torch

from cdna_sim import Options
from lightning_indexer import Arch
from lightning_indexer.amd import simulation
from lightning_indexer.backends.triton_portable.top_k import TopKConfig
from lightning_indexer.check.mqa_topk import Case, make_operands
from lightning_indexer.problems.mqa_topk import MqaTopKCall, reference_mqa_topk
from lightning_indexer.problems.one_call import unwritten
from lightning_indexer.selection import registry

# A list and a block that compile in a second.
SMALL = TopKConfig(block=256, span=512, capacity=128, sample=128, splits=1, programs=1, num_warps=1)


def main() -> int:
    arch, case = Arch.parse("gfx950"), Case(5, 300, 32, k=24, window="misaligned", waves=2, values=True)
    inputs = make_operands(case, torch.device("cpu"))
    tensors = (inputs.q, inputs.k, inputs.kv_scale, inputs.weights, inputs.ks, inputs.ke)
    indices, values = unwritten(case.problem.selection, torch.device("cpu"))
    with simulation(arch.name, Options(order="shuffled", seed=1)) as launcher:
        kernel = registry.kernel("hip-gfx950", "fp8_mqa_topk")
        config = replace(kernel.of_wave_bytes(case.problem, arch, 3 * 4 * 320), selection=SMALL)
        run = kernel.launch(case.problem, arch, config)
        run(MqaTopKCall(*tensors, None, None, indices, values))
        print(f"{len(launcher.reports)} launches, waves of {run.rows} rows")
    right, scores = reference_mqa_topk(inputs.q, inputs.kv, inputs.weights, inputs.ks, inputs.ke, case.k)
    return 0 if torch.equal(indices, right) and torch.equal(values, scores) else 1


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(main())
