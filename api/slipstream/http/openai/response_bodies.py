"""Types of response bodies, in OpenAI's shapes.

`Raw` marks the parts in which a stream's chunks differ: the rest of a chunk is encoded once
(`streaming`).
"""

from __future__ import annotations

from typing import Literal

from msgspec import UNSET, Raw, Struct, UnsetType

from slipstream.http.openai.usage import Usage

NULL = Raw(b"null")


class CompletionLogprobs(Struct, frozen=True):
    """A completion's log-probabilities, in columns of one entry per token."""

    text_offset: list[int]  # where each token begins in the answer's text, in characters
    token_logprobs: list[float | None]  # null for a prompt's first token
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class TopLogprob(Struct, frozen=True):
    """A candidate for a token. bytes: null if unknown."""

    token: str
    bytes: list[int] | None
    logprob: float


class TokenLogprob(Struct, frozen=True):
    """A token of a chat's answer, with the most likely candidates in its place."""

    token: str
    bytes: list[int] | None
    logprob: float
    top_logprobs: list[TopLogprob]


class ChatLogprobs(Struct, frozen=True):
    """A chat's log-probabilities: one entry per token."""

    content: list[TokenLogprob]
    refusal: None = None


class LogprobById(Struct, frozen=True):
    """A candidate for a token, keyed by token id (vLLM's shape). rank: 1 is the most likely."""

    logprob: float
    rank: int
    decoded_token: str


LogprobsById = dict[int, LogprobById]  # the candidates for one token, the token itself first
Logprobs = CompletionLogprobs | ChatLogprobs | list[LogprobsById]


class CompletionChoice(Struct, frozen=True):
    """One choice of a completion, or a chunk of it."""

    index: int
    text: str | Raw
    logprobs: Logprobs | Raw | None
    finish_reason: str | None
    # per prompt token, null for the first; null as a whole if not asked for
    prompt_logprobs: list[LogprobsById | None] | Raw | UnsetType | None = UNSET
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET  # of a stream: in the choice's first chunk


class GenerateChoice(Struct, frozen=True):
    """One choice, or a chunk of it. logprobs: one entry per token. stop_reason: the stop string or
    stop token id that ended it.
    """

    index: int
    text: str | Raw
    token_ids: list[int]
    logprobs: Logprobs | Raw | None
    finish_reason: str | None
    stop_reason: int | str | None = None


class FunctionWithArguments(Struct, frozen=True):
    """The function that a call names. arguments: a JSON object as text."""

    name: str
    arguments: str


class CustomWithInput(Struct, frozen=True):
    """The custom tool that a call names. input: free text."""

    name: str
    input: str


class MessageCall(Struct, frozen=True):
    """A tool call of a message: of a function, or of a custom tool."""

    id: str
    function: FunctionWithArguments | UnsetType = UNSET
    type: Literal["function", "custom"] = "function"
    custom: CustomWithInput | UnsetType = UNSET


class AnswerMessage(Struct, frozen=True):
    """The message that answers a chat. content: null beside tool calls alone.

    reasoning_content, and the same as reasoning: absent where there is none, as tool_calls are.
    """

    role: str
    content: str | Raw | None
    refusal: None = None
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    tool_calls: list[MessageCall] | UnsetType = UNSET


class ChatChoice(Struct, frozen=True):
    """One choice of a chat completion."""

    index: int
    message: AnswerMessage
    logprobs: Logprobs | Raw | None
    finish_reason: str | None
    token_ids: list[int] | UnsetType = UNSET


class FunctionChunk(Struct, frozen=True, kw_only=True):
    """The new part of a call's function. name: where the call begins."""

    name: str | UnsetType = UNSET
    arguments: str | Raw


class CustomChunk(Struct, frozen=True, kw_only=True):
    """The new part of a call's input. name: where the call begins."""

    name: str | UnsetType = UNSET
    input: str


class CallChunk(Struct, frozen=True, kw_only=True):
    """The new part of a tool call. index: of the call in its message. id, type: where it begins."""

    index: int
    id: str | UnsetType = UNSET
    type: Literal["function", "custom"] | UnsetType = UNSET
    function: FunctionChunk | UnsetType = UNSET
    custom: CustomChunk | UnsetType = UNSET


class ChatDelta(Struct, frozen=True, omit_defaults=True):
    """The new part of a message, in a chunk. reasoning: the same as reasoning_content."""

    role: str | UnsetType = UNSET
    content: str | Raw | UnsetType = UNSET
    reasoning_content: str | Raw | UnsetType = UNSET
    reasoning: str | Raw | UnsetType = UNSET
    tool_calls: list[CallChunk] | UnsetType = UNSET


