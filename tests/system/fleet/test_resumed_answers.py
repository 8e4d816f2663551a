"""HTTP answers over several replicas whose readers come back at another front."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from tests.helpers.http_front import Front, Raw
from tests.helpers.patience import Patience
from tests.helpers.stacks import spareless_stack

from slipstream import Client, Stack
from slipstream.demo_model import MODEL_PATH
from slipstream.http.answers.event_ids import parse_answer_id
from slipstream_ipc.messages import Locate

MODEL = f"simulated:step_ms=10,prefill_us=20,tokenizer={MODEL_PATH},mode=chain"
EVENTS = "Accept: text/event-stream"
PATH = "/v1/completions"
BODY = {"prompt": "Chapter 1", "max_tokens": 200, "ignore_eos": True, "seed": 3, "stream": True}


class Fleet:
    """Two replicas, and the fronts over them."""

    def __init__(self, stacks: list[Stack], opened: ExitStack) -> None:
        self.stacks = stacks
        self.address = ",".join([stack.address for stack in stacks])
        self._opened = opened

    def front(self) -> Front:
        front = Front(self.address, is_router=True)
        self._opened.callback(front.stop)
        return front

    def reader(self, front: Front, *headers: str) -> Reader:
        """Posts BODY."""
        reader = Reader(front.port)
        self._opened.callback(reader.raw.socket.close)
        reader.raw.post(PATH, BODY, EVENTS, *headers)
        return reader

    def having(self, answer_id: str) -> Stack:
        """The replica that has the answer's stream."""
        ids = (bytes.fromhex(parse_answer_id(answer_id).stream_ids()[0]),)
        for stack in self.stacks:
            with stack.client() as client:
                if client._io.ask(Locate(0, ids)).result().moves[0]:
                    return stack
        raise AssertionError("no replica has it")


@pytest.fixture
def fleet() -> Iterator[Fleet]:
    with ExitStack() as opened:
        stacks = [opened.enter_context(spareless_stack(MODEL)) for _ in range(2)]
        yield Fleet(stacks, opened)


class Reader:
    """A streamed answer, read as far as a test wants."""

    def __init__(self, port: int) -> None:
        self.raw = Raw(port)
        self.text = self.last_id = self.answer_id = ""
        self.error: dict[str, Any] | None = None
        self.is_done = False
        self._has_head = False

    def read(self, num_chars: int | None = None) -> str:
        """Read until there is so much text, or to the end. Returns all of it."""
        if not self._has_head:
            head = self.raw.read_until(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 200"), head
            self._has_head = True
        while num_chars is None or len(self.text) < num_chars:
            chunk = self.raw.read_chunk()
            if not chunk:
                break
            for block in chunk.decode().split("\n\n")[:-1]:
                self._take(dict(line.split(": ", 1) for line in block.split("\n")))
        return self.text

    def _take(self, fields: dict[str, str]) -> None:
        self.last_id = fields.get("id", self.last_id)
        if fields["data"] == "[DONE]":
            self.is_done = True
            return
        found = json.loads(fields["data"])
        if "error" in found:
            self.error = found["error"]
            return
        self.answer_id = found["id"]
        self.text += "".join([choice["text"] for choice in found["choices"]])


def whole_text(stack: Stack) -> str:
    with stack.client() as client:
        return client.generate("Chapter 1", max_tokens=200, ignore_eos=True, seed=3).text


def lose(stack: Stack) -> None:
    os.kill(stack.pids["supervisor"], signal.SIGKILL)


@pytest.mark.process
@pytest.mark.parametrize("method", ["post", "get"])
def test_last_event_id_at_another_front_after_a_move(fleet: Fleet, method: str) -> None:
    expected = whole_text(fleet.stacks[0])
    first, second = fleet.front(), fleet.front()
    reader = fleet.reader(first)
    reader.read(40)
    lose(fleet.having(reader.answer_id))
    num_chars = len(reader.text)
    begun = reader.read(num_chars + 60)  # of the other replica
    reader.raw.socket.close()
    last = f"Last-Event-ID: {reader.last_id}"
    if method == "post":
        elsewhere = fleet.reader(second, last)
    else:
        elsewhere = Reader(second.port)
        path = f"/v1/streams/{reader.answer_id}"
        elsewhere.raw.send(f"GET {path} HTTP/1.1\r\nHost: localhost\r\n{EVENTS}\r\n{last}\r\n\r\n")
    assert begun + elsewhere.read() == expected
    assert elsewhere.is_done


@pytest.mark.process
def test_replica_and_front_lost_at_once(fleet: Fleet) -> None:
    """A POST computes the answer again and skips what the client has; a GET cannot."""
    expected = whole_text(fleet.stacks[0])
    first, second = fleet.front(), fleet.front()
    reader = fleet.reader(first)
    reader.read(40)
    lost = fleet.having(reader.answer_id)
    first.process.kill()
    lose(lost)
    last = f"Last-Event-ID: {reader.last_id}"
    with Raw(second.port) as raw:
        patience = Patience()
        while raw.get("/health").json["replicas"][lost.address] != "away":
            patience.wait("the lost replica is away")
        assert raw.get(f"/v1/streams/{reader.answer_id}", EVENTS, last).status == 404
    again = fleet.reader(second, last)
    assert reader.text + again.read() == expected
    assert again.is_done


@pytest.mark.process
def test_replica_and_front_lost_python_client_goes_on(fleet: Fleet) -> None:
    expected = whole_text(fleet.stacks[0])
    front = fleet.front()
    with Client(fleet.address) as client:
        stream = client.stream("Chapter 1", max_tokens=200, ignore_eos=True, seed=3)
        text = next(stream).text
        front.process.kill()
        lose(fleet.stacks[stream._state.member])
        assert text + "".join([delta.text for delta in stream]) == expected


@pytest.mark.process
def test_two_fronts_one_stream_superseded_over_replicas(fleet: Fleet) -> None:
    """The reader that came last reads, also after the replica was lost."""
    expected = whole_text(fleet.stacks[0])
    first, second = fleet.front(), fleet.front()
    reader = fleet.reader(first)
    reader.read(40)
    later = fleet.reader(second, f"Last-Event-ID: {reader.last_id}")
    begun = reader.text
    later.read(20)
    reader.read()
    assert reader.error is not None
    assert reader.error["code"] == "superseded"
    lose(fleet.having(reader.answer_id))
    assert begun + later.read() == expected
    assert later.is_done


@pytest.mark.process
def test_reader_back_at_the_same_front_as_its_replica_dies(fleet: Fleet) -> None:
    """Its old connection is still open: its stream would move, too."""
    expected = whole_text(fleet.stacks[0])
    front = fleet.front()
    reader = fleet.reader(front)
    reader.read(40)
    lose(fleet.having(reader.answer_id))
    again = fleet.reader(front, f"Last-Event-ID: {reader.last_id}")
    assert reader.text + again.read() == expected
    assert again.is_done
    reader.read()
    assert reader.error is not None
    assert reader.error["code"] == "superseded"
