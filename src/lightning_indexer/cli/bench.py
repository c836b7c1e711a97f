"""``lightning-indexer bench``: one operation's backends and peers, timed in one run."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, TypeVar

import torch
import typer

from lightning_indexer.check.cases import PERFORMANCE_SHAPES, WINDOWS
from lightning_indexer.cli import common
from lightning_indexer.cli import distributed as cli_distributed
from lightning_indexer.cli.common import BackendOption, DeviceOption, FormOption, HeadsOption, JsonOption, err
from lightning_indexer.cli.tables import Column, Table
from lightning_indexer.problems.mqa_logits import FORMS, OPERATION
from lightning_indexer.problems.mqa_topk import OPERATION as MQA_TOPK
from lightning_indexer.problems.paged_mqa_logits import OPERATION as PAGED
from lightning_indexer.problems.top_k import MAX_K
from lightning_indexer.problems.top_k import OPERATION as TOP_K

if TYPE_CHECKING:
    from lightning_indexer.bench import paged, sweep, top_k
    from lightning_indexer.bench.sweep import Row
    from lightning_indexer.bench.timing import Ceilings

AnyRow = TypeVar("AnyRow")

# By operation, which of the options that are not everybody's it takes.
OPTIONS = {
    OPERATION: ("--heads", "--head-dim", "--window", "--form", "--tune"),
    PAGED: ("--heads", "--head-dim", "--length"),
    TOP_K: ("--k", "--window"),
    MQA_TOPK: ("--heads", "--k", "--window"),
}


def bench(
    operation: Annotated[str, typer.Option(help=f"One of {', '.join(OPTIONS)}.")] = OPERATION,
    device: DeviceOption = None,
    backend: BackendOption = None,
    heads: HeadsOption = None,
    head_dim: Annotated[
        int | None, typer.Option("--head-dim", "--head-dims", min=1, help="Head dim. Default: 128. Scoring only.")
    ] = None,
    k: Annotated[list[str] | None, typer.Option("--k", help="k. Default: 2048. Not of scoring.")] = None,
    shapes: Annotated[
        list[str] | None,
        typer.Option(
            "--shape",
            "--shapes",
            help="MxN. Default: eight on a GPU, three on a CPU. Selection: ROWSxWIDTH, or prefill, decode or all;"
            " default: all on a GPU, two on a CPU. Paged: BxNEXT_NxCONTEXT, or decode, prediction or all; default:"
            " decode on a GPU, three on a CPU.",
        ),
    ] = None,
    windows: Annotated[
        list[str] | None,
        typer.Option("--window", "--windows", help="Default: causal,multi_req; selection: causal (packed, whole)."),
    ] = None,
    lengths: Annotated[
        list[str] | None, typer.Option("--length", "--lengths", help="equal, ragged. Default: equal. Paged only.")
    ] = None,
    forms: FormOption = None,
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
        typer.Option("--distributed", help="Context parallelism instead, under torchrun; --form rows,keys,decode."),
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Time backends and peers in one run, after checking each result against the oracle.

    By default H 32 and 64, every form. Exit status 1 where a backend is wrong, or none could be timed; 130 where it was
    stopped: what was measured until then is written all the same.

    Examples: `lightning-indexer bench --device cuda --heads 32,64`,
    `lightning-indexer bench --device cpu --shape 1024x8192 --heads 32 --form clean`,
    `lightning-indexer bench --operation top_k_per_row --shape prefill`,
    `lightning-indexer bench --operation fp8_mqa_topk --heads 32,64`,
    `lightning-indexer bench --operation fp8_paged_mqa_logits --heads 64 --shape 64x1x32768,64x4x32768`,
    `torchrun --nproc-per-node 2 -m lightning_indexer bench --distributed`,
    `lightning-indexer bench --tune --backend cuda-sm90 --shape 4096x32768 --form noclean`
    """
    if distributed:
        cli_distributed.bench(device, shapes, heads, k, forms, budget_ms, results, _command(), as_json)
        return
    common.one_of("--operation", operation, tuple(OPTIONS))
    given = {
        "--heads": heads, "--head-dim": head_dim, "--k": k, "--window": windows, "--length": lengths,
        "--form": forms, "--tune": tune or None,
    }  # fmt: skip
    for option, value in given.items():
        if value is not None and option not in OPTIONS[operation]:
            raise typer.BadParameter(f"{operation} has no such option", param_hint=option)
    common.number("--budget-ms", budget_ms, 0.0)
    where = common.device(device)
    backends = common.backends(backend, where, operation)
    run = _Run(where, backends, peers, budget_ms, results, as_json)
    if operation == TOP_K:
        _bench_selection(_selection_cases(shapes, windows, k, where), run)
    elif operation == PAGED:
        _bench_paged(_paged_cases(shapes, heads, head_dim, lengths, where), run)
    elif operation == MQA_TOPK:
        _bench_fused(shapes, windows, heads, k, run)
    else:
        _bench_scores(shapes, heads, head_dim, windows, forms, run, tune)


