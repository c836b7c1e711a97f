"""The cache's operations on a GPU: every case, repeats, pools past 4 GiB, capture, no synchronisation, fp4 decode."""

from __future__ import annotations

import pytest
import torch

from lightning_indexer import CacheLayout, arch_of, gather_k_cache, insert_k_cache, prepare_q
from lightning_indexer.check import gather_k_cache as gather_check
from lightning_indexer.check import insert_k_cache as insert_check
from lightning_indexer.check import paged_mqa_logits as paged_check
from lightning_indexer.check import prepare_q as prepare_check
from lightning_indexer.check.memory import no_room
from lightning_indexer.check.verify import suite
from lightning_indexer.selection import registry

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU: kernels run in the interpreter instead"),
]

CHECKS = {"insert_k_cache": insert_check, "gather_k_cache": gather_check, "prepare_q": prepare_check}
BACKENDS = ["triton-portable", "torch-blocked"]
KERNELS = [(backend, operation) for backend in ("cuda-sm90", "triton-portable") for operation in CHECKS]


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


@pytest.mark.parametrize(("backend", "operation"), [*KERNELS, *(("torch-blocked", operation) for operation in CHECKS)])
def test_small_cases(backend, operation, device):
    check, ran = CHECKS[operation], 0
    for case in check.cases(False):
        if registry.explain(case.problem, arch_of(device), backend)[0].reason is None:
            assert check.run_case(case, backend, device, repeats=5) == [], case
            ran += 1
    assert ran > (4 if (backend, operation) == ("cuda-sm90", "gather_k_cache") else 20)


@pytest.mark.parametrize(("backend", "operation"), KERNELS)
def test_large_cases(backend, operation, device):
    check, found = CHECKS[operation], suite(operation)
    for case in check.cases(True)[len(check.cases(False)) :]:
        runs = registry.explain(case.problem, arch_of(device), backend)[0].reason is None
        if runs and no_room(found.bytes_needed(case), device) is None:
            assert check.run_case(case, backend, device, repeats=2) == [], case


@pytest.mark.parametrize("backend", BACKENDS)
def test_fp4_pages_in_decode(backend, device):
    cases = [case for case in paged_check.cases(True) if case.fp4]
    assert len(cases) > 8
    for case in cases:
        assert paged_check.run_case(case, backend, device, repeats=3) == [], case


@pytest.mark.parametrize("layout", [CacheLayout(), CacheLayout(16, 128, "preshuffled"), CacheLayout.fp4()], ids=str)
def test_graph_replays_with_other_slots_and_lengths(layout, device):
    tokens, blocks = 300, 64
    k = torch.randn(tokens, 128, device=device, dtype=torch.bfloat16)
    q, gates = torch.randn(7, 32, 128, device=device).bfloat16(), torch.randn(7, 32, device=device)
    cache = torch.zeros((blocks, *layout.block_shape), dtype=torch.uint8, device=device)
    slots = torch.full((tokens,), -1, dtype=torch.int64, device=device)
    table = torch.arange(blocks, dtype=torch.int32, device=device)[None]
    lengths = torch.zeros(2, dtype=torch.int32, device=device)

    def step():
        insert_k_cache(k, cache, slots, layout=layout)
        return gather_k_cache(cache, table, lengths, tokens, layout=layout), prepare_q(q, gates)

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        (keys, scales), (q8, _) = step()
    graph.replay()
    assert not bool(cache.any())  # every slot was -1
    for count in (1, 250, 300):
        slots.fill_(-1)
        slots[:count] = torch.arange(count, device=device)
        lengths[1] = count
        k.normal_()
        graph.replay()
        wide = keys[:count].float() * scales[:count, None]
        assert float((wide - k[:count].float()).abs().max()) <= (1.01 if layout.is_fp4 else 0.4)
    assert float(q8.float().abs().max()) == 448.0


def test_no_synchronisation(device):
    layout = CacheLayout()
    k = torch.randn(100, 128, device=device)
    cache = torch.zeros((4, *layout.block_shape), dtype=torch.uint8, device=device)
    slots = torch.arange(100, device=device)
    table, lengths = torch.zeros((1, 4), device=device).int(), torch.tensor([0, 100], device=device).int()
    q, gates = torch.randn(3, 8, 128, device=device), torch.randn(3, 8, device=device)
    for backend in (*BACKENDS, None):
        for _ in range(2):  # the first call may compile
            torch.cuda.set_sync_debug_mode("error" if _ else "default")
            try:
                insert_k_cache(k, cache, slots, layout=layout, backend=backend)
                gather_k_cache(cache, table, lengths, 100, layout=layout, compress_ratio=2, backend=backend)
                prepare_q(q, gates, backend=backend)
            finally:
                torch.cuda.set_sync_debug_mode("default")
