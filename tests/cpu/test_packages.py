"""What is installed, and what of it is broken: no backend's ``missing`` raises or imports; sources in a zip archive."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path
from types import ModuleType

import pytest

from lightning_indexer import Arch, MqaLogitsProblem, explain, packages
from lightning_indexer.amd import clang
from lightning_indexer.selection import registry
from processes import python

SOURCE = Path(packages.__file__).parents[1]
OPTIONAL = ("triton", "cuda", "flydsl", "ziglang", "hip", "tinygrad", "numpy")


@pytest.mark.parametrize("name", ["json", "xml.etree", "importlib.metadata", "torch"])
def test_what_is_there(name):
    assert packages.installed(name)


@pytest.mark.parametrize("name", ["no_such_package", "no_such_package.inside", "json.nothing", "json.decoder.deeper"])
def test_what_is_not_there(name):
    assert not packages.installed(name)
    assert packages.folders(name) == []


def test_a_module_without_a_spec(monkeypatch):
    monkeypatch.setitem(sys.modules, "stand_in", ModuleType("stand_in"))
    assert sys.modules["stand_in"].__spec__ is None
    assert not packages.installed("stand_in")
    assert packages.folders("stand_in") == []
    real = ModuleType("loaded_from_a_file")
    real.__file__ = "loaded_from_a_file.py"
    monkeypatch.setitem(sys.modules, "loaded_from_a_file", real)
    assert packages.installed("loaded_from_a_file")
    monkeypatch.setitem(sys.modules, "hidden", None)
    assert not packages.installed("hidden")


def test_a_folder_without_code_is_no_package(tmp_path, monkeypatch):
    (tmp_path / "folder_of_data" / "part").mkdir(parents=True)
    (tmp_path / "folder_of_data" / "part" / "__init__.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    assert not packages.installed("folder_of_data")
    assert packages.installed("folder_of_data.part"), "inside a namespace, such as cuda.core"
    assert "folder_of_data" not in sys.modules


def test_nothing_is_imported(tmp_path, monkeypatch):
    outer = tmp_path / "raises_at_import"
    (outer / "inner").mkdir(parents=True)
    for folder in (outer, outer / "inner"):
        (folder / "__init__.py").write_text("raise RuntimeError('broken')")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert packages.installed("raises_at_import.inner")
    assert not packages.installed("raises_at_import.other")
    assert not {name for name in sys.modules if name.startswith("raises_at_import")}


def test_a_distribution_without_metadata():
    assert packages.version("torch")
    assert packages.version("no-such-distribution") == ""


def test_finders_that_raise(monkeypatch):
    class Broken:
        @staticmethod
        def find_spec(name, path=None, target=None):
            raise OSError("a file system that is gone")

    monkeypatch.setattr(sys, "meta_path", [Broken])
    assert not packages.installed("some_package_here")
    assert not packages.installed("some_package_here.inside")


def every_backend() -> dict[str, str | None]:
    return {backend.name: backend.missing() for backend in registry.backends()}


def fresh(monkeypatch) -> None:
    monkeypatch.setattr(clang, "_tools", clang._tools.__wrapped__)


BROKEN = """
import sys
from pathlib import Path
import torch  # imports some of them itself
folder, kind, names = Path(sys.argv[1]), sys.argv[2], sys.argv[3:]
for name in [name for name in sys.modules if name.split(".")[0] in names]:
    del sys.modules[name]
for name in names:
    if kind == "raises":
        (folder / name).mkdir()
        (folder / name / "__init__.py").write_text("raise RuntimeError('libamdhip64.so: cannot open shared object')")
    elif kind == "folder":
        (folder / name).mkdir()
if kind != "hidden":
    sys.path.insert(0, str(folder))
import lightning_indexer as li
from lightning_indexer.selection import registry
torch.version.hip = "7.0.2"  # a PyTorch for ROCm
if kind == "no spec":
    from types import ModuleType
    sys.modules.update({name: ModuleType(name) for name in names})
if kind == "hidden":
    sys.modules.update(dict.fromkeys(names))
before = set(sys.modules)
missing = {backend.name: backend.missing() for backend in registry.backends()}
assert all(isinstance(reason, str | None) for reason in missing.values()), missing
assert missing["torch-blocked"] is None
for arch in li.Arch.known():
    verdicts = li.explain(li.MqaLogitsProblem(4096, 32768, 32, 128), arch)
    assert any(verdict.chosen for verdict in verdicts), verdicts
