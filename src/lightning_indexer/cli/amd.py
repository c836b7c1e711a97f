"""Commands that look at AMD kernels on any machine: ``verify --arch``, ``resources``, ``disasm``, ``cost``."""

from __future__ import annotations

import contextlib
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import torch
import typer
from rich.table import Column, Table
from rich.text import Text

from lightning_indexer.amd import cdna
from lightning_indexer.amd.built import CompileError
from lightning_indexer.amd.simulated import ARCHS
from lightning_indexer.arch import Arch
from lightning_indexer.check.cases import FORMS, PERFORMANCE_SHAPES, WINDOWS
from lightning_indexer.cli import common
from lightning_indexer.cli.common import err, out
from lightning_indexer.problems.mqa_logits import MqaLogitsProblem
from lightning_indexer.selection import registry as dispatch

if TYPE_CHECKING:
    from lightning_indexer.check.simulated import SimulatedCase, SimulatedOutcome
    from lightning_indexer.model.cost import Kernel, Prediction
    from lightning_indexer.model.rates import Published

ArchOption = Annotated[str, typer.Option(help="gfx942 or gfx950; no such device is needed.")]


def verify(
    arch_name: str,
    names: list[str] | None,
    windows: list[str] | None,
    heads: list[int] | None,
    head_dims: list[int] | None,
    jobs: int | None,
    seed: int,
) -> None:
    """``verify --arch``: the sweep in the simulator; exit status 1 if any case fails."""
    from lightning_indexer.check import simulated

    arch = _amd_arch(arch_name)
    backends = list(_amd_kernels(names, arch))
    for reason in (cdna.simulator_missing(), *(dispatch.get(name).missing() for name in backends)):
        if reason is not None:
            raise typer.BadParameter(reason, param_hint="--arch")
    for name in windows or []:
        common.one_of("--window", name, WINDOWS)
    cases = simulated.sweep(
        arch.name, backends, windows=windows or WINDOWS, heads=heads, head_dims=head_dims, seed=seed,
        thorough=bool(names),
    )  # fmt: skip
    cases, refused = _supported(cases, arch)
    if not cases:
        raise typer.BadParameter("; ".join(refused) or "no case is left", param_hint="--arch")
    started = time.perf_counter()
    outcomes: list[SimulatedOutcome] = []
    with common.progress() as progress, _compile_errors():
        task = progress.add_task(f"verify on simulated {arch.name}", total=len(cases))
        for outcome in simulated.run(cases, jobs or os.cpu_count() or 1):
            outcomes.append(outcome)
            progress.update(task, advance=1, description=str(outcome.case))
            if outcome.faults:
                progress.console.print(f"FAIL {outcome.case}: {outcome.faults}", markup=False, soft_wrap=True)
    good = _print_outcomes(outcomes, backends, arch, time.perf_counter() - started)
    for reason, count in refused.items():
        out.print(f"not supported by {reason}: {count} cases", markup=False, highlight=False)
    if not good:
        raise typer.Exit(1)


def resources(
    arch: ArchOption,
    backend: Annotated[list[str] | None, typer.Option(help="Only this backend; repeat for several.")] = None,
    heads: Annotated[str, typer.Option(help="Heads, comma-separated.")] = "32,64",
    head_dim: Annotated[str, typer.Option(help="Head dims, comma-separated.")] = "64,128",
) -> None:
    """Registers, LDS, scratch, spills and occupancy of every AMD kernel of the library, from its code object.

    Waves: of one SIMD at once, as registers and LDS allow. Kernels are compiled for 4096 x 32768 logits. Shapes that a
    backend is not built for are left out, or an error where it is asked for by name.

    Examples: `lightning-indexer resources --arch gfx950`, `lightning-indexer resources --arch gfx942 --heads 64`
    """
    target = _amd_arch(arch)
    table = Table(Column("kernel", no_wrap=True), title=f"{target.name} ({target.products})", title_justify="left")
    for column in ("VGPR", "of them AGPR", "SGPR", "LDS bytes", "scratch", "spills V/S", "waves"):
        table.add_column(column, justify="right")
    table.add_column("compiler")
    refused: dict[str, None] = {}
    for name, one in _amd_kernels(backend, target).items():
        for h in common.ints("--heads", heads):
            for d in common.ints("--head-dim", head_dim):
                for form in FORMS:
                    problem = common.problem(f"4096,32768,{h},{d}", form)
                    if (reason := one.supports(problem, target)) is not None:
                        refused[f"{name}: {reason}"] = None
                        continue
                    with _compile_errors():
                        built = one.build(problem, target)
                    r = built.resources
                    spills = f"{r.vgpr_spills}/{r.sgpr_spills}"
                    numbers = (r.vgpr, r.agpr, r.sgpr, r.lds, r.scratch, spills, r.waves_per_simd)
                    table.add_row(built.kernel, *map(str, numbers), built.compiler)
    if not table.row_count:
        raise typer.BadParameter("; ".join(refused))
    out.print(table)
    for sentence in refused:
        out.print(f"not supported by {sentence}", markup=False, highlight=False)


