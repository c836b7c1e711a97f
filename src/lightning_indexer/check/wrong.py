"""Where a result is wrong: the first positions, and a map small enough to keep and to draw."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

# Positions that are named, and cells of a map.
FIRST = 4
MAP_ROWS, MAP_COLUMNS = 64, 160


@dataclass(frozen=True, slots=True)
class WrongPositions:
    """Wrong elements of a result [rows, columns].

    Attributes:
        shape: of the result.
        count: how many are wrong.
        first: the first ones, in order of rows.
        cells: the result cut into at most 64 x 160 cells, and the share of each, 0 to 1, that is wrong.
    """

    shape: tuple[int, int]
    count: int
    first: tuple[tuple[int, int], ...]
    cells: tuple[tuple[float, ...], ...]

    @property
    def map(self) -> tuple[str, ...]:
        """The cells, a character each: ``.`` nothing is wrong, 1 to 9 about so many tenths are, ``#`` all is."""
        marks = ".123456789#"
        return tuple(
            "".join(marks[10 if cell == 1 else min(9, max(1, round(10 * cell))) if cell else 0] for cell in line)
            for line in self.cells
        )

    @classmethod
    def of_map(
        cls, shape: Sequence[int], count: int, first: Sequence[Sequence[int]], lines: Sequence[str]
    ) -> WrongPositions:
        """From what JSON holds; the cells are as exact as :attr:`map`."""
        share = {".": 0.0, "#": 1.0}
        cells = tuple(tuple(share[mark] if mark in share else int(mark) / 10 for mark in line) for line in lines)
        return cls((shape[0], shape[1]), count, tuple((at[0], at[1]) for at in first), cells)

    def __str__(self) -> str:
        named = ", ".join(f"[{row}, {column}]" for row, column in self.first)
        more = f", … {self.count} in all" if self.count > len(self.first) else ""
        return f"wrong at {named}{more}, of [{self.shape[0]}, {self.shape[1]}]"


class Wrong:
    """Collects masks of wrong elements of one result."""

    def __init__(self) -> None:
        self._mask: torch.Tensor | None = None

    def note(self, mask: torch.Tensor) -> None:
        """``mask``: [rows, columns] bool, True where an element is wrong."""
        if bool(mask.any()):
            self._mask = mask if self._mask is None else self._mask | mask

    def positions(self) -> WrongPositions | None:
        """What was noted; None where nothing was."""
        return None if self._mask is None else _positions(self._mask)


def _positions(mask: torch.Tensor) -> WrongPositions:
    rows, columns = mask.shape
    size = min(rows, MAP_ROWS), min(columns, MAP_COLUMNS)
    share = torch.nn.functional.adaptive_avg_pool2d(mask[None].float(), size)[0]
    first: list[tuple[int, int]] = []
    for row in mask.any(dim=1).nonzero()[:FIRST, 0].tolist():
        first += [(row, column) for column in mask[row].nonzero()[:FIRST, 0].tolist()]
    return WrongPositions(
        (rows, columns), int(mask.sum()), tuple(first[:FIRST]),
        tuple(tuple(round(cell, 4) for cell in line) for line in share.tolist()),
    )  # fmt: skip


def draw(titled: Sequence[tuple[str, WrongPositions]], path: Path) -> None:
    """:func:`figure_of`, as a PNG at ``path``."""
    figure_of(titled).savefig(path, dpi=110)


def figure_of(titled: Sequence[tuple[str, WrongPositions]]) -> Any:
    """One map below the other, by title and positions of each; matplotlib is needed."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 1 + 2.6 * len(titled)), layout="constrained")
    for axes, (title, wrong) in zip(figure.subplots(len(titled), squeeze=False)[:, 0], titled, strict=True):
        rows, columns = wrong.shape
        image = axes.imshow(
            [[100 * cell or float("nan") for cell in line] for line in wrong.cells], aspect="auto",
            interpolation="nearest", cmap="autumn_r", vmin=0, vmax=100, extent=(0, columns, rows, 0),
        )  # fmt: skip
        axes.scatter(
            [column + 0.5 for _, column in wrong.first], [row + 0.5 for row, _ in wrong.first], marker="x", s=30,
            color="black", linewidths=1.0, clip_on=False,
        )  # fmt: skip
        axes.set(xlabel="column", ylabel="row")
        axes.set_title(f"{title}: {wrong.count} wrong, crosses are the first", fontsize=9)
        figure.colorbar(image, ax=axes, label="% wrong")
    return figure
