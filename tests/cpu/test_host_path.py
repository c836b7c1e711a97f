"""The short ways of a fused call on the host: what they launch and compute is what the long ways do."""

from __future__ import annotations

import struct

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from helpers import CPU, int32
from lightning_indexer import Arch, CacheLayout, fp8_mqa_topk, fp8_paged_mqa_topk, reference_mqa_topk, top_k_per_row
from lightning_indexer.arch import MIB
from lightning_indexer.backends import row_waves
from lightning_indexer.backends.cuda_sm90 import mqa_logits, mqa_topk, mqa_topk_config, paged_mqa_logits, top_k
from lightning_indexer.calls import common
from lightning_indexer.check.mqa_topk import Case, make_operands
from lightning_indexer.problems import paged_mqa_topk as pages
from lightning_indexer.problems.mqa_logits import MqaLogitsProblem, row_stride
from lightning_indexer.problems.mqa_topk import MqaTopKCall, MqaTopKProblem
from lightning_indexer.problems.top_k import TopKProblem
from lightning_indexer.selection import registry
from sm90_standin.launches import Driver, part_of

SM90 = Arch.parse("sm90")


@pytest.fixture
def driver(monkeypatch):
    yield Driver(monkeypatch)
    for module in (mqa_logits, paged_mqa_logits, top_k):
        module._function.cache_clear()
    mqa_topk._kernel_on.cache_clear()
    common.forget_plans()


