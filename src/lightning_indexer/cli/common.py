"""What the commands share: the consoles, and how options are read."""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar

import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from typer.core import TyperCommand

from lightning_indexer.amd.built import CompileError
from lightning_indexer.arch import Arch, arch_of
from lightning_indexer.check.cases import WINDOWS
from lightning_indexer.cli import tables
from lightning_indexer.cli.tables import Table
from lightning_indexer.cli.usual import USUAL
from lightning_indexer.problems.mqa_logits import FORMS, OPERATION, MqaLogitsProblem
from lightning_indexer.selection import registry as dispatch

Name = TypeVar("Name", bound=str)
# Those whose kernels the simulator runs.
SIMULATED = tuple(arch.name for arch in Arch.known() if arch.simulated)
SIMULATED_ARCHS = " or ".join(SIMULATED)

# One spelling for every verb. Lists take commas and repetition; the plural of an option's name is the same option.
DeviceOption = Annotated[str | None, typer.Option(help="cpu, cuda or cuda:1. Default: cuda where there is one.")]
BackendOption = Annotated[
    list[str] | None, typer.Option("--backend", "--backends", help="Only these backends. Default: all that can run.")
]
HeadsOption = Annotated[list[str] | None, typer.Option("--heads", help="H: numbers of heads.")]
HeadDimOption = Annotated[list[str] | None, typer.Option("--head-dim", "--head-dims", help="D: head dims.")]
WindowOption = Annotated[
    list[str] | None, typer.Option("--window", "--windows", help=f"Windows, of {', '.join(WINDOWS)}.")
]
FormOption = Annotated[list[str] | None, typer.Option("--form", "--forms", help=f"Of {', '.join(FORMS)}.")]
SimulatedOption = Annotated[str, typer.Option("--arch", help=f"{SIMULATED_ARCHS}; no such device is needed.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON document in place of text.")]

err = Console(stderr=True)


class OneValue(TyperCommand):
    """A command whose options that take one value are given once: the last of two would silently win."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if not ctx.resilient_parsing:
            order: list[Any] = list(self.make_parser(ctx).parse_args(args=list(args))[2])
            for parameter in order:
                single = not getattr(parameter, "multiple", True) and not getattr(parameter, "is_flag", True)
                if single and sum(other is parameter for other in order) > 1:
                    raise typer.BadParameter("given more than once, and it takes one value", ctx, parameter)
        return super().parse_args(ctx, args)


def say(text: str = "") -> None:
    """Prints to standard output. A reader that has gone (``| head``) takes nothing from the work or its exit status."""
    try:
        typer.echo(text)
    except BrokenPipeError:
        _drop_output()
    except OSError as error:  # a full disk
        _drop_output()
        raise SystemExit(f"lightning-indexer: standard output: {error.strerror}") from None


def _drop_output() -> None:
    """What is still in the buffer goes nowhere."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def lines(texts: Iterable[str]) -> None:
    """Prints lines, wrapped between words."""
    for text in texts:
        say(tables.wrap(text, tables.terminal_width(), "  "))


def show(*some: Table) -> None:
    """Prints tables in the width that there is."""
    say(tables.many(some, tables.terminal_width()))


def show_markdown(text: str) -> None:
    """Prints a report: as it is into a pipe; on a terminal with tables that fit it."""
    say(tables.markdown(text, tables.terminal_width()))


def show_json(document: Mapping[str, Any] | Sequence[Any]) -> None:
    """Prints the one document of ``--json``."""
    say(json.dumps(tables.plain(document), indent=1, allow_nan=False))


class Steps(Progress):
    """A bar with the time left on the error stream, gone when its work is; a line now and then where that is no
    terminal, so that a log shows how far a run is."""

    EVERY = 30.0

    def __init__(self) -> None:
        super().__init__(
            TextColumn("{task.description}"), BarColumn(bar_width=24), MofNCompleteColumn(), TimeElapsedColumn(),
            TimeRemainingColumn(), console=err, transient=True,
        )  # fmt: skip
        self._printed = time.monotonic()

    def update(self, task_id: Any, **changes: Any) -> None:
        super().update(task_id, **changes)
        now = time.monotonic()
        if err.is_terminal or now - self._printed < self.EVERY:
            return
        self._printed = now
        task = next(task for task in self.tasks if task.id == task_id)
        left = "" if task.time_remaining is None else f", about {task.time_remaining:.0f} s left"
        of = "" if task.total is None else f" of {task.total:.0f}"
        text = f"{task.completed:.0f}{of} after {task.elapsed or 0:.0f} s{left}: {task.description}"
        err.print(text, markup=False, highlight=False, soft_wrap=True)


def progress() -> Steps:
    """What shows how far a command is."""
    return Steps()


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
        wanted = name or ("cuda" if torch.cuda.is_available() else "cpu")
        if re.fullmatch(r"(cpu|cuda)(:\d{1,3})?", wanted) is None:
            raise ValueError(f"got {name!r}, expected cpu, cuda or cuda:INDEX")
        found = torch.device(wanted)
        if found.type == "cuda" and not torch.cuda.is_available():
            raise ValueError(f"got {name!r}, and PyTorch sees no GPU here")
        if found.type == "cuda" and (found.index or 0) >= torch.cuda.device_count():
            raise ValueError(f"got {name!r}, and PyTorch sees {torch.cuda.device_count()} GPUs here")
        if found.type == "cuda":
            found = torch.device("cuda", found.index or 0)
            torch.cuda.set_device(found)
        return found


