"""A small disk for a stack's folders that can be filled: a tmpfs under a folder."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

_SIZE = "64m"
_BLOCK = bytes(2**16)


class Volume:
    """Runtime folder and cache of a stack, on a disk of 64 MiB."""

    def __init__(self, folder: Path) -> None:
        self.runtime_dir = folder / "run"
        self.cache = folder / "cache"
        self.runtime_dir.mkdir(mode=0o700)
        self.cache.mkdir(mode=0o700)
        self._filler = folder / "filler"

    def fill(self) -> None:
        """Fill the disk completely."""
        with self._filler.open("ab", buffering=0) as file, contextlib.suppress(OSError):
            while True:
                file.write(_BLOCK)

    def empty(self) -> None:
        """Free the space. Idempotent."""
        self._filler.unlink(missing_ok=True)


@contextlib.contextmanager
def mounted(folder: Path) -> Iterator[Volume | str]:
    """Mount such a disk at `folder`, with XDG_CACHE_HOME set to its cache; yields the reason
    instead if mounting is not permitted.
    """
    folder.mkdir()
    options = f"size={_SIZE},mode=700"
    command = ["mount", "-t", "tmpfs", "-o", options, "slipstream-chaos", str(folder)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        refusal = done.stderr.strip() if done.returncode else ""
    except OSError as error:
        refusal = str(error)
    if refusal:
        yield refusal
        return
    before = os.environ.get("XDG_CACHE_HOME")
    try:
        volume = Volume(folder)
        os.environ["XDG_CACHE_HOME"] = str(volume.cache)
        yield volume
    finally:
        if before is None:
            os.environ.pop("XDG_CACHE_HOME", None)
        else:
            os.environ["XDG_CACHE_HOME"] = before
        command = ["umount", "--lazy", str(folder)]
        subprocess.run(command, check=False)
