"""Scores and selection in one call on a GPU: every case, graph capture, memory, two streams, paged slots."""

from __future__ import annotations

import pytest
import torch

from lightning_indexer import arch_of, fp8_mqa_logits, fp8_mqa_topk, fp8_paged_mqa_topk, top_k_per_row
from lightning_indexer.arch import MIB
from lightning_indexer.backends.cuda_sm90.mqa_topk_config import gate_config
from lightning_indexer.check import mqa_topk, paged_mqa_topk
from lightning_indexer.check.cases import make_inputs
from lightning_indexer.check.mqa_topk import Case, make_operands
from lightning_indexer.check.paged_mqa_logits import make_inputs as make_pages
from lightning_indexer.problems.mqa_logits import MqaLogitsProblem
from lightning_indexer.problems.mqa_topk import MqaTopKCall, MqaTopKProblem
from lightning_indexer.problems.top_k import TopKProblem
from lightning_indexer.selection import registry

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU: kernels run in the interpreter instead"),
]

BACKENDS = list(registry.kernels("fp8_mqa_topk"))
PAGED = list(registry.kernels("fp8_paged_mqa_topk"))
KERNELS = [name for name in BACKENDS if name != "torch-blocked"]


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


def _gate(backend, problem, device):
    [verdict] = registry.explain(problem, arch_of(device), backend)
    if verdict.reason is not None:
        pytest.skip(verdict.reason)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", mqa_topk.cases(False), ids=str)
def test_small_cases(case, backend, device):
    _gate(backend, case.problem, device)
    assert mqa_topk.run_case(case, backend, device, repeats=2) == []


@pytest.mark.parametrize("backend", KERNELS)
@pytest.mark.parametrize("number", range(len(mqa_topk.cases(True))))
def test_full_cases(number, backend, device):
    case = mqa_topk.cases(True)[number]
    _gate(backend, case.problem, device)
    assert mqa_topk.run_case(case, backend, device, repeats=2) == [], case


@pytest.mark.parametrize("backend", PAGED)
@pytest.mark.parametrize("number", range(len(paged_mqa_topk.cases(False))))
def test_paged_cases(number, backend, device):
    case = paged_mqa_topk.cases(False)[number]
    _gate(backend, case.problem, device)
    assert paged_mqa_topk.run_case(case, backend, device, repeats=2) == [], case


@pytest.mark.parametrize("backend", KERNELS)
def test_waves_on_two_streams(backend, device):
    case = Case(300, 9000, 32, k=512, values=True)
    _gate(backend, case.problem, device)
    inputs = make_operands(case, device)
    expected = mqa_topk.two_calls(case, inputs, backend)
    kernel, arch = _waves(backend), arch_of(device)
    for size in (1, 2, 8):
        config = kernel.of_wave_bytes(case.problem, arch, size * MIB, overlapped=True)
        run = kernel.launch(case.problem, arch, config)
        assert run.overlapped
        workspace = torch.full((run.workspace_bytes,), 0xFF, dtype=torch.uint8, device=device)
        for _ in range(3):
            indices = torch.full((300, 512), -7, dtype=torch.int32, device=device)
            values = torch.full((300, 512), -7.0, device=device)
            run(MqaTopKCall(*_operands(inputs), None, None, indices, values, workspace))
            assert torch.equal(indices, expected[0])
            assert torch.equal(values, expected[1])


def _waves(backend):
    """The row waves of a backend, whatever else its kernel does."""
    kernel = registry.kernel(backend, "fp8_mqa_topk")
    return getattr(kernel, "waves", kernel)


def _operands(inputs):
    return inputs.q, inputs.k, inputs.kv_scale, inputs.weights, inputs.ks, inputs.ke


@pytest.mark.parametrize("backend", KERNELS)
@pytest.mark.parametrize("overlapped", [False, True])
def test_graph_capture_replays_with_new_operands(backend, overlapped, device):
    case = Case(200, 9000, 32, k=512, waves=4)
    _gate(backend, case.problem, device)
    inputs = make_operands(case, device)
    kernel, arch = _waves(backend), arch_of(device)
    run = kernel.launch(case.problem, arch, kernel.of_wave_bytes(case.problem, arch, 2 * MIB, overlapped=overlapped))
    out = torch.empty(200, 512, dtype=torch.int32, device=device)
    call = MqaTopKCall(*_operands(inputs), None, None, out, None, None)
    run(call)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run(call)
    for seed in range(3):
        shift = torch.randint(0, 999, (200,), generator=torch.Generator().manual_seed(seed), dtype=torch.int32)
        inputs.ks.copy_(shift)
        inputs.weights.mul_(-1.0)
        out.fill_(-7)
        graph.replay()
        assert torch.equal(out, mqa_topk.two_calls(case, inputs, backend)[0])


