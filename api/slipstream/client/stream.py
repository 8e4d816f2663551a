"""The reader's side of a stream, without the waiting, which differs between threads and tasks."""

from __future__ import annotations

import time
from collections import deque
from typing import Literal, Protocol

from slipstream.answers.events import text_of
from slipstream.answers.tool_calls import ToolCall, tool_calls_of
from slipstream.client.streams.stream_state import StreamState
from slipstream.errors import ClosedError
from slipstream.outputs import (
    Delta,
    RequestOutput,
    StreamPosition,
    end_of,
    events_of,
    join,
    message_of,
    metrics_of,
)
from slipstream.packed_prompts import prompt_text_of
from slipstream.prompt_logprobs import PromptTokenLogprobs, prompt_logprobs_of
from slipstream_ipc.columns import u32
from slipstream_ipc.messages import (
    AnswerEvent,
    ChatMessage,
    EventKind,
    Fault,
    FinishReason,
    ModelCard,
    Resume,
    Submit,
    TurnChanges,
)

OutputKind = Literal["delta", "cumulative", "final"]


class ClientConnection(Protocol):
    """A connection that carries streams, driven by a thread (`ThreadIO`) or an event loop
    (`LoopIO`).
    """

    @property
    def models(self) -> tuple[ModelCard, ...]:
        """The models that the server last reported; empty before the first connection."""

    def submit(self, state: StreamState) -> None:
        """Submit the stream's request."""

    def abort(self, state: StreamState) -> None:
        """Ask the server to end the stream, which then still receives its End."""

    def abandon(self, state: StreamState) -> None:
        """End the stream at once, without waiting for the server."""

    def release(self, state: StreamState) -> None:
        """Abandon the stream from a finalizer: from any thread, at any moment."""


