"""What ``lightning-indexer info`` shows. Needs none of the packages of the command line: it says which are missing."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import Any

import torch

from lightning_indexer import __version__, envs
from lightning_indexer.arch import Arch, arch_of
from lightning_indexer.cli import tables
from lightning_indexer.cli.tables import Table
from lightning_indexer.cli.usual import USUAL
from lightning_indexer.selection import registry

SIMULATED = " and ".join(arch.name for arch in Arch.known() if arch.simulated)
# Distribution, extra that brings it, what it is for.
PACKAGES = (
    ("torch", "", "everything"),
    ("triton", "triton", "triton-portable; L2 flush and timing of `bench` on GPUs"),
    ("cuda-core", "cuda", "compiling and launching cuda-sm90"),
    ("cuda-bindings", "cuda", "the CUDA driver"),
    ("nvidia-cuda-nvrtc", "cuda", "the compiler of cuda-sm90, where there is no CUDA toolkit"),
    ("ziglang", "amd", f"HIP C++ for {SIMULATED}, where there is no ROCm"),
    ("cdna-sim", "", "AMD kernels without an AMD GPU; from a clone: pip install ./packages/cdna-sim"),
    ("tinygrad", "sim", "decoder of the AMD simulator"),
    ("flydsl", "flydsl", "compiling FlyDSL kernels"),
    ("numpy", "cli", "selection on CPUs in a third of the time; the simulator"),
    ("typer", "cli", "the command line, but for `info`"),
    ("rich", "cli", "progress of the command line"),
    ("matplotlib", "cli", "pictures of `demo`, `bench`, `verify` and `plot`"),
)


def collect() -> dict[str, Any]:
    """Tables ``devices``, ``backends`` and ``packages``; lines ``peers`` and ``warnings``; ``variables`` by name."""
    from lightning_indexer.bench.environment import device_name, package_version
    from lightning_indexer.bench.peers import find

    here = [torch.device("cpu")]
    if torch.cuda.is_available():
        here += [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
    devices = Table(("device", "arch", "name"), f"lightning-indexer {__version__}")
    for device in here:
        devices.add(str(device), arch_of(device).name, device_name(device))

    backends = Table(("backend", "here", "runs on", "what it is"))
    for backend in registry.backends():
        able = [str(device) for device in here if _runs(backend.name, arch_of(device))]
        backends.add(
            backend.name, backend.missing() or "installed", ", ".join(able) or "no device of this machine",
            backend.summary,
        )  # fmt: skip

    packages = Table(("package", "version", "used for"))
    for package, extra, purpose in PACKAGES:
        how = f": pip install '.[{extra}]' from a clone" if extra else ""
        packages.add(package, package_version(package) or f"missing{how}", purpose)
    return {
        "devices": devices,
        "backends": backends,
        "packages": packages,
        "peers": [f"peer not measured here: {line}" for line in find(here[-1])[1]],
        "variables": {name: envs.value(name) for name in envs.KNOWN},
        "warnings": [f"{name} is set, and nothing reads it" for name in envs.unknown()],
    }


def text(found: dict[str, Any], width: int) -> str:
    """What is printed of it."""
    shown = [tables.many((found[name] for name in ("devices", "backends", "packages")), width), ""]
    shown += [tables.wrap(line, width, "  ") for line in found["peers"]]
    for name, meaning in envs.KNOWN.items():
        shown.append(tables.wrap(f"{name}={found['variables'][name] or '(not set)'}  {meaning}", width, "  "))
    return "\n".join(shown)


def document(found: dict[str, Any]) -> dict[str, Any]:
    """What ``--json`` prints of it."""
    return {name: each.records() if isinstance(each, Table) else each for name, each in found.items()}


def main(arguments: Sequence[str]) -> int:
    """``info`` without the packages of the command line; the exit status."""
    if set(arguments) - {"--json"}:
        print("usage: lightning-indexer info [--json]", file=sys.stderr)
        return 2
    found = collect()
    if "--json" in arguments:
        print(json.dumps(tables.plain(document(found)), indent=1, allow_nan=False))
        return 0
    print(text(found, tables.terminal_width()))
    for line in found["warnings"]:
        print(f"warning: {line}", file=sys.stderr)
    return 0


def _runs(backend: str, arch: Arch) -> bool:
    known = ((problem, registry.kernels(operation).get(backend)) for operation, problem in USUAL.items())
    return any(kernel is not None and kernel.supports(problem, arch) is None for problem, kernel in known)
