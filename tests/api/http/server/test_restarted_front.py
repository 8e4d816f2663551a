"""A front that replaces another answers what arrives before it is connected to the engine."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.helpers.fake_worker import FakeWorker
from tests.helpers.front_app import app_over
from tests.helpers.http_front import Raw
from tests.helpers.patience import PATIENCE_S
from tests.helpers.played_answers import away, echo

from slipstream.client.connection.loop_io import LoopIO
from slipstream.demo_model import MODEL_PATH
from slipstream.http.config import Limits
from slipstream.http.server.server import Server
from slipstream.stack.children.listeners import Listeners

SERVED = {"core": "ready", "worker": "ready"}


@pytest.fixture
def silent(tmp_path: Path) -> Iterator[FakeWorker]:
    """A worker that leaves attaches unanswered until told otherwise."""
    worker = FakeWorker(f"ipc://{tmp_path}/w", echo)
    worker.is_silent = True
    yield worker
    worker.stop()


async def answers_of(
    worker: FakeWorker, processes: dict[str, str], *, comes_back: bool = True
) -> list[Any]:
    """Statuses and bodies of /health and of a completion, sent before the front is connected."""
    io = LoopIO(worker.address, PATIENCE_S if comes_back else 0.1, outlives_server=False)
    app = app_over(io, str(MODEL_PATH))
    app.health.processes = processes
    server = Server(app, Limits())
    listeners = Listeners.at("127.0.0.1", 0)
    assert listeners.port is not None
    server.listen(listeners)
    handled = asyncio.Event()
    has_to_wait = app.has_to_wait

    def noted(request: Any) -> bool:
        if request.path != "/health":
            handled.set()
        return has_to_wait(request)

    app.has_to_wait = noted  # type: ignore[method-assign]
    try:
        with Raw(listeners.port) as health, Raw(listeners.port) as asker:
            asker.post("/v1/completions", {"prompt": "hello"})
            await asyncio.wait_for(handled.wait(), PATIENCE_S)
            found = [await away(health.get, "/health")]
            if comes_back:
                worker.is_silent = False
                await io.connect()
            server.begin_waiting()
            found.append(await away(asker.read))
    finally:
        server.stop_listening()
        await io.close()
        await server.close()
    return [(each.status, json.loads(each.body)) for each in found]


def test_a_request_waits_for_the_engine_that_served_before(silent: FakeWorker) -> None:
    health, answer = asyncio.run(answers_of(silent, SERVED))
    assert health[0] == 200
    assert answer[0] == 200
    assert answer[1]["choices"][0]["text"] == "hello"


@pytest.mark.parametrize("state", ["silent", "restarting"])
def test_it_waits_for_an_engine_that_is_replaced_too(silent: FakeWorker, state: str) -> None:
    _, answer = asyncio.run(answers_of(silent, {**SERVED, "core": state}))
    assert answer[0] == 200


def test_it_does_not_wait_for_ever(silent: FakeWorker) -> None:
    _, answer = asyncio.run(answers_of(silent, SERVED, comes_back=False))
    assert answer[0] == 503
    assert answer[1]["error"]["code"] == "not_ready"


@pytest.mark.parametrize("processes", [{}, {"core": "starting", "worker": "ready"}])
def test_an_engine_that_starts_is_not_waited_for(
    silent: FakeWorker, processes: dict[str, str]
) -> None:
    _, answer = asyncio.run(answers_of(silent, processes))
    assert answer[0] == 503
