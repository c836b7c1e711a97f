"""Launches of several threads at once: they share code, and nothing that changes."""

from __future__ import annotations

import sys
import threading

import numpy as np
import pytest

pytestmark = pytest.mark.skipif(sys.version_info < (3, 11), reason="the decoder, tinygrad, needs Python 3.11")

from cdna_sim import Memory, Options, SimulationFault, Simulator, assemble  # noqa: E402

THREADS, ROUNDS = 8, 5
LANES = np.arange(64, dtype=np.uint32)
KERNEL = """
.text
.globl kernel
.p2align 8
.type kernel,@function
kernel:
{lines}
.size kernel, .-kernel
.rodata
.p2align 6
.amdhsa_kernel kernel
  .amdhsa_next_free_vgpr 64
  .amdhsa_accum_offset 64
  .amdhsa_next_free_sgpr 40
  .amdhsa_user_sgpr_kernarg_segment_ptr 1
  .amdhsa_system_sgpr_workgroup_id_x 1
  .amdhsa_float_denorm_mode_32 3
  .amdhsa_group_segment_fixed_size {lds}
.end_amdhsa_kernel
"""
STEPS = 16


def mixed(lds: int = 1024) -> str:
    """out[i]: the sum over STEPS steps of x[i ^ 1], through LDS, and of constants of each step in the lowest lanes."""
    lines = [
        """
        s_load_dwordx4 s[8:11], s[0:1], 0x0
        v_and_b32 v0, 0x3ff, v0
        v_lshlrev_b32 v1, 2, v0
        v_xor_b32 v5, 4, v1
        v_mov_b32 v2, 0
        s_waitcnt lgkmcnt(0)"""
    ]
    for step in range(STEPS):
        lines.append(f"""
        global_load_dword v3, v1, s[8:9]
        s_waitcnt vmcnt(0)
        v_add_u32 v3, {1000 + step}, v3
        ds_write_b32 v1, v3
        s_waitcnt lgkmcnt(0)
        s_barrier
        ds_read_b32 v4, v5
        s_waitcnt lgkmcnt(0)
        s_barrier
        v_add_u32 v2, v2, v4
        s_mov_b64 s[20:21], exec
        v_cmp_gt_u32 vcc, {step + 20}, v0
        s_and_b64 exec, exec, vcc
        v_add_u32 v2, {70 + 3 * step}, v2
        s_mov_b64 exec, s[20:21]
        s_cmp_lg_u32 s2, {step}
        s_cbranch_scc0 skip{step}
        v_add_u32 v2, {5000 + step}, v2
        skip{step}:""")
    lines.append("global_store_dword v1, v2, s[10:11]\ns_endpgm")
    return KERNEL.format(lines="\n".join(lines), lds=lds)


def expected(x: np.ndarray) -> np.ndarray:
    items = np.arange(128)
    total = STEPS * x[items ^ 1].astype(np.int64)
    for step in range(STEPS):
        total += 1000 + step + np.where(items < step + 20, 70 + 3 * step, 0) + (0 if step == 0 else 5000 + step)
    return total.astype(np.uint32)


@pytest.fixture
def _switching():
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("_switching")
@pytest.mark.parametrize("arch", ["gfx942", "gfx950"])
def test_eight_threads_on_a_cold_cache(arch):
    code = assemble(mixed(), arch)
    failures: list[object] = []
    for turn in range(ROUNDS):
        # An address that no instruction has: another program of the same code, with nothing generated yet.
        options = Options(order="shuffled", seed=turn, drop=frozenset({-8 * turn - 4}))
        start = threading.Barrier(THREADS)

        def work(number: int, options: Options = options, start: threading.Barrier = start) -> None:
            x = np.random.default_rng(number).integers(0, 1000, 128, np.uint32)
            out, memory = np.full(128, 0xDEAD, np.uint32), Memory()
            pointers = np.array([memory.place("x", x, writable=False), memory.place("out", out)], np.uint64)
            start.wait()
            try:
                report = Simulator(code, "kernel", options).launch(1, 128, pointers.tobytes(), memory)
                np.testing.assert_array_equal(out, expected(x))
                assert report.loaded == {"x": STEPS * 512}
                assert report.stored == {"out": 512}
                assert report.by_kind["BARRIER"] == 2 * 2 * STEPS
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=work, args=(number,)) for number in range(THREADS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert failures == []


@pytest.mark.usefixtures("_switching")
def test_launches_share_a_memory_and_a_simulator():
    """Two launches of one simulator on one memory: neither sees the other's arguments, and counts are apart."""
    code = assemble(mixed(), "gfx950")
    simulator, memory = Simulator(code, "kernel"), Memory()
    xs = [np.random.default_rng(number).integers(0, 1000, 128, np.uint32) for number in range(THREADS)]
    outs = [np.zeros(128, np.uint32) for _ in xs]
    places = [
        (memory.place(f"x{n}", x), memory.place(f"out{n}", out))
        for n, (x, out) in enumerate(zip(xs, outs, strict=True))
    ]
    reports: dict[int, object] = {}

    def work(number: int) -> None:
        reports[number] = simulator.launch(1, 128, np.array(places[number], np.uint64).tobytes(), memory)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number, (x, out) in enumerate(zip(xs, outs, strict=True)):
        np.testing.assert_array_equal(out, expected(x))
        assert reports[number].stored == {f"out{number}": 512}
    assert [buffer.name for buffer in memory.buffers] == [f"{kind}{n}" for n in range(THREADS) for kind in ("x", "out")]


@pytest.mark.parametrize("arch", ["gfx942", "gfx950"])
@pytest.mark.parametrize("access", ["ds_write_b32 v1, v0", "ds_read_b32 v2, v1", "ds_add_u32 v1, v0"])
def test_each_launch_has_its_own_bound_of_lds(arch, access):
    """A larger launch first: the smaller one's overrun is a fault at its own bound."""
    lines = f"v_and_b32 v0, 0x3ff, v0\nv_lshlrev_b32 v1, 2, v0\n{access}\ns_waitcnt lgkmcnt(0)\ns_endpgm"
    simulator = Simulator(assemble(KERNEL.format(lines=lines, lds=0), arch), "kernel", Options(poison=False))
    simulator.launch(1, 64, b"", Memory(), dynamic_lds=256)
    with pytest.raises(SimulationFault, match=r"LDS access of 4 bytes at 0xfc is outside the workgroup's 128 bytes"):
        simulator.launch(1, 64, b"", Memory(), dynamic_lds=128)
    simulator.launch(1, 64, b"", Memory(), dynamic_lds=256)
    simulator.launch(1, 32, b"", Memory(), dynamic_lds=128)
