"""A stream from its reader's side, but for the waiting: that differs between threads and tasks.

Owns: the order of deltas, end and error; the output kinds; what was read so far. Does not know:
threads, event loops, the wire.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from slipstream.client_io import ClientIO
from slipstream.outputs import Completion, Delta, Position, end_of, join
from slipstream.prompt_pieces import PromptTokenLogprobs, prompt_logprobs_of
from slipstream.stream_state import StreamState
from slipstream_ipc.columns import u32
from slipstream_ipc.messages import FinishReason, Resume, Submit

OutputKind = Literal["delta", "cumulative", "final"]


class Reading:
    """What `Stream` and `AsyncStream` share. One reader at a time."""

    def __init__(self, io: ClientIO, state: StreamState, kind: OutputKind) -> None:
        self._io = io
        self._state = state
        self._kind = kind
        self._unread = state.deltas
        # what the next delta is taken by where nothing else has to be looked at
        self._pop: Callable[[], Delta] = self._unread.popleft if kind == "delta" else _no_delta
        self._texts: list[str] = []
        self._last: Delta | None = None  # that was read
        self._so_far: Delta | None = None  # of the kinds other than delta
        self._is_finished = False

    @property
    def id(self) -> str:
        """The stream's id, 32 hexadecimal digits."""
        return self._state.stream_id.hex()

    @property
    def label(self) -> str:
        """The caller's own name for the request; empty where the stream was resumed."""
        request = self._state.request
        return request.label if isinstance(request, Submit) else ""

    @property
    def prompt_token_ids(self) -> list[int] | None:
        """The prompt as the model sees it; known from the first delta on, None before."""
        ids = self._state.prompt_ids
        return u32(ids).tolist() if ids is not None else None

    @property
    def prompt_logprobs(self) -> PromptTokenLogprobs | None:
        """Each prompt token's candidates by id, the token itself first; None for the first token,
        which has none. Known from the first delta on; None before, or where not asked for.
        """
        return prompt_logprobs_of(self._state.prompt_logprobs)

    @property
    def text(self) -> str:
        """All text read so far, from where it was resumed if it was."""
        return "".join(self._texts)

    @property
    def position(self) -> Position:
        """How much of the stream has been read, for whoever goes on with it: see `resume`."""
        if self._last is not None:
            return end_of(self._last)
        request = self._state.request
        if isinstance(request, Resume):
            return Position(request.num_chars, request.num_tokens)
        return Position(0, 0)

    @property
    def finish_reason(self) -> FinishReason | None:
        """Why the stream ended; None while anything of it is to come or to be read."""
        if self._is_finished or (self._state.is_over and not self._unread):
            if self._state.end is not None:
                return self._state.end.reason
            return "abort" if self._state.error is None else "error"
        return None

    def abort(self) -> None:
        """Ask the server to end the stream. What is under way still comes, then the end."""
        self._io.abort(self._state)

    def _abandon(self) -> None:
        self._is_finished = True
        self._pop = _no_delta
        if not self._state.is_over:
            self._io.abandon(self._state)

    def __del__(self) -> None:
        if not self._state.is_over:
            self._io.abandon(self._state)

    def _take(self) -> Delta | None:
        """What is to be yielded next. None: nothing yet, or `_is_finished`.

        Raises: the error the stream ended with, once everything before it was taken.
        """
        if self._is_finished:
            return None
        is_over = self._state.is_over  # before `_unread`: what comes last is there by then
        if self._kind == "final":
            if is_over:
                return self._take_whole()
        elif (delta := self._next()) is not None:
            self._last = delta
            self._texts.append(delta.text)
            if self._kind == "delta":
                return delta
            self._so_far = delta if self._so_far is None else join([self._so_far, delta])
            return self._so_far
        elif is_over:
            self._finish()
        return None

    def _next(self) -> Delta | None:
        try:
            return self._unread.popleft()
        except IndexError:  # nothing, or being merged at this moment
            return None

    def _take_whole(self) -> Delta | None:
        if self._so_far is not None or (self._state.error is None and self._state.end is None):
            self._is_finished = True
            return None
        whole = join(self._unread, self._state.end)
        self._last = self._unread[-1] if self._unread else None
        self._unread.clear()
        self._texts.append(whole.text)
        if self._state.error is not None:
            self._finish()
        self._so_far = whole
        return whole

    def _finish(self) -> None:
        self._is_finished = True
        error = self._state.error
        if error is not None:
            error.text = self.text
            raise error

    def _completion(self) -> Completion:
        """Of a stream of kind `final` that is over."""
        whole = self._take()
        if whole is None:
            whole = join((), self._state.end)
        state = self._state
        return Completion(
            self.id,
            self.label,
            whole.text,
            whole,
            state.prompt_ids or b"",
            _prompt=state.prompt_logprobs,
        )


def _no_delta() -> Delta:
    """As an empty queue."""
    raise IndexError
