"""Runs Python programs in forks of one process that has imported what they all import: PyTorch takes seconds.

    python forked.py

A request is a line of JSON on standard input: arguments as for ``python`` (``-c CODE …``, ``-m MODULE …``, ``FILE …``),
the whole environment, folder, and the files that take the child's output. The answer is a line with its process id, and
one with its exit status when it has ended.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import runpy
import sys
import traceback

# What is not installed is left to the program to miss. Kernels are imported by the programs: they read the environment.
IMPORTED = ("torch", "numpy", "triton", "triton.compiler", "cdna_sim", "lightning_indexer")


def child(request: dict) -> object:
    """Runs the program; what to end with."""
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environment"])
    for number, path in ((1, request["output"]), (2, request["errors"])):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), number)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    more = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path and path not in sys.path]
    sys.path[1:1] = more
    first, *rest = request["arguments"]
    try:
        if first == "-c":
            sys.argv, sys.path[0] = ["-c", *rest[1:]], ""
            module = sys.modules["__main__"] = type(sys)("__main__")
            exec(compile(rest[0], "<string>", "exec"), module.__dict__)
        elif first == "-m":
            sys.argv, sys.path[0] = rest, ""
            runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
        else:
            sys.argv, sys.path[0] = [first, *rest], os.path.dirname(first)  # noqa: PTH120
            runpy.run_path(first, run_name="__main__")
    except SystemExit as end:
        return end.code
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def main() -> None:
    for name in IMPORTED:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    for line in sys.stdin:
        request = json.loads(line)
        process = os.fork()
        if process == 0:
            sys.exit(child(request))  # as any interpreter ends, with what was registered for that
        print(process, flush=True)
        print(os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]), flush=True)


if __name__ == "__main__":
    main()
