"""One loop in three shapes: how a step's ids, one per request, can travel to the requests' readers.

In every shape a step's ids arrive as an array from the device, are put into a message, encoded,
decoded on the client-facing side, added to each request's history there, and handed to its reader,
which takes and drops them. There is no detokenizing and no stop check. Both sides are in one
process, so its collector sees what two would share.

- lists_of_lists: an object per request with a list of its new ids, although there is always one, as
  in engines that allow several tokens per step.
- ints: the same with the id itself.
- columns: the ids of all requests are bytes; a reader looks up its own there.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Protocol

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import Struct

from slipstream_ipc.columns import pack_u32, u32

Int64s = npt.NDArray[np.int64]


class HeapShape(Protocol):
    """Requests whose ids travel in one of the shapes."""

    def step(self, ids: Int64s) -> None:
        """One id for every request, int64 [batch], all the way to its reader."""

    def check_end(self, ids: Int64s) -> None:
        """Check that each request's history ends with its id in `ids`."""


class _ListOutput(Struct, array_like=True, gc=False):
    request_id: str
    new_token_ids: list[int]


class _IntOutput(Struct, array_like=True, gc=False):
    request_id: str
    new_token_id: int


class _ColumnOutputs(Struct, array_like=True, gc=False):
    rows: bytes
    token_ids: bytes


@dataclass(slots=True)
class _ListRequest:
    token_ids: list[int] = field(default_factory=list)
    unread: deque[_ListOutput] = field(default_factory=deque)


@dataclass(slots=True)
class _IntRequest:
    token_ids: list[int] = field(default_factory=list)
    unread: deque[_IntOutput] = field(default_factory=deque)


class ListsOfLists:
    """The shape `lists_of_lists`."""

    def __init__(self, batch: int) -> None:
        self._requests = {_name(index): _ListRequest() for index in range(batch)}
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(list[_ListOutput])

    def step(self, ids: Int64s) -> None:
        """See `HeapShape`."""
        new: list[list[int]] = ids[:, None].tolist()
        outputs = list(map(_ListOutput, self._requests, new))
        for output in self._decoder.decode(self._encoder.encode(outputs)):
            request = self._requests[output.request_id]
            request.token_ids.extend(output.new_token_ids)
            request.unread.append(output)
        for request in self._requests.values():
            request.unread.popleft()

    def check_end(self, ids: Int64s) -> None:
        """See `HeapShape`."""
        assert [request.token_ids[-1] for request in self._requests.values()] == ids.tolist()


class Ints:
    """The shape `ints`."""

    def __init__(self, batch: int) -> None:
        self._requests = {_name(index): _IntRequest() for index in range(batch)}
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(list[_IntOutput])

    def step(self, ids: Int64s) -> None:
        """See `HeapShape`."""
        new: list[int] = ids.tolist()
        outputs = list(map(_IntOutput, self._requests, new))
        for output in self._decoder.decode(self._encoder.encode(outputs)):
            request = self._requests[output.request_id]
            request.token_ids.append(output.new_token_id)
            request.unread.append(output)
        for request in self._requests.values():
            request.unread.popleft()

    def check_end(self, ids: Int64s) -> None:
        """See `HeapShape`."""
        assert [request.token_ids[-1] for request in self._requests.values()] == ids.tolist()


class Columns:
    """The shape `columns`."""

    def __init__(self, batch: int, max_steps: int) -> None:
        self._rows = np.arange(batch)
        self._history = np.zeros((batch, max_steps), np.uint32)
        self._lengths = np.zeros(batch, np.int64)
        self._unread: deque[_ColumnOutputs] = deque()
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(_ColumnOutputs)

    def step(self, ids: Int64s) -> None:
        """See `HeapShape`."""
        outputs = _ColumnOutputs(pack_u32(self._rows), pack_u32(ids))
        received = self._decoder.decode(self._encoder.encode(outputs))
        rows = u32(received.rows)
        self._history[rows, self._lengths[rows]] = u32(received.token_ids)
        self._lengths[rows] += 1
        self._unread.append(received)  # shared by all readers, which index into it
        self._unread.popleft()

    def check_end(self, ids: Int64s) -> None:
        """See `HeapShape`."""
        assert (self._history[self._rows, self._lengths - 1] == ids).all()


def _name(index: int) -> str:
    return f"cmpl-{index:032x}"
