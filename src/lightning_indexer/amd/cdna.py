"""The package ``cdna-sim`` of this repository: it reads AMD code objects and runs them on the host.

It is no dependency of this library, and imported only where AMD code is compiled or simulated. Install it from a clone,
by its path; a package of that name on an index is not this one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from lightning_indexer import packages

if TYPE_CHECKING:
    from cdna_sim import CodeObject

_INSTALL = "pip install ./packages/cdna-sim from a clone of this library's repository"


def missing() -> str | None:
    """None where AMD code objects can be read, or how to install what reads them. Imports nothing."""
    if not packages.installed("cdna_sim"):
        return f"cdna-sim, which reads AMD code objects, is not installed: {_INSTALL}"
    absent = [name for name, module in _READER.items() if not packages.installed(module)]
    return f"cdna-sim needs {' and '.join(absent)}: {_INSTALL}" if absent else None


# What cdna_sim reads code objects with, distribution to module.
_READER = {"msgpack": "msgpack", "pyelftools": "elftools"}


def simulator_missing() -> str | None:
    """None where kernels can be simulated, or how to install what simulates them."""
    if not packages.installed("cdna_sim"):
        return f"the simulator, cdna-sim, is not installed: {_INSTALL}"
    import cdna_sim  # loads nothing else

    return missing() or cdna_sim.missing()


def code_object(elf: bytes) -> CodeObject:
    """``elf``, read.

    Raises:
        ModuleNotFoundError: cdna-sim is not installed; the message says how to install it.
        CodeObjectError: not an AMD code object.
    """
    if (reason := missing()) is not None:
        raise ModuleNotFoundError(reason)
    from cdna_sim import CodeObject

    return CodeObject(elf)
