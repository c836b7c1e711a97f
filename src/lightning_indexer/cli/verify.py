"""``lightning-indexer verify``: the sweeps of every operation, on a device or in the simulator."""

from __future__ import annotations

import os
import shlex
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import torch
import typer
from rich.table import Table

from lightning_indexer.arch import Arch, arch_of
from lightning_indexer.check.cases import WINDOWS
from lightning_indexer.cli import common
from lightning_indexer.cli.common import err, out
from lightning_indexer.selection import registry

if TYPE_CHECKING:
    from lightning_indexer.check.verify import Outcome, SimulatedCase, Summary

# Failures of a backend that are shown one by one; the others are counted.
SHOWN = 10


def verify(
    device: Annotated[str | None, typer.Option(help="cpu, cuda or cuda:1. Default: cuda where there is one.")] = None,
    backend: Annotated[
        list[str] | None, typer.Option(help="A backend's name; repeat for several. Default: all that can run.")
    ] = None,
    operation: Annotated[list[str] | None, typer.Option(help="Only this operation; repeat for several.")] = None,
    full: Annotated[
        bool, typer.Option("--full", help="All 14 shapes and more; for a GPU. Default: small ones.")
    ] = False,
    window: Annotated[list[str] | None, typer.Option(help="Only this window; repeat for several.")] = None,
    heads: Annotated[list[str] | None, typer.Option(help="Only these H, comma-separated; or repeat.")] = None,
    head_dim: Annotated[list[str] | None, typer.Option(help="Only these D, comma-separated; or repeat.")] = None,
    case: Annotated[list[str] | None, typer.Option(help="Only cases whose text holds this.")] = None,
    fail_fast: Annotated[bool, typer.Option("--fail-fast", "-x", help="Stop at the first failure.")] = False,
    arch: Annotated[
        str | None, typer.Option(help=f"{common.SIMULATED_ARCHS}: simulate that arch's kernels, on any machine.")
    ] = None,
    jobs: Annotated[int | None, typer.Option(min=1, help="Processes to simulate in. Default: one a CPU core.")] = None,
    seed: Annotated[int, typer.Option(help="Of operands and of the order of waves, in the simulator.")] = 0,
) -> None:
    """Check backends against the float32 oracle over the whole sweep. Exit status 1 if any case fails.

    Poisoned and guarded outputs, exact -inf masks, two accuracy levels, every logit, 20 bitwise repeats on a sample.
    With `--arch`, AMD kernels are compiled for that arch and executed in the simulator, at small shapes; no GPU is
    needed.

    Examples: `lightning-indexer verify`, `lightning-indexer verify --device cuda --full --backend triton-portable`,
    `lightning-indexer verify --arch gfx942 --backend triton-portable`
    """
    from lightning_indexer.check import verify as checks

    with common.bad_parameter("--operation"):
        operations = [checks.suite(name).operation for name in dict.fromkeys(operation or checks.operations())]
    for name in window or []:
        common.one_of("--window", name, WINDOWS)
    chosen_heads = _sizes("--heads", heads)
    chosen_dims = _sizes("--head-dim", head_dim)
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
    summaries = checks.summarise(found)
    _print(f"verify on {title}: worst calc_diff", summaries, simulated=arch is not None, several=len(operations) > 1)
    if arch is not None:
        err.print(f"{time.perf_counter() - started:.0f} s; instructions a second are those of one process")
    for line in notes:
        out.print(line, markup=False, highlight=False)
    for reason, cases in checks.left_out(found).items():
        out.print(f"{reason}: {len(cases)} cases: {'; '.join(cases)}", markup=False, highlight=False)
    _print_failures(found, repeat)
    if len(found) < total and not fail_fast:
        raise typer.Exit(130)
    if not all(s.good for s in summaries) or not needed <= {(s.operation, s.backend) for s in summaries}:
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
    with common.bad_parameter("--backend"):
        asked = [registry.get(name).name for name in dict.fromkeys(names)] if names else None
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


def _print(title: str, summaries: Sequence[Summary], *, simulated: bool, several: bool) -> None:
    table = Table(title=title, title_justify="left")
    for column in (["operation"] if several else []) + ["backend", "cases", "passed", "failed"]:
        table.add_column(column)
    more = ["diff fp32", "diff bf16", "one logit"]
    more += ["wave-instructions", "a second"] if simulated else ["to unquantised"]
    for column in ([] if simulated else ["not supported", "dropped", "repeated"]) + more:
        table.add_column(column)
    for s in summaries:
        cells = ([s.operation] if several else []) + [s.backend, str(s.cases), str(s.count["pass"])]
        cells.append(str(s.count["fail"]))
        if not simulated:
            cells += [str(s.count["unsupported"]), str(s.count["dropped"]), str(s.repeated)]
        cells += [_number(s.diff.get(dtype)) for dtype in (torch.float32, torch.bfloat16)]
        cells.append(_number(s.worst.get(torch.float32)))
        if simulated:
            cells += [f"{s.instructions:,}", f"{s.instructions / s.seconds:,.0f}" if s.seconds else "-"]
        else:
            cells.append(_number(s.diff_unquantised))
        table.add_row(*cells)
    out.print(table)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.1e}"


def _print_failures(outcomes: Sequence[Outcome], repeat: Sequence[str]) -> None:
    """The first failures of each backend, how many there are more, and the command that repeats the first one."""
    failed: dict[str, list[Outcome]] = {}
    for outcome in outcomes:
        if outcome.status == "fail":
            failed.setdefault(outcome.backend, []).append(outcome)
    for backend, mine in failed.items():
        for outcome in mine[:SHOWN]:
            out.print(_failure(outcome), markup=False, highlight=False, soft_wrap=True)
        if len(mine) > SHOWN:
            out.print(f"and {len(mine) - SHOWN} failures of {backend} more", markup=False, highlight=False)
        text = str(mine[0].case).rsplit(" seed=", 1)[0]
        command = ["lightning-indexer", "verify", *repeat, "--operation", mine[0].operation, "--backend", backend]
        line = shlex.join([*command, "--case", text])
        out.print(f"repeat the first of {backend} with: {line}", markup=False, highlight=False, soft_wrap=True)


def _sizes(option: str, given: list[str] | None) -> list[int] | None:
    return [number for part in given for number in common.ints(option, part)] if given else None
