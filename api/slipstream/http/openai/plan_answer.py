"""What an endpoint makes of a request: the streams to run, and the shape of the answer.

Owns: the types, and what the endpoints do alike: reading sampling parameters, making the streams of
a new answer. Does not know: what a body's own fields mean, how streams run.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Protocol

from msgspec import UNSET, Raw, UnsetType

from slipstream.client.streams.stream_state import StreamState
from slipstream.delta_batch import TokenLogprobs
from slipstream.http.errors import bad_field
from slipstream.http.openai.echo import Echo
from slipstream.http.openai.event_ids import MAX_PLACES, AnswerId, Place, checksum_of
from slipstream.http.openai.logprobs import TextPlace
from slipstream.http.openai.requests import GenerateRequest, Request, ResponseFormat, StreamOptions
from slipstream.http.openai.responses import Choice, Logprobs, LogprobsById
from slipstream.http.openai.vocabulary import TokenTexts
from slipstream.outputs import Delta
from slipstream.requests import Prompt, checked_params, new_submits
from slipstream_ipc.messages import (
    ModelCard,
    SamplingDefaults,
    SamplingParams,
    StructuredOutputs,
    TemplateOptions,
)
from slipstream_ipc.transport.addresses import short_id
from slipstream_ipc.validation.sampling_params import with_num_logprobs

WITH_IDS = "gen"  # answers of this kind always have token ids
WHOLE_INTERVAL = 64  # tokens to a delta where nobody looks at it before the end
_FEW_LOGPROBS = 20  # to a token
MAX_SHOWN = 2**20  # log-probabilities in an answer with more than few to a token
_DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
_SAMPLING = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "stop",
    "stop_token_ids",
    "include_stop_str_in_output",
    "ignore_eos",
    "min_tokens",
    "skip_special_tokens",
    "stream_interval",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "logit_bias",
    "allowed_token_ids",
    "bad_words",
    "structured_outputs",
    "n",
    "logprob_token_ids",
)


@dataclass(frozen=True, slots=True)
class Said:
    """What is told of a stream, or of a part of it, beside its text."""

    token_ids: list[int]  # where the shape has them
    stop_reason: int | str | None = None
    prompt_logprobs: list[LogprobsById | None] | UnsetType | None = UNSET
    prompt_ids: list[int] | UnsetType = UNSET  # where the shape has them: in a choice's first part


class Shape(Protocol):
    """How an endpoint's answers look.

    has_ids: token ids are told too. has_many_prompts: its choices may be of several prompts, so
    that what is told of a prompt stands in its choices.
    """

    whole_object: str
    chunk_object: str
    has_many_prompts: bool

    @property
    def has_ids(self) -> bool: ...

    def whole(
        self, index: int, text: str, logprobs: Logprobs | None, reason: str, said: Said
    ) -> Choice:
        """An answer in full."""

    def first(self, index: int) -> Choice | None:
        """What precedes a stream's first text."""

    def chunk(
        self,
        index: int,
        text: str | Raw,
        logprobs: Logprobs | Raw | None,
        reason: str | None,
        said: Said,
    ) -> Choice:
        """A part of an answer."""

    def logprobs(
        self, entries: list[TokenLogprobs], k: int, texts: TokenTexts, place: TextPlace
    ) -> Logprobs:
        """Log-probabilities of tokens that begin at `place`, which goes on to their end."""

    def logprobs_json(self, delta: Delta, texts: TokenTexts, place: TextPlace) -> bytes | None:
        """The same of a delta, as JSON, where there is a quick way; else `place` is as it was."""


