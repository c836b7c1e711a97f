"""What a measurement was made with: machine, versions, commit, memory."""

from __future__ import annotations

import datetime
import importlib.metadata
import platform
import subprocess
from pathlib import Path

import torch

from lightning_indexer._version import __version__
from lightning_indexer.arch import arch_of

_PACKAGES = ("torch", "triton", "numpy", "vllm", "deep_gemm", "amd-aiter")


def record(device: torch.device) -> dict[str, str]:
    """Hardware, versions, commit and the day, in the order in which reports print them."""
    facts = {"device": device_name(device), "arch": arch_of(device).name, "lightning-indexer": __version__}
    facts.update({name: version for name in _PACKAGES if (version := package_version(name)) is not None})
    if torch.version.cuda and device.type == "cuda":
        facts["cuda"] = torch.version.cuda
    if torch.version.hip:
        facts["rocm"] = torch.version.hip
    facts["python"] = platform.python_version()
    facts["commit"] = commit() or "unknown"
    facts["date"] = today()
    return facts


def of_the_library() -> dict[str, str]:
    """What a result depends on that no machine has a part in."""
    return {"lightning-indexer": __version__, "commit": commit() or "unknown", "date": today()}


def today() -> str:
    """The day in UTC, like 2026-01-31."""
    return datetime.datetime.now(datetime.timezone.utc).date().isoformat()


def package_version(name: str) -> str | None:
    """The installed version of a distribution, or None."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{_cpu_model()}, {torch.get_num_threads()} threads"


def commit(file: Path | None = None) -> str | None:
    """The commit of the checkout this package runs from, ``-dirty`` where files differ; None outside a checkout.

    A package that is installed inside the tree of another project is no part of that: ``file``, by default this one,
    has to be tracked.
    """
    here = (file or Path(__file__)).resolve()
    try:
        _git(here.parent, "ls-files", "--error-unmatch", here.name)
        return _git(here.parent, "describe", "--always", "--dirty", "--abbrev=12")
    except (OSError, subprocess.CalledProcessError):
        return None


def _git(folder: Path, *arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=folder, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def _cpu_model() -> str:
    for line in _read("/proc/cpuinfo").splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def _read(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""
