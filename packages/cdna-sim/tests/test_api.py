"""Kernels run as a newcomer would: machine code or a code object, arrays and numbers, a report."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path

import numpy as np
import pytest

pytestmark = pytest.mark.skipif(sys.version_info < (3, 11), reason="the decoder, tinygrad, needs Python 3.11")

import cdna_sim  # noqa: E402
from cdna_sim import CodeObject, Memory, Options, SimulationFault, Simulator, UnknownOpcode, from_machine_code  # noqa: E402

ARCHS = ("gfx942", "gfx950")
END = "000081bf"
STORE_IDS = "82000224 008070dc01000200" + END
README = Path(__file__).parents[1] / "README.md"


def code(arch: str = "gfx950", **named: object) -> CodeObject:
    return from_machine_code(bytes.fromhex(STORE_IDS), arch, [("out", "pointer")], **named)  # type: ignore[arg-type]


@pytest.mark.parametrize("arch", ARCHS)
def test_machine_code_runs(arch):
    out = np.full(80, 7, np.uint32)
    report = cdna_sim.run(code(arch), 1, 64, [out[8:72]])
    np.testing.assert_array_equal(out, [7] * 8 + list(range(64)) + [7] * 8)
    assert report.by_opcode == {"v_lshlrev_b32": 1, "global_store_dword": 1, "s_endpgm": 1}
    assert report.stored == {"out": 256}
    assert (report.waves, report.grid, report.block) == (1, (1, 1, 1), (64, 1, 1))


def test_the_example_of_the_readme(capsys):
    blocks = re.findall(r"```\w*\n(.*?)```", README.read_text(), re.DOTALL)
    at = next(index for index, block in enumerate(blocks) if "from_machine_code(code" in block)
    example, printed = blocks[at : at + 2]
    exec(compile(example, "README.md", "exec"), {})
    addresses = re.compile(r"0x10000\w+")
    assert addresses.sub("", capsys.readouterr().out) == addresses.sub("", printed)


def test_load_takes_bytes_and_paths(tmp_path):
    elf = code().elf
    path = tmp_path / "kernel.hsaco"
    path.write_bytes(elf)
    for source in (elf, bytearray(elf), memoryview(elf), path, str(path)):
        loaded = CodeObject.load(source)
        assert (loaded.arch, list(loaded.kernels)) == ("gfx950", ["kernel"])


def test_what_machine_code_says_of_itself():
    made = from_machine_code(
        bytes.fromhex(END), "gfx942", [("a", "pointer"), ("n", "u32"), ("x", "f32"), ("size", "u64"), ("m", "u32")],
        name="one", vgprs=70, agprs=16, lds=1000, scratch=64, workgroup=256,
    )  # fmt: skip
    kernel = made.kernel("one")
    assert [(a.name, a.offset, a.size) for a in kernel.arguments] == [
        ("a", 0, 8), ("n", 8, 4), ("x", 12, 4), ("size", 16, 8), ("m", 24, 4),
    ]  # fmt: skip
    resources = kernel.resources
    assert (resources.vgpr, resources.agpr, resources.lds, resources.scratch) == (88, 16, 1000, 64)
    assert (kernel.max_workgroup, kernel.descriptor.preload_length, kernel.kernarg_bytes) == (256, 7, 28)
    many = from_machine_code(bytes.fromhex(END), "gfx950", [(f"p{n}", "pointer") for n in range(8)])
    assert many.kernel().descriptor.preload_length == 0, "16 dwords are more than there are registers for"
    cdna_sim.run(many, 1, 64, [np.zeros(1)] * 8)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((b"\0\0\0\0", "gfx950"), r"code: got 00000000 at its end, expected 000081bf \(s_endpgm\)"),
        ((bytes.fromhex(END), "gfx900"), "arch: got 'gfx900', expected one of gfx90a, gfx942, gfx950"),
        ((bytes.fromhex(END), "gfx950", [("x", "double")]), "x: got type 'double', expected one of pointer, u32"),
    ],
)
def test_machine_code_is_checked(arguments, message):
    with pytest.raises(ValueError, match=message):
        from_machine_code(*arguments)


def test_arguments_that_do_not_fit():
    simulator = Simulator(code())
    with pytest.raises(ValueError, match="out: the array is not contiguous"):
        simulator.run(1, 64, [np.zeros((64, 2), np.uint32)[:, 0]])
    fixed = np.zeros(64, np.uint32)
    fixed.flags.writeable = False
    with pytest.raises(ValueError, match="out: the array is read-only"):
        simulator.run(1, 64, [fixed])
    with pytest.raises(SimulationFault, match=r"store of 4 bytes at .* in out, which is read-only"):
        simulator.run(1, 64, [fixed], outputs=[])
    with pytest.raises(ValueError, match="kernel: got 2 arguments, expected 1"):
        simulator.run(1, 64, [np.zeros(64, np.uint32), 3])
    with pytest.raises(SimulationFault, match="outside every buffer"):
        simulator.run(1, 64, [np.int64(0)])


def test_arrays_are_far_apart_and_keep_their_alignment():
    memory, whole = Memory(), np.zeros(100, np.uint32)
    first, second = memory.place("a", whole), memory.place("b", whole[1:])
    assert second - first > 2**35
    assert (first - whole.ctypes.data) % 2**16 == 0
    assert (second - whole.ctypes.data) % 2**16 == 4


def test_an_arch_that_is_not_modelled_is_named():
    with pytest.raises(UnknownOpcode, match="arch gfx90a: only gfx942 and gfx950 are modelled"):
        Simulator(code("gfx90a"))


def test_a_new_arch_is_a_row(monkeypatch):
    """One row, and its code objects are read, bounded and run."""
    row = cdna_sim.Arch("gfx999", 0x7F, 2048, 512, fp8="fn", opcodes="CDNA4", read_banks=64, late=1)
    monkeypatch.setitem(cdna_sim.ARCHS, "gfx999", row)
    out = np.zeros(64, np.uint32)
    cdna_sim.run(code("gfx999"), 1, 64, [out])
    np.testing.assert_array_equal(out, range(64))
    assert cdna_sim.lds_limit("gfx999") == 2048
    with pytest.raises(SimulationFault, match="4096 bytes of LDS of 2048"):
        cdna_sim.run(code("gfx999", lds=4096), 1, 64, [out])
    assert cdna_sim.simulated() == ("gfx942", "gfx950", "gfx999")


def test_instructions_of_the_next_generation_are_refused_by_name():
    swap = bytes.fromhex("02b3027e" + END)  # v_permlane16_swap_b32 v1, v2
    cdna_sim.run(from_machine_code(swap, "gfx950"), 1, 64, [])
    with pytest.raises(UnknownOpcode, match=r"v_permlane16_swap_b32 \(VOP1\): gfx942 has no such instruction"):
        cdna_sim.run(from_machine_code(swap, "gfx942"), 1, 64, [])


def test_what_is_missing_is_said(monkeypatch):
    assert cdna_sim.missing() is None
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "tinygrad" else object())
    assert cdna_sim.missing() == "simulation needs tinygrad: pip install 'tinygrad>=0.14,<0.15'"
    monkeypatch.setattr(sys, "hexversion", 0x030A0000)
    assert cdna_sim.missing() == "simulation needs Python 3.11 or newer: its instruction decoder, tinygrad, does"
    assert Options().deferred
