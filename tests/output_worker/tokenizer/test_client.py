"""The worker's side of its tokenizer process, with a child that tests play."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import zmq
from tests.helpers.patience import PATIENCE_S
from tests.helpers.played_prompts import Child

from slipstream_ipc.messages import Render, Rendered, TokenizerReady
from slipstream_worker.tokenizer.client import TokenizerClient

PATIENCE_MS = int(PATIENCE_S * 1e3)


@pytest.fixture
def context() -> Iterator[zmq.Context[zmq.Socket[bytes]]]:
    with zmq.Context() as found:
        yield found


def test_no_prompt_is_lost_however_many_wait(
    context: zmq.Context[zmq.Socket[bytes]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(TokenizerClient, "_start", lambda _: Child())
    address = f"ipc://{tmp_path}/prompts"
    prompts = TokenizerClient(context, address, {})
    socket = context.socket(zmq.PAIR)
    socket.connect(address)
    socket.send(msgspec.msgpack.encode(TokenizerReady("", "")))
    assert prompts.socket.poll(PATIENCE_MS)
    assert len(list(prompts.receive())) == 1
    keys = [prompts.ask(Render(0, "a prompt " * 100)) for _ in range(5000)]
    answered: set[int] = set()
    poller = zmq.Poller()
    poller.register(socket, zmq.POLLIN)
    poller.register(prompts.socket, zmq.POLLIN)
    while len(answered) < len(keys):  # the child has a few at a time, and more as it answers
        arrived = dict(poller.poll(PATIENCE_MS))
        assert arrived, f"{len(keys) - len(answered)} prompts never came"
        if socket in arrived:
            key = msgspec.msgpack.decode(socket.recv(), type=Render).key
            socket.send(msgspec.msgpack.encode(Rendered(key, b"")))
        answered |= {answer.key for answer in prompts.receive() if isinstance(answer, Rendered)}
    assert answered == set(keys)
    socket.close(linger=0)
    prompts.close()


@pytest.mark.parametrize(
    "garbage", [[b""], [b"\xc1"], [b"\x90"], [b"x" * 1000, b"y"], [b"\x92\x07"]]
)
def test_a_child_that_says_what_is_no_answer_is_replaced_and_asked_again(
    context: zmq.Context[zmq.Socket[bytes]],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    garbage: list[bytes],
) -> None:
    started: list[Child] = []

    def start(_: TokenizerClient) -> Child:
        started.append(Child())
        return started[-1]

    monkeypatch.setattr(TokenizerClient, "_start", start)
    address = f"ipc://{tmp_path}/prompts"
    prompts = TokenizerClient(context, address, {})
    socket = context.socket(zmq.PAIR)
    socket.connect(address)

    def arrived() -> list[Rendered | TokenizerReady]:
        assert prompts.socket.poll(PATIENCE_MS)
        return list(prompts.receive())

    ready = msgspec.msgpack.encode(TokenizerReady("", ""))
    socket.send(ready)
    assert len(arrived()) == 1
    key = prompts.ask(Render(0, "a prompt"))
    assert socket.recv()
    socket.send_multipart(garbage)
    assert arrived() == []
    assert len(started) == 1
    assert started[0].ended() is not None, "it lives on"
    assert list(prompts.beat(0.0)) == []  # once is no proof that it is the prompt's doing
    assert len(started) == 2
    socket.send(ready)
    assert len(arrived()) == 1
    assert socket.poll(PATIENCE_MS)
    assert msgspec.msgpack.decode(socket.recv(), type=Render).key == key
    socket.send(msgspec.msgpack.encode(Rendered(key, b"abcd")))
    assert arrived() == [Rendered(key, b"abcd")]
    socket.close(linger=0)
    prompts.close()