class _Run(NamedTuple):
    """What every operation's run has."""

    where: torch.device
    backends: list[str]
    peers: bool
    budget_ms: float
    results: Path
    as_json: bool


def _bench_scores(
    shapes: list[str] | None, heads: list[str] | None, head_dim: int | None, windows: list[str] | None,
    forms: list[str] | None, run: _Run, tune: bool,
) -> None:  # fmt: skip
    from lightning_indexer.bench import environment, report, sweep, timing
    from lightning_indexer.bench import peers as peers_module

    where, backends = run.where, run.backends
    default = PERFORMANCE_SHAPES if where.type == "cuda" else sweep.CPU_SHAPES
    chosen = sweep.Plan(
        shapes=tuple((m, n) for m, n in common.shapes(shapes)) if shapes else default,
        heads=tuple(common.ints("--heads", heads or "32,64")),
        head_dim=head_dim or 128,
        windows=tuple(common.names("--window", windows or "causal,multi_req", WINDOWS)),
        forms=tuple(common.names("--form", forms or FORMS, FORMS)),
        backends=tuple(backends),
        budget_ms=run.budget_ms,
    )
    left_out = chosen.left_out()
    if not chosen.cases():
        raise typer.BadParameter(f"no case is left: {'; '.join(left_out)}", param_hint="--window")
    if tune:
        _tune(chosen, where, run.as_json)
        return
    common.writable_folder("--results", run.results)
    found, absent = peers_module.find(where) if run.peers else ([], [])
    notes = [f"{peer.name}: {peer.note}" for peer in found] + [f"not measured: {line}" for line in absent + left_out]
    ceilings: list[Ceilings] = []

    def rows() -> Iterable[Row]:
        ceilings.append(timing.ceilings(where))
        yield from sweep.run(chosen, found, where)

    measured, stopped = _watch("ceilings", len(chosen.cases()) * (len(backends) + len(found)), rows())
    _refuse_nothing(measured, stopped)
    facts = environment.record(where)
    summaries = report.summarise(measured, backends, report.GROUPS)
    text = report.markdown(measured, summaries, ceilings[0], facts, notes + stopped, _command())
    paths = report.write(run.results, text, measured, summaries, ceilings[0], facts)
    _show(text, paths, run)
    paths += _pictures(run.results, measured, ceilings[0], backends, facts["device"])
    _end(paths, measured, backends, stopped)


def _selection_cases(
    shapes: list[str] | None, windows: list[str] | None, k: list[str] | None, where: torch.device
) -> tuple[top_k.Case, ...]:
    from lightning_indexer.bench import top_k

    name = _set_name(shapes, top_k.SETS)
    if shapes is None or name is not None:
        for option, value in (("--window", windows), ("--k", k)):
            if value is not None:
                raise typer.BadParameter("goes with --shape ROWSxWIDTH", param_hint=option)
        return top_k.SETS[name] if name else top_k.SETS["all"] if where.type == "cuda" else top_k.CPU
    sizes = common.ints("--k", k or "2048")
    if max(sizes) > MAX_K:
        raise typer.BadParameter(f"got {max(sizes)}, expected 1 to {MAX_K}", param_hint="--k")
    chosen = common.names("--window", windows or "causal", top_k.WINDOWS)
    return tuple(
        top_k.Case(rows, width, size, window)
        for window in chosen
        for rows, width in common.shapes(shapes, "ROWSxWIDTH, e.g. 64x131072, or prefill, decode or all")
        for size in sizes
    )


def _set_name(shapes: list[str] | None, sets: Mapping[str, Any]) -> str | None:
    """The set of shapes that ``--shape`` names, if it is one name."""
    names = common.parts("--shape", shapes) if shapes else []
    return names[0] if len(names) == 1 and names[0] in sets else None


