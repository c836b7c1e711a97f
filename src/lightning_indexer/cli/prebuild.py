"""``lightning-indexer prebuild``: kernels into the disk cache, so that no request waits for a compiler."""

from __future__ import annotations

import os
from typing import Annotated

import torch
import typer
from rich.table import Table

from lightning_indexer import envs
from lightning_indexer.arch import Arch, arch_of
from lightning_indexer.calls import prebuild as builder
from lightning_indexer.cli import common
from lightning_indexer.cli.common import err, out
from lightning_indexer.problems.mqa_logits import FORMS
from lightning_indexer.selection import registry as dispatch

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def prebuild(
    arch: Annotated[
        str | None, typer.Option(help="An arch, e.g. sm90; no such device is needed. Default: this machine's GPU.")
    ] = None,
    heads: Annotated[str, typer.Option(help="Heads of the models to serve, comma-separated.")] = "32,64",
    head_dim: Annotated[str, typer.Option(help="Head dims, comma-separated.")] = "128",
    form: Annotated[
        list[str] | None, typer.Option(help=f"One of {', '.join(FORMS)}; repeat for several. Default: all.")
    ] = None,
    out_dtype: Annotated[str, typer.Option(help="float32, bfloat16 or both, comma-separated.")] = "float32",
    backend: Annotated[list[str] | None, typer.Option(help="Only this backend; repeat for several.")] = None,
    jobs: Annotated[int | None, typer.Option(min=1, help="Processes. Default: one a core.")] = None,
) -> None:
    """Compile kernels ahead, e.g. while an image is built, so that a server's first requests find them on disk.

    They go where LIGHTNING_INDEXER_CACHE_DIR says, and are found again by the same versions of this library and of the
    compilers. Triton's kernels are not among them: Triton compiles at the first call, into a cache of its own.

    Examples: `lightning-indexer prebuild --arch sm90`,
    `lightning-indexer prebuild --arch gfx942 --heads 32 --backend flydsl`,
    `LIGHTNING_INDEXER_CACHE_DIR=/opt/kernels lightning-indexer prebuild --arch sm90 --heads 32,64 --form compressed`
    """
    if arch is None and not torch.cuda.is_available():
        raise typer.BadParameter("no GPU is here to take the arch from: name one, e.g. sm90", param_hint="--arch")
    with common.bad_parameter("--arch"):
        target = Arch.parse(arch) if arch else arch_of("cuda")
    forms = [common.one_of("--form", name, FORMS) for name in form or FORMS]
    dtypes = [_DTYPES[name] for name in common.names("--out-dtype", out_dtype, tuple(_DTYPES))]
    with common.bad_parameter("--backend"):
        batches = builder.plan(
            target, common.ints("--heads", heads), common.ints("--head-dim", head_dim),
            forms=forms, out_dtypes=dtypes, names=backend,
        )  # fmt: skip
    if not batches:
        raise typer.BadParameter(
            f"nothing for {target.name} with H={heads}, D={head_dim} is compiled ahead; `lightning-indexer explain "
            f"--arch {target.name}` says what runs there",
            param_hint="--arch",
        )
    for name in dict.fromkeys(batch.backend for batch in batches):
        if (reason := dispatch.get(name).missing()) is not None:
            if backend:
                raise typer.BadParameter(f"{name}: {reason}", param_hint="--backend")
            err.print(f"left out: {name}: {reason}", markup=False, highlight=False, soft_wrap=True)
            batches = [batch for batch in batches if batch.backend != name]
    folder = envs.cache_dir()
    if folder is None:
        raise typer.BadParameter(
            "this user has no home directory: name a folder", param_hint="LIGHTNING_INDEXER_CACHE_DIR"
        )
    common.writable_folder("LIGHTNING_INDEXER_CACHE_DIR", folder)
    kernels: dict[str, dict[str, None]] = {}
    errors = []
    with common.progress() as progress:
        task = progress.add_task(f"prebuild for {target.name}", total=len(batches))
        for done in builder.run(batches, jobs or os.cpu_count() or 1) if batches else ():
            progress.update(task, advance=1, description=str(done.batch))
            kernels.setdefault(done.batch.backend, {}).update(dict.fromkeys(done.kernels))
            if done.error:
                errors.append(f"FAIL {done.batch}: {done.error}")
    table = Table("backend", "kernels", title=target.name, title_justify="left")
    for name, found in kernels.items():
        table.add_row(name, str(len(found)))
    out.print(table)
    out.print(f"in {folder}", markup=False, highlight=False, soft_wrap=True)
    for line in errors:
        err.print(line, markup=False, highlight=False, soft_wrap=True)
    if errors or not any(kernels.values()):
        raise typer.Exit(1)
