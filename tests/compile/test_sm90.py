"""Every instantiation of ``cuda-sm90`` compiles with NVRTC, without a device, into what the design asks for."""

from __future__ import annotations

import itertools
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from lightning_indexer import Arch, MqaLogitsProblem
from lightning_indexer.backends.cuda_sm90.config import PAIRS, SHARED_LIMIT, THREADS, KernelConfig, heuristic
from lightning_indexer.backends.cuda_sm90.mqa_logits import HEAD_DIMS, HEADS, SOURCE, CudaSm90
from lightning_indexer.cuda import nvrtc

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


@pytest.fixture(scope="module")
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
        assert registers * THREADS <= REGISTERS_PER_MULTIPROCESSOR, config.name


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
        assert len(re.findall(rf"QGMMA\.64x{PAIRS}x32\.F32\.E4M3\.E4M3", sass)) == 2 * head_dim // 32
        # ReLU and weight, two an accumulator: no FMNMX, and nothing in local memory.
        assert len(re.findall(r"\bFMUL\.SAT\b", sass)) == 2 * PAIRS // 2
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
    backend = CudaSm90()
    good = MqaLogitsProblem(4096, 32768, 64, 128)
    assert backend.supports(good, SM90) is None
    assert "needs sm90" in backend.supports(good, Arch.parse("sm100"))
    assert "H=24" in backend.supports(good._replace(heads=24), SM90)
    assert "D=96" in backend.supports(good._replace(head_dim=96), SM90)
    assert "16-byte" in backend.supports(good._replace(aligned=False), SM90)


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
