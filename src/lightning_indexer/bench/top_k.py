"""Times ``top_k_per_row`` beside other implementations: ``python -m lightning_indexer.bench.top_k``.

Every implementation is first held against the reference: ours exactly, peers by their set of scores. Then medians with
the L2 cache flushed, and the floor of the same run: ``torch.amax`` over whole rows, one read of the logits.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import importlib.util
import json
import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass

import torch

from lightning_indexer.arch import arch_of
from lightning_indexer.bench.timing import measure
from lightning_indexer.calls.top_k import top_k_per_row
from lightning_indexer.problems.top_k import TopKProblem, reference_top_k
from lightning_indexer.selection import registry

HEADS = 32


@dataclass(frozen=True, slots=True)
class Shape:
    """One line of the table; ``window`` is ``causal``, ``packed`` (four requests) or ``decode`` (whole rows)."""

    rows: int
    width: int
    k: int = 2048
    window: str = "causal"
    ties: bool = False

    def __str__(self) -> str:
        k = "" if self.k == 2048 else f" k={self.k}"
        return f"{self.rows} x {self.width} {self.window}{k}{' ties' if self.ties else ''}"


PREFILL = (
    Shape(4096, 32768),
    Shape(1024, 131072),
    Shape(2048, 65536),
    Shape(8192, 8192),
    Shape(128, 32768),
    Shape(64, 1 << 20),
    Shape(1024, 32768, 512),
    Shape(1024, 32768, 1024),
    Shape(4096, 32768, window="packed"),
    Shape(4096, 32768, ties=True),
)
DECODE = tuple(Shape(b, n, window="decode") for n in (8192, 32768, 131072) for b in (1, 16, 64, 256))
CPU = (Shape(1024, 32768, window="decode"), Shape(64, 131072, window="decode"))

Run = Callable[[], object]


@dataclass(frozen=True, slots=True)
class Row:
    """Microseconds by implementation, None where it was wrong or cannot run; ``floor`` is ``torch.amax``."""

    shape: str
    floor: float
    times: dict[str, float | None]


def make(shape: Shape, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Scores of an indexer's distribution in rows of a padded stride, and starts and ends."""
    generator = torch.Generator(device).manual_seed(shape.rows + shape.width)
    weights = torch.randn((shape.rows, HEADS), generator=generator, device=device)
    logits = torch.zeros((shape.rows, -(-shape.width // 64) * 64), device=device)
    part = torch.empty_like(logits)
    for head in range(HEADS):
        logits.addcmul_(
            torch.randn(part.shape, generator=generator, device=device, out=part).relu_(), weights[:, head : head + 1]
        )
    if shape.ties:
        logits = logits.bfloat16().float()
    row = torch.arange(shape.rows, device=device)
    starts, ends = torch.zeros_like(row), torch.full_like(row, shape.width)
    if shape.window == "causal":
        ends = shape.width - shape.rows + 1 + row
    elif shape.window == "packed":
        request = row * 4 // shape.rows
        per_rows, per_keys = shape.rows // 4, shape.width // 4
        starts = request * per_keys
        ends = starts + per_keys - per_rows + row % per_rows + 1
    return logits[:, : shape.width], starts.int(), ends.int()


def implementations(
    shape: Shape, logits: torch.Tensor, starts: torch.Tensor, ends: torch.Tensor
) -> Iterator[tuple[str, Run, torch.Tensor | None]]:
    """Name, what to time, and the indices it writes (relative, ascending for ours); None: nothing to hold against."""
    rows, width = logits.shape
    arch = arch_of(logits.device)
    problem = TopKProblem(rows, width, shape.k)
    for name, kernel in registry.kernels(problem.operation).items():
        if (logits.device.type == "cuda") == (name == "torch-blocked") or kernel.supports(problem, arch):
            continue
        out = torch.empty((rows, shape.k), dtype=torch.int32, device=logits.device)

        def call(name: str = name, out: torch.Tensor = out) -> object:
            return top_k_per_row(logits, shape.k, starts, ends, out=out, backend=name)

        yield name, call, out
    yield "torch.topk", lambda: torch.topk(logits, shape.k, dim=1), None
    if logits.device.type == "cuda" and importlib.util.find_spec("topk_peers") is not None:
        peers = importlib.import_module("topk_peers")
        names = ["flashinfer", "sglang_decode" if shape.window == "decode" else "sglang_prefill"]
        for name in names:
            run, out = getattr(peers, name)(logits, starts, ends, shape.k)
            yield name, run, out


def right(name: str, out: torch.Tensor, logits: torch.Tensor, expected: torch.Tensor, starts: torch.Tensor) -> bool:
    """Ours: the indices themselves. Peers, whose ties and order are free: the same multiset of scores."""
    if "-" in name:
        return torch.equal(out, expected)

    def scores(indices: torch.Tensor) -> torch.Tensor:
        found = logits.gather(1, indices.clamp(min=0).long() + starts[:, None])
        return found.masked_fill(indices < 0, -math.inf).sort(dim=1).values

    return torch.equal(scores(out), scores(expected))


def run(shapes: Sequence[Shape], device: torch.device, budget_ms: float = 60.0) -> Iterator[Row]:
    """Checks and times every implementation at every shape."""
    for shape in shapes:
        logits, starts, ends = make(shape, device)
        expected, _ = reference_top_k(logits, shape.k, starts, ends)
        times: dict[str, float | None] = {}
        for name, call, out in implementations(shape, logits, starts, ends):
            call()
            if out is not None and not right(name, out, logits, expected, starts):
                times[name] = None
                continue
            times[name] = measure(call, device, budget_ms).median
        yield Row(str(shape), measure(functools.partial(logits.amax, 1), device, budget_ms).median, times)


def geomean(rows: Sequence[Row], name: str, over: str) -> float:
    """How many times faster ``name`` is than ``over``, over the shapes where both ran."""
    ratios = [b / a for row in rows if (a := row.times.get(name)) and (b := row.times.get(over))]
    return statistics.geometric_mean(ratios) if ratios else math.nan


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--shapes", choices=("prefill", "decode", "all"), default="prefill")
    parser.add_argument("--json", action="store_true", help="one JSON line a shape")
    chosen = parser.parse_args()
    device = torch.device(chosen.device)
    shapes = {"prefill": PREFILL, "decode": DECODE, "all": PREFILL + DECODE}[chosen.shapes]
    rows = []
    for row in run(shapes if device.type == "cuda" else CPU, device):
        rows.append(row)
        times = "  ".join(f"{name} {'wrong' if us is None else f'{us:.1f}'}" for name, us in row.times.items())
        print(json.dumps(asdict(row)) if chosen.json else f"{row.shape}: floor {row.floor:.1f}  {times}", flush=True)
    for name in {name: None for row in rows for name in row.times if "-" in name}:
        print(f"{name}: {geomean(rows, name, 'torch.topk'):.2f}x torch.topk (geomean)")


if __name__ == "__main__":
    main()
