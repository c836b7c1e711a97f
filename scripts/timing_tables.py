#!/usr/bin/env python3
"""Writes the tables of docs/timing.md that are of predictions, from docs/results/timing.json.

lightning-indexer timing --sweep docs/results/timing.json && scripts/timing_tables.py
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

DOCS = Path(__file__).resolve().parent.parent / "docs"
BEGIN, END = "<!-- {}: begin -->", "<!-- {}: end -->"
# The model is off by 13% on published rows of public code, root mean square: nearer predictions are no order.
OFF = 0.15
WHOLE = 32  # eight shapes, two windows, two numbers of heads
Record = dict[str, Any]


def tables(document: Record) -> str:
    """A table for each arch: predicted microseconds by backend, and what waves of the fastest wait for."""
    parts = []
    for arch in dict.fromkeys(row["arch"] for row in document["rows"]):
        rows = [row for row in document["rows"] if row["arch"] == arch and row["form"] == "clean"]
        backends = list(dict.fromkeys(row["backend"] for row in rows))
        names = " | ".join(f"`{backend}`" for backend in backends)
        lines = [
            f"{rows[0]['device']}, {arch}:", "",
            f"| H | rows | keys | window | {names} | waves of the fastest wait for |",
            "| --- | --- | --- | --- |" + " --- |" * (len(backends) + 1),
        ]  # fmt: skip
        cases: dict[tuple[Any, ...], dict[str, Record]] = {}
        for row in rows:
            cases.setdefault((row["heads"], row["rows"], row["keys"], row["window"]), {})[row["backend"]] = row
        for case, found in cases.items():
            fastest = min(found.values(), key=lambda row: row["predicted_us"])
            cells = [_cell(found.get(backend), fastest) for backend in backends]
            lines.append("| " + " | ".join([*map(str, case), *cells, _causes(fastest)]) + " |")
        if len(cases) < WHOLE:
            lines += ["", f"{len(cases)} of {WHOLE} rows: the sweep of this model is not whole."]
        parts.append("\n".join(lines))
    return "\n\n".join(parts)


def stalls(document: Record) -> str:
    """What waves wait for at (4096, 32768), causal, clean: share of wave-cycles by cause, every backend."""
    rows = [
        row for row in document["rows"]
        if (row["rows"], row["keys"], row["window"], row["form"]) == (4096, 32768, "causal", "clean")
    ]  # fmt: skip
    causes = list(dict.fromkeys(cause for row in rows for cause in row["stalls"]))
    lines = [
        f"| device | H | | {' | '.join(causes)} | issued | busiest unit |",
        "| --- | --- | --- |" + " --- |" * (len(causes) + 2),
    ]
    for row in rows:
        shares = [f"{100 * row['stalls'][cause]:.0f}%" for cause in causes]
        unit = max(row["busy"], key=row["busy"].__getitem__)
        head = [row["device"], str(row["heads"]), f"`{row['backend']}`"]
        tail = [f"{100 * row['issued']:.0f}%", f"{unit}, {row['busy'][unit]:.2f}"]
        lines.append("| " + " | ".join([*head, *shares, *tail]) + " |")
    return "\n".join(lines)


SECTIONS = {"predicted": tables, "stalls": stalls}


def filled(page: str, document: Record) -> str:
    """The page with each section as the document has it."""
    for name, make in SECTIONS.items():
        begin, end = BEGIN.format(name), END.format(name)
        before, rest = page.split(begin)
        page = f"{before}{begin}\n{make(document)}\n{end}{rest.split(end)[1]}"
    return page


def _cell(row: Record | None, fastest: Record) -> str:
    """Bold: the fastest; with a tilde what is not told from it."""
    if row is None:
        return ""
    us = row["predicted_us"]
    text = f"{us:.1f}" if us < 100 else f"{us:.0f}"
    if row is fastest:
        return f"**{text}**"
    return f"~{text}" if us <= fastest["predicted_us"] * (1 + OFF) else text


def _causes(row: Record) -> str:
    largest = sorted(row["stalls"].items(), key=lambda cause: -cause[1])[:2]
    return ", ".join(f"{cause} {100 * share:.0f}%" for cause, share in largest)


def main() -> None:
    page = DOCS / "timing.md"
    document = json.loads((DOCS / "results" / "timing.json").read_text())
    page.write_text(filled(page.read_text(), document))
    print(f"{page.name}: {len(document['rows'])} rows")


if __name__ == "__main__":
    main()
