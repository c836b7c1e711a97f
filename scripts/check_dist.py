"""Looks into built distributions: what has to be in them, and what must not. ``python scripts/check_dist.py dist``"""

from __future__ import annotations

import sys
import tarfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def check(condition: bool, what: str) -> None:
    if not condition:
        sys.exit(f"check_dist: {what}")


def wheel_of_the_library(path: Path) -> None:
    names = zipfile.ZipFile(path).namelist()
    outside = [name for name in names if not name.startswith(("lightning_indexer/", "lightning_indexer-"))]
    check(not outside, f"{path.name} holds {outside[:3]}")
    check(not any("cdna_sim/" in name or "/tests/" in name for name in names), f"{path.name} holds tests or simulator")
    source = ROOT / "src"
    for file in source.rglob("*"):
        name = file.relative_to(source).as_posix()
        if file.is_file() and "__pycache__" not in name:
            check(name in names, f"{path.name} lacks {name}")
    metadata = zipfile.ZipFile(path).read(next(name for name in names if name.endswith(".dist-info/METADATA"))).decode()
    for line in ("License-Expression: MIT", "Requires-Python: >=3.10", "Project-URL: Issues", "Requires-Dist: torch>="):
        check(line in metadata, f"{path.name}: its metadata lack {line!r}")


def sdist_of_the_library(path: Path) -> None:
    with tarfile.open(path) as archive:
        names = {name.split("/", 1)[1] for name in archive.getnames() if "/" in name}
    for name in ("tests/conftest.py", "packages/cdna-sim/pyproject.toml", "docs/semantics.md", "examples/prefill.py",
                 "Makefile", "constraints.txt", "mkdocs.yml", "RELEASING.md", "SECURITY.md", "LICENSE"):  # fmt: skip
        check(name in names, f"{path.name} lacks {name}")
    check(not any("__pycache__" in name or name.startswith((".venv", "dist/", "site/")) for name in names),
          f"{path.name} holds what was built")  # fmt: skip


def main() -> None:
    folder = Path(sys.argv[1])
    [wheel] = folder.glob("lightning_indexer-*.whl")
    [sdist] = folder.glob("lightning_indexer-*.tar.gz")
    wheel_of_the_library(wheel)
    sdist_of_the_library(sdist)
    [simulator] = folder.glob("cdna_sim-*.whl")
    names = zipfile.ZipFile(simulator).namelist()
    check(not any("tests/" in name or "lightning_indexer" in name for name in names), f"{simulator.name}: more than it")
    print(f"{wheel.name}, {sdist.name}, {simulator.name}: as they should be")


if __name__ == "__main__":
    main()
