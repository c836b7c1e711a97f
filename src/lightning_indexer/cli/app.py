"""The command line. Each command parses, calls the library and prints; the work is done elsewhere."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import torch
import typer
from rich.table import Table

from lightning_indexer import __version__, envs
from lightning_indexer.arch import Arch, arch_of
from lightning_indexer.check.cases import PERFORMANCE_SHAPES, WINDOWS
from lightning_indexer.chunking import parse_requests, plan_chunks
from lightning_indexer.cli import amd as cli_amd
from lightning_indexer.cli import common
from lightning_indexer.cli import engines as cli_engines
from lightning_indexer.cli import prebuild as cli_prebuild
from lightning_indexer.cli import verify as cli_verify
from lightning_indexer.cli.common import err, out
from lightning_indexer.problems.mqa_logits import FORMS, MqaLogitsProblem
from lightning_indexer.selection import registry as dispatch

if TYPE_CHECKING:
    from lightning_indexer.bench import sweep
    from lightning_indexer.bench.sweep import Row
    from lightning_indexer.bench.timing import Ceilings

app = typer.Typer(
    help="FP8 MQA logits: the lightning-indexer scoring step of DeepSeek-V3.2/V4 and GLM-5 sparse attention.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120},
    pretty_exceptions_enable=False,
)
DeviceOption = Annotated[str | None, typer.Option(help="cpu, cuda or cuda:1. Default: cuda where there is one.")]
BackendOption = Annotated[
    list[str] | None,
    typer.Option("--backend", help="A backend's name; repeat for several. Default: all that can run."),
]


@app.callback(invoke_without_command=True)
def _root(version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False) -> None:
    if version:
        out.print(__version__, highlight=False)
        raise typer.Exit
    with common.bad_parameter(None):
        arch_of("cpu")  # reads LIGHTNING_INDEXER_ARCH
        envs.kernels()
        if (name := envs.backend()) is not None:
            dispatch.get(name, "LIGHTNING_INDEXER_BACKEND")


@app.command()
def info() -> None:
    """Devices, versions, backends, and what is missing with the command that installs it.

    Example: `lightning-indexer info`
    """
    from lightning_indexer.bench.environment import device_name, package_version
    from lightning_indexer.bench.peers import find

    devices = [torch.device("cpu")]
    if torch.cuda.is_available():
        devices += [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
    table = Table("device", "arch", "name", title=f"lightning-indexer {__version__}", title_justify="left")
    for device in devices:
        table.add_row(str(device), arch_of(device).name, device_name(device))
    out.print(table)

    table = Table("backend", "here", "what it is")
    for backend in dispatch.backends():
        table.add_row(backend.name, backend.missing() or "installed", backend.summary)
    out.print(table)

    table = Table("package", "version", "used for")
    for package, extra, purpose in (
        ("torch", "", "everything"),
        ("triton", "triton", "triton-portable; L2 flush and timing of `bench` on GPUs"),
        ("ziglang", "amd", f"HIP C++ for {common.SIMULATED_ARCHS}, where there is no ROCm"),
        ("tinygrad", "sim", "decoder of the AMD simulator"),
        ("flydsl", "flydsl", "compiling FlyDSL kernels"),
        ("typer", "cli", "this command line"),
        ("rich", "cli", "tables and progress"),
        ("matplotlib", "cli", "pictures of `demo` and `bench`"),
    ):
        version = package_version(package)
        table.add_row(package, version or f"missing: pip install 'lightning-indexer\\[{extra}]'", purpose)
    out.print(table)

    for line in find(devices[-1])[1]:
        out.print(f"peer not measured here: {line}", markup=False, highlight=False)
    for name, meaning in envs.KNOWN.items():
        out.print(f"{name}={envs.value(name) or '(not set)'}  {meaning}", markup=False, highlight=False)
    for name in envs.unknown():
        err.print(f"[yellow]warning[/]: {name} is set, and nothing reads it")


@app.command()
def explain(
    arch: Annotated[str | None, typer.Option(help="An arch, e.g. sm90; no such device is needed.")] = None,
    shape: Annotated[str, typer.Option(help="M,N,H,D: rows, keys, heads, head dim.")] = "4096,32768,64,128",
    form: Annotated[str, typer.Option(help=f"One of {', '.join(FORMS)}.")] = "clean",
    backend: Annotated[str | None, typer.Option(help="Look at this backend alone.")] = None,
    table: Annotated[bool, typer.Option("--table", help="Every backend on every arch, for this shape.")] = False,
) -> None:
    """Which backend runs a shape on an arch, and why the others do not. Obeys LIGHTNING_INDEXER_BACKEND, as calls do.

    Examples: `lightning-indexer explain --arch gfx942 --shape 4096,32768,32,128`, `lightning-indexer explain --table`
    """
    problem = common.problem(shape, form)
    if table:
        _print_support(problem)
        return
    with common.bad_parameter("--arch"):
        chosen_arch = Arch.parse(arch) if arch else arch_of("cuda" if torch.cuda.is_available() else "cpu")
    if backend is None and (backend := envs.backend()) is not None:
        out.print(f"LIGHTNING_INDEXER_BACKEND={backend}", markup=False, highlight=False)
    with common.bad_parameter("--backend"):
        verdicts = dispatch.explain(problem, chosen_arch, backend)
    out.print(f"{problem} on {chosen_arch.name} ({chosen_arch.products})", markup=False, highlight=False)
    for verdict in verdicts:
        out.print(str(verdict), markup=False, highlight=False)
    if not any(verdict.chosen for verdict in verdicts):
        raise typer.Exit(1)


@app.command()
def plan(
    requests: Annotated[str, typer.Option(help="CONTEXT:NEW,CONTEXT:NEW,… in tokens: cached before, and new.")],
    max_logits_mb: Annotated[int, typer.Option(help="Budget of one chunk's float32 logits, MiB.")] = 512,
    max_gather_keys: Annotated[int | None, typer.Option(help="Keys that the gather workspace holds.")] = None,
    compress_ratio: Annotated[int, typer.Option(help="Tokens per key (4 where keys are compressed).")] = 1,
) -> None:
    """The chunks that a batch of prefill requests is scored in.

    Example: `lightning-indexer plan --requests 32768:4096,0:512 --max-logits-mb 512`
    """
    with common.bad_parameter("--requests"):
        parsed = parse_requests(requests)
    with common.bad_parameter(None):
        chunks = plan_chunks(
            parsed,
            max_logits_bytes=max_logits_mb * 2**20,
            max_gather_keys=max_gather_keys,
            compress_ratio=compress_ratio,
        )
    table = Table("chunk", "rows M", "keys N", "logits MiB", "gather", "requests (rows)")
    for index, chunk in enumerate(chunks):
        parts = ", ".join(f"{s.request} ({s.row_start}:{s.row_stop})" for s in chunk.slices)
        size = f"{chunk.rows * chunk.keys * 4 / 2**20:.1f}"
        table.add_row(str(index), str(chunk.rows), str(chunk.keys), size, "yes" if chunk.gather else "reuse", parts)
    out.print(table)


@app.command()
def demo(
    device: DeviceOption = None,
    picture: Annotated[Path, typer.Option(help="Where the picture of scores and windows goes.")] = Path("demo.png"),
    seed: Annotated[int, typer.Option(help="Seed of the random requests.")] = 0,
) -> None:
    """Score a batch of requests, take the top-k, and find the keys planted for some queries. Under a minute on a CPU.

    Examples: `lightning-indexer demo`, `lightning-indexer demo --device cuda --picture /tmp/scores.png`
    """
    from lightning_indexer.cli.demo import run_demo

    if not run_demo(common.device(device), picture, seed, out):
        raise typer.Exit(1)


app.command()(cli_verify.verify)
app.command()(cli_amd.resources)
app.command()(cli_amd.disasm)
app.command()(cli_amd.cost)
app.command()(cli_prebuild.prebuild)
app.command()(cli_engines.e2e)
app.command("trace-diff")(cli_engines.trace_diff)


@app.command()
def bench(
    device: DeviceOption = None,
    backend: BackendOption = None,
    heads: Annotated[str, typer.Option(help="Heads, comma-separated.")] = "32,64",
    head_dim: Annotated[int, typer.Option(min=1, help="Head dim.")] = 128,
    shapes: Annotated[str | None, typer.Option(help="S_QxS_K,… Default: eight on a GPU, three on a CPU.")] = None,
    windows: Annotated[str, typer.Option(help="Windows, comma-separated.")] = "causal,multi_req",
    forms: Annotated[
        str, typer.Option(help="clean, noclean, compressed; comma-separated.")
    ] = "clean,noclean,compressed",
    peers: Annotated[bool, typer.Option(help="Measure the peers that can be imported.")] = True,
    budget_ms: Annotated[float, typer.Option(help="Time spent on each measurement, ms.")] = 100.0,
    results: Annotated[Path, typer.Option(help="Folder for bench.md, .csv, .json and pictures.")] = Path("results"),
    tune: Annotated[
        bool, typer.Option("--tune", help="Time tile configs around each heuristic's choice instead; writes nothing.")
    ] = False,
) -> None:
    """Time backends and peers in one run, after checking each result against the oracle.

    Examples: `lightning-indexer bench --device cuda --heads 32,64`,
    `lightning-indexer bench --device cpu --shapes 1024x8192 --heads 32 --forms clean`,
    `lightning-indexer bench --tune --backend cuda-sm90 --shapes 4096x32768 --forms noclean`
    """
    from lightning_indexer.bench import environment, report, sweep, timing
    from lightning_indexer.bench import peers as peers_module

    where = common.device(device)
    backends = common.backends(backend, where)
    default = PERFORMANCE_SHAPES if where.type == "cuda" else sweep.CPU_SHAPES
    chosen = sweep.Plan(
        shapes=common.shapes(shapes) if shapes else default,
        heads=tuple(common.ints("--heads", heads)),
        head_dim=head_dim,
        windows=tuple(common.names("--windows", windows, WINDOWS)),
        forms=tuple(common.names("--forms", forms, FORMS)),
        backends=tuple(backends),
        budget_ms=budget_ms,
    )
    left_out = chosen.left_out()
    if not chosen.cases():
        raise typer.BadParameter(f"no case is left: {'; '.join(left_out)}", param_hint="--windows")
    if tune:
        _tune(chosen, where)
        return
    found, absent = peers_module.find(where) if peers else ([], [])
    notes = [f"{peer.name}: {peer.note}" for peer in found] + [f"not measured: {line}" for line in absent + left_out]
    rows = []
    with common.progress() as progress:
        total = len(chosen.cases()) * (len(backends) + len(found))
        task = progress.add_task("ceilings", total=total)
        ceilings = timing.ceilings(where)
        for row in sweep.run(chosen, found, where):
            rows.append(row)
            progress.update(task, advance=1, description=f"{row.contender} {row.case}")
    facts = environment.record(where)
    summaries = report.summarise(rows, backends)
    command = shlex.join(["lightning-indexer", *sys.argv[1:]])
    text = report.markdown(rows, summaries, ceilings, facts, notes, command)
    typer.echo(text)
    paths = report.write(results, text, rows, summaries, ceilings, facts)
    paths += _pictures(results, rows, ceilings, backends, facts["device"])
    err.print("wrote " + ", ".join(map(str, paths)), highlight=False, soft_wrap=True)
    if any(row.note.startswith("WRONG") and row.contender in backends for row in rows):
        raise typer.Exit(1)


def _tune(plan: sweep.Plan, device: torch.device) -> None:
    from lightning_indexer.bench import tune

    trials = []
    with common.progress() as progress:
        task = progress.add_task("tune", total=None)
        for trial in tune.run(plan, device):
            trials.append(trial)
            progress.update(task, advance=1, description=f"{trial.backend} {trial.case}")
    table = Table(
        "case", "backend", "heuristic us", "best us", "gain", "best config", title="tune", title_justify="left"
    )
    wrong = False
    for case, backend in dict.fromkeys((trial.case, trial.backend) for trial in trials):
        mine = [trial for trial in trials if (trial.case, trial.backend) == (case, backend)]
        timed = [trial for trial in mine if trial.median]
        wrong |= any(trial.note.startswith("WRONG") for trial in mine)
        if not timed or not mine[0].median:
            table.add_row(str(case), backend, "-", "-", "-", mine[0].note)
            continue
        best = min(timed, key=lambda trial: trial.median or 0.0)
        assert best.median
        table.add_row(
            str(case), backend, f"{mine[0].median:.1f}", f"{best.median:.1f}", f"{mine[0].median / best.median:.2f}x",
            tune.differences(best.config, mine[0].config),
        )  # fmt: skip
    out.print(table)
    for trial in trials:
        if trial.note:
            out.print(f"{trial.backend} {trial.case} {trial.config}: {trial.note}", markup=False, highlight=False)
    if wrong:
        raise typer.Exit(1)


def _pictures(folder: Path, rows: Sequence[Row], ceilings: Ceilings, backends: Sequence[str], title: str) -> list[Path]:
    try:
        import matplotlib  # noqa: F401
    except ModuleNotFoundError:
        err.print("no pictures: pip install 'lightning-indexer\\[cli]' brings matplotlib")
        return []
    from lightning_indexer.bench import plots

    paths = [folder / "roofline.png"]
    plots.roofline(rows, ceilings, title, paths[0])
    contenders = list(dict.fromkeys(row.contender for row in rows))
    for index, subject in enumerate(backends):
        others = [name for name in contenders if name != subject and name not in backends[:index]]
        path = folder / f"speedup-{subject}.png"
        if others and plots.speedup_bars(rows, subject, others, title, path):
            paths.append(path)
    return paths


def _print_support(problem: MqaLogitsProblem) -> None:
    table = Table("arch", *(backend.name for backend in dispatch.backends()), title=str(problem), title_justify="left")
    support = dispatch.support_table(problem)
    for arch in Arch.known():
        table.add_row(arch.name, *(support[b.name][arch.name] or "yes" for b in dispatch.backends()))
    out.print(table)
