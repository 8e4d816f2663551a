"""A stack whose runtime directory cannot be written says so in one line, whoever finds out."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from slipstream.stack.runtime_dir import RuntimeDirectory

_MOUNTS = subprocess.run(["unshare", "-rm", "true"], capture_output=True, check=False)
_FILES = 20  # of the file system; some are taken by its root, the folder and the lock
needs_mounts = pytest.mark.skipif(_MOUNTS.returncode != 0, reason="no mount namespaces here")


def serve_on_a_small_disk(folder: Path, *, fill: str) -> str:
    """What `slipstream serve` says of a tmpfs of 16 KiB that `fill` has filled."""
    script = (
        f"mount -t tmpfs -o size=16k,nr_inodes={_FILES} tmpfs {folder} && cd {folder} && "
        f"mkdir -m 700 run && {fill} && cd / && "
        f"exec {sys.executable} -m slipstream.cli.main serve simulated: --http-port 0 "
        f"--runtime-dir {folder}/run"
    )
    done = subprocess.run(
        ["unshare", "-rm", "sh", "-c", script],
        capture_output=True,
        text=True,
        check=False,
        env={"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "SLIPSTREAM_LOG_LEVEL": "ERROR"},
    )
    assert done.returncode == 1, done.stdout + done.stderr
    return done.stderr


@needs_mounts
def test_a_full_disk_is_told_by_the_supervisor(tmp_path: Path) -> None:
    said = serve_on_a_small_disk(tmp_path, fill="! cat /dev/zero > filled 2> /dev/null")
    assert said == (
        f"slipstream serve: runtime directory {tmp_path}/run cannot be written (No space left on "
        "device): free space there, or choose another --runtime-dir\n"
    )


@needs_mounts
@pytest.mark.slow
@pytest.mark.parametrize("num_files", [15, 16, 17])
def test_a_disk_without_files_left_is_told_by_the_process_that_needs_one(
    tmp_path: Path, num_files: int
) -> None:
    said = serve_on_a_small_disk(tmp_path, fill=f"touch $(seq {num_files})")
    *_, line = said.splitlines()  # a core says before that it keeps no note
    assert line.startswith("slipstream serve: ")
    assert f"cannot start in {tmp_path}/run: " in line
    assert "No space left on device" in line


def test_a_folder_that_cannot_be_made_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with (
        pytest.raises(OSError, match=r"cannot be written \(Not a directory\): free space"),
        RuntimeDirectory(tmp_path / "file" / "run"),
    ):
        pass
