"""Scores and selection in one call: the PyTorch backend, what is accepted and refused, waves, the operators."""

from __future__ import annotations

import re

import pytest
import torch

from helpers import CPU, INT32_MAX, INT32_MIN, int32
from lightning_indexer import (
    Arch,
    CacheLayout,
    fp8_mqa_logits,
    fp8_mqa_topk,
    fp8_paged_mqa_topk,
    reference_mqa_topk,
    top_k_per_row,
)
from lightning_indexer.arch import MIB
from lightning_indexer.backends.row_waves import Waves, wave_bytes
from lightning_indexer.calls import common
from lightning_indexer.check import mqa_topk, paged_mqa_topk
from lightning_indexer.check.cases import make_inputs
from lightning_indexer.check.mqa_topk import Case, make_operands
from lightning_indexer.problems.mqa_logits import MqaLogitsProblem, row_stride
from lightning_indexer.problems.mqa_topk import MqaTopKProblem
from lightning_indexer.problems.paged_mqa_logits import PagedMqaLogitsProblem
from lightning_indexer.problems.paged_mqa_topk import PagedMqaTopKProblem, reference_paged_mqa_topk
from lightning_indexer.problems.top_k import TopKProblem
from lightning_indexer.selection import registry


@pytest.mark.parametrize("case", mqa_topk.cases(False), ids=str)
def test_cpu(case):
    assert mqa_topk.run_case(case, "torch-blocked", CPU, repeats=1) == []


@pytest.mark.parametrize("case", paged_mqa_topk.cases(False)[::2], ids=str)
def test_cpu_paged(case):
    assert paged_mqa_topk.run_case(case, "torch-blocked", CPU, repeats=1) == []


# Waves


def problem(rows=4096, keys=32768, heads=64, k=2048, workspace=64 * MIB, width=0) -> MqaTopKProblem:
    scoring = MqaLogitsProblem(rows, keys, heads, 128, clean_logits=False, max_seqlen_k=width)
    return MqaTopKProblem(scoring, TopKProblem(rows, scoring.width, k), workspace_bytes=workspace)


@pytest.mark.parametrize(("backend", "arch"), [
    ("cuda-sm90", "sm90"), ("triton-portable", "sm90"), ("triton-portable", "sm120"), ("hip-gfx950", "gfx950"),
    ("gluon-gfx950", "gfx950"), ("flydsl", "gfx942"), ("torch-blocked", "cpu"), ("torch-blocked", "sm90"),
])  # fmt: skip
def test_waves_fit_their_workspace(backend, arch):
    kernel, arch = registry.kernel(backend, "fp8_mqa_topk"), Arch.parse(arch)
    for rows, keys in ((4096, 32768), (1000, 1 << 20), (5, 1000)):
        for workspace in (5 * MIB, 64 * MIB):
            given = problem(rows, keys, 32, workspace=workspace)
            assert kernel.supports(given, arch) is None
            for config in kernel.neighbours(given, arch):
                run = kernel.launch(given, arch, config)
                assert run.workspace_bytes <= workspace, (rows, keys, workspace, config)
                if not isinstance(config, Waves):  # the gate: tests/compile/test_mqa_topk_sm90.py
                    continue
                held = run.places * run.rows * row_stride(keys, torch.float32) * 4
                assert 1 <= config.rows <= rows
                assert run.workspace_bytes == run.select_bytes + held


def test_waves_are_whole_row_blocks_and_take_the_width_that_the_caller_bounds():
    kernel, arch = registry.kernel("cuda-sm90", "fp8_mqa_topk").waves, Arch.parse("sm90")
    # Hopper's waves are as large as the workspace, others as their share of the cache.
    assert wave_bytes(problem(), arch) == int(5 / 8 * 50 * MIB)
    assert kernel.wave_bytes(problem(), arch) == 64 * MIB
    portable = registry.kernel("triton-portable", "fp8_mqa_topk")
    assert portable.wave_bytes(problem(workspace=256 * MIB), arch) == 256 * MIB
    assert portable.wave_bytes(problem(), Arch.parse("gfx942")) == wave_bytes(problem(), Arch.parse("gfx942"))
    assert kernel.config(problem(), arch).rows == 512
    assert kernel.config(problem(workspace=100 * MIB), arch).rows == 684  # 6 waves of at most 800 rows
    assert kernel.config(problem(width=8192), arch).rows == 2048
    assert kernel.config(problem(rows=3), arch).rows == 3
    assert kernel.config(problem(keys=1 << 20, heads=32), arch).rows == 16
    assert kernel.config(problem(keys=1 << 20, heads=32, workspace=20 * MIB), arch).rows == 5


