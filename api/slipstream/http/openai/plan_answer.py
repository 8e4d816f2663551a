"""From a request's body to an `Ask`: the streams to run and the shape of their answer.

It holds what the endpoints share: sampling parameters, limits on log-probabilities, and the streams
of a new answer.
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
WHOLE_INTERVAL = 64  # tokens per delta of an answer that is not streamed
_FEW_LOGPROBS = 20  # per token; never refused
MAX_SHOWN = 2**20  # log-probabilities in an answer with more than `_FEW_LOGPROBS` per token
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
    """What a choice, or a chunk of it, contains besides text and log-probabilities."""

    token_ids: list[int]  # empty unless the shape has ids
    stop_reason: int | str | None = None
    prompt_logprobs: list[LogprobsById | None] | UnsetType | None = UNSET
    prompt_ids: list[int] | UnsetType = UNSET  # if the shape has ids: in a choice's first chunk


class Shape(Protocol):
    """The JSON shape of an endpoint's answers.

    has_ids: choices contain token ids. has_many_prompts: one answer may be to several prompts, so
    a prompt's ids and log-probabilities are in its choices, not beside them.
    """

    whole_object: str
    chunk_object: str
    has_many_prompts: bool

    @property
    def has_ids(self) -> bool: ...

    def whole(
        self, index: int, text: str, logprobs: Logprobs | None, reason: str, said: Said
    ) -> Choice:
        """A complete choice."""

    def first(self, index: int) -> Choice | None:
        """The chunk that precedes a choice's first text, if the shape has one."""

    def chunk(
        self,
        index: int,
        text: str | Raw,
        logprobs: Logprobs | Raw | None,
        reason: str | None,
        said: Said,
    ) -> Choice:
        """A chunk of a choice."""

    def logprobs(
        self, entries: list[TokenLogprobs], k: int, texts: TokenTexts, place: TextPlace
    ) -> Logprobs:
        """Log-probabilities of tokens whose text begins at `place`, which is advanced past it."""

    def logprobs_json(self, delta: Delta, texts: TokenTexts, place: TextPlace) -> bytes | None:
        """`logprobs` of a delta as JSON, by a fast path; None, with `place` unchanged, if there is
        none.
        """


@dataclass(frozen=True, slots=True, eq=False)
class Ask:
    """One request: its streams, each a choice of the answer, and how the answer is written."""

    id: AnswerId
    model: str
    created: int  # Unix time, s
    states: list[StreamState]
    shape: Shape
    is_stream: bool
    with_usage: bool  # in the last chunk of a stream
    with_usage_so_far: bool  # in each chunk, of its choice
    num_logprobs: int | None  # top candidates per token, besides the sampled token
    param_names: dict[str, str] = field(default_factory=dict)  # internal name -> caller's
    echo: Echo | None = None  # the prompts to repeat in front of the outputs

    @property
    def has_logprobs(self) -> bool:
        """Whether the answer has log-probabilities, of outputs or prompts."""
        return self.num_logprobs is not None or self.num_prompt_logprobs is not None

    @property
    def needs_texts(self) -> bool:
        """Whether the vocabulary has to be loaded before the request is run."""
        return self.has_logprobs or (self.echo is not None and self.echo.needs_texts)

    places: tuple[Place, ...] = ()  # the client's cursor in each stream; empty for a new answer
    is_usage_told: bool = False
    is_resumable: bool = False  # the client may resume: events have ids
    num_prompt_logprobs: int | None = None  # as num_logprobs, of the prompts
    told_request: int | None = None  # `request_checksum` from the client's last event
    if_unknown: str = ""  # hint for the error if its streams are no longer known

    @property
    def request_checksum(self) -> int | None:
        """A u32 that identifies the request when it is sent again: `checksum_of` its submits, or
        the one in the client's last event if the submits are not known here. None if neither is.
        """
        submits = [each for state in self.states if (each := state.resubmittable) is not None]
        if len(submits) < len(self.states):
            return self.told_request
        return checksum_of(submits, self.id.num_answers)

    @property
    def can_resume(self) -> bool:
        """Whether event ids can hold everything needed to resume the answer."""
        is_usual = self.echo is None and self.shape.has_ids == (self.id.kind == WITH_IDS)
        return self.is_stream and is_usual and self.id.num_streams <= MAX_PLACES

    @property
    def log_name(self) -> str:
        """A short name for logs: with the full `id` a reader of the log could read the streams."""
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
    """A new answer's id and streams: for each prompt, one stream per entry of `answers`.

    kind: see `AnswerId`. answers: `params` split into one per choice. Raises: BadRequestError.
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
    """Checked parameters; fields that the body leaves out take the model's own defaults.

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
        num_logprobs = None  # logprob_token_ids determines them
    given |= {"logprobs": num_logprobs, "prompt_logprobs": num_prompt_logprobs}
    return checked_params(SamplingParams(max_tokens=max_tokens, **given), {})


def _format(wanted: ResponseFormat, other: StructuredOutputs | None) -> dict[str, Any]:
    """A response_format as sampling parameters."""
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
    """The model's default sampling parameters, those that are set."""
    return {name: value for name in _DEFAULTS if (value := getattr(defaults, name)) is not None}


def check_prompt_logprobs(
    wanted: int | None, *, is_stream: bool, field: str = "prompt_logprobs"
) -> None:
    """Raises ApiError if a stream asks for prompt log-probabilities, as vLLM does."""
    if wanted is not None and is_stream:
        raise bad_field(field, f"{field}: allowed only where stream is false")


def check_prompt_shown(
    wanted: int | None, prompt_lens: int, model: ModelCard, field: str = "prompt_logprobs"
) -> None:
    """`check_num_shown` for prompt log-probabilities; prompt_lens: tokens of all prompts."""
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
    """Raises ApiError for more than `MAX_SHOWN` log-probabilities in one answer.

    prompt_lens: an upper bound of the tokens of all echoed prompts. Up to 20 per token, the usual
    limit of servers, are never refused here: they are written in parts (`unary`). Those of the
    whole vocabulary would keep this process busy for minutes.
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
    """The number of top candidates per token; -1 asks for the whole vocabulary."""
    return model.vocab_size if num_logprobs == -1 else num_logprobs


def names_of(body: Request) -> dict[str, str]:
    """The caller's name for each internal field whose name differs, for error messages."""
    is_format = body.response_format is not None and body.structured_outputs is None
    ours = ("structured_outputs", "structured_outputs.json")
    return dict.fromkeys(ours, "response_format") if is_format else {}
