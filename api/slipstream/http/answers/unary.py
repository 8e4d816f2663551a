"""Answers that are sent as one response, once all streams of the request have ended.

- A prompt's choices are encoded as soon as its streams have ended, while other prompts' still run:
  after the last one, mostly concatenation is left.
- Log-probabilities, of which there may be millions, are written in parts, in time slices
  (`time_slice`).
"""

from __future__ import annotations

from functools import partial

from msgspec import UNSET, Raw

from slipstream.client.streams.stream_state import StreamState
from slipstream.errors import SlipstreamError
from slipstream.http.answers.answer_plan import AnswerShape, ChoiceContent
from slipstream.http.answers.content_tokens import only_content
from slipstream.http.answers.live_answer import LiveAnswer, raise_failure
from slipstream.http.api_errors import ApiError
from slipstream.http.openai.answer_parts import finish_reason, has_ended_call, parts_of
from slipstream.http.openai.custom_tools import CustomCalls
from slipstream.http.openai.logprob_bodies import TextPosition
from slipstream.http.openai.response_bodies import NULL, Answer, Choice
from slipstream.http.response_encoding import json_raw
from slipstream.http.time_slice import Parts, run_all
from slipstream.outputs import events_of, join, kind_of, logprobs_in_parts


class UnaryAnswer:
    """A request answered by one response; the wakeup of all its streams."""

    def __init__(self, live: LiveAnswer, shape: AnswerShape) -> None:
        self._live = live
        self._shape = shape
        plan = live.plan
        self._num_answers = plan.id.num_answers
        self._prompts = {state: at // self._num_answers for at, state in enumerate(plan.states)}
        self._num_running = [self._num_answers] * plan.id.num_prompts  # running streams per prompt
        self._choices: list[Choice | Raw] = [NULL] * len(plan.states)
        for state in plan.states:
            live.context.broadcast.join(state, self, live.exchange, live.handle_exception)

    def ring(self, state: StreamState) -> None:
        """A stream has ended."""
        live = self._live
        if not (state.is_over and live.exchange.is_open):
            return
        try:
            raise_failure(state, live.plan)
        except (ApiError, SlipstreamError) as error:
            live.fail(error)
            return
        prompt = self._prompts[state]
        self._num_running[prompt] -= 1
        if self._num_running[prompt]:
            return
        parts = self._write(prompt)
        if live.plan.has_logprobs:
            live.context.slices.add(partial(self._go_on, parts), live.tenant)
        else:
            run_all(parts)

    def _go_on(self, parts: Parts[None]) -> bool:
        return self._live.exchange.is_open and next(parts, self) is not self

    def _write(self, prompt: int) -> Parts[None]:
        """Encode the choices of a prompt; after the last prompt, respond."""
        live, num = self._live, self._num_answers
        try:
            for index in range(prompt * num, (prompt + 1) * num):
                self._choices[index] = json_raw((yield from self._choice(index)))
                live.num_unwritten -= 1
            if not live.num_unwritten:
                yield from self._respond()
        except (ApiError, SlipstreamError) as error:
            live.fail(error)
        except Exception:
            live.handle_exception()

    def _choice(self, index: int) -> Parts[Choice]:
        live, plan = self._live, self._live.plan
        state = plan.states[index]
        assert state.end is not None
        whole = join(state.deltas, state.end)
        state.deltas.clear()
        entries, parts, end_reason = logprobs_in_parts(whole), None, str(state.end.reason)
        if self._shape.reads_events and kind_of(whole) != 0:
            events = events_of(whole)
            parts = parts_of(events, CustomCalls(self._shape.custom_tools), is_last=True)
            end_reason = finish_reason(
                state.end, has_called=has_ended_call(events), names_calls=plan.names_calls
            )
            if plan.num_logprobs is not None and not plan.has_all_logprobs:
                entries = only_content(entries, whole)
        text, logprobs, reason = yield from live.choice_parts(
            *(self._shape, index, TextPosition(), whole.text, entries, end_reason),
            is_first=True,
        )
        content = ChoiceContent(index, text, logprobs, reason or "", parts=parts)
        content.stop_reason = state.end.stop_reason
        if self._has_many:
            content.prompt_logprobs = yield from live.prompt_logprobs(index)
        if self._shape.has_ids:
            content.token_ids = live.with_prompt_ids(index, whole.token_ids, is_first=True)
            content.prompt_ids = live.prompt_ids(index)
        return self._shape.choice(content)

    @property
    def _has_many(self) -> bool:
        return self._shape.has_many_prompts

    def _respond(self) -> Parts[None]:
        live, plan = self._live, self._live.plan
        answer = Answer(
            live.id,
            self._shape.object,
            plan.created,
            plan.model,
            self._choices,
            live.usage(),
            UNSET if self._has_many else (yield from live.prompt_logprobs(0)),
            live.prompt_ids() if self._shape.has_ids and not self._has_many else UNSET,
        )
        live.respond(answer)
