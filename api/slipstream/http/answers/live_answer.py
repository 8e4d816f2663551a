"""The running streams of one request: what streamed and complete answers have in common.

It handles failures and disconnects, and computes usage and what is shown of the prompt.
`streaming`, `unary`, `block_answers` and `background` decide how and when an answer is written.

- When the client disconnects or one stream fails, all streams of the request are abandoned. If the
  client has event ids, a disconnect leaves them running for `resume_s`: it may resume.
- What is too much for one turn of the loop is written by `run`, in time slices and while the client
  reads; nothing else is written until it has been.
- A stream that was aborted by its id has ended with the finish reason `abort`; it has not failed.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

from slipstream.client.streams.stream_state import StreamState
from slipstream.errors import (
    BadRequestError,
    EngineError,
    SlipstreamError,
    SupersededError,
    of_prompt,
)
from slipstream.http.answers.answer_plan import AnswerPlan, prompt_name
from slipstream.http.answers.broadcast import Broadcast
from slipstream.http.answers.echo import token_offsets
from slipstream.http.answers.event_ids import EventId, EventIdWriter, StreamCursor
from slipstream.http.api_errors import ApiError, error_of
from slipstream.http.blocks.block_printer import BlockShape
from slipstream.http.changed_turns import tell_changed_turns
from slipstream.http.config import Limits
from slipstream.http.exchange import Exchange, HttpRequest
from slipstream.http.logprobs.held_logprobs import HeldLogprobs
from slipstream.http.logprobs.logprob_bodies import TextPosition
from slipstream.http.logprobs.logprob_pieces import EchoedTokens, ShownLogprobs, prompt_pieces
from slipstream.http.logprobs.vocabulary import TextsByModel
from slipstream.http.openai.ignored_fields import told_fields
from slipstream.http.openai.usage import Usage, final_usage, usage_of
from slipstream.http.response_encoding import JSON, Response, event
from slipstream.http.shares import Shares
from slipstream.http.time_slice import Parts, TimeSlicedQueue
from slipstream.prompt_logprobs import PromptPieces
from slipstream_ipc.columns import u32
from slipstream_ipc.messages import End
from slipstream_ipc.telemetry.logs import of_requests

_logger = logging.getLogger(__name__)
_WHOLE_BYTES = 2**16  # of a complete answer that is sent at once though it is made in pieces


class StreamEngine(Protocol):
    """Runs streams."""

    def submit(self, state: StreamState) -> None:
        """Start the stream."""

    def abandon(self, state: StreamState) -> None:
        """Cancel the stream: it has no reader any more."""


@dataclass(frozen=True, slots=True)
class AnswerContext:
    """The context that all answers of a front share.

    broadcast: writes the deltas of all streams. slices: the queue of long answers. shares: what
    those may hold. logprob_shares: what log-probabilities may take that wait for their answers'
    ends. log_ignored: logs what a request with this id has that is ignored.
    """

    engine: StreamEngine
    texts: TextsByModel
    limits: Limits
    broadcast: Broadcast = field(default_factory=Broadcast)
    slices: TimeSlicedQueue = field(default_factory=TimeSlicedQueue)
    shares: Shares = field(default_factory=Shares)
    logprob_shares: Shares = field(default_factory=Shares.of_logprobs)
    log_ignored: Callable[[str, str], None] = lambda names, request_id: None


class LiveAnswer:
    """The streams of one request while they run. num_unwritten: choices not written yet.
    failure_event: the last event of a stream that fails. resume: called when more may be written.
    forget: called when nothing will be.
    """

    def __init__(self, plan: AnswerPlan, exchange: Exchange, context: AnswerContext) -> None:
        self.plan = plan
        self.id = str(plan.id)
        self.exchange = exchange
        self.tenant = exchange.request.tenant  # whose lane its time slices are in
        self.context = context
        self.texts = context.texts.of(plan.served_by)
        self.num_unwritten = len(plan.states)
        self.event_ids: EventIdWriter | None = None
        self._has_settled = False
        self._echo_texts: dict[int, str] = {}  # of prompts, by number
        self._parts: deque[Parts[None]] = deque()  # to be run
        self._is_running = False  # they are in the queue of time slices
        self._is_amid = False  # something is written in part
        self.resume: Callable[[], None] = _nothing
        self.forget: Callable[[], None] = _nothing
        self.failure_event: Callable[[ApiError], bytes] = _failure_event
        if plan.is_resumable:
            self.event_ids = EventIdWriter(
                EventId(
                    plan.id,
                    plan.created,
                    plan.num_logprobs,
                    plan.with_usage,
                    plan.with_usage_so_far,
                    tuple([self.cursor(index) for index in range(len(plan.states))]),
                    plan.is_usage_sent,
                    plan.request_checksum,
                    plan.has_all_logprobs,
                    plan.names_calls,
                )
            )
        exchange.on_disconnect = self._on_disconnect
        exchange.on_writable = self._go_on

    def cursor(self, index: int) -> StreamCursor:
        """The client's cursor in a stream when the request began."""
        if self.plan.cursors:
            return self.plan.cursors[index]
        shape = self.plan.shape
        has_begun = isinstance(shape, BlockShape) or shape.first_chunk(index) is None
        return StreamCursor(has_begun=has_begun)

    def _on_disconnect(self) -> None:
        """The client has disconnected."""
        self._let_go()
        if self.event_ids is None or all(state.is_over for state in self.plan.states):
            self.abandon()
        else:
            asyncio.get_running_loop().call_later(self.context.limits.resume_s, self.abandon)

    @property
    def is_busy(self) -> bool:
        """True while something is written in time slices."""
        return bool(self._parts)

    def run(self, parts: Parts[None]) -> None:
        """Run it in time slices, behind what is run already, and while the client reads."""
        self._parts.append(parts)
        self.exchange.hold(True)
        self._go_on()

    def write(self, data: bytes) -> None:
        """Write behind everything that is being written."""
        if self._parts:
            self.run(self._written((data,)))
        else:
            self.exchange.write(data)

    def write_in_pieces(self, pieces: Iterable[bytes]) -> None:
        """Write pieces, each made when its turn comes, behind everything that is being written."""
        self.run(self._written(pieces))

    def _written(self, pieces: Iterable[bytes]) -> Parts[None]:
        for piece in pieces:
            self.exchange.write(piece)
            yield

    def _go_on(self) -> None:
        """Backpressure has ended, or there is something to run."""
        if not self._parts:
            self.resume()
        elif not (self._is_running or self.exchange.is_paused):
            self._is_running = True
            self.context.slices.add(self._run_part, self.tenant)

    def _run_part(self) -> bool:
        """Run a part; True if there are more that can be run now."""
        exchange = self.exchange
        if exchange.is_open and not exchange.is_paused:
            try:
                next(self._parts[0])
                self._is_amid = True
            except StopIteration:
                self._is_amid = False
                if self._parts:  # it has not failed
                    self._parts.popleft()
            except (ApiError, SlipstreamError) as error:
                self.fail(error)
            except Exception:
                self.handle_exception()
        if not exchange.is_open:
            self._let_go()
        elif self._parts and not exchange.is_paused:
            return True
        self._is_running = False
        if not self._parts:
            exchange.hold(False)
            if exchange.is_open:
                self.resume()
        return False

    def _let_go(self) -> None:
        """Nothing more will be written. The exchange refers to this object, which refers to it:
        what is large does not wait for the garbage collector.
        """
        self._parts.clear()
        self.forget()
        self.resume, self.forget, self.failure_event = _nothing, _nothing, _failure_event
        for state in self.plan.states:
            self.context.broadcast.detach(state)

    def begin_stream(self) -> None:
        """Send the head of the event stream."""
        self._tell()
        self.exchange.begin_stream()

    def respond(self, body: bytes) -> None:
        """Send the complete answer, which is JSON."""
        self._tell()
        self.exchange.respond(Response(200, body))

    def respond_in_pieces(self, pieces: Iterator[bytes]) -> Parts[None]:
        """Send the complete answer, in pieces as they are made where they are large."""
        exchange, made, num_bytes = self.exchange, [], 0
        for piece in pieces:
            if exchange.has_begun:
                exchange.write(piece)
            else:
                made.append(piece)
                num_bytes += len(piece)
                if num_bytes > _WHOLE_BYTES and exchange.takes_pieces:
                    self._tell()
                    exchange.begin_stream(JSON)
                    exchange.write(b"".join(made))
                    made.clear()
            yield
        if exchange.has_begun:
            exchange.finish()
        else:
            self.respond(b"".join(made))

    def _tell(self) -> None:
        """Say in the head what was done to turns, and what is not enforced of schemas."""
        changes = [state.changed_turns for state in self.plan.states]
        tell_changed_turns(self.exchange.request, changes)
        tell_left_out(self.exchange.request, self.plan, self.context.log_ignored)

    def abandon(self) -> None:
        """End every stream that is not over; one in the background goes on, unread."""
        for state in self.plan.states:
            if self.plan.is_background:
                self.context.broadcast.detach(state)
            elif not state.is_over:
                self.context.engine.abandon(state)

    def is_to_be_written(self, state: StreamState) -> bool:
        """True if a stream is over whose whole answer may be written; one that failed ends the
        request.
        """
        if not (state.is_over and self.exchange.is_open):
            return False
        try:
            raise_failure(state, self.plan)
        except (ApiError, SlipstreamError) as error:
            self.fail(error)
            return False
        return True

    def fail(self, failure: BaseException) -> None:
        """End the request with an error."""
        error, hint = error_of(failure, self.plan.param_names), ""
        if isinstance(failure, SlipstreamError) and failure.fault.code == "unknown_stream":
            hint = self.plan.unknown_hint
            message = f"{failure}; {hint}" if hint else str(failure)
            # also of a stream that was lost while it was waited for
            status = 404 if hint and not self.exchange.has_begun else error.status
            error = ApiError(status, message, code=error.body.error.code)
        if error.status >= 500:
            _logger.warning("%s", error, extra=of_requests(self.exchange.request.id))
        exchange = self.exchange
        if exchange.has_begun and (self._is_amid or not self.plan.is_stream):
            exchange.drop()
        elif exchange.has_begun:
            exchange.write(self.failure_event(error))
            exchange.finish()
        else:
            exchange.refuse(error)
        self._let_go()
        if isinstance(failure, SupersededError) or hint:
            self._on_disconnect()  # the client goes on elsewhere, or may: keep the other choices
        else:
            self.abandon()

    def settle(self, state: StreamState) -> None:
        """A stream whose end the client has may be forgotten: it has ended all the same. Only what
        its usage had of reasoning and of cached tokens is not known any more.
        """
        error, plan = state.error, self.plan
        if error is None or error.fault.code != "unknown_stream" or not plan.cursors:
            return
        cursor = plan.cursors[plan.states.index(state)]
        if cursor.has_ended:
            self._has_settled = True
            state.error, state.end = None, End("stop", cursor.num_tokens)

    def handle_exception(self) -> None:
        """`fail` with the exception being handled. One of no known kind is logged with its
        traceback.
        """
        error = sys.exception()
        if not isinstance(error, ApiError | SlipstreamError):
            _logger.exception("the answer failed", extra=of_requests(self.exchange.request.id))
            error = RuntimeError()
        if self.exchange.is_open:
            self.fail(error)

    def shown(
        self,
        index: int,
        position: TextPosition,
        text: str,
        tokens: HeldLogprobs,
        reason: str | None,
        *,
        is_first: bool,
    ) -> tuple[str, ShownLogprobs | None, str | None]:
        """A choice's text, log-probabilities and finish reason. The text begins at `position`.

        is_first: nothing of the choice has been written; the prompt is put in front if echoed.
        """
        echo, k, prompt = self.plan.echo, self.plan.num_logprobs, None
        if echo is not None and echo.is_prompt_only:
            text, tokens, reason = "", HeldLogprobs(), reason and "length"
        if echo is not None and is_first:
            echoed = self._echoed_text(index)
            text = echoed + text
            if k is not None:
                prompt = self._echoed_tokens(index, echoed)
                if prompt is None:  # aborted before they came, so without a token
                    return text, None, reason
                position.offset = len(echoed)
        if k is None:
            return text, None, reason
        return text, ShownLogprobs(k, self.texts, tokens, position, prompt), reason

    def _echoed_tokens(self, index: int, text: str) -> EchoedTokens | None:
        """The tokens of a choice's echoed prompt, shown as `text`; None if the choice was aborted
        before they came.
        """
        state = self.plan.states[index]
        found = _prompt_logprobs(state)
        if found is None:
            return None
        ids = u32(state.prompt_ids or b"")
        return EchoedTokens(ids, found, partial(token_offsets, ids, self.texts, text))

    def _echoed_text(self, index: int) -> str:
        """A choice's echoed prompt, made once for all choices of the prompt."""
        plan, number = self.plan, index // self.plan.id.num_answers
        text = self._echo_texts.get(number)
        if text is None:
            assert plan.echo is not None
            prompt_ids = plan.states[index].prompt_ids or b""
            text = plan.echo.text(index, u32(prompt_ids).tolist(), self.texts)
            if prompt_ids:  # not of a choice that fails before they came
                self._echo_texts[number] = text
        return text

    def usage(self) -> Usage:
        """The usage of all streams, which have ended."""
        states, num_answers = self.plan.states, self.plan.id.num_answers
        num_prompt = sum(self._prompt_lens())
        ends = [state.end or End("abort", 0) for state in states]
        usage = self._usage(num_prompt, sum(end.num_tokens for end in ends))
        return final_usage(usage, ends, num_answers)

    @property
    def lacks_prompt(self) -> bool:
        """True if all choices of a prompt are forgotten, so that its length is not known."""
        return self._has_settled and 0 in self._prompt_lens()

    def _prompt_lens(self) -> list[int]:
        """The tokens of each prompt, of which one of its choices may tell."""
        states, num_answers = self.plan.states, self.plan.id.num_answers
        return [
            max(state.prompt_len for state in states[at : at + num_answers])
            for at in range(0, len(states), num_answers)
        ]

    def usage_so_far(self, index: int, num_tokens: int) -> Usage | None:
        """The usage of a choice after `num_tokens`; None unless chunks contain it."""
        if not self.plan.with_usage_so_far:
            return None
        return self._usage(self.plan.states[index].prompt_len, num_tokens)

    def _usage(self, num_prompt: int, num_output: int) -> Usage:
        if self.plan.echo is not None and self.plan.echo.is_prompt_only:
            num_output = 0
        return usage_of(num_prompt, num_output)

    def prompt_ids(self, index: int = 0) -> list[int]:
        """The token ids of a choice's prompt."""
        ids: list[int] = u32(self.plan.states[index].prompt_ids or b"").tolist()
        return ids

    def with_prompt_ids(self, index: int, ids: list[int], *, is_first: bool) -> list[int]:
        """The token ids of a chunk, with those of an echoed prompt in front of the first."""
        echo = self.plan.echo
        if echo is None:
            return ids
        before = self.prompt_ids(index) if is_first else []
        return before if echo.is_prompt_only else before + ids

    def prompt_logprobs(self, index: int) -> Callable[[], Iterator[bytes]] | None:
        """Makes the JSON of a choice's prompt log-probabilities; None if not asked for, or aborted
        too early.
        """
        k = self.plan.num_prompt_logprobs
        if k is None:
            return None
        first = index - index % self.plan.id.num_answers  # choice of the same prompt
        found = _prompt_logprobs(self.plan.states[first])
        return None if found is None else partial(prompt_pieces, found, k, self.texts)


