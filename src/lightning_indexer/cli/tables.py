"""Tables for terminals of any width, for pipes and for programs; needs nothing that is not in Python itself.

Columns of numbers are as wide as their longest number. Columns of text wrap between words. Where that does not fit, a
table is printed as blocks, a row each, a line a column: no number is ever cut or split.
"""

from __future__ import annotations

import dataclasses
import math
import os
import re
import shutil
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

# Of streams that are no terminal: a row of a table is one line there.
UNLIMITED = 100_000
# A text column is not made narrower than this; below it, blocks are easier to read.
_LEAST_TEXT = 16
_GAP = "  "


@dataclass(frozen=True, slots=True)
class Column:
    """A column: its title, the key it has in JSON, the format of its numbers, and what stands for None."""

    title: str
    key: str = ""
    format: str = ""
    none: str = "-"

    @property
    def name(self) -> str:
        return self.key or re.sub(r"\W+", "_", self.title.lower()).strip("_")

    def text(self, value: Any) -> str:
        if value is None:
            return self.none
        if isinstance(value, bool):
            return "yes" if value else ""
        return format(value, self.format) if isinstance(value, (int, float)) else str(value)


@dataclass(slots=True)
class Table:
    """Rows of values: numbers stay numbers until they are printed."""

    columns: Sequence[Column | str]
    title: str = ""
    caption: str = ""
    rows: list[tuple[Any, ...]] = field(default_factory=list)

    def add(self, *values: Any) -> None:
        if len(values) != len(self.columns):
            raise ValueError(f"row: got {len(values)} values, expected {len(self.columns)}")
        self.rows.append(values)

    def _columns(self) -> list[Column]:
        return [Column(c) if isinstance(c, str) else c for c in self.columns]

    def records(self) -> list[dict[str, Any]]:
        """Rows by column, for JSON."""
        names = [column.name for column in self._columns()]
        return [dict(zip(names, map(plain, row), strict=True)) for row in self.rows]

    def render(self, width: int) -> str:
        """The table within ``width`` characters, or as near to it as its longest number and name allow."""
        columns = self._columns()
        titles = [column.title for column in columns]
        body = [[column.text(value) for column, value in zip(columns, row, strict=True)] for row in self.rows]
        right = [
            any(isinstance(row[at], (int, float)) for row in self.rows)
            and not any(isinstance(row[at], str) and " " in row[at] for row in self.rows)
            for at in range(len(columns))
        ]
        parts = [wrap(self.title, width)] if self.title else []
        parts.append(_grid(titles, body, right, width))
        if self.caption:
            parts.append(wrap(self.caption, width))
        return "\n".join(parts)


def terminal_width() -> int:
    """Columns of the terminal behind the output; ``COLUMNS`` overrules it; a pipe or a file has no limit."""
    chosen = os.environ.get("COLUMNS", "")
    if chosen.isdecimal() and int(chosen):
        return int(chosen)
    return shutil.get_terminal_size((80, 24)).columns if sys.stdout.isatty() else UNLIMITED


def wrap(text: str, width: int, indent: str = "") -> str:
    """Text in lines of at most ``width``; later lines of a paragraph are indented. Longer words stay whole."""
    return "\n".join("\n".join(_wrapped(line, width, indent)) for line in text.split("\n"))


def markdown(text: str, width: int) -> str:
    """Markdown for a terminal: tables that are wider than it are set anew, other lines wrap between words."""
    done: list[str] = []
    lines = text.split("\n")
    at = 0
    while at < len(lines):
        if not (lines[at].startswith("|") and lines[at + 1 : at + 2] and re.fullmatch(r"[|\s:-]+", lines[at + 1])):
            done.append(wrap(lines[at], width, "  " if lines[at].startswith("- ") else ""))
            at += 1
            continue
        end = at
        while end < len(lines) and lines[end].startswith("|"):
            end += 1
        if max(map(len, lines[at:end])) <= width:
            done += lines[at:end]
        else:
            header, _, *body = [_cells(line) for line in lines[at:end]]
            right = [all(_numeric(row[i]) for row in body) for i in range(len(header))]
            done.append(_grid(header, body, right, width))
        at = end
    return "\n".join(done)


