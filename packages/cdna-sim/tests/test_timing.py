"""The timing model: each rule by a few lines of assembly whose cycles follow from it."""

from __future__ import annotations

import dataclasses
import functools
import json
import sys

import numpy as np
import pytest

pytestmark = pytest.mark.skipif(sys.version_info < (3, 11), reason="the decoder, tinygrad, needs Python 3.11")

import cdna_sim  # noqa: E402
from cdna_sim import Simulator  # noqa: E402
from cdna_sim.timing import DEVICES, Run, Traces, predict, record, replay  # noqa: E402
from cdna_sim.timing.grid import dispatch, footprint, sampled, sampling_error, spread  # noqa: E402
from cdna_sim.timing.memory import UnitMemory  # noqa: E402
from cdna_sim.timing.pictures import chrome_trace  # noqa: E402

NEW, OLD = DEVICES["MI355X"], DEVICES["MI300X"]
ONE_SIMD = dataclasses.replace(NEW, simds=1)
TEXT = """
.text
.globl {name}
.p2align 8
.type {name},@function
{name}:
{lines}
s_endpgm
.size {name}, .-{name}
.rodata
.p2align 6
.amdhsa_kernel {name}
  .amdhsa_next_free_vgpr 128
  .amdhsa_accum_offset 128
  .amdhsa_next_free_sgpr 32
  .amdhsa_user_sgpr_kernarg_segment_ptr 1
  .amdhsa_kernarg_size 8
  .amdhsa_group_segment_fixed_size 16384
  .amdhsa_float_denorm_mode_32 3
.end_amdhsa_kernel
"""
ENTRY = """
  - {{.name: {name}, .symbol: {name}.kd, .kernarg_segment_size: 8, .kernarg_segment_align: 8,
     .group_segment_fixed_size: 16384, .private_segment_fixed_size: 0, .wavefront_size: 64, .sgpr_count: 32,
     .vgpr_count: 128, .max_flat_workgroup_size: 1024,
     .args: [{{.name: x, .size: 8, .offset: 0, .value_kind: global_buffer, .address_space: global}}]}}"""


def adds(count: int) -> str:
    return "\n".join(f"v_add_f32 v{90 + n % 4}, v80, v81" for n in range(count))


# 16 passes on gfx950; 8 and 4 on gfx942.
PRODUCT = "v_mfma_f32_32x32x64_f8f6f4 v[0:15], v[64:71], v[72:79], 0\n"
ANOTHER = "v_mfma_f32_32x32x64_f8f6f4 v[16:31], v[64:71], v[72:79], 0\n"
OLD_PRODUCT = "v_mfma_f32_32x32x16_fp8_fp8 v[0:15], v[64:65], v[66:67], 0\n"
PACKED = "v_pk_mul_f32 v[90:91], v[80:81], v[82:83]\n"
ARGUMENT = "s_load_dwordx2 s[4:5], s[0:1], 0x0\ns_waitcnt lgkmcnt(0)\n"
NEAR = ARGUMENT + "v_lshlrev_b32 v1, 4, v0\nglobal_load_dwordx4 v[4:7], v1, s[4:5]\n"
TWO = NEAR + "global_store_dwordx4 v1, v[12:15], s[4:5] offset:2048\n"


def lds(shift: int) -> str:
    address = f"v_lshlrev_b32 v1, {shift}, v0\nv_and_b32 v1, 0x3fff, v1\n"
    return address + "ds_write_b32 v1, v2\ns_waitcnt lgkmcnt(0)\nds_read_b32 v3, v1\ns_waitcnt lgkmcnt(0)"


