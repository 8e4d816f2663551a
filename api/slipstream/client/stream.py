"""A stream from its reader's side, but for the waiting: that differs between threads and tasks."""

from __future__ import annotations

from collections import deque
from typing import Literal, Protocol

from slipstream.client.streams.stream_state import StreamState
from slipstream.outputs import Delta, RequestOutput, StreamPosition, end_of, join
from slipstream.prompt_logprobs import PromptTokenLogprobs, prompt_logprobs_of
from slipstream_ipc.columns import u32
from slipstream_ipc.messages import FinishReason, ModelCard, Resume, Submit

OutputKind = Literal["delta", "cumulative", "final"]


class ClientConnection(Protocol):
    """What streams are asked for over: a thread (`thread_io`) or an event loop (`loop_io`)."""

    @property
    def model(self) -> ModelCard | None:
        """What the server serves, as it said last."""

    def submit(self, state: StreamState) -> None:
        """Ask for the stream."""

    def abort(self, state: StreamState) -> None:
        """Ask the server to end the stream; its End is still to come."""

    def abandon(self, state: StreamState) -> None:
        """End the stream at once: it is not read any more."""

    def release(self, state: StreamState) -> None:
        """The same where the stream is collected as garbage: from any thread, at any moment."""


class BaseStream:
    """What `Stream` and `AsyncStream` share. One reader at a time.

    A reader pops `_unread`, and notes what it pops in `_last` and `_texts`. Where it finds nothing,
    it asks `_is_at_end`, waits if not, and looks again.
    """

    def __init__(self, io: ClientConnection, state: StreamState, kind: OutputKind) -> None:
        self._io = io
        self._state = state
        self._kind = kind
        self._is_cumulative = kind == "cumulative"
        # of kind final, one delta at the end; nothing once the stream was closed
        self._unread: deque[Delta] = deque() if kind == "final" else state.deltas
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
    def position(self) -> StreamPosition:
        """How much of the stream has been read, for a reader that goes on with it: see `resume`."""
        if self._last is not None:
            return end_of(self._last)
        request = self._state.request
        if isinstance(request, Resume):
            return StreamPosition(request.num_chars, request.num_tokens)
        return StreamPosition(0, 0)

    @property
    def finish_reason(self) -> FinishReason | None:
        """Why the stream ended; None while anything of it is to come or to be read."""
        if self._is_finished or (self._state.is_over and not self._state.deltas):
            if self._state.end is not None:
                return self._state.end.reason
            return "abort" if self._state.error is None else "error"
        return None

    def abort(self) -> None:
        """Ask the server to end the stream. What is under way still comes, then the end."""
        self._io.abort(self._state)

    def close(self) -> None:
        """End the stream at once; what is unread is dropped. Idempotent."""
        self._is_finished = True
        self._unread = deque()
        if not self._state.is_over:
            self._io.abandon(self._state)

    def __del__(self) -> None:
        if not self._state.is_over:
            self._io.release(self._state)

    def _has_news(self) -> bool:
        """Whether there is nothing to wait for. For a reader that has hung its wakeup up."""
        state = self._state
        return state.is_over or (bool(state.deltas) and not state.wants_whole)

    def _is_at_end(self) -> bool:
        """Of a stream of which nothing is unread: whether nothing comes any more.

        Raises: the error that the stream ended with.
        """
        state = self._state
        if self._is_finished:
            return True
        if not state.is_over:
            return False
        if self._kind == "final":
            self._take_whole()
        if self._unread:  # since the reader looked
            return False
        self._is_finished = True
        if state.error is not None:
            state.error.text = self.text
            raise state.error
        return True

    def _take_whole(self) -> None:
        """Of a stream of kind `final` that is over: make one delta of it, to be read at its end, or
        the text of its error.
        """
        state = self._state
        if state.error is None and state.end is not None and self._so_far is None:
            self._so_far = join(state.deltas, state.end)
            self._unread.append(self._so_far)
            state.deltas.clear()
        elif state.error is not None and state.deltas:
            self._last = join(state.deltas)
            self._texts.append(self._last.text)
            state.deltas.clear()

    def _so_far_with(self, delta: Delta) -> Delta:
        """Of a stream of kind `cumulative`: all that was read, `delta` the last of it."""
        self._so_far = delta if self._so_far is None else join([self._so_far, delta])
        return self._so_far

    def _completion(self) -> RequestOutput:
        """Of a stream of kind `final` that is over. Raises: its error."""
        state, request = self._state, self._state.request
        whole = join((), state.end) if self._is_at_end() else self._unread.popleft()
        return RequestOutput(
            self.id,
            self.label,
            whole.text,
            whole,
            state.prompt_ids or b"",
            _prompt=state.prompt_logprobs,
            prompt=request.text if isinstance(request, Submit) else None,
        )
