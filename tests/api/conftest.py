"""A worker that tests play: the accepting end of the client hop, with nothing behind it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.helpers.fake_worker import FakeWorker

from slipstream_ipc.transport.sockets import private_directory


@pytest.fixture
def address() -> Iterator[str]:
    """Where a worker may listen; gone after the test."""
    directory = private_directory()
    yield f"ipc://{directory}/client.sock"
    for path in directory.iterdir():
        path.unlink()
    Path(directory).rmdir()


@pytest.fixture
def worker(address: str) -> Iterator[FakeWorker]:
    """A worker that runs, and says nothing by itself."""
    fake = FakeWorker(address)
    yield fake
    fake.stop()
