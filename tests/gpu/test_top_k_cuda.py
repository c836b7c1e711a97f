"""Top-k per row on a GPU: every case, repeats, graph capture, streams, compiled callers, logits past 2^31 elements."""

from __future__ import annotations

import pytest
import torch

from lightning_indexer.calls.top_k import top_k_per_row
from lightning_indexer.check.top_k import REPEATS, Case, cases, make_inputs, run_case
from lightning_indexer.problems.top_k import OPERATION, TopKProblem, reference_top_k
from lightning_indexer.selection import registry

BACKENDS = list(registry.kernels(OPERATION))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", cases(False), ids=str)
def test_small_cases(case, backend, device, gate):
    gate(backend, case.problem, device)
    assert run_case(case, backend, device, repeats=2) == []


@pytest.mark.parametrize("backend", [name for name in BACKENDS if name != "torch-blocked"])
@pytest.mark.parametrize("number", range(len(cases(True))))
def test_full_cases(number, backend, device, gate):
    case = cases(True)[number]
    gate(backend, case.problem, device)
    assert run_case(case, backend, device, repeats=REPEATS if case.rows * case.width < 2**24 else 1) == [], case


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("rows", "width"), [(64, 40000), (1, 300_000)])
def test_graph_capture_replays_with_new_scores(backend, rows, width, device, gate):
    gate(backend, TopKProblem(rows, width, 512, starts=False, ends=False), device)
    logits = torch.randn(rows, width, device=device)
    out = torch.empty(rows, 512, dtype=torch.int32, device=device)
    top_k_per_row(logits, 512, out=out, backend=backend)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        top_k_per_row(logits, 512, out=out, backend=backend)
    for seed in range(3):
        logits.copy_(torch.randn(rows, width, generator=torch.Generator().manual_seed(seed)))
        out.fill_(-7)
        graph.replay()
        assert torch.equal(out, reference_top_k(logits, 512)[0])


@pytest.mark.parametrize("backend", BACKENDS)
def test_nothing_is_read_back(backend, device, gate):
    case = Case(8, 9000, 256, scores="integers")
    gate(backend, case.problem, device)
    inputs = make_inputs(case, device)
    arguments = (inputs.logits, 256, inputs.starts, inputs.ends)
    top_k_per_row(*arguments, backend=backend)
    torch.cuda.set_sync_debug_mode("error")
    try:
        top_k_per_row(*arguments, backend=backend)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_compiled_caller(device):
    logits = torch.randn(16, 5000, device=device)

    def call(logits):
        return top_k_per_row(logits * 2, 100, values=True)

    indices, values = torch.compile(call, fullgraph=True)(logits)
    expected, scores = reference_top_k(logits * 2, 100)
    assert torch.equal(indices, expected)
    assert torch.equal(values, scores)
