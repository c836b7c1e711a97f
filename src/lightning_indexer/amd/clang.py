"""HIP C++ and AMDGPU assembly to code objects with a plain clang: hipcc's where ROCm is installed, else PyPI's.

The PyPI package ``ziglang`` carries clang and lld with the AMDGPU target, so that no ROCm and no GPU is needed. It has
no HIP headers: sources for it use clang's builtins.
"""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from lightning_indexer import artifacts, envs, packages
from lightning_indexer.amd import cdna
from lightning_indexer.amd.built import Built, get_or_build
from lightning_indexer.amd.repair import VERSION, repair
from lightning_indexer.arch import Arch
from lightning_indexer.artifacts import CompileError

if TYPE_CHECKING:
    from cdna_sim import CodeObject

# One input for both compilers, so neither ROCm's headers nor its device library; -fno-discard-value-names keeps the
# names of kernel arguments in the metadata. Code object V5: clang 22 writes V6 of its own accord (ABI version 4 in the
# ELF header), which ROCm older than 7 need not load.
_CODE_OBJECT = "-mcode-object-version=5"
_FLAGS = ("-std=c++17", "-O3", "-nogpuinc", "-nogpulib", "-fno-discard-value-names", _CODE_OBJECT)


@dataclass(frozen=True, slots=True)
class Tools:
    """Commands that run clang and lld, and what they are called in a message."""

    clang: tuple[str, ...]
    lld: tuple[str, ...]
    name: str


def missing() -> str | None:
    """None, or what to install, with the command. Runs no compiler."""
    if packages.installed("ziglang") or any(_rocm_tools()):
        return cdna.missing()
    return _MISSING


_MISSING = "no clang for AMD GPUs: pip install 'lightning-indexer[amd]'"


def tools() -> Tools:
    """The compiler used here.

    Raises:
        CompileError: there is none, or nothing that reads what it makes; the message says how to install it.
    """
    found, reason = _tools(), cdna.missing()
    if found is None or reason is not None:
        raise CompileError(_MISSING if found is None else reason)
    return found


@functools.cache
def version() -> str:
    """First line of what the compiler says of itself, e.g. ``clang version 22.1.8``."""
    return _run((*tools().clang, "--version"), "clang --version").splitlines()[0].strip()


def compile_hip(
    source: packages.Source, arch: str, macros: Mapping[str, str | int], flags: Sequence[str] = ()
) -> Built:
    """Compiles a HIP source that holds one kernel, from the disk cache where it is there.

    The key: the source, every ``.h`` and ``.hip`` beside it, the macros, the flags and the compiler's version.

    Args:
        source: the .hip file; its folder is the include path.
        arch: e.g. ``gfx942``.
        macros: the compile-time configuration.
        flags: for clang, after the common ones.

    Raises:
        CompileError: with the compiler's message, or how to install one.
        CodeObjectError: the source holds no kernel, or several.
    """
    text = b"".join(name.encode() + b"\0" + data for name, data in packages.contents(source, ".h", ".hip").items())
    key = ("hip", text, source.name, arch, repr(sorted(macros.items())), repr((_FLAGS, *flags)), version(), VERSION)
    return get_or_build(key, lambda: _compile(source, arch, macros, flags))


def _compile(source: packages.Source, arch: str, macros: Mapping[str, str | int], flags: Sequence[str]) -> Built:
    what = f"{source.name} for {arch} with {dict(macros)}"
    with (
        tempfile.TemporaryDirectory(prefix="lightning-indexer-") as folder,
        packages.on_disk(source, ".h", ".hip") as file,
    ):
        text = Path(folder, "kernel.s")
        command = [*tools().clang, "-x", "hip", f"--offload-arch={arch}", "--cuda-device-only", *_FLAGS, *flags]
        command += [f"-D{name}={value}" for name, value in macros.items()]
        _run([*command, "-I", str(file.parent), "-S", str(file), "-o", str(text)], what)
        isa = repair(text.read_text(), arch)
    code_object = cdna.code_object(_assemble(isa, arch))
    info = code_object.kernel()
    names = tuple(
        argument.name.removesuffix(".coerce") for argument in info.arguments if not argument.kind.startswith("hidden_")
    )
    return Built(code_object, info.name, isa, 0, "hip", version(), names)


def assemble(asm_text: str, arch: str) -> CodeObject:
    """Assembles and links AMDGPU assembly, e.g. what a compiler printed.

    Args:
        asm_text: a whole file: ``.amdgcn_target`` is not needed, ``.amdhsa_kernel`` is.
        arch: e.g. ``gfx942``.

    Raises:
        CompileError: with the assembler's message.
    """
    key = ("assemble", asm_text, arch, version())
    return artifacts.get_or_decode(key, ".hsaco", lambda: _assemble(asm_text, arch), cdna.code_object)


def _assemble(asm_text: str, arch: str) -> bytes:
    with tempfile.TemporaryDirectory(prefix="lightning-indexer-") as folder:
        source, linked = Path(folder, "kernel.s"), Path(folder, "kernel.hsaco")
        source.write_text(asm_text)
        object_file = str(source.with_suffix(".o"))
        _run(
            (*tools().clang, "-x", "assembler", *_target(arch), _CODE_OBJECT, "-c", str(source), "-o", object_file),
            f"assembly for {arch}",
        )
        _run((*tools().lld, "-shared", object_file, "-o", str(linked)), f"link for {arch}")
        return linked.read_bytes()


def _target(arch: str) -> tuple[str, ...]:
    return "--target=amdgcn-amd-amdhsa", f"-mcpu={arch}"


def _run(command: Sequence[str], what: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    except OSError as error:
        raise CompileError(f"{what} failed ({tools().name}): {command[0]} cannot be run: {error.strerror}") from error
    if done.returncode != 0:
        raise CompileError(f"{what} failed ({tools().name}):\n{done.stderr.strip() or done.stdout.strip()}")
    return done.stdout


@functools.cache
def _tools() -> Tools | None:
    """ROCm's compiler where it knows every arch here, else that of ``ziglang``, else ROCm's."""
    old = list(_rocm_tools())
    for found in old:
        if _knows_every_arch(found):
            return found
    if packages.installed("ziglang"):
        zig = (sys.executable, "-m", "ziglang")
        return Tools((*zig, "clang"), (*zig, "ld.lld"), "clang of the ziglang package")
    return old[0] if old else None


def _rocm_tools() -> Iterator[Tools]:
    """Of every ROCm that there is."""
    for root in (envs.rocm_path(), "/opt/rocm", _rocm_of_path()):
        if root is None:
            continue
        clang = Path(root, "llvm", "bin", "clang")
        with contextlib.suppress(OSError):  # a folder that may not be looked into
            if clang.exists():
                yield Tools((str(clang),), (str(clang.with_name("ld.lld")),), f"ROCm in {root}")


def _knows_every_arch(tools: Tools) -> bool:
    """By the newest of those that kernels here are compiled for; ROCm before 7.0 does not have CDNA4."""
    newest = [arch for arch in Arch.known() if arch.simulated][-1]
    line = "v_mfma_scale_f32_32x32x64_f8f6f4 v[0:15], v[16:23], v[24:31], 0, v32, v32"
    command = [*tools.clang, "-x", "assembler", *_target(newest.name), "-c", "-", "-o", os.devnull]
    try:
        return subprocess.run(command, input=line, capture_output=True, text=True, check=False).returncode == 0
    except OSError:  # it cannot be run
        return False


def _rocm_of_path() -> str | None:
    hipcc = shutil.which("hipcc")
    return str(Path(hipcc).resolve().parent.parent) if hipcc else None