def test_a_workspace_of_the_callers_own():
    case = Case(40, 500, 32, k=20)
    inputs = make_operands(case, CPU)
    given = (inputs.q, inputs.kv, inputs.weights, inputs.ks, inputs.ke, 20)
    expected, scores = reference_mqa_topk(*given)
    for fill in (0, 0xFF):  # bytes of NaN
        workspace = torch.full((6 * 4 * row_stride(500, torch.float32),), fill, dtype=torch.uint8)
        out, values = torch.full((40, 30), -7).int()[:, :20], torch.full((40, 20), -7.0)
        result = fp8_mqa_topk(*given, out=out, values=values, workspace=workspace)
        assert result[0] is out
        assert result[1] is values
        assert torch.equal(out, expected)
        assert torch.equal(values, scores)
    assert torch.equal(fp8_mqa_topk(*given), expected)


def test_a_nan_of_an_earlier_wave_selects_nothing_less():
    """Windows of at most k keys: what is left in the workspace plays no part."""
    inputs = make_operands(Case(12, 50, 32, k=64, window="misaligned"), CPU)
    workspace = torch.full((3 * 4 * row_stride(50, torch.float32),), 0xFF, dtype=torch.uint8)
    given = (inputs.q, inputs.kv, inputs.weights, inputs.ks, inputs.ke, 64)
    found = fp8_mqa_topk(*given, workspace=workspace)
    assert torch.equal(found, reference_mqa_topk(*given)[0])


@pytest.mark.parametrize("bound", [0, 9])
def test_extreme_windows(bound):
    inputs = make_inputs(6, 30, 8, 32, CPU)
    ks = int32(INT32_MIN, 0, INT32_MAX, INT32_MIN, 25, -4)
    ke = int32(INT32_MAX, INT32_MIN, INT32_MAX, INT32_MIN, INT32_MAX, 20)
    given = (inputs.q_fp8, (inputs.k_fp8, inputs.kv_scale), inputs.weights, ks, ke, 7)
    for base in ("row", "absolute"):
        expected, _ = reference_mqa_topk(*given, max_seqlen_k=bound, index_base=base)
        assert torch.equal(fp8_mqa_topk(*given, max_seqlen_k=bound, index_base=base), expected)


def test_kept_positions_come_first_by_score_and_count_as_infinite():
    inputs = make_operands(Case(5, 90, 32), CPU)
    ks, ke = int32(0, 10, 40, 88, 30), int32(90, 20, 90, 90, 30)
    given = (inputs.q, inputs.kv, inputs.weights, ks, ke, 8)
    indices, values = fp8_mqa_topk(*given, force_first=1, force_last=2, order="score", values=True)
    assert indices[:3, :3].tolist() == [[0, 88, 89], [0, 8, 9], [0, 48, 49]]
    assert bool((values[:3, :3] == float("inf")).all())
    assert torch.isfinite(values[0, 3:]).all()
    assert indices[3].tolist() == [0, 1] + [-1] * 6
    assert indices[4].tolist() == [-1] * 8


@pytest.mark.parametrize("bound", [0, 9])
def test_bfloat16_keys_without_scales(bound):
    """As the two calls select, in waves of two rows; under torch.compile too."""
    inputs = make_operands(Case(11, 90, 32, window="misaligned"), CPU)
    given = (inputs.q.bfloat16(), (inputs.kv[0].bfloat16(), None), inputs.weights, inputs.ks, inputs.ke)
    logits = fp8_mqa_logits(*given, clean_logits=False)
    ends = torch.minimum(inputs.ke, inputs.ks + bound) if bound else inputs.ke
    expected = top_k_per_row(logits, 7, inputs.ks, ends, index_base="absolute")
    options = {"max_seqlen_k": bound, "index_base": "absolute"}
    workspace = 2 * 4 * row_stride(90, torch.float32)
    assert torch.equal(fp8_mqa_topk(*given, 7, **options, workspace=workspace), expected)
    ones = (*given[:1], (given[1][0], torch.ones(90)), *given[2:])
    assert torch.equal(fp8_mqa_topk(*ones, 7, **options), expected)
    compiled = torch.compile(lambda *operands: fp8_mqa_topk(*operands, 7, **options), backend="eager", fullgraph=True)
    assert torch.equal(compiled(*given), expected)


