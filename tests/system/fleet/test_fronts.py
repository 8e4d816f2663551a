"""HTTP fronts over several replicas of real processes."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from tests.helpers.http_front import Front, Raw
from tests.helpers.ports import free_port
from tests.helpers.stacks import spareless_stack

from slipstream import Client, Stack
from slipstream.cli.keys import make_folder
from slipstream.demo_model import MODEL_PATH
from slipstream.http.answers.event_ids import parse_answer_id
from slipstream_ipc.messages import Locate

MODEL = f"simulated:step_ms=10,prefill_us=20,tokenizer={MODEL_PATH},mode=chain"
PROMPTS = [f"Chapter {n}: how names are bound, and where." for n in range(16)]
CHAT = "/v1/chat/completions"


def body_of(prompt: str) -> dict[str, Any]:
    return {
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": 600,
        "seed": 1,
        "ignore_eos": True,
    }


class Chat:
    """A streamed answer, read as far as a test wants."""

    def __init__(self, port: int, prompt: str) -> None:
        self.raw = Raw(port)
        self.raw.post(CHAT, {**body_of(prompt), "stream": True})
        head = self.raw.read_until(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200"), head
        self.id = ""
        self.text = ""
        self._said = b""

    def begin(self) -> None:
        """Read until there is some text."""
        while not self.text:
            self._take(self.raw.read_chunk())

    def finish(self) -> str:
        """Read to the end, which has to be that of a whole stream. Returns the text."""
        said = b""
        while chunk := self.raw.read_chunk():
            said = chunk
            self._take(chunk)
        assert said.endswith(b"data: [DONE]\n\n")
        return self.text

    def _take(self, chunk: bytes) -> None:
        self._said += chunk
        *events, self._said = self._said.split(b"\n\n")
        for event in events:
            data = event.removeprefix(b"data: ")
            if data != b"[DONE]":
                found = json.loads(data)
                assert "error" not in found, found
                self.id = found["id"]
                deltas = [choice["delta"] for choice in found["choices"]]
                self.text += "".join([delta.get("content") or "" for delta in deltas])


class Replicas(NamedTuple):
    """Two replicas. address: of both, as a front is told it; keys: for a tcp:// one."""

    stacks: list[Stack]
    address: str
    keys: str | None


@pytest.fixture(params=["ipc", "tcp"])
def replicas(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Replicas]:
    keys = str(tmp_path / "keys") if request.param == "tcp" else None
    settings: list[dict[str, Any]] = [{}, {}]
    if keys is not None:
        make_folder(Path(keys))
        settings = [{"listen": f"tcp://127.0.0.1:{free_port()}", "keys": keys} for _ in settings]
    with (
        spareless_stack(MODEL, **settings[0]) as first,
        spareless_stack(MODEL, **settings[1]) as second,
    ):
        stacks = [first, second]
        found = [
            given.get("listen", stack.address)
            for given, stack in zip(settings, stacks, strict=True)
        ]
        yield Replicas(stacks, ",".join(found), keys)


def has(replicas: Replicas, index: int, chats: list[Chat]) -> list[Chat]:
    """The answers that a replica computes, as one with the front's key is told."""
    ids = tuple([bytes.fromhex(parse_answer_id(chat.id).stream_ids()[0]) for chat in chats])
    with Client(replicas.address.split(",")[index], keys=replicas.keys) as client:
        located = client._io.ask(Locate(0, ids)).result()
    return [chat for chat, moves in zip(chats, located.moves, strict=True) if moves]


def answers(port: int) -> list[str]:
    """The answers to all prompts, without streaming."""
    with ExitStack() as opened:
        raws = [opened.enter_context(Raw(port)) for _ in PROMPTS]
        for raw, prompt in zip(raws, PROMPTS, strict=True):
            raw.post(CHAT, body_of(prompt))
        found = [raw.read() for raw in raws]
    assert {answer.status for answer in found} == {200}
    return [answer.json["choices"][0]["message"]["content"] for answer in found]


@pytest.mark.process
def test_replica_killed_under_chats(replicas: Replicas) -> None:
    stacks = replicas.stacks
    with ExitStack() as opened:
        alone = Front(stacks[1].address)
        opened.callback(alone.stop)
        plain = answers(alone.port)
        front = Front(replicas.address, keys=replicas.keys, is_router=True)
        opened.callback(front.stop)
        chats = [Chat(front.port, prompt) for prompt in PROMPTS]
        for chat in chats:
            opened.callback(chat.raw.socket.close)
            chat.begin()
        # prompts that begin alike have one home, which a hash of the addresses chooses
        lost, other = sorted((0, 1), key=lambda index: -len(has(replicas, index, chats)))
        cut = has(replicas, lost, chats)
        assert cut
        os.kill(stacks[lost].pids["supervisor"], signal.SIGKILL)
        assert [chat.finish() for chat in chats] == plain
        assert {chat.id for chat in cut} <= {chat.id for chat in has(replicas, other, chats)}


def test_an_address_that_cannot_be_used_is_a_misconfiguration() -> None:
    front = Front("ipc:///nowhere/a,tcp://10.0.0.5:7001", wait=False, is_router=True)
    status = front.status()
    front.stop()
    assert status.is_misconfigured
    assert "tcp://10.0.0.5:7001" in status.error
