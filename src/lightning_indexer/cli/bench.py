"""``lightning-indexer bench``: one operation's backends and peers, timed in one run."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import torch
import typer
from rich.table import Table

from lightning_indexer.check.cases import PERFORMANCE_SHAPES, WINDOWS
from lightning_indexer.cli import common
from lightning_indexer.cli import distributed as cli_distributed
from lightning_indexer.cli.common import err, out
from lightning_indexer.problems.mqa_logits import FORMS, OPERATION
from lightning_indexer.problems.mqa_topk import OPERATION as MQA_TOPK
from lightning_indexer.problems.paged_mqa_logits import OPERATION as PAGED
from lightning_indexer.problems.top_k import MAX_K
from lightning_indexer.problems.top_k import OPERATION as TOP_K

if TYPE_CHECKING:
    from lightning_indexer.bench import paged, sweep, top_k
    from lightning_indexer.bench.sweep import Row
    from lightning_indexer.bench.timing import Ceilings

# By operation, which of the options that are not everybody's it takes.
OPTIONS = {
    OPERATION: ("--heads", "--head-dim", "--windows", "--forms", "--tune"),
    PAGED: ("--heads", "--head-dim", "--lengths"),
    TOP_K: ("--k", "--windows"),
    MQA_TOPK: ("--heads", "--k", "--windows"),
}


def bench(
    operation: Annotated[str, typer.Option(help=f"One of {', '.join(OPTIONS)}.")] = OPERATION,
    device: Annotated[str | None, typer.Option(help="cpu, cuda or cuda:1. Default: cuda where there is one.")] = None,
    backend: Annotated[
        list[str] | None, typer.Option(help="A backend's name; repeat for several. Default: all that can run.")
    ] = None,
    heads: Annotated[str | None, typer.Option(help="Heads, comma-separated. Default: 32,64. Not of selection.")] = None,
    head_dim: Annotated[int | None, typer.Option(min=1, help="Head dim. Default: 128. Scoring only.")] = None,
    k: Annotated[str | None, typer.Option("--k", help="k, comma-separated. Default: 2048. Not of scoring.")] = None,
    shapes: Annotated[
        str | None,
        typer.Option(
            help="S_QxS_K,… Default: eight on a GPU, three on a CPU. Selection: ROWSxWIDTH,… or prefill, decode or all;"
            " default: all on a GPU, two on a CPU. Paged: BxNEXT_NxCONTEXT,… or decode, prediction or all; default:"
            " decode on a GPU, three on a CPU."
        ),
    ] = None,
    windows: Annotated[
        str | None,
        typer.Option(help="Windows, comma-separated. Default: causal,multi_req; selection: causal (packed, whole)."),
    ] = None,
    lengths: Annotated[
        str | None, typer.Option(help="equal, ragged; comma-separated. Default: equal. Paged only.")
    ] = None,
    forms: Annotated[
        str | None,
        typer.Option(help="clean, noclean, compressed; comma-separated. Default: all. Prefill only."),
    ] = None,
    peers: Annotated[bool, typer.Option(help="Measure the peers that can be imported.")] = True,
    budget_ms: Annotated[float, typer.Option(help="Time spent on each measurement, ms.")] = 100.0,
    results: Annotated[Path, typer.Option(help="Folder for the report, CSV, JSON and pictures.")] = Path("results"),
    tune: Annotated[
        bool,
        typer.Option(
            "--tune",
            help="Time tile configs around each heuristic's choice instead; writes nothing. Prefill only.",
        ),
    ] = False,
    distributed: Annotated[
        bool,
        typer.Option("--distributed", help="Context parallelism instead, under torchrun; --forms rows,keys,decode."),
    ] = False,
) -> None:
    """Time backends and peers in one run, after checking each result against the oracle.

    Examples: `lightning-indexer bench --device cuda --heads 32,64`,
    `lightning-indexer bench --device cpu --shapes 1024x8192 --heads 32 --forms clean`,
    `lightning-indexer bench --operation top_k_per_row --shapes prefill`,
    `lightning-indexer bench --operation fp8_mqa_topk --heads 32,64`,
    `lightning-indexer bench --operation fp8_paged_mqa_logits --heads 64 --shapes 64x1x32768,64x4x32768`,
    `torchrun --nproc-per-node 2 -m lightning_indexer bench --distributed`,
    `lightning-indexer bench --tune --backend cuda-sm90 --shapes 4096x32768 --forms noclean`
    """
    if distributed:
        cli_distributed.bench(device, shapes, heads, k, forms, budget_ms, results, _command())
        return
    common.one_of("--operation", operation, tuple(OPTIONS))
    given = {
        "--heads": heads, "--head-dim": head_dim, "--k": k, "--windows": windows, "--lengths": lengths,
        "--forms": forms, "--tune": tune or None,
    }  # fmt: skip
    for option, value in given.items():
        if value is not None and option not in OPTIONS[operation]:
            raise typer.BadParameter(f"{operation} has no such option", param_hint=option)
    where = common.device(device)
    backends = common.backends(backend, where, operation)
    if operation == TOP_K:
        selection = _selection_cases(shapes, windows, k, where)
        _bench_selection(selection, backends, where, peers, budget_ms, results)
        return
    if operation == PAGED:
        decode = _paged_cases(shapes, heads, head_dim, lengths, where)
        _bench_paged(decode, backends, where, peers, budget_ms, results)
        return
    if operation == MQA_TOPK:
        _bench_fused(shapes, windows, heads, k, backends, where, peers, budget_ms, results)
        return
    from lightning_indexer.bench import environment, report, sweep, timing
    from lightning_indexer.bench import peers as peers_module

    default = PERFORMANCE_SHAPES if where.type == "cuda" else sweep.CPU_SHAPES
    chosen = sweep.Plan(
        shapes=common.shapes(shapes) if shapes else default,
        heads=tuple(common.ints("--heads", heads or "32,64")),
        head_dim=head_dim or 128,
        windows=tuple(common.names("--windows", windows or "causal,multi_req", WINDOWS)),
        forms=tuple(common.names("--forms", forms or ",".join(FORMS), FORMS)),
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
    summaries = report.summarise(rows, backends, report.GROUPS)
    text = report.markdown(rows, summaries, ceilings, facts, notes, _command())
    typer.echo(text)
    paths = report.write(results, text, rows, summaries, ceilings, facts)
    paths += _pictures(results, rows, ceilings, backends, facts["device"])
    _end(paths, rows, backends)


def _selection_cases(
    shapes: str | None, windows: str | None, k: str | None, where: torch.device
) -> tuple[top_k.Case, ...]:
    from lightning_indexer.bench import top_k

    if shapes is None or shapes in top_k.SETS:
        for option, value in (("--windows", windows), ("--k", k)):
            if value is not None:
                raise typer.BadParameter("goes with --shapes ROWSxWIDTH", param_hint=option)
        return top_k.SETS[shapes] if shapes else top_k.SETS["all"] if where.type == "cuda" else top_k.CPU
    sizes = common.ints("--k", k or "2048")
    if max(sizes) > MAX_K:
        raise typer.BadParameter(f"got {max(sizes)}, expected 1 to {MAX_K}", param_hint="--k")
    chosen = common.names("--windows", windows or "causal", top_k.WINDOWS)
    return tuple(
        top_k.Case(rows, width, size, window)
        for window in chosen
        for rows, width in common.shapes(shapes)
        for size in sizes
    )


def _bench_selection(
    cases: tuple[top_k.Case, ...], backends: list[str], where: torch.device, peers: bool, budget_ms: float,
    results: Path,
) -> None:  # fmt: skip
    from lightning_indexer.bench import environment, report, top_k, top_k_peers, top_k_report

    found, absent = top_k_peers.find(where) if peers else ([], [])
    notes = [f"{peer.name}: {peer.note}" for peer in found] + [f"not measured: {line}" for line in absent]
    rows = []
    with common.progress() as progress:
        task = progress.add_task("bench", total=len(cases) * (len(backends) + len(found)))
        for row in top_k.run(top_k.Plan(cases, tuple(backends), budget_ms), found, where):
            rows.append(row)
            progress.update(task, advance=1, description=f"{row.contender} {row.case}")
    facts = environment.record(where)
    summaries = report.summarise(rows, backends, top_k_report.GROUPS)
    text = top_k_report.markdown(rows, backends, summaries, facts, notes, _command())
    typer.echo(text)
    _end(top_k_report.write(results, text, rows, summaries, facts), rows, backends)


def _paged_cases(
    shapes: str | None, heads: str | None, head_dim: int | None, lengths: str | None, where: torch.device
) -> tuple[paged.Case, ...]:
    from lightning_indexer.bench import paged

    sizes: tuple[tuple[int, int, int], ...]
    if shapes is None:
        sizes = paged.DECODE if where.type == "cuda" else paged.CPU
    elif shapes in paged.SETS:
        sizes = paged.SETS[shapes]
    else:
        sizes = tuple(_three(shape) for shape in shapes.split(","))
    return tuple(
        paged.Case(batch, next_n, context, h, head_dim or 128, lengths=kind)
        for kind in common.names("--lengths", lengths or "equal", paged.LENGTHS)
        for h in common.ints("--heads", heads or "32,64")
        for batch, next_n, context in sizes
    )


def _three(shape: str) -> tuple[int, int, int]:
    parts = shape.strip().lower().split("x")
    if len(parts) != 3 or not all(part.isdecimal() and int(part) for part in parts):
        raise typer.BadParameter(
            f"got {shape!r}, expected BxNEXT_NxCONTEXT like 64x1x32768, or decode, prediction or all",
            param_hint="--shapes",
        )
    batch, next_n, context = map(int, parts)
    return batch, next_n, context


def _bench_paged(
    cases: tuple[paged.Case, ...], backends: list[str], where: torch.device, peers: bool, budget_ms: float,
    results: Path,
) -> None:  # fmt: skip
    from lightning_indexer.bench import environment, paged, paged_peers, paged_report, report, timing

    found, absent = paged_peers.find(where) if peers else ([], [])
    notes = [f"{peer.name}: {peer.note}" for peer in found] + [f"not measured: {line}" for line in absent]
    rows = []
    with common.progress() as progress:
        task = progress.add_task("ceilings", total=len(cases) * (len(backends) + len(found)))
        ceilings = timing.ceilings(where)
        plan = paged.Plan(cases, tuple(backends), ceilings.copy_gbs, ceilings.product_tflops, budget_ms)
        for row in paged.run(plan, found, where):
            rows.append(row)
            progress.update(task, advance=1, description=f"{row.contender} {row.case}")
    facts = environment.record(where)
    summaries = report.summarise(rows, backends, paged_report.GROUPS)
    text = paged_report.markdown(rows, backends, summaries, ceilings, facts, notes, _command())
    typer.echo(text)
    _end(paged_report.write(results, text, rows, summaries, ceilings, facts), rows, backends)


def _end(paths: Sequence[Path], rows: Sequence[Any], backends: Sequence[str]) -> None:
    """Names the files; a wrong backend is a failed run."""
    err.print("wrote " + ", ".join(map(str, paths)), highlight=False, soft_wrap=True)
    if any(row.note.startswith("WRONG") and row.contender in backends for row in rows):
        raise typer.Exit(1)


def _bench_fused(
    shapes: str | None, windows: str | None, heads: str | None, k: str | None, backends: list[str],
    where: torch.device, peers: bool, budget_ms: float, results: Path,
) -> None:  # fmt: skip
    from lightning_indexer.bench import environment, mqa_topk, mqa_topk_report, top_k_peers
    from lightning_indexer.bench import peers as peers_module

    sizes = common.ints("--k", k or "2048")
    if max(sizes) > MAX_K:
        raise typer.BadParameter(f"got {max(sizes)}, expected 1 to {MAX_K}", param_hint="--k")
    default = mqa_topk.SHAPES if where.type == "cuda" else mqa_topk.CPU_SHAPES
    cases = tuple(
        mqa_topk.Case(rows, keys, h, size, window)
        for window in common.names("--windows", windows or "causal", mqa_topk.WINDOWS)
        for rows, keys in (common.shapes(shapes) if shapes else default)
        for h in common.ints("--heads", heads or "32,64")
        for size in sizes
    )
    scoring: peers_module.DeepGemm | None = None
    selecting: list[top_k_peers.Peer] = []
    notes: list[str] = []
    if peers:
        found, absent = peers_module.find(where)
        scoring = next((peer for peer in found if isinstance(peer, peers_module.DeepGemm)), None)
        selecting, others = top_k_peers.find(where)
        if scoring is not None:
            notes = [f"{scoring.name}: {scoring.note}", *(f"{peer.name}: {peer.note}" for peer in selecting)]
        notes += [f"not measured: {line}" for line in absent + others]
    plan = mqa_topk.Plan(cases, tuple(backends), budget_ms)
    rows_found = []
    with common.progress() as progress:
        task = progress.add_task("bench", total=len(cases) * len(mqa_topk.contenders(plan, scoring, selecting)))
        for row in mqa_topk.run(plan, scoring, selecting, where):
            rows_found.append(row)
            progress.update(task, advance=1, description=f"{row.contender} {row.case}")
    facts = environment.record(where)
    text = mqa_topk_report.markdown(rows_found, backends, facts, notes, _command())
    typer.echo(text)
    paths = mqa_topk_report.write(results, text, rows_found, facts)
    err.print("wrote " + ", ".join(map(str, paths)), highlight=False, soft_wrap=True)
    ours = {name for backend in backends for name in (backend, mqa_topk.TWO + backend)}
    if any(row.note.startswith("WRONG") and row.contender in ours for row in rows_found):
        raise typer.Exit(1)


def _command() -> str:
    return shlex.join(["lightning-indexer", *sys.argv[1:]])


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
