"""What a request says: prompt, sampling, what its answer is to look like.

Whether it may be asked for is `slipstream_ipc.validation.sampling_params`'s business, and that of
the modules below it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypedDict, Unpack

from msgspec import Meta, Struct

from slipstream_ipc.messages.fields import MAX_TEMPLATE_CHARS, MAX_TOOL_CALLS


class StructuredOptions(TypedDict, total=False):
    """What `StructuredOutputs` is made of, as callers write it."""

    json: str | Mapping[str, Any] | None
    regex: str | None
    choice: Sequence[str] | None
    grammar: str | None
    json_object: bool | None


class StructuredOutputs(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What an answer is made to look like; exactly one field is given. Names are vLLM's.

    json: a JSON schema, as text or as an object.
    regex: what the whole answer matches, in the syntax of Rust's regex crate: no look-around, no
    back-references.
    choice: the answers that there may be.
    grammar: a context-free grammar, in Lark syntax (llguidance's dialect) or in GBNF.
    json_object: True is any JSON object.
    """

    json: str | dict[str, Any] | None = None
    regex: str | None = None
    choice: tuple[str, ...] | None = None
    grammar: str | None = None
    json_object: bool | None = None

    if TYPE_CHECKING:

        def __init__(self, **options: Unpack[StructuredOptions]) -> None: ...


class SamplingOptions(TypedDict, total=False):
    """The fields of `SamplingParams` as callers write them: lists do as well as tuples."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int | None
    stop: str | Sequence[str] | None
    stop_token_ids: Sequence[int] | None
    include_stop_str_in_output: bool
    ignore_eos: bool
    max_tokens: int | None
    min_tokens: int
    logprobs: int | None
    skip_special_tokens: bool
    detokenize: bool
    stream_interval: int
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    logit_bias: Mapping[int, float] | None
    allowed_token_ids: Sequence[int] | None
    bad_words: Sequence[str] | None
    structured_outputs: StructuredOutputs | StructuredOptions | None
    n: int
    prompt_logprobs: int | None
    logprob_token_ids: Sequence[int] | None


class SamplingParams(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a request is sampled, ended and reported. Names and defaults are vLLM's.

    temperature: 0 is greedy. top_k: 0 is off. top_p: in (0, 1]. min_p: in [0, 1].
    seed: the same seed, prompt and model give the same tokens; None draws one per stream.
    stop: strings that end the stream, themselves left out unless include_stop_str_in_output.
    stop_token_ids: ids that end the stream besides the model's own end-of-sequence ids.
    max_tokens: None is as many as the model's length allows.
    logprobs: None is none; k is the sampled token's and the k most likely ones'; -1 is the whole
    vocabulary's. How many the server allows is its `max_logprobs`.
    stream_interval: tokens between two deltas; the first token and the end always leave at once.
    detokenize: False leaves texts empty and forbids stop strings.
    presence_penalty, frequency_penalty: in [-2, 2]; taken from the logit of what was output before,
    once and each time.
    repetition_penalty: > 0; divides the positive logits, and multiplies the others, of what is in
    the prompt or was output.
    logit_bias: numbers in [-100, 100] that are added to the logits of these ids.
    allowed_token_ids: nothing else is sampled; no stop id either that is not among them.
    bad_words: strings whose tokens are not output in a row, with a blank in front or without.
    structured_outputs: what the answer is made to look like; None is anything.
    n: answers to the prompt, each a stream of its own; the i-th has the seed `seed` + i. Clients
    ask for them one by one, so in a Submit it is 1.
    prompt_logprobs: as logprobs, of every token of the prompt but the first; None is none.
    logprob_token_ids: log-probabilities of these ids, at most 128, at each position, besides the
    sampled token's and in the place of the most likely ones'; `logprobs` is None or their number,
    and `max_logprobs` does not count. The `rank` of such an id is its place in the list.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    stop: str | tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    skip_special_tokens: bool = True
    detokenize: bool = True
    stream_interval: int = 1
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: tuple[int, ...] | None = None
    bad_words: tuple[str, ...] | None = None
    structured_outputs: StructuredOutputs | None = None
    n: int = 1
    prompt_logprobs: int | None = None
    logprob_token_ids: tuple[int, ...] | None = None

    if TYPE_CHECKING:

        def __init__(self, **options: Unpack[SamplingOptions]) -> None: ...


class FunctionCall(Struct, frozen=True, forbid_unknown_fields=True):
    """Which function a model calls. arguments: a JSON object, as text."""

    name: str
    arguments: str


class ToolCall(Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """A call that an assistant's message makes; `id` is what its answer names."""

    function: FunctionCall
    id: str | None = None
    type: Literal["function"] | None = None


class ChatMessage(Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """One turn of a chat, as the model's chat template wants it.

    tool_calls: of an assistant's turn. tool_call_id: which of them a tool's turn answers.
    """

    role: str
    content: str
    name: str | None = None
    tool_calls: Annotated[tuple[ToolCall, ...], Meta(max_length=MAX_TOOL_CALLS)] | None = None
    tool_call_id: str | None = None


class TemplateOptions(Struct, array_like=True, frozen=True):
    """What a chat template is given beside the messages; `slipstream_ipc.validation.chat_template`
    checks it.

    tools: a JSON array of OpenAI's tool definitions. kwargs: a JSON object of further variables.
    Either is empty for none. add_generation_prompt: the text is to end where an answer begins.
    continue_final_message: it is to end within the last message, which the answer goes on with.
    """

    tools: Annotated[str, Meta(max_length=MAX_TEMPLATE_CHARS)] = ""
    kwargs: Annotated[str, Meta(max_length=MAX_TEMPLATE_CHARS)] = ""
    add_generation_prompt: bool = True
    continue_final_message: bool = False