# What is accepted and refused


def operands(rows=4, keys=50):
    inputs = make_operands(Case(rows, keys, 32), CPU)
    return {
        "q": inputs.q, "kv": inputs.kv, "weights": inputs.weights, "cu_seqlen_ks": inputs.ks, "cu_seqlen_ke": inputs.ke,
        "k": 3,
    }  # fmt: skip


REFUSED = {
    "kv: got one tensor, expected the pair": {"kv": torch.zeros(5)},
    "kv_scale: got None with k of torch.float8_e4m3fn": {"kv": (torch.zeros(50, 128).to(torch.float8_e4m3fn), None)},
    "q: got dtype torch.float32": {"q": torch.zeros(4, 32, 128)},
    "cu_seqlen_ks: got dtype torch.int64": {"cu_seqlen_ks": torch.zeros(4, dtype=torch.int64)},
    "k: got 0, expected 1 to 4096": {"k": 0},
    "max_seqlen_k: got -1": {"max_seqlen_k": -1},
    "index_base: got 'global'": {"index_base": "global"},
    "offsets: got None with index_base 'offset'": {"index_base": "offset"},
    "offsets: got shape [3], expected [4] or [4, 1]": {"index_base": "offset", "offsets": int32(1, 2, 3)},
    "force_first: got 4, expected 0 to k, 3": {"force_first": 4},
    "force_last: got 2 beside force_first 2, expected 3 together": {"force_first": 2, "force_last": 2},
    "force_first: got float, expected an int": {"force_first": 1.0},
    "workspace: got 255 bytes, expected at least 256, a row of scores": {"workspace": 255},
    "workspace: got float, expected an int": {"workspace": 1e6},
    "workspace: got dtype torch.float32, expected torch.uint8": {"workspace": torch.zeros(4000)},
    "out: got strides (1, 4), expected a contiguous last dimension": {"out": int32(*range(12)).view(3, 4).t()},
    "values: got int, expected a bool or a torch.Tensor": {"values": 1},
    "backend: got 'fast', expected one of": {"backend": "fast"},
}  # fmt: skip


@pytest.mark.parametrize("message", REFUSED)
def test_refused(message):
    with pytest.raises((TypeError, ValueError), match=re.escape(message)):
        fp8_mqa_topk(**operands() | REFUSED[message])


def test_a_workspace_that_has_room_for_a_row_and_not_for_the_selection():
    kernel = registry.kernel("triton-portable", "fp8_mqa_topk")
    given = problem(4, 50, 32, k=3, workspace=256)
    assert kernel.launch(given, Arch.parse("sm89"), kernel.config(given, Arch.parse("sm89"))).workspace_bytes > 256


def paged(rows=3, **changes):
    layout = CacheLayout(16, 32)
    generator = torch.Generator().manual_seed(0)
    k = torch.randint(-1, 2, (9, 16, 32), generator=generator).float().to(torch.float8_e4m3fn)
    q = torch.randint(-1, 2, (rows, 1, 8, 32), generator=generator).float().to(torch.float8_e4m3fn)
    tables = torch.arange(9, dtype=torch.int32).view(3, 3)[:rows]
    given = {
        "q": q, "kv_cache": layout.pack(k, torch.ones(9, 16)), "weights": torch.ones(rows, 8),
        "context_lens": int32(40, 0, 48)[:rows], "block_tables": tables, "k": 5,
    }  # fmt: skip
    return given | changes


