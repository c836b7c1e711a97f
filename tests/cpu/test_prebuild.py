"""``prebuild``: which kernels, where they go, and that a launch finds them there."""

from __future__ import annotations

import errno
import warnings
from concurrent.futures import Future
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from lightning_indexer import Arch, MqaLogitsProblem, artifacts
from lightning_indexer.backends.cuda_sm90 import mqa_logits as sm90
from lightning_indexer.backends.cuda_sm90.config import heuristic
from lightning_indexer.backends.flydsl_cdna import config as flydsl
from lightning_indexer.backends.hip_gfx950 import config as hip
from lightning_indexer.calls import prebuild
from lightning_indexer.cli import app as cli
from lightning_indexer.cuda import nvrtc
from lightning_indexer.selection import registry as dispatch

SM90, GFX942, GFX950 = map(Arch.parse, ("sm90", "gfx942", "gfx950"))


@pytest.mark.parametrize(
    ("arch", "names"),
    [(SM90, ["cuda-sm90"]), (GFX942, ["flydsl"]), (GFX950, ["hip-gfx950", "flydsl"]), (Arch.parse("sm100"), [])],
    ids=lambda value: getattr(value, "name", None),
)
def test_backends_by_arch(arch, names):
    assert prebuild.backends(arch) == names
    for operation in (*prebuild.SCORES[1:], *prebuild.CACHE):
        assert prebuild.backends(arch, operation) == (["cuda-sm90"] if arch is SM90 else [])


def test_a_plan_has_every_size_that_heuristics_tell_apart():
    batch, decode, *cache = prebuild.plan(SM90, [64], [128])
    assert str(batch) == "cuda-sm90 fp8_mqa_logits H=64 D=128"
    assert str(decode) == "cuda-sm90 fp8_paged_mqa_logits H=64 D=128"
    forms = {(n, f, fp4) for n in (1, 2, 4) for f in ("clean", "noclean") for fp4 in (False, True)}
    assert {(p.next_n, p.form, p.layout.is_fp4) for p in decode.problems} == forms
    [narrow] = prebuild.plan(SM90, [64], [64], operations=["fp8_paged_mqa_logits"])
    assert not any(p.layout.is_fp4 for p in narrow.problems), "fp4 keys have 128 channels"
    assert prebuild.plan(SM90, [64], [128], operations=["fp8_paged_mqa_logits"]) == [decode]
    with pytest.raises(ValueError, match="operation: got 'x', expected one of fp8_mqa_logits"):
        prebuild.plan(SM90, [64], [128], operations=["x"])
    assert list(map(str, cache)) == [
        "cuda-sm90 insert_k_cache D=128", "cuda-sm90 gather_k_cache D=128", "cuda-sm90 prepare_q H=64 D=128",
    ]  # fmt: skip
    sizes = {(problem.rows, problem.keys) for problem in batch.problems}
    assert len(sizes) == len(prebuild.ROWS) * len(prebuild.KEYS)
    assert {(p.clean_logits, p.compressed) for p in batch.problems} == {(True, False), (False, False), (False, True)}
    # What no gate admits is left out, and so is a batch of nothing.
    assert {batch.backend for batch in prebuild.plan(GFX950, [128], [128])} == {"flydsl"}
    [hip] = prebuild.plan(GFX950, [32], [128], names=["hip-gfx950"], out_dtypes=[torch.float32, torch.bfloat16])
    assert {problem.out_dtype for problem in hip.problems} == {torch.float32}
    assert not any(problem.compressed for problem in hip.problems)
    assert prebuild.plan(SM90, [20], [128]) == []
    # Keys have no heads.
    both = prebuild.plan(SM90, [32, 64], [128], operations=prebuild.CACHE)
    assert [batch.operation for batch in both] == ["insert_k_cache", "gather_k_cache", "prepare_q", "prepare_q"]
    with pytest.raises(
        ValueError, match=r"got 'triton-portable', which compiles at its first call, expected one of cuda"
    ):
        prebuild.plan(SM90, [64], [128], names=["triton-portable"])


def test_heuristics_take_no_kernel_beyond_the_plan():
    """Kernels of sizes in between are those of the plan."""
    for arch, name in ((SM90, "cuda-sm90"), (GFX950, "hip-gfx950"), (GFX942, "flydsl"), (GFX950, "flydsl")):
        batches = prebuild.plan(arch, [32], [128], operations=["fp8_mqa_logits"])
        planned = {_name(name, p, arch) for batch in batches if batch.backend == name for p in batch.problems}
        for m in (1, 2, 3, 5, 17, 61, 100, 671, 2048, 3000, 5000, 16384):
            for n in (1, 100, 5000, 20000, 65536, 250000, 10**6):
                assert _name(name, MqaLogitsProblem(m, n, 32, 128), arch) in planned


