"""``triton-portable`` in Triton's interpreter against the reference, and its tile heuristic."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import os
import subprocess
import sys

import pytest
import torch

from helpers import (
    CPU,
    FORMS_AND_DTYPES,
    INT32_MAX,
    INT32_MIN,
    INTERPRETED,
    SOURCES,
    assert_matches,
    check_guarded,
    expected_for,
    int32,
    options_of,
    same_bits,
)
from lightning_indexer import Arch, MqaLogitsProblem, envs, fp8_mqa_logits
from lightning_indexer.backends.triton_portable import mqa_logits as backend_module
from lightning_indexer.backends.triton_portable.config import TileConfig, heuristic
from lightning_indexer.backends.triton_portable.mqa_logits import HEAD_DIMS, HEADS, Launch, constants, options
from lightning_indexer.check.cases import WINDOWS, Inputs, make_inputs, make_windows
from lightning_indexer.problems.mqa_logits import MqaLogitsCall

interpreted = pytest.mark.skipif(
    not envs.triton_interprets(), reason="a GPU is here: tests/gpu runs the compiled kernel, in the same process"
)

FNUZ = torch.float8_e4m3fnuz
TRITON_VERSION = tuple(int(part) for part in importlib.metadata.version("triton").split(".")[:2])
# Native fp8; fp8 widened to float16, as where the matrix unit has no fp8.
ARCHS = ("sm90", "sm80")
# Several chunks a row, several tiles a chunk.
SMALL = TileConfig(block=16, chunk=64, num_warps=4, num_stages=2)
WIDER = TileConfig(block=32, chunk=64, num_warps=4, num_stages=2)
ONE_TILE = TileConfig(block=64, chunk=64, num_warps=4, num_stages=2)


def run(inputs: Inputs, ks, ke, out: torch.Tensor, form: str, arch: str, config: TileConfig, width: int) -> None:
    rows, heads, head_dim = inputs.q_fp8.shape
    problem = MqaLogitsProblem(
        rows, inputs.k_fp8.shape[0], heads, head_dim, out_dtype=out.dtype, clean_logits=form == "clean",
        max_seqlen_k=width if form == "compressed" else 0,
    )  # fmt: skip
    call = MqaLogitsCall(inputs.q_fp8, inputs.k_fp8, inputs.kv_scale, inputs.weights, ks, ke, out=out)
    Launch(problem, Arch.parse(arch), config)(call)


def check(inputs: Inputs, ks, ke, form="clean", dtype=torch.float32, *, arch="sm90", config=SMALL, width=0):
    """One launch into a poisoned, guarded buffer; the buffer of compressed logits is as wide as the longest window."""
    width = (width or inputs.k_fp8.shape[0]) if form == "compressed" else 0
    return check_guarded(
        lambda out: run(inputs, ks, ke, out, form, arch, config, width),
        expected_for(inputs, ks, ke, width),
        dtype,
        clean=form == "clean",
        tolerance=INTERPRETED,
    )


# Windows, forms, sizes


@interpreted
@pytest.mark.parametrize("form", ["clean", "noclean", "compressed"])
@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize(("heads", "head_dim"), [(8, 32), (16, 64), (32, 128), (64, 64), (128, 32)])
@pytest.mark.slow
def test_windows(heads, head_dim, window, form):
    # Both kinds of arch over the table, each with every window, form and shape.
    arch = ARCHS[(WINDOWS.index(window) + HEADS.index(heads)) % 2]
    check(make_inputs(4, 160, heads, head_dim, CPU), *make_windows(window, 4, 160, CPU), form, arch=arch)


@interpreted
@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("config", [SMALL, WIDER, ONE_TILE], ids=lambda config: f"block {config.block}")
@pytest.mark.parametrize(("form", "dtype"), FORMS_AND_DTYPES)
@pytest.mark.slow
def test_tiles_and_results(arch, config, form, dtype):
    check(
        make_inputs(5, 150, 8, 32, CPU), *make_windows("misaligned", 5, 150, CPU), form, dtype, arch=arch, config=config
    )


@interpreted
@pytest.mark.parametrize("form", ["clean", "noclean", "compressed"])
@pytest.mark.parametrize("keys", [1, 15, 16, 17, 63, 64, 65, 113])
def test_sizes_around_tiles_and_chunks(keys, form):
    check(make_inputs(3, keys, 8, 32, CPU), *make_windows("causal", 3, keys, CPU), form)


@interpreted
@pytest.mark.parametrize("form", ["clean", "noclean", "compressed"])
def test_window_edges_around_tiles_and_chunks(form):
    """One row for each pair of edges: on, before and after the boundaries of a tile, a chunk and the buffer."""
    edges = (0, 1, 15, 16, 17, 48, 63, 64, 65, 80, 100)
    pairs = [(start, end) for start in edges for end in edges if start < end]
    ks, ke = (int32(*column) for column in zip(*pairs, strict=True))
    check(make_inputs(len(pairs), 100, 8, 32, CPU), ks, ke, form, config=WIDER)


@interpreted
@pytest.mark.parametrize("width", [1, 17, 64, 65, 200])
def test_compressed_narrower_and_wider_than_the_windows(width):
    for window in ("misaligned", "past_end"):
        check(make_inputs(6, 90, 8, 32, CPU), *make_windows(window, 6, 90, CPU), "compressed", width=width)


@interpreted
@pytest.mark.parametrize(("form", "dtype"), FORMS_AND_DTYPES)
def test_windows_at_the_ends_of_int32(form, dtype):
    extremes = [
        (INT32_MIN, INT32_MAX), (INT32_MIN, INT32_MIN), (INT32_MAX, INT32_MAX), (INT32_MAX, INT32_MIN),
        (INT32_MIN, 5), (-1, 5), (5, INT32_MAX), (69, INT32_MAX), (70, INT32_MAX), (0, INT32_MIN), (-40, 140), (8, 7),
    ]  # fmt: skip
    ks, ke = (int32(*column) for column in zip(*extremes, strict=True))
    check(make_inputs(len(extremes), 70, 8, 32, CPU), ks, ke, form, dtype)


@interpreted
@pytest.mark.parametrize("arch", [*ARCHS, "gfx950"])
def test_the_heuristics_own_tiles(arch):
    """As a call launches it: chunks of 256 columns or more, here with a long row."""
    config = heuristic(MqaLogitsProblem(2, 1560, 8, 32), Arch.parse(arch))
    check(make_inputs(2, 1560, 8, 32, CPU), int32(3, 700), int32(1501, 1560), arch=arch, config=config)


# Through the public call


@interpreted
@pytest.mark.parametrize(("form", "dtype"), FORMS_AND_DTYPES)
def test_the_public_call(form, dtype):
    inputs = make_inputs(4, 90, 16, 32, CPU)
    ks, ke = make_windows("misaligned", 4, 90, CPU)
    width = 80 if form == "compressed" else 0
    result = fp8_mqa_logits(
        inputs.q_fp8, (inputs.k_fp8, inputs.kv_scale), inputs.weights, ks, ke,
        out_dtype=dtype, backend="triton-portable", **options_of(form, width),
    )  # fmt: skip
    assert_matches(result, expected_for(inputs, ks, ke, width), clean=form == "clean", tolerance=INTERPRETED)


@interpreted
@pytest.mark.skipif(TRITON_VERSION < (3, 8), reason="the interpreter of Triton before 3.8 does not read fnuz")
@pytest.mark.parametrize("q_dtype", [torch.float8_e4m3fn, FNUZ])
@pytest.mark.parametrize("k_dtype", [torch.float8_e4m3fn, FNUZ])
def test_the_four_pairs_of_gfx942(monkeypatch, q_dtype, k_dtype):
    """Both dialects; byte 0x80, -0.0 in fn and NaN in fnuz, is in the fn operands."""
    monkeypatch.setenv("LIGHTNING_INDEXER_ARCH", "gfx942")
    inputs = make_inputs(3, 90, 8, 32, CPU)
    q, k = inputs.q.clamp(-200, 200).to(q_dtype), inputs.k.clamp(-200, 200).to(k_dtype)
    for operand in (q, k):
        if operand.dtype is torch.float8_e4m3fn:
            operand.view(torch.uint8)[..., ::5] = 0x80
    inputs = dataclasses.replace(inputs, q_fp8=q, k_fp8=k)
    ks, ke = make_windows("misaligned", 3, 90, CPU)
    result = fp8_mqa_logits(q, (k, inputs.kv_scale), inputs.weights, ks, ke, backend="triton-portable")
    assert_matches(result, expected_for(inputs, ks, ke), clean=True)


@interpreted
def test_strided_operands():
    """q and k are slices of larger tensors, weights a slice of rows that are wider."""
    inputs = make_inputs(4, 90, 8, 32, CPU)
    ks, ke = make_windows("misaligned", 4, 90, CPU)
    q = torch.full((6, 11, 48), float("nan")).to(torch.float8_e4m3fn)[1:5, 2:10, 3:35]
    k = torch.full((200, 40), float("nan")).to(torch.float8_e4m3fn)[7:97, 1:33]
    weights = torch.full((4, 20), float("nan"))[:, 5:13]
    for view, value in ((q, inputs.q_fp8), (k, inputs.k_fp8), (weights, inputs.weights)):
        view.copy_(value)
    result = fp8_mqa_logits(q, (k, inputs.kv_scale[:, None]), weights, ks, ke, backend="triton-portable")
    assert_matches(result, expected_for(inputs, ks, ke), clean=True)


# Numbers


@interpreted
@pytest.mark.parametrize("arch", ARCHS)
def test_every_byte_is_read_as_its_value(arch):
    """q picks one channel of K: the logits are K's values, subnormals included; widening must be exact."""
    codes = torch.tensor([code for code in range(256) if code & 0x7F != 0x7F], dtype=torch.uint8)
    inputs = make_inputs(2, len(codes), 16, 32, CPU)
    k = torch.zeros(len(codes), 32, dtype=torch.uint8)
    k[:, 5] = codes
    q = torch.zeros(2, 16, 32)
    q[0, 3, 5], q[1, 3, 5] = 1.0, -1.0
    weights = torch.zeros(2, 16)
    weights[:, 3] = 1.0
    inputs = dataclasses.replace(
        inputs,
        q_fp8=q.to(torch.float8_e4m3fn),
        k_fp8=k.view(torch.float8_e4m3fn),
        kv_scale=torch.ones(len(codes)),
        weights=weights,
    )
    ks, ke = int32(0, 0), int32(len(codes), len(codes))
    result = check(inputs, ks, ke, arch=arch)
    values = codes.view(torch.float8_e4m3fn).float()
    assert torch.equal(result, torch.stack((values, -values)).clamp(min=0))


