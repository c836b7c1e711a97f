"""``lightning-indexer prebuild``: kernels into the disk cache, so that no request waits for a compiler."""

from __future__ import annotations

import os
from typing import Annotated

import torch
import typer

from lightning_indexer import envs
from lightning_indexer.arch import Arch, arch_of
from lightning_indexer.calls import prebuild as builder
from lightning_indexer.cli import common
from lightning_indexer.cli.common import BackendOption, FormOption, HeadDimOption, HeadsOption, JsonOption, err
from lightning_indexer.cli.tables import Table
from lightning_indexer.problems.mqa_logits import FORMS
from lightning_indexer.selection import registry as dispatch

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def prebuild(
    arch: Annotated[
        str | None, typer.Option(help="An arch, e.g. sm90; no such device is needed. Default: this machine's GPU.")
    ] = None,
    heads: HeadsOption = None,
    head_dim: HeadDimOption = None,
    form: FormOption = None,
    out_dtype: Annotated[
        list[str] | None, typer.Option("--out-dtype", "--out-dtypes", help="float32, bfloat16. Default: float32.")
    ] = None,
    backend: BackendOption = None,
    jobs: Annotated[int | None, typer.Option(min=1, help="Processes. Default: one a core.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Compile kernels ahead, e.g. while an image is built, so that a server's first requests find them on disk.

    By default for H 32 and 64, D 128, and every form. They go where LIGHTNING_INDEXER_CACHE_DIR says, and are found
    again by the same versions of this library and of the compilers. Triton's kernels are not among them: Triton
    compiles at the first call, into a cache of its own.

    Examples: `lightning-indexer prebuild --arch sm90`,
    `lightning-indexer prebuild --arch gfx942 --heads 32 --backend flydsl`,
    `LIGHTNING_INDEXER_CACHE_DIR=/opt/kernels lightning-indexer prebuild --arch sm90 --heads 32,64 --form compressed`
    """
    if arch is None and not torch.cuda.is_available():
        raise typer.BadParameter("no GPU is here to take the arch from: name one, e.g. sm90", param_hint="--arch")
    with common.bad_parameter("--arch"):
        target = Arch.parse(arch) if arch else arch_of("cuda")
    forms = common.names("--form", form or FORMS, FORMS)
    dtypes = [_DTYPES[name] for name in common.names("--out-dtype", out_dtype or "float32", tuple(_DTYPES))]
    chosen_heads = common.ints("--heads", heads or "32,64")
    chosen_dims = common.ints("--head-dim", head_dim or "128")
    backend = common.backend_names(backend)
    with common.bad_parameter("--backend"):
        batches = builder.plan(target, chosen_heads, chosen_dims, forms=forms, out_dtypes=dtypes, names=backend)
    if not batches:
        raise typer.BadParameter(
            f"nothing for {target.name} with H={_list(chosen_heads)}, D={_list(chosen_dims)} is compiled ahead; "
            f"`lightning-indexer explain --arch {target.name}` says what runs there",
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
    table = Table(("backend", "kernels"), target.name)
    for name, found in kernels.items():
        table.add(name, len(found))
    if as_json:
        names = {name: list(found) for name, found in kernels.items()}
        common.show_json({"arch": target.name, "folder": folder, "kernels": names, "errors": errors})
    else:
        common.show(table)
        common.say(f"in {folder}")
    for line in errors:
        err.print(line, markup=False, highlight=False, soft_wrap=True)
    if errors or not any(kernels.values()):
        raise typer.Exit(1)


def _list(numbers: list[int]) -> str:
    return ",".join(map(str, numbers))
