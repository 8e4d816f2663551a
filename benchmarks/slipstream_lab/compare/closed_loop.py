"""Keeps a number of streamed completions running over HTTP, and reads them as cheaply as Python
can: plain sockets, one thread, nothing parsed but the end of an answer.

Each place is a connection that is kept: when its answer has ended, its next request is sent. The
last event of an answer, with the server's count of its tokens, proves that it is whole.
"""

from __future__ import annotations

import select
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from slipstream_bench.common.measures import cannot_measure

_END = b"0\r\n\r\n"  # end of a chunked body
_EVENT_END = b"\n\n"
_OK = b"HTTP/1.1 200 "
_SILENCE_S = 120.0
_RECEIVE_BYTES = 2**16
_TAIL_BYTES = 1024  # the event with the usage, and the one that ends the stream


@dataclass(slots=True)
class ClosedLoopResult:
    """From the first request to the end of the last answer. used: the increase of each value of
    `cpu()`, in seconds. num_events: with those of usage and end.
    """

    num_events: int = 0
    wall_s: float = 0.0
    used: dict[str, float] = field(default_factory=dict)
    ttfts_s: list[float] = field(default_factory=list)


@dataclass(slots=True)
class _Place:
    socket: socket.socket
    sent_s: float = 0.0
    is_silent: bool = True
    tail: bytes = b""


def run_closed_loop(
    address: tuple[str, int],
    requests: Sequence[bytes],
    num_places: int,
    output_len: int,
    cpu: Callable[[], dict[str, float]],
) -> ClosedLoopResult:
    """Send all requests, at most `num_places` at a time, and read all answers.

    Raises: EngineError if an answer is refused, cut short, or not of `output_len` tokens.
    """
    waiting = iter(requests)
    places: dict[int, _Place] = {}
    poller = select.epoll()
    try:
        for _ in range(min(num_places, len(requests))):
            one = socket.create_connection(address)
            places[one.fileno()] = _Place(one)
            poller.register(one, select.EPOLLIN)
        return _run(poller, places, waiting, output_len, cpu)
    finally:
        poller.close()
        for place in places.values():
            place.socket.close()


def _run(
    poller: select.epoll,
    places: dict[int, _Place],
    waiting: Iterator[bytes],
    output_len: int,
    cpu: Callable[[], dict[str, float]],
) -> ClosedLoopResult:
    result = ClosedLoopResult()
    proof = b'"completion_tokens":%d' % output_len
    before, begin_s = cpu(), time.perf_counter()
    for place in places.values():
        _send(place, next(waiting))
    num_open = len(places)
    while num_open:
        ready = poller.poll(_SILENCE_S)
        if not ready:
            raise cannot_measure(f"{num_open} streams were silent for {_SILENCE_S:g} s")
        for fd, _ in ready:
            place = places[fd]
            data = place.socket.recv(_RECEIVE_BYTES)
            num_events = data.count(_EVENT_END)
            if not place.tail and not data.startswith(_OK):
                raise cannot_measure(f"a server answered {data[:300]!r}")
            if place.is_silent and num_events:
                place.is_silent = False
                result.ttfts_s.append(time.perf_counter() - place.sent_s)
            result.num_events += num_events
            place.tail = data if len(data) >= _TAIL_BYTES else (place.tail + data)[-_TAIL_BYTES:]
            if place.tail.endswith(_END):
                if proof not in place.tail.replace(b": ", b":"):
                    raise cannot_measure(f"an answer without {proof!r} ended {place.tail!r}")
                request = next(waiting, None)
                if request is None:
                    poller.unregister(fd)
                    num_open -= 1
                else:
                    _send(place, request)
            elif not data:
                raise cannot_measure(f"a connection ended within an answer: {place.tail!r}")
    result.wall_s = time.perf_counter() - begin_s
    after = cpu()
    result.used = {name: after[name] - before[name] for name in before}
    return result


def _send(place: _Place, request: bytes) -> None:
    place.sent_s, place.is_silent, place.tail = time.perf_counter(), True, b""
    place.socket.sendall(request)
