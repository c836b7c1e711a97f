"""The disk cache: what is loaded, what is built again, what is left behind, and what is said of a cache without use."""

from __future__ import annotations

import errno
import os
import sys
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from lightning_indexer import artifacts, envs
from lightning_indexer.artifacts import CacheError, get_or_build, get_or_decode, required

CODE = b"\x7fELF" + bytes(range(256)) * 8
posix = pytest.mark.skipif(not hasattr(os, "geteuid"), reason="owners and modes are POSIX's")


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    path = tmp_path / "cache"
    monkeypatch.setenv("LIGHTNING_INDEXER_CACHE_DIR", str(path))
    monkeypatch.setattr(artifacts, "_warned", set())
    return path


class Compiler:
    def __init__(self, code: bytes = CODE) -> None:
        self.code, self.runs = code, 0

    def __call__(self) -> bytes:
        self.runs += 1
        return self.code


def stored(folder: Path, key: str = "key") -> Path:
    assert get_or_build((key,), ".cubin", Compiler()) == CODE
    [path] = folder.glob("*.cubin")
    return path


def silently(key: str = "key") -> int:
    """How often a kernel is compiled that is asked for twice, with no warning."""
    compiler = Compiler()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            assert get_or_build((key,), ".cubin", compiler) == CODE
    return compiler.runs


def complaint(key: str = "key", *, times: int = 3) -> str:
    """The one warning of several calls, each of which compiled."""
    compiler = Compiler()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(times):
            assert get_or_build((key,), ".cubin", compiler) == CODE
    assert compiler.runs == times
    [warning] = caught
    return str(warning.message)


def test_what_is_stored_is_found(folder):
    assert silently() == 1
    assert silently("other") == 1
    assert len(list(folder.iterdir())) == 2
    path = min(folder.iterdir())
    assert path.read_bytes().startswith(CODE), "tools that read ELF files read it"


@pytest.mark.parametrize(
    "spoil",
    [
        lambda path, data: path.write_bytes(b""),
        lambda path, data: path.write_bytes(data[:100]),
        lambda path, data: path.write_bytes(data[:-1]),
        lambda path, data: path.write_bytes(data + b"\0"),
        lambda path, data: path.write_bytes(data[:40] + b"\xff" + data[41:]),
        lambda path, data: path.write_bytes(CODE),
        lambda path, data: path.write_bytes(b"a text of somebody else\n" * 100),
    ],
    ids=["empty", "truncated", "a byte short", "a byte more", "one byte changed", "no footer", "foreign"],
)
def test_what_is_not_what_was_stored_is_built_again_and_replaced(folder, spoil):
    path = stored(folder)
    spoil(path, path.read_bytes())
    compiler = Compiler()
    with pytest.warns(RuntimeWarning, match="is not what was stored there; it is compiled again") as caught:
        assert get_or_build(("key",), ".cubin", compiler) == CODE
    assert str(path) in str(caught[0].message)
    assert compiler.runs == 1
    assert get_or_build(("key",), ".cubin", compiler) == CODE
    assert compiler.runs == 1, "replaced"


def test_a_kernel_under_the_name_of_another_is_not_taken(folder):
    path = stored(folder)
    assert get_or_build(("other",), ".cubin", Compiler(b"other code")) == b"other code"
    [other] = set(folder.glob("*.cubin")) - {path}
    other.replace(path)
    with pytest.warns(RuntimeWarning, match="is not what was stored"):
        assert get_or_build(("key",), ".cubin", Compiler()) == CODE


@posix
@pytest.mark.parametrize("kind", ["folder", "pipe", "link to nothing"])
def test_what_is_not_a_file_costs_time(folder, kind):
    path = stored(folder)
    path.unlink()
    if kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to(folder / "none")
    compiler = Compiler()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert get_or_build(("key",), ".cubin", compiler) == CODE
    assert compiler.runs == 1


def test_what_cannot_be_decoded_is_built_again(folder):
    assert get_or_decode(("key",), ".amd", lambda: b"7", int) == 7
    path = next(folder.iterdir())
    footer = path.read_bytes()[1:]

    def decode(data: bytes) -> int:
        if data == b"7":
            raise KeyError("written by another version")
        return int(data)

    with pytest.warns(RuntimeWarning, match="cannot be decoded"):
        assert get_or_decode(("key",), ".amd", lambda: b"8", decode) == 8
    assert get_or_decode(("key",), ".amd", lambda: b"9", decode) == 8
    assert path.read_bytes()[1:] != footer


# What goes wrong while storing


