"""Compiled code on disk, keyed by everything that went into it, and validated when it is loaded.

``LIGHTNING_INDEXER_CACHE_DIR`` says where. Default: ``$XDG_CACHE_HOME/lightning-indexer``, or
``~/.cache/lightning-indexer``. A file is the code followed by a footer: what it is, its key, its length and its
SHA-256. A file that is not exactly this, whatever it holds, is compiled again and replaced.

What is loaded here runs, so nothing is loaded that another user may have written: folder and file belong to this user
or to root, and only their owner may write them, unless ``LIGHTNING_INDEXER_TRUST_CACHE=1``. In a folder like /tmp,
where anybody may add files and only their owner may move them, the file has to be a plain one of this user or root.

A cache that cannot be used costs time and one warning.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import secrets
import stat
import struct
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar
from pathlib import Path
from typing import NamedTuple, TypeVar

from lightning_indexer import envs

T = TypeVar("T")

_MAGIC = b"lightning-index1"
_FOOTER = struct.Struct("<16s32sQ32s")  # magic, SHA-256 of the key, bytes of code, SHA-256 of the code
_VARIABLE = "LIGHTNING_INDEXER_CACHE_DIR"


class CompileError(RuntimeError):
    """A compiler refused its input or is not installed; the message holds what it said and what to do."""


class CacheError(RuntimeError):
    """Code had to be kept on disk, see :func:`required`, and is not; the message names the folder and the reason."""


class _Unusable(Exception):  # noqa: N818
    """Why a folder, or a file in it, is neither read nor written."""


def get_or_build(parts: tuple[str | bytes, ...], suffix: str, build: Callable[[], bytes]) -> bytes:
    """The stored bytes of ``parts``, else ``build()``, stored for the next process."""
    return get_or_decode(parts, suffix, build, bytes)


def get_or_decode(
    parts: tuple[str | bytes, ...], suffix: str, build: Callable[[], bytes], decode: Callable[[bytes], T]
) -> T:
    """As :func:`get_or_build`, decoded; stored bytes that ``decode`` does not take are built again.

    Raises:
        CacheError: the code is not on disk afterwards, inside :func:`required` alone.
    """
    digest = _digest(parts)
    name = f"{digest.hex()[:40]}{suffix}"
    folder = envs.cache_dir()
    if folder is None:
        _complain(None, f"no home directory and no {_VARIABLE} say where to keep compiled kernels")
        return decode(build())
    try:
        found = _load(folder, name, digest)
        if found is not None:
            with contextlib.suppress(Exception):  # of whatever type: the file is not what this version writes
                return decode(found)
            _warn((folder, "bad"), f"{folder / name} cannot be decoded; it is compiled again and replaced")
    except _Unusable as reason:
        _complain(folder, str(reason))
        return decode(build())
    code = build()
    try:
        _store(folder, name, code, digest)
        if _required.get() and _load(folder, name, digest) != code:
            raise _Unusable(f"{name} does not hold what was just written")
    except _Unusable as reason:
        _complain(folder, str(reason))
    return decode(code)


@contextlib.contextmanager
def required() -> Iterator[None]:
    """Inside, code that cannot be kept on disk and read back is an error: what runs later counts on finding it."""
    token = _required.set(True)
    try:
        yield
    finally:
        _required.reset(token)


def is_required() -> bool:
    """True inside :func:`required`."""
    return _required.get()


_required: ContextVar[bool] = ContextVar("required", default=False)


class Entry(NamedTuple):
    """A file of this library in the cache folder. ``kind``: how its name ends, ``.tmp`` where it is unfinished."""

    path: Path
    kind: str
    bytes: int
    modified: float


# What _store writes, and how it names what is not finished.
_NAME = re.compile(r"[0-9a-f]{40}(\.[a-z0-9]+)")
_TEMPORARY = re.compile(r"\.[0-9a-f]{40}\.[a-z0-9]+\.\d+\.[0-9a-f]{8}(\.tmp)")


def entries(folder: Path) -> list[Entry]:
    """The files in the folder whose names are this library's, by name; none where there is no folder.

    Raises:
        OSError: the folder cannot be read.
    """
    found = []
    for path in sorted(folder.iterdir()) if folder.exists() else ():
        match = _NAME.fullmatch(path.name) or _TEMPORARY.fullmatch(path.name)
        if match is not None and path.is_file():
            facts = path.stat()
            found.append(Entry(path, match[1], facts.st_size, facts.st_mtime))
    return found


def remove(some: Iterable[Entry]) -> list[tuple[Path, str]]:
    """Removes files of the cache; those that could not be, with the reason. A process that has loaded one keeps it."""
    failed = []
    for entry in some:
        try:
            entry.path.unlink(missing_ok=True)
        except OSError as error:
            failed.append((entry.path, error.strerror or str(error)))
    return failed


def _digest(parts: tuple[str | bytes, ...]) -> bytes:
    digest = hashlib.sha256()
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.digest()


def _load(folder: Path, name: str, key: bytes) -> bytes | None:
    """The code stored under a name; None if there is none, or if it is not what was stored.

    Raises:
        _Unusable: the folder cannot be read, or may not be trusted.
    """
    try:
        data = _read(folder, name)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise _Unusable(f"{error.filename or name}: {error.strerror}") from None
    if len(data) >= _FOOTER.size:
        magic, of_key, size, of_code = _FOOTER.unpack_from(data, len(data) - _FOOTER.size)
        code = data[: -_FOOTER.size]
        if (magic, of_key, size) == (_MAGIC, key, len(code)) and hashlib.sha256(code).digest() == of_code:
            return code
    _warn((folder, "bad"), f"{folder / name} is not what was stored there; it is compiled again and replaced")
    return None


def _read(folder: Path, name: str) -> bytes:
    if not hasattr(os, "geteuid"):  # not POSIX: rights are the folder's own
        return (folder / name).read_bytes()
    trusted = envs.trust_cache()
    # By descriptor: what was looked at is what is read. O_NONBLOCK: a pipe would wait for its writer.
    directory = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        place = os.fstat(directory)
        shared = bool(place.st_mode & 0o022)
        if not trusted:
            _check_owner(str(folder), place)
            if shared and not place.st_mode & stat.S_ISVTX:
                raise _Unusable(
                    f"other users may write to it (mode {stat.S_IMODE(place.st_mode):o}), {_untrusted(folder)}"
                )
        flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | (0 if trusted or not shared else os.O_NOFOLLOW)
        with os.fdopen(os.open(name, flags, dir_fd=directory), "rb") as file:
            facts = os.fstat(file.fileno())
            if not stat.S_ISREG(facts.st_mode):
                return b""
            if not trusted:
                path = folder / name
                _check_owner(str(path), facts)
                if facts.st_mode & 0o022:
                    raise _Unusable(f"other users may write to {path}, {_untrusted(path)}")
                if shared and facts.st_nlink != 1:  # a link that anybody made to another file of this user
                    raise _Unusable(f"{path} has {facts.st_nlink} names in a folder that anybody may write to")
            return file.read()
    finally:
        os.close(directory)


def _check_owner(path: str, facts: os.stat_result) -> None:
    if facts.st_uid not in (os.geteuid(), 0):
        raise _Unusable(
            f"{path} belongs to user {facts.st_uid}, this is user {os.geteuid()}, and machine code is loaded from it: "
            "LIGHTNING_INDEXER_TRUST_CACHE=1 trusts it"
        )


def _untrusted(path: Path) -> str:
    return f"and machine code is loaded from it: chmod go-w {path}, or LIGHTNING_INDEXER_TRUST_CACHE=1 trusts it"


def _store(folder: Path, name: str, code: bytes, key: bytes) -> None:
    """Renamed into place whole: several processes may compile the same kernel at once.

    Raises:
        _Unusable: nothing was stored, and nothing is left.
    """
    footer = _FOOTER.pack(_MAGIC, key, len(code), hashlib.sha256(code).digest())
    temporary = folder / f".{name}.{os.getpid()}.{secrets.token_hex(4)}.tmp"
    try:
        folder.mkdir(mode=0o755, parents=True, exist_ok=True)
        # Readable by whom the umask allows; writable by others never, or it would not be loaded again.
        handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0), 0o644)
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(code + footer)
            temporary.replace(folder / name)
        except BaseException:
            with contextlib.suppress(OSError):
                temporary.unlink()
            raise
    except OSError as error:
        raise _Unusable(f"it cannot be written: {error.strerror or error}") from None


def _complain(folder: Path | None, reason: str) -> None:
    """Says once for a folder why it is not used, or raises it where it has to be."""
    where = "" if folder is None else f" in {folder}"
    if _required.get():
        raise CacheError(f"nothing is kept{where}: {reason}; {_VARIABLE} names another folder")
    message = f"compiled kernels are not kept{where}: {reason}. Each process compiles them again; "
    _warn((folder, "unusable"), f"{message}{_VARIABLE} names another folder")


_warned: set[tuple[Path | None, str]] = set()


def _warn(key: tuple[Path | None, str], message: str) -> None:
    if key not in _warned:
        _warned.add(key)
        warnings.warn(message, RuntimeWarning, stacklevel=2)