@dataclass(frozen=True, slots=True, eq=False)
class Ask:
    """Streams that are one request, each of them one choice of the answer."""

    id: AnswerId
    model: str
    created: int  # seconds
    states: list[StreamState]
    shape: Shape
    is_stream: bool
    with_usage: bool  # at a stream's end
    with_usage_so_far: bool  # and in each chunk, of its choice
    num_logprobs: int | None  # the likeliest so many, beside the sampled one
    param_names: dict[str, str] = field(default_factory=dict)  # the caller's, by ours
    echo: Echo | None = None  # the prompts in front of their answers

    @property
    def has_logprobs(self) -> bool:
        """Whether log-probabilities are told, of outputs or prompts."""
        return self.num_logprobs is not None or self.num_prompt_logprobs is not None

    @property
    def needs_texts(self) -> bool:
        """Whether the vocabulary has to be there before it can be answered."""
        return self.has_logprobs or (self.echo is not None and self.echo.needs_texts)

    places: tuple[Place, ...] = ()  # what the client has of each stream; none: it asks for it first
    is_usage_told: bool = False
    is_resumable: bool = False  # the client may come back for the rest: events have ids
    num_prompt_logprobs: int | None = None  # as num_logprobs, of the prompts
    told_request: int | None = None  # `request_checksum`, as the client's last event has it
    if_unknown: str = ""  # what to do where its streams are not known any more

    @property
    def request_checksum(self) -> int | None:
        """By which the request is known again; None where a stream of it was submitted elsewhere,
        and nobody has said as what.
        """
        submits = [each for state in self.states if (each := state.resubmittable) is not None]
        if len(submits) < len(self.states):
            return self.told_request
        return checksum_of(submits, self.id.num_answers)

    @property
    def can_resume(self) -> bool:
        """Whether the ids of its events can say all there is to know."""
        is_usual = self.echo is None and self.shape.has_ids == (self.id.kind == WITH_IDS)
        return self.is_stream and is_usual and self.id.num_streams <= MAX_PLACES

    @property
    def log_name(self) -> str:
        """What a log calls it: by `id` whoever reads the log could read the streams, too."""
        return short_id(self.states[0].stream_id)


def new_ask(
    kind: str,
    shape: Shape,
    body: Request | GenerateRequest,
    model: ModelCard,
    *,
    prompts: Sequence[Prompt],
    params: SamplingParams,
    answers: Sequence[SamplingParams],
    param_names: dict[str, str],
    template: TemplateOptions | None = None,
    echo: Echo | None = None,
) -> Ask:
    """The streams of a new answer and its id: to each prompt one for each of `answers`, which are
    `params` for one choice each. kind: see `AnswerId`. Raises: BadRequestError.
    """
    answer_id = AnswerId(kind, secrets.token_bytes(16), len(prompts), len(answers))
    options = body.stream_options or StreamOptions()
    stream_ids = iter(answer_id.stream_ids())
    states = [
        StreamState(submit, wants_whole=not body.stream)
        for prompt in prompts
        for submit in new_submits(
            prompt,
            answers,
            stream_ids=list(islice(stream_ids, len(answers))),
            priority=body.priority or 0,
            cache_salt=body.cache_salt,
            model=model,
            template=template,
        )
    ]
    return Ask(
        id=answer_id,
        model=model.name,
        created=int(time.time()),
        states=states,
        shape=shape,
        is_stream=bool(body.stream),
        with_usage=bool(options.include_usage),
        with_usage_so_far=bool(options.include_usage and options.continuous_usage_stats),
        num_logprobs=with_num_logprobs(params, model.vocab_size).logprobs,
        num_prompt_logprobs=num_shown(params.prompt_logprobs, model),
        param_names=param_names,
        echo=echo,
    )


def sampling_params(
    body: Request,
    defaults: SamplingDefaults,
    *,
    max_tokens: int | None,
    num_logprobs: int | None,
    num_prompt_logprobs: int | None = None,
) -> SamplingParams:
    """Checked parameters; what the caller leaves open is as the model's makers have it.

    Raises: BadRequestError, ApiError.
    """
    given = model_defaults(defaults)
    given |= {name: value for name in _SAMPLING if (value := getattr(body, name)) is not None}
    if body.response_format is not None:
        given |= _format(body.response_format, body.structured_outputs)
    if not body.stream:
        if body.stream_options is not None:
            raise bad_field("stream_options", "stream_options: allowed only where stream is true")
        given["stream_interval"] = max(given.get("stream_interval", 1), WHOLE_INTERVAL)
    check_prompt_logprobs(num_prompt_logprobs, is_stream=bool(body.stream))
    if body.logprob_token_ids is not None:
        if num_logprobs is None:
            what = "logprob_token_ids: allowed only where logprobs are asked for"
            raise bad_field("logprob_token_ids", what)
        num_logprobs = None  # the list says how many
    given |= {"logprobs": num_logprobs, "prompt_logprobs": num_prompt_logprobs}
    return checked_params(SamplingParams(max_tokens=max_tokens, **given), {})


