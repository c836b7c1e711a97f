"""Every code block of README.md and docs: Python runs, commands parse.

The Python blocks of a page run in order, in one namespace and in a process of their own, one forked for each page. A
block under a comment ``<!-- not run: reason -->`` is only compiled. Of shell blocks, commands of this library parse
with all their options, and what others install or run is looked up in this repository.
"""

from __future__ import annotations

import ast
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
import typer

from lightning_indexer.cli.app import app

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
FENCE = re.compile(r"^( *)```(\w*)\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)
NOT_RUN = re.compile(r"<!-- not run: .+? -->\s*$")
# Programs of other projects.
OTHERS = {"vllm", "sglang", "lm_eval"}


class Block(NamedTuple):
    page: Path
    line: int
    language: str
    text: str
    runs: bool

    @property
    def name(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def blocks_of(page: Path) -> list[Block]:
    text = page.read_text()
    found = []
    for match in FENCE.finditer(text):
        indent, language, body = match.groups()
        line = text.count("\n", 0, match.start()) + 2
        body = "\n".join(part.removeprefix(indent) for part in body.split("\n"))
        found.append(Block(page, line, language, body, NOT_RUN.search(text[: match.start()]) is None))
    return found


BLOCKS = [block for page in PAGES for block in blocks_of(page)]
PYTHON = [block for block in BLOCKS if block.language == "python"]
PYTHON_PAGES = list(dict.fromkeys(block.page for block in PYTHON))

# PyTorch is imported once: with a process started for every page that would be most of the time.
RUNNER = """
import json, os, sys, traceback
import torch, lightning_indexer
failed = []
for page, blocks in json.load(sys.stdin).items():
    child = os.fork()
    if child == 0:
        namespace = {"__name__": "__main__"}
        try:
            for name, text in blocks:
                exec(compile(text, name, "exec"), namespace)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        sys.stdout.flush()
        os._exit(0)
    if os.waitpid(child, 0)[1]:
        failed.append(page)
sys.exit(", ".join(failed) or 0)
"""


def test_there_are_blocks():
    assert {page.name for page in PYTHON_PAGES} >= {"README.md", "adding-a-backend.md"}
    for page in PAGES:
        assert page.read_text().count("```") == 2 * len(blocks_of(page)), page


def test_blocks_have_a_known_language():
    for block in BLOCKS:
        assert block.language in ("python", "bash", "") or not block.runs, block.name


@pytest.mark.parametrize("block", PYTHON, ids=lambda block: block.name)
def test_python_compiles(block):
    ast.parse(block.text, block.name)


def test_python_runs(tmp_path):
    pages: dict[str, list[tuple[str, str]]] = {}
    for block in PYTHON:
        if block.runs:
            pages.setdefault(str(block.page.relative_to(ROOT)), []).append((block.name, block.text))
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    environment["LIGHTNING_INDEXER_CACHE_DIR"] = str(tmp_path / "kernels")
    done = subprocess.run(
        [sys.executable, "-W", "ignore::DeprecationWarning", "-c", RUNNER], input=json.dumps(pages), text=True,
        cwd=tmp_path, capture_output=True, check=False, timeout=900, env=environment,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


def commands_of(block: Block) -> list[list[str]]:
    """Its commands as words, without comments and assignments of variables before them."""
    commands = []
    for line in block.text.replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        while words and re.fullmatch(r"[A-Z_]+=.*", words[0], re.DOTALL):
            words = words[1:]
        if words:
            commands.append(words)
    return commands


COMMANDS = [
    pytest.param(words, id=f"{block.name} {' '.join(words[:2])}")
    for block in BLOCKS
    if block.language == "bash" or (block.language == "" and block.text.startswith(("pip ", "lightning-indexer ")))
    if block.runs
    for words in commands_of(block)
]


@pytest.mark.parametrize("words", COMMANDS)
def test_commands(words):
    program, *arguments = words
    if program == "torchrun":
        module = arguments.index("-m") + 1
        assert arguments[module] == "lightning_indexer"
        program, arguments = "lightning-indexer", arguments[module + 1 :]
    if program == "lightning-indexer":
        parse(arguments)
    elif program == "make":
        makefile = (ROOT / "Makefile").read_text()
        for target in arguments:
            assert re.search(rf"^{re.escape(target)}:", makefile, re.MULTILINE), target
    elif program == "pip":
        assert arguments[0] == "install"
        for requirement in arguments[1:]:
            check_requirement(requirement)
    elif "/" in program:
        assert (ROOT / program).is_file(), program
    else:
        assert program in OTHERS, program


def parse(arguments: list[str]) -> None:
    """As the command line does, up to running the verb."""
    group = typer.main.get_command(app)
    verb, *options = arguments
    assert verb in group.commands, verb
    command = group.commands[verb]
    with group.make_context("lightning-indexer", [verb], resilient_parsing=True) as parent:
        command.make_context(verb, options, parent=parent)


def check_requirement(requirement: str) -> None:
    """A path in this repository, with extras that its pyproject.toml has; or an option, or a distribution's name."""
    match = re.fullmatch(r"(\.[\w./-]*)(?:\[([\w,]+)\])?", requirement)
    if match is None:
        assert re.fullmatch(r"[\w-]+", requirement), requirement
        return
    project = ROOT / match[1] / "pyproject.toml"
    assert project.is_file(), requirement
    for extra in (match[2] or "").split(","):
        assert not extra or re.search(rf"^{extra} = \[", project.read_text(), re.MULTILINE), f"{requirement}: {extra}"
