"""What clients get, as types in OpenAI's shapes. Types alone.

`Raw` stands where a stream's chunks differ: the rest of a chunk is encoded once (`answer`).
"""

from __future__ import annotations

from typing import Literal

from msgspec import UNSET, Raw, Struct, UnsetType

NULL = Raw(b"null")


class Usage(Struct, frozen=True):
    """How many tokens a request took."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class CompletionLogprobs(Struct, frozen=True):
    """A completion's log-probabilities: a column for each kind of value."""

    text_offset: list[int]  # where each token's text begins in the answer's
    token_logprobs: list[float | None]  # null for a prompt's first token
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class TopLogprob(Struct, frozen=True):
    """A candidate. `bytes` is null where a token's bytes are not known."""

    token: str
    bytes: list[int] | None
    logprob: float


class TokenLogprob(Struct, frozen=True):
    """A token of a chat's answer, with the likeliest ones in its place."""

    token: str
    bytes: list[int] | None
    logprob: float
    top_logprobs: list[TopLogprob]


class ChatLogprobs(Struct, frozen=True):
    """A chat's log-probabilities."""

    content: list[TokenLogprob]
    refusal: None = None


class LogprobById(Struct, frozen=True):
    """A candidate, where it stands under its token id. As vLLM has it."""

    logprob: float
    rank: int
    decoded_token: str


LogprobsById = dict[int, LogprobById]  # of one token, itself first
Logprobs = CompletionLogprobs | ChatLogprobs | list[LogprobsById]


class CompletionChoice(Struct, frozen=True):
    """One prompt's answer, or a part of it."""

    index: int
    text: str | Raw
    logprobs: Logprobs | Raw | None
    finish_reason: str | None
    # of its prompt's tokens, null for the first one; null in an answer that was asked for none
    prompt_logprobs: list[LogprobsById | None] | UnsetType | None = UNSET
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET  # in the first part of a stream's


class GenerateChoice(Struct, frozen=True):
    """One answer, or a part of it; logprobs: one entry to a token. stop_reason: the stop string or
    id that ended it.
    """

    index: int
    text: str | Raw
    token_ids: list[int]
    logprobs: Logprobs | Raw | None
    finish_reason: str | None
    stop_reason: int | str | None = None


class ChatMessage(Struct, frozen=True):
    """The answer to a chat."""

    role: str
    content: str
    refusal: None = None


class ChatChoice(Struct, frozen=True):
    """The answer to a chat, in full."""

    index: int
    message: ChatMessage
    logprobs: Logprobs | None
    finish_reason: str | None
    token_ids: list[int] | UnsetType = UNSET


class ChatDelta(Struct, frozen=True, omit_defaults=True):
    """What is new of an answer."""

    role: str | UnsetType = UNSET
    content: str | Raw | UnsetType = UNSET


class ChatChunkChoice(Struct, frozen=True):
    """A part of the answer to a chat."""

    index: int
    delta: ChatDelta
    logprobs: Logprobs | Raw | None
    finish_reason: str | None
    token_ids: list[int] | UnsetType = UNSET


Choice = CompletionChoice | ChatChoice | ChatChunkChoice | GenerateChoice


class Answer(Struct, frozen=True):
    """A response's body, or a stream's chunk.

    usage: in the chunks of a stream that ends with it null, or their choice's so far, in those of
    others absent.
    prompt_logprobs: as in a completion's choice, of answers to one prompt. prompt_token_ids: where
    choices have token ids; of a stream, in a chat's first chunk.
    """

    id: str
    object: str
    created: int
    model: str
    choices: list[Choice | Raw]
    usage: Usage | UnsetType | None = UNSET
    prompt_logprobs: list[LogprobsById | None] | UnsetType | None = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


class Model(Struct, frozen=True):
    """What is served."""

    id: str
    created: int
    max_model_len: int
    object: str = "model"
    owned_by: str = "slipstream"


class Models(Struct, frozen=True):
    """Everything that is served."""

    data: list[Model]
    object: str = "list"


class Health(Struct, frozen=True):
    """How this process is; processes: how all of the stack are, by name."""

    status: str
    model: str | UnsetType = UNSET
    processes: dict[str, str] | UnsetType = UNSET


class Tokens(Struct, frozen=True):
    """What a prompt becomes. token_strs: as the vocabulary spells them, where asked for."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class Text(Struct, frozen=True):
    """What token ids read like."""

    prompt: str


class Aborted(Struct, frozen=True):
    """What became of a request: `aborted` now, or it had `ended` before."""

    request_id: str
    status: Literal["aborted", "ended"]


class Version(Struct, frozen=True):
    """Of this software."""

    version: str
