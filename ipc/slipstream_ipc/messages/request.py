"""The parts of a request: sampling parameters, structured outputs, chat messages, template options;
all that is asked of a stream besides its prompt; and the message that asks for streams.

`slipstream_ipc.validation` checks their values.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypedDict, Unpack

from msgspec import Meta, Raw, Struct

from slipstream_ipc.messages import tags
from slipstream_ipc.messages.answer import AnswerOptions
from slipstream_ipc.messages.fields import (
    I32,
    I64,
    MAX_CHAT_TURNS,
    MAX_OTHERS,
    MAX_TEMPLATE_CHARS,
    MAX_TOOL_CALLS,
    U32,
    Count,
    Identity,
    Label,
    LongText,
    LoraName,
    StreamId,
)
from slipstream_ipc.messages.kept import KeepOptions
from slipstream_ipc.messages.media import Media
from slipstream_ipc.messages.shared import TraceContext


class StructuredOptions(TypedDict, total=False):
    """The fields of `StructuredOutputs` as callers may write them."""

    json: str | Mapping[str, Any] | None
    regex: str | None
    choice: Sequence[str] | None
    grammar: str | None
    json_object: bool | None
    disable_any_whitespace: bool
    strict: bool


class StructuredOutputs(
    Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True
):
    """Constrains the form of an answer; exactly one form is given. Names are vLLM's.

    json: a JSON schema, as text or as an object.
    regex: matches the whole answer, in the syntax of Rust's regex crate: no look-around, no
    back-references.
    choice: the allowed answers.
    grammar: a context-free grammar, in Lark syntax (llguidance's dialect) or in GBNF.
    json_object: True allows any JSON object.
    disable_any_whitespace: with json or json_object, no white space between JSON's tokens.
    strict: with json, a keyword that cannot be enforced is refused; else it is left out, and the
    answer names it.
    """

    json: str | dict[str, Any] | None = None
    regex: str | None = None
    choice: tuple[str, ...] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    disable_any_whitespace: bool = False
    strict: bool = False

    if TYPE_CHECKING:

        def __init__(self, **options: Unpack[StructuredOptions]) -> None: ...


class RepetitionOptions(TypedDict, total=False):
    """The fields of `RepetitionDetection` as callers may write them."""

    max_pattern_size: int
    min_pattern_size: int
    min_count: int


class RepetitionDetection(
    Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True
):
    """Ends an answer whose last tokens are one pattern, written several times in a row. Names and
    defaults are those of vLLM's `RepetitionDetectionParams`.

    max_pattern_size: the longest pattern, in tokens; 0 detects none.
    min_pattern_size: the shortest; 0 is 1.
    min_count: how often the pattern stands there, at least 2.
    """

    max_pattern_size: int = 0
    min_pattern_size: int = 0
    min_count: int = 0

    if TYPE_CHECKING:

        def __init__(self, **options: Unpack[RepetitionOptions]) -> None: ...


class SamplingOptions(TypedDict, total=False):
    """The fields of `SamplingParams` as callers may write them, lists in place of tuples."""

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
    repetition_detection: RepetitionDetection | RepetitionOptions | None
    thinking_token_budget: int | None


class SamplingParams(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The parameters of sampling, of a request's ends and of its output. Names and defaults are
    vLLM's.

    temperature: 0 is greedy. top_k: 0 is off. top_p: in (0, 1]. min_p: in [0, 1].
    seed: the same seed, prompt and model give the same tokens; None draws one per stream, and
    so does -1 where a client is given it.
    stop: strings that end the stream, left out of the text unless include_stop_str_in_output.
    stop_token_ids: ids that end the stream besides the model's end-of-sequence ids.
    max_tokens: None is as many as the model's length allows.
    logprobs: None is none; k is the sampled token's and the k most likely ones'; -1 is the whole
    vocabulary's. The server's `max_logprobs` is the limit.
    stream_interval: tokens between two deltas; the first token and the end are always sent at once.
    detokenize: False leaves texts empty and forbids stop strings.
    presence_penalty, frequency_penalty: in [-2, 2]; subtracted from the logit of each token output
    so far, once or once per occurrence.
    repetition_penalty: > 0; divides the positive logits, and multiplies the others, of tokens in
    the prompt or the output.
    logit_bias: numbers in [-100, 100] that are added to the logits of these ids.
    allowed_token_ids: only these ids are sampled; a stop id that is not among them is not either.
    bad_words: strings whose token sequences are not output, with or without a leading space.
    structured_outputs: constrains the form of the answer; None is any.
    n: answers to the prompt, each a separate stream; the i-th has the seed `seed` + i. Clients turn
    them into streams before submitting, so in a Submit it is 1.
    prompt_logprobs: as logprobs, for every token of the prompt but the first; None is none.
    logprob_token_ids: at most 128 ids whose log-probabilities are returned at each position, with
    the sampled token's and instead of the most likely ones'; `logprobs` is None or their number,
    and `max_logprobs` does not apply. The `rank` of such an id is its position in the list.
    repetition_detection: ends the stream when its last tokens, `min_tokens` or more, repeat a
    pattern; None never does.
    thinking_token_budget: of a chat, the most tokens of reasoning, behind which reasoning ends; 0
    ends it at once, None and -1 set no limit.
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
    repetition_detection: RepetitionDetection | None = None
    thinking_token_budget: int | None = None

    if TYPE_CHECKING:

        def __init__(self, **options: Unpack[SamplingOptions]) -> None: ...


class SamplingDefaults(Struct, array_like=True, frozen=True):
    """The sampling parameters that the model's authors recommend; None where they give none.

    Callers may use them to fill in what a request leaves open. The core does not apply them.
    """

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None


class AskedOptions(TypedDict, total=False):
    """The fields of `Submit` that callers name, besides those with a rule of their own."""

    priority: int
    cache_salt: str | None
    prediction: str | None


class RequestSpec(Struct, array_like=True, frozen=True):
    """The request for a stream, besides its prompt. Nothing in it changes while the stream runs,
    except that `keep` goes once its answer is kept, or is not to be any more.

    A Submit has the same fields, flat and as its client gives them. The worker makes the spec of
    them (`slipstream_ipc.validation.request_spec`), in which `params` is what the model can do:
    without -1, and with a grammar of the worker's own where calls need one; its `seed` is None, as
    a registration has its own. Worker and core pass it on, and read fields where they use them.

    label: the user's name for the request; grants nothing.
    priority: lower runs first. own_priority: among its tenant's requests of equal priority.
    cache_salt: only requests with an equal salt share cached blocks.
    tenant: on whose behalf the request is made; tenants take turns among requests of equal
    priority.
    scope: only messages with an equal one read or end the stream; empty: its id is enough. A core
    does not read it.
    answer: how the answer to chat messages is to be read; None: it is text alone.
    keep: until its answer is in a Keep; None: it is not to be kept.
    trace: the caller's span; None unless the request is traced.
    adapter: the name of the adapter that changes the model; empty: none. adapter_digest: of its
    files, as the stream began; a stream goes on with the same ones or ends as diverged.
    """

    params: SamplingParams
    label: Label = ""
    priority: I32 = 0
    own_priority: I32 = 0
    cache_salt: Label = ""
    tenant: Identity = b""
    scope: Identity = b""
    answer: AnswerOptions | None = None
    keep: KeepOptions | None = None
    trace: TraceContext | None = None
    adapter: LoraName = ""
    adapter_digest: Identity = b""


class FunctionCall(Struct, frozen=True, forbid_unknown_fields=True):
    """A function and its arguments, a JSON object as text."""

    name: str
    arguments: str


class ChatToolCall(Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """A tool call in an assistant's message; the tool's answer refers to its `id`."""

    function: FunctionCall
    id: str | None = None
    type: Literal["function"] | None = None


class ChatMessage(Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """One turn of a chat, as the model's chat template expects it.

    tool_calls, reasoning_content: of an assistant's turn. tool_call_id: of a tool's turn, the call
    that it answers. parts: texts, and numbers of items among the Submit's `media`, in the order in
    which the turn has them; its `content` is the texts alone. None: it has no items.
    """

    role: str
    content: str
    name: str | None = None
    tool_calls: Annotated[tuple[ChatToolCall, ...], Meta(max_length=MAX_TOOL_CALLS)] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    parts: Annotated[tuple[str | U32, ...], Meta(max_length=MAX_CHAT_TURNS)] | None = None


class TemplateOptions(Struct, array_like=True, frozen=True):
    """The input of a chat template besides the messages; `slipstream_ipc.validation.chat_template`
    checks it.

    tools: a JSON array of OpenAI's tool definitions. kwargs: a JSON object of further variables.
    Either is empty for none. add_generation_prompt: end the text where an answer begins.
    continue_final_message: end the text within the last message, which the answer continues.
    """

    tools: Annotated[str, Meta(max_length=MAX_TEMPLATE_CHARS)] = ""
    kwargs: Annotated[str, Meta(max_length=MAX_TEMPLATE_CHARS)] = ""
    add_generation_prompt: bool = True
    continue_final_message: bool = False


class OtherAnswer(Struct, array_like=True, frozen=True):
    """A further stream of a Submit, which differs from its first stream in these fields only."""

    handle: U32
    stream_id: StreamId
    seed: I64 | None = None


class Submit(Struct, array_like=True, frozen=True, tag=tags.SUBMIT):
    """Request a stream. One of `text`, `token_ids`, `messages` is the prompt. `params` and the
    fields of `RequestSpec` say what is asked of it.

    An accepted stream that worker and core have both lost is submitted again with what its reader
    has: `output_ids`, whose text is `num_chars` characters long. A reader that did not keep the ids
    states `num_tokens` and their `checksum`: the stream is then computed from its beginning, and
    sent from that position on.

    Several answers to a prompt are requested in one Submit, so that the prompt is sent once. Each
    of `others` is an independent stream, which may be submitted again on its own.
    """

    handle: U32  # the client's number for the stream within this session
    stream_id: StreamId
    params: Raw  # a SamplingParams map; decoded separately, so that errors name the request
    text: str | None = None
    token_ids: bytes = b""
    messages: Annotated[tuple[ChatMessage, ...], Meta(max_length=MAX_CHAT_TURNS)] = ()
    # the worker checks narrower limits of the next two, so that an error names the request
    label: LongText = ""  # the user's name for the request; grants nothing
    priority: int = 0  # lower runs first
    was_accepted: bool = False  # exempts it from the bound on waiting requests
    output_ids: bytes = b""
    num_chars: Count = 0
    cache_salt: LongText = ""  # only requests with an equal salt share cached blocks
    template: TemplateOptions = TemplateOptions()  # of `messages`
    num_tokens: U32 = 0  # tokens that the reader has, where `output_ids` does not hold them
    checksum: U32 | None = None  # `history_checksum` of those
    seed: I64 | None = None  # replaces the one in `params`
    others: Annotated[tuple[OtherAnswer, ...], Meta(max_length=MAX_OTHERS)] = ()
    tenant: Identity = b""  # on whose behalf the request is made; empty: the client itself
    trace: TraceContext | None = None  # ignored unless the server exports traces
    answer: AnswerOptions | None = None  # of `messages`; None: the answer is text alone
    keep: KeepOptions | None = None  # None: the answer is not kept after its stream
    # only messages with an equal scope read or end the stream; empty: its id is enough
    scope: Identity = b""
    # how often the stream has changed its replica: a higher number replaces what is known under its
    # id, a lower one is superseded
    moves: U32 = 0
    strikes: U32 = 0  # deaths of other replicas' cores of their own doing, see `Begun`
    own_priority: int = 0  # among its tenant's requests of equal priority; lower runs first
    adapter: LongText = ""  # the name of an adapter on the model's card; empty: none
    adapter_digest: Identity = b""  # of that adapter as the client knows it; empty: any
    # what the answer will probably say: then it takes fewer steps, where answers are drafted
    prediction: str = ""
    # images, in the order in which the prompt has them; `token_ids` have a placeholder for each row
    # that the model makes of one
    media: Media = ()
