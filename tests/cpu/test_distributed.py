"""DTensors and operands of collectives that have not been waited for, over two processes."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from helpers import CPU, assert_matches, expected_logits
from lightning_indexer import CacheLayout, fp8_mqa_logits, fp8_paged_mqa_logits, top_k_per_row
from lightning_indexer.check.cases import make_inputs, make_windows
from processes import in_gloo_group

pytestmark = pytest.mark.slow  # two processes each

ROWS, KEYS = 7, 50  # rows that two ranks share unevenly
NAMES = ("q", "k", "kv_scale", "weights", "cu_seqlen_ks", "cu_seqlen_ke")
BACKENDS = ("torch-blocked", "triton-portable")


def operands(rows: int = ROWS, keys: int = KEYS) -> tuple[torch.Tensor, ...]:
    inputs = make_inputs(rows, keys, 8, 32, CPU, 0)
    return inputs.q_fp8, inputs.k_fp8, inputs.kv_scale, inputs.weights, *make_windows("misaligned", rows, keys, CPU)


def call(q, k, kv_scale, weights, ks, ke, **options) -> torch.Tensor:
    return fp8_mqa_logits(q, (k, kv_scale), weights, ks, ke, **options)


# Collectives: the result of an all-gather is a wrapper subclass until someone waits for it.


def gathered(part: torch.Tensor) -> torch.Tensor:
    """An all-gather's result, unfinished. Gloo gathers no fp8: its bytes, read as fp8 behind the wrapper."""
    from torch.distributed._functional_collectives import AsyncCollectiveTensor, all_gather_tensor

    if part.dtype.itemsize > 1:
        return all_gather_tensor(part.contiguous(), 0, dist.group.WORLD)
    whole = all_gather_tensor(part.contiguous().view(torch.uint8), 0, dist.group.WORLD)
    return AsyncCollectiveTensor(whole.elem.view(part.dtype))


def check_collectives(rank: int, ranks: int) -> None:
    arguments = operands(8, 50)
    expected = expected_logits(*arguments)
    for backend in BACKENDS:
        for place, name in enumerate(NAMES):
            for out in (None, torch.full((8, 50), float("nan"))):
                given = list(arguments)
                given[place] = gathered(arguments[place].chunk(2)[rank])
                assert type(given[place]).__name__ == "AsyncCollectiveTensor", name
                assert not given[place].completed
                result = call(*given, backend=backend, out=out)
                assert out is None or result is out
                assert_matches(result, expected, clean=True)


def test_operands_of_collectives_are_waited_for():
    in_gloo_group(2, check_collectives)


# DTensor


def distributed(tensor: torch.Tensor, mesh, placement):
    from torch.distributed.tensor import DTensor

    rank = mesh.get_local_rank()
    local = tensor
    if not placement.is_replicate():
        parts = tensor.chunk(2, placement.dim)
        local = parts[rank] if rank < len(parts) else tensor[:0]
    return DTensor.from_local(local, mesh, [placement], shape=tensor.shape, stride=tensor.stride())


