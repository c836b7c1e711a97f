"""Every instruction of the compiled ``triton-portable`` kernels has a row in the tables of these tests."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import test_mfma
import test_semantics_atomics
import test_semantics_compare
import test_semantics_convert
import test_semantics_crosslane
import test_semantics_lds
import test_semantics_memory
import test_semantics_salu
import test_semantics_valu_float
import test_semantics_valu_int
from helpers import SOURCES
from semantics import ARCHS, mnemonics

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "tests" / "compile" / "compile_triton.py"
BF16 = {"out_dtype": "bfloat16"}
COMPRESSED = {"clean_logits": False, "max_seqlen_k": 2048}
# H, D and form: together these have every instruction of all H from 8 to 128, D from 32 to 128, forms and result types.
KERNELS = {
    "gfx942": [
        (8, 128, COMPRESSED | BF16), (128, 32, {}), (8, 32, {}), (128, 32, BF16), (8, 64, {"clean_logits": False}),
    ],
    "gfx950": [
        (128, 128, COMPRESSED | BF16), (8, 32, {}), (32, 32, BF16), (8, 64, {"clean_logits": False}), (64, 32, {}),
        (8, 128, {}), (32, 64, {}), (32, 128, BF16), (128, 32, COMPRESSED | BF16),
    ],
}  # fmt: skip

TESTED = set().union(
    *(
        table.opcodes
        for module in (
            test_semantics_compare, test_semantics_convert, test_semantics_valu_float, test_semantics_valu_int,
        )
        for table in module.TABLES
    ),
    *(
        module.OPCODES
        for module in (
            test_mfma, test_semantics_atomics, test_semantics_crosslane, test_semantics_lds, test_semantics_memory,
            test_semantics_salu,
        )
    ),
)  # fmt: skip


@pytest.fixture(scope="module")
def compiled(tmp_path_factory) -> dict[str, list[str]]:
    """The assembly of each kernel; both archs are compiled at once, each in a process of its own."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"PYTHONPATH": SOURCES, "TRITON_CACHE_DIR": str(tmp_path_factory.mktemp("triton"))}
    running = {}
    for arch in ARCHS:
        problems = json.dumps([[1024, 8192, heads, head_dim, facts] for heads, head_dim, facts in KERNELS[arch]])
        command = [sys.executable, str(SCRIPT), arch, problems]
        running[arch] = subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
    texts = {}
    for arch, process in running.items():
        out, error = process.communicate()
        assert process.returncode == 0, error
        texts[arch] = [json.loads(line)["text"] for line in out.splitlines()]
    return texts


@pytest.mark.parametrize("arch", ARCHS)
def test_every_instruction_of_the_compiled_kernels_is_tested(arch, compiled):
    assert len(compiled[arch]) == len(KERNELS[arch])
    used = set().union(*(mnemonics(text) for text in compiled[arch])) - {"s_endpgm"}
    assert any(name.startswith("v_mfma") for name in used)
    assert len(used) > 100
    assert sorted(used - TESTED) == []
