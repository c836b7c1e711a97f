"""Commands that look at AMD kernels on any machine: ``resources``, ``disasm``, ``cost``, ``timing``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lightning_indexer.amd import cdna
from lightning_indexer.arch import Arch
from lightning_indexer.cli import common
from lightning_indexer.cli.common import BackendOption, FormOption, HeadDimOption, HeadsOption, JsonOption
from lightning_indexer.cli.tables import Column, Table
from lightning_indexer.model.rates import DEVICES, PUBLISHED
from lightning_indexer.problems.mqa_logits import FORMS, MqaLogitsProblem
from lightning_indexer.selection import registry

if TYPE_CHECKING:
    from lightning_indexer.model.survey import Predicted
    from lightning_indexer.model.timing import Row

RATED = tuple(DEVICES)


def resources(
    arch: common.SimulatedOption,
    backend: BackendOption = None,
    heads: HeadsOption = None,
    head_dim: HeadDimOption = None,
    form: FormOption = None,
    as_json: JsonOption = False,
) -> None:
    """Registers, LDS, scratch, spills and occupancy of every AMD kernel of the library, from its code object.

    Waves: of one SIMD at once, as registers and LDS allow. Kernels are compiled for 4096 x 32768 logits, by default for
    H 32 and 64, D 64 and 128. Shapes that a backend is not built for are left out with a sentence.

    Examples: `lightning-indexer resources --arch gfx942`, `lightning-indexer resources --arch gfx942 --heads 64`
    """
    from lightning_indexer.model import survey

    target, notes = common.simulated_arch(arch), list[str]()
    kernels = common.installed(common.compiled_kernels(backend, target), backend, notes)
    problems = [
        common.sized(4096, 32768, h, d, f)
        for h in common.ints("--heads", heads or "32,64")
        for d in common.ints("--head-dim", head_dim or "64,128")
        for f in common.names("--form", form or FORMS, FORMS)
    ]
    with common.progress() as progress, common.compile_errors():
        task = progress.add_task("resources", total=len(kernels) * len(problems))

        def begins(what: str) -> None:
            progress.update(task, advance=1, description=what)

        built, refused = survey.compiled(kernels, problems, target, begins)
    notes += [f"not supported by {sentence}" for sentence in refused]
    if not built:
        raise typer.BadParameter("; ".join(notes))
    table = Table(
        ("kernel", "VGPR", Column("of them AGPR", "agpr"), "SGPR", Column("LDS bytes", "lds"), "scratch",
         Column("VGPR spills"), Column("SGPR spills"), Column("waves", "waves_per_simd"), "compiler"),
        f"{target.name} ({target.products})",
    )  # fmt: skip
    for one in built:
        r = one.resources
        numbers = (r.vgpr, r.agpr, r.sgpr, r.lds, r.scratch, r.vgpr_spills, r.sgpr_spills, r.waves_per_simd)
        table.add(one.kernel, *numbers, one.compiler)
    if as_json:
        common.show_json({"arch": target.name, "kernels": table.records(), "notes": notes})
        return
    common.show(table)
    common.lines(notes)


def disasm(
    arch: common.SimulatedOption,
    backend: Annotated[
        str | None, typer.Option(help="Whose kernel. Default: what runs the shape on that arch.")
    ] = None,
    shape: Annotated[
        str, typer.Option("--shape", "--shapes", help="MxN or MxNxHxD: rows, keys, heads, head dim.")
    ] = "4096x32768",
    heads: Annotated[int, typer.Option(min=1, help="H: number of heads.")] = 64,
    head_dim: Annotated[int, typer.Option(min=1, help="D: head dim.")] = 128,
    form: Annotated[str, typer.Option("--form", "--forms", help=f"One of {', '.join(FORMS)}.")] = "clean",
    addresses: Annotated[
        bool, typer.Option("--addresses", help="Decoded from the code object instead, with the simulator's addresses.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """The machine code of an AMD kernel, as the assembly text that its compiler prints.

    Examples: `lightning-indexer disasm --arch gfx942`,
    `lightning-indexer disasm --arch gfx942 --backend triton-portable --shape 4096x32768 --heads 32 --form noclean`,
    `lightning-indexer disasm --arch gfx942 --addresses`
    """
    target = common.simulated_arch(arch)
    problem = common.problem(shape, heads, head_dim, form)
    name, one = _kernel(backend, problem, target)
    if addresses and (reason := cdna.simulator_missing()) is not None:
        raise typer.BadParameter(reason, param_hint="--addresses")
    with common.compile_errors():
        built = one.build(problem, target)
    text = built.isa
    if addresses:
        from cdna_sim import listing

        lines = listing(built.code_object, built.kernel)
        text = "\n".join(f"{pc:#08x}  {code.hex():32}  {line}" for pc, code, line in lines)
    if as_json:
        common.show_json({"arch": target.name, "backend": name, "kernel": built.kernel, "isa": text})
    else:
        common.say(text)


def _kernel(backend: str | None, problem: MqaLogitsProblem, target: Arch) -> tuple[str, Any]:
    """The kernel that is named, or that selection takes there; as ``explain`` says it, installed or not."""
    if backend is None:
        known = common.compiled_kernels(None, target)
        for verdict in registry.explain(problem, target):
            if verdict.backend in known and verdict.reason is None and verdict.passed_over is None:
                return verdict.backend, known[verdict.backend]
    [(name, one)] = common.installed(
        common.compiled_kernels([backend or "triton-portable"], target), ["named"], []
    ).items()
    if (reason := one.supports(problem, target)) is not None:
        raise typer.BadParameter(f"{name}: {reason}")
    return name, one


def cost(
    arch: Annotated[str, typer.Option(help=f"One of {', '.join(RATED)}, of which rates are known.")] = RATED[0],
    backend: BackendOption = None,
    heads: HeadsOption = None,
    shapes: Annotated[
        list[str] | None,
        typer.Option("--shape", "--shapes", help="MxN; clean, causal and multi_req. Default: the published ones."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """A model of how long each AMD kernel takes at D=128: simulated counts, published rates, published times beside.

    Examples: `lightning-indexer cost`, `lightning-indexer cost --backend triton-portable --shape 8192x8192`,
    `lightning-indexer cost --heads 64 --shape 4096x32768`
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
    wanted = survey.launches(numbers, [(m, n) for m, n in common.shapes(shapes)] if shapes else None)
    if not wanted:
        known = ", ".join(map(str, sorted({published.heads for published in PUBLISHED})))
        raise typer.BadParameter(f"nothing was published for H={numbers}, only for {known}", param_hint="--heads")
    with common.progress() as progress, common.compile_errors():
        task = progress.add_task("cost", total=len(wanted) * len(kernels))

        def begins(what: str) -> None:
            progress.update(task, advance=1, description=what)

        found = [survey.predict(published, kernels, target, begins) for published in wanted]
    notes += [f"not supported by {line}" for line in dict.fromkeys(line for each in found for line in each.refused)]
    if not any(times for each in found for times in each.times.values()):
        raise typer.BadParameter("; ".join(notes))
    shown = [*(_times(each) for each in found), _parts(found)]
    if as_json:
        common.show_json(
            {
                "kind": "model",
                "environment": _versions(target),
                "arch": target.name,
                "launches": [record for each in found for record in survey.records(each)],
                "kernels": shown[-1].records(),
                "notes": [*notes, model.EXPLANATION],
            }
        )
        return
    common.show(*shown)
    common.lines([*notes, model.EXPLANATION])