def disasm(
    arch: ArchOption,
    backend: Annotated[str, typer.Option(help="The backend whose kernel to print.")] = "triton-portable",
    shape: Annotated[str, typer.Option(help="M,N,H,D: rows, keys, heads, head dim.")] = "4096,32768,64,128",
    form: Annotated[str, typer.Option(help=f"One of {', '.join(FORMS)}.")] = "clean",
    addresses: Annotated[
        bool, typer.Option("--addresses", help="Decoded from the code object instead, with the simulator's addresses.")
    ] = False,
) -> None:
    """The machine code of an AMD kernel, as the assembly text that its compiler prints.

    Examples: `lightning-indexer disasm --arch gfx950`,
    `lightning-indexer disasm --arch gfx942 --backend triton-portable --shape 4096,32768,32,128 --form noclean`,
    `lightning-indexer disasm --arch gfx950 --addresses`
    """
    target = _amd_arch(arch)
    problem = common.problem(shape, form)
    [(name, one)] = _amd_kernels([backend], target).items()
    if (reason := one.supports(problem, target)) is not None:
        raise typer.BadParameter(f"{name}: {reason}")
    with _compile_errors():
        built = one.build(problem, target)
    if not addresses:
        typer.echo(built.isa)
        return
    if (reason := cdna.simulator_missing()) is not None:
        raise typer.BadParameter(reason, param_hint="--addresses")
    from cdna_sim import listing

    for pc, code, text in listing(built.code_object, built.kernel):
        typer.echo(f"{pc:#08x}  {code.hex():32}  {text}")


def cost(
    arch: Annotated[str, typer.Option(help="gfx950, of which rates are known here.")] = "gfx950",
    backend: Annotated[list[str] | None, typer.Option(help="Only this backend; repeat for several.")] = None,
    heads: Annotated[
        str | None, typer.Option(help="Heads, comma-separated. Default: 32,64, or 32 with --shapes.")
    ] = None,
    shapes: Annotated[
        str | None, typer.Option(help="S_QxS_K,…, clean, causal and multi_req; default: the published ones.")
    ] = None,
) -> None:
    """A model of how long each AMD kernel takes at D=128: simulated counts, published rates, published times beside.

    Examples: `lightning-indexer cost --arch gfx950`, `lightning-indexer cost --backend hip-gfx950 --shapes 8192x8192`,
    `lightning-indexer cost --heads 64 --shapes 4096x32768`
    """
    from lightning_indexer import envs
    from lightning_indexer.model import cost as model
    from lightning_indexer.model.rates import DEVICES

    target = Arch.parse(common.one_of("--arch", arch, tuple(DEVICES)))
    if (reason := cdna.simulator_missing()) is not None:
        raise typer.BadParameter(reason, param_hint="--arch")
    envs.stop_triton_interpreter()
    kernels = _amd_kernels(backend, target)
    tables = _cost_tables(heads, shapes)
    refused: dict[str, None] = {}
    parts: dict[str, list[str]] = {}

    def one_table(published: Published, advance: Callable[[str], None]) -> Table:
        found: dict[tuple[int, int, str], dict[str, model.Prediction]] = {launch: {} for launch in published.times}
        problems = {
            (rows, keys, window): common.sized(rows, keys, published.heads, 128, published.form)
            for rows, keys, window in published.times
        }
        for name, one in kernels.items():
            advance(f"{name} H={published.heads}")
            reasons = {launch: one.supports(problem, target) for launch, problem in problems.items()}
            able = {launch: problems[launch] for launch, reason in reasons.items() if reason is None}
            if not able:
                refused.update(dict.fromkeys(f"{name}: {reason}" for reason in reasons.values()))
                continue
            with _compile_errors():
                predictions = model.Model(name, one, list(dict.fromkeys(able.values())), target, published.rates)
            for launch, problem in able.items():
                found[launch][name] = predictions.predict(problem, launch[2])
            for kernel in predictions.kernels:
                parts[kernel.built.kernel] = _parts(kernel, next(iter(able.values())))
        return _times(published, found)

    with common.progress() as progress:
        task = progress.add_task("cost", total=len(tables) * len(kernels))
        shown = [one_table(table, lambda what: progress.update(task, advance=1, description=what)) for table in tables]
    if not any(table.row_count for table in shown):
        raise typer.BadParameter("; ".join(refused))
    table = Table(
        Column("kernel", overflow="fold"), title="simulated: for each row and 32 keys; then for each workgroup",
        title_justify="left",
    )  # fmt: skip
    for column in ("MFMA", "VALU", "packed", "SALU", "VMEM", "LDS", "k B", "logits B", "VALU", "q B", "weights B"):
        table.add_column(column, justify="right")
    for kernel, cells in parts.items():
        table.add_row(kernel, *cells)
    for each in (*shown, table):
        out.print(each)
    for sentence in refused:
        out.print(f"not supported by {sentence}", markup=False, highlight=False)
    out.print(model.EXPLANATION, markup=False, highlight=False)


