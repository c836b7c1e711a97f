"""``lightning-indexer scale``, and ``bench --distributed`` under ``torchrun``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from lightning_indexer.bench.report import table
from lightning_indexer.cli import common
from lightning_indexer.model import scale as model


def scale(
    forms: Annotated[
        str, typer.Option(help="rows, keys, decode; comma-separated: what is sharded.")
    ] = "rows,keys,decode",
    shape: Annotated[str, typer.Option(help="MxN of rows and keys.")] = "8192x1048576",
    decode_shape: Annotated[str, typer.Option(help="BxN of decode: sequences and keys of each.")] = "64x524288",
    heads: Annotated[int, typer.Option(help="32 or 64.")] = 64,
    ranks: Annotated[str, typer.Option(help="Ranks, comma-separated.")] = "1,2,4,8,16,32,64,128,256,512",
    way: Annotated[
        str | None, typer.Option(help="gather, rows or histogram: how candidates are merged. Default: the best.")
    ] = None,
) -> None:
    """Bytes and time of context parallelism by the number of ranks: a model of measured rates and assumed networks.

    Examples: `lightning-indexer scale`, `lightning-indexer scale --forms decode --way gather --ranks 8,64`
    """
    chosen = common.names("--forms", forms, model.FORMS)
    if heads not in model.SCORING_FLOPS:
        raise typer.BadParameter(f"got {heads}, expected 32 or 64", param_hint="--heads")
    if way is not None:
        common.one_of("--way", way, ("gather", "rows", "histogram"))
    counts = common.ints("--ranks", ranks)
    body = []
    for form in chosen:
        [(rows, keys)] = common.shapes(decode_shape if form == "decode" else shape)[:1]
        problem = model.Problem(form, rows, keys, heads)
        alone = model.estimate(problem, 1).total
        for count in counts:
            found = model.estimate(problem, count, way)
            times = (found.compute, found.communication, found.exposed, found.total)
            sizes = (found.received_bytes, found.shard_bytes, found.workspace_bytes)
            body.append(
                (form, f"({rows}, {keys})", str(count), *(f"{1e6 * seconds:.0f}" for seconds in times),
                 f"{alone / found.total:.1f}x", *(f"{size / 1e6:.1f}" for size in sizes))
            )  # fmt: skip
    header = (
        "sharded", "size", "ranks", "compute us", "communication us", "of it exposed", "total us", "speedup",
        "received MB", "shard MB", "workspace MB",
    )  # fmt: skip
    typer.echo("\n".join(table(header, body)))


def bench(
    device: str | None, shapes: str | None, heads: str | None, k: str | None, forms: str | None, budget_ms: float,
    results: Path, command: str,
) -> None:  # fmt: skip
    """Context parallelism on the group that ``torchrun`` started; rank 0 prints and writes."""
    from lightning_indexer.bench import distributed, environment

    chosen = common.names("--forms", forms or ",".join(distributed.FORMS), distributed.FORMS)
    sizes = common.shapes(shapes) if shapes else None
    counts = [common.ints(option, text) if text else None for option, text in (("--heads", heads), ("--k", k))]
    with common.bad_parameter("--distributed"):
        at = distributed.join(device)
    cases = distributed.cases(chosen, sizes, *counts, on_gpu=at.device.type == "cuda")
    rows = []
    for row in distributed.run(cases, at, budget_ms):
        rows.append(row)
        if at.rank == 0:
            common.err.print(" ".join(distributed.line(row)), highlight=False, soft_wrap=True)
    if at.rank == 0:
        facts = environment.record(at.device)
        repeat = f"torchrun --nproc-per-node {at.ranks} -m {command.replace('-', '_', 1)}"
        text = distributed.markdown(rows, facts, repeat)
        typer.echo(text)
        paths = distributed.write(results, text, rows, facts)
        common.err.print("wrote " + ", ".join(map(str, paths)), highlight=False, soft_wrap=True)
    distributed.leave()
    if any(row.note.startswith("WRONG") for row in rows):
        raise typer.Exit(1)
