"""The command line. Each command parses, calls the library and prints; the work is done elsewhere."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from lightning_indexer import __version__, envs
from lightning_indexer.arch import Arch, arch_of
from lightning_indexer.bench import environment
from lightning_indexer.chunking import parse_requests, plan_chunks
from lightning_indexer.cli import amd as cli_amd
from lightning_indexer.cli import bench as cli_bench
from lightning_indexer.cli import cache as cli_cache
from lightning_indexer.cli import common, tables
from lightning_indexer.cli import distributed as cli_distributed
from lightning_indexer.cli import engines as cli_engines
from lightning_indexer.cli import info as cli_info
from lightning_indexer.cli import plot as cli_plot
from lightning_indexer.cli import prebuild as cli_prebuild
from lightning_indexer.cli import report as cli_report
from lightning_indexer.cli import verify as cli_verify
from lightning_indexer.cli.common import DeviceOption, JsonOption, OneValue, err
from lightning_indexer.cli.tables import Column, Table
from lightning_indexer.cli.usual import USUAL
from lightning_indexer.problems.cache_layout import CacheLayout
from lightning_indexer.problems.mqa_logits import FORMS, OPERATION
from lightning_indexer.problems.paged_mqa_logits import OPERATION as PAGED
from lightning_indexer.problems.paged_mqa_logits import PagedMqaLogitsProblem
from lightning_indexer.problems.top_k import MAX_K, TopKProblem
from lightning_indexer.problems.top_k import OPERATION as TOP_K
from lightning_indexer.selection import registry as dispatch

app = typer.Typer(
    help="FP8 MQA logits: the lightning-indexer scoring step of DeepSeek-V3.2/V4 and GLM-5 sparse attention.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120},
    pretty_exceptions_enable=False,
)


@app.callback(invoke_without_command=True)
def _root(version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False) -> None:
    if version:
        common.say(__version__)
        raise typer.Exit
    with common.bad_parameter(None):
        arch_of("cpu")  # reads LIGHTNING_INDEXER_ARCH
        envs.kernels()
        if (name := envs.backend()) is not None:
            dispatch.get(name, "LIGHTNING_INDEXER_BACKEND")


@app.command(cls=OneValue)
def info(as_json: JsonOption = False) -> None:
    """Devices, versions, backends, and what is missing with the command that installs it.

    Example: `lightning-indexer info`
    """
    found = cli_info.collect()
    if as_json:
        common.show_json(cli_info.document(found))
        return
    common.say(cli_info.text(found, tables.terminal_width()))
    for line in found["warnings"]:
        err.print(f"[yellow]warning[/]: {line}")


@app.command(cls=OneValue)
def explain(
    arch: Annotated[str | None, typer.Option(help="An arch, e.g. sm90; no such device is needed.")] = None,
    operation: Annotated[str, typer.Option(help=f"One of {', '.join(USUAL)}.")] = OPERATION,
    shape: Annotated[
        str | None,
        typer.Option(
            "--shape",
            "--shapes",
            help="MxN or MxNxHxD: rows, keys, heads, head dim; default: 4096x32768. Selection: ROWSxWIDTH. Paged:"
            " BxNEXT_NxCONTEXT.",
        ),
    ] = None,
    heads: Annotated[int, typer.Option(min=1, help="H: number of heads.")] = 64,
    head_dim: Annotated[int, typer.Option(min=1, help="D: head dim.")] = 128,
    form: Annotated[str, typer.Option("--form", "--forms", help=f"One of {', '.join(FORMS)}. Scores only.")] = "clean",
    k: Annotated[int, typer.Option("--k", min=1, max=MAX_K, help="How many to select. Selection only.")] = 2048,
    backend: Annotated[str | None, typer.Option(help="Look at this backend alone.")] = None,
    table: Annotated[bool, typer.Option("--table", help="Every backend on every arch, for this shape.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Which backend runs a shape on an arch, and why the others do not. Obeys LIGHTNING_INDEXER_BACKEND, as calls do.

    Exit status 1 where none runs it.

    Examples: `lightning-indexer explain --arch gfx942 --shape 4096x32768 --heads 32`,
    `lightning-indexer explain --operation top_k_per_row --arch sm90 --shape 64x131072`,
    `lightning-indexer explain --table`
    """  # fmt: skip
    problem = _problem(operation, shape, heads, head_dim, form, k)
    if table:
        support = dispatch.support_table(problem)
        names = [backend.name for backend in dispatch.backends() if backend.name in support]
        if as_json:
            common.show_json({"environment": environment.of_the_library(), "problem": str(problem), "archs": {
                arch.name: {name: support[name][arch.name] for name in names} for arch in Arch.known()}})  # fmt: skip
            return
        shown = Table(("arch", *names), str(problem))
        for known in Arch.known():
            shown.add(known.name, *(support[name][known.name] or "yes" for name in names))
        common.show(shown)
        return
    with common.bad_parameter("--arch"):
        chosen_arch = Arch.parse(arch) if arch else arch_of("cuda" if torch.cuda.is_available() else "cpu")
    asked = backend or envs.backend()
    with common.bad_parameter("--backend"):
        verdicts = dispatch.explain(problem, chosen_arch, asked)
    if as_json:
        common.show_json({"problem": str(problem), "arch": chosen_arch.name, "asked_for": asked, "verdicts": verdicts})
    else:
        if backend is None and asked is not None:
            common.say(f"LIGHTNING_INDEXER_BACKEND={asked}")
        common.lines([f"{problem} on {chosen_arch.name} ({chosen_arch.products})", *map(str, verdicts)])
    if not any(verdict.chosen for verdict in verdicts):
        raise typer.Exit(1)


