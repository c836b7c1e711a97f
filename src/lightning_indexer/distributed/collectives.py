"""Waiting for the other ranks: collectives of ``torch.distributed``, whose failures name the operation and the timeout.

With gloo a rank that has failed, or is late by the timeout, raises here. With NCCL waiting is a dependency of streams,
and the group's watchdog ends the process at the timeout; with a ``timeout`` of the call the host waits, and raises.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from lightning_indexer.problems.checks import as_finite

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


# Of a timeout, in seconds: ten years.
_LONGEST = 315_360_000


class CollectiveError(RuntimeError):
    """Another rank of the group has failed, or did not come within the timeout. The group is of no more use."""


def _seconds(timeout: float) -> float:
    seconds = float(as_finite("timeout", timeout))
    if not 0 < seconds <= _LONGEST:
        raise ValueError(f"timeout: got {timeout}, expected more than 0 seconds, at most {_LONGEST}")
    return seconds


class Group:
    """A process group with what errors say of it."""

    def __init__(self, group: ProcessGroup | None, device: torch.device, timeout: float | None) -> None:
        import torch.distributed as dist

        if not dist.is_initialized():
            raise RuntimeError("group: torch.distributed is not initialised, expected init_process_group before")
        if group is not None and not isinstance(group, dist.ProcessGroup):
            raise TypeError(f"group: got {type(group).__name__}, expected a torch.distributed.ProcessGroup or None")
        self.group: Any = dist.group.WORLD if group is None else group
        self.rank = dist.get_rank(self.group)
        self.ranks = dist.get_world_size(self.group)
        self.device = device
        self.timeout = None if timeout is None else datetime.timedelta(seconds=_seconds(timeout))
        # Renamed in torch 2.13.
        self._all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

    def expect(self, ranks: int) -> None:
        """Refuses a sharding for another number of ranks."""
        if ranks != self.ranks:
            raise ValueError(f"sharding: got one of {ranks} ranks, expected {self.ranks}, those of the group")

    def all_gather(self, part: torch.Tensor, what: str) -> torch.Tensor:
        """[ranks, *part.shape]"""
        whole = part.new_empty((self.ranks, *part.shape))
        if self.ranks == 1:
            return whole.copy_(part[None])
        with self._named(what):
            self._wait(self._all_gather(whole.view(-1), part.contiguous().view(-1), group=self.group, async_op=True))
        return whole

    def all_to_all(self, parts: torch.Tensor, what: str) -> torch.Tensor:
        """Part r of dimension 0 goes to rank r; part r of the result came from there."""
        import torch.distributed as dist

        found = torch.empty_like(parts)
        with self._named(what):
            self._wait(dist.all_to_all_single(found, parts, group=self.group, async_op=True))
        return found

    def all_reduce(self, summand: torch.Tensor, what: str) -> torch.Tensor:
        """The sum over the ranks, in place."""
        import torch.distributed as dist

        with self._named(what):
            self._wait(dist.all_reduce(summand, group=self.group, async_op=True))
        return summand

    def exchange(
        self, sends: Sequence[tuple[torch.Tensor, int]], receives: Sequence[tuple[torch.Tensor, int]], what: str
    ) -> Callable[[], None]:
        """Starts to send tensors to ranks and to receive from ranks; the result waits. Empty tensors do not travel."""
        import torch.distributed as dist

        operations = [
            dist.P2POp(operation, tensor, dist.get_global_rank(self.group, rank), self.group)
            for operation, parts in ((dist.isend, sends), (dist.irecv, receives))
            for tensor, rank in parts
            if tensor.numel()
        ]
        works: list[Any] = []
        if operations:
            with self._named(what):
                works = dist.batch_isend_irecv(operations)

        def wait() -> None:
            with self._named(what):
                for work in works:
                    self._wait(work)

        return wait

    def _wait(self, work: Any) -> None:
        if self.timeout is None:
            work.wait()
        else:
            work.wait(self.timeout)

    @contextmanager
    def _named(self, what: str) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            limit = self.timeout or self.group._get_backend(self.device).options._timeout
            raise CollectiveError(
                f"{what}: rank {self.rank} of {self.ranks} waited in vain, timeout {limit.total_seconds():g} s: "
                f"another rank has failed or is late ({str(error).splitlines()[0]})"
            ) from error