def _nothing() -> None:
    """Nothing waits for the call."""


def tell_left_out(
    request: HttpRequest,
    plan: AnswerPlan,
    log_ignored: Callable[[str, str], None] = lambda names, request_id: None,
) -> None:
    """Name what is not enforced of the request's schemas, as ignored fields are; call it before the
    answer's head is sent.
    """
    left_out = next((each.left_out for each in plan.states if each.left_out), ())
    if left_out:
        names = [_callers_path(each, plan.param_names) for each in left_out]
        request.answer_headers = told_fields(request.answer_headers, names)
        log_ignored(", ".join(names), request.id)


def _callers_path(path: str, param_names: dict[str, str]) -> str:
    """The path of something within the request, by the caller's name of the field."""
    field = "structured_outputs.json"
    if not path.startswith(f"{field}."):
        return path
    return param_names.get(field, field) + path.removeprefix(field)


def _failure_event(error: ApiError) -> bytes:
    return event(error.body)


def _prompt_logprobs(state: StreamState) -> PromptPieces | None:
    """Log-probabilities of the prompt. None if the stream was aborted before they came.

    Raises: ApiError if they are missing otherwise.
    """
    pieces = state.prompt_logprobs
    if pieces is not None and pieces.is_whole:
        return pieces
    if state.end is None or state.end.reason != "abort":
        raise ApiError(
            500, "the engine sent no log-probabilities of the prompt", code="engine_error"
        )
    return None


def is_whole(state: StreamState) -> bool:
    """True if a stream that is over ended without an error."""
    return state.error is None and state.end is not None and state.end.reason != "error"


def raise_failure(state: StreamState, plan: AnswerPlan) -> None:
    """Raises the error of a stream of the plan that is over, or ApiError if its finish reason is
    `error`.
    """
    error = state.error
    if error is not None:
        if plan.id.num_prompts > 1 and isinstance(error, BadRequestError | EngineError):
            index = plan.states.index(state)
            raise of_prompt(error, prompt_name(index // plan.id.num_answers))
        raise error
    if not is_whole(state):
        why = "the request was aborted before its answer was complete"
        raise ApiError(500, why, code="aborted")
