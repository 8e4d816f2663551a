"""POST /v1/completions: prompts to streams, and the shape of what they say.

Owns: the kinds of prompts. Does not know: how streams run or are written.
"""

from __future__ import annotations

import secrets
import time
from typing import Any

import msgspec
from msgspec import Raw

from slipstream.batch import TokenLogprobs
from slipstream.http.ask import (
    Ask,
    check_num_shown,
    names_of,
    num_shown,
    sampling_params,
    wants_usage,
)
from slipstream.http.decoding import BodyDecoder, refuse_unsupported
from slipstream.http.echo import Echo
from slipstream.http.errors import bad_field
from slipstream.http.event_ids import AnswerId
from slipstream.http.logprobs import TextPlace, completion_logprobs
from slipstream.http.requests import CompletionRequest
from slipstream.http.responses import Choice, CompletionChoice, Logprobs
from slipstream.http.token_texts import TokenTexts
from slipstream.requests import Prompt, new_submit, params_of_answers
from slipstream.stream_table import StreamState
from slipstream_ipc.messages import ModelCard

MAX_PROMPTS = 1024  # of one request
MAX_ANSWERS = 4096  # to all of them
_DEFAULT_MAX_TOKENS = 16
_KINDS = "text, token ids, or a list of several of either"
_PARAM_NAMES = {"prompt_token_ids": "prompt", "prompt_logprobs": "logprobs"}
_decoder = BodyDecoder(CompletionRequest)


def read_completion(content: bytes) -> CompletionRequest:
    """Raises: ApiError."""
    body = _decoder.decode(content)
    refuse_unsupported(body, supported=("echo",))
    return body


def ask_completion(body: CompletionRequest, model: ModelCard) -> Ask:
    """Raises: ApiError, BadRequestError."""
    max_tokens = _DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
    is_all_echo = bool(body.echo) and max_tokens == 0
    params = sampling_params(
        body,
        model.default_sampling,
        max_tokens=1 if is_all_echo else max_tokens,
        num_logprobs=body.logprobs,
    )
    prompts, answers = _prompts(body.prompt), params_of_answers(params)
    echo = None
    if body.echo:
        echo = Echo(
            tuple(
                prompt if isinstance(prompt, str) else None for prompt in prompts for _ in answers
            ),
            is_all_echo,
            params.skip_special_tokens,
        )
        # each for itself: none waits with its first text for another
        answers = [msgspec.structs.replace(each, prompt_logprobs=body.logprobs) for each in answers]
    if len(prompts) * len(answers) > MAX_ANSWERS:
        given = f"{len(prompts)} prompts with {len(answers)} answers each"
        raise bad_field("n", f"n: got {given}, allowed: {MAX_ANSWERS} answers in all")
    prompt_lens = len(answers) * sum(_most_tokens(prompt) for prompt in prompts)
    check_num_shown(
        params, "logprobs", len(prompts) * len(answers), prompt_lens if echo else 0, model
    )
    answer_id = AnswerId("cmpl", secrets.token_bytes(16), len(prompts), len(answers))
    asked = [(prompt, each) for prompt in prompts for each in answers]
    states = [
        StreamState(
            new_submit(
                prompt,
                each,
                priority=body.priority or 0,
                cache_salt=body.cache_salt,
                model=model,
                stream_id=stream_id,
            ),
            wants_whole=not body.stream,
        )
        for stream_id, (prompt, each) in zip(answer_id.stream_ids(), asked, strict=True)
    ]
    return Ask(
        id=answer_id,
        model=model.name,
        created=int(time.time()),
        states=states,
        shape=CompletionShape(),
        is_stream=bool(body.stream),
        with_usage=wants_usage(body),
        num_logprobs=num_shown(body.logprobs, model),
        param_names={**_PARAM_NAMES, **names_of(body)},
        echo=echo,
    )


class CompletionShape:
    """See `Shape`."""

    whole_object = chunk_object = "text_completion"

    def whole(self, index: int, text: str, logprobs: Logprobs | None, reason: str) -> Choice:
        return CompletionChoice(index, text, logprobs, reason)

    def first(self, index: int) -> Choice | None:
        return None

    def chunk(
        self, index: int, text: str | Raw, logprobs: Logprobs | Raw | None, reason: str | None
    ) -> Choice:
        return CompletionChoice(index, text, logprobs, reason)

    def logprobs(
        self, entries: list[TokenLogprobs], k: int, texts: TokenTexts, place: TextPlace
    ) -> Logprobs:
        return completion_logprobs(entries, k, texts, place)


def _most_tokens(prompt: Any) -> int:
    """Of a prompt; where it is text, each of its bytes could be one, and one may begin it."""
    return len(prompt.encode(errors="replace")) + 1 if isinstance(prompt, str) else len(prompt)


def _prompts(given: str | list[object]) -> list[Prompt]:
    if isinstance(given, str):
        return [given]
    if not given:
        raise bad_field("prompt", f"prompt: got an empty list, allowed: {_KINDS}")
    match given[0]:
        case str():
            kind: type = list[str]
        case list():
            kind = list[list[int]]
        case _:
            kind = list[int]
    try:
        found: Any = msgspec.convert(given, kind)
    except msgspec.ValidationError as error:
        raise bad_field("prompt", f"prompt: {error}, allowed: {_KINDS}") from None
    prompts = [found] if isinstance(given[0], int) else found
    if len(prompts) > MAX_PROMPTS:
        raise bad_field("prompt", f"prompt: got {len(prompts)} prompts, allowed: {MAX_PROMPTS}")
    return prompts