@app.command(cls=OneValue)
def plan(
    requests: Annotated[
        list[str], typer.Option("--request", "--requests", help="CONTEXT:NEW in tokens: cached before, and new.")
    ],
    max_logits_mb: Annotated[
        int, typer.Option(min=0, help="Budget of one chunk's float32 logits, MiB; 0: none, for fp8_mqa_topk.")
    ] = 512,
    max_gather_keys: Annotated[int | None, typer.Option(help="Keys that the gather workspace holds.")] = None,
    compress_ratio: Annotated[int, typer.Option(help="Tokens per key (4 where keys are compressed).")] = 1,
    as_json: JsonOption = False,
) -> None:
    """The chunks that a batch of prefill requests is scored in.

    Example: `lightning-indexer plan --request 32768:4096,0:512 --max-logits-mb 512`
    """
    with common.bad_parameter("--request"):
        parsed = parse_requests(",".join(requests))
    with common.bad_parameter(None):
        chunks = plan_chunks(
            parsed,
            max_logits_bytes=max_logits_mb * 2**20 or None,
            max_gather_keys=max_gather_keys,
            compress_ratio=compress_ratio,
        )
    table = Table(
        ("chunk", Column("rows M", "rows"), Column("keys N", "keys"), Column("logits MiB", format=".1f"), "gather",
         Column("requests (rows)", "requests"))
    )  # fmt: skip
    for index, chunk in enumerate(chunks):
        slices = ", ".join(f"{s.request} ({s.row_start}:{s.row_stop})" for s in chunk.slices)
        size = chunk.rows * chunk.keys * 4 / 2**20
        table.add(index, chunk.rows, chunk.keys, size, "yes" if chunk.gather else "reuse", slices)
    if as_json:
        found = table.records()
        for record, chunk in zip(found, chunks, strict=True):
            record["slices"] = [asdict(part) for part in chunk.slices]
        common.show_json(
            {"environment": environment.of_the_library(), "compress_ratio": compress_ratio, "chunks": found}
        )  # fmt: skip
    else:
        common.show(table)


@app.command(cls=OneValue)
def demo(
    device: DeviceOption = None,
    picture: Annotated[Path, typer.Option(help="Where the picture of scores and windows goes.")] = Path("demo.png"),
    seed: Annotated[int, typer.Option(help="Seed of the random requests.")] = 0,
    as_json: JsonOption = False,
) -> None:
    """Score a batch of requests, take the top-k, and find the keys planted for some queries. Under a minute on a CPU.

    Exit status 1 if a planted key is not found.

    Examples: `lightning-indexer demo`, `lightning-indexer demo --device cuda --picture /tmp/scores.png`
    """
    from lightning_indexer.cli.demo import run_demo

    where = common.device(device)
    common.writable_file("--picture", picture)
    found = run_demo(where, picture, seed, quiet=as_json)
    if as_json:
        common.show_json(found)
    if found["found"] != found["planted"]:
        raise typer.Exit(1)


app.command(cls=OneValue)(cli_verify.verify)
app.command(cls=OneValue)(cli_bench.bench)
app.command(cls=OneValue)(cli_report.report)
app.command(cls=OneValue)(cli_plot.plot)
app.command(cls=OneValue)(cli_distributed.scale)
app.command(cls=OneValue)(cli_amd.resources)
app.command(cls=OneValue)(cli_amd.disasm)
app.command(cls=OneValue)(cli_amd.cost)
app.command(cls=OneValue)(cli_amd.timing)
app.command(cls=OneValue)(cli_prebuild.prebuild)
app.command(cls=OneValue)(cli_cache.cache)
app.command(cls=OneValue)(cli_engines.e2e)
app.command("trace-diff", cls=OneValue)(cli_engines.trace_diff)


def _problem(operation: str, shape: str | None, heads: int, head_dim: int, form: str, k: int) -> Any:
    common.one_of("--operation", operation, tuple(USUAL))
    if operation == OPERATION:
        return common.problem(shape or "4096x32768", heads, head_dim, form)
    if operation == TOP_K:
        [(rows, width)] = common.one_shape(shape or "4096x32768", "ROWSxWIDTH, e.g. 64x131072", 2)
        return TopKProblem(rows=rows, width=width, k=k)
    if operation == PAGED:
        [(batch, next_n, context)] = common.one_shape(shape or "64x1x32768", "BxNEXT_NxCONTEXT, e.g. 64x1x32768", 3)
        layout = CacheLayout(head_dim=head_dim)
        blocks = -(-context // layout.page)
        return PagedMqaLogitsProblem(batch, next_n, context, heads, head_dim, layout, blocks)
    if shape is not None:
        raise typer.BadParameter(f"{operation} is looked up at its usual shape", param_hint="--shape")
    return USUAL[operation]
