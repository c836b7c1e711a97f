"""``lightning-indexer plot``: pictures from results that were recorded, on any machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from lightning_indexer.cli import common
from lightning_indexer.cli.common import JsonOption


def plot(
    files: Annotated[
        list[Path],
        typer.Argument(help="What `bench`, `e2e`, `report`, or `--json` of cost, explain, plan, verify wrote."),
    ],
    kind: Annotated[
        list[str] | None, typer.Option("--kind", "--kinds", help="Only these pictures. Default: all that a file gives.")
    ] = None,
    output: Annotated[Path, typer.Option(help="Folder of the pictures.")] = Path("results"),
    image_format: Annotated[str, typer.Option("--format", help="png or svg.")] = "png",
    as_json: JsonOption = False,
) -> None:
    """Draw recorded results: scores and selection beside peers, bandwidth of decode, memory, the model, phases; which
    backend runs where, the chunks of a plan, where a result is wrong.

    Nothing is measured here: each picture names the device, versions and commit of its file. Exit status 1 where a file
    gives none.

    Examples: `lightning-indexer plot results/bench.json`,
    `lightning-indexer plot docs/results/h200-scores.json docs/results/h200-top_k.json --output docs/pictures`
    """
    from lightning_indexer.bench import pictures

    common.one_of("--format", image_format, ("png", "svg"))
    wanted = common.names("--kind", kind, pictures.KINDS) if kind else list(pictures.KINDS)
    try:
        import matplotlib  # noqa: F401
    except ModuleNotFoundError:
        raise typer.BadParameter("pictures need matplotlib: `pip install matplotlib`") from None
    documents = {}
    for path in files:
        try:
            documents[path] = pictures.load(path)
        except OSError as error:
            raise typer.BadParameter(f"{path}: {error.strerror}", param_hint="FILES") from None
        except ValueError as error:
            raise typer.BadParameter(str(error), param_hint="FILES") from None
    common.writable_folder("--output", output)
    wrote: dict[str, list[str]] = {}
    for path, document in documents.items():
        parts = pictures.parts(document)
        made = wrote.setdefault(str(path), [])
        for name, part in parts.items():
            for each in (each for each in pictures.kinds(part) if each in wanted):
                target = output / f"{path.stem}{name}-{each}.{image_format}"
                pictures.draw(part, each, path.name, target)
                made.append(str(target))
    if as_json:
        common.show_json({"wrote": wrote})
    else:
        for source, made in wrote.items():
            common.say(f"{source}: {', '.join(made) or 'nothing to draw'}")
    if not all(wrote.values()):
        raise typer.Exit(1)
