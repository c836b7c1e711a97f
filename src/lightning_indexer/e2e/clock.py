"""Time by phase: CUDA events on a GPU, which cost no synchronisation, and the wall clock elsewhere."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

import torch


class Clock:
    """Adds up what each phase takes, and what the whole takes."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pairs: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []
        self._seconds: dict[str, float] = {}
        self._begun = 0.0

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        if self._device.type == "cuda":
            start, stop = _event(), _event()
            start.record()
            yield
            stop.record()
            self._pairs.append((name, start, stop))
        else:
            begun = time.perf_counter()
            yield
            self._seconds[name] = self._seconds.get(name, 0.0) + time.perf_counter() - begun

    def begin(self) -> None:
        synchronize(self._device)
        self._begun = time.perf_counter()

    def end(self) -> tuple[float, dict[str, float]]:
        """Seconds since :meth:`begin`, and by phase, once the device is done."""
        synchronize(self._device)
        total = time.perf_counter() - self._begun
        for name, start, stop in self._pairs:
            self._seconds[name] = self._seconds.get(name, 0.0) + start.elapsed_time(stop) / 1e3
        self._pairs = []
        return total, dict(self._seconds)


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
