"""``triton-portable``'s top-k in Triton's interpreter against the reference, and its plan."""

from __future__ import annotations

import pytest
import torch

from helpers import CPU
from lightning_indexer import Arch, envs
from lightning_indexer.backends.triton_portable.top_k import TopK, TopKConfig, TopKLaunch, heuristic, neighbours
from lightning_indexer.calls.top_k import top_k_per_row, top_k_workspace_bytes
from lightning_indexer.check.top_k import SCORES, Case, Inputs, cases, run_case
from lightning_indexer.problems.top_k import MAX_K, TopKCall, TopKProblem

interpreted = pytest.mark.skipif(
    not envs.triton_interprets(), reason="a GPU is here: tests/gpu runs the compiled kernel, in the same process"
)
SM90 = Arch.parse("sm90")
# Several tiles a span, several spans a row, lists that rows pass.
SMALL = TopKConfig(block=64, span=128, capacity=128, sample=64, splits=1, programs=1, num_warps=4)
CUT = TopKConfig(block=64, span=128, capacity=128, sample=64, splits=3, programs=1, num_warps=4)


def run(config: TopKConfig):
    def call(case: Case, inputs: Inputs, indices, values):
        given = (inputs.logits, inputs.starts, inputs.ends, inputs.offsets, inputs.page_table)
        TopKLaunch(case.problem, SM90, config)(TopKCall(*given, indices, values))

    return call


@interpreted
@pytest.mark.parametrize("config", [SMALL, CUT], ids=["rows", "segments"])
@pytest.mark.parametrize("scores", SCORES)
@pytest.mark.slow
def test_scores(scores, config):
    tie = "larger" if SCORES.index(scores) % 2 else "smaller"
    assert run_case(Case(5, 420, 40, scores=scores, tie=tie), "", CPU, call=run(config)) == []


@interpreted
@pytest.mark.parametrize("config", [SMALL, CUT], ids=["rows", "segments"])
@pytest.mark.parametrize(
    "case",
    [
        Case(5, 420, 40, torch.bfloat16, "integers", base="page", order="score", tie="larger"),
        Case(5, 420, 40, torch.float16, "normal", base="offset", order="any", shift=1),
        Case(5, 420, 64, torch.float32, "plateau", base="absolute", order="score"),
        Case(5, 420, 64, torch.bfloat16, "zeros", base="offset", order="score", values=False),
        Case(4, 420, 1, torch.float16, "equal", tie="larger", window="ends"),
        Case(4, 420, 63, torch.bfloat16, "one_bin", window="packed"),
        Case(4, 420, 33, torch.float32, "integers", window="short"),
        Case(2, 1, 3, window="whole"),
        Case(2, 127, 20, window="whole"),
        Case(2, 128, 20, window="ends"),
        Case(2, 129, 20, window="whole"),
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.slow
def test_options_and_sizes(case, config):
    assert run_case(case, "", CPU, call=run(config)) == []


@interpreted
@pytest.mark.slow
def test_repeats_and_other_batches():
    for config in (SMALL, CUT):
        assert run_case(Case(4, 500, 30, scores="integers"), "", CPU, repeats=2, call=run(config)) == []


@interpreted
@pytest.mark.parametrize("case", [case for case in cases(False) if case.width >= 9000 and case.rows == 1], ids=str)
def test_public_call_with_the_heuristic(case):
    assert run_case(case, "triton-portable", CPU) == []


@interpreted
def test_workspace_of_the_caller():
    problem = TopKProblem(2, 300, 5, starts=False, ends=False)
    size = top_k_workspace_bytes(problem, "cpu", "triton-portable")
    assert size > 0
    logits = torch.randn(2, 300)
    expected = top_k_per_row(logits, 5)
    owned = torch.full((size + 64,), 0xA5, dtype=torch.uint8)
    fits = owned[:size] if owned.data_ptr() % 16 == 0 else owned[16 - owned.data_ptr() % 16 :][:size]
    assert torch.equal(top_k_per_row(logits, 5, workspace=fits, backend="triton-portable"), expected)
    assert bool((owned[size + 32 :] == 0xA5).all())
    with pytest.raises(ValueError, match=f"workspace: got {size - 1} bytes, expected at least {size}"):
        top_k_per_row(logits, 5, workspace=fits[:-1], backend="triton-portable")
    with pytest.raises(ValueError, match="workspace: got an address off a 16-byte boundary"):
        top_k_per_row(logits, 5, workspace=owned[1:], backend="triton-portable")


# The plan


def test_heuristic_holds_its_own_rules():
    for k in (1, 2, 63, 64, 512, 1024, 1025, 2048, MAX_K):
        for rows, width in (
            (1, 100),
            (1, 8192),
            (1, 2**20),
            (4096, 32768),
            (64, 2**20),
            (8192, 8192),
            (1, 2**31 - 2**15),
        ):
            for arch in Arch.known():
                problem = TopKProblem(rows, width, k)
                for config in neighbours(problem, arch):
                    assert config.capacity >= 2 * k
                    assert config.sample <= config.capacity
                    assert config.span % config.block == 0
                    assert config.splits >= 1
                    TopKLaunch(problem, arch, config)


def test_long_rows_are_cut_where_units_would_idle():
    assert heuristic(TopKProblem(4096, 32768, 2048), SM90).splits == 1
    assert heuristic(TopKProblem(1, 1 << 20, 2048), SM90).splits == 16
    assert heuristic(TopKProblem(64, 1 << 20, 2048), SM90).splits == 4
    assert heuristic(TopKProblem(1, 4096, 2048), SM90).splits == 1


def test_workspace_does_not_grow_with_rows():
    sizes = [TopKLaunch(p, SM90, heuristic(p, SM90)).workspace_bytes for p in (
        TopKProblem(4096, 32768, 2048), TopKProblem(65536, 32768, 2048),
    )]  # fmt: skip
    assert sizes[0] == sizes[1] < 64 * 2**20


def test_gate():
    problem = TopKProblem(4, 100, 5)
    kernel = TopK()
    for arch in Arch.known():
        reason = kernel.supports(problem, arch)
        assert (reason is None) == (arch.vendor != "cpu" or envs.triton_interprets())
    longest = TopKProblem(1, 2**31 - 1, 5)
    assert "the end of the last span has to be an int32" in str(kernel.supports(longest, SM90))
    with pytest.raises(ValueError, match="capacity of 2 k"):
        TopKLaunch(TopKProblem(4, 100, 65), SM90, SMALL)
