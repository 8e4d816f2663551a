"""Every type that crosses between Slipstream's processes; types alone, no logic.

Rules:
- Immutable msgspec Structs, arrays on the wire, one tagged union per direction of each hop.
- Fields are appended with defaults, never reordered; PROTOCOL_VERSION changes when that fails.
- Whatever there is one of per request and step travels as a column: the bytes of a little-endian
  numpy array, u32 unless its comment says otherwise. `slipstream_ipc.columns` checks and reads
  them.
- Every number has a range and every list a length: the decoder refuses what lies outside
  (`slipstream_ipc.codec` says which field it was). What is allowed inside is checked elsewhere:
  `slipstream_ipc.params` for what callers give.

A hop has an attaching end (worker towards core, client towards worker) and an accepting end.
"""

from __future__ import annotations

from typing import Annotated, Any, Generic, Literal, TypeVar

from msgspec import Meta, Raw, Struct

PROTOCOL_VERSION = 2

MAX_CHAT_TURNS = 16384
MAX_LABEL_CHARS = 1024

U64 = Annotated[int, Meta(ge=0)]  # msgpack has no larger ones
Count = Annotated[int, Meta(ge=0, le=2**63 - 1)]
U32 = Annotated[int, Meta(ge=0, le=2**32 - 1)]
I32 = Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)]
I64 = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
StreamId = Annotated[bytes, Meta(max_length=16)]  # 128 random bits; a shorter one is nobody's
StreamIds = Annotated[tuple[StreamId, ...], Meta(max_length=2**20)]
StopIds = Annotated[tuple[U32, ...], Meta(max_length=4096)]
Identity = Annotated[bytes, Meta(max_length=64)]
Label = Annotated[str, Meta(max_length=MAX_LABEL_CHARS)]
LongText = Annotated[str, Meta(max_length=2**16)]

FinishReason = Literal["stop", "length", "abort", "error"]
ErrorCode = Literal[
    "bad_request",  # the caller's fault: a field is wrong
    "conflict",  # the caller's fault: the stream id is taken by other content
    "unknown_stream",  # no such stream here (any more)
    "overloaded",  # nobody's fault: try again later
    "superseded",  # another reader has taken the stream over
    "diverged",  # a resumed stream is not the one the reader has part of
    "engine",  # ours
]

Body = TypeVar("Body")


class Frame(Struct, Generic[Body], array_like=True, gc=False, frozen=True):
    """What every message is wrapped in; `slipstream_ipc.link` gives its numbers their meaning."""

    epoch: U64
    seq: U64
    ack: U64
    body: Body | None = None  # None is a bare acknowledgement


class Fault(Struct, array_like=True, frozen=True):
    """What went wrong, and with which field of whose request."""

    code: ErrorCode
    message: LongText
    field: Label | None = None


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


class ChatMessage(Struct, frozen=True, forbid_unknown_fields=True):
    """One turn of a chat, as the model's chat template wants it."""

    role: str
    content: str


class SamplingDefaults(Struct, array_like=True, frozen=True):
    """How the model's makers would have it sampled; None where they say nothing.

    For whoever fills in what a request leaves open. The core applies none of it.
    """

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None


class ModelCard(Struct, array_like=True, frozen=True):
    """What a stack serves."""

    name: str
    path: str  # where the tokenizer is found: a folder or a hub id
    vocab_size: U32
    max_model_len: U32  # tokens, prompt and output together
    eos_token_ids: tuple[U32, ...]
    default_sampling: SamplingDefaults = SamplingDefaults()
    # how many a request may ask for, of its outputs and of its prompt; -1: the whole vocabulary
    max_logprobs: Annotated[int, Meta(ge=-1, le=2**31 - 1)] = 20


class End(Struct, array_like=True, frozen=True):
    """How a stream ended. Every accepted stream gets exactly one."""

    reason: FinishReason
    num_tokens: U32  # output tokens kept
    stop_reason: int | str | None = None  # the stop id or string that ended it, None for EOS
    fault: Fault | None = None


class LogprobColumns(Struct, array_like=True, gc=False, frozen=True):
    """Log-probabilities of all tokens of a batch, in its order; a token's first is its own.

    `widths` is empty where all entries of the batch have `width` values to a token.
    """

    width: U32
    values: bytes  # f32
    ids: bytes
    ranks: bytes  # one to a token that has values; 1 is the most likely
    widths: bytes = b""  # one to an entry of the batch


# ---- both hops, either way -----------------------------------------------------------------


class Hello(Struct, array_like=True, frozen=True, tag=0):
    """Opens an epoch. `fresh`: the sender knows of no stream and wants everything replayed."""

    version: U32
    identity: Identity  # stays the same over all attaches of one party's life
    fresh: bool = True


class Welcome(Struct, array_like=True, frozen=True, tag=1):
    """The accepting end's answer to a Hello."""

    version: U32
    model: ModelCard


class Reattach(Struct, array_like=True, frozen=True, tag=2):
    """The accepting end does not know this route: attach anew."""


