"""The folder a stack's sockets lie in, held by one stack at a time.

Owns: the lock, and the removal of what the stack leaves there. Does not know: who uses the
sockets.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
from pathlib import Path
from types import TracebackType

from slipstream_ipc.transport.sockets import private_directory

LOCK_NAME = "supervisor.lock"
_NOTE_NAME = "core-in-flight"  # what one core leaves for the next one of the same stack


class RuntimeDirectoryInUse(Exception):  # noqa: N818  (says what is the case, as its text does)
    """Another stack runs in the folder."""


class RuntimeDirectory:
    """A context manager: inside it the folder exists and belongs to this stack alone.

    Sockets and notes that an earlier stack left behind are removed at the start, our own at the
    end, and the folder too where it was made here.

    Raises: RuntimeDirectoryInUse; PermissionError where others may enter the folder, OSError where
    it cannot be written.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._is_ours = False
        self._lock_fd = -1

    def __enter__(self) -> RuntimeDirectory:
        try:
            self._is_ours = not self.path.exists()
            private_directory(self.path)
            while self._lock_fd < 0:
                self._lock_fd = _lock(self.path / LOCK_NAME)
            self._remove_traces()
        except PermissionError:
            raise  # it says what is allowed
        except OSError as error:
            raise OSError(
                f"runtime directory {self.path} cannot be written ({error.strerror}): make room "
                "there, or give another one (runtime_dir)"
            ) from error
        return self

    def __exit__(
        self,
        _type: type[BaseException] | None,
        _error: BaseException | None,
        _traceback: TracebackType | None,
    ) -> None:
        self._remove_traces()
        (self.path / LOCK_NAME).unlink(missing_ok=True)  # before the lock goes: see _lock
        os.close(self._lock_fd)
        if self._is_ours:
            with contextlib.suppress(OSError):  # somebody put something of theirs there: leave it
                self.path.rmdir()

    def _remove_traces(self) -> None:
        (self.path / _NOTE_NAME).unlink(missing_ok=True)
        for path in self.path.iterdir():
            with contextlib.suppress(FileNotFoundError):  # its own process may be faster
                if stat.S_ISSOCK(path.lstat().st_mode):
                    path.unlink()


def remove_traces(path: Path) -> None:
    """What a stack has left in its folder that could not do so itself; not where another runs."""
    if path.is_dir():
        with contextlib.suppress(RuntimeDirectoryInUse, OSError), RuntimeDirectory(path):
            pass


def _lock(path: Path) -> int:
    """A descriptor that holds the lock, or -1 where the file vanished under us: try again."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        owner = os.read(fd, 32).decode(errors="replace") or "unknown"
        os.close(fd)
        message = (
            f"runtime directory {path.parent} is in use by another stack (its supervisor is "
            f"process {owner}): stop that one, or give this one a folder of its own"
        )
        raise RuntimeDirectoryInUse(message) from None
    with contextlib.suppress(FileNotFoundError):
        if os.stat(path).st_ino == os.fstat(fd).st_ino:
            os.ftruncate(fd, 0)
            os.write(fd, str(os.getpid()).encode())
            return fd
    os.close(fd)
    return -1
