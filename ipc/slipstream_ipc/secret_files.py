"""Files that hold secrets, and who may read them."""

from __future__ import annotations

import os
import stat
from pathlib import Path

_ALLOWED = "the user's own, mode 0600, or root's, mode 0640"


def read_secret(path: Path) -> bytes:
    """The contents of a file. Raises: PermissionError where others may read it, OSError."""
    with path.open("rb") as file:
        check_secret(path, os.fstat(file.fileno()))
        return file.read()


def check_secret(path: Path, status: os.stat_result | None = None) -> None:
    """Raise PermissionError unless only its owner can read a file, or only root and a group.

    The group is for secrets that Kubernetes, systemd and Debian's `ssl-cert` give to one. Raises:
    OSError.
    """
    status = path.stat() if status is None else status
    forbidden = 0o077 if status.st_uid == os.getuid() else 0o037
    mode = stat.S_IMODE(status.st_mode)
    if status.st_uid not in (0, os.getuid()) or mode & forbidden:
        raise PermissionError(
            f"{path}: mode {mode:04o} of user {status.st_uid}; allowed: {_ALLOWED}: it holds a "
            "secret"
        )
