"""The custom operators: what tracing, fake tensors and torch.compile see is what eager calls do."""

from __future__ import annotations

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.library import opcheck

from helpers import CPU, assert_matches, expected_logits, same_bits
from lightning_indexer import fp8_mqa_logits
from lightning_indexer.check.cases import make_inputs, make_windows
from lightning_indexer.check.guarded import GuardedOutput

OPERATOR = torch.ops.lightning_indexer.fp8_mqa_logits.default
OPERATOR_OUT = torch.ops.lightning_indexer.fp8_mqa_logits_out.default

# opcheck's schema test compares tensors with torch.allclose, which has no fp8 kernel: test_operands_are_not_modified
# and test_out_writes_into_out_alone stand in for it.
OPCHECKS = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")

FORMS = {
    "clean": {"clean_logits": True, "max_seqlen_k": 0, "out_dtype": torch.float32},
    "clean bf16": {"clean_logits": True, "max_seqlen_k": 0, "out_dtype": torch.bfloat16},
    "noclean": {"clean_logits": False, "max_seqlen_k": 0, "out_dtype": torch.float32},
    "compressed": {"clean_logits": False, "max_seqlen_k": 33, "out_dtype": torch.float32},
    "compressed bf16": {"clean_logits": False, "max_seqlen_k": 33, "out_dtype": torch.bfloat16},
}


@pytest.fixture(autouse=True)
def _fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def operands(rows: int = 6, keys: int = 50, window: str = "misaligned", seed: int = 0) -> tuple[torch.Tensor, ...]:
    """q, k, kv_scale, weights, ks, ke. ``whole``: windows of every key, so that no position is unspecified."""
    inputs = make_inputs(rows, keys, 4, 32, CPU, seed)
    if window == "whole":
        ks = torch.zeros(rows, dtype=torch.int32)
        ke = torch.full((rows,), keys, dtype=torch.int32)
    else:
        ks, ke = make_windows(window, rows, keys, CPU)
    return inputs.q_fp8, inputs.k_fp8, inputs.kv_scale, inputs.weights, ks, ke


def call(q, k, kv_scale, weights, ks, ke, **options) -> torch.Tensor:
    return fp8_mqa_logits(q, (k, kv_scale), weights, ks, ke, **options)


def positional(form: dict) -> tuple:
    return form["clean_logits"], form["max_seqlen_k"], form["out_dtype"]


# opcheck


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_opcheck(form):
    # Unspecified positions may differ from run to run: where the form has some, the windows leave none.
    arguments = operands(window="misaligned" if form["clean_logits"] else "whole")
    opcheck(OPERATOR, (*arguments, *positional(form), None), test_utils=OPCHECKS)


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
@pytest.mark.parametrize("wider", [0, 13])
def test_opcheck_out(form, wider):
    clean, max_seqlen_k, dtype = positional(form)
    arguments = operands(window="misaligned" if clean else "whole")
    width = max_seqlen_k or 50
    out = torch.zeros(6, width + wider, dtype=dtype)[:, :width]
    opcheck(OPERATOR_OUT, (*arguments, out, clean, max_seqlen_k, None), test_utils=OPCHECKS)


@pytest.mark.parametrize(("rows", "keys"), [(0, 50), (6, 0), (0, 0)])
def test_opcheck_without_rows_or_keys(rows, keys):
    q, k, kv_scale, weights, ks, ke = operands()
    arguments = q[:rows], k[:keys], kv_scale[:keys], weights[:rows], ks[:rows], ke[:rows]
    opcheck(OPERATOR, (*arguments, True, 0, torch.float32, None), test_utils=OPCHECKS)
    opcheck(OPERATOR_OUT, (*arguments, torch.zeros(rows, keys), True, 0, None), test_utils=OPCHECKS)


def test_schemas():
    assert not OPERATOR._schema.is_mutable
    mutated = [argument.name for argument in OPERATOR_OUT._schema.arguments if argument.is_write]
    assert mutated == ["out"]
    assert OPERATOR_OUT._schema.returns == []


