"""Every instantiation of ``cuda-sm90`` compiles with NVRTC, without a device, into what the design asks for."""

from __future__ import annotations

import dataclasses
import itertools
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from lightning_indexer import Arch, MqaLogitsProblem
from lightning_indexer.backends.cuda_sm90.config import SHARED_LIMIT, KernelConfig, heuristic
from lightning_indexer.backends.cuda_sm90.mqa_logits import HEAD_DIMS, HEADS, MAX_KEYS, MAX_ROWS, SOURCE, MqaLogits
from lightning_indexer.cuda import nvrtc

# On one worker: the tests look at the same kernels.
pytestmark = pytest.mark.xdist_group("sm90")

REGISTERS_PER_MULTIPROCESSOR = 65536
SM90 = Arch.parse("sm90")
INSTANTIATIONS = list(itertools.product(HEADS, HEAD_DIMS, ("clean", "noclean", "compressed"), ("f32", "bf16")))


def _config(heads: int, head_dim: int, form: str, out: str) -> KernelConfig:
    problem = MqaLogitsProblem(
        4096, 32768, heads, head_dim,
        out_dtype=torch.float32 if out == "f32" else torch.bfloat16,
        clean_logits=form == "clean", max_seqlen_k=32768 if form == "compressed" else 0,
    )  # fmt: skip
    return heuristic(problem, SM90)


@pytest.fixture(scope="session")  # a worker may run other files between two tests of this one
def compiled() -> dict[KernelConfig, nvrtc.Compiled]:
    configs = [_config(*instantiation) for instantiation in INSTANTIATIONS]
    nvrtc.version()  # the first import of cuda-core is not for two threads at once
    nvrtc.build(SOURCE, "sm_90a", configs[0].macros())
    with ThreadPoolExecutor(2) as pool:
        built = pool.map(lambda config: nvrtc.build(SOURCE, "sm_90a", config.macros()), configs)
        return dict(zip(configs, built, strict=True))


def test_all_instantiations_are_distinct(compiled):
    assert len(compiled) == len(INSTANTIATIONS) == 90
    assert len({config.name for config in compiled}) == 90


def test_nothing_spills_and_wgmma_stays_asynchronous(compiled):
    for config, result in compiled.items():
        assert re.search(r"\b0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads", result.log), config.name
        # C75xx: ptxas serialises WGMMA, inserts waits, or ignores setmaxnreg.
        assert not re.search(r"C75\d\d|warning", result.log, re.IGNORECASE), f"{config.name}: {result.log}"
        registers = int(re.search(r"Used (\d+) registers", result.log).group(1))
        assert registers * config.threads <= REGISTERS_PER_MULTIPROCESSOR, config.name


def test_shared_memory_fits(compiled):
    for config in compiled:
        assert config.shared_bytes <= SHARED_LIMIT, config.name


def test_kernel_holds_the_instructions_it_is_built_on(compiled, tmp_path):
    triton = pytest.importorskip("triton", reason="its package carries cuobjdump")
    cuobjdump = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    for head_dim in HEAD_DIMS:
        config = _config(64, head_dim, "clean", "f32")
        cubin = tmp_path / "kernel.cubin"
        cubin.write_bytes(compiled[config].cubin)
        sass = subprocess.run([cuobjdump, "-sass", cubin], capture_output=True, text=True, check=True).stdout
        assert config.name in sass
        # Twice: the first tile of a row block, and the loop over the others.
        assert len(re.findall(rf"QGMMA\.64x{config.pairs}x32\.F32\.E4M3\.E4M3", sass)) == 2 * head_dim // 32
        # ReLU and weight, two an accumulator: no FMNMX, and nothing in local memory.
        assert len(re.findall(r"\bFMUL\.SAT\b", sass)) == 2 * config.pairs // 2
        assert not re.search(r"\bFMNMX\b", sass)
        assert not re.search(r"\b(LDL|STL)\b", sass)
        assert re.search(r"\bUTMALDG\.5D\b", sass)
        assert re.search(r"\bUTMALDG\.2D\b", sass)
        assert re.search(r"\bUBLKCP\b", sass), "-inf is filled by bulk stores"


