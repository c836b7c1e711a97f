"""CUDA C++ to a cubin with NVRTC, from NVIDIA's Python packages; no CUDA toolkit, and no GPU needed to compile."""

from __future__ import annotations

import functools
import io
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lightning_indexer import artifacts, packages
from lightning_indexer.artifacts import CompileError

_OPTIONS: dict[str, Any] = {"std": "c++17", "ptxas_options": ["-v"]}


@dataclass(frozen=True, slots=True)
class Compiled:
    """A cubin and what ptxas said of it (registers, spills, warnings)."""

    cubin: bytes
    log: str


def missing() -> str | None:
    """None, or which package is missing with the command that installs it."""
    for module, package in (("cuda.core", "cuda-core"), ("cuda.bindings", "cuda-bindings")):
        if not packages.installed(module):
            return f"{package} is not installed: pip install 'lightning-indexer[cuda]'"
    return None


@functools.cache
def version() -> str:
    """Of the NVRTC library that is loaded, e.g. ``13.0``, and of the packages that it and its options come through."""
    try:
        from cuda.bindings import nvrtc

        status, major, minor = nvrtc.nvrtcVersion()
    except Exception as error:  # of a broken installation: ImportError, or RuntimeError without the library
        raise CompileError(f"NVRTC cannot be loaded: {error}; pip install 'lightning-indexer[cuda]'") from error
    if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        raise CompileError(f"nvrtcVersion: {status}")
    # The library names no patch release, and cuda-core adds options of its own.
    builds = [packages.version(name) for name in ("nvidia-cuda-nvrtc", "nvidia-cuda-nvrtc-cu12", "cuda-core")]
    return " ".join([f"{major}.{minor}", *builds])


def build(source: packages.Source, arch: str, macros: Mapping[str, str | int]) -> Compiled:
    """Compiles without the cache.

    Args:
        source: the .cuh file; its folder is the include path.
        arch: e.g. ``sm_90a``.
        macros: the compile-time configuration.

    Raises:
        CompileError: with the compiler's log.
    """
    log = io.StringIO()
    try:
        from cuda.core import Program, ProgramOptions

        with packages.on_disk(source, ".cuh") as file:
            options = ProgramOptions(
                arch=arch,
                include_path=[str(file.parent)],
                define_macro=[(name, str(value)) for name, value in macros.items()] or None,
                **_OPTIONS,
            )
            code = Program(file.read_text(), "c++", options).compile("cubin", logs=log).code
    except Exception as error:  # cuda-core raises its own, undocumented, types
        raise CompileError(f"{source.name} with {dict(macros)}: {error}\n{log.getvalue()}") from error
    return Compiled(bytes(code), log.getvalue())


def cubin(source: packages.Source, arch: str, macros: Mapping[str, str | int]) -> bytes:
    """As :func:`build`, from the disk cache where it is there.

    The key: source, every ``.cuh`` beside it, arch, macros, the other options, and the compiler's version.
    """
    text = b"".join(name.encode() + b"\0" + data for name, data in packages.contents(source, ".cuh").items())
    options = repr(sorted(_OPTIONS.items()))
    key = ("cuda", text, source.name, arch, repr(sorted(macros.items())), options, version())
    return artifacts.get_or_build(key, ".cubin", lambda: build(source, arch, macros).cubin)
