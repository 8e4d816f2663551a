"""A fuzz run over HTTP: a stack with a simulated device and a front, both processes, and clients.

Every request ends once, with a status that blames its client or none: 2xx, 4xx, or 503 where the
server says that it is overloaded. A stream ends with its last event. Behind each request another
client, of another key, gets /version from the same front, which at the end is the process that it
was and has logged no exception.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from slipstream_bench.common.provenance import commit
from slipstream_verify.fuzz.fuzz_run import FuzzFailed
from slipstream_verify.fuzz.http_requests import HttpFuzzRequest, http_request

_KEYS = ("of-attackers", "of-others")
_MODEL = "simulated:step_ms=1,max_model_len=65536"
_START_S = 120.0
_ANSWER_S = 120.0  # that an answer may take
_TOLD_S = 30.0  # until a front tells its process
_MOST_SHOWN = 10
_MOST_IDS = 64
_LAST_EVENTS = (b"data: [DONE]\n\n", b"event: message_stop\n", b"event: error\n", b'"error":')
_LAST_RESPONSES = tuple(
    b"event: " + each
    for each in (b"response.completed", b"response.incomplete", b"response.failed", b"error")
)


class HttpFuzzResult(Struct, frozen=True, kw_only=True):
    """The result of a run. by_kind, statuses: of the requests. wrong: what went wrong, with the
    number of its request. longest_version_cpu_s: the most CPU time that the front used while a
    /version of the other key waited, whatever else the machine does.
    """

    seed: int
    requests: int
    by_kind: dict[str, int]
    statuses: dict[str, int]
    num_wrong: int
    wrong: tuple[str, ...]
    seconds: float
    longest_version_cpu_s: float
    begin_mib: float
    end_mib: float
    commit: str

    @property
    def is_good(self) -> bool:
        """Whether every request ended as it may, and the front is unharmed."""
        return not self.num_wrong


def fuzz_http(
    num_requests: int,
    seed: int,
    on_progress: Callable[[int], object] = lambda _num: None,
    *,
    num_clients: int = 4,
) -> HttpFuzzResult:
    """Run it and return the result. Raises: FuzzFailed if the stack does not start."""
    with tempfile.TemporaryDirectory(prefix="slipstream-fuzz-") as folder:
        log = Path(folder) / "log"
        with _serving(Path(folder), log) as port:
            run = _HttpRun(port, seed, num_requests, on_progress)
            run.run(num_clients)
            return run.result(log)


@contextlib.contextmanager
def _serving(folder: Path, log: Path) -> Iterator[int]:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        port = int(bound.getsockname()[1])
    keys = [word for key in _KEYS for word in ("--api-key", key)]
    line = [sys.executable, "-P", "-m", "slipstream", "serve", _MODEL, "--port", str(port), *keys]
    line += ["--served-model-name", "m"]
    line += ["--runtime-dir", str(folder / "stack"), "--no-spare-worker", "--no-spare-core"]
    with log.open("wb") as out, subprocess.Popen(line, stdout=out, stderr=out) as server:
        try:
            deadline = time.monotonic() + _START_S
            while not _is_ready(port):
                if server.poll() is not None or time.monotonic() > deadline:
                    raise FuzzFailed(f"the server does not start: {log.read_text()[-2000:]}")
                time.sleep(0.05)  # it says that it is ready to a reader of its log alone
            yield port
        finally:
            server.terminate()


def _is_ready(port: int) -> bool:
    with contextlib.suppress(OSError, http.client.HTTPException):
        return _ask(port, "GET", "/ready", b"")[0] == 200
    return False


def _ask(
    port: int, method: str, path: str, body: bytes, key: str = _KEYS[0]
) -> tuple[int, str, bytes]:
    """The status, the type and the body of an answer that has ended."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=_ANSWER_S)
    try:
        headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
        connection.request(method, path, body or None, headers)
        answer = connection.getresponse()
        return answer.status, answer.headers.get("Content-Type", ""), answer.read()
    finally:
        connection.close()


def wrong_with(request: HttpFuzzRequest, status: int, kind: str, body: bytes) -> str:
    """What is wrong with an answer; empty if nothing is."""
    if "event-stream" in kind:
        if status != 200 or not request.is_streamed:
            return f"a stream with status {status}"
        ends = (*_LAST_RESPONSES, *_LAST_EVENTS) if "resp" in request.path else _LAST_EVENTS
        is_whole = body.endswith(b"\n\n")
        last = body[:-2].rpartition(b"\n\n")[2] + b"\n\n" if is_whole else b""
        return (
            "" if any(end in last for end in ends) else f"a stream that ends with {last[-200:]!r}"
        )
    if status >= 500 and not (status == 503 and b"overloaded" in body):
        return f"status {status}: {body[:200]!r}"
    if not 200 <= status < 600:
        return f"status {status}"
    if "json" in kind:
        try:
            found = msgspec.json.decode(body)
        except msgspec.DecodeError as error:
            return f"a body that is no JSON: {error}"
        if status >= 400 and not (isinstance(found, dict) and found.get("error")):
            return f"an error without its reason: {body[:200]!r}"
    return ""


