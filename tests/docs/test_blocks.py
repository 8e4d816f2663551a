"""Every block of Python and of shell in README and docs runs as written, beside one server, or
beside one for embeddings where its page is about those.

Blocks without a language are not run: they need another machine, a model, or minutes. Their
commands and options are checked in `test_pages`.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

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


class Server(NamedTuple):
    """One that runs: its environment, with a default address of its own, its port, what it said."""

    environment: dict[str, str]
    port: str
    said: str


@contextmanager
def _serving(command: list[str], first_port: int) -> Iterator[Server]:
    """Start a server at the pages' port where it is free, else at another."""
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", first_port))
            port = str(first_port)
        except OSError:
            port = str(free_port())
    with tempfile.TemporaryDirectory(prefix="docs-") as folder:
        environment = {**os.environ, "XDG_RUNTIME_DIR": folder}
        process = subprocess.Popen(
            [*command, *([] if port == "8000" else ["--http-port", port])],
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
        yield Server(environment, port, "".join(said))
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=PATIENCE_S)
        assert process.returncode in (0, 130, 1, -signal.SIGINT)


@pytest.fixture(scope="module")
def launched() -> Iterator[Server]:
    """The README's first command, running."""
    with _serving(["scripts/launch"], 8000) as server:
        yield server


@pytest.fixture(scope="module")
def pooling() -> Iterator[Server]:
    """The demo model, served for embeddings."""
    command = [sys.executable, "-m", "slipstream", "serve", "--runner", "pooling"]
    with _serving(command, free_port()) as server:
        yield server


@pytest.fixture
def server(request: pytest.FixtureRequest) -> Server:
    """The one that the test's block is written for."""
    name = next(iter(request.node.callspec.params.values())).name
    is_pooling = name.startswith("docs/embeddings.md")
    found: Server = request.getfixturevalue("pooling" if is_pooling else "launched")
    return found


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
def test_launch_names_each_process_and_a_command_to_try(launched: Server) -> None:
    assert re.search(r"^core ready ", launched.said, re.MULTILINE)
    assert re.search(r"^worker ready ", launched.said, re.MULTILINE)
    assert re.search(r"^http ready ", launched.said, re.MULTILINE)
    assert "ipc://" in launched.said


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
@pytest.mark.parametrize(("command", "output"), shown_outputs())
def test_shown_output_is_what_comes(command: str, output: str, launched: Server) -> None:
    shown = _run(["bash", "-c", command.replace("8000", launched.port)], launched.environment)
    assert shown.rstrip("\n") == output.rstrip("\n")


@pytest.mark.process
@pytest.mark.parametrize("block", PYTHON, ids=lambda block: block.name)
def test_python_block(block: Block, server: Server) -> None:
    program = block.text.replace("8000", server.port)
    _run([sys.executable, "-W", "error::ResourceWarning", "-c", program], server.environment)


@pytest.mark.process
@pytest.mark.parametrize(
    "command",
    [each for each in COMMANDS if not each.text.startswith(ELSEWHERE)],
    ids=lambda block: block.name,
)
def test_command(command: Block, server: Server) -> None:
    asked = _failing_on_errors(command.text).replace("8000", server.port)
    _run(["bash", "-c", asked], server.environment)
