"""CUDA C++ to a cubin with NVRTC, from NVIDIA's Python packages; no CUDA toolkit, and no GPU needed to compile."""

from __future__ import annotations

import functools
import importlib.util
import io
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from lightning_indexer import artifacts as cache


class CompileError(RuntimeError):
    """NVRTC or ptxas refused the source; the message holds their log."""


@dataclass(frozen=True, slots=True)
class Compiled:
    """A cubin and what ptxas said of it (registers, spills, warnings)."""

    cubin: bytes
    log: str


def missing() -> str | None:
    """None, or which package is missing with the command that installs it."""
    for module, package in (("cuda.core", "cuda-core"), ("cuda.bindings", "cuda-bindings")):
        try:
            found = importlib.util.find_spec(module) is not None
        except ModuleNotFoundError:  # there is no package `cuda` at all
            found = False
        if not found:
            return f"{package} is not installed: pip install 'lightning-indexer[cuda]'"
    return None


@functools.cache
def version() -> str:
    """Of the NVRTC library that is loaded, e.g. ``13.0``."""
    from cuda.bindings import nvrtc

    error, major, minor = nvrtc.nvrtcVersion()
    if error != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        raise CompileError(f"nvrtcVersion: {error}")
    return f"{major}.{minor}"


def build(source: Path, arch: str, macros: Mapping[str, str | int]) -> Compiled:
    """Compiles without the cache.

    Args:
        source: the .cuh file; its folder is the include path.
        arch: e.g. ``sm_90a``.
        macros: the compile-time configuration.

    Raises:
        CompileError: with the compiler's log.
    """
    from cuda.core import Program, ProgramOptions

    options = ProgramOptions(
        arch=arch,
        std="c++17",
        include_path=[str(source.parent)],
        define_macro=[(name, str(value)) for name, value in macros.items()] or None,
        ptxas_options=["-v"],
    )
    log = io.StringIO()
    try:
        code = Program(source.read_text(), "c++", options).compile("cubin", logs=log).code
    except Exception as error:  # cuda-core raises its own, undocumented, types
        raise CompileError(f"{source.name} with {dict(macros)}: {error}\n{log.getvalue()}") from error
    return Compiled(bytes(code), log.getvalue())


def cubin(source: Path, arch: str, macros: Mapping[str, str | int]) -> bytes:
    """As :func:`build`, from the disk cache where it is there: keyed by source, headers, macros and NVRTC's version."""
    headers = b"".join(path.read_bytes() for path in sorted(source.parent.glob("*.cuh")))
    key = (headers, source.name, arch, repr(sorted(macros.items())), version())
    return cache.get_or_build(key, ".cubin", lambda: build(source, arch, macros).cubin)
