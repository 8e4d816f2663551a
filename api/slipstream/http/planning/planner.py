"""Planning shared by endpoints: sampling parameters, limits on log-probabilities, and the streams
of a new answer.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from itertools import islice
from typing import Any, cast

import msgspec
from msgspec.structs import asdict

from slipstream.client.streams.stream_state import StreamState
from slipstream.errors import BadRequestError, of_prompt
from slipstream.http.answers.answer_plan import AnswerPlan, AnswerShape, prompt_name
from slipstream.http.answers.echo import Echo
from slipstream.http.answers.event_ids import AnswerId
from slipstream.http.api_errors import bad_field
from slipstream.http.blocks.block_printer import BlockShape
from slipstream.http.openai.request_bodies import (
    GenerateRequest,
    OpenAIRequest,
    ResponseFormat,
    StreamOptions,
)
from slipstream.request.media import Chat
from slipstream.request.prompts import Prompt
from slipstream.request.requests import checked_cache_key, checked_params, new_submits
from slipstream.request.served_models import base_of
from slipstream_ipc.messages import (
    AnswerOptions,
    AskedOptions,
    ModelCard,
    SamplingDefaults,
    SamplingParams,
    StructuredOutputs,
    TemplateOptions,
)
from slipstream_ipc.validation.sampling_params import with_num_logprobs

UNARY_STREAM_INTERVAL = 64  # tokens per delta of an answer that is not streamed
MAX_LOGPROBS = 2**20  # log-probabilities in an answer with more than `_FREE_LOGPROBS` per token
MAX_PROMPT_LOGPROBS = 2**23  # of the prompts in an answer, whatever the number per token
OPEN_TOKENS = 4096  # that an answer without a limit is expected to have at most
_TOKEN_CHARS = 3
_FREE_LOGPROBS = 20  # per token; never refused
_GUIDED = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
    "guided_json_object": "json_object",
}
_OF_A_PROMPT = ("prompt", "prompt_token_ids", "max_tokens")
_PASSED_APART = ("max_tokens", "prompt_logprobs")  # endpoints compute them
_SAMPLING = tuple(
    name
    for name in OpenAIRequest.__struct_fields__
    if name in SamplingParams.__struct_fields__ and name not in _PASSED_APART
)


def plan_answer(
    kind: str,
    shape: AnswerShape | BlockShape,
    body: OpenAIRequest | GenerateRequest,
    model: ModelCard,
    *,
    prompts: Sequence[Prompt],
    params: SamplingParams,
    answers: Sequence[SamplingParams],
    param_names: dict[str, str],
    template: TemplateOptions | None = None,
    answer: AnswerOptions | None = None,
    prediction: str | None = None,
    echo: Echo | None = None,
) -> AnswerPlan:
    """A new answer's id and streams: for each prompt, one stream per entry of `answers`.

    kind: see `AnswerId`. answers: `params` split into one per choice. answer: how their text is
    read. prediction: what they will probably say. Raises: BadRequestError.
    """
    answer_id = AnswerId(kind, secrets.token_bytes(16), len(prompts), len(answers))
    options = body.stream_options or StreamOptions()
    stream_ids = iter(answer_id.stream_ids())
    cache_key = checked_cache_key(body.prompt_cache_key)
    names = AskedOptions.__annotations__.keys() - {"prediction"}
    asked = cast(AskedOptions, {name: getattr(body, name) for name in names})
    asked["prediction"] = prediction
    states: list[StreamState] = []
    for number, prompt in enumerate(prompts):
        try:
            submits = new_submits(
                prompt,
                answers,
                stream_ids=list(islice(stream_ids, len(answers))),
                model=model,
                template=template,
                answer=answer,
                **asked,
            )
        except BadRequestError as error:
            if len(prompts) > 1 and error.field in _OF_A_PROMPT:
                raise of_prompt(error, prompt_name(number)) from None
            raise
        states += [
            StreamState(
                submit,
                wants_whole=not body.stream,
                prompt_cache_key=cache_key,
                keeps_prompt_ids=shape.has_ids or echo is not None,
            )
            for submit in submits
        ]
    num_logprobs = with_num_logprobs(params, model.vocab_size).logprobs
    num_prompt_logprobs = num_candidates(params.prompt_logprobs, model)
    most_tokens = OPEN_TOKENS if params.max_tokens is None else params.max_tokens
    prompt_lens = 0
    if num_prompt_logprobs is not None:
        prompt_lens = sum([min(_estimated_len(each), model.max_model_len) for each in prompts])
    return AnswerPlan(
        id=answer_id,
        model=model.name,
        base=base_of(model),
        created=int(time.time()),
        states=states,
        shape=shape,
        is_stream=bool(body.stream),
        with_usage=bool(options.include_usage),
        with_usage_so_far=bool(options.include_usage and options.continuous_usage_stats),
        num_logprobs=num_logprobs,
        num_prompt_logprobs=num_prompt_logprobs,
        most_tokens=min(most_tokens, model.max_model_len) * len(states),
        prompt_lens=prompt_lens * len(answers),
        param_names=param_names,
        echo=echo,
    )


def _estimated_len(prompt: Prompt) -> int:
    """A prompt's tokens, about: they are known once it has been tokenised."""
    text = prompt.messages if isinstance(prompt, Chat) else prompt
    return len(msgspec.json.encode(text)) // _TOKEN_CHARS + 1