new = {name for name in set(sys.modules) - before if name.split(".")[0] in names}
assert not new, new
print(missing)
"""


@pytest.mark.parametrize("kind", ["raises", "folder", "no spec", "hidden"])
@pytest.mark.slow
def test_no_backend_ends_selection_where_packages_are_broken(tmp_path, kind):
    names = [name for name in OPTIONAL if name != "numpy"]  # torch imports it
    text = python("-c", BROKEN, tmp_path, kind, *names)
    if kind in ("no spec", "hidden"):
        assert "Triton is not installed: pip install" in text
        assert "cuda-core is not installed: pip install" in text


def test_a_hip_runtime_is_not_asked_for_before_a_launch(monkeypatch):
    """A machine with an AMD GPU and a runtime that cannot be loaded: selection does not hear of it."""
    from lightning_indexer.amd import hip_runtime

    def loaded(*_):
        raise RuntimeError("Cannot open libamdhip64.so: cannot open shared object file")

    monkeypatch.setattr("torch.version.hip", "7.0.2")
    monkeypatch.setattr(hip_runtime, "_runtime", loaded)
    found = every_backend()
    assert all("libamdhip64" not in (reason or "") for reason in found.values())
    verdicts = explain(MqaLogitsProblem(4096, 32768, 32, 128), Arch.parse("gfx950"))
    assert any(verdict.chosen for verdict in verdicts)


def test_a_clang_of_rocm_that_cannot_be_run(tmp_path, monkeypatch):
    tool = tmp_path / "llvm" / "bin" / "clang"
    tool.parent.mkdir(parents=True)
    tool.write_text("not a program")
    monkeypatch.setenv("ROCM_PATH", str(tmp_path))
    fresh(monkeypatch)
    assert clang.missing() is None
    found = clang._tools()
    assert found is not None
    hipcc = tmp_path / "hipcc"
    hipcc.touch(mode=0o755)
    monkeypatch.setattr(clang.shutil, "which", lambda name: "/hipcc")
    assert clang._rocm_of_path() == "/"


# Sources in a zip archive

ZIPPED = """
import sys
sys.path.insert(0, sys.argv[1])
import lightning_indexer
assert lightning_indexer.__file__.startswith(sys.argv[1]), lightning_indexer.__file__
from lightning_indexer import Arch, MqaLogitsProblem as Problem, packages
from lightning_indexer.backends.cuda_sm90 import mqa_logits as sm90
from lightning_indexer.selection import registry
assert isinstance(sm90.SOURCE, packages.PackedFile)
for name, arch, problem in (
    ("cuda-sm90", "sm90", Problem(700, 9000, 8, 32)), ("hip-gfx950", "gfx950", Problem(64, 4096, 32, 128)),
    ("hip-gfx950", "gfx950", Problem(64, 64, 32, 128)), ("flydsl", "gfx942", Problem(64, 4096, 32, 128)),
):
    backend = registry.get(name)
    if (reason := backend.missing()) is None:
        print(backend.kernels["fp8_mqa_logits"].precompile(problem, Arch.parse(arch)))
    else:
        print("left out", name, reason)
"""


@pytest.fixture(scope="module")
def archive(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("zip") / "packed.zip"
    with zipfile.ZipFile(path, "w") as packed:
        for root in {SOURCE, *(Path(place).parent for place in packages.folders("cdna_sim"))}:
            for name in ("lightning_indexer", "cdna_sim"):
                for file in (root / name).rglob("*"):
                    if file.is_file() and "__pycache__" not in file.parts:
                        packed.write(file, str(file.relative_to(root)))
    return path


@pytest.mark.slow
def test_sources_are_compiled_from_a_zip_archive(archive, compiled_kernels):
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "TRITON_INTERPRET")}
    environment["LIGHTNING_INDEXER_CACHE_DIR"] = str(compiled_kernels)
    done = subprocess.run(
        [sys.executable, "-c", ZIPPED, str(archive)], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 4
    assert all(line.startswith(("fp8_mqa_logits", "left out")) for line in lines), lines


def test_contents_and_files_of_an_archive(tmp_path, monkeypatch):
    with zipfile.ZipFile(tmp_path / "packed.zip", "w") as packed:
        for name in ("__init__.py", "a.cuh", "b.cuh", "c.txt"):
            packed.writestr(f"zipped_sources/{name}", f"# {name}")
    monkeypatch.syspath_prepend(str(tmp_path / "packed.zip"))
    source = packages.beside("zipped_sources.module", "a.cuh")
    assert source == packages.PackedFile("zipped_sources", "a.cuh")
    assert packages.contents(source, ".cuh") == {"a.cuh": b"# a.cuh", "b.cuh": b"# b.cuh"}
    with packages.on_disk(source, ".cuh") as file:
        assert file.read_text() == "# a.cuh"
        assert sorted(path.name for path in file.parent.iterdir()) == ["a.cuh", "b.cuh"]
    assert not file.exists()
