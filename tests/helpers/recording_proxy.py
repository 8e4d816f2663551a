"""A proxy in front of an HTTP server that keeps each request and its whole answer."""

from __future__ import annotations

import http.client
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from tests.helpers.patience import PATIENCE_S


@dataclass(frozen=True)
class Recorded:
    """A request's path and body, and its answer. headers: the answer's, names in lower case."""

    path: str
    body: Any
    status: int
    headers: dict[str, str]
    answer: bytes

    @property
    def events(self) -> list[Any]:
        """The answer as JSON: the data of its events if it is a stream, else the one object."""
        if not self.headers["content-type"].startswith("text/event-stream"):
            return [json.loads(self.answer)]
        lines = self.answer.decode().split("\n")
        found = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
        return [json.loads(data) for data in found if data != "[DONE]"]


@dataclass(frozen=True)
class RecordingProxy:
    """address: where clients find it. recorded: requests in the order in which answers ended."""

    address: str
    recorded: list[Recorded] = field(default_factory=list)


@contextmanager
def recording(upstream: str) -> Iterator[RecordingProxy]:
    """A proxy of the server at `upstream`, as long as the block runs."""
    host, _, port = upstream.removeprefix("http://").rpartition(":")
    found: list[Recorded] = []

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def handle_request(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            server = http.client.HTTPConnection(host, int(port), timeout=PATIENCE_S)
            try:
                server.request(self.command, self.path, body, dict(self.headers))
                answer = server.getresponse()
                headers = {name.lower(): value for name, value in answer.getheaders()}
                self.send_response(answer.status)
                for name, value in headers.items():
                    if name not in ("transfer-encoding", "connection", "date", "server"):
                        self.send_header(name, value)
                self.send_header("Connection", "close")
                self.end_headers()
                whole = b""
                while piece := answer.read1(65_536):
                    whole += piece
                    self.wfile.write(piece)
                sent = json.loads(body) if body else None
                found.append(Recorded(self.path, sent, answer.status, headers, whole))
            finally:
                server.close()
                self.close_connection = True

        do_GET = do_POST = do_DELETE = handle_request  # noqa: N815

        def log_message(self, *_: object) -> None:
            """Keep standard error for what tests say."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield RecordingProxy(f"http://127.0.0.1:{server.server_port}", found)
        finally:
            server.shutdown()
            thread.join(PATIENCE_S)
