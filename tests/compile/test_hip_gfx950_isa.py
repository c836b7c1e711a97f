"""The machine code of ``hip-gfx950``: what its plan promises, read from the compiler's output."""

from __future__ import annotations

import re

import pytest

from lightning_indexer import Arch, MqaLogitsProblem
from lightning_indexer.amd.built import Built
from lightning_indexer.backends.hip_gfx950.config import Tunables, heuristic, neighbours
from lightning_indexer.backends.hip_gfx950.mqa_logits import FLAGS, MqaLogits, compile_kernel

GFX950 = Arch.parse("gfx950")
LONG = MqaLogitsProblem(4096, 32768, 32, 128)
MFMA = "v_mfma_f32_32x32x64_f8f6f4"


def compiled(flags: tuple[str, ...] = FLAGS, problem: MqaLogitsProblem = LONG, **tunables: object) -> Built:
    return compile_kernel(heuristic(problem, GFX950, Tunables(**tunables)), flags)


def instructions(built: Built) -> list[str]:
    lines = (line.split(";")[0].strip() for line in built.isa.split(".section")[0].splitlines())
    return [line for line in lines if re.match(r"[a-z]+_", line)]


def count(built: Built, pattern: str) -> int:
    return sum(bool(re.match(rf"{pattern}\b", line)) for line in instructions(built))


def registers(operand: str) -> set[int]:
    if single := re.fullmatch(r"v(\d+)", operand):
        return {int(single[1])}
    several = re.fullmatch(r"v\[(\d+):(\d+)\]", operand)
    return set(range(int(several[1]), int(several[2]) + 1)) if several else set()


@pytest.mark.parametrize("form", [True, False], ids=["clean", "noclean"])
@pytest.mark.parametrize("block_m", [2, 4])
def test_one_row_and_tile(form, block_m):
    built = compiled(problem=LONG._replace(clean_logits=form), relu="max", block_m=block_m, strategy="stream")
    products = count(built, MFMA)
    # Two tiles in the loop, and two products a row and tile.
    assert products == 2 * 2 * block_m
    assert count(built, r"v_mfma\w*") == products
    tiles_and_rows = products // 2
    assert count(built, "v_max_f32(_e32|_e64)?") == 16 * tiles_and_rows
    assert count(built, r"v_permlane32_swap_b32(_e32)?") * 2 == tiles_and_rows
    assert not re.search(r"\bds_|ds_bpermute", "\n".join(instructions(built)))
    assert built.resources.lds == 0


def test_the_maximum_is_canonicalised_without_the_flag():
    built = compiled(("-fno-slp-vectorize",), relu="max", strategy="stream")
    assert count(built, "v_max_f32(_e32|_e64)?") == 32 * count(built, MFMA) // 2


def test_the_packed_clamp_takes_fewer_instructions():
    def vector(built: Built) -> int:
        """From the first product on: the loop, without what is done once a launch."""
        lines = instructions(built)
        start = next(index for index, line in enumerate(lines) if line.startswith(MFMA))
        return sum(line.startswith("v_") and not line.startswith("v_mfma") for line in lines[start:])

    clamp, maximum = compiled(strategy="stream", relu="clamp"), compiled(strategy="stream", relu="max")
    assert count(clamp, MFMA) == count(maximum, MFMA) == 16
    rows_and_tiles = 8
    assert count(clamp, r"v_pk_mul_f32 .* clamp") == 7 * rows_and_tiles
    assert count(clamp, r"v_mul_f32(_e64)? .* clamp") == 2 * rows_and_tiles
    assert count(clamp, "v_max_f32(_e32|_e64)?") == 0
    # 9 for 16; of the multiply-adds the compiler may leave a few more unpacked.
    assert vector(clamp) <= vector(maximum) - 5 * rows_and_tiles


