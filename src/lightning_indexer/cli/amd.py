"""Commands that look at AMD kernels on any machine: ``resources``, ``disasm``, ``cost``, ``timing``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Column, Table
from rich.text import Text

from lightning_indexer.amd import cdna
from lightning_indexer.arch import Arch
from lightning_indexer.cli import common
from lightning_indexer.cli.common import out
from lightning_indexer.model.rates import DEVICES
from lightning_indexer.problems.mqa_logits import FORMS

if TYPE_CHECKING:
    from lightning_indexer.model.survey import Predicted
    from lightning_indexer.model.timing import Row

ArchOption = Annotated[str, typer.Option(help=f"{common.SIMULATED_ARCHS}; no such device is needed.")]
RATED = tuple(DEVICES)


def resources(
    arch: ArchOption,
    backend: Annotated[list[str] | None, typer.Option(help="Only this backend; repeat for several.")] = None,
    heads: Annotated[str, typer.Option(help="Heads, comma-separated.")] = "32,64",
    head_dim: Annotated[str, typer.Option(help="Head dims, comma-separated.")] = "64,128",
) -> None:
    """Registers, LDS, scratch, spills and occupancy of every AMD kernel of the library, from its code object.

    Waves: of one SIMD at once, as registers and LDS allow. Kernels are compiled for 4096 x 32768 logits. Shapes that a
    backend is not built for are left out, or an error where it is asked for by name.

    Examples: `lightning-indexer resources --arch gfx942`, `lightning-indexer resources --arch gfx942 --heads 64`
    """
    from lightning_indexer.model import survey

    target, notes = common.simulated_arch(arch), list[str]()
    kernels = common.installed(common.compiled_kernels(backend, target), backend, notes)
    problems = [
        common.problem(f"4096,32768,{h},{d}", form)
        for h in common.ints("--heads", heads)
        for d in common.ints("--head-dim", head_dim)
        for form in FORMS
    ]
    with common.compile_errors():
        built, refused = survey.compiled(kernels, problems, target)
    notes += [f"not supported by {sentence}" for sentence in refused]
    if not built:
        raise typer.BadParameter("; ".join(notes))
    table = Table(Column("kernel", no_wrap=True), title=f"{target.name} ({target.products})", title_justify="left")
    for column in ("VGPR", "of them AGPR", "SGPR", "LDS bytes", "scratch", "spills V/S", "waves"):
        table.add_column(column, justify="right")
    table.add_column("compiler")
    for one in built:
        r = one.resources
        numbers = (r.vgpr, r.agpr, r.sgpr, r.lds, r.scratch, f"{r.vgpr_spills}/{r.sgpr_spills}", r.waves_per_simd)
        table.add_row(one.kernel, *map(str, numbers), one.compiler)
    out.print(table)
    _print_lines(notes)


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

    Examples: `lightning-indexer disasm --arch gfx942`,
    `lightning-indexer disasm --arch gfx942 --backend triton-portable --shape 4096,32768,32,128 --form noclean`,
    `lightning-indexer disasm --arch gfx942 --addresses`
    """
    target = common.simulated_arch(arch)
    problem = common.problem(shape, form)
    [(name, one)] = common.installed(common.compiled_kernels([backend], target), [backend], []).items()
    if (reason := one.supports(problem, target)) is not None:
        raise typer.BadParameter(f"{name}: {reason}")
    with common.compile_errors():
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
    arch: Annotated[str, typer.Option(help=f"One of {', '.join(RATED)}, of which rates are known.")] = RATED[0],
    backend: Annotated[list[str] | None, typer.Option(help="Only this backend; repeat for several.")] = None,
    heads: Annotated[
        str | None, typer.Option(help="Heads, comma-separated. Default: 32,64, or 32 with --shapes.")
    ] = None,
    shapes: Annotated[
        str | None, typer.Option(help="S_QxS_K,…, clean, causal and multi_req; default: the published ones.")
    ] = None,
) -> None:
    """A model of how long each AMD kernel takes at D=128: simulated counts, published rates, published times beside.

    Examples: `lightning-indexer cost`, `lightning-indexer cost --backend triton-portable --shapes 8192x8192`,
    `lightning-indexer cost --heads 64 --shapes 4096x32768`
    """
    from lightning_indexer import envs
    from lightning_indexer.model import cost as model
    from lightning_indexer.model import survey

    target, notes = Arch.parse(common.one_of("--arch", arch, RATED)), list[str]()
    if (reason := cdna.simulator_missing()) is not None:
        raise typer.BadParameter(reason, param_hint="--arch")
    envs.stop_triton_interpreter()
    kernels = common.installed(common.compiled_kernels(backend, target), backend, notes)
    numbers = common.ints("--heads", heads or ("32" if shapes else "32,64"))
    wanted = survey.launches(numbers, common.shapes(shapes) if shapes else None)
    with common.progress() as progress, common.compile_errors():
        task = progress.add_task("cost", total=len(wanted) * len(kernels))

        def begins(what: str) -> None:
            progress.update(task, advance=1, description=what)

        found = [survey.predict(published, kernels, target, begins) for published in wanted]
    notes += [f"not supported by {line}" for line in dict.fromkeys(line for each in found for line in each.refused)]
    if not any(times for each in found for times in each.times.values()):
        raise typer.BadParameter("; ".join(notes))
    for each in found:
        out.print(_times(each))
    out.print(_parts(found))
    _print_lines([*notes, model.EXPLANATION])


