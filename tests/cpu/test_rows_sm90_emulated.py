"""The row kernels of ``cuda-sm90``, their source and host code, executed on the CPU with stand-ins for their PTX."""

from __future__ import annotations

import shutil
import zlib

import pytest
import torch

from lightning_indexer import Arch
from lightning_indexer.backends.cuda_sm90 import gather_k_cache, insert_k_cache, prepare_q
from lightning_indexer.backends.cuda_sm90.rows import RowsConfig
from lightning_indexer.check import gather_k_cache as gather_check
from lightning_indexer.check import insert_k_cache as insert_check
from lightning_indexer.check import prepare_q as prepare_check
from lightning_indexer.problems.insert_k_cache import InsertProblem, problem_of, reference_insert
from lightning_indexer.problems.insert_k_cache import validate as validate_insert
from lightning_indexer.problems.prepare_q import PrepareQProblem, reference_prepare_q
from lightning_indexer.problems.prepare_q import validate as validate_prepare
from lightning_indexer.problems.transform import Transform
from sm90_standin.emulate import Emulator

pytestmark = [
    pytest.mark.slow,
    pytest.mark.xdist_group("sm90 rows emulated"),
    pytest.mark.skipif(shutil.which("g++") is None, reason="no g++"),
]

SM90 = Arch.parse("sm90")
CPU = torch.device("cpu")
CONFIGS = (RowsConfig(1, 1, 1), RowsConfig(1, 2, 1), RowsConfig(1, 3, 1), RowsConfig(2, 1, 1))


@pytest.fixture(scope="session")
def emulator(tmp_path_factory) -> Emulator:
    return Emulator(tmp_path_factory.mktemp("sm90_rows"))


def _config(*form: object) -> RowsConfig:
    """The same for all cases of a form, so that it is compiled once; each occurs."""
    return CONFIGS[zlib.crc32(repr(form).encode()) % len(CONFIGS)]


def _insert_faults(emulator: Emulator, case: insert_check.Case) -> list[str]:
    config = _config(case.problem.layout, case.problem.transform, case.problem.dtype)

    def call(case, inputs, kv_cache):
        given = validate_insert(insert_check.call_of(case, inputs, kv_cache))
        if case.tokens:
            emulator.run(insert_k_cache.Launch(case.problem, config), given, writes=("kv_cache",))

    return insert_check.run_case(case, "", CPU, call=call)


def _prepare_faults(emulator: Emulator, case: prepare_check.Case) -> list[str]:
    config = _config(case.problem.transform, case.problem.dtype, case.problem.fp4)

    def call(given):
        if case.problem.tokens:
            emulator.run(prepare_q.Launch(case.problem, config), validate_prepare(given))

    return prepare_check.run_case(case, "", CPU, call=call)


def _gather_faults(emulator: Emulator, case: gather_check.Case) -> list[str]:
    config = _config(case.problem.layout)

    def call(case, inputs, out):
        emulator.run(gather_k_cache.Launch(case.problem, config), gather_check.call_of(case, inputs, out))

    return gather_check.run_case(case, "", CPU, call=call)


# Reading back is other kernels' part.
INSERTS = [
    case for case in insert_check.cases(False)
    if not case.end_to_end and insert_k_cache.InsertKCache().supports(case.problem, SM90) is None
]  # fmt: skip
QUERIES = [c for c in prepare_check.cases(False) if prepare_q.PrepareQ().supports(c.problem, SM90) is None]


@pytest.mark.parametrize("part", range(8))
def test_inserts(part, emulator):
    assert len(INSERTS) > 70
    for case in INSERTS[part::8]:
        assert _insert_faults(emulator, case) == [], case


@pytest.mark.parametrize("part", range(4))
def test_queries(part, emulator):
    assert len(QUERIES) > 25
    for case in QUERIES[part::4]:
        assert _prepare_faults(emulator, case) == [], case


PLAIN, FP4 = gather_check.CacheLayout(), gather_check.CacheLayout.fp4()
GATHERS = [c for c in gather_check.cases(False) if gather_k_cache.GatherKCache().supports(c.problem, SM90) is None]
GATHERS += [gather_check.Case(9, 150, FP4, lengths=lengths) for lengths in gather_check.LENGTHS]
GATHERS += [gather_check.Case(batch, 50, FP4, spare=spare) for batch, spare in ((1, 0), (2, 500), (5, -7), (33, 3))]
GATHERS += [gather_check.Case(4, 150, gather_check.CacheLayout.fp4(1), ratio=4)]


def test_gathers(emulator):
    assert len(GATHERS) > 12
    for case in GATHERS:
        assert _gather_faults(emulator, case) == [], case


