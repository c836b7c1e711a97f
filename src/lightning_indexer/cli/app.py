"""The command line. Each command parses, calls the library and prints; the work is done elsewhere."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.table import Table

from lightning_indexer import __version__, envs
from lightning_indexer.arch import Arch, arch_of
from lightning_indexer.chunking import parse_requests, plan_chunks
from lightning_indexer.cli import amd as cli_amd
from lightning_indexer.cli import bench as cli_bench
from lightning_indexer.cli import common
from lightning_indexer.cli import distributed as cli_distributed
from lightning_indexer.cli import engines as cli_engines
from lightning_indexer.cli import prebuild as cli_prebuild
from lightning_indexer.cli import verify as cli_verify
from lightning_indexer.cli.common import err, out
from lightning_indexer.problems.mqa_logits import FORMS, MqaLogitsProblem
from lightning_indexer.selection import registry as dispatch

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
    max_logits_mb: Annotated[
        int, typer.Option(min=0, help="Budget of one chunk's float32 logits, MiB; 0: none, for fp8_mqa_topk.")
    ] = 512,
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
            max_logits_bytes=max_logits_mb * 2**20 or None,
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
app.command()(cli_bench.bench)
app.command()(cli_distributed.scale)
app.command()(cli_amd.resources)
app.command()(cli_amd.disasm)
app.command()(cli_amd.cost)
app.command()(cli_amd.timing)
app.command()(cli_prebuild.prebuild)
app.command()(cli_engines.e2e)
app.command("trace-diff")(cli_engines.trace_diff)


def _print_support(problem: MqaLogitsProblem) -> None:
    table = Table("arch", *(backend.name for backend in dispatch.backends()), title=str(problem), title_justify="left")
    support = dispatch.support_table(problem)
    for arch in Arch.known():
        table.add_row(arch.name, *(support[b.name][arch.name] or "yes" for b in dispatch.backends()))
    out.print(table)
