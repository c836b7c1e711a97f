"""Python in a process of its own: what needs Triton itself, where this process has Triton's interpreter."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SOURCES = (ROOT / "src", ROOT / "packages" / "cdna-sim" / "src")


def environment(**variables: str) -> dict[str, str]:
    """This process's, with the repository's packages in front and without ``TRITON_INTERPRET``."""
    found = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    found["PYTHONPATH"] = os.pathsep.join([*map(str, SOURCES), *filter(None, [os.environ.get("PYTHONPATH")])])
    return found | variables


def python(*arguments: str, timeout: float | None = None, **variables: str) -> str:
    """What ``python`` with these arguments prints; fails the test where its exit status is not 0."""
    done = subprocess.run(
        [sys.executable, *arguments], env=environment(**variables), capture_output=True, text=True, check=False,
        timeout=timeout,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
