"""The newcomer's first run: a batch of requests from planning to top-k, with keys planted that must be found."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from lightning_indexer.arch import arch_of
from lightning_indexer.calls.mqa_logits import fp8_mqa_logits
from lightning_indexer.calls.top_k import top_k_per_row
from lightning_indexer.check.cases import flop, positions_in_windows
from lightning_indexer.chunking import Chunk, Request, plan_chunks
from lightning_indexer.cli import common
from lightning_indexer.cli.tables import Column, Table
from lightning_indexer.fp8 import quantize_k, quantize_q
from lightning_indexer.problems.mqa_logits import MqaLogitsProblem
from lightning_indexer.selection import registry as dispatch

HEADS, HEAD_DIM, TOPK = 64, 128, 256
REQUESTS = (Request(3072, 512), Request(1500, 200), Request(0, 300), Request(7168, 256), Request(0, 1))
MAX_LOGITS_BYTES = 8 * 2**20
NEEDLES = 24


@dataclass(frozen=True, slots=True)
class _Batch:
    """Packed queries of all requests, and each request's own keys."""

    q: torch.Tensor
    weights: torch.Tensor
    keys: list[torch.Tensor]
    needles: list[tuple[int, int, int]]  # (request, row within it, key position)


def run_demo(device: torch.device, picture: Path, seed: int, *, quiet: bool = False) -> dict[str, Any]:
    """Runs the demo; prints it unless ``quiet``. Gives what it shows: how many keys were ``planted``, how many were
    ``found`` in their query's top-k, and the ``chunks``."""
    batch = _make_batch(device, seed)
    chunks = plan_chunks(REQUESTS, max_logits_bytes=MAX_LOGITS_BYTES)
    heading = (
        f"{len(REQUESTS)} requests, {sum(r.new for r in REQUESTS)} query rows, {sum(map(len, batch.keys))} keys,"
        f" H={HEADS} D={HEAD_DIM} on {device}; logits under {MAX_LOGITS_BYTES >> 20} MiB a chunk\n"
    )
    if not quiet:
        common.lines([heading])
    quantised = [quantize_k(keys) for keys in batch.keys]
    q_fp8 = quantize_q(batch.q)
    table = Table(
        ("chunk", Column("rows M", "rows"), Column("keys N", "keys"), "requests", "backend", Column("ms", format=".1f"),
         Column("GFLOP/s", "gflops", ".0f"), Column("in windows", "in_windows", ".0%"))
    )  # fmt: skip
    selected: dict[tuple[int, int], list[int]] = {}
    widest: tuple[torch.Tensor, Chunk] | None = None
    with common.progress() as progress:
        task = progress.add_task("scoring", total=len(chunks))
        for index, chunk in enumerate(chunks):
            logits = _score(index, chunk, batch, quantised, q_fp8, device, table, selected)
            progress.update(task, advance=1)
            if widest is None or len(chunk.slices) > len(widest[1].slices):
                widest = (logits, chunk)
    found = sum(key in selected[request, row] for request, row, key in batch.needles)
    if not quiet:
        common.show(table)
        common.lines([
            f"\nplanted keys found in the top-{TOPK} of their query: {found} / {len(batch.needles)}"
            f" (by chance {_chance(batch):.1f} would be)"
        ])  # fmt: skip
    assert widest is not None
    _draw(*widest, batch, picture)
    return {"planted": len(batch.needles), "found": found, "chunks": table.records(), "device": str(device)}


def _score(
    index: int, chunk: Chunk, batch: _Batch, quantised: list[tuple[torch.Tensor, torch.Tensor]], q_fp8: torch.Tensor,
    device: torch.device, table: Table, selected: dict[tuple[int, int], list[int]],
) -> torch.Tensor:  # fmt: skip
    """One chunk's logits; its line goes into the table, what it selects into ``selected``."""
    k_fp8 = torch.cat([quantised[s.request][0].view(torch.uint8) for s in chunk.slices]).view(torch.float8_e4m3fn)
    kv_scale = torch.cat([quantised[s.request][1] for s in chunk.slices])
    ks, ke = chunk.windows(device)
    rows = slice(chunk.token_start, chunk.token_stop)
    logits, seconds = _timed(q_fp8[rows], k_fp8, kv_scale, batch.weights[rows], ks, ke)
    indices = top_k_per_row(logits, TOPK, ks, ke)
    assert isinstance(indices, torch.Tensor)  # no values were asked for
    _collect(indices, chunk, selected)
    problem = MqaLogitsProblem(chunk.rows, chunk.keys, HEADS, HEAD_DIM)
    positions = positions_in_windows(ks, ke, chunk.keys)
    table.add(
        index, chunk.rows, chunk.keys, ", ".join(str(s.request) for s in chunk.slices),
        dispatch.select(problem, arch_of(device)).name, 1e3 * seconds,
        flop(HEADS, HEAD_DIM, positions) / seconds / 1e9, positions / logits.numel(),
    )  # fmt: skip
    return logits


