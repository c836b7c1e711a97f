"""Commands about engines: ``e2e`` runs a stack of layers with two sides, ``trace-diff`` compares kernel traces."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from lightning_indexer.arch import Arch, arch_of
from lightning_indexer.cli import common
from lightning_indexer.cli.common import DeviceOption, JsonOption, err
from lightning_indexer.e2e import decode as decoder
from lightning_indexer.e2e import report, traces
from lightning_indexer.e2e import run as runner
from lightning_indexer.e2e.dims import MODELS
from lightning_indexer.e2e.stack import FUSED, TORCH
from lightning_indexer.selection import registry as dispatch

GPU_CONTEXTS, CPU_CONTEXTS = "32768,65536,131072", "1024,2048"
GPU_STEP, CPU_STEP = 16384, 1024


def e2e(
    device: DeviceOption = None,
    model: Annotated[str, typer.Option(help=f"One of {', '.join(MODELS)}.")] = "glm-5.2",
    context: Annotated[
        list[str] | None,
        typer.Option(
            "--context",
            "--contexts",
            help=f"Prompt lengths. Default: {GPU_CONTEXTS} on a GPU, {CPU_CONTEXTS} on a CPU.",
        ),
    ] = None,
    a: Annotated[
        str | None,
        typer.Option("--a", help="What scores on side A: a backend, or policy: the library's choice for each call."),
    ] = None,
    b: Annotated[str | None, typer.Option("--b", help="Likewise on side B. Default: policy, on both.")] = None,
    select_a: Annotated[
        str | None,
        typer.Option(
            help=f"What selects on side A: {TORCH}, policy, a backend, or {FUSED}: the call that scores. Default:"
            f" {TORCH}; policy where --a or --b is given, so that the sides differ in one thing."
        ),
    ] = None,
    select_b: Annotated[str, typer.Option(help="Likewise on side B.")] = runner.POLICY,
    size: Annotated[
        str | None, typer.Option(help="full, or small: the indexer's own H and D in thin layers, the default on a CPU.")
    ] = None,
    layers: Annotated[int | None, typer.Option(min=1, help="Layers of the stack. Default: by model.")] = None,
    step: Annotated[int | None, typer.Option(min=1, help="Tokens of one prefill step.")] = None,
    max_logits_mb: Annotated[int, typer.Option(min=1, help="Budget of one chunk's float32 logits, MiB.")] = 512,
    repeats: Annotated[int, typer.Option(min=1, help="Timed runs of each side, in turn: A B A B.")] = 2,
    needles: Annotated[int, typer.Option(min=1, help="Planted tokens that later tokens ask for.")] = 16,
    rows: Annotated[int, typer.Option(min=1, help="Rows of each layer held against the float32 reference.")] = 64,
    decode: Annotated[int, typer.Option(min=0, help="Decode steps of each side after the prefill; 0: none.")] = 0,
    batch: Annotated[
        list[str] | None, typer.Option("--batch", "--batches", help="Sequences of a decode step. Default: 1,8,64.")
    ] = None,
    trace: Annotated[bool, typer.Option(help="Record a kernel trace of each side, and sum it by kernel.")] = True,
    results: Annotated[Path, typer.Option(help="Folder for e2e.md, e2e.json and traces.")] = Path("results/e2e"),
    seed: Annotated[int, typer.Option(help="Seed of weights, prompt and sampled rows.")] = 0,
    as_json: JsonOption = False,
) -> None:
    """Prefill a stack of sparse-attention layers with two sides in turn: TTFT, shares, needles, top-k, kernel trace.

    By default the sides differ in what selects: torch.topk before, top_k_per_row after. Exit status 1 if a needle is
    lost, the selection differs from the float32 reference's by more than 0.1%, or a row is not a top-k of its logits.

    Examples: `lightning-indexer e2e --device cpu --context 1024`,
    `lightning-indexer e2e --device cuda --context 131072 --select-a torch.topk --select-b cuda-sm90`,
    `lightning-indexer e2e --device cuda --context 32768,131072 --select-a policy --select-b fused`,
    `lightning-indexer e2e --device cuda --model glm-5.2 --context 32768,131072 --a triton-portable --b cuda-sm90`,
    `lightning-indexer e2e --device cuda --model deepseek-v3.2 --layers 2 --repeats 3 --no-trace`,
    `lightning-indexer e2e --device cuda --context 32768 --decode 256 --batch 1,8,64`
    """
    where = common.device(device)
    on_gpu = where.type == "cuda"
    dims = MODELS[common.one_of("--model", model, tuple(MODELS))]
    size = common.one_of("--size", size or ("full" if on_gpu else "small"), ("full", "small"))
    dims = dims.small() if size == "small" else dims
    contexts = common.ints("--context", context or (GPU_CONTEXTS if on_gpu else CPU_CONTEXTS))
    least = max(8, 4 * needles)
    if min(contexts) < least:
        raise typer.BadParameter(
            f"got {min(contexts)} tokens, expected at least {least} for {needles} needles", param_hint="--context"
        )
    step = step or (GPU_STEP if on_gpu else CPU_STEP)
    if max_logits_mb * 2**20 < 4 * max(contexts):
        raise typer.BadParameter(
            f"got {max_logits_mb} MiB, less than one row of {max(contexts)} logits", param_hint="--max-logits-mb"
        )
    sides = _backend(a), _backend(b)
    selections = _backend(select_a or (TORCH if sides == (None, None) else None)), _backend(select_b)
    arch = arch_of(where)
    budget = max_logits_mb * 2**20
    ran = []
    for side, scoring, selection in zip("ab", sides, selections, strict=True):
        calls = [call for context in contexts for call in runner.problems(dims, context, step, budget, selection)]
        selecting = runner.selections(dims, calls)
        ran.append((_ran(f"--{side}", scoring, arch, calls), _ran(f"--select-{side}", selection, arch, selecting)))
    batches = common.ints("--batch", batch or "1,8,64")
    common.writable_folder("--results", results)
    plan = runner.Plan(
        dims=dims, layers=layers or dims.layers, contexts=tuple(contexts), backends=sides,
        selections=selections, step=step, max_logits_bytes=budget, repeats=repeats, needles=needles,
        checked_rows=rows, seed=seed, trace_folder=results if trace else None,
    )  # fmt: skip
    if ran[0] == ran[1]:
        names = " + ".join(", ".join(calls) for calls in ran[0])
        err.print(f"A and B are both {names}: the ratios show how far two runs of one thing differ here")
    from lightning_indexer.bench import environment

    with common.progress() as progress:
        extra = len(contexts) * len(batches) if decode else 0
        task = progress.add_task("e2e", total=runner.steps(plan) + extra)

        def begins(what: str) -> None:
            progress.update(task, advance=1, description=what)

        found = runner.run(plan, where, arch, begins)
        decoded = decoder.after(plan, where, batches, decode, begins) if decode else []
    facts = environment.record(where)
    text = report.markdown(plan, found, facts, shlex.join(["lightning-indexer", *sys.argv[1:]]))
    if decoded:
        text += "\n" + decoder.markdown(plan, decoded)
    paths = report.write(results, text, plan, found, facts, decoder.records(decoded))
    if as_json:
        common.say(next(path for path in paths if path.suffix == ".json").read_text().rstrip())
    else:
        common.show_markdown(text)
    err.print("wrote " + ", ".join(map(str, paths)), highlight=False, soft_wrap=True)
    failed = report.failures(found)
    for line in failed:
        err.print(f"FAIL {line}", markup=False, highlight=False, soft_wrap=True)
    if failed:
        raise typer.Exit(1)


def trace_diff(
    a: Annotated[Path, typer.Argument(help="Trace of side A: torch.profiler's .json or .json.gz.")],
    b: Annotated[Path, typer.Argument(help="Trace of side B.")],
    group: Annotated[
        list[str] | None,
        typer.Option(
            help=f"Regular expression, whole; kernels whose names hold it are one row. Default: {traces.SCORING}."
        ),
    ] = None,
    top: Annotated[int, typer.Option(min=0, help="Kernels to list, largest difference first.")] = 30,
    as_json: JsonOption = False,
) -> None:
    """Two kernel traces, summed by kernel: launches, total time, ratio. Traces of vLLM and SGLang will do.

    Examples: `lightning-indexer trace-diff results/e2e/a.json.gz results/e2e/b.json.gz`,
    `lightning-indexer trace-diff a.pt.trace.json.gz b.pt.trace.json.gz --group '^(?!.*paged).*mqa_logits' --group topk`
    """
    with common.bad_parameter(None):
        found = traces.diff(traces.load(a), traces.load(b), group or (traces.SCORING,))
    if as_json:
        common.show_json(report.trace_records(found))
    else:
        common.show_markdown(f"A: {a}\nB: {b}\n\n{report.trace_markdown(found, top)}")
    for row in found.groups:
        if not row.a.launches and not row.b.launches:
            err.print(f"no kernel of either trace has a name with {row.name!r}", markup=False, highlight=False)


def _backend(name: str | None) -> str | None:
    """What ``Plan`` calls it: None is the library's choice."""
    return None if name == runner.POLICY else name


def _ran(option: str, name: str | None, arch: Arch, calls: Sequence[Any]) -> dict[str, int]:
    """What one side comes to, checked: it must run every one of the calls here."""
    with common.bad_parameter(option):
        if name is not None and (name not in (TORCH, FUSED) or not option.startswith("--select")):
            dispatch.get(name)
        try:
            return runner.ran(calls, arch, name)
        except dispatch.BackendUnavailableError as error:
            raise ValueError(str(error)) from None
