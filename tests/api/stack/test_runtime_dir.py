"""The folder of a stack's sockets: who could replace it."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from slipstream.client.endpoints import default_runtime_dir
from slipstream.stack.runtime_dir import RuntimeDirectory


@pytest.fixture
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What $XDG_RUNTIME_DIR names."""
    folder = tmp_path / "base"
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(folder))
    return folder


@pytest.mark.parametrize("value", ["", "run", "./run"])
def test_a_folder_that_is_not_absolute_is_none(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    default = default_runtime_dir()
    assert default.is_absolute()
    monkeypatch.setenv("XDG_RUNTIME_DIR", value)
    assert default_runtime_dir() == default


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o077])
def test_all_that_is_made_is_private(base: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        with RuntimeDirectory(default_runtime_dir()) as made:
            folders = (base, made.path.parent, made.path)
            assert [stat.S_IMODE(folder.stat().st_mode) for folder in folders] == [0o700] * 3
    finally:
        os.umask(before)


@pytest.mark.parametrize("name", ["default", "route"])
@pytest.mark.parametrize("mode", [0o777, 0o770, 0o1777, 0o755, 0o701])
def test_a_parent_that_others_may_enter_is_refused(base: Path, name: str, mode: int) -> None:
    parent = default_runtime_dir().parent
    parent.mkdir(parents=True)
    parent.chmod(mode)
    with (
        pytest.raises(PermissionError, match=f"mode is {mode & 0o777:04o}|mode is {mode:04o}"),
        RuntimeDirectory(parent / name),
    ):
        pytest.fail("it was taken")
    assert list(parent.iterdir()) == []


@pytest.mark.parametrize(("mode", "is_safe"), [(0o777, False), (0o770, False), (0o1777, True)])
def test_others_may_not_rename_the_parent(base: Path, mode: int, is_safe: bool) -> None:
    base.mkdir()
    base.chmod(mode)
    runtime = RuntimeDirectory(default_runtime_dir())
    if is_safe:
        with runtime:
            return
    with pytest.raises(PermissionError, match="others may rename"), runtime:
        pytest.fail("it was taken")


@pytest.mark.parametrize("which", ["base", "parent"])
@pytest.mark.skipif(os.getuid() != 0, reason="gives a folder to another user")
def test_a_parent_of_somebody_else_is_refused(base: Path, which: str) -> None:
    parent = default_runtime_dir().parent
    parent.mkdir(parents=True, mode=0o700)
    folder = base if which == "base" else parent
    folder.chmod(0o700)
    os.chown(folder, 65534, -1)
    with (
        pytest.raises(PermissionError, match="belongs to user 65534"),
        RuntimeDirectory(default_runtime_dir()),
    ):
        pytest.fail("it was taken")


def test_a_folder_that_a_user_chose_is_the_users_concern(base: Path) -> None:
    base.mkdir()
    base.chmod(0o777)
    with RuntimeDirectory(base / "mine"):
        pass


def test_what_a_core_left_for_its_successor_goes_with_the_stack(tmp_path: Path) -> None:
    with RuntimeDirectory(tmp_path / "run") as made:
        (made.path / "adapters").touch()
        (made.path / "core-in-flight").touch()
    assert not (tmp_path / "run").exists()
