"""``triton-portable``'s kernels of the cache in Triton's interpreter, their configs and gates."""

from __future__ import annotations

import pytest
import torch

from helpers import CPU
from lightning_indexer import Arch, CacheLayout, envs
from lightning_indexer.backends.triton_portable import gather_k_cache, insert_k_cache, prepare_q
from lightning_indexer.backends.triton_portable.row_launch import RowConfig
from lightning_indexer.check import gather_k_cache as gather_check
from lightning_indexer.check import insert_k_cache as insert_check
from lightning_indexer.check import prepare_q as prepare_check
from lightning_indexer.problems.gather_k_cache import GatherProblem
from lightning_indexer.problems.insert_k_cache import InsertProblem
from lightning_indexer.problems.prepare_q import PrepareQProblem
from lightning_indexer.problems.transform import Transform

interpreted = pytest.mark.skipif(
    not envs.triton_interprets(), reason="a GPU is here: tests/gpu runs the compiled kernels, in the same process"
)
SM90 = Arch.parse("sm90")
MODULES = (insert_k_cache, gather_k_cache, prepare_q)


@pytest.mark.slow
@interpreted
@pytest.mark.parametrize("check", [insert_check, gather_check, prepare_check], ids=["insert", "gather", "prepare_q"])
def test_cases(check):
    """Every seventeenth: all of them are a minute of the interpreter, and `verify --device cpu` runs them."""
    for case in check.cases(False)[::17]:
        assert check.run_case(case, "triton-portable", CPU) == [], case


@pytest.mark.slow
@interpreted
@pytest.mark.parametrize("config", [RowConfig(8, 1), RowConfig(128, 8)], ids=str)
def test_other_tiles(config):
    cpu = Arch.parse("cpu")
    for module, check, case in (
        (insert_k_cache, insert_check, insert_check.Case(70, CacheLayout.fp4(64), insert_check.TRANSFORMS[2])),
        (gather_k_cache, gather_check, gather_check.Case(5, 40, CacheLayout(16, 128, "preshuffled"))),
    ):

        def call(case, inputs, out, module=module, check=check):
            module.Launch(case.problem, cpu, config)(check.call_of(case, inputs, out))

        assert check.run_case(case, "", CPU, call=call) == []


def problems(rows: int) -> list:
    return [InsertProblem(rows, 128), GatherProblem(rows, 4), PrepareQProblem(rows, 1, 128)]


def test_heuristics():
    for rows in (1, 100, 4096, 131072, 2**24):
        for arch in Arch.known():
            for module, problem in zip(MODULES, problems(rows), strict=True):
                for config in module.neighbours(problem, arch):
                    assert config.rows & (config.rows - 1) == 0
                    assert 8 <= config.rows * 128 // (32 * config.num_warps) <= 64
    # A decode step's tokens go to as many units as there are; long steps take large tiles.
    assert insert_k_cache.heuristic(InsertProblem(64, 128), SM90).rows == 8
    assert insert_k_cache.heuristic(InsertProblem(131072, 128), SM90).rows == 32


def test_gates():
    for module, problem in zip(MODULES, problems(100), strict=True):
        kernel = next(kind() for kind in vars(module).values() if isinstance(kind, type) and hasattr(kind, "supports"))
        for arch in Arch.known():
            assert (kernel.supports(problem, arch) is None) == (arch.vendor != "cpu" or envs.triton_interprets())
    insert = insert_k_cache.InsertKCache()
    narrow = Transform(rope="first", rope_dim=32)
    for wrong, reason in (
        (InsertProblem(5, 256, CacheLayout(64, 256)), "D=256 is not one of 32, 64, 128"),
        (InsertProblem(5, 128, CacheLayout.fp4(), narrow), "RoPE of 32 channels splits the blocks of 32"),
        (InsertProblem(2**31, 128), "rows are more than"),
    ):
        assert reason in str(insert.supports(wrong, SM90))
    assert insert.supports(InsertProblem(5, 128, CacheLayout.fp4(), narrow._replace(interleaved=True)), SM90) is None


def test_encodings():
    fn, fnuz = torch.float8_e4m3fn, torch.float8_e4m3fnuz
    for arch, dtype, expected in (
        ("sm90", fn, "fn"), ("sm80", fn, "fn bits"), ("gfx942", fnuz, "fnuz"), ("gfx942", fn, "fn bits"),
        ("gfx950", fn, "fn"), ("gfx950", fnuz, "fnuz bits"),
    ):  # fmt: skip
        launch = insert_k_cache.Launch(
            InsertProblem(5, 128, CacheLayout(dtype=dtype)), Arch.parse(arch), RowConfig(8, 1)
        )
        assert launch.constants["TO"] == expected