def check_dtensors(rank: int, ranks: int) -> None:
    from torch.distributed.tensor import DTensor, Replicate, Shard, init_device_mesh

    mesh = init_device_mesh("cpu", (2,))
    whole, rows = Replicate(), Shard(0)
    placements = {
        "replicated": (whole,) * 6,
        "rows": (rows, whole, whole, rows, rows, rows),
        "windows replicated": (rows, whole, whole, rows, whole, whole),
        "q replicated": (whole, whole, whole, rows, whole, whole),
    }
    forms = (
        {},
        {"out_dtype": torch.bfloat16},
        {"clean_logits": False},
        {"clean_logits": False, "max_seqlen_k": 33},
    )
    for size in (ROWS, 8, 1):
        arguments = operands(size)
        for where in placements.values():
            given = [distributed(*pair[:1], mesh, pair[1]) for pair in zip(arguments, where, strict=True)]
            placed = rows if rows in where else whole
            for form in forms:
                width = form.get("max_seqlen_k", 0)
                expected = expected_logits(*arguments, width)
                clean = form.get("clean_logits", True)
                result = call(*given, **form)
                assert isinstance(result, DTensor)
                assert result.placements == (placed,)
                assert result.shape == (size, width or KEYS)
                assert size == 1 or result.to_local().stride() == result.stride()
                assert_matches(result.full_tensor(), expected, clean=clean)
                assert_matches(call(*arguments, **form), expected, clean=clean)
                dtype = form.get("out_dtype", torch.float32)
                out = distributed(torch.full((size, width or KEYS), float("nan"), dtype=dtype), mesh, placed)
                assert call(*given, **form, out=out) is out
                assert_matches(out.full_tensor(), expected, clean=clean)

    # What is refused, by name.
    arguments = operands()
    sharded = [distributed(a, mesh, p) for a, p in zip(arguments, placements["rows"], strict=True)]

    def refused(error, message: str, changes: dict[int, object], **options) -> None:
        given = [changes.get(place, tensor) for place, tensor in enumerate(sharded)]
        with pytest.raises(error, match=message):
            call(*given, **options)

    for place in (1, 2):
        refused(
            ValueError,
            rf"^{NAMES[place]}: got placements \(Shard\(dim=0\),\), expected Replicate\(\): every rank reads all keys",
            {place: distributed(arguments[place], mesh, rows)},
        )
    for place in (0, 3):
        refused(
            ValueError,
            rf"^{NAMES[place]}: got placements \(Shard\(dim=1\),\), expected Shard\(0\) or Replicate\(\)",
            {place: distributed(arguments[place], mesh, Shard(1))},
        )
    for place, name in enumerate(NAMES):
        refused(TypeError, f"^{name}: got Tensor, expected a DTensor as the other operands", {place: arguments[place]})
    refused(TypeError, "^out: got Tensor, expected a DTensor", {}, out=torch.zeros(ROWS, KEYS))
    out = distributed(torch.zeros(ROWS, KEYS), mesh, whole)
    refused(
        ValueError, r"^out: got placements \(Replicate\(\),\), expected \(Shard\(dim=0\),\), as the rows", {}, out=out
    )
    refused(TypeError, "^weights: got dtype torch.float64", {3: distributed(arguments[3].double(), mesh, rows)})


def check_dtensors_of_selection(rank: int, ranks: int) -> None:
    """``top_k_per_row`` with rows sharded or not, results given or not."""
    from torch.distributed.tensor import DTensor, Replicate, Shard, init_device_mesh

    mesh = init_device_mesh("cpu", (2,))
    whole, rows = Replicate(), Shard(0)
    logits = (torch.randn(ROWS, KEYS, generator=torch.Generator().manual_seed(0)) * 2).round()
    starts = torch.arange(ROWS, dtype=torch.int32)
    expected, expected_values = top_k_per_row(logits, 9, starts, order="score", values=True)
    for placed, of_starts in ((rows, rows), (rows, whole), (whole, rows), (whole, whole)):
        result = rows if rows in (placed, of_starts) else whole
        given = distributed(logits, mesh, placed), 9, distributed(starts, mesh, of_starts)
        found, values = top_k_per_row(*given, order="score", values=True)
        assert isinstance(found, DTensor)
        assert found.placements == values.placements == (result,)
        assert torch.equal(found.full_tensor(), expected)
        assert torch.equal(values.full_tensor(), expected_values)
        out = distributed(torch.zeros(ROWS, 9, dtype=torch.int32), mesh, result)
        into = distributed(torch.zeros(ROWS, 9), mesh, result)
        assert top_k_per_row(*given, order="score", out=out) is out
        pair = top_k_per_row(*given, order="score", out=out, values=into)
        assert pair[0] is out
        assert pair[1] is into
        assert torch.equal(out.full_tensor(), expected)
        assert torch.equal(into.full_tensor(), expected_values)
    given = distributed(logits, mesh, rows), 9, distributed(starts, mesh, rows)
    compiled = torch.compile(lambda *a: top_k_per_row(*a, order="score"), backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(*given).full_tensor(), expected)
    with pytest.raises(ValueError, match=r"^logits: got placements \(Shard\(dim=1\),\), expected Shard\(0\) or Repl"):
        top_k_per_row(distributed(logits, mesh, Shard(1)), 9)
    with pytest.raises(TypeError, match=r"^row_starts: got Tensor, expected a DTensor"):
        top_k_per_row(given[0], 9, starts)
    with pytest.raises(ValueError, match=r"^values: got placements \(Replicate\(\),\), expected \(Shard\(dim=0\),\)"):
        top_k_per_row(*given, values=distributed(torch.zeros(ROWS, 9), mesh, whole))
    # Results of collectives that have not been waited for.
    for place in (0, 2):
        waiting = [logits[:6], 9, starts[:6]]
        waiting[place] = gathered(waiting[place].chunk(2)[rank])
        assert torch.equal(top_k_per_row(*waiting, order="score"), expected[:6])