def no_space(*_: object) -> int:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("where", ["write", "rename"])
def test_a_full_disk_leaves_nothing_and_is_said_once(folder, monkeypatch, where):
    if where == "write":
        real = os.fdopen

        class Full:
            def __init__(self, file):
                self.file = file

            def __enter__(self):
                return self

            def __exit__(self, *_):
                self.file.close()

            def write(self, data):
                self.file.write(data[: len(data) // 2])
                no_space()

        monkeypatch.setattr(os, "fdopen", lambda handle, mode: Full(real(handle, mode)))
    else:
        monkeypatch.setattr(Path, "replace", no_space)
    message = complaint()
    assert str(folder) in message
    assert "No space left on device" in message
    assert "LIGHTNING_INDEXER_CACHE_DIR" in message
    assert list(folder.iterdir()) == []


def test_an_interrupt_leaves_nothing(folder, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        get_or_build(("key",), ".cubin", Compiler())
    assert list(folder.iterdir()) == []


def test_a_folder_that_cannot_be_made_is_said_once(tmp_path, folder, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("LIGHTNING_INDEXER_CACHE_DIR", str(tmp_path / "file" / "cache"))
    assert str(tmp_path / "file" / "cache") in complaint()


@posix
@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o002, 0o644), (0o000, 0o644), (0o077, 0o600)])
def test_files_are_readable_by_whom_the_umask_allows(folder, umask, mode):
    before = os.umask(umask)
    try:
        path = stored(folder)
    finally:
        os.umask(before)
    assert path.stat().st_mode & 0o777 == mode
    assert folder.stat().st_mode & 0o777 == 0o755 & ~umask
    assert silently() == 0, "what this user stores is loaded, whatever the umask"


# No folder


def test_no_home_costs_time_and_one_warning(monkeypatch):
    for name in ("HOME", "XDG_CACHE_HOME", "LIGHTNING_INDEXER_CACHE_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(artifacts, "_warned", set())
    if sys.platform != "win32":
        import pwd

        monkeypatch.setattr(pwd, "getpwuid", lambda uid: {}[uid])  # KeyError, as for a user that is not listed
    assert envs.cache_dir() is None
    message = complaint()
    assert "no home directory" in message
    assert "LIGHTNING_INDEXER_CACHE_DIR" in message
    with required(), pytest.raises(CacheError, match="LIGHTNING_INDEXER_CACHE_DIR"):
        get_or_build(("key",), ".cubin", Compiler())
    monkeypatch.setenv("LIGHTNING_INDEXER_CACHE_DIR", "~no-such-user/kernels")
    assert envs.cache_dir() is None


# Who may have written it


def owned_by(monkeypatch, user: int) -> None:
    """As if another user were running: what is on disk belongs to someone else."""
    monkeypatch.setattr(os, "geteuid", lambda: user)


@posix
@pytest.mark.parametrize("mode", [0o777, 0o775, 0o757])
def test_a_folder_that_others_may_write_to_is_not_used(folder, mode, monkeypatch):
    path = stored(folder)
    folder.chmod(mode)
    message = complaint()
    assert f"chmod go-w {folder}" in message
    assert "LIGHTNING_INDEXER_TRUST_CACHE=1" in message
    monkeypatch.setenv("LIGHTNING_INDEXER_TRUST_CACHE", "1")
    assert silently() == 0
    assert [*folder.iterdir()] == [path]


@posix
def test_a_file_that_others_may_write_to_is_not_loaded(folder, monkeypatch):
    path = stored(folder)
    path.chmod(0o664)
    assert f"chmod go-w {path}" in complaint()
    monkeypatch.setenv("LIGHTNING_INDEXER_TRUST_CACHE", "1")
    assert silently() == 0


@posix
def test_a_folder_of_another_user_is_not_used(folder, monkeypatch):
    real, user = os.fstat, os.geteuid() + 1000
    stored(folder)

    def of_a_stranger(descriptor: int) -> os.stat_result:
        facts = list(real(descriptor))
        facts[4] = user + 1
        return os.stat_result(facts)

    monkeypatch.setattr(artifacts.os, "fstat", of_a_stranger)
    owned_by(monkeypatch, user)
    message = complaint()
    assert f"{folder} belongs to user {user + 1}, this is user {user}" in message
    monkeypatch.setenv("LIGHTNING_INDEXER_TRUST_CACHE", "1")
    assert silently() == 0


@posix
def test_in_a_sticky_folder_only_a_plain_file_of_ones_own_is_loaded(folder, tmp_path):
    path = stored(folder)
    folder.chmod(0o1777)
    assert silently() == 0
    (tmp_path / "second name").hardlink_to(path)
    assert "has 2 names in a folder that anybody may write to" in complaint()
    (tmp_path / "second name").unlink()
    moved = path.rename(tmp_path / "moved")
    path.symlink_to(moved)
    artifacts._warned.clear()
    assert str(folder) in complaint()


@posix
def test_a_file_of_another_user_in_a_sticky_folder_is_not_loaded(folder, monkeypatch):
    stored(folder)
    folder.chmod(0o1777)
    real, calls = os.fstat, []

    def file_of_a_stranger(descriptor: int) -> os.stat_result:
        calls.append(descriptor)
        facts = list(real(descriptor))
        if not os.path.isdir(f"/proc/self/fd/{descriptor}"):  # noqa: PTH112
            facts[4] = 4321
        return os.stat_result(facts)

    monkeypatch.setattr(artifacts.os, "fstat", file_of_a_stranger)
    assert "belongs to user 4321" in complaint()
    assert calls


# Where it has to be on disk


def test_required_reads_back_what_was_stored(folder, monkeypatch):
    with required():
        assert get_or_build(("key",), ".cubin", Compiler()) == CODE
    real = Path.replace

    def half(self, target):
        self.write_bytes(self.read_bytes()[:-7])
        return real(self, target)

    monkeypatch.setattr(Path, "replace", half)
    with (
        required(),
        pytest.warns(RuntimeWarning, match="is not what was stored"),
        pytest.raises(CacheError, match="does not hold what was just written"),
    ):
        get_or_build(("other",), ".cubin", Compiler())
    monkeypatch.setattr(Path, "replace", no_space)
    with required(), pytest.raises(CacheError, match="No space left on device"):
        get_or_build(("third",), ".cubin", Compiler())
    assert not artifacts.is_required()


def test_writers_at_once_leave_one_whole_file(folder):
    def write(_: int) -> bytes:
        artifacts._store(folder, "kernel", CODE, bytes(32))
        found = artifacts._load(folder, "kernel", bytes(32))
        assert found is not None
        return found

    with ThreadPoolExecutor(8) as pool:
        assert set(pool.map(write, range(400))) == {CODE}
    assert [path.name for path in folder.iterdir()] == ["kernel"]
