"""Answers that are sent as one response, once all streams of the request have ended.

- A prompt's choices are encoded as soon as its streams have ended, while other prompts' still run:
  after the last one, mostly concatenation is left.
- Log-probabilities, of which there may be millions, are encoded as they are sent: in time slices,
  and while the client reads. Until then they are held in columns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

from msgspec import UNSET, Raw

from slipstream.client.streams.stream_state import StreamState
from slipstream.errors import SlipstreamError
from slipstream.http.answers.answer_plan import AnswerShape, ChoiceContent
from slipstream.http.answers.held_deltas import HeldDeltas
from slipstream.http.answers.live_answer import LiveAnswer
from slipstream.http.api_errors import ApiError
from slipstream.http.logprobs.content_tokens import content_of
from slipstream.http.logprobs.logprob_bodies import TextPosition
from slipstream.http.openai.answer_parts import finish_reason, has_ended_call, parts_of
from slipstream.http.openai.custom_tools import CustomCalls
from slipstream.http.openai.response_bodies import NULL, Answer, Choice
from slipstream.http.response_encoding import encoded, filled, hole, json_raw
from slipstream.http.time_slice import Parts, run_all
from slipstream.outputs import events_of, kind_of


class UnaryAnswer:
    """A request answered by one response; the wakeup of all its streams."""

    def __init__(self, live: LiveAnswer, shape: AnswerShape) -> None:
        self._live = live
        self._shape = shape
        plan = live.plan
        self._num_answers = plan.id.num_answers
        self._prompts = {state: at // self._num_answers for at, state in enumerate(plan.states)}
        self._num_running = [self._num_answers] * plan.id.num_prompts  # running streams per prompt
        self._fills: list[Callable[[], Iterator[bytes]]] = []  # of the choices' holes
        self._choices: list[Choice | Raw] = [NULL] * len(plan.states)
        has_logprobs = plan.num_logprobs is not None
        self._held = [HeldDeltas(state, has_logprobs=has_logprobs) for state in plan.states]
        for state in plan.states:
            live.context.broadcast.join(state, self, live.exchange, live.handle_exception)

    def ring(self, state: StreamState) -> None:
        """A stream has ended."""
        live = self._live
        if not live.is_to_be_written(state):
            return
        prompt = self._prompts[state]
        self._num_running[prompt] -= 1
        if self._num_running[prompt]:
            return
        parts = self._write(prompt)
        if live.plan.has_logprobs:
            live.run(parts)
        else:
            run_all(parts)

    def _write(self, prompt: int) -> Parts[None]:
        """Encode the choices of a prompt; after the last prompt, respond."""
        live, num = self._live, self._num_answers
        try:
            for index in range(prompt * num, (prompt + 1) * num):
                self._choices[index] = json_raw(self._choice(index))
                live.num_unwritten -= 1
                yield
            if not live.num_unwritten:
                body = encoded(self._answer())
                if self._fills:
                    yield from live.respond_in_pieces(filled(body, self._fill))
                else:
                    live.respond(body)
        except (ApiError, SlipstreamError) as error:
            live.fail(error)
        except Exception:
            live.handle_exception()

    def _choice(self, index: int) -> Choice:
        live, plan = self._live, self._live.plan
        state = plan.states[index]
        assert state.end is not None
        whole, tokens = self._held[index].take(state.end)
        parts, end_reason = None, str(state.end.reason)
        if self._shape.reads_events and kind_of(whole) != 0:
            events = events_of(whole)
            parts = parts_of(events, CustomCalls(self._shape.custom_tools), is_last=True)
            end_reason = finish_reason(
                state.end, has_called=has_ended_call(events), names_calls=plan.names_calls
            )
            if not plan.has_all_logprobs:
                tokens = content_of(tokens, whole)
        text, shown, reason = live.shown(
            *(index, TextPosition(), whole.text, tokens, end_reason), is_first=True
        )
        logprobs = None
        if shown is not None:
            logprobs = self._hole(partial(self._shape.logprobs, shown, is_line=False))
        content = ChoiceContent(index, text, logprobs, reason or "", parts=parts)
        content.stop_reason = state.end.stop_reason
        if self._has_many:
            content.prompt_logprobs = self._prompt_logprobs(index)
        if self._shape.has_ids:
            content.token_ids = live.with_prompt_ids(index, whole.token_ids, is_first=True)
            content.prompt_ids = live.prompt_ids(index)
        return self._shape.choice(content)

    @property
    def _has_many(self) -> bool:
        return self._shape.has_many_prompts

    def _answer(self) -> Answer:
        live, plan = self._live, self._live.plan
        return Answer(
            live.id,
            self._shape.object,
            plan.created,
            plan.model,
            self._choices,
            live.usage(),
            UNSET if self._has_many else self._prompt_logprobs(0),
            live.prompt_ids() if self._shape.has_ids and not self._has_many else UNSET,
        )

    def _prompt_logprobs(self, index: int) -> Raw | None:
        pieces = self._live.prompt_logprobs(index)
        return None if pieces is None else self._hole(pieces)

    def _hole(self, pieces: Callable[[], Iterator[bytes]]) -> Raw:
        """A place for what is made while the answer is sent."""
        self._fills.append(pieces)
        return hole(len(self._fills) - 1)

    def _fill(self, number: int) -> Iterator[bytes]:
        return self._fills[number]()