# The operators, called as they are


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_operands_are_not_modified(form):
    arguments = operands()
    before = [argument.clone() for argument in arguments]
    result = OPERATOR(*arguments, *positional(form), None)
    for argument, old in zip(arguments, before, strict=True):
        assert same_bits(argument, old)
        assert result.untyped_storage().data_ptr() != argument.untyped_storage().data_ptr()
    expected = expected_logits(*arguments, form["max_seqlen_k"])
    assert_matches(result, expected, clean=form["clean_logits"])


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_out_writes_into_out_alone(form):
    clean, max_seqlen_k, dtype = positional(form)
    arguments = operands()
    before = [argument.clone() for argument in arguments]
    buffer = GuardedOutput(6, max_seqlen_k or 50, dtype, CPU)
    assert OPERATOR_OUT(*arguments, buffer.view, clean, max_seqlen_k, None) is None
    assert buffer.intact()
    for argument, old in zip(arguments, before, strict=True):
        assert same_bits(argument, old)
    assert_matches(buffer.view, expected_logits(*arguments, max_seqlen_k), clean=clean)


# Fake tensors


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
@pytest.mark.parametrize(("rows", "keys"), [(6, 50), (6, 64), (1, 1), (3, 129), (0, 50), (6, 0)])
def test_fake_results_look_like_eager_ones(form, rows, keys):
    arguments = operands(6, 129)
    arguments = tuple(
        argument[:keys] if index in (1, 2) else argument[:rows] for index, argument in enumerate(arguments)
    )
    eager = call(*arguments, **form)
    with FakeTensorMode() as mode:
        fake = call(*(mode.from_tensor(argument) for argument in arguments), **form)
    assert type(fake) is not torch.Tensor
    assert fake.shape == eager.shape == (rows, form["max_seqlen_k"] or keys)
    assert fake.stride() == torch.empty(fake.shape).stride()  # contiguous, where eager results have padded rows
    assert fake.dtype is eager.dtype is form["out_dtype"]
    assert fake.device == eager.device
    assert fake.storage_offset() == eager.storage_offset()
    assert not fake.requires_grad


def test_fake_out_is_returned():
    with FakeTensorMode() as mode:
        arguments = [mode.from_tensor(argument) for argument in operands()]
        out = torch.empty(6, 70)[:, :50]
        assert call(*arguments, out=out) is out
        with pytest.raises(TypeError, match=r"^out: got dtype torch.float32, expected torch.bfloat16"):
            call(*arguments, out=out, out_dtype=torch.bfloat16)
        with pytest.raises(ValueError, match=r"out: got shape \[6, 49\], expected \[6, 50\]"):
            call(*arguments, out=out[:, :49])


def test_meta_tensors():
    eager = call(*operands())
    meta = call(*(argument.to("meta") for argument in operands()))
    assert (meta.device.type, meta.shape, meta.dtype) == ("meta", eager.shape, eager.dtype)
    assert meta.is_contiguous()


def test_parameters_go_through_the_operator():
    q, k, kv_scale, weights, ks, ke = operands()
    expected = expected_logits(q, k, kv_scale, weights, ks, ke)
    for arguments in (
        (torch.nn.Parameter(q, requires_grad=False), k, kv_scale, weights, ks, ke),
        (q, k, kv_scale, torch.nn.Parameter(weights), ks, ke),
    ):
        result = call(*arguments)
        assert not result.requires_grad
        assert_matches(result, expected, clean=True)
    out = torch.nn.Parameter(torch.full(expected.shape, torch.nan), requires_grad=False)
    assert call(q, k, kv_scale, weights, ks, ke, out=out) is out
    assert_matches(out.data, expected, clean=True)


# Tracing


@pytest.mark.parametrize("tracing_mode", ["real", "fake", "symbolic"])
def test_make_fx(tracing_mode):
    arguments = operands()

    def plain(q, k, kv_scale, weights, ks, ke):
        return call(q, k, kv_scale, weights, ks, ke)

    def into_out(q, k, kv_scale, weights, ks, ke):
        return call(q, k, kv_scale, weights, ks, ke, out=torch.zeros(q.shape[0], k.shape[0]))

    for function, operator in ((plain, OPERATOR), (into_out, OPERATOR_OUT)):
        graph = make_fx(function, tracing_mode=tracing_mode)(*arguments)
        targets = [node.target for node in graph.graph.nodes if node.op == "call_function"]
        assert targets.count(operator) == 1
        others = operands(seed=1)
        assert_matches(graph(*others), expected_logits(*others), clean=True)


