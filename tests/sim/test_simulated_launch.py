"""HIP kernels compiled, launched and simulated on torch tensors: what a kernel may touch, and what it is told."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from cdna_sim import Options, SimulationFault
from lightning_indexer.amd import launcher_for, simulation
from lightning_indexer.amd.built import Built
from lightning_indexer.amd.clang import compile_hip

pytestmark = pytest.mark.skipif(sys.version_info < (3, 11), reason="the decoder, tinygrad, needs Python 3.11")

ARCHS = ("gfx942", "gfx950")
SOURCE = """
using i64 = long long;
#define KERNEL extern "C" __attribute__((global, amdgpu_flat_work_group_size(BLOCK, BLOCK))) void
#define LANE (__builtin_amdgcn_workgroup_id_x() * BLOCK + __builtin_amdgcn_workitem_id_x())
struct Size { int rows, columns; };

#if WHICH == 0  // out[r, c] = a * x[r, c], rows apart by their strides
KERNEL kernel(float* out, const float* x, Size size, i64 out_stride, i64 x_stride, float a) {
  const int i = LANE;
  if (i >= size.rows * size.columns) return;
  const int row = i / size.columns, column = i % size.columns;
  out[row * out_stride + column] = a * x[row * x_stride + column];
}
#elif WHICH == 1  // the next workgroup's number into this one's place, through LDS
KERNEL kernel(int* out) {
  __attribute__((shared)) int shared[BLOCK];
  const int lane = __builtin_amdgcn_workitem_id_x();
  shared[lane] = LANE;
  __builtin_amdgcn_fence(__ATOMIC_RELEASE, "workgroup");
  __builtin_amdgcn_s_barrier();
  __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "workgroup");
  out[LANE] = shared[(lane + 64) % BLOCK] * 1000 + __builtin_amdgcn_workgroup_id_y();
}
#elif WHICH == 2  // at an offset from the pointer that the host chooses
KERNEL kernel(char* out, const char* x, i64 out_offset, i64 x_offset) {
  if (LANE == 5) out[out_offset] = x[x_offset];
}
#endif
"""


@pytest.fixture
def kernel(tmp_path, monkeypatch):
    monkeypatch.setenv("LIGHTNING_INDEXER_CACHE_DIR", str(tmp_path / "cache"))
    source = Path(tmp_path, "mqa_logits.hip")
    source.write_text(SOURCE)

    def build(which: int, arch: str, block: int = 64) -> Built:
        return compile_hip(source, arch, {"WHICH": which, "BLOCK": block})

    return build


@pytest.mark.parametrize("arch", ARCHS)
def test_views_structs_and_numbers(kernel, arch):
    x = torch.randn(6, 50)[1:, 3:40]
    out = torch.full((5, 41), -1.0)
    size = (5).to_bytes(4, "little") + (37).to_bytes(4, "little")
    with simulation(arch) as simulator:
        launcher_for(out.device).launch(
            kernel(0, arch, 128), (2, 1, 1), 128, (out[:, :37], x, size, 41, 50, -0.5), outputs=("out",)
        )
    assert torch.equal(out[:, :37], x * -0.5)
    assert bool((out[:, 37:] == -1.0).all())
    [report] = simulator.reports
    assert report.stored == {"out": 5 * 37 * 4}
    assert report.loaded["x"] == 5 * 37 * 4
    assert report.waves == 4


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("order", ["forward", "reversed", "shuffled"])
def test_workgroups_of_several_waves_over_a_grid(kernel, arch, order):
    out = torch.zeros(3 * 256, dtype=torch.int32)
    with simulation(arch, Options(order=order, seed=3)) as simulator:
        simulator.launch(kernel(1, arch, 256), (3, 1, 1), (256, 1, 1), (out,))
    lanes = torch.arange(3 * 256, dtype=torch.int32).view(3, 256)
    assert torch.equal(out.view(3, 256), lanes.roll(-64, 1) * 1000)


@pytest.mark.parametrize(
    ("x_offset", "place"),
    [(0, None), (31, None), (32, "0 bytes past the end of x"), (-1, "1 bytes before x"), (2**33, "past the end of x")],
)
def test_loads_stay_inside_their_tensor(kernel, x_offset, place):
    # One buffer on the host, two tensors in it: what lies between and behind them belongs to neither.
    storage = torch.arange(96, dtype=torch.uint8)
    x, out = storage[32:64], storage[64:80]
    built = kernel(2, "gfx950")
    with simulation("gfx950") as simulator:
        if place is None:
            simulator.launch(built, (1, 1, 1), 64, (out, x, 3, x_offset))
            assert int(out[3]) == 32 + x_offset
            return
        with pytest.raises(SimulationFault) as raised:
            simulator.launch(built, (1, 1, 1), 64, (out, x, 3, x_offset))
    fault = raised.value
    assert place in str(fault)
    assert (fault.kernel, fault.lane, fault.workgroup) == ("kernel", 5, (0, 0, 0))
    start, stop = built.info.text
    assert fault.pc is not None
    assert start <= fault.pc < stop
    assert "load" in fault.text
    assert torch.equal(storage, torch.arange(96, dtype=torch.uint8)), "nothing was written"


@pytest.mark.parametrize(("out_offset", "place"), [(16, "0 bytes past the end of out"), (-1, "1 bytes before out")])
def test_stores_stay_inside_their_tensor(kernel, out_offset, place):
    storage = torch.zeros(48, dtype=torch.uint8)
    with simulation("gfx942") as simulator, pytest.raises(SimulationFault, match=place):
        simulator.launch(
            kernel(2, "gfx942"), (1, 1, 1), 64, (storage[16:32], torch.ones(1, dtype=torch.uint8), out_offset, 0)
        )
    assert not bool(storage.any())


def test_inputs_are_not_written(kernel):
    x, out = torch.ones(8, dtype=torch.uint8), torch.zeros(8, dtype=torch.uint8)
    built = kernel(2, "gfx950")
    with simulation("gfx950") as simulator:
        simulator.launch(built, (1, 1, 1), 64, (out, x, 0, 0), outputs=("out",))
        assert int(out[0]) == 1
        with pytest.raises(SimulationFault, match="out"):
            simulator.launch(built, (1, 1, 1), 64, (out, x, 1, 0), outputs=())
    assert int(out[1]) == 0


def test_an_empty_tensor_has_no_bytes(kernel):
    empty = torch.empty(0, dtype=torch.uint8)
    with simulation("gfx950") as simulator, pytest.raises(SimulationFault, match="0 bytes past the end of x"):
        simulator.launch(kernel(2, "gfx950"), (1, 1, 1), 64, (torch.zeros(1, dtype=torch.uint8), empty, 0, 0))


def test_a_tensor_elsewhere_is_refused(kernel):
    meta = torch.empty(4, dtype=torch.uint8, device="meta")
    with (
        simulation("gfx950") as simulator,
        pytest.raises(ValueError, match="x: got a tensor on meta, expected one on th"),
    ):
        simulator.launch(kernel(2, "gfx950"), (1, 1, 1), 64, (torch.zeros(1, dtype=torch.uint8), meta, 0, 0))


def test_other_archs_are_refused(kernel):
    with (
        simulation("gfx942") as simulator,
        pytest.raises(ValueError, match="for gfx90a; the simulator runs gfx942"),
    ):
        simulator.launch(kernel(1, "gfx90a"), (1, 1, 1), 64, (torch.zeros(64, dtype=torch.int32),))


def test_a_kernel_is_decoded_once(kernel):
    built, out = kernel(1, "gfx950"), torch.zeros(64, dtype=torch.int32)
    with simulation("gfx950") as simulator:
        for _ in range(3):
            simulator.launch(built, (1, 1, 1), 64, (out,))
        assert len(simulator._simulators) == 1
        assert len(simulator.reports) == 3
