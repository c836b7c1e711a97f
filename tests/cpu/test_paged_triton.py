"""``triton-portable``'s paged kernel in Triton's interpreter against the reference, its plan and its gate."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from helpers import CPU
from lightning_indexer import Arch, CacheLayout, envs
from lightning_indexer.backends.triton_portable.paged_mqa_logits import (
    MAX_WIDTH,
    Launch,
    PagedMqaLogits,
    PagedTileConfig,
    call_like,
    heuristic,
    neighbours,
)
from lightning_indexer.check.paged_mqa_logits import Case, call_of, cases, run_case
from lightning_indexer.problems.paged_mqa_logits import PagedMqaLogitsProblem, problem_of

interpreted = pytest.mark.skipif(
    not envs.triton_interprets(), reason="a GPU is here: tests/gpu runs the compiled kernel, in the same process"
)
SM90 = Arch.parse("sm90")
FNUZ = torch.float8_e4m3fnuz


def run(arch: str, config: PagedTileConfig):
    def call(case: Case, inputs, out):
        Launch(case.problem, Arch.parse(arch), config)(call_of(case, inputs, out))

    return call


@interpreted
@pytest.mark.parametrize("case", cases(False)[::3], ids=str)
def test_public_call(case):
    small = replace(case, batch=min(case.batch, 3), width=min(case.width, 200))
    assert run_case(small, "triton-portable", CPU) == []


@interpreted
@pytest.mark.parametrize(
    "config",
    [PagedTileConfig(16, 1, 1, 4, 2), PagedTileConfig(32, 4, 3, 4, 2), PagedTileConfig(128, 2, 2, 4, 2)],
    ids=str,
)
@pytest.mark.parametrize(
    "case",
    [
        Case(2, 3, 16, 64, 200, lengths="rows"),
        Case(2, 3, 16, 32, 200, 16, "preshuffled", lengths="rows", clean=False),
        Case(3, 3, 8, 32, 130, 48, "preshuffled", "ue8m0", lengths="page ends", out_dtype=torch.bfloat16),
        Case(2, 5, 8, 32, 70, 1, lengths="rows", ragged=True),
    ],
    ids=str,
)
def test_other_tiles(case, config):
    """Fewer rows a program than next_n and more, tiles smaller and larger than a page, one program and several."""
    assert run_case(case, "", CPU, call=run("cpu", config), repeats=1) == []


@interpreted
def test_more_splits_than_tiles():
    case = Case(2, 1, 8, 32, 3000, lengths="ragged")
    assert run_case(case, "", CPU, call=run("cpu", PagedTileConfig(64, 1, 100, 4, 2))) == []


@interpreted
def test_lengths_at_the_ends_of_int32():
    case = Case(2, 2, 8, 32, 100, 16)

    def call(case, inputs, out):
        lengths = torch.tensor([2**31 - 1, -(2**31)], dtype=torch.int32)
        table = torch.zeros_like(inputs.block_tables)
        launch = Launch(case.problem, Arch.parse("cpu"), PagedTileConfig(16, 2, 1, 4, 2))
        launch(call_of(case, replace(inputs, context_lens=lengths, block_tables=table), out))
        assert (out != -torch.inf).sum(dim=1).tolist() == [100, 100, 0, 0]

    run_case(case, "", CPU, call=call)


def test_heuristic_holds_its_own_rules():
    for next_n in range(1, 9):
        for heads in (8, 16, 32, 64, 128):
            for batch, width in ((1, 1), (1, 131072), (64, 32768), (4096, 2048)):
                for arch in Arch.known():
                    problem = PagedMqaLogitsProblem(batch, next_n, width, heads, 128, max_blocks=width)
                    for config in neighbours(problem, arch):
                        launch = Launch(problem, arch, config)
                        columns = config.rows * launch.constants["PADDED_HEADS"]
                        assert 16 <= columns <= max(128, heads)
                        assert launch.grid[0] >= batch
                        assert config.splits >= 1


def test_rows_share_a_tile_and_long_contexts_are_dealt_out():
    def chosen(batch, next_n, width, heads):
        return heuristic(PagedMqaLogitsProblem(batch, next_n, width, heads, 128, max_blocks=width), SM90)

    assert [chosen(64, next_n, 32768, 32).rows for next_n in (1, 2, 3, 4, 6, 8)] == [1, 2, 4, 4, 4, 4]
    assert chosen(64, 8, 32768, 16).rows == 8
    assert chosen(64, 2, 32768, 128).rows == 1
    wide = PagedMqaLogitsProblem(64, 4, 32768, 32, 128, max_blocks=512)
    assert heuristic(wide, Arch.parse("gfx90a")).rows == 2
    assert chosen(1, 1, 131072, 64).splits > SM90.units
    assert chosen(4096, 1, 2048, 64).splits == 1
    assert chosen(4096, 1, 131072, 64).splits == 16


def test_a_call_without_memory_has_the_facts_of_its_problem():
    for aligned in (True, False):
        problem = PagedMqaLogitsProblem(
            3, 2, 200, 16, 64, CacheLayout(16, 64, "preshuffled"), 13, row_lengths=True, ragged=True, aligned=aligned
        )
        assert problem_of(call_like(problem)) == problem


def test_gate():
    kernel, problem = PagedMqaLogits(), PagedMqaLogitsProblem(4, 2, 100, 32, 128, max_blocks=2)
    for arch in Arch.known():
        reason = kernel.supports(problem, arch)
        assert (reason is None) == (arch.vendor != "cpu" or envs.triton_interprets())
    for wrong, reason in (
        (problem._replace(heads=24), "H=24 is not one of 8, 16, 32, 64, 128"),
        (problem._replace(head_dim=256), "D=256 is not one of 32, 64, 128"),
        (problem._replace(width=2**31 - 1), f"W={2**31 - 1} is beyond {MAX_WIDTH}"),
        (problem._replace(layout=CacheLayout(2**24, 128)), "a block of 2214592512 bytes is larger than"),
        (problem._replace(batch=2**26), "lanes"),
    ):
        assert reason in str(kernel.supports(wrong, Arch.parse("gfx950")))


def test_dialects():
    for arch, cache, q, expected in (
        ("sm90", torch.float8_e4m3fn, torch.float8_e4m3fn, ("fn", "fn", 1.0)),
        ("sm80", torch.float8_e4m3fn, torch.float8_e4m3fn, ("widen", "widen", 1.0)),
        ("gfx950", torch.float8_e4m3fn, torch.float8_e4m3fn, ("fn", "fn", 1.0)),
        ("gfx942", FNUZ, FNUZ, ("fnuz", "fnuz", 1.0)),
        ("gfx942", FNUZ, torch.float8_e4m3fn, ("fnuz", "scrub", 2.0)),
        ("gfx942", torch.float8_e4m3fn, FNUZ, ("scrub", "fnuz", 2.0)),
        ("gfx942", torch.float8_e4m3fn, torch.float8_e4m3fn, ("scrub", "scrub", 4.0)),
    ):
        problem = PagedMqaLogitsProblem(4, 2, 100, 32, 128, CacheLayout(dtype=cache), 2, q)
        launch = Launch(problem, Arch.parse(arch), heuristic(problem, Arch.parse(arch)))
        assert tuple(launch.constants[name] for name in ("MODE", "Q_MODE", "FACTOR")) == expected
