"""POST /generate: one prompt, `SamplingParams` as they are, and token ids beside the text.

`sampling_params` is an object with the names and defaults of the Python client's (vLLM's), as in
vLLM's and SGLang's own endpoints; fields that it leaves out take the model's own defaults. Ids,
usage, events, resuming and errors are as at the OpenAI endpoints.
"""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import Raw, Struct

from slipstream.delta_batch import TokenLogprobs
from slipstream.errors import BadRequestError
from slipstream.http.errors import bad_field, error_of
from slipstream.http.openai.decoding import BodyDecoder
from slipstream.http.openai.logprobs import TextPlace, by_id
from slipstream.http.openai.plan_answer import (
    WHOLE_INTERVAL,
    WITH_IDS,
    Ask,
    Said,
    check_num_shown,
    check_prompt_logprobs,
    check_prompt_shown,
    model_defaults,
    new_ask,
)
from slipstream.http.openai.requests import GenerateRequest
from slipstream.http.openai.responses import Choice, GenerateChoice, Logprobs
from slipstream.http.openai.vocabulary import TokenTexts
from slipstream.outputs import Delta
from slipstream.requests import Prompt, checked_params, params_of_answers
from slipstream_ipc.messages import ModelCard, SamplingParams

_PROMPTS = ("text", "prompt", "token_ids", "prompt_token_ids")
_decoder = BodyDecoder(GenerateRequest)


class _Given(Struct):
    """The sampling parameters that a body names, undecoded."""

    sampling_params: dict[str, Raw] | None = None


_given_decoder = msgspec.json.Decoder(_Given)


def read_generate(content: bytes) -> tuple[GenerateRequest, dict[str, Any]]:
    """The decoded body, and those sampling parameters that it names. Raises: ApiError."""
    body = _decoder.decode(content)
    names = _given_decoder.decode(content).sampling_params or {}
    return body, {name: getattr(body.sampling_params, name) for name in names}


def ask_generate(body: GenerateRequest, given: dict[str, Any], model: ModelCard) -> Ask:
    """The streams of a new answer. Raises: ApiError."""
    field, prompt = _prompt(body)
    names = _param_names(field)
    try:
        return _ask(body, given, model, prompt, names)
    except BadRequestError as error:
        raise error_of(error, names) from None


def _ask(
    body: GenerateRequest,
    given: dict[str, Any],
    model: ModelCard,
    prompt: Prompt,
    names: dict[str, str],
) -> Ask:
    is_stream = bool(body.stream)
    if not is_stream:
        if body.stream_options is not None:
            raise bad_field("stream_options", "stream_options: allowed only where stream is true")
        given = {**given, "stream_interval": max(given.get("stream_interval", 1), WHOLE_INTERVAL)}
    params = SamplingParams(**{**model_defaults(model.default_sampling), **given})
    params = checked_params(params, {})
    _check_shown(params, prompt, model, is_stream=is_stream)
    return new_ask(
        WITH_IDS,
        GenerateShape(),
        body,
        model,
        prompts=[prompt],
        params=params,
        answers=params_of_answers(params),
        param_names=names,
    )


class GenerateShape:
    """See `Shape`."""

    whole_object = "generation"
    chunk_object = "generation.chunk"
    has_ids = True
    has_many_prompts = False

    def whole(
        self, index: int, text: str, logprobs: Logprobs | None, reason: str, said: Said
    ) -> Choice:
        return self.chunk(index, text, logprobs, reason, said)

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
        return GenerateChoice(index, text, said.token_ids, logprobs, reason, said.stop_reason)

    def logprobs(
        self, entries: list[TokenLogprobs], k: int, texts: TokenTexts, place: TextPlace
    ) -> Logprobs:
        return [by_id(entry, k, texts) for entry in entries]

    def logprobs_json(self, delta: Delta, texts: TokenTexts, place: TextPlace) -> bytes | None:
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
    check_num_shown(params, "sampling_params.logprobs", params.n, 0, model)
    check_prompt_logprobs(params.prompt_logprobs, is_stream=is_stream, field=field)
    check_prompt_shown(params.prompt_logprobs, min(prompt_len, model.max_model_len), model, field)


def _param_names(field: str) -> dict[str, str]:
    ours = SamplingParams.__struct_fields__
    names = {name: f"sampling_params.{name}" for name in ours}
    return {**names, "prompt": field, "prompt_token_ids": field}