def test_paged_slots_and_the_width_of_the_table():
    given = paged()
    slots = fp8_paged_mqa_topk(**given, index_base="page")
    relative = fp8_paged_mqa_topk(**given, max_context_len=1000)
    expected, _ = reference_paged_mqa_topk(*given.values(), 48)
    assert torch.equal(relative, expected)
    page = given["block_tables"].gather(1, relative.clamp(min=0).long() // 16)
    assert torch.equal(slots, torch.where(relative < 0, -1, page * 16 + relative % 16))
    # The plan of the first call serves the second one.
    assert torch.equal(fp8_paged_mqa_topk(**given, index_base="page"), slots)


@pytest.mark.parametrize(("message", "changes"), [
    ("block_tables: got list, expected a torch.Tensor", {"block_tables": [1]}),
    ("page_size: got 8, expected 16, that of block_tables", {"index_base": "page", "page_size": 8}),
    ("workspace: got 100 bytes, expected at least 256, a row of scores", {"workspace": 100}),
    ("context_lens: got dtype torch.int64", {"context_lens": torch.zeros(3, dtype=torch.int64)}),
])  # fmt: skip
def test_paged_refused(message, changes):
    with pytest.raises((TypeError, ValueError), match=re.escape(message)):
        fp8_paged_mqa_topk(**paged(**changes))


def test_gradients_are_warned_of():
    given = operands()
    given["weights"] = given["weights"].requires_grad_()
    common._WARNED.discard("fp8_mqa_topk")
    with pytest.warns(UserWarning, match="fp8_mqa_topk: an operand requires grad"):
        fp8_mqa_topk(**given)


# torch.compile and friends


@pytest.mark.parametrize("own", [False, True])
def test_compiled(own):
    given = operands(8, 90)
    expected, scores = reference_mqa_topk(**given)
    out, values = torch.empty(8, 3, dtype=torch.int32), torch.empty(8, 3)

    def call(q, kv, weights, ks, ke, out, values):
        return fp8_mqa_topk(q, kv, weights, ks, ke, 3, values=values if own else True, out=out if own else None)

    tensors = list(given.values())[:5]
    result = torch.compile(call, backend="eager", fullgraph=True)(*tensors, out, values)
    assert torch.equal(result[0], expected)
    assert torch.equal(result[1], scores)
    assert not own or (torch.equal(out, expected) and torch.equal(values, scores))


def test_paged_compiled():
    given = paged()
    expected, _ = reference_paged_mqa_topk(*given.values(), 48, index_base="absolute")

    def call(q, cache, weights, lengths, tables):
        return fp8_paged_mqa_topk(q, cache, weights, lengths, tables, 5, index_base="absolute", workspace=4096)

    found = torch.compile(call, backend="eager", fullgraph=True)(*list(given.values())[:5])
    assert torch.equal(found, expected)


def test_fake_tensors():
    given = operands()
    meta = {name: value.to("meta") for name, value in given.items() if isinstance(value, torch.Tensor)}
    meta["kv"] = tuple(tensor.to("meta") for tensor in given["kv"])
    indices, values = fp8_mqa_topk(**meta, k=9, values=True)
    assert indices.shape == values.shape == (4, 9)
    assert indices.is_meta
    found = fp8_paged_mqa_topk(**{n: t.to("meta") if isinstance(t, torch.Tensor) else t for n, t in paged().items()})
    assert found.shape == (3, 5)


# The self-check


@pytest.mark.parametrize("options", [{}, {"index_base": "absolute", "values": True, "tie": "larger"}], ids=str)
def test_examples_are_exact_on_every_backend(options):
    arch = Arch.parse("cpu")
    scoring = MqaLogitsProblem(300, 4000, 32, 128, clean_logits=False, max_seqlen_k=3000 if options else 0)
    cut = TopKProblem(300, scoring.width, 40, **options)
    layout = CacheLayout(16, 64, "preshuffled")
    pages = PagedMqaLogitsProblem(70, 2, 900, 8, 64, layout, 60, clean_logits=False, row_lengths=True)
    for given in (
        MqaTopKProblem(scoring, cut, 2, 3),
        PagedMqaTopKProblem(pages, cut._replace(rows=140, width=900, starts=False), 2, 3),
    ):
        small = given.adversarial(arch)
        kernel = registry.kernel("torch-blocked", given.operation)
        call, other = small.example(CPU), small.example(CPU)
        config = kernel.config(small, arch)
        kernel.launch(small, arch, config)(call)
        kernel.launch(small, arch, kernel.of_wave_bytes(small, arch, 0))(other)
        assert small.compare(call, other) is None
        assert int((call.indices < -1).sum()) == 0
        other.indices[0, 0] += 1
        assert "1 of" in small.compare(call, other)


@pytest.mark.parametrize("case", [case for case in mqa_topk.cases(False) if case.bound][::2], ids=str)
def test_bounded_windows_of_a_kernel_without_the_compressed_form(case, monkeypatch):
    kernel, supports = registry.kernel("torch-blocked", "fp8_mqa_topk"), type(registry.kernel("torch-blocked")).supports
    refuse = lambda self, problem, arch: "no" if problem.compressed else supports(self, problem, arch)  # noqa: E731
    monkeypatch.setattr(type(kernel.scoring), "supports", refuse)
    common.forget_plans()
    assert kernel.config(case.problem, Arch.parse("cpu")).plain
    assert mqa_topk.run_case(case, "torch-blocked", CPU, repeats=1) == []
    common.forget_plans()
