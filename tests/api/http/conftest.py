"""Fronts over a worker that says what a test wants, and two stacks of real processes for all
files: one whose tokens depend on all before them, and one that plays answers with thoughts and
calls. Tests that kill processes are in tests/system; those that need other settings start stacks of
their own.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.helpers.fake_worker import FakeWorker
from tests.helpers.http_front import Front, Raw
from tests.helpers.played_responses import playing_stack
from tests.helpers.stacks import spareless_stack
from tests.helpers.zygote import session_zygote as session_zygote

from slipstream import Stack
from slipstream.http.config import Limits
from slipstream_ipc.transport.sockets import private_directory

GRACE_S = 600.0  # longer than a busy machine takes for what comes between two requests


@pytest.fixture(scope="module")
def played() -> Iterator[FakeWorker]:
    """A worker controlled by the tests of a module; each has to expect the messages it causes."""
    directory = private_directory()
    fake = FakeWorker(f"ipc://{directory}/client.sock")
    yield fake
    fake.stop()
    for path in directory.iterdir():
        path.unlink()
    Path(directory).rmdir()


@pytest.fixture(scope="module")
def front(played: FakeWorker) -> Iterator[Front]:
    """A front of that worker, with size limits low enough for tests to reach."""
    limits = Limits(body_bytes=100_000, header_bytes=8192)
    running = Front(played.address, limits=limits)
    yield running
    running.stop()


@pytest.fixture
def raw(front: Front) -> Iterator[Raw]:
    """A connection to the front."""
    with Raw(front.port) as connection:
        yield connection


@pytest.fixture(scope="session")
def chain_stack() -> Iterator[Stack]:
    """A stack whose tokens depend on all before them, so that no two prompts have the same answer;
    its model is called tiny.
    """
    model = "simulated:step_ms=1,mode=chain"
    options = {"served_model_name": "tiny", "max_logprobs": -1, "grace_s": GRACE_S}
    with spareless_stack(model, http_port=0, **options) as running:
        yield running


@pytest.fixture(scope="session")
def calling_stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """A stack whose model, called played, answers by `played_responses.LINES`."""
    with playing_stack(tmp_path_factory.mktemp("answers"), grace_s=GRACE_S) as running:
        yield running
