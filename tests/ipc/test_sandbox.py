"""A process that a request may kill: it is replaced, and of two deaths the request is to blame."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from slipstream_ipc.sandbox import DeadlyRequest, Sandbox

pytestmark = pytest.mark.process

Make = Callable[[str], Sandbox]
DECODER = msgspec.json.Decoder(str)


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    made: list[Sandbox] = []

    def sandbox(why_not: str) -> Sandbox:
        def config(fd: int) -> bytes:
            return msgspec.json.encode((fd, why_not))

        made.append(Sandbox("frail", "tests.helpers.frail_child", config))
        return made[-1]

    yield sandbox
    for each in made:
        each.close()


def ask(sandbox: Sandbox, asked: bytes) -> str:
    return sandbox.ask(asked, DECODER.decode)


def test_one_process_answers_all_that_harms_it_not(make: Make) -> None:
    sandbox = make("")
    assert sandbox.pid is None
    sandbox.start()
    first = sandbox.pid
    assert first is not None
    for asked in (b"a", b"", b"b" * 2**20):
        assert ask(sandbox, asked) == asked.decode()
    assert sandbox.pid == first


def test_a_death_from_outside_is_no_requests_fault(make: Make) -> None:
    sandbox = make("")
    ask(sandbox, b"a")
    first = sandbox.pid
    assert first is not None
    os.kill(first, signal.SIGKILL)
    assert ask(sandbox, b"b") == "b"
    assert sandbox.pid != first


@pytest.mark.parametrize(
    ("asked", "is_slow"), [(b"die", False), (b"nonsense", False), (b"work on", True)]
)
def test_a_request_over_which_it_dies_is_to_blame(make: Make, asked: bytes, is_slow: bool) -> None:
    sandbox = make("")
    with pytest.raises(DeadlyRequest) as caught:
        ask(sandbox, asked)
    assert caught.value.is_slow is is_slow
    assert ask(sandbox, b"a") == "a"


def test_a_process_that_cannot_start_says_why(make: Make) -> None:
    with pytest.raises(OSError, match="it has no legs"):
        ask(make("it has no legs"), b"a")
    with pytest.raises(OSError, match=r"the frail process cannot start \(code 7\)"):
        ask(make("exit"), b"a")


def test_closed_it_starts_no_more(make: Make) -> None:
    sandbox = make("")
    ask(sandbox, b"a")
    sandbox.close()
    sandbox.close()
    with pytest.raises(OSError, match="frail"):
        ask(sandbox, b"a")
