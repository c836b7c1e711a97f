"""The row kernels for Hopper (insert, gather, prepare_q): gates, and what they compile to without a GPU."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
import torch

from lightning_indexer import Arch, CacheLayout, explain
from lightning_indexer.backends.cuda_sm90 import gather_k_cache, insert_k_cache, prepare_q, rows
from lightning_indexer.cuda import nvrtc
from lightning_indexer.problems.gather_k_cache import GatherProblem
from lightning_indexer.problems.insert_k_cache import InsertProblem
from lightning_indexer.problems.prepare_q import PrepareQProblem
from lightning_indexer.problems.transform import Transform

pytestmark = pytest.mark.xdist_group("sm90 rows")

SM90 = Arch.parse("sm90")
FP4 = CacheLayout.fp4()
GAINED = Transform(True, True, "first", 64)
TURNED = Transform(False, False, "last", 64, True, True)
KERNELS = {
    "insert_k_cache": insert_k_cache.InsertKCache(),
    "gather_k_cache": gather_k_cache.GatherKCache(),
    "prepare_q": prepare_q.PrepareQ(),
}
COMPILED = [
    InsertProblem(32768, 128),
    InsertProblem(32768, 128, CacheLayout(16, 128, "preshuffled", "ue8m0"), GAINED),
    InsertProblem(32768, 128, FP4, GAINED._replace(interleaved=True)),
    InsertProblem(32768, 128, CacheLayout(), GAINED._replace(hadamard=True)),
    InsertProblem(100, 128, FP4, TURNED),
    GatherProblem(32768, 4, FP4, 128),
    PrepareQProblem(4096, 64, 128),
    PrepareQProblem(4096, 64, 128, TURNED),
    PrepareQProblem(4096, 32, 128, Transform(rope="first", rope_dim=128), fp4=True),
]


def _launch(problem):
    kernel = KERNELS[problem.operation]
    assert kernel.supports(problem, SM90) is None
    return kernel.launch(problem, SM90, kernel.config(problem, SM90))


@pytest.fixture(scope="session")
def compiled():
    launches = {problem: _launch(problem) for problem in COMPILED}
    return {p: nvrtc.build(one.source, rows.NVRTC_ARCH, one.macros(one.usual())) for p, one in launches.items()}


@pytest.mark.parametrize("problem", COMPILED, ids=lambda problem: f"{problem.operation} {problem}")
def test_what_is_held_fits_and_accesses_are_wide(problem, compiled, tmp_path):
    triton = pytest.importorskip("triton", reason="its package carries cuobjdump")
    result, launch = compiled[problem], _launch(problem)
    norm = problem.operation == "insert_k_cache" and problem.transform.norm
    spilled = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", result.log)
    # LayerNorm's gains are loaded ahead; instances that hold all of them have fewer warps, and were measured slower.
    assert max(map(int, spilled.groups())) <= (48 if norm else 0), result.log
    registers = int(re.search(r"Used (\d+) registers", result.log).group(1))
    assert registers * 32 * launch.config.warps * launch.config.ctas <= 65536
    cubin = tmp_path / "kernel.cubin"
    cubin.write_bytes(result.cubin)
    cuobjdump = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    sass = subprocess.run([cuobjdump, "-sass", cubin], capture_output=True, text=True, check=True).stdout
    assert launch.name in sass
    assert not re.search(r"\b(LDS|STS)\b", sass)
    assert norm or not re.search(r"\b(LDL|STL)\b", sass)
    groups = launch.config.groups
    chunks = 1 if problem.operation == "gather_k_cache" else 4
    assert len(re.findall(r"\bLDG\.E\.NA\.128\b", sass)) == chunks * groups, "rows are read 16 bytes a lane, once"
    wide_stores = len(re.findall(r"\bSTG\.E\.(?:64|128)\b", sass))
    expected = 2 if chunks == 1 else 1 if getattr(problem, "layout", None) == FP4 else 4
    assert wide_stores == expected * groups
    assert len(re.findall(r"\bSTG\.E desc", sass)) == groups, "4 bytes: the scale, or the weight"


def test_choices_fit_the_machine():
    for problem in COMPILED:
        kernel = KERNELS[problem.operation]
        for config in kernel.neighbours(problem, SM90):
            assert 32 * config.warps <= 1024
            assert 32 * config.warps * config.ctas <= 2048
            assert config.ctas <= 32
        assert kernel.neighbours(problem, SM90)[0] == kernel.config(problem, SM90)


@pytest.mark.parametrize("tokens", [1, 7, 100, 1000, 10000, 100000])
def test_few_rows_have_small_ctas(tokens):
    config = insert_k_cache.heuristic(InsertProblem(tokens, 128), SM90)
    assert config.warps == 1 or -(-tokens // config.rows) >= 2 * SM90.units


@pytest.mark.parametrize(
    ("problem", "sentence"),
    [
        (InsertProblem(9, 64, CacheLayout(64, 64)), "D=64 is not 128"),
        (InsertProblem(9, 128, CacheLayout(dtype=torch.float8_e4m3fnuz)), "the layout has float8_e4m3fnuz"),
        (InsertProblem(9, 128, CacheLayout(), Transform(rope="first", rope_dim=32)), "multiple of 64"),
        (InsertProblem(9, 128, FP4, Transform(rope="last", rope_dim=16, interleaved=True)), "multiple of 32"),
        (InsertProblem(2**31, 128), "a row's number is an int32"),
        (PrepareQProblem(2**26, 64, 128), "a row's number is an int32"),
        (PrepareQProblem(9, 64, 128, out_dtype=torch.float8_e4m3fnuz), "asked for float8_e4m3fnuz"),
        (GatherProblem(9, 1, CacheLayout()), "triton-portable's"),
        (GatherProblem(9, 1, FP4, 1, torch.float8_e4m3fnuz), "to float8_e4m3fn"),
    ],
    ids=str,
)
def test_gates_say_why(problem, sentence):
    kernel = KERNELS[problem.operation]
    assert sentence in kernel.supports(problem, SM90)
    taken = next(verdict for verdict in explain(problem, SM90, installed_only=False) if verdict.chosen)
    assert taken.backend in ("triton-portable", "torch-blocked")


@pytest.mark.parametrize("problem", [COMPILED[0], COMPILED[5], COMPILED[7]], ids=lambda problem: problem.operation)
def test_the_chain_of_sm90_starts_here(problem):
    assert "needs sm90" in KERNELS[problem.operation].supports(problem, Arch.parse("sm100"))
    assert next(v for v in explain(problem, SM90, installed_only=False) if v.chosen).backend == "cuda-sm90"
    assert all(v.backend != "cuda-sm90" for v in explain(problem, Arch.parse("sm100")))


def test_queries_that_are_only_quantised_are_left_to_triton():
    ours, portable, *_ = explain(COMPILED[6], SM90, installed_only=False)
    assert (ours.backend, ours.reason, ours.chosen) == ("cuda-sm90", None, False)
    assert "preferred behind RoPE or a rotation, or through fp4; this is T=4096 H=64" in str(ours)
    assert (portable.backend, portable.chosen) == ("triton-portable", True)
    assert explain(COMPILED[6]._replace(fp4=True), SM90, installed_only=False)[0].chosen


def test_names_tell_configurations_and_problems_apart():
    names = {}
    for problem in COMPILED:
        kernel = KERNELS[problem.operation]
        for config in kernel.neighbours(problem, SM90):
            launch = kernel.launch(problem, SM90, config)
            assert names.setdefault(launch.name, (problem, config)) == (problem, config)
            assert re.fullmatch(r"\w+", launch.name)


@pytest.mark.parametrize(
    ("problem", "macro", "value", "sentence"),
    [
        (COMPILED[0], "ARGUMENT_BYTES", 88, "ARGUMENT_BYTES: the host packs this struct"),
        (COMPILED[7], "ROPE_DIM", 16, "pairs lie within a lane"),
    ],
)
def test_what_the_source_is_not_written_for_is_named(problem, macro, value, sentence):
    launch = _launch(problem)
    with pytest.raises(nvrtc.CompileError, match=sentence):
        nvrtc.build(launch.source, rows.NVRTC_ARCH, {**launch.macros(launch.usual()), macro: value})
