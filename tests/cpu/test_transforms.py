"""torch.export, functional transforms, forward-mode tangents, tracing, autograd: it works, or it is refused by name."""

from __future__ import annotations

import threading
import warnings

import pytest
import torch
from torch.autograd import forward_ad

from helpers import CPU, assert_matches, expected_logits, same_bits
from lightning_indexer import fp8_mqa_logits
from lightning_indexer.calls import common
from lightning_indexer.check.cases import make_inputs, make_windows


@pytest.fixture(autouse=True)
def _fresh(monkeypatch):
    monkeypatch.setattr(common, "_WARNED", set())
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def operands(rows: int = 6, keys: int = 50, seed: int = 0) -> tuple[torch.Tensor, ...]:
    inputs = make_inputs(rows, keys, 4, 32, CPU, seed)
    return inputs.q_fp8, inputs.k_fp8, inputs.kv_scale, inputs.weights, *make_windows("misaligned", rows, keys, CPU)


def call(q, k, kv_scale, weights, ks, ke, **options) -> torch.Tensor:
    return fp8_mqa_logits(q, (k, kv_scale), weights, ks, ke, **options)


# torch.export


class Indexer(torch.nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.options = options

    def forward(self, q, k, kv_scale, weights, ks, ke):
        return call(q, k, kv_scale, weights, ks, ke, **self.options)


class IndexerIntoBuffer(torch.nn.Module):
    def forward(self, q, k, kv_scale, weights, ks, ke):
        out = torch.zeros(q.shape[0], k.shape[0], dtype=torch.bfloat16)
        return call(q, k, kv_scale, weights, ks, ke, out=out, out_dtype=torch.bfloat16)


DYNAMIC = {"rows", "keys"}


def exported(module: torch.nn.Module, dynamic: set[str], rows: int = 6, keys: int = 50) -> torch.nn.Module:
    m = {0: torch.export.Dim("rows", max=2**20)} if "rows" in dynamic else None
    n = {0: torch.export.Dim("keys", max=2**30)} if "keys" in dynamic else None
    shapes = {"q": m, "k": n, "kv_scale": n, "weights": m, "ks": m, "ke": m}
    return torch.export.export(module, operands(rows, keys), dynamic_shapes=shapes).module()


@pytest.mark.parametrize("dynamic", [{"rows"}, {"keys"}, DYNAMIC], ids=["rows", "keys", "both"])
@pytest.mark.parametrize("keys", [50, 64])
def test_export_with_dynamic_sizes(dynamic, keys):
    """Of a size whose rows need no padding and of one whose rows do, at sizes of both kinds."""
    graph = exported(Indexer(), dynamic, keys=keys)
    for rows, other in ((6, keys), (9, 64), (2, 130), (17, 256), (3, 4096 + 64), (5, 77)):
        sizes = rows if "rows" in dynamic else 6, other if "keys" in dynamic else keys
        arguments = operands(*sizes, seed=1)
        assert_matches(graph(*arguments), expected_logits(*arguments), clean=True)


@pytest.mark.parametrize("width", [33, 64])
def test_export_of_compressed_logits(width):
    graph = exported(Indexer(clean_logits=False, max_seqlen_k=width), DYNAMIC)
    for rows, keys in ((6, 50), (9, 64), (2, 131)):
        arguments = operands(rows, keys, seed=1)
        assert_matches(graph(*arguments), expected_logits(*arguments, width), clean=False)


def test_export_into_a_buffer():
    graph = exported(IndexerIntoBuffer(), DYNAMIC)
    for rows, keys in ((6, 50), (9, 64), (2, 131)):
        arguments = operands(rows, keys, seed=1)
        result = graph(*arguments)
        assert result.dtype is torch.bfloat16
        assert_matches(result, expected_logits(*arguments), clean=True)


def test_an_exported_program_survives_a_file(tmp_path):
    m, n = {0: torch.export.Dim("rows", max=2**20)}, {0: torch.export.Dim("keys", max=2**30)}
    program = torch.export.export(Indexer(), operands(), dynamic_shapes=(m, n, n, m, m, m))
    torch.export.save(program, tmp_path / "indexer.pt2")
    arguments = operands(9, 131, seed=1)
    loaded = torch.export.load(tmp_path / "indexer.pt2").module()
    assert_matches(loaded(*arguments), expected_logits(*arguments), clean=True)


# Functional transforms: each as a call with weights, whose logits are summed


Q, K, KV_SCALE, WEIGHTS, KS, KE = OPERANDS = operands()


def loss_of(weights: torch.Tensor) -> torch.Tensor:
    return call(Q, K, KV_SCALE, weights, KS, KE, clean_logits=False).sum()


TRANSFORMS = {
    "grad": lambda: torch.func.grad(loss_of)(WEIGHTS),
    "vjp": lambda: torch.func.vjp(loss_of, WEIGHTS),
    "jvp": lambda: torch.func.jvp(loss_of, (WEIGHTS,), (WEIGHTS,)),
    "vmap": lambda: torch.func.vmap(loss_of)(WEIGHTS.expand(3, -1, -1)),
    "jacfwd": lambda: torch.func.jacfwd(loss_of)(WEIGHTS),
    "hessian": lambda: torch.func.hessian(loss_of)(WEIGHTS),
}
NAMES = {"vjp": "grad", "jacfwd": "jvp", "hessian": "grad"}


@pytest.mark.parametrize("name", TRANSFORMS)
def test_transforms_are_refused_by_name(name):
    innermost = NAMES.get(name, name)
    reason = "no batching rule" if innermost == "vmap" else "no derivative"
    message = rf"^fp8_mqa_logits: called on an operand of torch\.func's {innermost}; it has {reason}"
    with pytest.raises(NotImplementedError, match=message):
        TRANSFORMS[name]()


@pytest.mark.parametrize("name", ["grad", "jvp", "vmap"])
def test_transforms_inside_a_compiled_function_are_refused(name):
    with pytest.raises(Exception, match=r"fp8_mqa_logits: called on an operand of torch\.func's transforms"):
        torch.compile(TRANSFORMS[name], backend="aot_eager", fullgraph=True)()


@pytest.mark.parametrize("place", range(4))
def test_every_operand_is_looked_at(place):
    def into(operand):
        arguments = list(OPERANDS)
        arguments[place] = operand
        return call(*arguments, clean_logits=False).sum()

    with pytest.raises(NotImplementedError, match=r"called on an operand of torch\.func's vmap"):
        torch.func.vmap(into)(OPERANDS[place].expand(2, *OPERANDS[place].shape))


def test_out_of_a_transform_is_refused():
    """A result that a transform has wrapped cannot be written by a kernel."""
    arguments = operands()
    with pytest.raises(NotImplementedError, match=r"called on an operand of torch\.func's vmap"):
        torch.func.vmap(lambda out: call(*arguments, out=out))(torch.zeros(2, 6, 50))


def test_operands_from_outside_of_a_transform_are_taken():
    arguments = operands()
    results = torch.func.vmap(lambda x: x + call(*arguments).clamp(min=-1e30).sum())(torch.zeros(3))
    assert torch.equal(results, call(*arguments).clamp(min=-1e30).sum().expand(3))


def test_functionalize():
    arguments = operands()
    assert same_bits(torch.func.functionalize(call)(*arguments), call(*arguments))


def in_threads(work, threads: int = 2) -> list[BaseException | None]:
    """What each of the threads raised; all of them are inside at once."""
    barrier = threading.Barrier(threads)
    raised: list[BaseException | None] = [None] * threads

    def run(index: int) -> None:
        try:
            work(barrier)
        except BaseException as error:
            raised[index] = error

    running = [threading.Thread(target=run, args=(index,)) for index in range(threads)]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join(60)
    return raised


@pytest.mark.parametrize("name", ["jvp", "grad"])
def test_transforms_in_two_threads_are_refused(name):
    def work(barrier):
        def waiting(w):
            barrier.wait(30)
            try:
                return loss_of(w)
            finally:
                barrier.wait(30)  # neither thread leaves its transform before both have called

        if name == "jvp":
            torch.func.jvp(waiting, (WEIGHTS,), (WEIGHTS,))
        else:
            torch.func.grad(waiting)(WEIGHTS)

    for error in in_threads(work):
        assert isinstance(error, NotImplementedError), error
        assert f"torch.func's {name}" in str(error)


# Forward-mode differentiation without torch.func. Its level is one for all threads of a process.


@pytest.mark.parametrize("place", range(4))
def test_a_tangent_is_refused(place):
    arguments = list(operands())
    with forward_ad.dual_level():
        arguments[place] = forward_ad.make_dual(arguments[place], torch.ones_like(arguments[place]))
        with pytest.raises(NotImplementedError, match=r"^fp8_mqa_logits: got an operand with a tangent, and it has no"):
            call(*arguments)


def test_a_tangent_is_refused_in_another_thread_too():
    arguments = list(operands())
    with forward_ad.dual_level():
        arguments[3] = forward_ad.make_dual(arguments[3], torch.ones_like(arguments[3]))
        errors = in_threads(lambda barrier: call(*arguments))
    assert all(isinstance(error, NotImplementedError) and "tangent" in str(error) for error in errors), errors


def test_a_level_of_another_thread_changes_nothing():
    results = []
    with forward_ad.dual_level():
        assert in_threads(lambda barrier: results.append(call(*operands()))) == [None, None]
    for result in results:
        assert_matches(result, expected_logits(*operands()), clean=True)


# torch.jit.trace


def test_jit_trace_is_refused():
    arguments = operands()
    with pytest.raises(
        NotImplementedError, match=r"^fp8_mqa_logits: torch\.jit\.trace records PyTorch's own operations"
    ):
        torch.jit.trace(call, arguments)


# Autograd


@pytest.mark.parametrize("place", range(2, 4))
def test_operands_that_require_grad_are_warned_of_once(place):
    arguments = list(operands())
    arguments[place] = arguments[place].clone().requires_grad_()
    with pytest.warns(UserWarning, match="^fp8_mqa_logits: an operand requires grad, and no gradient flows"):
        result = call(*arguments)
    assert not result.requires_grad
    assert_matches(result, expected_logits(*operands()), clean=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        call(*arguments)


def test_a_parameter_is_warned_of():
    arguments = list(operands())
    arguments[3] = torch.nn.Parameter(arguments[3])
    with pytest.warns(UserWarning, match="an operand requires grad"):
        call(*arguments)


def test_no_warning_where_no_gradient_is_asked_for():
    arguments = list(operands())
    arguments[3] = arguments[3].clone().requires_grad_()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with torch.no_grad():
            call(*arguments)
        call(*operands())
