"""Reads and counts many event streams with plain sockets: the cheapest of clients.

- The counted span begins when every stream has had an event, and ends with the first stream's end.
- Events are counted by the empty line at their end, which neither JSON nor a chunk's frame
  contains.
"""

from __future__ import annotations

import select
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from slipstream_bench.common.measures import cannot_measure

_END = b"0\r\n\r\n"  # end of a chunked body
_EVENT_END = b"\n\n"
_OK = b"HTTP/1.1 200 "
_SILENCE_S = 60.0
_RECEIVE = 2**18


@dataclass(frozen=True, slots=True)
class EventSpan:
    """The counts of the span. used: the increase of each value of `cpu()`, in seconds."""

    num_events: int
    num_bytes: int
    wall_s: float
    used: dict[str, float]


def read_streams(
    address: tuple[str, int], requests: Sequence[bytes], cpu: Callable[[], dict[str, float]]
) -> EventSpan:
    """Send each request on its own connection, and read all answers to their ends.

    Raises: EngineError if an answer is not a stream, or ends before there is a span.
    """
    poller = select.epoll()
    sockets: dict[int, socket.socket] = {}
    try:
        for request in requests:
            one = socket.create_connection(address)
            sockets[one.fileno()] = one
            one.sendall(request)
            one.setblocking(False)
            poller.register(one, select.EPOLLIN)
        return _read(poller, sockets, cpu)
    finally:
        poller.close()
        for one in sockets.values():
            one.close()


def _read(
    poller: select.epoll, sockets: dict[int, socket.socket], cpu: Callable[[], dict[str, float]]
) -> EventSpan:
    silent, num_open = set(sockets), len(sockets)
    num_events = num_bytes = 0
    begin_s, used = 0.0, dict[str, float]()
    span: EventSpan | None = None
    while num_open:
        ready = poller.poll(_SILENCE_S)
        if not ready:
            raise cannot_measure(f"{num_open} streams were silent for {_SILENCE_S:g} s")
        for fd, _ in ready:
            data = sockets[fd].recv(_RECEIVE)
            if silent:
                if fd in silent and _EVENT_END in data:
                    silent.discard(fd)
                    if not silent:
                        used, begin_s = cpu(), time.perf_counter()
                elif data[:9] == _OK[:9] and not data.startswith(_OK):
                    raise cannot_measure(f"a server answered {data[:300]!r}")
            elif span is None:
                if not data.endswith(_END) and data:
                    num_events += data.count(_EVENT_END)
                    num_bytes += len(data)
                else:
                    after = cpu()
                    more = {name: after[name] - used[name] for name in used}
                    wall_s = time.perf_counter() - begin_s
                    span = EventSpan(num_events, num_bytes, wall_s, more)
            if data.endswith(_END) or not data:
                poller.unregister(fd)
                num_open -= 1
    if span is None or not span.num_events:
        raise cannot_measure("the streams were too short: they never ran all at once")
    return span
