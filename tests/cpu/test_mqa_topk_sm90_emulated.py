"""The gate of ``fp8_mqa_topk`` on ``cuda-sm90``, its kernels and its host code, executed on the CPU with stand-ins for
their PTX.

Scores of small whole numbers are exact: positions and values have to be the reference's. Where scores are not numbers,
they are those of ``fp8_mqa_logits``' kernel, executed in the same way.
"""

from __future__ import annotations

import dataclasses
import shutil
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from lightning_indexer import Arch
from lightning_indexer.backends.cuda_sm90 import mqa_logits, mqa_topk, mqa_topk_config
from lightning_indexer.backends.cuda_sm90.config import heuristic
from lightning_indexer.check.mqa_topk import Case, Inputs, make_operands
from lightning_indexer.check.top_k import PAGE_SIZE, Guarded
from lightning_indexer.problems.mqa_logits import MqaLogitsCall
from lightning_indexer.problems.mqa_topk import MqaTopKCall, reference_mqa_topk
from lightning_indexer.problems.top_k import reference_top_k
from sm90_standin.emulate import Emulator, StandinError

pytestmark = [
    pytest.mark.slow,
    pytest.mark.xdist_group("mqa_topk_sm90 emulated"),
    pytest.mark.skipif(shutil.which("g++") is None, reason="no g++"),
]

SM90 = Arch.parse("sm90")
CPU = torch.device("cpu")
GUARD = 4096
# Each of them is compiled once: H, D, what positions count from, and whether scores are results.
FORMS: tuple[dict[str, Any], ...] = (
    {"heads": 32, "head_dim": 32, "base": "row"},
    {"heads": 32, "head_dim": 32, "base": "page", "values": True},
    {"heads": 64, "head_dim": 64, "base": "absolute", "values": True},
    {"heads": 32, "head_dim": 128, "base": "offset"},
)
ROW, PAGE, ABSOLUTE, OFFSET = FORMS


@pytest.fixture(scope="session")
def emulator(tmp_path_factory) -> Emulator:
    return Emulator(tmp_path_factory.mktemp("mqa_topk_sm90"))


@dataclass
class Ran:
    """What a call has left in its workspace and launched."""

    listed: int  # rows that were done again
    middles: list[tuple[int, int]]  # of each CTA of the last product: the row block it lies within, its place
    launched: list[str]


def _config(case: Case, units: int = 3, stride: int = 8, **changed: Any) -> mqa_topk_config.GateConfig:
    """Waves, parts of the sample and of the rows that are done again, all of a row block."""
    problem = case.problem._replace(workspace_bytes=2**24)
    arch = dataclasses.replace(SM90, units=units)
    config = mqa_topk_config.gate_config(problem, arch, stride=stride, room=changed.pop("room", None))
    assert config is not None
    rows = config.product.rows
    return dataclasses.replace(config, **{"wave": rows, "sampled": 2 * rows, "again": rows, **changed})


def _run(
    emulator: Emulator, case: Case, inputs: Inputs, config: mqa_topk_config.GateConfig, expected: Any, seed: int = 1
) -> Ran:
    """Two calls of one workspace, which holds something else before each, against what is expected."""
    problem = case.problem
    assert mqa_topk_config.refusal(problem, SM90) is None
    launch = mqa_topk.MqaTopK().launch(problem, SM90, config)
    generator = torch.Generator().manual_seed(seed)
    room = torch.randint(0, 256, (launch.workspace_bytes + 2 * GUARD,), generator=generator, dtype=torch.uint8)
    before = room.clone()
    workspace = room[GUARD:-GUARD]
    for number in range(2):
        indices = Guarded.make(case.rows, case.k, torch.int32, CPU)
        values = Guarded.make(case.rows, case.k, torch.float32, CPU) if case.values else None
        call = MqaTopKCall(
            inputs.q, inputs.k, inputs.kv_scale, inputs.weights, inputs.ks, inputs.ke, inputs.offsets,
            inputs.page_table, indices.view, values.view if values else None, workspace,
        )  # fmt: skip
        emulator.run(launch, call, writes=("indices", "values", "workspace"), seed=2 * seed + number)
        faults = indices.faults("indices") + (values.faults("values") if values else [])
        assert faults == []
        wrong = (indices.view != expected[0]).any(dim=1).nonzero().flatten().tolist()
        assert wrong == [], f"other positions in rows {wrong}"
        assert values is None or torch.equal(values.view, expected[1])
        for part in (slice(0, GUARD), slice(-GUARD, None)):
            assert torch.equal(room[part], before[part]), "a write outside of the workspace"
    plan = mqa_topk_config.Plan(problem, config)

    def ints(name: str, count: int) -> list[int]:
        return workspace[plan.offset[name] :][: 4 * count].clone().view(torch.int32).tolist()

    middles = ints("middles", 2 * config.product.ctas)
    pieces = list(zip(middles[::2], middles[1::2], strict=True))
    return Ran(ints("counters", 1)[0], [piece for piece in pieces if piece[0] >= 0], emulator.launched)