class Refusal(Struct, array_like=True, frozen=True, tag=3):
    """The accepting end will not have this peer, or cannot read what it sent."""

    fault: Fault


class Ping(Struct, array_like=True, frozen=True, tag=4):
    """Asks for a sign of life."""


class Starting(Struct, array_like=True, frozen=True, tag=5):
    """The accepting end is there and cannot serve yet; it keeps the Hello, and answers it then."""


# ---- client -> worker ----------------------------------------------------------------------


class Submit(Struct, array_like=True, frozen=True, tag=10):
    """Ask for a stream. One of `text`, `token_ids`, `messages` is the prompt.

    A stream that was accepted once, and that worker and core have both lost, is asked for again
    with what its reader has of it: `output_ids`, whose text is `num_chars` long.
    """

    handle: U32  # the client's number for the stream within this session
    stream_id: StreamId
    params: Raw  # a SamplingParams map, decoded apart so that its errors find their caller
    text: str | None = None
    token_ids: bytes = b""
    messages: Annotated[tuple[ChatMessage, ...], Meta(max_length=MAX_CHAT_TURNS)] = ()
    # the next two are held against narrower limits later, where an error finds its one request
    label: LongText = ""  # the user's own name for it; grants nothing
    priority: int = 0  # lower runs first
    was_accepted: bool = False  # so it passes the bound on waiting requests
    output_ids: bytes = b""
    num_chars: Count = 0
    cache_salt: LongText = ""  # cached blocks are shared only among requests with the same


class Resume(Struct, array_like=True, frozen=True, tag=11):
    """Go on with a stream from where the reader's copy ends; its reader so far is superseded."""

    handle: U32
    stream_id: StreamId
    num_chars: Count
    num_tokens: U32
    digest: U64 | None = None  # `history_digest` of the tokens it has; None: it did not keep them


class Abort(Struct, array_like=True, frozen=True, tag=12):
    """End a stream now. Counts only from the stream's reader."""

    stream_id: StreamId
    handle: U32 | None = None  # under which the sender reads it


class Goodbye(Struct, array_like=True, frozen=True, tag=13):
    """The client leaves for good: abort and forget what is its own."""


# ---- worker -> client ----------------------------------------------------------------------


class Accepted(Struct, array_like=True, frozen=True, tag=20):
    """The stream runs; its prompt has this many tokens."""

    handle: U32
    prompt_ids: bytes


class Rejected(Struct, array_like=True, frozen=True, tag=21):
    """The stream was never accepted, or what was asked of it cannot be done."""

    handle: U32
    fault: Fault


class Deltas(Struct, array_like=True, gc=False, frozen=True, tag=22):
    """What is new of a client's streams. Entry i begins at `chars[i]` and `tokens[i]`."""

    handles: bytes
    chars: bytes  # characters before this entry's text
    tokens: bytes  # tokens before this entry's ids
    texts: list[str]
    token_ids: bytes
    counts: bytes = b""  # ids to an entry; empty: one each
    ended: bytes = b""  # indices of entries that are their stream's last
    ends: tuple[End, ...] = ()  # one to an index in `ended`
    logprobs: LogprobColumns | None = None


class UnknownStreams(Struct, array_like=True, frozen=True, tag=23):
    """Resumed streams that the worker knows nothing of."""

    handles: Annotated[tuple[U32, ...], Meta(max_length=2**20)]


class Superseded(Struct, array_like=True, frozen=True, tag=24):
    """Another reader has taken this stream over; nothing more of it comes here."""

    handle: U32


class PromptLogprobs(Struct, array_like=True, gc=False, frozen=True, tag=25):
    """Log-probabilities of a stream's prompt, in pieces, all of them before its first delta.

    The prompt's first token has none, so `start` counts from its second one. They are said anew,
    from 0 on, behind each Accepted.
    """

    handle: U32
    start: U32  # tokens that pieces before have brought
    logprobs: LogprobColumns  # of one entry, a token of the prompt in the place of a sampled one


# ---- worker -> core ------------------------------------------------------------------------


class Admit(Struct, array_like=True, frozen=True, tag=30):
    """A stream's whole registration: enough to run it, or to go on with it, from nothing."""

    stream_id: StreamId
    prompt_ids: bytes
    params: SamplingParams
    stop_token_ids: StopIds  # every id that ends it, the model's own included
    seed: I64
    max_tokens: U32
    output_ids: bytes = b""
    priority: I32 = 0
    label: Label = ""
    owner: Identity = b""  # of the client that reads it
    handle: U32 = 0  # and its number there
    fingerprint: Identity = b""  # of the submission, by which a late duplicate is known
    logprobs: LogprobColumns | None = None  # of `output_ids`, as one entry, where they are wanted
    was_accepted: bool = False  # it passes the bound on waiting requests
    strikes: U32 = 0  # cores that died from within while they ran it, without progress between
    cache_salt: Label = ""  # cached blocks are shared only among requests with the same
    bad_word_ids: bytes = b""  # what `params.bad_words` are tokenised to, all behind one another
    bad_word_counts: bytes = b""  # tokens of each
    # of the prompt, its first token left out, as one entry; None: not asked for, or yet to compute
    prompt_logprobs: LogprobColumns | None = None