def _cost_tables(heads: str | None, shapes: str | None) -> list[Published]:
    """The launches that ``cost`` predicts, with what was published of them."""
    from lightning_indexer.model import rates
    from lightning_indexer.model.cost import COST_WINDOWS

    numbers = common.ints("--heads", heads or ("32" if shapes else "32,64"))
    if shapes is None:
        # All windows of all shapes of the first, also where no time was published.
        every = {(*shape, window): rates.AITER_HIP.times.get((*shape, window), ()) for shape in PERFORMANCE_SHAPES
                 for window in COST_WINDOWS}  # fmt: skip
        return [
            replace(p, times=every if p is rates.AITER_HIP else p.times) for p in rates.PUBLISHED if p.heads in numbers
        ]
    tables = []
    for h in numbers:
        known = next((p for p in rates.PUBLISHED if p.heads == h and p.form == "clean"), None)
        known = known or rates.Published("", rates.DEVICES["gfx950"], h, "clean", (), {}, {})
        launches = [(*shape, window) for shape in common.shapes(shapes) for window in COST_WINDOWS]
        tables.append(replace(known, times={launch: known.times.get(launch, ()) for launch in launches}))
    return tables


def _times(published: Published, found: dict[tuple[int, int, str], dict[str, Prediction]]) -> Table:
    """Predicted times, with the published ones beside them."""
    title = f"MODEL, not measured: microseconds on {published.rates.name}, H={published.heads} D=128 {published.form}"
    table = Table(title=title, title_justify="left")
    if published.kernels:
        names = ", ".join(f"[{name}]" for name in published.kernels)
        table.caption, table.caption_justify = Text(f"{names}: published, {published.unit}. {published.title}"), "left"
    for column in ("rows", "keys"):
        table.add_column(column, justify="right")
    table.add_column("window")
    table.add_column("backend", no_wrap=True)
    for column in ("in order", "overlapped", *(f"[{name}]" for name in published.kernels), "in order is"):
        table.add_column(Text(column), justify="right")
    table.add_column("limit")
    for (rows, keys, window), predictions in found.items():
        times = published.times[rows, keys, window]
        numbers = [f"{time:.1f}" for time in times] or ["-"] * len(published.kernels)
        for name, prediction in predictions.items():
            us, kind = prediction.in_order * 1e6, published.kinds.get(name)
            ratio = "-"
            if times and kind is not None and published.unit == "us":
                ratio = f"{us / times[kind]:.2f} of it"
            elif times and kind:
                [base] = [other for other, at in published.kinds.items() if at == 0]
                if base in predictions:
                    ratio = f"{us / (predictions[base].in_order * 1e6):.2f} of {base}, [{times[kind] / times[0]:.2f}]"
            own = (f"{us:.1f}", f"{prediction.overlapped * 1e6:.1f}")
            table.add_row(str(rows), str(keys), window, name, *own, *numbers, Text(ratio), prediction.limit)
    return table