def test_the_packed_clamp_is_never_the_heuristics_choice():
    """No hardware has shown that packed float32 products obey the clamp bit."""
    problems = [MqaLogitsProblem(m, n, h, 128) for m in (1, 64, 4096) for n in (64, 4096, 131072) for h in (32, 64)]
    assert {heuristic(problem, GFX950).relu for problem in problems} == {"max"}
    assert count(MqaLogits().build(LONG, GFX950), r"v_pk_mul_f32 .* clamp") == 0


def test_the_first_reader_of_a_product_is_one_that_the_compiler_knows():
    """Between a matrix product and its reader the compiler puts wait states, but none before inline assembly."""
    for tunables in ({}, {"strategy": "lds"}, {"block_m": 2}, {"block_m": 8}):
        built = compiled(relu="clamp", **tunables)
        lines = instructions(built)
        checked = 0
        for index, line in enumerate(lines):
            if not line.startswith(MFMA):
                continue
            operands = [part.strip() for part in line.removeprefix(MFMA).split(", ")]
            result = registers(operands[0])
            assert operands[3] in ("0", operands[0]), "the sum is the inline zero, or the result's own registers"
            for later in lines[index + 1 :]:
                name, _, rest = later.partition(" ")
                read = set[int]().union(*(registers(part.strip().split()[0]) for part in rest.split(",")[1:] if part))
                if name.startswith("v_mfma") and registers(rest.split(",")[0].strip()) == result:
                    break  # the second half of the same product
                if read & result:
                    assert name.startswith(("v_mul_f32", "v_accvgpr_read")), later
                    checked += 1
                    break
        assert checked == count(built, MFMA) // 2


def test_two_waves_of_a_simd_and_no_spill():
    for tunables in ({}, {"relu": "clamp"}, {"strategy": "lds"}, {"unroll2": False}):
        resources = compiled(**tunables).resources
        assert resources.vgpr <= 256
        assert resources.waves_per_simd == 2
        assert resources.vgpr_spills == resources.sgpr_spills == resources.scratch == 0


def test_other_rows_a_wave_do_not_spill():
    for strategy in ("stream", "lds"):
        two = compiled(block_m=2, strategy=strategy).resources
        assert (two.vgpr_spills, two.scratch, two.waves_per_simd) == (0, 0, 3)
        eight = compiled(block_m=8, strategy=strategy).resources
        assert (eight.vgpr_spills, eight.scratch, eight.waves_per_simd) == (0, 0, 1)


