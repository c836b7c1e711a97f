"""Top-k per row for Hopper: what the heuristic chooses fits the machine, and compiles without a GPU."""

from __future__ import annotations

import itertools
import re

import pytest
import torch

from lightning_indexer import Arch
from lightning_indexer.backends.cuda_sm90 import top_k
from lightning_indexer.cuda import nvrtc
from lightning_indexer.problems.top_k import TopKProblem

H200 = Arch.parse("sm90")
ROWS = (1, 16, 64, 128, 256, 511, 512, 4096, 65536)
WIDTHS = (1, 100, 8185, 8192, 8193, 32768, 49152, 65536, 131072, 524288, 524289, 2**20, 2**24, 2**31 - 1)


@pytest.mark.parametrize("dtype", top_k.DTYPES)
@pytest.mark.parametrize("order", ["index", "score"])
@pytest.mark.parametrize("aligned", [True, False])
def test_choices_fit_the_machine(dtype, order, aligned):
    for rows, width, k in itertools.product(ROWS, WIDTHS, (1, 512, 2048, 2049, 4096)):
        problem = TopKProblem(rows, width, k, dtype, order=order, aligned=aligned)
        assert top_k.TopK().supports(problem, H200) is None
        for config in top_k.neighbours(problem, H200):
            assert config.shared_bytes(width, k) <= top_k.SHARED_LIMIT, (problem, config)
            assert config.cluster * config.capacity <= 65536
            assert config.vectors * config.pack <= 32
            if config.kind == "short":
                assert width + (0 if aligned else config.pack - 1) <= config.held, (problem, config)
            else:
                assert config.held >= k
                assert config.capacity > 1.3 * k


def test_names_tell_configurations_apart():
    problems = [
        TopKProblem(rows, width, 2048, dtype, base, order, tie, values)
        for rows, width, dtype, base, order, tie, values in itertools.product(
            (1, 64, 1024), (8192, 32768, 131072, 2**20), top_k.DTYPES, top_k.INDEX_BASES, ("index", "score"),
            ("smaller", "larger"), (False, True),
        )
    ]  # fmt: skip
    configs = {config for problem in problems for config in top_k.neighbours(problem, H200)}
    assert len({config.name for config in configs}) == len(configs)
    assert all(re.fullmatch(r"\w+", config.name) for config in configs)


def test_refusals_say_why():
    kernel = top_k.TopK()
    assert "needs sm90" in (kernel.supports(TopKProblem(4, 100, 8), Arch.parse("sm80")) or "")
    assert "k from 1 to 4096" in (kernel.supports(TopKProblem(4, 10000, 4097), H200) or "")
    assert "float64" in (kernel.supports(TopKProblem(4, 100, 8, torch.float64), H200) or "")


@pytest.mark.skipif(nvrtc.missing() is not None, reason="no NVRTC")
@pytest.mark.parametrize(
    "problem",
    [
        TopKProblem(8192, 8192, 2048),
        TopKProblem(4, 8192, 2048, torch.float16, "page", "score", "larger", values=True, page_size=64),
        TopKProblem(4096, 32768, 2048),
        TopKProblem(1024, 131072, 4096, torch.bfloat16, "absolute"),
        TopKProblem(16, 131072, 2048, index_base="offset"),
    ],
    ids=str,
)
def test_compiles_and_spills_nothing_where_rows_stream_by(problem):
    config = top_k.heuristic(problem, H200)
    log = nvrtc.build(top_k.SOURCE, top_k.NVRTC_ARCH, config.macros()).log
    [own] = re.findall(rf"Function properties for {config.name}\s.*?(\d+) bytes spill loads", log, re.S)
    if config.dtype is torch.float32:  # the functions of the rare ways may
        assert int(own) <= 16, log
