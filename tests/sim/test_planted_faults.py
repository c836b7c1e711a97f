"""Faults planted into real kernels: the simulator must notice them.

Every wait and every barrier of a compiled Triton kernel is left out, one at a time; and a row offset is computed in 32
bits.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

from cdna_sim import Options, SimulationFault
from lightning_indexer.amd import launcher_for, simulation
from lightning_indexer.amd.clang import compile_hip
from processes import python

pytestmark = pytest.mark.skipif(sys.version_info < (3, 11), reason="the decoder, tinygrad, needs Python 3.11")


# In a process of its own: this one's Triton is the interpreter.
LEAVE_OUT = """
import json, sys
import torch
from lightning_indexer import Arch, MqaLogitsProblem
from lightning_indexer.backends.triton_portable.mqa_logits import Launch
from lightning_indexer.backends.triton_portable.config import heuristic
from lightning_indexer.check.cases import make_inputs, make_windows
from lightning_indexer.amd import simulation
from lightning_indexer.problems.mqa_logits import MqaLogitsCall
from cdna_sim import Options, SimulationFault, listing

arch, heads = Arch.parse(sys.argv[1]), int(sys.argv[2])
rows, keys, head_dim = 2, 300, 128
inputs = make_inputs(rows, keys, heads, head_dim, torch.device("cpu"))
problem = MqaLogitsProblem(rows, keys, heads, head_dim)
launch = Launch(problem, arch, heuristic(problem, arch))
ks, ke = (torch.tensor(ends, dtype=torch.int32) for ends in ((0, 5), (300, 131)))
operands = MqaLogitsCall(inputs.q_fp8, inputs.k_fp8, inputs.kv_scale, inputs.weights, ks, ke)


def run(drop=frozenset(), order="forward", seed=0):
    out = torch.full((rows, 320), float("nan"))[:, :keys]
    with simulation(arch.name, Options(drop=drop, order=order, seed=seed)) as simulator:
        launch(operands._replace(out=out))
    return out, simulator.reports[-1]


good, report = run()
built = launch.build(launch.arguments(operands._replace(out=torch.empty(rows, 320)[:, :keys])))
found = []
for pc, _, text in listing(built.code_object, built.kernel):
    if not text.startswith(("s_waitcnt", "s_barrier")):
        continue
    entry = {"pc": pc, "text": text, "executed": report.by_pc.get(pc, 0), "caught": ""}
    for order, seed in (("forward", 0), ("reversed", 0), ("shuffled", 1), ("shuffled", 2)):
        if not entry["executed"] or entry["caught"]:
            break
        try:
            out, _ = run(frozenset({pc}), order, seed)
            entry["caught"] = "" if torch.equal(out, good) else "wrong result"
        except SimulationFault as fault:
            entry["caught"] = str(fault)
    found.append(entry)
print(json.dumps(found))
"""


@pytest.mark.parametrize(("arch", "heads"), [("gfx950", 32)])
def test_each_wait_and_each_barrier_left_out(arch, heads):
    entries = [entry for entry in json.loads(python("-c", LEAVE_OUT, arch, str(heads))) if entry["executed"]]
    for kind in ("s_waitcnt", "s_barrier"):
        mine = [entry for entry in entries if entry["text"].startswith(kind)]
        missed = [f"{entry['pc']:#x} {entry['text']}" for entry in mine if not entry["caught"]]
        print(f"{arch} H={heads}: {kind} caught {len(mine) - len(missed)} of {len(mine)}, missed {missed}")
        assert len(mine) >= 8
        assert missed == []


OFFSETS = """
extern "C" __attribute__((global, amdgpu_flat_work_group_size(64, 64))) void kernel(char* out, WIDTH stride) {
  const WIDTH row = __builtin_amdgcn_workgroup_id_x();
  if (__builtin_amdgcn_workitem_id_x() == 0) out[row * stride] = 7;
}
"""


@pytest.mark.parametrize("arch", ["gfx942", "gfx950"])
def test_row_offsets_in_32_bits(arch, tmp_path, monkeypatch):
    """Row 2 of rows 1.2 GB apart: its offset passes 2^31, and in 32 bits lies before the buffer."""
    monkeypatch.setenv("LIGHTNING_INDEXER_CACHE_DIR", str(tmp_path / "cache"))
    source = Path(tmp_path, "mqa_logits.hip")
    source.write_text(OFFSETS)
    stride = 1_200_000_000
    out = torch.empty(2 * stride + 1, dtype=torch.uint8)  # address space; three pages of it are touched

    def launch(width: str) -> None:
        built = compile_hip(source, arch, {"WIDTH": width}, flags=("-fwrapv",))
        with simulation(arch, Options(order="reversed")):
            launcher_for(out.device).launch(built, (3, 1, 1), 64, (out, stride), outputs=("out",))

    out[0] = out[stride] = out[2 * stride] = 0
    launch("__INT64_TYPE__")
    assert [int(out[row * stride]) for row in range(3)] == [7, 7, 7]
    with pytest.raises(SimulationFault, match=r"store of 1 bytes? at .* before out") as caught:
        launch("int")
    assert caught.value.workgroup == (2, 0, 0)
