"""The simulator around its opcodes: launches, waves, barriers, held-back memory, faults and counts."""

from __future__ import annotations

import struct
import sys

import numpy as np
import pytest

pytestmark = pytest.mark.skipif(sys.version_info < (3, 11), reason="the decoder, tinygrad, needs Python 3.11")

from cdna_sim import Memory, Options, SimulationFault, Simulator, UnknownOpcode, assemble, listing  # noqa: E402

ARCHS = ("gfx942", "gfx950")
ORDERS = ("forward", "reversed", "shuffled")
LANES = np.arange(64, dtype=np.uint32)

# s[0:1]: kernel arguments, s2 to s4: workgroup numbers, v0: work-item numbers.
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
table: .long 11, 22, 33, 44
.p2align 6
.amdhsa_kernel kernel
  .amdhsa_next_free_vgpr 512
  .amdhsa_accum_offset 256
  .amdhsa_next_free_sgpr 100
  .amdhsa_user_sgpr_kernarg_segment_ptr 1
  .amdhsa_system_sgpr_workgroup_id_x 1
  .amdhsa_system_sgpr_workgroup_id_y 1
  .amdhsa_system_sgpr_workgroup_id_z 1
  .amdhsa_system_vgpr_workitem_id 2
  .amdhsa_float_denorm_mode_32 {denormals}
  .amdhsa_group_segment_fixed_size {lds}
  .amdhsa_private_segment_fixed_size {scratch}
{directives}
.end_amdhsa_kernel
"""
# s[8:9]: the first argument, a pointer; v1: 4 * the lane's number in its workgroup of one dimension.
START = """
s_load_dwordx2 s[8:9], s[0:1], 0x0
v_and_b32 v0, 0x3ff, v0
v_lshlrev_b32 v1, 2, v0
s_waitcnt lgkmcnt(0)
"""
STORE = "global_store_dword v1, v2, s[8:9]\ns_endpgm"


def build(lines: str, arch: str = "gfx950", lds: int = 0, scratch: int = 0, directives: str = "", denormals: int = 3):
    return assemble(
        KERNEL.format(lines=lines, lds=lds, scratch=scratch, directives=directives, denormals=denormals), arch
    )


def run(code, out, *, grid=(1, 1, 1), block=64, options=None, writable=True, **more):
    """Launches with the address of ``out`` as the only argument."""
    memory = Memory()
    address = memory.register("out", out, writable=writable)
    return Simulator(code, "kernel", options or Options()).launch(
        grid, block, struct.pack("<Q", address), memory, **more
    )


def pcs(code, start: str) -> list[int]:
    return [pc for pc, _, text in listing(code, "kernel") if text.startswith(start)]


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("arch", ARCHS)
def test_every_work_item_knows_its_place(arch, order):
    grid, block = (3, 2, 2), (20, 3, 2)
    code = build(
        """
        s_load_dwordx2 s[8:9], s[0:1], 0x0
        s_mul_i32 s5, s4, 2
        s_add_u32 s5, s5, s3
        s_mul_i32 s5, s5, 3
        s_add_u32 s5, s5, s2
        s_mulk_i32 s5, 480
        v_bfe_u32 v2, v0, 20, 10
        v_mul_u32_u24 v2, 3, v2
        v_bfe_u32 v3, v0, 10, 10
        v_add_u32 v2, v2, v3
        v_mul_u32_u24 v2, 20, v2
        v_and_b32 v3, 0x3ff, v0
        v_add_lshl_u32 v1, v2, v3, 2
        v_add_u32 v1, s5, v1
        s_lshl_b32 s6, s2, 8
        s_lshl_b32 s7, s3, 12
        s_or_b32 s6, s6, s7
        s_lshl_b32 s7, s4, 16
        s_or_b32 s6, s6, s7
        v_mov_b32 v2, s6
        v_add_u32 v2, v2, v3
        s_waitcnt lgkmcnt(0)
        """
        + STORE,
        arch,
    )
    out = np.zeros((*grid[::-1], *block[::-1]), np.uint32)
    report = run(code, out, grid=grid, block=block, options=Options(order=order))
    z, y, x, _, _, item = np.indices(out.shape)
    np.testing.assert_array_equal(out, z << 16 | y << 12 | x << 8 | item)
    assert report.waves == 12 * 2
    assert report.stored == {"out": out.nbytes}
    assert report.loaded == {}


def test_the_last_wave_may_be_partly_empty():
    out = np.zeros(128, np.uint32)
    run(build(START + "v_mov_b32 v2, 7\n" + STORE), out, block=100)
    np.testing.assert_array_equal(out, np.where(np.arange(128) < 100, 7, 0))


@pytest.mark.parametrize("arch", ARCHS)
def test_preloaded_arguments(arch):
    """Three dwords from the second on come in s2 to s4; the entry is 256 bytes on, the workgroup number follows."""
    lines = """
        s_trap 2
        .fill 63, 4, 0xbf800000
        v_lshlrev_b32 v1, 2, v0
        v_mov_b32 v2, s4
        v_add_u32 v2, s5, v2
        global_store_dword v1, v2, s[2:3]
        s_endpgm
        """
    directives = ".amdhsa_user_sgpr_kernarg_preload_length 3\n.amdhsa_user_sgpr_kernarg_preload_offset 1"
    lines = lines.replace("v_lshlrev", "v_and_b32 v0, 0x3ff, v0\nv_lshlrev")
    code = build(lines, arch, directives=directives)
    out, memory = np.zeros(64, np.uint32), Memory()
    address = memory.register("out", out)
    kernarg = struct.pack("<IQI", 0, address, 1000)
    Simulator(code, "kernel").launch((3, 1, 1), 64, kernarg, memory)
    np.testing.assert_array_equal(out, 1002)


def test_constants_beside_the_code():
    lines = """
        s_getpc_b64 s[10:11]
        s_add_u32 s10, s10, table@rel32@lo+4
        s_addc_u32 s11, s11, table@rel32@hi+12
        s_load_dwordx4 s[12:15], s[10:11], 0x0
        s_waitcnt lgkmcnt(0)
        v_mov_b32 v2, s14
        """
    out = np.zeros(64, np.uint32)
    run(build(START + lines + STORE), out)
    np.testing.assert_array_equal(out, 33)


def test_scratch_is_private_to_a_lane():
    lines = """
        scratch_store_dword off, v1, off offset:12
        v_mov_b32 v2, 0
        s_waitcnt vmcnt(0)
        scratch_load_dword v2, off, off offset:12
        s_waitcnt vmcnt(0)
        """
    out = np.zeros(128, np.uint32)
    run(build(START + lines + STORE, scratch=16), out, block=128)
    np.testing.assert_array_equal(out, 4 * np.arange(128))
    beyond = build(START + lines.replace("12", "16") + STORE, scratch=16)
    with pytest.raises(SimulationFault, match="scratch access at byte 16 of 16"):
        run(beyond, out)


EXCHANGE = (
    START
    + """
    ds_write_b32 v1, v0
    s_waitcnt lgkmcnt(0)
    s_barrier
    v_xor_b32 v3, 0x1fc, v1
    ds_read_b32 v2, v3
    s_waitcnt lgkmcnt(0)
    """
    + STORE
)


@pytest.mark.parametrize("deferred", [True, False])
@pytest.mark.parametrize("order", ORDERS)
def test_waves_meet_at_barriers(order, deferred):
    out = np.zeros(128, np.uint32)
    run(build(EXCHANGE, lds=512), out, block=128, options=Options(order=order, deferred=deferred))
    np.testing.assert_array_equal(out, np.arange(128)[::-1])


def test_ended_waves_count_as_arrived():
    """The second wave ends at once; the first passes two barriers."""
    lines = START + "v_readfirstlane_b32 s10, v0\ns_cmp_lg_u32 s10, 0\ns_cbranch_scc1 1f\ns_barrier\ns_barrier\n"
    out = np.zeros(128, np.uint32)
    run(build(lines + "v_mov_b32 v2, 5\nglobal_store_dword v1, v2, s[8:9]\n1:\ns_endpgm"), out, block=128)
    np.testing.assert_array_equal(out, np.where(np.arange(128) < 64, 5, 0))


@pytest.mark.parametrize("order", ORDERS)
def test_a_dropped_barrier_is_a_race(order):
    code = build(EXCHANGE, lds=512)
    options = Options(order=order, drop=frozenset(pcs(code, "s_barrier")))
    with pytest.raises(SimulationFault, match=r"which nothing has written|LDS race"):
        run(code, np.zeros(128, np.uint32), block=128, options=options)


@pytest.mark.parametrize("order", ORDERS)
def test_an_lds_write_held_back_past_the_barrier(order):
    """Without the wait, the write may land after the barrier."""
    code = build(EXCHANGE, lds=512)
    options = Options(order=order, drop=frozenset(pcs(code, "s_waitcnt lgkmcnt(0)")[1:2]))
    with pytest.raises(SimulationFault, match="which nothing has written"):
        run(code, np.zeros(128, np.uint32), block=128, options=options)


@pytest.mark.parametrize("order", ORDERS)
def test_overwriting_what_another_wave_reads(order):
    lines = EXCHANGE.replace("global_store", "ds_write_b32 v1, v2\ns_waitcnt lgkmcnt(0)\nglobal_store")
    with pytest.raises(
        SimulationFault, match=r"LDS race: byte 0x\w+ (is overwritten|was written by wave \d)"
    ) as caught:
        run(build(lines, lds=512), np.zeros(128, np.uint32), block=128, options=Options(order=order))
    assert caught.value.wave in (0, 1)


@pytest.mark.parametrize("order", ORDERS)
def test_waves_that_write_the_same_place(order):
    """A race, unless they write the same value."""
    lines = START + "v_and_b32 v3, 0xfc, v1\nv_mov_b32 v4, {value}\nds_write_b32 v3, v4\ns_endpgm"
    out, options = np.zeros(1, np.uint32), Options(order=order)
    run(build(lines.format(value=7), lds=256), out, block=128, options=options)
    with pytest.raises(SimulationFault, match=r"is overwritten, wave \d touched it and no barrier lies between"):
        run(build(lines.format(value="v0"), lds=256), out, block=128, options=options)


def test_reading_lds_that_nothing_wrote():
    code = build(START + "ds_read_b64 v[2:3], v1 offset:8\ns_waitcnt lgkmcnt(0)\n" + STORE, lds=1024)
    out = np.zeros(64, np.uint32)
    with pytest.raises(SimulationFault, match="LDS read of byte 0x8, which nothing has written") as caught:
        run(code, out)
    assert (caught.value.lane, caught.value.address) == (0, 8)
    run(code, out, options=Options(poison=False))
    np.testing.assert_array_equal(out, 0)


def test_lds_outside_the_workgroups_own():
    lines = START + "ds_write_b64 v1, v[2:3]\n" + STORE
    with pytest.raises(SimulationFault, match=r"LDS access of 8 bytes at 0xfc is outside the workgroup's 256 bytes"):
        run(build(lines, lds=256), np.zeros(64, np.uint32))
    run(build(lines, lds=256), np.zeros(64, np.uint32), dynamic_lds=4)


TWO_LOADS = (
    START
    + """
    global_load_dword v2, v1, s[8:9]
    global_load_dword v3, v1, s[8:9] offset:256
    s_waitcnt vmcnt({count})
    v_add_u32 v2, 1, {read}
    """
    + STORE
)


@pytest.mark.parametrize(
    ("count", "read", "good"), [(1, "v2", True), (1, "v3", False), (0, "v3", True), (2, "v2", False)]
)
def test_loads_arrive_in_order_at_their_wait(count, read, good):
    code = build(TWO_LOADS.format(count=count, read=read))
    out = np.arange(128, dtype=np.uint32)
    if good:
        run(code, out)
        np.testing.assert_array_equal(out[:64], LANES + (1 if read == "v2" else 65))
        return
    load = f"global_load_dword {read}, v1, s"
    with pytest.raises(SimulationFault, match=rf"use of {read} before an s_waitcnt vmcnt that waits for `{load}"):
        run(code, out)
    run(code, out, options=Options(strict=False))
    assert (out[:64] == 0x7FFADBAD + 1).all()
    out = np.arange(128, dtype=np.uint32)
    run(code, out, options=Options(deferred=False))
    assert (out[:64] < 200).all()


def test_overwriting_the_register_of_a_load():
    lines = START + "global_load_dword v2, v1, s[8:9]\nv_mov_b32 v2, 1\ns_waitcnt vmcnt(0)\n" + STORE
    with pytest.raises(SimulationFault, match="use of v2 before"):
        run(build(lines), np.zeros(64, np.uint32))


def test_a_hazard_across_a_branch():
    lines = START + "global_load_dword v2, v1, s[8:9]\ns_branch 1f\ns_nop 0\n1:\nv_add_u32 v2, v2, v2\n" + STORE
    with pytest.raises(SimulationFault, match="use of v2 before an s_waitcnt vmcnt") as caught:
        run(build(lines), np.zeros(64, np.uint32))
    assert caught.value.text.startswith("v_add_u32")


def test_scalar_loads_arrive_in_any_order():
    lines = START + "s_load_dword s10, s[8:9], 0x0\ns_load_dword s11, s[8:9], 0x4\n{wait}\nv_mov_b32 v2, s10\n" + STORE
    out = np.arange(64, dtype=np.uint32) + 9
    with pytest.raises(SimulationFault, match="use of s10 before an s_waitcnt lgkmcnt"):
        run(build(lines.format(wait="s_waitcnt lgkmcnt(1)")), out)
    run(build(lines.format(wait="s_waitcnt lgkmcnt(0)")), out)
    np.testing.assert_array_equal(out, 9)


def test_more_than_63_loads_wait_for_the_first():
    loads = "".join(f"global_load_dword v{10 + n}, v1, s[8:9]\n" for n in range(64))
    out = np.arange(64, dtype=np.uint32)
    run(build(START + loads + "v_add_u32 v2, 1, v10\n" + STORE), out)
    np.testing.assert_array_equal(out, LANES + 1)


COPY = (
    START
    + """
    s_mov_b32 m0, 0x100
    v_lshlrev_b32 v4, 4, v0
    {copy}
    {wait}
    ds_read_b32 v2, v1 offset:256
    s_waitcnt lgkmcnt(0)
    """
    + STORE
)


@pytest.mark.parametrize(
    "copy",
    ["global_load_lds_dwordx4 v4, s[8:9]",
     "s_mov_b64 s[10:11], 0x400\nbuffer_load_dwordx4 v4, s[8:11], 0 offen lds"],
)  # fmt: skip
def test_copies_to_lds_arrive_at_their_wait(copy):
    out = np.arange(256, dtype=np.uint32) + 5
    run(build(COPY.format(copy=copy, wait="s_waitcnt vmcnt(0)"), lds=2048), out)
    np.testing.assert_array_equal(out, np.arange(256) + 5)
    with pytest.raises(SimulationFault, match=r"which nothing has written|before an s_waitcnt vmcnt") as caught:
        run(build(COPY.format(copy=copy, wait=""), lds=2048), out)
    assert caught.value.text.startswith("ds_read_b32")
    written = COPY.replace("{copy}", "ds_write_b32 v1, v0 offset:256\ns_waitcnt lgkmcnt(0)\n{copy}")
    with pytest.raises(SimulationFault, match=r"LDS byte 0x100 is used before an s_waitcnt vmcnt that waits for `"):
        run(build(written.format(copy=copy, wait=""), lds=2048), out)


@pytest.mark.parametrize(
    ("offset", "kind", "where"),
    [
        (4, "store", "0 bytes past the end of out"),
        (-4, "load", "4 bytes before out"),
        (1 << 20, "store", "past the end"),
    ],
)
def test_memory_faults_say_where(offset, kind, where):
    instruction = "global_store_dword v1, v2, s[8:9]" if kind == "store" else "global_load_dword v2, v1, s[8:9]"
    lines = START + f"s_add_u32 s8, s8, {offset}\ns_addc_u32 s9, s9, {-1 if offset < 0 else 0}\nv_mov_b32 v2, 1\n"
    code = build(lines + instruction + "\ns_endpgm")
    buffer = np.zeros(3 * 64, np.uint32)
    out, memory = buffer[64:128], Memory()
    address = memory.register("out", out)
    with pytest.raises(SimulationFault) as caught:
        Simulator(code, "kernel").launch((2, 1, 1), 64, struct.pack("<Q", address), memory)
    fault = caught.value
    lane = 0 if offset != 4 else 63
    assert (fault.kernel, fault.workgroup, fault.wave, fault.lane) == ("kernel", (0, 0, 0), 0, lane)
    assert fault.address == address + offset + 4 * lane
    assert fault.pc == pcs(code, f"global_{kind}")[0]
    for part in (f"{kind} of 4 bytes at {fault.address:#x}", f"`{fault.text}`", where, f"lane {lane}", "kernel kernel"):
        assert part in str(fault)
    assert not buffer.any()


def test_part_of_a_lane_past_the_end():
    code = build(
        START + "v_lshlrev_b32 v1, 2, v1\nglobal_load_dwordx4 v[2:5], v1, s[8:9]\ns_waitcnt vmcnt(0)\ns_endpgm"
    )
    with pytest.raises(SimulationFault, match="4 of its 16 bytes past the end of out"):
        run(code, np.zeros(255, np.uint32))


def test_read_only_buffers():
    code = build(START + "v_mov_b32 v2, 1\n" + STORE)
    with pytest.raises(SimulationFault, match="in out, which is read-only"):
        run(code, np.zeros(64, np.uint32), writable=False)


def test_lanes_in_several_buffers():
    """One instruction may load from two arrays."""
    first, second, out = np.arange(64, dtype=np.uint32), np.arange(64, dtype=np.uint32) + 1000, np.zeros(64, np.uint32)
    memory = Memory()
    addresses = [memory.register(name, array) for name, array in (("a", first), ("b", second), ("out", out))]
    lines = """
        s_load_dwordx4 s[12:15], s[0:1], 0x8
        s_waitcnt lgkmcnt(0)
        v_and_b32 v3, 1, v0
        v_cmp_eq_u32 vcc, 0, v3
        v_mov_b32 v4, s12
        v_mov_b32 v5, s13
        v_mov_b32 v6, s14
        v_mov_b32 v7, s15
        v_cndmask_b32 v4, v6, v4, vcc
        v_cndmask_b32 v5, v7, v5, vcc
        v_add_co_u32 v4, vcc, v4, v1
        s_nop 1
        v_addc_co_u32 v5, vcc, 0, v5, vcc
        global_load_dword v2, v[4:5], off
        s_waitcnt vmcnt(0)
        """
    kernarg = struct.pack("<QQQ", addresses[2], addresses[0], addresses[1])
    report = Simulator(build(START + lines + STORE), "kernel").launch((1, 1, 1), 64, kernarg, memory)
    np.testing.assert_array_equal(out, np.where(LANES % 2 == 0, LANES, LANES + 1000))
    assert (report.loaded["a"], report.loaded["b"]) == (128, 128)


def test_what_is_not_modelled_is_named():
    code = build(START + "v_cubeid_f32 v2, v1, v1, v1\n" + STORE)
    with pytest.raises(UnknownOpcode, match=r"v_cubeid_f32 \(VOP3\): not modelled .*pc 0x") as caught:
        run(code, np.zeros(64, np.uint32))
    assert isinstance(caught.value, NotImplementedError)
    assert caught.value.pc == pcs(code, "v_cubeid")[0]
    with pytest.raises(UnknownOpcode, match=r"v_mov_b32 \(VOP1 DPP\): DPP control"):
        run(build(START + ".long 0x7e0402fa, 0xff016501\n" + STORE), np.zeros(64, np.uint32))
    for name, result in (("v_mfma_f32_16x16x8_xf32", "a[0:3]"), ("v_mfma_f64_16x16x4_f64", "v[0:7]")):
        code = build(f"{START}{name} {result}, v[2:3], v[2:3], 0\n{STORE}", arch="gfx942")
        with pytest.raises(UnknownOpcode, match=f"{name} .*: not modelled"):
            run(code, np.zeros(64, np.uint32))
    with pytest.raises(SimulationFault, match="float mode"):
        run(build(START + STORE, denormals=0), np.zeros(64, np.uint32))
    with pytest.raises(UnknownOpcode, match="change of the float mode"):
        run(build(START + "s_setreg_imm32_b32 hwreg(HW_REG_MODE, 4, 2), 0\n" + STORE), np.zeros(64, np.uint32))


@pytest.mark.parametrize(("arch", "largest", "plain"), [("gfx942", 0x7F, 0x80), ("gfx950", 0x7E, 0x7F)])
def test_conversions_to_fp8_saturate_where_the_mode_says_so(arch, largest, plain):
    """1000 is beyond both dialects; a NaN stays one, and the mode can be switched off again."""
    convert = "v_cvt_pk_fp8_f32 v2, v3, v4\nv_and_b32 v2, 0xffff, v2\n"
    lines = START + "v_mov_b32 v3, 0xc47a0000\nv_mov_b32 v4, {second}\n"
    for second, mode, expected in (
        ("1.0", "1", largest | 0x80 | (0x40 if arch == "gfx942" else 0x38) << 8),
        ("0x7fc00000", "1", largest | 0x80 | plain << 8),
        ("1.0", "0", plain | (0x80 if arch == "gfx950" else 0) | (0x40 if arch == "gfx942" else 0x38) << 8),
    ):
        setreg = (
            f"s_setreg_imm32_b32 hwreg(HW_REG_MODE, 23, 1), 1\ns_setreg_imm32_b32 hwreg(HW_REG_MODE, 23, 1), {mode}\n"
        )
        out = np.zeros(64, np.uint32)
        run(build(lines.format(second=second) + setreg + convert + STORE, arch=arch), out)
        assert set(out.tolist()) == {expected}, (second, mode, hex(int(out[0])))


def test_constants_of_packed_shifts():
    """op_sel of an integer constant gives its upper half, which is 0: one shift of two."""
    for modifiers, expected in (("op_sel:[1,0] op_sel_hi:[0,0]", 0x0A5AA5A0), ("op_sel_hi:[0,1]", 0x01230A5A)):
        out = np.zeros(64, np.uint32)
        run(build(START + f"v_mov_b32 v3, 0x1234a5a0\nv_pk_lshrrev_b16 v2, 4, v3 {modifiers}\n" + STORE), out)
        assert set(out.tolist()) == {expected}, modifiers


def test_what_a_launch_may_ask_for():
    code = build(START + STORE, lds=512)
    out = np.zeros(64, np.uint32)
    with pytest.raises(SimulationFault, match=r"load of 8 bytes at 0x\w+ is outside every buffer"):
        Simulator(code, "kernel").launch((1, 1, 1), 64, b"", Memory())
    with pytest.raises(SimulationFault, match=r"163841 bytes of LDS of 163840"):
        run(code, out, dynamic_lds=163840 - 511)
    with pytest.raises(ValueError, match="expected at least one"):
        run(code, out, grid=(0, 1, 1))
    with pytest.raises(SimulationFault, match="work-items in a workgroup"):
        run(code, out, block=2048)
    with pytest.raises(ValueError, match="order: got 'random'"):
        Options(order="random")  # type: ignore[arg-type]


LOOP = (
    START
    + """
    v_mov_b32 v2, 0
    s_mov_b32 s10, 0
    1:
    v_add_u32 v2, 3, v2
    s_mov_b32 s11, 2
    2:
    v_add_u32 v2, 1, v2
    s_sub_u32 s11, s11, 1
    s_cmp_lg_u32 s11, 0
    s_cbranch_scc1 2b
    s_add_u32 s10, s10, 1
    s_cmp_lt_u32 s10, 5
    s_cbranch_scc1 1b
    """
    + STORE
)


def test_counts_and_loops():
    code = build(LOOP)
    out = np.zeros(128, np.uint32)
    report = run(code, out, block=128)
    np.testing.assert_array_equal(out, 25)
    inner = pcs(code, "s_sub_u32")[0]
    assert report.by_pc[inner] == 2 * 5 * 2
    assert report.instructions == sum(report.by_pc.values()) == sum(report.by_kind.values())
    assert report.by_opcode["s_cbranch_scc1"] == 2 * (5 * 2 + 5)
    assert report.by_kind["VMEM_STORE"] == 2
    outer, nested = report.loops
    assert (outer.trips, nested.trips) == (2 * 4, 2 * 5)
    assert nested.by_kind == {"VALU": 1, "SALU": 2, "BRANCH": 1}
    assert nested.instructions == 2 * 5 * 2 * 4
    assert outer.start < nested.start < nested.stop < outer.stop
    again = run(code, out, block=128)
    assert (again.by_pc, again.instructions) == (report.by_pc, report.instructions)


def test_a_limit_on_instructions():
    endless = build(START + "1:\ns_branch 1b")
    with pytest.raises(SimulationFault, match="more than 1000 instructions"):
        run(endless, np.zeros(64, np.uint32), options=Options(max_instructions=1000))


def test_trace_and_accesses():
    seen, accesses = [], []
    options = Options(
        trace=lambda wave, ins: seen.append((wave.index, ins.pc)),
        on_access=lambda *what: accesses.append(what),
    )
    out = np.zeros(100, np.uint32)
    code = build(START + "v_mov_b32 v2, 7\n" + STORE)
    report = run(code, out, block=100, options=options)
    assert len(seen) == report.instructions
    assert {wave for wave, _ in seen} == {0, 1}
    assert [(kind, name, group, wave, size) for kind, name, group, wave, _, _, size in accesses] == [
        ("store", "out", (0, 0, 0), 0, 4),
        ("store", "out", (0, 0, 0), 1, 4),
    ]
    np.testing.assert_array_equal(accesses[1][5], out.ctypes.data + 4 * np.arange(64, 100))


@pytest.mark.parametrize(
    ("arch", "instruction", "step", "extra"),
    [
        ("gfx942", "ds_write_b32 v3, v2", 4, 0),
        ("gfx942", "ds_write_b32 v3, v2", 128, 2 * 31),
        ("gfx950", "ds_write_b32 v3, v2", 8, 2 * 1),
        ("gfx942", "ds_write_b128 v3, v[4:7]", 16, 0),
        ("gfx942", "ds_write_b128 v3, v[4:7]", 128, 8 * 7),
        ("gfx942", "ds_write_b32 v3, v2", 0, 0),
    ],
)
def test_bank_conflicts(arch, instruction, step, extra):
    lines = START + f"v_mul_u32_u24 v3, {step}, v0\n{instruction}\ns_waitcnt lgkmcnt(0)\ns_endpgm"
    assert run(build(lines, arch, lds=8192), np.zeros(1, np.uint32)).lds_bank_conflicts == extra


def test_text_and_bytes_of_a_kernel():
    code = build("s_mov_b32 m0, s3\nglobal_load_dword v2, v1, s[8:9] offset:-8\nv_add_f32 v1, 0x40490fdb, v2\n" + STORE)
    found = list(listing(code, "kernel"))
    texts = [text for _, _, text in found]
    assert texts[0] == "s_mov_b32 m0, s3"
    assert texts[1] == "global_load_dword v2, v1, s[8:9] offset:-8"
    assert texts[2] == "v_add_f32 v1, 0x40490fdb, v2"
    assert texts[-1] == "s_endpgm"
    start, stop = code.kernels["kernel"].text
    assert b"".join(data for _, data, _ in found) == code.image[start:stop]


def test_overlapping_and_odd_buffers():
    memory, whole = Memory(), np.arange(64, dtype=np.uint32)
    memory.register("whole", whole)
    memory.register("part", whole[8:16])
    assert memory.find(whole.ctypes.data + 32, 4).name == "part"
    assert memory.find(whole.ctypes.data + 60, 8).name == "whole"
    with pytest.raises(ValueError, match="not contiguous"):
        memory.register("strided", whole[::2])
    fixed = np.zeros(4)
    fixed.flags.writeable = False
    with pytest.raises(ValueError, match="read-only"):
        memory.register("fixed", fixed)
