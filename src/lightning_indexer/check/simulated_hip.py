"""What ``verify --arch gfx950`` runs of ``hip-gfx950`` beside the cases of every backend: its tunables, odd shapes."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from lightning_indexer.backends.hip_gfx950.config import Strategy, Tunables
from lightning_indexer.check.cases import WINDOWS, Case, Form, Window, window_applies

# Single rows, sizes around tiles, few rows over many tiles, rows that straddle workgroups. Then what the heuristic
# streams: N >= 8 M.
SHAPES = ((1, 1), (1, 17), (17, 113), (61, 160), (64, 384), (32, 32), (3, 1560), (13, 671), (2, 2049), (5, 4096))
FEW_SHAPES = ((17, 113),)
# Every tunable combination runs here: two row blocks of the widest kind and a partial one, two splits with work.
TUNED_SHAPE = (19, 330)
EVEN_TUNED_SHAPE = (18, 324)  # as long, and ``cp`` applies


def combinations() -> list[Tunables]:
    """Every combination of tunables that kernels are built for."""
    found = []
    for block_m, warps, splits, reverse, relu in itertools.product(
        (2, 4, 8), (1, 2, 4, 8), (1, 3), (False, True), ("clamp", "max")
    ):
        if (block_m, warps) == (8, 8):
            continue  # more registers than eight waves have
        common = {"block_m": block_m, "num_warps": warps, "split_n": splits, "reverse_rows": reverse, "relu": relu}
        for unroll2 in (False, True):
            found.append(Tunables(strategy="stream", unroll2=unroll2, **common))  # type: ignore[arg-type]
        found.append(Tunables(strategy="lds", **common))  # type: ignore[arg-type]
    return found


def few_combinations() -> list[Tunables]:
    """Some of them, in both strategies: few kernels to compile."""
    stream, lds = Tunables(strategy="stream", split_n=3), Tunables(strategy="lds", split_n=3)
    return [
        stream,
        lds,
        Tunables(strategy="stream", block_m=2, num_warps=2, unroll2=False, reverse_rows=True, split_n=1, relu="clamp"),
        Tunables(strategy="lds", block_m=8, num_warps=2, reverse_rows=False, split_n=3, relu="clamp"),
    ]


def cases(thorough: bool, windows: Sequence[str]) -> Iterator[tuple[Case, Tunables]]:
    """Cases at H=32, D=128, each with the tunables it runs with.

    ``thorough``: every shape x window x clean {1, 0} with either strategy, then every tunable combination, windows and
    forms in turn. Otherwise a few of each.
    """
    forms: tuple[Form, ...] = ("clean", "noclean")
    strategies: tuple[Strategy, ...] = ("stream", "lds")
    for shape, strategy in itertools.product(SHAPES if thorough else FEW_SHAPES, strategies):
        for window, form in itertools.product(WINDOWS, forms):
            if window in windows and window_applies(window, *shape):
                yield Case(*shape, 32, 128, window, form), Tunables(strategy=strategy)
    names: list[Window] = [window for window in WINDOWS if window in windows]
    turn = 0
    for tunables in combinations() if thorough else few_combinations():
        for form in forms:
            window = names[turn % len(names)]
            shape = EVEN_TUNED_SHAPE if window == "cp" else TUNED_SHAPE
            yield Case(*shape, 32, 128, window, form), tunables
            turn += 1
        turn += 1  # so that a window meets both forms