class BaseStream:
    """The base of `Stream` and `AsyncStream`. One reader at a time.

    A reader pops a delta from `_unread` and records it by `_note`. Where `_unread` is empty, it
    checks `_is_at_end`, waits if that is false, and tries again.
    """

    def __init__(self, io: ClientConnection, state: StreamState, kind: OutputKind) -> None:
        self._io = io
        self._state = state
        self._kind = kind
        self._is_cumulative = kind == "cumulative"
        # of kind "final", one delta at the end; empty once the stream is closed
        self._unread: deque[Delta] = deque() if kind == "final" else state.deltas
        self._texts: list[str] = []
        self._events: list[AnswerEvent] | None = None  # None: none of the deltas read has any
        self._last: Delta | None = None  # the last delta read
        self._so_far: Delta | None = None  # all deltas joined; unused for kind "delta"
        self._is_finished = False
        self._is_cut = False  # closed before it was read to its end

    @property
    def id(self) -> str:
        """The stream's id, 32 hexadecimal digits."""
        return self._state.stream_id.hex()

    @property
    def label(self) -> str:
        """The label given with the request; empty where the stream was resumed."""
        request = self._state.request
        return request.label if isinstance(request, Submit) else ""

    @property
    def prompt_token_ids(self) -> list[int] | None:
        """The prompt's token ids as the model sees them; None before the first delta."""
        ids = self._state.prompt_ids
        return u32(ids).tolist() if ids is not None else None

    @property
    def changed_turns(self) -> TurnChanges:
        """The changes to a chat's turns that let the model's template take them; known with
        `prompt_token_ids`.
        """
        return self._state.changed_turns

    @property
    def left_out(self) -> tuple[str, ...]:
        """See `RequestOutput.left_out`; empty before the first delta."""
        return self._state.left_out

    @property
    def prompt_logprobs(self) -> PromptTokenLogprobs | None:
        """The candidates of each prompt token by token id, the token itself first; None for the
        first token, which has no log-probability.

        None before the first delta, or where they were not requested.
        """
        return prompt_logprobs_of(self._state.prompt_logprobs)

    @property
    def text(self) -> str:
        """All text read so far; of a resumed stream, since the position it was resumed from."""
        return "".join(self._texts)

    @property
    def content(self) -> str:
        """The part of `text` that is the answer itself, without reasoning and tool calls."""
        events = self._events
        return self.text if events is None else text_of(EventKind.CONTENT, events)

    @property
    def reasoning(self) -> str | None:
        """The model's reasoning read so far; None where there is none."""
        return text_of(EventKind.REASONING, self._events or ()) or None

    @property
    def tool_calls(self) -> list[ToolCall]:
        """The tool calls read so far; those with the status "incomplete" go on or were cut off.

        Of a resumed stream, those that begin after the position it was resumed from.
        """
        return tool_calls_of(self._events or ())

    @property
    def message(self) -> ChatMessage:
        """The part read so far as an assistant's turn, to be appended to the messages of the next
        request. Incomplete tool calls are left out.
        """
        if self._events is None:
            return ChatMessage("assistant", self.text)
        return message_of(self._events)

    @property
    def position(self) -> StreamPosition:
        """The reader's position in the stream, in characters and tokens; `resume` takes it."""
        if self._last is not None:
            return end_of(self._last)
        request = self._state.request
        if isinstance(request, Resume):
            return StreamPosition(request.num_chars, request.num_tokens)
        return StreamPosition(0, 0)

    @property
    def finish_reason(self) -> FinishReason | None:
        """The reason why the stream ended; None until it has ended and all of it has been read."""
        if self._is_finished or (self._state.is_over and not self._state.deltas):
            if self._state.end is not None:
                return self._state.end.reason
            return "abort" if self._state.error is None else "error"
        return None

    def abort(self) -> None:
        """Ask the server to end the stream. Deltas already under way still arrive, then the end."""
        self._io.abort(self._state)

    def close(self) -> None:
        """End the stream at once and drop unread deltas. Idempotent."""
        has_more = not self._state.is_over or bool(self._unread or self._state.deltas)
        self._is_cut = self._is_cut or (not self._is_finished and has_more)
        self._is_finished = True
        self._state.drop_deltas()
        self._unread = self._state.deltas
        if not self._state.is_over:
            self._io.abandon(self._state)

    def __del__(self) -> None:
        if not self._state.is_over:
            self._io.release(self._state)

    def _check_open(self) -> None:
        """Raises ClosedError for a stream that was closed before it was read to its end."""
        if self._is_cut:
            why = "this stream is closed: read it before close(), or within its `with` block"
            raise ClosedError(Fault("bad_request", why))

    def _is_accepted(self) -> bool:
        """True if the server has accepted the stream.

        Raises: the error that the stream ended with before it was accepted, or ClosedError.
        """
        state = self._state
        is_over = state.is_over  # read before `prompt_ids`, which is set first
        if state.prompt_ids is not None:
            return True
        if is_over:
            if state.error is not None:
                raise state.error
            raise ClosedError(Fault("engine", "the stream was ended before it was accepted"))
        return False

    def _is_decided(self) -> bool:
        """True if the stream was accepted or is over."""
        return self._state.prompt_ids is not None or self._state.is_over

    def _has_news(self) -> bool:
        """True if the reader need not wait. Called after the reader has set its wakeup."""
        state = self._state
        return state.is_over or (bool(state.deltas) and not state.wants_whole)

    def _is_at_end(self) -> bool:
        """True if a stream without unread deltas is over.

        Raises: the error that the stream ended with.
        """
        state = self._state
        if self._is_finished:
            return True
        if not state.is_over:
            return False
        if self._kind == "final":
            self._take_whole()
        if self._unread:  # arrived since the reader found it empty
            return False
        self._is_finished = True
        if state.error is not None:
            state.error.text = self.text
            raise state.error
        return True

    def _take_whole(self) -> None:
        """Join a finished stream of kind "final" into one delta, or into its error's text."""
        state = self._state
        if state.error is None and state.end is not None and self._so_far is None:
            self._so_far = join(state.deltas, state.end)
            self._unread.append(self._so_far)
            state.deltas.clear()
        elif state.error is not None and state.deltas:
            self._note(join(state.deltas))
            state.deltas.clear()

    def _note(self, delta: Delta) -> None:
        """Record a delta that was read."""
        self._last = delta
        self._texts.append(delta.text)
        if delta._batch.has_events:
            self._note_events(delta)

    def _note_events(self, delta: Delta) -> None:
        """Record the events of a delta that was read, if it is read as events."""
        if delta._entry in delta._batch.read_entries:
            if self._events is None:
                self._events = []
            self._events += events_of(delta)

    def _so_far_with(self, delta: Delta) -> Delta:
        """Everything read so far joined with `delta`, for a stream of kind "cumulative"."""
        self._so_far = delta if self._so_far is None else join([self._so_far, delta])
        return self._so_far

    def _completion(self) -> RequestOutput:
        """The output of a finished stream of kind "final". Raises: the stream's error."""
        state, request = self._state, self._state.request
        is_whole = not self._is_at_end()
        whole = self._unread.popleft() if is_whole else join((), state.end)
        zero = time.time() - time.monotonic()
        return RequestOutput(
            whole.text,
            whole,
            self.id,
            self.label,
            state.prompt_ids or b"",
            _prompt=state.prompt_logprobs,
            prompt=prompt_text_of(request) if isinstance(request, Submit) else None,
            metrics=metrics_of(whole, state.submitted_at, zero) if is_whole else None,
            changed_turns=state.changed_turns,
            left_out=state.left_out,
        )
