"""Answers that are sent as one response, once all streams of the request have ended.

- A prompt's choices are encoded as soon as its streams have ended, while other prompts' still run:
  after the last one, mostly concatenation is left.
- Log-probabilities, of which there may be millions, are written in parts, in time slices
  (`time_slice`).
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from msgspec import UNSET, Raw

from slipstream.client.streams.stream_state import StreamState
from slipstream.errors import SlipstreamError
from slipstream.http.errors import ApiError
from slipstream.http.openai.broadcast import FanOut
from slipstream.http.openai.live_answer import Running, raise_failure
from slipstream.http.openai.logprobs import TextPlace
from slipstream.http.openai.plan_answer import Said
from slipstream.http.openai.responses import NULL, Answer, Choice
from slipstream.http.time_slice import Parts, Share, at_once
from slipstream.http.wire import json_raw, json_response
from slipstream.outputs import join, logprobs_in_parts


class Whole:
    """A request answered by one response; the wakeup of all its streams."""

    def __init__(self, running: Running, fan_out: FanOut, share: Share) -> None:
        self._running = running
        self._share = share
        ask = running.ask
        self._num_answers = ask.id.num_answers
        self._prompts = {state: at // self._num_answers for at, state in enumerate(ask.states)}
        self._num_running = [self._num_answers] * ask.id.num_prompts  # running streams per prompt
        self._choices: list[Choice | Raw] = [NULL] * len(ask.states)
        for state in ask.states:
            fan_out.join(state, self, running.exchange, running.fault)

    def ring(self, state: StreamState) -> None:
        """A stream has ended."""
        running = self._running
        if not (state.is_over and running.exchange.is_open):
            return
        try:
            raise_failure(state)
        except (ApiError, SlipstreamError) as error:
            running.fail(error)
            return
        prompt = self._prompts[state]
        self._num_running[prompt] -= 1
        if self._num_running[prompt]:
            return
        parts = self._write(prompt)
        if running.ask.has_logprobs:
            self._share.add(partial(self._go_on, parts))
        else:
            at_once(parts)

    def _go_on(self, parts: Parts[None]) -> bool:
        return self._running.exchange.is_open and next(parts, self) is not self

    def _write(self, prompt: int) -> Parts[None]:
        """Encode the choices of a prompt; after the last prompt, respond."""
        running, num = self._running, self._num_answers
        try:
            for index in range(prompt * num, (prompt + 1) * num):
                self._choices[index] = json_raw((yield from self._choice(index)))
                running.num_left -= 1
            if not running.num_left:
                yield from self._respond()
        except (ApiError, SlipstreamError) as error:
            running.fail(error)
        except Exception:
            running.fault()

    def _choice(self, index: int) -> Parts[Choice]:
        running, ask = self._running, self._running.ask
        state = ask.states[index]
        assert state.end is not None
        whole = join(state.deltas, state.end)
        state.deltas.clear()
        text, logprobs, reason = yield from running.shown_in_parts(
            *(index, TextPlace(), whole.text, logprobs_in_parts(whole), state.end.reason),
            is_first=True,
        )
        of_prompt = (yield from running.prompt_logprobs(index)) if self._has_many else UNSET
        said = Said([], state.end.stop_reason, of_prompt)
        if ask.shape.has_ids:
            ids = running.shown_ids(index, whole.token_ids, is_first=True)
            said = replace(said, token_ids=ids, prompt_ids=running.prompt_ids(index))
        return ask.shape.whole(index, text, logprobs, reason or "", said)

    @property
    def _has_many(self) -> bool:
        return self._running.ask.shape.has_many_prompts

    def _respond(self) -> Parts[None]:
        running, ask = self._running, self._running.ask
        answer = Answer(
            running.id,
            ask.shape.whole_object,
            ask.created,
            ask.model,
            self._choices,
            running.usage(),
            UNSET if self._has_many else (yield from running.prompt_logprobs(0)),
            running.prompt_ids() if ask.shape.has_ids and not self._has_many else UNSET,
        )
        running.exchange.respond(json_response(200, answer))
