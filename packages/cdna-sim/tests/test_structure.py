"""The package as a whole: what importing it loads, and that its modules use each other one way."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import cdna_sim

ROOT = Path(cdna_sim.__file__).parent


def imports() -> dict[str, set[str]]:
    """The package's modules that each of them imports, in functions and for types too."""
    modules = {
        ".".join(("cdna_sim", *path.relative_to(ROOT).with_suffix("").parts)).removesuffix(".__init__"): path
        for path in ROOT.rglob("*.py")
    }
    found: dict[str, set[str]] = {}
    for name, path in modules.items():
        named: set[str] = set()
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                named |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                assert node.level == 0, f"{name}: a relative import"
                module = node.module or ""
                for alias in node.names:
                    whole = f"{module}.{alias.name}"
                    named.add(whole if whole in modules else module)
        found[name] = {one for one in named if one in modules} - {"cdna_sim"}
    return found


def test_no_module_needs_itself():
    graph = imports()
    assert len(graph) > 40
    # The package's own file names what it loads later, and nothing imports it.
    TopologicalSorter(graph).prepare()


def test_no_folder_needs_itself():
    folders: dict[str, set[str]] = {}
    for name, needed in imports().items():
        if name.count(".") > 1:
            own = name.split(".")[1]
            others = {one.split(".")[1] for one in needed if one.count(".") > 1} - {own}
            folders.setdefault(own, set()).update(others)
    assert set(folders) == {"exec", "isa", "memory", "ops", "timing"}
    TopologicalSorter(folders).prepare()


SCRIPT = """
import importlib, json, sys
name, action = sys.argv[1:]
module = importlib.import_module(name)
if action == "read":
    module.from_machine_code(bytes.fromhex("000081bf"), "gfx950").kernels["kernel"].resources
elif action == "run":
    import numpy
    code = module.from_machine_code(bytes.fromhex("82000224008070dc01000200000081bf"), "gfx950", [("out", "pointer")])
    out = numpy.zeros(64, numpy.uint32)
    module.run(code, 1, 64, [out])
    assert out.tolist() == list(range(64))
packages = ("numpy", "tinygrad", "elftools", "msgpack", "torch", "ziglang")
print(json.dumps([name for name in packages if name in sys.modules]))
"""


def loaded(module: str, action: str = "import") -> list[str]:
    command = [sys.executable, "-c", SCRIPT, module, action]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_importing_loads_nothing_and_reading_no_simulator():
    assert loaded("cdna_sim") == []
    assert loaded("cdna_sim", "read") == ["elftools", "msgpack"]


def test_running_needs_no_torch():
    if cdna_sim.missing() is None:
        assert "torch" not in loaded("cdna_sim", "run")


EACH = """
import importlib, sys
for name in sys.argv[1:]:
    for known in [known for known in sys.modules if known.startswith("cdna_sim")]:
        del sys.modules[known]
    importlib.import_module(name)
assert "torch" not in sys.modules
"""


def test_each_module_can_be_imported_first():
    done = subprocess.run([sys.executable, "-c", EACH, *imports()], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_public_names_are_there():
    for name in cdna_sim.__all__:
        assert getattr(cdna_sim, name) is not None
    assert set(cdna_sim.__all__) <= set(dir(cdna_sim))