@interpreted
@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("sign_of_weights", [1.0, -1.0])
@pytest.mark.parametrize("sign_of_scales", [1.0, -1.0])
def test_signs_and_zeros(arch, sign_of_weights, sign_of_scales):
    """Keys below 60 are negative, so their scores are 0; the scales have any sign."""
    inputs = make_inputs(3, 120, 8, 32, CPU)
    k = inputs.k_fp8.float().abs() + 0.5
    k[:60] *= -1
    inputs = dataclasses.replace(
        inputs,
        q_fp8=inputs.q_fp8.float().abs().to(torch.float8_e4m3fn),
        k_fp8=k.to(torch.float8_e4m3fn),
        weights=inputs.weights.abs() * sign_of_weights,
        kv_scale=inputs.kv_scale * sign_of_scales,
    )
    result = check(inputs, int32(1, 30, 50), int32(119, 100, 120), arch=arch)
    zeros = result[:, 50:60]
    assert same_bits(zeros, torch.zeros_like(zeros))
    assert bool((result[:, 60:100] * sign_of_weights * sign_of_scales > 0).all())


@interpreted
@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("form", ["clean", "compressed"])
def test_keys_outside_of_every_window_are_not_read(arch, form):
    """NaN codes: a window's edge shares its tile with NaN keys."""
    inputs = make_inputs(3, 120, 8, 32, CPU)
    ks, ke = int32(21, 22, 70), int32(40, 41, 99)
    outside = torch.ones(120, dtype=torch.bool)
    outside[21:41] = False
    outside[70:99] = False
    k, scale = inputs.k_fp8.clone(), inputs.kv_scale.clone()
    k.view(torch.uint8)[outside] = 0x7F
    scale[outside] = float("nan")
    garbage = dataclasses.replace(inputs, k_fp8=k, kv_scale=scale)
    width = 30 if form == "compressed" else 0
    check_guarded(
        lambda out: run(garbage, ks, ke, out, form, arch, SMALL, width),
        expected_for(inputs, ks, ke, width),
        torch.float32,
        clean=form == "clean",
    )