class ChatChunkChoice(Struct, frozen=True):
    """A chunk of one choice of a chat completion."""

    index: int
    delta: ChatDelta
    logprobs: Logprobs | Raw | None
    finish_reason: str | None
    token_ids: list[int] | UnsetType = UNSET


Choice = CompletionChoice | ChatChoice | ChatChunkChoice | GenerateChoice


class Answer(Struct, frozen=True):
    """A response's body, or a chunk of a stream.

    usage: absent in a stream's chunks unless include_usage is set; then null, or that of the choice
    so far, and the total in the last chunk.
    prompt_logprobs: as in a completion's choice, where all choices answer one prompt.
    prompt_token_ids: if choices have token ids; of a stream, in a chat's first chunk.
    """

    id: str
    object: str
    created: int
    model: str
    choices: list[Choice | Raw]
    usage: Usage | UnsetType | None = UNSET
    prompt_logprobs: list[LogprobsById | None] | Raw | UnsetType | None = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


class Model(Struct, frozen=True):
    """The served model, with OpenAI's fields and Anthropic's. created_at: `created` in RFC 3339.
    Of an adapter, with vLLM's: root, its folder, and parent, the model that it changes.
    """

    id: str
    created: int
    max_model_len: int
    display_name: str
    created_at: str
    object: str = "model"
    owned_by: str = "slipstream"
    type: str = "model"
    lifecycle: str = "active"
    root: str | UnsetType = UNSET
    parent: str | UnsetType = UNSET


class Models(Struct, frozen=True):
    """The list of served models. first_id, last_id, has_more: Anthropic's; the ids are null where
    the page is empty.
    """

    data: list[Model]
    first_id: str | None
    last_id: str | None
    has_more: bool = False
    object: str = "list"


class Health(Struct, frozen=True):
    """The state of the server. processes, pids: the state and the process id of each process of the
    stack, by name; an id is up to a second old. models: in place of `model` where several are
    served. replicas: what each replica that a router knows of is doing.
    """

    status: str
    model: str | UnsetType = UNSET
    models: list[str] | UnsetType = UNSET
    processes: dict[str, str] | UnsetType = UNSET
    pids: dict[str, int] | UnsetType = UNSET
    replicas: dict[str, str] | UnsetType = UNSET


class Tokens(Struct, frozen=True):
    """A tokenized prompt. token_strs: as the vocabulary spells them, if asked for."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class Embedding(Struct, frozen=True):
    """An input's vector: numbers, or 32-bit floats in base64."""

    index: int
    embedding: list[float] | str
    object: Literal["embedding"] = "embedding"


class EmbeddingUsage(Struct, frozen=True):
    """The tokens of all inputs."""

    prompt_tokens: int
    total_tokens: int


class EmbeddingList(Struct, frozen=True):
    """The vectors of a request's inputs, in their order."""

    data: list[Embedding]
    model: str
    usage: EmbeddingUsage
    object: Literal["list"] = "list"


class Classification(Struct, frozen=True):
    """The classes of an input. probs: of labels, in the model's order; label: of the highest."""

    index: int
    label: str
    probs: list[float]
    num_classes: int


class ClassificationList(Struct, frozen=True):
    """The classes of a request's inputs, in their order."""

    id: str
    created: int
    model: str
    data: list[Classification]
    usage: EmbeddingUsage
    object: Literal["list"] = "list"


class Score(Struct, frozen=True):
    """The score of a pair."""

    index: int
    score: float
    object: Literal["score"] = "score"


class ScoreList(Struct, frozen=True):
    """The scores of a request's pairs, in their order."""

    id: str
    created: int
    model: str
    data: list[Score]
    usage: EmbeddingUsage
    object: Literal["list"] = "list"


class RerankedText(Struct, frozen=True):
    """A document."""

    text: str


class Reranked(Struct, frozen=True, omit_defaults=True):
    """A document's place among those of a request, its score, and its text if it is asked for."""

    index: int
    relevance_score: float
    document: RerankedText | None = None


class RerankList(Struct, frozen=True):
    """The documents of a request, by falling score."""

    id: str
    model: str
    results: list[Reranked]
    usage: EmbeddingUsage


class Text(Struct, frozen=True):
    """Detokenized text."""

    prompt: str


class Aborted(Struct, frozen=True):
    """The result of an abort: `aborted`, or `ended` if the request had ended before."""

    request_id: str
    status: Literal["aborted", "ended"]


class Version(Struct, frozen=True, omit_defaults=True):
    """The version of Slipstream. engine: name and version of another engine that it serves."""

    version: str
    engine: str = ""