def sampling_params(
    body: OpenAIRequest,
    defaults: SamplingDefaults,
    *,
    max_tokens: int | None,
    num_logprobs: int | None,
    num_prompt_logprobs: int | None = None,
) -> SamplingParams:
    """Checked parameters; fields that the body leaves out take the model's own defaults.

    Raises: BadRequestError, ApiError.
    """
    given = model_defaults(defaults)
    given |= {name: value for name in _SAMPLING if (value := getattr(body, name)) is not None}
    structured = _structured_outputs(body)
    given |= {} if structured is None else {"structured_outputs": structured}
    if not body.stream:
        if body.stream_options is not None:
            raise bad_field("stream_options", "stream_options: allowed only if stream is true")
        given["stream_interval"] = max(given.get("stream_interval", 1), UNARY_STREAM_INTERVAL)
    check_not_streamed(num_prompt_logprobs, is_stream=bool(body.stream))
    if body.logprob_token_ids is not None:
        if num_logprobs is None:
            what = "logprob_token_ids: allowed only if logprobs is set"
            raise bad_field("logprob_token_ids", what)
        num_logprobs = None  # logprob_token_ids determines them
    given |= {"logprobs": num_logprobs, "prompt_logprobs": num_prompt_logprobs}
    return checked_params(SamplingParams(max_tokens=max_tokens, **given), {})


def _guided(body: OpenAIRequest) -> str | None:
    """The name of vLLM's former field that the body gives; None if none. Raises: ApiError."""
    found = [name for name in _GUIDED if getattr(body, name) not in (None, False)]
    if len(found) > 1:
        what = f"{found[1]}: not allowed together with {found[0]}"
        raise bad_field(found[1], what)
    return found[0] if found else None


def _structured_outputs(body: OpenAIRequest) -> StructuredOutputs | None:
    """The form that the body asks for, in whichever of its fields. Raises: ApiError."""
    structured = body.structured_outputs
    if (guided := _guided(body)) is not None:
        if structured is not None:
            what = f"{guided}: not allowed together with structured_outputs"
            raise bad_field(guided, what)
        structured = StructuredOutputs(**{_GUIDED[guided]: getattr(body, guided)})
    if body.response_format is None:
        return structured
    return _response_form(body.response_format, structured)


def _response_form(
    wanted: ResponseFormat, other: StructuredOutputs | None
) -> StructuredOutputs | None:
    """The form of a response_format. other: its `disable_any_whitespace` goes with that, and with
    free text it stays.
    """
    if (wanted.type == "json_schema") != (wanted.json_schema is not None):
        what = "response_format.json_schema: required for type json_schema, not allowed for others"
        raise bad_field("response_format", what)
    if wanted.type == "text":
        return other
    compact = StructuredOutputs(disable_any_whitespace=True)
    if other not in (None, compact):
        what = (
            "response_format: not allowed together with structured_outputs, except for its "
            "disable_any_whitespace"
        )
        raise bad_field("response_format", what)
    is_compact = other == compact
    if wanted.json_schema is None:
        return StructuredOutputs(json_object=True, disable_any_whitespace=is_compact)
    form = wanted.json_schema
    is_strict = form.strict is True
    return StructuredOutputs(json=form.schema, disable_any_whitespace=is_compact, strict=is_strict)


