"""``lightning-indexer scale``, and ``bench --distributed`` under ``torchrun``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from lightning_indexer.cli import common
from lightning_indexer.cli.common import JsonOption
from lightning_indexer.cli.tables import Column, Table
from lightning_indexer.model import scale as model


def scale(
    forms: Annotated[
        list[str] | None,
        typer.Option("--form", "--forms", help="What is sharded, of rows, keys, decode. Default: all."),
    ] = None,
    shape: Annotated[str, typer.Option("--shape", "--shapes", help="MxN of rows and keys.")] = "8192x1048576",
    decode_shape: Annotated[str, typer.Option(help="BxN of decode: sequences and keys of each.")] = "64x524288",
    heads: Annotated[int, typer.Option(help="32 or 64.")] = 64,
    ranks: Annotated[list[str] | None, typer.Option(help="Numbers of ranks. Default: 1,2,4, … 512.")] = None,
    way: Annotated[
        str | None, typer.Option(help="gather, rows or histogram: how candidates are merged. Default: the best.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Bytes and time of context parallelism by the number of ranks: a model of measured rates and assumed networks.

    Examples: `lightning-indexer scale`, `lightning-indexer scale --form decode --way gather --ranks 8,64`
    """
    chosen = common.names("--form", forms or model.FORMS, model.FORMS)
    if heads not in model.SCORING_FLOPS:
        raise typer.BadParameter(f"got {heads}, expected 32 or 64", param_hint="--heads")
    if way is not None:
        common.one_of("--way", way, ("gather", "rows", "histogram"))
    counts = common.ints("--ranks", ranks or [str(2**power) for power in range(10)])
    times = [Column(f"{name} us", format=".0f") for name in ("compute", "communication", "of it exposed", "total")]
    sizes = [Column(f"{name} MB", format=".1f") for name in ("received", "shard", "workspace")]
    table = Table(("sharded", "size", "ranks", *times, Column("speedup", format=".1f"), *sizes))
    for form in chosen:
        [(rows, keys)] = common.one_shape(decode_shape if form == "decode" else shape, "MxN, e.g. 8192x1048576", 2)
        problem = model.Problem(form, rows, keys, heads)
        alone = model.estimate(problem, 1).total
        for count in counts:
            found = model.estimate(problem, count, way)
            seconds = (found.compute, found.communication, found.exposed, found.total)
            sized = (found.received_bytes, found.shard_bytes, found.workspace_bytes)
            table.add(
                form, f"({rows}, {keys})", count, *(1e6 * each for each in seconds), alone / found.total,
                *(each / 1e6 for each in sized),
            )  # fmt: skip
    if as_json:
        common.show_json({"kind": "model of ranks", "heads": heads, "rows": table.records()})
    else:
        common.show(table)


def bench(
    device: str | None, shapes: list[str] | None, heads: list[str] | None, k: list[str] | None,
    forms: list[str] | None, budget_ms: float, results: Path, command: str, as_json: bool,
) -> None:  # fmt: skip
    """Context parallelism on the group that ``torchrun`` started; rank 0 prints and writes."""
    from lightning_indexer.bench import distributed, environment

    chosen = common.names("--form", forms or distributed.FORMS, distributed.FORMS)
    sizes = [(m, n) for m, n in common.shapes(shapes)] if shapes else None
    counts = [common.ints(option, text) if text else None for option, text in (("--heads", heads), ("--k", k))]
    common.number("--budget-ms", budget_ms, 0.0)
    common.writable_folder("--results", results)
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
        paths = distributed.write(results, text, rows, facts)
        if as_json:
            common.say(next(path for path in paths if path.suffix == ".json").read_text().rstrip())
        else:
            common.show_markdown(text)
        common.err.print("wrote " + ", ".join(map(str, paths)), highlight=False, soft_wrap=True)
    distributed.leave()
    if any(row.note.startswith("WRONG") for row in rows):
        raise typer.Exit(1)