def timing(
    arch: Annotated[str, typer.Option(help=f"{common.SIMULATED_ARCHS}; no such device is needed.")] = RATED[0],
    device: Annotated[str | None, typer.Option(help="MI300X, MI350X or MI355X. Default: the arch's fastest.")] = None,
    backend: Annotated[list[str] | None, typer.Option(help="Only this backend; repeat for several.")] = None,
    heads: Annotated[str, typer.Option(help="Heads, comma-separated; with --shapes.")] = "32",
    shapes: Annotated[
        str | None, typer.Option(help="S_QxS_K,…, clean logits; default: the published launches.")
    ] = None,
    windows: Annotated[str, typer.Option(help="causal, multi_req; with --shapes.")] = "causal",
    samples: Annotated[int, typer.Option(min=1, help="Workgroups of a launch that are simulated.")] = 4,
    trace: Annotated[Path | None, typer.Option(help="Writes the last launch's compute unit, for Perfetto.")] = None,
    picture: Annotated[Path | None, typer.Option(help="Draws 4000 cycles of it (.png, .svg).")] = None,
) -> None:
    """Predicted times of AMD kernels at D=128: every instruction replayed through a model of a compute unit.

    Without --shapes: each published launch on our kernel of the same kind, with the published time beside it.

    Examples: `lightning-indexer timing`, `lightning-indexer timing --shapes 4096x32768 --heads 32,64`,
    `lightning-indexer timing --arch gfx942 --shapes 4096x4096 --backend flydsl --trace unit.json`
    """
    from lightning_indexer import envs
    from lightning_indexer.model import cost as windows_model
    from lightning_indexer.model import timing as model

    target, notes = common.simulated_arch(arch), list[str]()
    if (reason := cdna.simulator_missing()) is not None:
        raise typer.BadParameter(reason, param_hint="--arch")
    for option, path in (("--trace", trace), ("--picture", picture)):
        if path is not None:
            common.writable_file(option, path)
    with common.bad_parameter("--device"):
        on = model.device_of(target, device)
    wanted = common.names("--windows", windows, windows_model.COST_WINDOWS)
    envs.stop_triton_interpreter()
    kernels = common.installed(common.compiled_kernels(backend, target), backend, notes)
    if shapes is None and target.name not in RATED:
        raise typer.BadParameter(f"no times were published for {target.name} here: name some", param_hint="--shapes")
    with common.progress() as progress, common.compile_errors():
        task = progress.add_task("timing", total=None)
        found = []
        if shapes is None:
            rows = model.published_rows(kernels, target, samples)
        else:
            launches = [(*shape, window) for shape in common.shapes(shapes) for window in wanted]
            rows = model.rows(kernels, target, on, common.ints("--heads", heads), launches, samples)
        for row in rows:
            found.append(row)
            progress.update(task, advance=1, description=f"{row.backend} {row.launch[0]}x{row.launch[1]}")
    if not found:
        raise typer.BadParameter("; ".join([*notes, "no kernel runs any of these"]))
    out.print(_timing_table(found))
    _print_lines([*notes, model.EXPLANATION])
    _draw(found[-1], trace, picture)


