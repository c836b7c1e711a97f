"""What is recorded beside a measurement: machine, versions, commit."""

from __future__ import annotations

import re
import subprocess

import torch

from helpers import CPU
from lightning_indexer.bench import environment
from lightning_indexer.check import memory

# The environment


def test_record_names_machine_versions_and_commit():
    facts = environment.record(CPU)
    assert list(facts)[:3] == ["device", "arch", "lightning-indexer"]
    assert facts["arch"] == "cpu"
    assert facts["torch"] == torch.__version__
    assert "threads" in facts["device"]
    assert re.fullmatch(r"[0-9a-f]{12}(-dirty)?|unknown|v?\d.*", facts["commit"])


def test_what_is_not_installed_has_no_version():
    assert environment.package_version("no-such-distribution") is None
    assert "no-such-distribution" not in environment.record(CPU)


def test_outside_a_checkout_there_is_no_commit(monkeypatch, tmp_path):
    monkeypatch.setattr(environment, "__file__", str(tmp_path / "environment.py"))
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert environment.commit() is None
    assert environment.record(CPU)["commit"] == "unknown"


def test_available_memory_is_read_from_the_system(monkeypatch):
    assert memory.available_bytes(CPU) > 2**20
    monkeypatch.setattr(memory.Path, "read_text", lambda path: "MemTotal: 9 kB\nMemAvailable:   1234 kB\n")
    assert memory.available_bytes(CPU) == 1234 * 1024


def test_a_package_inside_another_project_has_not_its_commit(tmp_path):
    def git(*arguments):
        subprocess.run(["git", "-c", "user.name=a", "-c", "user.email=a@b.c", *arguments], cwd=tmp_path, check=True)

    git("init", "-q")
    tracked, installed = tmp_path / "mine.py", tmp_path / "theirs.py"
    for path in (tracked, installed):
        path.write_text("")
    git("add", "mine.py")
    git("commit", "-q", "-m", "x")
    assert re.fullmatch(r"[0-9a-f]{12}", environment.commit(tracked))
    assert environment.commit(installed) is None