def _versions(target: Arch) -> dict[str, str]:
    """What the counts depend on; the machine that simulates is not among it."""
    from lightning_indexer.bench import environment

    found = {name: environment.package_version(name) for name in ("triton", "flydsl", "ziglang")}
    return {
        "device": f"a model of {target.name}, simulated counts",
        **{name: version for name, version in found.items() if version is not None},
        "commit": environment.commit() or "unknown",
        "date": environment.today(),
    }


def timing(
    arch: Annotated[
        str | None, typer.Option("--arch", help=f"{common.SIMULATED_ARCHS}. Default: {RATED[0]}; of --sweep, each.")
    ] = None,
    device: Annotated[str | None, typer.Option(help="MI300X, MI350X or MI355X. Default: the arch's fastest.")] = None,
    backend: BackendOption = None,
    heads: HeadsOption = None,
    shapes: Annotated[
        list[str] | None,
        typer.Option("--shape", "--shapes", help="MxN, clean logits. Default: the published launches."),
    ] = None,
    windows: Annotated[
        list[str] | None,
        typer.Option("--window", "--windows", help="causal, multi_req. Default: causal; of --sweep, both."),
    ] = None,
    form: Annotated[
        list[str] | None, typer.Option("--form", "--forms", help="clean, noclean; of --sweep. Default: clean.")
    ] = None,
    sweep: Annotated[
        Path | None,
        typer.Option(help="Predicts the performance shapes, H 32 and 64, into this file; what it has is kept."),
    ] = None,
    samples: Annotated[int, typer.Option(min=1, help="Workgroups along x that are simulated.")] = 4,
    trace: Annotated[Path | None, typer.Option(help="Writes the last launch's compute unit, for Perfetto.")] = None,
    picture: Annotated[Path | None, typer.Option(help="Draws 4000 cycles of it (.png, .svg).")] = None,
    as_json: JsonOption = False,
) -> None:
    """Predicted times of AMD kernels at D=128: every instruction replayed through a model of a compute unit.

    Without --shape: each published launch on our kernel of the same kind, with the published time beside it.

    Examples: `lightning-indexer timing`, `lightning-indexer timing --shape 4096x32768 --heads 32,64`,
    `lightning-indexer timing --arch gfx942 --shape 4096x4096 --backend flydsl --trace unit.json`,
    `lightning-indexer timing --sweep docs/results/timing.json`
    """
    from lightning_indexer import envs
    from lightning_indexer.model import cost as windows_model
    from lightning_indexer.model import timing as model

    if sweep is not None:
        for option, given in (("--trace", trace), ("--picture", picture), ("--device", device)):
            if given is not None:
                raise typer.BadParameter("is of one launch; leave it out, or --sweep", param_hint=option)
        _sweep(sweep, arch, backend, heads, shapes, windows, form, samples, as_json)
        return
    if form is not None:
        raise typer.BadParameter("is of --sweep alone", param_hint="--form")
    target, notes = common.simulated_arch(arch or RATED[0]), list[str]()
    if (reason := cdna.simulator_missing()) is not None:
        raise typer.BadParameter(reason, param_hint="--arch")
    for option, path in (("--trace", trace), ("--picture", picture)):
        if path is not None:
            common.writable_file(option, path)
    with common.bad_parameter("--device"):
        on = model.device_of(target, device)
    wanted = common.names("--window", windows or "causal", windows_model.COST_WINDOWS)
    numbers = common.ints("--heads", heads or "32")
    envs.stop_triton_interpreter()
    kernels = common.installed(common.compiled_kernels(backend, target), backend, notes)
    if not shapes and target.name not in RATED:
        raise typer.BadParameter(f"no times were published for {target.name} here: name some", param_hint="--shape")
    with common.progress() as progress, common.compile_errors():
        task = progress.add_task("timing", total=None)
        found = []
        if not shapes:
            rows = model.published_rows(kernels, target, samples)
        else:
            launches = [(m, n, window) for m, n in common.shapes(shapes) for window in wanted]
            rows = model.rows(kernels, target, on, numbers, launches, samples)
        for row in rows:
            found.append(row)
            progress.update(task, advance=1, description=f"{row.backend} {row.launch[0]}x{row.launch[1]}")
    if not found:
        raise typer.BadParameter("; ".join([*notes, "no kernel runs any of these"]), param_hint="--heads")
    table = _timing_table(found)
    notes.append(model.EXPLANATION)
    if as_json:
        common.show_json(
            {"kind": "timing", "environment": _versions(target), "launches": table.records(), "notes": notes}
        )
    else:
        common.show(table)
        common.lines(notes)
    _draw(found[-1], trace, picture)


