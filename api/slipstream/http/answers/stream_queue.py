"""Hands the deltas of a streamed answer's stream to what writes them, as its client reads.

Under backpressure, and while something is written in time slices, deltas stay in the stream's
queue, where they are merged (`unread_deltas`), and leave in few portions once there is room: a slow
reader costs no more than its answer and delays no other. It is dropped above `held_bytes`, or after
`stall_s` (`connection`).
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Protocol

from slipstream.client.streams.stream_state import StreamState
from slipstream.errors import SlipstreamError
from slipstream.http.answers.broadcast import ChunkWriter
from slipstream.http.answers.live_answer import LiveAnswer, is_whole, raise_failure
from slipstream.http.api_errors import ApiError
from slipstream.http.response_encoding import json_part
from slipstream.outputs import Delta, begin_of, end_of
from slipstream_ipc.telemetry.logs import of_requests

_logger = logging.getLogger(__name__)
_PORTION_BYTES = 2**16  # of a backlog, to be written at once


class DeltaWriter(ChunkWriter, Protocol):
    """Writes the deltas of one stream. writes_deltas: `write_delta` may be called."""

    writes_deltas: bool

    def write_deltas(self, deltas: Sequence[Delta]) -> None:
        """Write consecutive deltas that are not the stream's last."""

    def write_end(self, deltas: Sequence[Delta]) -> None:
        """Write the last deltas of a stream that has not failed, and its end."""


class StreamQueue:
    """The wakeup of one stream. stream: how the broadcast writes its deltas.

    token_bytes: that a token takes in the answer beside its text, estimated.
    """

    def __init__(
        self, live: LiveAnswer, state: StreamState, writer: DeltaWriter, token_bytes: int
    ) -> None:
        self._live = live
        self._exchange = live.exchange
        self._state = state
        self._writer = writer
        self._token_bytes = token_bytes
        self._has_ended = False  # the end has been handled
        self.stream = live.context.broadcast.join(state, self, live.exchange, live.handle_exception)

    def ring(self, state: StreamState) -> None:
        """There are new deltas, the stream has ended, or more may be written."""
        exchange = self._exchange
        if self._has_ended or not exchange.is_open:
            return
        try:
            if exchange.is_paused:
                if self._held_bytes() > self._live.context.limits.held_bytes:
                    _logger.warning(
                        "dropped: its client does not read the stream",
                        extra=of_requests(exchange.request.id),
                    )
                    exchange.drop()
            elif self._live.is_busy:
                return
            elif self._writer.writes_deltas and not state.is_over and len(state.deltas) == 1:
                delta = state.deltas.popleft()
                self._writer.write_delta(delta, json_part(delta.text))
            else:
                self._flush()
        except (ApiError, SlipstreamError) as error:
            self._live.fail(error)
        except Exception:
            self._live.handle_exception()

    def resume(self) -> None:
        """More may be written."""
        self.ring(self._state)

    def _flush(self) -> None:
        """Write the queued deltas while there is no backpressure, then the end."""
        state = self._state
        while True:
            deltas = self._take()
            if state.is_over and not state.deltas:
                break
            self._writer.write_deltas(deltas)
            if self._exchange.is_paused or self._live.is_busy or not state.deltas:
                return
        self._live.settle(state)
        if not is_whole(state):
            self._writer.write_deltas(deltas)
            if self._live.is_busy:
                return
        raise_failure(state, self._live.plan)
        self._has_ended = True
        self._live.num_unwritten -= 1
        self._writer.write_end(deltas)

    def _take(self) -> list[Delta]:
        """Take the oldest queued deltas, up to `_PORTION_BYTES`."""
        deltas = self._state.deltas
        taken: list[Delta] = []
        num_bytes = 0
        while deltas and num_bytes < _PORTION_BYTES:
            delta = deltas.popleft()
            taken.append(delta)
            num_bytes += len(delta.text) + delta.num_tokens * self._token_bytes
        return taken

    def _held_bytes(self) -> int:
        deltas = self._state.deltas
        if not deltas:
            return 0
        begin, end = begin_of(deltas[0]), end_of(deltas[-1])
        num_tokens = end.num_tokens - begin.num_tokens
        return end.num_chars - begin.num_chars + num_tokens * self._token_bytes