def test_decode_of_sizes_in_between_takes_no_other_kernel():
    kernel = dispatch.kernel("cuda-sm90", "fp8_paged_mqa_logits")
    [batch] = prebuild.plan(SM90, [32], [128], operations=["fp8_paged_mqa_logits"])
    planned = {kernel.config(problem, SM90).name for problem in batch.problems}
    for b in (1, 3, 16, 57, 300, 4096):
        for width in (1, 100, 8192, 163840):
            for next_n in prebuild.NEXT_N:
                for like in (batch.problems[0], batch.problems[-1]):
                    problem = like._replace(batch=b, width=width, max_blocks=-(-width // 64), next_n=next_n)
                    assert kernel.config(problem, SM90).name in planned


def test_the_cache_of_sizes_in_between_takes_no_other_kernel():
    for batch in prebuild.plan(SM90, [32, 64], [128], operations=prebuild.CACHE):
        kernel = dispatch.kernel("cuda-sm90", batch.operation)
        planned = {kernel.launch(p, SM90, kernel.config(p, SM90)).name for p in batch.problems}
        count = "keys" if batch.operation == "gather_k_cache" else "tokens"
        for problem in batch.problems:
            for size in (2, 100, 250, 1000, 5000, 20000, 10**6):
                other = problem._replace(**{count: size})
                assert kernel.launch(other, SM90, kernel.config(other, SM90)).name in planned


def _name(backend: str, problem: MqaLogitsProblem, arch: Arch) -> str:
    if backend == "cuda-sm90":
        return heuristic(problem, arch).name
    if backend == "flydsl":
        return flydsl.layout(problem, arch, flydsl.heuristic(problem, arch)).name
    return hip.heuristic(problem, arch).name


class FaultyKernel:
    """Compiles every second time."""

    count = 0

    def supports(self, problem, arch):
        return None

    def precompile(self, problem, arch):
        self.count += 1
        if self.count % 2 == 0:
            raise ArithmeticError("the compiler said no")
        return f"kernel {self.count % 4}"

    config = neighbours = launch = precompile


class Faulty:
    name, summary = "faulty", ""

    def __init__(self, kernel=None):
        self.kernels = {"fp8_mqa_logits": kernel or FaultyKernel()}

    def missing(self):
        return None


def test_a_compiler_error_is_told_with_what_was_done(monkeypatch):
    monkeypatch.setitem(dispatch._BACKENDS, "faulty", Faulty())
    [batch] = prebuild.plan(SM90, [32], [64], names=["faulty"])
    done = prebuild.compile_batch(batch)
    assert (done.kernels, done.error) == (("kernel 1", "kernel 3"), "the compiler said no")
    monkeypatch.setattr(prebuild, "run", lambda batches, jobs: map(prebuild.compile_batch, batches))
    dispatch.kernel("faulty").count = 0
    result = CliRunner().invoke(cli.app, ["prebuild", "--arch", "sm90", "--heads", "32", "--backend", "faulty"])
    assert result.exit_code == 1
    assert "FAIL faulty fp8_mqa_logits H=32 D=128: the compiler said no" in result.output


def test_a_process_that_ends_costs_its_own_batch_alone(monkeypatch):
    batches = prebuild.plan(SM90, [32, 64], [128], operations=["fp8_mqa_logits"])

    class Pool:
        def __init__(self, *_):
            pass

        def __enter__(self):
            return self

        def __exit__(self, *_):
            return None

        def submit(self, call, batch):
            future = Future()
            if batch is batches[0]:
                future.set_exception(BrokenProcessPool("killed"))
            else:
                future.set_result(prebuild.Prebuilt(batch, ("kernel",)))
            return future

    monkeypatch.setattr(prebuild, "ProcessPoolExecutor", Pool)
    found = {done.batch: (done.kernels, done.error) for done in prebuild.run(batches, 2)}
    assert found == {batches[0]: ((), "BrokenProcessPool: killed"), batches[1]: (("kernel",), "")}


def test_a_cache_that_cannot_be_written_is_an_error(monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setenv("LIGHTNING_INDEXER_CACHE_DIR", str(tmp_path / "file"))
    result = CliRunner().invoke(cli.app, ["prebuild", "--arch", "sm90", "--heads", "8"], env={"COLUMNS": "200"})
    assert result.exit_code == 2
    assert "cannot write into" in result.output


class StoringKernel(FaultyKernel):
    """Stores one kernel in the disk cache."""

    def precompile(self, problem, arch):
        return artifacts.get_or_build(("key",), ".cubin", lambda: b"kernel").decode()


class Storing(Faulty):
    def __init__(self):
        self.kernels = {"fp8_mqa_logits": StoringKernel()}


@pytest.mark.parametrize("how", ["full disk", "half written", "trusted by nobody"])
def test_prebuild_fails_where_a_later_process_would_find_nothing(monkeypatch, tmp_path, how):
    monkeypatch.setenv("LIGHTNING_INDEXER_CACHE_DIR", str(tmp_path))
    monkeypatch.setitem(dispatch._BACKENDS, "faulty", Faulty(StoringKernel()))
    monkeypatch.setattr(prebuild, "run", lambda batches, jobs: map(prebuild.compile_batch, batches))
    arguments = ["prebuild", "--arch", "sm90", "--heads", "32", "--backend", "faulty"]
    real = Path.replace

    def replace(self, target):
        if how == "full disk":
            raise OSError(errno.ENOSPC, "No space left on device")
        self.write_bytes(b"")
        return real(self, target)

    if how == "trusted by nobody":
        tmp_path.chmod(0o777)
        said = "other users may write to it"
    else:
        monkeypatch.setattr(Path, "replace", replace)
        said = "No space left on device" if how == "full disk" else "does not hold what was just written"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        result = CliRunner().invoke(cli.app, arguments)
    assert result.exit_code == 1
    assert "FAIL faulty fp8_mqa_logits H=32 D=128: nothing is kept in" in result.output
    assert said in result.output
    assert not list(tmp_path.glob("*.tmp"))
    monkeypatch.setattr(Path, "replace", real)
    tmp_path.chmod(0o755)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert CliRunner().invoke(cli.app, arguments).exit_code == 0


def test_an_empty_file_does_not_pass_for_a_kernel(monkeypatch, tmp_path):
    monkeypatch.setenv("LIGHTNING_INDEXER_CACHE_DIR", str(tmp_path))
    monkeypatch.setitem(dispatch._BACKENDS, "faulty", Faulty(StoringKernel()))
    [batch] = prebuild.plan(SM90, [32], [64], names=["faulty"])
    assert prebuild.compile_batch(batch).error == ""
    [path] = tmp_path.iterdir()
    path.write_bytes(b"")
    with pytest.warns(RuntimeWarning, match="is not what was stored there"):
        assert prebuild.compile_batch(batch) == prebuild.Prebuilt(batch, ("kernel",))
    assert path.read_bytes().startswith(b"kernel")


def test_a_user_without_a_home_is_told_to_name_a_folder(monkeypatch):
    monkeypatch.setattr("lightning_indexer.envs.cache_dir", lambda: None)
    result = CliRunner().invoke(cli.app, ["prebuild", "--arch", "sm90", "--heads", "8"], env={"COLUMNS": "200"})
    assert result.exit_code == 2
    assert "this user has no home directory: name a folder" in result.output


@pytest.mark.slow
def test_a_launch_finds_what_was_compiled(monkeypatch, tmp_path):
    if (reason := nvrtc.missing()) is not None:
        pytest.skip(reason)
    monkeypatch.setenv("LIGHTNING_INDEXER_CACHE_DIR", str(tmp_path))
    arguments = ["prebuild", "--arch", "sm90", "--heads", "8", "--head-dim", "32", "--form", "clean", "--jobs", "1"]
    result = CliRunner().invoke(cli.app, arguments)
    assert result.exit_code == 0, result.output
    assert "cuda-sm90" in result.output
    # One of prefill; of decode one a next_n.
    assert len(list(tmp_path.glob("*.cubin"))) == 1 + len(prebuild.NEXT_N)

    def compiled_again(*_):
        raise AssertionError("compiled again")

    monkeypatch.setattr(nvrtc, "build", compiled_again)
    config = heuristic(MqaLogitsProblem(700, 9000, 8, 32), SM90)
    assert nvrtc.cubin(sm90.SOURCE, sm90.NVRTC_ARCH, dict(config.macros().items()))
    with pytest.raises(AssertionError, match="compiled again"):
        nvrtc.cubin(sm90.SOURCE, sm90.NVRTC_ARCH, heuristic(MqaLogitsProblem(700, 9000, 16, 32), SM90).macros())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "no GPU is here to take the arch from: name one, e.g. sm90"),
        (("--arch", "x"), "got 'x'"),
        (("--arch", "sm100"), "nothing for sm100 with H=32,64, D=128 is compiled ahead"),
        (("--arch", "sm90", "--heads", "20"), "nothing for sm90 with H=20, D=128"),
        (("--arch", "sm90", "--form", "x"), "got 'x', expected one of clean, noclean, compressed"),
        (("--arch", "sm90", "--out-dtype", "int8"), "got 'int8', expected one of float32, bfloat16"),
        (("--arch", "sm90", "--backend", "torch-blocked"), "got 'torch-blocked', which compiles at its first call"),
        (("--arch", "sm90", "--backend", "x"), "backend: got 'x'"),
        (("--arch", "sm90", "--heads", "0"), "got '0', expected positive integers"),
    ],
)
def test_what_cannot_be_prebuilt_is_said(monkeypatch, arguments, message):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    result = CliRunner().invoke(cli.app, ["prebuild", *arguments], env={"COLUMNS": "200"})
    assert result.exit_code == 2
    assert message in " ".join(result.output.replace("│", " ").split())


def test_a_missing_package_is_said(monkeypatch):
    monkeypatch.setattr(dispatch.get("flydsl").__class__, "missing", lambda self: "FlyDSL is not installed")
    arguments = ["prebuild", "--arch", "gfx942"]
    result = CliRunner().invoke(cli.app, arguments)
    assert result.exit_code == 1
    assert "left out: flydsl: FlyDSL is not installed" in result.output
    result = CliRunner().invoke(cli.app, [*arguments, "--backend", "flydsl"])
    assert result.exit_code == 2
