"""Sets up what ``tests/engines`` runs against: the Python files of the engines' wheels, and what they import, pinned.

    python tests/engines/setup_engines.py FOLDER

A wheel is downloaded without its dependencies and read for its Python files alone: nothing of an engine is compiled or
started, and vLLM's 300 MB are 50 MB then. requirements.txt beside this file has the packages that the modules under
test import, by name and version, installed without their dependencies. What is there already is left alone.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

WHEELS = ("vllm==0.33.0", "sglang==0.5.23")
HERE = Path(__file__).resolve().parent


def pip(*arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "pip", "--disable-pip-version-check", *arguments], check=True)


def unpack(wheel: Path, folder: Path) -> None:
    """The Python files of a wheel, its metadata and entry points; and the sources that SGLang looks for at import."""
    with zipfile.ZipFile(wheel) as archive:
        for member in archive.infolist():
            name = Path(member.filename)
            wanted = name.suffix == ".py" or name.name in ("METADATA", "entry_points.txt")
            if wanted or member.filename.startswith(("sglang/kernels/jit/include/", "sglang/kernels/jit/csrc/")):
                archive.extract(member, folder)


def main(folder: Path) -> None:
    for wheel in WHEELS:
        place = folder / wheel.replace("==", "-")
        if (place / "done").exists():
            continue
        with tempfile.TemporaryDirectory() as downloads:
            pip("download", "--quiet", "--no-deps", "--only-binary", ":all:", "--dest", downloads, wheel)
            for found in Path(downloads).glob("*.whl"):
                unpack(found, place)
        (place / "done").touch()
    requirements, marker = (HERE / "requirements.txt").read_text(), folder / "packages" / "requirements.txt"
    if not marker.exists() or marker.read_text() != requirements:
        target = str(folder / "packages")
        pip("install", "--quiet", "--no-deps", "--upgrade", "--target", target, "-r", str(HERE / "requirements.txt"))
        marker.write_text(requirements)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