def _bench_selection(cases: tuple[top_k.Case, ...], run: _Run) -> None:
    from lightning_indexer.bench import environment, report, top_k, top_k_peers, top_k_report

    common.writable_folder("--results", run.results)
    found, absent = top_k_peers.find(run.where) if run.peers else ([], [])
    notes = [f"{peer.name}: {peer.note}" for peer in found] + [f"not measured: {line}" for line in absent]
    plan = top_k.Plan(cases, tuple(run.backends), run.budget_ms)
    total = len(cases) * (len(run.backends) + len(found))
    rows, stopped = _watch("bench", total, top_k.run(plan, found, run.where))
    _refuse_nothing(rows, stopped)
    facts = environment.record(run.where)
    summaries = report.summarise(rows, run.backends, top_k_report.GROUPS)
    text = top_k_report.markdown(rows, run.backends, summaries, facts, notes + stopped, _command())
    paths = top_k_report.write(run.results, text, rows, summaries, facts)
    _show(text, paths, run)
    _end(paths, rows, run.backends, stopped)


def _paged_cases(
    shapes: list[str] | None, heads: list[str] | None, head_dim: int | None, lengths: list[str] | None,
    where: torch.device,
) -> tuple[paged.Case, ...]:  # fmt: skip
    from lightning_indexer.bench import paged

    sizes: Sequence[tuple[int, ...]]
    if shapes is None:
        sizes = paged.DECODE if where.type == "cuda" else paged.CPU
    elif (name := _set_name(shapes, paged.SETS)) is not None:
        sizes = paged.SETS[name]
    else:
        sizes = common.shapes(shapes, "BxNEXT_NxCONTEXT like 64x1x32768, or decode, prediction or all", 3)
    return tuple(
        paged.Case(batch, next_n, context, h, head_dim or 128, lengths=kind)
        for kind in common.names("--length", lengths or "equal", paged.LENGTHS)
        for h in common.ints("--heads", heads or "32,64")
        for batch, next_n, context in sizes
    )


def _bench_paged(cases: tuple[paged.Case, ...], run: _Run) -> None:
    from lightning_indexer.bench import environment, paged, paged_peers, paged_report, report, timing

    common.writable_folder("--results", run.results)
    found, absent = paged_peers.find(run.where) if run.peers else ([], [])
    notes = [f"{peer.name}: {peer.note}" for peer in found] + [f"not measured: {line}" for line in absent]
    ceilings: list[Ceilings] = []

    def measure() -> Iterable[paged.Row]:
        ceilings.append(timing.ceilings(run.where))
        plan = paged.Plan(
            cases, tuple(run.backends), ceilings[0].copy_gbs, ceilings[0].product_tflops, run.budget_ms
        )  # fmt: skip
        yield from paged.run(plan, found, run.where)

    rows, stopped = _watch("ceilings", len(cases) * (len(run.backends) + len(found)), measure())
    _refuse_nothing(rows, stopped)
    facts = environment.record(run.where)
    summaries = report.summarise(rows, run.backends, paged_report.GROUPS)
    text = paged_report.markdown(rows, run.backends, summaries, ceilings[0], facts, notes + stopped, _command())
    paths = paged_report.write(run.results, text, rows, summaries, ceilings[0], facts)
    _show(text, paths, run)
    _end(paths, rows, run.backends, stopped)


def _bench_fused(
    shapes: list[str] | None, windows: list[str] | None, heads: list[str] | None, k: list[str] | None, run: _Run
) -> None:
    from lightning_indexer.bench import environment, mqa_topk, mqa_topk_report, top_k_peers
    from lightning_indexer.bench import peers as peers_module

    sizes = common.ints("--k", k or "2048")
    if max(sizes) > MAX_K:
        raise typer.BadParameter(f"got {max(sizes)}, expected 1 to {MAX_K}", param_hint="--k")
    default = mqa_topk.SHAPES if run.where.type == "cuda" else mqa_topk.CPU_SHAPES
    cases = tuple(
        mqa_topk.Case(rows, keys, h, size, window)
        for window in common.names("--window", windows or "causal", mqa_topk.WINDOWS)
        for rows, keys in (common.shapes(shapes) if shapes else default)
        for h in common.ints("--heads", heads or "32,64")
        for size in sizes
    )
    common.writable_folder("--results", run.results)
    scoring: peers_module.DeepGemm | None = None
    selecting: list[top_k_peers.Peer] = []
    notes: list[str] = []
    if run.peers:
        found, absent = peers_module.find(run.where)
        scoring = next((peer for peer in found if isinstance(peer, peers_module.DeepGemm)), None)
        selecting, others = top_k_peers.find(run.where)
        if scoring is not None:
            notes = [f"{scoring.name}: {scoring.note}", *(f"{peer.name}: {peer.note}" for peer in selecting)]
        notes += [f"not measured: {line}" for line in absent + others]
    plan = mqa_topk.Plan(cases, tuple(run.backends), run.budget_ms)
    total = len(cases) * len(mqa_topk.contenders(plan, scoring, selecting))
    rows, stopped = _watch("bench", total, mqa_topk.run(plan, scoring, selecting, run.where))
    # A line of the table wants every contender of its case.
    rows = [row for row in rows if not stopped or row.case != rows[-1].case]
    _refuse_nothing(rows, stopped)
    facts = environment.record(run.where)
    text = mqa_topk_report.markdown(rows, run.backends, facts, notes + stopped, _command())
    paths = mqa_topk_report.write(run.results, text, rows, facts)
    _show(text, paths, run)
    ours = [name for backend in run.backends for name in (backend, mqa_topk.TWO + backend)]
    _end(paths, rows, ours, stopped)