def _format(wanted: ResponseFormat, other: StructuredOutputs | None) -> dict[str, Any]:
    """What a response_format asks for, as sampling parameters."""
    if (wanted.type == "json_schema") != (wanted.json_schema is not None):
        what = "response_format.json_schema: goes with type json_schema, and only with that"
        raise bad_field("response_format", what)
    if wanted.type == "text":
        return {}
    if other is not None:
        raise bad_field("response_format", "response_format: got structured_outputs beside it")
    if wanted.json_schema is None:
        return {"structured_outputs": StructuredOutputs(json_object=True)}
    return {"structured_outputs": StructuredOutputs(json=wanted.json_schema.schema)}


def model_defaults(defaults: SamplingDefaults) -> dict[str, Any]:
    """What the model's makers say, as sampling parameters."""
    return {name: value for name in _DEFAULTS if (value := getattr(defaults, name)) is not None}


def check_prompt_logprobs(
    wanted: int | None, *, is_stream: bool, field: str = "prompt_logprobs"
) -> None:
    """Raises ApiError where a stream is to have a prompt's log-probabilities (vLLM's rule)."""
    if wanted is not None and is_stream:
        raise bad_field(field, f"{field}: allowed only where stream is false")


def check_prompt_shown(
    wanted: int | None, prompt_lens: int, model: ModelCard, field: str = "prompt_logprobs"
) -> None:
    """The same as `check_num_shown`, of prompts of so many tokens in all."""
    shown = num_shown(wanted, model)
    if shown is None or shown <= _FEW_LOGPROBS:
        return
    num = (1 + shown) * prompt_lens
    if num > MAX_SHOWN:
        message = (
            f"{field}: got {shown} to a token, {num} log-probabilities in all, allowed: "
            f"{MAX_SHOWN} in one answer; ask for fewer, or of a shorter prompt"
        )
        raise bad_field(field, message)


def check_num_shown(
    params: SamplingParams, field: str, num_answers: int, prompt_lens: int, model: ModelCard
) -> None:
    """Raises ApiError for more log-probabilities than one answer may be written with.

    prompt_lens: tokens of all prompts that are echoed, at most. What every server allows to a token
    (20) is never refused here, and written a part at a time (`whole`); the whole vocabulary's would
    keep this process busy for minutes.
    """
    wanted = with_num_logprobs(params, model.vocab_size).logprobs
    if wanted is None or wanted <= _FEW_LOGPROBS:
        return
    most_tokens = model.max_model_len if params.max_tokens is None else params.max_tokens
    num = (1 + wanted) * (num_answers * most_tokens + prompt_lens)
    if num > MAX_SHOWN:
        message = (
            f"{field}: got {wanted} to a token, {num} log-probabilities in all, allowed: "
            f"{MAX_SHOWN} in one answer; ask for fewer, or for fewer tokens"
        )
        raise bad_field(field, message)


def num_shown(num_logprobs: int | None, model: ModelCard) -> int | None:
    """How many of the likeliest an answer has, where -1 asks for all."""
    return model.vocab_size if num_logprobs == -1 else num_logprobs


def names_of(body: Request) -> dict[str, str]:
    """What the caller calls fields of ours, where it differs."""
    is_format = body.response_format is not None and body.structured_outputs is None
    ours = ("structured_outputs", "structured_outputs.json")
    return dict.fromkeys(ours, "response_format") if is_format else {}
