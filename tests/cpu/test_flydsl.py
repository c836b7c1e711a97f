"""``flydsl`` without a compiler: gate, heuristic, names, and where a kernel keeps what."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch

from lightning_indexer import Arch, MqaLogitsProblem
from lightning_indexer.backends.flydsl_cdna.config import FlyConfig, heuristic, layout, neighbours
from lightning_indexer.backends.flydsl_cdna.layout import KEYS_OF_WAVE, LANES, PIECE, Layout
from lightning_indexer.selection import registry as dispatch

ARCHS = ("gfx942", "gfx950")
LAYOUTS = [
    Layout(arch == "gfx950", heads, head_dim, rows, waves, stages, clean=True)
    for arch in ARCHS
    for heads in (32, 64, 128)
    for head_dim in (64, 128)
    for rows in (1, 2, 4)
    for waves in (1, 2, 4)
    for stages in (2, 3)
]


def problem(rows: int, keys: int, heads: int = 64, head_dim: int = 128, **facts) -> MqaLogitsProblem:
    return MqaLogitsProblem(rows, keys, heads, head_dim, **facts)


# Gate


@pytest.mark.parametrize("arch", ARCHS)
def test_the_gate_is_open_for_every_form(arch):
    for facts in ({}, {"clean_logits": False}, {"clean_logits": False, "max_seqlen_k": 99}):
        for heads, head_dim, out_dtype in itertools.product((32, 64, 128), (64, 128), (torch.float32, torch.bfloat16)):
            asked = problem(1, 1, heads, head_dim, out_dtype=out_dtype, **facts)
            assert dispatch.kernel("flydsl").supports(asked, Arch.parse(arch)) is None


@pytest.mark.parametrize(
    ("asked", "sentence"),
    [
        (problem(8, 8, 16), "H=16 is not one of 32, 64, 128"),
        (problem(8, 8, 64, 32), "D=32 is not one of 64, 128"),
        (problem(8, 8, aligned=False), "rows of q and k have to start on 16 bytes, for loads of 16 bytes"),
        (
            problem(8, 2**29),
            "N=536870912 is more than 536870911: offsets of scales and columns have 32 bits",
        ),
        (
            problem(8, 8, clean_logits=False, max_seqlen_k=2**29),
            "max_seqlen_k=536870912 is more than 536870911: offsets of scales and columns have 32 bits",
        ),
    ],
)
def test_the_gate_says_why_not(asked, sentence):
    assert dispatch.kernel("flydsl").supports(asked, Arch.parse("gfx950")) == sentence
    good = asked._replace(keys=8, heads=64, head_dim=128, aligned=True, max_seqlen_k=0)
    assert dispatch.kernel("flydsl").supports(good, Arch.parse("gfx950")) is None


def test_other_archs_are_refused_by_name():
    assert dispatch.kernel("flydsl").supports(problem(8, 8), Arch.parse("gfx90a")) == (
        "needs CDNA3 or CDNA4 and its fp8 matrix instruction of 32x32x16, not gfx90a's"
    )


# Heuristic


@pytest.mark.parametrize(
    ("arch", "asked", "config"),
    [
        ("gfx950", problem(4096, 32768, 32), FlyConfig(rows=4, waves=2, stages=3, chunk=8192)),
        ("gfx950", problem(4096, 32768, 64), FlyConfig(rows=4, waves=4, stages=3, chunk=8192)),
        ("gfx942", problem(4096, 32768, 32), FlyConfig(rows=4, waves=4, stages=2, chunk=8192)),
        ("gfx942", problem(4096, 32768, 64), FlyConfig(rows=4, waves=4, stages=2, chunk=8192)),
        ("gfx950", problem(128, 32768, 64), FlyConfig(rows=4, waves=4, stages=3, chunk=512)),
        ("gfx950", problem(3, 131072, 64), FlyConfig(rows=4, waves=4, stages=3, chunk=256)),
        ("gfx950", problem(2, 131072, 32), FlyConfig(rows=2, waves=1, stages=3, chunk=256)),
        ("gfx950", problem(1, 131072, 32), FlyConfig(rows=1, waves=1, stages=3, chunk=256)),
        ("gfx942", problem(2, 1, 128), FlyConfig(rows=2, waves=2, stages=2, chunk=256)),
    ],
)
def test_heuristic(arch, asked, config):
    assert heuristic(asked, Arch.parse(arch)) == config


@pytest.mark.parametrize("arch", ARCHS)
def test_every_choice_fits(arch):
    for rows, keys in itertools.product((1, 2, 3, 100, 16384), (1, 1000, 2**20)):
        for heads, head_dim in itertools.product((32, 64, 128), (64, 128)):
            asked = problem(rows, keys, heads, head_dim)
            found = neighbours(asked, Arch.parse(arch))
            assert found[0] == heuristic(asked, Arch.parse(arch))
            assert len(set(found)) == len(found)
            for config in found:
                plan = layout(asked, Arch.parse(arch), config)
                assert plan.lds_bytes <= Arch.parse(arch).shared_bytes
                assert config.chunk % plan.tile == 0


# Names


def test_the_name_is_made_of_the_config():
    plan = Layout(True, 32, 128, 2, 2, 3, clean=False)
    assert plan.name == "fp8_mqa_logits_H32_D128_mfma32x32x64_bkv64_r2_w2_lds3_swizzled_noclean_flydsl"
    plan = Layout(False, 64, 64, 1, 4, 2, clean=False, compressed=True, bf16=True, swizzle=False)
    assert plan.name == "fp8_mqa_logits_H64_D64_mfma16x16x32_bkv256_r1_w4_lds2_compressed_bf16_flydsl"


def test_kernels_that_differ_have_names_that_differ():
    every = [
        dataclasses.replace(plan, clean=clean, compressed=compressed, bf16=bf16)
        for plan in LAYOUTS
        for clean, compressed in ((True, False), (False, False), (False, True))
        for bf16 in (True, False)
    ]
    assert len({plan.name for plan in every}) == len(set(every)) == len(every)


# Layout


def test_waves_share_the_block_without_rest():
    for plan in LAYOUTS:
        assert plan.row_waves * plan.key_waves == plan.waves
        assert plan.row_waves * plan.rows_of_wave == plan.rows
        assert plan.key_waves * KEYS_OF_WAVE == plan.tile
        assert plan.copies * plan.threads * PIECE == plan.key_bytes == plan.tile * plan.head_dim


def test_the_lanes_of_a_product_read_every_channel_once():
    for plan in LAYOUTS:
        read = [plan.piece(group, number) for group in range(plan.lane_groups) for number in range(plan.reads)]
        assert sorted(read) == list(range(plan.pieces))


def test_the_results_of_a_product_are_every_head_once():
    for plan in LAYOUTS:
        heads = [
            4 * (lane // plan.side + plan.lane_groups * (register // 4)) + register % 4
            for lane in range(0, LANES, plan.side)
            for register in range(plan.results)
        ]
        assert sorted(heads) == list(range(plan.side))


def test_swizzling_permutes_the_chunks_of_each_key():
    for plan in LAYOUTS:
        for key in range(plan.tile):
            places = [plan.swizzled(key, piece) for piece in range(plan.pieces)]
            assert sorted(places) == list(range(plan.pieces))
            # Copies compute the chunk from the place, reads the place from the chunk.
            assert [plan.swizzled(key, place) for place in places] == list(range(plan.pieces))
            # Reads of the keys of a wave's later products add a constant.
            assert places == [plan.swizzled(key + plan.side, piece) for piece in range(plan.pieces)]
