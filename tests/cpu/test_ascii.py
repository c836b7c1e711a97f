"""The command line on a stream that holds ASCII alone, as in containers without a locale."""

from __future__ import annotations

import io
import sys

import pytest
from typer.main import get_command

from lightning_indexer import __main__ as entry
from lightning_indexer.cli.app import app

VERBS = sorted(get_command(app).commands)


class Ascii(io.TextIOWrapper):
    def __init__(self):
        super().__init__(io.BytesIO(), encoding="ascii", errors="strict", write_through=True)

    @property
    def text(self) -> str:
        return self.buffer.getvalue().decode("ascii")


@pytest.mark.parametrize(
    "arguments", [["--help"], *([verb, "--help"] for verb in VERBS), ["plan", "--requests", "32768:4096"]]
)
def test_text_on_an_ascii_stream(monkeypatch, arguments):
    streams = Ascii(), Ascii()
    monkeypatch.setattr(sys, "stdout", streams[0])
    monkeypatch.setattr(sys, "stderr", streams[1])
    monkeypatch.setattr(sys, "argv", ["lightning-indexer", *arguments])
    with pytest.raises(SystemExit) as ended:
        entry.main()
    assert ended.value.code in (0, None)
    assert ("Usage: lightning-indexer" if "--help" in arguments else "4096") in streams[0].text
    assert streams[1].text == ""
