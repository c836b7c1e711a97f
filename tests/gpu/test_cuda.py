"""What only a GPU can show: real launches, streams, graph capture, compiled callers, results past 2^31 elements.

The full sweep is ``lightning-indexer verify --device cuda --full``.
"""

from __future__ import annotations

import pytest
import torch

from lightning_indexer import MqaLogitsProblem, calc_diff, fp8_mqa_logits, reference_logits
from lightning_indexer.check import device as runner
from lightning_indexer.check.cases import make_inputs, make_windows
from lightning_indexer.check.guarded import GuardedOutput
from lightning_indexer.check.mqa_logits import MqaLogitsSuite, compress
from lightning_indexer.problems.mqa_logits import MAX_DIFF, window_mask
from lightning_indexer.selection import registry as dispatch

BACKENDS = [backend.name for backend in dispatch.backends()]


def _call(shape, device, window="causal"):
    rows, keys, heads, head_dim = shape
    inputs = make_inputs(rows, keys, heads, head_dim, device)
    ks, ke = make_windows(window, rows, keys, device)
    return inputs.q_fp8, (inputs.k_fp8, inputs.kv_scale), inputs.weights, ks, ke


def _assert_equals_reference(logits: torch.Tensor, q, kv, weights, ks, ke) -> None:
    expected = reference_logits(q, kv, weights, ks, ke)
    inside = torch.isfinite(expected)
    assert torch.equal(torch.isneginf(logits), ~inside)
    assert calc_diff(logits, expected, inside) < MAX_DIFF[logits.dtype]


@pytest.mark.parametrize("backend", BACKENDS)
def test_small_sweep(backend, device, gate):
    gate(backend, MqaLogitsProblem(64, 384, 64, 128), device)
    suite = MqaLogitsSuite()
    outcomes = list(runner.run(suite, suite.cases(full=False), [backend], device))
    assert [str(o.case) + ": " + o.detail for o in outcomes if o.status == "fail"] == []
    assert sum(o.status == "pass" for o in outcomes) > 400


@pytest.mark.parametrize("backend", BACKENDS)
def test_graph_capture_replays_with_new_operands(backend, device, gate):
    shape = (64, 1560, 32, 128)
    gate(backend, MqaLogitsProblem(*shape), device)
    q, (k, kv_scale), weights, ks, ke = _call(shape, device)
    out = torch.empty(shape[:2], device=device)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        fp8_mqa_logits(q, (k, kv_scale), weights, ks, ke, out=out, backend=backend)
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        fp8_mqa_logits(q, (k, kv_scale), weights, ks, ke, out=out, backend=backend)
    weights.mul_(-3.0)
    ks.add_(5)
    ke.sub_(7)
    out.fill_(float("nan"))
    graph.replay()
    torch.cuda.synchronize()
    _assert_equals_reference(out, q, (k, kv_scale), weights, ks, ke)


@pytest.mark.parametrize("backend", BACKENDS)
def test_runs_on_the_current_stream(backend, device, gate):
    shape = (32, 4096, 64, 128)
    gate(backend, MqaLogitsProblem(*shape), device)
    q, kv, weights, ks, ke = _call(shape, device, "multi_req")
    late = torch.empty_like(weights)
    fp8_mqa_logits(q, kv, late, ks, ke, backend=backend)  # compile first
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        late.copy_(weights)
        logits = fp8_mqa_logits(q, kv, late, ks, ke, backend=backend)
    stream.synchronize()
    _assert_equals_reference(logits, q, kv, weights, ks, ke)


@pytest.mark.parametrize("backend", BACKENDS)
def test_results_past_2_to_31_elements(backend, device, gate):
    shape = (8192, 262272, 32, 32)
    gate(backend, MqaLogitsProblem(*shape), device)
    if torch.cuda.mem_get_info(device)[0] < 30 * 2**30:
        pytest.skip("needs 30 GiB of GPU memory")
    q, kv, weights, ks, ke = _call(shape, device)
    logits = fp8_mqa_logits(q, kv, weights, ks, ke, backend=backend)
    for rows in (slice(0, 4), slice(8190, 8192)):
        _assert_equals_reference(logits[rows], q[rows], kv, weights[rows], ks[rows], ke[rows])