def _watch(title: str, total: int, rows: Iterable[AnyRow]) -> tuple[list[AnyRow], list[str]]:
    """Measures; the rows until then where the user stops it, and a line that says so."""
    found: list[AnyRow] = []
    with common.progress() as progress:
        task = progress.add_task(title, total=total)
        try:
            for row in rows:
                found.append(row)
                progress.update(task, advance=1, description=f"{row.contender} {row.case}")  # type: ignore[attr-defined]
        except KeyboardInterrupt:
            return found, [f"stopped after {len(found)} of {total} measurements"]
    return found, []


def _refuse_nothing(rows: Sequence[Any], stopped: Sequence[str]) -> None:
    """Ends a run that was stopped before its first row."""
    if stopped and not rows:
        err.print(stopped[0])
        raise typer.Exit(130)


def _show(text: str, paths: Sequence[Path], run: _Run) -> None:
    """The report, or the document that was written beside it."""
    if run.as_json:
        common.say(next(path for path in paths if path.suffix == ".json").read_text().rstrip())
    else:
        common.show_markdown(text)


def _end(paths: Sequence[Path], rows: Sequence[Any], backends: Sequence[str], stopped: Sequence[str]) -> None:
    """Names the files; a run that was stopped, a wrong backend, and none that could be timed are no success."""
    err.print("wrote " + ", ".join(map(str, paths)), highlight=False, soft_wrap=True)
    for line in stopped:
        err.print(line)
    if stopped:
        raise typer.Exit(130)
    ours = [row for row in rows if row.contender in backends]
    if not any(row.median for row in ours):
        err.print(f"nothing of {', '.join(backends)} was timed", highlight=False)
        for line in dict.fromkeys(f"{row.contender}: {row.note}" for row in ours):
            err.print(line, markup=False, highlight=False, soft_wrap=True)
        raise typer.Exit(1)
    if any(row.note.startswith("WRONG") for row in ours):
        raise typer.Exit(1)


def _command() -> str:
    return shlex.join(["lightning-indexer", *sys.argv[1:]])


def _tune(plan: sweep.Plan, device: torch.device, as_json: bool) -> None:
    from lightning_indexer.bench import tune

    trials = []
    with common.progress() as progress:
        task = progress.add_task("tune", total=None)  # how many configs there are shows as they come
        for trial in tune.run(plan, device):
            trials.append(trial)
            progress.update(task, advance=1, description=f"{trial.backend} {trial.case}")
    columns = (Column("heuristic us", format=".1f"), Column("best us", format=".1f"), Column("gain", format=".2f"))
    table = Table(("case", "backend", *columns, "best config"), "tune")
    for case, backend in dict.fromkeys((trial.case, trial.backend) for trial in trials):
        mine = [trial for trial in trials if (trial.case, trial.backend) == (case, backend)]
        timed = [trial for trial in mine if trial.median]
        if not timed or not mine[0].median:
            table.add(str(case), backend, None, None, None, mine[0].note)
            continue
        best = min(timed, key=lambda trial: trial.median or 0.0)
        assert best.median
        gain = mine[0].median / best.median
        table.add(
            str(case), backend, mine[0].median, best.median, gain, tune.differences(best.config, mine[0].config)
        )  # fmt: skip
    if as_json:
        common.show_json({"best": table.records(), "trials": trials})
    else:
        common.show(table)
        common.lines(f"{trial.backend} {trial.case} {trial.config}: {trial.note}" for trial in trials if trial.note)
    if any(trial.note.startswith("WRONG") for trial in trials) or not any(trial.median for trial in trials):
        raise typer.Exit(1)


def _pictures(folder: Path, rows: Sequence[Row], ceilings: Ceilings, backends: Sequence[str], title: str) -> list[Path]:
    try:
        import matplotlib  # noqa: F401
    except ModuleNotFoundError:
        err.print("no pictures: `pip install matplotlib` brings what draws them", markup=False, highlight=False)
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