class Counted(TorchDispatchMode):
    """The PyTorch operations of a block."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        self.names.append(function._schema.name.removeprefix("aten::"))
        return function(*arguments, **(options or {}))


# Decode: B sequences of next_n rows over a cache of 64-key pages.


def paged(batch=3, next_n=1, blocks=80, **changes):
    rows, heads, dim = batch * next_n, 64, 128
    generator = torch.Generator().manual_seed(1)
    draw = lambda high, *shape: torch.randint(0, high, shape, generator=generator, dtype=torch.int32)  # noqa: E731
    given = {
        "q": torch.zeros(batch, next_n, heads, dim, dtype=torch.uint8).view(torch.float8_e4m3fn),
        "kv_cache": torch.zeros(9, 64, 1, dim + 4, dtype=torch.uint8),
        "weights": torch.zeros(rows, heads),
        "context_lens": draw(64 * blocks, batch),
        "block_tables": draw(9, batch, blocks + 7)[:, :blocks],
        "k": 512,
    }  # fmt: skip
    return given | changes


DECODE = {
    "one row": {"batch": 1},
    "rows": {},
    "a row a token": {"next_n": 2},
    "lengths of rows": {"next_n": 2, "context_lens": int32(5, 6, 7, 8, 9, 10).view(3, 2)},
    "strided lengths": {"context_lens": int32(*range(100, 106))[::2]},
    "slots": {"index_base": "page", "values": True},
    "slots of rows": {"index_base": "page", "next_n": 3},
    "offsets": {"index_base": "offset", "offsets": int32(7, 8, 9)},
    "a table": {"index_base": "page", "page_size": 16, "page_table": int32(*range(1200)).view(3, 400)[:, :320]},
    "ragged": {"indices": int32(1, 1, 0)},
    "kept": {"force_first": 2, "force_last": 3},
    "by score": {"order": "score", "tie": "larger", "values": True},
    "strided results": {"out": int32(*range(1560)).view(3, 520)[:, :512], "values": torch.zeros(3, 600)[:, :512]},
    "a workspace": {"workspace": torch.zeros(3 * 5120 * 4 + 2, dtype=torch.uint8)},
    "everything selected": {"blocks": 8},
}  # fmt: skip


@pytest.mark.parametrize("name", DECODE)
def test_one_wave_launches_what_waves_launch(name, driver):
    given = paged(**DECODE[name])
    call = pages.validate(
        pages.PagedMqaTopKArguments(**{"sequences" if n == "indices" else n: v for n, v in given.items()})
    )
    problem = pages.problem_of(call)
    kernel = registry.kernel("cuda-sm90", problem.operation)
    run = kernel.launch(problem, SM90, kernel.config(problem, SM90))
    indices = torch.zeros(problem.rows, problem.k, dtype=torch.int32) if call.out is None else call.out
    values = torch.zeros(problem.rows, problem.k) if call.values is True else call.values
    values = values if isinstance(values, torch.Tensor) else None
    workspace = torch.zeros(run.workspace_bytes, dtype=torch.uint8) if call.workspace is None else call.workspace
    record = pages.PagedMqaTopKCall(
        *call[:5], call.layout, call.sequences, call.offsets, call.page_table, indices, values, workspace
    )
    bound = run.bind(record)
    assert (bound is run) == (name == "everything selected")
    run(record)
    expected = driver.taken()
    for _ in range(2):
        bound(record)
        found = driver.taken()
        assert [launch.kernel for launch in found] == [launch.kernel for launch in expected]
        for launch, other in zip(found, expected, strict=True):
            # Ends that the call works out lie elsewhere each time.
            assert _without_ends(launch) == _without_ends(other)


def _without_ends(launch):
    if not launch.kernel.startswith("top_k_per_row"):
        return launch
    (arguments,) = launch.parameters
    return launch._replace(parameters=(arguments[:16], arguments[24:]))


@pytest.mark.parametrize("name", DECODE)
def test_a_second_call_launches_what_the_first_does(name, driver, monkeypatch):
    """By the public call, whose first one plans."""
    monkeypatch.setenv("LIGHTNING_INDEXER_ARCH", "sm90")
    given = paged(**DECODE[name])
    shape = (given["q"].shape[0] * given["q"].shape[1], given["k"])
    given.setdefault("out", torch.zeros(shape, dtype=torch.int32))
    if given.get("values") is True:
        given["values"] = torch.zeros(shape)
    given.setdefault("workspace", torch.zeros(2**20, dtype=torch.uint8))
    launches = []
    for _ in range(3):
        fp8_paged_mqa_topk(**given, backend="cuda-sm90")
        launches.append([_without_tables(_without_ends(launch)) for launch in driver.taken()])
    assert len(launches[0]) in (1, 2)
    assert launches[0] == launches[1] == launches[2]
    # Other operands of the same kind: their own addresses.
    other = given | {"q": given["q"].clone(), "weights": given["weights"].clone()}
    fp8_paged_mqa_topk(**other, backend="cuda-sm90")
    for launch in driver.taken():
        if launch.kernel.startswith("fp8_paged"):
            assert launch.parameters[0][0] == other["q"].data_ptr()
            assert struct.unpack_from("<Q", launch.parameters[2]) == (other["weights"].data_ptr(),)


def _without_tables(launch):
    """Page tables that a call works out, of several rows a sequence, lie elsewhere each time."""
    if len(launch.parameters) != 2:
        return launch
    start, rest = launch.parameters
    return launch._replace(parameters=(start, rest[:8], rest[16:]))


@pytest.mark.parametrize(("changes", "operations"), [
    ({}, ["empty_strided"]),
    ({"index_base": "page", "values": True}, ["empty_strided"]),
    ({"next_n": 2, "context_lens": int32(5, 6, 7, 8, 9, 10).view(3, 2)}, ["empty_strided", "view"]),
    ({"next_n": 2}, ["empty_strided", "arange", "unsqueeze", "add", "view"]),
    ({"workspace": torch.zeros(2**20, dtype=torch.uint8)}, []),
])  # fmt: skip
def test_operations_of_one_wave(changes, operations, driver):
    given = paged(**changes)
    call = pages.validate(pages.PagedMqaTopKArguments(**given))
    problem = pages.problem_of(call)
    kernel = registry.kernel("cuda-sm90", problem.operation)
    indices, values = torch.zeros(problem.rows, problem.k, dtype=torch.int32), torch.zeros(problem.rows, problem.k)
    record = pages.PagedMqaTopKCall(
        *call[:5], call.layout, None, None, call.page_table, indices, values if call.values else None, call.workspace
    )
    bound = kernel.launch(problem, SM90, kernel.config(problem, SM90)).bind(record)
    for _ in range(2):
        with Counted() as counted:
            bound(record)
        # ``slice`` and ``alias`` come and go with PyTorch's own way to a view.
        assert [name for name in counted.names if name not in ("slice", "alias", "_unsafe_view")] == operations


@pytest.mark.parametrize("options", [
    {}, {"values": True}, {"index_base": "page", "page_size": 64, "page_table": int32(*range(72)).view(3, 24)[:, :20]},
    {"row_starts": int32(1, 2, 3), "row_ends": int32(100, 200, 300), "order": "score"},
], ids=str)  # fmt: skip
def test_a_second_selection_launches_what_the_first_does(options, driver, monkeypatch):
    monkeypatch.setenv("LIGHTNING_INDEXER_ARCH", "sm90")
    logits, out, values = torch.zeros(3, 1400)[:, :1280], torch.zeros(3, 600, dtype=torch.int32), torch.zeros(3, 600)
    given = options | {"out": out[:, :512], "values": values[:, :512] if "values" in options else None}
    for _ in range(3):
        top_k_per_row(logits, 512, **given, backend="cuda-sm90")
    first, *others = driver.taken()
    assert others == [first, first]
    wide = struct.unpack("<7Q4q4if4x", first.parameters[0])
    at = lambda name: 0 if given.get(name) is None else given[name].data_ptr()  # noqa: E731
    assert wide[:7] == (
        logits.data_ptr(), at("row_starts"), at("row_ends"), 0, at("page_table"), out.data_ptr(), at("values"),
    )  # fmt: skip
    assert wide[7:11] == (1400, 600, 600 if "values" in options else 0, 24 if "page_table" in options else 0)
    top_k_per_row(logits.clone(), 512, **given, backend="cuda-sm90")  # a row stride of its own
    (launch,) = driver.taken()
    assert struct.unpack_from("<7Q4q", launch.parameters[0])[7] == 1280


# Results, on the backends that run here


@pytest.mark.parametrize("options", [
    {}, {"values": True}, {"index_base": "page"}, {"force_first": 1, "force_last": 2},
    {"order": "score", "values": True},
], ids=str)  # fmt: skip
@pytest.mark.parametrize("next_n", [1, 2])
def test_one_wave_selects_what_waves_select(next_n, options):
    layout = CacheLayout(16, 32)
    generator = torch.Generator().manual_seed(next_n)
    k = torch.randint(-2, 3, (12, 16, 32), generator=generator).float().to(torch.float8_e4m3fn)
    q = torch.randint(-2, 3, (4, next_n, 8, 32), generator=generator).float().to(torch.float8_e4m3fn)
    given = (q, layout.pack(k, torch.ones(12, 16)), torch.ones(4 * next_n, 8), int32(40, 0, 48, 33),
             torch.arange(12, dtype=torch.int32).view(4, 3), 5)  # fmt: skip
    common.forget_plans()
    found = fp8_paged_mqa_topk(*given, **options)
    assert isinstance(next(iter(common.PLANS.values())).run, row_waves.OneWave)
    again = fp8_paged_mqa_topk(*given, **options)
    own = fp8_paged_mqa_topk(
        *given, **options, workspace=torch.full((4 * next_n * 4 * 64 + 3,), 255, dtype=torch.uint8)
    )
    cut = fp8_paged_mqa_topk(*given, **options, workspace=next_n * 4 * 64)  # a wave a sequence
    for other in (again, own, cut):
        for one, two in zip(_pair(found), _pair(other), strict=True):
            assert torch.equal(one, two)


@pytest.mark.parametrize("bound", [0, 30])
def test_one_wave_over_keys(bound):
    inputs = make_operands(Case(6, 90, 32, window="misaligned"), CPU)
    given = (inputs.q, inputs.kv, inputs.weights, inputs.ks, inputs.ke, 7)
    options = {"max_seqlen_k": bound, "index_base": "absolute"}
    expected, scores = reference_mqa_topk(*given, **options)
    for workspace in (None, 6 * 4 * row_stride(90, torch.float32), 2 * 4 * row_stride(90, torch.float32)):
        for _ in range(2):
            found, values = fp8_mqa_topk(*given, **options, values=True, workspace=workspace)
            assert torch.equal(found, expected)
            assert torch.equal(values, scores)


@pytest.mark.parametrize("name", ["indices", "offsets", "page_table", "out", "values", "workspace"])
def test_parameters_among_options(name):
    """They go through the operators, which call again with the tensors that they hold."""
    given = paged(q=torch.zeros(3, 1, 64, 128).to(torch.float8_e4m3fn), context_lens=int32(700, 0, 90))
    base = {"offsets": {"index_base": "offset"}, "page_table": {"index_base": "page", "page_size": 64}}.get(name, {})
    tensor = {
        "indices": int32(2, 1, 0), "offsets": int32(1, 2, 3), "page_table": given["block_tables"],
        "out": torch.zeros(3, 512, dtype=torch.int32), "values": torch.zeros(3, 512),
        "workspace": torch.zeros(2**20, dtype=torch.uint8),
    }[name]  # fmt: skip
    expected = fp8_paged_mqa_topk(**given, **base, **{name: tensor})
    found = fp8_paged_mqa_topk(**given, **base, **{name: torch.nn.Parameter(tensor, requires_grad=False)})
    assert all(map(torch.equal, _pair(found), _pair(expected)))
    if name in ("indices", "page_table"):
        return
    rows = {"logits": torch.zeros(3, 700), "k": 512, **base}
    expected = top_k_per_row(**rows, **{name: tensor})
    found = top_k_per_row(**rows, **{name: torch.nn.Parameter(tensor, requires_grad=False)})
    assert all(map(torch.equal, _pair(found), _pair(expected)))


def _pair(result):
    return result if isinstance(result, tuple) else (result,)


# The gate


ROWS, KEYS, HEADS, K = 3000, 65000, 64, 512


def gated(**traits):
    scoring = MqaLogitsProblem(ROWS, KEYS, HEADS, 128, clean_logits=False)
    problem = MqaTopKProblem(scoring, TopKProblem(ROWS, KEYS, K, **traits), workspace_bytes=22 * MIB)
    config = mqa_topk_config.gate_config(problem, SM90)
    plan = mqa_topk_config.Plan(problem, config)
    assert plan.waves > 2
    assert config.sampled < ROWS
    return problem, config, plan


def operands(problem, plan):
    lane = lambda *shape: torch.zeros(shape, dtype=torch.uint8)  # noqa: E731
    selection = problem.selection
    return MqaTopKCall(
        lane(ROWS, HEADS + 8, 128)[:, :HEADS].view(torch.float8_e4m3fn),
        lane(KEYS, 144)[:, :128].view(torch.float8_e4m3fn), torch.zeros(KEYS),
        torch.zeros(ROWS, HEADS + 3)[:, :HEADS], torch.zeros(ROWS, dtype=torch.int32),
        torch.zeros(ROWS, dtype=torch.int32),
        torch.zeros(ROWS, dtype=torch.int32) if selection.index_base == "offset" else None,
        torch.zeros(ROWS, 1100, dtype=torch.int32) if selection.index_base == "page" else None,
        torch.zeros(ROWS, K + 5, dtype=torch.int32)[:, :K],
        torch.zeros(ROWS, K + 7)[:, :K] if selection.values else None, lane(plan.bytes),
    )  # fmt: skip


@pytest.mark.parametrize("traits", [
    {}, {"values": True}, {"index_base": "offset"}, {"index_base": "page", "page_size": 64, "values": True},
], ids=str)  # fmt: skip
def test_launches_of_the_gate(traits, driver):
    problem, config, plan = gated(**traits)
    run, call = mqa_topk.Launch(problem, SM90, config), operands(problem, plan)
    with Counted() as counted:
        run(call)
    assert counted.names == []
    launches = driver.taken()
    expected, waves = ["sample"], []
    for first in range(0, ROWS, config.sampled):
        past = min(ROWS, first + config.sampled)
        cuts = [(start, min(past, start + config.wave)) for start in range(first, past, config.wave)]
        expected += ["score", "gate", *["product", "select"] * len(cuts)]
        waves += cuts
    assert [part_of(launch.kernel) for launch in launches] == [*expected, "redo"]
    for launch in launches:
        part = mqa_topk.parts(problem, config)[part_of(launch.kernel)]
        assert (launch.block, launch.shared_bytes) == (part.threads, part.shared_bytes)
        attribute = b"cooperative" if part.cooperative else b"dependent" if part.dependent else b""
        assert launch.attributes.rstrip(b"\0") == attribute
        assert launch.stream == 77

    base = call.workspace.data_ptr()
    room = lambda name: base + plan.offset[name]  # noqa: E731
    address = lambda tensor, row: 0 if tensor is None else tensor.data_ptr() + 4 * row * tensor.stride(0)  # noqa: E731
    products = [launch for launch in launches if part_of(launch.kernel) == "product"]
    selects = [launch for launch in launches if part_of(launch.kernel) == "select"]
    for number, ((start, end), product, select) in enumerate(zip(waves, products, selects, strict=True)):
        q_map, k_map, packed = product.parameters
        assert q_map[0] == call.q.data_ptr() + start * call.q.stride(0)
        assert q_map[1][3] == end - start
        assert k_map == (call.k.data_ptr(), (128, KEYS), (144,), config.product.k_box)
        assert struct.unpack("<" + mqa_topk_config.STRUCTS["product"][0], packed) == (
            0, call.kv_scale.data_ptr(), address(call.weights, start), address(call.ks, start), address(call.ke, start),
            0, call.q.stride(0), call.weights.stride(0), 0, end - start, KEYS, KEYS, config.product.enter_cost,
            room("gates") + 16 * start, room("main"), room("counts"), room("middles"),
            room("counters") + 4 * (2 + number), config.room, config.places,
        )  # fmt: skip
        assert select.grid == (end - start, 1, 1)
        assert struct.unpack("<" + mqa_topk_config.STRUCTS["select"][0], select.parameters[0]) == (
            room("main"), room("counts"), room("middles"), room("gates") + 16 * start, address(call.ks, start),
            address(call.ke, start), room("counters"), room("redo"), address(call.offsets, start),
            address(call.page_table, start), address(call.indices, start), address(call.values, start),
            call.indices.stride(0), 0 if call.values is None else call.values.stride(0),
            0 if call.page_table is None else call.page_table.stride(0), K, problem.selection.page_size, end - start,
            KEYS, start, config.product.ctas, config.room, mqa_topk_config.select_words(problem), config.warp_room, 0,
        )  # fmt: skip


def test_the_gate_again_and_elsewhere(driver):
    problem, config, plan = gated()
    run, call = mqa_topk.Launch(problem, SM90, config), operands(problem, plan)
    run(call)
    first, made = driver.taken(), len(driver.maps)
    run(call)
    assert driver.taken() == first
    assert len(driver.maps) == made
    for name in ("q", "k", "kv_scale", "weights", "ks", "ke", "indices", "workspace"):
        tensor = getattr(call, name)
        moved = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
        by = moved.data_ptr() - tensor.data_ptr()
        run(call._replace(**{name: moved}))
        changed = set()
        for launch, other in zip(driver.taken(), first, strict=True):
            changed |= _differences(launch, other)
        assert changed == {by}, name


def _differences(launch, other):
    """By how much the addresses of two launches differ that are else the same."""
    assert launch[:6] == other[:6]
    found = set()
    for one, two in zip(launch.parameters, other.parameters, strict=True):
        if isinstance(one, tuple):
            assert one[1:] == two[1:]
            found.add(one[0] - two[0])
        else:
            words = [struct.unpack(f"<{len(each) // 8}Q", each) for each in (one, two)]
            found |= {here - there for here, there in zip(*words, strict=True)}
    return found - {0}