def _timing_table(found: list[Row]) -> Table:
    """Predictions, how they come about, and published times beside them."""
    table = Table(
        Column("launch", overflow="fold"), Column("backend", overflow="fold"), title_justify="left",
        title="MODEL, not measured: microseconds, D=128",
    )  # fmt: skip
    for column in ("predicted", "sampling", "published", "ratio"):
        table.add_column(column, justify="right")
    table.add_column("limit", overflow="fold")
    table.add_column("waves wait for", overflow="fold")
    for row in found:
        rows, keys, window = row.launch
        p = row.prediction
        causes = sorted(p.stalls.items(), key=lambda cause: -cause[1])[:3]
        table.add_row(
            f"({rows}, {keys}) {window} H={row.heads} {row.device.name}", row.backend, f"{p.microseconds:.1f}",
            f"±{100 * p.error:.1f}%", "-" if row.published is None else f"{row.published:.1f}",
            "-" if row.ratio is None else f"{row.ratio:.2f}", p.limit,
            ", ".join(f"{cause} {100 * share:.0f}%" for cause, share in causes),
        )  # fmt: skip
    return table


def _draw(row: Row, trace: Path | None, picture: Path | None) -> None:
    """The compute unit of one launch, as a trace and as a picture."""
    if trace is None and picture is None:
        return
    from cdna_sim.timing import pictures, timeline

    run, name = timeline(row.device, row.traces), f"{row.backend} {row.launch} H={row.heads} on {row.device.name}"
    if trace is not None:
        trace.write_text(json.dumps(pictures.chrome_trace(row.device, run, name)))
    if picture is not None:
        pictures.picture(run, picture, name, start=run.total / 2)


def _times(predicted: Predicted) -> Table:
    """Predicted times, with the published ones beside them."""
    from lightning_indexer.model import survey

    published = predicted.published
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
    for launch, predictions in predicted.times.items():
        rows, keys, window = launch
        numbers = [f"{time:.1f}" for time in published.times[launch]] or ["-"] * len(published.kernels)
        for name, prediction in predictions.items():
            own = (f"{prediction.in_order * 1e6:.1f}", f"{prediction.overlapped * 1e6:.1f}")
            ratio = Text(survey.beside(predicted, launch, name))
            table.add_row(str(rows), str(keys), window, name, *own, *numbers, ratio, prediction.limit)
    return table


def _parts(found: list[Predicted]) -> Table:
    """What was counted of each kernel."""
    from lightning_indexer.model import survey

    table = Table(
        Column("kernel", overflow="fold"), title="simulated: for each row and 32 keys; then for each workgroup",
        title_justify="left",
    )  # fmt: skip
    for column in (*survey.TILE_PARTS, *survey.GROUP_PARTS):
        table.add_column(column, justify="right")
    cells: dict[str, list[str]] = {}
    for each in found:
        for kernel, problem in each.kernels:
            tile, group = survey.parts(kernel, problem)
            cells[kernel.built.kernel] = [*(f"{n:.1f}" for n in tile), *(f"{n:.0f}" for n in group)]
    for name, numbers in cells.items():
        table.add_row(name, *numbers)
    return table


def _print_lines(lines: list[str]) -> None:
    for line in lines:
        out.print(line, markup=False, highlight=False)
