"""Assembly to a code object with clang and lld of the PyPI package ``ziglang`` (the extra ``asm``)."""

from __future__ import annotations

import functools
import importlib.util
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from cdna_sim.code_object import CodeObject


class AssemblerError(RuntimeError):
    """The assembler refused its input or is not installed; the message holds what it said and what to do."""


@functools.lru_cache(256)
def assemble(text: str, arch: str) -> CodeObject:
    """Assembles and links AMDGPU assembly.

    Args:
        text: a whole file: ``.amdgcn_target`` is not needed, ``.amdhsa_kernel`` is.
        arch: e.g. ``gfx950``.

    Raises:
        AssemblerError: with the assembler's message, or how to install one.
        CodeObjectError: what was assembled is no code object that can be loaded.
    """
    if importlib.util.find_spec("ziglang") is None:
        raise AssemblerError("no assembler: pip install ziglang, whose clang and lld know AMD GPUs")
    zig = (sys.executable, "-m", "ziglang")
    with tempfile.TemporaryDirectory(prefix="cdna-sim-") as folder:
        source, made, linked = (Path(folder, f"kernel.{kind}") for kind in ("s", "o", "hsaco"))
        source.write_text(text)
        target = ("--target=amdgcn-amd-amdhsa", f"-mcpu={arch}")
        _run((*zig, "clang", "-x", "assembler", *target, "-c", str(source), "-o", str(made)), f"assembly for {arch}")
        _run((*zig, "ld.lld", "-shared", str(made), "-o", str(linked)), f"link for {arch}")
        return CodeObject(linked.read_bytes())


def _run(command: Sequence[str], what: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise AssemblerError(f"{what} failed:\n{done.stderr.strip() or done.stdout.strip()}")
