"""Several fronts on one port: real processes, killed under streams that come back."""

from __future__ import annotations

import asyncio
import os
import select
import signal
import socket
from collections.abc import Callable
from urllib.parse import urlsplit

import msgspec
import pytest
from tests.helpers.patience import PATIENCE_S
from tests.helpers.stacks import spareless_stack

from slipstream import Stack, StackError
from slipstream.stack.supervisor_events import ProcessRestarted
from slipstream_bench.common.load.http_client import EventSplitter, HttpClient, RequestFailedError

pytestmark = pytest.mark.process

FRONTS = ["http-0", "http-1"]
NUM_STREAMS = 64
NUM_TOKENS = 200


@pytest.fixture(scope="module")
def stack():
    settings = {"http_port": 0, "http_workers": 2, "max_num_seqs": NUM_STREAMS}
    with spareless_stack("simulated:step_ms=10,mode=chain", **settings) as running:
        yield running


class Reading:
    """One stream, over as many connections as it takes."""

    def __init__(self, number: int, url: str, on_begun: Callable[[], None]) -> None:
        self._body = msgspec.json.encode(
            {
                "prompt": f"stream {number}",
                "max_tokens": NUM_TOKENS,
                "temperature": 0,
                "seed": number,
                "ignore_eos": True,
                "stream": True,
            }
        )
        self._http = HttpClient(urlsplit(url), {"Accept": "text/event-stream"})
        self._events = EventSplitter()
        self._on_begun = on_begun
        self.text = ""
        self.ends: list[str] = []
        self.num_breaks = 0

    async def run(self) -> None:
        """To its end."""
        while not self.ends:
            events, self._events = self._events, EventSplitter()  # half an event is none
            self._events.last_id = events.last_id
            last = {"Last-Event-ID": events.last_id.decode()} if events.last_id else {}
            try:
                await self._http.exchange("POST", "/v1/completions", self._body, self._take, last)
            except RequestFailedError as error:
                if error.reason not in ("disconnected", "connect", "http_503"):
                    raise
                self.num_breaks += 1
        self._http.close()

    def _take(self, piece: bytes) -> None:
        for data in self._events.feed(piece):
            if data == b"[DONE]":
                continue
            for choice in msgspec.json.decode(data)["choices"]:
                if choice["text"] and not self.text:
                    self._on_begun()
                self.text += choice["text"]
                self.ends += [choice["finish_reason"]] if choice["finish_reason"] else []


async def read_all(stack: Stack, during=None) -> list[Reading]:
    """64 streams at once; `during` is called when all of them have begun."""
    num_left, all_have_begun = NUM_STREAMS, asyncio.Event()

    def on_begun() -> None:
        nonlocal num_left
        num_left -= 1
        if not num_left:
            all_have_begun.set()

    readings = [Reading(number, stack.http_address, on_begun) for number in range(NUM_STREAMS)]
    tasks = [asyncio.create_task(reading.run()) for reading in readings]
    async with asyncio.timeout(2 * PATIENCE_S):
        await all_have_begun.wait()
        if during is not None:
            during()
        await asyncio.gather(*tasks)
    return readings


def num_connections(pid: int) -> int:
    """TCP connections of a process, the socket it listens at among them."""
    folder = f"/proc/{pid}/fd"
    links = []
    for fd in os.listdir(folder):
        try:
            links.append(os.readlink(f"{folder}/{fd}"))
        except OSError:
            continue
    with open(f"/proc/{pid}/net/tcp") as table:
        inodes = {f"socket:[{line.split()[9]}]" for line in table.readlines()[1:]}
    return len(inodes.intersection(links))


def restarted(stack: Stack, name: str) -> None:
    """Until another has taken the place."""
    while (event := stack.next_event(PATIENCE_S)) is not None:
        if isinstance(event, ProcessRestarted) and event.name == name:
            return
    raise AssertionError(f"{name} did not come back")


def test_streams_of_a_front_that_is_killed_go_on_at_another(stack):
    assert set(FRONTS) < set(stack.pids)
    expected = asyncio.run(read_all(stack))
    assert [reading.num_breaks for reading in expected] == [0] * NUM_STREAMS
    stack.events()

    killed = ""

    def kill() -> None:
        nonlocal killed
        # the fronts share the connections; each has a socket that listens, too
        assert all(num_connections(stack.pids[name]) > NUM_STREAMS // 4 for name in FRONTS)
        killed = max(FRONTS, key=lambda name: num_connections(stack.pids[name]))
        os.kill(stack.pids[killed], signal.SIGKILL)

    found = asyncio.run(read_all(stack, kill))
    assert [one.text for one in found] == [one.text for one in expected]
    assert [one.ends for one in found] == [["length"]] * NUM_STREAMS
    assert any(one.num_breaks for one in found)
    restarted(stack, killed)


@pytest.mark.parametrize("name", FRONTS)
def test_health_names_every_front(stack, name):
    http = HttpClient(urlsplit(stack.http_address), {})

    async def health() -> tuple[str, dict[str, str]]:
        body = bytearray()
        try:
            await http.exchange("GET", "/health", None, body.extend)
        except RequestFailedError as error:
            if error.reason != "http_503":
                raise
            body = bytearray(error.detail.encode())
        found = msgspec.json.decode(body)
        return found["status"], found.get("processes", {})

    async def main() -> None:
        async with asyncio.timeout(PATIENCE_S):
            while (await health())[0] != "ok" or FRONTS[0] not in (await health())[1]:
                pass
            assert set((await health())[1]) == {
                *("core", "worker", "tokenizer", "supervisor"),
                *FRONTS,
            }
            # the other one takes connections while this one does not
            http.close()
            os.kill(stack.pids[name], signal.SIGSTOP)
            try:
                while (await health())[1].get(name) != "silent":
                    pass
            finally:
                os.kill(stack.pids[name], signal.SIGCONT)
            while (await health())[0] != "ok":
                pass
        http.close()

    asyncio.run(main())


def test_a_port_in_use_is_one_clear_error_before_anything_is_loaded():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(StackError) as caught:
            Stack("simulated", http_port=port, http_workers=2)
    message = str(caught.value)
    assert message.startswith(f"cannot listen at http://127.0.0.1:{port}: Address already in use")
    assert "http_port" in message


def test_connections_wait_while_the_only_front_is_replaced():
    """They lie in a socket that is the supervisor's."""
    with spareless_stack("simulated:step_ms=1", http_port=0) as stack:
        where = urlsplit(stack.http_address)
        stack.events()
        front = os.pidfd_open(stack.pids["http"])
        os.kill(stack.pids["http"], signal.SIGKILL)
        assert select.select([front], [], [], PATIENCE_S)[0]  # it has ended
        os.close(front)
        with socket.create_connection((where.hostname, where.port), PATIENCE_S) as one:
            one.sendall(b"GET /version HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert one.recv(100).startswith(b"HTTP/1.1 200 OK")


def test_fronts_without_a_port_are_refused():
    with pytest.raises(
        ValueError, match="http_workers: got 2, allowed: 1 without http_port and uds"
    ):
        Stack("simulated", http_workers=2)
