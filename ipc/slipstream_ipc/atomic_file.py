"""Files that appear whole or not at all, whatever dies meanwhile: process, machine or disk."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

__all__ = ["write_atomically"]


def write_atomically(path: Path, content: bytes, *, mode: int = 0o600) -> None:
    """Put `content` at `path`: written beside it, synced, moved there. Raises OSError.

    The temporary name is each writer's own: two processes may write the same file at once. Without
    the sync a machine that loses its power may keep the move and not the content.
    """
    handle, name = tempfile.mkstemp(prefix=path.name, suffix=".part", dir=path.parent)
    temporary = Path(name)
    try:
        with os.fdopen(handle, "wb") as file:
            os.fchmod(handle, mode)
            file.write(content)
            file.flush()
            os.fsync(handle)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
