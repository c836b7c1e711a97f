"""Python in processes of its own: what needs Triton itself, where this process has Triton's interpreter; groups of
``torch.distributed``."""

from __future__ import annotations

import datetime
import multiprocessing
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SOURCES = (ROOT / "src", ROOT / "packages" / "cdna-sim" / "src")


def environment(**variables: str) -> dict[str, str]:
    """This process's, with the repository's packages in front and without ``TRITON_INTERPRET``."""
    found = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    found["PYTHONPATH"] = os.pathsep.join([*map(str, SOURCES), *filter(None, [os.environ.get("PYTHONPATH")])])
    return found | variables


def python(*arguments: str, timeout: float | None = None, **variables: str) -> str:
    """What ``python`` with these arguments prints; fails the test where its exit status is not 0."""
    done = subprocess.run(
        [sys.executable, *arguments], env=environment(**variables), capture_output=True, text=True, check=False,
        timeout=timeout,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


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
