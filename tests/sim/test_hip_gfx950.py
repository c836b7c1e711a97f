"""``hip-gfx950`` executed in the simulator: values, what it loads and stores, which wave does what, and its cost."""

from __future__ import annotations

import functools
import sys
from collections import defaultdict

import pytest
import torch

pytestmark = pytest.mark.skipif(sys.version_info < (3, 11), reason="the decoder, tinygrad, needs Python 3.11")


from cdna_sim import Options, Report  # noqa: E402
from helpers import CPU, check_guarded, expected_for, same_bits  # noqa: E402
from lightning_indexer import Arch, MqaLogitsProblem, calc_diff, fp8_mqa_logits  # noqa: E402
from lightning_indexer.amd import simulation  # noqa: E402
from lightning_indexer.backends.hip_gfx950.config import Tunables  # noqa: E402
from lightning_indexer.backends.hip_gfx950.mqa_logits import MqaLogits  # noqa: E402
from lightning_indexer.check.bounds import BFLOAT16_SUMS  # noqa: E402
from lightning_indexer.check.cases import Inputs, make_inputs, make_windows  # noqa: E402
from lightning_indexer.check.mqa_logits import MqaLogitsSuite  # noqa: E402
from lightning_indexer.check.simulated import run_case  # noqa: E402
from lightning_indexer.check.verify import SimulatedCase  # noqa: E402
from lightning_indexer.model.cost import Model  # noqa: E402
from lightning_indexer.model.rates import MI355X  # noqa: E402
from lightning_indexer.problems.mqa_logits import MqaLogitsCall  # noqa: E402
from lightning_indexer.selection import registry  # noqa: E402

GFX950 = Arch.parse("gfx950")
STREAM, LDS = Tunables(strategy="stream"), Tunables(strategy="lds")
BOTH = pytest.mark.parametrize("tunables", [STREAM, LDS], ids=["stream", "lds"])


def operands(inputs: Inputs, ks: torch.Tensor, ke: torch.Tensor) -> MqaLogitsCall:
    return MqaLogitsCall(inputs.q_fp8, inputs.k_fp8, inputs.kv_scale, inputs.weights, ks, ke)


def launch(problem: MqaLogitsProblem, call: MqaLogitsCall, tunables: Tunables) -> None:
    kernel = MqaLogits(tunables)
    assert (reason := kernel.supports(problem, GFX950)) is None, reason
    kernel.launch(problem, GFX950, kernel.config(problem, GFX950))(call)


def simulate(
    rows: int,
    keys: int,
    tunables: Tunables,
    options: Options | None = None,
    *,
    clean: bool = True,
    windows: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, Report]:
    """Checked against the reference, in a guarded and poisoned buffer. Windows: by default every key."""
    inputs = make_inputs(rows, keys, 32, 128, CPU)
    ks, ke = windows or (torch.zeros(rows, dtype=torch.int32), torch.full((rows,), keys, dtype=torch.int32))
    problem = MqaLogitsProblem(rows, keys, 32, 128, clean_logits=clean)
    with simulation("gfx950", options or Options(order="shuffled", seed=3)) as launcher:
        logits = check_guarded(
            lambda out: launch(problem, operands(inputs, ks, ke)._replace(out=out), tunables),
            expected_for(inputs, ks, ke), torch.float32, clean=clean,
        )  # fmt: skip
    [report] = launcher.reports
    return logits, report


def cases_of(kind: str) -> list[SimulatedCase]:
    found = MqaLogitsSuite().simulated_cases(GFX950, ["hip-gfx950"], heads=[32], head_dims=[128])
    return [case for case in found if case.config is not None and case.config.strategy == kind]


@pytest.mark.parametrize("kind", ["stream", "lds"])
def test_verify(kind):
    # A slice of `verify --arch gfx950`: every window, both forms, the smallest shape with all sizes of block.
    cases = [case for case in cases_of(kind) if case.case.s_q == 17]
    assert len({(case.case.window, case.case.form) for case in cases}) == 10  # cp does not apply
    for outcome in map(run_case, cases):
        assert outcome.status == "pass", f"{outcome.case}: {outcome.detail}"


BIASES = {
    "a ten-thousandth of itself": lambda logits: logits.mul_(1 + 1e-4),
    "a thousandth": lambda logits: logits.add_(1e-3),
}