def _sweep(
    path: Path, arch: str | None, backend: list[str] | None, heads: list[str] | None, shapes: list[str] | None,
    windows: list[str] | None, form: list[str] | None, samples: int, as_json: bool,
) -> None:  # fmt: skip
    """``timing --sweep``: predictions into a file."""
    from lightning_indexer import envs
    from lightning_indexer.check.cases import PERFORMANCE_SHAPES
    from lightning_indexer.model import cost as windows_model
    from lightning_indexer.model import timing as model
    from lightning_indexer.model import timing_sweep

    targets = [common.simulated_arch(name) for name in ([arch] if arch else common.SIMULATED)]
    if (reason := cdna.simulator_missing()) is not None:
        raise typer.BadParameter(reason, param_hint="--sweep")
    common.writable_file("--sweep", path)
    wanted = common.names("--window", windows or windows_model.COST_WINDOWS, windows_model.COST_WINDOWS)
    forms = common.names("--form", form or timing_sweep.FORMS[:1], timing_sweep.FORMS)
    numbers = common.ints("--heads", heads or ",".join(map(str, timing_sweep.HEADS)))
    sizes = common.shapes(shapes) if shapes else PERFORMANCE_SHAPES
    envs.stop_triton_interpreter()
    notes = list[str]()
    kernels = {
        target.name: common.installed(common.compiled_kernels(backend, target), backend, notes) for target in targets
    }
    versions = _versions(targets[0]) | {"device": "a model of " + ", ".join(target.name for target in targets)}
    rows = []
    with common.bad_parameter("--sweep"):
        recorded = timing_sweep.Recorded(path, versions)
    launches = [(m, n, window) for m, n in sizes for window in wanted]
    with common.progress() as progress, common.compile_errors():
        task = progress.add_task("timing", total=None)
        for row, _ in timing_sweep.sweep(recorded, kernels, numbers, forms, launches, samples):
            rows.append(row)
            progress.update(task, advance=1, description=f"{row['backend']} {row['rows']}x{row['keys']}")
    recorded.save()  # with the versions of now, of which every row is
    if as_json:
        common.show_json({"kind": "timing", "launches": rows, "notes": [*notes, model.EXPLANATION]})
        return
    table = Table(
        ("M", "N", "window", Column("H", "heads"), "form", "device", "backend",
         Column("predicted us", "predicted_us", ".1f"), "limit", Column("waves wait for", "stalls")),
        "MODEL, not measured: D=128",
    )  # fmt: skip
    for row in rows:
        table.add(
            row["rows"], row["keys"], row["window"], row["heads"], row["form"], row["device"], row["backend"],
            row["predicted_us"], row["limit"], _causes(row["stalls"]),
        )  # fmt: skip
    common.show(table)
    common.lines([*notes, model.EXPLANATION])


