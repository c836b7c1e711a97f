"""Paged decode logits on a GPU: every case, repeats, capture with lengths that change, no synchronisation."""

from __future__ import annotations

import pytest
import torch

from lightning_indexer import arch_of, fp8_paged_mqa_logits
from lightning_indexer.check.paged_mqa_logits import Case, cases, make_inputs, run_case
from lightning_indexer.problems.paged_mqa_logits import OPERATION, PagedMqaLogitsProblem, reference_paged_logits
from lightning_indexer.selection import registry

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU: kernels run in the interpreter instead"),
]

BACKENDS = list(registry.kernels(OPERATION))


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


def _gate(backend: str, problem: PagedMqaLogitsProblem, device: torch.device) -> None:
    [verdict] = registry.explain(problem, arch_of(device), backend)
    if verdict.reason is not None:
        pytest.skip(verdict.reason)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", cases(False), ids=str)
def test_small_cases(case, backend, device):
    _gate(backend, case.problem, device)
    assert run_case(case, backend, device, repeats=20) == []


@pytest.mark.parametrize("backend", [name for name in BACKENDS if name != "torch-blocked"])
@pytest.mark.parametrize("number", range(len(cases(False)), len(cases(True))))
def test_large_cases(number, backend, device):
    case = cases(True)[number]
    _gate(backend, case.problem, device)
    assert run_case(case, backend, device, repeats=2) == [], case


@pytest.mark.parametrize("backend", [name for name in BACKENDS if name != "torch-blocked"])
def test_graph_replays_with_other_lengths(backend, device):
    case = Case(8, 2, 32, 128, 1500)
    _gate(backend, case.problem, device)
    inputs = make_inputs(case, device)
    out = torch.empty(16, 1500, device=device)

    def call() -> None:
        fp8_paged_mqa_logits(
            inputs.q, inputs.kv_cache, inputs.weights, inputs.context_lens, inputs.block_tables, 1500,
            layout=case.layout, out=out, backend=backend,
        )  # fmt: skip

    call()
    longest = inputs.context_lens.clone()
    graph = torch.cuda.CUDAGraph()
    inputs.context_lens.zero_()  # as engines capture
    with torch.cuda.graph(graph):
        call()
    for lengths in (longest, longest // 2, torch.zeros_like(longest), longest.clamp(max=7)):
        inputs.context_lens.copy_(lengths)
        out.fill_(float("nan"))
        graph.replay()
        expected = reference_paged_logits(
            inputs.q,
            inputs.kv_cache,
            inputs.weights,
            inputs.context_lens,
            inputs.block_tables,
            1500,
            layout=case.layout,
        )
        assert torch.equal(torch.isneginf(out), torch.isneginf(expected))
        inside = ~torch.isneginf(expected)
        if bool(inside.any()):
            error = (out - expected).abs()[inside].max()
            assert float(error) <= 2**-9 * float(expected[inside].abs().max())
