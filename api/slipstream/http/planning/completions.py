"""POST /v1/completions: from a body to an `AnswerPlan`, and the shape of the answer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from slipstream.http.answers.answer_plan import AnswerPlan, ChoiceContent
from slipstream.http.answers.echo import Echo
from slipstream.http.api_errors import bad_field, callers_fields
from slipstream.http.logprobs.logprob_bodies import TextPosition
from slipstream.http.logprobs.logprob_encoding import completion_logprobs_json
from slipstream.http.logprobs.logprob_pieces import ShownLogprobs, completion_pieces
from slipstream.http.logprobs.vocabulary import TokenTexts
from slipstream.http.openai.body_decoder import BodyDecoder, refuse_unsupported
from slipstream.http.openai.ignored_fields import IgnoredFields
from slipstream.http.openai.request_bodies import CompletionRequest
from slipstream.http.openai.response_bodies import Choice, CompletionChoice
from slipstream.http.planning.planner import (
    caller_names,
    check_num_logprobs,
    check_num_prompt_logprobs,
    plan_answer,
    sampling_params,
)
from slipstream.outputs import Delta
from slipstream.request.parallel_sampling import params_of_answers
from slipstream.request.prompts import Prompt
from slipstream_ipc.messages import ModelCard
from slipstream_ipc.validation.field_types import field_error

MAX_PROMPTS = 1024  # per request
MAX_ANSWERS = 4096  # per request, over all prompts
MAX_ECHO_BYTES = 2**24  # per request, of prompts in front of its answers
_ID_BYTES = 4  # of a token id's text, about
_DEFAULT_MAX_TOKENS = 16
_ALLOWED_PROMPTS = "text, token ids, or a list of several of either"
_PARAM_NAMES = {"prompt_token_ids": "prompt"}
_decoder = BodyDecoder(CompletionRequest)


def read_completion(content: bytes, ignored: IgnoredFields | None = None) -> CompletionRequest:
    """Decode a body and refuse unsupported fields. ignored: see `BodyDecoder`. Raises: ApiError."""
    body = _decoder.decode(content, ignored)
    refuse_unsupported(body, supported=("echo",))
    return body


def plan_completion(body: CompletionRequest, model: ModelCard) -> AnswerPlan:
    """The streams of a new completion. Raises: ApiError."""
    names = {**_PARAM_NAMES, **caller_names(body), **_echo_names(body)}
    with callers_fields(names):
        return _plan(body, model, names)


def _plan(body: CompletionRequest, model: ModelCard, names: dict[str, str]) -> AnswerPlan:
    max_tokens = _DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
    is_prompt_only = bool(body.echo) and max_tokens == 0
    params = sampling_params(
        body,
        model.default_sampling,
        max_tokens=1 if is_prompt_only else max_tokens,
        num_logprobs=body.logprobs,
        num_prompt_logprobs=body.prompt_logprobs,
    )
    prompts, answers = _prompts(body.prompt), params_of_answers(params)
    echo = None
    if body.echo:
        if body.logprob_token_ids is not None:
            what = "logprob_token_ids: allowed only if echo is false"
            raise bad_field("logprob_token_ids", what)
        texts = [prompt if isinstance(prompt, str) else None for prompt in prompts]
        echo = Echo(tuple(text for text in texts for _ in answers), is_prompt_only)
        # for each answer, so that no answer's first text waits for another stream
        _check_echo(prompts, len(answers))
        wanted = _larger(body.logprobs, body.prompt_logprobs)
        answers = [msgspec.structs.replace(each, prompt_logprobs=wanted) for each in answers]
    if len(prompts) * len(answers) > MAX_ANSWERS:
        given = f"{len(prompts)} prompts with {len(answers)} answers each"
        raise bad_field("n", f"n: got {given}, allowed: {MAX_ANSWERS} answers in all")
    prompt_lens = len(answers) * sum(_most_tokens(prompt) for prompt in prompts)
    check_num_logprobs(
        params, "logprobs", len(prompts) * len(answers), prompt_lens if echo else 0, model
    )
    check_num_prompt_logprobs(body.prompt_logprobs, prompt_lens, model)
    return plan_answer(
        "cmpl",
        CompletionShape(has_ids=bool(body.return_token_ids)),
        body,
        model,
        prompts=prompts,
        params=params,
        answers=answers,
        param_names=names,
        echo=echo,
    )


class CompletionShape:
    """See `AnswerShape`."""

    object = chunk_object = "text_completion"
    has_many_prompts = True
    reads_events = False
    custom_tools = ()

    def __init__(self, *, has_ids: bool = False) -> None:
        self.has_ids = has_ids

    def choice(self, content: ChoiceContent) -> Choice:
        ids = (content.token_ids, content.prompt_ids) if self.has_ids else ()
        return CompletionChoice(
            content.index,
            content.text,
            content.logprobs,
            content.finish_reason,
            content.prompt_logprobs,
            *ids,
        )

    def first_chunk(self, index: int) -> Choice | None:
        return None

    def chunk(self, content: ChoiceContent) -> Choice:
        return self.choice(content)  # without prompt_logprobs, which streams do not have

    def logprobs(self, shown: ShownLogprobs, *, is_line: bool) -> Iterator[bytes]:
        return completion_pieces(shown, is_line=is_line)

    def logprobs_json(
        self, delta: Delta, texts: TokenTexts, position: TextPosition
    ) -> bytes | None:
        return completion_logprobs_json(delta, texts, position)


def _larger(one: int | None, other: int | None) -> int | None:
    """The larger of two numbers of log-probabilities; -1 means all, None none."""
    given = [number for number in (one, other) if number is not None]
    return -1 if -1 in given else max(given, default=None)


def _echo_names(body: CompletionRequest) -> dict[str, str]:
    """The caller's name for `prompt_logprobs` if `echo` is what asks for them."""
    return {"prompt_logprobs": "logprobs"} if body.echo and body.prompt_logprobs is None else {}


def _check_echo(prompts: Sequence[Prompt], num_answers: int) -> None:
    """Raises ApiError where the prompts, once in each answer, are too long."""
    num = num_answers * sum(
        len(prompt.encode(errors="replace")) if isinstance(prompt, str) else _ID_BYTES * len(prompt)
        for prompt in prompts
    )
    if num > MAX_ECHO_BYTES:
        what = (
            f"n: got prompts of {num} bytes in all answers together, {_ID_BYTES} to a token id, "
            f"allowed with echo: {MAX_ECHO_BYTES}"
        )
        raise bad_field("n", what)


def _most_tokens(prompt: Any) -> int:
    """An upper bound of a prompt's tokens: for text, one per byte and one in front."""
    return len(prompt.encode(errors="replace")) + 1 if isinstance(prompt, str) else len(prompt)


def _prompts(given: str | list[object]) -> list[Prompt]:
    if isinstance(given, str):
        return [given]
    if not given:
        raise bad_field("prompt", f"prompt: got an empty list, allowed: {_ALLOWED_PROMPTS}")
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
        wrong = field_error(error, kind, given, where="prompt")
        raise bad_field("prompt", f"{wrong} (a prompt is {_ALLOWED_PROMPTS})") from None
    prompts = [found] if isinstance(given[0], int) else found
    if len(prompts) > MAX_PROMPTS:
        raise bad_field("prompt", f"prompt: got {len(prompts)} prompts, allowed: {MAX_PROMPTS}")
    return prompts