class _HttpRun:
    def __init__(
        self, port: int, seed: int, num_requests: int, on_progress: Callable[[int], object]
    ) -> None:
        self._port = port
        self._seed = seed
        self._num = num_requests
        self._on_progress = on_progress
        self._lock = threading.Lock()
        self._next = 0
        self._done = 0
        self._kinds: Counter[str] = Counter()
        self._statuses: Counter[str] = Counter()
        self._ids: deque[str] = deque(maxlen=_MOST_IDS)  # of responses
        self._wrong: list[str] = []
        self._longest_cpu_s = 0.0
        self._pid = self._front()
        self._begin_mib = self._mib()
        self._begun_at = time.monotonic()

    def run(self, num_clients: int) -> None:
        clients = [threading.Thread(target=self._client) for _ in range(num_clients)]
        for client in clients:
            client.start()
        for client in clients:
            client.join()

    def result(self, log: Path) -> HttpFuzzResult:
        if self._front() != self._pid:
            self._wrong.append("the front was replaced")
        lines = log.read_text(errors="replace").splitlines()
        self._wrong += [f"log: {line[:300]}" for line in lines if _is_internal(line)]
        return HttpFuzzResult(
            seed=self._seed,
            requests=self._done,
            by_kind=dict(sorted(self._kinds.items())),
            statuses=dict(sorted(self._statuses.items())),
            num_wrong=len(self._wrong),
            wrong=tuple(self._wrong[:_MOST_SHOWN]),
            seconds=time.monotonic() - self._begun_at,
            longest_version_cpu_s=self._longest_cpu_s,
            begin_mib=self._begin_mib,
            end_mib=self._mib(),
            commit=commit() or "unknown",
        )

    def _client(self) -> None:
        while True:
            with self._lock:
                number, self._next = self._next, self._next + 1
                ids = tuple(self._ids)
            if number >= self._num:
                return
            request = http_request(self._seed, number, ids)
            status, wrong = self._send(request)
            begin_s = self._cpu_s()
            try:
                found, _, _ = _ask(self._port, "GET", "/version", b"", _KEYS[1])
                wrong = wrong or ("" if found == 200 else f"/version: status {found}")
            except (OSError, http.client.HTTPException) as error:
                wrong = wrong or f"/version: {type(error).__name__}: {error}"
            cpu_s = self._cpu_s() - begin_s
            with self._lock:
                self._longest_cpu_s = max(self._longest_cpu_s, cpu_s)
                self._done += 1
                self._kinds.update(request.kinds or ("usual",))
                self._statuses[f"{status} {request.path.partition('?')[0][:40]}"] += 1
                if wrong:
                    what = f"{request.method} {request.path[:60]} ({', '.join(request.kinds)})"
                    self._wrong.append(f"request {number}, {what}: {wrong}")
                self._on_progress(self._done)

    def _send(self, request: HttpFuzzRequest) -> tuple[int, str]:
        try:
            status, kind, body = _ask(self._port, request.method, request.path, request.body)
        except (OSError, http.client.HTTPException) as error:
            return 0, f"{type(error).__name__}: {error}"
        if request.path == "/v1/responses" and status == 200 and "json" in kind:
            with self._lock:
                self._ids.append(str(_id_of(body)))
        return status, wrong_with(request, status, kind, body)

    def _front(self) -> int:
        end_s = time.monotonic() + _TOLD_S
        while time.monotonic() < end_s:
            _, _, body = _ask(self._port, "GET", "/health", b"")
            pids = json.loads(body).get("pids", {})
            if "http" in pids:  # a front hears of the processes a moment after it is ready
                return int(pids["http"])
        raise TimeoutError(f"/health named no process for {_TOLD_S:.0f} s")

    def _cpu_s(self) -> float:
        with contextlib.suppress(OSError):
            return int(Path(f"/proc/{self._pid}/schedstat").read_text().split()[0]) / 1e9
        return 0.0

    def _mib(self) -> float:
        with contextlib.suppress(OSError):
            rollup = Path(f"/proc/{self._pid}/smaps_rollup").read_text()
            [kib] = [line.split()[1] for line in rollup.splitlines() if line.startswith("Pss:")]
            return int(kib) / 1024
        return 0.0


def _id_of(body: bytes) -> Any:
    with contextlib.suppress(msgspec.DecodeError):
        found = msgspec.json.decode(body)
        if isinstance(found, dict):
            return found.get("id")
    return None


def _is_internal(line: str) -> bool:
    return "Traceback" in line or " ERROR " in line or " CRITICAL " in line