FENCED = """
import ctypes, json, mmap
import torch
from lightning_indexer import Arch, MqaLogitsProblem, calc_diff, reference_logits
from lightning_indexer.backends.triton_portable.mqa_logits import Launch
from lightning_indexer.backends.triton_portable.config import TileConfig
from lightning_indexer.check.cases import make_inputs
from lightning_indexer.problems.mqa_logits import MqaLogitsCall

libc = ctypes.CDLL(None, use_errno=True)
libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
NO_ACCESS = 0
regions = []

def fenced(x, before):
    # A copy of x that starts right after a page that no one may touch, or ends right before one.
    size, page = x.numel() * x.element_size(), mmap.PAGESIZE
    inner = -(-size // page) * page
    region = mmap.mmap(-1, inner + 2 * page)
    regions.append(region)
    start = ctypes.addressof(ctypes.c_byte.from_buffer(region))
    for fence in (start, start + page + inner):
        assert libc.mprotect(fence, page, NO_ACCESS) == 0, ctypes.get_errno()
    offset = page if before else page + inner - size
    copy = torch.frombuffer(region, dtype=torch.uint8, count=size, offset=offset).view(x.dtype).view(x.shape)
    return copy.copy_(x)

rows, keys = 5, 75
inputs = make_inputs(rows, keys, 8, 32, torch.device("cpu"))
ks = torch.tensor([-3, 0, 33, 70, 200], dtype=torch.int32)
ke = torch.tensor([75, 500, 75, 2**31 - 1, 300], dtype=torch.int32)
expected = reference_logits(inputs.q_fp8, (inputs.k_fp8, inputs.kv_scale), inputs.weights, ks, ke)
inside = expected != float("-inf")
diffs = []
for before in (True, False):
    operands = MqaLogitsCall(
        *(fenced(x, before) for x in (inputs.q_fp8, inputs.k_fp8, inputs.kv_scale, inputs.weights, ks, ke))
    )
    for arch in ("sm80", "sm90"):
        for facts in ({}, {"clean_logits": False}, {"clean_logits": False, "max_seqlen_k": 90}):
            problem = MqaLogitsProblem(rows, keys, 8, 32, **facts)
            out = fenced(torch.empty(rows, problem.width), before)
            Launch(problem, Arch.parse(arch), TileConfig(32, 64, 4, 2))(operands._replace(out=out))
            if not problem.compressed:
                diffs.append(calc_diff(out, expected, inside))
print(json.dumps(diffs))
"""


