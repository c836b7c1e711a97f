"""Triton's pipeline hook, set while this library compiles for gfx950: what it adds, whom it keeps, when it goes."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest

pytest.importorskip("triton")

from triton import knobs

from lightning_indexer.amd.triton_amd import repaired

BROKEN = "\n".join(
    ["\tv_mfma_f32_32x32x64_f8f6f4 v[0:15], v[32:39], v[40:47], 0", *["\ts_mov_b32 s9, 0"] * 19, "\tv_mov_b32 v1, v2"]
)


def hook():
    return knobs.runtime.add_stages_inspection_hook


def assembled(arch: str) -> str:
    """What the pipeline's stage gives under the hook that is set."""
    stages = {"llir": None, "amdgcn": lambda src, metadata: src + metadata}
    hook()(object(), stages, SimpleNamespace(arch=arch), "triton", None)
    return stages["amdgcn"](BROKEN, "")


@pytest.fixture(autouse=True)
def _none_before():
    assert hook() is None
    yield
    assert hook() is None


def test_the_stage_is_mended_for_gfx950_alone():
    with repaired("gfx950"):
        assert assembled("gfx950").split("\n")[-2:] == ["\ts_nop 0", "\tv_mov_b32 v1, v2"]
        assert assembled("gfx942") == BROKEN
        # A pipeline without that stage, as NVIDIA's, is left as it is.
        stages = {"ptx": None}
        hook()(object(), stages, SimpleNamespace(), "triton", 90)
        assert stages == {"ptx": None}
        key, digest = hook()()
        assert "wait states" in key
        assert digest
    with repaired("gfx942"):
        assert hook() is None


def test_another_hook_is_kept():
    seen = []

    def other(*arguments):
        seen.append(len(arguments))
        return None if arguments else ("theirs", "7")

    knobs.runtime.add_stages_inspection_hook = other
    try:
        with repaired("gfx950"):
            assert "s_nop" in assembled("gfx950")
            key, digest = hook()()
            assert key.startswith("theirs ")
            assert digest.startswith("7")
        assert hook() is other
        assert seen == [5, 0]
    finally:
        knobs.runtime.add_stages_inspection_hook = None


def test_it_goes_with_the_last_user_and_with_errors():
    inside, leave = threading.Event(), threading.Event()

    def second():
        with repaired("gfx950"):
            inside.set()
            leave.wait(10)

    thread = threading.Thread(target=second)
    thread.start()
    assert inside.wait(10)
    with pytest.raises(KeyError), repaired("gfx950"):
        raise KeyError
    assert hook() is not None
    leave.set()
    thread.join()
    assert hook() is None


def test_someone_else_may_save_and_restore_it_meanwhile():
    outer = repaired("gfx950")
    outer.__enter__()
    saved = hook()  # ours
    outer.__exit__(None, None, None)
    knobs.runtime.add_stages_inspection_hook = saved
    try:
        with repaired("gfx950"):
            assert "s_nop" in assembled("gfx950")
            assert hook()()  # and does not call itself for ever
    finally:
        knobs.runtime.add_stages_inspection_hook = None

    def theirs(*arguments):
        return None

    with repaired("gfx950"):
        knobs.runtime.add_stages_inspection_hook = theirs
    assert hook() is theirs
    knobs.runtime.add_stages_inspection_hook = None