@pytest.mark.parametrize("bias", BIASES)
def test_verify_notices_a_small_bias(monkeypatch, bias):
    """Of every logit, for each of the few configs."""

    def biased(run, call):
        run(call)
        BIASES[bias](call.result)

    honest = MqaLogits.launch
    launched = lambda self, *given: functools.partial(biased, honest(self, *given))  # noqa: E731
    monkeypatch.setattr(MqaLogits, "launch", launched)
    for kind in ("stream", "lds"):
        case = next(c for c in cases_of(kind) if not c.config.bfloat16_sums)
        outcome = run_case(case)
        assert outcome.status == "fail"
        assert "allowed 1e-10" in outcome.detail
        assert "off by more than 2e-06 of what they sum, the first at [" in outcome.detail


def test_sums_of_bfloat16_have_bounds_of_their_own():
    [case, *_] = [c for c in cases_of("stream") if c.config.bfloat16_sums]
    outcome = run_case(case)
    assert outcome.status == "pass", outcome.detail
    assert outcome.finding.diff > 1e-8
    assert outcome.finding.worst > 1e-5


def test_the_public_call_takes_it():
    rows, keys = 2, 40
    inputs = make_inputs(rows, keys, 32, 128, CPU)
    ks, ke = make_windows("causal", rows, keys, CPU)
    with simulation("gfx950") as launcher:
        logits = fp8_mqa_logits(inputs.q_fp8, (inputs.k_fp8, inputs.kv_scale), inputs.weights, ks, ke)
    assert launcher.reports[0].by_opcode["v_mfma_f32_32x32x64_f8f6f4"] == 2 * 2 * 2
    torch.testing.assert_close(logits, expected_for(inputs, ks, ke), atol=1e-3, rtol=1e-5)


def test_64_heads():
    rows, keys = 3, 70
    inputs = make_inputs(rows, keys, 64, 128, CPU)
    ks, ke = make_windows("misaligned", rows, keys, CPU)
    problem = MqaLogitsProblem(rows, keys, 64, 128)
    with simulation("gfx950", Options(order="shuffled", seed=2)):
        for tunables in (STREAM, LDS):
            check_guarded(
                lambda out, t=tunables: launch(problem, operands(inputs, ks, ke)._replace(out=out), t),
                expected_for(inputs, ks, ke), torch.float32, clean=True,
            )  # fmt: skip


@pytest.mark.parametrize("strategy", ["stream", "lds"])
@pytest.mark.parametrize("heads", [32, 64])
def test_the_head_sum_on_the_matrix_unit(strategy, heads):
    rows, keys = 7, 130
    inputs = make_inputs(rows, keys, heads, 128, CPU)
    ks, ke = make_windows("misaligned", rows, keys, CPU)
    tunables = Tunables(strategy=strategy, reduce="mfma", block_m=4)
    inputs.q_fp8.view(torch.uint8)[2, 5, 7] = 0xFF  # row 2 shares a result with its neighbours
    inputs.weights[5] = float("inf")
    out = torch.empty(rows, keys)
    with simulation("gfx950", Options(order="shuffled", seed=2)):
        launch(MqaLogitsProblem(rows, keys, heads, 128), operands(inputs, ks, ke)._replace(out=out), tunables)
    expected = expected_for(inputs, ks, ke)
    sound = [0, 1, 3, 4, 6]
    inside = expected[sound] != float("-inf")
    assert torch.equal(out[sound] != float("-inf"), inside)
    diff = calc_diff(out[sound], expected[sound], inside)
    assert 1e-8 < diff < BFLOAT16_SUMS[torch.float32].diff  # bfloat16 shows


# What is loaded, and by whom


