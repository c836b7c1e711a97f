"""The ``flydsl`` kernels executed on simulated gfx942 and gfx950. `make verify-amd` runs the whole sweep."""

from __future__ import annotations

import functools
import json
import sys
from dataclasses import replace

import pytest
import torch
from test_semantics_coverage import TESTED

from cdna_sim import Options, SimulationFault, listing
from helpers import CPU, check_guarded, expected_for, expected_logits, int32, same_bits
from lightning_indexer import Arch, MqaLogitsProblem, fp8_mqa_logits
from lightning_indexer.amd import simulation
from lightning_indexer.backends.flydsl_cdna.config import FlyConfig, heuristic
from lightning_indexer.backends.flydsl_cdna.mqa_logits import MAX_KEY_STRIDE, Launch
from lightning_indexer.check.cases import Inputs, make_inputs, make_windows
from lightning_indexer.problems.mqa_logits import MqaLogitsCall
from processes import python
from semantics import mnemonics

pytestmark = [
    pytest.mark.skipif(sys.version_info < (3, 11), reason="the decoder, tinygrad, needs Python 3.11"),
    pytest.mark.usefixtures("compiled_kernels"),
]

ARCHS = ("gfx942", "gfx950")
NATIVE = {"gfx942": torch.float8_e4m3fnuz, "gfx950": torch.float8_e4m3fn}
NAN = {"gfx942": 0x80, "gfx950": 0x7F}
# Blocks that the heuristic does not choose, each on one arch: 256 keys a tile; rows and keys shared; four rows a wave.
OTHER_BLOCKS = [
    ("gfx942", FlyConfig(rows=1, waves=4, stages=2, chunk=256)),
    ("gfx950", FlyConfig(rows=2, waves=4, stages=2, chunk=256)),
    ("gfx950", FlyConfig(rows=4, waves=1, stages=3, chunk=256)),
    ("gfx942", FlyConfig(rows=4, waves=2, stages=3, chunk=256)),
]


@functools.cache
def native_inputs(arch: str, rows: int, keys: int, heads: int, head_dim: int) -> Inputs:
    inputs = make_inputs(rows, keys, heads, head_dim, CPU)
    signs = 1.0 - 2.0 * (torch.arange(keys) % 3 == 1).float()
    q, k = (x.float().clamp(-240, 240).to(NATIVE[arch]) for x in (inputs.q_fp8, inputs.k_fp8))
    return replace(inputs, q_fp8=q, k_fp8=k, kv_scale=inputs.kv_scale * signs)


def launch(arch: str, rows: int, keys: int, heads: int, head_dim: int, config: FlyConfig | None = None, **facts):
    problem = MqaLogitsProblem(rows, keys, heads, head_dim, NATIVE[arch], NATIVE[arch], **facts)
    return Launch(problem, Arch.parse(arch), config or heuristic(problem, Arch.parse(arch)))


def operands(inputs: Inputs, ks: torch.Tensor, ke: torch.Tensor, out: torch.Tensor | None = None) -> MqaLogitsCall:
    return MqaLogitsCall(inputs.q_fp8, inputs.k_fp8, inputs.kv_scale, inputs.weights, ks, ke, out=out)


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("clean", [True, False])
def test_windows_of_every_kind(arch, clean):
    rows, keys = 7, 301
    inputs = native_inputs(arch, rows, keys, 32, 128)
    # Rows of a block whose windows are apart, empty, reversed, past either end, one key wide.
    ks = int32(-5, 200, 64, 3, 300, 250, 10)
    ke = int32(7, 264, 64, 2, 2**31 - 1, -(2**31), 301)
    run = launch(arch, rows, keys, 32, 128, clean_logits=clean)
    with simulation(arch, Options(order="shuffled", seed=3)):
        check_guarded(
            lambda out: run(operands(inputs, ks, ke, out)), expected_for(inputs, ks, ke), torch.float32, clean=clean
        )


@pytest.mark.parametrize("arch", ARCHS)
def test_a_nan_key_stays_in_its_column_and_keys_outside_count_for_nothing(arch):
    rows, keys = 4, 130
    inputs = native_inputs(arch, rows, keys, 32, 128)
    ks, ke = int32(3, 3, 70, 70), int32(64, 60, 129, 100)
    k, scale = inputs.k_fp8.clone(), inputs.kv_scale.clone()
    outside = [0, 1, 2, 64, 65, 69, 129]
    k.view(torch.uint8)[outside] = NAN[arch]
    scale[outside] = float("nan")
    run = launch(arch, rows, keys, 32, 128)
    with simulation(arch):
        check_guarded(
            lambda out: run(operands(replace(inputs, k_fp8=k, kv_scale=scale), ks, ke, out)),
            expected_for(inputs, ks, ke), torch.float32, clean=True,
        )  # fmt: skip
        plain, changed = torch.empty(rows, keys), torch.empty(rows, keys)
        run(operands(inputs, ks, ke, plain))
        k.view(torch.uint8)[20] = NAN[arch]
        run(operands(replace(inputs, k_fp8=k, kv_scale=scale), ks, ke, changed))
    differing = (plain.view(torch.int32) != changed.view(torch.int32)).any(0)
    assert differing.nonzero().flatten().tolist() == [20]


