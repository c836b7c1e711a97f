"""``lightning-indexer verify``: the sweeps of every operation, on a device or in the simulator."""

from __future__ import annotations

import os
import shlex
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import torch
import typer

from lightning_indexer.arch import Arch, arch_of
from lightning_indexer.check.cases import WINDOWS
from lightning_indexer.cli import common
from lightning_indexer.cli.common import (
    BackendOption,
    DeviceOption,
    HeadDimOption,
    HeadsOption,
    JsonOption,
    WindowOption,
    err,
)
from lightning_indexer.cli.tables import Column, Table
from lightning_indexer.selection import registry

if TYPE_CHECKING:
    from lightning_indexer.check.verify import Outcome, SimulatedCase, Summary

# Failures of a backend that are shown one by one, the others are counted; and maps in one picture.
SHOWN = 10
DRAWN = 8


def verify(
    device: DeviceOption = None,
    backend: BackendOption = None,
    operation: Annotated[
        list[str] | None, typer.Option("--operation", "--operations", help="Only these operations.")
    ] = None,
    full: Annotated[
        bool, typer.Option("--full", help="All 14 shapes and more; for a GPU. Default: small ones.")
    ] = False,
    window: WindowOption = None,
    heads: HeadsOption = None,
    head_dim: HeadDimOption = None,
    case: Annotated[list[str] | None, typer.Option(help="Only cases whose text holds this, whole; or repeat.")] = None,
    fail_fast: Annotated[bool, typer.Option("--fail-fast", "-x", help="Stop at the first failure.")] = False,
    arch: Annotated[
        str | None, typer.Option(help=f"{common.SIMULATED_ARCHS}: simulate that arch's kernels, on any machine.")
    ] = None,
    jobs: Annotated[int | None, typer.Option(min=1, help="Processes to simulate in. Default: one a CPU core.")] = None,
    seed: Annotated[int, typer.Option(help="Of operands and of the order of waves, in the simulator.")] = 0,
    picture: Annotated[
        Path | None, typer.Option(help="Where a PNG goes that shows which positions are wrong, if any are.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Check backends against the float32 oracle over the whole sweep.

    Exit status 1 if any case fails, or none of a backend runs; 130 where it was stopped.

    Poisoned and guarded outputs, exact -inf masks, two accuracy levels, every logit, 20 bitwise repeats on a sample.
    With `--arch`, AMD kernels are compiled for that arch and executed in the simulator, at small shapes; no GPU is
    needed.

    Examples: `lightning-indexer verify`, `lightning-indexer verify --device cuda --full --backend triton-portable`,
    `lightning-indexer verify --device cuda --heads 32,64 --window causal --fail-fast --picture wrong.png`,
    `lightning-indexer verify --arch gfx942 --backend triton-portable`
    """
    from lightning_indexer.check import verify as checks

    with common.bad_parameter("--operation"):
        asked = common.parts("--operation", operation or checks.operations())
        operations = [checks.suite(name).operation for name in dict.fromkeys(asked)]
    window = common.names("--window", window, WINDOWS) if window else None
    chosen_heads = common.ints("--heads", heads) if heads else None
    chosen_dims = common.ints("--head-dim", head_dim) if head_dim else None
    backend = common.backend_names(backend)
    if picture is not None:
        common.writable_file("--picture", picture)
    only = {"window": window, "heads": chosen_heads, "head_dim": chosen_dims}
    if arch is not None:
        if device is not None or full:
            raise typer.BadParameter("the simulator takes neither --device nor --full", param_hint="--arch")
        repeat = ["--arch", arch, "--seed", str(seed)]
        ran = _simulated(operations, common.simulated_arch(arch), backend, only, case, jobs, seed)
    else:
        where = common.device(device)
        repeat = ["--device", str(where), *(["--full"] if full else [])]
        ran = _on_device(operations, where, backend, only, case, full)
    title, total, outcomes, notes, needed = ran
    started = time.perf_counter()
    found = _watch(title, total, outcomes, fail_fast)
    seconds = time.perf_counter() - started
    summaries = checks.summarise(found)
    good = all(s.good for s in summaries) and needed <= {(s.operation, s.backend) for s in summaries}
    stopped = len(found) < total and not fail_fast
    if arch is not None:
        err.print(f"{seconds:.0f} s; instructions a second are those of one process")
    if as_json:
        common.show_json(_document(title, total, found, summaries, notes, repeat, seconds, good and not stopped))
    else:
        heading = f"verify on {title}: worst calc_diff"
        common.show(_table(heading, summaries, simulated=arch is not None, several=len(operations) > 1))
        common.lines(notes)
        for reason, left in checks.left_out(found).items():
            common.lines([f"{reason}: {len(left)} cases: {'; '.join(left)}"])
        _print_failures(found, repeat)
    _draw(found, picture)
    if stopped:
        raise typer.Exit(130)
    if not good:
        raise typer.Exit(1)


# What a runner is about to do: title, number of outcomes, the outcomes, lines to print behind the table, and which
# (operation, backend) have to be among them.
_Ran = tuple[str, int, "Iterator[Outcome]", list[str], set[tuple[str, str]]]


def _on_device(
    operations: Sequence[str], where: torch.device, names: list[str] | None, only: Mapping[str, Sequence[Any] | None],
    text: list[str] | None, full: bool,
) -> _Ran:  # fmt: skip
    from lightning_indexer.bench import environment
    from lightning_indexer.check import device as runner
    from lightning_indexer.check import verify as checks

    arch = arch_of(where)
    asked = names or None
    work, needed = [], set()
    for operation in operations:
        suite = checks.suite(operation)
        cases = checks.select(suite.cases(full=full), **only, text=text)
        backends = asked or checks.backends_of(suite, cases, arch)
        backends = [name for name in backends if operation in registry.get(name).kernels]
        if cases and backends:
            work.append((suite, cases, backends))
            needed |= {(operation, name) for name in backends}
    total = sum(len(cases) * len(backends) for _, cases, backends in work)
    if not total:
        raise typer.BadParameter("no case has these heads, head dims and windows")
    outcomes = (outcome for suite, cases, backends in work for outcome in runner.run(suite, cases, backends, where))
    return environment.device_name(where), total, outcomes, [], needed


def _simulated(
    operations: Sequence[str], arch: Arch, names: list[str] | None, only: Mapping[str, Sequence[Any] | None],
    text: list[str] | None, jobs: int | None, seed: int,
) -> _Ran:  # fmt: skip
    from lightning_indexer.amd import cdna
    from lightning_indexer.check import simulated as runner
    from lightning_indexer.check import verify as checks

    if (reason := cdna.simulator_missing()) is not None:
        raise typer.BadParameter(reason, param_hint="--arch")
    cases: list[SimulatedCase] = []
    notes: list[str] = []
    needed: set[tuple[str, str]] = set()
    for operation in operations:
        here = (
            [n for n in names if isinstance(registry.kernels(operation).get(n), registry.Compiled)] if names else None
        )
        if names and not here and operation != operations[0]:
            continue  # the first one says what is wrong with a name
        backends = common.installed(common.compiled_kernels(here or names, arch, operation), names, notes)
        needed |= {(operation, name) for name in backends}
        suite = checks.suite(operation)
        for found in suite.simulated_cases(
            arch, list(backends), seed=seed, thorough=bool(names), heads=only["heads"], head_dims=only["head_dim"]
        ):
            if checks.select([found.case], **only) and (text is None or any(part in str(found) for part in text)):
                cases.append(found)
    cases, refused = runner.supported(cases)
    notes += [f"not supported by {reason}: {count} cases" for reason, count in refused.items()]
    if not cases:
        raise typer.BadParameter("; ".join([*refused, *notes]) or "no case is left", param_hint="--arch")
    outcomes = runner.run(cases, jobs or os.cpu_count() or 1)
    if text is not None or any(only.values()):
        needed &= {(found.operation, found.backend) for found in cases}
    return f"simulated {arch.name}", len(cases), outcomes, notes, needed


def _watch(title: str, total: int, outcomes: Iterator[Outcome], fail_fast: bool) -> list[Outcome]:
    """Runs what is to run; the outcomes until then where the user stops it."""
    found: list[Outcome] = []
    failed = Counter[str]()
    with common.progress() as progress, common.compile_errors():
        task = progress.add_task(f"verify on {title}", total=total)
        try:
            for outcome in outcomes:
                found.append(outcome)
                progress.update(task, advance=1, description=f"{outcome.backend} {outcome.case}")
                if outcome.status == "fail":
                    failed[outcome.backend] += 1
                    if failed[outcome.backend] <= SHOWN:
                        progress.console.print(_failure(outcome), markup=False, highlight=False, soft_wrap=True)
                    if fail_fast:
                        break
        except KeyboardInterrupt:
            err.print(f"stopped after {len(found)} of {total} cases")
    return found


def _failure(outcome: Outcome) -> str:
    backend = "" if outcome.backend in str(outcome.case) else f"{outcome.backend} "
    return f"FAIL {backend}{outcome.case}: {outcome.detail}"


def _table(title: str, summaries: Sequence[Summary], *, simulated: bool, several: bool) -> Table:
    columns: list[Column | str] = [*(["operation"] if several else []), "backend", "cases", "passed", "failed"]
    columns += [] if simulated else ["not supported", "dropped", "repeated"]
    columns += [Column(name, format=".1e") for name in ("diff fp32", "diff bf16", "one logit")]
    simulation = ["wave-instructions", "a second"]
    columns += (
        [Column(name, format=",.0f") for name in simulation] if simulated else [Column("to unquantised", format=".1e")]
    )
    table = Table(columns, title)
    for s in summaries:
        cells: list[Any] = [*([s.operation] if several else []), s.backend, s.cases, s.count["pass"], s.count["fail"]]
        cells += [] if simulated else [s.count["unsupported"], s.count["dropped"], s.repeated]
        cells += [s.diff.get(dtype) for dtype in (torch.float32, torch.bfloat16)]
        cells.append(s.worst.get(torch.float32))
        speed = s.instructions / s.seconds if s.seconds else None
        cells += [s.instructions, speed] if simulated else [s.diff_unquantised]
        table.add(*cells)
    return table


def _document(
    title: str, total: int, found: Sequence[Outcome], summaries: Sequence[Summary], notes: Sequence[str],
    repeat: Sequence[str], seconds: float, good: bool,
) -> dict[str, Any]:  # fmt: skip
    """What ``--json`` prints."""
    from lightning_indexer.bench import environment
    from lightning_indexer.check import verify as checks

    failed = [o for o in found if o.status == "fail"]
    return {
        "environment": {"device": title, **environment.of_the_library()},
        "on": title,
        "good": good,
        "seconds": seconds,
        "cases": total,
        "done": len(found),
        "summary": [
            {
                "operation": s.operation, "backend": s.backend, "cases": s.cases, "count": s.count,
                "repeated": s.repeated, "diff": {str(dtype): value for dtype, value in s.diff.items()},
                "one_logit": {str(dtype): value for dtype, value in s.worst.items()},
                "diff_unquantised": s.diff_unquantised, "instructions": s.instructions,
            }
            for s in summaries
        ],
        "failures": [
            {
                "operation": o.operation, "backend": o.backend, "case": str(o.case), "detail": o.detail,
                "wrong": None if o.finding is None or o.finding.wrong is None else {
                    "shape": o.finding.wrong.shape, "count": o.finding.wrong.count, "first": o.finding.wrong.first,
                    "map": o.finding.wrong.map if number < DRAWN else [],
                },
                "repeat": _repeat(o, repeat),
            }
            for number, o in enumerate(failed)
        ],
        "left_out": {reason: len(cases) for reason, cases in checks.left_out(found).items()},
        "notes": list(notes),
    }  # fmt: skip


def _repeat(outcome: Outcome, repeat: Sequence[str]) -> str:
    """The command that runs one case again."""
    text = str(outcome.case).rsplit(" seed=", 1)[0]
    command = ["lightning-indexer", "verify", *repeat, "--operation", outcome.operation, "--backend", outcome.backend]
    return shlex.join([*command, "--case", text])


def _print_failures(outcomes: Sequence[Outcome], repeat: Sequence[str]) -> None:
    """The first failures of each backend, how many there are more, and the command that repeats the first one."""
    failed: dict[str, list[Outcome]] = {}
    for outcome in outcomes:
        if outcome.status == "fail":
            failed.setdefault(outcome.backend, []).append(outcome)
    for backend, mine in failed.items():
        for outcome in mine[:SHOWN]:
            common.say(_failure(outcome))
            if outcome.finding is not None and outcome.finding.wrong is not None:
                common.say(f"  {outcome.finding.wrong}")
        if len(mine) > SHOWN:
            common.say(f"and {len(mine) - SHOWN} failures of {backend} more")
        common.say(f"repeat the first of {backend} with: {_repeat(mine[0], repeat)}")


def _draw(outcomes: Sequence[Outcome], picture: Path | None) -> None:
    """The maps of the first failures, as many of each backend."""
    if picture is None:
        return
    from lightning_indexer.check import wrong

    maps: dict[str, list[tuple[str, wrong.WrongPositions]]] = {}
    for outcome in outcomes:
        if outcome.finding is not None and outcome.finding.wrong is not None:
            maps.setdefault(outcome.backend, []).append((_failure(outcome).split(":")[0], outcome.finding.wrong))
    drawn = [each for number in range(DRAWN) for mine in maps.values() for each in mine[number : number + 1]][:DRAWN]
    if not drawn:
        err.print("no picture: no position is wrong")
        return
    try:
        wrong.draw(drawn, picture)
    except ModuleNotFoundError:
        err.print("no picture: `pip install matplotlib` brings what draws it", markup=False, highlight=False)
        return
    err.print(f"wrote {picture}", markup=False, highlight=False, soft_wrap=True)
