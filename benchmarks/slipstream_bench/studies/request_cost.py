"""CPU time of the HTTP front's process per short request that is not streamed.

    python benchmarks/slipstream_bench/studies/request_cost.py [--connections N] [--requests N]
                                              [--runs N] [--get PATH] [PYTHON ...]

A stack over the simulated model answers `POST /v1/completions` over connections that are kept
alive, each with one request at a time. Measured is the user and system time of the front's process,
not wall time, from the first answer of every connection until `--requests` more have come. With
`--get PATH` the requests are GETs, which shows the HTTP server almost alone.

Checkouts are compared by their interpreters (PYTHON): each serves a stack, and runs take turns, so
that a busy machine is as busy for each. Only `slipstream.Stack` is imported, for older checkouts.
"""

from __future__ import annotations

import argparse
import json
import resource
import select
import socket
import statistics
import subprocess
import sys
from contextlib import ExitStack
from typing import Any
from urllib.parse import urlsplit

import psutil

_SILENCE_S = 60.0
_RECEIVE = 2**16
_HEAD_END = b"\r\n\r\n"
_LENGTH = b"content-length: "


class BareClient:
    """One connection with one request at a time."""

    def __init__(self, address: tuple[str, int], request: bytes) -> None:
        self.socket = socket.create_connection(address)
        self._request = request
        self._unread = b""

    def ask(self) -> None:
        """Send the request."""
        self.socket.sendall(self._request)

    def is_answered(self) -> bool:
        """Receive; whether the answer is complete. Raises: RuntimeError if it is not a 200."""
        data = self.socket.recv(_RECEIVE)
        self._unread += data
        head, end, body = self._unread.partition(_HEAD_END)
        if not data or (end and not head.startswith(b"HTTP/1.1 200 ")):
            raise RuntimeError(f"the server answered {self._unread[:300]!r}")
        length = int(head.lower().partition(_LENGTH)[2].partition(b"\r")[0]) if end else 0
        if not end or len(body) < length:
            return False
        self._unread = b""
        return True


def measure(address: tuple[str, int], request: bytes, num: int, total: int, pid: int) -> float:
    """CPU µs of process `pid` to a request, `num` of them at a time."""
    front, poller = psutil.Process(pid), select.epoll()
    clients = {
        one.socket.fileno(): one for one in (BareClient(address, request) for _ in range(num))
    }
    for fd, one in clients.items():
        poller.register(fd, select.EPOLLIN)
        one.ask()
    left, before, used, num_open = num + total, 0.0, 0.0, num
    while num_open:
        ready = poller.poll(_SILENCE_S)
        if not ready:
            raise RuntimeError(f"no answer for {_SILENCE_S:g} s")
        for fd, _ in ready:
            one = clients[fd]
            if not one.is_answered():
                continue
            left -= 1
            if left == total:
                before = sum(front.cpu_times()[:2])
            elif left == 0:
                used = sum(front.cpu_times()[:2]) - before
            if left >= 0:
                one.ask()
            else:
                num_open -= 1
    for one in clients.values():
        one.socket.close()
    return used * 1e6 / total


def _request(arguments: argparse.Namespace) -> bytes:
    lines, body = ["Host: localhost", "Accept: */*", "User-Agent: request-cost"], b""
    if arguments.get is not None:
        return "\r\n".join([f"GET {arguments.get} HTTP/1.1", *lines, "\r\n"]).encode()
    content = {"prompt": "a question", "max_tokens": arguments.tokens, "temperature": 0}
    body = json.dumps({**content, "ignore_eos": True}).encode()
    lines += ["Content-Type: application/json", f"Content-Length: {len(body)}"]
    return "\r\n".join(["POST /v1/completions HTTP/1.1", *lines, "\r\n"]).encode() + body


def serve(num: int, step_ms: float) -> None:
    """Serve a stack, and print its host, port and front's process, until standard input ends."""
    import slipstream

    model = f"simulated:step_ms={step_ms:g},prefill_us=0"
    settings: dict[str, Any] = {"max_num_seqs": num, "spare_core": False, "spare_worker": False}
    with slipstream.Stack(model, http_port=0, **settings) as stack:
        where = urlsplit(stack.http_address)
        print(where.hostname, where.port, stack.pids["http"], flush=True)
        sys.stdin.read()


def compare(arguments: argparse.Namespace) -> None:
    """Start a stack for each interpreter, measure in turns, print the medians."""
    with ExitStack() as stack:
        served: list[tuple[tuple[str, int], int]] = []
        for python in arguments.python:
            options = ["--serve", "--connections", str(arguments.connections)]
            command = [python, "-P", __file__, *options, "--step-ms", str(arguments.step_ms)]
            child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            stack.callback(child.wait)
            assert child.stdin is not None
            assert child.stdout is not None
            stack.callback(child.stdin.close)
            host, port, pid = child.stdout.readline().decode().split()
            served.append(((host, int(port)), int(pid)))
        request, load = _request(arguments), (arguments.connections, arguments.requests)
        used: list[list[float]] = [[] for _ in served]
        for _ in range(arguments.runs):
            for (address, front), values in zip(served, used, strict=True):
                values.append(measure(address, request, *load, front))
                print(f"{values[-1]:.0f}", end=" ", file=sys.stderr, flush=True)
    for python, values in zip(arguments.python, used, strict=True):
        shown = " ".join(f"{value:.0f}" for value in values)
        print(
            f"{statistics.median(values):6.1f} CPU µs of the front to a request: {python} ({shown})"
        )


def main() -> int:
    """Measure and print; exit code 0."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("python", nargs="*", default=[sys.executable], metavar="PYTHON")
    parser.add_argument("--connections", type=int, default=512, metavar="N")
    parser.add_argument("--requests", type=int, default=4000, metavar="N", help="of a run")
    parser.add_argument("--runs", type=int, default=7, metavar="N")
    parser.add_argument("--tokens", type=int, default=8, metavar="N")
    parser.add_argument("--step-ms", type=float, default=30.0, metavar="MS")
    parser.add_argument("--get", metavar="PATH")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    if arguments.serve:
        serve(arguments.connections, arguments.step_ms)
    else:
        compare(arguments)
    return 0


if __name__ == "__main__":
    sys.exit(main())
