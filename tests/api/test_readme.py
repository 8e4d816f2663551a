"""Every code block of the README runs as written, in the order in which a reader meets them."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BLOCKS = re.findall(r"```(python|bash)\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
PYTHON = [text for language, text in BLOCKS if language == "python"]
COMMANDS = [
    line for language, text in BLOCKS if language == "bash" for line in text.strip().splitlines()
]


@pytest.fixture(scope="module")
def environment() -> Iterator[dict[str, str]]:
    """A default address of our own, and the interpreter of these tests as `.venv`."""
    folder = tempfile.mkdtemp(prefix="readme-")
    yield {**os.environ, "XDG_RUNTIME_DIR": folder}
    shutil.rmtree(folder)


@pytest.fixture(scope="module")
def port() -> str:
    """The README's port where nobody has it, else another: blocks then run with that one."""
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", 8000))
        except OSError:
            probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


@pytest.fixture(scope="module")
def launched(environment: dict[str, str], port: str) -> Iterator[str]:
    """The README's first command, running; what it said."""
    process = subprocess.Popen(
        ["scripts/launch", *([] if port == "8000" else ["--http-port", port])],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    said = []
    assert process.stdout is not None
    for line in process.stdout:
        said.append(line)
        if "curl" in line:
            break
    yield "".join(said)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=10)
    assert process.returncode in (0, 130, 1, -signal.SIGINT)


def test_there_is_something_to_test() -> None:
    assert COMMANDS[0] == "scripts/launch"
    assert len(PYTHON) >= 4


@pytest.mark.slow
def test_launch_names_each_process_and_a_command_to_try(launched: str) -> None:
    assert re.search(r"^core ready ", launched, re.MULTILINE)
    assert re.search(r"^worker ready ", launched, re.MULTILINE)
    assert re.search(r"^http ready ", launched, re.MULTILINE)
    assert "ipc://" in launched


@pytest.mark.slow
@pytest.mark.usefixtures("launched")
@pytest.mark.parametrize("block", PYTHON)
def test_python_block(block: str, environment: dict[str, str], port: str) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error::ResourceWarning", "-c", block.replace("8000", port)],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


@pytest.mark.slow
@pytest.mark.usefixtures("launched")
@pytest.mark.parametrize(
    "command", [c for c in COMMANDS if not c.startswith(("scripts/launch", "scripts/test"))]
)
def test_command(command: str, environment: dict[str, str], port: str) -> None:
    done = subprocess.run(
        ["bash", "-c", command.replace("8000", port)],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=170,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