def test_a_broken_source_raises_with_the_log(tmp_path):
    source = tmp_path / "mqa_logits.cuh"
    source.write_text("this is not CUDA")
    with pytest.raises(nvrtc.CompileError, match=r"this is not CUDA|identifier"):
        nvrtc.build(source, "sm_90a", {})


def test_the_cache_is_keyed_by_source_macros_and_compiler(tmp_path, monkeypatch):
    monkeypatch.setenv("LIGHTNING_INDEXER_CACHE_DIR", str(tmp_path / "cache"))
    source = tmp_path / "source" / "mqa_logits.cuh"
    source.parent.mkdir()
    source.write_text('extern "C" __global__ void kernel(int* out) { *out = VALUE; }')
    builds = []
    real = nvrtc.build

    def counted(*arguments):
        builds.append(arguments)
        return real(*arguments)

    monkeypatch.setattr(nvrtc, "build", counted)
    first = nvrtc.cubin(source, "sm_90a", {"VALUE": 1})
    assert nvrtc.cubin(source, "sm_90a", {"VALUE": 1}) == first
    assert len(builds) == 1
    nvrtc.cubin(source, "sm_90a", {"VALUE": 2})
    (source.parent / "other.cuh").write_text("// a header that the kernel might include")
    nvrtc.cubin(source, "sm_90a", {"VALUE": 1})
    monkeypatch.setattr(nvrtc, "_OPTIONS", {**nvrtc._OPTIONS, "use_fast_math": True})
    nvrtc.cubin(source, "sm_90a", {"VALUE": 1})
    monkeypatch.setattr(nvrtc, "version", lambda: "0.0")
    nvrtc.cubin(source, "sm_90a", {"VALUE": 1})
    assert len(builds) == 5


def test_the_version_names_the_packages_that_options_pass_through(monkeypatch):
    from lightning_indexer import packages

    before = nvrtc.version.__wrapped__()
    real = packages.version
    for changed in ("cuda-core", "nvidia-cuda-nvrtc"):
        monkeypatch.setattr(packages, "version", lambda name, changed=changed: "0" if name == changed else real(name))
        assert nvrtc.version.__wrapped__() != before


def test_an_unwritable_cache_costs_time_only(tmp_path, monkeypatch):
    blocked = tmp_path / "file"
    blocked.write_text("")
    monkeypatch.setenv("LIGHTNING_INDEXER_CACHE_DIR", str(blocked / "cache"))
    source = tmp_path / "mqa_logits.cuh"
    source.write_text('extern "C" __global__ void kernel() {}')
    with pytest.warns(RuntimeWarning, match="LIGHTNING_INDEXER_CACHE_DIR names another folder"):
        assert nvrtc.cubin(source, "sm_90a", {})[:4] == b"\x7fELF"


@pytest.mark.parametrize("heads", HEADS)
def test_config_is_pure_and_frozen(heads):
    config = _config(heads, 128, "clean", "f32")
    assert config == _config(heads, 128, "clean", "f32")
    assert config.rows == 256 // heads
    assert config.ctas == SM90.units
    with pytest.raises(AttributeError):
        config.k_stages = 1  # type: ignore[misc]


def test_gate():
    kernel = MqaLogits()
    good = MqaLogitsProblem(4096, 32768, 64, 128)
    assert kernel.supports(good, SM90) is None
    assert "needs sm90" in kernel.supports(good, Arch.parse("sm100"))
    assert "H=24" in kernel.supports(good._replace(heads=24), SM90)
    assert "D=96" in kernel.supports(good._replace(head_dim=96), SM90)
    assert "16-byte" in kernel.supports(good._replace(aligned=False), SM90)