class Report(Struct, array_like=True, gc=False, frozen=True, tag=31):
    """The worker has checked everything up to `step`; these rows end, cut to so many tokens."""

    step: Count
    rows: bytes = b""
    num_tokens: bytes = b""


class Withdraw(Struct, array_like=True, frozen=True, tag=32):
    """End a stream for a reason that its tokens do not imply (abort, fault)."""

    stream_id: StreamId
    end: End


class Forget(Struct, array_like=True, frozen=True, tag=33):
    """No reader will ask for these ended streams again."""

    stream_ids: StreamIds


class Positions(Struct, array_like=True, frozen=True, tag=34):
    """After an attach: how much of which streams the worker has. `last`: no more follow."""

    stream_ids: StreamIds
    lengths: bytes  # output tokens
    digests: bytes  # u64, of those tokens
    last: bool


# ---- core -> worker ------------------------------------------------------------------------


class Admitted(Struct, array_like=True, frozen=True, tag=40):
    """The stream has this row in the columns to come."""

    stream_id: StreamId
    row: U32


class Registered(Struct, array_like=True, frozen=True, tag=41):
    """Replays a stream to a worker that does not know it; its tokens follow as a catch-up."""

    row: U32
    registration: Admit
    end: End | None = None  # where it ended for a reason that its tokens do not imply


class Refused(Struct, array_like=True, frozen=True, tag=42):
    """The core did not take the stream, or had to end it."""

    stream_id: StreamId
    fault: Fault


class Step(Struct, array_like=True, gc=False, frozen=True, tag=43):
    """New tokens by row: what lies between the worker's cursor and the end of the history."""

    step: Count  # everything sampled up to this step has been sent with this message
    rows: bytes
    token_ids: bytes
    counts: bytes = b""  # tokens to a row; empty: one each
    starts: bytes = b""  # where in the history, prompt included; sent where counts are
    logprobs: LogprobColumns | None = None


class Unknown(Struct, array_like=True, frozen=True, tag=44):
    """Streams that the worker stated and the core knows nothing of."""

    stream_ids: StreamIds


class SyncDone(Struct, array_like=True, frozen=True, tag=45):
    """Every registration this attach calls for has been sent."""


class Suspects(Struct, array_like=True, frozen=True, tag=46):
    """Streams in the step that ran when this core's predecessor died from within.

    Said once after each Welcome; `incarnation` is this core's, so that a death counts once.
    """

    incarnation: Count
    stream_ids: StreamIds


class PromptScores(Struct, array_like=True, gc=False, frozen=True, tag=47):
    """Log-probabilities of a stream's prompt, in pieces, all of them before its first token.

    `start` counts from the prompt's second token; said anew from 0 on after an attach.
    """

    stream_id: StreamId
    start: U32
    logprobs: LogprobColumns


ClientToWorker = Hello | Ping | Submit | Resume | Abort | Goodbye
WorkerToClient = (
    Welcome
    | Reattach
    | Refusal
    | Ping
    | Starting
    | Accepted
    | Rejected
    | Deltas
    | UnknownStreams
    | Superseded
    | PromptLogprobs
)
WorkerToCore = Hello | Ping | Admit | Report | Withdraw | Forget | Positions
CoreToWorker = (
    Welcome
    | Reattach
    | Refusal
    | Ping
    | Admitted
    | Registered
    | Refused
    | Step
    | Unknown
    | SyncDone
    | Suspects
    | PromptScores
)


# ---- worker <-> its prompt process, supervisor <- every process ------------------------------


class Render(Struct, array_like=True, frozen=True):
    """Turn a prompt into token ids; one of `text` and `messages`, or neither. So with bad words."""

    key: int
    text: str | None = None
    messages: tuple[ChatMessage, ...] = ()
    bad_words: tuple[str, ...] = ()


class Rendered(Struct, array_like=True, frozen=True, tag=0):
    """The ids of a prompt, or why there are none."""

    key: int
    token_ids: bytes = b""
    fault: Fault | None = None
    bad_word_ids: bytes = b""  # as in Admit
    bad_word_counts: bytes = b""


class PromptReady(Struct, array_like=True, frozen=True, tag=1):
    """The tokenizer is loaded. `table_path` is "" where its decoder does not compile."""

    tokenizer_path: str  # its tokenizer.json
    table_path: str
    why_not: str = ""
    error: str = ""  # it could not be loaded at all


FromPromptProcess = Rendered | PromptReady


class Status(Struct, frozen=True, omit_defaults=True):
    """A line a child writes to its supervisor.

    ready: it serves. beat: its loop goes round; loading: it does not, as long as that takes.
    drained: nothing is left of what it had when it was told to drain. detail: what it serves, for
    people. error: why it cannot do what it was told; another one could not either. last_words: what
    it dies of.
    """

    ready: bool = False
    beat: bool = False
    loading: bool = False
    drained: bool = False
    detail: str = ""
    error: str = ""
    last_words: str = ""
