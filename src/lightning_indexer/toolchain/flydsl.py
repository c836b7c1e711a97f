"""FlyDSL kernels to AMD code objects: compiled only, in a process of their own.

FlyDSL reads its target and its options from the environment, and leaves the code object in its dump of the last pass.
Facts of version 0.4.2; it links with ``$ROCM_PATH/llvm/bin/ld.lld``, which may be the one of PyPI's ``ziglang``.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from lightning_indexer import envs
from lightning_indexer.toolchain import amdgpu_clang
from lightning_indexer.toolchain.built import Built, CompileError, get_or_build
from lightning_indexer.toolchain.code_object import CodeObject


def missing() -> str | None:
    """None, or what to install, with the command."""
    if importlib.util.find_spec("flydsl") is None:
        return "FlyDSL is not installed: pip install 'lightning-indexer[amd,flydsl]'"
    return amdgpu_clang.missing()


def compile_flydsl(
    factory: str, parameters: Mapping[str, Any], arch: str, *, argument_names: tuple[str, ...] = ()
) -> Built:
    """Compiles the kernel that a factory makes, from the disk cache where it is there.

    The key: every ``.py`` file beside the factory's, its name and parameters, and FlyDSL's version.

    Args:
        factory: ``package.module:function``. ``function(**parameters)`` returns the ``@flyc.jit`` launcher and the
            tuple of arguments that specialise it; tensors are on the CPU, the stream is ``fx.Stream(None)``.
        parameters: for the factory; what JSON can hold.
        arch: e.g. ``gfx950``.
        argument_names: what to call the kernel's arguments; FlyDSL does not keep their names.

    Raises:
        CompileError: something is not installed, or FlyDSL refused the kernel; the message holds its error.
        CodeObjectError: the launcher launches several kernels.
    """
    if (reason := missing()) is not None:
        raise CompileError(reason)
    module, _, _ = factory.partition(":")
    spec = importlib.util.find_spec(module)
    if spec is None or spec.origin is None:
        raise CompileError(f"factory: got {factory!r}, and there is no such module")
    sources = sorted(Path(spec.origin).parent.glob("*.py"))
    text = b"".join(path.name.encode() + b"\0" + path.read_bytes() for path in sources)
    compiler = f"FlyDSL {metadata.version('flydsl')}"
    key = ("flydsl", text, factory, json.dumps([parameters, argument_names], sort_keys=True), arch, compiler)

    def build() -> Built:
        elf, isa = _compile(factory, parameters, arch)
        code_object = CodeObject(elf)
        return Built(code_object, code_object.kernel().name, isa, 0, "flydsl", compiler, argument_names)

    return get_or_build(key, build)


def _compile(factory: str, parameters: Mapping[str, Any], arch: str) -> tuple[bytes, str]:
    with tempfile.TemporaryDirectory(prefix="lightning-indexer-") as folder:
        dump = Path(folder, "dump")
        variables = {
            "COMPILE_ONLY": "1", "ARCH": arch, "FLYDSL_GPU_ARCH": arch, "FLYDSL_DUMP_IR": "1",
            "FLYDSL_DUMP_DIR": str(dump), "FLYDSL_RUNTIME_ENABLE_CACHE": "0",
            "ROCM_PATH": str(_linker(Path(folder, "rocm"))), "PYTHONPATH": os.pathsep.join(sys.path),
        }  # fmt: skip
        done = subprocess.run(
            [sys.executable, "-m", __name__], input=json.dumps([factory, dict(parameters)]), text=True,
            env=envs.for_process(**variables), capture_output=True, check=False,
        )  # fmt: skip
        if done.returncode != 0:
            raise CompileError(f"{factory} for {arch} with {dict(parameters)}:\n{done.stderr.strip()}")
        objects, texts = sorted(dump.glob("*/*gpu_module_to_binary.mlir")), sorted(dump.glob("*/*final_isa.s"))
        if len(objects) != 1 or len(texts) != 1:
            raise CompileError(f"{factory} for {arch}: FlyDSL dumped {len(objects)} code objects, expected one")
        return _embedded(objects[0].read_text()), texts[0].read_text()


def _linker(root: Path) -> Path:
    """A folder that looks like ROCm's as far as FlyDSL asks: it holds the linker."""
    script = root / "llvm" / "bin" / "ld.lld"
    script.parent.mkdir(parents=True)
    script.write_text(f'#!/bin/sh\nexec {shlex.join(amdgpu_clang.tools().lld)} "$@"\n')
    script.chmod(0o755)
    return root


def _embedded(text: str) -> bytes:
    """The code object in MLIR's text: a string in which bytes that do not print are a backslash and two hex digits."""
    match = re.search(r'\bbin = "((?:[^"\\]|\\\\|\\[0-9A-F]{2})*)"', text)
    if match is None:
        raise CompileError("FlyDSL's dump holds no code object")
    return re.sub(
        rb"\\(\\|[0-9A-F]{2})",
        lambda escape: b"\\" if escape[1] == b"\\" else bytes([int(escape[1], 16)]),
        match[1].encode(),
    )


def _main() -> None:
    """In the process of its own: compiles what standard input names."""
    import flydsl.compiler as flyc

    factory, parameters = json.load(sys.stdin)
    module, _, function = factory.partition(":")
    launcher, arguments = getattr(importlib.import_module(module), function)(**parameters)
    flyc.compile(launcher, *arguments)


if __name__ == "__main__":
    _main()
