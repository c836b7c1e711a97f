"""The environment variables the library reads, and their validation. Nothing else reads ``os.environ``.

Variables are read at each call, so that a test or a caller may change them at run time.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

KNOWN: dict[str, str] = {
    "LIGHTNING_INDEXER_BACKEND": "run this backend for calls that name none (see `lightning-indexer info`)",
    "LIGHTNING_INDEXER_ARCH": "select as if the device were this arch; on the CPU, AMD archs that can be are simulated",
    "LIGHTNING_INDEXER_CACHE_DIR": "keep compiled kernels here (default ~/.cache/lightning-indexer)",
    "LIGHTNING_INDEXER_TRUST_CACHE": "1: load compiled kernels that other users may have written (default 0)",
    "LIGHTNING_INDEXER_KERNELS": "0: calls that name no backend run torch-blocked, on every device (default 1)",
    "LIGHTNING_INDEXER_SELF_CHECK": "0: never hold a kernel against PyTorch before its first call; 1: on every arch "
    "(default: on archs where this project has not measured it)",
    "LIGHTNING_INDEXER_VLLM": "1: the vLLM plugin replaces vLLM's indexer with this library's; or the names of its "
    "seams, with commas between (default 0)",
    "LIGHTNING_INDEXER_SGLANG": "1: the SGLang plugin replaces the functions by which SGLang scores (default 0)",
}


def value(name: str) -> str | None:
    """What a variable is set to; None if it is empty or not set."""
    return os.environ.get(name) or None


def backend() -> str | None:
    """Name of the backend that calls without ``backend=`` must use, or None."""
    return value("LIGHTNING_INDEXER_BACKEND")


def arch() -> str | None:
    """Name of the arch to assume for every device, or None."""
    return value("LIGHTNING_INDEXER_ARCH")


def kernels() -> bool:
    """False where calls that name no backend must run torch-blocked."""
    return _switch("LIGHTNING_INDEXER_KERNELS", default=True)


def self_check() -> bool | None:
    """True where every kernel is to be checked before its first call, False where none is; None: the unmeasured."""
    return (
        None if value("LIGHTNING_INDEXER_SELF_CHECK") is None else _switch("LIGHTNING_INDEXER_SELF_CHECK", default=True)
    )


def vllm_seams(known: tuple[str, ...]) -> tuple[str, ...]:
    """The seams of ``known`` at which the vLLM plugin is to replace vLLM's functions.

    Raises:
        ValueError: the variable is neither a switch nor a list of their names.
    """
    name = "LIGHTNING_INDEXER_VLLM"
    names = tuple(part.strip() for part in (value(name) or "0").split(","))
    if set(names) <= set(known):
        return names
    try:
        return known if _switch(name, default=False) else ()
    except ValueError:
        raise ValueError(f"{name}: got {value(name)!r}, expected 0, 1 or some of {', '.join(known)}") from None


def sglang_plugin() -> bool:
    """True where the SGLang plugin is to replace the functions by which SGLang scores."""
    return _switch("LIGHTNING_INDEXER_SGLANG", default=False)


def vllm_without_aiter() -> bool:
    """True where vLLM's own ``VLLM_ROCM_USE_AITER`` is set, and switches its ROCm kernels off."""
    text = value("VLLM_ROCM_USE_AITER")
    return text is not None and text.lower() not in ("1", "true")  # as vLLM reads it


def _switch(name: str, *, default: bool) -> bool:
    """A variable that is 0 or 1.

    Raises:
        ValueError: it is set to something else.
    """
    text = value(name)
    if text is None:
        return default
    if text.lower() in ("1", "true", "on", "yes"):
        return True
    if text.lower() in ("0", "false", "off", "no"):
        return False
    raise ValueError(f"{name}: got {text!r}, expected 0 or 1")


def cache_dir() -> Path | None:
    """Where compiled kernels are kept; None where that is below a home directory and the user has none."""
    chosen = value("LIGHTNING_INDEXER_CACHE_DIR")
    try:
        if chosen is not None:
            return Path(chosen).expanduser()
        return Path(value("XDG_CACHE_HOME") or "~/.cache").expanduser() / "lightning-indexer"
    except RuntimeError:  # no HOME, and no such user
        return None


def trust_cache() -> bool:
    """True where compiled kernels are loaded from wherever they are kept, whoever may write there."""
    return _switch("LIGHTNING_INDEXER_TRUST_CACHE", default=False)


def triton_interprets() -> bool:
    """True where Triton's own ``TRITON_INTERPRET`` asks for its CPU interpreter."""
    return os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "on", "y", "yes")


# What os.environ itself keeps: each call of the library reads these names, and a look-up here costs a tenth.
_RAW: Mapping[Any, Any] = getattr(os.environ, "_data", os.environ)
SELECTION: tuple[Any, ...] = (
    "LIGHTNING_INDEXER_BACKEND",
    "LIGHTNING_INDEXER_ARCH",
    "LIGHTNING_INDEXER_KERNELS",
    "LIGHTNING_INDEXER_SELF_CHECK",
    "TRITON_INTERPRET",
)
if _RAW is not os.environ and os.supports_bytes_environ:
    SELECTION = tuple(os.fsencode(name) for name in SELECTION)
# The names that are set, as they are at any time: most often none of SELECTION is among them.
VARIABLES = _RAW.keys()


def selection() -> tuple[object, ...]:
    """Everything in the environment that the choice of a backend reads, unparsed: a key for what was chosen."""
    backend, arch, kernels, check, interpret = SELECTION
    get = _RAW.get
    return get(backend), get(arch), get(kernels), get(check), get(interpret)


def stop_triton_interpreter() -> None:
    """Takes ``TRITON_INTERPRET`` from this process, whose Triton then compiles; in time only before it is imported."""
    os.environ.pop("TRITON_INTERPRET", None)


def for_process(**changes: str | None) -> dict[str, str]:
    """The environment for a process that the library starts: this one's with ``changes``, where None removes."""
    kept = {name: text for name, text in os.environ.items() if name not in changes}
    return kept | {name: text for name, text in changes.items() if text is not None}


def rocm_path() -> str | None:
    """Where ROCm's own ``ROCM_PATH`` says that it is installed, or None."""
    return value("ROCM_PATH")


def unknown() -> list[str]:
    """``LIGHTNING_INDEXER_*`` variables that are set and that nothing reads: most likely a typing slip."""
    return sorted(name for name in os.environ if name.startswith("LIGHTNING_INDEXER_") and name not in KNOWN)
