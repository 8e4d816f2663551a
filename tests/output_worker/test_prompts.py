"""The worker's side of its prompt process, with a child that tests play."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import zmq

from slipstream_ipc.messages import PromptReady, Render, Rendered
from slipstream_worker.prompts import Prompts

PATIENCE_MS = 20_000


class Child:
    """A process that lives, as `Popen` shows it."""

    returncode = None

    def poll(self) -> None:
        return

    def terminate(self) -> None:
        return

    def wait(self, _timeout: float | None = None) -> int:
        return 0


@pytest.fixture
def context() -> Iterator[zmq.Context[zmq.Socket[bytes]]]:
    with zmq.Context() as found:
        yield found


def test_no_prompt_is_lost_however_many_wait(
    context: zmq.Context[zmq.Socket[bytes]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(Prompts, "_start", lambda _: Child())
    address = f"ipc://{tmp_path}/prompts"
    prompts = Prompts(context, address, {})
    socket = context.socket(zmq.PAIR)
    socket.connect(address)
    socket.send(msgspec.msgpack.encode(PromptReady("", "")))
    assert prompts.socket.poll(PATIENCE_MS)
    assert len(list(prompts.receive())) == 1
    keys = [prompts.ask(Render(0, "a prompt " * 100)) for _ in range(5000)]
    answered = set()
    for _ in keys:
        assert socket.poll(PATIENCE_MS), f"{len(keys) - len(answered)} prompts never came"
        key = msgspec.msgpack.decode(socket.recv(), type=Render).key
        socket.send(msgspec.msgpack.encode(Rendered(key, b"")))
        answered |= {answer.key for answer in prompts.receive() if isinstance(answer, Rendered)}
    while len(answered) < len(keys):
        assert prompts.socket.poll(PATIENCE_MS)
        answered |= {answer.key for answer in prompts.receive() if isinstance(answer, Rendered)}
    assert answered == set(keys)
    socket.close(linger=0)
    prompts.close()