def _off_16(tensor: torch.Tensor | None, elements: int = 1) -> torch.Tensor | None:
    """The same values that many elements further, rows an odd number of elements apart."""
    if tensor is None:
        return None
    wide = torch.zeros((*tensor.shape[:-1], tensor.shape[-1] + 2 * elements + 1), dtype=tensor.dtype)
    wide[..., elements : elements + tensor.shape[-1]] = tensor
    return wide[..., elements : elements + tensor.shape[-1]]


GAINED = Transform(True, True, "last", 64, True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("aligned", [True, False])
@pytest.mark.parametrize("layout", [PLAIN, FP4], ids=str)
def test_operands_of_any_dtype_and_address(dtype, aligned, layout, emulator):
    """Gains, tables and positions of the engines' dtypes, where rows do not start on 16 bytes, too."""
    problem = InsertProblem(45, 128, layout, GAINED, dtype)
    call = problem.example(CPU)
    steps = call.steps
    steps = steps._replace(
        norm_weight=steps.norm_weight.to(dtype), cos_sin_cache=steps.cos_sin_cache.to(dtype),
        positions=steps.positions.int(),
    )  # fmt: skip
    if not aligned:
        steps = steps._replace(cos_sin_cache=_off_16(steps.cos_sin_cache), norm_bias=_off_16(steps.norm_bias))
        call = call._replace(k=_off_16(call.k))
    call = validate_insert(call._replace(steps=steps))
    launch = insert_k_cache.Launch(problem_of(call), RowsConfig(2, 1, 1))
    assert launch.operands(call).wide == aligned
    right = call.kv_cache.clone()
    reference_insert(call.k, right, call.slot_mapping, layout, call.steps)
    emulator.run(launch, call, writes=("kv_cache",))
    assert problem.compare(call, call._replace(kv_cache=right)) is None


@pytest.mark.parametrize("fp4", [False, True])
@pytest.mark.parametrize("aligned", [True, False])
def test_queries_at_any_address(fp4, aligned, emulator):
    problem = PrepareQProblem(5, 6, 128, Transform(rope="first", rope_dim=128), torch.float16, fp4=fp4)
    call = validate_prepare(problem.example(CPU))
    if not aligned:
        size = call.results[0].numel()
        odd = torch.zeros(size + 3, dtype=torch.uint8)[3:].view(torch.float8_e4m3fn).view(call.q.shape)
        call = call._replace(q=_off_16(call.q), out=(odd, call.results[1]))
    launch = prepare_q.Launch(problem, RowsConfig(1, 1, 1))
    assert (launch.operands(call).wide, launch.operands(call).store) == ((True, 8) if aligned else (False, 1))
    emulator.run(launch, call)
    assert problem.compare(call, call._replace(out=reference_prepare_q(call))) is None


EXTREMES = (0.0, -0.0, 1e-45, 1e-38, 3e38, -3e38, float("nan"), 0.5, -0.25, 1.25, 2.5, 5.0)


@pytest.mark.parametrize("layout", [PLAIN, PLAIN._replace(scales="ue8m0"), FP4], ids=str)
def test_rows_of_extremes(layout, emulator):
    """Zeros of both signs, subnormals, the largest values, NaN, ties; an infinity, which makes its scale infinite."""
    tokens = 40
    generator = torch.Generator("cpu").manual_seed(3)
    choice = torch.randint(0, len(EXTREMES), (tokens, 128), generator=generator)
    k = torch.tensor(EXTREMES)[choice]
    k[:8] = torch.randn((8, 128), generator=generator).half().float()  # in fp4, many at the middle of two codes
    k[8:12] = (torch.randint(-24, 25, (4, 128), generator=generator) / 4).float()
    k[12, :] = float("nan")
    problem = InsertProblem(tokens, 128, layout, Transform(), torch.float32)
    cache = torch.full((2, *layout.block_shape), 0x15, dtype=torch.uint8)
    call = validate_insert(insert_check.InsertCall(k, cache, torch.arange(tokens), layout))
    right = cache.clone()
    reference_insert(k, right, call.slot_mapping, layout)

    def run(target):
        emulator.run(insert_k_cache.Launch(problem, RowsConfig(1, 1, 1)), target, writes=("kv_cache",))

    run(call)
    assert problem.compare(call, call._replace(kv_cache=right)) is None
    before = layout.unpack(cache)[1].clone()
    k[20, 37] = float("inf")
    run(call)
    scales = layout.unpack(cache)[1]
    key, others = scales[0, 20], torch.arange(64) != 20
    assert torch.equal(scales[0, others], before[0, others])
    assert int(key[1]) == 255 if layout.is_fp4 else not bool(key.isfinite())
