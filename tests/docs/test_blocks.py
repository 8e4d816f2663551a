"""Every block of Python and of shell in README and docs runs as written, beside one server.

Blocks without a language are not run: they need another machine, a model, or minutes. Their
commands and options are checked in `test_pages`.
"""

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

import pytest
from tests.helpers.pages import ROOT, Block, blocks, shown_outputs
from tests.helpers.patience import PATIENCE_S
from tests.helpers.ports import free_port

PYTHON = blocks("python")
COMMANDS = [
    Block(f"{block.name}.{number}", line)
    for block in blocks("bash")
    for number, line in enumerate(block.text.strip().splitlines(), 1)
]
# the first is the fixture `launched`, the other has a test of its own, test_demo_kill
ELSEWHERE = ("scripts/launch", ".venv/bin/slipstream demo kill")


@pytest.fixture(scope="module")
def environment() -> Iterator[dict[str, str]]:
    """A default address of our own."""
    folder = tempfile.mkdtemp(prefix="docs-")
    yield {**os.environ, "XDG_RUNTIME_DIR": folder}
    shutil.rmtree(folder)


@pytest.fixture(scope="module")
def port() -> str:
    """The pages' port where it is free, else another: blocks then run with that one."""
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
    assert COMMANDS[0].text == "scripts/launch"
    assert len(PYTHON) >= 10
    assert {block.name.rpartition("-")[0] for block in PYTHON} >= {"README.md", "docs/python.md"}


def _failing_on_errors(command: str) -> str:
    """With an exit code for what the server refuses."""
    return re.sub(r"^curl ", "curl --fail-with-body ", command)


def test_curl_is_asked_to_fail() -> None:
    [*asked] = [_failing_on_errors(each.text) for each in COMMANDS if each.text.startswith("curl")]
    assert len(asked) >= 5
    assert all(each.startswith("curl --fail-with-body -s") for each in asked)


@pytest.mark.process
def test_launch_names_each_process_and_a_command_to_try(launched: str) -> None:
    assert re.search(r"^core ready ", launched, re.MULTILINE)
    assert re.search(r"^worker ready ", launched, re.MULTILINE)
    assert re.search(r"^http ready ", launched, re.MULTILINE)
    assert "ipc://" in launched


def _run(command: list[str], environment: dict[str, str]) -> str:
    done = subprocess.run(
        command,
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=2 * PATIENCE_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.strip()
    return done.stdout


@pytest.mark.process
@pytest.mark.usefixtures("launched")
@pytest.mark.parametrize(("command", "output"), shown_outputs())
def test_shown_output_is_what_comes(
    command: str, output: str, environment: dict[str, str], port: str
) -> None:
    shown = _run(["bash", "-c", command.replace("8000", port)], environment)
    assert shown.rstrip("\n") == output.rstrip("\n")


@pytest.mark.process
@pytest.mark.usefixtures("launched")
@pytest.mark.parametrize("block", PYTHON, ids=lambda block: block.name)
def test_python_block(block: Block, environment: dict[str, str], port: str) -> None:
    program = block.text.replace("8000", port)
    _run([sys.executable, "-W", "error::ResourceWarning", "-c", program], environment)


@pytest.mark.process
@pytest.mark.usefixtures("launched")
@pytest.mark.parametrize(
    "command",
    [each for each in COMMANDS if not each.text.startswith(ELSEWHERE)],
    ids=lambda block: block.name,
)
def test_command(command: Block, environment: dict[str, str], port: str) -> None:
    _run(["bash", "-c", _failing_on_errors(command.text).replace("8000", port)], environment)