@pytest.mark.parametrize("backend", BACKENDS)
def test_extreme_starts_of_compressed_logits(backend, device, gate):
    """A row at INT32_MIN beside ordinary ones: column offsets between rows of a block pass 32 bits."""
    shape = (16, 512, 32, 128)
    gate(backend, MqaLogitsProblem(*shape, clean_logits=False, max_seqlen_k=512), device)
    q, kv, weights, ks, ke = _call(shape, device)
    ks[3], ks[7], ke[7], ks[9], ke[11] = -(2**31), 17, 2**31 - 1, 2**31 - 1, -(2**31)
    output = GuardedOutput(16, 512, torch.float32, device)
    fp8_mqa_logits(
        q, kv, weights, ks, ke, clean_logits=False, max_seqlen_k=512, out=output.view, backend=backend
    )  # fmt: skip
    assert output.intact()
    expected = reference_logits(q, kv, weights, ks, ke)
    inside = compress(torch.isfinite(expected), ks, 512)
    expected = compress(expected.masked_fill(~torch.isfinite(expected), 0.0), ks, 512)
    assert calc_diff(output.view, expected, inside) < MAX_DIFF[torch.float32]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("heads", [32, 128])
def test_operands_that_are_views(backend, heads, device, gate):
    """Rows of q apart, heads of a row apart, odd strides of the weights, windows that start at any address."""
    rows, keys = 61, 700
    gate(backend, MqaLogitsProblem(rows, keys, heads, 128), device)
    q, (k, kv_scale), weights, ks, ke = _call((rows, keys, heads, 128), device, "misaligned")

    def inside(tensor: torch.Tensor, shape: tuple[int, ...], start: int) -> torch.Tensor:
        """The same values as a view into a larger tensor, ``start`` elements from its beginning."""
        bits = tensor.view(torch.uint8) if tensor.dtype is torch.float8_e4m3fn else tensor
        buffer = torch.full((start + torch.Size(shape).numel(),), 77, dtype=bits.dtype, device=device)
        view = buffer[start:].view(shape)[tuple(slice(0, side) for side in bits.shape)]
        view.copy_(bits)
        return view.view(tensor.dtype)

    wide_q = inside(q, (rows, heads, 144), 0)
    spaced_q = inside(q, (rows, heads + 3, 128), 16)
    others = (
        (inside(k, (keys, 160), 32), inside(kv_scale, (keys,), 3)),
        inside(weights, (rows, heads + 5), 1), inside(ks, (rows,), 1), inside(ke, (rows,), 3),
    )  # fmt: skip
    for moved in (wide_q, spaced_q):
        logits = fp8_mqa_logits(moved, *others, backend=backend)
        _assert_equals_reference(logits, q, (k, kv_scale), weights, ks, ke)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("window", ["causal", "multi_req", "empty"])
def test_more_row_blocks_than_the_schedule_prices_one_by_one(backend, window, device, gate):
    shape = (9001, 9100, 128, 32)  # cuda-sm90: 4501 row blocks, 2048 prices
    gate(backend, MqaLogitsProblem(*shape), device)
    call = _call(shape, device, window)
    _assert_equals_reference(fp8_mqa_logits(*call, backend=backend), *call)


@pytest.mark.parametrize("backend", BACKENDS)
def test_zeros_are_positive(backend, device, gate):
    shape = (8, 300, 32, 64)
    gate(backend, MqaLogitsProblem(*shape), device)
    q, (k, kv_scale), weights, ks, ke = _call(shape, device)
    for scale in (kv_scale, -kv_scale):
        logits = fp8_mqa_logits(torch.zeros_like(q), (k, scale), -weights.abs(), ks, ke, backend=backend)
        inside = window_mask(ks, ke, shape[1])
        assert torch.equal(torch.isneginf(logits), ~inside)
        assert torch.equal(logits[inside].view(torch.int32), torch.zeros_like(logits[inside]).view(torch.int32))


def test_operator_on_cuda(device):
    q, kv, weights, ks, ke = _call((16, 256, 32, 128), device)
    operator = torch.ops.lightning_indexer.fp8_mqa_logits.default
    # test_schema multiplies its inputs, which CUDA has no fp8 kernel for; tests/cpu/test_operator.py runs it.
    tests = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    arguments = (q, *kv, weights, ks, ke, True, 0, torch.float32, None)
    torch.library.opcheck(operator, arguments, test_utils=tests)


def test_torch_compile_equals_eager(device):
    def score(q, k, kv_scale, weights, ks, ke):
        return fp8_mqa_logits(q, (k, kv_scale), weights * 0.5, ks, ke).relu()

    compiled = torch.compile(score, fullgraph=True)
    for keys in (256, 384):
        q, kv, weights, ks, ke = _call((16, keys, 32, 128), device)
        assert torch.equal(compiled(q, *kv, weights, ks, ke), score(q, *kv, weights, ks, ke))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one GPU")
def test_second_device_while_the_first_is_current():
    device = torch.device("cuda", 1)
    with torch.cuda.device(0):
        q, kv, weights, ks, ke = _call((16, 256, 32, 128), device)
        logits = fp8_mqa_logits(q, kv, weights, ks, ke)
    assert logits.device == device
    _assert_equals_reference(logits, q, kv, weights, ks, ke)