def model_defaults(defaults: SamplingDefaults) -> dict[str, Any]:
    """The model's default sampling parameters, those that are set."""
    return {name: value for name, value in asdict(defaults).items() if value is not None}


def check_not_streamed(
    wanted: int | None, *, is_stream: bool, field: str = "prompt_logprobs"
) -> None:
    """Raises ApiError if a stream asks for prompt log-probabilities, as vLLM does."""
    if wanted is not None and is_stream:
        raise bad_field(field, f"{field}: allowed only if stream is false")


def check_num_prompt_logprobs(
    wanted: int | None, prompt_lens: int, model: ModelCard, field: str = "prompt_logprobs"
) -> None:
    """`check_num_logprobs` for prompt log-probabilities; prompt_lens: tokens of all prompts."""
    wanted = num_candidates(wanted, model)
    _check_prompts(field, wanted, prompt_lens)
    _check_num(field, wanted, prompt_lens, "those of a shorter prompt")


def check_num_logprobs(
    params: SamplingParams, field: str, num_answers: int, prompt_lens: int, model: ModelCard
) -> None:
    """Raises ApiError for more than `MAX_LOGPROBS` log-probabilities in one answer.

    prompt_lens: an upper bound of the tokens of all echoed prompts, each as often as it is echoed.
    Up to 20 per token, the usual limit of servers, are never refused for tokens that are generated,
    and up to `MAX_PROMPT_LOGPROBS` for those of prompts, which cost their client nothing: they are
    written in parts (`logprob_pieces`). Those of the whole vocabulary would keep this process busy
    for minutes.
    """
    most_tokens = model.max_model_len if params.max_tokens is None else params.max_tokens
    num_tokens = num_answers * most_tokens + prompt_lens
    wanted = with_num_logprobs(params, model.vocab_size).logprobs
    _check_prompts(field, wanted, prompt_lens)
    _check_num(field, wanted, num_tokens, "fewer tokens")


def _check_prompts(field: str, per_token: int | None, num_tokens: int) -> None:
    num = 0 if per_token is None else (1 + per_token) * num_tokens
    if num > MAX_PROMPT_LOGPROBS:
        message = (
            f"{field}: got {per_token} per token, up to {num} log-probabilities of prompts in all, "
            f"allowed: {MAX_PROMPT_LOGPROBS} in one answer; request fewer, or shorter prompts, or "
            "fewer answers (n)"
        )
        raise bad_field(field, message)


def _check_num(field: str, per_token: int | None, num_tokens: int, instead: str) -> None:
    if per_token is None or per_token <= _FREE_LOGPROBS:
        return
    num = (1 + per_token) * num_tokens
    if num > MAX_LOGPROBS:
        message = (
            f"{field}: got {per_token} per token, {num} log-probabilities in all, allowed: "
            f"{MAX_LOGPROBS} in one answer; request fewer, or {instead}"
        )
        raise bad_field(field, message)


def num_candidates(num_logprobs: int | None, model: ModelCard) -> int | None:
    """The number of top candidates per token; -1 asks for the whole vocabulary."""
    return model.vocab_size if num_logprobs == -1 else num_logprobs


def caller_names(body: OpenAIRequest) -> dict[str, str]:
    """The caller's name for each internal field whose name differs, for error messages."""
    if body.structured_outputs is not None:
        return {}
    if (guided := _guided(body)) is not None:
        return dict.fromkeys(
            ("structured_outputs", f"structured_outputs.{_GUIDED[guided]}"), guided
        )
    ours = ("structured_outputs", "structured_outputs.json")
    return dict.fromkeys(ours, "response_format") if body.response_format is not None else {}
