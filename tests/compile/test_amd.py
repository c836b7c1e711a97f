"""The AMD compilers without a device: what they make, what they say, and what they keep on disk."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest

from lightning_indexer import artifacts
from lightning_indexer.amd import built as built_module
from lightning_indexer.amd import clang as amdgpu_clang
from lightning_indexer.amd import flydsl, triton_amd
from lightning_indexer.amd.built import Built, CompileError
from lightning_indexer.amd.clang import compile_hip
from processes import python

HERE = Path(__file__).parent
ARCHS = ("gfx942", "gfx950")
HIP = """
extern "C" __attribute__((global, amdgpu_flat_work_group_size(BLOCK, BLOCK)))
void kernel(float* out, const float* in, int n) {
  __attribute__((shared)) float shared[LDS_FLOATS];
  const int lane = __builtin_amdgcn_workitem_id_x();
  float value[VALUES];
  for (int j = 0; j < VALUES; ++j) value[j] = in[lane + j * BLOCK];
  shared[lane % LDS_FLOATS] = value[0];
  __builtin_amdgcn_s_barrier();
  for (int round = 0; round < n; ++round)
    for (int j = 0; j < VALUES; ++j) value[j] = value[j] * value[(j + 7) % VALUES] + shared[(lane ^ 1) % LDS_FLOATS];
  for (int j = 0; j < VALUES; ++j) out[lane + j * BLOCK] = value[j];
}
"""
# What LLVM prints behind a kernel, as comments.
PRINTED = {
    "vgpr": "TotalNumVgprs", "agpr": "NumAgprs", "sgpr": "TotalNumSgprs", "lds": "LDSByteSize",
    "scratch": "ScratchSize", "waves_per_simd": "Occupancy",
}  # fmt: skip


@pytest.fixture
def source(tmp_path) -> Path:
    path = tmp_path / "source" / "mqa_logits.hip"
    path.parent.mkdir()
    path.write_text(HIP)
    return path


@pytest.fixture(autouse=True)
def _cache(tmp_path, monkeypatch):
    monkeypatch.setenv("LIGHTNING_INDEXER_CACHE_DIR", str(tmp_path / "cache"))


@pytest.fixture
def compiled(monkeypatch) -> list[str]:
    """Grows by one with each run of the compiler proper."""
    runs = []
    real = amdgpu_clang._compile

    def counted(*arguments):
        runs.append(arguments[1])
        return real(*arguments)

    monkeypatch.setattr(amdgpu_clang, "_compile", counted)
    return runs


def printed(built: Built) -> dict[str, int]:
    found = {}
    for field, label in PRINTED.items():
        [number] = re.findall(rf"^; {label}: (\d+)", built.isa, re.MULTILINE)
        found[field] = int(number)
    return found


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize(
    ("block", "values", "lds_floats"),
    [(64, 4, 64), (256, 40, 2112), (256, 100, 64), (1024, 8, 16384), (128, 70, 5184), (64, 200, 64)],
)
def test_resources_are_those_that_the_compiler_prints(source, arch, block, values, lds_floats):
    built = compile_hip(source, arch, {"BLOCK": block, "VALUES": values, "LDS_FLOATS": lds_floats})
    resources = built.resources
    assert {field: getattr(resources, field) for field in PRINTED} == printed(built)
    for field, label in (("vgpr_spills", "vgpr_spill_count"), ("sgpr_spills", "sgpr_spill_count")):
        assert re.findall(rf"\.{label}:\s+(\d+)", built.isa) == [str(getattr(resources, field))]
    assert built.info.max_workgroup == block
    assert built.code_object.arch == arch


def test_a_kernel_that_spills_says_so(source):
    built = compile_hip(source, "gfx950", {"BLOCK": 1024, "VALUES": 200, "LDS_FLOATS": 64})
    assert built.resources.vgpr_spills > 0
    assert built.resources.scratch == printed(built)["scratch"] > 0


def test_arguments_keep_their_names(source):
    built = compile_hip(source, "gfx950", {"BLOCK": 64, "VALUES": 4, "LDS_FLOATS": 64})
    assert built.argument_names == ("out", "in", "n")
    assert built.kernel == "kernel"
    assert built.source == "hip"
    assert "clang version" in built.compiler


def test_the_cache_is_keyed_by_source_macros_flags_arch_and_compiler(source, compiled, monkeypatch):
    macros = {"BLOCK": 64, "VALUES": 4, "LDS_FLOATS": 64}
    first = compile_hip(source, "gfx950", macros)
    assert compile_hip(source, "gfx950", dict(reversed(macros.items()))) is first
    monkeypatch.setattr(built_module, "_BUILT", {})  # as in the next process
    again = compile_hip(source, "gfx950", macros)
    assert again.code_object.elf == first.code_object.elf
    assert again.argument_names == first.argument_names
    assert len(compiled) == 1
    compile_hip(source, "gfx942", macros)
    compile_hip(source, "gfx950", {**macros, "VALUES": 5})
    compile_hip(source, "gfx950", macros, ("-fno-honor-nans",))
    source.write_text(HIP + "// changed\n")
    compile_hip(source, "gfx950", macros)
    (source.parent / "plan.h").write_text("// a header that the kernel might include\n")
    compile_hip(source, "gfx950", macros)
    monkeypatch.setattr(amdgpu_clang, "version", lambda: "clang version 0")
    compile_hip(source, "gfx950", macros)
    assert len(compiled) == 7


def test_a_header_is_found_beside_the_source(source):
    (source.parent / "plan.h").write_text("#define BLOCK 128\n")
    source.write_text('#include "plan.h"\n' + HIP)
    assert compile_hip(source, "gfx942", {"VALUES": 2, "LDS_FLOATS": 8}).info.max_workgroup == 128


def test_an_error_holds_what_failed_and_the_message_of_the_compiler(source):
    source.write_text("this is not HIP\n")
    with pytest.raises(CompileError) as raised:
        compile_hip(source, "gfx950", {"BLOCK": 64})
    message = str(raised.value)
    assert message.startswith("mqa_logits.hip for gfx950 with {'BLOCK': 64} failed (clang of the ziglang package):\n")
    assert "error: expected unqualified-id" in message


def test_rocm_comes_first_where_it_is_installed(tmp_path, monkeypatch):
    rocm = tmp_path / "rocm"
    for tool in ("bin/hipcc", "llvm/bin/clang", "llvm/bin/ld.lld"):
        path = rocm / tool
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("#!/bin/sh\necho 'AMD clang version 20.0.0'\n")
        path.chmod(0o755)
    monkeypatch.setenv("ROCM_PATH", str(rocm))
    assert amdgpu_clang._tools.__wrapped__() == amdgpu_clang.Tools(
        (f"{rocm}/llvm/bin/clang",), (f"{rocm}/llvm/bin/ld.lld",), f"ROCm in {rocm}"
    )
    monkeypatch.delenv("ROCM_PATH")
    monkeypatch.setenv("PATH", f"{rocm}/bin", prepend=os.pathsep)
    found = amdgpu_clang._tools.__wrapped__()
    assert found.name == f"ROCm in {rocm}" or Path("/opt/rocm").exists()
    monkeypatch.setattr(amdgpu_clang, "tools", lambda: found)
    assert amdgpu_clang.version.__wrapped__() == "AMD clang version 20.0.0" or Path("/opt/rocm").exists()


def test_a_rocm_that_does_not_know_gfx950_comes_last(tmp_path, monkeypatch):
    clang = tmp_path / "llvm" / "bin" / "clang"
    clang.parent.mkdir(parents=True)
    clang.write_text("#!/bin/sh\necho \"error: unknown target CPU 'gfx950'\" >&2\nexit 1\n")
    clang.chmod(0o755)
    monkeypatch.setenv("ROCM_PATH", str(tmp_path))
    if Path("/opt/rocm").exists():
        pytest.skip("another ROCm is here")
    assert amdgpu_clang._tools.__wrapped__().name == "clang of the ziglang package"
    assert amdgpu_clang._knows_every_arch(amdgpu_clang._tools.__wrapped__())
    monkeypatch.setattr(amdgpu_clang.packages, "installed", lambda name: False)
    assert amdgpu_clang._tools.__wrapped__().name == f"ROCm in {tmp_path}"


def test_without_a_compiler_the_command_that_installs_one_is_named(source, monkeypatch):
    monkeypatch.setattr(amdgpu_clang, "_tools", lambda: None)
    monkeypatch.setattr(amdgpu_clang.packages, "installed", lambda name: False)
    monkeypatch.setattr(amdgpu_clang, "_rocm_tools", lambda: iter(()))
    sentence = r"no clang for AMD GPUs: pip install 'lightning-indexer\[amd\]'"
    assert re.search(sentence, amdgpu_clang.missing())
    amdgpu_clang.version.cache_clear()
    with pytest.raises(CompileError, match=sentence):
        compile_hip(source, "gfx950", {})
    monkeypatch.undo()
    amdgpu_clang.version.cache_clear()


# Triton, in a process without its interpreter

TRITON = """
import json, sys
from lightning_indexer import Arch, MqaLogitsProblem
from lightning_indexer.backends.triton_portable.mqa_logits import MqaLogits
import triton

