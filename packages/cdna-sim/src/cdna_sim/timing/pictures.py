"""One workgroup's timeline: as a trace that Perfetto and chrome://tracing open, and as a picture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from cdna_sim.timing.device import Device
from cdna_sim.timing.instructions import UNITS
from cdna_sim.timing.unit import Run

_COLOURS = {
    "matrix": "#c0392b", "vector": "#2e86c1", "vmem": "#27ae60", "lds": "#8e44ad", "scalar": "#95a5a6",
    "smem": "#7f8c8d", "wait": "#f5b041", "barrier": "#d68910", "branch": "#bdc3c7", "nop": "#eeeeee",
}  # fmt: skip


def chrome_trace(device: Device, run: Run, name: str) -> dict[str, Any]:
    """A run with events as a Chrome trace: a process for the workgroup, a thread for each wave and unit.

    Times are microseconds at the device's clock; cycles are in each event's arguments.
    """
    scale = 1e-3 / device.clock
    events: list[dict[str, Any]] = [{"ph": "M", "pid": 0, "name": "process_name", "args": {"name": name}}]
    threads: dict[tuple[int, str], int] = {}
    for wave, op, start, cycles in run.events:
        # The matrix unit works on while its wave issues further instructions.
        lane = (wave, "matrix" if UNITS[op.unit] == "matrix" else "issue")
        if lane not in threads:
            threads[lane] = 2 * wave + (lane[1] == "matrix")
            label = {"name": f"wave {wave} {lane[1]}"}
            events.append({"ph": "M", "pid": 0, "tid": threads[lane], "name": "thread_name", "args": label})
        events.append(
            {
                "ph": "X", "pid": 0, "tid": threads[lane], "name": op.text.split()[0], "cat": UNITS[op.unit],
                "ts": start * scale, "dur": cycles * scale,
                "args": {"instruction": op.text, "pc": f"{op.pc:#x}", "cycle": start, "cycles": cycles},
            }
        )  # fmt: skip
    return {"traceEvents": events, "displayTimeUnit": "ns"}


def picture(run: Run, path: Path, title: str, start: float = 0.0, cycles: float = 4000.0) -> None:
    """Draws cycles [start, start + cycles) of a run with events: a lane of each wave, by unit, and its matrix unit.

    Needs matplotlib.
    """
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    waves = sorted({wave for wave, *_ in run.events})
    figure = Figure(figsize=(12, 0.6 + 0.7 * len(waves)), layout="constrained")
    axes = figure.add_subplot()
    for row, wave in enumerate(waves):
        bars: dict[str, list[tuple[float, float]]] = {}
        for number, op, at, length in run.events:
            if number == wave and at + length > start and at < start + cycles:
                bars.setdefault(UNITS[op.unit], []).append((at, length))
        for unit, spans in bars.items():
            below = 0.0 if unit == "matrix" else 0.35
            axes.broken_barh(spans, (row + below, 0.3 if unit == "matrix" else 0.5), color=_COLOURS.get(unit, "black"))
    axes.set_xlim(start, start + cycles)
    axes.set_yticks([row + 0.45 for row in range(len(waves))], [f"wave {wave}" for wave in waves])
    axes.set_xlabel("cycles (a model's, not measured)")
    axes.set_title(title, loc="left", fontsize=9)
    axes.legend(
        handles=[Patch(color=colour, label=unit) for unit, colour in _COLOURS.items()], ncols=5, fontsize=7,
        loc="upper left", bbox_to_anchor=(0, -0.2),
    )  # fmt: skip
    figure.savefig(path, dpi=120)