class Accesses:
    """Every global access, by buffer and kind."""

    def __init__(self) -> None:
        self.found: dict[tuple[str, str], list[tuple]] = defaultdict(list)

    def __call__(self, kind, buffer, workgroup, wave, pc, addresses, width):
        self.found[kind, buffer].append((workgroup, wave, addresses.copy(), width))

    def tiles(self, kind: str, buffer: str, bytes_of_tile: int, base: int) -> dict[int, set]:
        """Who touched each tile."""
        owners = defaultdict(set)
        for workgroup, wave, addresses, _ in self.found[kind, buffer]:
            for tile in set((addresses.astype("int64") - base) // bytes_of_tile):
                owners[int(tile)].add((workgroup, wave))
        return owners


@pytest.mark.parametrize(("splits", "unroll2"), [(1, True), (3, True), (2, False)])
def test_each_tile_of_keys_is_loaded_once_by_one_wave(splits, unroll2):
    rows, keys, block = 8, 32 * 21, 4
    seen = Accesses()
    tunables = Tunables(strategy="stream", block_m=block, split_n=splits, unroll2=unroll2)
    _, report = simulate(rows, keys, tunables, Options(on_access=seen))
    # Once for each of the two row blocks, not for each of the eight rows; the prefetch past the end loads nothing.
    assert report.loaded["k"] == 2 * keys * 128
    assert report.loaded["kv_scale"] == 2 * 2 * keys * 4  # both half waves read it
    base = min(int(addresses.min()) for _, _, addresses, _ in seen.found["load", "k"])
    owners = seen.tiles("load", "k", 32 * 128, base)
    assert sorted(owners) == list(range(21))
    for of_tile in owners.values():
        assert len(of_tile) == 2
        assert {workgroup[0] for workgroup, _ in of_tile} == {0, 1}
    # Every split has work, and every wave of it.
    assert {owner for of_tile in owners.values() for owner in of_tile} == {
        ((x, y, 0), wave) for x in range(2) for y in range(splits) for wave in range(4)
    }
    assert report.by_opcode["v_mfma_f32_32x32x64_f8f6f4"] == 2 * rows * 21
    assert report.by_opcode["v_permlane32_swap_b32"] == rows // 2 * 21
    assert "LDS" not in report.by_kind


def test_keys_staged_in_lds_are_loaded_once_for_all_waves():
    rows, keys = 32, 64 * 5
    seen = Accesses()
    _, report = simulate(rows, keys, Tunables(strategy="lds", split_n=2), Options(on_access=seen))
    # 16 rows a workgroup, 4 a wave.
    assert report.loaded["k"] == 2 * keys * 128
    base = min(int(addresses.min()) for _, _, addresses, _ in seen.found["load", "k"])
    owners = seen.tiles("load", "k", 64 * 128, base)
    assert sorted(owners) == list(range(5))
    assert all(len({workgroup for workgroup, _ in of_stage}) == 2 for of_stage in owners.values())
    assert report.lds_bank_conflicts == 0


@BOTH
def test_stores_fill_waves_and_the_result_once(tunables):
    rows, keys = 16, 32 * 6
    seen = Accesses()
    _, report = simulate(rows, keys, tunables, Options(on_access=seen))
    stores = seen.found["store", "out"]
    assert {len(addresses) for _, _, addresses, _ in stores} == {64}
    assert report.stored == {"out": rows * keys * 4}
    written = torch.cat([torch.from_numpy(addresses.astype("int64")) for _, _, addresses, _ in stores])
    assert len(written.unique()) == len(written)


@BOTH
def test_every_element_is_stored_once_whatever_the_windows(tunables):
    rows, keys = 18, 333
    for window in ("misaligned", "empty", "multi_req", "past_end"):
        _, report = simulate(rows, keys, tunables, windows=make_windows(window, rows, keys, CPU))
        assert report.stored == {"out": rows * keys * 4}


@pytest.mark.parametrize(("keys", "reverse"), [(2048, False), (2049, True)])
@BOTH
def test_high_rows_start_first_when_keys_are_many(tunables, keys, reverse):
    seen = Accesses()
    rows = 32
    # Short windows: the order is what matters here.
    windows = torch.zeros(rows, dtype=torch.int32), torch.full((rows,), 40, dtype=torch.int32)
    simulate(rows, keys, tunables, Options(on_access=seen), clean=False, windows=windows)
    first_rows = [int(addresses.min()) for _, _, addresses, _ in seen.found["store", "out"]]
    # Workgroups run in the order of their numbers, as the hardware starts them.
    assert (first_rows[0] > first_rows[-1]) == reverse


# Edge cases


@BOTH
def test_the_same_bits_in_any_order(tunables):
    first, _ = simulate(17, 300, tunables, Options())
    for options in (Options(order="shuffled", seed=9), Options(order="reversed", deferred=False)):
        assert same_bits(first, simulate(17, 300, tunables, options)[0])


def test_the_clamped_product_gives_the_bits_of_the_maximum():
    clamp, _ = simulate(4, 300, Tunables(strategy="stream", relu="clamp"))
    maximum, _ = simulate(4, 300, Tunables(strategy="stream", relu="max"))
    assert same_bits(clamp, maximum)


@BOTH
def test_keys_outside_the_windows_may_hold_anything(tunables):
    rows, keys = 6, 200
    inputs = make_inputs(rows, keys, 32, 128, CPU)
    ks = torch.tensor([40, 41, 45, 60, 70, 90], dtype=torch.int32)
    ke = torch.tensor([150, 140, 149, 50, 150, 95], dtype=torch.int32)
    expected = expected_for(inputs, ks, ke)
    inputs.k_fp8.view(torch.uint8)[:40] = 0x7F
    inputs.k_fp8.view(torch.uint8)[150:] = 0xFF
    inputs.kv_scale[:40] = float("nan")
    inputs.kv_scale[150:] = float("inf")
    problem = MqaLogitsProblem(rows, keys, 32, 128)
    with simulation("gfx950"):
        check_guarded(
            lambda out: launch(problem, operands(inputs, ks, ke)._replace(out=out), tunables),
            expected, torch.float32, clean=True,
        )  # fmt: skip


@pytest.mark.parametrize("relu", ["clamp", "max"])
def test_nan_codes_stay_in_their_row_and_column(relu):
    rows, keys = 4, 96
    inputs = make_inputs(rows, keys, 32, 128, CPU)
    ks, ke = torch.zeros(rows, dtype=torch.int32), torch.full((rows,), keys, dtype=torch.int32)
    expected = expected_for(inputs, ks, ke)
    inputs.k_fp8.view(torch.uint8)[50, 3] = 0x7F
    inputs.q_fp8.view(torch.uint8)[2, 5, 7] = 0xFF
    out = torch.empty(rows, keys)
    with simulation("gfx950"):
        tunables = Tunables(strategy="stream", relu=relu)
        launch(MqaLogitsProblem(rows, keys, 32, 128), operands(inputs, ks, ke)._replace(out=out), tunables)
    # relu(NaN) is 0: column 50 is +0.0, row 2 lacks a head.
    assert same_bits(out[:, 50], torch.zeros(rows))
    others = [n for n in range(keys) if n != 50]
    torch.testing.assert_close(out[[0, 1, 3]][:, others], expected[[0, 1, 3]][:, others], atol=1e-3, rtol=1e-5)
    assert bool(out[2].isfinite().all())


def test_no_negative_zero():
    rows, keys = 3, 64
    inputs = make_inputs(rows, keys, 32, 128, CPU)
    inputs.q_fp8.view(torch.uint8)[:] = 0x38  # 1.0
    inputs.k_fp8.view(torch.uint8)[:] = 0xB8  # -1.0
    inputs.weights[:] = -1.0
    inputs.kv_scale[::2] = -1.0
    ks, ke = torch.zeros(rows, dtype=torch.int32), torch.full((rows,), keys, dtype=torch.int32)
    for tunables in (STREAM, LDS, Tunables(strategy="stream", relu="max")):
        out = torch.empty(rows, keys)
        with simulation("gfx950"):
            launch(MqaLogitsProblem(rows, keys, 32, 128), operands(inputs, ks, ke)._replace(out=out), tunables)
        assert same_bits(out, torch.zeros(rows, keys))


@BOTH
def test_strided_operands_and_rows_of_the_result_past_two_gib(tunables):
    rows, keys = 3, 70
    inputs = make_inputs(rows, keys, 32, 128, CPU)
    ks, ke = make_windows("misaligned", rows, keys, CPU)
    expected = expected_for(inputs, ks, ke)
    q = torch.zeros(rows, 40, 160, dtype=torch.uint8).view(torch.float8_e4m3fn)[:, 4:36, 16:144]
    q.copy_(inputs.q_fp8)
    k = torch.zeros(keys, 176, dtype=torch.uint8).view(torch.float8_e4m3fn)[:, 32:160]
    k.copy_(inputs.k_fp8)
    weights = torch.zeros(rows, 45)[:, 3:35]
    weights.copy_(inputs.weights)
    stride = 2**29 + 33  # 2 GiB and more between two rows; only the pages that are written exist
    out = torch.empty(2 * stride + keys).as_strided((rows, keys), (stride, 1))
    with simulation("gfx950"):
        given = MqaLogitsCall(q, k, inputs.kv_scale, weights, ks, ke)
        launch(MqaLogitsProblem(rows, keys, 32, 128), given._replace(out=out), tunables)
    torch.testing.assert_close(out.clone(), expected, atol=1e-3, rtol=1e-5)


@BOTH
def test_strides_out_of_reach_go_through_a_copy(tunables):
    rows, keys = 3, 20
    inputs = make_inputs(rows, keys, 32, 128, CPU)
    ks, ke = make_windows("misaligned", rows, keys, CPU)
    # Address space only: pages that nothing touches are never there.
    far = torch.empty(keys << 27, dtype=torch.uint8).view(torch.float8_e4m3fn).as_strided((keys, 128), (2**27, 1))
    far.copy_(inputs.k_fp8)
    out = torch.empty(3 << 30).as_strided((rows, keys), (2**30, 1))
    near = torch.empty(rows, keys)
    for clean in (True, False):
        problem = MqaLogitsProblem(rows, keys, 32, 128, clean_logits=clean)
        given = operands(inputs, ks, ke)
        out.fill_(5.0)
        near.fill_(5.0)
        with simulation("gfx950"):
            launch(problem, given._replace(k=far, out=out), tunables)
            launch(problem, given._replace(out=near), tunables)
        assert same_bits(out, near)


def test_the_stride_of_a_single_row_says_nothing():
    inputs = make_inputs(1, 1, 32, 128, CPU)
    ks, ke = torch.zeros(1, dtype=torch.int32), torch.ones(1, dtype=torch.int32)
    k, out = inputs.k_fp8.as_strided((1, 128), (2**33, 1)), torch.empty(1, 1).as_strided((1, 1), (2**33, 1))
    with simulation("gfx950"):
        launch(MqaLogitsProblem(1, 1, 32, 128), operands(inputs, ks, ke)._replace(k=k, out=out), STREAM)
    torch.testing.assert_close(out, expected_for(inputs, ks, ke), atol=1e-3, rtol=1e-5)


def test_a_problem_that_the_gate_refuses_does_not_run():
    for problem, reason in (
        (MqaLogitsProblem(2, 8, 32, 128, out_dtype=torch.bfloat16), "writes float32 logits"),
        (MqaLogitsProblem(2, 8, 32, 128, clean_logits=False, max_seqlen_k=8), "compressed logits are not built"),
        (MqaLogitsProblem(2, 8, 32, 64), "D=64 is not one of 128"),
    ):
        with simulation("gfx950"), pytest.raises(registry.BackendUnavailableError, match=f"hip-gfx950: .*{reason}"):
            registry.prepare(problem, GFX950, "hip-gfx950")


# Its cost


def test_a_tile_costs_less_through_lds_where_keys_are_few():
    problem = MqaLogitsProblem(8192, 8192, 32, 128)
    found = {}
    for tunables in (STREAM, LDS):
        model = Model("hip-gfx950", MqaLogits(tunables), [problem], GFX950, MI355X)
        found[tunables.strategy] = model.predict(problem, "causal")
    stream, lds = found["stream"], found["lds"]
    assert lds.kernel.built.resources.vgpr_spills == lds.kernel.built.resources.scratch == 0
    assert lds.cycles_of_tile < stream.cycles_of_tile
    assert lds.in_order < stream.in_order
    # What it is for: q once a row and keys once for 16 rows, where streaming has once a wave and for 4 rows.
    assert lds.units["L1"] < 0.5 * stream.units["L1"]
    for prediction in found.values():
        tile = prediction.kernel.of_tile(problem)
        assert tile["MFMA"] == pytest.approx(2)
        assert tile["store out"] == pytest.approx(128)
        assert prediction.kernel.group["load q"] > 0
    assert stream.kernel.of_tile(problem)["load k"] == pytest.approx(32 * 128 / 4)
    assert lds.kernel.of_tile(problem)["load k"] == pytest.approx(32 * 128 / 16)