@pytest.mark.parametrize(("arch", "config"), OTHER_BLOCKS)
def test_other_blocks(arch, config):
    rows, keys = 5, 530
    inputs = native_inputs(arch, rows, keys, 32, 64)
    ks, ke = make_windows("misaligned", rows, keys, CPU)
    run = launch(arch, rows, keys, 32, 64, config)
    with simulation(arch, Options(order="reversed")):
        check_guarded(
            lambda out: run(operands(inputs, ks, ke, out)), expected_for(inputs, ks, ke), torch.float32, clean=True
        )


@pytest.mark.parametrize("arch", ARCHS)
def test_compressed_bfloat16(arch):
    rows, keys, width = 3, 300, 131
    inputs = native_inputs(arch, rows, keys, 64, 64)
    ks, ke = int32(-20, 100, 290), int32(90, 400, 300)
    run = launch(arch, rows, keys, 64, 64, clean_logits=False, max_seqlen_k=width, out_dtype=torch.bfloat16)
    expected = expected_for(inputs, ks, ke, width)
    with simulation(arch):
        check_guarded(lambda out: run(operands(inputs, ks, ke, out)), expected, torch.bfloat16, clean=False)


@pytest.mark.parametrize("arch", ARCHS)
def test_a_long_loop_gives_the_same_bits_in_any_order_and_has_no_bank_conflicts(arch):
    rows, keys = 4, 1091  # 18 tiles round the ring
    inputs = native_inputs(arch, rows, keys, 32, 128)
    ks, ke = make_windows("causal", rows, keys, CPU)
    config = replace(launch(arch, rows, keys, 32, 128).config, chunk=2048)
    run = launch(arch, rows, keys, 32, 128, config)
    results, conflicts = [], []
    for options in (Options(), Options(order="shuffled", seed=1), Options(order="reversed", deferred=False)):
        with simulation(arch, options) as launcher:
            results.append(
                check_guarded(
                    lambda out: run(operands(inputs, ks, ke, out)), expected_for(inputs, ks, ke), torch.float32,
                    clean=True,
                ).clone()
            )  # fmt: skip
        conflicts += [report.lds_bank_conflicts for report in launcher.reports]
    assert all(same_bits(results[0], result) for result in results)
    assert conflicts == [0, 0, 0]
    # Below those of triton-portable on the same arch, which docs/kernels/flydsl.md lists beside them.
    [report] = launcher.reports
    positions = int((ke - ks).clamp(min=0).sum())
    assert report.instructions / positions < {"gfx942": 3.2, "gfx950": 2.0}[arch]
    run.layout = replace(run.layout, swizzle=False)
    del run.built
    with simulation(arch) as launcher:
        plain = torch.empty(rows, keys)
        run(operands(inputs, ks, ke, plain))
    assert same_bits(plain, results[0])
    # What the swizzle is for: every read of 16 bytes a lane takes twice as long or longer.
    [report] = launcher.reports
    assert report.lds_bank_conflicts >= report.by_opcode["ds_read_b128"] * (4 if arch == "gfx950" else 8)


@pytest.mark.parametrize("arch", ARCHS)
def test_the_barrier_and_the_wait_before_it_are_needed(arch):
    rows, keys = 4, 700
    inputs = native_inputs(arch, rows, keys, 32, 128)
    ks, ke = make_windows("causal", rows, keys, CPU)
    run = launch(arch, rows, keys, 32, 128, replace(launch(arch, rows, keys, 32, 128).config, chunk=1024))
    code = list(listing(run.built.code_object, run.built.kernel))
    [barrier] = [index for index, (_, _, text) in enumerate(code) if text.startswith("s_barrier")]
    waits = [index for index in range(barrier - 4, barrier) if code[index][2].startswith("s_waitcnt")]
    assert waits
    for index in (barrier, waits[-1]):
        with (
            simulation(arch, Options(order="shuffled", drop=frozenset({code[index][0]}))),
            pytest.raises(SimulationFault),
        ):
            run(operands(inputs, ks, ke, torch.empty(rows, keys)))


@pytest.mark.parametrize("arch", ARCHS)
def test_rows_further_apart_than_32_bits(arch):
    rows, keys, heads, head_dim = 3, 300, 32, 64
    small = native_inputs(arch, rows, keys, heads, head_dim)
    ks, ke = make_windows("misaligned", rows, keys, CPU)
    # Address space only: pages that nothing touches are never there.
    q = torch.empty_strided((rows, heads, head_dim), (2**32 + 64, 128, 1), dtype=NATIVE[arch])
    k = torch.empty_strided((keys, head_dim), (MAX_KEY_STRIDE & -16, 1), dtype=NATIVE[arch])
    weights = torch.empty_strided((rows, heads), (2**30 + 4, 1))
    out = torch.empty_strided((rows, keys), (2**30 + 64, 1))
    for target, source in ((q, small.q_fp8), (k, small.k_fp8)):
        target.view(torch.uint8).copy_(source.view(torch.uint8))
    weights.copy_(small.weights)
    run = launch(arch, rows, keys, heads, head_dim)
    with simulation(arch):
        run(MqaLogitsCall(q, k, small.kv_scale, weights, ks, ke, out=out))
        plain = torch.empty(rows, keys)
        run(operands(small, ks, ke, plain))
    assert same_bits(out, plain)
    expected = expected_logits(small.q_fp8, small.k_fp8, small.kv_scale, small.weights, ks, ke)
    assert torch.equal(plain == float("-inf"), expected == float("-inf"))