BOTH = {
    "empty": "", "adds10": adds(10), "adds100": adds(100), "scalars": "s_mov_b32 s9, 0\n" * 10,
    "products": "v_mul_lo_u32 v9, v80, v81\n" * 3, "exponents": "v_exp_f32 v9, v80\n" * 3, "packed": PACKED,
    "nop": "s_nop 7", "near": NEAR, "near_waited": NEAR + "s_waitcnt vmcnt(0)",
    "near_twice": NEAR + "s_waitcnt vmcnt(0)\nglobal_load_dwordx4 v[8:11], v1, s[4:5]\ns_waitcnt vmcnt(0)",
    "far": ARGUMENT + "v_lshlrev_b32 v1, 7, v0\nglobal_load_dwordx4 v[4:7], v1, s[4:5]",
    "two_wait0": TWO + "s_waitcnt vmcnt(0)", "two_wait1": TWO + "s_waitcnt vmcnt(1)",
    "two_wait2": TWO + "s_waitcnt vmcnt(2)", "lds": lds(2), "lds_conflicts": lds(8),
    "falls": "s_branch next\nnext:", "jumps": "s_branch over\ns_nop 0\nover:",
    # Wave 1 alone adds.
    "meet": "v_readfirstlane_b32 s8, v0\ns_cmp_eq_u32 s8, 0\ns_cbranch_scc1 meet_here\n" + adds(50)
    + "\nmeet_here:\ns_barrier",
}  # fmt: skip
KERNELS = {
    "gfx942": BOTH | {
        "pair": OLD_PRODUCT + OLD_PRODUCT.replace("v[0:15]", "v[16:31]"), "read": OLD_PRODUCT + "v_add_f32 v90, v0, v0",
        "small": 2 * "v_mfma_f32_16x16x32_fp8_fp8 v[0:3], v[64:65], v[66:67], v[0:3]\n",
    },
    "gfx950": BOTH | {
        "chain": PRODUCT + PRODUCT.replace(", 0", ", v[0:15]"), "read": PRODUCT + "v_add_f32 v90, v0, v0",
        "beside": PRODUCT + adds(14) + "\n" + ANOTHER, "then_packed": PRODUCT + PACKED,
        "mixed": ARGUMENT + adds(10) + "\n" + PRODUCT + "v_add_f32 v90, v0, v0\ns_nop 3",
    },
}  # fmt: skip


@functools.cache
def code_object(arch: str) -> cdna_sim.CodeObject:
    kernels = KERNELS[arch]
    text = "".join(TEXT.format(name=name, lines=lines) for name, lines in kernels.items())
    entries = "".join(ENTRY.format(name=name) for name in kernels)
    metadata = f"---\namdhsa.version: [1, 2]\namdhsa.kernels:{entries}\n...\n"
    return cdna_sim.assemble(f"{text}\n.amdgpu_metadata\n{metadata}.end_amdgpu_metadata\n", arch)


@functools.cache
def traces(name: str, arch: str = "gfx950", waves: int = 1, grid: int = 1, samples: int = 1, lines: int = 1) -> Traces:
    code, room = code_object(arch), np.zeros((1 << 20) + 256, np.uint8)
    x = room[-room.ctypes.data % 256 :][: 1 << 20]  # as allocators align

    def launch(options):
        return Simulator(code, name, dataclasses.replace(options, wait_states=False)).run(grid, 64 * waves, [x])

    return record(launch, code, name, samples=samples, lines=lines)


def run(name: str, device=NEW, waves: int = 1, events: bool = False) -> Run:
    found = traces(name, device.arch, waves)
    memory = UnitMemory(device, 1, footprint(found, 1), False)
    return replay(device, list(found.workgroups.values()), memory, events=events)


def cycles(name: str, device=NEW, waves: int = 1) -> float:
    """Beyond those of an empty kernel."""
    return run(name, device, waves).total - run("empty", device, waves).total


def test_a_wave_issues_once_a_turn():
    assert cycles("adds10") == 40
    assert cycles("scalars") == 40


def test_waves_of_a_simd_share_its_vector_unit():
    assert cycles("adds10", ONE_SIMD, waves=2) == pytest.approx(80, abs=4)
    assert cycles("adds10", NEW, waves=4) == 40
    assert run("adds10", ONE_SIMD, waves=2).stalls["vector unit busy"] > 0


def test_slower_vector_instructions():
    assert cycles("products") == 48
    assert cycles("exponents") == 24
    assert cycles("exponents", OLD) == 48


def test_the_matrix_unit_takes_passes():
    assert cycles("pair", OLD) == 4 * 8 + 4
    assert cycles("small", OLD) == 4 * 4 + 4
    assert cycles("chain") == 4 * 16 + 4  # an accumulator goes on at once


