"""Writes files that appear complete or not at all, even if the process or the machine dies."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

__all__ = ["write_atomically"]


def write_atomically(
    path: Path, content: bytes, *, mode: int = 0o600, is_synced: bool = True
) -> None:
    """Write `content` to a temporary file beside `path`, sync it and move it there. Raises OSError.

    The temporary name is unique, so several processes may write the same file at once. Without the
    sync, a power failure could keep the move and lose the content: `is_synced` is False where the
    file is of no use after one.
    """
    handle, name = tempfile.mkstemp(prefix=path.name, suffix=".part", dir=path.parent)
    temporary = Path(name)
    try:
        with os.fdopen(handle, "wb") as file:
            os.fchmod(handle, mode)
            file.write(content)
            file.flush()
            if is_synced:
                os.fsync(handle)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
