"""The gate of ``fp8_mqa_topk`` for Hopper: plans that fit the workspace, kernels that compile and spill nothing."""

from __future__ import annotations

import dataclasses
import itertools
import re
import struct

import pytest

from lightning_indexer import Arch
from lightning_indexer.backends.cuda_sm90 import mqa_topk, mqa_topk_config
from lightning_indexer.backends.cuda_sm90.config import SHARED_LIMIT
from lightning_indexer.backends.row_waves import Waves
from lightning_indexer.cuda import nvrtc
from lightning_indexer.problems.mqa_logits import MqaLogitsProblem
from lightning_indexer.problems.mqa_topk import MqaTopKProblem
from lightning_indexer.problems.one_call import WORKSPACE_BYTES
from lightning_indexer.problems.top_k import TopKProblem

# On one worker: the tests look at the same kernels.
pytestmark = pytest.mark.xdist_group("mqa_topk_sm90")

H200 = Arch.parse("sm90")
SHAPES = ((4096, 32768), (1024, 131072), (512, 262144), (8192, 8192), (16384, 2**20), (3, 40000), (65536, 16385))


def _problem(
    rows: int, keys: int, heads: int = 64, k: int = 2048, head_dim: int = 128, **traits: object
) -> MqaTopKProblem:
    scoring = MqaLogitsProblem(rows, keys, heads, head_dim, clean_logits=False)
    return MqaTopKProblem(scoring, TopKProblem(rows, keys, k, **traits))  # type: ignore[arg-type]


