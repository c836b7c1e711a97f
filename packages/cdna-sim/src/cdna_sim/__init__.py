"""A functional simulator of AMD CDNA code objects: a code object in, a grid run over arrays, a report out.

Importing this package imports neither numpy nor tinygrad; the first use of one of its names does what that name needs.
Code objects are read with pyelftools and msgpack alone.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import sys
from typing import TYPE_CHECKING, Any

from cdna_sim._version import __version__

if TYPE_CHECKING:
    from cdna_sim.arch import ARCHS, Arch, simulated
    from cdna_sim.arguments import Pointer, explicit_arguments, hidden_arguments, pack_arguments
    from cdna_sim.assembler import AssemblerError, assemble
    from cdna_sim.code_object import Argument, CodeObject, CodeObjectError, Descriptor, KernelInfo, Resources
    from cdna_sim.errors import SimulationFault, UnknownOpcode
    from cdna_sim.exec.wait_states import Hazard, wait_state_hazards
    from cdna_sim.isa.decode import Instruction, listing
    from cdna_sim.machine_code import from_machine_code
    from cdna_sim.memory.buffers import Memory
    from cdna_sim.occupancy import lds_limit, waves_per_simd
    from cdna_sim.options import Loop, Options, Report
    from cdna_sim.simulator import Simulator, run
    from cdna_sim.snippet import State, run_snippet

_HOME = {
    "arch": ("ARCHS", "Arch", "simulated"),
    "arguments": ("Pointer", "explicit_arguments", "hidden_arguments", "pack_arguments"),
    "assembler": ("AssemblerError", "assemble"),
    "code_object": ("Argument", "CodeObject", "CodeObjectError", "Descriptor", "KernelInfo", "Resources"),
    "errors": ("SimulationFault", "UnknownOpcode"),
    "exec.wait_states": ("Hazard", "wait_state_hazards"),
    "isa.decode": ("Instruction", "listing"),
    "machine_code": ("from_machine_code",),
    "memory.buffers": ("Memory",),
    "occupancy": ("lds_limit", "waves_per_simd"),
    "options": ("Loop", "Options", "Report"),
    "simulator": ("Simulator", "run"),
    "snippet": ("State", "run_snippet"),
}
_MODULE = {name: module for module, names in _HOME.items() for name in names}

__all__ = [
    "ARCHS", "Arch", "Argument", "AssemblerError", "CodeObject", "CodeObjectError", "Descriptor", "Hazard",
    "Instruction", "KernelInfo", "Loop", "Memory", "Options", "Pointer", "Report", "Resources", "SimulationFault",
    "Simulator", "State", "UnknownOpcode", "__version__", "assemble", "explicit_arguments", "from_machine_code",
    "hidden_arguments", "lds_limit", "listing", "missing", "pack_arguments", "run", "run_snippet", "simulated",
    "wait_state_hazards", "waves_per_simd",
]  # fmt: skip


def missing() -> str | None:
    """What running a kernel lacks here, as a sentence with the command; None if nothing. Imports nothing."""
    if sys.hexversion < 0x030B0000:
        return "simulation needs Python 3.11 or newer: its instruction decoder, tinygrad, does"
    absent = [name for name in ("numpy", "tinygrad") if importlib.util.find_spec(name) is None]
    if "numpy" not in absent and int(importlib.metadata.version("numpy").split(".")[0]) < 2:
        absent.insert(0, "numpy")
    if absent:
        ranges = {"numpy": "'numpy>=2'", "tinygrad": "'tinygrad>=0.14,<0.15'"}
        return f"simulation needs {' and '.join(absent)}: pip install {' '.join(ranges[name] for name in absent)}"
    return None


def __getattr__(name: str) -> Any:
    if name not in _MODULE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULE[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