@pytest.mark.parametrize("backend", KERNELS)
@pytest.mark.parametrize("options", [{}, {"force_first": 2, "force_last": 3}, {"max_seqlen_k": 4000}], ids=str)
def test_nothing_is_read_back(backend, options, device):
    case = Case(64, 9000, 32, k=256, waves=4)
    _gate(backend, case.problem, device)
    inputs = make_operands(case, device)
    given = (inputs.q, inputs.kv, inputs.weights, inputs.ks, inputs.ke, 256)
    fp8_mqa_topk(*given, workspace=case.workspace, backend=backend, **options)
    torch.cuda.set_sync_debug_mode("error")
    try:
        fp8_mqa_topk(*given, workspace=case.workspace, backend=backend, **options)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_paged_calls_read_nothing_back(device):
    case = paged_mqa_topk.cases(False)[0]
    pages = make_pages(case.scored, device)
    given = (pages.q, pages.kv_cache, pages.weights, pages.context_lens, pages.block_tables, 24)
    fp8_paged_mqa_topk(*given, layout=case.scored.layout, index_base="page")
    torch.cuda.set_sync_debug_mode("error")
    try:
        fp8_paged_mqa_topk(*given, layout=case.scored.layout, index_base="page")
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize(("rows", "keys", "most"), [(16384, 1 << 20, 24 << 30), (4096, 32768, 4 << 30)])
def test_memory_is_that_of_the_workspace(rows, keys, most, device):
    if torch.cuda.mem_get_info(device)[0] < most:
        pytest.skip(f"needs {most >> 30} GiB")
    inputs = make_inputs(rows, keys, 32, 128, device)
    q, k, weights, kv_scale = inputs.q_fp8.clone(), inputs.k_fp8.clone(), inputs.weights, inputs.kv_scale
    del inputs
    row = torch.arange(rows, device=device)
    ks, ke = (row % 5).int(), (keys - rows + 1 + row).int()
    out = torch.full((rows, 2048), -7, dtype=torch.int32, device=device)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    fp8_mqa_topk(q, (k, kv_scale), weights, ks, ke, 2048, out=out)
    torch.cuda.synchronize()
    assert torch.cuda.max_memory_allocated(device) - before <= 80 * MIB
    # Rows of the start, of the middle and of the end, by the two calls.
    for some in (slice(0, 8), slice(rows // 2 + 1, rows // 2 + 9), slice(rows - 8, rows)):
        logits = fp8_mqa_logits(q[some], (k, kv_scale), weights[some], ks[some], ke[some], clean_logits=False)
        assert torch.equal(out[some], top_k_per_row(logits, 2048, ks[some], ke[some]))


def test_compiled_caller(device):
    inputs = make_operands(Case(40, 900, 32), device)

    def call(q, k, scale, weights, ks, ke):
        return fp8_mqa_topk(q, (k, scale), weights * 1.0, ks, ke, 20, values=True)

    found = torch.compile(call, fullgraph=True)(*_operands(inputs))
    expected = fp8_mqa_topk(inputs.q, inputs.kv, inputs.weights, inputs.ks, inputs.ke, 20, values=True)
    assert torch.equal(found[0], expected[0])
    assert torch.equal(found[1], expected[1])


@pytest.mark.parametrize("heads", [32, 64])
@pytest.mark.parametrize("window", ["causal", "short", "odd", "tiny", "none"])
@pytest.mark.parametrize("values", [False, True])
def test_the_gate_of_hopper_is_the_two_calls(heads, window, values, device):
    """NaN among the scores; windows of fewer than k positions, of less than a tile for each worker, and of none."""
    _check_gate(heads, window, values, device, 1030, 20011)


@pytest.mark.parametrize("heads", [32, 64])
@pytest.mark.parametrize(("rows", "keys"), [(300, 150000), (9, 2**20), (5000, 9001), (1, 300000)])
def test_the_gate_of_hopper_at_other_shapes(heads, rows, keys, device):
    """Bitmaps in several parts; row blocks that are cut many times, and pieces of many row blocks."""
    _check_gate(heads, "causal", True, device, rows, keys)


@pytest.mark.parametrize("operands", ["ascending", "descending", "equal", "sampled", "miss", "hot"])
def test_the_gate_of_hopper_on_hard_rows(operands, device):
    """Sorted and equal rows; gates that are too high, by the sample or by all that is sampled; lists that are full."""
    _check_gate(32, "causal", True, device, 600, 30000, operands)


def _check_gate(heads, window, values, device, rows, keys, operands="random"):
    k = 2048
    selection = TopKProblem(rows, keys, k, values=values)
    problem = MqaTopKProblem(MqaLogitsProblem(rows, keys, heads, 128, clean_logits=False), selection)
    _gate("cuda-sm90", problem, device)
    kernel, arch = registry.kernel("cuda-sm90", "fp8_mqa_topk"), arch_of(device)
    config = gate_config(problem, arch)
    assert config is not None
    generator = torch.Generator(device=device).manual_seed(heads)
    q = torch.randn(rows, heads, 128, device=device, generator=generator).to(torch.float8_e4m3fn)
    keys_, scale = torch.randn(keys, 128, device=device, generator=generator), torch.ones(keys, device=device)
    weights = torch.randn(rows, heads, device=device, generator=generator)
    position = torch.arange(keys, device=device)
    if operands == "random":
        scale[::11] = float("nan")
    else:
        keys_ = keys_[:1].expand(keys, 128)
        weights = weights.abs() + 0.1
    if operands in ("ascending", "descending"):
        scale = 1.0 + (position if operands == "ascending" else keys - position) / keys
    if operands in ("sampled", "miss"):  # what is sampled is above all others, or what is not
        scale = 1.0 + torch.rand(keys, device=device, generator=generator)
        scale[_sampled(keys, config.stride).to(device)] = 3.0 if operands == "miss" else 0.5
    if operands == "hot":  # keys of one math warp
        scale = 1.0 + torch.rand(keys, device=device, generator=generator)
        scale[position % 128 < 16] += 1.0
    row = torch.arange(rows, device=device)
    starts, ends = {
        "causal": (row * 0, keys - rows + row + 1),
        "short": (row * 7 % keys, row * 7 % keys + row * 37 % 4000),
        "odd": (row * 7919 % (keys + 400) - 200, row * 104729 % (keys + 900)),
        "tiny": (row // 8 * 50 % keys, row // 8 * 50 % keys + row % 3 * 40),
        "none": (row, row),
    }[window]
    kv = (keys_.to(torch.float8_e4m3fn).contiguous(), scale)
    windows = (starts.int(), ends.int())
    logits = fp8_mqa_logits(q, kv, weights, *windows, clean_logits=False, backend="cuda-sm90")
    expected = top_k_per_row(logits, k, *windows, values=values, backend="cuda-sm90")
    indices, scores = expected if values else (expected, None)
    run = kernel.launch(problem, arch, config)
    workspace = torch.full((run.workspace_bytes,), 0xFF, dtype=torch.uint8, device=device)
    out = torch.full((rows, k), -7, dtype=torch.int32, device=device)
    found = torch.full((rows, k), -7.0, device=device) if values else None
    call = MqaTopKCall(q, *kv, weights, *windows, None, None, out, found, workspace)

    def check():
        assert torch.equal(out, indices)
        assert found is None or torch.equal(found, scores)

    run(call)
    check()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run(call)
    for _ in range(2):
        out.fill_(-7)
        workspace.fill_(0xFF)
        graph.replay()
        check()


def _sampled(keys, stride):
    """The positions that sample.cuh takes."""
    i = torch.arange(-(-keys // stride), dtype=torch.int64)
    mixed = (i * 0x9E3779B1 & 0xFFFFFFFF) ^ ((i * 0x85EBCA6B & 0xFFFFFFFF) >> 13)
    span = (keys - i * stride).clamp(max=stride)
    return i * stride + ((mixed >> 8 & 0xFFFF) * span >> 16)