# torch.compile. inductor gets nothing but the operator to compile, so it needs no C++ compiler.


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.slow
def test_compiled_calls_equal_eager_ones(backend):
    arguments = operands()
    for form in FORMS.values():
        compiled = torch.compile(lambda *a, form=form: call(*a, **form), backend=backend, fullgraph=True)
        result, eager = compiled(*arguments), call(*arguments, **form)
        assert result.is_contiguous()
        inside = expected_logits(*arguments, form["max_seqlen_k"]) != float("-inf")
        if form["clean_logits"]:
            inside[:] = True
        assert same_bits(result[inside], eager[inside])


def test_compiled_between_other_operations():
    def step(q, k, kv_scale, weights, ks, ke):
        return call(q, k, kv_scale, weights * 2, ks, ke + 1).clamp(min=-100.0) + 1

    arguments = operands()
    compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
    assert same_bits(compiled(*arguments), step(*arguments))


# Widths that would need padding in eager code and widths that would not: one graph for all.
SIZES = [(6, 50), (6, 51), (9, 130), (6, 64), (11, 1000), (7, 128), (5, 77)]


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.slow
def test_no_recompilation_per_size(backend):
    counter = CompileCounterWithBackend(backend)
    compiled = torch.compile(call, backend=counter, fullgraph=True, dynamic=True)
    for rows, keys in SIZES:
        arguments = operands(rows, keys)
        result, eager = compiled(*arguments), call(*arguments)
        assert result.is_contiguous()
        assert same_bits(result, eager)
        assert counter.frame_count == 1


@pytest.mark.slow
def test_automatic_dynamic_sizes_settle():
    """Without ``dynamic=True``: one graph for the first size, one for a dynamic N, one for a dynamic M, and no more."""
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(call, backend=counter, fullgraph=True)
    for rows, keys, graphs in ((6, 50, 1), (6, 51, 2), (6, 65, 2), (9, 130, 3), (11, 200, 3), (12, 1000, 3)):
        arguments = operands(rows, keys)
        assert same_bits(compiled(*arguments), call(*arguments))
        assert counter.frame_count <= graphs


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.slow
def test_compiled_out_writes_into_the_callers_buffer(backend):
    compiled = torch.compile(call, backend=backend, fullgraph=True)
    arguments = operands()
    eager = call(*arguments)
    for dtype in (torch.float32, torch.bfloat16):
        buffer = GuardedOutput(6, 50, dtype, CPU)
        result = compiled(*arguments, out=buffer.view, out_dtype=dtype)
        assert result is buffer.view
        assert buffer.intact()
        assert same_bits(buffer.view, eager.to(dtype))


def test_compiled_with_operands_that_require_grad():
    q, k, kv_scale, weights, ks, ke = operands()
    compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
    result = compiled(q, k, kv_scale.clone().requires_grad_(), weights.clone().requires_grad_(), ks, ke)
    assert not result.requires_grad
    assert same_bits(result, call(q, k, kv_scale, weights, ks, ke))


@pytest.mark.parametrize(("rows", "keys"), [(0, 50), (6, 0)])
def test_compiled_without_rows_or_keys(rows, keys):
    q, k, kv_scale, weights, ks, ke = operands()
    arguments = q[:rows], k[:keys], kv_scale[:keys], weights[:rows], ks[:rows], ke[:rows]
    compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
    assert compiled(*arguments).shape == (rows, keys)


def test_compiled_calls_are_checked_while_tracing():
    q, k, kv_scale, weights, ks, ke = operands()
    compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
    with pytest.raises(Exception, match=r"cu_seqlen_ke: got dtype torch.int64, expected torch.int32"):
        compiled(q, k, kv_scale, weights, ks, ke.long())


def test_a_named_backend_reaches_the_compiled_call():
    compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
    arguments = operands()
    assert same_bits(compiled(*arguments, backend="torch-blocked"), call(*arguments, backend="torch-blocked"))
    with pytest.raises(ValueError, match="backend: got 'cutlass', expected one of"):
        compiled(*arguments, backend="cutlass")
