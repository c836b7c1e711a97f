"""What the commands share: the consoles, and how options are read."""

from __future__ import annotations

import contextlib
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar

import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from lightning_indexer.amd.built import CompileError
from lightning_indexer.arch import Arch, arch_of
from lightning_indexer.problems.cache_layout import CacheLayout
from lightning_indexer.problems.mqa_logits import FORMS, OPERATION, MqaLogitsProblem
from lightning_indexer.problems.mqa_topk import OPERATION as MQA_TOPK
from lightning_indexer.problems.mqa_topk import MqaTopKProblem
from lightning_indexer.problems.paged_mqa_logits import OPERATION as PAGED
from lightning_indexer.problems.paged_mqa_logits import PagedMqaLogitsProblem
from lightning_indexer.problems.paged_mqa_topk import OPERATION as PAGED_MQA_TOPK
from lightning_indexer.problems.paged_mqa_topk import PagedMqaTopKProblem
from lightning_indexer.problems.top_k import OPERATION as TOP_K
from lightning_indexer.problems.top_k import TopKProblem
from lightning_indexer.selection import registry as dispatch

Name = TypeVar("Name", bound=str)
# By operation, the shape by which backends are looked up where none is named: DeepSeek-V3.2's.
USUAL: dict[str, Any] = {
    OPERATION: MqaLogitsProblem(rows=4096, keys=32768, heads=64, head_dim=128),
    PAGED: PagedMqaLogitsProblem(64, 1, 32768, 64, 128, CacheLayout(), 512),
    TOP_K: TopKProblem(rows=4096, width=32768, k=2048),
}
USUAL[PAGED_MQA_TOPK] = PagedMqaTopKProblem(
    USUAL[PAGED]._replace(clean_logits=False), TopKProblem(rows=64, width=32768, k=2048, starts=False)
)
USUAL[MQA_TOPK] = MqaTopKProblem(USUAL[OPERATION]._replace(clean_logits=False), USUAL[TOP_K])

# A pipe or a log has no width: tables get theirs.
out = Console(width=None if sys.stdout.isatty() else 140)
err = Console(stderr=True)


def progress() -> Progress:
    """A bar on the error stream that is gone when its work is."""
    return Progress(
        TextColumn("{task.description}", table_column=None), BarColumn(bar_width=24), MofNCompleteColumn(),
        TimeElapsedColumn(), console=err, transient=True,
    )  # fmt: skip


@contextlib.contextmanager
def bad_parameter(option: str | None) -> Iterator[None]:
    """Turns the library's ValueError or TypeError about what the user typed into the command line's own error."""
    try:
        yield
    except (ValueError, TypeError) as error:
        raise typer.BadParameter(str(error), param_hint=option) from None


def device(name: str | None) -> torch.device:
    """The device that ``--device`` names, made the current one; by default a GPU where there is one."""
    with bad_parameter("--device"):
        try:
            found = torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))
        except RuntimeError as error:
            raise ValueError(str(error).splitlines()[0]) from None
        if found.type not in ("cpu", "cuda"):
            raise ValueError(f"got {name!r}, expected cpu, cuda or cuda:INDEX")
        if found.type == "cuda" and not torch.cuda.is_available():
            raise ValueError(f"got {name!r}, and PyTorch sees no GPU here")
        if found.type == "cuda" and (found.index or 0) >= torch.cuda.device_count():
            raise ValueError(f"got {name!r}, and PyTorch sees {torch.cuda.device_count()} GPUs here")
        if found.type == "cuda":
            found = torch.device("cuda", found.index or 0)
            torch.cuda.set_device(found)
        return found


def backends(names: list[str] | None, where: torch.device, operation: str = OPERATION) -> list[str]:
    """The backends that ``--backend`` names; by default all that can run the operation there."""
    with bad_parameter("--backend"):
        if not names:
            return [
                verdict.backend
                for verdict in dispatch.explain(USUAL[operation], arch_of(where))
                if verdict.reason is None
            ]
        return [dispatch.get(name).name for name in dict.fromkeys(names)]


# Those whose kernels the simulator runs.
SIMULATED = tuple(arch.name for arch in Arch.known() if arch.simulated)
SIMULATED_ARCHS = " or ".join(SIMULATED)


def simulated_arch(name: str) -> Arch:
    """The arch that ``--arch`` names, one whose kernels are compiled and simulated on any machine."""
    return Arch.parse(one_of("--arch", name, SIMULATED))