@interpreted
@pytest.mark.slow
def test_nothing_outside_of_the_tensors_is_touched():
    """Every tensor between pages that no one may touch; a read past the last key would end the process."""
    environment = {**os.environ, "PYTHONPATH": SOURCES}
    done = subprocess.run([sys.executable, "-c", FENCED], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"exit status {done.returncode}\n{done.stderr}"
    diffs = json.loads(done.stdout)
    assert len(diffs) == 8
    assert max(diffs) < INTERPRETED[torch.float32].diff


@interpreted
@pytest.mark.parametrize("arch", ARCHS)
def test_a_nan_key_stays_in_its_column(arch):
    inputs = make_inputs(3, 100, 8, 32, CPU)
    ks, ke = int32(3, 5, 50), int32(90, 49, 100)
    spoiled = inputs.k_fp8.clone()
    spoiled.view(torch.uint8)[49, 7] = 0xFF
    good, bad = (torch.empty(3, 100) for _ in range(2))
    run(inputs, ks, ke, good, "clean", arch, SMALL, 0)
    run(dataclasses.replace(inputs, k_fp8=spoiled), ks, ke, bad, "clean", arch, SMALL, 0)
    others = torch.arange(100) != 49
    assert same_bits(bad[:, others], good[:, others])
    assert same_bits(bad[1:], good[1:])


@interpreted
def test_repeats_are_bitwise_equal():
    inputs = make_inputs(3, 100, 16, 64, CPU)
    ks, ke = make_windows("misaligned", 3, 100, CPU)
    results = []
    for _ in range(5):
        results.append(torch.empty(3, 100))
        run(inputs, ks, ke, results[-1], "clean", "sm90", SMALL, 0)
    assert all(same_bits(result, results[0]) for result in results)


# The heuristic and the launch's constants: pure functions


GPUS = [arch for arch in Arch.known() if arch.vendor in ("nvidia", "amd")]
SHAPES = [(1, 1), (1, 131072), (4, 300), (128, 32768), (671, 131072), (1024, 1024), (16384, 2048), (8192, 262144)]


@pytest.mark.parametrize("arch", GPUS, ids=lambda arch: arch.name)
@pytest.mark.parametrize(("rows", "keys"), SHAPES)
def test_heuristic(arch, rows, keys):
    for heads in HEADS:
        for head_dim in HEAD_DIMS:
            config = heuristic(MqaLogitsProblem(rows, keys, heads, head_dim), arch)
            assert config.block in (32, 64, 128)
            assert config.chunk % config.block == 0
            assert config.num_warps in (1, 2, 4, 8)
            assert config.num_stages >= 1
            assert (config.waves_per_eu == 0) or arch.vendor == "amd"
            assert heuristic(MqaLogitsProblem(rows, keys, heads, head_dim), arch) == config


@pytest.mark.parametrize("arch", GPUS, ids=lambda arch: arch.name)
def test_few_rows_still_fill_the_device(arch):
    """Programs for every unit, unless the row is too short to be cut so far."""
    for rows, keys in SHAPES:
        config = heuristic(MqaLogitsProblem(rows, keys, 64, 128), arch)
        programs = rows * -(-keys // config.chunk)
        assert programs >= 4 * arch.units or config.chunk <= 256, (rows, keys, config)
    assert (
        heuristic(MqaLogitsProblem(1, 131072, 64, 128), arch).chunk
        < heuristic(MqaLogitsProblem(8192, 262144, 64, 128), arch).chunk
    )


def test_the_width_counts_and_not_the_keys():
    sm90 = Arch.parse("sm90")
    compressed = MqaLogitsProblem(64, 262144, 64, 128, clean_logits=False, max_seqlen_k=2048)
    assert heuristic(compressed, sm90) == heuristic(MqaLogitsProblem(64, 2048, 64, 128), sm90)
    assert heuristic(compressed, sm90) != heuristic(MqaLogitsProblem(64, 262144, 64, 128), sm90)


def test_a_config_is_frozen_and_hashable():
    config = heuristic(MqaLogitsProblem(1, 1, 8, 32), Arch.parse("sm90"))
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.block = 32
    assert hash(config) == hash(dataclasses.replace(config))


def test_constants_follow_the_problem():
    config = TileConfig(64, 512, 4, 3)
    clean = constants(MqaLogitsProblem(4, 90, 8, 64), config, widen=False)
    assert clean == {
        "HEADS": 8, "PADDED_HEADS": 16, "HEAD_DIM": 64, "BLOCK": 64, "CLEAN": True, "COMPRESSED": False, "WIDEN": False,
    }  # fmt: skip
    compressed = constants(MqaLogitsProblem(4, 90, 64, 64, clean_logits=False, max_seqlen_k=5), config, widen=True)
    assert compressed == {
        "HEADS": 64, "PADDED_HEADS": 64, "HEAD_DIM": 64, "BLOCK": 64, "CLEAN": False, "COMPRESSED": True, "WIDEN": True,
    }  # fmt: skip


def test_constants_are_in_the_order_of_the_signature():
    """A compiled kernel is launched with them by position."""
    from lightning_indexer.backends.triton_portable.mqa_logits_kernel import fp8_mqa_logits_kernel

    names = list(constants(MqaLogitsProblem(1, 1, 8, 32), SMALL, widen=False))
    assert fp8_mqa_logits_kernel.arg_names[-len(names) :] == names


def test_compiler_options():
    config = TileConfig(64, 512, 4, 2, waves_per_eu=2)
    common = {"num_warps": 4, "num_stages": 2, "enable_fp_fusion": True}
    assert options(config, Arch.parse("sm90")) == common
    assert options(config, Arch.parse("gfx950")) == {**common, "waves_per_eu": 2}
    assert options(dataclasses.replace(config, waves_per_eu=0), Arch.parse("gfx950")) == common


@pytest.mark.parametrize("arch", ["sm80", "sm86", "gfx90a"])
def test_archs_without_fp8_widen(arch):
    assert backend_module.Launch(MqaLogitsProblem(1, 1, 8, 32), Arch.parse(arch), SMALL).widen
    assert not backend_module.Launch(MqaLogitsProblem(1, 1, 8, 32), Arch.parse("sm89"), SMALL).widen
