"""An HTTP front in a separate process, a fake worker, and a client that speaks raw HTTP."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.helpers.fake_worker import FakeWorker
from tests.helpers.http_front import Front, Raw
from tests.helpers.zygote import session_zygote as session_zygote

from slipstream.http.config import Limits
from slipstream_ipc.transport.sockets import private_directory


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
