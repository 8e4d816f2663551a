"""What an endpoint makes of a request: the streams to run, and the shape of the answer.

Types alone, but for the sampling parameters that both endpoints read alike.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

from msgspec import Raw

from slipstream.batch import TokenLogprobs
from slipstream.http.echo import Echo
from slipstream.http.errors import bad_field
from slipstream.http.event_ids import MAX_PLACES, AnswerId, Place
from slipstream.http.logprobs import TextPlace
from slipstream.http.requests import Request, ResponseFormat
from slipstream.http.responses import Choice, Logprobs
from slipstream.http.token_texts import TokenTexts
from slipstream.requests import checked_params
from slipstream.stream_table import StreamState
from slipstream_ipc.messages import (
    ModelCard,
    SamplingDefaults,
    SamplingParams,
    StructuredOutputs,
)
from slipstream_ipc.security import short_id

_WHOLE_INTERVAL = 64  # tokens to a delta where nobody looks at it before the end
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
)


class Shape(Protocol):
    """How an endpoint's answers look."""

    whole_object: str
    chunk_object: str

    def whole(self, index: int, text: str, logprobs: Logprobs | None, reason: str) -> Choice:
        """An answer in full."""

    def first(self, index: int) -> Choice | None:
        """What precedes a stream's first text."""

    def chunk(
        self, index: int, text: str | Raw, logprobs: Logprobs | Raw | None, reason: str | None
    ) -> Choice:
        """A part of an answer."""

    def logprobs(
        self, entries: list[TokenLogprobs], k: int, texts: TokenTexts, place: TextPlace
    ) -> Logprobs:
        """Log-probabilities of tokens that begin at `place`, which goes on to their end."""


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
    num_logprobs: int | None  # the likeliest so many, beside the sampled one
    param_names: dict[str, str] = field(default_factory=dict)  # the caller's, by ours
    echo: Echo | None = None  # the prompts in front of their answers

    @property
    def needs_texts(self) -> bool:
        """Whether the vocabulary has to be there before it can be answered."""
        return self.num_logprobs is not None or (self.echo is not None and self.echo.needs_texts)

    places: tuple[Place, ...] = ()  # what the client has of each stream; none: it asks for it first
    is_usage_told: bool = False
    is_resumable: bool = False  # the client may come back for the rest: events have ids

    @property
    def can_resume(self) -> bool:
        """Whether the ids of its events can say all there is to know."""
        return self.is_stream and self.echo is None and self.id.num_streams <= MAX_PLACES

    @property
    def log_name(self) -> str:
        """What a log calls it: by `id` whoever reads the log could read the streams, too."""
        return short_id(self.states[0].stream_id)


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
    given: dict[str, Any] = {
        name: value for name in _DEFAULTS if (value := getattr(defaults, name)) is not None
    }
    given |= {name: value for name in _SAMPLING if (value := getattr(body, name)) is not None}
    if body.response_format is not None:
        given |= _format(body.response_format, body.structured_outputs)
    if not body.stream:
        if body.stream_options is not None:
            raise bad_field("stream_options", "stream_options: allowed only where stream is true")
        given["stream_interval"] = max(given.get("stream_interval", 1), _WHOLE_INTERVAL)
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


def check_num_shown(
    params: SamplingParams, field: str, num_answers: int, prompt_lens: int, model: ModelCard
) -> None:
    """Raises ApiError for more log-probabilities than one answer may be written with.

    prompt_lens: tokens of all prompts that are echoed, at most. What every server allows to a token
    (20) is never refused here; the whole vocabulary's would keep this process busy for minutes.
    """
    wanted = num_shown(params.logprobs, model)
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


def wants_usage(body: Request) -> bool:
    """Whether a stream ends with its usage."""
    return body.stream_options is not None and bool(body.stream_options.include_usage)