@pytest.mark.parametrize("arch", ARCHS)
def test_the_stride_of_a_single_key_says_nothing(arch):
    inputs = native_inputs(arch, 2, 1, 32, 128)
    ks, ke = torch.zeros(2, dtype=torch.int32), torch.ones(2, dtype=torch.int32)
    far, near = torch.empty(2, 1), torch.empty(2, 1)
    given = operands(inputs, ks, ke)
    with simulation(arch):
        launch(arch, 2, 1, 32, 128)(given._replace(k=given.k.as_strided((1, 128), (2**33, 1)), out=far))
        launch(arch, 2, 1, 32, 128)(given._replace(out=near))
    assert same_bits(far, near)


@pytest.mark.parametrize("arch", ARCHS)
def test_nothing_past_an_operand_is_touched(arch):
    rows, keys = 3, 300
    inputs = native_inputs(arch, rows, keys, 32, 128)
    ks, ke = int32(0, 0, 0), int32(300, 300, 300)
    run = launch(arch, rows, keys, 32, 128)
    whole = operands(inputs, ks, ke)
    out = torch.empty(rows, 320)
    cut = {
        "k": (whole._replace(k=whole.k[: keys - 1]), out[:, :keys]),
        "kv_scale": (whole._replace(kv_scale=whole.kv_scale[: keys - 1]), out[:, :keys]),
        "weights": (whole._replace(weights=whole.weights[:, :-1]), out[:, :keys]),
        "out": (whole, out[:, : keys - 1]),
    }
    for name, (given, view) in cut.items():
        with simulation(arch), pytest.raises(SimulationFault, match=f"past the end of {name}") as raised:
            run(given._replace(out=view))
        assert f"kernel {run.layout.name}" in str(raised.value)


def test_the_public_call_converts_fn_operands_on_gfx942():
    rows, keys = 3, 130
    inputs = make_inputs(rows, keys, 32, 128, CPU)
    inputs.q_fp8.view(torch.uint8)[:, ::3] = 0x80
    inputs.k_fp8.view(torch.uint8)[::2] = 0x80
    ks, ke = make_windows("causal", rows, keys, CPU)
    with simulation("gfx942") as launcher:
        check_guarded(
            lambda out: fp8_mqa_logits(
                inputs.q_fp8, (inputs.k_fp8, inputs.kv_scale), inputs.weights, ks, ke, out=out, backend="flydsl"
            ),
            expected_for(inputs, ks, ke), torch.float32, clean=True,
        )  # fmt: skip
    [report] = launcher.reports
    assert report.stored == {"out": rows * keys * 4}


# In a process of its own: this one's Triton is the interpreter.
TRITON = """
import json, torch
from lightning_indexer import fp8_mqa_logits
from lightning_indexer.check.cases import make_inputs
from lightning_indexer.amd import simulation

inputs = make_inputs(4, 512, 32, 64, torch.device("cpu"))
windows = torch.zeros(4, dtype=torch.int32), torch.full((4,), 512, dtype=torch.int32)
with simulation("gfx950") as launcher:
    fp8_mqa_logits(
        inputs.q_fp8, (inputs.k_fp8, inputs.kv_scale), inputs.weights, *windows, backend="triton-portable"
    )
print(json.dumps([report.instructions for report in launcher.reports]))
"""


def test_fewer_instructions_than_triton_portable():
    [triton] = json.loads(python("-c", TRITON))
    inputs = native_inputs("gfx950", 4, 512, 32, 64)
    whole = operands(inputs, torch.zeros(4, dtype=torch.int32), torch.full((4,), 512, dtype=torch.int32))
    with simulation("gfx950") as launcher:
        launch("gfx950", 4, 512, 32, 64)(whole._replace(out=torch.empty(4, 512)))
    [report] = launcher.reports
    assert report.instructions < 0.6 * triton


@pytest.mark.parametrize("arch", ARCHS)
def test_every_instruction_has_a_row_in_the_semantics_tables(arch):
    runs = [
        launch(arch, 4, 300, 32, 128),
        launch(arch, 4, 300, 32, 128, clean_logits=False),
        launch(arch, 3, 300, 64, 64, clean_logits=False, max_seqlen_k=131, out_dtype=torch.bfloat16),
    ]
    used = set().union(*(mnemonics(run.built.isa) for run in runs)) - {"s_endpgm"}
    assert len(used) > 60
    assert sorted(used - TESTED) == []
