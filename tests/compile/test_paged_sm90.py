"""Paged decode for Hopper: what the heuristic chooses fits the machine, and compiles without a device."""

from __future__ import annotations

import dataclasses
import itertools
import re
import subprocess
from pathlib import Path

import pytest
import torch

from lightning_indexer import Arch, CacheLayout
from lightning_indexer.backends.cuda_sm90 import paged_config
from lightning_indexer.backends.cuda_sm90 import paged_mqa_logits as host
from lightning_indexer.cuda import nvrtc
from lightning_indexer.problems.paged_mqa_logits import PagedMqaLogitsProblem

pytestmark = pytest.mark.xdist_group("sm90 paged")

SM90 = Arch.parse("sm90")
REGISTERS_PER_MULTIPROCESSOR = 65536
GOOD = PagedMqaLogitsProblem(64, 1, 32768, 64, 128, CacheLayout(), 512, clean_logits=False)


def _problem(heads=64, head_dim=128, next_n=1, page=64, scales="float32", clean=False, bf16=False, batch=64, fp4=False):
    layout = CacheLayout.fp4(page) if fp4 else CacheLayout(page, head_dim, scales=scales)
    dtype = torch.bfloat16 if bf16 else torch.float32
    return PagedMqaLogitsProblem(
        batch, next_n, 32768, heads, head_dim, layout, 32768 // page, out_dtype=dtype, clean_logits=clean
    )


# One of each kind of path: lanes of a row, groups of rows, workers, pages, scales, results.
COMPILED = [
    _problem(),
    _problem(64, next_n=2, clean=True),
    _problem(64, next_n=3, batch=512),
    _problem(64, next_n=4, clean=True),
    _problem(128, next_n=8),
    _problem(16, 64, 6, 16, "ue8m0", clean=True, bf16=True),
    _problem(24, 32, 5, 128, clean=True),
    _problem(8, 128, 8, 32),
    _problem(fp4=True),
    _problem(32, fp4=True, clean=True),
    _problem(64, next_n=2, clean=True, fp4=True),
    _problem(64, next_n=3, fp4=True),
    _problem(64, next_n=4, page=128, fp4=True),
    _problem(128, next_n=8, fp4=True),
    _problem(16, next_n=6, page=16, clean=True, bf16=True, fp4=True),
    _problem(8, next_n=8, page=32, fp4=True),
]


@pytest.fixture(scope="session")
def compiled() -> dict[paged_config.PagedConfig, nvrtc.Compiled]:
    configs = [paged_config.heuristic(problem, SM90) for problem in COMPILED]
    return {config: nvrtc.build(host.SOURCE, host.NVRTC_ARCH, config.macros()) for config in configs}


def test_nothing_spills_and_wgmma_stays_asynchronous(compiled):
    assert {config.lanes_of_row for config in compiled} == {1, 2, 4}
    assert {(config.workers, config.ctas_per_sm) for config in compiled} == {(2, 2), (3, 1), (2, 1), (1, 1)}
    for config, result in compiled.items():
        assert re.search(r"\b0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads", result.log), config.name
        # C75xx: ptxas serialises WGMMA, inserts waits, or ignores setmaxnreg.
        assert not re.search(r"C75\d\d|warning", result.log, re.IGNORECASE), f"{config.name}: {result.log}"
        registers = int(re.search(r"Used (\d+) registers", result.log).group(1))
        assert registers * config.threads * config.ctas_per_sm <= REGISTERS_PER_MULTIPROCESSOR, config.name


