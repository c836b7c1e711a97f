"""``lightning-indexer`` and ``python -m lightning_indexer``."""

from __future__ import annotations

import io
import sys


def main() -> None:
    """Runs the command line; says what to install where its packages are missing."""
    try:
        from lightning_indexer.cli.app import app
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] not in ("typer", "rich", "click"):
            raise
        if sys.argv[1:2] == ["info"]:
            from lightning_indexer.cli import info

            sys.exit(info.main(sys.argv[2:]))
        sys.exit(
            f"lightning-indexer: the command line needs {error.name}: pip install '.[cli]' from a clone; "
            "`lightning-indexer info` works without"
        )
    for stream in (sys.stdout, sys.stderr):
        # An ASCII stream (LANG=C) takes no "…": a mark in its place is better than no text.
        if isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="replace")
    app(prog_name="lightning-indexer")


if __name__ == "__main__":
    main()
