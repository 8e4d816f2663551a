"""Many clients that mean no good, beside a stream that goes on."""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest
from tests.helpers.fake_worker import Entry, deltas
from tests.helpers.http_front import Front, Raw

from slipstream.http.config import Limits
from slipstream_ipc.messages import End, Submit

MALFORMED = [b"nonsense\r\n\r\n", b"\x16\x03\x01\0\0", b"GET / HTTP/1.1\r\n\r\n", b"\0" * 100]
MIB = 2**20


@pytest.mark.process
def test_malformed_requests_and_half_heads_harm_no_stream(worker):
    front = Front(worker.address, limits=Limits(linger_s=0.1))
    try:
        with ExitStack() as stack:
            stream = stack.enter_context(Raw(front.port))
            stream.post("/v1/completions", {"prompt": "x", "stream": True})
            handle = worker.expect_and_accept()
            worker.send(deltas(Entry(handle, "a")))
            stream.read_until(b"\r\n\r\n")
            assert stream.read_event()["choices"][0]["text"] == "a"
            for _ in range(1000):
                half = stack.enter_context(Raw(front.port))
                half.send("GET /version HTTP/1.1\r\nX: ")
            before = psutil.Process(front.process.pid).memory_info().rss
            for number in range(1, 4001):
                with Raw(front.port) as raw:
                    raw.send(MALFORMED[number % len(MALFORMED)])
                    assert raw.read().status == 400
                if number % 100 == 0:
                    worker.send(deltas(Entry(handle, "b", number // 100)))
                    assert stream.read_event()["choices"][0]["text"] == "b"
            assert psutil.Process(front.process.pid).memory_info().rss - before < 16 * MIB
            worker.send(deltas(Entry(handle, "", 41, end=End("stop", 41))))
            assert stream.read_event()["choices"][0]["finish_reason"] == "stop"
    finally:
        log = front.stop()
    assert log == ""


CHATS = 40
TURNS = 16_000


@pytest.mark.process
def test_long_chats_that_run_take_no_more_than_was_sent(worker):
    """Each took 3.6 MiB of its front for half a megabyte of JSON, until its stream had ended."""
    body = json.dumps({"messages": [{"role": "user", "content": "x"}] * TURNS, "stream": True})
    front = Front(worker.address)
    try:
        with ExitStack() as stack:

            def begin() -> Submit:
                raw = stack.enter_context(Raw(front.port))
                raw.post("/v1/chat/completions", body.encode())
                submit = worker.expect(Submit)
                handle = worker.accept(submit, [7] * 300_000)
                worker.send(deltas(Entry(handle, "a")))
                raw.read_until(b"\r\n\r\n")  # the front has the prompt's ids, and what they begin
                return submit

            begin()  # what one takes while it is read
            before = pss(front)
            for _ in range(CHATS):
                submit = begin()
            assert len(submit.messages) == TURNS
            assert pss(front) - before < 1.5 * CHATS * len(body)
    finally:
        log = front.stop()
    assert log == ""


def pss(front: Front) -> int:
    """Bytes of memory that the process has for itself, and its part of what it shares."""
    rollup = Path(f"/proc/{front.process.pid}/smaps_rollup").read_text()
    [kib] = [line.split()[1] for line in rollup.splitlines() if line.startswith("Pss:")]
    return int(kib) * 1024