runs = []
real = triton.compile
triton.compile = lambda *arguments, **options: runs.append(0) or real(*arguments, **options)
arch = Arch.parse(sys.argv[1])
built = MqaLogits().build(MqaLogitsProblem(4096, 32768, 32, 128), arch)
odd = MqaLogits().build(MqaLogitsProblem(4096, 32767, 32, 128), arch)
large = MqaLogits().build(MqaLogitsProblem(70000, 32768, 32, 128), arch)
resources = built.resources
print(json.dumps({
    "runs": len(runs), "kernel": built.kernel, "names": built.argument_names, "compiler": built.compiler,
    "vgpr": resources.vgpr, "agpr": resources.agpr, "sgpr": resources.sgpr, "lds": resources.lds,
    "dynamic": built.dynamic_lds, "waves": resources.waves_per_simd, "block": built.info.max_workgroup,
    "isa": built.isa, "stores": [text.isa.count("global_store") for text in (built, odd, large)],
    "same": built.code_object.elf == odd.code_object.elf,
}))
"""


def run_triton(arch: str, cache: Path) -> dict:
    return json.loads(python("-c", TRITON, arch, LIGHTNING_INDEXER_CACHE_DIR=str(cache)))


@pytest.mark.parametrize("arch", ARCHS)
def test_triton(arch, tmp_path):
    found = run_triton(arch, tmp_path)
    assert found["runs"] == 3
    block = 64 if arch == "gfx942" else 128
    assert found["kernel"] == f"fp8_mqa_logits_H32_D128_bkv{block}_clean_triton"
    assert found["names"][:8] == ["q_ptr", "k_ptr", "kv_scale_ptr", "w_ptr", "ks_ptr", "ke_ptr", "out_ptr", "rows"]
    assert found["compiler"].startswith("Triton 3.")
    for label, field in (("TotalNumVgprs", "vgpr"), ("NumAgprs", "agpr"), ("TotalNumSgprs", "sgpr")):
        assert re.findall(rf"^; {label}: (\d+)", found["isa"], re.MULTILINE) == [str(found[field])]
    assert found["lds"] == found["dynamic"] > 0, "Triton's LDS is dynamic"
    assert found["block"] == 256
    assert 1 <= found["waves"] <= 8
    # As Triton's launcher would have it: a width that 16 does not divide, and a result past 2 GiB that buffer
    # instructions cannot address, are kernels of their own.
    assert not found["same"]
    small, odd, large = found["stores"]
    assert small == odd == 0
    assert large > 0
    again = run_triton(arch, tmp_path)
    assert again["runs"] == 0
    assert again["isa"] == found["isa"]


def test_code_objects_load_under_a_rocm_before_7(source):
    """Version 3 of the ELF header's ABI is code object V5; clang 22 by itself writes V6, which is 4."""
    for arch in ARCHS:
        built = compile_hip(source, arch, {"BLOCK": 64, "VALUES": 4, "LDS_FLOATS": 64})
        assert built.code_object.elf[8] == 3
        again = amdgpu_clang.assemble(re.sub(r"(?m)^\s*\.amdhsa_code_object_version.*$", "", built.isa), arch)
        assert again.elf[8] == 3


