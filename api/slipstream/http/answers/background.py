"""Answers in the background: the client is told that its request was accepted, and the stream goes
on without a reader.
"""

from __future__ import annotations

from msgspec import Struct

from slipstream.client.streams.stream_state import StreamState
from slipstream.errors import SlipstreamError
from slipstream.http.answers.answer_plan import AnswerPlan
from slipstream.http.answers.live_answer import AnswerContext, StreamEngine, tell_left_out
from slipstream.http.api_errors import error_of
from slipstream.http.changed_turns import tell_changed_turns
from slipstream.http.exchange import Exchange
from slipstream.http.response_encoding import json_response


def start_in_background(
    body: Struct, plan: AnswerPlan, exchange: Exchange, context: AnswerContext
) -> None:
    """Submit the stream; the exchange is answered with `body` once it is accepted."""
    if exchange.is_open:
        [state] = plan.states
        _Acceptance(body, plan, exchange).wait(state, context.engine)


class _Acceptance:
    """The wakeup of a stream until the server has accepted or refused it."""

    def __init__(self, body: Struct, plan: AnswerPlan, exchange: Exchange) -> None:
        self._body = body
        self._plan = plan
        self._exchange = exchange

    def wait(self, state: StreamState, engine: StreamEngine) -> None:
        """Submit the stream. It is abandoned if the client leaves before it knows its id."""
        state.awaits_acceptance = True
        state.wakeup = self
        self._exchange.on_disconnect = lambda: engine.abandon(state)
        engine.submit(state)

    def ring(self, state: StreamState) -> None:
        """The stream is accepted, or over."""
        if not self._exchange.is_open:
            return
        if state.prompt_ids is not None:
            state.drop_deltas()
            tell_changed_turns(self._exchange.request, [state.changed_turns])
            tell_left_out(self._exchange.request, self._plan)
            self._exchange.respond(json_response(200, self._body))
        elif isinstance(state.error, SlipstreamError):
            self._exchange.refuse(error_of(state.error, self._plan.param_names))
