"""DTensors and operands of collectives that have not been waited for, over two processes."""

from __future__ import annotations

import os
import socket

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from helpers import CPU, assert_matches, expected_logits
from lightning_indexer import fp8_mqa_logits
from lightning_indexer.check.cases import make_inputs, make_windows

pytestmark = pytest.mark.slow  # two processes each

ROWS, KEYS = 7, 50  # rows that two ranks share unevenly
NAMES = ("q", "k", "kv_scale", "weights", "cu_seqlen_ks", "cu_seqlen_ke")
BACKENDS = ("torch-blocked", "triton-portable")


def operands(rows: int = ROWS, keys: int = KEYS) -> tuple[torch.Tensor, ...]:
    inputs = make_inputs(rows, keys, 8, 32, CPU, 0)
    return inputs.q_fp8, inputs.k_fp8, inputs.kv_scale, inputs.weights, *make_windows("misaligned", rows, keys, CPU)


def call(q, k, kv_scale, weights, ks, ke, **options) -> torch.Tensor:
    return fp8_mqa_logits(q, (k, kv_scale), weights, ks, ke, **options)


def in_group(rank: int, port: int, check) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), TRITON_INTERPRET="1")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=2)
    try:
        check(rank)
    finally:
        dist.destroy_process_group()


def over_two_processes(check) -> None:
    """Runs ``check(rank)`` in a group of two; what it raises in either is raised here."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    mp.spawn(in_group, (port, check), nprocs=2)


# Collectives: the result of an all-gather is a wrapper subclass until someone waits for it.


def gathered(part: torch.Tensor) -> torch.Tensor:
    """An all-gather's result, unfinished. Gloo gathers no fp8: its bytes, read as fp8 behind the wrapper."""
    from torch.distributed._functional_collectives import AsyncCollectiveTensor, all_gather_tensor

    if part.dtype.itemsize > 1:
        return all_gather_tensor(part.contiguous(), 0, dist.group.WORLD)
    whole = all_gather_tensor(part.contiguous().view(torch.uint8), 0, dist.group.WORLD)
    return AsyncCollectiveTensor(whole.elem.view(part.dtype))


def check_collectives(rank: int) -> None:
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
    over_two_processes(check_collectives)


# DTensor


def distributed(tensor: torch.Tensor, mesh, placement):
    from torch.distributed.tensor import DTensor

    rank = mesh.get_local_rank()
    local = tensor
    if not placement.is_replicate():
        parts = tensor.chunk(2, placement.dim)
        local = parts[rank] if rank < len(parts) else tensor[:0]
    return DTensor.from_local(local, mesh, [placement], shape=tensor.shape, stride=tensor.stride())


def check_dtensors(rank: int) -> None:
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


def test_dtensors():
    over_two_processes(check_dtensors)


def check_compiled(rank: int) -> None:
    from torch.distributed.tensor import Replicate, Shard, init_device_mesh

    mesh = init_device_mesh("cpu", (2,))
    arguments = operands()
    where = (Shard(0), Replicate(), Replicate(), Shard(0), Shard(0), Shard(0))
    given = [distributed(a, mesh, p) for a, p in zip(arguments, where, strict=True)]
    result = torch.compile(call, backend="aot_eager", fullgraph=True)(*given)
    assert_matches(result.full_tensor(), expected_logits(*arguments), clean=True)


def test_compiled_calls_on_dtensors():
    over_two_processes(check_compiled)