def backend_names(given: list[str] | None) -> list[str] | None:
    """The names of ``--backend``, each once and known; None where it is not given."""
    if given is None:
        return None
    with bad_parameter("--backend"):
        return [dispatch.get(name).name for name in dict.fromkeys(parts("--backend", given))]


def backends(names: list[str] | None, where: torch.device, operation: str = OPERATION) -> list[str]:
    """The backends that ``--backend`` names; by default all that can run the operation there."""
    names = backend_names(names)
    with bad_parameter("--backend"):
        if not names:
            return [
                verdict.backend
                for verdict in dispatch.explain(USUAL[operation], arch_of(where))
                if verdict.reason is None
            ]
        return names


def simulated_arch(name: str) -> Arch:
    """The arch that ``--arch`` names, one whose kernels are compiled and simulated on any machine."""
    return Arch.parse(one_of("--arch", name, SIMULATED))


def compiled_kernels(names: list[str] | None, arch: Arch, operation: str = OPERATION) -> dict[str, Any]:
    """AMD kernels by the backends of these names; without names, of all that run the usual shape on ``arch``."""
    names = backend_names(names)
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


def problem(shape: str, heads: int, head_dim: int, form: str) -> MqaLogitsProblem:
    """The problem of ``--shape MxN`` or ``MxNxHxD``, ``--heads``, ``--head-dim`` and ``--form``."""
    one_of("--form", form, FORMS)
    numbers = shape.lower().replace(",", "x").split("x")
    if len(numbers) not in (2, 4) or not all(number.strip().isdecimal() and int(number) for number in numbers):
        raise typer.BadParameter(f"got {shape!r}, expected MxN or MxNxHxD, e.g. 4096x32768", param_hint="--shape")
    rows, keys, heads, head_dim = [*map(int, numbers), heads, head_dim][:4]
    return sized(rows, keys, heads, head_dim, form)


def sized(rows: int, keys: int, heads: int, head_dim: int, form: str) -> MqaLogitsProblem:
    """The problem of these sizes; compressed logits as wide as there are keys."""
    width = keys if form == "compressed" else 0
    return MqaLogitsProblem(rows, keys, heads, head_dim, clean_logits=form == "clean", max_seqlen_k=width)


def writable_file(option: str, path: Path) -> None:
    """Refuses a file that cannot be written, before the work whose result it is to hold; makes its folder."""
    is_new = not path.exists()
    try:
        path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
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


def parts(option: str, given: str | Iterable[str]) -> list[str]:
    """The items of a list option: commas between them, or the option again, or both."""
    texts = [given] if isinstance(given, str) else list(given)
    found = [part.strip() for text in texts for part in text.split(",")]
    if not all(found):
        raise typer.BadParameter(f"got {','.join(texts)!r}, which has an empty item", param_hint=option)
    return found


def ints(option: str, given: str | Iterable[str]) -> list[int]:
    """Positive integers, each once."""
    texts = parts(option, given)
    if not all(text.isdecimal() and int(text) for text in texts):
        raise typer.BadParameter(
            f"got {','.join(texts)!r}, expected positive integers, comma-separated", param_hint=option
        )
    return list(dict.fromkeys(map(int, texts)))


def shapes(given: str | Iterable[str], meaning: str = "MxN, e.g. 1024x8192", count: int = 2) -> list[tuple[int, ...]]:
    """``MxN,MxN,…``, or of more numbers."""
    found = []
    for part in parts("--shape", given):
        numbers = part.lower().split("x")
        if len(numbers) != count or not all(number.isdecimal() and 0 < int(number) < 2**31 for number in numbers):
            raise typer.BadParameter(f"got {part!r}, expected {meaning}", param_hint="--shape")
        found.append(tuple(map(int, numbers)))
    return list(dict.fromkeys(found))


def one_shape(text: str, meaning: str, count: int) -> list[tuple[int, ...]]:
    """The one shape of a verb that looks at one."""
    found = shapes(text, meaning, count)
    if len(found) != 1:
        raise typer.BadParameter(f"got {text!r}, expected one shape: {meaning}", param_hint="--shape")
    return found


def names(option: str, given: str | Iterable[str], known: tuple[Name, ...]) -> list[Name]:
    """Names out of ``known``, each once."""
    return [one_of(option, part, known) for part in dict.fromkeys(parts(option, given))]


def number(option: str, value: float, least: float) -> float:
    """A finite number of at least ``least``; NaN passes every comparison of a parser."""
    if not least <= value < float("inf"):
        raise typer.BadParameter(f"got {value:g}, expected a number of at least {least:g}", param_hint=option)
    return value


def one_of(option: str, name: str, known: tuple[Name, ...]) -> Name:
    """``name``, if it is one of ``known``."""
    for candidate in known:
        if candidate == name:
            return candidate
    raise typer.BadParameter(f"got {name!r}, expected one of {', '.join(known)}", param_hint=option)