def test_results_of_the_matrix_unit_are_late():
    # Passes, and wait states after them: 4 on gfx950, 3 on gfx942.
    assert cycles("read") == 4 * (16 + 4 + 1) + 4
    assert cycles("read", OLD) == 4 * (8 + 3 + 1) + 4


def test_vector_instructions_beside_a_matrix_instruction_after_its_operands_are_read():
    beside = run("beside")
    # Two of the 16 turns are lost to operands; the second product issues as the first ends.
    assert beside.total - run("empty").total == 64 + 4
    assert beside.stalls["operands read"] == 4


def test_packed_float32_waits_for_the_matrix_unit():
    assert cycles("packed") == 4
    assert cycles("then_packed") == 64 + 12 + 4
    assert run("then_packed").stalls["packed beside matrix"] > 0


def test_nops_and_branches():
    assert cycles("nop") == 32
    assert cycles("falls") == 4
    assert cycles("jumps") == NEW.branch


def test_a_load_is_waited_for_from_memory_and_from_l1():
    # The same lines again: 16 accesses of four lanes that share 64 bytes, then L1.
    assert cycles("near_twice") - cycles("near_waited") == pytest.approx(NEW.l1_latency + 16 + 8, abs=8)
    assert cycles("near_waited") > 2 * NEW.cache_latency * NEW.clock  # the argument, then the data
    assert NEW.cache_latency < run("near_waited").stalls["vector memory"] / NEW.clock < NEW.memory_latency


def test_what_the_infinity_cache_does_not_hold_comes_from_memory():
    small = dataclasses.replace(NEW, cache_size=1024)
    assert cycles("near_waited", small) > 2 * NEW.memory_latency * NEW.clock


def test_lanes_that_share_no_line_take_an_access_each():
    near, far = run("near"), run("far")
    assert (near.busy["address"], far.busy["address"]) == (16, 64)
    assert (near.busy["l2"], far.busy["l2"]) == (2 * 8 + 2, 2 * 64 + 2)  # lines of 128 bytes, and the argument's


def test_counts_leave_later_operations_outstanding():
    assert cycles("two_wait1") <= cycles("two_wait0")
    assert cycles("two_wait2") < cycles("two_wait1") - NEW.cache_latency * NEW.clock


def test_lds_has_a_rate_a_latency_and_banks():
    # A write and a read, each waited for: two of 256 bytes at 128 a cycle.
    assert cycles("lds") == pytest.approx(2 * (NEW.lds_latency + 2) + 6 * 4, abs=12)
    assert cycles("lds_conflicts") > cycles("lds") + 60  # 64 lanes in one bank


def test_a_barrier_waits_for_the_last_wave():
    met = run("meet", waves=2)
    assert met.stalls["barrier"] >= 50 * 4 - NEW.branch - 8
    assert met.total >= 200


def test_shared_lines_come_from_memory_once():
    many = traces("near_waited", grid=512, samples=4)
    touched = footprint(many, 32)
    assert touched.together >= 1024
    assert touched.whole >= touched.together
    assert len(touched.shared) >= 8
    one = [next(iter(many.workgroups.values()))]

    def total(warm: bool, **changed: int) -> float:
        return replay(NEW, one, UnitMemory(NEW, 256, dataclasses.replace(touched, **changed), warm)).total

    kept, warm, cold, spilling = total(False), total(True), total(False, whole=1 << 40), total(True, together=1 << 40)
    assert cold - warm > NEW.clock * (NEW.memory_latency - NEW.l2_latency)
    assert warm < spilling < cold  # what L2 does not hold comes from the Infinity Cache
    assert warm < kept < cold  # as does what no L2 has yet


def test_residency_by_registers_slots_and_lds():
    found = dataclasses.replace(traces("empty"), waves=4)
    assert dataclasses.replace(found, lds=0, vgpr=128).resident == 4  # 4 waves of 128 registers on each of 4 SIMDs
    assert dataclasses.replace(found, lds=0, vgpr=24).resident == 8
    assert dataclasses.replace(found, lds=0, vgpr=256).resident == 2
    assert dataclasses.replace(found, lds=64 * 1024, vgpr=24).resident == 2
    assert dataclasses.replace(found, lds=64 * 1024, vgpr=24, arch="gfx942").resident == 1