def compiled_kernels(names: list[str] | None, arch: Arch, operation: str = OPERATION) -> dict[str, Any]:
    """AMD kernels by the backends of these names; without names, of all that run the usual shape on ``arch``."""
    kernels = dispatch.kernels(operation)
    known: dict[str, Any] = {n: one for n, one in kernels.items() if isinstance(one, dispatch.Compiled)}
    with bad_parameter("--backend"):
        if not names:
            return {n: one for n, one in known.items() if one.supports(USUAL[operation], arch) is None}
        for name in names:
            if dispatch.get(name).name not in known:
                raise ValueError(f"{name} has no AMD kernels; these have: {', '.join(known)}")
        return {name: known[name] for name in dict.fromkeys(names)}


def installed(kernels: dict[str, Any], names: list[str] | None, notes: list[str]) -> dict[str, Any]:
    """The kernels whose backends are installed here. What another one lacks is an error where it was asked for by name,
    else a line of ``notes``."""
    found = {}
    for name, kernel in kernels.items():
        if (reason := dispatch.get(name).missing()) is None:
            found[name] = kernel
        elif names:
            raise typer.BadParameter(f"{name}: {reason}", param_hint="--backend")
        else:
            notes.append(f"left out: {name}: {reason}")
    return found


@contextlib.contextmanager
def compile_errors() -> Iterator[None]:
    """A kernel that does not compile, or a compiler that is missing, ends the command with the compiler's message."""
    try:
        yield
    except CompileError as error:
        err.print(str(error), markup=False, highlight=False, soft_wrap=True)
        raise typer.Exit(1) from None


def problem(shape: str, form: str) -> MqaLogitsProblem:
    """The problem of ``--shape M,N,H,D`` and ``--form``."""
    one_of("--form", form, FORMS)
    numbers = ints("--shape", shape)
    if len(numbers) != 4:
        raise typer.BadParameter(f"got {shape!r}, expected M,N,H,D", param_hint="--shape")
    rows, keys, heads, head_dim = numbers
    return sized(rows, keys, heads, head_dim, form)


def sized(rows: int, keys: int, heads: int, head_dim: int, form: str) -> MqaLogitsProblem:
    """The problem of these sizes; compressed logits as wide as there are keys."""
    width = keys if form == "compressed" else 0
    return MqaLogitsProblem(rows, keys, heads, head_dim, clean_logits=form == "clean", max_seqlen_k=width)


def writable_file(option: str, path: Path) -> None:
    """Refuses a file that cannot be written, before the work whose result it is to hold."""
    is_new = not path.exists()
    try:
        path.open("a").close()
    except OSError as error:
        raise typer.BadParameter(f"cannot write {path}: {error.strerror}", param_hint=option) from None
    if is_new:
        path.unlink()


def writable_folder(option: str, path: Path) -> None:
    """Makes a folder; refuses one that cannot be made or written into."""
    try:
        path.mkdir(mode=0o755, parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError as error:
        raise typer.BadParameter(f"cannot write into {path}: {error.strerror}", param_hint=option) from None


def ints(option: str, text: str) -> list[int]:
    """Positive integers, comma-separated."""
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        numbers = []
    if not numbers or min(numbers) < 1:
        raise typer.BadParameter(f"got {text!r}, expected positive integers, comma-separated", param_hint=option)
    return numbers


def shapes(text: str) -> tuple[tuple[int, int], ...]:
    """``S_QxS_K,S_QxS_K,…``"""
    found = []
    for part in text.split(","):
        numbers = part.lower().split("x")
        if len(numbers) != 2 or not all(number.strip().isdigit() and int(number) > 0 for number in numbers):
            raise typer.BadParameter(f"got {part!r}, expected S_QxS_K, e.g. 1024x8192", param_hint="--shapes")
        found.append((int(numbers[0]), int(numbers[1])))
    return tuple(found)


def names(option: str, text: str, known: tuple[Name, ...]) -> list[Name]:
    """Names out of ``known``, comma-separated."""
    return [one_of(option, part.strip(), known) for part in text.split(",")]


def one_of(option: str, name: str, known: tuple[Name, ...]) -> Name:
    """``name``, if it is one of ``known``."""
    for candidate in known:
        if candidate == name:
            return candidate
    raise typer.BadParameter(f"got {name!r}, expected one of {', '.join(known)}", param_hint=option)
