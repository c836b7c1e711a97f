"""One launched ``Run`` of each backend, given one problem in memory of several kinds: layouts.py.

What Triton compiles is simulated in processes of its own: this one's Triton is the interpreter.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
import torch
from layouts import problem_of, wrong_layouts

from lightning_indexer import Arch
from lightning_indexer.selection import registry
from processes import python

HERE = Path(__file__).resolve().parent
simulated = pytest.mark.skipif(sys.version_info < (3, 11), reason="the decoder, tinygrad, needs Python 3.11")


@simulated
@pytest.mark.parametrize(
    ("backend", "arch"),
    [
        ("triton-portable", "gfx942"),
        ("triton-portable", "gfx950"),
        ("gluon-gfx950", "gfx950"),
        ("hip-gfx950", "gfx950"),
        ("flydsl", "gfx942"),
        ("flydsl", "gfx950"),
    ],
)
def test_one_run_takes_memory_of_every_kind(backend, arch):
    if (reason := registry.get(backend).missing()) is not None:
        pytest.skip(reason)
    text = python(HERE / "layouts.py", backend, arch, PYTHONPATH=os.pathsep.join(path for path in sys.path if path))
    assert json.loads(text.splitlines()[0]) == []


@pytest.mark.parametrize("backend", ["torch-blocked", "triton-portable"])
@pytest.mark.parametrize("form", ["clean", "compressed"])
def test_one_run_on_the_cpu_takes_memory_of_every_kind(backend, form):
    kernel, arch = registry.kernel(backend), Arch.parse("cpu")
    problem = problem_of(form, 32, torch.float8_e4m3fn)
    assert kernel.supports(problem, arch) is None
    assert wrong_layouts(kernel.launch(problem, arch, kernel.config(problem, arch)), problem) == []
