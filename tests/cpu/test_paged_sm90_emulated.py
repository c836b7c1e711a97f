"""The paged kernel of ``cuda-sm90``, its source and its host code, executed on the CPU with stand-ins for its PTX."""

from __future__ import annotations

import dataclasses
import shutil

import pytest
import torch

from lightning_indexer import Arch
from lightning_indexer.backends.cuda_sm90 import paged_config
from lightning_indexer.backends.cuda_sm90 import paged_mqa_logits as host
from lightning_indexer.check.paged_mqa_logits import Case, call_of, run_case
from paged_fp4 import check_any_exponents
from sm90_standin.emulate import Emulator

pytestmark = [
    pytest.mark.slow,
    pytest.mark.xdist_group("sm90 emulated"),
    pytest.mark.skipif(shutil.which("g++") is None, reason="no g++"),
]

SM90 = Arch.parse("sm90")
CPU = torch.device("cpu")


@pytest.fixture(scope="session")
def emulator(tmp_path_factory) -> Emulator:
    return Emulator(tmp_path_factory.mktemp("sm90"))


def _config(case: Case, **changed) -> paged_config.PagedConfig:
    return dataclasses.replace(paged_config.heuristic(case.problem, SM90), **{"units": 2, **changed})


def _faults(emulator: Emulator, case: Case, config: paged_config.PagedConfig, seed: int):
    assert host.PagedMqaLogits().supports(case.problem, SM90) is None

    def call(case, inputs, out):
        emulator.run(host.Launch(case.problem, config), call_of(case, inputs, out), seed=seed)

    return run_case(case, "", CPU, call=call)


ONE_ROW = [
    Case(5, 1, 64, 128, 300), Case(4, 1, 64, 128, 300, lengths="page ends"), Case(1, 1, 64, 128, 1),
    Case(2, 1, 64, 128, 130, lengths="past the end"), Case(5, 1, 64, 128, 200, ragged=True, gap=256),
]  # fmt: skip


@pytest.mark.parametrize("case", ONE_ROW, ids=str)
def test_one_row(case, emulator):
    """Four lanes a row, a page a load."""
    assert _faults(emulator, case, _config(case), 1) == []


@pytest.mark.parametrize(
    "case",
    [
        # A lane a row; groups of rows, the last not full; pages of two tiles.
        Case(3, 7, 64, 32, 300, 128, lengths="rows", clean=False),
        # Two lanes a row; four pages a tile.
        Case(3, 6, 16, 64, 300, 16, scales="ue8m0", lengths="rows", out_dtype=torch.bfloat16),
    ],
    ids=str,
)
def test_rows_share_tiles(case, emulator):
    assert _faults(emulator, case, _config(case), 1) == []


# One kernel for all of these, of queues of the least depth, on a grid of 8 workers.
LEAST = {"k_stages": 2, "q_stages": 1}
SCHEDULES = [
    Case(1, 1, 8, 32, 70),
    Case(33, 1, 8, 32, 300),
    Case(40, 1, 8, 32, 500, lengths="zeros"),
    Case(9, 1, 8, 32, 2000),
    Case(514, 1, 8, 32, 20),  # two sequences to a prefix sum
]


@pytest.mark.parametrize("case", SCHEDULES, ids=str)
def test_schedule(case, emulator):
    """All kinds of pieces."""
    assert _faults(emulator, case, _config(case, **LEAST), 3) == []


FP4 = [
    # A page a load, four lanes a row; zero blocks' scales, by indices.
    Case(5, 1, 64, 128, 300, fp4=True),
    Case(7, 1, 8, 128, 200, fp4=True, ragged=True, clean=False, out_dtype=torch.bfloat16, gap=256),
    # One product of 128 columns at a time.
    Case(3, 2, 64, 128, 400, fp4=True, lengths="rows"),
    # Two groups of two rows, the last not full; pages of two tiles; four pages a tile.
    Case(3, 3, 64, 128, 300, 128, fp4=True, lengths="rows", clean=False),
    Case(4, 4, 16, 128, 150, 16, fp4=True, lengths="zeros"),
]


@pytest.mark.parametrize("case", FP4, ids=str)
def test_fp4_keys(case, emulator):
    assert _faults(emulator, case, _config(case), 1) == []


@pytest.mark.parametrize(("next_n", "heads", "page"), [(1, 64, 64), (3, 32, 16)])
def test_fp4_keys_of_any_exponents(next_n, heads, page, emulator):
    case = Case(4, next_n, heads, 128, 300, page, fp4=True, lengths="rows")

    def call(case, inputs, out):
        emulator.run(host.Launch(case.problem, _config(case)), call_of(case, inputs, out), seed=2)

    assert check_any_exponents(case, CPU, call) == []
