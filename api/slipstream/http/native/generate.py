"""POST /generate: one prompt, `SamplingParams` as they are, and token ids beside the text.

`sampling_params` is an object with the names and defaults of the Python client's (vLLM's), as in
vLLM's and SGLang's own endpoints; fields that it leaves out take the model's own defaults. Ids,
usage, events, resuming and errors are as at the OpenAI endpoints.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
from msgspec import Raw, Struct

from slipstream.errors import BadRequestError
from slipstream.http.answers.answer_plan import WITH_IDS, AnswerPlan, ChoiceContent
from slipstream.http.api_errors import bad_field, error_of
from slipstream.http.logprobs.logprob_bodies import TextPosition
from slipstream.http.logprobs.logprob_pieces import ShownLogprobs, pieces_by_id
from slipstream.http.logprobs.vocabulary import TokenTexts
from slipstream.http.openai.body_decoder import BodyDecoder
from slipstream.http.openai.request_bodies import GenerateRequest
from slipstream.http.openai.response_bodies import Choice, GenerateChoice
from slipstream.http.planning.planner import (
    UNARY_STREAM_INTERVAL,
    check_not_streamed,
    check_num_logprobs,
    check_num_prompt_logprobs,
    model_defaults,
    plan_answer,
)
from slipstream.outputs import Delta
from slipstream.request.parallel_sampling import params_of_answers
from slipstream.request.prompts import Prompt
from slipstream.request.requests import checked_params
from slipstream_ipc.messages import ModelCard, SamplingParams

_PROMPTS = ("text", "prompt", "token_ids", "prompt_token_ids")
_decoder = BodyDecoder(GenerateRequest)


class _GivenParams(Struct):
    """The sampling parameters that a body names, undecoded."""

    sampling_params: dict[str, Raw] | None = None


_given_params_decoder = msgspec.json.Decoder(_GivenParams)


def read_generate(content: bytes) -> tuple[GenerateRequest, dict[str, Any]]:
    """The decoded body, and those sampling parameters that it names. Raises: ApiError."""
    body = _decoder.decode(content)
    names = _given_params_decoder.decode(content).sampling_params or {}
    return body, {name: getattr(body.sampling_params, name) for name in names}


def plan_generation(body: GenerateRequest, given: dict[str, Any], model: ModelCard) -> AnswerPlan:
    """The streams of a new answer. Raises: ApiError."""
    field, prompt = _prompt(body)
    names = _param_names(field)
    try:
        return _plan(body, given, model, prompt, names)
    except BadRequestError as error:
        raise error_of(error, names) from None


def _plan(
    body: GenerateRequest,
    given: dict[str, Any],
    model: ModelCard,
    prompt: Prompt,
    names: dict[str, str],
) -> AnswerPlan:
    is_stream = bool(body.stream)
    if not is_stream:
        if body.stream_options is not None:
            raise bad_field("stream_options", "stream_options: allowed only if stream is true")
        given = {
            **given,
            "stream_interval": max(given.get("stream_interval", 1), UNARY_STREAM_INTERVAL),
        }
    params = SamplingParams(**{**model_defaults(model.default_sampling), **given})
    params = checked_params(params, {})
    _check_shown(params, prompt, model, is_stream=is_stream)
    return plan_answer(
        WITH_IDS,
        GenerateShape(),
        body,
        model,
        prompts=[prompt],
        params=params,
        answers=params_of_answers(params),
        param_names=names,
        prediction=body.prediction,
    )


class GenerateShape:
    """See `AnswerShape`."""

    object = "generation"
    chunk_object = "generation.chunk"
    has_ids = True
    has_many_prompts = False
    reads_events = False
    custom_tools = ()

    def choice(self, content: ChoiceContent) -> Choice:
        return GenerateChoice(
            content.index,
            content.text,
            content.token_ids,
            content.logprobs,
            content.finish_reason,
            content.stop_reason,
        )

    def first_chunk(self, index: int) -> Choice | None:
        return None

    def chunk(self, content: ChoiceContent) -> Choice:
        return self.choice(content)

    def logprobs(self, shown: ShownLogprobs, *, is_line: bool) -> Iterator[bytes]:
        return pieces_by_id(shown, is_line=is_line)

    def logprobs_json(
        self, delta: Delta, texts: TokenTexts, position: TextPosition
    ) -> bytes | None:
        return None


def _prompt(body: GenerateRequest) -> tuple[str, Prompt]:
    """The name of the field that holds the prompt, and the prompt."""
    given = [name for name in _PROMPTS if getattr(body, name) is not None]
    if len(given) != 1:
        what = f"prompt: got {' and '.join(given) or 'none'}, allowed: one of {', '.join(_PROMPTS)}"
        raise bad_field("prompt", what)
    prompt: Prompt = getattr(body, given[0])
    return given[0], prompt


def _check_shown(
    params: SamplingParams, prompt: Prompt, model: ModelCard, *, is_stream: bool
) -> None:
    field = "sampling_params.prompt_logprobs"
    prompt_len = len(prompt)
    if isinstance(prompt, str):
        prompt_len = len(prompt.encode(errors="replace")) + 1  # each byte could be a token
    check_num_logprobs(params, "sampling_params.logprobs", params.n, 0, model)
    check_not_streamed(params.prompt_logprobs, is_stream=is_stream, field=field)
    check_num_prompt_logprobs(
        params.prompt_logprobs, min(prompt_len, model.max_model_len), model, field
    )


def _param_names(field: str) -> dict[str, str]:
    ours = SamplingParams.__struct_fields__
    names = {name: f"sampling_params.{name}" for name in ours}
    return {**names, "prompt": field, "prompt_token_ids": field}
