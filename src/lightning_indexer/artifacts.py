"""Compiled code on disk, keyed by everything that went into it.

``LIGHTNING_INDEXER_CACHE_DIR`` says where. Default: ``$XDG_CACHE_HOME/lightning-indexer``, or
``~/.cache/lightning-indexer``.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

from lightning_indexer import envs


def get_or_build(parts: tuple[str | bytes, ...], suffix: str, build: Callable[[], bytes]) -> bytes:
    """The stored bytes of ``parts``, else ``build()``, stored for the next process.

    A folder that cannot be written costs the next process its time, and nothing else.
    """
    digest = hashlib.sha256()
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        digest.update(len(data).to_bytes(8, "little") + data)
    path = envs.cache_dir() / f"{digest.hexdigest()[:40]}{suffix}"
    try:
        return path.read_bytes()
    except OSError:
        pass
    code = build()
    _store(path, code)
    return code


def _store(path: Path, code: bytes) -> None:
    # Renamed into place whole: several processes may compile the same kernel at once.
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, suffix=".tmp")
        with os.fdopen(handle, "wb") as file:
            file.write(code)
        Path(temporary).replace(path)
    except OSError:
        return
