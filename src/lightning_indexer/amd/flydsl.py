"""FlyDSL kernels to AMD code objects: compiled only, in a process for each arch.

FlyDSL reads its target and its options from the environment, and leaves the text of the kernel in a dump, which is
repaired and assembled here. Facts of version 0.4.2; it links with ``$ROCM_PATH/llvm/bin/ld.lld``, which may be the one
of PyPI's ``ziglang``.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import itertools
import json
import multiprocessing.util
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning_indexer import envs, packages
from lightning_indexer.amd import clang as amdgpu_clang
from lightning_indexer.amd.built import Built, get_or_build
from lightning_indexer.amd.repair import VERSION, repair
from lightning_indexer.artifacts import CompileError


def missing() -> str | None:
    """None, or what to install, with the command."""
    if not packages.installed("flydsl"):
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
        arch: e.g. ``gfx942``.
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
    file = Path(spec.origin)
    source = file if file.exists() else packages.PackedFile(spec.parent or "", file.name)
    text = b"".join(name.encode() + b"\0" + data for name, data in packages.contents(source, ".py").items())
    compiler = f"FlyDSL {packages.version('flydsl')}"
    key = ("flydsl", text, factory, json.dumps([parameters, argument_names], sort_keys=True), arch, compiler, VERSION)

    def build() -> Built:
        what = f"{factory} for {arch} with {dict(parameters)}"
        while (printed := _process(arch, text).compile(what, factory, parameters)) is None:
            pass  # another thread was interrupted, and its process ended with it
        isa = repair(printed, arch)
        code_object = amdgpu_clang.assemble(_portable(isa), arch)
        return Built(code_object, code_object.kernel().name, isa, 0, "flydsl", compiler, argument_names)

    return get_or_build(key, build)


class _Process:
    """A process that compiles for one arch: importing FlyDSL takes longer than compiling a kernel.

    Requests and answers are lines of JSON on its standard input and output; it ends with its input. A fork of the
    process that started it leaves it, and its folder, alone.
    """

    def __init__(self, arch: str) -> None:
        self._owner, self.ended = os.getpid(), False
        self._folder = root = Path(tempfile.mkdtemp(prefix="lightning-indexer-"))
        self._errors = (root / "stderr").open("w+")
        self._count = itertools.count()
        variables = {
            "COMPILE_ONLY": "1", "ARCH": arch, "FLYDSL_GPU_ARCH": arch, "FLYDSL_DUMP_IR": "1",
            "FLYDSL_RUNTIME_ENABLE_CACHE": "0", "ROCM_PATH": str(_linker(root / "rocm")),
            "PYTHONPATH": os.pathsep.join(sys.path),
        }  # fmt: skip
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__], env=envs.for_process(**variables), text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors,
        )  # fmt: skip
        self._lock = threading.Lock()
        # As atexit, but also at the end of a worker of multiprocessing.
        self._at_exit = multiprocessing.util.Finalize(None, self.close, exitpriority=10)

    def compile(self, what: str, factory: str, parameters: Mapping[str, Any]) -> str | None:
        """The text of a kernel, None where the process has ended; errors say ``what`` it is."""
        with self._lock:
            if self.ended:
                return None
            dump = self._folder / str(next(self._count))
            request = {"factory": factory, "parameters": dict(parameters), "dump": str(dump), "path": sys.path}
            error = self._ask(json.dumps(request))
            if error:
                raise CompileError(f"{what}:\n{error.strip()}")
            texts = sorted(dump.glob("*/*final_isa.s"))
            if len(texts) != 1:
                raise CompileError(f"{what}: FlyDSL dumped {len(texts)} kernels, expected one")
            found = texts[0].read_text()
            shutil.rmtree(dump, ignore_errors=True)
            return found

    def _ask(self, line: str) -> str:
        """The error that came of a request, empty if none."""
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        try:
            with contextlib.suppress(BrokenPipeError):
                stdin.write(line + "\n")
                stdin.flush()
            answer = stdout.readline()
        except BaseException:  # an interrupt: the answer is still to come, and would be taken for the next one's
            self._process.kill()
            self.close()
            raise
        if not answer:  # LLVM ends the process on some errors; a new one starts with the next kernel
            self._process.wait()
            self._errors.seek(0)
            text = f"the compiler ended with {self._process.returncode}: {self._errors.read()}"
            self.close()
            return text
        return str(json.loads(answer)["error"])

    def close(self) -> None:
        """Ends the process."""
        if self.ended or self._owner != os.getpid():
            return
        self.ended = True
        self._at_exit.cancel()
        self._process.communicate()
        self._errors.close()
        shutil.rmtree(self._folder, ignore_errors=True)


_processes: dict[tuple[str, bytes, int], _Process] = {}


def _process(arch: str, text: bytes) -> _Process:
    """The process for kernels of these sources, which it has imported. A fork needs one of its own."""
    key = (arch, text, os.getpid())
    if key not in _processes or _processes[key].ended:
        _processes[key] = _Process(arch)
    return _processes[key]


def _linker(root: Path) -> Path:
    """A folder that looks like ROCm's as far as FlyDSL asks: it holds the linker."""
    script = root / "llvm" / "bin" / "ld.lld"
    script.parent.mkdir(parents=True)
    script.write_text(f'#!/bin/sh\nexec {shlex.join(amdgpu_clang.tools().lld)} "$@"\n')
    script.chmod(0o755)
    return root


def _portable(isa: str) -> str:
    """The text as code object V5, which ROCm before 7 loads too, and less the directive that names its target, which
    LLVM versions spell differently."""
    isa = re.sub(r"(?m)^\s*\.amdhsa_code_object_version.*$", ".amdhsa_code_object_version 5", isa)
    return re.sub(r"(?m)^\s*\.amdgcn_target.*$", "", isa)


def _main() -> None:
    """In the process of its own: compiles what each line of standard input names."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # FlyDSL prints on standard output
    for line in sys.stdin:
        request = json.loads(line)
        error = ""
        try:
            _compile(request["factory"], request["parameters"], request["dump"], request["path"])
        except Exception:  # whatever FlyDSL or the factory raises goes to the caller
            error = traceback.format_exc()
        answers.write(json.dumps({"error": error}) + "\n")
        answers.flush()


def _compile(factory: str, parameters: dict[str, Any], dump: str, path: list[str]) -> None:
    os.environ["FLYDSL_DUMP_DIR"], sys.path[:] = dump, path
    import flydsl.compiler as flyc

    module, _, function = factory.partition(":")
    launcher, arguments = getattr(importlib.import_module(module), function)(**parameters)
    flyc.compile(launcher, *arguments)


if __name__ == "__main__":
    _main()