def plain(value: Any) -> Any:
    """What JSON can hold: no NaN or infinity, no types of its own."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): plain(each) for key, each in value.items()}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, (list, tuple, set)):
        return [plain(each) for each in value]
    return value if value is None or isinstance(value, (bool, int, str)) else str(value)


def _cells(line: str) -> list[str]:
    return [cell.strip().replace("\\|", "|") for cell in re.split(r"(?<!\\)\|", line)[1:-1]]


def _numeric(text: str) -> bool:
    return not text or text[0].isdigit() or text[0] in "-+." or text in ("wrong", "inf", "nan")


def _grid(titles: Sequence[str], body: Sequence[Sequence[str]], right: Sequence[bool], width: int) -> str:
    columns = [[title, *(row[at] for row in body)] for at, title in enumerate(titles)]
    widths = [max(len(cell) for cell in column) for column in columns]
    # Titles of numbers wrap, numbers do not.
    numbers = [max([*map(len, column[1:]), *map(len, column[0].split())], default=0) for column in columns]
    least = [
        numbers[at] if is_right else min(widths[at], max(_LEAST_TEXT, *map(_longest_word, columns[at])))
        for at, is_right in enumerate(right)
    ]
    spare = width - len(_GAP) * (len(titles) - 1) - sum(least)
    if spare < 0:
        return _blocks(titles, body, width)
    # What is left over goes to the column that lacks least, so that most columns get all they want.
    for at in sorted(range(len(titles)), key=lambda at: widths[at] - least[at]):
        more = min(spare, widths[at] - least[at])
        least[at] += more
        spare -= more
    lines = [*_row(titles, right, least), _GAP.join("-" * each for each in least)]
    for row in body:
        lines += _row(row, right, least)
    return "\n".join(line.rstrip() for line in lines)


def _row(cells: Sequence[str], right: Sequence[bool], widths: Sequence[int]) -> list[str]:
    folded = [_wrapped(cell, width) for cell, width in zip(cells, widths, strict=True)]
    lines = []
    for number in range(max(map(len, folded), default=1)):
        texts = [cell[number] if number < len(cell) else "" for cell in folded]
        lines.append(
            _GAP.join(
                text.rjust(width) if is_right else text.ljust(width)
                for text, is_right, width in zip(texts, right, widths, strict=True)
            )
        )
    return lines


def _blocks(titles: Sequence[str], body: Sequence[Sequence[str]], width: int) -> str:
    margin = min(max(map(len, titles[1:]), default=0), max(8, width // 3))
    blocks = []
    for row in body:
        lines = _wrapped(f"{titles[0]} {row[0]}", width, "  ")
        for title, cell in zip(titles[1:], row[1:], strict=True):
            if cell:
                lines += _wrapped(f"  {title.ljust(margin)}  {cell}", width, " " * (margin + 4))
        blocks.append("\n".join(lines))
    return "\n".join(blocks)


def _longest_word(text: str) -> int:
    return max(map(len, _pieces(text)), default=0)


def _pieces(text: str) -> list[str]:
    """Where a line may end: between words, and behind the joints of long names."""
    return [piece for word in text.split() for piece in _joints(word)]


def _joints(word: str) -> list[str]:
    return re.findall(r".+?(?:[_/,](?=[A-Za-z])|$)", word) if len(word) > _LEAST_TEXT else [word]


def _wrapped(text: str, width: int, indent: str = "") -> list[str]:
    if len(text) <= width:
        return [text]
    lines = [text[: len(text) - len(text.lstrip())]]
    start = True
    for gap, word in re.findall(r"(\s*)(\S+)", text):
        for number, piece in enumerate(_joints(word)):
            before = gap if number == 0 and not start else ""
            if not start and len(lines[-1]) + len(before) + len(piece) > width:
                lines[-1] = lines[-1].rstrip()
                lines.append(indent)
                before = ""
            lines[-1] += before + piece
            start = False
    return lines


def many(tables: Iterable[Table], width: int) -> str:
    """Tables below each other, an empty line between."""
    return "\n\n".join(table.render(width) for table in tables)
