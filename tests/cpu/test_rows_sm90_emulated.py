"""The row kernels of ``cuda-sm90``, their source and host code, executed on the CPU with stand-ins for their PTX."""

from __future__ import annotations

import shutil

import pytest
import torch

from lightning_indexer import Arch
from lightning_indexer.backends.cuda_sm90 import gather_k_cache, insert_k_cache, prepare_q
from lightning_indexer.backends.cuda_sm90.rows import RowsConfig
from lightning_indexer.check import gather_k_cache as gather_check
from lightning_indexer.check import insert_k_cache as insert_check
from lightning_indexer.check import prepare_q as prepare_check
from lightning_indexer.problems.insert_k_cache import validate as validate_insert
from lightning_indexer.problems.prepare_q import validate as validate_prepare
from sm90_standin.emulate_rows import RowsEmulator

pytestmark = [
    pytest.mark.slow,
    pytest.mark.xdist_group("sm90 rows emulated"),
    pytest.mark.skipif(shutil.which("g++") is None, reason="no g++"),
]

SM90 = Arch.parse("sm90")
CPU = torch.device("cpu")


@pytest.fixture(scope="session")
def emulator(tmp_path_factory) -> RowsEmulator:
    return RowsEmulator(tmp_path_factory.mktemp("sm90_rows"))


def _insert_faults(emulator: RowsEmulator, case: insert_check.Case, config: RowsConfig) -> list[str]:
    def call(case, inputs, kv_cache):
        given = validate_insert(insert_check.call_of(case, inputs, kv_cache))
        if case.tokens:
            with pytest.MonkeyPatch.context() as patch:
                emulator.run(given, insert_k_cache.Launch(case.problem, config), patch)

    return insert_check.run_case(case, "", CPU, call=call)


def _prepare_faults(emulator: RowsEmulator, case: prepare_check.Case, config: RowsConfig) -> list[str]:
    def call(given):
        if case.problem.tokens:
            with pytest.MonkeyPatch.context() as patch:
                emulator.run(validate_prepare(given), prepare_q.Launch(case.problem, config), patch)

    return prepare_check.run_case(case, "", CPU, call=call)


def _gather_faults(emulator: RowsEmulator, case: gather_check.Case, config: RowsConfig) -> list[str]:
    def call(case, inputs, out):
        with pytest.MonkeyPatch.context() as patch:
            given = gather_check.call_of(case, inputs, out)
            emulator.run(given, gather_k_cache.Launch(case.problem, config), patch)

    return gather_check.run_case(case, "", CPU, call=call)


# Reading back is other kernels' part.
INSERTS = [
    case for case in insert_check.cases(False)
    if not case.end_to_end and insert_k_cache.InsertKCache().supports(case.problem, SM90) is None
]  # fmt: skip
QUERIES = [c for c in prepare_check.cases(False) if prepare_q.PrepareQ().supports(c.problem, SM90) is None]


@pytest.mark.parametrize("part", range(8))
def test_inserts(part, emulator):
    assert len(INSERTS) > 70
    for number, case in enumerate(INSERTS[part::8]):
        config = RowsConfig(1, 2, 1) if number % 3 == 1 else RowsConfig(2, 1, 1)
        assert _insert_faults(emulator, case, config) == [], case


@pytest.mark.parametrize("part", range(4))
def test_queries(part, emulator):
    assert len(QUERIES) > 25
    for number, case in enumerate(QUERIES[part::4]):
        config = RowsConfig(1, 2, 1) if number % 3 == 1 else RowsConfig(2, 1, 1)
        assert _prepare_faults(emulator, case, config) == [], case


FP4 = gather_check.CacheLayout.fp4()
GATHERS = [c for c in gather_check.cases(False) if gather_k_cache.GatherKCache().supports(c.problem, SM90) is None]
GATHERS += [gather_check.Case(9, 150, FP4, lengths=lengths) for lengths in gather_check.LENGTHS]
GATHERS += [gather_check.Case(batch, 50, FP4, spare=spare) for batch, spare in ((1, 0), (2, 500), (5, -7), (33, 3))]
GATHERS += [gather_check.Case(4, 150, gather_check.CacheLayout.fp4(1), ratio=4)]


def test_gathers(emulator):
    assert len(GATHERS) > 12
    for number, case in enumerate(GATHERS):
        config = RowsConfig(1, 2, 1) if number % 3 == 1 else RowsConfig(2, 1, 1)
        assert _gather_faults(emulator, case, config) == [], case
