"""Python in processes of its own: what needs Triton itself, where this process has Triton's interpreter; groups of
``torch.distributed``."""

from __future__ import annotations

import atexit
import datetime
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import ClassVar

ROOT = Path(__file__).resolve().parents[1]
SOURCES = (ROOT / "src", ROOT / "packages" / "cdna-sim" / "src")


def environment(**variables: str) -> dict[str, str]:
    """This process's, with the repository's packages in front and without ``TRITON_INTERPRET``."""
    found = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    found["PYTHONPATH"] = os.pathsep.join([*map(str, SOURCES), *filter(None, [os.environ.get("PYTHONPATH")])])
    return found | variables


def python(*arguments: str | Path, timeout: float = 900.0, **variables: str) -> str:
    """What :func:`program` prints; fails the test where its exit status is not 0."""
    done = program(*arguments, timeout=timeout, **variables)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def program(
    *arguments: str | Path, timeout: float = 900.0, **variables: str
) -> subprocess.CompletedProcess[str]:  # fmt: skip
    """Runs ``python`` with these arguments and variables, without ``TRITON_INTERPRET``.

    It is a fork of a process that has imported PyTorch and Triton, see forked.py: not for tests of what is imported,
    nor for Triton's interpreter.
    """
    return _Forks.of_this_process().run([str(each) for each in arguments], environment(**variables), timeout)


class _Forks:
    """The process that forks, one for each process of tests, from the first program on."""

    _known: ClassVar[dict[int, _Forks]] = {}

    @classmethod
    def of_this_process(cls) -> _Forks:
        found = cls._known.get(os.getpid())
        if found is None or found.process.poll() is not None:
            found = cls._known[os.getpid()] = cls()
        return found

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-W", "ignore::DeprecationWarning", str(Path(__file__).with_name("forked.py"))],
            env=environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        atexit.register(self.process.kill)

    def run(
        self, arguments: Sequence[str], environment: dict[str, str], timeout: float
    ) -> subprocess.CompletedProcess[str]:
        """Runs a program to its end, or for ``timeout`` seconds, after which it is killed."""
        assert self.process.stdin is not None
        with tempfile.TemporaryDirectory() as folder:
            output, errors = Path(folder, "output"), Path(folder, "errors")
            request = {"arguments": arguments, "environment": environment, "folder": str(Path.cwd()),
                       "output": str(output), "errors": str(errors)}  # fmt: skip
            self.process.stdin.write(json.dumps(request) + "\n")
            self.process.stdin.flush()
            child = int(self._line())
            killer = threading.Timer(timeout, os.kill, (child, signal.SIGKILL))
            killer.start()
            try:
                status = int(self._line())
            finally:
                killer.cancel()
            texts = [path.read_text() if path.exists() else "" for path in (output, errors)]
            return subprocess.CompletedProcess(list(arguments), status, *texts)

    def _line(self) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, f"the process that forks has ended, exit status {self.process.wait()}"
        return line


# What the server of a group's processes imports once, for all of them.
_IMPORTED = ["torch", "torch.distributed.tensor", "numpy", "pytest", "lightning_indexer.distributed"]


def in_gloo_group(ranks: int, check: Callable[[int, int], None]) -> None:
    """Runs ``check(rank, ranks)`` in a group of processes; what it raises in one is raised here."""
    import torch.multiprocessing as mp

    multiprocessing.set_forkserver_preload(_IMPORTED)
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(_member, (ranks, f"{folder}/group", check), nprocs=ranks, start_method="forkserver")


def _member(rank: int, ranks: int, path: str, check: Callable[[int, int], None]) -> None:
    import torch
    import torch.distributed as dist

    os.environ["TRITON_INTERPRET"] = "1"
    torch.set_num_threads(1)
    limit = datetime.timedelta(seconds=60)
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=ranks, timeout=limit)
    try:
        check(rank, ranks)
    finally:
        dist.destroy_process_group()