def test_kernel_holds_the_instructions_it_is_built_on(compiled, tmp_path):
    triton = pytest.importorskip("triton", reason="its package carries cuobjdump")
    cuobjdump = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    for config, result in list(compiled.items())[:4]:
        cubin = tmp_path / "kernel.cubin"
        cubin.write_bytes(result.cubin)
        sass = subprocess.run([cuobjdump, "-sass", cubin], capture_output=True, text=True, check=True).stdout
        assert config.name in sass
        assert len(re.findall(rf"QGMMA\.64x{config.pairs}x32\.F32\.E4M3\.E4M3", sass)) == config.head_dim // 32
        assert len(re.findall(r"\bFMUL\.SAT\b", sass)) == config.pairs // 2
        assert not re.search(r"\bFMNMX\b", sass)
        assert not re.search(r"\b(LDL|STL)\b", sass)
        assert re.search(r"\bUTMALDG\.5D\b", sass)
        assert re.search(r"\bUTMALDG\.3D\b", sass)
        assert bool(re.search(r"\bUBLKCP\b", sass)) == (config.form == "clean"), "-inf is filled by bulk stores"


def test_fp4_keys_are_looked_up_by_permutation(compiled, tmp_path):
    triton = pytest.importorskip("triton", reason="its package carries cuobjdump")
    cuobjdump = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    config = paged_config.heuristic(_problem(fp4=True), SM90)
    cubin = tmp_path / "kernel.cubin"
    cubin.write_bytes(compiled[config].cubin)
    sass = subprocess.run([cuobjdump, "-sass", cubin], capture_output=True, text=True, check=True).stdout
    products = re.findall(r"QGMMA\.64x64x32\.F32\.E4M3\.E4M3 R\d+, (R\d+), gdesc", sass)
    assert len(set(products)) == 4, "keys are operands in registers"
    # Of 64 codes a lane: a tile is converted at the head of a segment, and behind the products of either accumulator.
    assert 3 * 32 <= len(re.findall(r"\bPRMT\b", sass)) < 4 * 32
    assert not re.search(r"\b(LDL|STL)\b", sass)
    assert not re.search(r"\bUTMALDG\.3D\b", sass)


def test_choices_fit_the_machine():
    names = {}
    for heads, head_dim, next_n, page in itertools.product(
        (8, 24, 64, 72, 104, 128), (*host.HEAD_DIMS, "fp4"), range(1, 9), host.PAGES
    ):
        for batch in (1, 512):
            fp4 = head_dim == "fp4"
            problem = _problem(heads, 128 if fp4 else head_dim, next_n, page, batch=batch, fp4=fp4)
            assert host.PagedMqaLogits().supports(problem, SM90) is None
            for config in paged_config.neighbours(problem, SM90):
                assert names.setdefault(config.name, config.macros()) == config.macros()
                assert config.shared_bytes <= config.shared_limit <= paged_config.SHARED_LIMIT, config
                assert config.ctas_per_sm * (config.shared_bytes + 1024) <= 228 * 1024, config
                assert 2 <= config.k_stages <= 32
                assert config.pairs <= (128 if fp4 else 256)
                assert config.groups * config.rows >= next_n
                assert all(1 <= side <= 256 for side in (*config.q_box, *config.k_box))
    assert all(re.fullmatch(r"\w+", name) for name in names)


def test_config_is_pure_and_frozen():
    config = paged_config.heuristic(GOOD, SM90)
    assert config == paged_config.heuristic(GOOD, SM90)
    assert config.ctas == 2 * SM90.units
    assert config.pieces == 4 * SM90.units
    with pytest.raises(AttributeError):
        config.k_stages = 1  # type: ignore[misc]


