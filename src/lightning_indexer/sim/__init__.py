"""A functional simulator of gfx942 and gfx950 code objects; docs/simulator.md says what it models.

Importing this package imports neither numpy nor tinygrad; the first use of one of its names does.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning_indexer.sim.errors import SimulationFault, UnknownOpcode
    from lightning_indexer.sim.executor import Simulator
    from lightning_indexer.sim.memory import Memory
    from lightning_indexer.sim.options import Loop, Options, Report
    from lightning_indexer.sim.snippet import State, run_snippet
    from lightning_indexer.sim.text import listing
    from lightning_indexer.sim.waitstates import Hazard, too_close

__all__ = [
    "Hazard", "Loop", "Memory", "Options", "Report", "SimulationFault", "Simulator", "State", "UnknownOpcode",
    "listing", "missing", "run_snippet", "too_close",
]  # fmt: skip

_HOME = {
    "SimulationFault": "errors", "UnknownOpcode": "errors", "Simulator": "executor", "listing": "text",
    "Memory": "memory", "Loop": "options", "Options": "options", "Report": "options",
    "State": "snippet", "run_snippet": "snippet", "Hazard": "waitstates", "too_close": "waitstates",
}  # fmt: skip


def missing() -> str | None:
    """None, or what to install, with the command."""
    absent = [name for name in ("numpy", "tinygrad") if importlib.util.find_spec(name) is None]
    if "numpy" not in absent and int(importlib.metadata.version("numpy").split(".")[0]) < 2:
        absent.insert(0, "numpy 2")
    if absent:
        return f"the simulator needs {' and '.join(absent)}: pip install 'lightning-indexer[sim]'"
    return None


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
