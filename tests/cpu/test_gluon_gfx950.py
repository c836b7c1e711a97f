"""``gluon-gfx950``: the tile configs and their limits, as tables that need no GPU. tests/sim runs the kernel."""

from __future__ import annotations

import dataclasses
import importlib.util
import itertools
import sys
from importlib.machinery import PathFinder

import pytest
import torch

from lightning_indexer import Arch, MqaLogitsProblem
from lightning_indexer.backends.gluon_gfx950.backend import GluonGfx950
from lightning_indexer.backends.gluon_gfx950.config import GluonConfig, heuristic, is_wide, neighbours
from lightning_indexer.backends.gluon_gfx950.mqa_logits import HEAD_DIMS, HEADS, Launch

GFX950 = Arch.parse("gfx950")
DEEPSEEK = MqaLogitsProblem(4096, 32768, 64, 128)


def contiguous(problem: MqaLogitsProblem) -> tuple[int, int, int, int, int]:
    """Strides of q (two), k, weights and out."""
    return problem.heads * problem.head_dim, problem.head_dim, problem.head_dim, problem.heads, problem.keys


@pytest.mark.parametrize("rows", [1, 2, 5, 300, 4095, 4096, 16384])
@pytest.mark.parametrize("keys", [1, 300, 32768, 1048576])
def test_the_layouts_of_every_config_exist(rows, keys):
    for heads, head_dim in itertools.product(HEADS, HEAD_DIMS):
        for config in neighbours(MqaLogitsProblem(rows, keys, heads, head_dim), GFX950):
            assert config.row_warps * config.key_warps == 4
            # A wave has whole tiles of 32 (rows x heads) x 32 keys, whole rows, and whole lines of results.
            assert config.rows % config.row_warps == 0
            assert config.rows * heads % (32 * config.row_warps) == 0
            assert config.step % (32 * config.key_warps) == 0
            assert config.block % config.step == config.chunk % config.block == config.block % 64 == 0
            # A wave's copy is 64 lanes of 16 bytes.
            assert config.block * head_dim % (4 * 64 * 16) == 0
            assert config.buffers >= 2
            assert config.lds_bytes(head_dim) <= GFX950.shared_bytes
            # A wave's accumulators, q and w, in registers of 4 bytes a lane.
            wave = config.rows // config.row_warps * heads
            scores = wave * config.step // config.key_warps // 64
            assert scores + wave * head_dim // 4 // 64 + wave // 2 <= 192


@pytest.mark.parametrize("rows", [1, 300, 4096])
def test_lds_holds_two_programs_of_what_the_heuristic_takes(rows):
    for heads, head_dim in itertools.product(HEADS, HEAD_DIMS):
        config = heuristic(MqaLogitsProblem(rows, 32768, heads, head_dim), GFX950)
        assert 2 * config.lds_bytes(head_dim) <= GFX950.shared_bytes


def test_many_rows_of_the_shipped_model_share_tiles_of_three_buffers():
    config = heuristic(DEEPSEEK, GFX950)
    assert (config.rows, config.row_warps, config.block, config.buffers) == (4, 4, 128, 3)
    for other in (
        DEEPSEEK._replace(rows=4095),
        DEEPSEEK._replace(heads=32),
        DEEPSEEK._replace(head_dim=64),
    ):
        assert heuristic(other, GFX950).buffers == 2


def test_few_rows_are_cut_along_the_keys():
    assert heuristic(MqaLogitsProblem(1, 1048576, 64, 128), GFX950).chunk == 512
    assert heuristic(MqaLogitsProblem(16384, 1048576, 64, 128), GFX950).chunk == 8192
    assert heuristic(MqaLogitsProblem(128, 32768, 64, 128), GFX950).rows == 2
    assert heuristic(MqaLogitsProblem(1, 32768, 64, 128), GFX950).rows == 1


def test_what_lds_does_not_hold_is_refused_before_the_launch():
    large = dataclasses.replace(heuristic(DEEPSEEK, GFX950), block=256, buffers=5)
    assert large.lds_bytes(128) == 160 * 1024
    Launch(DEEPSEEK, GFX950, large)
    with pytest.raises(ValueError, match="196608 bytes of LDS at D=128, expected at most 163840"):
        Launch(DEEPSEEK, GFX950, dataclasses.replace(large, buffers=6))


@pytest.mark.parametrize("rows", [1, 4096, 16384])
@pytest.mark.parametrize("heads", HEADS)
def test_buffer_instructions_reach_whatever_is_contiguous(rows, heads):
    """A program's own part of it: 2^31 elements and more of logits, 2^27 keys of K."""
    for keys in (1, 262144, 1048576):
        problem = MqaLogitsProblem(rows, keys, heads, 128)
        assert not is_wide(problem, heuristic(problem, GFX950), contiguous(problem))


# Of one operand each: the largest stride that buffer instructions reach, by hand.
CONFIG = GluonConfig(rows=4, row_warps=4, key_warps=1, step=64, block=128, buffers=3, chunk=8192)
REACH = {
    0: (2**31 - 63 * 128 - 128 - 1) // 3,
    1: (2**31 - 3 * 64 * 128 - 128 - 1) // 63,
    2: (2**31 - 128 - 1) // (8192 + 4 * 128),
    3: ((2**31 - 1) // 4 - 64) // 3,
    4: ((2**31 - 1) // 4 - 32768 - 128) // 3,
}


@pytest.mark.parametrize("operand", REACH)
def test_beyond_what_they_reach_addresses_are_64_bit(operand):
    for stride, wide in ((REACH[operand], False), (REACH[operand] + 1, True)):
        strides = list(contiguous(DEEPSEEK))
        strides[operand] = stride
        if operand == 0:
            strides[1] = 128
        if operand == 1:
            strides[0] = 64 * 128
        assert is_wide(DEEPSEEK, CONFIG, tuple(strides)) is wide
    one_row = DEEPSEEK._replace(rows=1)
    assert is_wide(one_row, heuristic(one_row, GFX950), (*contiguous(one_row)[:4], 2**31))


def test_bfloat16_reaches_twice_as_far():
    strides = (*contiguous(DEEPSEEK)[:4], REACH[4] * 2)
    assert is_wide(DEEPSEEK, CONFIG, strides)
    assert not is_wide(DEEPSEEK._replace(out_dtype=torch.bfloat16), CONFIG, strides)


@pytest.mark.parametrize(("exists", "reason"), [(False, "not installed: pip"), (True, r"pip install 'triton>=3.6'")])
def test_what_is_missing_is_said_with_its_command(monkeypatch, tmp_path, exists, reason):
    package = tmp_path / "triton"
    if exists:
        package.mkdir()
        (package / "__init__.py").touch()
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, package=None: PathFinder.find_spec(name))
    importlib.invalidate_caches()
    assert reason in GluonGfx950().missing()
    if exists:
        (package / "experimental" / "gluon" / "language" / "amd" / "cdna4").mkdir(parents=True)
        assert GluonGfx950().missing() is None
