"""The runtime directory, which holds a stack's sockets and is locked by one stack at a time."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import secrets
import stat
import tempfile
import time
from pathlib import Path

from slipstream.client.endpoints import LOCK_NAME, default_runtime_dir
from slipstream_ipc.cache_folder import user_cache
from slipstream_ipc.transport.addresses import check_unmovable
from slipstream_ipc.transport.sockets import private_directory

_NOTES = "core-in-flight", "adapters"  # a core's, to its successor in the same stack


class RuntimeDirectoryInUseError(Exception):
    """Another stack runs in the folder."""


class RuntimeDirectory:
    """A context manager within which the folder exists and is locked by this stack.

    Sockets and notes of an earlier stack are removed at the start. At the end those of this stack
    are removed, and the folder itself where it was made here.

    The folders above a default one are checked as well: who could rename them could replace it.

    Raises: RuntimeDirectoryInUseError; PermissionError where other users may access the folder;
    OSError where it cannot be written.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._is_ours = False
        self._lock_fd = -1

    def __enter__(self) -> RuntimeDirectory:
        what = "made"
        try:
            self._is_ours = not self.path.exists()
            if self.path.parent == default_runtime_dir().parent:  # the path is our choice
                private_directory(self.path.parent)
                check_unmovable(self.path.parent.parent)
            private_directory(self.path)
            what = "written"
            while self._lock_fd < 0:
                self._lock_fd = _lock(self.path / LOCK_NAME)
            self._remove_leftovers()
        except OSError as error:
            if error.errno is None:
                raise  # from `private_directory`: its message says what is allowed
            self._remove_folder()
            is_full = error.errno in (errno.ENOSPC, errno.EDQUOT)
            advice = "free space there, or choose another" if is_full else "choose another"
            raise OSError(
                f"runtime directory {self.path} cannot be {what} ({error.strerror}): {advice} "
                "runtime_dir"
            ) from error
        return self

    def __exit__(self, *_: object) -> None:
        self._remove_leftovers()
        (self.path / LOCK_NAME).unlink(missing_ok=True)  # before the lock is released: see _lock
        os.close(self._lock_fd)
        self._remove_folder()

    def _remove_folder(self) -> None:
        if self._is_ours:
            with contextlib.suppress(OSError):  # not empty: foreign files are left alone
                self.path.rmdir()

    def _remove_leftovers(self) -> None:
        for name in _NOTES:
            (self.path / name).unlink(missing_ok=True)
        for path in self.path.iterdir():
            with contextlib.suppress(FileNotFoundError):  # removed by its process meanwhile
                if stat.S_ISSOCK(path.lstat().st_mode):
                    path.unlink()


def cache_dir(runtime_dir: Path) -> Path:
    """The folder where compiled token tables are cached; made here.

    Containers often have no home, or one that is not writable: then the cache is a folder beside
    the sockets, and tables are compiled again in each new runtime directory.
    """
    try:
        folder = user_cache()
        folder.mkdir(parents=True, exist_ok=True)
        if os.access(folder, os.W_OK | os.X_OK):
            return folder
    except (OSError, RuntimeError):  # RuntimeError: the user has no home
        pass
    return runtime_dir / "cache"


def remove_leftovers(path: Path) -> None:
    """Clean up after a stack that was killed; does nothing where another stack runs."""
    if path.is_dir():
        with contextlib.suppress(RuntimeDirectoryInUseError, OSError), RuntimeDirectory(path):
            pass


def _is_locked_by(fd: int) -> bool:
    """True if this descriptor acquires the lock. It is tried for a moment, as a command that asks
    which process holds the lock takes it for microseconds.
    """
    for pause_s in (0.01, 0.1, 0.0):
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        time.sleep(pause_s)
    return False


def _lock(path: Path) -> int:
    """A descriptor that holds the lock; -1 where the file was removed meanwhile: try again.

    Raises: RuntimeDirectoryInUseError.
    """
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    if not _is_locked_by(fd):
        owner = os.read(fd, 32).decode(errors="replace") or "unknown"
        os.close(fd)
        message = (
            f"runtime directory {path.parent} is in use by another stack (its supervisor is "
            f"process {owner}): stop that stack, or give this one another runtime_dir (and "
            "http_port)"
        )
        raise RuntimeDirectoryInUseError(message)
    with contextlib.suppress(FileNotFoundError):
        if os.stat(path).st_ino == os.fstat(fd).st_ino:
            os.ftruncate(fd, 0)
            try:
                os.write(fd, str(os.getpid()).encode())
            except OSError:
                path.unlink()
                os.close(fd)
                raise
            return fd
    os.close(fd)
    return -1


def new_runtime_dir() -> Path:
    """The path of a folder that no other stack has; its supervisor makes it."""
    return Path(tempfile.gettempdir()) / f"slipstream-{secrets.token_hex(6)}"