@pytest.mark.parametrize("spoil", [lambda data: b"", lambda data: data[: len(data) // 2], lambda data: b"{}\nELF"])
def test_a_spoilt_kernel_on_disk_is_compiled_again(source, compiled, tmp_path, monkeypatch, spoil):
    macros = {"BLOCK": 64, "VALUES": 4, "LDS_FLOATS": 64}
    first = compile_hip(source, "gfx950", macros)
    [path] = (tmp_path / "cache").glob("*.amd")
    path.write_bytes(spoil(path.read_bytes()))
    monkeypatch.setattr(built_module, "_BUILT", {})
    monkeypatch.setattr(artifacts, "_warned", set())
    with pytest.warns(RuntimeWarning, match="is not what was stored there"):
        again = compile_hip(source, "gfx950", macros)
    assert (again.kernel, again.info.arguments) == (first.kernel, first.info.arguments)
    assert len(compiled) == 2
    monkeypatch.setattr(built_module, "_BUILT", {})
    assert compile_hip(source, "gfx950", macros).code_object.elf == again.code_object.elf
    assert len(compiled) == 2, "replaced"


def test_an_interpreted_kernel_is_refused():
    def kernel(): ...

    with pytest.raises(CompileError, match=r"kernel runs in Triton's interpreter .*TRITON_INTERPRET was set when"):
        triton_amd.compile_triton(kernel, {}, {}, {}, "gfx950", {})
    with pytest.raises(CompileError, match="TRITON_INTERPRET"):
        triton_amd.specialise(kernel, {}, "gfx950", {})


def test_triton_missing_is_said_with_its_command(monkeypatch):
    monkeypatch.setattr(triton_amd, "missing", lambda: "Triton is not installed: pip install …")
    with pytest.raises(CompileError, match="Triton is not installed"):
        triton_amd.compile_triton(None, {}, {}, {}, "gfx950", {})


# FlyDSL


@pytest.fixture
def factory(monkeypatch) -> str:
    monkeypatch.syspath_prepend(str(HERE))
    return "flydsl_kernel:make"


@pytest.mark.parametrize("arch", ARCHS)
def test_flydsl(factory, arch, monkeypatch):
    built = flydsl.compile_flydsl(factory, {"lanes": 128}, arch)
    assert built.code_object.arch == arch
    assert built.kernel.startswith("double_kernel")
    assert built.info.max_workgroup == 128
    assert re.search(r"\bv_(pk_)?add_f32", built.isa)
    assert re.findall(r"\.vgpr_count:\s+(\d+)", built.isa) == [str(built.resources.vgpr)]
    assert built.compiler.startswith("FlyDSL ")
    monkeypatch.setattr(built_module, "_BUILT", {})
    monkeypatch.setattr(flydsl, "_process", None)
    assert flydsl.compile_flydsl(factory, {"lanes": 128}, arch).isa == built.isa


def test_flydsl_errors_hold_the_message(factory):
    with pytest.raises(CompileError, match=r"flydsl_kernel:make for gfx950 with (?s:.)*unexpected keyword argument"):
        flydsl.compile_flydsl(factory, {"nonsense": 1}, "gfx950")
    with pytest.raises(CompileError, match="got 'no_such_module:make', and there is no such module"):
        flydsl.compile_flydsl("no_such_module:make", {}, "gfx950")


def test_flydsl_after_an_interrupt_answers_the_next_question(factory, monkeypatch, tmp_path):
    monkeypatch.setenv("LIGHTNING_INDEXER_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(flydsl, "_processes", {})
    before = flydsl.compile_flydsl(factory, {"lanes": 64}, "gfx950")
    [process] = flydsl._processes.values()

    def interrupted():
        raise KeyboardInterrupt

    process._process.stdout.readline = interrupted
    with pytest.raises(KeyboardInterrupt):
        flydsl.compile_flydsl(factory, {"lanes": 256}, "gfx950")
    assert process.ended
    after = flydsl.compile_flydsl(factory, {"lanes": 128}, "gfx950")
    assert (before.info.max_workgroup, after.info.max_workgroup) == (64, 128)
    assert flydsl._process("gfx950", next(iter(flydsl._processes))[1]) is not process


def test_a_fork_leaves_flydsl_to_its_parent(factory, monkeypatch, tmp_path):
    monkeypatch.setenv("LIGHTNING_INDEXER_CACHE_DIR", str(tmp_path))
    flydsl.compile_flydsl(factory, {"lanes": 64}, "gfx950")
    process = list(flydsl._processes.values())[-1]
    assert not process.ended
    owner = os.getpid()
    monkeypatch.setattr(flydsl.os, "getpid", lambda: owner + 1)
    process.close()
    assert not process.ended
    assert process._process.poll() is None
    assert process._folder.exists()


def test_flydsl_missing_is_said_with_its_command(monkeypatch):
    monkeypatch.setattr(flydsl.packages, "installed", lambda name: False)
    assert flydsl.missing() == "FlyDSL is not installed: pip install 'lightning-indexer[amd,flydsl]'"
    with pytest.raises(CompileError, match="FlyDSL is not installed"):
        flydsl.compile_flydsl("module:make", {}, "gfx950")
