"""What has come of a stream whose end alone is waited for: its deltas are joined as they come, and
their log-probabilities held apart.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from slipstream.client.streams.unread_deltas import merge_unread
from slipstream.http.answers.broadcast import BroadcastStream
from slipstream.http.openai.held_logprobs import HeldLogprobs
from slipstream.outputs import Delta, columns_of, join
from slipstream_ipc.messages import End


class HeldDeltas:
    """The deltas of one stream. logprobs: of all tokens, once `whole` has been called."""

    def __init__(self, stream: BroadcastStream) -> None:
        self._stream = stream
        self.logprobs = HeldLogprobs()
        stream.merge = self._merge

    def whole(self, end: End | None) -> Delta:
        """All deltas as one, without log-probabilities. end: the stream's."""
        joined = self._joined(list(self._stream.deltas), end)
        self._stream.deltas.clear()
        return joined

    def _merge(self, unread: deque[Delta]) -> None:
        merge_unread(unread, self._joined)

    def _joined(self, deltas: Sequence[Delta], end: End | None = None) -> Delta:
        for delta in deltas:
            self.logprobs.add(columns_of(delta))
        return join(deltas, end, has_logprobs=False)
