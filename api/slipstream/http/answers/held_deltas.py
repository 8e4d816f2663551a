"""The deltas of a stream whose end alone is waited for.

Log-probabilities leave their messages as they come: a message has many streams' and would keep all
of them until the last of these has been answered.
"""

from __future__ import annotations

from slipstream.client.streams.stream_state import StreamState
from slipstream.http.logprobs.held_logprobs import HeldLogprobs
from slipstream.outputs import Delta, columns_of, join
from slipstream_ipc.messages import End


class HeldDeltas:
    """The deltas of one stream, and apart from them the log-probabilities of its tokens."""

    def __init__(self, state: StreamState, *, has_logprobs: bool) -> None:
        self._logprobs = HeldLogprobs()
        self._deltas = state.deltas
        if has_logprobs:
            state.push = self._push

    def take(self, end: End) -> tuple[Delta, HeldLogprobs]:
        """Take all deltas, as one that has no log-probabilities, and those. end: the stream's."""
        joined = join(list(self._deltas), end)
        self._deltas.clear()
        tokens, self._logprobs = self._logprobs, HeldLogprobs()
        return joined, tokens

    def _push(self, delta: Delta) -> None:
        self._logprobs.add(columns_of(delta))
        self._deltas.append(join([delta], has_logprobs=False))
