"""Context parallelism on GPUs: bitwise one device's selection, with random operands and the backend that calls choose.

NCCL takes one rank a GPU: as many as there are, one included. On a single GPU two and three ranks share it, and their
collectives go through the host by gloo.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
import torch.multiprocessing as mp

from lightning_indexer.bench.distributed import Case, Ranks, decode, prefill
from lightning_indexer.distributed import collectives, keys, rows

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU: kernels run in the interpreter instead"),
]

CASES = (
    Case("rows", 600, 40000, 64), Case("rows", 301, 8193, 32, 512), Case("keys", 600, 40000, 64),
    Case("keys", 301, 8193, 32, 512), Case("decode", 5, 20000, 64), Case("decode", 3, 1000, 32),
)  # fmt: skip


class ThroughHost(collectives.Group):
    """A group of ranks that share a GPU: gloo has no collectives of CUDA tensors, so they are copied."""

    def all_gather(self, part: torch.Tensor, what: str) -> torch.Tensor:
        return super().all_gather(part.cpu(), what).to(self.device)

    def all_to_all(self, parts: torch.Tensor, what: str) -> torch.Tensor:
        return super().all_to_all(parts.cpu(), what).to(self.device)

    def all_reduce(self, summand: torch.Tensor, what: str) -> torch.Tensor:
        return summand.copy_(super().all_reduce(summand.cpu(), what))

    def exchange(
        self, sends: Sequence[tuple[torch.Tensor, int]], receives: Sequence[tuple[torch.Tensor, int]], what: str
    ) -> Callable[[], None]:
        landed = [(torch.empty_like(tensor, device="cpu"), rank) for tensor, rank in receives]
        finish = super().exchange([(tensor.cpu(), rank) for tensor, rank in sends], landed, what)

        def wait() -> None:
            finish()
            for (target, _), (source, _) in zip(receives, landed, strict=True):
                target.copy_(source)

        return wait


def member(rank: int, ranks: int, path: str, shared: bool) -> None:
    import torch.distributed as dist

    device = torch.device("cuda", 0 if shared else rank)
    torch.cuda.set_device(device)
    limit = datetime.timedelta(seconds=100)
    name = "gloo" if shared else "nccl"
    dist.init_process_group(name, init_method=f"file://{path}", rank=rank, world_size=ranks, timeout=limit)
    if shared:
        keys.Group = rows.Group = ThroughHost  # type: ignore[misc]
    for case in CASES:
        alone, ways = (decode if case.form == "decode" else prefill)(case, Ranks(rank, ranks, device))
        expected = alone().clone()
        for way, (call, some) in ways.items():
            for _ in range(3):
                found = call()
                assert torch.equal(found, expected[some]), (str(case), way, rank)
    dist.destroy_process_group()


@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_that_share_a_gpu(ranks: int, tmp_path: Path):
    mp.start_processes(member, (ranks, str(tmp_path / "group"), True), nprocs=ranks, start_method="spawn")


def test_nccl_on_every_gpu(tmp_path: Path):
    ranks = torch.cuda.device_count()
    mp.start_processes(member, (ranks, str(tmp_path / "group"), False), nprocs=ranks, start_method="spawn")
