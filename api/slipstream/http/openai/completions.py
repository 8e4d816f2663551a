"""POST /v1/completions: from a body to an `Ask`, and the shape of the answer."""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import UNSET, Raw

from slipstream.delta_batch import TokenLogprobs
from slipstream.http.errors import bad_field
from slipstream.http.openai.decoding import BodyDecoder, refuse_unsupported
from slipstream.http.openai.echo import Echo
from slipstream.http.openai.logprob_json import completion_json
from slipstream.http.openai.logprobs import TextPlace, completion_logprobs
from slipstream.http.openai.plan_answer import (
    Ask,
    Said,
    check_num_shown,
    check_prompt_shown,
    names_of,
    new_ask,
    sampling_params,
)
from slipstream.http.openai.requests import CompletionRequest
from slipstream.http.openai.responses import Choice, CompletionChoice, Logprobs
from slipstream.http.openai.vocabulary import TokenTexts
from slipstream.outputs import Delta
from slipstream.requests import Prompt, params_of_answers
from slipstream_ipc.messages import ModelCard

MAX_PROMPTS = 1024  # per request
MAX_ANSWERS = 4096  # per request, over all prompts
_DEFAULT_MAX_TOKENS = 16
_KINDS = "text, token ids, or a list of several of either"
_PARAM_NAMES = {"prompt_token_ids": "prompt"}
_decoder = BodyDecoder(CompletionRequest)


def read_completion(content: bytes) -> CompletionRequest:
    """Decode a body and refuse unsupported fields. Raises: ApiError."""
    body = _decoder.decode(content)
    refuse_unsupported(body, supported=("echo",))
    return body


def ask_completion(body: CompletionRequest, model: ModelCard) -> Ask:
    """The streams of a new completion. Raises: ApiError, BadRequestError."""
    max_tokens = _DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
    is_all_echo = bool(body.echo) and max_tokens == 0
    params = sampling_params(
        body,
        model.default_sampling,
        max_tokens=1 if is_all_echo else max_tokens,
        num_logprobs=body.logprobs,
        num_prompt_logprobs=body.prompt_logprobs,
    )
    prompts, answers = _prompts(body.prompt), params_of_answers(params)
    echo = None
    if body.echo:
        if body.logprob_token_ids is not None:
            what = "logprob_token_ids: allowed only where echo is false"
            raise bad_field("logprob_token_ids", what)
        echo = Echo(
            tuple(
                prompt if isinstance(prompt, str) else None for prompt in prompts for _ in answers
            ),
            is_all_echo,
        )
        # for each answer, so that no answer's first text waits for another stream
        wanted = _more(body.logprobs, body.prompt_logprobs)
        answers = [msgspec.structs.replace(each, prompt_logprobs=wanted) for each in answers]
    if len(prompts) * len(answers) > MAX_ANSWERS:
        given = f"{len(prompts)} prompts with {len(answers)} answers each"
        raise bad_field("n", f"n: got {given}, allowed: {MAX_ANSWERS} answers in all")
    prompt_lens = len(answers) * sum(_most_tokens(prompt) for prompt in prompts)
    check_num_shown(
        params, "logprobs", len(prompts) * len(answers), prompt_lens if echo else 0, model
    )
    check_prompt_shown(body.prompt_logprobs, prompt_lens, model)
    return new_ask(
        "cmpl",
        CompletionShape(has_ids=bool(body.return_token_ids)),
        body,
        model,
        prompts=prompts,
        params=params,
        answers=answers,
        param_names={**_PARAM_NAMES, **names_of(body), **_echo_names(body)},
        echo=echo,
    )


class CompletionShape:
    """See `Shape`."""

    whole_object = chunk_object = "text_completion"
    has_many_prompts = True

    def __init__(self, *, has_ids: bool = False) -> None:
        self.has_ids = has_ids

    def whole(
        self, index: int, text: str, logprobs: Logprobs | None, reason: str, said: Said
    ) -> Choice:
        ids = (said.token_ids, said.prompt_ids) if self.has_ids else ()
        return CompletionChoice(index, text, logprobs, reason, said.prompt_logprobs, *ids)

    def first(self, index: int) -> Choice | None:
        return None

    def chunk(
        self,
        index: int,
        text: str | Raw,
        logprobs: Logprobs | Raw | None,
        reason: str | None,
        said: Said,
    ) -> Choice:
        ids = (said.token_ids, said.prompt_ids) if self.has_ids else ()
        return CompletionChoice(index, text, logprobs, reason, UNSET, *ids)

    def logprobs(
        self, entries: list[TokenLogprobs], k: int, texts: TokenTexts, place: TextPlace
    ) -> Logprobs:
        return completion_logprobs(entries, k, texts, place)

    def logprobs_json(self, delta: Delta, texts: TokenTexts, place: TextPlace) -> bytes | None:
        return completion_json(delta, texts, place)


def _more(one: int | None, other: int | None) -> int | None:
    """The larger of two numbers of log-probabilities; -1 means all, None none."""
    given = [number for number in (one, other) if number is not None]
    return -1 if -1 in given else max(given, default=None)


def _echo_names(body: CompletionRequest) -> dict[str, str]:
    """The caller's name for `prompt_logprobs` if `echo` is what asks for them."""
    return {"prompt_logprobs": "logprobs"} if body.echo and body.prompt_logprobs is None else {}


def _most_tokens(prompt: Any) -> int:
    """An upper bound of a prompt's tokens: for text, one per byte and one in front."""
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