def _make_batch(device: torch.device, seed: int) -> _Batch:
    generator = torch.Generator().manual_seed(seed)
    rows = sum(request.new for request in REQUESTS)
    q = torch.randn(rows, HEADS, HEAD_DIM, generator=generator)
    # The models' head gates are mostly positive; so is a query's interest in a key.
    weights = torch.rand(rows, HEADS, generator=generator)
    keys = [torch.randn(request.context + request.new, HEAD_DIM, generator=generator) for request in REQUESTS]
    needles, first_row = [], 0
    for index, request in enumerate(REQUESTS):
        # Every query sees a planted key: it lies among the context, or among the request's first tokens.
        for row in torch.randperm(request.new, generator=generator)[: NEEDLES // len(REQUESTS) + 1].tolist():
            key = int(torch.randint(0, request.context + row + 1, (1,), generator=generator))
            towards = torch.einsum("h,hd->d", weights[first_row + row], q[first_row + row])
            keys[index][key] = 3.0 * HEAD_DIM**0.5 * towards / towards.norm()
            needles.append((index, row, key))
        first_row += request.new
    # A later needle may have replaced an earlier one's key; keep those that stand.
    standing = {(request, key): (request, row, key) for request, row, key in needles}
    return _Batch(q.to(device), weights.to(device), [k.to(device) for k in keys], list(standing.values()))


def _timed(
    q: torch.Tensor, k: torch.Tensor, kv_scale: torch.Tensor, weights: torch.Tensor, ks: torch.Tensor, ke: torch.Tensor
) -> tuple[torch.Tensor, float]:
    fp8_mqa_logits(q, (k, kv_scale), weights, ks, ke)  # compiles, where the backend does
    _synchronize(q.device)
    start = time.perf_counter()
    logits = fp8_mqa_logits(q, (k, kv_scale), weights, ks, ke)
    _synchronize(q.device)
    return logits, time.perf_counter() - start


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _collect(indices: torch.Tensor, chunk: Chunk, selected: dict[tuple[int, int], list[int]]) -> None:
    """Keeps each row's positions, which count from its request's first key; rows with fewer keys than k have fewer."""
    rows = iter(indices.tolist())
    for part in chunk.slices:
        for inner in range(part.rows):
            selected[part.request, part.row_start + inner] = [position for position in next(rows) if position >= 0]


def _chance(batch: _Batch) -> float:
    return sum(min(1.0, TOPK / (REQUESTS[request].context + row + 1)) for request, row, _ in batch.needles)


def _draw(logits: torch.Tensor, chunk: Chunk, batch: _Batch, picture: Path) -> None:
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        common.err.print("no picture: `pip install matplotlib` brings what draws it", markup=False, highlight=False)
        return
    scores = logits.float().cpu()
    inside = scores.isfinite()
    low, high = (float(scores[inside].quantile(at)) for at in (0.02, 0.98)) if inside.sum() < 2**24 else (0.0, 1.0)
    figure = Figure(figsize=(11, 5.5), layout="constrained")
    axes = figure.subplots()
    image = axes.imshow(
        scores.masked_fill(~inside, float("nan")).numpy(), aspect="auto", interpolation="nearest", cmap="viridis",
        vmin=low, vmax=high, extent=(0, scores.shape[1], scores.shape[0], 0),
    )  # fmt: skip
    axes.set_facecolor("#e8e8e8")
    row = 0
    for part in chunk.slices:
        planted = [(r, k) for request, r, k in batch.needles if request == part.request]
        planted = [(r, k) for r, k in planted if part.row_start <= r < part.row_stop]
        axes.scatter(
            [part.key_start + k + 0.5 for _, k in planted], [row + r - part.row_start + 0.5 for r, _ in planted], s=70,
            facecolors="none", edgecolors="#d1495b", linewidths=1.4,
        )  # fmt: skip
        axes.annotate(
            f"request {part.request}: {part.rows} rows, {part.keys} keys",
            (part.key_start + 12, row + part.rows - 8),
            va="bottom",
            bbox={"facecolor": "white", "alpha": 0.85, "edgecolor": "none"},
        )
        row += part.rows
    axes.set(
        xlabel="gathered key n",
        ylabel="query row m",
        title="Logits of one chunk: grey is outside the windows, circles are planted keys",
    )
    figure.colorbar(image, label="logit")
    picture.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(picture, dpi=110)
    common.err.print(f"wrote {picture}", markup=False, highlight=False, soft_wrap=True)
