"""``lightning-indexer cache``: what is in the cache of compiled kernels, and how to be rid of it."""

from __future__ import annotations

import time
from typing import Annotated

import typer

from lightning_indexer import artifacts, envs
from lightning_indexer.cli import common
from lightning_indexer.cli.common import JsonOption, err
from lightning_indexer.cli.tables import Column, Table

# By the ending of a file's name, what it holds.
KINDS = {
    ".cubin": "cuda-sm90, machine code",
    ".amd": "AMD kernel: code object, assembly, resources",
    ".hsaco": "AMD code object",
}


def cache(
    clear: Annotated[bool, typer.Option("--clear", help="Remove the compiled kernels.")] = False,
    older_than_days: Annotated[
        float | None, typer.Option(help="Only files that were written longer ago than this.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Compiled kernels on disk: where, how many, how large; `--clear` removes them, and nothing else from that folder.

    They are compiled again when they are needed. LIGHTNING_INDEXER_CACHE_DIR names the folder. Triton keeps its own
    elsewhere (TRITON_CACHE_DIR, or ~/.triton/cache). Exit status 1 where something could not be removed.

    Examples: `lightning-indexer cache`, `lightning-indexer cache --clear`,
    `lightning-indexer cache --clear --older-than-days 30`
    """
    if older_than_days is not None:
        common.number("--older-than-days", older_than_days, 0.0)
    folder = envs.cache_dir()
    if folder is None:
        raise typer.BadParameter(
            "this user has no home directory: name a folder", param_hint="LIGHTNING_INDEXER_CACHE_DIR"
        )
    now = time.time()
    try:
        entries = artifacts.entries(folder)
    except OSError as error:
        raise typer.BadParameter(f"{folder}: {error.strerror}", param_hint="LIGHTNING_INDEXER_CACHE_DIR") from None
    if older_than_days is not None:
        entries = [entry for entry in entries if now - entry.modified > 86400 * older_than_days]
    failed = artifacts.remove(entries) if clear else []
    for path, reason in failed:
        err.print(f"cannot remove {path}: {reason}", markup=False, highlight=False, soft_wrap=True)
    table = Table(
        ("kind", Column("what it is"), Column("files"), Column("MiB", format=".1f"), Column("days old", format=".1f"))
    )
    for kind in dict.fromkeys(entry.kind for entry in entries):
        mine = [entry for entry in entries if entry.kind == kind]
        oldest = (now - min(entry.modified for entry in mine)) / 86400
        table.add(kind, KINDS.get(kind, "unfinished"), len(mine), sum(e.bytes for e in mine) / 2**20, oldest)
    total = sum(entry.bytes for entry in entries)
    if as_json:
        common.show_json(
            {"folder": folder, "files": len(entries), "bytes": total, "kinds": table.records(),
             "removed": len(entries) - len(failed) if clear else 0}
        )  # fmt: skip
    else:
        if entries:
            common.show(table)
        done = f"removed {len(entries) - len(failed)} of " if clear else ""
        common.say(f"{done}{len(entries)} files, {total / 2**20:.1f} MiB in {folder}")
    if failed:
        raise typer.Exit(1)
