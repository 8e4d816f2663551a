"""A fake worker that tests control: the router's end of the client connection."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.helpers.fake_worker import FakeWorker

from slipstream_ipc.transport.sockets import private_directory


@pytest.fixture
def address() -> Iterator[str]:
    """A socket address for a worker, removed after the test."""
    directory = private_directory()
    yield f"ipc://{directory}/client.sock"
    for path in directory.iterdir():
        path.unlink()
    Path(directory).rmdir()


@pytest.fixture
def worker(address: str) -> Iterator[FakeWorker]:
    """A running worker that answers Hellos and nothing else by itself."""
    fake = FakeWorker(address)
    yield fake
    fake.stop()
