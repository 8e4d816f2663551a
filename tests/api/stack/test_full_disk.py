"""A stack whose runtime directory cannot be written says so in one line, whoever finds out."""

from __future__ import annotations

import errno
import subprocess
import sys
from pathlib import Path

import pytest

from slipstream.stack.runtime_dir import RuntimeDirectory

_MOUNTS = subprocess.run(["unshare", "-rm", "true"], capture_output=True, check=False)
_FILES = 20  # of the file system; some are taken by its root, the folder and the lock
needs_mounts = pytest.mark.skipif(_MOUNTS.returncode != 0, reason="no mount namespaces here")


def serve_on_a_small_disk(folder: Path, *, fill: str, then: str = "true") -> tuple[str, str]:
    """What `slipstream serve` says of a tmpfs of 16 KiB that `fill` has filled; and what it prints,
    with what `then` prints afterwards.
    """
    script = (
        f"mount -t tmpfs -o size=16k,nr_inodes={_FILES} tmpfs {folder} && cd {folder} && "
        f"mkdir -m 700 run && {fill} && cd / && "
        f"{{ {sys.executable} -m slipstream.cli.main serve simulated: --http-port 0 "
        f"--runtime-dir {folder}/run; code=$?; {then}; exit $code; }}"
    )
    done = subprocess.run(
        ["unshare", "-rm", "sh", "-c", script],
        capture_output=True,
        text=True,
        check=False,
        env={"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "SLIPSTREAM_LOG_LEVEL": "ERROR"},
    )
    assert done.returncode == 1, done.stdout + done.stderr
    return done.stderr, done.stdout


@needs_mounts
def test_a_full_disk_is_told_by_the_supervisor(tmp_path: Path) -> None:
    fill = "! cat /dev/zero > filled 2> /dev/null"
    said, left = serve_on_a_small_disk(tmp_path, fill=fill, then=f"ls -A {tmp_path}/run")
    assert left == "", "a file in the folder that it was refused"
    assert said == (
        f"slipstream serve: runtime directory {tmp_path}/run cannot be written (No space left on "
        "device): free space there, or choose another --runtime-dir\n"
    )


@needs_mounts
@pytest.mark.process
@pytest.mark.parametrize("num_files", [15, 16, 17])
def test_a_disk_without_files_left_is_told_by_the_process_that_needs_one(
    tmp_path: Path, num_files: int
) -> None:
    said, _ = serve_on_a_small_disk(tmp_path, fill=f"touch $(seq {num_files})")
    *_, line = said.splitlines()  # a core says before that it keeps no note
    assert line.startswith("slipstream serve: ")
    assert f"cannot start in {tmp_path}/run: " in line
    assert "No space left on device" in line


@needs_mounts
def test_a_folder_on_a_disk_that_is_read_only_is_not_to_be_emptied(tmp_path: Path) -> None:
    read_only = f"mount -o remount,ro {tmp_path}"
    said, _ = serve_on_a_small_disk(tmp_path, fill=read_only)
    assert said == (
        f"slipstream serve: runtime directory {tmp_path}/run cannot be written (Read-only file "
        "system): choose another --runtime-dir\n"
    )


@pytest.mark.parametrize(
    ("folder", "why"),
    [("{tmp_path}/file/run", "Not a directory"), ("/proc/nope", "No such file or directory")],
)
def test_a_folder_that_cannot_be_made_is_told(tmp_path: Path, folder: str, why: str) -> None:
    (tmp_path / "file").touch()
    path = Path(folder.format(tmp_path=tmp_path))
    with (
        pytest.raises(OSError, match=rf"cannot be made \({why}\): choose another runtime_dir$"),
        RuntimeDirectory(path),
    ):
        pass


def test_a_folder_in_one_of_another_user_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(path: Path, **_: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(Path, "mkdir", refused)  # these tests may be root's
    with (
        pytest.raises(OSError, match=r"cannot be made \(Permission denied\): choose another"),
        RuntimeDirectory(tmp_path / "run"),
    ):
        pass