def _causes(stalls: dict[str, float]) -> str:
    """The three largest, with their shares."""
    return ", ".join(
        f"{cause} {100 * share:.0f}%" for cause, share in sorted(stalls.items(), key=lambda each: -each[1])[:3]
    )


def _timing_table(found: list[Row]) -> Table:
    """Predictions, how they come about, and published times beside them."""
    table = Table(
        ("M", "N", "window", Column("H", "heads"), "device", "backend", Column("predicted us", "predicted_us", ".1f"),
         Column("sampling error", "sampling_error", ".3f"), Column("published us", "published_us", ".1f"),
         Column("ratio", "ratio", ".2f"), "limit", Column("waves wait for", "stalls")),
        "MODEL, not measured: D=128",
    )  # fmt: skip
    for row in found:
        rows, keys, window = row.launch
        p = row.prediction
        table.add(
            rows, keys, window, row.heads, row.device.name, row.backend, p.microseconds, p.error, row.published,
            row.ratio, p.limit, _causes(p.stalls),
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
    times = [Column(f"[{name}]", format=".1f") for name in published.kernels]
    table = Table(
        ("rows", "keys", "window", "backend", Column("in order", format=".1f"), Column("overlapped", format=".1f"),
         *times, "in order is", "limit"),
        f"MODEL, not measured: microseconds on {published.rates.name}, H={published.heads} D=128 {published.form}",
    )  # fmt: skip
    if published.kernels:
        names = ", ".join(f"[{name}]" for name in published.kernels)
        table.caption = f"{names}: published, {published.unit}. {published.title}"
    for launch, predictions in predicted.times.items():
        rows, keys, window = launch
        numbers = published.times[launch] or [None] * len(published.kernels)
        for name, prediction in predictions.items():
            own = prediction.in_order * 1e6, prediction.overlapped * 1e6
            ratio = survey.beside(predicted, launch, name)
            table.add(rows, keys, window, name, *own, *numbers, ratio, prediction.limit)
    return table


def _parts(found: list[Predicted]) -> Table:
    """What was counted of each kernel."""
    from lightning_indexer.model import survey

    columns = [Column(name, format=".1f") for name in survey.TILE_PARTS]
    columns += [Column(f"{name} of a group", format=".0f") for name in survey.GROUP_PARTS]
    table = Table(("kernel", *columns), "simulated: for each row and 32 keys; then for each workgroup")
    counts = {
        kernel.built.kernel: [float(n) for numbers in survey.parts(kernel, problem) for n in numbers]
        for each in found
        for kernel, problem in each.kernels
    }
    for name, counted in counts.items():
        table.add(name, *counted)
    return table