@pytest.mark.parametrize(("heads", "k"), [(32, 1), (32, 512), (32, 2048), (64, 512), (64, 2048), (64, 4096)])
def test_plans_fit(heads, k):
    for rows, keys in SHAPES:
        problem = _problem(rows, keys, heads, k)
        for stride in (None, 16, 64):
            config = mqa_topk_config.gate_config(problem, H200, stride=stride)
            assert config is not None, problem
            plan = mqa_topk_config.Plan(problem, config)
            assert plan.bytes <= WORKSPACE_BYTES
            assert min(config.wave, config.sampled, config.again) > 0
            assert config.wave % config.product.rows == 0
            assert config.sampled % config.wave == 0 or config.sampled >= rows
            # A place for each row block of a wave, and for the middle pieces that cuts of equal blocks make.
            blocks = -(-min(config.wave, rows) // config.product.rows)
            assert config.places >= blocks + max(0, H200.units - blocks)
            # Offsets of candidates are int32, and so are those of the counts.
            assert config.places * plan.place_bytes // mqa_topk_config.CANDIDATE_BYTES < 2**31
            # Windows without a gate fit into the lists, and those that hold no more than k are among them.
            assert config.ungated >= k
            assert config.capacity >= config.rank * config.stride
            for name, part in mqa_topk.parts(problem, config).items():
                assert part.shared_bytes + (mqa_topk_config.SELECT_STATIC if name == "select" else 0) <= SHARED_LIMIT
            gate = dict(mqa_topk.parts(problem, config)["gate"].macros)
            assert 32 * gate["WARPS"] * gate["VALUES_PER_LANE"] >= plan.samples
            assert gate["WARPS"] <= 32


def test_lists_of_the_usual_shapes_need_few_waves():
    for heads in (32, 64):
        for (rows, keys), waves in {(4096, 32768): 3, (1024, 131072): 1, (512, 262144): 1}.items():
            problem = _problem(rows, keys, heads)
            config = mqa_topk_config.gate_config(problem, H200)
            assert mqa_topk_config.Plan(problem, config).waves == waves
            assert config.sampled >= rows
            assert config.again % config.product.rows == 0


def test_regions_of_the_workspace_do_not_overlap():
    problem = _problem(4096, 32768)
    plan = mqa_topk_config.Plan(problem, mqa_topk_config.gate_config(problem, H200))
    assert plan.offset["main"] == plan.fixed < plan.bytes
    starts = sorted(plan.offset.values())
    assert len(set(starts)) == len(starts)
    assert all(start % 256 == 0 for start in starts)
    sizes = {"gates": 16 * 4096, "redo": 4 * 4096, "sampled_k": 1024 * 128, "middles": 8 * 132}
    for name, size in sizes.items():
        start = plan.offset[name]
        assert all(other <= start or other >= start + size for other in starts), name


def test_a_small_workspace_takes_waves():
    # A place for every CTA is 80 MiB where lists are as long as k = 4096 asks for, of eight rows each.
    small = _problem(4096, 32768, 32, 4096)._replace(workspace_bytes=2**25)
    for problem in (_problem(4096, 32768)._replace(workspace_bytes=2**22), small):
        assert mqa_topk_config.gate_config(problem, H200) is None
        assert isinstance(mqa_topk.MqaTopK().config(problem, H200), Waves)


def test_which_path():
    kernel = mqa_topk.MqaTopK()
    for rows, keys in ((4096, 32768), (1024, 131072), (512, 262144), (4096, 131072)):
        assert isinstance(kernel.config(_problem(rows, keys), H200), mqa_topk_config.GateConfig)
    others = [
        _problem(8192, 8192), _problem(16384, 16384), _problem(64, 131072), _problem(1024, 131072, heads=128),
        _problem(1024, 131072)._replace(workspace_bytes=2**29),
        _problem(1024, 131072, order="score"), _problem(1024, 131072, tie="larger"), _problem(512, 2**20 + 1),
        _problem(1024, 131072)._replace(force_first=4),
    ]  # fmt: skip
    for problem in others:
        assert kernel.supports(problem, H200) is None
        assert isinstance(kernel.config(problem, H200), Waves), problem
    bounded = _problem(1024, 131072)
    bounded = bounded._replace(scoring=bounded.scoring._replace(max_seqlen_k=9000))
    assert isinstance(kernel.config(bounded, H200), Waves)
    # What does not go through the gate has as few waves as the workspace allows.
    assert kernel.config(_problem(8192, 8192), H200).rows == 2048
    assert kernel.config(_problem(8192, 8192)._replace(workspace_bytes=2**28), H200).rows == 8192
    first, *rest = kernel.neighbours(_problem(1024, 131072), H200)
    assert isinstance(first, mqa_topk_config.GateConfig)
    assert any(isinstance(config, Waves) for config in rest)
    assert len({first, *rest}) == 1 + len(rest)


def test_the_rank_misses_as_rarely_as_asked():
    # Of Poisson variables: 96 of 64 expected is 4 deviations, 8.4e-5.
    assert mqa_topk_config.rank_of(64, 8.5e-5) == 97
    ranks = [mqa_topk_config.rank_of(64, miss) for miss in (1e-2, 1e-4, 1e-6, 1e-9)]
    assert ranks == sorted(ranks)
    assert mqa_topk_config.rank_of(1 / 64, 1e-5) <= 4


@pytest.mark.skipif(nvrtc.missing() is not None, reason="no NVRTC")
@pytest.mark.parametrize(("heads", "head_dim"), [(32, 128), (64, 128), (64, 32)])
def test_kernels_compile_and_spill_nothing(heads, head_dim):
    problem = _problem(4096, 32768, heads, head_dim=head_dim)
    parts = mqa_topk.parts(problem, mqa_topk_config.gate_config(problem, H200))
    for name, part in parts.items():
        if head_dim < 128 and name != "product":  # of the others H and D change little
            continue
        log = _build(part)
        assert "0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads" in log, (name, log)
        # C75xx: ptxas serialises WGMMA, inserts waits, or ignores setmaxnreg.
        assert not re.search(r"C75\d\d|warning", log, re.IGNORECASE), (name, log)
        registers = int(re.search(r"Used (\d+) registers", log).group(1))
        ctas = dict(part.macros).get("CTAS_PER_SM", 1)
        assert registers * part.threads * ctas <= 65536, name


@pytest.mark.skipif(nvrtc.missing() is not None, reason="no NVRTC")
@pytest.mark.parametrize("base", mqa_topk_config.INDEX_BASES)
def test_every_output_compiles(base):
    page = 64 if base == "page" else 0
    problem = _problem(512, 2**20, 64, 4096, index_base=base, values=True, page_size=page)
    config = mqa_topk_config.gate_config(problem, H200)
    parts = mqa_topk.parts(problem, config)
    for name in ("product", "select", "redo") if base == "page" else ("select",):
        assert "0 bytes spill stores" in _build(parts[name]), name


@pytest.mark.skipif(nvrtc.missing() is not None, reason="no NVRTC")
def test_what_the_launch_packs_is_what_the_kernels_take():
    problem = _problem(4096, 32768)
    parts = mqa_topk.parts(problem, mqa_topk_config.gate_config(problem, H200))
    for name in ("sample", "select"):
        wrong = dict(parts[name].macros) | {"ARGUMENT_BYTES": struct.calcsize("<" + parts[name].structs[0]) + 8}
        with pytest.raises(nvrtc.CompileError, match=r"STRUCTS of mqa_topk_config\.py"):
            _build(parts[name]._replace(macros=tuple(wrong.items())))


def test_names_tell_kernels_apart():
    problems = [
        _problem(4096, keys, heads, k, head_dim, index_base=base, values=values)
        for keys, heads, k, head_dim, base, values in itertools.product(
            (32768, 2**20), mqa_topk_config.HEADS, (512, 2048), (64, 128), ("row", "absolute"), (False, True)
        )
    ]
    parts = {
        part._replace(shared_bytes=0)
        for problem in problems
        for part in mqa_topk.parts(problem, mqa_topk_config.gate_config(problem, H200)).values()
    }
    assert len({part.name for part in parts}) == len(parts)
    assert all(re.fullmatch(r"\w+", part.name) for part in parts)


def test_config_is_frozen_and_told():
    config = mqa_topk_config.gate_config(_problem(4096, 32768), H200)
    assert config == mqa_topk_config.gate_config(_problem(4096, 32768), H200)
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.rank = 1  # type: ignore[misc]
    assert "one key of 32 sampled" in str(config)


def _build(part: mqa_topk.Part) -> str:
    source = mqa_topk.packages.beside(mqa_topk.__name__, part.file)
    return nvrtc.build(source, "sm_90a", dict(part.macros)).log
