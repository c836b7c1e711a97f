"""What the library asks of ``cdna-sim``: nothing at import, a sentence where it is missing, the same facts of archs."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
import torch

from cdna_sim import ARCHS, from_machine_code
from lightning_indexer import Arch, packages
from lightning_indexer.amd import cdna, clang, simulation
from lightning_indexer.amd import simulated as launcher
from lightning_indexer.amd.built import Built, CompileError

ROOT = Path(__file__).resolve().parents[2]
STORE_IDS = bytes.fromhex("82000224008070dc01000200000081bf")  # out[lane] = lane


def test_both_tables_of_archs_say_the_same():
    for name, row in ARCHS.items():
        arch = Arch.parse(name)
        assert (arch.shared_bytes, arch.wave, arch.simulated) == (row.lds, 64, row.simulated)
        if row.simulated:
            assert arch.fp8 == row.fp8
    assert tuple(launcher.ARCHS) == tuple(name for name, row in ARCHS.items() if row.simulated)


def hide(monkeypatch, *modules: str) -> None:
    installed = packages.installed
    monkeypatch.setattr(packages, "installed", lambda name: name not in modules and installed(name))


def test_what_is_missing_is_said_with_its_command(monkeypatch):
    assert cdna.missing() is None
    by_path = r"pip install \./packages/cdna-sim from a clone"
    with monkeypatch.context() as patch:
        hide(patch, "cdna_sim")
        assert re.search(f"reads AMD code objects, is not installed: {by_path}", cdna.missing())
        assert re.search(f"the simulator, cdna-sim, is not installed: {by_path}", cdna.simulator_missing())
        with pytest.raises(ModuleNotFoundError, match=by_path):
            cdna.code_object(b"")
        with pytest.raises(ModuleNotFoundError, match=by_path), simulation("gfx950"):
            pass
        patch.setattr(clang, "_tools", lambda: clang.Tools((), (), "none"))
        assert clang.missing() == cdna.missing()
        with pytest.raises(CompileError, match=by_path):
            clang.tools()
    hide(monkeypatch, "msgpack", "elftools")
    assert cdna.missing().startswith("cdna-sim needs msgpack and pyelftools: pip install ./packages/cdna-sim")
    assert cdna.simulator_missing() == cdna.missing()


def test_nothing_fetches_the_package_by_name():
    """Whoever registers the name on an index must not be installed: every command names the folder."""
    project = (ROOT / "pyproject.toml").read_text()
    requirements = project[: project.index("[project.scripts]")]
    assert "tinygrad" in requirements
    assert not re.search(r"""["']cdna[-_.]sim""", requirements)
    texts = [ROOT / "Makefile", ROOT / "README.md", ROOT / "CONTRIBUTING.md", *ROOT.glob("docs/**/*.md")]
    texts += [*ROOT.glob("packages/*/*.md"), *ROOT.glob("src/**/*.py"), *ROOT.glob("packages/*/src/**/*.py")]
    for path in texts:
        for line in path.read_text().splitlines():
            if re.search(r"pip\S* install", line) and re.search(r"cdna[-_]sim", line):
                assert "./packages/cdna-sim" in line, f"{path}: {line}"


@pytest.mark.skipif(sys.version_info < (3, 11), reason="the decoder, tinygrad, needs Python 3.11")
def test_reports_do_not_grow_without_end():
    built = Built(from_machine_code(STORE_IDS, "gfx942", [("out", "pointer")]), "kernel", "", 0, "hip", "")
    with simulation("gfx942") as simulator:
        for turn in range(300):
            out = torch.zeros(64 + turn, dtype=torch.int32)
            simulator.launch(built, (1, 1, 1), 64, (out,))
            assert out[:64].tolist() == list(range(64))
    assert len(simulator.reports) == 256
    assert simulator.reports[-1].stored == {"out": 256}