def _options(case: Case, inputs: Inputs) -> dict[str, Any]:
    return {
        "index_base": case.base, "offsets": inputs.offsets, "page_table": inputs.page_table, "page_size": PAGE_SIZE,
    }  # fmt: skip


def _check(
    emulator: Emulator, case: Case, inputs: Inputs | None = None, config: mqa_topk_config.GateConfig | None = None,
    seed: int = 1,
) -> Ran:  # fmt: skip
    """Against the reference, whose scores are exact."""
    inputs = inputs or make_operands(case, CPU)
    given = (inputs.q, inputs.kv, inputs.weights, inputs.ks, inputs.ke, case.k)
    expected = reference_mqa_topk(*given, **_options(case, inputs))
    return _run(emulator, case, inputs, config or _config(case), expected, seed)


def _check_scores(emulator: Emulator, case: Case, inputs: Inputs, config: mqa_topk_config.GateConfig) -> Ran:
    """Against the selection from the scores of ``fp8_mqa_logits``."""
    scoring = case.problem.scoring
    out = torch.full((case.rows, case.keys), -7.0)
    launch = mqa_logits.Launch(scoring, heuristic(scoring, dataclasses.replace(SM90, units=2)))
    operands = (inputs.q, inputs.k, inputs.kv_scale, inputs.weights, inputs.ks, inputs.ke)
    emulator.run(launch, MqaLogitsCall(*operands, False, 0, torch.float32, out), seed=3)
    expected = reference_top_k(out, case.k, inputs.ks, inputs.ke, **_options(case, inputs))
    return _run(emulator, case, inputs, config, expected)


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("window", ["causal", "misaligned", "past_end"])
def test_forms(form, window, emulator):
    """Waves, parts of the sample, pieces that begin and end row blocks; the last row block is not full."""
    case = Case(29, 700, k=100, window=window, **form)
    ran = _check(emulator, case)
    assert ran.launched.count("mqa_topk_product.cuh") == -(-29 // (256 // case.heads))
    assert ran.launched.count("mqa_topk_gate.cuh") == -(-29 // (512 // case.heads))


@pytest.mark.parametrize("window", ["empty", "multi_req", "short", "none"])
def test_windows(window, emulator):
    """Empty ones, those that start anywhere, of about k keys, and rows without any."""
    _check(emulator, Case(29, 500, k=100, window=window, **PAGE))


@pytest.mark.parametrize("operands", ["equal", "zeros", "ascending", "descending", "nan"])
def test_hard_rows(operands, emulator):
    """Ties that are cut by position, by the gate and in the selection; scores that are NaN or infinite."""
    ran = _check(emulator, Case(12, 900, k=100, operands=operands, **PAGE))
    assert operands == "nan" or ran.listed == 0


# Keys of math warps of one number above all others; such keys in the odd rows alone; what is sampled above all others;
# what is sampled below.
HOT = ("warp", "odd rows", "miss", "below")


def _hot(case: Case, kind: str) -> Inputs:
    inputs = make_operands(case, CPU)
    position = torch.arange(case.keys)
    scale = (1 + position % 3).float()
    inputs.q[:], inputs.k[:], inputs.weights[:] = 0.0, 0.0, 0.0
    inputs.q[:, :, 0], inputs.k[:, 0], inputs.weights[:, 3] = 1.0, 1.0, 1.0
    if kind == "warp":
        scale[position % 64 < 11] += 4  # in more than a list's room, but in no more than a warp of the selection brings
    elif kind == "odd rows":
        # Of the last list of a row, behind which the next row's first one lies.
        scale = (case.keys - position).float()
        inputs.q[1::2, :, 1] = 64.0
        inputs.k[:, 1] = (position % 128 >= 112).float()
    else:
        scale[sampled(case.keys, 8)] = 8.0 if kind == "miss" else 0.5
    return dataclasses.replace(inputs, kv_scale=scale)


def _hot_config(case: Case, kind: str) -> mqa_topk_config.GateConfig:
    return _config(case, units=1 if kind == "odd rows" else 2)


def sampled(keys: int, stride: int) -> torch.Tensor:
    """The positions that sample.cuh takes."""
    i = torch.arange(-(-keys // stride), dtype=torch.int64)
    mixed = (i * 0x9E3779B1 & 0xFFFFFFFF) ^ ((i * 0x85EBCA6B & 0xFFFFFFFF) >> 13)
    span = (keys - i * stride).clamp(max=stride)
    return i * stride + ((mixed >> 8 & 0xFFFF) * span >> 16)


@pytest.mark.parametrize("kind", HOT)
@pytest.mark.parametrize("form", [ROW, ABSOLUTE], ids=str)
def test_rows_that_are_done_again(kind, form, emulator):
    """Lists that are full, gates that are too high: more rows than one wave of them, some by more CTAs than others."""
    case = Case(19, 900, k=100, **form)
    ran = _check(emulator, case, _hot(case, kind), _hot_config(case, kind), seed=5)
    assert ran.listed == (9 if kind == "odd rows" else 19)


def test_pieces_in_the_middle(emulator):
    """Of one row block; with places of their own, and where there are none, for the rows are done again then."""
    case = Case(7, 900, k=100, **PAGE)
    config = _config(case, units=9)
    ran = _check(emulator, case, None, config)
    assert len(ran.middles) > 4
    assert ran.listed == 0
    for places, again in ((3, 7), (1, 7)):
        ran = _check(emulator, case, None, dataclasses.replace(config, places=places), seed=places)
        assert ran.listed == again
        assert {place for _, place in ran.middles} == {-1, *range(1, places)}


@pytest.mark.parametrize("form", [ROW, PAGE], ids=str)
def test_bitmaps_in_parts(form, emulator, monkeypatch):
    monkeypatch.setattr(mqa_topk_config, "SELECT_WORDS", 4)
    assert _check(emulator, Case(9, 700, k=100, window="misaligned", **form)).listed == 0


def test_every_key_is_sampled(emulator):
    """The gate by two warps."""
    case = Case(9, 700, k=100, **ROW)
    assert _check(emulator, case, None, _config(case, stride=1)).listed == 0


def test_operands_in_wider_rows(emulator):
    """Operands whose rows are apart, and windows of every kind, in one wave."""
    case = Case(19, 531, k=100, **PAGE)
    call = case.problem.example(CPU)
    inputs = Inputs(*call[:6], call.offsets, call.page_table)
    _check(emulator, case, inputs, _config(case, wave=24, sampled=24, again=24))
    _check(emulator, case, dataclasses.replace(inputs, kv_scale=inputs.kv_scale.abs()), _config(case, places=1))


@pytest.mark.parametrize("form", [ROW, ABSOLUTE], ids=str)
def test_scores_that_are_no_numbers(form, emulator):
    """NaN in keys and queries, infinite weights and scales, in rows that pass the gate and that are done again."""
    case = Case(13, 600, k=100, operands="normal", **form)
    inputs = make_operands(case, CPU)
    inputs.k.view(torch.uint8)[5::9, 3], inputs.q.view(torch.uint8)[2, :, 4] = 0x7F, 0xFF
    inputs.weights[3::4, 1], inputs.weights[5, 0], inputs.weights[6] = float("inf"), float("nan"), -float("inf")
    inputs.kv_scale[7::50], inputs.kv_scale[8::50], inputs.kv_scale[9::50] = float("inf"), -float("inf"), float("nan")
    _check_scores(emulator, case, inputs, _config(case))
    _check_scores(emulator, case, inputs, _config(case, units=5, places=1, again=24))


@pytest.mark.parametrize("seed", range(3))
def test_schedules(seed, emulator):
    """More units than row blocks and fewer, in other orders each time."""
    case = Case(21, 400, k=100, window="multi_req" if seed == 1 else "causal", **ROW)
    config = _config(case, units=(2, 6, 4)[seed], wave=16, sampled=16)
    _check(emulator, case, None, config, seed=seed + 10)


def test_no_rows(emulator):
    case = Case(0, 600, k=100, **ROW)
    config = _config(Case(1, 600, k=100, **ROW))
    assert _run(emulator, case, make_operands(case, CPU), config, (torch.empty(0, 100).int(), None)).launched == []


# What is planted, the rows that show it, and what is said of it.
FAULTS = {
    "the selection does not wait": (
        "mqa_topk_select.cuh", "  wait_for_previous();\n", "", "none", "read of what the grid in front may write",
    ),
    "the product does not wait": (
        "mqa_topk_product.cuh", "    wait_for_previous();", "", "none", "while the grid in front runs|may write",
    ),
    "a list one candidate longer": ("append.cuh", "slot < a.room", "slot <= a.room", "odd rows", "other positions"),
    "lists that meet": (
        "mqa_topk_select.cuh", "fits = first + last <= room", "fits = max(first, last) <= room", "warp",
        "other positions|never written",
    ),
    "nothing is done again": (
        "mqa_topk_redo.cuh", "if (count == 0) return;", "return;", "miss", "never written",
    ),
    "q is gathered without fences": (
        "mqa_topk_redo.cuh", "ptx::fence_async_proxy_everywhere();", "", "no places", "other positions",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_faults_are_seen(name, emulator, tmp_path):
    file, right, wrong, kind, said = FAULTS[name]
    case = Case(19, 900, k=100, **ROW)
    inputs = _hot(case, kind) if kind in HOT else make_operands(case, CPU)
    config = _config(case, units=5, places=1) if kind == "no places" else _hot_config(case, kind)
    faulty = emulator.with_fault(tmp_path, file, right, wrong)
    with pytest.raises((AssertionError, StandinError), match=said):
        _check(faulty, case, inputs, config, seed=5)