def _parts(kernel: Kernel, problem: MqaLogitsProblem) -> list[str]:
    """What was counted, for the second table of ``cost``."""
    from lightning_indexer.model.cost import bytes_of

    tile, group = kernel.of_tile(problem), kernel.group
    numbers = [tile["MFMA"], tile["VALU"], tile["packed"], tile["SALU"]]
    numbers += [tile["VMEM_LOAD"] + tile["VMEM_STORE"], tile["LDS"]]
    numbers += [bytes_of(tile, "load", "k"), bytes_of(tile, "store", "out")]
    ends = [group["VALU"], bytes_of(group, "load", "q"), bytes_of(group, "load", "w")]
    return [*(f"{number:.1f}" for number in numbers), *(f"{number:.0f}" for number in ends)]


def _amd_arch(name: str) -> Arch:
    return Arch.parse(common.one_of("--arch", name, ARCHS))


def _amd_kernels(names: Sequence[str] | None, arch: Arch) -> dict[str, Any]:
    """AMD kernels by the backends of these names; without names, of all that run the usual shape on ``arch``."""
    usual = common.problem("4096,32768,64,128", "clean")
    known: dict[str, Any] = {n: one for n, one in dispatch.kernels().items() if isinstance(one, dispatch.Compiled)}
    with common.bad_parameter("--backend"):
        if not names:
            return {name: one for name, one in known.items() if one.supports(usual, arch) is None}
        for name in names:
            if dispatch.get(name).name not in known:
                raise ValueError(f"{name} has no AMD kernels; these have: {', '.join(known)}")
        return {name: known[name] for name in dict.fromkeys(names)}


def _supported(cases: Sequence[SimulatedCase], arch: Arch) -> tuple[list[SimulatedCase], Counter[str]]:
    """The cases that their backends' gates admit, and how many each reason keeps out."""
    admitted, refused = [], Counter[str]()
    for case in cases:
        problem = case.case.problem(case.case.s_k if case.case.form == "compressed" else 0)
        reason = dispatch.kernel(case.backend).supports(problem, arch)
        if reason is None:
            admitted.append(case)
        else:
            refused[f"{case.backend}: {reason}"] += 1
    return admitted, refused


def _print_outcomes(outcomes: Sequence[SimulatedOutcome], backends: Sequence[str], arch: Arch, seconds: float) -> bool:
    """Prints the verdict; True when every case passed, and every backend ran some."""
    table = Table(
        "backend", "cases", "passed", "failed", "diff fp32", "diff bf16", "wave-instructions", "a second",
        title=f"verify on simulated {arch.name}: worst calc_diff", title_justify="left",
    )  # fmt: skip
    good = True
    for backend in backends:
        mine = [outcome for outcome in outcomes if outcome.case.backend == backend]
        failed = sum(bool(outcome.faults) for outcome in mine)
        good &= failed == 0 and len(mine) > 0
        worst = []
        for dtype in (torch.float32, torch.bfloat16):
            diffs = [o.diff for o in mine if o.diff is not None and o.case.case.out_dtype is dtype]
            worst.append(f"{max(diffs):.1e}" if diffs else "-")
        instructions, busy = sum(o.instructions for o in mine), sum(o.seconds for o in mine)
        rate = f"{instructions / busy:,.0f}" if busy else "-"
        counts = (str(len(mine)), str(len(mine) - failed), str(failed))
        table.add_row(backend, *counts, *worst, f"{instructions:,}", rate)
    out.print(table)
    err.print(f"{seconds:.0f} s; instructions a second are those of one process", highlight=False)
    return good


@contextlib.contextmanager
def _compile_errors() -> Iterator[None]:
    """A kernel that does not compile, or a compiler that is missing, ends the command with the compiler's message."""
    try:
        yield
    except CompileError as error:
        err.print(str(error), markup=False, highlight=False, soft_wrap=True)
        raise typer.Exit(1) from None
