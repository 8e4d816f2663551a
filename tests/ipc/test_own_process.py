"""Processes that a child runs itself: forks or programs, which start and end the same way."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

MODULE = """
import os, sys
from slipstream_ipc.process import report, run_child, start_child
from slipstream_ipc.messages import Status

def main():
    config, _ = start_child("own", dict)
    is_program = __name__ == "__main__"
    given = [each for each in ("SLIPSTREAM_CONTROL_FD", "SECRET") if each in os.environ]
    report(Status(detail=f"{config} {is_program} {given}"))
    os.read(config["fd"], 1)
    return 3

if __name__ == "__main__":
    run_child(main)
"""
STARTER = """
import importlib, json, os, sys, threading
from slipstream_ipc.own_process import start_own_process

os.environ |= {"SLIPSTREAM_STATUS_FD": "77", "SLIPSTREAM_CONTROL_FD": "78", "SECRET": "kept"}
how = sys.argv[1]
if how != "not imported":
    importlib.import_module("own_module")
if how == "threads":
    threading.Thread(target=threading.Event().wait, daemon=True).start()
reading, writing = os.pipe()
heard, said = os.pipe()
config = json.dumps({"fd": reading}).encode()
fds = (reading, said)
process = start_own_process("own_module", config, "own-1", descriptors=fds, status_fd=said)
os.close(said)
line = b""
while not line.endswith(b"\\n"):
    line += os.read(heard, 4096)
name = open(f"/proc/{process.pid}/comm").read().strip()
parent = open(f"/proc/{process.pid}/stat").read().split()[3] == str(os.getpid())
os.close(writing)
own_end = os.read(heard, 1) == b""
detail = json.loads(line)["detail"].replace(str(reading), "N")
print(f"{detail} {name} {parent} {own_end} {process.wait(30.0)}")
"""


@pytest.mark.parametrize(
    ("how", "is_program"), [("imported", False), ("not imported", True), ("threads", True)]
)
def test_a_fork_starts_and_ends_as_a_program_does(
    how: str, is_program: bool, tmp_path: Path
) -> None:
    (tmp_path / "own_module.py").write_text(MODULE)
    starter = tmp_path / "starter.py"
    starter.write_text(STARTER)
    path = os.pathsep.join((str(tmp_path), os.environ.get("PYTHONPATH", "")))
    done = subprocess.run(
        [sys.executable, str(starter), how],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=True,
    )
    expected = f"{{'fd': N}} {is_program} ['SECRET'] slip:own-1 True True 3"
    assert done.stdout.strip() == expected, done.stderr


def test_a_process_that_cannot_be_started_says_why() -> None:
    program = """
from slipstream_ipc.own_process import start_own_process
process = start_own_process("slipstream_ipc.not_there", b"{}", "own")
print(process.wait(30.0))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout == "1\n"
    assert "No module named slipstream_ipc.not_there" in done.stderr