def test_gate_keeps_positions_and_tiles_in_32_bits():
    kernel = MqaLogits()
    good = MqaLogitsProblem(64, MAX_KEYS, 64, 32)
    assert kernel.supports(good, SM90) is None
    config = heuristic(good, SM90)
    fill_warps = config.threads // 32 - 4 * config.workers - config.workers
    assert 4 * fill_warps * config.ctas * 2048 + 32 * 4096 <= 2**31 - 1 - MAX_KEYS
    assert f"N={MAX_KEYS + 1}" in kernel.supports(good._replace(keys=MAX_KEYS + 1), SM90)
    assert kernel.supports(good._replace(rows=MAX_ROWS, keys=64), SM90) is None
    assert f"M={MAX_ROWS + 1}" in kernel.supports(good._replace(rows=MAX_ROWS + 1, keys=64), SM90)
    # Four rows a block, each block with one window at the start and one at the end: 2^24 tiles a block.
    compressed = good._replace(keys=2**30, clean_logits=False, max_seqlen_k=64)
    assert kernel.supports(compressed._replace(rows=4 * 127), SM90) is None
    assert "tiles" in kernel.supports(compressed._replace(rows=4 * 128), SM90)


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"tile_keys": 128}, "TILE_KEYS: the keys of a tile are the M of one WGMMA, 64"),
        ({"pairs": 128}, "PAIRS: the (row, head) pairs of a tile are the N of one WGMMA, 256"),
        ({"workers": 4}, "WORKERS: one warpgroup holds their producer warps and a fill warp"),
        ({"workers": 3}, "together more than the 65536 that the CTA starts with"),
        ({"math_registers": 160}, "setmaxnreg.dec lowers what a thread starts with"),
        ({"math_registers": 232}, "together more than the 65536 that the CTA starts with"),
        ({"other_registers": 60}, "setmaxnreg takes multiples of 8 from 24 to 256"),
        ({"k_stages": 1}, "K_STAGES: a tile is given back after the next product is issued"),
        ({"q_stages": 1}, "Q_STAGES: a row block is given back after the next one has begun"),
        ({"k_stages": 6}, "SHARED_BYTES: more shared memory than a CTA may have"),
        ({"heads": 24}, "HEADS: a lane of a quad sums whole rows"),
        ({"head_dim": 96}, "HEAD_DIM: one swizzle span of TMA and WGMMA"),
    ],
)
def test_a_geometry_that_the_source_is_not_written_for_is_named(changed, sentence):
    config = dataclasses.replace(_config(64, 128, "clean", "f32"), **changed)
    with pytest.raises(nvrtc.CompileError, match=re.escape(sentence)):
        nvrtc.build(SOURCE, "sm_90a", config.macros())


@pytest.mark.parametrize(
    ("macro", "value", "sentence"),
    [
        ("Q_BOX", "128,2,1,4,16", "Q_BOX: channels, even or odd head, lanes of a row, rows, pairs of heads"),
        ("Q_BOX", "64,2,1,4,32", "inner bytes, a swizzle span"),
        ("K_BOX", "128,128", "K_BOX: one load, one tile of keys"),
        ("K_BOX", "128,512", "a side of a TMA box is 1 to 256"),
        ("THREADS", 256, "THREADS: a math warpgroup for each worker, and one of other warps"),
        ("SHARED_BYTES", 200 * 1024, "KernelConfig.shared_bytes and struct Shared differ"),
    ],
)
def test_what_the_launch_is_given_is_what_the_source_takes(macro, value, sentence):
    macros = {**_config(64, 128, "clean", "f32").macros(), macro: value}
    with pytest.raises(nvrtc.CompileError, match=re.escape(sentence)):
        nvrtc.build(SOURCE, "sm_90a", macros)


def test_missing_package_is_named_with_its_command():
    code = (
        "import sys, importlib.abc\n"
        "class Block(importlib.abc.MetaPathFinder):\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.split('.')[0] == 'cuda': raise ModuleNotFoundError(name, name=name)\n"
        "sys.meta_path.insert(0, Block())\n"
        "from lightning_indexer.cuda import nvrtc\n"
        "print(nvrtc.missing())\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "pip install 'lightning-indexer[cuda]'" in result.stdout
