"""A stack that is asked to stop, and another in its place: no stream loses anything by it."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
from tests.helpers.http_front import Raw, read_events
from tests.helpers.patience import PATIENCE_S, Patience
from tests.helpers.ports import free_port
from tests.helpers.stacks import spareless_stack

from slipstream import AsyncClient, Client, ConnectionLostError, Stack, Stream
from slipstream.stack.supervisor_events import StackDraining

MODEL = "simulated:step_ms=5,mode=chain"
PROMPTS = [f"Clause {n}: what is asked for before the end." for n in range(3)]
PARAMS: dict[str, Any] = {"max_tokens": 700, "temperature": 0, "ignore_eos": True}

pytestmark = pytest.mark.process


def start(folder: Path, **settings: Any) -> Stack:
    return spareless_stack(MODEL, runtime_dir=folder, drain_s=0.3, **settings)


def end(stack: Stack) -> None:
    """As `systemctl stop` does."""
    os.kill(stack.pids["supervisor"], signal.SIGTERM)
    assert stack._supervisor.wait(PATIENCE_S) == 0


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "stack"


@pytest.fixture
def whole(tmp_path: Path) -> list[str]:
    """What undisturbed streams say."""
    with spareless_stack(MODEL) as stack, stack.client() as client:
        return [each.text for each in client.generate_many(PROMPTS, **PARAMS)]


def test_a_client_of_each_kind(folder: Path, whole: list[str]) -> None:
    texts: dict[str, list[str]] = {}
    begun = threading.Barrier(4)

    def read_one(client: Client) -> None:
        stream = client.stream(PROMPTS[0], **PARAMS)
        text = next(stream).text
        begun.wait(PATIENCE_S)
        texts["one"] = [text + "".join(delta.text for delta in stream)]

    def read_many(client: Client) -> None:
        parts = [""] * len(PROMPTS)
        is_begun = False
        with client.stream_many(PROMPTS, **PARAMS) as streams:
            for index, delta in streams:
                parts[index] += delta.text
                if not is_begun and all(parts):
                    is_begun = True
                    begun.wait(PATIENCE_S)
        texts["many"] = parts

    def read_async(address: str) -> None:
        async def read() -> None:
            async with AsyncClient(address, timeout_s=PATIENCE_S) as client:
                stream = client.stream(PROMPTS[1], **PARAMS)
                text, is_begun = "", False
                async for delta in stream:
                    text += delta.text
                    if not is_begun:
                        is_begun = True
                        await asyncio.to_thread(begun.wait, PATIENCE_S)
                texts["async"] = [text]

        asyncio.run(read())

    with start(folder) as stack, Client(stack.address, timeout_s=PATIENCE_S) as client:
        threads = [
            threading.Thread(target=read_one, args=(client,)),
            threading.Thread(target=read_many, args=(client,)),
            threading.Thread(target=read_async, args=(stack.address,)),
        ]
        for thread in threads:
            thread.start()
        begun.wait(PATIENCE_S)
        end(stack)
        assert not texts  # each has more to say than the drain allows
        with start(folder):
            for thread in threads:
                thread.join(PATIENCE_S)
    assert texts == {"one": whole[:1], "many": whole, "async": whole[1:2]}


def begin_to_drain(stack: Stack) -> None:
    os.kill(stack.pids["supervisor"], signal.SIGTERM)
    while not isinstance(event := stack.next_event(PATIENCE_S), StackDraining):
        assert event is not None


def test_what_is_asked_for_while_it_drains_is_answered_by_the_next(
    folder: Path, whole: list[str]
) -> None:
    with (
        spareless_stack(MODEL, runtime_dir=folder, drain_s=1e6) as stack,
        Client(stack.address, timeout_s=PATIENCE_S) as client,
        Client(stack.address, timeout_s=PATIENCE_S) as other,
    ):
        stream = client.stream(PROMPTS[0], **PARAMS)
        text = next(stream).text
        begin_to_drain(stack)
        late: list[Stream] = []
        patience = Patience()
        while not late or late[-1]._state.was_sent:  # until one is turned away
            patience.check("none is turned away")
            late.append(other.stream(PROMPTS[1], **PARAMS))
            other.tokenize("a")  # answered behind it
        text += "".join(delta.text for delta in stream)
        assert text == whole[0]  # it had time to end where it was
        assert stack._supervisor.wait(PATIENCE_S) == 0
        assert not late[-1]._state.is_over
        with start(folder):
            assert {"".join(delta.text for delta in each) for each in late} == {whole[1]}


def test_over_http_the_same_request_again_gets_the_rest(folder: Path, whole: list[str]) -> None:
    port = free_port()
    body = {"prompt": PROMPTS[0], "stream": True, **PARAMS}
    with start(folder, http_port=port) as stack, Raw(port) as raw, Raw(port) as waiting:
        waiting.post("/v1/completions", {"prompt": PROMPTS[1], **PARAMS})
        raw.post("/v1/completions", body, "Accept: text/event-stream")
        assert raw.read_until(b"\r\n\r\n").startswith(b"HTTP/1.1 200 OK")
        first = raw.read_chunk()  # so the request before it is taken as well
        end(stack)
        answer = waiting.read()
        assert (answer.status, answer.error["code"]) == (503, "draining")
        assert "shutting down" in answer.error["message"]
        assert answer.headers["retry-after"]
        text, last, is_whole = read_events(raw, first)
        assert whole[0].startswith(text)
        assert not is_whole
        with start(folder, http_port=port), Raw(port) as again:
            header = (f"Last-Event-ID: {last}",) if last else ()
            again.post("/v1/completions", body, *header)
            assert again.read_until(b"\r\n\r\n").startswith(b"HTTP/1.1 200 OK")
            rest, _, is_whole = read_events(again)
    assert text + rest == whole[0]
    assert is_whole


def test_none_comes(folder: Path) -> None:
    with start(folder) as stack, Client(stack.address, timeout_s=0.5) as client:
        stream = client.stream(PROMPTS[0], **PARAMS)
        first = next(stream).text
        end(stack)
        with pytest.raises(ConnectionLostError, match="shut down, and none has come") as caught:
            list(stream)
        assert caught.value.text.startswith(first)


def test_a_second_signal_loses_nothing_either(folder: Path, whole: list[str]) -> None:
    with (
        spareless_stack(MODEL, runtime_dir=folder, drain_s=1e6) as stack,
        Client(stack.address, timeout_s=PATIENCE_S) as client,
    ):
        stream = client.stream(PROMPTS[0], **PARAMS)
        text = next(stream).text
        begin_to_drain(stack)
        end(stack)
        with start(folder):
            assert text + "".join(delta.text for delta in stream) == whole[0]
