"""Predicted times of this library's AMD kernels: ``cdna_sim.timing`` over the launches of ``fp8_mqa_logits``."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from lightning_indexer.amd import simulation
from lightning_indexer.arch import Arch
from lightning_indexer.model import rates
from lightning_indexer.model.cost import windows_of
from lightning_indexer.model.survey import HEAD_DIM, Launch
from lightning_indexer.problems.mqa_logits import MqaLogitsCall, MqaLogitsProblem, row_stride

if TYPE_CHECKING:
    from cdna_sim import Options, Report
    from cdna_sim.timing import Device, Prediction, Traces

HIP = "hip-gfx950"


def record(kernel: Any, problem: MqaLogitsProblem, window: str, arch: Arch, *, samples: int = 6) -> Traces:
    """Some workgroups of one launch over a window of :func:`windows_of`, as the kernel's heuristic tiles it."""
    from cdna_sim import timing

    run = kernel.launch(problem, arch, kernel.config(problem, arch))
    ks, ke = windows_of(window, problem.rows, problem.keys)
    dtype = torch.float8_e4m3fnuz if arch.fp8 == "fnuz" else torch.float8_e4m3fn
    # Values play no part in what is executed.
    q = torch.zeros(problem.rows, problem.heads, problem.head_dim, dtype=torch.uint8).view(dtype)
    k = torch.zeros(problem.keys, problem.head_dim, dtype=torch.uint8).view(dtype)
    scale, weights = torch.ones(problem.keys), torch.ones(problem.rows, problem.heads)
    out = torch.empty(problem.rows, row_stride(problem.width, problem.out_dtype), dtype=problem.out_dtype)
    call = MqaLogitsCall(q, k, scale, weights, ks, ke, problem.clean_logits, out=out[:, : problem.width])

    def simulate(options: Options) -> Report:
        with simulation(arch.name, options) as launcher:
            run(call)
        [report] = launcher.reports
        return report

    built = kernel.build(problem, arch)
    return timing.record(
        simulate, built.code_object, built.kernel, dynamic_lds=built.dynamic_lds, samples=samples,
        lines=getattr(run, "lines", 1),
    )  # fmt: skip


@dataclass(frozen=True)
class Row:
    """One launch on one backend: the prediction, and what was published of a kernel of the same kind.

    Attributes:
        published: microseconds, or None.
    """

    device: Device
    backend: str
    heads: int
    launch: Launch
    prediction: Prediction
    traces: Traces
    published: float | None

    @property
    def ratio(self) -> float | None:
        """The predicted time in parts of the published one."""
        return None if self.published is None else self.prediction.microseconds / self.published


def device_of(arch: Arch, name: str | None = None) -> Device:
    """The device called ``name``, or the fastest of an arch.

    Raises:
        ValueError: no such device runs the arch's code; the message lists those that do.
    """
    from cdna_sim.timing import DEVICES

    known = {device.name: device for device in DEVICES.values() if device.arch == arch.name}
    if name is None and known:
        return max(known.values(), key=lambda device: device.clock * device.units)
    if name not in known:
        raise ValueError(f"device: got {name!r}, expected one of {', '.join(known)}")
    return known[name]


def published_rows(kernels: Mapping[str, Any], arch: Arch, samples: int) -> Iterator[Row]:
    """Every published launch on our kernel of the same kind, and on the two whose proportion alone was published.

    The published HIP kernel streams keys into registers at every shape; so does ours here.
    """
    kernels = dict(kernels)
    if HIP in kernels:
        from lightning_indexer.backends.hip_gfx950.config import Tunables
        from lightning_indexer.backends.hip_gfx950.mqa_logits import MqaLogits

        kernels[HIP] = MqaLogits(Tunables(strategy="stream"))
    for published in rates.PUBLISHED:
        device = device_of(arch, published.rates.name)
        for launch, times in published.times.items():
            for backend, column in published.kinds.items():
                if backend in kernels:
                    time = times[column] if published.unit == "us" else None
                    yield predicted(kernels[backend], backend, published.heads, launch, published.form, arch, device,
                               samples, time)  # fmt: skip


def rows(
    kernels: Mapping[str, Any], arch: Arch, device: Device, heads: Iterable[int], launches: Iterable[Launch],
    samples: int,
) -> Iterator[Row]:  # fmt: skip
    """Launches with clean logits, on every kernel whose gate admits them."""
    launches = list(launches)
    for h in heads:
        for launch in launches:
            problem = MqaLogitsProblem(launch[0], launch[1], h, HEAD_DIM, clean_logits=True)
            for backend, kernel in kernels.items():
                if kernel.supports(problem, arch) is None:
                    yield predicted(kernel, backend, h, launch, "clean", arch, device, samples, None)


def predicted(
    kernel: Any, backend: str, heads: int, launch: Launch, form: str, arch: Arch, device: Device, samples: int,
    published: float | None,
) -> Row:  # fmt: skip
    """One launch on one kernel, simulated and predicted."""
    from cdna_sim.timing import predict

    problem = MqaLogitsProblem(launch[0], launch[1], heads, HEAD_DIM, clean_logits=form == "clean")
    traces = record(kernel, problem, launch[2], arch, samples=samples)
    return Row(device, backend, heads, launch, predict(device, traces), traces, published)


EXPLANATION = """\
This is a model: executed instructions, simulated, replayed through a compute unit whose constants are published ones
(cdna_sim/timing/device.py), but for a device's sustained clock and launch, which were fitted to published times.
Nothing here was measured by this project. docs/timing.md: what is modelled, how far off, what would prove it wrong."""
