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
from tests.patience import PATIENCE_S
from tests.ports import free_port

ROOT = Path(__file__).parents[2]
BLOCKS = re.findall(r"```(python|bash)\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
PYTHON = [text for language, text in BLOCKS if language == "python"]
COMMANDS = [
    line for language, text in BLOCKS if language == "bash" for line in text.strip().splitlines()
]
# the first is the fixture `launched`, the last are these tests, and one has its own, test_demo_kill
ELSEWHERE = ("scripts/launch", "scripts/test", ".venv/bin/slipstream demo kill")


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
            return str(free_port())
        return "8000"


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
    process.communicate(timeout=PATIENCE_S)
    assert process.returncode in (0, 130, 1, -signal.SIGINT)


def test_there_is_something_to_test() -> None:
    assert COMMANDS[0] == "scripts/launch"
    assert len(PYTHON) >= 4


def _failing_on_errors(command: str) -> str:
    """With an exit code for what the server refuses."""
    return re.sub(r"^curl ", "curl --fail-with-body ", command)


def test_curl_is_asked_to_fail() -> None:
    [*asked] = [_failing_on_errors(each) for each in COMMANDS if each.startswith("curl")]
    assert len(asked) >= 5
    assert all(each.startswith("curl --fail-with-body -s") for each in asked)


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
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


@pytest.mark.slow
@pytest.mark.usefixtures("launched")
@pytest.mark.parametrize("command", [c for c in COMMANDS if not c.startswith(ELSEWHERE)])
def test_command(command: str, environment: dict[str, str], port: str) -> None:
    done = subprocess.run(
        ["bash", "-c", _failing_on_errors(command).replace("8000", port)],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=2 * PATIENCE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
