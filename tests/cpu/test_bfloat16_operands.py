"""Scores of bfloat16 operands: the public call, the backends that take them, and those that do not."""

from __future__ import annotations

import pytest
import torch

from helpers import CPU, INTERPRETED, ON_CPU, check_guarded, expected_logits, options_of, same_bits
from lightning_indexer import Arch, MqaLogitsProblem, envs, fp8_mqa_logits
from lightning_indexer.check.cases import make_inputs, make_windows
from lightning_indexer.problems.mqa_logits import FORMS
from lightning_indexer.selection import registry, selfcheck

BF16 = torch.bfloat16
TAKEN_BY = [
    "torch-blocked",
    pytest.param("triton-portable", marks=pytest.mark.skipif(not envs.triton_interprets(), reason="tests/gpu has it")),
]


def operands(rows=5, keys=150, heads=8, head_dim=32):
    inputs = make_inputs(rows, keys, heads, head_dim, CPU)
    return inputs.q.to(BF16), inputs.k.to(BF16), inputs.weights


@pytest.mark.parametrize("backend", TAKEN_BY)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("window", ["misaligned", "empty", "past_end"])
def test_against_the_reference(window, form, backend):
    (q, k, weights), (ks, ke) = operands(), make_windows(window, 5, 150, CPU)
    scale = torch.linspace(-2.0, 2.0, 150)
    width = 90 if form == "compressed" else 0
    for kv_scale in (None, scale):
        expected = expected_logits(q, k, torch.ones(150) if kv_scale is None else kv_scale, weights, ks, ke, width)
        check_guarded(
            lambda out, kv_scale=kv_scale: fp8_mqa_logits(
                q, (k, kv_scale), weights, ks, ke, out=out, backend=backend, **options_of(form, width)
            ),
            expected,
            torch.float32,
            clean=form == "clean",
            tolerance=INTERPRETED if backend == "triton-portable" else ON_CPU,
        )


def test_strided_rows_and_the_compiled_operator():
    q, k, weights = operands(keys=40)
    wide = torch.full((40, 32 + 7), float("nan"), dtype=BF16)
    wide[:, 3:35] = k
    ks, ke = make_windows("misaligned", 5, 40, CPU)
    expected = fp8_mqa_logits(q, (k, None), weights, ks, ke)
    assert same_bits(fp8_mqa_logits(q, (wide[:, 3:35], None), weights, ks, ke), expected)
    compiled = torch.compile(lambda *a: fp8_mqa_logits(a[0], (a[1], None), *a[2:]), backend="aot_eager", fullgraph=True)
    assert same_bits(compiled(q, k, weights, ks, ke), expected)


def test_what_is_refused():
    (q, k, weights), (ks, ke) = operands(keys=40), make_windows("causal", 5, 40, CPU)
    fp8 = k.to(torch.float8_e4m3fn)
    with pytest.raises(TypeError, match=r"k: got dtype torch\.float8_e4m3fn with q of torch\.bfloat16"):
        fp8_mqa_logits(q, (fp8, torch.ones(40)), weights, ks, ke)
    with pytest.raises(TypeError, match=r"kv_scale: got None with k of torch\.float8_e4m3fn"):
        fp8_mqa_logits(q.to(torch.float8_e4m3fn), (fp8, None), weights, ks, ke)
    with pytest.raises(TypeError, match="k: got list"):
        fp8_mqa_logits(q, ([1.0], None), weights, ks, ke)
    with pytest.raises(TypeError, match=r"q: got dtype torch\.float16"):
        fp8_mqa_logits(q.half(), (k.half(), torch.ones(40)), weights, ks, ke)


@pytest.mark.parametrize(
    ("backend", "arch"),
    [("cuda-sm90", "sm90"), ("flydsl", "gfx942"), ("gluon-gfx950", "gfx950"), ("hip-gfx950", "gfx950")],
)
def test_kernels_of_fp8_say_so(backend, arch):
    problem = MqaLogitsProblem(4096, 32768, 32 if backend == "hip-gfx950" else 64, 128)
    kernel = registry.kernel(backend)
    assert kernel.supports(problem, Arch.parse(arch)) is None
    wide = problem._replace(q_dtype=BF16, k_dtype=BF16)
    assert kernel.supports(wide, Arch.parse(arch)) == "q and k are bfloat16, and this kernel reads fp8"
    verdicts = {verdict.backend: verdict for verdict in registry.explain(wide, Arch.parse(arch))}
    assert verdicts["triton-portable"].reason is None or "installed" in verdicts["triton-portable"].reason


def test_the_self_check_keeps_the_operands():
    problem = MqaLogitsProblem(4, 96, 8, 32, BF16, BF16).adversarial(Arch.parse("gfx942"))
    assert (problem.q_dtype, problem.k_dtype) == (BF16, BF16)
    assert problem.example(CPU).q.dtype is BF16
    assert not problem.is_fp8
    assert "bfloat16 operands" in str(problem)
    assert selfcheck is not None