def check_dtensors_of_decode(rank: int, ranks: int) -> None:
    """``fp8_paged_mqa_logits`` with sequences sharded or not; ragged rows by ``indices``."""
    from torch.distributed.tensor import DTensor, Replicate, Shard, init_device_mesh

    mesh = init_device_mesh("cpu", (2,))
    whole, rows = Replicate(), Shard(0)
    inputs = make_inputs(8, 48, 8, 32, CPU, 0)
    layout = CacheLayout(16, 32)
    cache = layout.pack(inputs.k_fp8.view(3, 16, 32), inputs.kv_scale.view(3, 16))
    tables = torch.tensor([[2, 0], [1, 2], [0, 1], [1, 0]], dtype=torch.int32)
    lengths = torch.tensor([31, 4, 0, 20], dtype=torch.int32)
    q = inputs.q_fp8.view(4, 2, 8, 32)
    operands = q, cache, inputs.weights, lengths, tables
    expected = fp8_paged_mqa_logits(*operands, 32)
    for where in ((rows, whole, rows, rows, rows), (rows, whole, whole, whole, rows), (whole,) * 5):
        given = [distributed(tensor, mesh, placed) for tensor, placed in zip(operands, where, strict=True)]
        result = fp8_paged_mqa_logits(*given, 32)
        assert isinstance(result, DTensor)
        assert result.placements == (where[0],)
        assert_matches(result.full_tensor(), expected, clean=True)
        out = distributed(torch.full((8, 32), float("nan")), mesh, where[0])
        assert fp8_paged_mqa_logits(*given, 32, out=out) is out
        assert_matches(out.full_tensor(), expected, clean=True)
    # Ragged: three rows of q on two ranks, every rank with the tables of all sequences.
    order = torch.tensor([3, 0, 1], dtype=torch.int32)
    one = inputs.q_fp8[:3, None], cache, inputs.weights[:3], lengths[order.long(), None], tables
    expected = fp8_paged_mqa_logits(*one, 32, indices=order)
    where = rows, whole, rows, rows, whole
    given = [distributed(tensor, mesh, placed) for tensor, placed in zip(one, where, strict=True)]
    result = fp8_paged_mqa_logits(*given, 32, indices=distributed(order, mesh, rows))
    assert_matches(result.full_tensor(), expected, clean=True)
    given = [distributed(tensor[:3] if i != 1 else tensor, mesh, whole) for i, tensor in enumerate(operands)]
    given[0] = distributed(q[:3], mesh, rows)
    given[2] = distributed(inputs.weights[:6], mesh, whole)
    with pytest.raises(ValueError, match=r"^q: got 3 sequences on 2 ranks, expected a multiple of 2, as next_n"):
        fp8_paged_mqa_logits(*given, 32)
    with pytest.raises(ValueError, match=r"^kv_cache: got placements .*, expected Replicate\(\): every rank reads all"):
        fp8_paged_mqa_logits(given[0], distributed(cache, mesh, rows), *given[2:], 32)
    for place in range(5):
        waiting = list(operands)
        waiting[place] = gathered(operands[place].chunk(2)[rank]) if place != 1 else gathered_whole(cache, rank)
        assert_matches(fp8_paged_mqa_logits(*waiting, 32), fp8_paged_mqa_logits(*operands, 32), clean=True)


def gathered_whole(tensor: torch.Tensor, rank: int) -> torch.Tensor:
    """All rows of a tensor that two ranks do not share evenly, in one piece from rank 0."""
    from torch.distributed._functional_collectives import AsyncCollectiveTensor, broadcast

    return AsyncCollectiveTensor(broadcast(tensor if rank == 0 else torch.zeros_like(tensor), 0, dist.group.WORLD).elem)


def check_all_dtensors(rank: int, ranks: int) -> None:
    check_dtensors(rank, ranks)
    check_dtensors_of_selection(rank, ranks)
    check_dtensors_of_decode(rank, ranks)


def test_dtensors():
    in_gloo_group(2, check_all_dtensors)


def check_compiled(rank: int, ranks: int) -> None:
    from torch.distributed.tensor import Replicate, Shard, init_device_mesh

    mesh = init_device_mesh("cpu", (2,))
    arguments = operands()
    where = (Shard(0), Replicate(), Replicate(), Shard(0), Shard(0), Shard(0))
    given = [distributed(a, mesh, p) for a, p in zip(arguments, where, strict=True)]
    result = torch.compile(call, backend="aot_eager", fullgraph=True)(*given)
    assert_matches(result.full_tensor(), expected_logits(*arguments), clean=True)


def test_compiled_calls_on_dtensors():
    in_gloo_group(2, check_compiled)
