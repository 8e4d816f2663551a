"""Files that appear whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from slipstream_ipc.atomic_file import write_atomically


def test_what_is_there_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "file"
    for content in (b"one", b"", b"another" * 100_000):
        write_atomically(path, content, mode=0o700)
        assert path.read_bytes() == content
        assert path.stat().st_mode & 0o777 == 0o700
        assert list(tmp_path.iterdir()) == [path]


def test_content_is_on_the_disk_before_the_file_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A move that outlives a loss of power must not outlive what was moved."""
    path, order = tmp_path / "file", []
    sync, replace = os.fsync, Path.replace

    def synced(handle: int) -> None:
        order.append(("sync", os.fstat(handle).st_ino, os.fstat(handle).st_size))
        sync(handle)

    def replaced(self: Path, target: Any) -> Path:
        order.append(("move", self.stat().st_ino, self.stat().st_size))
        return replace(self, target)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(Path, "replace", replaced)
    write_atomically(path, b"content")
    written = (path.stat().st_ino, len(b"content"))
    assert order == [("sync", *written), ("move", *written)]


@pytest.mark.parametrize("step", ["fsync", "fchmod"])
def test_a_write_that_fails_leaves_what_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    path = tmp_path / "file"
    write_atomically(path, b"old")

    def fail(*_: object) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(os, step, fail)
    with pytest.raises(OSError, match="no space"):
        write_atomically(path, b"new")
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]