def test_two_ctas_share_a_multiprocessor_in_decode_of_one_row():
    for heads in (8, 16, 32, 64):
        config = paged_config.heuristic(_problem(heads), SM90)
        assert (config.workers, config.ctas_per_sm) == (2, 2)
        assert config.registers[0] >= config.pairs // 2 + config.pairs // 4


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"heads": 20}, "H=20 is not one of 8, 16"),
        ({"head_dim": 96, "layout": CacheLayout(64, 96)}, "D=96 is not one of 32, 64, 128"),
        ({"layout": CacheLayout(48)}, "page=48 is not one of 16, 32, 64, 128"),
        ({"layout": CacheLayout(1)}, "page=1 is not"),
        ({"layout": CacheLayout(order="preshuffled")}, "pages are preshuffled"),
        ({"next_n": 9}, "next_n=9 is beyond 8"),
        ({"aligned": False}, "16-byte boundaries"),
        ({"width": 2**31 - 1}, "W=2147483647 is beyond"),
        ({"batch": 2**30, "next_n": 2}, "B * next_n=2147483648 is beyond"),
        ({"batch": 2**24, "width": 2**20, "max_blocks": 2**14}, "tiles of 64 keys are beyond"),
    ],
)
def test_gate(changed, sentence):
    kernel = host.PagedMqaLogits()
    assert kernel.supports(GOOD, SM90) is None
    assert sentence in kernel.supports(GOOD._replace(**changed), SM90)


def test_gate_names_the_arch():
    assert "needs sm90" in host.PagedMqaLogits().supports(GOOD, Arch.parse("sm100"))


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"rows": 8, "next_n": 8}, "GROUP_ROWS: the N of a WGMMA is at most 256"),
        ({"k_stages": 1}, "K_STAGES: one is loaded while another is read"),
        ({"q_stages": 0}, "Q_STAGES: one at least"),
        ({"k_stages": 5}, "SHARED_BYTES: more shared memory than a CTA may have"),
        ({"workers": 4}, "WORKERS: one warpgroup holds their producer warps and a fill warp"),
    ],
)
def test_a_geometry_that_the_source_is_not_written_for_is_named(changed, sentence):
    config = dataclasses.replace(paged_config.heuristic(GOOD, SM90), **changed)
    with pytest.raises(nvrtc.CompileError, match=re.escape(sentence)):
        nvrtc.build(host.SOURCE, host.NVRTC_ARCH, config.macros())


def test_a_geometry_that_fp4_keys_are_not_read_in_is_named():
    macros = paged_config.heuristic(_problem(64, next_n=4, fp4=True), SM90).macros()
    for changed, sentence in (
        ({"GROUP_ROWS": 4}, "of 128 columns at most"),
        ({"HEAD_DIM": 64}, "FP4: a lane of a quad"),
    ):
        with pytest.raises(nvrtc.CompileError, match=re.escape(sentence)):
            nvrtc.build(host.SOURCE, host.NVRTC_ARCH, {**macros, **changed})


@pytest.mark.parametrize(
    ("macro", "value", "sentence"),
    [
        ("Q_BOX", "128,8,1,4,1", "Q_BOX: whole rows"),
        ("K_BOX", "128,64,1", "K_BOX: channels, the keys of a block"),
        ("SHARED_BYTES", 90 * 1024, "PagedConfig.shared_bytes and struct Shared differ"),
        ("MATH_REGISTERS", 104, "together more than a CTA starts with"),
        ("OTHER_REGISTERS", 88, "above and below what a thread starts with"),
    ],
)
def test_what_the_launch_is_given_is_what_the_source_takes(macro, value, sentence):
    macros = {**paged_config.heuristic(GOOD, SM90).macros(), macro: value}
    with pytest.raises(nvrtc.CompileError, match=re.escape(sentence)):
        nvrtc.build(host.SOURCE, host.NVRTC_ARCH, macros)


def test_constants_of_the_host_are_those_of_the_source():
    folder = Path(host.__file__).parent
    geometry = (folder / "paged_geometry.cuh").read_text()
    members = re.search(r"struct Arguments \{(.*?)\};", geometry, re.S).group(1)
    assert len(re.findall(r"\*", members)) == 6
    assert host._CONSTANTS.size == 6 * 8 + 10 * 4  # nine ints, and the padding behind them
    for value in (1, 2, 3, 7, 132, 264, 528, 2**20 + 1, 2**31 - 1):
        assert host.inverse(value) == min(2**32 - 1, -(-(2**32) // value))
