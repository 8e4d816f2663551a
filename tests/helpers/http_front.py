"""An HTTP front in a separate process, and raw connections to it."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
from typing import Any

import msgspec
from tests.helpers.patience import PATIENCE_S

from slipstream.demo_model import MODEL_PATH
from slipstream.http.config import FrontConfig
from slipstream_ipc.messages import Status

JSON = "Content-Type: application/json"


class Front:
    """The process of a front. port: known once it is ready, which the constructor waits for unless
    `wait` is False.
    """

    def __init__(self, address: str, wait: bool = True, **options: Any) -> None:
        config = FrontConfig(address, str(MODEL_PATH), port=options.pop("port", 0), **options)
        read_fd, write_fd = os.pipe()
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-m", "slipstream.http.main"],
            stdin=subprocess.PIPE,
            stderr=subprocess.PIPE,
            pass_fds=(write_fd,),
            env={
                **os.environ,
                "SLIPSTREAM_STATUS_FD": str(write_fd),
                "SLIPSTREAM_LOG_LEVEL": "WARNING",
            },
        )
        os.close(write_fd)
        assert self.process.stdin is not None
        self.process.stdin.write(msgspec.json.encode(config))
        self.process.stdin.close()
        self.process.stdin = None
        self._status = read_fd
        self._unread = b""
        self.port = options.get("port", 0)
        if wait:
            status = self.status()
            assert status.ready, status
            self.port = int(status.detail.rpartition(":")[2])

    def status(self) -> Status:
        """The next status that the process reports, beats skipped."""
        while True:
            while b"\n" not in self._unread:
                ready, _, _ = select.select([self._status], [], [], PATIENCE_S)
                assert ready, "the front says nothing"
                self._unread += os.read(self._status, 4096)
            line, self._unread = self._unread.split(b"\n", 1)
            status = msgspec.json.decode(line, type=Status)
            if not status.beat:
                return status

    def stop(self) -> str:
        """Stop the process. Returns its log."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        _, errors = self.process.communicate(timeout=PATIENCE_S)
        os.close(self._status)
        self._status = -1
        return errors.decode()


class Answer:
    """A response. body: without the framing of chunks."""

    def __init__(self, head: bytes, body: bytes) -> None:
        first, *lines = head.decode().split("\r\n")
        self.version, status, self.reason = first.split(" ", 2)
        self.status = int(status)
        found = [line.split(": ", 1) for line in lines]
        self.headers = {name.lower(): value for name, value in found}
        self.body = body

    @property
    def json(self) -> Any:
        """The body, decoded."""
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        """The fields of an error body."""
        assert set(self.json) == {"error"}
        fields: dict[str, Any] = self.json["error"]
        assert set(fields) == {"message", "type", "param", "code"}
        return fields

    @property
    def events(self) -> list[Any]:
        """The decoded events of a stream; "[DONE]" stays a string."""
        return events_of(self.body)


def events_of(body: bytes) -> list[Any]:
    """Decode server-sent events. Asserts that each is one line, however lines are split."""
    parts = body.decode().split("\n\n")
    assert parts.pop() == ""
    for part in parts:
        assert part.startswith("data: ")
        assert len(part.splitlines()) == 1, part
    contents = [part.removeprefix("data: ") for part in parts]
    return [content if content == "[DONE]" else json.loads(content) for content in contents]


class Raw:
    """A connection on which a test can send any bytes."""

    def __init__(self, port: int, receive_buffer: int | None = None) -> None:
        self.socket = socket.socket()
        if receive_buffer is not None:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        self.socket.settimeout(PATIENCE_S)
        self.socket.connect(("127.0.0.1", port))
        self._unread = b""

    def __enter__(self) -> Raw:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()

    def send(self, data: str | bytes) -> None:
        """Send data unchanged."""
        self.socket.sendall(data.encode() if isinstance(data, str) else data)

    def get(self, path: str, *headers: str) -> Answer:
        """Send a request and read its answer."""
        self.send("\r\n".join([f"GET {path} HTTP/1.1", "Host: localhost", *headers, "\r\n"]))
        return self.read()

    def post(self, path: str, content: Any, *headers: str, version: str = "1.1") -> None:
        """Send a request with a body: bytes as they are, anything else as JSON."""
        body = content if isinstance(content, bytes) else json.dumps(content).encode()
        lines = [
            f"POST {path} HTTP/{version}",
            "Host: localhost",
            JSON,
            f"Content-Length: {len(body)}",
        ]
        self.send("\r\n".join([*lines, *headers, "\r\n"]).encode() + body)

    def read(self, *, with_body: bool = True) -> Answer:
        """Read the next answer to its end."""
        head = self.read_until(b"\r\n\r\n")[:-4]
        answer = Answer(head, b"")
        if not with_body or answer.status == 100:
            return answer
        if answer.headers.get("transfer-encoding") == "chunked":
            while chunk := self.read_chunk():
                answer.body += chunk
        elif "content-length" in answer.headers:
            answer.body = self.read_bytes(int(answer.headers["content-length"]))
        else:
            answer.body = self.read_to_end()
        return answer

    def read_chunk(self) -> bytes:
        """Read the next chunk of a chunked body; b"" at its end."""
        size = int(self.read_until(b"\r\n"), 16)
        chunk = self.read_bytes(size)
        assert self.read_bytes(2) == b"\r\n"
        return chunk

    def read_event(self) -> Any:
        """Read the next event of a stream that sends one event per chunk."""
        (event,) = events_of(self.read_chunk())
        return event

    def read_until(self, end: bytes) -> bytes:
        """Read up to and including `end`."""
        while end not in self._unread:
            self._receive()
        found, _, self._unread = self._unread.partition(end)
        return found + end

    def read_bytes(self, number: int) -> bytes:
        """Read exactly `number` bytes."""
        while len(self._unread) < number:
            self._receive()
        found, self._unread = self._unread[:number], self._unread[number:]
        return found

    def read_to_end(self) -> bytes:
        """Read until the server closes the connection."""
        while data := self.socket.recv(1 << 16):
            self._unread += data
        found, self._unread = self._unread, b""
        return found

    def _receive(self) -> None:
        data = self.socket.recv(1 << 16)
        assert data, f"the connection ended after {self._unread!r}"
        self._unread += data


def read_events(raw: Raw, said: bytes = b"") -> tuple[str, str, bool]:
    """Read a stream of completions until it ends or is cut off; `said` was read of it already.

    Returns its text, the last event's id, and whether it is whole.
    """
    try:
        while chunk := raw.read_chunk():
            said += chunk
    except (ConnectionError, AssertionError):
        pass
    text, last = "", ""
    for event in said.decode().split("\n\n"):
        lines = dict(line.partition(": ")[::2] for line in event.splitlines())
        last = lines.get("id", last)
        data = lines.get("data", "[DONE]")
        if data != "[DONE]" and "choices" in (body := json.loads(data)):
            text += "".join(choice["text"] for choice in body["choices"])
    return text, last, said.endswith(b"data: [DONE]\n\n")
