"""Which packages are there, asked without importing one and without raising; and the files of this one."""

from __future__ import annotations

import contextlib
import importlib.resources
import importlib.util
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any


def installed(name: str) -> bool:
    """Whether a module can be found, its file read, and that is all: no code of its packages runs.

    Args:
        name: dotted or not. A folder of that name without code counts for the outermost package alone, where another
            one is named inside of it.
    """
    first, *others = name.split(".")
    try:
        spec = importlib.util.find_spec(first)
    except Exception:  # a finder's own, or ValueError: a module was put into sys.modules without a spec
        return getattr(sys.modules.get(name), "__file__", None) is not None
    for count in range(2, len(others) + 2):
        if spec is None or spec.submodule_search_locations is None:
            return False
        spec = _inside(".".join([first, *others][:count]), spec.submodule_search_locations)
    return spec is not None and spec.origin is not None


def folders(name: str) -> list[Path]:
    """Where a package's files are, empty if it is not there."""
    try:
        spec = importlib.util.find_spec(name)
        return [Path(place) for place in spec.submodule_search_locations or ()] if spec is not None else []
    except Exception:  # as above
        return []


def version(distribution: str) -> str:
    """Of an installed distribution; empty where it has no metadata."""
    try:
        return metadata.version(distribution) or ""
    except Exception:  # PackageNotFoundError, or metadata that cannot be read
        return ""


def _inside(name: str, places: Any) -> Any:
    for finder in sys.meta_path:
        with contextlib.suppress(Exception):
            if (spec := finder.find_spec(name, places)) is not None:
                return spec
    return None


@dataclass(frozen=True, slots=True)
class PackedFile:
    """A file of a package that lies in no folder, but e.g. in a zip archive."""

    package: str
    name: str

    def files(self) -> dict[str, bytes]:
        """Every file beside it, and itself."""
        folder = importlib.resources.files(self.package)
        return {file.name: file.read_bytes() for file in folder.iterdir() if file.is_file()}


Source = Path | PackedFile


def beside(module: str, name: str) -> Source:
    """The file ``name`` in the folder of a module, ``__name__`` of the caller."""
    package = module.rpartition(".")[0]
    folder = importlib.resources.files(package)
    return folder / name if isinstance(folder, Path) else PackedFile(package, name)


def contents(source: Source, *endings: str) -> dict[str, bytes]:
    """A source and the files beside it that end so, by name, in order."""
    if isinstance(source, PackedFile):
        found = source.files()
    else:
        found = {path.name: path.read_bytes() for path in source.parent.iterdir() if path.name.endswith(endings)}
        found[source.name] = source.read_bytes()
    return {name: data for name, data in sorted(found.items()) if name.endswith(endings) or name == source.name}


@contextlib.contextmanager
def on_disk(source: Source, *endings: str) -> Iterator[Path]:
    """The source as a file with its neighbours beside it, for a compiler."""
    if isinstance(source, Path):
        yield source
        return
    with tempfile.TemporaryDirectory(prefix="lightning-indexer-") as folder:
        for name, data in contents(source, *endings).items():
            Path(folder, name).write_bytes(data)
        yield Path(folder, source.name)
