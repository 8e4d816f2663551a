"""Tells of a model's file that is not what its name says: empty, or a pointer in its place."""

from __future__ import annotations

from pathlib import Path

_LFS = b"version https://git-lfs.github.com/spec/"


class DamagedFileError(ValueError):
    """A file of a model cannot be used as it is; the message names it and says why."""

    def __init__(self, file: Path, problem: str) -> None:
        super().__init__(f"{file.name} {problem}")
        self.file = file


def refuse_placeholder(file: Path) -> None:
    """Raise DamagedFileError for a file that is empty or a pointer of Git LFS; OSError."""
    with file.open("rb") as opened:
        begin = opened.read(len(_LFS))
    if not begin:
        raise DamagedFileError(file, "is empty; fetch it again")
    if begin == _LFS:
        raise DamagedFileError(
            file, "is a pointer of Git LFS and not the file itself; fetch it with `git lfs pull`"
        )
