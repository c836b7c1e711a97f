"""Paged decode logits on a GPU: every case, repeats, capture with lengths that change, no synchronisation."""

from __future__ import annotations

import pytest
import torch

from lightning_indexer import CacheLayout, arch_of, fp8_paged_mqa_logits
from lightning_indexer.backends.cuda_sm90 import paged_config
from lightning_indexer.backends.cuda_sm90 import paged_mqa_logits as sm90
from lightning_indexer.check.paged_mqa_logits import (
    Case,
    call_backend,
    call_of,
    cases,
    make_inputs,
    run_case,
)
from lightning_indexer.problems.paged_mqa_logits import OPERATION, PagedMqaLogitsProblem, reference_paged_logits
from lightning_indexer.selection import registry
from paged_fp4 import check_any_exponents

BACKENDS = list(registry.kernels(OPERATION))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", cases(False), ids=str)
def test_small_cases(case, backend, device, gate):
    gate(backend, case.problem, device)
    assert run_case(case, backend, device, repeats=20) == []


@pytest.mark.parametrize("backend", [name for name in BACKENDS if name != "torch-blocked"])
@pytest.mark.parametrize("number", range(len(cases(False)), len(cases(True))))
def test_large_cases(number, backend, device, gate):
    case = cases(True)[number]
    gate(backend, case.problem, device)
    assert run_case(case, backend, device, repeats=2) == [], case


@pytest.mark.parametrize("backend", [name for name in BACKENDS if name != "torch-blocked"])
def test_graph_replays_with_other_lengths(backend, device, gate):
    case = Case(8, 2, 32, 128, 1500)
    gate(backend, case.problem, device)
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


@pytest.mark.parametrize("backend", ["cuda-sm90", "triton-portable"])
def test_a_pool_and_a_result_past_4_gib(backend, device, gate):
    """Blocks on both sides of 4 GiB; a result of more than 2^31 bytes, whose last row is looked at."""
    layout, batch, width = CacheLayout(), 9, 2**26
    gate(backend, PagedMqaLogitsProblem(batch, 1, width, 32, 128, layout, 600, clean_logits=False), device)
    blocks = 2**32 // layout.block_bytes + 9
    if torch.cuda.mem_get_info(device)[0] < blocks * layout.block_bytes + 4 * batch * width + 2**31:
        pytest.skip("too little memory")
    pool = torch.zeros((blocks, *layout.block_shape), dtype=torch.uint8, device=device)
    lengths = torch.tensor([5, 0, 64, 65, 1000, 0, 128, 1, 600 * 64], dtype=torch.int32, device=device)
    tables = torch.full((batch, 600), -1, dtype=torch.int32, device=device)
    generator = torch.Generator().manual_seed(5)
    for b, length in enumerate(lengths.tolist()):
        for page in range(-(-length // 64)):
            block = blocks - 1 - 9 * page - b if page % 2 == 0 else 9 * page + b
            tables[b, page] = block
            keys = torch.randn(1, 64, 128, generator=generator).to(torch.float8_e4m3fn)
            pool[block] = layout.pack(keys, torch.rand(1, 64, generator=generator) + 0.1)[0].to(device)
    q = torch.randn(batch, 1, 32, 128, generator=generator).to(torch.float8_e4m3fn).to(device)
    weights = torch.randn(batch, 32, generator=generator).to(device)
    out = torch.full((batch, width), float("nan"), device=device)
    assert out.nbytes > 2**31
    fp8_paged_mqa_logits(q, pool, weights, lengths, tables, width, clean_logits=False, out=out, backend=backend)
    seen = 600 * 64
    expected = reference_paged_logits(q, pool, weights, lengths, tables, seen)
    inside = torch.arange(seen, device=device) < lengths[:, None]
    found = out[:, :seen]
    assert not bool(found[inside].isnan().any())
    error = (found - expected)[inside].abs().max()
    assert float(error) <= 2**-9 * float(expected[inside].abs().max())
    if backend == "cuda-sm90":
        assert bool(found[~inside].isnan().all()), "wrote where no row sees"
        assert bool(out[:, seen:].isnan().all())
    fp8_paged_mqa_logits(q, pool, weights, lengths, tables, width, out=out, backend=backend)
    assert bool(torch.isneginf(found[~inside]).all())
    assert bool(torch.isneginf(out[:, seen:]).all())


@pytest.mark.parametrize("backend", ["cuda-sm90", "triton-portable"])
@pytest.mark.parametrize(
    ("heads", "next_n", "page"), [(8, 8, 16), (32, 3, 64), (64, 1, 64), (64, 4, 128), (128, 2, 32)]
)
def test_fp4_keys_of_any_exponents(heads, next_n, page, backend, device, gate):
    """Blocks far apart, blocks of zeros above others, scales of 0 and of NaN: as ``fp4_to_fp8`` converts them."""
    case = Case(6, next_n, heads, 128, 1500, page, fp4=True, lengths="rows")
    gate(backend, case.problem, device)
    assert check_any_exponents(case, device, call_backend(backend)) == []


SM90_SHAPES = [(8, 32, 1), (16, 64, 3), (32, 128, 8), (64, 128, 4), (128, 128, 8), (24, 128, 5), (64, 128, 1)]


@pytest.mark.parametrize(("heads", "head_dim", "next_n"), SM90_SHAPES)
@pytest.mark.parametrize("page", sm90.PAGES)
def test_every_choice_of_cuda_sm90(heads, head_dim, next_n, page, device, gate):
    """What a tuning run may choose, 20 bitwise repeats each."""
    case = Case(11, next_n, heads, head_dim, 3000, page, lengths="rows", clean=page != 32)
    gate("cuda-sm90", case.problem, device)
    configs = paged_config.neighbours(case.problem, arch_of(device))
    for config in configs if page == 64 else configs[:1]:
        launch = sm90.Launch(case.problem, config)

        def call(case, inputs, out, launch=launch):
            launch(call_of(case, inputs, out))

        faults = run_case(case, "", device, repeats=20, call=call)
        assert faults == [], config


@pytest.mark.parametrize(("heads", "next_n"), [(8, 8), (16, 3), (32, 1), (64, 1), (64, 2), (64, 4), (128, 8), (24, 5)])
def test_every_choice_of_cuda_sm90_for_fp4_keys(heads, next_n, device, gate):
    case = Case(11, next_n, heads, 128, 3000, fp4=True, lengths="rows", clean=heads != 16)
    gate("cuda-sm90", case.problem, device)
    for config in paged_config.neighbours(case.problem, arch_of(device)):
        launch = sm90.Launch(case.problem, config)

        def call(case, inputs, out, launch=launch):
            launch(call_of(case, inputs, out))

        faults = run_case(case, "", device, repeats=20, call=call)
        assert faults == [], config