@pytest.mark.parametrize(("heads", "block_m"), [(32, 8), (64, 4)])
def test_eight_waves_of_the_widest_rows_would_spill_and_are_refused(heads, block_m):
    problem = LONG._replace(heads=heads)
    with pytest.raises(ValueError, match=f"num_warps: got 8 with block_m {block_m} and H={heads}, expected at most 4"):
        heuristic(problem, GFX950, Tunables(block_m=block_m, num_warps=8))
    resources = compiled(problem=problem, block_m=block_m // 2, num_warps=8).resources
    assert (resources.vgpr_spills, resources.sgpr_spills, resources.scratch) == (0, 0, 0)


@pytest.mark.parametrize("heads", [32, 64])
@pytest.mark.parametrize("form", [True, False], ids=["clean", "nocl"])
def test_no_config_that_is_measured_spills(heads, form):
    for rows, keys in ((4096, 32768), (64, 64)):
        problem = MqaLogitsProblem(rows, keys, heads, 128, clean_logits=form)
        for config in neighbours(problem, GFX950):
            resources = compile_kernel(config).resources
            assert (resources.vgpr_spills, resources.sgpr_spills, resources.scratch) == (0, 0, 0), config


def test_the_head_sum_on_the_matrix_unit_is_an_option():
    built = compiled(reduce="mfma", strategy="stream")
    assert "_bf16sum_" in built.kernel
    products = count(built, MFMA)
    assert count(built, "v_mfma_f32_32x32x16_bf16") == products  # two of either a row and tile
    assert count(built, r"v_permlane32_swap_b32(_e32)?") == 0
    assert (built.resources.vgpr_spills, built.resources.waves_per_simd) == (0, 2)
    # It rounds to bfloat16: never the heuristic's choice.
    assert {heuristic(MqaLogitsProblem(m, 4096, h, 128), GFX950).reduce for m in (1, 64, 4096) for h in (32, 64)} == {
        "fma"
    }


def test_64_heads():
    built = MqaLogits().build(MqaLogitsProblem(4096, 32768, 64, 128), GFX950)
    assert "_H64_" in built.kernel
    assert built.resources.vgpr_spills == 0
    assert built.resources.waves_per_simd == 2


def test_lds_strategy():
    built = compiled(strategy="lds")
    assert built.resources.lds == 2 * 64 * 128
    assert count(built, r"buffer_load_dwordx4 .* lds") > 0
    assert count(built, "ds_read_b128") == 4 * count(built, MFMA) // (2 * 4)
    assert count(built, "ds_write\\w*") == 0


# The config


def test_strategy_and_grid_by_shape():
    for rows, keys, strategy in (
        (4096, 32768, "lds"), (1024, 131072, "lds"), (128, 32768, "lds"), (8192, 8192, "lds"), (9, 64, "lds"),
        (8, 131072, "stream"), (1, 8, "stream"), (1, 7, "stream"),
    ):  # fmt: skip
        config = heuristic(MqaLogitsProblem(rows, keys, 32, 128), GFX950)
        assert config.strategy == strategy
        assert config.reverse_rows == (keys > 2048)
        assert config.grid(rows)[0] * config.rows_of_block >= rows > (config.grid(rows)[0] - 1) * config.rows_of_block
    # A small row grid is split until the device is full: 2 workgroups of a compute unit, twice over.
    few = heuristic(MqaLogitsProblem(128, 32768, 32, 128), GFX950)
    assert few.grid(128) == (8, few.split_n, 1)
    assert few.split_n == 128
    assert heuristic(LONG, GFX950).split_n == 4


def test_sums_are_not_packed():
    """Packed float32 instructions do not execute beside matrix instructions; nor do scales of one take a word each."""
    built = MqaLogits().build(LONG, GFX950)
    assert count(built, r"v_pk_(fma|mul|add)_f32") == 0
    assert "v_mfma_scale" not in built.isa


def test_explicit_values_are_kept():
    fixed = Tunables(
        strategy="stream", block_m=2, split_n=7, num_warps=8, unroll2=False, reverse_rows=False, relu="max"
    )
    config = heuristic(LONG, GFX950, fixed)
    for name in ("strategy", "block_m", "split_n", "num_warps", "unroll2", "reverse_rows", "relu"):
        assert getattr(config, name) == getattr(fixed, name)
    assert config.name == "fp8_mqa_logits_H32_D128_mfma32x32x64_stream_r2_w8_k1_max_clean_hip"
    assert compile_kernel(config).kernel == config.name


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"block_m": 3}, "block_m: got 3, expected one of 0, 2, 4, 8"),
        ({"num_warps": 16}, "num_warps: got 16, expected one of 0, 1, 2, 4, 8"),
        ({"split_n": -1}, "split_n: got -1, expected 0"),
        ({"split_n": 65536}, "split_n: got 65536, expected 0"),
        ({"unroll2": 2}, "unroll2: got 2, expected one of None, False, True"),
        ({"reverse_rows": "x"}, "reverse_rows: got 'x'"),
        ({"relu": "x"}, "relu: got 'x'"),
        ({"reduce": "x"}, "reduce: got 'x'"),
        ({"strategy": "x"}, "strategy: got 'x'"),
    ],
)
def test_wrong_values_are_refused(wrong, message):
    with pytest.raises(ValueError, match=message):
        Tunables(**wrong)


def test_values_that_exclude_each_other_are_refused():
    with pytest.raises(ValueError, match="block_m: got 8 with H=64, expected at most 4"):
        heuristic(LONG._replace(heads=64), GFX950, Tunables(block_m=8))
    with pytest.raises(ValueError, match="unroll2: got True with strategy 'lds'"):
        heuristic(LONG, GFX950, Tunables(strategy="lds", unroll2=True))