def test_dispatch_fills_units_and_has_a_tail():
    units = NEW.units

    def makespan(count: int, full: float, alone: float, resident: int) -> tuple[float, float]:
        return dispatch(NEW, np.full(count, full), np.full(count, alone), resident, 1)

    even, tail = makespan(units, 1000.0, 1000.0, 1)
    assert even == pytest.approx(1000, abs=units / 8)
    assert tail < 0.05
    more, tail = makespan(units + 8, 1000.0, 1000.0, 1)
    assert more == pytest.approx(2000, abs=units / 4)
    assert tail == pytest.approx(0.48, abs=0.03)
    # Two that are resident together take as long as one after the other, if they gain nothing.
    assert makespan(2 * units, 2000.0, 1000.0, 2)[0] == pytest.approx(2000, abs=units / 2)


def test_sampling_error():
    places = np.arange(6.0)
    assert sampling_error(places, 5 + places) == pytest.approx(0, abs=1e-12)
    assert sampling_error(places, np.array([1.0, 5, 1, 5, 1, 5])) > 0.1


def test_a_launch_is_its_makespan_and_the_launch():
    found = traces("adds100", waves=4, grid=NEW.units * 4, samples=3)
    predicted = predict(NEW, found)
    assert (predicted.workgroups, predicted.resident) == (1024, 4)
    assert predicted.error < 0.01
    assert predicted.cycles == pytest.approx(4 * 400, rel=0.1)  # four waves on each SIMD
    assert predicted.microseconds == pytest.approx(NEW.launch + predicted.cycles / NEW.clock / 1000)
    assert predicted.limit == "vector"
    with pytest.raises(ValueError, match="gfx942"):
        predict(OLD, found)


def test_a_grid_of_x_alone_may_hold_lines():
    found = traces("empty", grid=24, samples=2, lines=3)
    assert (found.grid, found.count) == ((8, 3, 1), 24)
    assert {number // 8 for number in found.workgroups} == {0, 1, 2}
    assert len({number % 8 for number in found.workgroups}) == 2


def test_stalls_and_issues_make_up_every_cycle():
    one = run("mixed")
    assert sum(one.stalls.values()) + one.issued == pytest.approx(one.waves, abs=8)


def test_a_timeline_as_chrome_has_it(tmp_path):
    adds_run = run("adds10", events=True)
    events = json.loads(json.dumps(chrome_trace(NEW, adds_run, "kernel")))["traceEvents"]
    slices = [event for event in events if event["ph"] == "X"]
    assert [event["name"] for event in slices] == ["v_add_f32"] * 10 + ["s_endpgm"]
    assert slices[1]["ts"] - slices[0]["ts"] == pytest.approx(4e-3 / NEW.clock)
    assert {"ph", "pid", "tid", "ts", "dur", "name"} <= slices[0].keys()


def test_samples_and_what_is_between_them():
    for grid in ((1024, 1, 1), (256, 4, 1), (7, 1, 3), (1, 1, 1)):
        numbers = sampled(grid, 8)
        count = grid[0] * grid[1] * grid[2]
        assert numbers == sorted(set(numbers))
        assert len(numbers) <= 8 * min(4, grid[1] * grid[2])
        assert set(numbers) <= set(range(count))
        # A value linear in x is found again between samples, on every line.
        found = spread(grid, {number: float(number % grid[0]) for number in numbers})
        assert found.shape == (count,)
        middle = found.reshape(-1, grid[0])[:, grid[0] // 2]
        assert np.abs(middle - grid[0] // 2).max() <= 0.1 * grid[0]
    # Rows of four requests over their own keys: a quarter of the workgroups has all the work, on a diagonal.
    for columns in (4, 6, 16):
        grid = (512, columns, 1)
        loaded = {n: float(n % 512 // 128 == n // 512 * 4 // columns) for n in range(512 * columns)}
        found = spread(grid, {number: loaded[number] for number in sampled(grid, 4)})
        assert found.max() == 1.0
        assert found.sum() == pytest.approx(sum(loaded.values()), rel=0.2)
    # Along x they do not repeat with a period of the grid's.
    assert len({number % 64 for number in sampled((1024, 1, 1), 8)}) > 6
