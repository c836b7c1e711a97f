"""Timing one call, its host overhead and its memory; and the ceilings of the device in the same run."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch


@dataclass(frozen=True, slots=True)
class Timing:
    """Microseconds. ``p20`` and ``p80`` are percentiles over ``runs`` runs; ``host`` is the time the caller is held;
    ``cpu`` is what a run takes of all cores together, None on a GPU.
    """

    median: float
    p20: float
    p80: float
    host: float
    runs: int
    extra_bytes: int | None
    cpu: float | None = None


@dataclass(frozen=True, slots=True)
class Ceilings:
    """What the device reaches on random data: matrix product and memory.

    ``product`` is fp8 through ``torch._scaled_mm`` where the device has it, else float32.
    """

    product_name: str
    product_tflops: float
    copy_gbs: float

    def __str__(self) -> str:
        return f"{self.product_name} matrix product {self.product_tflops:.4g} TFLOP/s, copy {self.copy_gbs:.4g} GB/s"

    def record(self) -> dict[str, str | float]:
        """For JSON."""
        return {"product": self.product_name, "product_tflops": self.product_tflops, "copy_gbs": self.copy_gbs}


def measure(call: Callable[[], object], device: torch.device, budget_ms: float = 100.0) -> Timing:
    """Times ``call`` until about ``budget_ms`` are spent; on a GPU with the L2 cache flushed before each run."""
    call()
    extra = extra_bytes(call, device)
    cpu = None
    if device.type == "cuda":
        from triton.testing import do_bench

        times = [1e3 * ms for ms in do_bench(call, warmup=budget_ms / 4, rep=budget_ms, return_mode="all")]
        host = _host_overhead(call, budget_ms / 1e3)
    else:
        begun = time.process_time()
        times = _cpu_times(call, budget_ms / 1e3)
        cpu = 1e6 * (time.process_time() - begun) / len(times)
        host = 0.0  # the caller is held for the whole call
    times.sort()
    return Timing(
        statistics.median(times), times[len(times) // 5], times[-1 - len(times) // 5], host, len(times), extra, cpu
    )  # fmt: skip


def _cpu_times(call: Callable[[], object], budget: float) -> list[float]:
    times: list[float] = []
    spent = 0.0
    while len(times) < 3 or (spent < budget and len(times) < 1000):
        start = time.perf_counter()
        call()
        elapsed = time.perf_counter() - start
        spent += elapsed
        times.append(1e6 * elapsed)
    return times


def _host_overhead(call: Callable[[], object], budget: float) -> float:
    """Median time until the call returns, with the device idle before each so that no queue fills up."""
    times: list[float] = []
    begun = time.perf_counter()
    while len(times) < 3 or (len(times) < 25 and time.perf_counter() - begun < budget):
        torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        times.append(1e6 * (time.perf_counter() - start))
    torch.cuda.synchronize()
    return statistics.median(times)


def extra_bytes(call: Callable[[], object], device: torch.device) -> int | None:
    """Peak memory of one call above what was held before it, its result included; None where it cannot be read."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        call()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    try:
        Path("/proc/self/clear_refs").write_text("5")  # resets the peak resident size
    except OSError:
        call()
        return None
    before = _status_kib("VmRSS")
    call()
    return 1024 * max(0, _status_kib("VmHWM") - before)


def _status_kib(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1])
    raise KeyError(field)


def ceilings(device: torch.device) -> Ceilings:
    """Measures both ceilings on random data: a large matrix product, and a copy counted as bytes read plus written."""
    on_gpu = device.type == "cuda"
    size = 8192 if on_gpu else 2048
    a, b = torch.randn(size, size, device=device), torch.randn(size, size, device=device)
    name, product = "float32", lambda: torch.mm(a, b)
    if on_gpu and torch.cuda.get_device_capability(device) >= (8, 9):
        a8, b8, one = a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn).t(), torch.ones((), device=device)
        name, product = "fp8", lambda: torch._scaled_mm(a8, b8, one, one, out_dtype=torch.bfloat16)
    tflops = 2 * size**3 / measure(product, device).median / 1e6
    source = torch.randn(2**29 if on_gpu else 2**25, device=device)
    target = torch.empty_like(source)
    copy = 2 * source.nbytes / measure(lambda: target.copy_(source), device).median / 1e3
    return Ceilings(name, tflops, copy)
